"""Attention within documents and over a cache, compared with plain arithmetic and torch's own."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_ladder.model import documents as documents_module
from megatron_ladder.model import flash_attention
from megatron_ladder.model.documents import DocumentBounds, _flash_attention, document_attention
from megatron_ladder.model.operations import Operations

BATCH, LENGTH, HEADS, KV_HEADS, WIDTH = 2, 9, 4, 2, 8
BOUNDS = torch.tensor([0, 1, 2, 6, 9, 14, 18], dtype=torch.int32)


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(BATCH, heads, LENGTH, WIDTH) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    q, k, v = (torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True) for shape in shapes)
    return q, k, v


def plain(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int) -> Tensor:
    """Attend with an explicit mask [b, s, s]."""
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (k, v))
    number = [sum(place >= bound for bound in BOUNDS.tolist()) for place in range(BATCH * LENGTH)]
    hidden = torch.tensor(
        [
            [
                [
                    key > query
                    or key <= query - (window or LENGTH)
                    or number[row * LENGTH + key] != number[row * LENGTH + query]
                    for key in range(LENGTH)
                ]
                for query in range(LENGTH)
            ]
            for row in range(BATCH)
        ]
    )
    scores = (q @ k.transpose(2, 3) * scale).masked_fill(hidden[:, None], -math.inf)
    return torch.softmax(scores, dim=-1) @ v


def as_documented(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    dropout: float,
    is_causal: bool,
    debug: bool,
    *,
    scale: float,
    seqused_k: None,
    window_size_left: int = LENGTH,
    window_size_right: int = 0,
) -> tuple[Tensor, Tensor]:
    """aten._flash_attention_forward, which CPUs lack, from the documentation of torch.nn.attention.varlen.varlen_attn.

    The real operator receives the arguments as well, on the meta device.
    """
    assert (dropout, is_causal, debug) == (0, True, False) and torch.equal(cu_seq_q, cu_seq_k)
    assert cu_seq_q.dtype == torch.int32 and max_q == max_k == int(cu_seq_q.diff().max())
    assert query.shape == (BATCH * LENGTH, HEADS, WIDTH)
    assert key.shape == value.shape == (BATCH * LENGTH, KV_HEADS, WIDTH)
    found = []
    for begin, end in zip(cu_seq_q.tolist(), cu_seq_q.tolist()[1:], strict=False):
        q, k, v = (x[begin:end].transpose(0, 1) for x in (query, key, value))
        k, v = (x.repeat_interleave(HEADS // KV_HEADS, dim=0) for x in (k, v))
        scores = q @ k.transpose(1, 2) * scale
        ones = torch.ones(end - begin, end - begin).bool()
        hidden = ones.triu(1 + window_size_right) | ones.tril(-1 - window_size_left)
        found.append((torch.softmax(scores.masked_fill(hidden, -math.inf), dim=-1) @ v).transpose(0, 1))
    meta = (x.detach().to("meta") for x in (query, key, value, cu_seq_q, cu_seq_k))
    options = {"scale": scale, "seqused_k": seqused_k, "window_size_left": window_size_left, "window_size_right": 0}
    on_meta = torch.ops.aten._flash_attention_forward(*meta, max_q, max_k, dropout, is_causal, debug, **options)
    result = torch.cat(found)
    assert on_meta[0].shape == result.shape
    return result, on_meta[1]


@pytest.mark.parametrize("window", [0, 2, 3])
@pytest.mark.parametrize("packed", [False, True], ids=["one after the other", "packed"])
@pytest.mark.parametrize("scale", [1 / math.sqrt(WIDTH), 0.7])
def test_tokens_attend_within_their_document(
    packed: bool, scale: float, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flash_attention, "flash_attention_forward", as_documented)
    kernel = _flash_attention if packed else None
    results = []
    documents = DocumentBounds.of(BOUNDS, torch.device("cpu"))
    for attention in (
        lambda q, k, v, scale: plain(q, k, v, scale, window),
        lambda q, k, v, scale: document_attention(q, k, v, documents, scale, window, packed=kernel),
    ):
        q, k, v = inputs()
        found = attention(q, k, v, scale)
        weights = torch.arange(found.numel(), dtype=torch.float64).view(found.shape).cos()
        (found * weights).sum().backward()
        results.append((found.detach(), q.grad, k.grad, v.grad))
    for expected, computed in zip(*results, strict=True):
        assert computed.shape == expected.shape
        assert torch.allclose(computed, expected, rtol=1e-12, atol=1e-12)


def test_half_precision_on_cuda_uses_the_packed_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU: tensors that only claim to be on one."""

    class OnCuda(Tensor):
        is_cuda = True

    taken: list[torch.dtype] = []

    def kernel(q: Tensor, k: Tensor, v: Tensor, documents: DocumentBounds, scale: float, window: int) -> Tensor:
        taken.append(q.dtype)
        return q

    monkeypatch.setattr(documents_module, "_flash_attention", kernel)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        q, k, v = (x.detach().to(dtype).as_subclass(OnCuda) for x in inputs())
        document_attention(q, k, v, DocumentBounds.of(BOUNDS, torch.device("cpu")), 1.0)
    assert taken == [torch.float16, torch.bfloat16]


@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (4, 1), (3, 3)])
@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize("masked", ["no", "rows", "queries"])
@pytest.mark.parametrize(("value_width", "scale"), [(8, 8**-0.5), (5, 0.7)])
def test_one_query_or_several_over_grouped_heads_of_a_cache(
    heads: int, kv_heads: int, queries: int, masked: str, value_width: int, scale: float
) -> None:
    torch.manual_seed(0)
    q = torch.randn(2, queries, heads, 8).transpose(1, 2)
    # The beginning of a longer cache, as a batch of slots passes it.
    k, v = (torch.randn(2, kv_heads, 9, width)[:, :, :5] for width in (8, value_width))
    seen = torch.arange(5) <= torch.tensor([[2], [4]])
    mask = seen[:, None, None, :]
    of_queries = (torch.arange(5) <= torch.arange(queries).unsqueeze(1)) & mask
    mask = {"no": None, "rows": mask, "queries": of_queries}[masked]
    repeated = (x.repeat_interleave(heads // kv_heads, dim=1) for x in (k, v))
    is_causal = mask is None and queries > 1
    expected = F.scaled_dot_product_attention(q, *repeated, attn_mask=mask, is_causal=is_causal, scale=scale)
    torch.testing.assert_close(Operations().attend(q, k, v, mask, scale), expected)

"""Windows and sinks of attention, compared with plain arithmetic over a dense mask."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.flop_counter import FlopCounterMode

from megatron_ladder.model.documents import DocumentBounds, attend_to_blocks, document_attention, visible_blocks
from megatron_ladder.model.windows import attend_causally

BATCH, HEADS, KV_HEADS, WIDTH, SCALE = 2, 4, 2, 8, 0.4
CPU = torch.device("cpu")


def inputs(length: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(length)
    shapes = [(BATCH, heads, length, WIDTH) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    drawn = [torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in (*shapes, (HEADS,))]
    return [one.requires_grad_() for one in drawn]


def plain(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, visible: Tensor) -> Tensor:
    """Attend by a softmax over the visible scores and the sink; the sink has no value."""
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (k, v))
    scores = (q @ k.transpose(2, 3) * SCALE).masked_fill(~visible, -math.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.view(1, -1, 1, 1).expand(len(q), -1, q.shape[2], 1)), dim=-1)
    return torch.softmax(scores, dim=-1)[..., : k.shape[2]] @ v


def visible_in(documents: list[list[int]], window: int) -> Tensor:
    """[b, 1, s, s], for the lengths of the documents of each row."""
    rows = []
    for lengths in documents:
        number = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
        query, key = torch.arange(len(number)).unsqueeze(1), torch.arange(len(number))
        rows.append((key <= query) & (key > query - window) & (number.unsqueeze(1) == number))
    return torch.stack(rows).unsqueeze(1)


def gradients(attended: Tensor, of: list[Tensor]) -> list[Tensor]:
    weights = torch.arange(attended.numel(), dtype=torch.float64).view(attended.shape).cos()
    return [attended, *torch.autograd.grad((attended * weights).sum(), of)]


@pytest.mark.parametrize("has_sinks", [False, True], ids=["no sinks", "sinks"])
@pytest.mark.parametrize("window", [1, 2, 3, 4, 5, 11, 12, 40])
@pytest.mark.parametrize("length", [1, 3, 4, 5, 12])
def test_a_query_sees_the_newest_positions(length: int, window: int, has_sinks: bool) -> None:
    q, k, v, sinks = inputs(length)
    of = [q, k, v, sinks] if has_sinks else [q, k, v]
    expected = gradients(plain(q, k, v, sinks if has_sinks else None, visible_in([[length]] * BATCH, window)), of)
    found = gradients(attend_causally(q, k, v, SCALE, window, sinks if has_sinks else None), of)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("has_sinks", [False, True], ids=["no sinks", "sinks"])
@pytest.mark.parametrize("window", [2, 3, 4, 20])
def test_windows_end_at_the_beginning_of_a_document(window: int, has_sinks: bool) -> None:
    lengths = [[1, 3, 5, 3], [4, 8]]
    q, k, v, sinks = inputs(12)
    of = [q, k, v, sinks] if has_sinks else [q, k, v]
    documents = DocumentBounds.of(torch.tensor([0, 1, 4, 9, 12, 16, 24], dtype=torch.int32), CPU)
    expected = gradients(plain(q, k, v, sinks if has_sinks else None, visible_in(lengths, window)), of)
    attended = document_attention(q, k, v, documents, SCALE, window, sinks if has_sinks else None)
    torch.testing.assert_close(gradients(attended, of), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("window", [0, 3])
@pytest.mark.parametrize("lengths", [None, [[1, 3, 5, 3], [4, 8]]], ids=["rows", "documents"])
def test_blocks_of_flex_attention(lengths: list[list[int]] | None, window: int) -> None:
    """Its kernels, without torch's compiler, have no backward on CPUs."""
    q, k, v, sinks = (one.detach() for one in inputs(12))
    documents = lengths and DocumentBounds.of(torch.tensor([0, 1, 4, 9, 12, 16, 24], dtype=torch.int32), CPU)
    blocks = visible_blocks(BATCH, 12, documents, window, CPU, create_block_mask)
    found = attend_to_blocks(q, k, v, blocks, SCALE, sinks, flex_attention)
    expected = plain(q, k, v, sinks, visible_in(lengths or [[12]] * BATCH, window or 12))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_the_cost_of_a_window_grows_with_the_length() -> None:
    def flops(length: int) -> int:
        q, k, v, sinks = inputs(length)
        with FlopCounterMode(display=False) as counter:
            attend_causally(q, k, v, SCALE, 16, sinks).sum().backward()
        return counter.get_total_flops()

    assert flops(256) == 2 * flops(128) == 4 * flops(64)

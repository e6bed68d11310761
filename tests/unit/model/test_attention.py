"""Attention of one query over a cache, compared with torch's own over repeated heads."""

import pytest
import torch
import torch.nn.functional as F

from megatron_ladder.model.operations import Operations


@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (4, 1), (3, 3)])
@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize("masked", [True, False])
def test_grouped_queries(heads: int, kv_heads: int, queries: int, masked: bool) -> None:
    torch.manual_seed(0)
    q = torch.randn(2, queries, heads, 8).transpose(1, 2)
    # The beginning of a longer cache, as a batch of slots passes it.
    k, v = (torch.randn(2, kv_heads, 9, 8)[:, :, :5] for _ in "kv")
    seen = torch.arange(5) <= torch.tensor([[2], [4]])
    mask = seen[:, None, None, :] if masked else None
    repeated = (x.repeat_interleave(heads // kv_heads, dim=1) for x in (k, v))
    expected = F.scaled_dot_product_attention(q, *repeated, attn_mask=mask, is_causal=mask is None and queries > 1)
    torch.testing.assert_close(Operations().attend(q, k, v, mask), expected)

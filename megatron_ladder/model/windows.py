"""Causal attention with a window, with sinks, or both, on whole sequences.

A window of W positions is computed in blocks of W queries. Each sees only the keys of its own block and of the one
before, so that the cost grows with s W instead of s^2 (W = 3; `x` is computed and hidden, `.` is not computed):

    queries    keys  0 1 2 3 4 5 6 7 8
    3 4 5            x o o o x x . . .
                     x x o o o x . . .
                     x x x o o o . . .

A sink adds the exponential of a trained number to the denominator of the softmax of a head, which gives every query
something to attend to without a value (arXiv 2309.17453): out * sigmoid(lse - sink), with lse the logarithm of the
denominator without it.

Layouts: queries [b, heads, s, d]; keys and values [b, kv_heads, s, d]; sinks [heads].
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def attend_causally(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window: int = 0, sinks: Tensor | None = None
) -> Tensor:
    """Attend to the newest `window` positions, by default to all: [b, heads, s, d] -> [b, heads, s, d]."""
    length = q.shape[2]
    if not window or length <= window:
        if sinks is None:
            return F.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
            )
        places = torch.arange(length, device=q.device)
        return attend_with_mask(q, k, v, places <= places.unsqueeze(1), scale, sinks)
    blocks = math.ceil(length / window)
    padding = (0, 0, 0, blocks * window - length)
    q_blocks = _in_blocks(F.pad(q, padding), blocks)
    k_blocks, v_blocks = (_in_blocks(_with_blocks_before(F.pad(x, padding), window), blocks) for x in (k, v))
    key = torch.arange(2 * window, device=q.device)
    query = key[:window].unsqueeze(1)
    visible = (key > query) & (key <= query + window)
    # Nothing is before the first block.
    is_first = (torch.arange(blocks, device=q.device) == 0)[:, None, None]
    visible = (visible & ~(is_first & (key < window))).repeat(len(q), 1, 1).unsqueeze(1)
    attended = attend_with_mask(q_blocks, k_blocks, v_blocks, visible, scale, sinks)
    return attended.unflatten(0, (-1, blocks)).transpose(1, 2).flatten(2, 3)[:, :, :length]


def _with_blocks_before(x: Tensor, window: int) -> Tensor:
    """[b, heads, blocks * window, d] -> [b, heads, blocks * 2 * window, d], each block after the one before it."""
    blocks = x.unflatten(2, (-1, window))
    before = F.pad(blocks[:, :, :-1], (0, 0, 0, 0, 1, 0))
    return torch.cat((before, blocks), dim=3).flatten(2, 3)


def _in_blocks(x: Tensor, blocks: int) -> Tensor:
    """[b, heads, s, d] -> [b * blocks, heads, s / blocks, d]."""
    return x.unflatten(2, (blocks, -1)).transpose(1, 2).flatten(0, 1)


def attend_with_mask(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, sinks: Tensor | None = None
) -> Tensor:
    """Attend where `mask` is True, which is broadcastable to [b, 1, s, keys]; with sinks in fp32 at least."""
    if sinks is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    grouped = q.unflatten(1, (k.shape[1], -1))
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = (grouped @ k.unsqueeze(2).mT).to(wide) * scale
    scores = scores.masked_fill(~(mask if mask.dim() == 2 else mask.unsqueeze(2)), -math.inf)
    lse = scores.logsumexp(-1, keepdim=True)
    in_denominator = torch.logaddexp(lse, sinks.to(wide).view(1, k.shape[1], -1, 1, 1))
    shares = (scores - in_denominator).exp()
    return (shares.to(v.dtype) @ v.unsqueeze(2)).flatten(1, 2)

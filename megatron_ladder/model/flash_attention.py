"""FlashAttention over packed sequences, by torch's operator for GPUs."""

from typing import Any

from torch import Tensor

from megatron_ladder.torch_private import flash_attention_forward

_HAS_PAGES = "block_table" in str(flash_attention_forward.default._schema)


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_starts: Tensor,
    key_starts: Tensor,
    longest_query: int,
    longest_key: int,
    scale: float,
    is_causal: bool = False,
    used_keys: Tensor | None = None,
    pages: Tensor | None = None,
    window: int = 0,
) -> tuple[Tensor, Tensor]:
    """Attend within n sequences: q [queries, heads, d], k and v [keys, kv_heads, d] -> [queries, heads, d].

    Also return the logarithms of the denominators of the softmax, [heads, queries], which have no gradient.

    `query_starts` and `key_starts` [n + 1] int32 are the first row of each sequence and the end of the last one.
    `scale` multiplies the scores. A query sees the newest `window` positions, its own included; 0: all. Only the first
    `used_keys` [n] int32 keys of each sequence are used; by default all.

    The operator splits the keys of a head among multiprocessors if `pages` [n, 1] int32 lists the page of each
    sequence: `longest_key` keys, a multiple of 256. torch before 2.13 does so only if several heads share the keys.
    """
    paged: dict[str, Tensor] = {}
    if pages is not None and _HAS_PAGES:
        k, v = (x.unflatten(0, (-1, longest_key)) for x in (k, v))
        paged = {"block_table": pages}
    options: dict[str, Any] = {"scale": scale, "seqused_k": used_keys, **paged}
    if window:
        # The kernel counts the positions before the query's own.
        options |= {"window_size_left": window - 1, "window_size_right": 0}
    lengths = (longest_query, longest_key)
    attended, lse, *_ = flash_attention_forward(
        q, k, v, query_starts, key_starts, *lengths, 0.0, is_causal, False, **options
    )
    return attended, lse

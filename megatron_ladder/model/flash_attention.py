"""FlashAttention over packed sequences, by torch's operator for GPUs."""

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
) -> Tensor:
    """Attend within n sequences: q [queries, heads, d], k and v [keys, kv_heads, d] -> [queries, heads, d].

    `query_starts` and `key_starts` [n + 1] int32 are the first row of each sequence and the end of the last one.
    `scale` multiplies the scores. Only the first `used_keys` [n] int32 keys of each sequence are used; by default all.

    The operator splits the keys of a head among multiprocessors if `pages` [n, 1] int32 lists the page of each
    sequence: `longest_key` keys, a multiple of 256. torch before 2.13 does so only if several heads share the keys.
    """
    paged: dict[str, Tensor] = {}
    if pages is not None and _HAS_PAGES:
        k, v = (x.unflatten(0, (-1, longest_key)) for x in (k, v))
        paged = {"block_table": pages}
    lengths = (longest_query, longest_key)
    attended: Tensor = flash_attention_forward(
        q, k, v, query_starts, key_starts, *lengths, 0.0, is_causal, False, scale=scale, seqused_k=used_keys, **paged
    )[0]
    return attended

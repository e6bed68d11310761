"""A key-value cache in memory that is allocated once.

Layouts: keys and values of a layer [b, kv_heads/t, positions, d].

Every sample begins in column 0, so that a token's column is its position, independent of the other samples' lengths:

    column       0  1  2  3  4  5
    sample 0     a  b  c  d  e  .       the prompt a b c, then d e
    sample 1     p  q  x  x  .  .       the prompt p q, then x x

Prompts are processed as one batch, padded on the right. Attention is causal, so no token sees the padding after it. The
padding's columns of the cache are overwritten by the sample's next tokens, or hidden by the mask.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_ladder.blueprint.model import ModelConfig, key_value_replicas


class StaticKeyValueCache:
    """Keys and values of this rank's heads, for all layers."""

    def __init__(
        self,
        config: ModelConfig,
        tensor_parallel: int,
        samples: int,
        positions: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        kv_heads = config.num_key_value_heads * key_value_replicas(config, tensor_parallel) // tensor_parallel
        shape = (samples, kv_heads, positions, config.head_dim)
        # Zeros, because masked values are multiplied by 0, and 0 times NaN is NaN.
        self._keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.num_layers)]
        self._values = [torch.zeros_like(keys) for keys in self._keys]
        self._key_rows = [keys.flatten(0, 2) for keys in self._keys]
        self._value_rows = [values.flatten(0, 2) for values in self._values]
        # First row of each head of each sample, among the columns of all heads.
        self._first_rows = torch.arange(0, samples * kv_heads * positions, positions, device=device)
        self._first_rows = self._first_rows.view(samples, kv_heads)

    def for_prompts(self, slots: Sequence[int]) -> "_PromptColumns":
        """Return the cache for a forward pass over the prompts of some samples."""
        return _PromptColumns(self, torch.tensor(slots, device=self._first_rows.device))

    def for_one_token(self, columns: Tensor, extent: int) -> "_TokenColumns":
        """Return the cache for a forward pass over the next token of every sample.

        Args:
            columns: [b] int64, the column of each sample's token: the number of its tokens so far.
            extent: number of columns that attention gets: one more than the largest of `columns`.
        """
        return _TokenColumns(self, (self._first_rows + columns.unsqueeze(1)).flatten(), extent)

    def store_prompts(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store keys and values [n, kv_heads/t, s, d] in the first s columns of the samples `slots` [n]."""
        self._keys[layer][slots, :, : keys.shape[2]] = keys
        self._values[layer][slots, :, : values.shape[2]] = values

    def store_token(self, layer: int, rows: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store keys and values [b, kv_heads/t, 1, d] in the rows `rows` [b kv_heads/t], one per head and sample."""
        self._key_rows[layer].index_copy_(0, rows, keys.flatten(0, 2))
        self._value_rows[layer].index_copy_(0, rows, values.flatten(0, 2))

    def first(self, layer: int, extent: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of the first `extent` columns, [b, kv_heads/t, extent, d]."""
        return self._keys[layer].narrow(2, 0, extent), self._values[layer].narrow(2, 0, extent)


class _PromptColumns(NamedTuple):
    """A `KeyValueCache` that stores prompts, which attend to themselves only."""

    cache: StaticKeyValueCache
    slots: Tensor

    def extend(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store keys and values [b, kv_heads/t, s, d] and return them."""
        self.cache.store_prompts(layer, self.slots, keys, values)
        return keys, values


class _TokenColumns(NamedTuple):
    """A `KeyValueCache` that stores one token per sample, and returns it with all earlier ones."""

    cache: StaticKeyValueCache
    rows: Tensor
    """[b kv_heads/t] int64, rows among the columns of all heads."""
    extent: int

    def extend(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store keys and values [b, kv_heads/t, 1, d]; return those of the first `extent` columns."""
        self.cache.store_token(layer, self.rows, keys, values)
        return self.cache.first(layer, self.extent)

"""Keys and values of the tokens that were seen, in memory that is allocated once.

Layouts: keys and values of a layer [b, kv_heads/t, positions, d].

Every sample begins in column 0, so that a token's column is its position, whatever the other samples' lengths:

    column       0  1  2  3  4  5
    sample 0     a  b  c  d  e  .       the prompt a b c, then d e
    sample 1     p  q  x  x  .  .       the prompt p q, then x x

The prompts are fed side by side, filled up on the right. Attention is causal, so no token sees a filling behind it,
and what the filling left in the cache is overwritten by the sample's own next tokens, or hidden by the mask.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_ladder.blueprint.model import ModelConfig, key_value_replicas


class StaticKeyValueCache:
    """This rank's heads of all layers.

    Attributes:
        positions: columns of every sample.
    """

    def __init__(
        self,
        config: ModelConfig,
        tensor_parallel: int,
        samples: int,
        positions: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.positions = positions
        kv_heads = config.num_key_value_heads * key_value_replicas(config, tensor_parallel) // tensor_parallel
        shape = (samples, kv_heads, positions, config.head_dim)
        # Zeros: what the mask hides is multiplied by 0, which does not make up for a NaN.
        self._keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.num_layers)]
        self._values = [torch.zeros_like(keys) for keys in self._keys]
        self._key_rows = [keys.flatten(0, 2) for keys in self._keys]
        self._value_rows = [values.flatten(0, 2) for values in self._values]
        # Where each head of each sample begins, when all columns of all heads are counted through.
        self._first_rows = torch.arange(0, samples * kv_heads * positions, positions, device=device)
        self._first_rows = self._first_rows.view(samples, kv_heads)

    def for_prompts(self, slots: Sequence[int]) -> "PromptColumns":
        """The cache for a forward pass over the beginnings of some samples."""
        return PromptColumns(self, torch.tensor(slots, device=self._first_rows.device))

    def for_one_token(self, columns: Tensor, extent: int) -> "TokenColumns":
        """The cache for a forward pass over one more token of every sample.

        Args:
            columns: [b] int64, where each sample's token goes: the number of its tokens so far.
            extent: the columns that attention is given: one more than the largest of `columns`.
        """
        return TokenColumns(self, (self._first_rows + columns.unsqueeze(1)).flatten(), extent)

    def store_prompts(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Keys and values [n, kv_heads/t, s, d] to the first s columns of the samples `slots` [n]."""
        self._keys[layer][slots, :, : keys.shape[2]] = keys
        self._values[layer][slots, :, : values.shape[2]] = values

    def store_token(self, layer: int, rows: Tensor, keys: Tensor, values: Tensor) -> None:
        """Keys and values [b, kv_heads/t, 1, d], each head's of each sample to its row of `rows` [b kv_heads/t]."""
        self._key_rows[layer].index_copy_(0, rows, keys.flatten(0, 2))
        self._value_rows[layer].index_copy_(0, rows, values.flatten(0, 2))

    def first(self, layer: int, extent: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the first `extent` columns, [b, kv_heads/t, extent, d]."""
        return self._keys[layer].narrow(2, 0, extent), self._values[layer].narrow(2, 0, extent)


class PromptColumns(NamedTuple):
    """A `model.attention.KeyValueCache`: stores the prompts, which see nothing but themselves."""

    cache: StaticKeyValueCache
    slots: Tensor

    def extend(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Stores keys and values [b, kv_heads/t, s, d] and returns them."""
        self.cache.store_prompts(layer, self.slots, keys, values)
        return keys, values


class TokenColumns(NamedTuple):
    """A `model.attention.KeyValueCache`: stores a token a sample, and returns what came before with it."""

    cache: StaticKeyValueCache
    rows: Tensor
    """[b kv_heads/t] int64, where they go, all columns of all heads counted through."""
    extent: int

    def extend(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Stores keys and values [b, kv_heads/t, 1, d]; returns those of the first `extent` columns."""
        self.cache.store_token(layer, self.rows, keys, values)
        return self.cache.first(layer, self.extent)

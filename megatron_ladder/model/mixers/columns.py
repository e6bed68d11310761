"""The states of attention in generation: a column of keys and values for each position, or for those of a window.

Every sequence begins in column 0, so a token's column is its position, independent of the other sequences' lengths. The
columns of a window of W positions are a ring, in which position p has the column p mod W:

    window 4, newest position 5     column      0  1  2  3
                                    position    4  5  2  3

A pass over several newest tokens needs a longer ring, so that no token overwrites one that an earlier token of the pass
sees.

Padding after a prompt has positions, but never a column of a ring. In states that grow its columns are overwritten by
the next tokens of the sequence, or hidden.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_ladder.model.flash_attention import flash_attention
from megatron_ladder.model.mixers.mixer import States

_LARGEST_FLASH_HEAD, _FIRST_FLASH_DEVICE = 256, (8, 0)
"""Limits of FlashAttention: the head's size, and the compute capability."""
PAGE = 256
"""FlashAttention splits the keys of a head among multiprocessors if a table lists their pages, multiples of this."""


class PromptColumns(NamedTuple):
    """The columns of some positions of prompts, which attend to themselves and to those before."""

    before: int
    lengths: Tensor
    """[b] int64: see `States.lengths`."""
    is_ring: bool
    """Whether the states do not grow."""
    mask: Tensor | None = None
    """[b or 1, 1, s, columns]: which columns of `update` each position sees; None without earlier positions."""
    filled: None = None

    @staticmethod
    def of(states: States, length: int, window: int, columns: int) -> "PromptColumns":
        """Return the columns of `length` positions, in states with `columns`; a window of 0 is no window."""
        assert states.lengths is not None
        before, lengths = states.before, states.lengths
        if not before:
            return PromptColumns(before, lengths, window > 0)
        queries = torch.arange(before, before + length, device=lengths.device).unsqueeze(1)
        keys = torch.arange(before + length, device=lengths.device).unsqueeze(0)
        if window:
            held = _held_positions(_newest_of_prompts(before, lengths), columns)
            own = queries.t().expand(len(lengths), -1)
            keys = torch.cat((held, own), dim=1).unsqueeze(1)
            visible = (keys >= 0) & (keys <= queries) & (keys > queries - window)
            return PromptColumns(before, lengths, True, visible.unsqueeze(1))
        return PromptColumns(before, lengths, False, (keys <= queries)[None, None])

    def update(self, stored: Sequence[Tensor], new: Sequence[Tensor]) -> Sequence[Tensor]:
        """Store [b, heads/t, s, width] in states of [slots, heads/t, columns, width]; return what the positions see."""
        return [self._update(*parts) for parts in zip(stored, new, strict=True)]

    def _update(self, stored: Tensor, new: Tensor) -> Tensor:
        rows, length = new.shape[0], new.shape[2]
        if not self.is_ring:
            stored[:rows, :, self.before : self.before + length] = new.to(stored.dtype)
            return stored[:rows, :, : self.before + length].to(new.dtype) if self.before else new
        held = stored[:rows]
        seen = torch.cat((held.to(new.dtype), new), dim=2) if self.before else new
        positions = _held_positions(_newest_of_prompts(self.before + length, self.lengths), held.shape[2])
        index = positions - self.before
        chosen = index.clamp(min=0)[:, None, :, None].expand(-1, new.shape[1], -1, new.shape[3])
        is_new = (index >= 0)[:, None, :, None]
        held.copy_(torch.where(is_new, new.gather(2, chosen).to(stored.dtype), held))
        return seen


def _newest_of_prompts(length: int, lengths: Tensor) -> Tensor:
    """Return the newest position of each row, [b, 1], after `length` positions; below 0: none."""
    return lengths.clamp(max=length).unsqueeze(1) - 1


def _held_positions(newest: Tensor, columns: int) -> Tensor:
    """Return the position in each column of rings, [b, columns], given the newest ones [b, 1]; below 0: none."""
    return newest - (newest - torch.arange(columns, device=newest.device)) % columns


class TokenColumns(NamedTuple):
    """The columns of the newest tokens of each row, which attend to the columns of earlier positions."""

    rows: Tensor
    """[b heads/t s] int64, the row of each head's columns among the columns of all heads of all slots."""
    extent: int
    """Columns that may be filled."""
    mask: Tensor | None
    """[b, 1, s, extent]; None if a single token sees all of them, or the kernel counts them."""
    filled: "FilledColumns | None"

    @staticmethod
    def of(
        states: States, number: int, name: str, positions: Tensor, window: int, counts_filled: bool
    ) -> "TokenColumns":
        """Return the columns of tokens at `positions` [s, b] in a state of a mixer, and in those of the same shape.

        Each token sees the `window` newest positions up to its own; 0 are all of them. `counts_filled` replaces the
        mask by `FilledColumns`, except in rings with drafts: from each token of a pass, other columns are hidden.
        """
        _, heads, columns, _ = states.tensors[number][name].shape
        tokens, batch = positions.shape
        first_rows = torch.arange(0, batch * heads * columns, columns, device=positions.device)
        # Only a ring has fewer columns than positions.
        rows = (first_rows.view(-1, heads, 1) + (positions % columns).t().unsqueeze(1)).flatten()
        extent = min(states.extent, columns)
        mask, filled = None, None
        if counts_filled and not (window and states.drafted):
            counts = (positions[-1] + 1).clamp(max=columns).to(torch.int32).unsqueeze(1).expand(-1, heads).flatten()
            starts = torch.arange(len(counts) + 1, dtype=torch.int32, device=positions.device)
            filled = FilledColumns(starts * tokens, starts * columns, starts[:-1].unsqueeze(1), counts)
            extent = columns
        elif not states.is_even:
            held = _held_positions(positions[-1:].t(), columns)[:, None, :extent]
            queries = positions.t().unsqueeze(2)
            visible = (held >= 0) & (held <= queries)
            if window:
                visible &= held > queries - window
            mask = visible.unsqueeze(1)
        return TokenColumns(rows, extent, mask, filled)

    def update(self, stored: Sequence[Tensor], new: Sequence[Tensor]) -> Sequence[Tensor]:
        """Store [b, heads/t, s, width]; return the columns that may be filled."""
        seen = []
        for state, part in zip(stored, new, strict=True):
            state.flatten(0, 2).index_copy_(0, self.rows, part.flatten(0, 2).to(state.dtype))
            seen.append(state[: len(part), :, : self.extent])
        return seen


def counts_filled_columns(dtype: torch.dtype, head_dim: int, device: torch.device) -> bool:
    """Return whether torch has the kernel of `FilledColumns` for this device."""
    fits = dtype in (torch.bfloat16, torch.float16) and head_dim % 8 == 0 and head_dim <= _LARGEST_FLASH_HEAD
    return (
        fits
        and device.type == "cuda"
        and torch.backends.cuda.is_flash_attention_available()
        and torch.cuda.get_device_capability(device) >= _FIRST_FLASH_DEVICE
    )


class FilledColumns(NamedTuple):
    """Attention to the filled columns of each sample, by a kernel for GPUs that reads no others.

    Each of several queries sees the columns up to its own. Neither the shapes nor the values on the host change from
    step to step, so the call can be captured.
    """

    query_starts: Tensor
    """[b kv_heads/t + 1] int32: each key-value head of each sample is a sequence with the queries of a step."""
    key_starts: Tensor
    """[b kv_heads/t + 1] int32: its first row among the columns of all heads."""
    pages: Tensor
    """[b kv_heads/t, 1] int32: its columns are one page."""
    filled: Tensor
    """[b kv_heads/t] int32, the number of filled columns."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float, sinks: Tensor | None = None) -> Tensor:
        """See `Operations.attend`; `sinks` [heads/t] as in `windows.py`."""
        kv_heads, positions, head_dim = k.shape[1:]
        # [b, kv_heads/t, s, heads of one key-value head, d]
        grouped = q.unflatten(1, (kv_heads, -1)).transpose(2, 3)
        attended, lse = flash_attention(
            grouped.flatten(0, 2),
            k.reshape(-1, 1, head_dim),
            v.reshape(-1, 1, head_dim),
            self.query_starts,
            self.key_starts,
            q.shape[2],
            positions,
            scale,
            is_causal=q.shape[2] > 1,
            used_keys=self.filled,
            pages=self.pages if positions % PAGE == 0 else None,
        )
        if sinks is not None:
            of_heads = sinks.view(kv_heads, 1, -1).expand(grouped.shape[:-1]).flatten(0, 2)
            attended = (attended * torch.sigmoid(lse.t() - of_heads).unsqueeze(-1)).to(attended.dtype)
        return attended.view(grouped.shape).transpose(2, 3).flatten(1, 2)

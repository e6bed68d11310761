"""What all token mixers have in common: heads between two products, prepared inputs, and states in generation.

    projected, this rank's columns  ->  heads (with the states of earlier tokens)  ->  input of the output projection

Layouts: projections [s, b, sum of widths]; states [slots, heads/t, entries, ...], or [slots, heads/t, ...] if fixed.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_ladder.blueprint.mixers.mixer import Mixer, StateKind, StateSpec
from megatron_ladder.blueprint.model import ModelConfig, mixer_states, mtp_states
from megatron_ladder.blueprint.specs import Branch
from megatron_ladder.model.operations import BuildContext
from megatron_ladder.model.sub_block import SequenceContext
from megatron_ladder.parallel.layout import ParallelModule


class States(NamedTuple):
    """What a pass of generation reads and writes: the states of a rank's mixers, in slots of the batch.

    A pass computes either some positions of prompts, the same of every row, or the newest tokens of each row. With
    drafts, there are several newest tokens, and the last ones may be wrong. `keep` then restores the fixed states after
    the last accepted token. Other states hold the wrong tokens until later ones overwrite them, because no token sees a
    position after its own.
    """

    tensors: Sequence[Mapping[str, Tensor]]
    """For the mixer of each layer and lane its states by name. The rows of a pass have the first slots."""
    before: int = 0
    """The positions of prompts before those of this pass."""
    lengths: Tensor | None = None
    """[b] int64: how many positions of each row are tokens of its prompt; padding follows. None for newest tokens."""
    extent: int = 0
    """With the newest tokens: at least the number of positions of the longest row."""
    is_even: bool = False
    """With the newest tokens: whether each row has a single one, at its last of `extent` positions."""
    drafted: Sequence[Mapping[str, Tensor]] = ()
    """The fixed states after each of the newest tokens, [tokens, slots, ...], if there may be several."""

    @property
    def begins(self) -> bool:
        """Whether nothing is before the positions of this pass: what is stored belongs to an earlier sequence."""
        return self.lengths is not None and not self.before

    @staticmethod
    def allocate(
        config: ModelConfig,
        ranks: int,
        slots: int,
        positions: int,
        dtype: torch.dtype,
        device: torch.device,
        draft_tokens: int = 0,
        of_head: bool = False,
    ) -> "States":
        """Return empty states of one of `ranks` tensor-parallel ranks, for the layers of a model or its drafting head.

        A pass has up to `1 + draft_tokens` newest tokens of each row.
        """
        specs = mtp_states(config, ranks) if of_head else mixer_states(config, ranks)

        def allocated(spec: StateSpec, *dims: int) -> Tensor:
            # No token of a pass may overwrite one that an earlier token of the pass sees.
            spec = replace(spec, window=spec.window + draft_tokens)
            kept = torch.promote_types(dtype, torch.float32) if spec.is_fp32 else dtype
            # Zeros, because masked values are multiplied by 0, and 0 times NaN is NaN.
            return torch.zeros(*dims, slots, *spec.shape_for(positions), dtype=kept, device=device)

        tensors = [{spec.name: allocated(spec) for spec in of_mixer} for of_mixer in specs]
        if not draft_tokens:
            return States(tensors)
        fixed = [[spec for spec in of_mixer if spec.kind is StateKind.FIXED] for of_mixer in specs]
        drafted = [{spec.name: allocated(spec, draft_tokens + 1) for spec in of_mixer} for of_mixer in fixed]
        return States(tensors, drafted=drafted)

    @property
    def slot_bytes(self) -> int:
        """The bytes of a slot."""
        of_slots = (state for of_mixer in self.tensors for state in of_mixer.values())
        drafted = (state[:, 0] for of_mixer in self.drafted for state in of_mixer.values())
        return sum(state[0].nbytes for state in of_slots) + sum(state.nbytes for state in drafted)

    def fixed_after(self, number: int, token: int) -> Mapping[str, Tensor]:
        """Return the tensors for the fixed states of a mixer after one of the newest tokens, for all slots."""
        if not self.drafted:
            return self.tensors[number]
        return {name: states[token] for name, states in self.drafted[number].items()}

    def keep(self, tokens: Tensor) -> None:
        """Continue each row from the fixed states after one of its newest tokens, whose number is in `tokens`, [b]."""
        rows = torch.arange(len(tokens), device=tokens.device)
        for of_mixer, drafted in zip(self.tensors, self.drafted, strict=True):
            for name, states in drafted.items():
                of_mixer[name][: len(tokens)] = states[tokens, rows]


class Heads(ParallelModule):
    """Maps the projections of a branch's inputs to what its output projection multiplies, on this rank's heads.

    `heads(projected, context)`: [s, b, sum of widths] -> [s, b, columns of the output matrix / t].
    """

    __call__: Callable[..., Tensor]

    def __init__(self, build: BuildContext, number: int, branch: Branch) -> None:
        """`number` counts the mixers of a rank, whose `States` it indexes."""
        super().__init__(build)
        assert branch.mixer is not None
        self.mixer: Mixer = branch.mixer
        self.number = number
        self.widths = tuple(matrix.weight.width(self.group.size) for matrix in branch.inputs.values())
        """Columns of each input on this rank."""
        self.unpacked: Sequence[ParallelModule] = ()
        """Modules of which it also reads single rows, so that generation must not pack their matrices."""

    def prepare(self, context: SequenceContext) -> Any:
        """Return, as a NamedTuple, what depends on positions and states, but is the same in all layers of the mixer."""


def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Return prepared inputs with the results of a function of their tensors."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, dict):
        return {key: map_tensors(function, part) for key, part in value.items()}
    if isinstance(value, tuple):
        return type(value)(*(map_tensors(function, part) for part in value))
    return value


def tensors_in(value: Any) -> list[Tensor]:
    """Return all tensors of prepared inputs."""
    found: list[Tensor] = []

    def find(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(find, value)
    return found

"""The wirings of a comparison by name, such as staleness-2 or desync-4x; does not import torch."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from megatron_ladder.blueprint.model import ModelConfig, model_errors
from megatron_ladder.blueprint.model_flags import ModelFlags
from megatron_ladder.blueprint.wiring import (
    DESYNC_INTERVALS,
    EXPERT_MODES,
    SHARED_STREAM_MODES,
    WIRING_FIELDS,
    WIRINGS,
    ResidualMode,
)
from megatron_ladder.command_line import flag_words


def _all_layers(model: ModelConfig) -> Sequence[int]:
    return range(model.num_layers)


def _upper_half(model: ModelConfig) -> Sequence[int]:
    return range(model.num_layers - model.num_layers // 2, model.num_layers)


def _linear_attention(model: ModelConfig) -> Sequence[int]:
    return model.linear_attention_layers


def _softmax_attention(model: ModelConfig) -> Sequence[int]:
    return [layer for layer in range(model.num_layers) if layer not in model.linear_attention_layers]


@dataclass(frozen=True)
class NamedWiring:
    """A value of --residual-mode with its parameters."""

    mode: ResidualMode
    staleness: int = 1
    desync_interval: int = 0
    late_layers: Callable[[ModelConfig], Sequence[int]] = _all_layers
    """Returns the layers of a model that read late, if any do."""
    own_partials: bool = False
    """Whether every rank is a lane that reads its own parts of the outputs in flight."""

    @property
    def shares_stream(self) -> bool:
        """Whether all tensor-parallel ranks read the same stream."""
        return WIRINGS[self.mode].stream == "shared" and not self.own_partials

    @property
    def is_planned(self) -> bool:
        """Whether it has its own row in plans. Own partials take the time of the wiring without them."""
        return self.late_layers is _all_layers and not self.own_partials

    def fits(self, model: ModelConfig, ranks: int) -> bool:
        """Whether a model with the tensors of this one can have the wiring on so many tensor-parallel ranks."""
        # The layers of longcat have other tensors.
        return ranks >= self.fewest_ranks and self.mode != "longcat" and not [*model_errors(self.of(model, ranks))]

    def lacks_layers(self, model: ModelConfig) -> bool:
        """Whether no layer of the model would read late, although the wiring has late reads."""
        return bool(WIRINGS[self.mode].late) and not self.late_layers(model)

    @property
    def fewest_ranks(self) -> int:
        """The fewest tensor-parallel ranks with which the wiring is defined."""
        return 1 if self.shares_stream else 2

    def flags(self, model: ModelConfig, ranks: int) -> list[str]:
        """Return the flags of pretrain_ladder.py that give a model this wiring on so many tensor-parallel ranks."""
        flags = vars(self.of(model, ranks).to_flags())
        changed = {name: flags[name] for name in WIRING_FIELDS if flags[name] != getattr(ModelFlags, name)}
        return flag_words({"residual_mode": self.mode, **changed})

    def of(self, model: ModelConfig, ranks: int) -> ModelConfig:
        """Return the model in this wiring, on so many tensor-parallel ranks."""
        wiring = WIRINGS[self.mode]
        return replace(
            model,
            residual_mode=self.mode,
            residual_staleness=self.staleness,
            lanes=ranks if self.own_partials else 0,
            ladder_layers=tuple(self.late_layers(model)) if wiring.late else (),
            desync_interval=self.desync_interval,
            desync_tp=ranks if wiring.stream == "per rank" else None,
        )


NAMED_WIRINGS: Mapping[str, NamedWiring] = {
    **{mode: NamedWiring(mode) for mode in (*SHARED_STREAM_MODES, *EXPERT_MODES)},
    "staleness-2": NamedWiring("ladder", staleness=2),
    "hybrid": NamedWiring("ladder", late_layers=_upper_half),
    "late-linear-attention": NamedWiring("ladder-attention", late_layers=_linear_attention),
    "late-softmax-attention": NamedWiring("ladder-attention", late_layers=_softmax_attention),
    **{
        f"own-partials-{staleness}": NamedWiring("ladder", staleness=staleness, own_partials=True)
        for staleness in (1, 2, 4)
    },
    **{f"desync-{interval}x": NamedWiring("desync", desync_interval=interval) for interval in DESYNC_INTERVALS},
}

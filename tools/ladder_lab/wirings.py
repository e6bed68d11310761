"""The wirings of a comparison by name, such as staleness-2 or desync-4x; does not import torch."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from megatron_ladder.blueprint.model import ModelConfig, model_errors
from megatron_ladder.blueprint.wiring import DESYNC_INTERVALS, EXPERT_MODES, SHARED_STREAM_MODES, WIRINGS, ResidualMode


@dataclass(frozen=True)
class NamedWiring:
    """A value of --residual-mode with its parameters."""

    mode: ResidualMode
    staleness: int = 1
    desync_interval: int = 0
    upper_half: bool = False
    """Whether only the upper half of the layers are ladder layers (a hybrid)."""
    own_partials: bool = False
    """Whether every rank is a lane that reads its own parts of the outputs in flight."""

    @property
    def shares_stream(self) -> bool:
        """Whether all tensor-parallel ranks read the same stream."""
        return WIRINGS[self.mode].stream == "shared" and not self.own_partials

    @property
    def is_planned(self) -> bool:
        """Whether it has its own row in plans. Own partials take the time of the wiring without them."""
        return not self.upper_half and not self.own_partials

    def fits(self, model: ModelConfig, ranks: int) -> bool:
        """Whether a model with the tensors of this one can have the wiring on so many tensor-parallel ranks."""
        # The layers of longcat have other tensors.
        return ranks >= self.fewest_ranks and self.mode != "longcat" and not [*model_errors(self.of(model, ranks))]

    @property
    def fewest_ranks(self) -> int:
        """The fewest tensor-parallel ranks with which the wiring is defined."""
        return 1 if self.shares_stream else 2

    def flags(self, num_layers: int, ranks: int) -> tuple[str, ...]:
        """Return the flags of pretrain_ladder.py for a model with so many layers, on so many tensor-parallel ranks."""
        words = ["--residual-mode", self.mode]
        words += ["--residual-staleness", str(self.staleness)] if self.staleness != 1 else []
        words += ["--lanes", str(ranks)] if self.own_partials else []
        words += ["--desync-interval", str(self.desync_interval)] if self.desync_interval else []
        words += ["--ladder-layers", str(num_layers // 2)] if self.upper_half else []
        return tuple(words)

    def of(self, model: ModelConfig, ranks: int) -> ModelConfig:
        """Return the model in this wiring, on so many tensor-parallel ranks."""
        wiring = WIRINGS[self.mode]
        layers = model.num_layers
        first = layers - layers // 2 if self.upper_half else 0
        return replace(
            model,
            residual_mode=self.mode,
            residual_staleness=self.staleness,
            lanes=ranks if self.own_partials else 0,
            ladder_layers=tuple(range(first, layers)) if wiring.late else (),
            desync_interval=self.desync_interval,
            desync_tp=ranks if wiring.stream == "per rank" else None,
        )


NAMED_WIRINGS: Mapping[str, NamedWiring] = {
    **{mode: NamedWiring(mode) for mode in (*SHARED_STREAM_MODES, *EXPERT_MODES)},
    "staleness-2": NamedWiring("ladder", staleness=2),
    "hybrid": NamedWiring("ladder", upper_half=True),
    **{
        f"own-partials-{staleness}": NamedWiring("ladder", staleness=staleness, own_partials=True)
        for staleness in (1, 2, 4)
    },
    **{f"desync-{interval}x": NamedWiring("desync", desync_interval=interval) for interval in DESYNC_INTERVALS},
}

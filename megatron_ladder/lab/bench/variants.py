"""The ways to compute that a benchmark compares; does not import torch."""

from dataclasses import dataclass

from megatron_ladder.blueprint.wiring import DESYNC_INTERVALS, SHARED_STREAM_MODES, WIRINGS, ResidualMode


@dataclass(frozen=True)
class Variant:
    """A wiring and a way to compute it."""

    name: str
    residual_mode: ResidualMode
    residual_staleness: int = 1
    desync_interval: int = 0
    tp_overlap: bool = True
    mirrored_backward: bool = True
    without_reduces: bool = False
    """Omit the reduces: wrong results, and a lower bound on the time with any interconnect."""

    @property
    def one_norm(self) -> bool:
        """Whether attention and MLP share a norm, an input product and a reduce."""
        return WIRINGS[self.residual_mode].one_norm


VARIANTS: dict[str, Variant] = {
    variant.name: variant
    for variant in (
        *(Variant(name, name) for name in SHARED_STREAM_MODES),
        Variant("staleness-2", "ladder", residual_staleness=2),
        *(Variant(f"desync-{interval}", "desync", desync_interval=interval) for interval in DESYNC_INTERVALS),
        Variant("standard-blocking", "standard", tp_overlap=False),
        Variant("ladder-blocking", "ladder", tp_overlap=False),
        Variant("ladder-autograd", "ladder", mirrored_backward=False),
        Variant("no-comm", "standard", without_reduces=True),
        Variant("no-comm-parallel", "parallel", without_reduces=True),
    )
}
"""`standard` overlaps the reduce of an input's gradient with the weight's gradient, as Megatron-LM does.
`ladder-autograd` overlaps only forward and leaves backward to autograd. `-blocking` waits at once."""


def bound_of(variant: Variant) -> Variant:
    """Return the variant with the same arithmetic and without reduces."""
    return VARIANTS["no-comm-parallel" if variant.one_norm else "no-comm"]

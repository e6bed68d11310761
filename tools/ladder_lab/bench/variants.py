"""The ways to compute that a benchmark compares; does not import torch."""

from dataclasses import dataclass

from ladder_lab.wirings import NAMED_WIRINGS, NamedWiring
from megatron_ladder.blueprint.wiring import WIRINGS


@dataclass(frozen=True)
class Variant:
    """A wiring and a way to compute it."""

    name: str
    wiring: NamedWiring
    tp_overlap: bool = True
    mirrored_backward: bool = True
    without_reduces: bool = False
    """Omit the reduces: wrong results, and a lower bound on the time with any interconnect."""

    @property
    def one_norm(self) -> bool:
        """Whether attention and MLP share a norm, an input product and a reduce."""
        return WIRINGS[self.wiring.mode].one_norm


VARIANTS: dict[str, Variant] = {
    **{name: Variant(name, wiring) for name, wiring in NAMED_WIRINGS.items()},
    **{
        variant.name: variant
        for variant in (
            Variant("standard-blocking", NAMED_WIRINGS["standard"], tp_overlap=False),
            Variant("ladder-blocking", NAMED_WIRINGS["ladder"], tp_overlap=False),
            Variant("ladder-autograd", NAMED_WIRINGS["ladder"], mirrored_backward=False),
            Variant("no-comm", NAMED_WIRINGS["standard"], without_reduces=True),
            Variant("no-comm-parallel", NAMED_WIRINGS["parallel"], without_reduces=True),
        )
    },
}
"""`standard` overlaps the reduce of an input's gradient with the weight's gradient, as Megatron-LM does.
`ladder-autograd` overlaps only forward and leaves backward to autograd. `-blocking` waits at once."""


def bound_of(variant: Variant) -> Variant:
    """Return the variant with the same arithmetic and without reduces."""
    return VARIANTS["no-comm-parallel" if variant.one_norm else "no-comm"]

"""The ways to compute that a benchmark compares; does not import torch."""

from dataclasses import dataclass

from ladder_lab.wirings import NAMED_WIRINGS, NamedWiring
from megatron_ladder.blueprint.wiring import EXPERT_MODES, WIRINGS, SubBlockKind


@dataclass(frozen=True)
class Variant:
    """A wiring and a way to compute it."""

    name: str
    wiring: NamedWiring
    tp_overlap: bool = True
    mirrored_backward: bool = True
    late_weight_gradients: bool = True
    without_reduces: bool = False
    """Omit the reduces: wrong results, and a lower bound on the time with any interconnect."""

    @property
    def sub_blocks(self) -> tuple[tuple[SubBlockKind, ...], ...]:
        """The kinds of a dense layer, and of one with experts."""
        row = WIRINGS[self.wiring.mode]
        return row.sub_blocks, row.expert_sub_blocks


VARIANTS: dict[str, Variant] = {
    **{name: Variant(name, wiring) for name, wiring in NAMED_WIRINGS.items()},
    **{
        variant.name: variant
        for variant in (
            Variant("standard-blocking", NAMED_WIRINGS["standard"], tp_overlap=False),
            Variant("ladder-blocking", NAMED_WIRINGS["ladder"], tp_overlap=False),
            Variant("ladder-autograd", NAMED_WIRINGS["ladder"], mirrored_backward=False),
            Variant("no-comm", NAMED_WIRINGS["standard"], without_reduces=True),
            *(
                Variant(f"{name}-early-weights", NAMED_WIRINGS[name], late_weight_gradients=False)
                for name in ("standard", "ladder", "ladder-parallel", "staleness-2", "farskip", "shortcut")
            ),
            *(
                Variant(f"no-comm-{mode}", NAMED_WIRINGS[mode], without_reduces=True)
                for mode in ("parallel", *EXPERT_MODES)
            ),
        )
    },
}
"""`standard` overlaps the reduce of an input's gradient with the weight's gradient, as Megatron-LM does.
`ladder-autograd` overlaps only forward and leaves backward to autograd. `-blocking` waits at once. `-early-weights`
computes gradients of weights at once, instead of where they hide the next wait."""


def bound_of(variant: Variant) -> Variant:
    """Return the variant with the same sub-blocks and without reduces."""
    bounds = (other for other in VARIANTS.values() if other.without_reduces)
    return next(bound for bound in bounds if bound.sub_blocks == variant.sub_blocks)

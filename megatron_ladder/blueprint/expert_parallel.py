"""The wiring of a model whose routed experts are divided over expert-parallel ranks.

Routed experts (R) get their tokens from other ranks, and return complete outputs, whereas the other branches of the
sub-block (a shared expert S, attention A) are divided over the tensor-parallel ranks and leave partial sums. So they
become separate sub-blocks, which see the same outputs as before, and not each other's:

    wiring of a layer     divided      R sees
    A, S+R                A, S, R      what S sees
    A+S+R                 A+S, R       what A+S sees
    A, R, S               A, R, S      the stream before A: its tokens travel under A
    A, R, M, A, M         A, M, R, ... what M sees: its tokens travel under M

A sub-block that reads the same stream directly after R comes before it, because the tokens of R travel under it. The
model computes the same function in either order.
"""

from collections.abc import Sequence
from typing import NamedTuple

from megatron_ladder.blueprint.wiring import SubBlockKind, WiredSubBlock, plan_reads

_PARTS = {
    SubBlockKind.EXPERTS: (SubBlockKind.SHARED_EXPERT, SubBlockKind.ROUTED_EXPERTS),
    SubBlockKind.MIXER_EXPERTS: (SubBlockKind.MIXER_SHARED, SubBlockKind.PARALLEL_ROUTED_EXPERTS),
}
_PARTS_WITHOUT_SHARED_EXPERT = {
    SubBlockKind.EXPERTS: (SubBlockKind.ROUTED_EXPERTS,),
    SubBlockKind.MIXER_EXPERTS: (SubBlockKind.MIXER, SubBlockKind.PARALLEL_ROUTED_EXPERTS),
}


class _Part(NamedTuple):
    """A sub-block of the divided wiring."""

    kind: SubBlockKind
    layer: int
    whole: int
    """Position of the sub-block that it is a part of."""

    @property
    def is_routed(self) -> bool:
        return self.kind in (SubBlockKind.ROUTED_EXPERTS, SubBlockKind.PARALLEL_ROUTED_EXPERTS)

    def stays_before(self, following: "_Part") -> bool:
        """Return whether both sub-blocks can share one sum, as before the division."""
        return not (self.is_routed or following.is_routed) and following.whole == self.whole + 1


def divide_experts(layers: Sequence[Sequence[WiredSubBlock]], shared_expert: bool) -> list[tuple[WiredSubBlock, ...]]:
    """Return the sub-blocks of every layer with separate routed experts; `shared_expert`: whether the model has one."""
    parts_of = _PARTS if shared_expert else _PARTS_WITHOUT_SHARED_EXPERT
    plan = plan_reads(layers)
    wholes = [(layer, sub_block) for layer, sub_blocks in enumerate(layers) for sub_block in sub_blocks]
    parts: list[_Part] = []
    for whole, (layer, sub_block) in enumerate(wholes):
        follows_routed = bool(parts) and parts[-1].layer == layer and parts[-1].is_routed
        at = len(parts) - (follows_routed and not plan.arriving(whole))
        parts[at:at] = [_Part(kind, layer, whole) for kind in parts_of.get(sub_block.kind, (sub_block.kind,))]
    divided: list[list[WiredSubBlock]] = [[] for _ in layers]
    for position, part in enumerate(parts):
        _, sub_block = wholes[part.whole]
        seen = set(range(part.whole)) - {part.whole - back for back in sub_block.missing}
        missing = [back for back in range(1, position + 1) if parts[position - back].whole not in seen]
        joins_next = sub_block.joins_next and not part.is_routed and part.stays_before(parts[position + 1])
        shares_input = sub_block.shares_input and parts[position - 1].stays_before(part)
        divided[part.layer].append(
            WiredSubBlock(
                part.kind,
                tuple(missing),
                joins_next=joins_next,
                shares_input=shares_input,
                moves_tokens=part.is_routed,
            )
        )
    return [tuple(sub_blocks) for sub_blocks in divided]

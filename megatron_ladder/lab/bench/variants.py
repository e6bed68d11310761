"""The models that a benchmark compares: one set of weights, wired and computed in several ways."""

from dataclasses import dataclass, replace

import torch
from torch import nn

from megatron_ladder.blueprint.model import ModelConfig
from megatron_ladder.blueprint.wiring import DESYNC_INTERVALS, SHARED_STREAM_MODES, WIRINGS, ResidualMode
from megatron_ladder.comm.group import CommGroup
from megatron_ladder.comm.mesh import ProcessMesh
from megatron_ladder.errors import UserError
from megatron_ladder.model.language_model import LanguageModel
from megatron_ladder.model.stack import StackOptions


@dataclass(frozen=True)
class Variant:
    """A wiring and a way to compute it."""

    name: str
    residual_mode: ResidualMode
    residual_staleness: int = 1
    desync_interval: int = 0
    options: StackOptions = StackOptions()
    without_reduces: bool = False
    """Omit the reduces: wrong results, and a lower bound on the time with any interconnect."""

    @property
    def one_norm(self) -> bool:
        """Whether attention and MLP share a norm, an input product and a reduce."""
        return WIRINGS[self.residual_mode].one_norm


_BLOCKING = StackOptions(tp_overlap=False)
_AUTOGRAD = StackOptions(mirrored_backward=False)
VARIANTS: dict[str, Variant] = {
    variant.name: variant
    for variant in (
        *(Variant(name, name) for name in SHARED_STREAM_MODES),
        Variant("staleness-2", "ladder", residual_staleness=2),
        *(Variant(f"desync-{interval}", "desync", desync_interval=interval) for interval in DESYNC_INTERVALS),
        Variant("standard-blocking", "standard", options=_BLOCKING),
        Variant("ladder-blocking", "ladder", options=_BLOCKING),
        Variant("ladder-autograd", "ladder", options=_AUTOGRAD),
        Variant("no-comm", "standard", without_reduces=True),
        Variant("no-comm-parallel", "parallel", without_reduces=True),
    )
}
"""`standard` overlaps the reduce of an input's gradient with the weight's gradient, as Megatron-LM does.
`ladder-autograd` overlaps only forward and leaves backward to autograd. `-blocking` waits at once."""


def bound_of(variant: Variant) -> Variant:
    """Return the variant with the same arithmetic and without reduces."""
    return VARIANTS["no-comm-parallel" if variant.one_norm else "no-comm"]


def find_variants(names: tuple[str, ...]) -> list[Variant]:
    """Return the variants of these names; raises UserError for unknown ones."""
    unknown = [name for name in names if name not in VARIANTS]
    if unknown:
        raise UserError(f"--wirings {' '.join(unknown)}: expected some of {', '.join(VARIANTS)}")
    return [VARIANTS[name] for name in names]


def build_models(
    variants: list[Variant],
    model: ModelConfig,
    mesh: ProcessMesh,
    link: CommGroup,
    no_comm: CommGroup,
    dtype: torch.dtype,
    device: torch.device,
) -> dict[str, LanguageModel]:
    """Build a model of each variant, with timed reduces or with none; those with the same modules share weights."""
    models: dict[str, LanguageModel] = {}
    owners: dict[bool, LanguageModel] = {}
    for variant in variants:
        group = no_comm if variant.without_reduces else link
        config = model.in_wiring(
            variant.residual_mode, staleness=variant.residual_staleness, desync_interval=variant.desync_interval,
            ranks=link.size,
        )  # fmt: skip
        built = LanguageModel(
            config, replace(mesh, tensor=group), variant.options, dtype=dtype, device=device,
            seed=None if variant.one_norm in owners else 1,
        )  # fmt: skip
        if variant.one_norm in owners:
            shapes = {name: parameter.shape for name, parameter in built.named_parameters()}
            weights = owners[variant.one_norm].state_dict(keep_vars=True)
            for name, weight in weights.items():
                # Norms of per-rank streams have a row for each rank.
                if weight.shape != shapes[name]:
                    weights[name] = nn.Parameter(weight.detach().view(shapes[name]))
            built.load_state_dict(weights, assign=True)
        owners.setdefault(variant.one_norm, built)
        models[variant.name] = built
    return models

"""Muon on flat partitions, compared with `torch.optim.Muon` on whole matrices."""

import pytest
import torch

from megatron_ladder.blueprint.specs import Role, TensorSpec
from megatron_ladder.checkpoint.optimizer_state import Span
from megatron_ladder.comm.group import CommGroup
from megatron_ladder.comm.mesh import ProcessMesh
from megatron_ladder.config.sections import OptimizerConfig
from megatron_ladder.engine.muon import MuonWithAdamW
from megatron_ladder.engine.optimizer import parameter_groups
from megatron_ladder.parallel.layout import ParallelModule, Placement, Section

FUSED = {"q": (8, 24), "k": (3, 24)}
"""Matrices whose rows are in one parameter."""
SHAPES = {**FUSED, "down": (24, 10)}
CUTS = (0, 37, 264, 301, 504)
"""Borders of the spans: 11 x 24 elements of the fused parameter, then 24 x 10 of the other one."""


def spans_of(flat: torch.Tensor) -> list[Span]:
    sections = [
        Section(TensorSpec("q", FUSED["q"], Role.MATRIX), 0, 8),
        Section(TensorSpec("k", FUSED["k"], Role.MATRIX), 0, 3, local_start=8),
    ]
    fused, down = (
        (sections, (11, 24)),
        ([Section(TensorSpec("down", SHAPES["down"], Role.MATRIX, 1), 0, 10)], SHAPES["down"]),
    )
    found = []
    for low, high in zip(CUTS, CUTS[1:], strict=False):
        held, shape = fused if high <= 264 else down
        start = low if high <= 264 else low - 264
        found.append(Span(held, shape, start, flat.detach()[low:high], flat, low, owned=True))
    return found


@pytest.mark.parametrize("scale_mode", ["match_rms_adamw", "original"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_updates_in_bf16_equal_torch_muon_bitwise(scale_mode: str, nesterov: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    matrices = {name: torch.randn(shape, generator=generator).requires_grad_() for name, shape in SHAPES.items()}
    bias, flat_bias = torch.zeros(5, requires_grad=True), torch.zeros(5, requires_grad=True)
    flat = torch.cat([matrix.detach().reshape(-1) for matrix in matrices.values()]).requires_grad_()
    muon = torch.optim.Muon(
        matrices.values(),
        lr=0.02,
        weight_decay=0.1,
        momentum=0.9,
        nesterov=nesterov,
        ns_steps=4,
        adjust_lr_fn=scale_mode,
    )
    adamw = torch.optim.AdamW([bias], lr=0.02, weight_decay=0.0)
    config = OptimizerConfig(
        lr=0.02, muon_momentum=0.9, muon_nesterov=nesterov, muon_ns_steps=4, muon_scale_mode=scale_mode
    )  # type: ignore[arg-type]
    groups = [
        {"params": [flat], "weight_decay": 0.1, "moments": ("exp_avg",)},
        {"params": [flat_bias], "weight_decay": 0.0, "moments": ("exp_avg", "exp_avg_sq")},
    ]
    ours = MuonWithAdamW(groups, config, torch.bfloat16, lr=0.02)
    ours.distribute(spans_of(flat), CommGroup.alone())
    for _ in range(3):
        for matrix in matrices.values():
            matrix.grad = torch.randn(matrix.shape, generator=generator)
        bias.grad = torch.randn(5, generator=generator)
        flat.grad = torch.cat([matrix.grad.reshape(-1) for matrix in matrices.values() if matrix.grad is not None])
        flat_bias.grad = bias.grad.clone()
        for optimizer in (muon, adamw, ours):
            optimizer.step()
    expected = torch.cat([matrix.detach().reshape(-1) for matrix in matrices.values()])
    assert torch.equal(flat.detach(), expected) and torch.equal(flat_bias, bias)


def test_convolutions_neither_decay_nor_are_orthogonalised() -> None:
    place = Placement(ProcessMesh.single(), torch.float32, torch.device("cpu"))
    module = ParallelModule(place)
    module.add_parameter("filters", [TensorSpec("filters", (8, 4), Role.CONVOLUTION, 0)], place)
    (group,) = parameter_groups(module, OptimizerConfig(lr=0.02, optimizer="muon", weight_decay=0.1))
    assert group == {"params": [module.filters], "weight_decay": 0.0, "moments": ("exp_avg", "exp_avg_sq")}

"""Losses that bodies return besides their outputs: their gradients and values in every layout."""

from dataclasses import replace
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from megatron_ladder.blueprint.tensors import SubBlockTensors, TensorSpec
from megatron_ladder.blueprint.wiring import SubBlockKind
from megatron_ladder.comm.inflight import Launch
from megatron_ladder.comm.mesh import ProcessMesh
from megatron_ladder.model.bodies import MLP
from megatron_ladder.model.language_model import LanguageModel
from megatron_ladder.model.operations import BuildContext
from megatron_ladder.model.stack import BODIES, StackOptions
from megatron_ladder.model.sub_block import BodyOutput, SequenceContext
from megatron_ladder.parallel.input_gradient import InputGradient
from megatron_ladder.parallel.layout import ParallelModule
from megatron_ladder.parallel.partial_gradients import sum_gradient
from megatron_ladder.train.step import train_step
from tests.helpers.pool import GlooPools
from tests.helpers.sharded import Pieces, assert_pieces, gradient_pieces, mesh_of, small_model
from tests.helpers.steps import RECIPE, steps_of_batches
from tests.helpers.training import build_trainer_here, own_batches

CHOICES = 3
MICRO_BATCHES = 2
WIRINGS: dict[str, dict[str, Any]] = {
    "standard": {},
    "ladder": {"residual_mode": "ladder", "ladder_layers": (0, 1, 2, 3)},
}


def penalty(normed: Tensor, weight: Tensor) -> Tensor:
    return 0.05 * (normed @ weight.t()).logsumexp(-1).square().sum()


class RoutedMLP(MLP):
    """An MLP with a router, of which only the z-loss matters."""

    loss_names = ("router z loss",)

    def __init__(self, build: BuildContext, layer: int, tensors: SubBlockTensors) -> None:
        super().__init__(build, layer, tensors)
        self.router = ParallelModule()
        tensor = TensorSpec(
            f"layers.{layer}.mlp.router.weight", (CHOICES, build.config.hidden_size), block=CHOICES, std=0.3
        )
        self.router.add_parameter("weight", [tensor], build.mesh.tensor, build.dtype, build.device)

    def forward(
        self,
        normed: Tensor,
        context: SequenceContext,
        input_gradient: InputGradient | None = None,
        launch: Launch | None = None,
    ) -> BodyOutput:
        deferred = None if input_gradient is None else input_gradient.partial_gradients
        weight = sum_gradient(self.router.weight, self.gate_up_proj.group, deferred)
        loss = penalty(self.gate_up_proj.share_input(normed, input_gradient), weight)
        return BodyOutput(super().forward(normed, context, input_gradient, launch).in_flight, {"router z loss": loss})


def batches() -> Tensor:
    return torch.randint(0, 101, (MICRO_BATCHES, 2, 2, 12), generator=torch.Generator().manual_seed(3))


def plain_gradients(wiring: str) -> tuple[list[float], Pieces]:
    """Let autograd differentiate the sum of the loss and of the penalties, computed from what the norms returned."""
    with mock.patch.dict(BODIES, {SubBlockKind.MLP: RoutedMLP}):
        model = LanguageModel(small_model(**WIRINGS[wiring]), ProcessMesh.single(), seed=1, dtype=torch.float64)
    for step in model.stack.sub_blocks():
        step.body.loss_names = ()
    found: list[Tensor] = []
    for step in model.stack.sub_blocks():
        if isinstance(step.body, RoutedMLP):
            weight = step.body.router.weight
            step.body.register_forward_pre_hook(
                lambda _, inputs, weight=weight: found.append(penalty(inputs[0], weight))
            )
            step.body.register_forward_hook(lambda _, inputs, output: BodyOutput(output.in_flight))
    value = 0.0
    for tokens, labels in batches():
        found.clear()
        loss = model(tokens, labels)
        of_bodies = torch.stack(found).sum()
        ((loss + of_bodies) / 24).backward()
        value += of_bodies.item()
    return [value], gradient_pieces(model)


def run(
    wiring: str, ranks: int, options: StackOptions, cuts: tuple[int, ...], sequence_parallel: bool
) -> tuple[list[float], Pieces]:
    """Return the losses of bodies by range, summed over micro-batches, and the gradients."""
    mesh = replace(mesh_of(2) if ranks > 1 else ProcessMesh.single(), sequence_parallel=sequence_parallel)
    config = small_model(**WIRINGS[wiring])
    with mock.patch.dict(BODIES, {SubBlockKind.MLP: RoutedMLP}):
        parts = [
            LanguageModel(config, mesh, options, layers=range(*bound), seed=1, dtype=torch.float64)
            for bound in pairwise((0, *cuts, config.num_layers))
        ]
    for part in parts:
        part.stack.partial_sums.expect(MICRO_BATCHES)
    for tokens, labels in batches():
        if not cuts:
            (parts[0](tokens, labels) / 24).backward()
            continue
        entered: list[Tensor] = []
        left = tokens
        for part in parts:
            entered.append(left if left is tokens else left.detach().clone().requires_grad_())
            left = part.stage(entered[-1], loss_scale=1 / 24)
            entered.append(left)
        (parts[-1].loss(left[0], labels) / 24).backward()
        for index in reversed(range(len(parts) - 1)):
            entered[2 * index + 1].backward(entered[2 * index + 2].grad)
    return [part.take_extra_losses().item() for part in parts], [
        piece for part in parts for piece in gradient_pieces(part)
    ]


@pytest.mark.parametrize(
    ("wiring", "ranks", "options", "cuts", "sequence_parallel"),
    [
        ("ladder", 1, StackOptions(recompute_layers=2), (), False),
        ("standard", 1, StackOptions(), (1, 2, 3), False),
        ("ladder", 2, StackOptions(recompute_layers=2), (), False),
        ("ladder", 2, StackOptions(recompute_layers=1), (1, 3), False),
        ("standard", 2, StackOptions(tp_overlap=False, recompute_layers=2), (), False),
        ("standard", 2, StackOptions(mirrored_backward=False), (2,), True),
        ("ladder", 2, StackOptions(recompute_layers=2), (), True),
        ("standard", 2, StackOptions(), (2,), True),
    ],
    ids=["1", "1-cut", "2", "2-cut", "2-blocking", "2-sharded-autograd", "2-sharded", "2-sharded-cut"],
)
def test_losses_of_bodies_count_once(
    gloo_pools: GlooPools,
    wiring: str,
    ranks: int,
    options: StackOptions,
    cuts: tuple[int, ...],
    sequence_parallel: bool,
) -> None:
    (expected,), pieces = plain_gradients(wiring)
    results = gloo_pools(ranks).run(run, wiring, ranks, options, cuts, sequence_parallel)
    for losses, _ in results:
        assert sum(losses) == pytest.approx(expected, rel=1e-12)
    assert_pieces([found for _, found in results], {name: values for name, _, values in pieces}, 1e-11)


def step(argv: list[str], micro_batches: int) -> tuple[float, float, float]:
    """Return loss, loss of the bodies and norm of the gradient of a step."""
    with mock.patch.dict(BODIES, {SubBlockKind.MLP: RoutedMLP}):
        trainer = build_trainer_here(argv)
    result = train_step(trainer, own_batches(trainer, steps_of_batches(1, micro_batches)[0]), 1)
    return result.loss, result.extra_losses["router z loss"], result.gradient_norm


def test_a_step_is_the_same_in_every_layout(gloo_pools: GlooPools) -> None:
    argv = [*RECIPE, "--global-batch-size", "8"]
    whole = gloo_pools(1).run(step, argv, 4)[0]
    words = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --zero-stage 1"
    for found in gloo_pools(4).run(step, [*argv, *words.split()], 4):
        assert found == pytest.approx(whole, rel=1e-5)
    assert gloo_pools(2).run(step, [*argv, "--zero-stage", "2"], 4)[0] == pytest.approx(whole, rel=1e-5)

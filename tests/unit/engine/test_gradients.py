"""Norm and clipping take one operation for all gradients: on a GPU, each operation is a launch."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_ladder.blueprint.specs import Role, TensorSpec
from megatron_ladder.checkpoint.optimizer_state import Span
from megatron_ladder.comm.group import CommGroup
from megatron_ladder.comm.mesh import ProcessMesh
from megatron_ladder.engine.state import clip_gradients, gradient_norm, sum_partial_gradients
from megatron_ladder.parallel.layout import Section
from tests.helpers.recording import Calls


@pytest.mark.parametrize("tensors", [0, 1, 40])
def test_norm_and_clipping_do_not_take_operations_for_each_tensor(tensors: int) -> None:
    values = [torch.randn(3, 5) for _ in range(tensors)]
    sections = [Section(TensorSpec("matrix", (3, 5), Role.MATRIX), 0, 3)]
    gradients = [(Span(sections, (3, 5), 0, value, value, 0, owned=True), value.clone()) for value in values]
    with Calls() as operations:
        norm, sums = gradient_norm(
            gradients, CommGroup.alone(), torch.device("cpu"), torch.ones(2, dtype=torch.float64)
        )
        clip_gradients(gradients, norm, 0.5)
    assert norm == pytest.approx(math.sqrt(sum(float(value.double().square().sum()) for value in values)), rel=1e-6)
    assert sums == [1.0, 1.0]
    for (_, gradient), value in zip(gradients, values, strict=True):
        torch.testing.assert_close(gradient, value * (0.5 / norm) if norm > 0.5 else value)
    assert len(operations.found) <= 20


class ScalingGroup(CommGroup):
    """Ranks that hold the same numbers; records the numbers of elements of its sums."""

    def __init__(self, ranks: int) -> None:
        super().__init__(range(ranks), 0, None)
        self.summed: list[int] = []

    def all_reduce(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self.summed.append(tensor.numel())
        return tensor.mul_(self.size)


def test_partial_gradients_are_summed_over_the_ranks_that_hold_the_slice() -> None:
    """Four ranks, two key heads: a fused matrix of queries and keys, a norm of all ranks, and half of a latent."""
    pair, four = ScalingGroup(2), ScalingGroup(4)
    mesh = replace(ProcessMesh.single(), tensor=four, head_replicas={2: pair})
    query, key = TensorSpec("q", (8, 5), Role.MATRIX, 0, heads=4), TensorSpec("k", (4, 5), Role.MATRIX, 0, heads=2)
    latent, norm, bias = (
        TensorSpec("latent", (3, 4), Role.MATRIX, 0, heads=1),
        TensorSpec("norm", (6,), Role.VECTOR),
        TensorSpec("bias", (7,), Role.VECTOR),
    )
    parameters = [
        ([Section.of(query, mesh.tensor), Section.of(key, mesh.tensor, local_start=2)], (4, 5), 0, 20),
        ([Section.of(norm, mesh.tensor, is_partial=True)], (6,), 0, 6),
        ([Section.of(bias, mesh.tensor)], (7,), 0, 7),
        ([Section.of(latent, mesh.tensor)], (3, 4), 5, 7),
    ]
    gradients = []
    for sections, shape, start, length in parameters:
        master = torch.ones(length)
        gradients.append((Span(sections, shape, start, master, master, 0, owned=True), torch.ones(length)))
    sum_partial_gradients(gradients, mesh, torch.device("cpu"))
    expected = [[1.0] * 10 + [2.0] * 10, [4.0] * 6, [1.0] * 7, [4.0] * 7]
    assert [gradient.tolist() for _, gradient in gradients] == expected
    assert (pair.summed, four.summed) == ([10], [13])

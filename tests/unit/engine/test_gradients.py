"""Norm and clipping take one operation for all gradients: on a GPU, each operation is a launch."""

import math

import pytest
import torch

from megatron_ladder.blueprint.tensors import TensorSpec
from megatron_ladder.checkpoint.optimizer_state import Span
from megatron_ladder.comm.group import CommGroup
from megatron_ladder.engine.state import clip_gradients, gradient_norm
from megatron_ladder.parallel.layout import Section
from tests.helpers.recording import Calls


@pytest.mark.parametrize("tensors", [0, 1, 40])
def test_norm_and_clipping_do_not_take_operations_for_each_tensor(tensors: int) -> None:
    values = [torch.randn(3, 5) for _ in range(tensors)]
    sections = [Section(TensorSpec("matrix", (3, 5)), 0, 3)]
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

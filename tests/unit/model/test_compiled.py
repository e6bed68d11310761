"""Compiled operations in one process, where the norm adds the output before it."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_ladder.comm.mesh import ProcessMesh
from megatron_ladder.generate.engine import GenerationEngine
from megatron_ladder.generate.requests import GenerationRequest
from megatron_ladder.generate.sampling import SamplingParameters
from megatron_ladder.model.language_model import LanguageModel
from megatron_ladder.model.operations import Operations, compile_operations
from megatron_ladder.model.stack import StackOptions
from tests.unit.generate.tiny_model import MODELS, PROMPTS, reference_of, tiny_config, tiny_engine, tiny_model

BACKEND = "aot_eager"


def counting(operations: Operations, counted: list[int]) -> Operations:
    """Collects the widths of what norms add."""

    def counting_add_norm(x: Tensor, output: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
        counted.append(output.shape[-1])
        return operations.add_norm(x, output, weight, epsilon)

    return replace(operations, add_norm=counting_add_norm)


@pytest.mark.parametrize(
    ("name", "changes", "recompute", "additions"),
    [
        # The first of six sub-blocks reads the embedding only; a ladder sub-block misses one more output.
        ("standard", {}, 0, 5),
        ("ladder", {}, 0, 4),
        ("ladder", {"qk_layernorm": True}, 3, 0),
        ("parallel", {"ladder_layers": ()}, 0, 2),
    ],
)
def test_gradients_equal_those_of_the_uncompiled_model(
    name: str, changes: dict[str, Any], recompute: int, additions: int
) -> None:
    torch.compiler.reset()
    config = tiny_config(**(MODELS[name] | changes))
    counted: list[int] = []
    compiled = counting(compile_operations(Operations(), BACKEND), counted)
    models = [
        LanguageModel(
            config, ProcessMesh.single(), StackOptions(recompute_layers=recompute, operations=operations),
            dtype=torch.float64, seed=1,
        )
        for operations in (Operations(), compiled)
    ]  # fmt: skip
    tokens = torch.arange(24).view(2, 12)
    losses = [model(tokens, tokens.flip(1)) for model in models]
    assert counted == [config.hidden_size] * additions
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-12)
    for loss in losses:
        loss.backward()
    for a, b in zip(*(model.parameters() for model in models), strict=True):
        assert a.grad is not None and b.grad is not None
        assert (a.grad - b.grad).abs().max() <= 1e-11 * a.grad.abs().max()


def test_add_norm_returns_the_sum_and_its_norm() -> None:
    stream, output = torch.tensor([[1.0, -2.0]]), torch.tensor([[2.0, 6.0]])
    total, normed = Operations().add_norm(stream, output, torch.tensor([1.0, 10.0]), 0.0)
    assert total.tolist() == [[3.0, 4.0]]
    assert normed.flatten().tolist() == pytest.approx([3 / 12.5**0.5, 40 / 12.5**0.5])


def test_generation_equals_that_of_the_uncompiled_model() -> None:
    torch.compiler.reset()
    config = tiny_config(**MODELS["hybrid"])
    weights, _ = reference_of(config)
    requests = [GenerationRequest(prompt, 6, SamplingParameters(temperature=0.0)) for prompt in PROMPTS]
    model = tiny_model(config, weights, operations=compile_operations(Operations(), BACKEND))
    compiled = GenerationEngine(model, ProcessMesh.single())
    plain = tiny_engine(config, weights)
    assert [g.ids for g in compiled.generate(requests)] == [g.ids for g in plain.generate(requests)]

"""Compiled sub-blocks in one process, where the norm adds the output before it on its way."""

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_ladder.comm.mesh import ProcessMesh
from megatron_ladder.generate.requests import GenerationRequest
from megatron_ladder.generate.sampling import SamplingParameters
from megatron_ladder.model.compiled import compile_sub_blocks
from megatron_ladder.model.language_model import LanguageModel
from megatron_ladder.model.norm import RMSNorm, add_rms_norm
from megatron_ladder.model.stack import StackOptions
from tests.unit.generate.tiny_model import MODELS, PROMPTS, reference_of, tiny_config, tiny_engine

BACKEND = "aot_eager"


def count_additions(model: LanguageModel) -> list[int]:
    """Collects the widths of what norms add."""
    counted: list[int] = []
    for module in model.modules():
        if isinstance(module, RMSNorm) and module.add_function is not None:
            compiled = module.add_function

            def counting(x: Tensor, output: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
                counted.append(output.shape[-1])
                return compiled(x, output, weight, epsilon)  # noqa: B023

            module.add_function = counting
    return counted


@pytest.mark.parametrize(
    ("name", "changes", "recompute", "additions"),
    [
        # Of six sub-blocks, the first reads the embedding alone; a ladder one misses another output.
        ("standard", {}, 0, 5),
        ("ladder", {}, 0, 4),
        ("ladder", {"qk_layernorm": True}, 3, 0),
        ("parallel", {"ladder_layers": ()}, 0, 2),
    ],
)
def test_gradients_are_those_of_the_uncompiled_model(
    name: str, changes: dict[str, Any], recompute: int, additions: int
) -> None:
    torch.compiler.reset()
    config = tiny_config(**(MODELS[name] | changes))
    options = StackOptions(recompute_layers=recompute)
    models = [LanguageModel(config, ProcessMesh.single(), options, dtype=torch.float64, seed=1) for _ in range(2)]
    compile_sub_blocks(models[1], BACKEND)
    counted = count_additions(models[1])
    tokens = torch.arange(24).view(2, 12)
    losses = [model(tokens, tokens.flip(1)) for model in models]
    assert counted == [config.hidden_size] * additions
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-12)
    for loss in losses:
        loss.backward()
    for a, b in zip(*(model.parameters() for model in models), strict=True):
        assert a.grad is not None and b.grad is not None
        assert (a.grad - b.grad).abs().max() <= 1e-11 * a.grad.abs().max()


def test_the_sum_and_its_norm() -> None:
    stream, output = torch.tensor([[1.0, -2.0]]), torch.tensor([[2.0, 6.0]])
    total, normed = add_rms_norm(stream, output, torch.tensor([1.0, 10.0]), 0.0)
    assert total.tolist() == [[3.0, 4.0]]
    assert normed.flatten().tolist() == pytest.approx([3 / 12.5**0.5, 40 / 12.5**0.5])


def test_generation_is_that_of_the_uncompiled_model() -> None:
    torch.compiler.reset()
    config = tiny_config(**MODELS["hybrid"])
    weights, _ = reference_of(config)
    requests = [GenerationRequest(prompt, 6, SamplingParameters(temperature=0.0)) for prompt in PROMPTS]
    plain, compiled = (tiny_engine(config, weights) for _ in range(2))
    compile_sub_blocks(compiled.model, BACKEND)
    assert [g.ids for g in compiled.generate(requests)] == [g.ids for g in plain.generate(requests)]

"""Norms whose weights start at 0, compared with those of Qwen3-Next in transformers, and where a model has them."""

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNorm

from megatron_ladder.comm.mesh import ProcessMesh
from megatron_ladder.model.language_model import LanguageModel
from megatron_ladder.model.operations import Operations
from megatron_ladder.parallel.layout import parameter_sections
from tests.helpers.sharded import LATENT_WIDTHS, small_model


def values(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_multiplies_by_one_more_than_its_weight_in_fp32(dtype: torch.dtype) -> None:
    theirs = Qwen3NextRMSNorm(16, eps=1e-6).to(dtype)
    # Of these, bfloat16 loses one and a half bits if it adds 1.
    theirs.weight.data = values(16, dtype=dtype) / 8
    weight = theirs.weight.detach().clone().requires_grad_()
    x = values(5, 3, 16, dtype=dtype).requires_grad_()
    output, gradient = values(5, 3, 16, dtype=dtype), values(5, 3, 16, dtype=dtype) * 3
    wanted = theirs(x + output)
    wanted_gradients = torch.autograd.grad(wanted, (x, theirs.weight), gradient)
    total, normed = Operations().add_norm(x, output, weight, 1e-6, 1.0)
    assert torch.equal(total, x + output)
    alone = Operations().norm(total, weight, 1e-6, 1.0)
    assert torch.equal(normed, alone)
    tolerance = {"rtol": 1e-6, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 2**-8, "atol": 2**-16}
    torch.testing.assert_close(normed, wanted, **tolerance)
    gradients = torch.autograd.grad(normed, (x, weight), gradient)
    for found, expected in zip(gradients, wanted_gradients, strict=True):
        torch.testing.assert_close(found, expected, rtol=tolerance["rtol"], atol=float(expected.abs().max()) * 1e-3)


@pytest.mark.parametrize("latent", [False, True])
def test_only_norms_of_latents_start_at_one(latent: bool) -> None:
    widths = LATENT_WIDTHS | {"q_lora_rank": 9} if latent else {"qk_layernorm": True}
    model = LanguageModel(small_model(apply_layernorm_1p=True, **widths), ProcessMesh.single(), seed=1)
    first = {
        section.name: set(parameter.flatten().tolist())
        for parameter, sections in parameter_sections(model)
        for section in sections
        if section.name.endswith("norm.weight")
    }
    assert len(first) == 4 * 4 + 1
    for name, numbers in first.items():
        assert numbers == {1.0 if name.endswith("_a_norm.weight") else 0.0}, name

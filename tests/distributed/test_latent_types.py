"""Logits and gradients of imported models with latent attention, compared with transformers' on one process."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_ladder.blueprint.model import key_value_replicas
from megatron_ladder.blueprint.tensors import model_tensors
from megatron_ladder.checkpoint.hf_directory import open_hf_directory
from megatron_ladder.checkpoint.loading import load_weights
from megatron_ladder.model.language_model import LanguageModel
from tests.helpers.hugging_face import hf_name
from tests.helpers.pool import GlooPools
from tests.helpers.sharded import Pieces, assert_pieces, gradient_pieces, mesh_of, run_chain
from tests.unit.convert.saved_models import save_model
from tests.unit.convert.test_latent_types import CASES

TOLERANCE = 1e-5
FOUR_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 64}
"""For models of three heads on two and four ranks."""


def on_ranks(hf: str, ranks: int, tokens: Tensor, labels: Tensor) -> tuple[Tensor, Pieces]:
    """Return this rank's columns of the logits [s, b, V/t], and its gradients of the mean loss."""
    directory = open_hf_directory(Path(hf))
    model = LanguageModel(directory.model, mesh_of(ranks, key_value_replicas(directory.model, ranks)))
    load_weights(model, directory)
    with torch.no_grad():
        logits = model.logits_shard(model.hidden_states(tokens, model.training_context(tokens)))
    run_chain([model], tokens, labels, targets=labels.numel())
    return logits, gradient_pieces(model)


def gradient(module: Any, name: str) -> Tensor:
    """Return the gradient of a canonical weight in a model of transformers, which stacks gates on ups of experts."""
    stack, _, part = hf_name(name).partition(".mlp.experts.")
    if not part:
        return module.get_parameter(hf_name(name)).grad
    if part == "down_proj.weight":
        return module.get_parameter(f"{stack}.mlp.experts.down_proj").grad
    gates, ups = module.get_parameter(f"{stack}.mlp.experts.gate_up_proj").grad.chunk(2, dim=1)
    return gates if part == "gate_proj.weight" else ups


def cases() -> list[Any]:
    """Return each model with 1, 2 and 4 ranks, and those of three heads also with 3; all but one of each are slow."""
    found = []
    for index, (name, (_, changes)) in enumerate(CASES.items()):
        has_three = changes.get("num_attention_heads") == 3
        sizes = (1, 2, 3, 4) if has_three else (1, 2, 4)
        quick = 3 if has_three else sizes[1 + index % 2]
        for ranks in sizes:
            found.append(pytest.param(name, ranks, marks=() if ranks == quick else pytest.mark.slow))
    return found


@pytest.mark.parametrize(("name", "ranks"), cases())
def test_logits_and_gradients_are_those_of_transformers(
    gloo_pools: GlooPools, tmp_path: Path, name: str, ranks: int
) -> None:
    kind, changes = CASES[name]
    if changes.get("num_attention_heads") == 3 and ranks in (2, 4):
        changes = changes | FOUR_HEADS
    theirs = save_model(tmp_path / "hf", kind, **changes)
    with torch.no_grad():
        # Scores near zero would leave the gradients of queries to rounding.
        for part, weight in theirs.named_parameters():
            weight *= 3 if ".self_attn." in part and weight.dim() == 2 else 1
    theirs.save_pretrained(tmp_path / "hf")
    # Longer than the original positions of YaRN.
    tokens, labels = torch.randint(0, 301, (2, 2, 48), generator=torch.Generator().manual_seed(3))
    expected = theirs(tokens).logits
    torch.nn.functional.cross_entropy(expected.flatten(0, 1), labels.flatten()).backward()
    outcomes = gloo_pools(ranks).run(on_ranks, str(tmp_path / "hf"), ranks, tokens, labels)
    found = torch.cat([logits for logits, _ in outcomes], dim=-1)[..., :301].transpose(0, 1)
    assert (found - expected).abs().max() <= TOLERANCE * expected.abs().max()
    model = open_hf_directory(tmp_path / "hf").model
    names = [spec.name for spec in model_tensors(model) if not spec.name.endswith("expert_bias")]
    assert_pieces([pieces for _, pieces in outcomes], {name: gradient(theirs, name) for name in names}, TOLERANCE)

"""`convert_checkpoint.py arrange`: which heads and neurons share a lane."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_ladder.blueprint.model import ModelConfig
from megatron_ladder.checkpoint.format import Checkpoint
from megatron_ladder.comm.mesh import ProcessMesh
from megatron_ladder.convert import arrangement
from megatron_ladder.convert.options import ArrangeOptions
from megatron_ladder.data.batches import MicroBatch
from megatron_ladder.errors import UserError
from megatron_ladder.model.language_model import LanguageModel
from tests.helpers.sharded import fill_slices
from tests.helpers.steps import everything
from tests.reference import ReferenceConfig, make_weights, reference_logits
from tests.unit.convert.saved_models import convert, small_config, write_cut_checkpoint
from tests.unit.convert.test_sensitivity import write_tokens
from tests.unit.generate.tiny_model import DELTA, tiny_config, write_checkpoint

MODELS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "two norms": ({"num_key_value_heads": 4, "add_qkv_bias": True, "qk_layernorm": True}, ["--lanes", "2"]),
    "grouped queries": (
        {"num_attention_heads": 8, "head_dim": 4, "num_key_value_heads": 4, "add_mlp_bias": True},
        ["--lanes", "4", "--ladder-layers", "1,2", "--residual-staleness", "3"],
    ),
    "one norm": (
        {"num_key_value_heads": 4, "residual_mode": "parallel"},
        ["--residual-mode", "ladder-parallel", "--lanes", "4"],
    ),
    "windows and sinks": (
        {"num_key_value_heads": 4, "softmax_type": "learnable", "window_size": 5, "window_layers": (0, 2)},
        ["--lanes", "4"],
    ),
    "gated DeltaNet": (
        DELTA | {"num_key_value_heads": 2, "linear_attention_layers": (0, 1), "apply_layernorm_1p": True},
        ["--lanes", "2", "--residual-staleness", "2"],
    ),
    "of the attention only": ({"num_key_value_heads": 4}, ["--residual-mode", "ladder-attention", "--lanes", "4"]),
}
"""Changes of the model, and flags."""


def arranged(folder: Path, config: ModelConfig, weights: Mapping[str, Tensor], *words: str) -> dict[str, Tensor]:
    """Run the command on a model, and return the weights of its result."""
    write_checkpoint(folder / "run", config, weights)
    write_tokens(folder / "data", 200)
    sizes = ("--tokens", 150, "--seq-length", 16, "--batch-size", 3)
    convert("arrange", "--load", folder / "run", "--save", folder / "new", "--data", folder / "data", *sizes, *words)
    assert Checkpoint.open(folder / "new").model().lanes == int(words[words.index("--lanes") + 1])
    return {name: weight for (name, _), weight in everything(folder / "new").items()}


@pytest.mark.parametrize("name", MODELS)
def test_the_model_computes_the_same_without_own_partials(name: str, tmp_path: Path) -> None:
    changes, words = MODELS[name]
    config = tiny_config(**changes)
    reference = ReferenceConfig.like(config)
    weights = make_weights(reference, 3)
    found = arranged(tmp_path, config, weights, *words)
    assert any(not torch.equal(found[name], weights[name]) for name in weights)
    tokens = torch.arange(24).view(2, 12) * 2
    expected, others = (
        reference_logits({name: one.double() for name, one in these.items()}, reference, tokens)
        for these in (weights, found)
    )
    assert (expected - others).abs().max() < 1e-12


def test_moments_follow_their_weights(tmp_path: Path) -> None:
    """The checkpoint is cut at any element."""
    config = small_config(num_key_value_heads=4)
    weights = write_cut_checkpoint(tmp_path / "run", config, {})
    write_tokens(tmp_path / "data", 200)
    words = ("--load", tmp_path / "run", "--save", tmp_path / "new", "--data", tmp_path / "data", "--lanes", 2)
    convert("arrange", *words, "--seq-length", 16, "--verify")
    found = everything(tmp_path / "new")
    assert any(not torch.equal(found[name, "weight"], weights[name]) for name in weights)
    for name in weights:
        weight, first, second = (found[name, kind] for kind in ("weight", "exp_avg", "exp_avg_sq"))
        assert torch.equal(first, weight * 0.1) and torch.equal(second, weight.square()), name


def planted_weights(config: ModelConfig, groups: int, seed: int) -> dict[str, Tensor]:
    """Return weights whose units form groups that read and write separate parts of the stream, in random order."""
    weights = make_weights(ReferenceConfig.like(config), seed)
    generator = torch.Generator().manual_seed(seed)
    part = torch.arange(config.hidden_size) * groups // config.hidden_size
    for layer in range(config.num_layers):
        for branch, units, inputs, output in (
            ("attention", config.num_key_value_heads, ("q_proj", "k_proj", "v_proj"), "o_proj"),
            ("mlp", config.ffn_hidden_size, ("gate_proj", "up_proj"), "down_proj"),
        ):
            group = torch.arange(units)[torch.randperm(units, generator=generator)] * groups // units
            for name in (*inputs, output):
                weight = weights[f"layers.{layer}.{branch}.{name}.weight"]
                rows = weight.t() if name == output else weight
                inside = group.repeat_interleave(len(rows) // units)[:, None] == part
                rows.mul_(inside)
    return weights


def groups_of_lanes(rows: Tensor, lanes: int, groups: int) -> list[set[int]]:
    """Return the groups whose parts of the stream each lane's rows [units x size, h] read or write."""
    used = rows.unflatten(0, (lanes, -1)).abs().sum(1).unflatten(1, (groups, -1)).sum(-1)
    return [{group for group in range(groups) if one[group] > 0} for one in used]


def test_planted_groups_are_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tiny_config(num_key_value_heads=4, num_layers=2)
    weights = planted_weights(config, 4, seed=5)
    found = arranged(tmp_path, config, weights, "--lanes", "4", "--residual-staleness", "2")
    assert "100.0% after" in capsys.readouterr().out
    lanes = [
        groups_of_lanes(weight.t() if name.split(".")[-2] in ("o_proj", "down_proj") else weight, 4, 4)
        for name, weight in found.items()
        if "_proj" in name
    ]
    assert len({str(one) for one in lanes}) == 1 and sorted(map(sorted, lanes[0])) == [[0], [1], [2], [3]]


@pytest.mark.parametrize(
    ("changes", "words", "message"),
    [
        ({}, {"lanes": 1}, "--lanes 1: give the number of lanes to arrange, at least 2"),
        ({}, {"lanes": 2, "ladder_layers": "none"}, "--ladder-layers: nothing reads while an output is in flight"),
        ({"num_key_value_heads": 2}, {"lanes": 4}, "--lanes 4: the model has 2 key-value heads"),
        (
            DELTA | {"num_key_value_heads": 4},
            {"lanes": 4},
            "--lanes 4: the model has 2 key heads of gated DeltaNet, and lanes that share one cannot be arranged",
        ),
        ({"residual_mode": "ladder", "ladder_layers": (0,), "lanes": 2}, {"lanes": 2}, "--load run: the model depends"),
    ],
)
def test_errors_name_the_flag(changes: dict[str, Any], words: dict[str, Any], message: str) -> None:
    options = ArrangeOptions(load=Path("run"), save=Path("new"), data=Path("data"), **words)
    with pytest.raises(UserError, match=f"^{message}"):
        arrangement._arranged_model(tiny_config(**changes), options)


@pytest.mark.parametrize("offset", [0.0, 1.0])
@torch.inference_mode()
def test_effects_are_those_of_the_formula(tmp_path: Path, offset: float) -> None:
    """Effects of each neuron of layer 0 on the attention of layer 1, from activations, one unit at a time."""
    config = tiny_config(num_key_value_heads=4, num_layers=2, apply_layernorm_1p=offset == 1)
    weights = make_weights(ReferenceConfig.like(config), 3)
    model = LanguageModel(config, ProcessMesh.single())
    fill_slices(model, weights)
    recorded: dict[str, Tensor] = {}
    steps = model.stack.sub_blocks()
    hooks = [
        steps[1].body.down_proj.register_forward_pre_hook(  # type: ignore[attr-defined]
            lambda _, args: recorded.__setitem__("neurons", args[0].flatten(0, 1))
        ),
        steps[2].norm.register_forward_hook(
            lambda _, args, result: recorded.__setitem__("stream", result[0].flatten(0, 1))
        ),
    ]
    rows = torch.arange(64).view(4, 16)
    batches = [MicroBatch(rows, rows)]
    options = ArrangeOptions(load=tmp_path, save=tmp_path, data=tmp_path, lanes=2, residual_mode="ladder")
    branches = arrangement._measure(model, arrangement._arranged_model(config, options), batches)
    for hook in hooks:
        hook.remove()
    g = offset + weights["layers.1.attention_norm.weight"]
    into = torch.cat([weights[f"layers.1.attention.{which}_proj.weight"] for which in "qkv"])
    inverse = 1 / recorded["stream"].pow(2).mean(-1)
    # Both attention's lanes together.
    found = branches[1].effects_on(2).sum(1)
    for unit in (0, 7, 47):
        written = recorded["neurons"][:, unit, None] * weights["layers.0.mlp.down_proj.weight"][:, unit]
        read = (written * g) @ into.t()
        expected = read.pow(2).sum() * inverse.sum()
        torch.testing.assert_close(found[unit], expected, rtol=1e-4, atol=0)
    # And from the other side: the sum over all neurons of the effects on the heads is the same.
    torch.testing.assert_close(branches[2].effects_of(2).sum(), found.sum(), rtol=1e-4, atol=0)

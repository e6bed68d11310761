"""Drafting heads in Hugging Face directories: in and out bit by bit, left out, and exported with late layers."""

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from megatron_ladder.checkpoint.format import Checkpoint
from megatron_ladder.checkpoint.hf_directory import open_hf_directory
from megatron_ladder.checkpoint.loading import load_weights
from megatron_ladder.cli.generate import main as generate
from megatron_ladder.comm.mesh import ProcessMesh
from megatron_ladder.generate.loading import open_model
from megatron_ladder.model.language_model import LanguageModel
from megatron_ladder.model.mtp import shift_tokens
from tests.helpers.runs import errors_of
from tests.unit.convert.saved_models import (
    assert_equal_bits,
    config_of,
    convert,
    export,
    save_model,
    small_config,
    tensors_of,
)

QWEN = {"enorm": "mtp.pre_fc_norm_embedding", "hnorm": "mtp.pre_fc_norm_hidden", "eh_proj": "mtp.fc"}
NEXTN = {name: f"model.layers.4.{name}" for name in ("enorm", "hnorm", "eh_proj")}
KINDS: dict[str, tuple[str, dict[str, str], str, dict[str, Any]]] = {
    "qwen3_5_text": ("mtp.layers.0.", QWEN | {"norm": "mtp.norm"}, "mtp_num_hidden_layers", {}),
    "qwen3_5_moe_text": (
        "mtp.layers.0.",
        QWEN | {"norm": "mtp.norm"},
        "mtp_num_hidden_layers",
        {"save_original_format": False},
    ),
    "qwen3_next": ("mtp.layers.0.", QWEN | {"norm": "mtp.norm"}, "num_nextn_predict_layers", {}),
    "deepseek_v3": (
        "model.layers.4.",
        NEXTN | {"norm": "model.layers.4.shared_head.norm"},
        "num_nextn_predict_layers",
        {},
    ),
    "glm4_moe": (
        "model.layers.4.",
        NEXTN | {"norm": "model.layers.4.shared_head.norm"},
        "num_nextn_predict_layers",
        {},
    ),
    "hy_v3": ("model.layers.4.", NEXTN | {"norm": "model.layers.4.final_layernorm"}, "num_nextn_predict_layers", {}),
}
"""Name of the layer, names of the other parts, key of config.json, and how to save the model."""


def edit_config(hf: Path, **changes: Any) -> None:
    (hf / "config.json").write_text(json.dumps(config_of(hf) | changes))


def save_with_head(hf: Path, kind: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Save a model of four layers with a head like its last one with softmax attention; return the tensors of the
    model, and of the head."""
    layer, parts, key, options = KINDS[kind]
    save_model(hf, kind, torch.bfloat16, **options)
    weights = tensors_of(hf)
    generator = torch.Generator().manual_seed(2)

    def random(shape: Any) -> Tensor:
        return (0.3 * torch.randn(shape, generator=generator)).bfloat16()

    prefix = max(name for name in weights if ".self_attn." in name).partition("self_attn.")[0]
    # States of routers are in fp32.
    head = {
        name.replace(prefix, layer): random(one.shape).to(one.dtype)
        for name, one in weights.items()
        if name.startswith(prefix)
    }
    hidden = weights["model.norm.weight"].shape[0]
    head |= {
        f"{name}.weight": random((hidden, 2 * hidden) if part == "eh_proj" else hidden) for part, name in parts.items()
    }
    if parts["norm"].endswith("shared_head.norm"):
        head[f"{layer}embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
        head[f"{layer}shared_head.head.weight"] = weights["lm_head.weight"].clone()
    save_file(weights | head, hf / "model.safetensors")
    edit_config(hf, **{key: 1})
    return weights, head


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_comes_in_and_out_bit_by_bit(tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    hf, ours, back, again, bare = (tmp_path / name for name in ("hf", "ours", "back", "again", "bare"))
    weights, head = save_with_head(hf, kind)
    key = KINDS[kind][2]
    convert("import", "--hf", hf, "--save", ours, "--verify")
    assert "dropped" not in capsys.readouterr().out and Checkpoint.open(ours).model().mtp_num_layers == 1
    checkpoint = Checkpoint.open(ours)
    for part, name in KINDS[kind][1].items():
        stored = checkpoint.stored("weight")[f"layers.4.{'head_norm' if part == 'norm' else part}.weight"]
        assert list(stored.shape) == list(head[f"{name}.weight"].shape)
    convert("export", "--load", ours, "--hf", back, "--verify")
    assert config_of(back)["model_type"] == kind and config_of(back)[key] == 1
    assert_equal_bits(tensors_of(back), weights | head)
    convert("import", "--hf", back, "--save", again)
    first, second = ({path.name: path.read_bytes() for path in one.rglob("*.safetensors")} for one in (ours, again))
    assert first == second
    convert("inspect", hf)
    assert "drafting head: one layer" in capsys.readouterr().out
    # Without the head.
    convert("export", "--load", ours, "--hf", bare, "--drop-mtp")
    assert_equal_bits(tensors_of(bare), weights)
    assert not config_of(bare).get(key)
    convert("import", "--hf", hf, "--save", tmp_path / "plain", "--drop-mtp")
    assert f"{len(head)} tensors of layers that predict further tokens" in capsys.readouterr().out
    assert Checkpoint.open(tmp_path / "plain").model() == open_hf_directory(bare).model == open_hf_directory(hf).model
    convert("export", "--load", tmp_path / "plain", "--hf", tmp_path / "plain-hf")
    assert_equal_bits(tensors_of(tmp_path / "plain-hf"), weights)


@pytest.mark.parametrize("kind", ["qwen3_5_text", "glm4_moe"])
def test_a_late_model_is_exported_with_its_head(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder
) -> None:
    """Our code ignores the head, as a type of transformers does."""
    hf, ours, back, again = (tmp_path / name for name in ("hf", "ours", "back", "again"))
    weights, head = save_with_head(hf, kind)
    convert("import", "--hf", hf, "--save", ours, "--ladder-layers", "2,3")
    convert("export", "--load", ours, "--hf", back, "--verify")
    assert "verified: the logits" in capsys.readouterr().out
    assert config_of(back)["model_type"] == "megatron_ladder" and config_of(back)["mtp_num_hidden_layers"] == 1
    found = tensors_of(back)
    layer, parts, *_ = KINDS[kind]
    assert found["mtp.fc.weight"].equal(head[f"{parts['eh_proj']}.weight"])
    assert found["mtp.layers.0.input_layernorm.weight"].equal(head[f"{layer}input_layernorm.weight"])
    _, report = AutoModelForCausalLM.from_pretrained(back, trust_remote_code=True, output_loading_info=True)
    assert not any(report[name] for name in ("unexpected_keys", "missing_keys"))
    convert("import", "--hf", back, "--save", again)
    first, second = ({path.name: path.read_bytes() for path in one.rglob("*.safetensors")} for one in (ours, again))
    assert first == second
    convert("import", "--hf", back, "--save", tmp_path / "plain", "--drop-mtp")
    without = Checkpoint.open(ours).model().without_mtp
    assert open_model(back, None, None).config == Checkpoint.open(tmp_path / "plain").model() == without


@pytest.mark.parametrize("kind", ["deepseek_v3", "qwen3_next"])
def test_a_head_that_config_json_does_not_mention(tmp_path: Path, kind: str) -> None:
    hf = tmp_path / "hf"
    save_with_head(hf, kind)
    config = config_of(hf)
    del config[KINDS[kind][2]]
    (hf / "config.json").write_text(json.dumps(config))
    convert("import", "--hf", hf, "--save", tmp_path / "ours")
    convert("import", "--hf", hf, "--save", tmp_path / "plain", "--drop-mtp")
    model = Checkpoint.open(tmp_path / "ours").model()
    assert model.mtp_num_layers == 1
    assert open_model(hf, None, None).config == Checkpoint.open(tmp_path / "plain").model() == model.without_mtp


def test_every_model_with_a_head_is_exported_if_only_as_our_own_type(tmp_path: Path) -> None:
    """The type of a plain Llama has no head."""
    config = small_config(mtp_num_layers=1, mtp_before_final_norm=True)
    hf, weights = export(tmp_path, config, "--verify")
    assert config_of(hf)["model_type"] == "megatron_ladder"
    convert("import", "--hf", hf, "--save", tmp_path / "again")
    assert Checkpoint.open(tmp_path / "again").model() == config
    assert tensors_of(hf)["mtp.norm.weight"].equal(weights[f"layers.{config.num_layers}.head_norm.weight"])
    convert("export", "--load", tmp_path / "run", "--hf", tmp_path / "bare", "--drop-mtp")
    assert config_of(tmp_path / "bare")["model_type"] == "llama"


def test_a_head_that_reads_before_the_final_norm_is_exported_as_our_own_type(tmp_path: Path) -> None:
    save_with_head(tmp_path / "source", "glm4_moe")
    config = replace(open_hf_directory(tmp_path / "source", keeps_mtp=True).model, mtp_before_final_norm=True)
    hf, _ = export(tmp_path, config)
    assert config_of(hf)["model_type"] == "megatron_ladder"
    assert open_hf_directory(hf, keeps_mtp=True).model == config
    convert("export", "--load", tmp_path / "run", "--hf", tmp_path / "bare", "--drop-mtp")
    assert config_of(tmp_path / "bare")["model_type"] == "glm4_moe"


def test_files_that_disagree_about_a_head(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hf = tmp_path / "hf"
    weights, head = save_with_head(hf, "glm4_moe")
    head["model.layers.4.shared_head.head.weight"][0, 0] += 1
    save_file(weights | head, hf / "model.safetensors")
    (error,) = errors_of(convert, "import", "--hf", hf, "--save", tmp_path / "a")
    assert "model.layers.4.shared_head.head.weight differs from lm_head.weight, but a drafting head shares" in error
    assert error.endswith("leave the head out with --drop-mtp")
    (error,) = errors_of(generate, ["--model", str(hf), "--draft", "mtp", "--tokens", "1"])
    assert error.endswith("a drafting head shares the matrix of the model: leave --draft out")
    del head["model.layers.4.enorm.weight"], head["model.layers.4.shared_head.head.weight"]
    save_file(weights | head, hf / "model.safetensors")
    (error,) = errors_of(convert, "import", "--hf", hf, "--save", tmp_path / "b")
    assert "model.layers.4.enorm.weight: is missing" in error
    save_file(weights, hf / "model.safetensors")
    convert("import", "--hf", hf, "--save", tmp_path / "c")
    assert "num_nextn_predict_layers announces a drafting head, which the files do not hold" in capsys.readouterr().out


def logits_of_transformers(hf: Path, kind: str, head: dict[str, Tensor], tokens: Tensor, before_norm: bool) -> Tensor:
    """Map tokens [b, s] to the logits [b, s - 1, V] of a head, whose layer is that of a model of one layer."""
    layer, parts, *_ = KINDS[kind]
    family = type(AutoModelForCausalLM.from_pretrained(hf, dtype=torch.float32))
    whole = family.from_pretrained(hf, dtype=torch.float32, experts_implementation="eager")
    config = copy.deepcopy(whole.config)
    config.num_hidden_layers = 1
    config.layer_types, config.mlp_layer_types, config.first_k_dense_replace = ["full_attention"], ["sparse"], 0
    of_layer = {name.replace(layer, "model.layers.0."): one for name, one in head.items() if name.startswith(layer)}
    of_layer |= {
        name: one for name, one in tensors_of(hf).items() if name in ("model.embed_tokens.weight", "lm_head.weight")
    }
    of_layer["model.norm.weight"] = head[f"{parts['norm']}.weight"]
    one = family.from_pretrained(
        None, config=config, state_dict=of_layer, dtype=torch.float32, experts_implementation="eager"
    )
    norms = {}
    for part in ("enorm", "hnorm"):
        norms[part] = copy.deepcopy(whole.model.norm)
        norms[part].weight.data.copy_(head[f"{parts[part]}.weight"])
    streams: list[Tensor] = []
    whole.model.norm.register_forward_pre_hook(lambda _, inputs: streams.append(inputs[0]))
    normed = whole.model(tokens).last_hidden_state
    stream = (streams[0] if before_norm else normed)[:, :-1]
    both = torch.cat((norms["enorm"](whole.model.embed_tokens(tokens[:, 1:])), norms["hnorm"](stream)), dim=-1)
    logits: Tensor = one(inputs_embeds=both @ head[f"{parts['eh_proj']}.weight"].float().T).logits
    return logits


@pytest.mark.parametrize("before_norm", [False, True])
@pytest.mark.parametrize("kind", ["qwen3_5_text", "qwen3_5_moe_text", "deepseek_v3", "glm4_moe"])
@torch.no_grad()
def test_the_logits_of_an_imported_head_are_those_of_transformers_layers(
    tmp_path: Path, kind: str, before_norm: bool
) -> None:
    """transformers computes no heads, so that its layers are put together as in a server."""
    hf, ours = tmp_path / "hf", tmp_path / "ours"
    _, head = save_with_head(hf, kind)
    convert("import", "--hf", hf, "--save", ours)
    checkpoint = Checkpoint.open(ours)
    model = LanguageModel(replace(checkpoint.model(), mtp_before_final_norm=before_norm), ProcessMesh.single())
    load_weights(model, checkpoint)
    tokens = torch.randint(0, 301, (2, 12), generator=torch.Generator().manual_seed(3))
    context = model.training_context(tokens)
    stream = model.hidden_states(tokens, context)
    assert model.mtp is not None
    read = stream if before_norm else model.final_norm(stream)
    normed, _ = model.mtp(model.embedding(shift_tokens(tokens)), read, context)
    found = model.head.logits(normed)[:-1, :, : model.config.vocab_size].transpose(0, 1)
    same, other = (logits_of_transformers(hf, kind, head, tokens, which) for which in (before_norm, not before_norm))
    assert (found - same).abs().max() <= 1e-5 * same.abs().max()
    assert (found - other).abs().max() > 1e-2 * same.abs().max()

"""Results of conversions: equal bits and logits, whatever the layout, the element type and the number of files."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from megatron_ladder.blueprint.boxes import Box
from megatron_ladder.checkpoint.format import Checkpoint
from megatron_ladder.checkpoint.hf_directory import hf_name
from megatron_ladder.errors import UserError
from tests.helpers.steps import everything
from tests.unit.convert.hand_made import write_directory
from tests.unit.convert.hf_models import GLM
from tests.unit.convert.saved_models import (
    assert_equal_bits,
    convert,
    our_logits,
    save_model,
    small_config,
    tensors_of,
    write_cut_checkpoint,
)
from tests.unit.convert.test_remote_code import LLAMA31


@pytest.mark.parametrize(
    ("kind", "tied"),
    [("llama", False), ("llama", True), ("qwen3_moe", False), ("mixtral", True), ("glm4_moe", True)],
)
def test_round_trip_is_bitwise(tmp_path: Path, kind: str, tied: bool) -> None:
    hf, ours, back = tmp_path / "hf", tmp_path / "ours", tmp_path / "back"
    save_model(hf, kind, dtype=torch.bfloat16, tie_word_embeddings=tied, max_shard_size="60KB")
    assert len(list(hf.glob("*.safetensors"))) > 1
    convert("import", "--hf", hf, "--save", ours, "--verify")
    Checkpoint.open(ours).verify()
    convert("export", "--load", ours, "--hf", back, "--max-shard-size", "100KB", "--verify")
    assert_equal_bits(tensors_of(hf), tensors_of(back))
    index = json.loads((back / "model.safetensors.index.json").read_text())
    shards = {path.name: load_file(path) for path in back.glob("*.safetensors")}
    assert {name: file for file, held in shards.items() for name in held} == index["weight_map"]
    sizes = {file: sum(tensor.nbytes for tensor in held.values()) for file, held in shards.items()}
    assert max(sizes.values()) <= 100_000 and sum(sizes.values()) == index["metadata"]["total_size"]


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "glm4_moe", "hy_v3", "dots1", "solar_open"])
def test_experts_that_are_stored_as_stacks_are_imported(tmp_path: Path, kind: str) -> None:
    save_model(tmp_path / "hf", kind)
    save_model(tmp_path / "stacks", kind, save_original_format=False)
    convert("import", "--hf", tmp_path / "stacks", "--save", tmp_path / "ours")
    convert("export", "--load", tmp_path / "ours", "--hf", tmp_path / "back")
    assert len(tensors_of(tmp_path / "stacks")) < len(tensors_of(tmp_path / "hf"))
    assert_equal_bits(tensors_of(tmp_path / "hf"), tensors_of(tmp_path / "back"))


def test_layers_that_predict_further_tokens_are_dropped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hf, ours, config = tmp_path / "hf", tmp_path / "ours", tmp_path / "hf" / "config.json"
    save_model(hf, "glm4_moe", num_nextn_predict_layers=1)
    weights = tensors_of(hf)
    more = {name.replace(".3.", ".4.", 1): weight.clone() for name, weight in weights.items() if ".layers.3." in name}
    save_file(weights | more | {"model.layers.4.eh_proj.weight": torch.zeros(2, 2)}, hf / "model.safetensors")
    convert("import", "--hf", hf, "--save", ours, "--drop-mtp")
    assert f"{len(more) + 1} tensors of layers that predict further tokens" in capsys.readouterr().out
    convert("export", "--load", ours, "--hf", tmp_path / "back")
    assert_equal_bits(weights, tensors_of(tmp_path / "back"))
    config.write_text(json.dumps(json.loads(config.read_text()) | {"num_nextn_predict_layers": 0}))
    with pytest.raises(UserError, match="model.layers.4.eh_proj.weight: unexpected tensor"):
        convert("import", "--hf", hf, "--save", tmp_path / "new")


@pytest.mark.parametrize("flags", [[], ["--dtype", "bf16"]])
def test_the_bias_of_the_choice_of_experts_is_never_rounded(tmp_path: Path, flags: list[str]) -> None:
    config = small_config(**GLM, residual_mode="farskip", ladder_layers=(1,))
    weights = write_cut_checkpoint(tmp_path / "run", config, {"bf16": True})
    convert("export", "--load", tmp_path / "run", "--hf", tmp_path / "hf", *flags, "--verify")
    found = tensors_of(tmp_path / "hf")
    bias, router = (found[f"model.layers.1.mlp.gate.{name}"] for name in ("e_score_correction_bias", "weight"))
    assert router.dtype == torch.bfloat16 and bias.equal(weights["layers.1.router.expert_bias"])
    module = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", trust_remote_code=True, dtype=torch.bfloat16)
    assert module.model.layers[1].mlp.gate.e_score_correction_bias.equal(bias) and module.dtype == torch.bfloat16


LLAMA3 = LLAMA31["rope_scaling"] | {"rope_theta": 5e5, "original_max_position_embeddings": 32}


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("llama", {"rope_parameters": LLAMA3}),
        ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 16}),
        ("mistral", {}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen3", {}),
        ("qwen3_moe", {"norm_topk_prob": False}),
        ("mixtral", {}),
        ("mixtral", {"num_experts_per_tok": 1}),
        ("glm4_moe", {}),
    ],
)
def test_logits_match_transformers(tmp_path: Path, kind: str, changes: dict[str, Any]) -> None:
    hf, ours = tmp_path / "hf", tmp_path / "ours"
    reference = save_model(hf, kind, **changes)
    convert("import", "--hf", hf, "--save", ours)
    tokens = torch.randint(0, 301, (2, 48))
    with torch.no_grad():
        expected = reference(tokens).logits
    assert (our_logits(ours, tokens) - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_verify_compares_logits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory with intact tensors whose config.json has another wiring."""
    from megatron_ladder.convert import conversions

    save_model(tmp_path / "hf")
    convert("import", "--hf", tmp_path / "hf", "--save", tmp_path / "ours", "--ladder-layers", "2")
    real = conversions.hf_config
    monkeypatch.setattr(conversions, "hf_config", lambda model, **ids: real(model, **ids) | {"ladder_layers": 1})
    with pytest.raises(RuntimeError, match="logits of transformers and ours differ"):
        convert("export", "--load", tmp_path / "ours", "--hf", tmp_path / "back", "--verify")
    assert not (tmp_path / "back").exists()


def test_verify_says_what_was_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The new wiring of an import has no counterpart, so its logits are not verified."""
    hf, plain, ladder = (tmp_path / name for name in ("hf", "plain", "ladder"))
    save_model(hf)
    convert("import", "--hf", hf, "--save", plain, "--verify")
    assert "logits of the source in transformers and of the checkpoint, on 64 random" in capsys.readouterr().out
    convert("import", "--hf", hf, "--save", ladder, "--ladder-layers", "1", "--verify")
    compared = (
        "the checkpoint, in the wiring of the source, standard (those of ladder in layer 3 (of 4) were not compared)"
    )
    assert f"logits of the source in transformers and of {compared}, on 64 random" in capsys.readouterr().out
    convert("export", "--load", ladder, "--hf", tmp_path / "back", "--dtype", "bf16", "--verify")
    printed = capsys.readouterr().out
    assert "all 39 tensors are bitwise equal to their sources, cast to bfloat16\n" in printed
    assert "of the exported model in transformers, both with weights in bfloat16, on 64 random" in printed
    convert("reshape", "--load", plain, "--save", tmp_path / "late", "--ladder-layers", "1", "--verify")
    printed = capsys.readouterr().out
    assert "all 39 tensors are bitwise equal to their sources\n" in printed and "logits" not in printed


@pytest.mark.parametrize("kind", ["llama", "mixtral", "glm4_moe"])
def test_export_and_inspect_count_the_same_tensors(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    save_model(tmp_path / "hf", kind)
    convert("import", "--hf", tmp_path / "hf", "--save", tmp_path / "ours")
    (imported,) = re.findall(r"weights_rank_00000.safetensors: .*, (\d+) tensors\n", capsys.readouterr().out)
    convert("inspect", tmp_path / "ours")
    stacked = " (one for all experts)" * (kind != "llama")
    assert f"weight: {imported} tensors{stacked} in {imported} boxes" in capsys.readouterr().out
    convert("export", "--load", tmp_path / "ours", "--hf", tmp_path / "back")
    stored = len(tensors_of(tmp_path / "back"))
    assert f", {stored} tensors\n" in capsys.readouterr().out
    convert("inspect", tmp_path / "back")
    assert f"weights: {stored} tensors, float32" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("run", "flags", "dtype"),
    [({"bf16": True}, [], "bfloat16"), ({}, [], "float32"), ({"bf16": True}, ["--dtype", "fp16"], "float16")],
)
def test_export_of_a_checkpoint_written_with_zero(
    tmp_path: Path, run: dict[str, Any], flags: list[str], dtype: str
) -> None:
    weights = write_cut_checkpoint(tmp_path / "run", small_config(), run)
    convert("export", "--load", tmp_path / "run", "--hf", tmp_path / "hf", *flags)
    found = tensors_of(tmp_path / "hf")
    assert_equal_bits(found, {hf_name(name): weight.to(getattr(torch, dtype)) for name, weight in weights.items()})
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["dtype"] == dtype
    assert (tmp_path / "hf" / "merges.txt").read_text() == "{}"


@pytest.mark.parametrize("value", [70000.0, float("inf"), float("nan")])
def test_numbers_that_do_not_fit_are_rejected(value: float, tmp_path: Path) -> None:
    hf, ours, new = tmp_path / "hf", tmp_path / "ours", tmp_path / "new"
    save_model(hf)
    weights = load_file(hf / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][3, 7] = value
    save_file(weights, hf / "model.safetensors")
    words, message = ["import", "--hf", hf, "--save", new], "contains NaN or infinity"
    if value == 70000.0:
        convert("import", "--hf", hf, "--save", ours)
        words = ["export", "--load", ours, "--hf", new, "--dtype", "fp16"]
        message = r"the value 7e\+04 does not fit in float16; choose another --dtype"
    with pytest.raises(UserError, match=f"up_proj.weight: {message}"):
        convert(*words)
    assert not list(tmp_path.glob("new*"))


@pytest.mark.parametrize(
    ("optimizer", "changes"), [("adamw", {"qk_layernorm": True}), ("muon", {}), ("adamw", GLM), ("muon", GLM)]
)
def test_reshape_keeps_every_number(tmp_path: Path, optimizer: str, changes: dict[str, Any]) -> None:
    """The checkpoint is cut at any element by three ranks; the result has whole tensors."""
    config = small_config(residual_mode="ladder", ladder_layers=(2,), **changes)
    write_cut_checkpoint(tmp_path / "run", config, {}, optimizer)
    convert("reshape", "--load", tmp_path / "run", "--save", tmp_path / "other", "--verify")
    before, after = Checkpoint.open(tmp_path / "run"), Checkpoint.open(tmp_path / "other")
    after.verify()
    assert {**after.manifest, "files": 0} == {**before.manifest, "files": 0}
    one, other = everything(tmp_path / "run"), everything(tmp_path / "other")
    assert one.keys() == other.keys() and all(one[key].equal(other[key]) for key in one)
    generator = torch.empty(9, dtype=torch.uint8)
    after.read("rng.rank_00001.cpu", "rng", Box.whole((9,)), generator)
    assert generator.equal(torch.arange(9))
    names = {f"{group}_rank_00000.safetensors" for group in ("weights", "optimizer", "rng")}
    assert {file["name"] for file in after.manifest["files"]} == names | {"merges.txt"}


def test_dry_run_writes_nothing_and_reports_the_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = write_directory(tmp_path / "hf")
    convert("import", "--hf", directory, "--save", tmp_path / "ours", "--dry-run", "--ladder-layers", "1")
    assert list(tmp_path.iterdir()) == [directory]
    printed = capsys.readouterr().out
    assert "the wiring of the source, standard, is overridden: ladder in layer 1 (of 2)" in printed
    assert "weights_rank_00000.safetensors: 2.51 kB, 21 tensors\n2.51 kB in 1 file -> " in printed
    assert "nothing was written" in printed

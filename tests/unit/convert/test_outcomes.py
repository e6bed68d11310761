"""Results of conversions: complete or nothing, every byte read once, unchanged by interruptions."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_ladder.blueprint.tensors import model_tensors
from megatron_ladder.checkpoint.format import Checkpoint
from megatron_ladder.checkpoint.hf_directory import hf_name
from megatron_ladder.checkpoint.publish import write_manifest
from megatron_ladder.convert import copying
from megatron_ladder.convert.options import shard_bytes
from megatron_ladder.convert.training_checkpoint import _rank_slices
from megatron_ladder.errors import UserError
from tests.reference import ReferenceConfig, weight_shapes
from tests.unit.convert.hand_made import CONFIG, SHAPES, entries, safetensors, write_directory, write_sharded
from tests.unit.convert.saved_models import (
    assert_equal_bits,
    convert,
    save_model,
    small_config,
    tensors_of,
    write_cut_checkpoint,
)

ROOT = Path(__file__).resolve().parents[3]
CONFIGS: list[dict[str, Any]] = [
    {},
    {"tie_embeddings": True, "qk_layernorm": True, "add_qkv_bias": True, "add_attention_output_bias": True},
    {"residual_mode": "ladder-parallel", "ladder_layers": (1, 2), "add_mlp_bias": True},
    {"residual_mode": "ladder-attention", "ladder_layers": (0, 2)},
    {"residual_mode": "desync", "desync_interval": 4, "desync_tp": 4},
]


@pytest.mark.parametrize("changes", CONFIGS, ids=lambda changes: changes.get("residual_mode", "standard"))
def test_tensors_of_a_model_match_the_reference(changes: dict[str, Any]) -> None:
    config = small_config(**changes)
    found = [(tensor.name, tensor.shape) for tensor in model_tensors(config)]
    assert found == list(weight_shapes(ReferenceConfig.like(config)).items())


@pytest.mark.parametrize("changes", CONFIGS, ids=lambda changes: changes.get("residual_mode", "standard"))
def test_slices_tile_every_tensor(changes: dict[str, Any]) -> None:
    for tensor in model_tensors(small_config(**changes)):
        held = np.zeros(tensor.shape, int)
        ranks = [rank for rank, box in _rank_slices(tensor, 4) if np.add.at(held, box.slices(), 1) is None]
        assert np.all(held == 1) and ranks == sorted(set(ranks)) and max(ranks) < 4, tensor.name


@pytest.mark.parametrize("source", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("target", ["float32", "bfloat16", "float16"])
def test_casts_match_torch(source: str, target: str) -> None:
    special = [0.0, -0.0, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-11, 1 + 3 * 2**-11, 1e-40, -6e-8, 60000.0, 1e-45]
    values = torch.cat([torch.tensor([*special, float("inf"), float("-inf"), float("nan")]), torch.randn(5000)])
    # A NaN with all bits set: rounded like a number, it would become zero.
    values = torch.cat([values, torch.tensor([0x7FFFFFFF], dtype=torch.int32).view(torch.float32)])
    tensor = values.to(getattr(torch, source))
    raw = tensor.view(torch.uint8).numpy().view(copying._RAW[tensor.element_size()])
    expected = tensor.to(getattr(torch, target))
    found = torch.from_numpy(copying._cast(raw, source, target).view(np.uint8).copy()).view(getattr(torch, target))
    assert torch.equal(found.nan_to_num(7.0).view(torch.uint8), expected.nan_to_num(7.0).view(torch.uint8))
    assert torch.equal(found.isnan(), expected.isnan())


def test_numbers_that_do_not_fit_are_rejected() -> None:
    with pytest.raises(OverflowError, match="7e\\+04"):
        copying._cast(np.array([70000.0], np.float32).view(np.uint32), "float32", "float16")


@pytest.mark.parametrize(("text", "size"), [("5GB", 5 * 10**9), ("500 mb", 5 * 10**8), ("2GiB", 2**31), ("77", 77)])
def test_sizes_of_shards(text: str, size: int) -> None:
    assert shard_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GB", "5 TB", "0", "-1MB", "infGB"])
def test_invalid_sizes_of_shards(text: str) -> None:
    with pytest.raises(ValueError):
        shard_bytes(text)


@pytest.mark.parametrize(
    ("run", "flags", "dtype"),
    [({"bf16": True}, [], "bfloat16"), ({}, [], "float32"), ({"bf16": True}, ["--dtype", "fp16"], "float16")],
)
def test_export_of_a_checkpoint_written_with_zero(
    tmp_path: Path, run: dict[str, Any], flags: list[str], dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copying, "_ROWS_BYTES", 1000)
    config = small_config()
    weights = write_cut_checkpoint(tmp_path / "run", config, run)
    convert("export", "--load", tmp_path / "run", "--hf", tmp_path / "hf", "--verify", *flags)
    found = tensors_of(tmp_path / "hf")
    assert_equal_bits(found, {hf_name(name): weight.to(getattr(torch, dtype)) for name, weight in weights.items()})
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["dtype"] == dtype
    assert (tmp_path / "hf" / "tokenizer.json").read_text() == "{}"


@pytest.mark.parametrize(("layout", "optimizer"), [((1, 1), None), ((2, 3), "muon"), ((4, 2), "adamw")], ids=str)
def test_reshape_keeps_every_number(
    tmp_path: Path, layout: tuple[int, int], optimizer: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copying, "_ROWS_BYTES", 1000)
    config = small_config(residual_mode="ladder", ladder_layers=(2,), qk_layernorm=True)
    write_cut_checkpoint(tmp_path / "run", config, {}, optimizer)
    words = "--tensor-model-parallel-size", layout[0], "--pipeline-model-parallel-size", layout[1]
    convert("reshape", "--load", tmp_path / "run", "--save", tmp_path / "other", *words, "--verify")
    before, after = Checkpoint.open(tmp_path / "run"), Checkpoint.open(tmp_path / "other")
    after.verify()
    assert {**after.manifest, "files": 0} == {**before.manifest, "files": 0}
    for kind in ("weight", "exp_avg", "exp_avg_sq", "rng"):
        assert after.stored(kind).keys() == before.stored(kind).keys()
        for name, stored in after.stored(kind).items():
            shape, dtype, values = stored.global_shape, getattr(torch, stored.dtype), []
            assert (shape, stored.dtype) == (before.stored(kind)[name].global_shape, before.stored(kind)[name].dtype)
            for checkpoint in (before, after):
                values.append(torch.empty(shape, dtype=dtype))
                checkpoint.read(name, kind, (0,) * len(shape), shape, values[-1])
            assert torch.equal(*values), name
    ranks = layout[0] * layout[1]
    names = {file["name"] for file in after.manifest["files"]}
    groups = ("weights", "optimizer")
    assert {f"{group}_rank_{rank:05d}.safetensors" for group in groups for rank in range(ranks)} <= names
    assert "tokenizer.json" in names and len(names) == 2 * ranks + 2


def test_reshape_can_change_only_the_wiring(tmp_path: Path) -> None:
    config = small_config()
    weights = write_cut_checkpoint(tmp_path / "run", config, {})
    convert("reshape", "--load", tmp_path / "run", "--save", tmp_path / "hybrid", "--ladder-layers", "2")
    before, after = Checkpoint.open(tmp_path / "run"), Checkpoint.open(tmp_path / "hybrid")
    assert after.model() == small_config(residual_mode="ladder", ladder_layers=(1, 2))
    kept = {"model": 0, "files": 0}
    assert {**after.manifest, **kept} == {**before.manifest, **kept} and after.iteration == 30
    for name, weight in weights.items():
        found = torch.empty_like(weight)
        after.read(name, "weight", (0,) * weight.dim(), weight.shape, found)
        assert torch.equal(found, weight), name


def test_reshape_changes_both_copies_of_the_wiring(tmp_path: Path) -> None:
    """The manifest has the wiring twice: in the model and in the run."""
    write_cut_checkpoint(tmp_path / "run", small_config(), {})
    manifest = tmp_path / "run" / "iter_0000030" / "manifest.json"
    stored = json.loads(manifest.read_text())
    del stored["manifest_checksum"]
    stored["run"]["model"] = stored["model"]
    write_manifest(manifest.parent, stored)
    convert("reshape", "--load", tmp_path / "run", "--save", tmp_path / "hybrid", "--ladder-layers", "0-1")
    after = Checkpoint.open(tmp_path / "hybrid").manifest
    assert after["run"]["model"] == after["model"] and after["model"]["ladder_layers"] == [0, 1]


@pytest.mark.parametrize(
    ("source", "words", "message"),
    [
        (CONFIGS[-1], ["--ladder-layers", "1"], "the source is desync"),
        ({}, ["--residual-mode", "parallel"], "every layer of the source has two norms"),
        ({}, ["--residual-mode", "desync"], "can only be trained from the start"),
    ],
)
def test_a_wiring_that_needs_other_weights_is_rejected(
    tmp_path: Path, source: dict[str, Any], words: list[str], message: str
) -> None:
    write_cut_checkpoint(tmp_path / "run", small_config(**source), {})
    with pytest.raises(UserError, match=message):
        convert("reshape", "--load", tmp_path / "run", "--save", tmp_path / "other", *words)
    assert not (tmp_path / "other").exists()


@pytest.fixture
def bytes_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Positions of all tensor bytes that are read, in any file."""
    read: list[int] = []
    real = os.preadv

    def counting(descriptor: int, buffers: list[memoryview], begin: int) -> int:
        count = real(descriptor, buffers, begin)
        read.extend(range(begin, begin + count))
        return count

    monkeypatch.setattr(os, "preadv", counting)
    return read


def test_each_byte_is_read_once(tmp_path: Path, bytes_read: list[int]) -> None:
    directory = write_directory(tmp_path / "hf")
    convert("import", "--hf", directory, "--save", tmp_path / "ours", "--tensor-model-parallel-size", "2")
    header = len(safetensors(entries(SHAPES))) - 2 * sum(int(np.prod(shape)) for shape in SHAPES.values())
    assert sorted(bytes_read) == list(range(header, (directory / "model.safetensors").stat().st_size))


def test_dry_run_writes_nothing_and_reports_the_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = write_directory(tmp_path / "hf")
    convert("import", "--hf", directory, "--save", tmp_path / "ours", "--dry-run", "--ladder-layers", "1")
    assert list(tmp_path.iterdir()) == [directory]
    printed = capsys.readouterr().out
    assert "the wiring of the source, standard, is overridden: ladder in layers 1 of 2" in printed
    assert "weights_rank_00000.safetensors: 2.51 kB, 21 tensors" in printed and "nothing was written" in printed


def test_an_interrupted_conversion_continues_after_its_complete_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save_model(tmp_path / "hf")
    convert("import", "--hf", tmp_path / "hf", "--save", tmp_path / "ours")
    words = ["export", "--load", tmp_path / "ours", "--hf", tmp_path / "back", "--max-shard-size", "60KB"]
    real, renamed = os.rename, []

    def dying(source: Path, target: Path) -> None:
        if len(renamed) == 2:
            raise OSError(28, "No space left on device")
        renamed.append(target)
        real(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", dying)
        with pytest.raises(UserError, match="No space left on device"):
            convert(*words)
    assert not (tmp_path / "back").exists()
    (work,) = tmp_path.glob("back.tmp-*")
    whole = {path.name: path.stat().st_ino for path in work.glob("*.safetensors")}
    assert len(whole) == 2 and len(list(work.glob("*.partial"))) == 1
    capsys.readouterr()
    convert(*words, "--verify")
    assert f"continues an interrupted conversion in {work}" in capsys.readouterr().out
    assert {name: (tmp_path / "back" / name).stat().st_ino for name in whole} == whole
    assert_equal_bits(tensors_of(tmp_path / "hf"), tensors_of(tmp_path / "back"))
    assert not list(tmp_path.glob("back.tmp-*"))


def test_an_interrupted_import_has_the_same_checksums(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bytes_read: list[int]
) -> None:
    directory = write_directory(tmp_path / "hf")
    words = ["import", "--hf", directory, "--save", tmp_path / "ours", "--pipeline-model-parallel-size", "2"]
    with monkeypatch.context() as patch:
        real = os.rename
        patch.setattr(os, "rename", lambda source, target: real(source, target) if "00000" in target.name else 1 / 0)
        with pytest.raises(ZeroDivisionError):
            convert(*words)
    assert not (tmp_path / "ours" / "latest").exists()
    (work,) = (tmp_path / "ours").iterdir()
    assert {path.name for path in work.iterdir()} >= {"weights_rank_00000.safetensors"}
    bytes_read.clear()
    convert(*words)
    first = ("model.embed_tokens.", "model.layers.0.")
    second_stage = [shape for name, shape in SHAPES.items() if not name.startswith(first)]
    assert len(bytes_read) == 2 * sum(int(np.prod(shape)) for shape in second_stage)
    Checkpoint.open(tmp_path / "ours").verify()


def test_a_changed_source_is_converted_from_scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The new file has the same name, header and size."""
    directory = write_directory(tmp_path / "hf")
    words = ["import", "--hf", directory, "--save", tmp_path / "ours"]
    with monkeypatch.context() as patch:
        real = os.rename
        patch.setattr(os, "rename", lambda source, target: real(source, target) if "weights" in target.name else 1 / 0)
        with pytest.raises(ZeroDivisionError):
            convert(*words)
    weights = bytearray(safetensors(entries(SHAPES)))
    weights[-1] = 1
    write_directory(directory, weights=bytes(weights))
    os.utime(directory / "model.safetensors", ns=(1, 1))
    convert(*words, "--verify")


def test_another_configuration_makes_another_checkpoint(tmp_path: Path) -> None:
    directory = write_directory(tmp_path / "hf")
    for config in (CONFIG, {**CONFIG, "rms_norm_eps": 1e-6}):
        write_directory(directory, config)
        convert("import", "--hf", directory, "--save", tmp_path / "ours", "--overwrite")
        assert Checkpoint.open(tmp_path / "ours").model().norm_epsilon == config["rms_norm_eps"]
    assert [path.name for path in (tmp_path / "ours").iterdir() if path.is_dir()] == ["iter_0000000.1"]


def test_overwriting(tmp_path: Path) -> None:
    directory, ours, back = write_directory(tmp_path / "hf"), tmp_path / "ours", tmp_path / "back"
    convert("import", "--hf", directory, "--save", ours)
    with pytest.raises(UserError, match="--overwrite"):
        convert("import", "--hf", directory, "--save", ours)
    back.mkdir()
    (back / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="is not empty"):
        convert("export", "--load", ours, "--hf", back)
    with pytest.raises(UserError, match="no config.json"):
        convert("export", "--load", ours, "--hf", back, "--overwrite")
    assert (back / "notes.txt").read_text() == "mine"
    convert("export", "--load", ours, "--hf", tmp_path / "again")
    convert("export", "--load", ours, "--hf", tmp_path / "again", "--overwrite")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again", "back", "hf", "ours"]
    write_cut_checkpoint(tmp_path / "run", small_config(), {})
    with pytest.raises(UserError, match="another run"):
        convert("import", "--hf", directory, "--save", tmp_path / "run", "--overwrite")
    for name in ("latest", "latest.partial"):
        (tmp_path / name / name).mkdir(parents=True)
        with pytest.raises(UserError, match=f"{name} is not a file; remove it"):
            convert("import", "--hf", directory, "--save", tmp_path / name)
        assert [path.name for path in (tmp_path / name).iterdir()] == [name]


def test_verify_finds_wrong_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = write_directory(tmp_path / "hf")
    real = os.fsync

    def flipping(descriptor: int) -> None:
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith("00001.safetensors.partial"):
            os.pwrite(descriptor, b"\1", os.fstat(descriptor).st_size - 1)
        real(descriptor)

    monkeypatch.setattr(os, "fsync", flipping)
    words = "--tensor-model-parallel-size", "2", "--verify"
    with pytest.raises(RuntimeError, match=r"weights_rank_00001\.safetensors: weight:.* differs from its source"):
        convert("import", "--hf", directory, "--save", tmp_path / "ours", *words)
    assert not (tmp_path / "ours" / "latest").exists()


def test_the_tool_starts_without_torch(tmp_path: Path) -> None:
    write_sharded(tmp_path / "hf")
    script = f"""
import sys
from megatron_ladder.cli.convert_checkpoint import main
main(["import", "--hf", {str(tmp_path / "hf")!r}, "--save", {str(tmp_path / "ours")!r}])
main(["export", "--load", {str(tmp_path / "ours")!r}, "--hf", {str(tmp_path / "back")!r}])
main(["reshape", "--load", {str(tmp_path / "ours")!r}, "--save", {str(tmp_path / "other")!r}])
main(["inspect", {str(tmp_path / "ours")!r}])
print(sorted({{"torch", "deepspeed", "transformers"}} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"

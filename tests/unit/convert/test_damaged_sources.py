"""Damaged files of a checkpoint are rejected, and do not get a new, valid checksum."""

import json
from pathlib import Path

import pytest

from megatron_ladder.checkpoint.checksum import checksum_of
from megatron_ladder.checkpoint.publish import write_manifest
from megatron_ladder.errors import ExitCode, UserError, exit_code_of
from tests.unit.convert.saved_models import convert, small_config, write_cut_checkpoint

WEIGHTS, OPTIMIZER, TOKENIZER = "weights_rank_00001.safetensors", "optimizer_rank_00001.safetensors", "tokenizer.json"


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint whose manifest also lists the tokenizer."""
    write_cut_checkpoint(tmp_path / "run", small_config(), {})
    directory = tmp_path / "run" / "iter_0000030"
    manifest = json.loads((directory / "manifest.json").read_bytes())
    del manifest["manifest_checksum"]
    content = (directory / TOKENIZER).read_bytes()
    manifest["files"].append({"name": TOKENIZER, "size": len(content), "checksum": checksum_of(content)})
    write_manifest(directory, manifest)
    return directory


def flip_last_bit(path: Path) -> None:
    """Change data, and keep size and header."""
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("verb", "file"),
    [("reshape", WEIGHTS), ("reshape", OPTIMIZER), ("reshape", TOKENIZER), ("export", WEIGHTS), ("export", TOKENIZER)],
)
def test_a_damaged_file_is_reported(tmp_path: Path, saved: Path, verb: str, file: str) -> None:
    flip_last_bit(saved / file)
    target = "--hf" if verb == "export" else "--save"
    with pytest.raises(UserError, match=f"{file}: damaged: .* choose another checkpoint") as raised:
        convert(verb, "--load", saved, target, tmp_path / "result")
    assert exit_code_of(raised.value) is ExitCode.USER_ERROR
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_all_damaged_files_are_reported(tmp_path: Path, saved: Path) -> None:
    flip_last_bit(saved / WEIGHTS)
    flip_last_bit(saved / OPTIMIZER)
    with pytest.raises(UserError) as raised:
        convert("reshape", "--load", saved, "--save", tmp_path / "result")
    assert [WEIGHTS in line or OPTIMIZER in line for line in raised.value.messages] == [True, True]


def test_an_export_ignores_files_that_it_does_not_read(tmp_path: Path, saved: Path) -> None:
    flip_last_bit(saved / OPTIMIZER)
    convert("export", "--load", saved, "--hf", tmp_path / "result")


def test_a_dry_run_reads_no_tensors(tmp_path: Path, saved: Path) -> None:
    flip_last_bit(saved / WEIGHTS)
    convert("reshape", "--load", saved, "--save", tmp_path / "result", "--dry-run")

"""Merged checkpoints against means that numpy computes from exported directories."""

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_ladder.checkpoint.format import Checkpoint
from megatron_ladder.convert.training_checkpoint import open_training_checkpoint
from megatron_ladder.errors import UserError
from tests.helpers.killer import killed_everywhere
from tests.reference import ReferenceConfig, make_weights
from tests.unit.convert.saved_models import assert_equal_bits, convert, small_config, tensors_of, write_cut_checkpoint
from tests.unit.generate.tiny_model import write_checkpoint

ITERATIONS = (8, 9, 12)
EXPERTS = {
    "num_experts": 4,
    "moe_ffn_hidden_size": 16,
    "moe_layers": (1, 2),
    "moe_router_enable_expert_bias": True,
    "moe_router_score_function": "sigmoid",
}


def write_run(folder: Path, **changes: Any) -> Path:
    """Write three checkpoints of different weights, cut as ZeRO cuts them, and export each in fp32."""
    for seed, iteration in enumerate(ITERATIONS):
        save = folder / f"saved-{iteration}"
        write_cut_checkpoint(save, small_config(**changes), {}, iteration=iteration, seed=seed)
        convert("export", "--load", save, "--hf", folder / f"hf-{iteration}", "--dtype", "fp32")
        (name,) = (path.name for path in save.glob("iter_*"))
        (folder / "run").mkdir(exist_ok=True)
        (save / name).rename(folder / "run" / name)
        (folder / "run" / "latest").write_text(name)
    return folder / "run"


def mean_of(folder: Path, iterations: tuple[int, ...], weights: list[float]) -> dict[str, torch.Tensor]:
    exported = [tensors_of(folder / f"hf-{iteration}") for iteration in iterations]
    means = {}
    for name in exported[0]:
        total = np.zeros(exported[0][name].shape)
        for weight, tensors in zip(weights, exported, strict=True):
            total = total + np.float64(weight) * tensors[name].numpy().astype(np.float64)
        means[name] = torch.from_numpy((total / np.sum(np.float64(weights))).astype(np.float32))
    return means


@pytest.mark.parametrize("changes", [{}, EXPERTS], ids=["dense", "experts"])
def test_a_merge_is_the_mean_of_exported_weights(
    tmp_path: Path, changes: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """Every tensor, norms and the router's bias included, bit for bit."""
    run = write_run(tmp_path, **changes)
    expected = {
        ("mean", (8, 9, 12)): [1.0, 1.0, 1.0],
        ("linear", (9, 12)): [1.0, 2.0],
        ("minus-sqrt", (8, 9, 12)): [(1 / 3) ** 0.5, (2 / 3) ** 0.5 - (1 / 3) ** 0.5, 1 - (2 / 3) ** 0.5],
    }
    for (kind, iterations), weights in expected.items():
        chosen = ["--last", len(iterations)] if kind == "mean" else ["--iterations", *reversed(iterations)]
        convert("merge", "--load", run, "--save", tmp_path / kind, *chosen, "--weights", kind, "--verify")
        (verified,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("verified: "))
        assert verified.endswith("are bitwise equal to the means of their sources, computed again")
        convert("export", "--load", tmp_path / kind, "--hf", tmp_path / f"hf-{kind}", "--dtype", "fp32")
        assert_equal_bits(tensors_of(tmp_path / f"hf-{kind}"), mean_of(tmp_path, iterations, weights))
        merged = Checkpoint.open(tmp_path / kind)
        assert merged.iteration == 12 and not merged.stored("exp_avg") and not merged.stored("rng")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_mean_is_rounded_once(tmp_path: Path, dtype: torch.dtype) -> None:
    """The mean of 1 and twice the next number rounds up; a sum in the element type would lose the halves."""
    config = small_config()
    last_place = torch.finfo(dtype).eps
    for iteration, value in enumerate((1.0, 1.0 + last_place, 1.0 + last_place), start=1):
        shapes = make_weights(ReferenceConfig.like(config), seed=1)
        weights = {name: torch.full(one.shape, value, dtype=dtype) for name, one in shapes.items()}
        write_checkpoint(tmp_path / "run", config, weights, iteration=iteration)
    convert("merge", "--load", tmp_path / "run", "--save", tmp_path / "merged", "--last", 3)
    merged = open_training_checkpoint(tmp_path / "merged")
    embedding = merged.read("embedding.weight", "weight")
    assert embedding.dtype == dtype and (embedding == 1.0 + last_place).all()


def test_weights_emulate_a_decay_of_the_updates(tmp_path: Path) -> None:
    """An update between two checkpoints counts as often as the checkpoints after it."""
    run = write_run(tmp_path)
    for kind, factor in (("mean", lambda x: 1 - x), ("minus-sqrt", lambda x: 1 - x**0.5)):
        convert("merge", "--load", run, "--save", tmp_path / kind, "--last", 3, "--weights", kind)
        weights = np.array(Checkpoint.open(tmp_path / kind).manifest["merged"]["weights"])
        effects = np.cumsum(weights[::-1])[::-1] / weights.sum()
        np.testing.assert_allclose(effects, [factor(index / 3) for index in range(3)], atol=1e-15)


def test_an_interrupted_merge_publishes_nothing_and_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, save = write_run(tmp_path), tmp_path / "merged"
    words = ["merge", "--load", run, "--save", save, "--last", 3]
    real = os.replace

    def dying(source: Path, target: Path) -> None:
        if Path(target).name == "manifest.json":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", dying)
        with pytest.raises(UserError, match="run the same command again to continue"):
            convert(*words)
    (work,) = save.iterdir()
    assert work.name.startswith("iter_0000012.tmp-")
    weights = work / "weights_rank_00000.safetensors"
    number = weights.stat().st_ino
    convert(*words, "--verify")
    assert (Checkpoint.open(save).directory / weights.name).stat().st_ino == number
    assert sorted(path.name for path in save.iterdir()) == ["iter_0000012", "latest"]


@pytest.mark.long
def test_a_merge_may_be_killed_anywhere(tmp_path: Path) -> None:
    """The merged checkpoint is published whole or not at all, and the same command finishes it."""
    run = write_run(tmp_path)

    def merge(directory: Path) -> None:
        convert("merge", "--load", run, "--save", directory, "--last", 3)

    def weights_of(directory: Path) -> bytes:
        return (Checkpoint.open(directory).directory / "weights_rank_00000.safetensors").read_bytes()

    before = tmp_path / "before"
    before.mkdir()
    whole = Path(shutil.copytree(before, tmp_path / "whole"))
    merge(whole)
    calls = set()
    were_published = set()
    for killed in killed_everywhere(before, merge, tmp_path):
        calls.add(killed.call)
        is_published = (killed.directory / "iter_0000012").is_dir()
        were_published.add(is_published)
        if not is_published:
            merge(killed.directory)
            assert {path.name for path in killed.directory.iterdir()} == {"iter_0000012", "latest"}, killed
        assert weights_of(killed.directory) == weights_of(whole), killed
    assert {"open", "write", "fsync", "os.rename"} <= calls and were_published == {False, True}


def test_refusals(tmp_path: Path) -> None:
    run, save = write_run(tmp_path), tmp_path / "merged"
    other = tmp_path / "other"
    write_cut_checkpoint(other, small_config(num_layers=2), {}, iteration=13)
    (other / "iter_0000013").rename(run / "iter_0000013")
    cases = {
        (
            "--iterations",
            8,
            10,
            7,
        ): f"8 10 7: no checkpoint of iteration 7, 10: {run} contains iterations 8, 9, ",
        ("--iterations", 8, 8): "^--iterations 8 8: expected two or more different checkpoints: ",
        (): f"^--iterations or --last must choose the checkpoints to merge: {run} contains iterations 8, 9, 12, 13$",
        ("--last", 5): "^--last 5: expected 5 different checkpoints: ",
        ("--iterations", 12, 13): "iter_0000012: is of another model than .*iter_0000013",
        ("--last", 2, "--iterations", 8, 9): "exclude each other",
    }
    for words, message in cases.items():
        with pytest.raises(UserError, match=message):
            convert("merge", "--load", run, "--save", save, *words)
    others = {
        run / "iter_0000012": "is one checkpoint: give the directory that contains several",
        tmp_path / "hf-8": "is a Hugging Face directory",
        tmp_path / "nowhere": "no such directory",
        run / "latest": "is a file, expected a directory of checkpoints",
    }
    for load, message in others.items():
        with pytest.raises(UserError, match=f"^--load {load}: {message}"):
            convert("merge", "--load", load, "--save", save, "--last", 2)
    with pytest.raises(UserError, match="checkpoints of another run"):
        convert("merge", "--load", run, "--save", run, "--iterations", 8, 9)
    assert not save.exists()


def test_a_damaged_source_is_refused(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    file = run / "iter_0000009" / "weights_rank_00001.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(UserError, match="iter_0000009.*damaged"):
        convert("merge", "--load", run, "--save", tmp_path / "merged", "--last", 2)
    convert("merge", "--load", run, "--save", tmp_path / "merged", "--iterations", 8, 12)

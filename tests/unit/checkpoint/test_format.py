"""What a checkpoint holds and refuses, and the choice of the current one."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron_ladder.blueprint.boxes import Box
from megatron_ladder.checkpoint.format import Checkpoint, find_checkpoint
from megatron_ladder.checkpoint.manifest import merge_manifest
from megatron_ladder.checkpoint.optimizer_state import Piece
from megatron_ladder.checkpoint.publish import write_manifest
from megatron_ladder.checkpoint.saving import _write_pieces
from megatron_ladder.errors import UserError
from tests.unit.checkpoint.tiny_training import TinyState, header_of, save_of_ranks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_bits_survive(tmp_path: Path, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    bits = torch.randint(0, 256, (64, dtype.itemsize), generator=generator, dtype=torch.uint8)
    bits[::5, 1:] = 255  # NaNs of different payloads
    values = bits.view(dtype).view(8, 8)
    assert values.isnan().any()
    piece = Piece("x", "exp_avg", (8, 8), Box.whole((8, 8)), values)
    write_manifest(tmp_path, merge_manifest(header_of(1), [_write_pieces(tmp_path, 0, [piece])]))
    out = torch.empty(8, 8, dtype=dtype)
    Checkpoint.open(tmp_path).read("x", "exp_avg", Box.whole((8, 8)), out)
    assert torch.equal(out.view(torch.uint8), values.view(torch.uint8))
    column = torch.empty(8, 3, dtype=dtype)
    Checkpoint.open(tmp_path).read("x", "exp_avg", Box((0, 2), (8, 3)), column)
    assert torch.equal(column.view(torch.uint8), values[:, 2:5].contiguous().view(torch.uint8))


def test_weights_are_in_separate_files_that_safetensors_opens(tmp_path: Path) -> None:
    save_of_ranks(tmp_path, 100, 1)
    directory = tmp_path / "iter_0000100"
    files = sorted(path.name for path in directory.glob("*.safetensors"))
    groups = ("optimizer", "rng", "weights")
    assert files == [f"{group}_rank_0000{rank}.safetensors" for group in groups for rank in (0, 1)]
    for path in directory.glob("*.safetensors"):
        kinds = {key.partition(":")[0] for key in load_file(path)}
        assert ("weight" in kinds) == path.name.startswith("weights") and (kinds == {"weight"} or "weight" not in kinds)
    for path in directory.glob("optimizer*"):
        path.write_bytes(bytes(path.stat().st_size))
    out = torch.empty(6, 5)
    Checkpoint.open(tmp_path).read("mlp.weight", "weight", Box.whole((6, 5)), out)
    assert torch.equal(out, TinyState(1).whole["mlp.weight", "weight"])


def test_checkpoints_of_another_model_are_rejected(tmp_path: Path) -> None:
    save_of_ranks(tmp_path, 100, 1)
    checkpoint = Checkpoint.open(tmp_path)
    with pytest.raises(UserError, match="expected lm_head.weight: the checkpoint belongs to another model"):
        checkpoint.read("lm_head.weight", "weight", Box.whole((1,)), torch.empty(1))
    with pytest.raises(UserError, match=r"weight of mlp.weight has the shape \[6, 5\].*\[0:6, 3:7\]"):
        checkpoint.read("mlp.weight", "weight", Box((0, 3), (6, 4)), torch.empty(6, 4))
    with pytest.raises(UserError, match=r"\[6, 5\].*\[6, 6\]"):
        checkpoint.read("mlp.weight", "exp_avg", Box.whole((3, 5)), torch.empty(3, 5), shape=(6, 6))
    with pytest.raises(ValueError, match=r"\[5, 6\]"):
        checkpoint.read("mlp.weight", "weight", Box.whole((6, 5)), torch.empty(5, 6))


@pytest.mark.parametrize(
    ("latest", "used", "warned"),
    [
        (b"iter_0000100\n", "iter_0000100", False),
        (None, "iter_0000300", True),
        (b"iter_0000150\n", "iter_0000100.1", True),
        (b"../iter_0000100\n", "iter_0000300", True),
    ],
)
def test_latest_is_preferred_but_not_trusted(tmp_path: Path, latest: bytes | None, used: str, warned: bool) -> None:
    for seed, iteration in enumerate((100, 100, 200, 300)):
        save_of_ranks(tmp_path, iteration, seed)
    if latest is None:
        (tmp_path / "latest").unlink()
    else:
        (tmp_path / "latest").write_bytes(latest)
    found = find_checkpoint(tmp_path)
    assert found is not None and found.directory == tmp_path / used
    assert bool(found.warnings) == warned
    assert not warned or (str(tmp_path / "latest") in found.warnings[0] and used in found.warnings[-1])

"""Checks that need all processes of a run."""

import json
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron_ladder.errors import UserError
from megatron_ladder.train.setup import _check_shared
from tests.helpers.pool import GlooPools
from tests.helpers.sharded import mesh_of
from tests.helpers.steps import RECIPE
from tests.helpers.training import build_trainer_here


def errors_of_save(folders: list[Path]) -> tuple[str, ...]:
    """On each rank: return the errors if every rank has its own directory."""
    save = folders[dist.get_rank()]
    try:
        _check_shared(save, mesh_of(2).world)
    except UserError as error:
        return error.messages
    return ()


def test_a_directory_that_is_not_shared_is_rejected(gloo_pools: GlooPools, tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    assert gloo_pools(2).run(errors_of_save, [folders[0]] * 2) == [(), ()]
    for (message,) in gloo_pools(2).run(errors_of_save, folders):
        assert message.startswith("--save ") and "do not see the same directory" in message
    assert [list(folder.iterdir()) for folder in folders] == [[], []]


def errors_of_deepspeed(path: Path) -> tuple[str, ...]:
    """On each rank: return the errors of a DeepSpeed configuration."""
    try:
        build_trainer_here([*RECIPE, "--zero-stage", "1", "--deepspeed_config", str(path)])
    except UserError as error:
        return error.messages
    return ()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"zero_optimization": {"overlap_com": True}}, "DeepSpeedZeroConfig: overlap_com: Extra inputs"),
        ({"checkpoint": {"tag_validation": "perhaps"}}, "tag_validation"),
    ],
)
def test_an_error_of_deepspeed_names_the_file(gloo_pools: GlooPools, tmp_path: Path, given: object, said: str) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(given))
    for (message,) in gloo_pools(2).run(errors_of_deepspeed, path):
        assert message.startswith(f"--deepspeed_config {path}: ") and said in message

"""What is found out about a run once its processes have met."""

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


def mistakes_about_save(folders: list[Path]) -> tuple[str, ...]:
    """On each rank: what is said where every rank was told its own directory."""
    save = folders[dist.get_rank()]
    try:
        _check_shared(save, mesh_of(2).world)
    except UserError as error:
        return error.messages
    return ()


def test_a_directory_that_is_not_shared_is_found_at_once(gloo_pools: GlooPools, tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    assert gloo_pools(2).run(mistakes_about_save, [folders[0]] * 2) == [(), ()]
    for (mistake,) in gloo_pools(2).run(mistakes_about_save, folders):
        assert mistake.startswith("--save ") and "do not see the same directory" in mistake
    assert [list(folder.iterdir()) for folder in folders] == [[], []]


def mistakes_of_deepspeed(path: Path) -> tuple[str, ...]:
    """On each rank: what the engine says of a configuration."""
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
def test_what_deepspeed_refuses_is_a_mistake_in_the_file(
    gloo_pools: GlooPools, tmp_path: Path, given: object, said: str
) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(given))
    for (mistake,) in gloo_pools(2).run(mistakes_of_deepspeed, path):
        assert mistake.startswith(f"--deepspeed_config {path}: ") and said in mistake

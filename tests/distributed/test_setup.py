"""Checks that need all processes of a run."""

from pathlib import Path

import torch.distributed as dist

from megatron_ladder.errors import UserError
from megatron_ladder.train.setup import _check_shared
from tests.helpers.pool import GlooPools
from tests.helpers.sharded import mesh_of


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

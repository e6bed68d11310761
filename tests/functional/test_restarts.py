"""The loop of docs/reliability.md that repeats a run as long as its record says that this helps."""

import re
from pathlib import Path

import psutil
import pytest

from tests.functional.test_nodes import FOREVER, RECIPE, START, tokens
from tests.helpers.commands import REPOSITORY_ROOT, Command, free_port, running

__all__ = ["tokens"]

LAUNCHERS = {
    "deepspeed": "deepspeed --quiet --num_gpus 2 --master_port",
    "torchrun": "torchrun --nproc-per-node 2 --master-port",
}


def loop(launcher: str, flags: list[str | Path], folder: Path) -> list[str]:
    page = (REPOSITORY_ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
    (script,) = re.findall(r"```bash\n(dir=.*?)```", page, re.DOTALL)
    words = " ".join(map(str, [*RECIPE, *flags]))
    command = f"{LAUNCHERS[launcher]} {free_port()} pretrain_ladder.py {words}"
    changed = script.replace("deepspeed --quiet --num_gpus 8 pretrain_ladder.py ...", command)
    changed = changed.replace("dir=checkpoints", f"dir={folder}").replace("10 * attempt", "0")
    assert command in changed and str(folder) in changed
    return ["bash", "-c", changed]


@pytest.mark.parametrize("launcher", ["torchrun", pytest.param("deepspeed", marks=pytest.mark.slow)])
def test_a_run_with_a_killed_rank_resumes_until_it_is_asked_to_stop(
    launcher: str, tokens: Path, tmp_path: Path
) -> None:
    stop, save = tmp_path / "stop", tmp_path / "run"
    flags = ["--data-path", tokens, *FOREVER, "--save-interval", "2", "--kill-switch-file", stop]
    command = Command(loop(launcher, flags, save), tmp_path / "loop", {"DS_ACCELERATOR": "cpu"})
    with running(command):
        command.wait_for("iteration       5/", START)
        ranks = [one for one in psutil.Process(command.process.pid).children(recursive=True) if "RANK" in one.environ()]
        ranks[-1].kill()
        command.wait_for("worth another attempt", START)
        command.wait_for("continues from", START)
        stop.touch()
        assert command.wait(START) == 0, command.stdout + command.stderr
    assert (
        command.stdout.count("worth another attempt") == 1
        and "the run finished, or was asked to stop" in command.stdout
    )


@pytest.mark.parametrize("launcher", ["deepspeed", pytest.param("torchrun", marks=pytest.mark.slow)])
def test_invalid_input_is_not_repeated(launcher: str, tokens: Path, tmp_path: Path) -> None:
    flags = ["--data-path", tokens, "--train-iters", "3", "--hidden-sise", "3"]
    command = Command(loop(launcher, flags, tmp_path / "run"), tmp_path / "loop", {"DS_ACCELERATOR": "cpu"})
    with running(command):
        assert command.wait(START) == 2, command.stdout + command.stderr
    assert command.stderr.count("error: --hidden-sise ") == 1 and command.stdout.count("the input was invalid") == 1

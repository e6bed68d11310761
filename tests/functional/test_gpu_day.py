"""The half hour on one GPU: its commands are valid, and calls that end at any time add up."""

import json
import os
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_ladder.command_line import parse_command_line
from megatron_ladder.errors import UserError
from tests.docs.reading import read_command
from tests.gpu import day, program_checks, rank_checks, runner  # noqa: F401
from tests.gpu.__main__ import GpuOptions, choose_checks
from tests.helpers.commands import REPOSITORY_ROOT, Command, run_command, running, write_nvidia_smi

SCRIPT = REPOSITORY_ROOT / "tests" / "gpu_day.sh"
SPEED = "examples/paper/speed.sh"


def call(*words: str | Path) -> int:
    """Return the exit code of a call in this process."""
    try:
        day.main([*map(str, words)])
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def read_part(folder: Path, part: str) -> dict[str, Any]:
    """Return the results of a part."""
    return json.loads((folder / f"{part}.json").read_text())


def errors_of(words: list[str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return what the program of a command says about its flags."""
    if words[:2] == ["env", "-C"]:
        words = words[3:]
    program, *rest = [word.removeprefix(f"{REPOSITORY_ROOT}/") for word in words]
    if rest[:2] == ["-m", "tests.gpu"]:
        (options,) = parse_command_line([GpuOptions], rest[2:], "gpu", "")
        monkeypatch.setattr("tests.gpu.__main__._finds_no_gpu", lambda: False)
        assert choose_checks(options)
        return []
    if rest[0] == SPEED:
        done = run_command(["bash", *rest, "--dry-run"], timeout=60)
        assert done.returncode == 0, done.stderr
        commands = [shlex.split(line) for line in done.stdout.splitlines()]
        assert len(commands) == 9
        return [error for command in commands for error in errors_of(command, monkeypatch)]
    found = read_command([program, *rest])
    assert found is not None, words
    return found


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_every_command_is_accepted_by_its_program(device: day.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A renamed flag must not cost time on a rented GPU."""
    planned = day.commands(device, day.PARTS, Path("FOLDER"))
    assert [step.part for step, _ in planned] == sorted([step.part for step, _ in planned], key=day.PARTS.index)
    errors = [error for _, words in planned for error in errors_of(words, monkeypatch)]
    assert errors == []


def test_commands_are_printed_without_a_folder_for_results(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--dry-run", "--only", "paper", "study") == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed == [shlex.join(words) for _, words in day.commands("cuda", ["paper", "study"], Path("FOLDER"))]
    with pytest.raises(UserError, match="--output is required, except for --dry-run"):
        call("--only", "paper")


def test_checks_use_all_gpus_of_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_nvidia_smi(tmp_path, gpus=4)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    ((_, words),) = day.commands("cuda", ["checks"], Path("FOLDER"))
    assert words[words.index("--gpus") + 1] == "4"
    machine = runner.Machine("cuda", 4, tmp_path)
    assert [machine.ranks(gpus) for gpus in (1, 2, 8)] == [1, 2, 4]
    with pytest.raises(runner.NotRun, match="needs 4 GPUs, found 3"):
        runner.Machine("cuda", 3, tmp_path).ranks(8)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Replaces the steps: name -> shell code, in the part `training`."""

    def replace_steps(**code: str) -> None:
        made = [day.Step("training", name, f"sh -c {shlex.quote(text)}") for name, text in code.items()]
        monkeypatch.setattr(day, "STEPS", tuple(made))

    return replace_steps


def test_a_later_call_continues_with_the_files_of_the_earlier_one(tmp_path: Path, steps: Callable[..., None]) -> None:
    """The results come back to another machine, where they are read-only, and finished steps do not run again."""
    ran, go, fifo = tmp_path / "ran", tmp_path / "go", tmp_path / "fifo"
    os.mkfifo(fifo)
    steps(
        first=f"echo first >> {ran}; echo '[1]' > {{folder}}/first.json",
        # Stops the call, as a signal to it would, and continues with what it wrote before.
        second=f"test -e {go} || {{{{ echo '[2]' > {{folder}}/half.json; kill -TERM $PPID; read wait < {fifo}; }}}}; "
        "cat {folder}/half.json > {folder}/second.json",
    )
    earlier, later = tmp_path / "earlier", tmp_path / "later"
    assert call("--device", "cpu", "--output", earlier) == day.OPEN
    found = read_part(earlier, "training")
    assert found["files"] == {"first.json": [1], "half.json": [2]}
    assert [found["steps"][name]["exit_code"] for name in ("first", "second")] == [0, None]
    (earlier / "training.json").chmod(0o444)
    earlier.chmod(0o555)
    go.touch()
    assert call("--device", "cpu", "--output", later, "--results", earlier) == 0
    found = read_part(later, "training")
    assert found["files"] == {"first.json": [1], "half.json": [2], "second.json": [2]}
    assert ran.read_text() == "first\n"
    assert call("--device", "cpu", "--output", later) == 0 and ran.read_text() == "first\n"
    earlier.chmod(0o755)


def test_a_failed_step_is_reported_and_runs_again_after_the_others(
    tmp_path: Path, steps: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    order = tmp_path / "order"
    steps(bad=f"echo bad >> {order}; echo reason; exit 7", noisy=f"echo noisy >> {order}; exit 3")
    assert call("--device", "cpu", "--output", tmp_path / "out") == 1
    assert read_part(tmp_path / "out", "training")["steps"]["bad"]["output"] == ["reason"]
    assert "left: training, bad, exit code 7" in capsys.readouterr().out
    steps(bad=f"echo bad >> {order}; exit 7", noisy="exit 1", third=f"echo third >> {order}")
    assert call("--device", "cpu", "--output", tmp_path / "out") == 1
    assert order.read_text().split() == ["bad", "noisy", "third", "bad"]


def test_a_step_that_is_stopped_without_a_new_result_runs_after_others_and_fails(
    tmp_path: Path, steps: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    """Every stop is one by a signal; the first step rewrites its file, and the second one adds to it each time."""
    order, fifo = tmp_path / "order", tmp_path / "fifo"
    os.mkfifo(fifo)
    stop = f"kill -TERM $PPID; read wait < {fifo}"
    stuck = f"echo stuck >> {order}; echo $$ > {{folder}}/stuck.json; {stop}"
    slow = f"echo slow >> {order}; echo $$ > {{folder}}/$$.json; {stop}"
    steps(stuck=stuck, slow=slow, fast=f"echo fast >> {order}")
    codes = [call("--device", "cpu", "--output", tmp_path / "out") for _ in range(6)]
    assert order.read_text().split() == ["stuck", "slow", "fast", "stuck", "slow", "stuck", "slow"]
    assert codes == [day.OPEN] * 6
    printed = capsys.readouterr().out
    assert printed.count("stuck: stopped\n") == 2 and "stuck: failed: stopped 2 times without a new result\n" in printed
    assert "left: training, stuck, exit code 1\nleft: training, slow\n" in printed
    steps(stuck=stuck, slow="true")
    codes = [call("--device", "cpu", "--output", tmp_path / "out") for _ in range(2)]
    assert codes == [1, 1] and order.read_text().split()[7:] == ["stuck"] * 2


def test_results_of_another_device_are_not_continued(
    tmp_path: Path, steps: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps(first="true")
    assert call("--device", "cpu", "--output", tmp_path) == 0
    monkeypatch.setattr(day, "describe_device", lambda device: "NVIDIA H200, 580.1")
    with pytest.raises(UserError, match=r"checks.json: was measured with CPU.*, now NVIDIA H200, 580.1: give another"):
        call("--output", tmp_path)


def test_a_file_that_no_later_call_gets_is_made_again_if_it_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, go = tmp_path / "made", tmp_path / "go"
    corpus = f"sh -c 'echo corpus >> {made}; touch {{folder}}/corpus.bin'"
    use = f"sh -c 'test -e {{folder}}/corpus.bin && test -e {go}'"
    monkeypatch.setattr(
        day, "STEPS", (day.Step("study", "corpus", corpus, makes="corpus.bin"), day.Step("study", "use", use))
    )
    codes = []
    for _ in range(2):
        codes.append(call("--device", "cpu", "--output", tmp_path / "out"))
        go.touch()
    assert codes == [1, 0] and made.read_text().split() == ["corpus", "corpus"]
    assert call("--device", "cpu", "--output", tmp_path / "out") == 0 and len(made.read_text().split()) == 2


def test_checks_that_passed_are_not_run_again(tmp_path: Path) -> None:
    checks = [runner.Check(title, 1, 1, runner.Value.RIGHT, lambda machine, ranks: "") for title in ("a", "b")]
    outcomes = [runner.Outcome(checks[0], "passed", "figure", 2.0), runner.Outcome(checks[1], "failed", "", 1.0, "why")]
    path = tmp_path / "checks.json"
    assert runner.read_passed(path, "H100", checks) == []
    path.write_text(json.dumps(runner.as_json("H100", outcomes)))
    assert runner.read_passed(path, "H100", checks) == outcomes[:1]
    assert runner.read_passed(path, "H200", checks) == []
    assert json.loads(path.read_text())["checks"][1]["details"] == "why"


def test_a_missing_folder_of_results_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--results .*/gone: no such folder: give the --output of earlier calls"):
        day.main(["--device", "cpu", "--output", str(tmp_path / "new"), "--results", str(tmp_path / "gone")])
    assert not (tmp_path / "new").exists()


def test_missing_wheels_are_named(tmp_path: Path) -> None:
    done = run_command(["bash", SCRIPT, "--output", tmp_path, "--wheels", tmp_path], timeout=60)
    assert done.returncode == 2 and f"--wheels {tmp_path}: no wheels there" in done.stderr


@pytest.mark.slow
def test_the_rehearsal_survives_a_kill_and_finishes(tmp_path: Path) -> None:
    words = ["bash", SCRIPT, "--device", "cpu", "--output", tmp_path / "results"]
    killed = Command(words, tmp_path / "killed")
    with running(killed):
        killed.wait_for("paper, paper ...", 120)
        killed.process.kill()
    assert [*read_part(tmp_path / "results", "checks")["steps"]] == ["checks"]
    done = run_command(words, timeout=660)
    while done.returncode == day.OPEN:
        done = run_command(words, timeout=660)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "checks, checks" not in done.stdout
    assert "# One GPU as one of eight" in read_part(tmp_path / "results", "paper")["files"]["report.md"]
    assert "## Over sizes" in read_part(tmp_path / "results", "study")["files"]["study/report.md"]
    assert len([*(tmp_path / "results").iterdir()]) == len(day.PARTS)

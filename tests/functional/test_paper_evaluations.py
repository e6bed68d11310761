"""The paper's evaluations: published rows, and the command lines."""

import shlex
from pathlib import Path

import pytest

from examples.paper.evaluations import PUBLISHED, TASKS, average
from tests.helpers.commands import REPOSITORY_ROOT, run_command

SCRIPT = REPOSITORY_ROOT / "examples" / "paper" / "evaluate.sh"
AVERAGES = {
    "from-scratch": {
        "1.2b-standard": 59.98,
        "1.2b-parallel": 58.75,
        "1.2b-ladder": 58.92,
        "1.5b-ladder": 60.33,
        "3.5b-standard": 64.11,
        "3.5b-parallel": 63.03,
        "3.5b-ladder": 62.91,
        "4.5b-ladder": 64.21,
    },
    "adaptation": {"source": 56.11, "16-unhealed": 41.65, "16-healed": 57.61, "20-healed": 53.86},
}
"""As published."""


@pytest.mark.parametrize("table", AVERAGES)
def test_published_rows_have_the_published_averages(table: str) -> None:
    assert PUBLISHED[table].keys() == AVERAGES[table].keys()
    for model, values in PUBLISHED[table].items():
        assert average(TASKS[table], values) == pytest.approx(AVERAGES[table][model], abs=0.0051)


def checkpoints(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "latest").write_text("iter_0025000\n")
    return folder


def test_the_script_exports_and_evaluates_the_newest_checkpoint(tmp_path: Path) -> None:
    run = checkpoints(tmp_path / "runs" / "a b")
    words = ["bash", SCRIPT, "--size", "1.2b", "--run", run, "--dry-run"]
    done = run_command([*words, "--wiring", "ladder", "--", "--tasks", "piqa"], timeout=60)
    assert done.returncode == 0, done.stderr
    export, evaluate = map(shlex.split, done.stdout.splitlines())
    folder = run / "evaluation" / "iter_0025000"
    assert export[:6] == ["python3", "tools/convert_checkpoint.py", "export", "--load", str(run), "--hf"]
    assert export[6] == str(folder / "exported")
    assert f"pretrained={folder / 'exported'},trust_remote_code=True,dtype=auto" in evaluate
    assert evaluate[-1] == str(folder / "lm_eval" / "1.2b-ladder" / "piqa_0-shot")
    done = run_command([*words, "--wiring", "desync-2x", "--tp", "4", "--", "--tasks", "piqa"], timeout=60)
    (evaluate,) = map(shlex.split, done.stdout.splitlines())
    assert f"model={run},tp=4" in evaluate

"""The paper's evaluations: tasks, published rows, resumption, and the table, with a function in place of lm-eval."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from examples.paper.evaluations import PUBLISHED, TASKS, average, main
from megatron_ladder.errors import UserError
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
RESULTS = {
    "alias": "a task",
    **{"acc,none": 0.7, "acc_stderr,none": 0.01, "acc_norm,none": 0.9, "acc_norm_stderr,none": 0.01},
    **{"word_perplexity,none": 18.5, "word_perplexity_stderr,none": "N/A", "byte_perplexity,none": 1.7},
}
"""The metrics of a task as lm-eval 0.4 writes them."""


@pytest.mark.parametrize("table", AVERAGES)
def test_published_rows_have_the_published_averages(table: str) -> None:
    assert PUBLISHED[table].keys() == AVERAGES[table].keys()
    for model, values in PUBLISHED[table].items():
        assert average(TASKS[table], values) == pytest.approx(AVERAGES[table][model], abs=0.0051)


def test_finished_tasks_are_skipped_and_settings_kept_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, failing = list[list[str]](), ["piqa"]

    def lm_eval(command: list[str], env: dict[str, str]) -> subprocess.CompletedProcess[str]:
        calls.append(command)
        assert env["PYTHONPATH"].split(os.pathsep) == [str(REPOSITORY_ROOT), "own"]
        task, output = (command[command.index(flag) + 1] for flag in ("--tasks", "--output_path"))
        if task not in failing:
            path = Path(output) / "model__name" / "results_2026-01-01T00-00-00.000000.json"
            path.parent.mkdir()
            path.write_text(json.dumps({"results": {task: RESULTS}}))
        return subprocess.CompletedProcess(command, 3 if task in failing else 0)

    def run(*words: str) -> str:
        flags = ["--table", "from-scratch", "--models", f"1.2b-ladder={tmp_path}", "--output", str(tmp_path / "out")]
        calls.clear()
        main([*flags, *words])
        return (tmp_path / "out" / "table.md").read_text()

    monkeypatch.setenv("PYTHONPATH", "own")
    monkeypatch.setattr(subprocess, "run", lm_eval)
    monkeypatch.setitem(sys.modules, "lm_eval", mock.Mock(__spec__="installed"))
    with pytest.raises(UserError, match="1.2b-ladder PIQA: lm_eval exited with code 3 and left no result"):
        run()
    assert len(calls) == 4
    failing.clear()
    run()
    assert [call[call.index("--tasks") + 1] for call in calls] == ["piqa", "sciq", "winogrande", "wikitext"]
    run()
    assert calls == []
    text = run("--limit", "8", "--tasks", "piqa", "--chat-template")
    (call,) = calls
    assert call[call.index("--limit") + 1] == "8" and "--apply_chat_template" in call
    assert call[-1].endswith("/piqa_0-shot_chat_limit-8")
    assert "Only 8 samples of each task: not an estimate." in text and "with the chat template" in text
    assert "\n| 1.2b-ladder |  |  |  | 70.00 |  |  |  |  |\n" in text


def test_the_script_exports_and_evaluates_the_newest_checkpoint(tmp_path: Path) -> None:
    run = tmp_path / "a b"
    run.mkdir()
    (run / "latest").write_text("iter_0025000\n")
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

"""The paper's evaluations: tasks, published rows, resumption, and the table, with a module in place of lm-eval."""

import json
import shlex
from pathlib import Path
from typing import Any

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
LM_EVAL = """# Writes results in the format of lm-eval 0.4, and its own arguments to a file.
import json, os, pathlib, sys

words = sys.argv[1:]
with open("{log}", "a") as log:
    log.write(json.dumps([*words, os.environ.get("HF_ALLOW_CODE_EVAL")]) + "\\n")
task, output = (words[words.index(flag) + 1] for flag in ("--tasks", "--output_path"))
numbers = json.loads(pathlib.Path("{numbers}").read_text())
if task not in numbers:
    sys.exit(3)
folder = pathlib.Path(output) / "model__name"
folder.mkdir(parents=True)
values = {{"alias": task, **numbers[task]}}
(folder / "results_2026-01-01T00-00-00.000000.json").write_text(json.dumps({{"results": {{task: values}}}}))
"""
SCRATCH_NUMBERS: dict[str, dict[str, Any]] = {
    **{
        task: {"acc,none": value, "acc_stderr,none": 0.01, "acc_norm,none": 0.9, "acc_norm_stderr,none": 0.01}
        for task, value in zip(
            ("arc_challenge", "arc_easy", "hellaswag", "piqa", "sciq", "winogrande"),
            (0.3, 0.6, 0.4, 0.7, 0.8, 0.5),
            strict=True,
        )
    },
    "wikitext": {"word_perplexity,none": 18.5, "word_perplexity_stderr,none": "N/A", "byte_perplexity,none": 1.7},
}


class FakeLmEval:
    """A module lm_eval with given results, and the arguments of its calls."""

    def __init__(self, folder: Path, numbers: dict[str, dict[str, Any]]) -> None:
        self._log, self._numbers, self.bin = folder / "calls", folder / "numbers.json", folder / "bin"
        self.bin.mkdir(parents=True)
        (self.bin / "lm_eval.py").write_text(LM_EVAL.format(log=self._log, numbers=self._numbers))
        self.set(numbers)

    def set(self, numbers: dict[str, dict[str, Any]]) -> None:
        self._numbers.write_text(json.dumps(numbers))

    def calls(self) -> list[list[str | None]]:
        lines = self._log.read_text().splitlines() if self._log.exists() else []
        self._log.unlink(missing_ok=True)
        return [json.loads(line) for line in lines]


@pytest.fixture
def lm_eval(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeLmEval:
    fake = FakeLmEval(tmp_path / "fake", SCRATCH_NUMBERS)
    monkeypatch.syspath_prepend(fake.bin)
    monkeypatch.setenv("PYTHONPATH", str(fake.bin))
    return fake


def rows_of(markdown: str) -> dict[str, list[str]]:
    lines = [line[1:-1].split("|") for line in markdown.splitlines() if line.startswith("|")]
    return {name.strip(): [cell.strip() for cell in cells] for name, *cells in lines}


def run_here(tmp_path: Path, table: str, *words: str, name: str = "1.2b-ladder") -> str:
    (tmp_path / "model").mkdir(exist_ok=True)
    flags = ["--table", table, "--models", f"{name}={tmp_path / 'model'}", "--output", str(tmp_path / "out")]
    main([*flags, *words])
    return (tmp_path / "out" / "table.md").read_text()


@pytest.mark.parametrize("table", AVERAGES)
def test_published_rows_have_the_published_averages(table: str) -> None:
    assert PUBLISHED[table].keys() == AVERAGES[table].keys()
    for model, values in PUBLISHED[table].items():
        assert average(TASKS[table], values) == pytest.approx(AVERAGES[table][model], abs=0.0051)


def test_finished_tasks_are_skipped_and_settings_kept_apart(tmp_path: Path, lm_eval: FakeLmEval) -> None:
    lm_eval.set({task: values for task, values in SCRATCH_NUMBERS.items() if task != "piqa"})
    with pytest.raises(UserError, match="1.2b-ladder PIQA: lm_eval exited with code 3 and left no result"):
        run_here(tmp_path, "from-scratch")
    assert len(lm_eval.calls()) == 4
    lm_eval.set(SCRATCH_NUMBERS)
    run_here(tmp_path, "from-scratch")
    assert [call[call.index("--tasks") + 1] for call in lm_eval.calls()] == ["piqa", "sciq", "winogrande", "wikitext"]
    run_here(tmp_path, "from-scratch")
    assert lm_eval.calls() == []
    text = run_here(tmp_path, "from-scratch", "--limit", "8", "--tasks", "piqa", "--chat-template")
    (call,) = lm_eval.calls()
    assert call[call.index("--limit") + 1] == "8" and "--apply_chat_template" in call
    assert "Only 8 samples of each task: not an estimate." in text and "with the chat template" in text
    assert rows_of(text)["1.2b-ladder"] == ["", "", "", "70.00", "", "", "", ""]


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

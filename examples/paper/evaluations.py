"""Tasks and published results of the paper's evaluations (arXiv 2501.06589), and a program that runs them with lm-eval.

    python examples/paper/evaluations.py --table from-scratch --models 1.2b-ladder=DIR --output FOLDER

runs every task whose result is missing in FOLDER, and writes FOLDER/table.md, in which the published results follow
ours. evaluate.sh exports the models and calls it. It does not import torch.

According to one of the authors (on github.com/mayank31398/ladder-residual-inference), they used lm-evaluation-harness,
EvalPlus and AlpacaEval.
"""

import importlib.util
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, NoReturn

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.append(str(REPOSITORY))

from examples.lm_eval_runs import lm_eval_command, metric_of  # noqa: E402
from megatron_ladder.command_line import parse_command_line  # noqa: E402
from megatron_ladder.errors import UserError, raise_user_errors, run_program  # noqa: E402
from megatron_ladder.files import write_atomically  # noqa: E402

STATED = "a summary of the paper"
DEFAULT = "not stated: lm-eval's default"
INFERRED = "not stated: inferred from the published values"
OURS = "not stated: ours"
WEIGHTS_NAME = "weights.json"
"""File in the folder of a result that describes the weights it belongs to."""
CODE, JUDGE = "--run-code", "AlpacaEval and an OpenAI API key"


class Task(NamedTuple):
    """A column of a published table."""

    name: str
    """As in the paper."""
    lm_eval: str
    """Task of lm-eval; empty if another program is needed."""
    shots: int
    shots_from: str
    metric: str
    """Metric of lm-eval, with the filter if there are several."""
    metric_from: str
    needs: str = ""
    """What the task needs in addition; empty if it runs by default."""
    in_average: bool = True

    @property
    def scale(self) -> float:
        """Factor from lm-eval's number to the published one: accuracies are percentages."""
        return 1.0 if "perplexity" in self.metric else 100.0


FROM_SCRATCH = (
    Task("ARC-C", "arc_challenge", 0, DEFAULT, "acc", OURS),
    Task("ARC-E", "arc_easy", 0, DEFAULT, "acc", OURS),
    Task("HellaSwag", "hellaswag", 0, DEFAULT, "acc", INFERRED),
    Task("PIQA", "piqa", 0, DEFAULT, "acc", OURS),
    Task("SciQ", "sciq", 0, DEFAULT, "acc", OURS),
    Task("Winogrande", "winogrande", 0, DEFAULT, "acc", DEFAULT),
    Task("Wikitext perplexity", "wikitext", 0, DEFAULT, "word_perplexity", INFERRED, in_average=False),
)
ADAPTATION = (
    Task("MMLU", "mmlu", 5, STATED, "acc", DEFAULT),
    Task("ARC-C", "arc_challenge", 25, STATED, "acc_norm", INFERRED),
    Task("OBQA", "openbookqa", 0, DEFAULT, "acc_norm", INFERRED),
    Task("HellaSwag", "hellaswag", 10, STATED, "acc_norm", INFERRED),
    Task("TruthfulQA", "truthfulqa_mc1", 0, DEFAULT, "acc", STATED),
    Task("GSM8K", "gsm8k_cot", 8, STATED, "exact_match,flexible-extract", OURS),
    Task("HumanEval+", "humaneval_plus", 0, DEFAULT, "pass@1", STATED, needs=CODE),
    Task("IFEval", "ifeval", 0, DEFAULT, "prompt_level_strict_acc", OURS),
    Task("AlpacaEval 2", "", 0, "has none", "length-controlled win rate", STATED, needs=JUDGE),
)
"""The authors ran HumanEval+ with EvalPlus; lm-eval's task has the same problems and tests."""
TASKS: Mapping[str, tuple[Task, ...]] = {"from-scratch": FROM_SCRATCH, "adaptation": ADAPTATION}

PUBLISHED: Mapping[str, Mapping[str, tuple[float, ...]]] = {
    "from-scratch": {
        "1.2b-standard": (34.22, 70.33, 41.10, 71.49, 87.30, 55.41, 18.54),
        "1.2b-parallel": (30.46, 67.97, 40.35, 71.16, 87.40, 55.17, 18.95),
        "1.2b-ladder": (31.31, 67.76, 41.18, 71.49, 86.60, 55.17, 18.42),
        "1.5b-ladder": (33.96, 70.16, 42.58, 71.98, 87.90, 55.41, 17.47),
        "3.5b-standard": (38.99, 74.12, 46.48, 74.59, 92.00, 58.48, 14.48),
        "3.5b-parallel": (38.48, 73.02, 45.55, 73.67, 90.00, 57.46, 14.96),
        "3.5b-ladder": (36.77, 72.43, 45.66, 73.72, 89.90, 58.96, 14.90),
        "4.5b-ladder": (40.96, 75.00, 46.81, 73.99, 90.80, 57.70, 14.05),
    },
    "adaptation": {
        "source": (68.14, 60.32, 43.00, 80.04, 36.84, 84.99, 60.40, 52.57, 18.69),
        "16-unhealed": (63.19, 56.57, 42.60, 77.70, 35.50, 10.54, 30.50, 46.25, 11.99),
        "16-healed": (67.33, 59.98, 45.00, 79.05, 37.58, 86.81, 60.51, 59.76, 22.43),
        "20-healed": (62.31, 59.90, 42.60, 77.49, 36.72, 76.19, 48.80, 59.05, 21.72),
    },
}
"""Results of the paper by model, in the order of the tasks. The number is that of ladder layers."""


@dataclass(frozen=True)
class EvaluationOptions:
    """Evaluation."""

    table: str
    """Table of the paper: from-scratch or adaptation."""
    models: tuple[str, ...]
    """NAME=DIR for each model: a Hugging Face directory or a directory of training checkpoints. Names as in the
    published tables, such as 1.2b-ladder or 16-healed, are compared with their rows."""
    output: Path
    """Folder for lm-eval's results and table.md."""
    tasks: tuple[str, ...] = ()
    """Names of tasks as lm-eval has them; all of the table if not given."""
    tp: int = 1
    """Tensor-parallel processes for a directory of training checkpoints."""
    batch_size: str = "auto"
    """Samples that lm-eval computes at once; auto is 16 for training checkpoints."""
    limit: int | None = None
    """Samples of each task, to try the script; such results are kept apart and are no estimate."""
    chat_template: bool = False
    """Put every prompt into the model's chat template. By default none is used, as in lm-eval."""
    run_code: bool = False
    """Also run HumanEval+, which executes the code that the model writes: use a container."""
    dry_run: bool = False
    """Print the commands only."""


def folder_of(options: EvaluationOptions, model: str, task: Task) -> Path:
    """Return the folder of a result; all settings that change it are part of the name."""
    settings = [task.lm_eval, f"{task.shots}-shot"]
    settings += ["chat"] * options.chat_template + [f"limit-{options.limit}"] * (options.limit is not None)
    return options.output / "lm_eval" / model / "_".join(settings)


def read_result(folder: Path, task: Task) -> float | None:
    """Return the published metric from the newest result of lm-eval in a folder, or None without one.

    Raises:
        UserError: the file has no such metric.
    """
    files = sorted(folder.rglob("results*.json"), key=lambda path: path.stat().st_mtime)
    if not files:
        return None
    try:
        return task.scale * metric_of(json.loads(files[-1].read_text())["results"], task.lm_eval, task.metric)
    except ValueError as error:
        raise UserError(f"{files[-1]}: no metric {task.metric}: {error}") from None


def task_command(options: EvaluationOptions, model: str, directory: Path, task: Task) -> list[str]:
    """Return the command that runs a task."""
    words = lm_eval_command(directory, options.tp, options.batch_size)
    words += ["--tasks", task.lm_eval, "--num_fewshot", str(task.shots)]
    words += ["--apply_chat_template"] * options.chat_template
    words += ["--fewshot_as_multiturn"] * (options.chat_template and task.shots > 0)
    words += ["--limit", str(options.limit)] if options.limit is not None else []
    words += ["--confirm_run_unsafe_code"] * (task.needs == CODE)
    return [*words, "--output_path", str(folder_of(options, model, task))]


def runnable(options: EvaluationOptions) -> list[Task]:
    """Return the tasks of the command line that run: those that need nothing, and code with --run-code."""
    return [
        task
        for task in TASKS[options.table]
        if (not options.tasks or task.lm_eval in options.tasks)
        and (not task.needs or (task.needs == CODE and options.run_code))
    ]


def describe_weights(directory: Path) -> str:
    """Return what differs if a folder contains other weights: its newest checkpoint, or the files of its weights."""
    files = [directory / "latest"]
    if not files[0].is_file():
        files = sorted([*directory.glob("config.json"), *directory.glob("*.safetensors")])
    return json.dumps([[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files])


def current_result(options: EvaluationOptions, model: str, directory: Path, task: Task) -> float | None:
    """Return the result of a task if it is one of the weights in `directory`; None without one."""
    folder = folder_of(options, model, task)
    record = folder / WEIGHTS_NAME
    if record.is_file() and record.read_text(encoding="utf-8") != describe_weights(directory):
        return None
    return read_result(folder, task)


def run_tasks(options: EvaluationOptions, models: Mapping[str, Path]) -> None:
    """Run all tasks without a result of these weights, or print their commands.

    Raises:
        UserError: lm-eval is not installed, or failed.
    """
    for model, directory in models.items():
        for task in runnable(options):
            folder = folder_of(options, model, task)
            if current_result(options, model, directory, task) is not None:
                print(f"{model} {task.name}: has a result in {folder}", file=sys.stderr)
                continue
            command = task_command(options, model, directory, task)
            print(shlex.join(command), flush=True)
            if options.dry_run:
                continue
            if importlib.util.find_spec("lm_eval") is None:
                raise UserError(f'lm-eval is not installed for {sys.executable}: pip install "lm-eval[hf,ifeval]"')
            if read_result(folder, task) is not None:
                # Of other weights.
                folder.rename(folder.with_name(f"{folder.name}.old-{time.time_ns()}"))
            folder.mkdir(parents=True, exist_ok=True)
            write_atomically(folder / WEIGHTS_NAME, describe_weights(directory))
            environment = os.environ | {
                "PYTHONPATH": os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])])
            }
            environment |= {"HF_ALLOW_CODE_EVAL": "1"} if task.needs == CODE else {}
            done = subprocess.run(command, env=environment)
            if done.returncode or read_result(folder, task) is None:
                raise UserError(
                    f"{model} {task.name}: lm_eval exited with code {done.returncode} and left no result in {folder}; "
                    "see above, and run the same command again, which skips finished tasks"
                )


def average(tasks: Sequence[Task], values: Sequence[float | None]) -> float | None:
    """Return the mean of the accuracies, or None if one is missing."""
    counted = [value for task, value in zip(tasks, values, strict=True) if task.in_average]
    return None if None in counted else sum(value for value in counted if value is not None) / len(counted)


def report(options: EvaluationOptions, models: Mapping[str, Path]) -> str:
    """Return the Markdown report: results of the models, each followed by its published row, then the settings."""
    tasks, published = TASKS[options.table], PUBLISHED[options.table]

    def row(name: str, values: Sequence[float | None]) -> list[str]:
        cells = [*values, average(tasks, values)]
        return [name, *("" if value is None else f"{value:.2f}" for value in cells)]

    rows = [["model", *(task.name for task in tasks), "average"]]
    for model, directory in models.items():
        measured = [current_result(options, model, directory, task) if task.lm_eval else None for task in tasks]
        rows.append(row(model, measured))
        if model in published:
            rows.append(row(f"{model}, published", published[model]))
    rows += [row(f"{name}, published", values) for name, values in published.items() if name not in models]
    template = "with the chat template" if options.chat_template else "without a chat template"
    parts = [_table(rows), f"Ours: lm-eval, {template}. Published: arXiv 2501.06589, chat template not stated."]
    if options.limit is not None:
        parts.append(f"**Only {options.limit} samples of each task: not an estimate.**")
    parts += [f"{task.name} needs {_need_of(task)}." for task in tasks if task.needs]
    settings = [["task", "lm-eval", "shots", "from", "metric", "from"]]
    settings += [
        [task.name, task.lm_eval or "none", str(task.shots), task.shots_from, task.metric, task.metric_from]
        for task in tasks
    ]
    return "\n".join([*(f"{part}\n" for part in parts), _table(settings)])


def _need_of(task: Task) -> str:
    if task.needs == CODE:
        return "`--run-code`, which executes code that the model writes (the authors used EvalPlus)"
    return f"{task.needs}: it is not run here, so our cell is empty"


def _table(rows: Sequence[Sequence[str]]) -> str:
    head, *others = rows
    return "".join(f"| {' | '.join(line)} |\n" for line in [head, ["---"] * len(head), *others])


def option_errors(options: EvaluationOptions) -> Iterator[str]:
    """Yield one line per invalid option."""
    if options.table not in TASKS:
        yield f"--table {options.table}: expected one of {', '.join(TASKS)}"
    else:
        known = [task.lm_eval for task in TASKS[options.table] if task.lm_eval]
        for name in options.tasks:
            if name not in known:
                yield f"--tasks {name}: expected some of {', '.join(known)}"
    for word in options.models:
        name, _, directory = word.partition("=")
        if not name or not directory:
            yield f"--models {word}: expected NAME=DIR"
        elif not options.dry_run and not Path(directory).is_dir():
            yield f"--models {word}: {directory} is not a directory: export the model first, see evaluate.sh"


def main(argv: Sequence[str]) -> None:
    """Run the tasks, and print and write the report."""
    options: EvaluationOptions
    (options,) = parse_command_line(
        [EvaluationOptions], argv, program="evaluations.py", description="Runs the paper's evaluations with lm-eval."
    )
    raise_user_errors(option_errors(options))
    models = {name: Path(directory) for name, _, directory in (word.partition("=") for word in options.models)}
    run_tasks(options, models)
    if options.dry_run:
        return
    text = report(options, models)
    write_atomically(options.output / "table.md", text)
    print(f"\n{text}", end="")


def entry_point() -> NoReturn:
    """Console entry point."""
    run_program(main)


if __name__ == "__main__":
    entry_point()

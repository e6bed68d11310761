"""Checks that the paper's runs are valid and fit in memory, without a GPU or a network.

    python examples/paper/check.py
    python examples/paper/check.py --gpu h200 -- --hosts "a b" --gpus-per-host 4 --tp 4

For every size and wiring, this program gets the command from train.sh (with the flags after --, and --tp 2 if the
wiring needs tensor parallelism), parses it as the trainer does, counts the parameters of the model, and estimates
memory and time with the planner.
"""

import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path += [str(REPOSITORY), str(REPOSITORY / "tools")]

from examples.paper.runs import RECIPE, SIZES, WIRINGS  # noqa: E402
from ladder_lab.cost.layout import Layout  # noqa: E402
from ladder_lab.cost.machines import GPUS, TIME_RANGE, Machine  # noqa: E402
from ladder_lab.cost.memory import RESERVED_BYTES, worst_memory  # noqa: E402
from ladder_lab.cost.training import LayerTime, step_time  # noqa: E402
from megatron_ladder.blueprint.tensors import parameter_count  # noqa: E402
from megatron_ladder.command_line import parse_command_line  # noqa: E402
from megatron_ladder.config.run import RunConfig, parse_run, resolve_run  # noqa: E402
from megatron_ladder.engine.deepspeed_json import deepspeed_json  # noqa: E402
from megatron_ladder.errors import UserError, raise_user_errors, run_program  # noqa: E402
from megatron_ladder.flags import flag  # noqa: E402

SCRIPT = REPOSITORY / "examples" / "paper" / "train.sh"
COLUMNS = (
    "size",
    "wiring",
    "in the paper",
    "parameters",
    "untied",
    "TP x PP x DP",
    "micro-batch x steps",
    "GB a GPU",
    "seconds a step",
    "days",
    "GPU hours",
)


@dataclass(frozen=True)
class CheckOptions:
    """Machine. Flags after -- are passed to train.sh."""

    gpu: str = flag("h100", choices=GPUS)
    """GPU, in its usual boxes, as in plan.py."""
    recipe: bool = False
    """Print only the recipe with its sources."""


@dataclass(frozen=True)
class Estimate:
    """Memory and time of a run, by the planner."""

    layout: Layout
    memory_bytes: float
    """Memory of the GPU that needs the most, including reserved memory."""
    step_seconds: float
    run_seconds: float

    @property
    def gpu_hours(self) -> float:
        """GPU hours of the whole run."""
        return self.layout.gpus * self.run_seconds / 3600


def dry_run(size: str, wiring: str, flags: Sequence[str]) -> tuple[int, list[str]]:
    """Return the number of processes that train.sh would start, and their command line.

    Raises:
        UserError: train.sh reported an error.
    """
    argv = ["bash", str(SCRIPT), "--dry-run", "--size", size, "--wiring", wiring, *flags]
    done = subprocess.run(argv, capture_output=True, text=True)
    if done.returncode != 0:
        raise UserError(*(line.removeprefix("error: ") for line in done.stderr.splitlines()))
    heading, command = done.stdout.splitlines()
    words = shlex.split(command)
    return int(heading.split()[0]), words[words.index("pretrain_ladder.py") + 1 :]


def read_command(words: Sequence[str], processes: int) -> RunConfig:
    """Resolve a command line, with all checks of the trainer that need no file.

    Raises:
        UserError: with one message per error.
    """
    settings = parse_run(words)
    run = resolve_run(settings, settings.values["vocab_size"], processes)
    deepspeed_json(run)
    return run


def estimate(run: RunConfig, machine: Machine) -> Estimate:
    """Estimate memory and time of a run."""
    layout, training = Layout.of(run), run.training
    memory = worst_memory(run.model, layout, training.seq_length, run.accumulation_steps)

    def step_seconds(late: range) -> float:
        model = replace(run.model, ladder_layers=tuple(late))
        times = LayerTime(model, machine, layout, training.seq_length)
        return step_time(times, layout, run.global_batch_size).total

    # The planner assumes identical layers.
    late = len(run.model.ladder_layers) / run.model.num_layers
    seconds = (1 - late) * step_seconds(range(0)) + late * step_seconds(range(run.model.num_layers))
    return Estimate(layout, memory.total + RESERVED_BYTES, seconds, seconds * training.train_iters)


def row(size: str, wiring: str, run: RunConfig, planned: Estimate) -> list[str]:
    """Return a row of the table, in the order of `COLUMNS`."""
    layout = planned.layout
    return [
        size,
        wiring,
        "yes" if wiring in SIZES[size].in_the_paper else "",
        f"{parameter_count(replace(run.model, tie_embeddings=True)).total:,}",
        f"{parameter_count(replace(run.model, tie_embeddings=False)).total:,}",
        f"{layout.tensor} x {layout.pipeline} x {layout.data}",
        f"{layout.micro_batch} x {run.accumulation_steps}",
        f"{planned.memory_bytes / 1e9:.1f}",
        f"{planned.step_seconds:.2f}",
        f"{planned.run_seconds / 86400:.1f}",
        f"{planned.gpu_hours:,.0f}",
    ]


def markdown(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a table."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [heading, ["---"] * len(heading), *rows])


def recipe_table() -> str:
    """Return a table of every flag of the recipe with its source."""
    return markdown(
        ("flag", "from"),
        [(f"`{f'{setting.flag} {setting.value}'.rstrip()}`", setting.source) for setting in RECIPE],
    )


def check(options: CheckOptions, flags: Sequence[str]) -> Iterator[str]:
    """Print the table, and yield one message per run that is invalid or does not fit."""
    machine = Machine.usual(options.gpu)
    rows = []
    for size in SIZES:
        for wiring in WIRINGS:
            try:
                # Flags of the command line come later and replace these.
                processes, words = dry_run(size, wiring, ["--tp", str(WIRINGS[wiring].fewest_ranks), *flags])
                run = read_command(words, processes)
            except UserError as error:
                yield from (f"{size} {wiring}: {message}" for message in error.messages)
                continue
            planned = estimate(run, machine)
            rows.append(row(size, wiring, run, planned))
            if planned.memory_bytes > machine.gpu.memory_bytes:
                yield (
                    f"{size} {wiring}: {planned.memory_bytes / 1e9:.1f} GB do not fit {machine.gpu.name}'s "
                    f"{machine.gpu.memory_bytes / 1e9:.0f}: give a smaller --micro-batch-size, or --tp"
                )
    if rows:
        tokens = run.training.train_iters * run.tokens_per_step
        print(markdown(COLUMNS, rows))
        print(
            f"\n{run.training.train_iters:,} steps of {run.tokens_per_step:,} tokens, {tokens / 1e9:.1f} billion, on "
            f"{run.world_size} GPUs of {machine.gpu.name}, each with {machine.gpu.memory_bytes / 1e9:.0f} GB. "
            "Parameters: with one embedding matrix, as the runs have it, and untied. Times are predictions, "
            f"{100 * TIME_RANGE:.0f} % to both sides."
        )


def main(argv: Sequence[str]) -> None:
    """Check all runs.

    Raises:
        UserError: a run is invalid or does not fit.
    """
    split = argv.index("--") if "--" in argv else len(argv)
    options: CheckOptions
    (options,) = parse_command_line([CheckOptions], argv[:split], "check.py", (__doc__ or "").split("\n")[0])
    if options.recipe:
        print(recipe_table())
        return
    raise_user_errors(check(options, argv[split + 1 :]))
    print("All command lines are valid, and all runs fit.")


def entry_point() -> NoReturn:
    """Console entry point."""
    run_program(main)


if __name__ == "__main__":
    entry_point()

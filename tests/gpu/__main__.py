"""Checks the CUDA path on the GPUs of this machine, or the checks' logic on its CPU, and prints one table:

python -m tests.gpu --gpus 8 --output gpu.md
python -m tests.gpu --device cpu
"""

import importlib
import os
import platform
import re
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

# Read when torch is imported: a fork would lose the threads of its parent.
os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

import torch  # noqa: E402

from ladder_lab.output import write_json  # noqa: E402
from megatron_ladder import __version__  # noqa: E402
from megatron_ladder.comm.launch import RankInfo  # noqa: E402
from megatron_ladder.command_line import parse_command_line  # noqa: E402
from megatron_ladder.errors import ExitCode, UserError, run_program  # noqa: E402
from megatron_ladder.flags import flag  # noqa: E402
from tests.gpu import runner  # noqa: E402
from tests.gpu.on_ranks import describe_device  # noqa: E402
from tests.helpers.pool import import_for_ranks  # noqa: E402

START_SECONDS = 120.0
"""Time to start one rank."""


@dataclass(frozen=True)
class GpuOptions:
    """Devices and checks."""

    device: Literal["cuda", "cpu"] = "cuda"
    """cuda runs the checks on GPUs. cpu runs the same functions with gloo: 2 processes stand for 2 GPUs and 4 for 8,
    and what only CUDA has is replaced."""
    gpus: int = flag(0, minimum=0)
    """Number of GPUs of this machine that the checks may use; tests/gpu.sh counts them."""
    only: str = ""
    """Run only the checks whose titles match this regular expression, such as "gradients|decod"."""
    minutes: float | None = flag(None, above=0)
    """Checks that have not started by then are not run. Default: 15, or 40 with 4 GPUs or more."""
    output: Path | None = flag(None, output="file")
    """Markdown file for the table, with the errors of failed checks."""
    json: Path | None = flag(None, output="file")
    """JSON file for the outcomes, written after each check. A check that passed on the same device, according to this
    file, is not run again."""

    @property
    def seconds(self) -> float:
        """Time for all checks."""
        return 60 * (self.minutes or (40 if self.gpus >= 4 else 15))


def main(argv: Sequence[str]) -> None:
    """Run the checks and print the table; exit with code 1 if one failed."""
    for module in ("rank_checks", "program_checks"):
        importlib.import_module(f"tests.gpu.{module}")
    (options,) = parse_command_line([GpuOptions], argv, "gpu.sh", __doc__ or "")
    assert isinstance(options, GpuOptions)
    chosen = choose_checks(options)
    if options.device == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
        # With GPUs, DeepSpeed would initialise CUDA here, and forks could not use it then.
        import_for_ranks()
    with tempfile.TemporaryDirectory(prefix="gpu_checks_") as folder:
        machine = runner.Machine(options.device, options.gpus, Path(folder))
        with machine.limited_to(START_SECONDS):
            (machine.description,) = machine.call(1, describe_device)
        versions = f"megatron_ladder {__version__}, torch {torch.__version__}, Python {platform.python_version()}"
        heading = f"{machine.description}; {versions}"
        print(heading, flush=True)
        passed = runner.read_passed(options.json, heading, runner.CHECKS)
        outcomes = [*passed]

        def report(outcome: runner.Outcome) -> None:
            outcomes.append(outcome)
            _report(outcome)
            write_json(options.json, runner.as_json(heading, outcomes))

        open_checks = [one for one in chosen if one not in [outcome.check for outcome in passed]]
        runner.run_checks(open_checks, machine, options.seconds, report)
    text, failures = runner.summary(outcomes)
    text = f"{heading}\n\n{text}\n"
    print(f"\n{text}", flush=True)
    if options.output is not None:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(text + failures, encoding="utf-8")
    if failures:
        # The table is the message.
        sys.exit(ExitCode.INTERNAL)


def choose_checks(options: GpuOptions) -> list[runner.Check]:
    """Return the checks to run, the most valuable ones first; raise UserError if there is none."""
    if options.device == "cuda" and (options.gpus == 0 or _finds_no_gpu()):
        raise UserError("--device cuda: no GPU was found: give --gpus, or use --device cpu to run the checks' logic")
    try:
        chosen = [one for one in runner.CHECKS if re.search(options.only, one.title, re.IGNORECASE)]
    except re.error as error:
        raise UserError(f"--only {options.only}: not a regular expression: {error}") from None
    if not chosen:
        titles = "; ".join(dict.fromkeys(one.title for one in runner.CHECKS))
        raise UserError(f"--only {options.only}: no title matches; the titles are: {titles}")
    return sorted(chosen, key=lambda one: one.value)


def _finds_no_gpu() -> bool:
    """Look in another process: after looking, this one could not fork ranks that use CUDA."""
    with ProcessPoolExecutor(1) as other:
        return other.submit(RankInfo(0, 1, 0).device).result().type == "cpu"


def _report(outcome: runner.Outcome) -> None:
    print(f"{outcome.result:7}  {outcome.check.name}: {outcome.figure} ({outcome.seconds:.0f} s)", flush=True)
    if outcome.details:
        print(outcome.details, file=sys.stderr, flush=True)


if __name__ == "__main__":
    run_program(main)

"""Starts a training command, and restarts it after failures from the checkpoints that it saved.

    run_resilient.py --max-restarts 5 -- deepspeed --quiet --num_gpus 8 pretrain_ladder.py ... --save DIR --load DIR

It imports no torch, and observes only the exit code and the record of the run.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ladder.cli.programs import Command
from megatron_ladder.command_line import parse_config
from megatron_ladder.config.data import CheckpointConfig
from megatron_ladder.config.file import flag_values, read_config_file
from megatron_ladder.errors import UserError, run_program
from megatron_ladder.flags import flag


@dataclass(frozen=True)
class ResilientConfig:
    """Restarts. The command follows after --."""

    max_restarts: int = flag(5, minimum=0)
    """Maximum number of consecutive restarts without a new checkpoint."""
    backoff_seconds: float = flag(10.0, minimum=0)
    """Pause before the first restart; it doubles with each consecutive restart without a new checkpoint."""
    max_backoff_seconds: float = flag(600.0, minimum=0)
    """Maximum pause before a restart."""
    retry_bad_numbers: bool = False
    """Also restart after a non-finite loss or gradient (exit code 3)."""
    stop_minutes: float = flag(30.0, minimum=0)
    """Minutes that the command may take to save after SIGTERM, SIGINT or SIGHUP before it is killed."""


COMMANDS = (Command((ResilientConfig,)),)


def parse_options(argv: Sequence[str]) -> tuple[ResilientConfig, list[str], Path]:
    """Return the options before `--`, the command after it, and the directory in which the command saves.

    Raise a UserError if a flag is wrong, there is no command, or the command does not load from where it saves.
    """
    split = argv.index("--") if "--" in argv else len(argv)
    config = parse_config(ResilientConfig, argv[:split], "run_resilient.py", __doc__)
    command = list(argv[split + 1 :])
    return config, command, _find_save_directory(command)


def _find_save_directory(command: Sequence[str]) -> Path:
    if not command:
        raise UserError("there is no command: give it after --, as in `run_resilient.py -- deepspeed ...`")
    words, settings = flag_values(command), dict[str, Any]()
    if path := words.get("--config"):
        # The command reports invalid keys itself.
        settings = read_config_file(Path(path), (CheckpointConfig,), []).settings
    found = {name: words.get(name) or str(settings.get(name[2:]) or "") for name in ("--save", "--load")}
    if "--finetune" in command or settings.get("finetune") == "true":
        raise UserError(
            "--finetune: every restart would start at iteration 0 again: run the first step without run_resilient.py "
            "(--exit-interval 1), then leave --finetune out"
        )
    missing = [name for name in ("--save", "--load") if not found.get(name)]
    if missing:
        raise UserError(f"the command has no {' and no '.join(missing)}: a restart would start from scratch: give both")
    if Path(found["--save"]).resolve() != Path(found["--load"]).resolve():
        raise UserError(
            f"--load {found['--load']} is not --save {found['--save']}: a restart would not find the checkpoints: give "
            "both the same directory"
        )
    return Path(found["--save"])


def main(argv: Sequence[str]) -> None:
    """Run the command until it succeeds, must not be restarted, or is stopped by a signal.

    Raises:
        UserError: see `parse_options`; or the command cannot be started.
        SystemExit: with the command's last exit code, if it is not 0.
    """
    config, command, save = parse_options(argv)
    from megatron_ladder.cli.supervise import run_supervised

    run_supervised(command, config, save)


entry_point = functools.partial(run_program, main)

"""Pretrains a Llama-family transformer with Ladder Residual: the program behind `pretrain_ladder.py`."""

import functools
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from megatron_ladder.cli.programs import Command
from megatron_ladder.config.data import CheckpointConfig
from megatron_ladder.config.file import flag_values, read_config_file
from megatron_ladder.config.run import SECTIONS, RunFlags, parse_run
from megatron_ladder.errors import ExitCode, UserError, raise_user_errors, run_program
from megatron_ladder.train.record import RunRecord
from megatron_ladder.train.stop import StopSignals

COMMANDS = (Command(SECTIONS),)


def parse_options(argv: Sequence[str]) -> RunFlags:
    """Read the command line; raise a UserError with one line per value that is not valid by itself."""
    errors: list[str] = []
    flags = parse_run(argv, errors)
    raise_user_errors(errors)
    return flags


def main(argv: Sequence[str]) -> None:
    """Run the training that the command line describes."""
    # Several processes report their errors to each other, which needs torch.
    if os.environ.get("WORLD_SIZE", "1") == "1":
        parse_options(argv)
    # Importing torch takes seconds, in which a signal would otherwise end the process.
    with StopSignals() as signals, _recording_refusals(argv):
        from megatron_ladder.train.loop import pretrain

        pretrain(argv, signals)


@contextmanager
def _recording_refusals(argv: Sequence[str]) -> Iterator[None]:
    """Record invalid input in the directory of --save, as far as it is known, for `report_run.py --status`."""
    try:
        yield
    except UserError:
        if os.environ.get("RANK", "0") == "0" and (save := _save_directory(argv)) is not None:
            with suppress(OSError):
                save.mkdir(exist_ok=True)
            RunRecord(save).write("refused", code=int(ExitCode.USER_ERROR))
        raise


def _save_directory(argv: Sequence[str]) -> Path | None:
    words = flag_values(argv)
    save = words.get("--save")
    if not save and (path := words.get("--config")):
        with suppress(UserError):
            save = read_config_file(Path(path), (CheckpointConfig,), []).settings.get("save")
    return Path(save) if save else None


entry_point = functools.partial(run_program, main)

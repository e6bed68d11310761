"""Pretrains a Llama-family transformer with Ladder Residual: the program behind `pretrain_ladder.py`."""

import functools
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from megatron_ladder.config.run import RunFlags, parse_run, read_run_words
from megatron_ladder.errors import ExitCode, UserError, run_program
from megatron_ladder.train.record import RunRecord
from megatron_ladder.train.stop import StopSignals


def parse_options(argv: Sequence[str]) -> RunFlags:
    """Read the command line; raise a UserError with one line per value that is not valid by itself."""
    return parse_run(argv)


def main(argv: Sequence[str]) -> None:
    """Run the training that the command line describes."""
    words = read_run_words(argv)
    # Importing torch takes seconds, in which a signal would otherwise end the process.
    with StopSignals() as signals, _recording_refusals(words.words.get("save")):
        # Several processes report their errors to each other, which needs torch.
        if os.environ.get("WORLD_SIZE", "1") == "1":
            words.to_flags()
        from megatron_ladder.train.loop import pretrain

        pretrain(words, signals)


@contextmanager
def _recording_refusals(save: object) -> Iterator[None]:
    """Record invalid input in the directory of --save, as far as it is known, for `report_run.py --status`."""
    try:
        yield
    except UserError:
        if os.environ.get("RANK", "0") == "0" and save:
            folder = Path(str(save))
            with suppress(OSError):
                folder.mkdir(exist_ok=True)
            RunRecord(folder).write("refused", code=int(ExitCode.USER_ERROR))
        raise


entry_point = functools.partial(run_program, main)

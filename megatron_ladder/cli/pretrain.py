"""Pretrains a Llama-family transformer with Ladder Residual: the program behind `pretrain_ladder.py`."""

import functools
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from megatron_ladder.config.run import parse_run, read_run_words, to_flags
from megatron_ladder.config.sections import DataConfig
from megatron_ladder.errors import Problem, UserError, exit_code_of, run_program
from megatron_ladder.flags import section_flags
from megatron_ladder.train.record import RunRecord, read_record
from megatron_ladder.train.stop import stop_signals

_DATA = [flag.field_name for flag in section_flags(DataConfig) if flag.on_resume == "data"]
_NEEDED = {"--data-path": _DATA, "--tokenizer-type": ("tokenizer_type", "vocab_size")}
"""Flags whose absence is reported with that of required flags, and the names of those that replace them."""


parse_options = parse_run


def main(argv: Sequence[str]) -> None:
    """Run the training that the command line describes."""
    words = read_run_words(argv)
    for flag, names in _NEEDED.items():
        if not {"load", *names} & {*words.words, *words.faulty}:
            words.missing.append(Problem(flag, " is required without --load: see --help"))
    # Importing torch takes seconds, in which a signal would otherwise end the process.
    with stop_signals() as received, _recording_early_failures(words.words.get("save")):
        # Several processes report their errors to each other, which needs torch.
        if os.environ.get("WORLD_SIZE", "1") == "1":
            to_flags(words)
        from megatron_ladder.train.loop import pretrain

        pretrain(words, received)


@contextmanager
def _recording_early_failures(save: object) -> Iterator[None]:
    """Record invalid input, and failures before the run owns the directory of --save, for `report_run.py --status`."""
    folder = Path(str(save)) if save and os.environ.get("RANK", "0") == "0" else None
    launches = _count_launches(folder)
    try:
        yield
    except Exception as error:
        if folder is not None and (isinstance(error, UserError) or _count_launches(folder) == launches):
            # ValueError: the name is impossible.
            with suppress(OSError, ValueError):
                folder.mkdir(exist_ok=True)
                RunRecord(folder).write("refused", code=int(exit_code_of(error)))
        raise


def _count_launches(folder: Path | None) -> int:
    with suppress(OSError, ValueError):
        return 0 if folder is None else sum(event["event"] == "launch" for event in read_record(folder))
    return 0


entry_point = functools.partial(run_program, main)

"""Pretrains a Llama-family transformer with Ladder Residual: the program behind `pretrain_ladder.py`."""

import functools
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from megatron_ladder.config.run import check_run, parse_run, read_run
from megatron_ladder.config.sections import DataConfig
from megatron_ladder.errors import Problem, UserError, exit_code_of, run_program
from megatron_ladder.flags import section_flags
from megatron_ladder.train.record import RunRecord, read_record
from megatron_ladder.train.stop import stop_signals

_DATA = [one.field_name for one in section_flags(DataConfig) if one.on_resume == "data"]
_NEEDED = {"data_path": _DATA, "tokenizer_type": ("tokenizer_type", "vocab_size")}
"""Fields whose absence is reported with that of required ones, and those that replace them."""


parse_options = parse_run


def main(argv: Sequence[str]) -> None:
    """Run the training that the command line describes."""
    settings = read_run(argv)
    for name, others in _NEEDED.items():
        if not {"load", *others} & {*settings.given, *settings.faulty}:
            settings.problems.append(Problem({name: None}, "{} is required without {load}", "see --help"))
    # Importing torch takes seconds, in which a signal would otherwise end the process.
    with stop_signals() as received, _recording_early_failures(settings.given.get("save")):
        # Several processes report their errors to each other, which needs torch.
        if os.environ.get("WORLD_SIZE", "1") == "1":
            check_run(settings)
        from megatron_ladder.train.loop import pretrain

        pretrain(settings, received)


@contextmanager
def _recording_early_failures(save: Path | None) -> Iterator[None]:
    """Record invalid input, and failures before the run owns the directory of --save, for `report_run.py --status`."""
    folder = save if os.environ.get("RANK", "0") == "0" else None
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

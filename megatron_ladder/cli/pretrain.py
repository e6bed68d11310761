"""Pretrains a Llama-family transformer with Ladder Residual: the program behind `pretrain_ladder.py`."""

import functools
import os
from collections.abc import Sequence

from megatron_ladder.config.run import check_run, parse_run, read_run
from megatron_ladder.config.sections import DataConfig
from megatron_ladder.errors import Problem, run_program
from megatron_ladder.flags import section_flags
from megatron_ladder.train.record import recording_refusal
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
    with stop_signals() as received, recording_refusal(settings.given.get("save")):
        # Several processes report their errors to each other, which needs torch.
        if os.environ.get("WORLD_SIZE", "1") == "1":
            check_run(settings)
        from megatron_ladder.train.loop import pretrain

        pretrain(settings, received)


entry_point = functools.partial(run_program, main)

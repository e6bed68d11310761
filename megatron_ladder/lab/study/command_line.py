"""Parses the command line of `tools/study.py` and reports all its errors before anything is trained."""

import shlex
import shutil
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, get_args

from megatron_ladder.blueprint.model import tensor_parallel_errors
from megatron_ladder.errors import UserError, raise_user_errors
from megatron_ladder.flags import flag_name, parse_command_line
from megatron_ladder.lab.bench.options import parse_alpha
from megatron_ladder.lab.bench.sizes import find_size
from megatron_ladder.lab.study.commands import resolve_trial, training_flag_errors
from megatron_ladder.lab.study.options import (
    OWN_LINK,
    AdaptOptions,
    ReportOptions,
    Request,
    RunOptions,
    SmallRunOptions,
)
from megatron_ladder.lab.study.report import missing_library_errors
from megatron_ladder.lab.study.trial import Trial
from megatron_ladder.lab.study.wirings import ALL_WIRINGS, STANDARD, TIMED_WIRINGS

Command = Literal["run", "adapt", "report"]
COMMANDS: tuple[Command, ...] = get_args(Command)
NONE = "none"
DESCRIPTIONS: dict[Command, str] = {
    "run": "Train a grid of wirings and seeds, at equal tokens and at equal time, and report on it. Resumes a stopped "
    "study.",
    "adapt": "Rewire upper layers of standard models (trained first if missing), heal them, and report on it. Only the "
    "first of --sizes is adapted; flags about other wirings have no effect.",
    "report": "Report on the finished trials of a study.",
}


def parse_options(argv: Sequence[str]) -> Request | ReportOptions:
    """Parse `run|adapt|report` and the flags.

    Raises:
        UserError: with one message per error.
    """
    words = list(argv)
    if not words or words[0] not in COMMANDS:
        found = f"{words[0]}: " if words and not words[0].startswith("-") else ""
        raise UserError(f"{found}expected one of {', '.join(COMMANDS)} first; each has its --help")
    command = COMMANDS[COMMANDS.index(words.pop(0))]
    if command == "report":
        options: ReportOptions
        (options,) = parse_command_line([ReportOptions], words, "study.py report", DESCRIPTIONS[command])
        return options
    return _parse_request(words, command)


def _parse_request(argv: Sequence[str], command: Command) -> Request:
    """Parse the flags of `run` or `adapt`, and those after --."""
    split = list(argv).index("--") if "--" in argv else len(argv)
    words, training_flags = argv[:split], tuple(argv[split + 1 :])
    errors: list[str] = []
    kind = SmallRunOptions if "--small" in words else RunOptions
    kinds = [kind, *[AdaptOptions] * (command == "adapt")]
    options, *adapt = parse_command_line(kinds, words, f"study.py {command}", DESCRIPTIONS[command], found=errors)
    if adapt:
        errors += _adapt_errors(options, *adapt)
        options = replace(options, wirings=(STANDARD,), timed_wirings=(NONE,))
    request = Request(options, training_flags, *adapt)
    errors += _grid_errors(options) + _launcher_errors(options.launcher) + missing_library_errors()
    errors += training_flag_errors(training_flags)
    if not errors:
        # The trainer's checks, which need valid options.
        for size in options.sizes:
            for wiring in options.wirings:
                trial = Trial("tokens", wiring, size, 1, max(options.learning_rates), options.tuning_iterations)
                resolve_trial(request, (), trial, errors)
    raise_user_errors(errors)
    return request


def timed_wirings(options: RunOptions) -> tuple[str, ...]:
    """Return the wirings that are also trained at equal time; standard, the reference, is always included."""
    if not options.timed_wirings:
        return tuple(name for name in options.wirings if name in TIMED_WIRINGS)
    if options.timed_wirings == (NONE,):
        return ()
    return (*[STANDARD] * (STANDARD not in options.timed_wirings), *options.timed_wirings)


def _grid_errors(options: RunOptions) -> list[str]:
    errors = []
    unknown = [name for name in options.wirings if name not in ALL_WIRINGS]
    if unknown:
        errors.append(f"--wirings {' '.join(unknown)}: expected some of {', '.join(ALL_WIRINGS)}")
    timed = timed_wirings(options)
    known = TIMED_WIRINGS if options.link != OWN_LINK else ALL_WIRINGS
    invalid = [name for name in timed if name not in known or name not in options.wirings]
    if invalid:
        errors.append(
            f"--timed-wirings {' '.join(invalid)}: expected some of --wirings that can be timed, {', '.join(known)}; "
            f"or {NONE}"
        )
    if STANDARD not in options.wirings:
        errors.append(f"--wirings {' '.join(options.wirings)}: add {STANDARD}, with which all others are compared")
    for size in options.sizes:
        try:
            shape = find_size(size)
        except ValueError as error:
            errors.append(f"--sizes {size}: {error}")
            continue
        if timed and options.link != OWN_LINK:
            parts = tensor_parallel_errors(shape, max(options.timing_ranks, 1))
            errors += [f"--timing-ranks {options.timing_ranks}: {part}" for part in parts]
    if options.tuning_seed in options.seeds and len(options.learning_rates) > 1:
        errors.append(f"--tuning-seed {options.tuning_seed}: must not be one of --seeds")
    alpha = parse_alpha(options.link)
    if options.link != OWN_LINK and (alpha is None or alpha[0] == 0):
        errors.append(f"--link {options.link}: expected a time such as 1.2c or 2ms, or {OWN_LINK}")
    for name in ("wirings", "timed_wirings", "sizes", "seeds", "learning_rates"):
        values = getattr(options, name)
        twice = dict.fromkeys(value for value in values if values.count(value) > 1)
        errors += [f"{flag_name(name)} {value}: is given twice" for value in twice]
    return errors


def _adapt_errors(options: RunOptions, adapt: AdaptOptions) -> list[str]:
    errors = [
        f"{flag_name(name)}: has no effect on an adaptation, which uses standard models: remove it"
        for name in ("wirings", "timed_wirings")
        if getattr(options, name) != getattr(RunOptions, name)
    ]
    try:
        layers = find_size(options.sizes[0]).num_layers
    except ValueError:
        # Reported with the other sizes.
        return errors
    return errors + [
        f"--adapt-layers {upper}: expected numbers of upper layers, 1 to {layers}; 0 is always included"
        for upper in adapt.adapt_layers
        if upper > layers
    ]


def _launcher_errors(launcher: str | None) -> list[str]:
    if launcher is None:
        return []
    try:
        words = shlex.split(launcher)
    except ValueError as error:
        return [f"--launcher {launcher}: {error}"]
    if not words or shutil.which(words[0]) is None:
        return [f"--launcher {launcher}: {words[0] if words else 'an empty command'} is not an executable program"]
    return []

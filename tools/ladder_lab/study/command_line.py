"""Parses the command line of `tools/study.py` and reports all its errors before anything is trained."""

import contextlib
import importlib.util
import itertools
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import replace

from ladder_lab.bench.options import parse_alpha
from ladder_lab.bench.sizes import find_size
from ladder_lab.study.commands import resolve_trial, training_flag_errors
from ladder_lab.study.options import (
    NONE,
    OWN_LINK,
    AdaptOptions,
    ReportOptions,
    Request,
    RunOptions,
    SmallRunOptions,
)
from ladder_lab.study.schema import Trial
from ladder_lab.study.wirings import STANDARD
from megatron_ladder.blueprint.model import tensor_parallel_errors
from megatron_ladder.command_line import parse_command_line, take_subcommand
from megatron_ladder.errors import raise_user_errors
from megatron_ladder.flags import flag_name

DESCRIPTIONS = {
    "run": "Train a grid of wirings and seeds, at equal tokens and at equal time, and report on it. Resumes a stopped "
    "study.",
    "adapt": "Rewire upper layers of standard models (trained first if missing), heal them, and report on it. Only the "
    "first of --sizes is adapted; flags about other wirings have no effect.",
    "report": "Report on the finished trials of a study.",
}


def parse_options(argv: Sequence[str]) -> Request | ReportOptions:
    """Parse `run|adapt|report` and the flags. Raises UserError with one message per error."""
    command, _ = take_subcommand(argv, DESCRIPTIONS, "study.py", "Runs and reports grids of training runs.")
    split = argv.index("--") if "--" in argv and command != "report" else len(argv)
    words, training_flags = argv[1:split], tuple(argv[split + 1 :])
    errors: list[str] = []
    kind = ReportOptions if command == "report" else SmallRunOptions if "--small" in words else RunOptions
    kinds = [kind, *[AdaptOptions] * (command == "adapt")]
    options, *adapt = parse_command_line(kinds, words, f"study.py {command}", DESCRIPTIONS[command], found=errors)
    errors += [
        f"{name} is not installed, but reports of studies need it: pip install 'megatron-ladder[{extra}]'"
        for name, extra in {"matplotlib": "plot", "scipy": "lab"}.items()
        if importlib.util.find_spec(name) is None
    ]
    if isinstance(options, ReportOptions):
        raise_user_errors(errors)
        return options
    if adapt:
        errors += _adapt_errors(options, *adapt)
        options = replace(options, wirings=(STANDARD,), timed_wirings=(NONE,))
    recorded = ("python", "tools/study.py", *argv)
    request = Request(options, training_flags, adapt[0] if adapt else None, recorded)
    errors += _run_errors(options) + training_flag_errors(training_flags)
    if not errors:
        # The trainer's checks, which need valid options.
        for size, wiring in itertools.product(options.sizes, options.wirings):
            trial = Trial("tokens", wiring, size, 1, max(options.learning_rates), options.iterations)
            resolve_trial(request, trial, errors)
    raise_user_errors(errors)
    return request


def timed_wirings(options: RunOptions) -> tuple[str, ...]:
    """Return the wirings that are also trained at equal time; standard, the reference, is always included."""
    if not options.timed_wirings:
        return options.wirings
    if options.timed_wirings == (NONE,):
        return ()
    return (*[STANDARD] * (STANDARD not in options.timed_wirings), *options.timed_wirings)


def _run_errors(options: RunOptions) -> list[str]:
    timed, is_emulated = timed_wirings(options), options.link != OWN_LINK
    alpha = parse_alpha(options.link)
    errors = []
    if invalid := [name for name in timed if name not in options.wirings]:
        errors.append(f"--timed-wirings {' '.join(invalid)}: expected some of --wirings, or {NONE}")
    if STANDARD not in options.wirings:
        errors.append(f"--wirings {' '.join(options.wirings)}: add {STANDARD}, with which all others are compared")
    is_tuned = options.learning_rates_from is None and len(options.learning_rates) > 1
    if is_tuned and options.tuning_seed in options.seeds:
        errors.append(f"--tuning-seed {options.tuning_seed}: must not be one of --seeds")
    if is_emulated and (alpha is None or alpha[0] == 0):
        errors.append(f"--link {options.link}: expected a time such as 1.2c or 2ms, or {OWN_LINK}")
    for name in ("wirings", "timed_wirings", "sizes", "seeds", "learning_rates"):
        values = getattr(options, name)
        twice = dict.fromkeys(value for value in values if values.count(value) > 1)
        errors += [f"{flag_name(name)} {value}: is given twice" for value in twice]
    for size in options.sizes:
        try:
            parts = tensor_parallel_errors(find_size(size), max(options.timing_ranks, 1))
            errors += [f"--timing-ranks {options.timing_ranks}: {part}" for part in parts if timed and is_emulated]
        except ValueError as error:
            errors.append(f"--sizes {size}: {error}")
    if options.launcher is not None:
        try:
            program = [*shlex.split(options.launcher), ""][0]
            if shutil.which(program) is None:
                named = program or "an empty command"
                errors.append(f"--launcher {options.launcher}: {named} is not an executable program")
        except ValueError as error:
            errors.append(f"--launcher {options.launcher}: {error}")
    return errors


def _adapt_errors(options: RunOptions, adapt: AdaptOptions) -> list[str]:
    errors = [
        f"{flag_name(name)}: has no effect on an adaptation, which uses standard models: remove it"
        for name in ("wirings", "timed_wirings")
        if getattr(options, name) != getattr(RunOptions, name)
    ]
    # An invalid size is reported with the other sizes.
    with contextlib.suppress(ValueError):
        layers = find_size(options.sizes[0]).num_layers
        errors += [
            f"--adapt-layers {upper}: expected numbers of upper layers, 1 to {layers}; 0 is always included"
            for upper in adapt.adapt_layers
            if upper > layers
        ]
    return errors

"""Reads the command line of `tools/study.py`, and finds all that is wrong with it before anything is trained."""

import importlib.util
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, get_args

from megatron_ladder.blueprint.model import tensor_parallel_mistakes
from megatron_ladder.errors import UserError
from megatron_ladder.flags import flag_name, parse_command_line
from megatron_ladder.lab.bench.options import parse_alpha
from megatron_ladder.lab.bench.sizes import find_size
from megatron_ladder.lab.study.adaptation import adaptation_mistakes
from megatron_ladder.lab.study.commands import resolve_trial, training_flag_mistakes
from megatron_ladder.lab.study.options import (
    OWN_LINK,
    AdaptOptions,
    ReportOptions,
    Request,
    RunOptions,
    SmallRunOptions,
)
from megatron_ladder.lab.study.trial import Trial
from megatron_ladder.lab.study.wirings import ALL_WIRINGS, STANDARD, TIMED_WIRINGS

Command = Literal["run", "adapt", "report"]
COMMANDS: tuple[Command, ...] = get_args(Command)
NONE = "none"
DESCRIPTIONS: dict[Command, str] = {
    "run": "Trains a grid of wirings and seeds, at equal tokens and at equal time, and reports on it. Goes on where it "
    "stopped.",
    "adapt": "Rewires upper layers of standard models, which it trains if they are not there, heals them, and reports "
    "on it. The first of --sizes is adapted; flags about other wirings have no meaning.",
    "report": "Reports on what is there of a study.",
}


def parse_options(argv: Sequence[str]) -> Request | ReportOptions:
    """Reads `run|adapt|report` and the flags.

    Raises:
        UserError: a line for each mistake.
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
    return parse_request(words, command)


def parse_request(argv: Sequence[str], command: Command = "run") -> Request:
    """Reads the flags of `run` or `adapt`, and what stands behind --.

    Raises:
        UserError: a line for each mistake.
    """
    split = list(argv).index("--") if "--" in argv else len(argv)
    words, behind = argv[:split], tuple(argv[split + 1 :])
    mistakes: list[str] = []
    kind = SmallRunOptions if "--small" in words else RunOptions
    kinds = [kind, *[AdaptOptions] * (command == "adapt")]
    options, *adapt = parse_command_line(kinds, words, f"study.py {command}", DESCRIPTIONS[command], found=mistakes)
    if adapt:
        mistakes += _adapt_mistakes(options, *adapt)
        options = replace(options, wirings=(STANDARD,), timed_wirings=(NONE,))
    request = Request(options, behind, *adapt)
    mistakes += _grid_mistakes(options) + _number_mistakes(options) + _launcher_mistakes(options.launcher)
    if importlib.util.find_spec("matplotlib") is None:
        mistakes.append("matplotlib is not installed, which the report needs: pip install matplotlib")
    behind_mistakes = training_flag_mistakes(behind)
    if not mistakes and not behind_mistakes:
        # The trainer's own checks: of what it has been told by now, every number can be.
        for size in options.sizes:
            for wiring in options.wirings:
                trial = Trial("tokens", wiring, size, 1, max(options.learning_rates), options.tuning_iterations)
                resolve_trial(request, (), trial, mistakes)
    if mistakes or behind_mistakes:
        raise UserError(*dict.fromkeys([*mistakes, *behind_mistakes]))
    return request


def timed_wirings(options: RunOptions) -> tuple[str, ...]:
    """Those that are trained at equal time as well; standard, whose time it is, is always one of them."""
    if not options.timed_wirings:
        return tuple(name for name in options.wirings if name in TIMED_WIRINGS)
    if options.timed_wirings == (NONE,):
        return ()
    return (*[STANDARD] * (STANDARD not in options.timed_wirings), *options.timed_wirings)


def _grid_mistakes(options: RunOptions) -> list[str]:
    mistakes = []
    strange = [name for name in options.wirings if name not in ALL_WIRINGS]
    if strange:
        mistakes.append(f"--wirings {' '.join(strange)}: expected some of {', '.join(ALL_WIRINGS)}")
    timed = timed_wirings(options)
    known = TIMED_WIRINGS if options.link != OWN_LINK else ALL_WIRINGS
    beyond = [name for name in timed if name not in known or name not in options.wirings]
    if beyond:
        mistakes.append(
            f"--timed-wirings {' '.join(beyond)}: expected some of --wirings that are timed, {', '.join(known)}; "
            f"or {NONE}"
        )
    if STANDARD not in options.wirings:
        mistakes.append(f"--wirings {' '.join(options.wirings)}: all are compared with {STANDARD}: add it")
    for size in options.sizes:
        try:
            shape = find_size(size)
        except ValueError as error:
            mistakes.append(f"--sizes {size}: {error}")
            continue
        if timed and options.link != OWN_LINK:
            parts = tensor_parallel_mistakes(shape, max(options.timing_ranks, 1))
            mistakes += [f"--timing-ranks {options.timing_ranks}: {part}" for part in parts]
    if options.tuning_seed in options.seeds and len(options.learning_rates) > 1:
        mistakes.append(f"--tuning-seed {options.tuning_seed}: is one of --seeds: give another one")
    alpha = parse_alpha(options.link)
    if options.link != OWN_LINK and (alpha is None or alpha[0] == 0):
        mistakes.append(f"--link {options.link}: expected a time such as 1.2c or 2ms, or {OWN_LINK}")
    for name in ("wirings", "timed_wirings", "sizes", "seeds", "learning_rates"):
        values = getattr(options, name)
        twice = dict.fromkeys(value for value in values if values.count(value) > 1)
        mistakes += [f"{flag_name(name)} {value}: is given twice" for value in twice]
    return mistakes


def _adapt_mistakes(options: RunOptions, adapt: AdaptOptions) -> list[str]:
    mistakes = [
        f"--{name.replace('_', '-')}: has no meaning for an adaptation, which is of standard models: leave it out"
        for name in ("wirings", "timed_wirings")
        if getattr(options, name) != getattr(RunOptions, name)
    ]
    if not adapt.healing_rate_share > 0:
        mistakes.append(f"--healing-rate-share {adapt.healing_rate_share}: expected more than 0")
    try:
        layers = find_size(options.sizes[0]).num_layers
    except ValueError:
        # It is told with the other sizes.
        return mistakes
    return mistakes + adaptation_mistakes(layers, adapt.adapt_layers, adapt.healing_percent)


def _number_mistakes(options: RunOptions) -> list[str]:
    mistakes = []
    above_zero = (
        "iterations", "tuning_iterations", "seq_length", "micro_batch_size", "global_batch_size", "evaluations",
        "eval_iters", "saves", "jobs",
    )  # fmt: skip
    for name in above_zero:
        if getattr(options, name) < 1:
            mistakes.append(f"{flag_name(name)} {getattr(options, name)}: expected 1 or more")
    mistakes += [f"--learning-rates {rate:g}: expected more than 0" for rate in options.learning_rates if rate <= 0]
    mistakes += [f"--seeds {seed}: expected 0 or more" for seed in options.seeds if seed < 0]
    mistakes += [f"--tuning-seed {options.tuning_seed}: expected 0 or more"] * (options.tuning_seed < 0)
    mistakes += [f"--timing-rounds {options.timing_rounds}: expected 4 or more"] * (options.timing_rounds < 4)
    mistakes += [f"--timing-ranks {options.timing_ranks}: expected 2 or more"] * (options.timing_ranks < 2)
    for name in ("warm_up_share", "last_rate_share"):
        value = getattr(options, name)
        mistakes += [f"{flag_name(name)} {value}: expected a share, 0 to 1"] * (not 0 <= value <= 1)
    mistakes += [f"--warm-up-share {options.warm_up_share}: leaves no step after it"] * (options.warm_up_share == 1)
    return mistakes


def _launcher_mistakes(launcher: str | None) -> list[str]:
    if launcher is None:
        return []
    try:
        words = shlex.split(launcher)
    except ValueError as error:
        return [f"--launcher {launcher}: {error}"]
    if not words or shutil.which(words[0]) is None:
        return [f"--launcher {launcher}: {words[0] if words else 'nothing'} is no program that can be started"]
    return []

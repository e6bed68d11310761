"""Runs of command lines, and what is wrong with them."""

from collections.abc import Callable, Sequence
from typing import Any

from megatron_ladder.config.run import parse_run, resolve_run
from megatron_ladder.errors import UserError


def errors_of(call: Callable[..., object], *args: Any, **named: Any) -> list[str]:
    """Return the messages of the user's mistakes that a call reports; none if it returns."""
    try:
        call(*args, **named)
    except UserError as error:
        return list(error.messages)
    return []


def run_or_errors(argv: Sequence[str], vocab_size: int, world_size: int) -> tuple[Any, list[str]]:
    """Return the run of a command line, or None and its errors."""
    try:
        return resolve_run(parse_run(argv, world_size=world_size), vocab_size, world_size), []
    except UserError as error:
        return None, list(error.messages)

"""Telling a user of many mistakes at once."""

from collections.abc import Sequence

from megatron_ladder.errors import UserError

MOST_NAMED = 20


def limited(mistakes: Sequence[str]) -> list[str]:
    """The first mistakes, and how many more there are."""
    named = list(mistakes[:MOST_NAMED])
    if len(mistakes) > MOST_NAMED:
        named.append(f"and {len(mistakes) - MOST_NAMED} more")
    return named


def raise_mistakes(mistakes: Sequence[str]) -> None:
    """Raises UserError with a line for each, if there are any."""
    if mistakes:
        raise UserError(*limited(mistakes))

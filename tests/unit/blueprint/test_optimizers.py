"""The table of optimizers."""

import pytest

from megatron_ladder.blueprint.optimizers import optimizer_kind
from megatron_ladder.errors import UserError


def test_an_unknown_optimizer_is_rejected() -> None:
    """A checkpoint may have been trained by another version, with an optimizer that this one lacks."""
    assert optimizer_kind("adam") is optimizer_kind("adamw") is not optimizer_kind("muon")
    with pytest.raises(UserError, match="--optimizer adamv: did you mean adamw"):
        optimizer_kind("adamv")

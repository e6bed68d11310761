"""The mapping between elements of local parameters and of canonical tensors."""

import pytest

from megatron_ladder.blueprint.specs import Role, TensorSpec
from megatron_ladder.parallel.layout import Section, split_interval


def test_a_row_parallel_parameter_is_one_run() -> None:
    section = Section(TensorSpec("o", (3, 8), Role.MATRIX, 1), start=4, length=4)
    assert list(split_interval([section], (3, 4), 2, 7)) == [(section, 2, 0, 7)]
    with pytest.raises(ValueError, match="is not contiguous"):
        list(split_interval([section], (3, 5), 0, 15))

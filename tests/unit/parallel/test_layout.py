"""The mapping between elements of local parameters and of canonical tensors."""

import pytest
import torch

from megatron_ladder.blueprint.boxes import Box
from megatron_ladder.blueprint.tensors import TensorSpec
from megatron_ladder.parallel.layout import Section, split_interval

Q = Section(TensorSpec("q", (8, 3), 0), start=4, length=4)
K = Section(TensorSpec("k", (2, 3), 0), start=1, length=1, local_start=4)
ROW = Section(TensorSpec("o", (3, 8), 1), start=4, length=4)


def test_sections_know_their_boxes() -> None:
    assert Q.box == Box((4, 0), (4, 3)) and ROW.box == Box((0, 4), (3, 4))
    parameter = torch.arange(15).view(5, 3)
    assert K.view(parameter).tolist() == [[12, 13, 14]]


def test_run_is_split_at_section_borders() -> None:
    # A [6, 3] parameter: four rows of q, one of k, one of padding.
    assert list(split_interval([Q, K], (6, 3), 0, 18)) == [(Q, 0, 0, 12), (K, 0, 12, 3)]
    assert list(split_interval([Q, K], (6, 3), 10, 4)) == [(Q, 10, 0, 2), (K, 0, 2, 2)]
    assert list(split_interval([Q, K], (6, 3), 13, 5)) == [(K, 1, 0, 2)]
    assert list(split_interval([Q, K], (6, 3), 15, 3)) == []


def test_a_row_parallel_parameter_is_one_run() -> None:
    assert list(split_interval([ROW], (3, 4), 2, 7)) == [(ROW, 2, 0, 7)]
    with pytest.raises(ValueError, match="is not contiguous"):
        list(split_interval([ROW], (3, 5), 0, 15))

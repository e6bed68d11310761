"""Which layers a stage gets, against all partitions there are."""

import itertools

import pytest

from megatron_ladder.blueprint.partition import balanced_partition
from megatron_ladder.config.run import parse_run, resolve_run
from megatron_ladder.engine.build import partition


def sizes(ranges: list[range]) -> list[int]:
    assert [r.start for r in ranges] == [0, *(r.stop for r in ranges[:-1])]
    return [len(r) for r in ranges]


def test_the_heaviest_stage_is_as_light_as_in_any_partition() -> None:
    weights, before, after = [3, 1, 4, 1, 5, 9, 2, 6], 7, 8
    for stages in range(1, 9):
        found = balanced_partition(weights, before, after, stages)
        assert len(found) == stages and min(sizes(found)) >= 1 and found[-1].stop == 8

        def heaviest(bounds: tuple[int, ...]) -> int:
            totals = [sum(weights[a:b]) for a, b in itertools.pairwise(bounds)]
            totals[0] += before
            totals[-1] += after
            return max(totals)

        every = ((0, *cut, 8) for cut in itertools.combinations(range(1, 8), stages - 1))
        assert heaviest((0, *(r.stop for r in found))) == min(map(heaviest, every))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", [4, 4]),
        # A layer has 4 x 64^2 + 3 x 64 x 172 parameters and norms, about 49 thousand; 2000 words are 128 thousand.
        ("--pipeline-partition parameters", [4, 4]),
        # The final norm is on the last stage.
        ("--pipeline-partition parameters --num-layers 7", [4, 3]),
        ("--pipeline-partition parameters --pipeline-model-parallel-size 4", [1, 3, 3, 1]),
        # The last stage holds a copy of a tied matrix.
        ("--pipeline-partition parameters --pipeline-model-parallel-size 4 --tie-embeddings", [1, 3, 3, 1]),
    ],
)
def test_a_runs_partition(words: str, expected: list[int]) -> None:
    base = (
        "--train-iters 9 --lr 1e-3 --seq-length 128 --hidden-size 64 --ffn-hidden-size 172 --num-attention-heads 4 "
        "--num-layers 8 --pipeline-model-parallel-size 2 "
    )
    run = resolve_run(parse_run((base + words).split()), 2000, 4)
    assert sizes(partition(run)) == expected

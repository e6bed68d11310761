"""Programs with one planted fault each, of four ranks: tensor-parallel pairs 0-1 and 2-3, data-parallel pairs 0, 2 and
1, 3, and a pipeline transfer from 0 to 1."""

from collections.abc import Callable

import pytest

from ladder_lab.dry_run.replay import Collective, Communicator, RankProgram, find_problems

TENSOR, DATA, PAIR = 0, 1, 2
Programs = dict[int, RankProgram]


def collective(slot: int, place: str, kind: str = "all_reduce", size: int = 64, source: int = -1) -> Collective:
    return Collective(slot, kind, size, "bfloat16", source, place)


def programs() -> Programs:
    def of(rank: int) -> RankProgram:
        tensor, data = (0, 1) if rank < 2 else (2, 3), (rank % 2, rank % 2 + 2)
        groups = [Communicator("tensor", tensor), Communicator("data", data), Communicator("world pair", (0, 1))]
        own = [
            collective(TENSOR, "layers.0.attention"),
            collective(TENSOR, "layers.0.mlp"),
            collective(DATA, "step", "reduce_scatter"),
            collective(TENSOR, "layers.1.attention"),
        ]
        if rank < 2:
            own.append(collective(PAIR, "pipeline", "recv" if rank else "send", source=0))
        return RankProgram(groups, own)

    return {rank: of(rank) for rank in range(4)}


def smaller(of_rank_3: list[Collective], all_programs: Programs) -> None:
    of_rank_3[1] = of_rank_3[1]._replace(size=32)


def between_two_groups(of_rank_3: list[Collective], all_programs: Programs) -> None:
    """Every communicator sees the same launches, but ranks 0 and 3 reduce over the other group first."""
    for collectives in (of_rank_3, all_programs[0].collectives):
        collectives[2:4] = reversed(collectives[2:4])  # type: ignore[index]


def test_ranks_that_match_have_no_problems() -> None:
    assert find_problems(programs()) == []


@pytest.mark.parametrize(
    ("plant", "expected"),
    [
        (
            smaller,
            "group 'tensor' of ranks 2-3, collective 2: rank 3 launches all_reduce of 32 bytes (bfloat16) in "
            "layers.0.mlp, but rank 2 launches all_reduce of 64 bytes (bfloat16) in layers.0.mlp",
        ),
        (
            between_two_groups,
            "cyclic wait: rank 0 waits in all_reduce of 64 bytes (bfloat16) in layers.1.attention of group 'tensor' of "
            "ranks 0-1; rank 1 waits in reduce_scatter of 64 bytes (bfloat16) in step of group 'data' of ranks 1, 3; "
            "rank 3 waits in all_reduce of 64 bytes (bfloat16) in layers.1.attention of group 'tensor' of ranks 2-3; "
            "rank 2 waits in reduce_scatter of 64 bytes (bfloat16) in step of group 'data' of ranks 0, 2; each of "
            "these ranks waits for the next one, and the last for the first",
        ),
    ],
)
def test_a_planted_fault_is_named(plant: Callable[[list[Collective], Programs], None], expected: str) -> None:
    faulty = programs()
    plant(faulty[3].collectives, faulty)  # type: ignore[arg-type]
    assert expected in find_problems(faulty)


def exchange(*kinds: str) -> Programs:
    """Two stages that send to each other, in this order of their launches."""
    groups = [Communicator("pipeline pair", (0, 1)), Communicator("pipeline, descending pair", (0, 1))]

    def of(rank: int) -> RankProgram:
        slots = {"send": rank, "recv": 1 - rank}
        sources = {"send": rank, "recv": 1 - rank}
        return RankProgram(groups, [collective(slots[kind], "step", kind, source=sources[kind]) for kind in kinds])

    return {0: of(0), 1: of(1)}


def test_receives_may_start_before_the_sends_of_the_other_direction() -> None:
    assert find_problems(exchange("recv", "send")) == find_problems(exchange(*["recv", "send"] * 5)) == []


def test_sends_that_wait_for_receives_behind_sends_are_a_circle() -> None:
    (problem,) = find_problems(exchange("send", "recv"))
    launch = "waits in send of 64 bytes (bfloat16) in step of group"
    assert problem.startswith(f"cyclic wait: rank 0 {launch} 'pipeline pair' of ranks 0-1; rank 1 {launch} 'pipeline, ")


def test_launches_in_two_groups_of_several_ranks_may_cross_in_time() -> None:
    """Ranks 0 and 1 are one tensor-parallel reduce ahead of ranks 2 and 3 when all meet in the data groups."""
    ahead = programs()
    for rank in (0, 1):
        own = [*ahead[rank].collectives]
        ahead[rank] = RankProgram(ahead[rank].communicators, [own[0], own[1], own[3], own[2], *own[4:]])
    assert find_problems(ahead) == []

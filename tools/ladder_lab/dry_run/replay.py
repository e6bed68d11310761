"""Replays the collectives of all ranks against each other, as NCCL would run them, and finds those that never match.

A communicator completes a collective when all its ranks have launched it. NCCL matches by order alone: it compares
neither operations nor sizes, so two ranks that differ hang or mix up their data. Two checks find every difference:

1. All ranks of a communicator must launch the same sequence: operation, size, dtype, source and sub-block. A send and
   its receive are the two sides of one operation in the communicator of their two ranks.
2. Each rank waits at each of its collectives until all ranks of the communicator have arrived, and at each send until
   its receive has started, but at no receive, which starts before the pass under which it runs. If this order of
   launches comes to an end, so does every weaker one, in which collectives of several communicators overlap. If it
   stops, some ranks wait for each other in a circle. That is an error even where streams could hide it, because the
   kernels of one collective may occupy the device that the other needs (`comm/mesh.py`).
"""

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from megatron_ladder.comm.agreement import name_ranks
from megatron_ladder.errors import limited


class Communicator(NamedTuple):
    """Ranks that communicate, in order, and the name of their group."""

    name: str
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        return f"group '{self.name}' of {_short(self.ranks)}"

    def moved(self, distance: int) -> "Communicator":
        """Return the communicator of the ranks at this distance."""
        return Communicator(self.name, tuple(rank + distance for rank in self.ranks))


class Collective(NamedTuple):
    """One launch of a rank."""

    slot: int
    """Index of the communicator in the rank's program."""
    kind: str
    """Such as `all_reduce`, `send` and `recv`."""
    size: int
    """Bytes of this rank's part: the input of a gather, the result of a reduce-scatter."""
    dtype: str
    source: int
    """Index in the communicator of the rank whose data the others receive; -1 if all ranks contribute."""
    place: str
    """The sub-block or the function that launches it."""

    @property
    def contract(self) -> tuple[object, ...]:
        """What all ranks of the communicator must have in common."""
        if self.kind in ("send", "recv"):
            return "send", self.size, self.dtype, self.source
        return self.kind, self.size, self.dtype, self.source, self.place

    def __str__(self) -> str:
        return f"{self.kind} of {self.size:,} bytes ({self.dtype}) in {self.place}"


class RankProgram(NamedTuple):
    """The launches of one rank in order; ranks that differ only in their communicators share the sequence."""

    communicators: Sequence[Communicator]
    collectives: Sequence[Collective]


def find_problems(programs: Mapping[int, RankProgram]) -> list[str]:
    """Return one message per communicator whose ranks differ, or one about ranks that wait in a circle.

    `programs` has every rank of every communicator.
    """
    return limited(list(_differences(programs))) or _run_to_the_end(programs)


def _differences(programs: Mapping[int, RankProgram]) -> Iterator[str]:
    members: dict[Communicator, dict[int, tuple[Collective, ...]]] = {}
    # Ranks that share a sequence share its parts.
    parts: dict[int, list[tuple[Collective, ...]]] = {}
    for rank, (communicators, collectives) in programs.items():
        if id(collectives) not in parts:
            lists: list[list[Collective]] = [[] for _ in communicators]
            for collective in collectives:
                lists[collective.slot].append(collective)
            parts[id(collectives)] = [tuple(part) for part in lists]
        for communicator, part in zip(communicators, parts[id(collectives)], strict=True):
            if part and rank not in communicator.ranks:
                yield f"rank {rank} launches {part[0]} in {communicator}, to which it does not belong"
            members.setdefault(communicator, {})[rank] = part
    equal: dict[tuple[int, ...], bool] = {}
    for communicator, parts_of_ranks in members.items():
        launches = {rank: parts_of_ranks.get(rank, ()) for rank in communicator.ranks}
        key = tuple(dict.fromkeys(id(part) for part in launches.values()))
        if key not in equal:
            parts_by_id = {id(part): part for part in launches.values()}
            contracts = {tuple(collective.contract for collective in part) for part in parts_by_id.values()}
            equal[key] = len(contracts) == 1
        if not equal[key]:
            yield _describe_difference(communicator, launches)


def _describe_difference(communicator: Communicator, launches: Mapping[int, Sequence[Collective]]) -> str:
    """Name the first collective that differs, the ranks that differ from most others, and what both launch."""
    number = 0
    while len({launched[number].contract if number < len(launched) else None for launched in launches.values()}) == 1:
        number += 1
    at = {rank: part[number] if number < len(part) else None for rank, part in launches.items()}
    kinds = {rank: None if launched is None else launched.contract for rank, launched in at.items()}
    usual = Counter(kinds.values()).most_common(1)[0][0]
    others = [rank for rank, kind in kinds.items() if kind != usual]
    same = [rank for rank in kinds if kinds[rank] == usual]
    odd = [rank for rank in others if kinds[rank] == kinds[others[0]]]
    differing = f"{_launches(odd, at[odd[0]])}, but {_launches(same, at[same[0]])}"
    return f"{communicator}, collective {number + 1}: {differing}"


def _short(ranks: Sequence[int]) -> str:
    """Format ranks at equal distances by the first two and the last: `ranks 0, 8, ... 56`."""
    steps = {after - before for before, after in pairwise(sorted(ranks))}
    if len(ranks) > 3 and len(steps) == 1 and steps != {1}:
        first, second, *_, last = sorted(ranks)
        return f"ranks {first}, {second}, ... {last}"
    return name_ranks(sorted(ranks))


def _launches(ranks: Sequence[int], collective: Collective | None) -> str:
    verb = "launches" if len(ranks) == 1 else "launch"
    return f"{_short(ranks)} {verb} {'nothing more' if collective is None else collective}"


def _run_to_the_end(programs: Mapping[int, RankProgram]) -> list[str]:
    done = dict.fromkeys(programs, 0)
    arrived: Counter[Communicator] = Counter()
    receives: Counter[tuple[Communicator, int]] = Counter()
    senders: dict[tuple[Communicator, int], int] = {}
    ready = deque(programs)
    while ready:
        rank = ready.popleft()
        communicators, collectives = programs[rank]
        if done[rank] == len(collectives):
            continue
        launched = collectives[done[rank]]
        communicator = communicators[launched.slot]
        direction = communicator, launched.source
        if launched.kind == "send" and not receives[direction]:
            senders[direction] = rank
            continue
        if launched.kind in ("send", "recv"):
            receives[direction] += 1 if launched.kind == "recv" else -1
            done[rank] += 1
            ready.append(rank)
            if direction in senders and receives[direction]:
                ready.append(senders.pop(direction))
            continue
        arrived[communicator] += 1
        if arrived[communicator] == len(communicator.ranks):
            arrived[communicator] = 0
            for member in communicator.ranks:
                done[member] += 1
            ready.extend(communicator.ranks)
    rest = {rank: programs[rank].collectives[count:] for rank, count in done.items()}
    waiting = {rank: collectives[0] for rank, collectives in rest.items() if collectives}
    return [_describe_circle(programs, waiting)] if waiting else []


def _describe_circle(programs: Mapping[int, RankProgram], waiting: Mapping[int, Collective]) -> str:
    def awaited(rank: int) -> int:
        """Return a rank that has not arrived where this one waits."""
        mine = programs[rank].communicators[waiting[rank].slot]
        places = ((other, programs[other].communicators[waiting[other].slot]) for other in mine.ranks)
        return next(other for other, position in places if position != mine)

    path = [next(iter(waiting))]
    while (following := awaited(path[-1])) not in path:
        path.append(following)
    circle = path[path.index(following) :]
    steps = (
        f"rank {rank} waits in {waiting[rank]} of {programs[rank].communicators[waiting[rank].slot]}" for rank in circle
    )
    return f"cyclic wait: {'; '.join(steps)}; each of these ranks waits for the next one, and the last for the first"

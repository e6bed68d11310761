"""The time of a pipeline schedule, computed from its rules instead of measured."""

from megatron_ladder.engine.schedule import Pass, Slot


def played_seconds(schedule: list[list[Slot]], forward: float, backward: float, send: float = 0.0) -> float:
    """Return the time of a step whose passes take these seconds.

    A rank waits for its inputs before it computes. After it has computed, it waits for the sends of the slot before. A
    transfer takes `send` seconds from the moment when both ends have started it and the pair's earlier transfers have
    ended.
    """
    clocks, arrivals = [0.0] * len(schedule), dict[tuple[int, Pass], float]()
    sends: list[list[float]] = [[] for _ in schedule]
    pair_ends = dict[frozenset[int], float]()
    for slots in zip(*schedule, strict=True):
        for rank, (work, _) in enumerate(slots):
            if work is not None:
                clocks[rank] = max(clocks[rank], arrivals.get((rank, work), 0.0))
                clocks[rank] += forward if work.is_forward else backward
            clocks[rank] = max([clocks[rank], *sends[rank]])
            sends[rank].clear()
        for transfer in sorted({transfer for slot in slots for transfer in slot.transfers}):
            pair = frozenset((transfer.source, transfer.target))
            start = max(clocks[transfer.source], clocks[transfer.target], pair_ends.get(pair, 0.0))
            pair_ends[pair] = start + send
            arrivals[transfer.target, transfer.read_by] = start + send
            sends[transfer.source].append(start + send)
    return max(clocks)

"""The time of a pipeline schedule, computed from its rules instead of measured."""

from megatron_ladder.engine.schedule import Pass, Slot


def played_seconds(schedule: list[list[Slot]], forward: float, backward: float, send: float = 0.0) -> float:
    """Return the time of a step whose passes take these seconds.

    A rank starts the receives of a slot, waits for its input and computes. Then it waits for the send of the slot
    before. A transfer takes `send` seconds from the moment when both ends have started it and the earlier transfers
    from the same sender to the same receiver have ended.
    """
    clocks, arrivals = [0.0] * len(schedule), dict[tuple[int, Pass], float]()
    sends: list[list[float]] = [[] for _ in schedule]
    lane_ends = dict[tuple[int, int], float]()
    for slots in zip(*schedule, strict=True):
        receives_start = [*clocks]
        for rank, (work, _) in enumerate(slots):
            if work is not None:
                clocks[rank] = max(clocks[rank], arrivals.get((rank, work), 0.0))
                clocks[rank] += forward if work.is_forward else backward
            clocks[rank] = max([clocks[rank], *sends[rank]])
            sends[rank].clear()
        for transfer in sorted({transfer for slot in slots for transfer in slot.transfers}):
            lane = transfer.source, transfer.target
            start = max(clocks[transfer.source], receives_start[transfer.target], lane_ends.get(lane, 0.0))
            lane_ends[lane] = start + send
            arrivals[transfer.target, transfer.read_by] = start + send
            sends[transfer.source].append(start + send)
    return max(clocks)

"""Records of streamed texts that are passed over because they cannot be read."""

from collections.abc import Callable, Iterable, Sequence

from megatron_ladder.data.reading.protocol import BadRecord
from megatron_ladder.errors import UserError


class SkippedRecords:
    """Those that one rank knows of. Each counts once, however often its epoch or window is read again.

    A rank counts what its own streams met, and what a checkpoint told of all. So an input with no more than `most` of
    them is read to its end by any number of ranks, again and again.
    """

    def __init__(
        self,
        most: int = 0,
        report: Callable[[str], None] = print,
        known: Iterable[Sequence[int]] = (),
    ) -> None:
        """
        Args:
            report: takes a line about each that was not known.
            known: what `state` gave, of any number of ranks.
        """
        self._most, self._report = most, report
        self._known = {(shard, block, record) for shard, block, record in known}

    def take(self, shard: int, block: int, bad: Sequence[BadRecord], place: Callable[[int, int], str]) -> None:
        """Counts the bad records of a block.

        Args:
            shard: number of the shard, as they lie in the plan.
            block: number of the block in its shard.
            place: block and record -> where that is found, for messages.

        Raises:
            UserError: they are more than may be passed over.
        """
        for record in bad:
            found = (shard, block, record.number)
            # A block of more than may be passed over was not read to its end.
            if found in self._known and len(bad) <= self._most:
                continue
            where = f"--streaming {place(block, record.number)}: {record.reason}"
            if len(self._known) >= self._most:
                already = f" ({len(self._known)} before it were skipped: --streaming-skip-bad-lines {self._most})"
                raise UserError(where + (already if self._most else ""))
            self._known.add(found)
            self._report(f"skipped: {where}")

    def state(self) -> list[list[int]]:
        """Shard, block and record of each; JSON-able."""
        return [list(found) for found in sorted(self._known)]

"""Converts documents to token files: worker processes tokenize blocks of the input, which are written in order.

The input is cut into shards of about a gigabyte. No output has its final name before the whole input is read, and a run
that was interrupted or failed continues after the shards that it has finished.
"""

import itertools
import math
import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from megatron_ladder.data.encoding import KeyTokens, Task
from megatron_ladder.data.indexed import IndexedDataset, Sidecar, documents_with_targets
from megatron_ladder.data.partial import FinishedShard, Partial
from megatron_ladder.data.reading.find import find_sources
from megatron_ladder.data.reading.protocol import GROUP_BYTES, Block, Reading, Shard, Source
from megatron_ladder.errors import UserError
from megatron_ladder.processes import interrupts_blocked
from megatron_ladder.progress import ProgressBar


@dataclass(frozen=True)
class PreprocessOptions:
    """Options that do not change the tokens; the flags of preprocess_data.py, and a receiver of messages."""

    workers: int = 1
    log_interval: int = 1000
    report: Callable[[str], None] = print
    shard_bytes: int = 1 << 30
    """Approximate size of the input whose output is finished or absent; an interrupted run loses at most one."""


class _TokenizedGroup(NamedTuple):
    """The result of a worker: `bad` has one line per unreadable record; `documents` includes empty ones."""

    file_bytes: int
    documents: int
    bad: list[str]
    keys: tuple[KeyTokens, ...]


def preprocess(
    inputs: Sequence[str | Path], output_prefix: Path, task: Task, options: PreprocessOptions = PreprocessOptions()
) -> dict[str, Sidecar]:
    """Write or replace `<output_prefix>_<key>_document.{bin,idx,json}` for each key, and return the sidecars.

    Raises:
        UserError: an input is missing, malformed (`file:line`) or without text, or the output cannot be written.
        OSError: a file or the network failed during the run.
    """
    sources = find_sources(inputs, task.reading)
    shards = list(_joined_shards(sources, task.reading, options.shard_bytes))
    with Partial(output_prefix, task, options.report) as partial:
        made_of = [partial.made_of(members) for members in shards]
        found = [partial.find(number, one) for number, one in enumerate(made_of)]
        if any(found):
            options.report(
                f"resuming: an earlier run has finished {len(found) - found.count(None)} of {len(found)} shards"
            )
        finished = _make_missing(shards, made_of, found, task, partial, options)
        parts = {name: partial.parts(name, len(shards)) for name in task.outputs}
        for name, datasets in parts.items():
            documents = sum(map(len, datasets))
            without_targets = documents - sum(map(_with_targets, datasets))
            if without_targets == documents:
                shown = " ".join(source.name for source in sources[:3]) + (" ..." if len(sources) > 3 else "")
                problem = (
                    "conversation with a text of the assistant" if documents else f"document with a non-empty {name!r}"
                )
                partial.discard()
                raise UserError(f"--input {shown}: no {problem}: nothing is written")
            if without_targets:
                options.report(f"{without_targets:,} of {documents:,} conversations have no text of the assistant")
        skipped = sum(len(shard.skipped) for shard in finished)
        return {name: partial.join(name, datasets, skipped) for name, datasets in parts.items()}


def _with_targets(dataset: IndexedDataset) -> int:
    """Return the number of documents with a token, but the first, that counts in the loss."""
    bounds, mask = dataset.document_bounds, dataset.loss_mask
    return len(dataset) if mask is None else int(documents_with_targets(mask, bounds[:-1], bounds[1:]).sum())


def _joined_shards(sources: Sequence[Source], reading: Reading, most_bytes: int) -> Iterator[tuple[Shard, ...]]:
    """Yield all shards in order; small ones together, up to `most_bytes`."""
    joined: list[Shard] = []
    size = 0
    for shard in (shard for source in sources for shard in source.shards(reading, most_bytes)):
        own = most_bytes if shard.total_bytes is None else shard.total_bytes
        if joined and size + own > most_bytes:
            yield tuple(joined)
            joined, size = [], 0
        joined.append(shard)
        size += own
    yield tuple(joined)


def _make_missing(
    shards: Sequence[tuple[Shard, ...]],
    made_of: Sequence[dict[str, object]],
    found: Sequence[FinishedShard | None],
    task: Task,
    partial: Partial,
    options: PreprocessOptions,
) -> list[FinishedShard]:
    """Return the records of all shards, after tokenizing those that were not `found`."""
    sizes = [[shard.total_bytes for shard in members] for members in shards]
    total = None if any(None in members for members in sizes) else sum(size or 0 for size in itertools.chain(*sizes))
    missing = [number for number, record in enumerate(found) if record is None]
    expected = sum(size or options.shard_bytes for number in missing for size in sizes[number])
    done = sum(size or 0 for number, record in enumerate(found) if record is not None for size in sizes[number])
    workers = min(options.workers, math.ceil(expected / GROUP_BYTES))
    finished = list(found)
    skipped = 0
    for record in found:
        skipped = _count_skipped(skipped, [] if record is None else record.skipped, task.reading.max_bad)
    read_bytes = documents = shown_documents = 0
    with (
        ProgressBar("tokenized", total, done=done) as bar,
        closing(
            _tokenize_all(_groups([shards[number] for number in missing], task.reading), task, workers)
        ) as tokenized,
    ):
        for number in missing:
            with partial.begin(number, made_of[number]) as writer:
                for group, is_last in tokenized:
                    skipped = _count_skipped(skipped, group.bad, task.reading.max_bad)
                    for line in group.bad:
                        options.report(f"skipped {line}")
                    writer.add(group.keys, group.bad)
                    read_bytes, documents = read_bytes + group.file_bytes, documents + group.documents
                    if documents - shown_documents >= options.log_interval:
                        bar.advance(read_bytes, documents=documents)
                        read_bytes, shown_documents = 0, documents
                    if is_last:
                        break
                finished[number] = writer.finish()
        bar.advance(read_bytes, documents=documents)
    return [record for record in finished if record is not None]


def _count_skipped(before: int, lines: Sequence[str], max_bad: int) -> int:
    """Return the number of skipped records with these; raises UserError for more than `max_bad`."""
    if before + len(lines) > max_bad:
        first = lines[max_bad - before]
        raise UserError(first + (f" ({max_bad} before it were skipped: --skip-bad-lines {max_bad})" if max_bad else ""))
    return before + len(lines)


def _groups(shards: Sequence[tuple[Shard, ...]], reading: Reading) -> Iterator[tuple[tuple[Block, ...], bool]]:
    """Yield all blocks in groups of ~GROUP_BYTES, and whether each group is the last one of an element of `shards`."""
    for members in shards:
        group: list[Block] = []
        size = 0
        for block in (block for shard in members for block in shard.blocks(reading)):
            if size >= GROUP_BYTES:
                yield tuple(group), False
                group, size = [], 0
            group.append(block)
            size += block.text_bytes
        yield tuple(group), True


def _tokenize_all(
    groups: Iterator[tuple[tuple[Block, ...], bool]], task: Task, workers: int
) -> Generator[tuple[_TokenizedGroup, bool], None, None]:
    """Yield tokenized groups in the order of the input; raises a worker's error, or BrokenProcessPool if one dies."""
    if workers <= 1:
        yield from ((_tokenize_group(task, group), is_last) for group, is_last in groups)
        return
    # Not multiprocessing.Pool, which waits forever for a worker that was killed.
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), initializer=_initialize_worker)
    with ExitStack() as stack:
        stack.callback(pool.shutdown, wait=True, cancel_futures=True)
        with interrupts_blocked():
            # A task starts a worker if none is idle.
            for _ in range(workers):
                pool.submit(os.getpid)
        ahead = deque[tuple[Future[_TokenizedGroup], bool]]()
        for group, is_last in groups:
            ahead.append((pool.submit(_tokenize_group, task, group), is_last))
            if len(ahead) > 2 * workers:
                future, was_last = ahead.popleft()
                yield future.result(), was_last
        for future, was_last in ahead:
            yield future.result(), was_last


def _initialize_worker() -> None:
    """Limit the tokenizer to one thread, and end the worker if its parent is killed."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"

    def end_with_parent() -> None:
        parent = multiprocessing.parent_process()
        if parent is not None:
            parent.join()
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()


def _tokenize_group(task: Task, group: Sequence[Block]) -> _TokenizedGroup:
    parsed = [task.prepare(block.read(task.reading)) for block in group]
    bad = [
        f"{block.place(number)}: {reason}"
        for block, one in zip(group, parsed, strict=True)
        for number, reason in one.bad
    ]
    columns = [[value for one in parsed for value in one.columns[place]] for place in range(len(task.outputs))]
    file_bytes = sum(block.file_bytes for block in group)
    return _TokenizedGroup(file_bytes, len(columns[0]), bad, task.encode(columns))

"""Converts documents to token files: worker processes tokenize blocks of the input, which are written in order.

No output has its final name before the whole input is read. A run that was interrupted (by a signal, the network or
the file system) resumes where it stopped; a run with wrong input leaves no files.
"""

import itertools
import math
import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from megatron_ladder.data.encoding import KeyTokens, Task, TextTask
from megatron_ladder.data.partial import Partial
from megatron_ladder.data.reading.find import find_sources, group_blocks
from megatron_ladder.data.reading.protocol import GROUP_BYTES, BadRecord, Block, Reading, Source, WrongInputError
from megatron_ladder.data.sidecar import Sidecar
from megatron_ladder.data.tokenizers import Tokenizer, source_of
from megatron_ladder.errors import UserError
from megatron_ladder.processes import interrupts_blocked
from megatron_ladder.progress import ProgressBar

_COMMIT_SECONDS = 5.0
"""Time between two commits, which a killed run loses at most."""


@dataclass(frozen=True)
class PreprocessOptions:
    """Options that do not change the tokens; the flags of preprocess_data.py, and a receiver of messages."""

    workers: int = 1
    partitions: int = 1
    log_interval: int = 1000
    report: Callable[[str], None] = print


class _TokenizedGroup(NamedTuple):
    """The result of a worker: `blocks` are source, records and bad records; `documents` includes empty ones."""

    file_bytes: int
    documents: int
    blocks: tuple[tuple[int, int, tuple[BadRecord, ...]], ...]
    keys: tuple[KeyTokens, ...]


@dataclass
class _InputPosition:
    """The position in the input for the journal: completed groups of `group_blocks`, the last source and the records
    read of it, and the bytes read and records skipped of all sources."""

    groups: int = 0
    source: int = 0
    records: int = 0
    file_bytes: int = 0
    skipped: int = 0

    def advance(self, group: _TokenizedGroup, sources: Sequence[Source], max_bad: int) -> list[str]:
        """Count a group and return one line per skipped record; raises WrongInputError for more than `max_bad`."""
        lines = list[str]()
        for source, records, bad_records in group.blocks:
            if source != self.source:
                self.source, self.records = source, 0
            for bad in bad_records:
                where = f"{sources[source].place(self.records + bad.number)}: {bad.reason}"
                if self.skipped >= max_bad:
                    already = f" ({self.skipped} before it were skipped: --skip-bad-lines {max_bad})"
                    raise WrongInputError(where + (already if max_bad else ""))
                lines.append(where)
                self.skipped += 1
            self.records += records
        self.groups += 1
        self.file_bytes += group.file_bytes
        return lines


def preprocess(
    inputs: Sequence[str | Path],
    output_prefix: Path,
    tokenizer: Tokenizer,
    append_eod: bool = False,
    reading: Reading | None = None,
    options: PreprocessOptions | None = None,
) -> dict[str, Sidecar]:
    """Write or replace `<output_prefix>_<key>_document.{bin,idx,json}` for each key, and return the sidecars.

    Raises:
        UserError: an input is missing, malformed (`file:line`) or without text, or the output cannot be written.
        RuntimeError, OSError: a file or the network failed during the run; all progress is kept.
    """
    reading, options = reading or Reading(), options or PreprocessOptions()
    task = TextTask(source_of(tokenizer), tokenizer.sha256, tokenizer.vocab_size, tokenizer.eod_id, reading, append_eod)
    return run_task(find_sources(inputs, reading), output_prefix, tokenizer, task, options)


def run_task(
    sources: Sequence[Source], output_prefix: Path, tokenizer: Tokenizer, task: Task, options: PreprocessOptions
) -> dict[str, Sidecar]:
    """Process all sources with a task and publish its outputs; returns and raises as `preprocess`."""
    inputs = [source.identity() for source in sources]
    can_resume = all(source.name != "-" for source in sources)
    try:
        opened = Partial(output_prefix, task, inputs, can_resume, options.report)
    except OSError as error:
        raise UserError(f"--output-prefix {output_prefix}: cannot be written: {error}") from None
    with opened as partial:
        if partial.sidecars is not None:
            options.report("an earlier run finished without publishing its output: publishing it")
            sidecars = partial.sidecars
        else:
            position = _tokenize_rest(sources, task, partial, options)
            sidecars = [
                Sidecar(
                    tokenizer.kind,
                    tokenizer.sha256,
                    tokenizer.vocab_size,
                    tokenizer.eod_id,
                    task.append_eod,
                    conversations=task.conversations,
                    skipped=position.skipped,
                    **dataset.finish(),
                )
                for dataset in partial.datasets
            ]
            for name, sidecar in zip(task.outputs, sidecars, strict=True):
                if sidecar.documents == 0:
                    shown = " ".join(source.name for source in sources[:3]) + (" ..." if len(sources) > 3 else "")
                    raise WrongInputError(f"--input {shown}: no document with a non-empty {name!r}: nothing is written")
        partial.publish(sidecars)
    return dict(zip(task.outputs, sidecars, strict=True))


def _tokenize_rest(
    sources: Sequence[Source], task: Task, partial: Partial, options: PreprocessOptions
) -> _InputPosition:
    """Tokenize from the position in the journal to the end of the input, and return that position."""
    position = _InputPosition(**partial.place)
    if position.groups:
        done = sum(dataset.documents for dataset in partial.datasets)
        options.report(f"resuming after {position.file_bytes / 1e6:,.1f} MB and {done:,} documents of an earlier run")
    groups = itertools.islice(group_blocks(sources, task.reading, options.partitions), position.groups, None)
    sizes = [source.total_bytes for source in sources]
    expected = sum(size or GROUP_BYTES * options.workers for size in sizes)
    workers = min(options.workers, math.ceil(expected / GROUP_BYTES))
    total = None if None in sizes else sum(size or 0 for size in sizes)
    read_bytes = documents = shown_documents = 0
    try:
        with (
            ProgressBar("tokenized", total, done=position.file_bytes) as bar,
            closing(_tokenize_all(groups, task, workers)) as tokenized,
        ):
            for group in tokenized:
                for line in position.advance(group, sources, task.reading.max_bad):
                    options.report(f"skipped {line}")
                    partial.skip(line)
                for dataset, part in zip(partial.datasets, group.keys, strict=True):
                    dataset.add(part)
                read_bytes, documents = read_bytes + group.file_bytes, documents + group.documents
                if documents - shown_documents >= options.log_interval:
                    bar.advance(read_bytes, documents=documents)
                    read_bytes, shown_documents = 0, documents
                partial.commit(vars(position), at_least_seconds=_COMMIT_SECONDS)
            bar.advance(read_bytes, documents=documents)
    except KeyboardInterrupt:
        options.report(f"interrupted: run the same command again to resume; {partial.folder} keeps the progress")
        raise
    except (OSError, UserError) as error:
        if partial.is_kept_after(error):
            options.report(f"stopped: run the same command again to resume; {partial.folder} keeps the progress")
        if isinstance(error, OSError) and error.errno:
            where = error.filename or f"{partial.folder} or the input"
            raise RuntimeError(f"{where}: {error.strerror}") from error
        raise
    return position


def _tokenize_all(
    groups: Iterator[tuple[tuple[int, Block], ...]], task: Task, workers: int
) -> Generator[_TokenizedGroup, None, None]:
    """Yield tokenized groups in the order of the input; raises a worker's error, or BrokenProcessPool if one dies."""
    if workers <= 1:
        yield from (_tokenize_group(task, group) for group in groups)
        return
    # Not multiprocessing.Pool, which waits forever for a worker that was killed.
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), initializer=_initialize_worker)
    try:
        with interrupts_blocked():
            # A task starts a worker if none is idle.
            for _ in range(workers):
                pool.submit(os.getpid)
        ahead: deque[Future[_TokenizedGroup]] = deque(
            pool.submit(_tokenize_group, task, group) for group in itertools.islice(groups, 2 * workers)
        )
        while ahead:
            done = ahead.popleft().result()
            ahead.extend(pool.submit(_tokenize_group, task, group) for group in itertools.islice(groups, 1))
            yield done
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _initialize_worker() -> None:
    """Limit the tokenizer to one thread, and end the worker if its parent is killed."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"

    def end_with_parent() -> None:
        parent = multiprocessing.parent_process()
        if parent is not None:
            parent.join()
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()


def _tokenize_group(task: Task, group: Sequence[tuple[int, Block]]) -> _TokenizedGroup:
    parsed = [task.prepare(block.read(task.reading)) for _, block in group]
    ends = tuple((number, result.records, result.bad) for (number, _), result in zip(group, parsed, strict=True))
    by_key = zip(*(result.columns for result in parsed), strict=True)
    columns = [list(itertools.chain.from_iterable(of_blocks)) for of_blocks in by_key]
    file_bytes = sum(block.file_bytes for _, block in group)
    return _TokenizedGroup(file_bytes, len(columns[0]), ends, task.encode(columns))

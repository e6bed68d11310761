"""Documents to token files: blocks of the input are read and tokenised by worker processes, and written in order.

Nothing appears under its final name before the whole input is read. A run that was interrupted, by the network or the
file system too, goes on where it was; an input that is wrong leaves nothing.
"""

import itertools
import math
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from megatron_ladder.data.encoders.choose import choose_encoder
from megatron_ladder.data.encoding import KeyTokens, Task, TextTask
from megatron_ladder.data.partial import Partial, PartialDataset, dataset_prefix
from megatron_ladder.data.progress import Progress
from megatron_ladder.data.reading.find import PlacedBlock, find_sources, group_blocks
from megatron_ladder.data.reading.first import Begun, first_texts
from megatron_ladder.data.reading.protocol import GROUP_BYTES, BadRecord, Reading, Source, WrongInputError
from megatron_ladder.data.sidecar import Sidecar
from megatron_ladder.data.tokenizers import Tokenizer, source_of
from megatron_ladder.errors import UserError

__all__ = ["PreprocessOptions", "dataset_prefix", "preprocess", "run_task", "text_task"]

COMMIT_SECONDS = 5.0
"""What a killed run loses at most, besides what it was at."""

SAMPLED_SOURCES = 8
"""From whose beginnings texts are taken to compare libraries."""


@dataclass(frozen=True)
class PreprocessOptions:
    """What does not change the tokens."""

    workers: int = 1
    """Processes that tokenise; 1 works in this process."""
    partitions: int = 1
    """Sources that are read side by side, where this process does the reading."""
    log_interval: int = 1000
    """Documents between two progress lines, which are also a second apart."""
    library: str = "auto"
    """--tokenizer-library."""
    report: Callable[[str], None] = print
    """Takes sentences about what is going on."""
    show_progress: Callable[[str], None] | None = None
    """Takes progress lines; `report` if not given."""


class BlockEnd(NamedTuple):
    """What is to be known of a block besides its tokens."""

    source: int
    records: int
    bad: tuple[BadRecord, ...]


class TokenizedGroup(NamedTuple):
    """What a worker sends back."""

    text_bytes: int
    file_bytes: int
    documents: int
    """Documents read, empty ones included."""
    blocks: tuple[BlockEnd, ...]
    keys: tuple[KeyTokens, ...]


@dataclass
class Place:
    """How far the input is read; the journal keeps it."""

    groups: int = 0
    """Of `group_blocks`, that are done."""
    source: int = 0
    """The last one read from."""
    records: int = 0
    """Of that source, that are read."""
    file_bytes: int = 0
    """Of all sources, that are read."""
    skipped: int = 0
    """Records passed over."""

    def take(self, group: TokenizedGroup, sources: Sequence[Source], most_bad: int) -> list[str]:
        """Counts a group; new lines about records passed over.

        Raises:
            WrongInputError: more than `most_bad` could not be read.
        """
        lines = list[str]()
        for block in group.blocks:
            if block.source != self.source:
                self.source, self.records = block.source, 0
            for bad in block.bad:
                where = f"{sources[block.source].place(self.records + bad.number)}: {bad.reason}"
                if self.skipped >= most_bad:
                    already = f" ({self.skipped} before it were skipped: --skip-bad-lines {most_bad})"
                    raise WrongInputError(where + (already if most_bad else ""))
                lines.append(where)
                self.skipped += 1
            self.records += block.records
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
    """Writes `<output_prefix>_<key>_document.{bin,idx,json}` for each key; replaces what was there.

    Args:
        inputs: paths, patterns, `-` or `hf://` names, as behind --input.

    Returns:
        The sidecar of each key.

    Raises:
        UserError: an input that is missing or malformed (`file:line`), or none with a text; no file is left then. Or
            the output cannot be written at all.
        RuntimeError, OSError: a file or the network failed on the way; what was done until then is kept.
    """
    reading, options = reading or Reading(), options or PreprocessOptions()
    found = find_sources(inputs, reading)
    sources = [source if source.can_be_read_again else Begun(source) for source in found]
    task = text_task(tokenizer, sources, reading, append_eod, options)
    return run_task(sources, output_prefix, tokenizer, task, options)


def text_task(
    tokenizer: Tokenizer, sources: Sequence[Source], reading: Reading, append_eod: bool, options: PreprocessOptions
) -> TextTask:
    """A task whose library was compared with the tokenizer's own on some of the input.

    Args:
        sources: that can be read again, or are Begun.
    """
    library = options.library
    step = max(1, len(sources) // SAMPLED_SOURCES)
    texts = [first_texts(source, reading) for source in sources[::step][:SAMPLED_SOURCES]]
    # One of each in turn, so that no source fills the sample alone.
    sample = [text for row in itertools.zip_longest(*texts) for text in row if text is not None]
    choice = choose_encoder(tokenizer, library, sample)
    options.report(f"tokenizer: {choice.sentence}")
    return TextTask(
        source_of(tokenizer),
        tokenizer.sha256,
        tokenizer.vocab_size,
        tokenizer.eod_id,
        choice.encoder.library,
        reading,
        append_eod,
        choice.encoder,
    )


def run_task(
    sources: Sequence[Source], output_prefix: Path, tokenizer: Tokenizer, task: Task, options: PreprocessOptions
) -> dict[str, Sidecar]:
    """Does a task on all sources and publishes its outputs; returns and raises as `preprocess`."""
    sizes = [source.total_bytes for source in sources]
    total = None if None in sizes else sum(size or 0 for size in sizes)
    progress = Progress(total, options.log_interval, options.show_progress or options.report)
    with _begin(sources, output_prefix, task) as partial:
        for line in (partial.unlocked, partial.found):
            if line is not None:
                options.report(line)
        if partial.sidecars is not None:
            options.report("finished before, but not published: publishing")
            sidecars = partial.sidecars
        else:
            place = _read_on(sources, task, partial, progress, options)
            sidecars = [_sidecar_of(dataset, tokenizer, task, place) for dataset in partial.datasets]
            _check_texts(sources, task, sidecars)
            progress.show()
        partial.publish(sidecars)
    return dict(zip(task.outputs, sidecars, strict=True))


def _begin(sources: Sequence[Source], output_prefix: Path, task: Task) -> Partial:
    inputs = [source.identity() for source in sources]
    can_resume = all(source.name != "-" for source in sources)
    try:
        return Partial(output_prefix, task, inputs, can_resume)
    except OSError as error:
        raise UserError(f"--output-prefix {output_prefix}: cannot be written: {error}") from None


def _read_on(
    sources: Sequence[Source], task: Task, partial: Partial, progress: Progress, options: PreprocessOptions
) -> Place:
    """Tokenises from where the journal is to the end, and returns that place."""
    place = Place(**partial.place)
    if place.groups:
        done = sum(dataset.documents for dataset in partial.datasets)
        options.report(f"going on behind {place.file_bytes / 1e6:,.1f} MB and {done:,} documents of an earlier run")
        progress.start_at(place.file_bytes)
    groups = itertools.islice(group_blocks(sources, task.reading, options.partitions), place.groups, None)
    total = sum(source.total_bytes or GROUP_BYTES * options.workers for source in sources)
    workers = min(options.workers, math.ceil(total / GROUP_BYTES))
    try:
        with closing(_tokenize_all(groups, task, workers)) as tokenized:
            for group in tokenized:
                for line in place.take(group, sources, task.reading.most_bad):
                    options.report(f"skipped {line}")
                    partial.skip(line)
                for dataset, part in zip(partial.datasets, group.keys, strict=True):
                    dataset.add(part)
                progress.advance(group.text_bytes, group.file_bytes, group.documents)
                partial.commit(vars(place), at_least_seconds=COMMIT_SECONDS)
    except KeyboardInterrupt:
        options.report(f"interrupted: the same command goes on; what is in {partial.folder} is kept")
        raise
    except (OSError, UserError) as error:
        if partial.is_kept_after(error):
            options.report(f"stopped: the same command goes on; what is in {partial.folder} is kept")
        if isinstance(error, OSError) and error.errno:
            where = error.filename or f"{partial.folder} or the input"
            raise RuntimeError(f"{where}: {error.strerror}") from error
        raise
    return place


def _sidecar_of(dataset: PartialDataset, tokenizer: Tokenizer, task: Task, place: Place) -> Sidecar:
    return Sidecar(
        tokenizer_type=tokenizer.kind,
        tokenizer_sha256=tokenizer.sha256,
        vocab_size=tokenizer.vocab_size,
        eod_id=tokenizer.eod_id,
        append_eod=bool(task.identity().get("--append-eod")),
        largest_id=dataset.largest_id,
        documents=dataset.documents,
        tokens=dataset.tokens,
        bin_checksum=dataset.bin_checksum,
        idx_checksum=dataset.write_index(),
        loss_mask_checksum=dataset.loss_mask_checksum,
        conversations=task.conversations,
        skipped=place.skipped,
    )


def _check_texts(sources: Sequence[Source], task: Task, sidecars: Sequence[Sidecar]) -> None:
    for name, sidecar in zip(task.outputs, sidecars, strict=True):
        if sidecar.documents == 0:
            shown = " ".join(source.name for source in sources[:3]) + (" ..." if len(sources) > 3 else "")
            raise WrongInputError(f"--input {shown}: no document with a {name!r} that is not empty: nothing is written")


def _tokenize_all(
    groups: Iterator[tuple[PlacedBlock, ...]], task: Task, workers: int
) -> Generator[TokenizedGroup, None, None]:
    """Tokenised groups in the order of the input. A worker's error is raised here, as is its death."""
    if workers <= 1:
        yield from (tokenize_group(task, group) for group in groups)
        return
    # Not multiprocessing.Pool, which waits for ever for a worker that was killed.
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), initializer=_begin_worker)
    try:
        ahead: deque[Future[TokenizedGroup]] = deque(
            pool.submit(tokenize_group, task, group) for group in itertools.islice(groups, 2 * workers)
        )
        while ahead:
            done = ahead.popleft().result()
            ahead.extend(pool.submit(tokenize_group, task, group) for group in itertools.islice(groups, 1))
            yield done
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _begin_worker() -> None:
    """Leaves Ctrl-C to the parent, one thread to the tokenizer, and no worker behind a killed parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
    os._exit(1)


def tokenize_group(task: Task, group: Sequence[PlacedBlock]) -> TokenizedGroup:
    """Reads and tokenises the documents of some blocks; what a worker process runs."""
    ends: list[BlockEnd] = []
    parts: list[tuple[list[Any], ...]] = []
    for number, block in group:
        parsed = task.prepare(block.read(task.reading))
        parts.append(parsed.columns)
        ends.append(BlockEnd(number, parsed.records, parsed.bad))
    columns = [list(itertools.chain.from_iterable(of_blocks)) for of_blocks in zip(*parts, strict=True)]
    return TokenizedGroup(
        sum(block.text_bytes for _, block in group),
        sum(block.file_bytes for _, block in group),
        len(columns[0]),
        tuple(ends),
        task.encode(columns),
    )

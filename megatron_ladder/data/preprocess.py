"""Converts documents to token files: worker processes tokenize blocks of the input, which are written in order.

The input is cut into shards of about a gigabyte. No output has its final name before the whole input is read, and a run
that was interrupted or failed continues after the shards that it has finished.

An unfinished data set is a hidden directory next to the output. `.<prefix>.partial/` contains for shard N a small data
set `N_<output>` of each output, and `N.json`, which is written last. It records everything that determines the shard:
the input, the tokenizer and the flags. A run uses the shards whose record is what it would write itself, makes the
others, and joins all of them in order.
"""

import json
import math
import multiprocessing
import os
import shutil
import threading
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Self

import msgspec
import numpy as np

from megatron_ladder.data.encoding import DocumentCounts, KeyTokens, Task
from megatron_ladder.data.indexed import (
    IndexedDataset,
    IndexedDatasetWriter,
    Sidecar,
    bin_path,
    documents_with_targets,
    idx_path,
    loss_mask_path,
    write_sidecar,
)
from megatron_ladder.data.reading.find import find_sources
from megatron_ladder.data.reading.protocol import GROUP_BYTES, SHOWN_BAD, Block, Shard, Source
from megatron_ladder.errors import Problem, UserError, counted
from megatron_ladder.files import lock_file, read_if_exists, remove_temporary_files, write_atomically
from megatron_ladder.processes import interrupts_blocked
from megatron_ladder.progress import ProgressBar
from megatron_ladder.tokenizers.special_tokens import list_tokens

_FORMAT = 9


@dataclass(frozen=True)
class PreprocessOptions:
    """Options that do not change the tokens; the flags of preprocess_data.py, and a receiver of messages."""

    workers: int = 1
    log_interval: int = 1000
    report: Callable[[str], None] = print
    shard_bytes: int = 1 << 30
    """Approximate size of the input whose output is finished or absent; an interrupted run loses at most one."""


@dataclass
class _ShardReport:
    """Findings about the input of one or more shards, for the user; stored with each finished shard."""

    skipped: list[str] = field(default_factory=list)
    """One line per skipped record."""
    counts: dict[str, DocumentCounts] = field(default_factory=dict)
    """By output."""

    def add(self, skipped: Sequence[str], counts: Mapping[str, DocumentCounts]) -> None:
        self.skipped += skipped
        for output, more in counts.items():
            self.counts.setdefault(output, DocumentCounts()).add(more)


class Partial:
    """The directory of an unfinished run; a context manager. After an error it is kept if it has a finished shard."""

    def __init__(self, output_prefix: Path, task: Task, report: Callable[[str], None]) -> None:
        """Lock the directory, or raise UserError if another process uses it."""
        self.folder = output_prefix.with_name(f".{output_prefix.name}.partial")
        self._output_prefix = output_prefix
        self._task = task
        self._report = report
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = open(self.folder / "lock", "ab")  # noqa: SIM115 - closed by __exit__
        except OSError as error:
            raise UserError(self._problem("cannot be written: {error}", error=error)) from None
        try:
            problem = lock_file(self._lock.fileno())
        except BlockingIOError:
            self._lock.close()
            reason = "another process is writing there ({folder})"
            raise UserError(self._problem(reason, "wait for it, or give another prefix", folder=self.folder)) from None
        if problem is not None:
            about = f"this file system has no locks ({problem.strerror})"
            report(f"{self.folder}: {about}: make sure that no other process writes there")

    def _problem(self, reason: str, fix: str = "", **texts: object) -> Problem:
        return Problem({"output_prefix": self._output_prefix}, f"{{}}: {reason}", fix, **texts)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        finished = len(list(self.folder.glob("*.json")))
        if kind is None or not finished:
            self.discard()
        else:
            self._report(
                f"stopped: run the same command again to resume; {self.folder} keeps {finished} finished shards"
            )
        self._lock.close()

    def discard(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def made_of(self, shards: Sequence[Shard]) -> dict[str, Any]:
        """Return everything that determines the output of some shards; JSON-able."""
        inputs = [shard.identity() for shard in shards]
        return {"format": _FORMAT, "input": inputs} | self._task.identity()

    def _part(self, number: int, output: str) -> Path:
        return self.folder / f"{number:05}_{output}"

    def _record(self, number: int) -> Path:
        return self.folder / f"{number:05}.json"

    def _writer(self, prefix: Path) -> IndexedDatasetWriter:
        return IndexedDatasetWriter(prefix, self._task.dtype, self._task.chat_template is not None)

    def find(self, number: int, made_of: dict[str, Any]) -> _ShardReport | None:
        """Return the report of a shard that an earlier run has finished, and made of the same."""
        content = read_if_exists(self._record(number))
        if content is None or None in made_of["input"]:
            return None
        finished = json.loads(content)
        expected = json.loads(json.dumps(made_of))
        changed = [name for name in expected if finished["made_of"].get(name) != expected[name]]
        if changed:
            self._report(f"shard {number} of an earlier run has other {', '.join(changed)}: starting it from scratch")
        return None if changed else msgspec.convert(finished["report"], _ShardReport)

    @contextmanager
    def begin(self, number: int, made_of: dict[str, Any]) -> Iterator[tuple[list[IndexedDatasetWriter], _ShardReport]]:
        """Open the writers of a shard, and its report; both are durable after the block.

        What an earlier run left of the shard is removed, and so are its files if an error ends the block.
        """
        for path in self.folder.glob(f"{number:05}[_.]*"):
            path.unlink()
        with ExitStack() as stack:
            writers = [stack.enter_context(self._writer(self._part(number, name))) for name in self._task.outputs]
            report = _ShardReport()
            yield writers, report
            for writer in writers:
                writer.publish()
            record = {"made_of": made_of, "report": msgspec.to_builtins(report)}
            write_atomically(self._record(number), json.dumps(record))

    def parts(self, output: str, shards: int) -> list[IndexedDataset]:
        """Return the data sets of the finished shards with tokens of an output."""
        prefixes = [self._part(number, output) for number in range(shards)]
        return [IndexedDataset(prefix) for prefix in prefixes if bin_path(prefix).stat().st_size]

    def join(self, output: str, parts: Sequence[IndexedDataset], skipped: int) -> Sidecar:
        """Join the parts of an output, publish them under their final name, and return their sidecar."""
        task = self._task
        prefix = dataset_prefix(self._output_prefix, output)
        if idx_path(prefix).exists():
            self._report(f"{prefix}: exists, and is replaced")
        # A killed run may have left them.
        for path_of in (bin_path, idx_path, loss_mask_path):
            remove_temporary_files(path_of(prefix))
        with self._writer(prefix) as writer:
            for part in parts:
                writer.add_documents(part.tokens, np.diff(part.document_bounds), part.loss_mask)
            checksums = writer.publish()
        sidecar = Sidecar(
            task.tokenizer.kind,
            task.tokenizer.identity,
            task.tokenizer.vocab_size,
            task.tokenizer.eod_id,
            task.append_eod,
            largest_id=max(int(part.tokens.max()) for part in parts),
            documents=sum(map(len, parts)),
            tokens=sum(len(part.tokens) for part in parts),
            **checksums,
            conversations=task.chat_template is not None,
            skipped=skipped,
            chat_template=task.chat_template,
            answer_ends=tuple(sorted(set[int]().union(*map(task.answer_ends, parts)))),
            parse_special_tokens=task.parse_special_tokens,
        )
        write_sidecar(prefix, sidecar)
        return sidecar


def dataset_prefix(output_prefix: Path, name: str) -> Path:
    """`corpus` and `text` -> `corpus_text_document`, as Megatron names its outputs."""
    return output_prefix.with_name(f"{output_prefix.name}_{name}_document")


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

    Raises UserError if an input is missing, malformed (`file:line`) or without text, or the output cannot be written;
    OSError if a file or the network failed during the run.
    """
    sources = find_sources(inputs, task.reading)
    shards = list(_joined_shards(sources, options.shard_bytes))
    with Partial(output_prefix, task, options.report) as partial:
        made_of = [partial.made_of(members) for members in shards]
        reports = [partial.find(number, shard_inputs) for number, shard_inputs in enumerate(made_of)]
        if finished := len(reports) - reports.count(None):
            options.report(f"resuming: an earlier run has finished {finished} of {len(reports)} shards")
        report = _make_missing(shards, made_of, reports, task, partial, options)
        parts = {name: partial.parts(name, len(shards)) for name in task.outputs}
        for name, datasets in parts.items():
            documents = sum(map(len, datasets))
            without_targets = documents - sum(map(_with_targets, datasets))
            if without_targets == documents:
                names = " ".join([source.name for source in sources[:3]] + ["..."] * (len(sources) > 3))
                missing = f"no document with a non-empty {name!r}"
                if documents:
                    missing = "no conversation with a text of the assistant"
                elif report.skipped:
                    missing = f"every record was skipped, the first because of {report.skipped[0]}"
                partial.discard()
                raise UserError(Problem({"input": names}, "{}: {missing}: nothing is written", missing=missing))
            if without_targets:
                options.report(f"{without_targets:,} of {documents:,} conversations have no text of the assistant")
        sidecars = {name: partial.join(name, datasets, len(report.skipped)) for name, datasets in parts.items()}
    for name, counts in report.counts.items():
        for line in _describe(counts, task.parse_special_tokens):
            options.report(f"{dataset_prefix(output_prefix, name)}: {line}")
    return sidecars


def _describe(counts: DocumentCounts, parsed: bool) -> Iterator[str]:
    """Yield lines about keys without an effect, special tokens that texts spell, and ends inside documents."""
    if counts.unused:
        most_first = Counter(counts.unused).most_common()
        yield f"not used (number of conversations): {', '.join(f'{name} ({number:,})' for name, number in most_first)}"
    if counts.spelled:
        most_first = Counter(counts.spelled).most_common()
        spelled = list_tokens([f"{token} {number:,}" for token, number in most_first], ", ")
        fate = "are these tokens now" if parsed else "stay text ({parse_special_tokens} makes them these tokens)"
        yield str(Problem({}, f"spellings of special tokens in the input {fate}: {{spelled}}", spelled=spelled))
    if counts.inner_ends:
        ends = counted(counts.inner_ends, "end-of-document token")
        take = "{reset_attention_mask}, {reset_position_ids} and {eod_mask_loss} take each for an end"
        yield f"*** {Problem({}, f'{ends} inside documents', take)} ***"


def _with_targets(dataset: IndexedDataset) -> int:
    """Return the number of documents with a token, but the first, that counts in the loss."""
    if dataset.loss_mask is None:
        return len(dataset)
    bounds = dataset.document_bounds
    return int(documents_with_targets(dataset.loss_mask, bounds[:-1], bounds[1:]).sum())


def _joined_shards(sources: Sequence[Source], most_bytes: int) -> Iterator[tuple[Shard, ...]]:
    """Yield all shards in order; small ones together, up to `most_bytes`."""
    joined: list[Shard] = []
    size = 0
    for shard in (shard for source in sources for shard in source.shards(most_bytes)):
        shard_bytes = most_bytes if shard.total_bytes is None else shard.total_bytes
        if joined and size + shard_bytes > most_bytes:
            yield tuple(joined)
            joined = []
            size = 0
        joined.append(shard)
        size += shard_bytes
    yield tuple(joined)


def _make_missing(
    shards: Sequence[tuple[Shard, ...]],
    made_of: Sequence[dict[str, object]],
    reports: Sequence[_ShardReport | None],
    task: Task,
    partial: Partial,
    options: PreprocessOptions,
) -> _ShardReport:
    """Tokenize the shards without a report, and return the report of all shards."""
    # The amount of work.
    sizes = [[shard.total_bytes for shard in members] for members in shards]
    known = [sum(size or 0 for size in members) for members in sizes]
    total = None if any(None in members for members in sizes) else sum(known)
    missing = [number for number, earlier in enumerate(reports) if earlier is None]
    expected = sum(size or options.shard_bytes for number in missing for size in sizes[number])
    workers = min(options.workers, math.ceil(expected / GROUP_BYTES))
    # What earlier runs did.
    of_all = _ShardReport()
    for earlier in reports:
        if earlier is not None:
            _check_skipped(len(of_all.skipped), earlier.skipped, task.reading.max_bad)
            of_all.add(earlier.skipped, earlier.counts)
    # The rest, shard by shard; groups are tokenized ahead, across shards.
    read_bytes = documents = shown_documents = 0
    with (
        ProgressBar("tokenized", total, done=sum(known) - sum(known[number] for number in missing)) as bar,
        closing(_tokenize_all(_groups([shards[number] for number in missing]), task, workers)) as tokenized,
    ):
        for number in missing:
            with partial.begin(number, made_of[number]) as (writers, report):
                for group, is_last in tokenized:
                    _check_skipped(len(of_all.skipped), group.bad, task.reading.max_bad)
                    for line in group.bad:
                        options.report(f"skipped {line}")
                    counts = {name: part.counts for name, part in zip(task.outputs, group.keys, strict=True)}
                    report.add(group.bad, counts)
                    of_all.add(group.bad, counts)
                    for writer, part in zip(writers, group.keys, strict=True):
                        writer.add_documents(part.token_ids, part.lengths, part.loss_mask)
                    read_bytes += group.file_bytes
                    documents += group.documents
                    if documents - shown_documents >= options.log_interval:
                        bar.advance(read_bytes, documents=documents)
                        read_bytes = 0
                        shown_documents = documents
                    if is_last:
                        break
        bar.advance(read_bytes, documents=documents)
    return of_all


def _check_skipped(before: int, lines: Sequence[str], max_bad: int) -> None:
    """Raise UserError if there are more than `max_bad` skipped records with these."""
    if before + len(lines) > max_bad:
        already = f" ({max_bad} before it were skipped: {{skip_bad_lines}} {max_bad})" if max_bad else ""
        first, *others = lines[max_bad - before :][:SHOWN_BAD]
        raise UserError(Problem({}, "{first}" + already, first=first), *others)


def _groups(shards: Sequence[tuple[Shard, ...]]) -> Iterator[tuple[tuple[Block, ...], bool]]:
    """Yield all blocks in groups of ~GROUP_BYTES, and whether each group is the last one of an element of `shards`."""
    for members in shards:
        group: list[Block] = []
        size = 0
        for block in (block for shard in members for block in shard.blocks()):
            if size >= GROUP_BYTES:
                yield tuple(group), False
                group = []
                size = 0
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
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _initialize_worker, (task,))
    with ExitStack() as stack:
        stack.callback(pool.shutdown, wait=True, cancel_futures=True)
        with interrupts_blocked():
            # A task starts a worker if none is idle.
            for _ in range(workers):
                pool.submit(os.getpid)
        ahead = deque[tuple[Future[_TokenizedGroup], bool]]()
        for group, is_last in groups:
            ahead.append((pool.submit(_work, group), is_last))
            if len(ahead) > 2 * workers:
                future, was_last = ahead.popleft()
                yield future.result(), was_last
        for future, was_last in ahead:
            yield future.result(), was_last


_task_of_worker: Task


def _initialize_worker(task: Task) -> None:
    """Keep the task, limit the tokenizer to one thread, and end the worker if its parent is killed."""
    global _task_of_worker
    _task_of_worker = task
    os.environ["TOKENIZERS_PARALLELISM"] = "false"

    def end_with_parent() -> None:
        parent = multiprocessing.parent_process()
        if parent is not None:
            parent.join()
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()


def _work(group: Sequence[Block]) -> _TokenizedGroup:
    return _tokenize_group(_task_of_worker, group)


def _tokenize_group(task: Task, group: Sequence[Block]) -> _TokenizedGroup:
    parsed = [block.read(task.prepare) for block in group]
    records = [record for item in parsed for record in item.records]
    bad = [reason for item in parsed for _, reason in item.bad]
    return _TokenizedGroup(sum(block.file_bytes for block in group), len(records), bad, task.encode(records))

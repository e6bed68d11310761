"""Text files to a token file: spans of the input are tokenised by worker processes and written in order.

Nothing appears under its final name before the whole input is read, so an error leaves no file.
"""

import functools
import itertools
import math
import multiprocessing
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_ladder.data.documents import SPAN_BYTES, Span, check_inputs, read_documents, span_groups
from megatron_ladder.data.indexed import IndexedDatasetWriter, token_dtype
from megatron_ladder.data.sidecar import Sidecar, sidecar_path, write_sidecar
from megatron_ladder.data.tokenizers import Tokenizer, load_tokenizer
from megatron_ladder.errors import UserError

PROGRESS_SECONDS = 1.0
"""Progress lines come no closer than this."""


def dataset_prefix(output_prefix: Path, json_key: str) -> Path:
    """`corpus` and `text` -> `corpus_text_document`, Megatron's name."""
    return output_prefix.with_name(f"{output_prefix.name}_{json_key}_document")


class KeyTokens(NamedTuple):
    """Tokens of one key of some documents; documents without a token are left out."""

    token_ids: NDArray[Any]
    """[sum(lengths)] in the type of the file"""
    lengths: NDArray[np.int32]
    largest_id: int
    """-1 where there is no token."""


class TokenizedGroup(NamedTuple):
    """What a worker sends back."""

    size: int
    """Bytes read."""
    documents: int
    """Documents read, empty ones included."""
    keys: tuple[KeyTokens, ...]


@dataclass(frozen=True)
class Work:
    """What a worker must know besides the spans; hashable and small, it goes with every task."""

    tokenizer_type: str
    tokenizer_model: Path
    tokenizer_sha256: str
    json_keys: tuple[str, ...]
    append_eod: bool


def preprocess(
    inputs: Sequence[Path],
    output_prefix: Path,
    tokenizer: Tokenizer,
    json_keys: Sequence[str] = ("text",),
    append_eod: bool = False,
    workers: int = 1,
    log_interval: int = 1000,
    report: Callable[[str], None] = print,
) -> dict[str, Sidecar]:
    """Writes `<output_prefix>_<key>_document.{bin,idx,json}` for each key; replaces what was there.

    Args:
        workers: processes that tokenise; 1 works in this process.
        log_interval: documents between two progress lines, which are also PROGRESS_SECONDS apart.
        report: takes the progress lines.

    Returns:
        The sidecar of each key.

    Raises:
        UserError: an input that is missing or malformed (`file:line`), or none with a text. No file is left.
    """
    check_inputs(inputs, json_keys)
    work = Work(tokenizer.kind, tokenizer.files[0], tokenizer.sha256, tuple(json_keys), append_eod)
    total_bytes = sum(path.stat().st_size for path in inputs)
    progress = _Progress(total_bytes, log_interval, report)
    dtype = token_dtype(tokenizer.vocab_size)
    prefixes = [dataset_prefix(output_prefix, key) for key in json_keys]
    with ExitStack() as stack:
        try:
            output_prefix.parent.mkdir(parents=True, exist_ok=True)
            writers = [stack.enter_context(IndexedDatasetWriter(prefix, dtype)) for prefix in prefixes]
        except OSError as error:
            raise UserError(f"--output-prefix {output_prefix}: cannot be written: {error}") from None
        groups = stack.enter_context(closing(_tokenize_all(inputs, work, workers, total_bytes)))
        sidecars = _write_all(groups, writers, progress, tokenizer, work)
        for key, sidecar in zip(json_keys, sidecars, strict=True):
            if sidecar.documents == 0:
                shown = " ".join(map(str, inputs[:3])) + (" ..." if len(inputs) > 3 else "")
                raise UserError(
                    f"--input {shown}: no document with a {key!r} that is not empty: nothing is written"
                )
        for writer, prefix, sidecar in zip(writers, prefixes, sidecars, strict=True):
            sidecar_path(prefix).unlink(missing_ok=True)
            writer.publish()
            write_sidecar(prefix, sidecar)
    progress.show()
    return dict(zip(json_keys, sidecars, strict=True))


def _write_all(
    groups: Iterable[TokenizedGroup],
    writers: Sequence[IndexedDatasetWriter],
    progress: "_Progress",
    tokenizer: Tokenizer,
    work: Work,
) -> list[Sidecar]:
    """Appends every group to the writers, one a key, and counts."""
    documents, tokens, largest = ([0] * len(writers), [0] * len(writers), [-1] * len(writers))
    for group in groups:
        for position, (writer, part) in enumerate(zip(writers, group.keys, strict=True)):
            writer.add_documents(part.token_ids, part.lengths)
            documents[position] += len(part.lengths)
            tokens[position] += len(part.token_ids)
            largest[position] = max(largest[position], part.largest_id)
        progress.advance(group.size, group.documents)
    return [
        Sidecar(
            tokenizer_type=tokenizer.kind,
            tokenizer_sha256=tokenizer.sha256,
            vocab_size=tokenizer.vocab_size,
            eod_id=tokenizer.eod_id,
            append_eod=work.append_eod,
            largest_id=largest[position],
            documents=documents[position],
            tokens=tokens[position],
        )
        for position in range(len(writers))
    ]


def _tokenize_all(
    inputs: Sequence[Path], work: Work, workers: int, total_bytes: int
) -> Generator[TokenizedGroup, None, None]:
    """Tokenised groups in the order of the input. A worker's error is raised here, as is its death."""
    groups = span_groups(inputs)
    workers = min(workers, math.ceil(total_bytes / SPAN_BYTES))
    if workers <= 1:
        yield from (tokenize_spans(work, group) for group in groups)
        return
    # Not multiprocessing.Pool, which waits for ever for a worker that was killed.
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), initializer=_begin_worker)
    try:
        ahead = deque(
            pool.submit(tokenize_spans, work, group) for group in itertools.islice(groups, 2 * workers)
        )
        while ahead:
            done: Future[TokenizedGroup] = ahead.popleft()
            yield done.result()
            ahead.extend(pool.submit(tokenize_spans, work, group) for group in itertools.islice(groups, 1))
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


@functools.cache
def _tokenizer_of(tokenizer_type: str, tokenizer_model: Path, sha256: str) -> Tokenizer:
    """Loaded once a process. The checksum makes sure that all processes use the same one."""
    tokenizer = load_tokenizer(tokenizer_type, tokenizer_model)
    if tokenizer.sha256 != sha256:
        raise UserError(f"--tokenizer-model {tokenizer_model}: changed while it was used: start again")
    return tokenizer


def tokenize_spans(work: Work, spans: Sequence[Span]) -> TokenizedGroup:
    """Tokenises the documents of some spans; what a worker process runs."""
    tokenizer = _tokenizer_of(work.tokenizer_type, work.tokenizer_model, work.tokenizer_sha256)
    documents = [texts for span in spans for texts in read_documents(span, work.json_keys)]
    keys = tuple(
        _tokenize([texts[position] for texts in documents], tokenizer, work.append_eod)
        for position in range(len(work.json_keys))
    )
    return TokenizedGroup(sum(span.end - span.begin for span in spans), len(documents), keys)


def _tokenize(texts: Sequence[str], tokenizer: Tokenizer, append_eod: bool) -> KeyTokens:
    documents = [ids for ids in tokenizer.encode_batch(texts) if ids]
    if append_eod:
        for ids in documents:
            ids.append(tokenizer.eod_id)
    lengths = np.array([len(ids) for ids in documents], dtype=np.int32)
    token_ids = np.fromiter(
        itertools.chain.from_iterable(documents),
        dtype=token_dtype(tokenizer.vocab_size),
        count=int(lengths.sum(dtype=np.int64)),
    )
    return KeyTokens(token_ids, lengths, int(token_ids.max()) if len(token_ids) else -1)


class _Progress:
    """Progress lines: how far, how fast, how long still."""

    def __init__(self, total_bytes: int, log_interval: int, report: Callable[[str], None]) -> None:
        self._total_bytes = total_bytes
        self._log_interval = log_interval
        self._report = report
        self._begun = self._shown_at = time.monotonic()
        self._bytes = self._documents = self._shown_documents = 0

    def advance(self, size: int, documents: int) -> None:
        """Counts what was done, and shows it when a line is due."""
        self._bytes += size
        self._documents += documents
        due = self._documents - self._shown_documents >= self._log_interval
        if due and time.monotonic() - self._shown_at >= PROGRESS_SECONDS:
            self.show()

    def show(self) -> None:
        """One line."""
        self._shown_at, self._shown_documents = time.monotonic(), self._documents
        seconds = max(self._shown_at - self._begun, 1e-3)
        rate = self._bytes / seconds
        left = max(self._total_bytes - self._bytes, 0) / rate if rate else 0.0
        minutes, rest = divmod(round(left), 60)
        share = 100 * self._bytes / self._total_bytes if self._total_bytes else 100.0
        self._report(
            f"tokenised {self._bytes / 1e6:,.1f} MB ({min(share, 100):.0f}%), {self._documents:,} documents"
            f" | {rate / 1e6:.1f} MB/s, {self._documents / seconds:,.0f} documents/s"
            f" | ETA {minutes}:{rest:02d}"
        )

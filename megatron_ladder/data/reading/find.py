"""From the arguments of --input to sources, and from sources to groups of blocks."""

import glob
import os
import queue
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron_ladder.data.reading.files import (
    COMPRESSIONS,
    CompressedLines,
    JsonLinesFile,
    PlainFile,
    StandardInput,
    zstd_module,
)
from megatron_ladder.data.reading.hub import PREFIX, HubSource
from megatron_ladder.data.reading.parquet import ParquetFile
from megatron_ladder.data.reading.protocol import (
    GROUP_BYTES,
    JSON_SUFFIXES,
    Block,
    Reading,
    Source,
    is_json_lines,
)
from megatron_ladder.errors import UserError

_BLOCKS_AHEAD = 4
"""Blocks of each source that wait in memory."""
_WAIT_SECONDS = 0.1
"""Time between two checks whether anyone still needs blocks."""


def find_sources(inputs: Sequence[str | Path], reading: Reading) -> list[Source]:
    """Return the sources in order, matches of a pattern sorted; raises UserError with one line per problem."""
    sources: list[Source] = []
    problems: list[str] = []
    for word in map(str, inputs):
        try:
            sources += _sources_of(word, reading)
        except UserError as error:
            problems += error.messages
    if sum(isinstance(source, StandardInput) for source in sources) > 1:
        problems.append("--input -: standard input can be read only once")
    if problems:
        raise UserError(*problems)
    return sources


def _sources_of(word: str, reading: Reading) -> list[Source]:
    if word == "-":
        return [StandardInput()]
    if word.startswith(PREFIX):
        source = HubSource.parse(word)
        source.check()
        return [source]
    if not os.path.lexists(word) and glob.has_magic(word):
        files = [Path(name) for name in sorted(glob.glob(word, recursive=True)) if os.path.isfile(name)]
        if not files:
            raise UserError(f"--input {word}: no file matches")
        return [_source_of(path, reading) for path in files]
    return [_source_of(Path(word), reading)]


def _source_of(path: Path, reading: Reading) -> Source:
    if not path.is_file():
        found = "is a directory: give its files, for example '*.jsonl'" if path.is_dir() else "no such file"
        raise UserError(f"--input {path}: {found}")
    if not os.access(path, os.R_OK):
        raise UserError(f"--input {path}: no permission to read")
    suffix = path.suffix.lower()
    if is_json_lines(path):
        return JsonLinesFile(path)
    if suffix in COMPRESSIONS:
        if not is_json_lines(path.with_suffix("")):
            known = ", ".join(name + suffix for name in JSON_SUFFIXES)
            raise UserError(f"--input {path}: only JSON lines can be read compressed ({known}): decompress it")
        if suffix == ".zst":
            try:
                zstd_module()
            except ImportError:
                raise UserError(f"--input {path}: Zstandard needs a library: pip install backports.zstd") from None
        return CompressedLines(path)
    if suffix == ".parquet":
        source = ParquetFile(path)
        source.check(reading)
        return source
    if reading.keys != ("text",) or not reading.texts_only:
        raise UserError(
            f"--input {path}: plain text has no keys {' '.join(reading.keys)}: leave out --json-keys, "
            f"or give JSON lines ({', '.join(JSON_SUFFIXES)})"
        )
    return PlainFile(path, path.stat().st_size)


def group_blocks(
    sources: Sequence[Source], reading: Reading, partitions: int = 1
) -> Iterator[tuple[tuple[int, Block], ...]]:
    """Yield groups of ~GROUP_BYTES in order, reading `partitions` sources at a time; blocks have source numbers."""
    group: list[tuple[int, Block]] = []
    size = 0
    for number, block in _numbered_blocks(sources, reading, partitions):
        group.append((number, block))
        size += block.text_bytes
        if size >= GROUP_BYTES:
            yield tuple(group)
            group, size = [], 0
    if group:
        yield tuple(group)


def _numbered_blocks(sources: Sequence[Source], reading: Reading, partitions: int) -> Iterator[tuple[int, Block]]:
    if partitions == 1:
        for number, source in enumerate(sources):
            yield from ((number, block) for block in source.blocks(reading))
        return
    waiting = deque(enumerate(sources))
    readers: deque[tuple[int, _Reader]] = deque()
    try:
        while waiting or readers:
            while waiting and len(readers) < partitions:
                number, source = waiting.popleft()
                readers.append((number, _Reader(source, reading)))
            number, reader = readers[0]
            yield from ((number, block) for block in reader)
            readers.popleft()
    finally:
        for _, reader in readers:
            reader.stop()


class _Reader:
    """A thread that reads one source a few blocks ahead. Decompression releases Python's lock, so threads help."""

    def __init__(self, source: Source, reading: Reading) -> None:
        self._queue: queue.Queue[Block | BaseException | None] = queue.Queue(_BLOCKS_AHEAD)
        self._stopped = threading.Event()
        self._source, self._reading = source, reading
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        try:
            for block in self._source.blocks(self._reading):
                if not self._put(block):
                    return
            self._put(None)
        except BaseException as error:  # Raised again in __iter__.
            self._put(error)

    def _put(self, item: Block | BaseException | None) -> bool:
        while not self._stopped.is_set():
            try:
                self._queue.put(item, timeout=_WAIT_SECONDS)
                return True
            except queue.Full:
                pass
        return False

    def __iter__(self) -> Iterator[Block]:
        while (item := self._queue.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item

    def stop(self) -> None:
        """Let the thread end, without waiting for it."""
        self._stopped.set()

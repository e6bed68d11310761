"""From what stands after --input to sources, and from sources to groups of blocks."""

import glob
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from megatron_ladder.data.reading.ahead import blocks_side_by_side
from megatron_ladder.data.reading.files import JsonLinesFile, PlainFile
from megatron_ladder.data.reading.formats import COMPRESSIONS, JSON_SUFFIXES, is_json_lines
from megatron_ladder.data.reading.hub import PREFIX, HubSource
from megatron_ladder.data.reading.parquet import ParquetFile
from megatron_ladder.data.reading.protocol import GROUP_BYTES, Block, Reading, Source
from megatron_ladder.data.reading.streams import CompressedLines, StandardInput, zstd_module
from megatron_ladder.errors import UserError


def find_sources(inputs: Sequence[str | Path], reading: Reading) -> list[Source]:
    """The sources behind words of a command line, in their order; those of a pattern are sorted.

    Raises:
        UserError: a line for each word behind which there is nothing that can be read.
    """
    sources: list[Source] = []
    mistakes: list[str] = []
    for word in map(str, inputs):
        try:
            sources += _sources_of(word, reading)
        except UserError as error:
            mistakes += error.mistakes
    if sum(isinstance(source, StandardInput) for source in sources) > 1:
        mistakes.append("--input -: standard input can be read once")
    if mistakes:
        raise UserError(*mistakes)
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
        found = "is a directory, give its files, '*.jsonl' for one" if path.is_dir() else "no such file"
        raise UserError(f"--input {path}: {found}")
    if not os.access(path, os.R_OK):
        raise UserError(f"--input {path}: may not be read")
    suffix = path.suffix.lower()
    if is_json_lines(path):
        return JsonLinesFile(path)
    if suffix in COMPRESSIONS:
        return _compressed(path, suffix)
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


def _compressed(path: Path, suffix: str) -> Source:
    if not is_json_lines(path.with_suffix("")):
        known = ", ".join(name + suffix for name in JSON_SUFFIXES)
        raise UserError(f"--input {path}: of compressed files, JSON lines are read ({known}): decompress it")
    if suffix == ".zst":
        try:
            zstd_module()
        except ImportError:
            raise UserError(f"--input {path}: Zstandard needs a library: pip install backports.zstd") from None
    return CompressedLines(path)


class PlacedBlock(NamedTuple):
    """A block, and which source it is of."""

    source: int
    block: Block


def group_blocks(
    sources: Sequence[Source], reading: Reading, side_by_side: int = 1
) -> Iterator[tuple[PlacedBlock, ...]]:
    """Blocks of all sources in order, several together, about GROUP_BYTES of text in a group.

    Args:
        side_by_side: sources that are read at once; the order does not depend on it.
    """
    group: list[PlacedBlock] = []
    size = 0
    for number, block in blocks_side_by_side(sources, reading, side_by_side):
        group.append(PlacedBlock(number, block))
        size += block.text_bytes
        if size >= GROUP_BYTES:
            yield tuple(group)
            group, size = [], 0
    if group:
        yield tuple(group)

"""From the arguments of --input to sources."""

import glob
import os
import re
from collections.abc import Sequence
from pathlib import Path

from megatron_ladder.data.reading import lines
from megatron_ladder.data.reading.hub import PREFIX, HubSource
from megatron_ladder.data.reading.parquet import ParquetFile
from megatron_ladder.data.reading.protocol import JSON_SUFFIXES, Reading, Source, is_json_lines
from megatron_ladder.errors import ErrorCollector, UserError
from megatron_ladder.files import reject_pointer

_BEGINS_WITH_OBJECT = re.compile(rb'(\xef\xbb\xbf)?\s*\[?\s*\{\s*["}]')


def find_sources(inputs: Sequence[str | Path], reading: Reading) -> list[Source]:
    """Return the sources in order, matches of a pattern sorted; raises UserError with one line per problem."""
    sources: list[Source] = []
    errors = ErrorCollector()
    for word in map(str, inputs):
        with errors.collect():
            sources += _sources_of(word, reading)
    if sum(isinstance(source, lines.StandardInput) for source in sources) > 1:
        errors.add(reading.problem("-", "standard input can be read only once"))
    errors.raise_if_any()
    return sources


def _sources_of(word: str, reading: Reading) -> list[Source]:
    if word == "-":
        return [lines.StandardInput(reading)]
    if word.startswith(PREFIX):
        return [HubSource.parse(word, reading)]
    if not os.path.lexists(word) and glob.has_magic(word):
        files = [Path(name) for name in sorted(glob.glob(word, recursive=True)) if os.path.isfile(name)]
        if not files:
            raise UserError(reading.problem(word, "no file matches"))
        return [_source_of(path, reading) for path in files]
    return [_source_of(Path(word), reading)]


def _source_of(path: Path, reading: Reading) -> Source:
    if path.is_dir():
        raise UserError(reading.problem(path, "is a directory", "give its files, for example '*.jsonl'"))
    if not path.is_file():
        raise UserError(reading.problem(path, "no such file"))
    if not os.access(path, os.R_OK):
        raise UserError(reading.problem(path, "no permission to read"))
    reject_pointer(path)
    suffix = path.suffix.lower()
    if is_json_lines(path):
        return lines.JsonLinesFile(path, reading)
    if suffix in lines.COMPRESSIONS:
        if not is_json_lines(path.with_suffix("")):
            known = ", ".join(name + suffix for name in JSON_SUFFIXES)
            raise UserError(reading.problem(path, f"only JSON lines can be read compressed ({known})", "decompress it"))
        if suffix == ".zst":
            try:
                lines.zstd_module()
            except ImportError:
                problem = reading.problem(path, "Zstandard needs a library", "pip install backports.zstd")
                raise UserError(problem) from None
        return lines.CompressedLines(path, reading)
    if suffix == ".parquet":
        source = ParquetFile(path, reading)
        source.check()
        return source
    if suffix in (".csv", ".tsv"):
        raise UserError(reading.problem(path, "tables of text cannot be read", "convert it to Parquet or JSON lines"))
    with open(path, "rb") as file:
        if _BEGINS_WITH_OBJECT.match(file.read(64)):
            return lines.JsonLinesFile(path, reading)
    if reading.keys != ("text",) or not reading.texts_only:
        fix = f"leave out {{{reading.keys_field}}}, or give JSON lines ({', '.join(JSON_SUFFIXES)})"
        raise UserError(reading.problem(path, "plain text has no keys {keys}", fix, keys=" ".join(reading.keys)))
    return lines.PlainFile(path, reading)

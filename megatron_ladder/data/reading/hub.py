"""Data sets of the `datasets` library: from its hub, or from a local directory that it knows how to read.

hf://allenai/c4:en@train         name, configuration and split, streamed from the hub
hf:///data/my_texts@validation   a local directory of data files
"""

import bisect
import contextlib
import functools
import importlib.util
import itertools
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ladder.data.reading.parquet import check_columns
from megatron_ladder.data.reading.protocol import Block, Reading, Rows, Shard
from megatron_ladder.errors import UserError, raise_user_errors
from megatron_ladder.files import reject_pointer

PREFIX = "hf://"
BATCH_ROWS = 256
"""Rows of a block. The order of streamed samples depends on it."""
_NETWORK_MODULES = ("aiohttp", "h11", "http.client", "httpcore", "httpx", "huggingface_hub", "requests", "urllib3")
"""Prefixes of modules whose errors are caused by the network or the hub."""


@dataclass(frozen=True)
class HubSource:
    """A split of a data set: `name` is what the user wrote, `path` a name on the hub or a local directory."""

    reading: Reading
    name: str
    path: str
    config: str | None
    split: str
    total_bytes = None

    @staticmethod
    def parse(text: str, reading: Reading) -> "HubSource":
        """Parse `hf://NAME[:CONFIG][@SPLIT]`, where the split defaults to `train`, without importing the library."""
        match = re.fullmatch(r"hf://([^:@]+)(?::([^:@]+))?(?:@([^:@]+))?", text)
        if match is None:
            raise UserError(reading.problem(text, "expected hf://NAME[:CONFIG][@SPLIT]"))
        if Path(match[1]).is_file():
            raise UserError(reading.problem(text, "is a file", "leave out hf://"))
        if importlib.util.find_spec("datasets") is None:
            raise UserError(reading.problem(text, "needs the datasets library", "pip install datasets"))
        return HubSource(reading, text, match[1], match[2], match[3] or "train")

    def shards(self, part_bytes: int | None) -> Iterator[Shard]:
        """Yield the library's own shards, usually files."""
        count = int(self.dataset.num_shards)
        yield from (_HubShard(self, number, count) for number in range(count))

    @contextlib.contextmanager
    def translated_errors(self, action: str, fix: str = "") -> Iterator[None]:
        """Raise ConnectionError for errors of the network, and UserError for all others."""
        try:
            yield
        except Exception as error:  # Errors of the hub, the network and many file formats have no common base class.
            reason = str(error).strip().split("\n")[0]
            described = f"{type(error).__name__}: {reason}"
            failed = f"datasets cannot {action} it ({{described}})"
            is_remote = type(error).__module__.startswith(_NETWORK_MODULES) and not isinstance(error, ValueError)
            if is_remote or isinstance(error, ConnectionError | TimeoutError):
                again = "; ".join(filter(None, ["run the same command again to resume", fix]))
                raise ConnectionError(self.reading.problem(self.name, failed, again, described=described)) from error
            raise UserError(self.reading.problem(self.name, failed, fix, described=described)) from None

    @functools.cached_property
    def dataset(self) -> Any:
        """The library's data set; a pickle of this source contains it, so that other processes do not ask the hub."""
        import datasets

        fix = "without a network, give a directory of data files, hf:///PATH"
        with self.translated_errors("open", fix):
            files = self.data_files if Path(self.path).is_dir() else []
        for file in filter(Path.is_file, map(Path, files)):
            reject_pointer(file)
        with self.translated_errors("open", fix):
            dataset = datasets.load_dataset(self.path, self.config, split=self.split, streaming=True)
        named = "its README.md names {file}, which is outside of the directory"
        raise_user_errors(
            self.reading.problem(self.name, named, "copy it there", file=file)
            for file in files
            if not Path(os.path.abspath(file)).is_relative_to(os.path.abspath(self.path))
        )
        return dataset

    @functools.cached_property
    def data_files(self) -> list[str]:
        """Paths or addresses of the split's files in order; none if the library does not know them."""
        import datasets

        files = datasets.load_dataset_builder(self.path, self.config).config.data_files or {}
        splits = {str(split): list(members) for split, members in files.items()}
        # A name that is not a split's is an expression over splits, such as train[:10%].
        return splits.get(self.split, [file for members in splits.values() for file in members])


@dataclass(frozen=True)
class _HubShard:
    """One of the parts into which the library divides a data set."""

    source: HubSource
    number: int
    count: int
    total_bytes = None

    @property
    def label(self) -> str:
        return f"{Path(self.source.name).name} part {self.number} of {self.count} None"

    def identity(self) -> list[Any]:
        """Return the name, and sizes and modification times of local files."""
        files = sorted(path for path in Path(self.source.path).rglob("*") if path.is_file())
        statuses = [[str(path), path.stat().st_size, path.stat().st_mtime_ns] for path in files]
        return [self.source.name, self.number, self.count, statuses]

    def blocks(self, first: int = 0) -> Iterator[Block]:
        """Stream rows without the first blocks, of which no more is read than the library requires."""
        source = self.source
        reading = self.source.reading
        with source.translated_errors("read"):
            dataset = source.dataset.shard(num_shards=self.count, index=self.number)
        columns = tuple(dataset.column_names or reading.keys)
        check_columns(source.name, columns, reading)
        if first:
            files = source.data_files
            dataset = _skip_rows(dataset, first * BATCH_ROWS, files[self.number] if len(files) == self.count else None)
        keys = [key for key in reading.all_keys if key in columns]
        batches = dataset.select_columns(keys).iter(BATCH_ROWS)
        for begin in itertools.count(first * BATCH_ROWS, BATCH_ROWS):
            with source.translated_errors("read"):
                batch = next(batches, None)
            if batch is None:
                return
            name = f"{source.name} part {self.number} of {self.count}"
            yield Rows(reading, name, list(zip(*(batch[key] for key in keys), strict=True)), begin, 0, columns)


def _skip_rows(dataset: Any, rows: int, file: str | None) -> Any:
    """Return the rest of a data set that is streamed from one file, without its first `rows`.

    The library decodes a file from its beginning to skip rows. Only Parquet records where rows are, so such a file is
    entered at a row group. `file` is its path or address, or None.
    """
    if file is None or not file.endswith(".parquet"):
        return dataset.skip(rows)
    import datasets
    import fsspec
    import pyarrow.parquet

    with fsspec.open(file) as opened:
        metadata = pyarrow.parquet.read_metadata(opened)
    sizes = [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]
    groups = dataset.reshard()
    begins = list(itertools.accumulate(sizes, initial=0))
    if groups.num_shards != len(sizes):
        return dataset.skip(rows)
    first = min(bisect.bisect_right(begins, rows), len(sizes)) - 1
    entered, *others = (groups.shard(len(sizes), number) for number in range(first, len(sizes)))
    return datasets.concatenate_datasets([entered.skip(rows - begins[first]), *others])

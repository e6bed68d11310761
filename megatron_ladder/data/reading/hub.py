"""Data sets of the `datasets` library: from its hub, or from a local file or directory.

hf://allenai/c4:en@train         name, configuration and split, streamed from the hub
hf://data/my_texts               a local directory or file, if one with this name exists
hf:///data/my_texts@validation   the same with an absolute path
"""

import bisect
import contextlib
import functools
import importlib.util
import itertools
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ladder.data.reading.parquet import check_rows, missing_columns
from megatron_ladder.data.reading.protocol import Block, Parsed, Reading, WrongInputError
from megatron_ladder.errors import UserError

PREFIX = "hf://"
BATCH_ROWS = 256
_BUILDERS = {".parquet": "parquet", ".csv": "csv", ".tsv": "csv", ".txt": "text", ".arrow": "arrow"}
"""Suffix of a single file -> the library's reader; JSON for all other suffixes."""
_NETWORK_MODULES = ("aiohttp", "h11", "http.client", "httpcore", "httpx", "huggingface_hub", "requests", "urllib3")
"""Prefixes of modules whose errors are caused by the network or the hub."""
_TEMPORARY_STATUSES = (408, 425, 429)
"""Status codes below 500 that do not mean that the request was wrong."""
_CONTENT_ERRORS = (ValueError, LookupError, TypeError, EOFError, zlib.error)
"""Errors that readers raise for content that they cannot read."""


@dataclass(frozen=True)
class _Rows:
    """Some rows, as columns."""

    columns: tuple[list[Any], ...]
    file_bytes: int = 0

    @functools.cached_property
    def text_bytes(self) -> int:
        return sum(_json_characters(value) for column in self.columns for value in column)

    def read(self, reading: Reading) -> Parsed:
        return check_rows(self.columns, reading)


def _json_characters(value: object) -> int:
    """Return the approximate length of a value as JSON; a number counts as 8 characters."""
    if isinstance(value, str | bytes):
        return len(value) + 2
    if isinstance(value, dict):
        return 2 + sum(len(str(key)) + 4 + _json_characters(inner) for key, inner in value.items())
    if isinstance(value, list | tuple):
        return 2 + sum(2 + _json_characters(inner) for inner in value)
    return 8


def _is_network_error(error: BaseException) -> bool:
    """Return whether an error or one of its causes is due to the network, the hub or this machine."""
    cause: BaseException | None = error
    while cause is not None:
        if _is_direct_network_error(cause):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def _is_direct_network_error(error: BaseException) -> bool:
    if isinstance(error, ConnectionError | TimeoutError):
        return True
    if isinstance(error, OSError) and error.errno:
        return not isinstance(error, FileNotFoundError | PermissionError | IsADirectoryError | NotADirectoryError)
    if isinstance(error, ValueError) or not type(error).__module__.startswith(_NETWORK_MODULES):
        return False
    status = getattr(getattr(error, "response", None), "status_code", 0)
    return not 400 <= status < 500 or status in _TEMPORARY_STATUSES


@dataclass(frozen=True)
class HubSource:
    """A split of a data set: `name` is what the user wrote, `path` a name on the hub or a local path."""

    name: str
    path: str
    config: str | None
    split: str
    total_bytes = None
    can_be_read_again = False

    @staticmethod
    def parse(text: str) -> "HubSource":
        """Parse `hf://NAME[:CONFIG][@SPLIT]`, where the split defaults to `train`; raises UserError for other text."""
        found = re.fullmatch(r"hf://([^:@]+)(?::([^:@]+))?(?:@([^:@]+))?", text)
        if found is None:
            raise UserError(f"--input {text}: expected hf://NAME[:CONFIG][@SPLIT]")
        return HubSource(text, found[1], found[2], found[3] or "train")

    def identity(self) -> dict[str, Any]:
        """Return the name, and sizes and modification times of local files."""
        local = Path(self.path)
        files = sorted(path for path in local.rglob("*") if path.is_file()) if local.is_dir() else [local]
        statuses = [(str(path), path.stat()) for path in files if path.is_file()]
        return {"input": self.name, "files": [[name, status.st_size, status.st_mtime_ns] for name, status in statuses]}

    def place(self, number: int) -> str:
        return f"{self.name}: row {number}"

    def blocks(self, reading: Reading) -> Iterator[Block]:
        """Stream rows; raises UserError for missing or unreadable data, ConnectionError for an unreachable hub."""
        yield from self.blocks_of(self._open(), reading)

    def blocks_of(self, dataset: Any, reading: Reading) -> Iterator[Block]:
        """Stream the rows of the library's data set or of a part of it; raises as `blocks`."""
        missing = [key for key in reading.keys if key not in (dataset.column_names or reading.keys)]
        if missing:
            raise UserError(missing_columns(self.name, missing, dataset.column_names))
        batches = dataset.select_columns(list(reading.keys)).iter(BATCH_ROWS)
        while True:
            with self._translated_errors("read"):
                batch = next(batches, None)
            if batch is None:
                return
            yield _Rows(tuple(list(batch[key]) for key in reading.keys))

    @contextlib.contextmanager
    def _translated_errors(self, action: str, fix: str = "") -> Iterator[None]:
        """Raise ConnectionError for errors of the network, WrongInputError for unreadable content, else UserError."""
        try:
            yield
        except Exception as error:  # Errors of the hub, the network and many file formats have no common base class.
            reason = str(error).strip().split("\n")[0]
            problem = f"--input {self.name}: datasets cannot {action} it ({type(error).__name__}: {reason})"
            if _is_network_error(error):
                retry = "run the same command again to resume"
                raise ConnectionError(f"{problem}: {retry}{fix and '; ' + fix}") from error
            is_wrong = action == "read" and isinstance(error, _CONTENT_ERRORS)
            raise (WrongInputError if is_wrong else UserError)(f"{problem}{fix and ': ' + fix}") from None

    def count_shards(self) -> int:
        """Return the number of parts into which the library can divide the data set."""
        return int(self._dataset.num_shards)

    def shard(self, number: int, count: int) -> Any:
        """Return one of `count` parts as the library's data set."""
        return self._dataset.shard(num_shards=count, index=number)

    @functools.cached_property
    def _dataset(self) -> Any:
        """The library's data set; a pickle of this source contains it, so that other processes do not ask the hub."""
        return self._open()

    @functools.cached_property
    def data_files(self) -> list[str]:
        """Paths or addresses of the split's files in order; none if the library does not know them."""
        import datasets

        if Path(self.path).is_file():
            return [self.path]
        files = datasets.load_dataset_builder(self.path, self.config).config.data_files or {}
        splits = {str(split): list(members) for split, members in files.items()}
        # A name that is not a split's is an expression over splits, such as train[:10%].
        return splits.get(self.split, [file for members in splits.values() for file in members])

    def check(self) -> None:
        """Raise UserError if the library is missing, without importing it."""
        if importlib.util.find_spec("datasets") is None:
            raise UserError(f"--input {self.name}: needs the datasets library: pip install datasets")

    def _open(self) -> Any:
        import datasets

        local = Path(self.path)
        with self._translated_errors("open", "without a network, give a directory of data files, hf:///PATH"):
            if local.is_file():
                builder = _BUILDERS.get(local.suffix.lower(), "json")
                files = {self.split: str(local)}
                return datasets.load_dataset(builder, data_files=files, split=self.split, streaming=True)
            return datasets.load_dataset(self.path, self.config, split=self.split, streaming=True)


@dataclass(frozen=True)
class HubShard:
    """One of the parts into which the library divides a data set."""

    whole: HubSource
    number: int
    count: int
    total_bytes = None
    can_be_read_again = True

    @property
    def name(self) -> str:
        return f"{self.whole.name} part {self.number} of {self.count}"

    def identity(self) -> dict[str, Any]:
        return self.whole.identity() | {"shard": [self.number, self.count]}

    def place(self, number: int) -> str:
        return f"{self.name}: row {number}"

    def blocks(self, reading: Reading) -> Iterator[Block]:
        return self.blocks_from(0, reading)

    def blocks_from(self, first: int, reading: Reading) -> Iterator[Block]:
        """Stream rows without the first blocks, of which no more is read than the library requires."""
        dataset = self.whole.shard(self.number, self.count)
        if first:
            files = self.whole.data_files
            file = files[self.number] if len(files) == self.count else None
            dataset = _skip_rows(dataset, first * BATCH_ROWS, file)
        yield from self.whole.blocks_of(dataset, reading)


def _skip_rows(dataset: Any, rows: int, file: str | None) -> Any:
    """Return the rest of a data set that is streamed from one file, without its first `rows`.

    The library decodes a file from its beginning to skip rows. Only Parquet records where rows are, so such a file is
    entered at a row group. `file` is its path or address, or None.
    """
    # Earlier releases of the library cannot separate row groups.
    if file is None or not file.endswith(".parquet") or not hasattr(dataset, "reshard"):
        return dataset.skip(rows)
    import datasets
    import fsspec
    import pyarrow.parquet

    with fsspec.open(file) as opened:
        metadata = pyarrow.parquet.read_metadata(opened)
    sizes = [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]
    begins = [0, *itertools.accumulate(sizes)]
    groups = dataset.reshard()
    if not sizes or groups.num_shards != len(sizes):
        return dataset.skip(rows)
    first = max(0, min(bisect.bisect_right(begins, rows), len(sizes)) - 1)
    entered, *others = (groups.shard(len(sizes), number) for number in range(first, len(sizes)))
    return datasets.concatenate_datasets([entered.skip(rows - begins[first]), *others])

"""Data sets that the `datasets` library knows: from its hub, or a local file or directory of data files.

    hf://allenai/c4:en@train         name, configuration and split, streamed from the hub
    hf://data/my_texts               a directory or file of this machine, if there is one of that name
    hf:///data/my_texts@validation   the same with an absolute path
"""

import functools
import importlib.util
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ladder.data.reading.hub_middle import without_first
from megatron_ladder.data.reading.parquet import check_rows
from megatron_ladder.data.reading.protocol import Block, Parsed, Reading, WrongInputError
from megatron_ladder.errors import UserError

PREFIX = "hf://"
BATCH_ROWS = 256
BUILDERS = {".parquet": "parquet", ".csv": "csv", ".tsv": "csv", ".txt": "text", ".arrow": "arrow"}
"""Suffix of a single file -> what reads it; any other is JSON."""
NETWORK_MODULES = ("aiohttp", "h11", "http.client", "httpcore", "httpx", "huggingface_hub", "requests", "urllib3")
"""Beginnings of the modules whose errors are the network's, or the hub's."""
ASK_AGAIN = (408, 425, 429)
"""Status codes below 500 that do not say that the request was wrong."""
OF_THE_CONTENT = (ValueError, LookupError, TypeError, EOFError, zlib.error)
"""What readers raise for content that they cannot read."""


@dataclass(frozen=True)
class Rows:
    """Some rows, as columns."""

    columns: tuple[list[Any], ...]
    file_bytes: int = 0

    @functools.cached_property
    def text_bytes(self) -> int:
        """About the characters of the values as JSON."""
        return sum(json_characters(value) for column in self.columns for value in column)

    def read(self, reading: Reading) -> Parsed:
        """Leaves out rows without a text."""
        return check_rows(self.columns, reading)


def json_characters(value: object) -> int:
    """About how long a value is as JSON; a number counts as much as a text of a few characters."""
    if isinstance(value, str | bytes):
        return len(value) + 2
    if isinstance(value, dict):
        return 2 + sum(len(str(key)) + 4 + json_characters(inner) for key, inner in value.items())
    if isinstance(value, list | tuple):
        return 2 + sum(2 + json_characters(inner) for inner in value)
    return 8


def is_of_the_network(error: BaseException) -> bool:
    """Whether the network, the hub or this machine failed, by an error of the `datasets` library.

    It wraps what it meets, so the errors before it are asked too.
    """
    before: BaseException | None = error
    while before is not None:
        if _is_of_the_network(before):
            return True
        before = before.__cause__ or before.__context__
    return False


def _is_of_the_network(error: BaseException) -> bool:
    if isinstance(error, ConnectionError | TimeoutError):
        return True
    if isinstance(error, OSError) and error.errno:
        return not isinstance(error, FileNotFoundError | PermissionError | IsADirectoryError | NotADirectoryError)
    if isinstance(error, ValueError) or not type(error).__module__.startswith(NETWORK_MODULES):
        return False
    status = getattr(getattr(error, "response", None), "status_code", 0)
    return not 400 <= status < 500 or status in ASK_AGAIN


@dataclass(frozen=True)
class HubSource:
    """A data set by its name, configuration and split."""

    name: str
    """As the user gave it."""
    path: str
    """A name on the hub, or a path."""
    config: str | None
    split: str
    total_bytes = None
    can_be_read_again = False

    @staticmethod
    def parse(text: str) -> "HubSource":
        """Reads `hf://NAME[:CONFIG][@SPLIT]`; the split is `train` if not given.

        Raises:
            UserError: for anything else.
        """
        found = re.fullmatch(r"hf://([^:@]+)(?::([^:@]+))?(?:@([^:@]+))?", text)
        if found is None:
            raise UserError(f"--input {text}: expected hf://NAME[:CONFIG][@SPLIT]")
        return HubSource(text, found[1], found[2], found[3] or "train")

    def identity(self) -> dict[str, Any]:
        """The name; of local files also their sizes and times."""
        local = Path(self.path)
        files = sorted(path for path in local.rglob("*") if path.is_file()) if local.is_dir() else [local]
        statuses = [(str(path), path.stat()) for path in files if path.is_file()]
        return {"input": self.name, "files": [[name, status.st_size, status.st_mtime_ns] for name, status in statuses]}

    def place(self, number: int) -> str:
        """The row, counted from 0."""
        return f"{self.name}: row {number}"

    def blocks(self, reading: Reading) -> Iterator[Block]:
        """Rows as they are streamed.

        Raises:
            UserError: the library finds no such data set, split or column, or cannot read what it finds.
            ConnectionError: the hub cannot be reached, or no longer.
        """
        yield from self.blocks_of(self._open(), reading)

    def blocks_of(self, dataset: Any, reading: Reading) -> Iterator[Block]:
        """Rows of the data set, or of a part of it, as they are streamed; raises as `blocks`."""
        missing = [key for key in reading.keys if key not in (dataset.column_names or reading.keys)]
        if missing:
            raise UserError(
                f"--input {self.name}: no column {', '.join(missing)} (columns found: "
                f"{', '.join(dataset.column_names)}): name the text's column by --json-keys"
            )
        batches = dataset.select_columns(list(reading.keys)).iter(BATCH_ROWS)
        while (batch := self._next(batches)) is not None:
            yield Rows(tuple(list(batch[key]) for key in reading.keys))

    def _next(self, batches: Iterator[Any]) -> Any:
        """None at the end."""
        try:
            return next(batches, None)
        except Exception as error:  # Of the network, and of readers of many formats: they have no common ancestor.
            what = f"--input {self.name}: datasets cannot read it ({_in_a_line(error)})"
            if is_of_the_network(error):
                raise ConnectionError(f"{what}: start the same command again, which goes on") from error
            raise (WrongInputError if isinstance(error, OF_THE_CONTENT) else UserError)(what) from None

    def count_shards(self) -> int:
        """Into how many parts the library can cut it."""
        return int(self._open().num_shards)

    def shard(self, number: int, count: int) -> Any:
        """One of so many parts, as the library's data set."""
        return self._open().shard(num_shards=count, index=number)

    def data_files(self) -> list[str]:
        """Paths or addresses of the split's files in their order; none where the library does not tell."""
        import datasets

        if Path(self.path).is_file():
            return [self.path]
        files = datasets.load_dataset_builder(self.path, self.config).config.data_files or {}
        splits = {str(split): list(members) for split, members in files.items()}
        # What is no name of a split is a part of one, or of several.
        return splits.get(self.split, [file for members in splits.values() for file in members])

    def check(self) -> None:
        """Raises UserError when the library is missing, without loading it."""
        if importlib.util.find_spec("datasets") is None:
            raise UserError(f"--input {self.name}: needs the datasets library: pip install datasets")

    def _open(self) -> Any:
        import datasets

        local = Path(self.path)
        try:
            if local.is_file():
                builder = BUILDERS.get(local.suffix.lower(), "json")
                files = {self.split: str(local)}
                return datasets.load_dataset(builder, data_files=files, split=self.split, streaming=True)
            return datasets.load_dataset(self.path, self.config, split=self.split, streaming=True)
        except Exception as error:  # Of the hub, the network, files of many kinds: they have no common ancestor.
            what = f"--input {self.name}: datasets cannot open it ({_in_a_line(error)})"
            where = "without a network give a directory of data files, hf:///PATH"
            if is_of_the_network(error):
                raise ConnectionError(f"{what}: start the same command again, which goes on; {where}") from error
            raise UserError(f"{what}: {where}") from None


def _in_a_line(error: Exception) -> str:
    reason = str(error).strip().split("\n")[0]
    return f"{type(error).__name__}: {reason}"


@dataclass(frozen=True)
class HubShard:
    """One of the parts into which the library cuts a data set."""

    whole: HubSource
    number: int
    count: int
    total_bytes = None
    can_be_read_again = True

    @property
    def name(self) -> str:
        """As the user gave it, and the part."""
        return f"{self.whole.name} part {self.number} of {self.count}"

    def identity(self) -> dict[str, Any]:
        """That of the whole, and the part."""
        return self.whole.identity() | {"shard": [self.number, self.count]}

    def place(self, number: int) -> str:
        """The row, counted from 0."""
        return f"{self.name}: row {number}"

    def blocks(self, reading: Reading) -> Iterator[Block]:
        """Rows as they are streamed."""
        return self.blocks_from(0, reading)

    def blocks_from(self, first: int, reading: Reading) -> Iterator[Block]:
        """Without the first blocks, of which no more is read than the library must."""
        dataset = self.whole.shard(self.number, self.count)
        if first:
            files = self.whole.data_files()
            file = files[self.number] if len(files) == self.count else None
            dataset = without_first(dataset, first * BATCH_ROWS, file)
        yield from self.whole.blocks_of(dataset, reading)

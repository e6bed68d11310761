"""An unfinished data set: a hidden directory next to the output that holds the finished shards of the input.

`.<prefix>.partial/` contains for shard N a small data set `N_<output>` of each output, and `N.json`, which is written
last. It records everything that determines the shard: the input, the tokenizer and the flags. A run uses the shards
whose record is what it would write itself, makes the others, and joins all of them in order.
"""

import json
import shutil
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import msgspec
import numpy as np

from megatron_ladder.data.encoding import KeyTokens, Task
from megatron_ladder.data.indexed import (
    IndexedDataset,
    IndexedDatasetWriter,
    Sidecar,
    bin_path,
    idx_path,
    loss_mask_path,
    write_sidecar,
)
from megatron_ladder.data.reading.protocol import Shard
from megatron_ladder.errors import UserError
from megatron_ladder.files import lock_file, read_if_exists, remove_temporary_files, write_atomically

_FORMAT = 7


class FinishedShard(msgspec.Struct):
    """The content of `N.json`; `skipped` has one line for each skipped record."""

    made_of: dict[str, Any]
    skipped: list[str]


class ShardWriter:
    """Writes the data sets of one shard; a context manager, which deletes them unless they were finished."""

    def __init__(self, prefix: Path, task: Task, made_of: dict[str, Any]) -> None:
        self._prefix, self._found, self._stack = prefix, FinishedShard(made_of, []), ExitStack()
        self._writers = [
            self._stack.enter_context(
                IndexedDatasetWriter(_part_of(prefix, name), task.dtype, task.chat_template is not None)
            )
            for name in task.outputs
        ]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def add(self, parts: Sequence[KeyTokens], skipped: Sequence[str]) -> None:
        """Append documents of each output, and lines about skipped records."""
        for writer, part in zip(self._writers, parts, strict=True):
            writer.add_documents(part.token_ids, part.lengths, part.loss_mask)
        self._found.skipped += skipped

    def finish(self) -> FinishedShard:
        """Make the shard durable, and return its record."""
        for writer in self._writers:
            writer.publish()
        write_atomically(_record_of(self._prefix), msgspec.json.encode(self._found))
        return self._found


def _part_of(prefix: Path, output: str) -> Path:
    return prefix.with_name(f"{prefix.name}_{output}")


def _record_of(prefix: Path) -> Path:
    return prefix.with_name(f"{prefix.name}.json")


class Partial:
    """The directory of an unfinished run; a context manager. After an error it is kept if it has a finished shard."""

    def __init__(self, output_prefix: Path, task: Task, report: Callable[[str], None]) -> None:
        """Lock the directory, or raise UserError if another process uses it."""
        self.folder = output_prefix.with_name(f".{output_prefix.name}.partial")
        self._output_prefix, self._task, self._report = output_prefix, task, report
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = open(self.folder / "lock", "ab")  # noqa: SIM115 - closed by __exit__
        except OSError as error:
            raise UserError(f"--output-prefix {output_prefix}: cannot be written: {error}") from None
        try:
            problem = lock_file(self._lock.fileno())
        except BlockingIOError:
            self._lock.close()
            raise UserError(
                f"--output-prefix {output_prefix}: another process is writing there ({self.folder}): wait for it, or "
                "give another prefix"
            ) from None
        if problem is not None:
            about = f"this file system has no locks ({problem.strerror})"
            report(f"{self.folder}: {about}: make sure that no other process writes there")

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
        """Delete all finished shards."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def made_of(self, shards: Sequence[Shard]) -> dict[str, Any]:
        """Return everything that determines the output of some shards; JSON-able."""
        inputs = [shard.identity() for shard in shards]
        return {"format": _FORMAT, "input": inputs} | self._task.identity()

    def find(self, number: int, made_of: dict[str, Any]) -> FinishedShard | None:
        """Return the record of a shard if an earlier run has finished it, and would make it of the same."""
        content = read_if_exists(_record_of(self.folder / f"{number:05}"))
        if content is None or None in made_of["input"]:
            return None
        found = msgspec.json.decode(content, type=FinishedShard)
        expected = json.loads(json.dumps(made_of))
        changed = [name for name in expected if found.made_of.get(name) != expected[name]]
        if changed:
            self._report(f"shard {number} of an earlier run has other {', '.join(changed)}: starting it from scratch")
        return None if changed else found

    def begin(self, number: int, made_of: dict[str, Any]) -> ShardWriter:
        """Return the writer of a shard, after removing what an earlier run left of it."""
        for path in self.folder.glob(f"{number:05}[_.]*"):
            path.unlink()
        return ShardWriter(self.folder / f"{number:05}", self._task, made_of)

    def parts(self, output: str, shards: int) -> list[IndexedDataset]:
        """Return the data sets of the finished shards with tokens of an output."""
        prefixes = [_part_of(self.folder / f"{number:05}", output) for number in range(shards)]
        return [IndexedDataset(prefix) for prefix in prefixes if bin_path(prefix).stat().st_size]

    def join(self, output: str, parts: Sequence[IndexedDataset], skipped: int) -> Sidecar:
        """Join the parts of an output, publish them under their final name, and return their sidecar."""
        task, prefix = self._task, dataset_prefix(self._output_prefix, output)
        if idx_path(prefix).exists():
            self._report(f"{prefix}: exists, and is replaced")
        # A killed run may have left them.
        for path_of in (bin_path, idx_path, loss_mask_path):
            remove_temporary_files(path_of(prefix))
        with IndexedDatasetWriter(prefix, task.dtype, task.chat_template is not None) as writer:
            for part in parts:
                writer.add_documents(part.tokens, np.diff(part.document_bounds), part.loss_mask)
            checksums = writer.publish()
        sidecar = Sidecar(
            task.tokenizer.kind,
            task.tokenizer.sha256,
            task.tokenizer.vocab_size,
            task.tokenizer.eod_id,
            task.append_eod,
            largest_id=max(int(part.tokens.max()) for part in parts),
            documents=sum(map(len, parts)),
            tokens=sum(len(part.tokens) for part in parts),
            **checksums._asdict(),
            conversations=task.chat_template is not None,
            skipped=skipped,
            chat_template=task.chat_template,
        )
        write_sidecar(prefix, sidecar)
        return sidecar


def dataset_prefix(output_prefix: Path, name: str) -> Path:
    """`corpus` and `text` -> `corpus_text_document`, as Megatron names its outputs."""
    return output_prefix.with_name(f"{output_prefix.name}_{name}_document")

"""A data set that is not finished: files beside the output under a hidden name, and a journal of what is sure.

`.<prefix>.partial/` holds for each output the tokens (`.bin`), the lengths of its documents, and a loss mask if there
is one; `skipped` has a line for each record that was passed over. `journal` holds a JSON object a line: first what
decides the output (inputs, tokenizer, flags), then every few seconds how far it is: sizes and checksums of the files,
which are on the disk by then, and the place in the input. A run that finds such a folder cuts the files back to the
last line, compares their checksums, and goes on from there. The last line of a finished run holds the sidecars; after
it there is only publishing left, which can be done again.
"""

import fcntl
import json
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import numpy as np
import xxhash
from numpy.typing import NDArray

from megatron_ladder.data.encoding import KeyTokens, Task
from megatron_ladder.data.files import publish, sync_folder
from megatron_ladder.data.indexed import HEADER, MAGIC, TOKEN_DTYPES, VERSION, bin_path, idx_path, loss_mask_path
from megatron_ladder.data.reading.protocol import WrongInputError
from megatron_ladder.data.sidecar import Sidecar, sidecar_path, sidecar_values, write_sidecar
from megatron_ladder.errors import UserError

FORMAT = 3
"""Of the journal; it counts groups, so that another size of them is another format."""
SKIPPED = "skipped"
"""Name of the file of what was passed over."""
READ_BYTES = 1 << 20
INDEX_DOCUMENTS = 1 << 20
"""Documents whose offsets are written at once."""


class PartialFile:
    """A file that grows, and knows its checksum."""

    def __init__(self, path: Path) -> None:
        """Opens the file, and drops what is in it."""
        self.path = path
        self._file: BinaryIO = open(path, "w+b")  # noqa: SIM115 - closed by close()
        self._hasher = xxhash.xxh3_128()
        self.size = 0

    @classmethod
    def reopen(cls, path: Path, size: int, checksum: str) -> "PartialFile | None":
        """Cuts a file back to `size` bytes and goes on behind them; None if these are not the ones of the checksum."""
        if not path.is_file():
            return None
        self = cls.__new__(cls)
        self.path, self.size, self._hasher = path, size, xxhash.xxh3_128()
        self._file = open(path, "r+b")  # noqa: SIM115 - closed by close()
        left = size
        while left and (block := self._file.read(min(left, READ_BYTES))):
            self._hasher.update(block)
            left -= len(block)
        if left or self.checksum != checksum:
            self.close()
            return None
        self._file.truncate(size)
        self._file.seek(size)
        return self

    def append(self, content: "bytes | NDArray[Any]") -> None:
        """Writes bytes, or those of a contiguous array, at the end."""
        view = content.view(np.uint8).data if isinstance(content, np.ndarray) else memoryview(content)
        self._file.write(view)
        self._hasher.update(view)
        self.size += len(view)

    def sync(self) -> None:
        """Makes everything durable."""
        self._file.flush()
        os.fsync(self._file.fileno())

    @property
    def checksum(self) -> str:
        """`xxh3_128:` and 32 hexadecimal digits."""
        return f"xxh3_128:{self._hasher.hexdigest()}"

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


class PartialDataset:
    """The files of one output, and its counts."""

    def __init__(self, folder: Path, name: str, dtype: "np.dtype[Any]", has_loss_mask: bool) -> None:
        """Begins anew."""
        self._folder, self._name, self._dtype = folder, name, dtype
        suffixes = (".bin", ".lengths", "_loss_mask.bin") if has_loss_mask else (".bin", ".lengths")
        self._files = {suffix: PartialFile(folder / f"{name}{suffix}") for suffix in suffixes}
        self.documents = self.tokens = 0
        self.largest_id = -1

    @classmethod
    def reopen(
        cls, folder: Path, name: str, dtype: "np.dtype[Any]", recorded: dict[str, Any]
    ) -> "PartialDataset | None":
        """As it was when `record` gave that; None if its files are not those."""
        self = cls.__new__(cls)
        self._folder, self._name, self._dtype = folder, name, dtype
        self.documents, self.tokens = recorded["documents"], recorded["tokens"]
        self.largest_id = recorded["largest_id"]
        self._files = {}
        for suffix, (size, checksum) in recorded["files"].items():
            file = PartialFile.reopen(folder / f"{name}{suffix}", size, checksum)
            if file is None:
                self.close()
                return None
            self._files[suffix] = file
        return self

    def add(self, part: KeyTokens) -> None:
        """Appends documents."""
        self._files[".bin"].append(np.ascontiguousarray(part.token_ids, dtype=self._dtype))
        self._files[".lengths"].append(np.ascontiguousarray(part.lengths, dtype="<i4"))
        if part.loss_mask is not None:
            self._files["_loss_mask.bin"].append(np.ascontiguousarray(part.loss_mask, dtype=np.uint8))
        self.documents += len(part.lengths)
        self.tokens += len(part.token_ids)
        self.largest_id = max(self.largest_id, part.largest_id)

    def record(self) -> dict[str, Any]:
        """Counts, sizes and checksums, for the journal; the files are durable then."""
        for file in self._files.values():
            file.sync()
        return {
            "documents": self.documents,
            "tokens": self.tokens,
            "largest_id": self.largest_id,
            "files": {suffix: [file.size, file.checksum] for suffix, file in self._files.items()},
        }

    @property
    def bin_checksum(self) -> str:
        """Of the tokens."""
        return self._files[".bin"].checksum

    @property
    def loss_mask_checksum(self) -> str | None:
        """Of the loss mask; None if there is none."""
        mask = self._files.get("_loss_mask.bin")
        return None if mask is None else mask.checksum

    def write_index(self) -> str:
        """Writes the index file from the lengths, some at a time, and returns its checksum."""
        code = next(code for code, name in TOKEN_DTYPES.items() if np.dtype(name) == self._dtype)
        self._files[".lengths"].sync()
        lengths = np.memmap(self._files[".lengths"].path, "<i4", "r") if self.documents else np.empty(0, "<i4")
        index = PartialFile(self._folder / f"{self._name}.idx")
        index.append(HEADER.pack(MAGIC, VERSION, code, self.documents, self.documents + 1))
        begins = range(0, self.documents, INDEX_DOCUMENTS)
        for begin in begins:
            index.append(np.array(lengths[begin : begin + INDEX_DOCUMENTS]))
        offset = 0
        for begin in begins:
            ends = np.cumsum(lengths[begin : begin + INDEX_DOCUMENTS], dtype="<i8") * self._dtype.itemsize + offset
            index.append(np.concatenate([np.array([offset], "<i8"), ends[:-1]]))
            offset = int(ends[-1])
        for begin in range(0, self.documents + 1, INDEX_DOCUMENTS):
            index.append(np.arange(begin, min(begin + INDEX_DOCUMENTS, self.documents + 1), dtype="<i8"))
        index.sync()
        index.close()
        return index.checksum

    def close(self) -> None:
        """Closes the files."""
        for file in self._files.values():
            file.close()


def publish_dataset(folder: Path, name: str, prefix: Path, sidecar: Sidecar) -> None:
    """Renames the files of one output into place; may be called again after it was cut short.

    Nothing that looks whole is ever a mixture: what described the former files goes first, the index comes after the
    tokens and the sidecar last, each durable before the next.
    """
    moves = [
        (folder / f"{name}.bin", bin_path(prefix)),
        (folder / f"{name}_loss_mask.bin", loss_mask_path(prefix)),
        (folder / f"{name}.idx", idx_path(prefix)),
    ]
    if moves[0][0].exists():
        for stale in (sidecar_path(prefix), idx_path(prefix), loss_mask_path(prefix)):
            stale.unlink(missing_ok=True)
        sync_folder(prefix.parent)
    for source, target in moves:
        if source.exists():
            publish(source, target)
    write_sidecar(prefix, sidecar)


class Partial:
    """The folder of an unfinished run; a context manager.

    Leaving it by a WrongInputError deletes the folder, and so does a mistake of the user before anything was done.
    Leaving it by anything else keeps it, and what was done until then.
    """

    def __init__(self, output_prefix: Path, task: Task, inputs: list[dict[str, Any]], can_resume: bool = True) -> None:
        """Takes the folder, and finds out whether there is something to go on from.

        Attributes:
            found: a sentence about what was found, or None.
            unlocked: a sentence about why nobody else is kept away, or None.
            place: what the last `commit` was given, {} at a beginning.
            sidecars: those of a run that had only to publish, else None.

        Raises:
            UserError: another process works there.
        """
        self.folder = output_prefix.with_name(f".{output_prefix.name}.partial")
        self.folder.mkdir(parents=True, exist_ok=True)
        self._journal = open(self.folder / "journal", "a+b")  # noqa: SIM115 - closed by __exit__
        self.unlocked: str | None = None
        try:
            fcntl.flock(self._journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._journal.close()
            raise UserError(
                f"--output-prefix {output_prefix}: another process is writing there ({self.folder}): wait for it, or "
                "give another prefix"
            ) from None
        except OSError as error:
            self.unlocked = (
                f"{self.folder}: this file system does not lock ({error.strerror}): see to it that no other process "
                "writes there"
            )
        self._prefixes = [dataset_prefix(output_prefix, name) for name in task.outputs]
        self._task = task
        self._header = {"format": FORMAT, "inputs": inputs, "has_loss_mask": task.has_loss_mask} | task.identity()
        self.found: str | None = None
        self.place: dict[str, Any] = {}
        self.sidecars: list[Sidecar] | None = None
        self._committed_at = time.monotonic()
        self._has_progress = False
        self._skipped: PartialFile | None
        lines = self._read_journal()
        if not (lines and can_resume and self._resume(lines)):
            self._begin_anew()

    def _resume(self, lines: list[dict[str, Any]]) -> bool:
        header, last = lines[0], lines[-1]
        changed = [name for name in self._header if header.get(name) != self._header[name]]
        if changed:
            self.found = f"begun before with other {', '.join(_in_words(name) for name in changed)}: starting anew"
            return False
        if "sidecars" in last:
            self.sidecars = [Sidecar(**values) for values in last["sidecars"]]
            self.datasets, self._skipped = [], None
            self._has_progress = True
            return True
        if len(lines) == 1:
            return False
        reopened = [
            PartialDataset.reopen(self.folder, name, self._task.dtype, recorded)
            for name, recorded in zip(self._task.outputs, last["outputs"], strict=True)
        ]
        self.datasets = [dataset for dataset in reopened if dataset is not None]
        self._skipped = PartialFile.reopen(self.folder / SKIPPED, *last["skipped"])
        if len(self.datasets) < len(reopened) or self._skipped is None:
            self._close()
            self.found = f"{self.folder}: what was begun before is damaged: starting anew"
            return False
        self.place = last["place"]
        self._has_progress = True
        return True

    def _begin_anew(self) -> None:
        for path in self.folder.iterdir():
            if path.name != "journal":
                path.unlink()
        self._journal.truncate(0)
        self.datasets = [
            PartialDataset(self.folder, name, self._task.dtype, self._task.has_loss_mask) for name in self._task.outputs
        ]
        self._skipped = PartialFile(self.folder / SKIPPED)
        self._write(self._header)

    def _read_journal(self) -> list[dict[str, Any]]:
        """Its lines; a last one that was cut short is cut off."""
        self._journal.seek(0)
        whole, _, _ = self._journal.read().rpartition(b"\n")
        self._journal.truncate(len(whole) + 1 if whole else 0)
        return [json.loads(line) for line in whole.split(b"\n")] if whole else []

    def _write(self, values: dict[str, Any]) -> None:
        self._journal.write(json.dumps(values).encode() + b"\n")
        self._journal.flush()
        os.fsync(self._journal.fileno())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()
        if error is not None and not self.is_kept_after(error):
            shutil.rmtree(self.folder, ignore_errors=True)
        self._journal.close()

    def _close(self) -> None:
        for file in (*self.datasets, self._skipped):
            if file is not None:
                file.close()

    def is_kept_after(self, error: BaseException) -> bool:
        """Whether a run that ends by this error leaves the folder, for the next one to go on from."""
        if isinstance(error, WrongInputError):
            return False
        return self._has_progress or not isinstance(error, UserError)

    def skip(self, line: str) -> None:
        """Notes a record that was passed over: its place, and the reason."""
        assert self._skipped is not None
        self._skipped.append(f"{line}\n".encode(errors="backslashreplace"))

    def commit(self, place: dict[str, Any], at_least_seconds: float = 0.0) -> None:
        """Makes what was added durable, with the place in the input behind it; not if the last time is too near."""
        if time.monotonic() - self._committed_at >= at_least_seconds:
            assert self._skipped is not None
            self._skipped.sync()
            skipped = [self._skipped.size, self._skipped.checksum]
            outputs = [dataset.record() for dataset in self.datasets]
            self._write({"place": place, "skipped": skipped, "outputs": outputs})
            self._committed_at = time.monotonic()
            self._has_progress = True

    def publish(self, sidecars: Sequence[Sidecar]) -> None:
        """Makes everything appear under its name, and the folder disappear."""
        if self.sidecars is None:
            for dataset in self.datasets:
                dataset.record()
            self._write({"sidecars": [sidecar_values(sidecar) for sidecar in sidecars]})
        for name, prefix, sidecar in zip(self._task.outputs, self._prefixes, sidecars, strict=True):
            publish_dataset(self.folder, name, prefix, sidecar)
        shutil.rmtree(self.folder)


def dataset_prefix(output_prefix: Path, name: str) -> Path:
    """`corpus` and `text` -> `corpus_text_document`, Megatron's name."""
    return output_prefix.with_name(f"{output_prefix.name}_{name}_document")


def _in_words(name: str) -> str:
    return {"inputs": "input", "format": "release"}.get(name, name)

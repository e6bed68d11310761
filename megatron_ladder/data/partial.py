"""An unfinished data set: files in a hidden directory next to the output, and a journal of what is durable.

`.<prefix>.partial/` contains, for each output, the tokens (`.bin`), the lengths of its documents, and a loss mask if
the output has one. `skipped` has one line per skipped record. `journal` has one JSON object per line: the first
records everything that determines the output (inputs, tokenizer, flags); every few seconds another one records the
progress: sizes and checksums of the files, which are durable by then, and the position in the input.

A run that finds such a directory truncates the files to the state of the last line, compares their checksums, and
continues from there. The last line of a finished run contains the sidecars; after it, only publishing remains, which
can be repeated.
"""

import json
import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from megatron_ladder.data.encoding import KeyTokens, Task
from megatron_ladder.data.indexed import HashedFile, bin_path, idx_path, loss_mask_path, sidecar_path, write_index
from megatron_ladder.data.reading.protocol import WrongInputError
from megatron_ladder.data.sidecar import Sidecar, write_sidecar
from megatron_ladder.errors import UserError
from megatron_ladder.files import lock_file, publish, sync_directory

_FORMAT = 3
"""Format of the journal. It counts groups, so changing their size changes the format."""
_SKIPPED = "skipped"
_BIN, _LENGTHS, _LOSS_MASK = ".bin", ".lengths", "_loss_mask.bin"


@dataclass
class _PartialDataset:
    """The files of one output by their suffixes, and its counts."""

    index_path: Path
    dtype: "np.dtype[Any]"
    files: dict[str, HashedFile]
    documents: int = 0
    tokens: int = 0
    largest_id: int = -1

    def add(self, part: KeyTokens) -> None:
        self.files[_BIN].append(np.ascontiguousarray(part.token_ids, dtype=self.dtype))
        self.files[_LENGTHS].append(np.ascontiguousarray(part.lengths, dtype="<i4"))
        if part.loss_mask is not None:
            self.files[_LOSS_MASK].append(np.ascontiguousarray(part.loss_mask, dtype=np.uint8))
        self.documents += len(part.lengths)
        self.tokens += len(part.token_ids)
        self.largest_id = max(self.largest_id, part.largest_id)

    def counts(self) -> dict[str, int]:
        """Return the counts by their names in the journal and in the sidecar."""
        return {"documents": self.documents, "tokens": self.tokens, "largest_id": self.largest_id}

    def record(self) -> dict[str, Any]:
        """Make the files durable, and return counts, sizes and checksums for the journal."""
        for file in self.files.values():
            file.sync()
        return self.counts() | {"files": {suffix: [file.size, file.checksum] for suffix, file in self.files.items()}}

    def finish(self) -> dict[str, Any]:
        """Write the index file, and return counts and checksums for the sidecar."""
        self.files[_LENGTHS].sync()
        lengths = np.memmap(self.files[_LENGTHS].path, "<i4", "r") if self.documents else np.empty(0, "<i4")
        return self.counts() | {
            "bin_checksum": self.files[_BIN].checksum,
            "idx_checksum": write_index(self.index_path, self.dtype, lengths),
            "loss_mask_checksum": self.files[_LOSS_MASK].checksum if _LOSS_MASK in self.files else None,
        }

    def close(self) -> None:
        for file in self.files.values():
            file.close()


def _publish_dataset(folder: Path, name: str, prefix: Path, sidecar: Sidecar) -> None:
    """Rename the files of one output to their final names; can be repeated after an interruption.

    What looks complete is never a mixture of old and new files: the old sidecar and index are deleted first, the new
    index follows the tokens and the new sidecar comes last, and each step is durable before the next.
    """
    moves = [
        (folder / f"{name}{_BIN}", bin_path(prefix)),
        (folder / f"{name}{_LOSS_MASK}", loss_mask_path(prefix)),
        (folder / f"{name}.idx", idx_path(prefix)),
    ]
    if moves[0][0].exists():
        for stale in (sidecar_path(prefix), idx_path(prefix), loss_mask_path(prefix)):
            stale.unlink(missing_ok=True)
        sync_directory(prefix.parent)
    for source, target in moves:
        if source.exists():
            publish(source, target)
    write_sidecar(prefix, sidecar)


class Partial:
    """The directory of an unfinished run; a context manager.

    It is deleted after a WrongInputError, and after another UserError before the first progress, otherwise kept.
    """

    def __init__(
        self,
        output_prefix: Path,
        task: Task,
        inputs: list[dict[str, Any]],
        can_resume: bool,
        report: Callable[[str], None],
    ) -> None:
        """Lock the directory, or raise UserError if another process uses it, and look for progress of an earlier run.

        `place` is the position of the last `commit`, or {}; `sidecars` is None unless the run only has to publish them.
        """
        self.folder = output_prefix.with_name(f".{output_prefix.name}.partial")
        self.folder.mkdir(parents=True, exist_ok=True)
        self._journal = open(self.folder / "journal", "a+b")  # noqa: SIM115 - closed by __exit__
        try:
            error = lock_file(self._journal.fileno())
        except BlockingIOError:
            self._journal.close()
            raise UserError(
                f"--output-prefix {output_prefix}: another process is writing there ({self.folder}): wait for it, or "
                "give another prefix"
            ) from None
        if error is not None:
            problem = f"this file system has no locks ({error.strerror})"
            report(f"{self.folder}: {problem}: make sure that no other process writes there")
        self._prefixes = [dataset_prefix(output_prefix, name) for name in task.outputs]
        self._task, self._report = task, report
        self._header = {"format": _FORMAT, "inputs": inputs, "has_loss_mask": task.conversations} | task.identity()
        self.place: dict[str, Any] = {}
        self.sidecars: list[Sidecar] | None = None
        self._committed_at = time.monotonic()
        self._has_progress = False
        self.datasets: list[_PartialDataset] = []
        self._skipped: HashedFile | None = None
        lines = self._read_journal()
        if not (lines and can_resume and self._resume(lines)):
            self._start_over()

    def _resume(self, lines: list[dict[str, Any]]) -> bool:
        header, last = lines[0], lines[-1]
        changed = [name for name in self._header if header.get(name) != self._header[name]]
        if changed:
            labels = {"inputs": "input", "format": "release"}
            names = ", ".join(labels.get(name, name) for name in changed)
            self._report(f"an earlier run was started with other {names}: starting from scratch")
            return False
        if "sidecars" in last:
            self.sidecars = [Sidecar(**values) for values in last["sidecars"]]
            self._has_progress = True
            return True
        if len(lines) == 1:
            return False
        self.datasets, is_whole = [], True
        for name, recorded in zip(self._task.outputs, last["outputs"], strict=True):
            reopened = {
                suffix: HashedFile.reopen(self.folder / f"{name}{suffix}", size, checksum)
                for suffix, (size, checksum) in recorded.pop("files").items()
            }
            files = {suffix: file for suffix, file in reopened.items() if file is not None}
            is_whole = is_whole and len(files) == len(reopened)
            self.datasets.append(_PartialDataset(self.folder / f"{name}.idx", self._task.dtype, files, **recorded))
        self._skipped = HashedFile.reopen(self.folder / _SKIPPED, *last["skipped"])
        if not is_whole or self._skipped is None:
            self._close()
            self._report(f"{self.folder}: the files of an earlier run are damaged: starting from scratch")
            return False
        self.place = last["place"]
        self._has_progress = True
        return True

    def _start_over(self) -> None:
        for path in self.folder.iterdir():
            if path.name != "journal":
                path.unlink()
        self._journal.truncate(0)
        suffixes = (_BIN, _LENGTHS, _LOSS_MASK) if self._task.conversations else (_BIN, _LENGTHS)
        self.datasets = []
        for name in self._task.outputs:
            files = {suffix: HashedFile(self.folder / f"{name}{suffix}") for suffix in suffixes}
            self.datasets.append(_PartialDataset(self.folder / f"{name}.idx", self._task.dtype, files))
        self._skipped = HashedFile(self.folder / _SKIPPED)
        self._write(self._header)

    def _read_journal(self) -> list[dict[str, Any]]:
        """Return the lines of the journal, after removing an incomplete last line."""
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
        """Return whether a run that ends with this error keeps the directory, so that it can be resumed."""
        if isinstance(error, WrongInputError):
            return False
        return self._has_progress or not isinstance(error, UserError)

    def skip(self, line: str) -> None:
        """Record a skipped record: its location and the reason."""
        assert self._skipped is not None
        self._skipped.append(f"{line}\n".encode(errors="backslashreplace"))

    def commit(self, place: dict[str, Any], at_least_seconds: float = 0.0) -> None:
        """Make the progress durable together with its position in the input, unless the last commit is too recent."""
        if time.monotonic() - self._committed_at >= at_least_seconds:
            assert self._skipped is not None
            self._skipped.sync()
            skipped = [self._skipped.size, self._skipped.checksum]
            outputs = [dataset.record() for dataset in self.datasets]
            self._write({"place": place, "skipped": skipped, "outputs": outputs})
            self._committed_at = time.monotonic()
            self._has_progress = True

    def publish(self, sidecars: Sequence[Sidecar]) -> None:
        """Move all outputs to their final names, and delete the directory."""
        if self.sidecars is None:
            for dataset in self.datasets:
                dataset.record()
            self._write({"sidecars": [vars(sidecar) for sidecar in sidecars]})
        for name, prefix, sidecar in zip(self._task.outputs, self._prefixes, sidecars, strict=True):
            _publish_dataset(self.folder, name, prefix, sidecar)
        shutil.rmtree(self.folder)


def dataset_prefix(output_prefix: Path, name: str) -> Path:
    """`corpus` and `text` -> `corpus_text_document`, as Megatron names its outputs."""
    return output_prefix.with_name(f"{output_prefix.name}_{name}_document")

"""A checkpoint on disk, written by many ranks and read by any number of others, in any layout.

    SAVE/iter_0000100/manifest.json                      contents of the directory (see `manifest`)
    SAVE/iter_0000100/weights_rank_00000.safetensors     boxes of fp32 master weights that rank 0 wrote
    SAVE/iter_0000100/optimizer_rank_00000.safetensors   boxes of moments
    SAVE/iter_0000100/rng_rank_00000.safetensors         states of random number generators
    SAVE/iter_0000100/tokenizer.json                     files that belong to the model

The unit is a box, a rectangular part of a canonical tensor. A box has a name and a kind, the shape of the tensor, an
offset and an extent. Neither names nor boxes depend on a layout: a reader takes the elements that it needs from the
boxes that hold them. There is no pickle. This module needs no process group, and imports torch only to read tensors.
"""

from __future__ import annotations

import contextlib
import stat
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from megatron_ladder.blueprint.model import ModelConfig
from megatron_ladder.checkpoint.boxes import Box, cut_span, intersection
from megatron_ladder.checkpoint.checksum import file_error
from megatron_ladder.checkpoint.manifest import TensorTable, decode_manifest, manifest_checksum
from megatron_ladder.checkpoint.publish import (
    LATEST_NAME,
    MANIFEST_NAME,
    is_published_name,
    published_checkpoints,
    publishing_order,
    read_latest,
)
from megatron_ladder.checkpoint.tensor_file import (
    BY_NAME,
    BY_STORED_NAME,
    TensorPosition,
    element_name,
    open_to_read,
    read_header,
    read_part,
)
from megatron_ladder.checkpoint.tilings import StoredTensor, writer_of
from megatron_ladder.errors import UserError, limited, raise_user_errors
from megatron_ladder.files import hub_hint
from megatron_ladder.progress import ProgressBar

if TYPE_CHECKING:
    # Programs that only look at checkpoints start without torch, whose import takes seconds.
    import torch

GENERATION_CONFIG = "generation_config.json"
CHAT_TEMPLATE = "chat_template.jinja"
TOKENIZERS = ("tokenizer.json", "tokenizer.model")
CARRIED = (
    *TOKENIZERS,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    CHAT_TEMPLATE,
    GENERATION_CONFIG,
)
"""Files of a Hugging Face directory that travel with the model through import, training and export; none holds code."""

_VERIFYING_THREADS = 8
_FILES_OPEN = 128
"""Most files kept open while loading; a process may usually open 1,024, fewer than the ranks of a large run wrote."""


class Checkpoint:
    """A complete checkpoint, open for reading. Opening reads the manifest; data files are opened when needed."""

    def __init__(self, directory: Path, manifest: dict[str, Any], table: TensorTable, manifest_checksum: str) -> None:
        self.directory = directory
        self.manifest = manifest
        """The manifest without its tensors."""
        self.warnings: tuple[str, ...] = ()
        """Problems of newer checkpoints that were passed over."""
        self.manifest_checksum = manifest_checksum
        self._table = table
        self._headers: dict[str, dict[str, TensorPosition]] = {}
        self._kept: dict[Path, BinaryIO] | None = None

    @staticmethod
    def open(path: Path) -> Checkpoint:
        """Open a checkpoint, or the current one of a directory; raise UserError if none is complete."""
        if not path.exists():
            raise UserError(f"{path}: no such directory{hub_hint(path)}")
        if (found := find_checkpoint(path)) is None:
            raise UserError(f"{path}: no checkpoint found")
        return found

    @staticmethod
    def open_unchecked(directory: Path) -> Checkpoint:
        """Open a checkpoint that another rank found complete; only the manifest is read."""
        return _open_directory(directory)

    @contextlib.contextmanager
    def keeping_files_open(self) -> Iterator[None]:
        """Keep the last files that were read open for further reads in the block, which one thread makes."""
        self._kept = {}
        try:
            yield
        finally:
            for file in self._kept.values():
                file.close()
            self._kept = None

    def _opened(self, path: Path) -> contextlib.AbstractContextManager[BinaryIO]:
        if self._kept is None:
            return open_to_read(path)
        if path in self._kept:
            file = self._kept.pop(path)
        else:
            if len(self._kept) >= _FILES_OPEN:
                self._kept.pop(next(iter(self._kept))).close()
            file = open_to_read(path)
        # Now the last one, and so the last to be closed.
        self._kept[path] = file
        return contextlib.nullcontext(file)

    @property
    def iteration(self) -> int:
        """Return the number of completed optimizer steps."""
        return int(self.manifest["iteration"])

    @property
    def consumed_samples(self) -> int:
        """Return the number of training samples seen."""
        return int(self.manifest["consumed_samples"])

    @property
    def file_names(self) -> frozenset[str]:
        """Return the names of all files except the manifest."""
        return frozenset(record["name"] for record in self.manifest["files"])

    @property
    def optimizer(self) -> str:
        """Return the --optimizer of the run; a converted model has none."""
        return str(self.manifest.get("run", {}).get("optimizer", {}).get("optimizer", "adamw"))

    def model(self) -> ModelConfig:
        """Return sizes and wiring of the stored model; raise UserError if they are invalid."""
        source = str(self.directory / MANIFEST_NAME)
        return ModelConfig.from_dict(self.manifest["model"], source, tensors=len(self._table["weight"]))

    def stored(self, kind: str) -> Mapping[str, StoredTensor]:
        """Return all stored tensors of a kind by name."""
        return self._table[kind]

    def read_weight(self, name: str, offset: Sequence[int], extent: Sequence[int], out: torch.Tensor) -> None:
        """Fill `out` with a box of a weight, converted to its dtype; raise as `read`."""
        self.read(name, "weight", offset, extent, out)

    def read(self, name: str, kind: str, offset: Sequence[int], extent: Sequence[int], out: torch.Tensor) -> None:
        """Fill `out` with a box of a stored tensor, reading only the bytes around that box.

        Args:
            out: [*extent], on any device, contiguous or not. Only weights are converted to its dtype.

        Raises:
            UserError: the tensor is not stored, is too small or has another dtype, or its file is damaged.
            ValueError: the shape of `out` is not `extent`.
        """
        wanted = Box(tuple(offset), tuple(extent))
        if tuple(out.shape) != wanted.extent:
            raise ValueError(f"{name}: {wanted} cannot be read into a tensor of shape {list(out.shape)}")
        stored = self._stored(name, kind)
        if not wanted.fits(stored.global_shape):
            raise self._another_model(f"{kind} of {name} has the shape {list(stored.global_shape)}", str(wanted))
        dtype = element_name(out.dtype)
        if dtype != stored.dtype and kind != "weight":
            raise UserError(f"{self.directory}: {kind} of {name} is stored as {stored.dtype}, expected {dtype}")
        target = out.detach()
        for index in stored.overlapping(wanted):
            box = stored.box(index)
            shared = intersection(box, wanted)
            assert shared is not None
            begin, path = self.position(stored, index).begin, self.directory / stored.file(index)
            part = target[shared.within(wanted).slices()]
            read_part(path, begin, box.extent, shared.within(box), stored.dtype, part, opened=self._opened)

    def read_span(
        self, name: str, kind: str, global_shape: Sequence[int], held: Box, start: int, out_flat: torch.Tensor
    ) -> None:
        """Fill `out_flat` with an interval of a flattened box, as in `saving.CheckpointWriter.add_span`.

        Raises:
            UserError: as for `read`, or the shape of the stored tensor is not `global_shape`.
        """
        stored = self._stored(name, kind)
        if stored.global_shape != tuple(global_shape):
            found = f"{kind} of {name} has the shape {list(stored.global_shape)}"
            raise self._another_model(found, str(list(global_shape)))
        for box, begin in cut_span(held, start, out_flat.numel()):
            piece = out_flat[begin : begin + box.numel].view(box.extent)
            self.read(name, kind, box.offset, box.extent, piece)

    def verify(self, progress: str | None = None, rank: int = 0, ranks: int = 1, only_weights: bool = False) -> None:
        """Read files in parallel, and compare checksums and headers with the manifest.

        Args: as for `verify_checksums`.

        Raises:
            UserError: files are damaged; one line per file.
        """
        self.verify_headers(self.verify_checksums(progress, rank, ranks, only_weights))

    def verify_checksums(
        self, progress: str | None = None, rank: int = 0, ranks: int = 1, only_weights: bool = False
    ) -> set[str]:
        """Read files in parallel, compare checksums with the manifest, and return the names of the files.

        Another thread may read tensors meanwhile.

        Args:
            progress: description of the progress bar; no bar if None.
            rank, ranks: verify share `rank` of `ranks` shares of the files: those that the rank of that number wrote,
                which it reads again if the layout is the same.
            only_weights: skip files that contain nothing but tensors of other kinds.

        Raises:
            UserError: files are damaged; one line per file.
        """
        skipped = set[str]()
        if only_weights:
            files = {kind: set[str]().union(*(t.files() for t in self._table[kind].values())) for kind in self._table}
            skipped = set[str]().union(*files.values()) - files["weight"]
        records = [
            record
            for record in self.manifest["files"]
            if record["name"] not in skipped and writer_of(record["name"]) % ranks == rank
        ]
        size, lock = sum(record["size"] for record in records), threading.Lock()
        with contextlib.nullcontext() if progress is None else ProgressBar(progress, size) as bar:

            def report(count: int) -> None:
                if bar is not None:
                    with lock:
                        bar.advance(count)

            def check(record: dict[str, Any]) -> str | None:
                return file_error(self.directory / record["name"], record["checksum"], report)

            with ThreadPoolExecutor(_VERIFYING_THREADS) as threads:
                raise_user_errors(limited([error for error in threads.map(check, records) if error is not None]))
        return {record["name"] for record in records}

    def verify_headers(self, names: Collection[str]) -> None:
        """Compare the headers of files with the manifest; raise UserError if one differs."""
        for tensors in self._table.values():
            for stored in tensors.values():
                for index in stored.boxes_in(names):
                    self.position(stored, index)

    def position(self, stored: StoredTensor, index: int) -> TensorPosition:
        """Return the position of a box in its file; raise UserError if its header contradicts the manifest."""
        file, key = stored.file(index), stored.key(index)
        path = self.directory / file
        if file not in self._headers:
            self._headers[file] = read_header(path, self._opened)
        position = self._headers[file].get(key)
        if position is None:
            raise UserError(f"{path}: has no tensor {key!r}, which the manifest lists")
        box = stored.box(index)
        if position.shape != box.extent or BY_STORED_NAME.get(position.dtype) != BY_NAME[stored.dtype]:
            raise UserError(
                f"{path}: {key!r} is {position.dtype} of shape {list(position.shape)}, and the manifest lists "
                f"{stored.dtype} of shape {list(box.extent)}"
            )
        return position

    def _stored(self, name: str, kind: str) -> StoredTensor:
        if name not in self._table[kind]:
            raise self._another_model(f"holds {kind} of {len(self._table[kind])} tensors", name)
        return self._table[kind][name]

    def _another_model(self, found: str, expected: str) -> UserError:
        return UserError(f"{self.directory}: {found}, expected {expected}: the checkpoint belongs to another model")


def find_checkpoint(save: Path) -> Checkpoint | None:
    """Open the current checkpoint of a directory of checkpoints, or one checkpoint; return None if there is none.

    The current checkpoint is the one that `latest` names. If it is not complete, open the newest complete one before
    it, or else the newest of all, and record why in `Checkpoint.warnings`. Checksums of data files are not compared.

    Raises:
        UserError: there are checkpoints, but none is complete; one line per checkpoint.
    """
    if (save / MANIFEST_NAME).is_file() or (is_published_name(save.name) and save.exists()):
        return _open_complete(save)
    if save.exists() and not save.is_dir():
        raise UserError(f"{save}: is a file, expected a directory of checkpoints")
    if latest := read_latest(save):
        # Usually no other checkpoint has to be looked at.
        with contextlib.suppress(UserError):
            return _open_complete(save / latest)
    candidates, errors = checkpoint_candidates(save)
    if not candidates and not errors:
        return None
    for name in candidates:
        try:
            found = _open_complete(save / name)
        except UserError as error:
            errors += error.messages
            continue
        if errors:
            found.warnings = (*errors, f"{save / name}: is used instead")
        return found
    first = [f"{save}: none of its {len(candidates)} checkpoints is complete"] if candidates else []
    raise UserError(*first, *errors)


def checkpoint_candidates(save: Path) -> tuple[list[str], list[str]]:
    """Return the names of the checkpoints in a directory in the order to try them, and errors of the directory.

    The one that `latest` names comes first, then older ones, the newest first, then newer ones.
    """
    latest, names = read_latest(save), published_checkpoints(save)
    candidates, errors = names[::-1], list[str]()
    if latest is None:
        errors += [f"{save / LATEST_NAME}: is missing"] if names else []
    elif latest not in names:
        errors.append(f"{save / LATEST_NAME}: names {latest or 'no checkpoint'!r}, which does not exist")
    if latest:
        candidates.sort(key=lambda name: publishing_order(name) > publishing_order(latest))
    return candidates, errors


def _open_directory(directory: Path) -> Checkpoint:
    path = directory / MANIFEST_NAME
    try:
        data = path.read_bytes()
        manifest, table = decode_manifest(data)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"{path}: {error}") from None
    return Checkpoint(directory, manifest, table, manifest_checksum(data))


def _open_complete(directory: Path) -> Checkpoint:
    checkpoint, errors = _open_directory(directory), []
    for record in checkpoint.manifest["files"]:
        path, expected = directory / record["name"], record["size"]
        try:
            found = path.lstat()
            if is_link := stat.S_ISLNK(found.st_mode):
                found = path.stat()
        except (FileNotFoundError, NotADirectoryError):
            errors.append(f"{path}: is missing, or not a file")
            continue
        if is_link and path.resolve().parent != directory.resolve():
            errors.append(f"{path}: is a link out of the directory of the checkpoint")
        elif not stat.S_ISREG(found.st_mode):
            errors.append(f"{path}: is missing, or not a file")
        elif found.st_size != expected:
            errors.append(
                f"{path}: truncated or changed: the manifest records {expected} bytes, the file has {found.st_size}"
            )
    raise_user_errors(limited(errors))
    return checkpoint

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
import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_ladder.blueprint.boxes import Box
from megatron_ladder.blueprint.model import ModelConfig
from megatron_ladder.blueprint.optimizers import MOMENTS
from megatron_ladder.checkpoint import tensor_file
from megatron_ladder.checkpoint.manifest import KINDS, TensorTable, decode_manifest, manifest_checksum, writer_of
from megatron_ladder.checkpoint.publish import (
    LATEST_NAME,
    MANIFEST_NAME,
    is_published_name,
    published_checkpoints,
    publishing_order,
    read_latest,
)
from megatron_ladder.errors import UserError, limited, raise_user_errors
from megatron_ladder.files import hub_hint
from megatron_ladder.progress import ProgressBar
from megatron_ladder.tokenizers.kinds import TOKENIZER_KINDS

if TYPE_CHECKING:
    # Programs that only look at checkpoints start without torch, whose import takes seconds.
    import torch

IMPORTED = "hugging_face"
"""Key of a manifest: type and special token ids of the directory from which a model was imported."""
IMPORTED_DTYPES = "element_types"
"""Key of that entry: the element types of tensors that differ from that of the embedding, by canonical name."""
HF_CONFIG = "config.json"
"""The file that makes a directory one of Hugging Face."""
GENERATION_CONFIG = "generation_config.json"
_TOKEN_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")
CHAT_TEMPLATE = "chat_template.jinja"
CARRIED = (
    *(name for kind in TOKENIZER_KINDS for name in kind.files),
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    CHAT_TEMPLATE,
    GENERATION_CONFIG,
)
"""Files of a Hugging Face directory that travel with the model through import, training and export; none holds code."""
MODEL_CARD = "README.md"
"""In a training checkpoint, only the metadata of the model that was imported, such as its licence."""
_LICENCE = re.compile(
    r"(licen[cs]e|notice|copying|use_policy)([-_][\w-]+(\.\d+)*)?(\.(txt|md|rst|pdf))?", re.IGNORECASE
)
_VERIFYING_THREADS = 8


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
        self._files: dict[str, Any] = {}
        """Open data files by name."""

    @staticmethod
    def open(path: Path) -> Checkpoint:
        """Open a checkpoint, or the current one of a directory; raise UserError if none is complete."""
        if not path.exists():
            raise UserError(f"{path}: no such directory{checkpoints_nearby(path) or hub_hint(path)}")
        checkpoint = find_checkpoint(path)
        if checkpoint is None:
            raise UserError(f"{path}: no checkpoint found{checkpoints_nearby(path)}")
        return checkpoint

    @staticmethod
    def open_unchecked(directory: Path) -> Checkpoint:
        """Open a checkpoint that another rank found complete; only the manifest is read."""
        path = directory / MANIFEST_NAME
        try:
            data = path.read_bytes()
            manifest, table = decode_manifest(data)
        except OSError as error:
            raise UserError(f"{path}: cannot be read: {error.strerror}") from None
        except ValueError as error:
            raise UserError(f"{path}: {error}") from None
        return Checkpoint(directory, manifest, table, manifest_checksum(data))

    @property
    def is_imported(self) -> bool:
        """Whether the model comes from a Hugging Face directory, and has kept its tokenizer."""
        return self.manifest.get(IMPORTED) is not None

    @property
    def imported_type(self) -> str:
        """The `model_type` of the directory from which the model was imported; "" if it was not."""
        return str((self.manifest.get(IMPORTED) or {}).get("model_type", ""))

    @property
    def imported_dtypes(self) -> dict[str, str]:
        """The element types in that directory of tensors that had another one than the embedding."""
        dtypes: dict[str, str] = (self.manifest.get(IMPORTED) or {}).get(IMPORTED_DTYPES, {})
        return dtypes

    @property
    def imported_ids(self) -> dict[str, Any]:
        """The ids of special tokens in the directory from which the model was imported, by their keys there."""
        return token_ids(self.manifest.get(IMPORTED) or {}, self.directory / MANIFEST_NAME)

    @property
    def end_ids(self) -> tuple[int, ...]:
        """The tokens that end texts in the imported model, and those that ended documents and answers in training."""
        return tuple(dict.fromkeys([*end_ids(self.imported_ids), *self.manifest.get("end_ids", ())]))

    @property
    def answers_end(self) -> bool:
        """False if the model was trained on conversations, and no token is recorded that ended their answers."""
        return bool(self.manifest.get("answers_end", True))

    def close(self) -> None:
        """Release the data files; further reads open them again."""
        self._files.clear()

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

    @property
    def has_moments(self) -> bool:
        """Whether it holds an optimizer's state, not just weights."""
        return any(self.stored(which) for which in MOMENTS)

    def model(self) -> ModelConfig:
        """Return sizes and wiring of the stored model; raise UserError if they are invalid."""
        return ModelConfig.from_dict(self.manifest["model"], str(self.directory / MANIFEST_NAME))

    def stored(self, kind: str) -> Mapping[str, tensor_file.StoredTensor]:
        """Return all stored tensors of a kind by name."""
        return self._table[kind]

    def read_weight(self, name: str, box: Box, out: torch.Tensor) -> None:
        """Fill `out` with a box of a weight, converted to its dtype; raise as `read`."""
        self.read(name, "weight", box, out)

    def read(self, name: str, kind: str, wanted: Box, out: torch.Tensor, shape: Sequence[int] | None = None) -> None:
        """Fill `out` [*extent] with a box of a stored tensor, reading only the bytes around that box.

        Only weights are converted to the dtype of `out`. `shape` is that of the whole tensor, if it is known. Raises
        UserError if the tensor is not stored, has another shape or dtype, or its file is damaged.
        """
        if tuple(out.shape) != wanted.extent:
            raise ValueError(f"{name}: {wanted} cannot be read into a tensor of shape {list(out.shape)}")
        if name not in self._table[kind]:
            raise self._another_model(f"holds {kind} of {len(self._table[kind])} tensors", name)
        stored = self._table[kind][name]
        if not wanted.fits(stored.shape) or (shape is not None and stored.shape != tuple(shape)):
            expected = str(wanted) if shape is None else str(list(shape))
            raise self._another_model(f"{kind} of {name} has the shape {list(stored.shape)}", expected)
        dtype = tensor_file.element_name(out.dtype)
        if dtype != stored.dtype and kind != "weight":
            raise UserError(f"{self.directory}: {kind} of {name} is stored as {stored.dtype}, expected {dtype}")
        copied = 0
        for index in stored.overlapping(wanted):
            box = stored.box(index)
            shared = box.intersection(wanted)
            assert shared is not None
            part = self._part(stored, index)[shared.within(box).slices()]
            out.detach()[shared.within(wanted).slices()].copy_(part)
            copied += shared.numel
        if copied != wanted.numel:
            raise UserError(f"{self.directory}: {kind} of {name}: files hold {copied} of the elements {wanted}")

    def verify(self, progress: str | None = None, rank: int = 0, ranks: int = 1, only_weights: bool = False) -> None:
        """Read files in parallel, and compare checksums with the manifest; another thread may read tensors meanwhile.

        Of several `ranks`, each verifies the files that the rank of its number wrote, which it reads again if the
        layout is the same. `only_weights` skips files of other kinds of tensors. Raises UserError with one line per
        damaged file.
        """
        skipped = {prefix for kind, prefix in KINDS.items() if kind != "weight"} if only_weights else set()
        records = [
            record
            for record in self.manifest["files"]
            if record["name"].partition("_rank_")[0] not in skipped and writer_of(record["name"]) % ranks == rank
        ]

        def check(record: dict[str, Any]) -> str | None:
            path = self.directory / record["name"]
            try:
                checksum = tensor_file.file_checksum(path)
            except OSError as error:
                return f"{path}: cannot be read: {error.strerror}"
            if checksum == record["checksum"]:
                return None
            return f"{path}: damaged: the manifest records {record['checksum']}, the contents have {checksum}"

        errors = list[str]()
        size = sum(record["size"] for record in records)
        with (
            contextlib.nullcontext() if progress is None else ProgressBar(progress, size) as bar,
            ThreadPoolExecutor(_VERIFYING_THREADS) as threads,
        ):
            for record, error in zip(records, threads.map(check, records), strict=True):
                if error is not None:
                    errors.append(error)
                if bar is not None:
                    bar.advance(record["size"])
        raise_user_errors(limited(errors))

    def _part(self, stored: tensor_file.StoredTensor, index: int) -> torch.Tensor:
        """Return a box in its mapped file."""
        file = stored.file(index)
        path = self.directory / file
        if file not in self._files:
            self._files[file] = tensor_file.open_safetensors(path)
        return tensor_file.stored_tensor(path, self._files[file], stored.key(index))

    def _another_model(self, content: str, expected: str) -> UserError:
        return UserError(f"{self.directory}: {content}, expected {expected}: the checkpoint belongs to another model")


@contextlib.contextmanager
def reporting_os_errors(where: object) -> Iterator[None]:
    """Convert an OSError to a UserError about an argument or a directory."""
    try:
        yield
    except OSError as error:
        file = f"{error.filename} " if error.filename else ""
        raise UserError(f"{where}: {file}cannot be read: {error.strerror or error}") from None


def is_card_or_licence(name: str) -> bool:
    """Return whether a file travels with a model as those of `CARRIED`, whichever tokenizer the training uses."""
    return name == MODEL_CARD or _LICENCE.fullmatch(name) is not None


def is_hf_directory(path: Path) -> bool:
    """Return whether a directory is one of Hugging Face; raise UserError if it holds training checkpoints as well."""
    if not (path / HF_CONFIG).exists():
        return False
    names = published_checkpoints(path)
    if not names and is_published_name(path.name):
        names = [MANIFEST_NAME]
    if names:
        raise UserError(
            f"{path}: holds {HF_CONFIG} of a Hugging Face model and {names[-1]} of a training, so it is unclear which "
            "of them is meant: move one to another directory"
        )
    return True


def find_checkpoint(save: Path) -> Checkpoint | None:
    """Open the current checkpoint of a directory of checkpoints, or one checkpoint; return None if there is none.

    The current checkpoint is the one that `latest` names. If it is not complete, open the newest complete one before
    it, or else the newest of all, and record why in `Checkpoint.warnings`. Checksums of data files are not compared.
    Raises UserError if there are checkpoints, but none is complete, or for a Hugging Face directory.
    """
    if is_hf_directory(save):
        raise UserError(
            f"{save}: is a Hugging Face directory, expected training checkpoints: convert it with "
            f"`tools/convert_checkpoint.py import --hf {save} --save DIR`, and give DIR"
        )
    if (save / MANIFEST_NAME).is_file() or (is_published_name(save.name) and save.exists()):
        return _open_complete(save)
    if save.exists() and not save.is_dir():
        raise UserError(f"{save}: is a file, expected a directory of checkpoints")
    candidates, errors = checkpoint_candidates(save)
    if not candidates and not errors:
        return None
    for name in candidates:
        try:
            checkpoint = _open_complete(save / name)
        except UserError as error:
            errors += error.messages
            continue
        if errors:
            checkpoint.warnings = (*errors, f"{save / name}: is used instead")
        return checkpoint
    if candidates:
        errors.insert(0, f"{save}: none of its {len(candidates)} checkpoints is complete")
    raise UserError(*errors)


def checkpoints_nearby(path: Path) -> str:
    """Return a hint at directories with checkpoints in a directory, or with names like that of one that is missing."""
    folder = path if path.is_dir() else path.parent
    with contextlib.suppress(OSError):
        holders = {entry.name: entry for entry in sorted(folder.iterdir()) if published_checkpoints(entry)}
        names = holders if folder == path else difflib.get_close_matches(path.name, holders)
        if names:
            return f": did you mean {' or '.join(str(holders[name]) for name in [*names][:3])}?"
    return ""


def checkpoint_candidates(save: Path) -> tuple[list[str], list[str]]:
    """Return the names of the checkpoints in a directory in the order to try them, and errors of the directory.

    The one that `latest` names comes first, then older ones, the newest first, then newer ones.
    """
    latest = read_latest(save)
    candidates = published_checkpoints(save)[::-1]
    errors = list[str]()
    if latest is None and candidates:
        errors.append(f"{save / LATEST_NAME}: is missing")
    elif latest is not None and latest not in candidates:
        errors.append(f"{save / LATEST_NAME}: names {latest or 'no checkpoint'!r}, which does not exist")
    if latest:
        candidates.sort(key=lambda name: publishing_order(name) > publishing_order(latest))
    return candidates, errors


def _open_complete(directory: Path) -> Checkpoint:
    checkpoint = Checkpoint.open_unchecked(directory)
    errors = []
    for record in checkpoint.manifest["files"]:
        path = directory / record["name"]
        size = path.stat().st_size if path.is_file() else "no"
        if size != record["size"]:
            errors.append(f"{path}: missing, truncated or changed: {record['size']} bytes expected, {size} found")
    raise_user_errors(limited(errors))
    return checkpoint


def token_ids(values: Any, source: Path, vocab_size: int | None = None) -> dict[str, Any]:
    """Return the ids of special tokens in the JSON object of a file. Null, and -1 except for the end, mean none.

    Raises UserError if an id is not an integer, or not one of the vocabulary, if its size is given.
    """
    if not isinstance(values, Mapping):
        raise UserError(f"{source}: found {values!r:.60}, expected an object with {', '.join(_TOKEN_KEYS)}")
    ids = {}
    errors = []
    for key in _TOKEN_KEYS:
        value = values.get(key)
        is_end = key == "eos_token_id"
        if value is None or (value == -1 and not is_end):
            continue
        listed = value if is_end and isinstance(value, list) else [value]
        if all(type(token) is int and (vocab_size is None or 0 <= token < vocab_size) for token in listed):
            ids[key] = value
        else:
            bounds = "" if vocab_size is None else f" of 0-{vocab_size - 1}"
            errors.append(f"{source}: {key}: found {value!r:.60}, expected an id{bounds}, or null")
    raise_user_errors(errors)
    return ids


def end_ids(ids: Mapping[str, Any]) -> list[int]:
    """Return the tokens that end texts, of which the result of `token_ids` may have none, one or a list."""
    ends = ids.get("eos_token_id", [])
    return ends if isinstance(ends, list) else [ends]

"""Megatron's indexed data sets: `<prefix>.bin` with the tokens, `<prefix>.idx` with their positions.

Everything is little-endian. The .idx file holds, without padding:

    bytes        content
    9            magic `MMIDIDX\\0\\0`
    8            u64, version: 1
    1            u8, code of the token type (see _TOKEN_DTYPES)
    8            u64, number of sequences S
    8            u64, number of documents + 1: D
    4 * S        i32, tokens of each sequence
    8 * S        i64, byte offset of each sequence in .bin
    8 * D        i64, first sequence of each document, and S at the end

We write each document as one sequence. Megatron may cut a document into several sequences (sentences). These are
adjacent in .bin, so a document is one range of tokens in both cases, and the reader offers documents as such ranges.
"""

import contextlib
import dataclasses
import json
import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, BinaryIO, Literal, Self

import numpy as np
import xxhash
from numpy.typing import NDArray

from megatron_ladder import files
from megatron_ladder.errors import UserError, counted
from megatron_ladder.typed import read_json, typed

_HEADER = struct.Struct("<9sQBQQ")
_MAGIC = b"MMIDIDX\x00\x00"
_VERSION = 1
# Code in the file -> NumPy type.
_TOKEN_DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
SAMPLED_BLOCKS = 64
"""Blocks of .bin that distinguish data sets with equal indices without reading all tokens."""
_SAMPLED_BYTES = 4096
"""Size of such a block."""
_SAMPLED_DOCUMENTS = 1000
"""Number of documents from all over a data set whose last tokens are read."""


def bin_path(prefix: Path) -> Path:
    """`data/train_text_document` -> `data/train_text_document.bin`; dots in the prefix are kept."""
    return prefix.with_name(prefix.name + ".bin")


def idx_path(prefix: Path) -> Path:
    """`data/train_text_document` -> `data/train_text_document.idx`."""
    return prefix.with_name(prefix.name + ".idx")


def sidecar_path(prefix: Path) -> Path:
    """`data/train_text_document` -> `data/train_text_document.json`, an optional file."""
    return prefix.with_name(prefix.name + ".json")


def loss_mask_path(prefix: Path) -> Path:
    """`data/chat_text_document` -> `data/chat_text_document_loss_mask.bin`, an optional file."""
    return prefix.with_name(prefix.name + "_loss_mask.bin")


def token_dtype(vocab_size: int) -> "np.dtype[Any]":
    """Return the type in which Megatron stores the ids of a vocabulary: u16 below 65,500 ids, else i32."""
    return np.dtype("<u2" if vocab_size < 65_500 else "<i4")


def format_checksum(hasher: xxhash.xxh3_128) -> str:
    """Return a checksum as it is stored: `xxh3_128:` and 32 hexadecimal digits."""
    return f"xxh3_128:{hasher.hexdigest()}"


class _HashedFile:
    """A file that is written under a temporary name, from its beginning to its end, and computes its checksum."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._temporary = files.temporary_path(path)
        self._hasher = xxhash.xxh3_128()
        self._file: IO[bytes] = open(self._temporary, "xb")  # noqa: SIM115 - closed by finish() or remove()

    def append(self, content: "bytes | NDArray[Any]") -> None:
        """Write bytes, or those of a contiguous array."""
        view = content.view(np.uint8).data if isinstance(content, np.ndarray) else memoryview(content)
        with files.naming(self._path):
            self._file.write(view)
        self._hasher.update(view)

    def finish(self) -> str:
        """Make all content durable, close the file, and return the checksum."""
        with files.naming(self._path):
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
        return format_checksum(self._hasher)

    def publish(self) -> None:
        """Move the finished file to its final name."""
        files.publish(self._temporary, self._path)

    def remove(self) -> None:
        """Close and delete the file, unless it was published."""
        # On a full disk it has content that cannot be written.
        with contextlib.suppress(OSError):
            self._file.close()
        self._temporary.unlink(missing_ok=True)


class IndexedDatasetWriter:
    """Writes a data set under temporary names, which `publish` replaces: .bin first, .idx last."""

    def __init__(self, prefix: Path, dtype: "np.dtype[Any]", has_loss_mask: bool = False) -> None:
        self.prefix = prefix
        self.dtype = dtype
        self._lengths: list[NDArray[np.int32]] = []
        self._bin = _HashedFile(bin_path(prefix))
        self._idx = _HashedFile(idx_path(prefix))
        self._mask = _HashedFile(loss_mask_path(prefix)) if has_loss_mask else None
        self._files = [file for file in (self._bin, self._mask, self._idx) if file is not None]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        for file in self._files:
            file.remove()

    def add_documents(
        self, token_ids: NDArray[Any], lengths: NDArray[np.integer], loss_mask: NDArray[np.uint8] | None = None
    ) -> None:
        """Append documents of `token_ids` [sum(lengths)]."""
        assert int(lengths.sum(dtype=np.int64)) == len(token_ids)
        self._bin.append(np.ascontiguousarray(token_ids, dtype=self.dtype))
        if self._mask is not None:
            assert loss_mask is not None
            self._mask.append(np.ascontiguousarray(loss_mask, dtype=np.uint8))
        self._lengths.append(lengths.astype("<i4"))

    def publish(self) -> dict[str, Any]:
        """Move the data set to its final name, and return the checksums of its files by their names in the sidecar.

        What looks complete is never a mixture of old and new files: an old sidecar and index are deleted first, the new
        index follows the tokens, and each step is durable before the next.
        """
        # Each document is one sequence.
        lengths = np.concatenate([np.empty(0, "<i4"), *self._lengths])
        code = next(code for code, name in _TOKEN_DTYPES.items() if np.dtype(name) == self.dtype)
        self._idx.append(_HEADER.pack(_MAGIC, _VERSION, code, len(lengths), len(lengths) + 1))
        self._idx.append(lengths)
        self._idx.append((np.cumsum(lengths, dtype="<i8") - lengths) * self.dtype.itemsize)
        self._idx.append(np.arange(len(lengths) + 1, dtype="<i8"))
        named = {"bin_checksum": self._bin, "idx_checksum": self._idx, "loss_mask_checksum": self._mask}
        checksums = {name: None if file is None else file.finish() for name, file in named.items()}
        for stale in (sidecar_path(self.prefix), idx_path(self.prefix), loss_mask_path(self.prefix)):
            stale.unlink(missing_ok=True)
        files.sync_directory(self.prefix.parent)
        for file in self._files:
            file.publish()
        return checksums


@dataclass(frozen=True)
class Sidecar:
    """Metadata of a data set: `<prefix>.json`, which describes how the tokens were made. Megatron ignores it.

    The tokenizer's type is the first of its synonyms, and its hash is that of its file, or hashes are those of the file
    and of other formats next to it (`Tokenizer.identity`). `append_eod` records whether every document ends with
    `eod_id`. Documents do not include empty ones, which were left out; tokens include
    end-of-document tokens. A checksum is `xxh3_128:` and 32 hexadecimal digits, or None if it is unknown or the file
    does not exist. Each document is one conversation, which training packs whole, if `conversations` is set, and
    `chat_template` is the template that rendered it; `answer_ends` are the special tokens at the ends of answers.
    `skipped` counts unreadable lines. `parse_special_tokens` records whether the spelling of a special token became
    that token.
    """

    tokenizer_type: str
    tokenizer_sha256: str | tuple[str, ...]
    vocab_size: int
    eod_id: int
    append_eod: bool
    largest_id: int
    documents: int
    tokens: int
    bin_checksum: str | None = None
    idx_checksum: str | None = None
    loss_mask_checksum: str | None = None
    conversations: bool = False
    skipped: int = 0
    chat_template: str | None = None
    answer_ends: tuple[int, ...] = ()
    parse_special_tokens: bool = False
    format_version: Literal[1] = 1


def write_sidecar(prefix: Path, sidecar: Sidecar) -> None:
    """Write the sidecar of a data set atomically."""
    values = dataclasses.asdict(sidecar)
    values = {"format_version": values.pop("format_version")} | values
    if sidecar.chat_template is None:
        del values["chat_template"], values["answer_ends"]
    if not sidecar.parse_special_tokens:
        del values["parse_special_tokens"]
    files.write_atomically(sidecar_path(prefix), json.dumps(values, indent=2) + "\n")


def read_sidecar(prefix: Path) -> Sidecar | None:
    """Return the sidecar of a data set, or None if there is none; raises UserError if it cannot be read."""
    path = sidecar_path(prefix)
    try:
        content = files.read_if_exists(path)
        return None if content is None else typed(read_json(content), Sidecar)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"{path}: not the sidecar of a data set ({error}): preprocess the data again") from None


class IndexedDataset:
    """A memory-mapped data set, validated when it is opened.

    Attributes:
        prefix: path of the two files without `.bin` and `.idx`.
        tokens [number of tokens]: all documents, concatenated, in the type of the file.
        sequence_bounds [sequences + 1] int64: sequence i is `tokens[bounds[i]:bounds[i + 1]]`.
        document_bounds [documents + 1] int64: document i is `tokens[bounds[i]:bounds[i + 1]]`.
        loss_mask [number of tokens] uint8: 1 for a token that counts in the loss, else 0; None without a file
            `<prefix>_loss_mask.bin`, and every token counts.
        idx_checksum: checksum of the index file, see `format_checksum`.
        sidecar: description of the tokens, or None; data sets of other programs have none.
    """

    def __init__(self, prefix: Path) -> None:
        """Raises UserError if a file is missing, has another format, or contradicts itself or another file."""
        if not prefix.name:
            raise UserError(f"{prefix}: is a directory: give the path of a data set without .bin and .idx")
        self.prefix = prefix
        self._mapped: dict[str, mmap.mmap] = {}
        try:
            dtype = self._read_index()
            tokens = int(self.sequence_bounds[-1])
            if tokens == 0:
                raise UserError(f"{idx_path(prefix)}: has no token: preprocess an input with text")
            self.tokens = self._map(bin_path(prefix), dtype, tokens)
        except FileNotFoundError as error:
            raise UserError(f"{error.filename}: no such file{_prefixes_nearby(prefix)}") from None
        self.loss_mask: NDArray[np.uint8] | None = None
        with contextlib.suppress(FileNotFoundError):
            self.loss_mask = self._map(loss_mask_path(prefix), np.dtype(np.uint8), tokens)
        self.sidecar = read_sidecar(prefix)
        if self.sidecar is not None:
            self._compare(self.sidecar)

    def _compare(self, sidecar: Sidecar) -> None:
        path = sidecar_path(self.prefix)
        counts = (len(self), len(self.tokens))
        if counts != (sidecar.documents, sidecar.tokens):
            raise UserError(
                f"{path}: describes {counted(sidecar.documents, 'document')} and "
                f"{counted(sidecar.tokens, 'token')}, the data set has "
                f"{counts[0]} and {counts[1]}: preprocess the data again"
            )
        if sidecar.idx_checksum not in (None, self.idx_checksum):
            raise UserError(
                f"{idx_path(self.prefix)}: found checksum {self.idx_checksum}, {path} expects {sidecar.idx_checksum}: "
                "the index is damaged or of other data: copy or preprocess the data again"
            )

    @property
    def missing_loss_mask(self) -> str | None:
        """The beginning of a message if the sidecar requires a loss mask, and there is none; else None."""
        sidecar = self.sidecar
        if self.loss_mask is not None or sidecar is None:
            return None
        if not (sidecar.conversations or sidecar.loss_mask_checksum):
            return None
        return f"{loss_mask_path(self.prefix)}: no such file, and it belongs to {sidecar_path(self.prefix)}"

    def _read_index(self) -> "np.dtype[Any]":
        """Read and validate .idx and return the type of the tokens."""
        path = idx_path(self.prefix)
        with _open(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size < _HEADER.size:
                raise UserError(f"{path}: {size} bytes found, at least {_HEADER.size} expected: not a Megatron index")
            content = memoryview(mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ))
        magic, version, code, sequences, bounds = _HEADER.unpack_from(content)
        if magic != _MAGIC or version != _VERSION:
            raise UserError(
                f"{path}: begins with {magic!r} version {version}, expected {_MAGIC!r} version {_VERSION}: "
                "not a Megatron index"
            )
        if code not in _TOKEN_DTYPES:
            known = ", ".join(map(str, sorted(_TOKEN_DTYPES)))
            raise UserError(f"{path}: the code of the token type is {code}, expected one of {known}")
        expected = _HEADER.size + 12 * sequences + 8 * bounds
        if size != expected:
            raise UserError(
                f"{path}: {size} bytes found, {expected} expected for {sequences} sequences and "
                f"{bounds - 1} documents: preprocess or copy the data again"
            )
        dtype = np.dtype(_TOKEN_DTYPES[code])
        lengths = np.frombuffer(content, "<i4", sequences, _HEADER.size)
        offsets = np.frombuffer(content, "<i8", sequences, _HEADER.size + 4 * sequences)
        documents = np.frombuffer(content, "<i8", bounds, _HEADER.size + 12 * sequences)
        starts = np.zeros(sequences + 1, np.int64)
        np.cumsum(lengths, dtype=np.int64, out=starts[1:])
        damage = ""
        if not bounds or documents[0] != 0 or documents[-1] != sequences or np.any(np.diff(documents) < 0):
            damage = "documents overlap"
        if np.any(lengths < 0) or not np.array_equal(offsets, starts[:-1] * dtype.itemsize):
            damage = "offsets of sequences do not follow from their lengths"
        if damage:
            raise UserError(f"{path}: damaged: {damage}: preprocess or copy the data again")
        one_sequence_each = bounds == sequences + 1 and bool(np.all(np.diff(documents) > 0))
        self.sequence_bounds = starts
        self.document_bounds = starts if one_sequence_each else starts[documents]
        self.idx_checksum = format_checksum(xxhash.xxh3_128(content))
        return dtype

    def _map(self, path: Path, dtype: "np.dtype[Any]", entries: int) -> NDArray[Any]:
        with _open(path) as file:
            size = os.fstat(file.fileno()).st_size
            expected = entries * dtype.itemsize
            if size != expected:
                raise UserError(
                    f"{file.name}: {size} bytes found, {expected} expected by {idx_path(self.prefix)} ({entries} "
                    "tokens): preprocess or copy the data again"
                )
            self._mapped[file.name] = mmap.mmap(file.fileno(), expected, access=mmap.ACCESS_READ)
            return np.frombuffer(self._mapped[file.name], dtype)

    def check_size(self) -> None:
        """Raise UserError if a file was truncated since it was opened: reading beyond its end kills the process."""
        for path, mapped in self._mapped.items():
            if (size := mapped.size()) < len(mapped):
                raise UserError(
                    f"{path}: {size} bytes found, {len(mapped)} when it was opened: another program changed the file "
                    "during the run: preprocess or copy the data again"
                )

    def __len__(self) -> int:
        """Number of documents."""
        return len(self.document_bounds) - 1

    def document(self, number: int) -> NDArray[Any]:
        """Return the tokens of one document, a view into the file."""
        return self.tokens[self.document_bounds[number] : self.document_bounds[number + 1]]


def _open(path: Path) -> BinaryIO:
    """Open a file; raises FileNotFoundError, and UserError for other problems."""
    try:
        file = open(path, "rb")  # noqa: SIM115 - the caller closes it.
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    files.reject_pointer(path, file.peek())
    return file


def documents_with_targets(
    mask: NDArray[np.uint8], begins: NDArray[np.int64], ends: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Return whether any token but the first counts in each of some documents, tokens begins .. ends - 1 in order."""
    has_target = np.zeros(len(begins), np.bool_)
    longer = np.flatnonzero(ends - begins > 1)
    if len(longer):
        edges = np.stack([begins[longer] + 1, ends[longer]], axis=1).ravel()
        has_target[longer] = np.maximum.reduceat(mask[: edges[-1]], edges[:-1])[::2] > 0
    return has_target


def sampled_ends(dataset: IndexedDataset) -> NDArray[Any]:
    """Return the last token of documents from all over a data set, without empty ones."""
    bounds = dataset.document_bounds
    present = np.flatnonzero(np.diff(bounds))
    chosen = present[np.unique(np.linspace(0, len(present) - 1, _SAMPLED_DOCUMENTS).astype(np.int64))]
    return dataset.tokens[bounds[chosen + 1] - 1]


def occurs_in_sample(dataset: IndexedDataset, token_id: int) -> bool:
    """Return whether a token is in blocks from all over a data set."""
    begins = _sampled_begins(len(dataset.tokens), SAMPLED_BLOCKS)
    return any(bool((dataset.tokens[begin : begin + _SAMPLED_BYTES] == token_id).any()) for begin in begins)


def sampled_checksum(array: NDArray[Any], blocks: int = SAMPLED_BLOCKS) -> str:
    """Return the checksum of blocks from all over a mapped file."""
    content = array.view(np.uint8)
    hasher = xxhash.xxh3_128()
    for begin in _sampled_begins(len(content), blocks):
        hasher.update(content[begin : begin + _SAMPLED_BYTES].tobytes())
    return format_checksum(hasher)


def _sampled_begins(length: int, blocks: int) -> list[int]:
    return np.unique(np.linspace(0, max(length - _SAMPLED_BYTES, 0), blocks).astype(np.int64)).tolist()


def _prefixes_nearby(prefix: Path) -> str:
    """Return a hint for a user who gave a file instead of a prefix, or the prefix without `_text_document`."""
    name = prefix.name.removesuffix(".bin").removesuffix(".idx")
    nearby = sorted(path.with_suffix("") for path in prefix.parent.glob("*.idx") if path.name.startswith(name))
    if not nearby and prefix.is_file():
        return f": {prefix} holds no tokens: make them with `tools/preprocess_data.py --input {prefix}`"
    if not nearby:
        return " (give the path of a data set without .bin and .idx)"
    return f": did you mean {' or '.join(map(str, nearby[:3]))}?"

"""Megatron's indexed data sets: `<prefix>.bin` with raw tokens, `<prefix>.idx` that says where they lie.

Everything is little-endian. The .idx file holds, without padding:

    bytes        what
    9            magic `MMIDIDX\\0\\0`
    8            u64, version: 1
    1            u8, code of the token type (see TOKEN_DTYPES)
    8            u64, number of sequences S
    8            u64, number of documents + 1: D
    4 * S        i32, tokens of each sequence
    8 * S        i64, byte offset of each sequence in .bin
    8 * D        i64, first sequence of each document, and S at the end

A document of ours is one sequence. Megatron may cut one into several (sentences); they lie side by side in
.bin, so a document is one run of tokens either way, and that is what the reader offers.
"""

import os
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, NamedTuple, Self

import numpy as np
import xxhash
from numpy.typing import NDArray

from megatron_ladder.data.files import publish, temporary_beside
from megatron_ladder.errors import UserError

HEADER = struct.Struct("<9sQBQQ")
MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
TOKEN_DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
"""Code in the file -> NumPy type."""
FLOAT_CODES = {6: "float64", 7: "float32"}
"""The other codes of Megatron."""

COPIED_TOKENS = 1 << 23
"""How many are copied at a time from one data set to another."""

SAMPLED_BLOCKS, SAMPLED_BYTES = 64, 4096
"""How much of .bin tells two data sets with equal indices apart without reading them whole."""

U16_VOCABULARY_LIMIT = 65_500
"""Megatron stores ids as u16 below this vocabulary size, with a margin under 2**16."""


def bin_path(prefix: Path) -> Path:
    """`data/train_text_document` -> `data/train_text_document.bin`; a dot in the prefix is part of it."""
    return prefix.with_name(prefix.name + ".bin")


def idx_path(prefix: Path) -> Path:
    """`data/train_text_document` -> `data/train_text_document.idx`."""
    return prefix.with_name(prefix.name + ".idx")


def loss_mask_path(prefix: Path) -> Path:
    """`data/chat_text_document` -> `data/chat_text_document_loss_mask.bin`, which only some data sets have."""
    return prefix.with_name(prefix.name + "_loss_mask.bin")


def token_dtype(vocab_size: int) -> "np.dtype[Any]":
    """The type in which Megatron stores ids of a vocabulary: u16 where it fits, else i32."""
    return np.dtype("<u2" if vocab_size < U16_VOCABULARY_LIMIT else "<i4")


class Checksums(NamedTuple):
    """Of a data set's two files, each `xxh3_128:` and 32 hexadecimal digits."""

    bin: str
    idx: str


class IndexedDatasetWriter:
    """Writes a data set beside its name and publishes it by renaming, .bin first and .idx last.

    A context manager: leaving it without `publish()`, by an exception for one, leaves no file behind.
    """

    def __init__(self, prefix: Path, dtype: "np.dtype[Any]") -> None:
        self.prefix = prefix
        self.dtype = dtype
        self._code = next(code for code, name in TOKEN_DTYPES.items() if np.dtype(name) == dtype)
        self._lengths: list[NDArray[np.int32]] = []
        self._document_ends: list[NDArray[np.int64]] = []
        self._sequences = 0
        self._bin_hasher = xxhash.xxh3_128()
        self._temporary_bin = temporary_beside(bin_path(prefix))
        self._bin: BinaryIO = open(self._temporary_bin, "xb")  # noqa: SIM115 - closed by __exit__

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bin.close()
        self._temporary_bin.unlink(missing_ok=True)

    def add_document(self, token_ids: Sequence[int] | NDArray[Any]) -> None:
        """Appends one document of any number of tokens."""
        self.add_documents(np.asarray(token_ids, dtype=np.int64), np.array([len(token_ids)], dtype=np.int32))

    def add_documents(self, token_ids: NDArray[Any], lengths: NDArray[np.int32]) -> None:
        """Appends documents that follow each other in `token_ids` [sum(lengths)].

        Raises:
            ValueError: when the lengths do not add up, or an id does not fit the type of the file.
        """
        if int(lengths.sum(dtype=np.int64)) != len(token_ids) or (len(lengths) and int(lengths.min()) < 0):
            raise ValueError(f"document lengths add up to {lengths.sum()}, not to {len(token_ids)} tokens")
        if len(token_ids) and token_ids.dtype != self.dtype:
            smallest, largest, limits = int(token_ids.min()), int(token_ids.max()), np.iinfo(self.dtype)
            if smallest < limits.min or largest > limits.max:
                raise ValueError(
                    f"token ids {smallest} to {largest} do not fit {self.dtype} of {self.prefix}"
                )
        self._write(token_ids)
        self._add_index(lengths, np.arange(1, len(lengths) + 1))

    def append(self, dataset: "IndexedDataset", copied: Callable[[int], None]) -> str:
        """Appends all of a data set of the same type, documents of several sequences included, a block at a time.

        Args:
            copied: is told the number of bytes after each block.

        Returns:
            The checksum of the tokens read: `xxh3_128:` and 32 hexadecimal digits.
        """
        if dataset.tokens.dtype != self.dtype:
            raise ValueError(f"{dataset.prefix} holds {dataset.tokens.dtype}, {self.prefix} {self.dtype}")
        hasher = xxhash.xxh3_128()
        for begin in range(0, len(dataset.tokens), COPIED_TOKENS):
            block = dataset.tokens[begin : begin + COPIED_TOKENS]
            hasher.update(block.data)
            self._write(block)
            copied(block.nbytes)
        self._add_index(np.diff(dataset.sequence_bounds), dataset.document_indices[1:])
        return f"xxh3_128:{hasher.hexdigest()}"

    def _write(self, token_ids: NDArray[Any]) -> None:
        content = np.ascontiguousarray(token_ids, dtype=self.dtype).data
        self._bin.write(content)
        self._bin_hasher.update(content)

    def _add_index(self, lengths: NDArray[Any], document_ends: NDArray[np.int64]) -> None:
        """Lengths of sequences that were written, and after how many of them each document ends."""
        self._lengths.append(lengths.astype("<i4"))
        self._document_ends.append(document_ends + self._sequences)
        self._sequences += len(lengths)

    def publish(self) -> Checksums:
        """Makes the data set appear under its name; one that was there is replaced."""
        lengths = np.concatenate([np.empty(0, "<i4"), *self._lengths])
        offsets = np.zeros(len(lengths), "<i8")
        np.cumsum(lengths[:-1] * np.int64(self.dtype.itemsize), out=offsets[1:])
        documents = np.concatenate([np.zeros(1, "<i8"), *self._document_ends]).astype("<i8", copy=False)
        _sync_and_close(self._bin)
        temporary_idx = temporary_beside(idx_path(self.prefix))
        idx_hasher = xxhash.xxh3_128()
        try:
            with open(temporary_idx, "xb") as file:
                header = HEADER.pack(MAGIC, VERSION, self._code, len(lengths), len(documents))
                for part in (header, lengths.data, offsets.data, documents.data):
                    file.write(part)
                    idx_hasher.update(part)
                _sync_and_close(file)
            # An old index must never stand beside a new .bin, not even when we are killed in between.
            idx_path(self.prefix).unlink(missing_ok=True)
            publish(self._temporary_bin, bin_path(self.prefix))
            publish(temporary_idx, idx_path(self.prefix))
        finally:
            temporary_idx.unlink(missing_ok=True)
        return Checksums(f"xxh3_128:{self._bin_hasher.hexdigest()}", f"xxh3_128:{idx_hasher.hexdigest()}")


def _sync_and_close(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())
    file.close()


class IndexedDataset:
    """A data set on disk, memory-mapped and checked when it is opened.

    Attributes:
        prefix: the two files' path without `.bin` and `.idx`.
        tokens [number of tokens]: all documents one after the other, in the file's own type.
        sequence_bounds [sequences + 1] int64: sequence i is `tokens[bounds[i]:bounds[i + 1]]`.
        document_bounds [documents + 1] int64: document i is `tokens[bounds[i]:bounds[i + 1]]`.
        loss_mask [number of tokens] uint8: 1 where a token is to be learnt, 0 where it is only read; None
            where there is no `<prefix>_loss_mask.bin`, and every token is learnt.
        document_indices [documents + 1] int64: first sequence of each document, and the number of sequences.
        idx_checksum: of the index file, `xxh3_128:` and 32 hexadecimal digits.
    """

    def __init__(self, prefix: Path) -> None:
        """
        Raises:
            UserError: when a file is missing, is no such file, or contradicts itself or the other one; it
                names the file, what was found and what was expected.
        """
        self.prefix = prefix
        index = _read_index(prefix)
        self.sequence_bounds, self.document_bounds = index.sequence_bounds, index.document_bounds
        self.document_indices, self.idx_checksum = index.document_indices, index.checksum
        found, expected = bin_path(prefix).stat().st_size, index.tokens * index.dtype.itemsize
        if found != expected:
            raise UserError(
                f"{bin_path(prefix)}: {found} bytes found, {expected} expected by {idx_path(prefix)} "
                f"({index.tokens} tokens of {index.dtype.itemsize} bytes): preprocess or copy the data again"
            )
        if index.tokens == 0:
            raise UserError(f"{idx_path(prefix)}: holds no token: preprocess an input with text")
        # The plain-array view spares NumPy's subclass handling on every slice.
        self.tokens: NDArray[Any] = np.asarray(np.memmap(bin_path(prefix), dtype=index.dtype, mode="r"))
        self.loss_mask = _open_loss_mask(prefix, index.tokens)

    def __len__(self) -> int:
        """Number of documents."""
        return len(self.document_bounds) - 1

    def document(self, number: int) -> NDArray[Any]:
        """Tokens of one document, a view into the file."""
        if not 0 <= number < len(self):
            raise IndexError(f"{self.prefix} has documents 0 to {len(self) - 1}, not {number}")
        return self.tokens[self.document_bounds[number] : self.document_bounds[number + 1]]


def sampled_checksum(array: NDArray[Any], blocks: int = SAMPLED_BLOCKS) -> str:
    """Checksum of 64 blocks, 4096 bytes each, from all over a mapped file, so that other tokens under an equal index
    are told without reading everything: `xxh3_128:` and 32 hexadecimal digits."""
    content = array.view(np.uint8)
    begins = np.linspace(0, max(len(content) - SAMPLED_BYTES, 0), blocks).astype(np.int64)
    hasher = xxhash.xxh3_128()
    for begin in np.unique(begins).tolist():
        hasher.update(content[begin : begin + SAMPLED_BYTES].tobytes())
    return f"xxh3_128:{hasher.hexdigest()}"


def _open_loss_mask(prefix: Path, tokens: int) -> NDArray[np.uint8] | None:
    path = loss_mask_path(prefix)
    if not path.is_file():
        return None
    found = path.stat().st_size
    if found != tokens:
        raise UserError(
            f"{path}: {found} bytes found, {tokens} expected, one for each token of {bin_path(prefix)}: preprocess "
            "or copy the data again"
        )
    return np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))


class _Index(NamedTuple):
    dtype: "np.dtype[Any]"
    tokens: int
    sequence_bounds: NDArray[np.int64]
    document_indices: NDArray[np.int64]
    document_bounds: NDArray[np.int64]
    checksum: str


def _read_index(prefix: Path) -> _Index:
    """Reads and checks .idx; the .bin file is only looked for."""
    if not prefix.name:
        raise UserError(f"{prefix}: is a folder: a data set is named by its path without .bin and .idx")
    path = idx_path(prefix)
    for needed in (path, bin_path(prefix)):
        if not needed.is_file():
            raise UserError(f"{needed}: no such file{_prefixes_nearby(prefix)}")
    content = path.read_bytes() if path.stat().st_size < HEADER.size else np.memmap(path, mode="r").data
    if len(content) < HEADER.size:
        raise UserError(
            f"{path}: {len(content)} bytes found, at least {HEADER.size} expected: not a Megatron index"
        )
    magic, version, code, sequences, bounds = HEADER.unpack_from(content)
    if magic != MAGIC or version != VERSION:
        raise UserError(
            f"{path}: begins with {magic!r} version {version}, expected {MAGIC!r} version {VERSION}: "
            "not a Megatron index"
        )
    if code in FLOAT_CODES:
        raise UserError(f"{path}: holds {FLOAT_CODES[code]}, which no token id is: not a data set of tokens")
    if code not in TOKEN_DTYPES:
        known = ", ".join(map(str, sorted(TOKEN_DTYPES)))
        raise UserError(f"{path}: code of the token type is {code}, expected one of {known}")
    expected = HEADER.size + 12 * sequences + 8 * bounds
    if len(content) == expected + sequences > expected:
        raise UserError(f"{path}: holds a mode for each sequence: data sets of several modalities cannot be read")
    if len(content) != expected:
        raise UserError(
            f"{path}: {len(content)} bytes found, {expected} expected for {sequences} sequences and "
            f"{bounds - 1} documents: preprocess or copy the data again"
        )
    dtype = np.dtype(TOKEN_DTYPES[code])
    lengths = np.frombuffer(content, "<i4", sequences, HEADER.size)
    offsets = np.frombuffer(content, "<i8", sequences, HEADER.size + 4 * sequences)
    documents = np.frombuffer(content, "<i8", bounds, HEADER.size + 12 * sequences)
    starts = _sequence_starts(path, lengths, offsets, dtype.itemsize)
    is_one_sequence_each = _check_documents(path, documents, sequences)
    checksum = f"xxh3_128:{xxhash.xxh3_128_hexdigest(content)}"
    document_bounds = starts if is_one_sequence_each else starts[documents]
    return _Index(dtype, int(starts[-1]), starts, documents, document_bounds, checksum)


def _sequence_starts(
    path: Path, lengths: NDArray[np.int32], offsets: NDArray[np.int64], itemsize: int
) -> NDArray[np.int64]:
    """First token of each sequence, and the number of tokens at the end [S + 1]; the offsets must agree."""
    if len(lengths) and int(lengths.min()) < 0:
        worst = int(lengths.argmin())
        raise UserError(f"{path}: length of sequence {worst} is {lengths[worst]}, expected 0 or more")
    starts = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, dtype=np.int64, out=starts[1:])
    wrong = np.flatnonzero(offsets != starts[:-1] * itemsize)
    if len(wrong):
        first = int(wrong[0])
        raise UserError(
            f"{path}: byte offset of sequence {first} is {offsets[first]}, expected "
            f"{starts[first] * itemsize} by the lengths before it ({len(wrong)} wrong offsets)"
        )
    return starts


def _check_documents(path: Path, documents: NDArray[np.int64], sequences: int) -> bool:
    """Whether every document is one sequence."""
    if len(documents) == 0 or documents[0] != 0 or documents[-1] != sequences:
        ends = (int(documents[0]), int(documents[-1])) if len(documents) else "nothing"
        raise UserError(f"{path}: document indices run over {ends}, expected (0, {sequences})")
    falling = np.flatnonzero(documents[1:] < documents[:-1])
    if len(falling):
        first = int(falling[0])
        raise UserError(
            f"{path}: document {first} begins at sequence {documents[first]} and ends at "
            f"{documents[first + 1]}: preprocess or copy the data again"
        )
    return len(documents) == sequences + 1 and bool((documents[1:] > documents[:-1]).all())


def _prefixes_nearby(prefix: Path) -> str:
    """Help for who gave a file for a prefix, or the prefix without `_text_document`."""
    name = prefix.name.removesuffix(".bin").removesuffix(".idx")
    nearby = sorted(
        path.with_suffix("") for path in prefix.parent.glob("*.idx") if path.name.startswith(name)
    )
    if not nearby:
        return " (a data set is named by its path without .bin and .idx)"
    return f": did you mean {' or '.join(map(str, nearby[:3]))}?"

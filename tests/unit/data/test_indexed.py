"""Indexed data sets: their files, byte by byte, what is wrong with them, and their inspection."""

import os
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import xxhash

from megatron_ladder.cli.inspect_data import main as inspect_data
from megatron_ladder.data.indexed import (
    IndexedDataset,
    IndexedDatasetWriter,
    Sidecar,
    loss_mask_path,
    read_sidecar,
    token_dtype,
    write_sidecar,
)
from megatron_ladder.data.inspect import verify
from megatron_ladder.errors import UserError
from megatron_ladder.tokenizers.sentencepiece import SentencePieceTokenizer
from tests.helpers.runs import errors_of
from tests.helpers.tokens import write_documents

U16_BIN = bytes.fromhex("0500 0600 ffff 0700")
U16_IDX = bytes.fromhex(
    "4d4d494449445800 00"  # MMIDIDX and two zero bytes
    "0100000000000000"  # version 1
    "08"  # u16
    "0200000000000000"  # 2 sequences
    "0300000000000000"  # 2 documents + 1
    "03000000 01000000"  # lengths 3, 1
    "0000000000000000 0600000000000000"  # byte offsets 0, 6
    "0000000000000000 0100000000000000 0200000000000000"  # documents begin at sequences 0, 1; end at 2
)


def put(prefix: Path, idx: bytes, data: bytes) -> Path:
    Path(f"{prefix}.idx").write_bytes(idx)
    Path(f"{prefix}.bin").write_bytes(data)
    return prefix


def test_files_equal_megatrons_bytes(tmp_path: Path) -> None:
    documents = [[5, 6, 65_535], [7]]
    assert token_dtype(65_500).name == "int32"
    write_documents(tmp_path / "a.b", *documents, dtype=token_dtype(65_499))
    assert (tmp_path / "a.b.idx").read_bytes() == U16_IDX
    assert (tmp_path / "a.b.bin").read_bytes() == U16_BIN
    assert sorted(os.listdir(tmp_path)) == ["a.b.bin", "a.b.idx"]
    read = IndexedDataset(put(tmp_path / "fixture", U16_IDX, U16_BIN))
    assert [read.document(i).tolist() for i in range(len(read))] == documents


# Tokens 1, 2 and 3 in documents of two tokens and of one, as Megatron writes them, for each of its types.
HEAD, TAIL = "4d4d494449445800 00 0100000000000000", "0200000000000000 0300000000000000 02000000 01000000"
DOCUMENTS = "0000000000000000 0100000000000000 0200000000000000"
OF_EVERY_TYPE = {
    "uint8": ("01", "0000000000000000 0200000000000000", "01 02 03"),
    "int8": ("02", "0000000000000000 0200000000000000", "01 02 03"),
    "int16": ("03", "0000000000000000 0400000000000000", "0100 0200 0300"),
    "int32": ("04", "0000000000000000 0800000000000000", "01000000 02000000 03000000"),
    "int64": ("05", "0000000000000000 1000000000000000", "0100000000000000 0200000000000000 0300000000000000"),
    "uint16": ("08", "0000000000000000 0400000000000000", "0100 0200 0300"),
}


@pytest.mark.parametrize("name", OF_EVERY_TYPE)
def test_every_token_type_of_megatron(tmp_path: Path, name: str) -> None:
    code, offsets, tokens = OF_EVERY_TYPE[name]
    idx, data = bytes.fromhex(f"{HEAD} {code} {TAIL} {offsets} {DOCUMENTS}"), bytes.fromhex(tokens)
    prefix = put(tmp_path / "fixture", idx, data)
    read = IndexedDataset(prefix)
    assert read.tokens.dtype.name == name
    assert [read.document(number).tolist() for number in range(2)] == [[1, 2], [3]]
    write_documents(tmp_path / "ours", [1, 2], [3], dtype=read.tokens.dtype)
    assert (tmp_path / "ours.idx").read_bytes() == idx and (tmp_path / "ours.bin").read_bytes() == data


def test_documents_of_several_and_of_no_sequences(tmp_path: Path) -> None:
    # As Megatron writes with --split-sentences: lengths 1, 0, 2 in documents of 2, 0 and 1 sequences.
    idx = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 3, 3, 4)
    idx += struct.pack("<3i", 1, 0, 2) + struct.pack("<3q", 0, 2, 2) + struct.pack("<4q", 0, 2, 2, 3)
    read = IndexedDataset(put(tmp_path / "sentences", idx, struct.pack("<3h", 7, 8, 9)))
    assert [read.document(i).tolist() for i in range(len(read))] == [[7], [], [8, 9]]


def test_every_truncation_is_detected(tmp_path: Path) -> None:
    for length in range(len(U16_IDX)):
        with pytest.raises(UserError, match=r"cut\.idx"):
            IndexedDataset(put(tmp_path / "cut", U16_IDX[:length], U16_BIN))
    for length in (*range(len(U16_BIN)), len(U16_BIN) + 1):
        expected = rf"{length} bytes found, 8 expected by .*cut\.idx \(4 tokens\): preprocess or copy the data again"
        with pytest.raises(UserError, match=rf"cut\.bin: {expected}"):
            IndexedDataset(put(tmp_path / "cut", U16_IDX, (U16_BIN + b"\0")[:length]))


def test_a_missing_data_set_suggests_similar_names(tmp_path: Path) -> None:
    put(tmp_path / "corpus_text_document", U16_IDX, U16_BIN)
    for given in ("corpus", "corpus_text_document.bin", "corpus_text_document.idx"):
        with pytest.raises(UserError, match=r"no such file: did you mean .*/corpus_text_document\?"):
            IndexedDataset(tmp_path / given)
    (tmp_path / "text.jsonl").write_text("{}")
    with pytest.raises(UserError, match=r"preprocess_data\.py --input .*/text\.jsonl"):
        IndexedDataset(tmp_path / "text.jsonl")
    with pytest.raises(UserError, match=r"other\.idx: no such file"):
        IndexedDataset(tmp_path / "other")
    with pytest.raises(UserError, match="is a directory: give the path"):
        IndexedDataset(Path("."))


def test_loss_mask_has_a_byte_for_each_token(tmp_path: Path) -> None:
    prefix = put(tmp_path / "chat", U16_IDX, U16_BIN)
    assert IndexedDataset(prefix).loss_mask is None
    path = tmp_path / "chat_loss_mask.bin"
    path.mkdir()
    with pytest.raises(UserError, match=r"chat_loss_mask\.bin: cannot be read: Is a directory"):
        IndexedDataset(prefix)
    path.rmdir()
    path.write_bytes(bytes([0, 1, 1, 0]))
    mask = IndexedDataset(prefix).loss_mask
    assert mask is not None and mask.tolist() == [0, 1, 1, 0]
    for wrong in (3, 5, 0):
        path.write_bytes(bytes(wrong))
        with pytest.raises(UserError, match=rf"chat_loss_mask\.bin: {wrong} bytes found, 4 expected"):
            IndexedDataset(prefix)


def write_described(prefix: Path, lengths: list[int], **values: object) -> Path:
    """Write a data set of random tokens with its sidecar."""
    tokens = np.random.default_rng(len(lengths)).integers(0, 60_000, sum(lengths))
    with IndexedDatasetWriter(prefix, np.dtype(np.uint16)) as writer:
        writer.add_documents(tokens, np.array(lengths, np.int32))
        values |= writer.publish()
    sidecar = Sidecar("T", "ab", 100_000, 2, True, int(tokens.max()), len(lengths), len(tokens))
    write_sidecar(prefix, replace(sidecar, **values))
    return prefix


def test_every_corruption_is_detected(tmp_path: Path) -> None:
    prefix = write_described(tmp_path / "d", [5, 0, 3, 70, 1, 1, 200, 12])
    path = tmp_path / "d.idx"
    whole = path.read_bytes()
    generator = np.random.default_rng(5)
    by_structure = 0
    for at, byte in zip(generator.integers(0, len(whole), 120), generator.integers(0, 256, 120), strict=True):
        if whole[at] == byte:
            continue
        path.write_bytes(whole[:at] + bytes([byte]) + whole[at + 1 :])
        assert any(str(path) in line or "d.bin" in line for line in errors_of(IndexedDataset, prefix))
        by_structure += "checksum" not in errors_of(IndexedDataset, prefix)[0]
    assert by_structure > 100
    # Only the checksum detects the other two-byte type, and a moved document bound that keeps the order.
    for at, byte in ((17, 3), (len(whole) - 8 * 3, 5)):
        path.write_bytes(whole[:at] + bytes([byte]) + whole[at + 1 :])
        assert "d.idx: found checksum xxh3_128:" in errors_of(IndexedDataset, prefix)[0]
    path.write_bytes(whole)
    path, whole = tmp_path / "d.bin", (tmp_path / "d.bin").read_bytes()
    for at in (0, 100, 583):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(UserError, match=r"d\.bin: found checksum xxh3_128:\w+, its sidecar"):
            verify(IndexedDataset(prefix))
    path.write_bytes(whole)
    assert verify(IndexedDataset(prefix))[-1] == "verified: the checksum of .bin equals that in the sidecar"


def test_a_changed_or_missing_loss_mask(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prefix = write_described(tmp_path / "d", [4, 9], conversations=True)
    path, before = loss_mask_path(prefix), bytes([0, 1] * 6 + [1])
    # The sidecar of an earlier release requires a mask, but has no checksum of it.
    with pytest.raises(
        UserError, match=r"d_loss_mask\.bin: no such file, and it belongs to .*d\.json: copy it as well"
    ):
        verify(IndexedDataset(prefix))
    path.write_bytes(before)
    assert "the checksum of the loss mask is unknown" in verify(IndexedDataset(prefix))[-1]
    sidecar = read_sidecar(prefix)
    assert sidecar is not None
    write_sidecar(prefix, replace(sidecar, loss_mask_checksum=f"xxh3_128:{xxhash.xxh3_128_hexdigest(before)}"))
    assert verify(IndexedDataset(prefix))[-1] == "verified: the checksum of the loss mask equals that in the sidecar"
    path.write_bytes(bytes([1]) + before[1:])
    with pytest.raises(
        UserError, match=r"d_loss_mask\.bin: found checksum xxh3_128:\w+, its sidecar expects xxh3_128:\w"
    ):
        verify(IndexedDataset(prefix))
    path.unlink()
    inspect_data([str(prefix)])
    assert "d_loss_mask.bin: no such file" in capsys.readouterr().out


def test_inspecting_prints_texts(
    tmp_path: Path, sentencepiece_tokenizer: SentencePieceTokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer, texts = sentencepiece_tokenizer, ["def one():", "import os", "class Three:\n    pass"]
    write_documents(tmp_path / "d", *map(tokenizer.encode, texts))
    flags = ["--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", str(tokenizer.files[0])]
    inspect_data([str(tmp_path / "d"), *flags, "--documents", "0", "2-2", "--verify"])
    printed = capsys.readouterr().out
    shown = f"{tmp_path}/d: 3 documents, ", "tokens per document: minimum ", "verified: the sizes", texts[0], texts[2]
    assert all(words in printed for words in shown) and texts[1] not in printed
    inspect_data(["--data-path", str(tmp_path / "d"), "--documents", "1"])
    ids = " ".join(map(str, tokenizer.encode(texts[1])))
    assert capsys.readouterr().out.splitlines()[-1].endswith(f" tokens: {ids}")
    with pytest.raises(UserError, match="--documents 3: expected numbers from 0 to 2"):
        inspect_data([str(tmp_path / "d"), "--documents", "3"])


def test_inspecting_needs_no_file_of_a_tokenizer_without_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(write_documents(tmp_path / "d", [*b"bytes", 256])), "--documents", "0", "--tokenizer-type"]
    inspect_data([*words, "ByteTokenizer"])
    assert capsys.readouterr().out.splitlines()[-1] == "bytes"
    inspect_data([*words, "NullTokenizer", "--vocab-size", "256"])
    assert capsys.readouterr().out.splitlines()[-1] == "98 121 116 101 115"
    for more, error in (
        (["SentencePieceTokenizer"], "--tokenizer-type SentencePieceTokenizer needs --tokenizer-model"),
        (["ByteTokenizer", "--tokenizer-model", "x"], "--tokenizer-model x: ByteTokenizer has no file: leave it out"),
    ):
        assert errors_of(inspect_data, [*words, *more]) == [error]

"""Inspecting data sets, and detecting damaged ones."""

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
    write_sidecar,
)
from megatron_ladder.data.inspect import verify
from megatron_ladder.data.tokenizers import SentencePieceTokenizer
from megatron_ladder.errors import UserError
from tests.helpers.runs import errors_of
from tests.helpers.tokens import write_documents

SIDECAR = Sidecar("T", "ab", 100_000, 2, True, largest_id=0, documents=0, tokens=0)


def write(prefix: Path, lengths: list[int], dtype: str = "<u2", **changes: object) -> Path:
    """Write a data set of random tokens with its sidecar."""
    tokens = np.random.default_rng(len(lengths)).integers(0, 60_000, sum(lengths))
    with IndexedDatasetWriter(prefix, np.dtype(dtype)) as writer:
        writer.add_documents(tokens, np.array(lengths, np.int32))
        checksums = writer.publish()
    counted = replace(SIDECAR, largest_id=int(tokens.max()), documents=len(lengths), tokens=len(tokens))
    known = replace(counted, **checksums)
    write_sidecar(prefix, replace(known, **changes))
    return prefix


def refusals_of(prefix: Path) -> list[str]:
    return errors_of(IndexedDataset, prefix)


def test_every_corruption_of_an_index_is_detected(tmp_path: Path) -> None:
    prefix = write(tmp_path / "d", [5, 0, 3, 70, 1, 1, 200, 12])
    path = tmp_path / "d.idx"
    whole = path.read_bytes()
    generator = np.random.default_rng(5)
    by_structure = 0
    for at, byte in zip(generator.integers(0, len(whole), 120), generator.integers(0, 256, 120), strict=True):
        if whole[at] == byte:
            continue
        path.write_bytes(whole[:at] + bytes([byte]) + whole[at + 1 :])
        assert any(str(path) in line or "d.bin" in line for line in refusals_of(prefix))
        by_structure += "checksum" not in refusals_of(prefix)[0]
    assert by_structure > 100
    # Only the checksum detects the other two-byte type, and a moved document bound that keeps the order.
    for at, byte in ((17, 3), (len(whole) - 8 * 3, 5)):
        path.write_bytes(whole[:at] + bytes([byte]) + whole[at + 1 :])
        assert "d.idx: found checksum xxh3_128:" in refusals_of(prefix)[0]
    path.write_bytes(whole)
    assert refusals_of(prefix) == []


def test_a_changed_or_missing_loss_mask(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prefix = write(tmp_path / "d", [4, 9], conversations=True)
    path, before = loss_mask_path(prefix), bytes([0, 1] * 6 + [1])

    def refused(printed: str) -> None:
        with pytest.raises(UserError, match=printed):
            verify(IndexedDataset(prefix))

    # The sidecar of an earlier release requires a mask, but has no checksum of it.
    refused(r"d_loss_mask\.bin: no such file, and it belongs to .*d\.json: copy it as well")
    path.write_bytes(before)
    assert "the checksum of the loss mask is unknown" in verify(IndexedDataset(prefix))[-1]
    sidecar = read_sidecar(prefix)
    assert sidecar is not None
    write_sidecar(prefix, replace(sidecar, loss_mask_checksum=f"xxh3_128:{xxhash.xxh3_128_hexdigest(before)}"))
    assert verify(IndexedDataset(prefix))[-1] == "verified: the checksum of the loss mask equals that in the sidecar"
    path.write_bytes(bytes([1]) + before[1:])
    refused(r"d_loss_mask\.bin: found checksum xxh3_128:\w+, its sidecar expects xxh3_128:\w+: the file is damaged")
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


def test_corruption_of_tokens_is_detected(tmp_path: Path) -> None:
    prefix = write(tmp_path / "d", [5, 0, 3, 70, 1, 1, 200, 12])
    path = tmp_path / "d.bin"
    whole = path.read_bytes()
    for at in (0, 100, 583):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(UserError, match=r"d\.bin: found checksum xxh3_128:\w+, its sidecar"):
            verify(IndexedDataset(prefix))
    path.write_bytes(whole)
    assert verify(IndexedDataset(prefix))[-1] == "verified: the checksum of .bin equals that in the sidecar"

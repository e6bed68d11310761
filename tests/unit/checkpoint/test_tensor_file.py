"""Data files compared with the safetensors library, xxhash, and literal bytes."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash
from safetensors import safe_open
from safetensors.torch import save_file

from megatron_ladder.checkpoint import checksum, tensor_file
from megatron_ladder.checkpoint.boxes import Box
from megatron_ladder.checkpoint.checksum import file_checksum
from megatron_ladder.checkpoint.tensor_file import BY_NAME, BY_STORED_NAME, read_header, read_part, write_tensor_file
from megatron_ladder.errors import UserError


def tensor_of(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    if dtype in (torch.uint8, torch.int64):
        return torch.randint(0, 200, shape, generator=generator, dtype=dtype)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


@pytest.fixture
def tensors() -> list[tuple[str, torch.Tensor]]:
    return [(f"t{size}.{name}", tensor_of(getattr(torch, name), size, 3)) for size in (1, 5) for name in BY_NAME]


@pytest.mark.parametrize("chunk_bytes", [8, 24, 1 << 24])
def test_the_library_reads_written_files(
    tmp_path: Path, tensors: list[tuple[str, torch.Tensor]], chunk_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_file, "CHUNK_BYTES", chunk_bytes)
    path = tmp_path / "a.safetensors"
    size, digits = write_tensor_file(path, tensors)
    with safe_open(path, "pt") as file:
        assert sorted(file.keys()) == sorted(key for key, _ in tensors)
        for key, tensor in tensors:
            found = file.get_tensor(key)
            assert found.dtype == tensor.dtype and found.shape == tensor.shape
            assert torch.equal(found.view(torch.uint8), tensor.view(torch.uint8))
    data = path.read_bytes()
    assert size == len(data)
    assert digits == "xxh3_128:" + xxhash.xxh3_128(data).hexdigest()


def test_bytes_on_disk(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    tensors = [("u", torch.tensor([7, 9], dtype=torch.uint8)), ("f", torch.tensor([[1.5]]))]
    size, _ = write_tensor_file(path, tensors)
    header = (
        b'{"__metadata__":{"format":"pt"},"f":{"dtype":"F32","shape":[1,1],"data_offsets":[0,4]},'
        b'"u":{"dtype":"U8","shape":[2],"data_offsets":[4,6]}}'
    )
    header += b" " * (-len(header) % 8)
    expected = len(header).to_bytes(8, "little") + header + b"\x00\x00\xc0\x3f" + b"\x07\x09"
    assert path.read_bytes() == expected and size == len(expected)


def test_parameters_and_views_are_written(tmp_path: Path) -> None:
    whole = torch.nn.Parameter(torch.arange(12.0).view(4, 3))
    path = tmp_path / "a.safetensors"
    write_tensor_file(path, [("rows", whole[1:3])])
    with safe_open(path, "pt") as file:
        assert torch.equal(file.get_tensor("rows"), torch.tensor([[3.0, 4, 5], [6, 7, 8]]))


def test_all_bytes_are_flushed_before_the_fsync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_size))
    size, _ = write_tensor_file(tmp_path / "a.safetensors", [("x", torch.zeros(3))])
    assert synced == [size]


def test_a_file_is_never_overwritten(tmp_path: Path) -> None:
    write_tensor_file(tmp_path / "a.safetensors", [("x", torch.zeros(2))])
    with pytest.raises(FileExistsError):
        write_tensor_file(tmp_path / "a.safetensors", [("x", torch.ones(2))])


def test_files_of_the_library_are_read(tmp_path: Path, tensors: list[tuple[str, torch.Tensor]]) -> None:
    path = tmp_path / "a.safetensors"
    save_file(dict(tensors), path, metadata={"any": "thing"})
    data, positions = path.read_bytes(), read_header(path)
    assert set(positions) == {key for key, _ in tensors}
    for key, tensor in tensors:
        position = positions[key]
        assert position.shape == tuple(tensor.shape)
        assert getattr(torch, BY_STORED_NAME[position.dtype].name) == tensor.dtype
        assert data[position.begin : position.end] == tensor.view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("part", [Box((0, 0), (2, 3)), Box((0, 1), (2, 2))], ids=["contiguous", "strided"])
def test_short_files_are_reported(tmp_path: Path, part: Box) -> None:
    path = tmp_path / "short"
    path.write_bytes(bytes(30))
    out = torch.zeros(part.extent)
    with pytest.raises(UserError, match=f"{path}: cannot be read: "):
        read_part(path, 8, (2, 3), part, "float32", out)
    path.write_bytes(bytes(8) + np.arange(6, dtype=np.float32).tobytes())
    read_part(path, 8, (2, 3), part, "float32", out)
    assert torch.equal(out, torch.arange(6.0).view(2, 3)[part.slices()])


def test_checksum_of_a_file_reports_its_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksum, "PIECE_BYTES", 40)
    path = tmp_path / "any"
    path.write_bytes(bytes(range(100)))
    seen: list[int] = []
    assert file_checksum(path, seen.append) == "xxh3_128:" + xxhash.xxh3_128(bytes(range(100))).hexdigest()
    assert seen == [40, 40, 20]


def file_of(header: object, data: bytes = b"") -> bytes:
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    return len(text).to_bytes(8, "little") + text + data


GOOD = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not a complete"),
        (b"\x02\x00\x00", "header of 2 bytes"),
        ((1 << 62).to_bytes(8, "little") + b"{}", "header of"),
        (file_of([1]), "not an object"),
        (file_of("{"), "not a complete"),
        (file_of("[" * 100_000), "nested too deeply"),
        (file_of('{"a": NaN}'), "NaN"),
        (file_of('{"a": 1, "b": 2, "a": 3}'), "'a' occurs more than once"),
        (b"\x02\x00\x00\x00\x00\x00\x00\x00\xff\xfe", "not a complete"),
        (file_of({"a": GOOD}, bytes(7)), "end at byte"),
        (file_of({"a": GOOD}, bytes(9)), "end at byte"),
        (file_of({"a": 3}, bytes(8)), "'a' lacks"),
        (file_of({"a": {"dtype": "F32", "shape": [2]}}, bytes(8)), "'a' lacks"),
        (file_of({"a": GOOD | {"dtype": ["F32"]}}, bytes(8)), "invalid dtype"),
        (file_of({"a": GOOD | {"shape": [-2]}}, bytes(8)), "invalid dtype"),
        (file_of({"a": GOOD | {"shape": [2.0]}}, bytes(8)), "invalid dtype"),
        (file_of({"a": GOOD | {"shape": [True]}}, bytes(8)), "invalid dtype"),
        (file_of({"a": GOOD | {"shape": [3]}}, bytes(8)), r"8 bytes, which is not F32 of shape \[3\]"),
        (file_of({"a": GOOD | {"data_offsets": [8, 0]}}, bytes(8)), "invalid dtype"),
        (file_of({"a": GOOD | {"data_offsets": [8, 16]}}, bytes(16)), "'a' begins at byte"),
        (file_of({"a": GOOD, "b": GOOD}, bytes(8)), "'b' begins at byte"),
    ],
)
def test_damaged_and_hostile_headers_are_rejected(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "bad.safetensors"
    path.write_bytes(data)
    with pytest.raises(UserError, match=message) as raised:
        read_header(path)
    assert str(path) in str(raised.value)


def test_oversized_headers_are_rejected_before_they_are_read(tmp_path: Path) -> None:
    path, length = tmp_path / "sparse.safetensors", 100_000_001
    path.write_bytes(length.to_bytes(8, "little"))
    os.truncate(path, 8 + length)
    with pytest.raises(UserError, match=f"a header of {length} bytes"):
        read_header(path)

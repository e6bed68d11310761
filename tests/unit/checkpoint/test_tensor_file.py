"""Data files compared with the safetensors library, xxhash, and literal bytes."""

from pathlib import Path

import pytest
import torch
import xxhash
from safetensors import safe_open

from megatron_ladder.checkpoint.tensor_file import STORED_NAMES, file_checksum, write_tensor_file


def tensor_of(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    if dtype in (torch.uint8, torch.int64):
        return torch.randint(0, 200, shape, generator=generator, dtype=dtype)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


@pytest.fixture
def tensors() -> list[tuple[str, torch.Tensor]]:
    return [(f"t{size}.{name}", tensor_of(getattr(torch, name), size, 3)) for size in (1, 5) for name in STORED_NAMES]


def test_the_library_reads_written_files(tmp_path: Path, tensors: list[tuple[str, torch.Tensor]]) -> None:
    """One tensor is longer than the chunks in which it is written."""
    tensors.append(("long", torch.arange(5_000_001)))
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
    assert digits == file_checksum(path) == "xxh3_128:" + xxhash.xxh3_128(data).hexdigest()


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

"""Data files compared with the safetensors library, xxhash, and literal bytes."""

from pathlib import Path

import torch
import xxhash
from safetensors.torch import load_file

from megatron_ladder.checkpoint.tensor_file import STORED_NAMES, file_checksum, write_tensor_file


def test_the_library_reads_written_files(tmp_path: Path) -> None:
    """One tensor is longer than the chunks in which it is written."""
    tensors = [("long", torch.arange(5_000_001))]
    for name in STORED_NAMES:
        dtype = getattr(torch, name)
        bits = torch.randint(0, 256, (5, 3 * dtype.itemsize), generator=torch.Generator().manual_seed(5))
        tensors += [(f"t{size}.{name}", bits[:size].byte().view(dtype)) for size in (1, 5)]
    path = tmp_path / "a.safetensors"
    size, digits = write_tensor_file(path, tensors)
    found = load_file(path)
    assert sorted(found) == sorted(key for key, _ in tensors)
    for key, tensor in tensors:
        assert found[key].dtype == tensor.dtype and found[key].shape == tensor.shape
        assert torch.equal(found[key].view(torch.uint8), tensor.view(torch.uint8))
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

"""This rank's slices of the weights of a Hugging Face directory, from the bytes where they lie."""

import mmap
from pathlib import Path

import torch
from torch import Tensor, nn

from megatron_ladder.checkpoint.boxes import Box, flat_range, row_major_strides
from megatron_ladder.convert.hf_directory import HFDirectory
from megatron_ladder.convert.sources import StoredBox
from megatron_ladder.errors import UserError
from megatron_ladder.parallel.layout import has_padding, parameter_sections


@torch.no_grad()
def load_hf_weights(model: nn.Module, directory: HFDirectory) -> None:
    """Fills this rank's parameters, reading only the bytes of their slices; padding becomes zero.

    Raises:
        UserError: a file cannot be read; it is named.
    """
    files: dict[Path, mmap.mmap] = {}
    for parameter, sections in parameter_sections(model):
        if has_padding(parameter, sections):
            parameter.zero_()
        for section in sections:
            source = directory.tensors[section.name]
            wanted = Box(section.offset, section.extent)
            target = section.view(parameter).detach()
            for stored, shared in source.in_rows(wanted):
                part = target[shared.within(wanted).slices()]
                read_box(stored, shared, getattr(torch, source.dtype), part, files)


def read_box(stored: StoredBox, shared: Box, dtype: torch.dtype, out: Tensor, files: dict[Path, mmap.mmap]) -> None:
    """Fills `out` with the part `shared` of a stored box, in another dtype or on another device too.

    Args:
        files: mappings of files that were read before.

    Raises:
        UserError: the file cannot be read, or ends before.
    """
    part = shared.within(stored.box)
    first, end = flat_range(stored.box.extent, part)
    begin = stored.begin + first * dtype.itemsize
    count = end - first
    try:
        lies_together = stored.mapped is None and count == part.numel
        if lies_together and out.is_contiguous() and out.dtype == dtype and out.device.type == "cpu":
            _read_into(stored.path, begin, out)
            return
        whole = stored.mapped if stored.mapped is not None else _mapping(stored.path, files)
        flat = torch.frombuffer(whole, dtype=dtype, count=count, offset=begin)
    except (OSError, ValueError) as error:
        raise UserError(f"{stored.path}: cannot be read: {error}") from None
    out.copy_(flat.as_strided(part.extent, row_major_strides(stored.box.extent)))


def _read_into(path: Path, begin: int, out: Tensor) -> None:
    remaining = out.view(-1).view(torch.uint8).numpy().data
    with open(path, "rb", buffering=0) as file:
        file.seek(begin)
        while remaining and (count := file.readinto(remaining)):
            remaining = remaining[count:]
    if remaining:
        raise ValueError(f"it ends {len(remaining)} bytes before the end of a tensor in it")


def _mapping(path: Path, files: dict[Path, mmap.mmap]) -> mmap.mmap:
    if path not in files:
        with open(path, "rb") as file:
            # A private copy-on-write mapping, since torch warns of read-only memory; nothing writes to it.
            files[path] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    return files[path]

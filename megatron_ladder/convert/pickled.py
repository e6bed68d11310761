"""Pickled weights, `pytorch_model.bin`: read by torch's restricted unpickler alone, which runs no code of the file."""

from pathlib import Path
from pickle import UnpicklingError

import torch

from megatron_ladder.convert.sources import SourceTensor, StoredBox, whole_box
from megatron_ladder.errors import UserError


def read_pickled(path: Path) -> dict[str, SourceTensor]:
    """The tensors of a file, their numbers left on disk: the file is mapped.

    Raises:
        UserError: the file holds something other than a dictionary of tensors, or is of the format before torch 1.6.
    """
    try:
        held = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except (OSError, RuntimeError, ValueError, EOFError, UnpicklingError) as error:
        reason = str(error).split("\n")[0]
        raise UserError(f"{path}: cannot be read with weights_only=True: {reason}") from None
    if not isinstance(held, dict) or not all(
        isinstance(name, str) and isinstance(tensor, torch.Tensor) for name, tensor in held.items()
    ):
        raise UserError(f"{path}: is not a dictionary of tensors")
    return {name: _mapped(path, name, tensor) for name, tensor in held.items()}


def _mapped(path: Path, name: str, tensor: torch.Tensor) -> SourceTensor:
    if not tensor.is_contiguous() or tensor.is_sparse or tensor.is_quantized:
        raise UserError(f"{path}: {name}: its numbers do not lie row by row: save the model as safetensors")
    shape = tuple(tensor.shape)
    data = tensor.detach().reshape(-1).view(torch.uint8).numpy().data if tensor.numel() else memoryview(b"")
    box = StoredBox(path, 0, whole_box(shape), mapped=data)
    return SourceTensor(name, shape, str(tensor.dtype).removeprefix("torch."), (box,))

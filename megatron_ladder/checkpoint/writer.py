"""The boxes that one rank writes into a checkpoint; see `format` for what becomes of them."""

from collections.abc import Sequence
from pathlib import Path

import torch

from megatron_ladder.checkpoint.boxes import Box, cut_span
from megatron_ladder.checkpoint.checksum import DEFAULT_CHECKSUM
from megatron_ladder.checkpoint.header import BY_NAME, element_name
from megatron_ladder.checkpoint.manifest import KINDS, BoxRecord, FileIndex
from megatron_ladder.checkpoint.tensor_file import write_tensor_file


class CheckpointWriter:
    """Writes the boxes that one rank holds.

    `add` and `add_span` only note the tensors, which must stay as they are until `finish` has written them:
    saving holds no second copy of the state.
    """

    def __init__(self, directory: Path, rank: int, algorithm: str = DEFAULT_CHECKSUM) -> None:
        """
        Args:
            directory: exists, and is not yet published.
            rank: makes this writer's file names its own.
            algorithm: of the checksums.
        """
        self._directory = directory
        self._rank = rank
        self._algorithm = algorithm
        self._tensors: dict[str, list[tuple[str, torch.Tensor]]] = {}
        self._boxes: list[BoxRecord] = []

    def add(
        self, name: str, kind: str, global_shape: Sequence[int], offset: Sequence[int], tensor: torch.Tensor
    ) -> None:
        """Takes one box of a canonical tensor.

        Args:
            name: of the canonical tensor.
            kind: one of `KINDS`.
            global_shape: of the canonical tensor; one to eight dimensions.
            offset: of the box in it.
            tensor: the box's elements; its shape is the extent. Contiguous, on any device; float32, bfloat16,
                float16, float64, uint8 or int64.

        Raises:
            ValueError: the box does not lie in the tensor, or its kind, dtype or memory layout is another.
        """
        box = Box(tuple(offset), tuple(tensor.shape))
        if kind not in KINDS or element_name(tensor.dtype) not in BY_NAME:
            raise ValueError(f"{name}: kind {kind!r} or dtype {tensor.dtype} has no place in a checkpoint")
        if not box.lies_in(global_shape) or not tensor.is_contiguous():
            raise ValueError(
                f"{name}: {list(tensor.shape)} elements at {list(offset)} are not contiguous, or are no box "
                f"of a tensor of shape {list(global_shape)}"
            )
        sort = KINDS[kind]
        key = f"{kind}:{name}@{','.join(map(str, offset))}"
        self._tensors.setdefault(sort, []).append((key, tensor))
        self._boxes.append(
            {
                "name": name,
                "kind": kind,
                "global_shape": list(global_shape),
                "offset": list(box.offset),
                "extent": list(box.extent),
                "dtype": element_name(tensor.dtype),
                "file": self._file_name(sort),
                "key": key,
            }
        )

    def add_span(
        self,
        name: str,
        kind: str,
        global_shape: Sequence[int],
        box_offset: Sequence[int],
        box_extent: Sequence[int],
        start: int,
        flat_tensor: torch.Tensor,
    ) -> None:
        """Takes an interval of a box: elements from `start` on of the box flattened row by row.

        Args:
            box_offset: of the box (a rank's slice) in the canonical tensor.
            box_extent: of that box.
            start: first element of the interval in the flattened box.
            flat_tensor: [elements of the interval], contiguous.

        Raises:
            ValueError: as for `add`, or the interval does not lie in the box.
        """
        for box, begin in cut_span(Box(tuple(box_offset), tuple(box_extent)), start, flat_tensor.numel()):
            piece = flat_tensor[begin : begin + box.numel].view(box.extent)
            self.add(name, kind, global_shape, box.offset, piece)

    def finish(self) -> FileIndex:
        """Writes and fsyncs the files, and says what is in them; for `merge_manifest`.

        Raises:
            FileExistsError: the rank has written here before.
        """
        index: FileIndex = {"files": [], "boxes": self._boxes}
        for sort, tensors in self._tensors.items():
            name = self._file_name(sort)
            size, checksum = write_tensor_file(self._directory / name, tensors, self._algorithm)
            index["files"].append({"name": name, "size": size, "checksum": checksum})
        return index

    def discard(self) -> None:
        """Removes what was written."""
        for sort in self._tensors:
            (self._directory / self._file_name(sort)).unlink(missing_ok=True)

    def _file_name(self, sort: str) -> str:
        return f"{sort}_rank_{self._rank:05d}.safetensors"

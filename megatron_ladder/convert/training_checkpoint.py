"""Training checkpoints as source and target of a conversion.

A converted checkpoint has whole tensors in files of bounded size, which every layout of ranks can read.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_ladder.blueprint.boxes import Box
from megatron_ladder.blueprint.model import ModelConfig
from megatron_ladder.blueprint.optimizers import optimizer_kind
from megatron_ladder.blueprint.specs import Role, TensorSpec
from megatron_ladder.blueprint.tensors import model_tensors
from megatron_ladder.checkpoint import manifest
from megatron_ladder.checkpoint.format import Checkpoint
from megatron_ladder.checkpoint.publish import MANIFEST_NAME
from megatron_ladder.checkpoint.tensor_file import box_key, checksum_of, file_checksum
from megatron_ladder.convert.copying import CopiedTensor, Files, divide
from megatron_ladder.errors import ErrorCollector, Problem, UserError, limited, raise_user_errors

_MOST_BYTES = 2 * 10**9
"""Size of the files, of which one is in memory at a time; a larger tensor has a separate file."""


@dataclass(frozen=True)
class TrainingCheckpoint:
    """A complete checkpoint whose tensors are those of its model."""

    checkpoint: Checkpoint
    model: ModelConfig
    specs: Mapping[str, TensorSpec]
    """The tensors of the model by name, in the order in which it computes with them."""
    other_files: dict[str, bytes]
    """Files besides manifest and tensors: the tokenizer."""

    def tensors(self) -> Iterator[CopiedTensor]:
        """Yield all tensors, kind by kind, weights and moments in the model's order, as in another checkpoint."""
        order = {name: index for index, name in enumerate(self.specs)}
        for kind in manifest.KINDS:
            for name, stored in sorted(self.checkpoint.stored(kind).items(), key=lambda item: order.get(item[0], 0)):
                key = box_key(kind, name, Box.whole(stored.shape))
                source = f"{self.checkpoint.directory}: {name}"
                read = partial(self.read, name, kind)
                yield CopiedTensor(key, name, kind, stored.shape, stored.dtype, source, read)

    def read(self, name: str, kind: str, expert: int | None = None) -> Tensor:
        """Return a whole tensor, or an expert's matrix of a stack; raise UserError if it cannot be read."""
        stored = self.checkpoint.stored(kind)[name]
        box = Box.whole(stored.shape)
        if expert is not None:
            box = Box((expert, *box.offset[1:]), (1, *box.extent[1:]))
        tensor = torch.empty(box.extent, dtype=getattr(torch, stored.dtype))
        self.checkpoint.read(name, kind, box, tensor)
        return tensor if expert is None else tensor[0]

    @property
    def trained_dtype(self) -> str:
        """Return the element type in which the model was trained; stored weights may be its fp32 masters."""
        training = self.checkpoint.manifest.get("run", {}).get("training", {})
        stored = self.checkpoint.stored("weight")["embedding.weight"].dtype
        return "bfloat16" if stored == "float32" and training.get("bf16") else stored

    def verify(self, only_weights: bool) -> None:
        """Raise UserError if the contents of files differ from the checksums in the manifest."""
        try:
            self.checkpoint.verify("verifying the source", only_weights=only_weights)
        except UserError as error:
            reason = "{problem}; choose another checkpoint with {load}"
            raise UserError(*(Problem({}, reason, problem=problem) for problem in error.problems)) from None


def open_training_checkpoint(load: Path) -> TrainingCheckpoint:
    """Open the current checkpoint of a directory; its tensors are those of its model.

    Raises UserError if no checkpoint is complete, or tensors are missing, unexpected or have other shapes.
    """
    errors = ErrorCollector()
    with errors.collect("load"):
        checkpoint = Checkpoint.open(load)
    errors.raise_if_any()
    path = checkpoint.directory / MANIFEST_NAME
    model = checkpoint.model()
    specs = {tensor.name: tensor for tensor in model_tensors(model)}
    optimizer = optimizer_kind(checkpoint.optimizer)
    differences = []
    for kind in manifest.KINDS:
        stored = checkpoint.stored(kind)
        if kind == "rng" or (not stored and kind != "weight"):
            continue
        may_lack = set[Role]()
        if kind != "weight":
            may_lack = {role for role in Role if kind not in optimizer.moments_of(role)}
        for name in {**specs, **stored}:
            shape = stored[name].shape if name in stored else None
            expected = specs[name].shape if name in specs else None
            is_optional = shape is None and specs[name].role in may_lack
            if shape != expected and not is_optional:
                differences.append(f"{path}: {kind} of {name}: found {_text(shape)}, expected {_text(expected)}")
    raise_user_errors(limited(differences))
    of_tensors = set[str]()
    for kind in manifest.KINDS:
        of_tensors.update(*(stored.files() for stored in checkpoint.stored(kind).values()))
    others = {
        path.name: path.read_bytes()
        for path in sorted(checkpoint.directory.iterdir())
        if path.name not in {MANIFEST_NAME, *of_tensors} and path.is_file()
    }
    return TrainingCheckpoint(checkpoint, model, specs, others)


def _text(shape: tuple[int, ...] | None) -> str:
    return "no such tensor" if shape is None else f"shape {list(shape)}"


def checkpoint_files(tensors: list[CopiedTensor]) -> Files:
    """Return the files of a checkpoint with these tensors."""
    files = {}
    for group in dict.fromkeys(manifest.KINDS.values()):
        of_group = [tensor for tensor in tensors if manifest.KINDS[tensor.kind] == group]
        for number, held in enumerate(divide(of_group, _MOST_BYTES)):
            files[manifest.file_name(held[0].kind, number)] = held
    return files


def manifest_bytes(files: Files, header: Mapping[str, Any], directory: Path, other_files: Mapping[str, bytes]) -> bytes:
    """Return the manifest of a checkpoint whose files of tensors have been written into `directory`.

    `header` has the keys besides files and tensors.
    """
    records = [
        manifest.FileRecord(name, (directory / name).stat().st_size, file_checksum(directory / name)) for name in files
    ]
    records += [manifest.FileRecord(name, len(content), checksum_of(content)) for name, content in other_files.items()]
    written = {}
    for file, tensors in files.items():
        for tensor in tensors:
            whole = manifest.BoxRecord((0,) * len(tensor.shape), tensor.shape, manifest.writer_of(file))
            written[tensor.kind, tensor.name] = (tensor.dtype, manifest.Tiling(tensor.shape, (whole,)))
    return manifest.encode_manifest(manifest.merge_manifest(header, [manifest.make_index(records, written)]))

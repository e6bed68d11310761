"""Training checkpoints as source and target of a conversion.

A checkpoint has no layout, so its files may be cut in any way. The cut here is that of training: a rank that resumes in
the same layout opens only its own file.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ladder.blueprint.model import ModelConfig, slicing_errors
from megatron_ladder.blueprint.partition import uniform_partition
from megatron_ladder.blueprint.tensors import TensorSpec, model_tensors
from megatron_ladder.checkpoint.boxes import Box
from megatron_ladder.checkpoint.checksum import algorithm_of, checksum_of, mismatch
from megatron_ladder.checkpoint.format import Checkpoint
from megatron_ladder.checkpoint.hf_directory import SourceTensor, StoredBox
from megatron_ladder.checkpoint.manifest import encode_manifest, merge_manifest
from megatron_ladder.checkpoint.publish import MANIFEST_NAME
from megatron_ladder.checkpoint.tilings import (
    KINDS,
    BoxRecord,
    FileRecord,
    StoredTensor,
    box_key,
    file_name,
    make_index,
    writer_of,
)
from megatron_ladder.convert.plan import CopiedTensor, CopyPlan, TargetBox, make_plan
from megatron_ladder.errors import UserError, limited, raise_user_errors

_LAYER = re.compile(r"layers\.(\d+)\.")
_MAX_OTHER_BYTES = 100_000_000
"""Larger files in the directory are not copied: no tokenizer has as many bytes."""


@dataclass(frozen=True)
class TrainingCheckpoint:
    """A complete checkpoint whose tensors are those of its model."""

    checkpoint: Checkpoint
    model: ModelConfig
    tensors: dict[str, dict[str, SourceTensor]]
    """kind -> canonical name -> tensor; weights in the model's order."""
    other_files: dict[str, bytes]
    """Files besides manifest and tensors: the tokenizer."""

    @property
    def trained_dtype(self) -> str:
        """Return the element type in which the model was trained; stored weights may be its fp32 masters."""
        training = self.checkpoint.manifest.get("run", {}).get("training", {})
        stored = self.tensors["weight"]["embedding.weight"].dtype
        if stored == "float32" and training.get("bf16"):
            return "bfloat16"
        return "float16" if stored == "float32" and training.get("fp16") else stored

    def recorded_checksums(self, plan: CopyPlan) -> dict[Path, str]:
        """Return the checksums in the manifest of the files that a plan reads."""
        directory, records = self.checkpoint.directory, self.checkpoint.manifest["files"]
        recorded = {directory / record["name"]: record["checksum"] for record in records}
        return {path: recorded[path] for path in plan.source_files}


def open_training_checkpoint(load: Path) -> TrainingCheckpoint:
    """Open the current checkpoint of a directory, and check that its tensors are those of its model.

    Raises:
        UserError: no checkpoint is complete, tensors are missing, unexpected or have other shapes, or other files are
            damaged.
    """
    try:
        checkpoint = Checkpoint.open(load)
    except UserError as error:
        first, *more = error.messages
        raise UserError(f"--load {first}", *more) from None
    path = checkpoint.directory / MANIFEST_NAME
    model = checkpoint.model()
    expected = {tensor.name: tensor.shape for tensor in model_tensors(model)}
    errors = []
    for kind in KINDS:
        stored = checkpoint.stored(kind)
        if kind == "rng" or (not stored and kind != "weight"):
            continue
        for name, shape in expected.items():
            if name not in stored:
                # Muon keeps one moment of the matrices of the layers.
                of_muon = checkpoint.optimizer == "muon" and re.match(r"layers\..*_proj\.weight$", name)
                if kind != "exp_avg_sq" or not of_muon:
                    errors.append(f"{path}: {kind} of {name} is missing; expected shape {list(shape)}")
            elif (found := stored[name].global_shape) != shape:
                errors.append(f"{path}: {kind} of {name}: found shape {list(found)}, expected {list(shape)}")
        unexpected = [name for name in stored if name not in expected]
        errors += [f"{path}: {kind} of {name}: this model has no such tensor" for name in unexpected]
    raise_user_errors(limited(errors))
    order = {name: index for index, name in enumerate(expected)}
    tensors: dict[str, dict[str, SourceTensor]] = {}
    for kind in KINDS:
        named = sorted(checkpoint.stored(kind).items(), key=lambda item: order.get(item[0], 0))
        tensors[kind] = {name: _source_tensor(checkpoint, stored) for name, stored in named}
    return TrainingCheckpoint(checkpoint, model, tensors, _other_files(checkpoint))


def _source_tensor(checkpoint: Checkpoint, stored: StoredTensor) -> SourceTensor:
    boxes = []
    for index in range(stored.num_boxes):
        begin = checkpoint.position(stored, index).begin
        boxes.append(StoredBox(checkpoint.directory / stored.file(index), begin, stored.box(index)))
    boxes.sort(key=lambda stored_box: stored_box.box.offset)
    return SourceTensor(stored.name, stored.global_shape, stored.dtype, tuple(boxes))


def _other_files(checkpoint: Checkpoint) -> dict[str, bytes]:
    checksums = {record["name"]: record["checksum"] for record in checkpoint.manifest["files"]}
    errors: list[str] = []
    of_tensors = {file for kind in KINDS for stored in checkpoint.stored(kind).values() for file in stored.files()}
    found = {}
    for path in sorted(checkpoint.directory.iterdir()):
        if path.name in {MANIFEST_NAME, *of_tensors} or path.is_symlink() or not path.is_file():
            continue
        if path.suffix == ".py" or path.stat().st_size > _MAX_OTHER_BYTES:
            continue
        content = found[path.name] = path.read_bytes()
        if (expected := checksums.get(path.name)) is not None:
            error = mismatch(path, expected, checksum_of(content, algorithm_of(expected)))
            errors += [f"{error}; choose another checkpoint with --load"] if error is not None else []
    raise_user_errors(limited(errors))
    return found


def plan_checkpoint(
    tensors: Mapping[str, Mapping[str, SourceTensor]], model: ModelConfig, tensor_parallel: int, stages: int
) -> CopyPlan:
    """Plan a checkpoint in the form in which ranks of that layout would write it.

    Args:
        tensors: kind -> canonical name -> tensor.

    Raises:
        UserError: the model cannot be cut for this layout.
    """
    errors = slicing_errors(model, tensor_parallel)
    if stages > model.num_layers:
        errors.append(f"--pipeline-model-parallel-size {stages}: the model has only {model.num_layers} layers")
    raise_user_errors(limited(errors))
    layer_ranges = uniform_partition(model.num_layers, stages)
    described = {tensor.name: tensor for tensor in model_tensors(model)}
    groups: dict[tuple[int, str], list[CopiedTensor]] = {}
    for kind, named in tensors.items():
        for name, source in named.items():
            if kind == "rng":
                stage, slices = 0, iter([(0, source.whole)])
            else:
                slices = _rank_slices(described[name], tensor_parallel)
                if match := _LAYER.match(name):
                    stage = next(stage for stage, layers in enumerate(layer_ranges) if int(match[1]) in layers)
                else:
                    stage = 0 if name.startswith("embedding.") else stages - 1
            boxes = []
            for rank, box in slices:
                file = file_name(kind, stage * tensor_parallel + rank)
                boxes.append(TargetBox(file, box_key(kind, name, box), box))
            copied = CopiedTensor(name, kind, source, source.dtype, tuple(boxes))
            groups.setdefault((stage, KINDS[kind]), []).append(copied)
    return make_plan(groups[key] for key in sorted(groups))


def _rank_slices(tensor: TensorSpec, tensor_parallel: int) -> Iterator[tuple[int, Box]]:
    """Yield each tensor-parallel rank that writes a slice of a canonical tensor, with the slice.

    If several ranks hold the same slice, the first writes it.
    """
    for rank in range(0, tensor_parallel, tensor.replicas(tensor_parallel)):
        start, length = tensor.slice_of(rank, tensor_parallel)
        if length > 0:
            cut = tensor.sharded_dim or 0
            offset = tuple(start if dim == cut else 0 for dim in range(len(tensor.shape)))
            extent = tuple(length if dim == cut else size for dim, size in enumerate(tensor.shape))
            yield rank, Box(offset, extent)


def manifest_bytes(
    plan: CopyPlan, header: Mapping[str, Any], checksums: Mapping[str, str], other_files: Mapping[str, bytes]
) -> bytes:
    """Return the manifest of a planned checkpoint.

    Args:
        header: keys besides files and tensors.
        checksums: checksums of the planned files.
    """
    boxes = [
        BoxRecord(tensor.name, tensor.kind, tensor.source.shape, target.box, tensor.dtype, writer_of(target.file))
        for tensor in plan.tensors
        for target in tensor.boxes
    ]
    files: list[FileRecord] = [
        {"name": file.name, "size": file.size, "checksum": checksums[file.name]} for file in plan.files
    ]
    for name, content in other_files.items():
        files.append({"name": name, "size": len(content), "checksum": checksum_of(content)})
    return encode_manifest(merge_manifest(header, [make_index(files, boxes)]))

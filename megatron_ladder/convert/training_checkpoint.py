"""Training checkpoints as source and target of a conversion."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ladder.blueprint.model import ModelConfig, tensor_parallel_errors
from megatron_ladder.blueprint.tensors import model_tensors
from megatron_ladder.checkpoint.checksum import algorithm_of, checksum_of, mismatch
from megatron_ladder.checkpoint.format import Checkpoint
from megatron_ladder.checkpoint.manifest import (
    KINDS,
    FileIndex,
    box_key,
    box_record,
    encode_manifest,
    file_name,
    merge_manifest,
    writer_of,
)
from megatron_ladder.checkpoint.publish import MANIFEST_NAME
from megatron_ladder.convert.names import rank_slices, stage_of, tensor_shapes
from megatron_ladder.convert.plan import CopiedTensor, CopyPlan, TargetBox, make_plan
from megatron_ladder.convert.sources import SourceTensor, stored_tensor
from megatron_ladder.errors import UserError, limited, raise_user_errors

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
    expected = tensor_shapes(model)
    errors = []
    for kind in (kind for kind in KINDS if kind != "rng"):
        stored = checkpoint.stored(kind)
        if not stored and kind != "weight":
            continue
        for name, shape in expected.items():
            if name not in stored:
                errors.append(f"{path}: {kind} of {name} is missing; expected shape {list(shape)}")
            elif stored[name].global_shape != shape:
                found = list(stored[name].global_shape)
                errors.append(f"{path}: {kind} of {name}: found shape {found}, expected {list(shape)}")
        errors += [
            f"{path}: {kind} of {name}: this model has no such tensor" for name in stored if name not in expected
        ]
    raise_user_errors(limited(errors))
    order = {name: index for index, name in enumerate(expected)}
    tensors: dict[str, dict[str, SourceTensor]] = {}
    for kind in KINDS:
        stored = checkpoint.stored(kind)
        names = sorted(stored, key=lambda name: order.get(name, 0))
        tensors[kind] = {name: stored_tensor(checkpoint, stored[name]) for name in names}
    return TrainingCheckpoint(checkpoint, model, tensors, _other_files(checkpoint))


def _other_files(checkpoint: Checkpoint) -> dict[str, bytes]:
    checksums = {record["name"]: record["checksum"] for record in checkpoint.manifest["files"]}
    errors: list[str] = []
    of_tensors = {file for kind in KINDS for stored in checkpoint.stored(kind).values() for file in stored.files}
    found = {}
    for path in sorted(checkpoint.directory.iterdir()):
        if path.name not in {MANIFEST_NAME, *of_tensors} and path.is_file() and not path.is_symlink():
            if path.suffix == ".py" or path.stat().st_size > _MAX_OTHER_BYTES:
                continue
            content = found[path.name] = path.read_bytes()
            expected = checksums.get(path.name)
            if expected is not None:
                error = mismatch(path, expected, checksum_of(content, algorithm_of(expected)))
                errors += [f"{error}; choose another checkpoint with --load"] if error is not None else []
    raise_user_errors(limited(errors))
    return found


def checksums_of_sources(checkpoint: Checkpoint, plan: CopyPlan) -> dict[Path, str]:
    """Return the recorded checksums of the files that a plan reads."""
    read = {stored.path for tensor in plan.tensors for stored in tensor.source.boxes}
    recorded = {checkpoint.directory / record["name"]: record["checksum"] for record in checkpoint.manifest["files"]}
    return {path: recorded[path] for path in sorted(read)}


def check_layout(model: ModelConfig, tensor_parallel: int, stages: int) -> None:
    """Raise UserError if a model cannot be cut for a layout."""
    errors = tensor_parallel_errors(model, tensor_parallel)
    if stages > model.num_layers:
        errors.append(f"--pipeline-model-parallel-size {stages}: the model has only {model.num_layers} layers")
    raise_user_errors(limited(errors))


def plan_checkpoint(
    tensors: Mapping[str, Mapping[str, SourceTensor]], model: ModelConfig, tensor_parallel: int, stages: int
) -> CopyPlan:
    """Plan a checkpoint in the form in which ranks of that layout would write it.

    Args:
        tensors: kind -> canonical name -> tensor.
    """
    described = {tensor.name: tensor for tensor in model_tensors(model)}
    groups: dict[tuple[int, str], list[CopiedTensor]] = {}
    for kind, named in tensors.items():
        for name, source in named.items():
            stage = 0 if kind == "rng" else stage_of(name, model, stages)
            slices = [(0, source.whole)] if kind == "rng" else rank_slices(described[name], tensor_parallel)
            boxes = []
            for rank, box in slices:
                file = file_name(kind, stage * tensor_parallel + rank)
                boxes.append(TargetBox(file, box_key(kind, name, box), box))
            copied = CopiedTensor(name, kind, source, source.dtype, tuple(boxes))
            groups.setdefault((stage, KINDS[kind]), []).append(copied)
    return make_plan(groups[key] for key in sorted(groups))


def manifest_bytes(
    plan: CopyPlan, header: Mapping[str, Any], checksums: Mapping[str, str], other_files: Mapping[str, bytes]
) -> bytes:
    """Return the manifest of a planned checkpoint.

    Args:
        header: keys besides files and tensors.
        checksums: checksums of the planned files.
    """
    boxes = [
        box_record(tensor.name, tensor.kind, tensor.source.shape, target.box, tensor.dtype, writer_of(target.file))
        for tensor in plan.tensors
        for target in tensor.boxes
    ]
    index: FileIndex = {"files": [], "boxes": boxes}
    for file in plan.files:
        size = len(file.header()) + file.data_bytes
        index["files"].append({"name": file.name, "size": size, "checksum": checksums[file.name]})
    for name, content in other_files.items():
        index["files"].append({"name": name, "size": len(content), "checksum": checksum_of(content)})
    return encode_manifest(merge_manifest(header, [index]))

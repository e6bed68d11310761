"""Training checkpoints at both ends of a conversion: what one holds, and the plan of another."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ladder import __version__
from megatron_ladder.blueprint.model import ModelConfig, tensor_parallel_errors
from megatron_ladder.blueprint.tensors import model_tensors
from megatron_ladder.checkpoint.checksum import algorithm_of, checksum_of
from megatron_ladder.checkpoint.format import Checkpoint
from megatron_ladder.checkpoint.manifest import KINDS, BoxRecord, FileIndex, encode_manifest, merge_manifest
from megatron_ladder.checkpoint.publish import MANIFEST_NAME
from megatron_ladder.convert.mistakes import raise_mistakes
from megatron_ladder.convert.names import rank_slices, stage_of, tensor_shapes
from megatron_ladder.convert.plan import CopiedTensor, Plan, TargetBox, make_plan
from megatron_ladder.convert.source_checksums import damage
from megatron_ladder.convert.sources import SourceTensor, stored_tensor
from megatron_ladder.errors import UserError

_MOST_BYTES_BESIDE = 100_000_000
"""Of a file beside the tensors: a tokenizer has fewer."""


@dataclass(frozen=True)
class TrainingCheckpoint:
    """A whole checkpoint whose tensors are those of its model."""

    checkpoint: Checkpoint
    model: ModelConfig
    tensors: dict[str, dict[str, SourceTensor]]
    """kind -> canonical name -> tensor; weights in the model's order."""
    files_beside: dict[str, bytes]
    """What lies beside manifest and tensors: the tokenizer."""

    @property
    def trained_dtype(self) -> str:
        """Element type that the model was trained in; stored weights may be the fp32 masters of it."""
        training = self.checkpoint.manifest.get("run", {}).get("training", {})
        stored = self.tensors["weight"]["embedding.weight"].dtype
        if stored == "float32" and training.get("bf16"):
            return "bfloat16"
        return "float16" if stored == "float32" and training.get("fp16") else stored


def open_training_checkpoint(load: Path) -> TrainingCheckpoint:
    """Opens the checkpoint in use of a directory, and compares it with the model that it says it is.

    Raises:
        UserError: there is none that is whole, tensors are missing, unexpected or of other shapes, or what lies beside
            them is not what was saved.
    """
    try:
        checkpoint = Checkpoint.open(load)
    except UserError as error:
        first, *more = error.mistakes
        raise UserError(f"--load {first}", *more) from None
    path = checkpoint.directory / MANIFEST_NAME
    model = ModelConfig.from_dict(checkpoint.manifest["model"], source=str(path))
    expected = tensor_shapes(model)
    mistakes = []
    for kind in (kind for kind in KINDS if kind != "rng"):
        stored = checkpoint.stored(kind)
        if not stored and kind != "weight":
            continue
        for name, shape in expected.items():
            if name not in stored:
                mistakes.append(f"{path}: {kind} of {name} is missing; expected shape {list(shape)}")
            elif stored[name].global_shape != shape:
                found = list(stored[name].global_shape)
                mistakes.append(f"{path}: {kind} of {name}: found shape {found}, expected {list(shape)}")
        mistakes += [
            f"{path}: {kind} of {name}: this model has no such tensor" for name in stored if name not in expected
        ]
    raise_mistakes(mistakes)
    order = {name: place for place, name in enumerate(expected)}
    tensors: dict[str, dict[str, SourceTensor]] = {}
    for kind in KINDS:
        stored = checkpoint.stored(kind)
        names = sorted(stored, key=lambda name: order.get(name, 0))
        tensors[kind] = {name: stored_tensor(checkpoint, stored[name]) for name in names}
    return TrainingCheckpoint(checkpoint, model, tensors, _files_beside(checkpoint))


def _files_beside(checkpoint: Checkpoint) -> dict[str, bytes]:
    checksums = {record["name"]: record["checksum"] for record in checkpoint.manifest["files"]}
    mistakes = []
    of_tensors = {file for kind in KINDS for stored in checkpoint.stored(kind).values() for file in stored.files}
    found = {}
    for path in sorted(checkpoint.directory.iterdir()):
        if path.name not in {MANIFEST_NAME, *of_tensors} and path.is_file() and not path.is_symlink():
            if path.suffix == ".py" or path.stat().st_size > _MOST_BYTES_BESIDE:
                continue
            content = found[path.name] = path.read_bytes()
            expected = checksums.get(path.name)
            if expected is not None:
                mistakes += damage(path, expected, checksum_of(content, algorithm_of(expected)))
    raise_mistakes(mistakes)
    return found


def checksums_of_sources(checkpoint: Checkpoint, plan: Plan) -> dict[Path, str]:
    """Checksums that the manifest has of the files that a plan reads; not of others, such as the optimizer's."""
    read = {stored.path for tensor in plan.tensors for stored in tensor.source.boxes}
    recorded = {checkpoint.directory / record["name"]: record["checksum"] for record in checkpoint.manifest["files"]}
    return {path: recorded[path] for path in sorted(read)}


def check_layout(model: ModelConfig, tensor_parallel: int, stages: int) -> None:
    """Raises one UserError if a model cannot be cut so."""
    mistakes = tensor_parallel_errors(model, tensor_parallel)
    if stages > model.num_layers:
        mistakes.append(f"--pipeline-model-parallel-size {stages}: the model has {model.num_layers} layers")
    raise_mistakes(mistakes)


def plan_checkpoint(
    tensors: Mapping[str, Mapping[str, SourceTensor]], model: ModelConfig, tensor_parallel: int, stages: int
) -> Plan:
    """Plans a checkpoint as ranks of that layout would write it.

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
                file = f"{KINDS[kind]}_rank_{stage * tensor_parallel + rank:05d}.safetensors"
                boxes.append(TargetBox(file, f"{kind}:{name}@{','.join(map(str, box.offset))}", box))
            copied = CopiedTensor(name, kind, source, source.dtype, tuple(boxes))
            groups.setdefault((stage, KINDS[kind]), []).append(copied)
    return make_plan(groups[key] for key in sorted(groups))


def manifest_bytes(
    plan: Plan, header: Mapping[str, Any], checksums: Mapping[str, str], files_beside: Mapping[str, bytes]
) -> bytes:
    """The manifest of a planned checkpoint.

    Args:
        header: what it says besides files and tensors.
        checksums: of the plan's files.
    """
    boxes: list[BoxRecord] = [
        {
            "name": tensor.name,
            "kind": tensor.kind,
            "global_shape": list(tensor.source.shape),
            "offset": list(target.box.offset),
            "extent": list(target.box.extent),
            "dtype": tensor.dtype,
            "file": target.file,
            "key": target.key,
        }
        for tensor in plan.tensors
        for target in tensor.boxes
    ]
    index: FileIndex = {"files": [], "boxes": boxes}
    for file in plan.files:
        size = len(file.header()) + file.data_bytes
        index["files"].append({"name": file.name, "size": size, "checksum": checksums[file.name]})
    for name, content in files_beside.items():
        index["files"].append({"name": name, "size": len(content), "checksum": checksum_of(content)})
    return encode_manifest(merge_manifest(header, [index]))


def versions() -> dict[str, str]:
    """For a manifest's header."""
    return {"megatron_ladder": __version__}

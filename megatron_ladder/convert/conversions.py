"""The conversions of `convert_checkpoint.py`: import and export of Hugging Face directories, and reshape.

Each function reads headers and manifests only, and returns a checked `Conversion`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megatron_ladder import __version__
from megatron_ladder.checkpoint.format import GENERATION_CONFIG
from megatron_ladder.checkpoint.hf_config import token_ids
from megatron_ladder.checkpoint.hf_directory import (
    CONFIG_NAME,
    FLOAT_DTYPES,
    INDEX_NAME,
    WEIGHTS_NAME,
    Permutation,
    SourceTensor,
    hf_name,
    open_hf_directory,
)
from megatron_ladder.checkpoint.publish import MANIFEST_NAME, temporary_directory
from megatron_ladder.checkpoint.tensor_file import BY_NAME
from megatron_ladder.convert.carry_out import Conversion
from megatron_ladder.convert.logits import compare_logits
from megatron_ladder.convert.options import CheckpointOptions, ExportOptions, ImportOptions, ReshapeOptions, shard_bytes
from megatron_ladder.convert.outputs import check_hf_target, check_save_target, hf_work, publish_hf, publish_save
from megatron_ladder.convert.plan import CopiedTensor, CopyPlan, TargetBox, make_plan
from megatron_ladder.convert.remote_code import hf_config, hf_type, module_files
from megatron_ladder.convert.tokenizer_files import (
    describe_tokenizer,
    exported_tokenizer,
    json_file,
    read_carried,
)
from megatron_ladder.convert.training_checkpoint import manifest_bytes, open_training_checkpoint, plan_checkpoint
from megatron_ladder.convert.wiring import rewired, wiring_text
from megatron_ladder.errors import raise_user_errors

_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""Values of --dtype."""
_DERIVED_KEYS = ("format", "schema_version", "files")
"""Keys of a manifest that a reshape computes again."""


def plan_import(options: ImportOptions) -> Conversion:
    """Plan a training checkpoint, weights only, from a Hugging Face directory.

    Raises:
        UserError: the source is inconsistent or not supported, or the target must not be written to.
    """
    iteration = 0
    replaced = check_save_target(options.save, iteration, options.overwrite)
    directory = open_hf_directory(options.hf)
    model_type = directory.config["model_type"]
    model, notes = rewired(directory.model, options)
    tensor_parallel, stages = options.tensor_model_parallel_size, options.pipeline_model_parallel_size
    plan = plan_checkpoint({"weight": directory.tensors}, model, tensor_parallel, stages)
    directory.check_tied_head()
    carried = read_carried(options.hf)
    description, tokenizer, token_count = describe_tokenizer(carried)
    if token_count > model.vocab_size:
        notes.append(f"the tokenizer has {token_count} ids, the model {model.vocab_size}: larger ids must not occur")
    header = {
        "iteration": iteration,
        "consumed_samples": 0,
        "model": model.to_dict(),
        "tokenizer": tokenizer,
        "hugging_face": {"model_type": model_type, **directory.token_ids()},
        "versions": {"megatron_ladder": __version__},
    }
    parameters = sum(tensor.whole.numel for tensor in directory.tensors.values())
    return _checkpoint_conversion(
        options,
        plan,
        header,
        {**carried, **description},
        replaced,
        facts=(
            f"{options.hf}: {model_type}, {parameters:,} parameters, {directory.dtype}",
            f"wiring: {wiring_text(model)}; {_layout_text(tensor_parallel, stages)}",
        ),
        notes=notes,
        check_logits=lambda work: compare_logits(options.hf, directory.model, work, model_type, None, own_code=False),
    )


def plan_reshape(options: ReshapeOptions, orders: Mapping[str, Permutation] = MappingProxyType({})) -> Conversion:
    """Plan a training checkpoint with other files or another wiring, optimizer state included.

    `orders` are new orders of rows or columns, by the canonical name of a tensor; they also apply to its moments.

    Raises:
        UserError: the checkpoint is incomplete or does not allow the layout, or the target must not be written to.
    """
    source = open_training_checkpoint(options.load)
    checkpoint, iteration = source.checkpoint, source.checkpoint.iteration
    replaced = check_save_target(options.save, iteration, options.overwrite)
    tensor_parallel, stages = options.tensor_model_parallel_size, options.pipeline_model_parallel_size
    model, notes = rewired(source.model, options)
    tensors = {
        kind: {name: replace(tensor, order=orders.get(name)) for name, tensor in named.items()}
        for kind, named in source.tensors.items()
    }
    plan = plan_checkpoint(tensors, model, tensor_parallel, stages)
    header = {key: value for key, value in checkpoint.manifest.items() if key not in _DERIVED_KEYS}
    header["model"] = model.to_dict()
    if "model" in header.get("run", {}):
        header["run"] = {**header["run"], "model": header["model"]}
    kinds = [kind for kind, tensors in source.tensors.items() if tensors]
    return _checkpoint_conversion(
        options,
        plan,
        header,
        source.other_files,
        replaced,
        facts=(
            f"{checkpoint.directory}: iteration {iteration}, {', '.join(kinds)}, wiring: {wiring_text(model)}",
            _layout_text(tensor_parallel, stages),
        ),
        notes=[*notes, *checkpoint.warnings],
        source_checksums=source.recorded_checksums(plan),
    )


def _checkpoint_conversion(
    options: CheckpointOptions,
    plan: CopyPlan,
    header: Mapping[str, Any],
    other_files: Mapping[str, bytes],
    replaced: Sequence[str],
    **more: Any,
) -> Conversion:
    """Return a conversion to a training checkpoint; `more` are other fields of `Conversion`."""
    iteration = header["iteration"]
    return Conversion(
        plan=plan,
        work=temporary_directory(options.save, iteration, plan.fingerprint(header, sorted(other_files.items()))),
        target=options.save,
        checksums=True,
        small_files=lambda checksums: {
            **other_files,
            MANIFEST_NAME: manifest_bytes(plan, header, checksums, other_files),
        },
        publish=lambda work: publish_save(work, options.save, iteration, replaced),
        **more,
    )


def plan_export(options: ExportOptions) -> Conversion:
    """Plan a Hugging Face directory from a training checkpoint of any layout.

    Raises:
        UserError: the checkpoint is incomplete or not supported, or the target must not be written to.
    """
    check_hf_target(options.hf, options.overwrite)
    source = open_training_checkpoint(options.load)
    checkpoint = source.checkpoint
    model_type = hf_type(source.model)
    dtype = source.trained_dtype if options.dtype is None else _DTYPES[options.dtype]
    weights = source.tensors["weight"]
    raise_user_errors(
        [
            f"{checkpoint.directory}: {tensor.name}: found {tensor.dtype}, expected {', '.join(FLOAT_DTYPES)}"
            for tensor in weights.values()
            if tensor.dtype not in FLOAT_DTYPES
        ]
    )
    new_dtype = dtype if options.dtype or len({tensor.dtype for tensor in weights.values()}) == 1 else None
    plan = _plan_shards(weights, new_dtype, shard_bytes(options.max_shard_size))
    other_files, ids = exported_tokenizer(checkpoint.directory, source.other_files)
    ids |= token_ids(checkpoint.manifest.get("hugging_face") or {}, checkpoint.directory / MANIFEST_NAME)
    other_files.setdefault(GENERATION_CONFIG, json_file({**ids, "_from_model_config": True}))
    code = module_files(source.model)
    other_files |= {**code, CONFIG_NAME: json_file(hf_config(source.model, dtype=dtype, **ids))}
    index: dict[str, bytes] = {}
    if len(plan.files) > 1:
        weight_map = {key: file.name for file in plan.files for key in file.entries}
        metadata = {"total_size": plan.total_bytes}
        index = {INDEX_NAME: json_file({"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))})}

    def publish(work: Path) -> Path:
        publish_hf(work, options.hf, options.overwrite)
        return options.hf

    return Conversion(
        plan=plan,
        work=hf_work(options.hf, plan.fingerprint(sorted(other_files.items()))),
        target=options.hf,
        checksums=False,
        small_files=lambda checksums: {**other_files, **index},
        publish=publish,
        facts=(
            f"{checkpoint.directory}: iteration {checkpoint.iteration}, wiring: {wiring_text(source.model)}",
            f"written as {model_type} in {dtype}"
            + (f", with {', '.join(code)}: load it with trust_remote_code=True" if code else ""),
        ),
        notes=checkpoint.warnings,
        source_checksums=source.recorded_checksums(plan),
        check_logits=lambda work: compare_logits(
            work, source.model, checkpoint.directory, model_type, new_dtype, own_code=True
        ),
    )


def _layout_text(tensor_parallel: int, stages: int) -> str:
    return f"files for {tensor_parallel} tensor-parallel x {stages} pipeline ranks"


def _plan_shards(weights: Mapping[str, SourceTensor], dtype: str | None, most_bytes: int) -> CopyPlan:
    """Divide the weights into files in their order; a tensor larger than `most_bytes` has a separate file.

    Args:
        dtype: element type of all weights; None leaves each unchanged.
    """
    shards: list[list[str]] = [[]]
    filled = 0
    for name, tensor in weights.items():
        size = tensor.whole.numel * BY_NAME[dtype or tensor.dtype].size
        if shards[-1] and filled + size > most_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    groups = []
    for number, names in enumerate(shards, 1):
        file = WEIGHTS_NAME if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        targets = {name: (TargetBox(file, hf_name(name), weights[name].whole),) for name in names}
        groups.append(
            [
                CopiedTensor(name, "weight", weights[name], dtype or weights[name].dtype, boxes)
                for name, boxes in targets.items()
            ]
        )
    return make_plan(groups)

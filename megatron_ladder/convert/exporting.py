"""`convert_checkpoint.py export`: a training checkpoint of any layout becomes a Hugging Face directory."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_ladder.checkpoint.carried import GENERATION_CONFIG
from megatron_ladder.checkpoint.header import BY_NAME
from megatron_ladder.convert.carry_out import Conversion
from megatron_ladder.convert.hf_directory import CONFIG_NAME, FLOAT_DTYPES, INDEX_NAME, WEIGHTS_NAME
from megatron_ladder.convert.logits import compare_logits
from megatron_ladder.convert.mistakes import raise_mistakes
from megatron_ladder.convert.names import hf_name
from megatron_ladder.convert.options import ExportOptions, shard_bytes
from megatron_ladder.convert.outputs import check_hf_target, hf_work, publish_hf
from megatron_ladder.convert.plan import CopiedTensor, Plan, TargetBox, make_plan
from megatron_ladder.convert.remote_code import hf_config, hf_type, module_files
from megatron_ladder.convert.sources import SourceTensor
from megatron_ladder.convert.tokenizer_files import (
    TOKEN_KEYS,
    exported_tokenizer,
    generation_config,
)
from megatron_ladder.convert.training_checkpoint import (
    TrainingCheckpoint,
    checksums_of_sources,
    open_training_checkpoint,
)
from megatron_ladder.convert.wiring import wiring_text

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""Values of --dtype."""


def plan_export(options: ExportOptions) -> Conversion:
    """Reads manifest and headers, and says what there is to do.

    Raises:
        UserError: the checkpoint is not whole or cannot be expressed, or the target may not be written to.
    """
    check_hf_target(options.hf, options.overwrite)
    source = open_training_checkpoint(options.load)
    model_type = hf_type(source.model)
    dtype = source.trained_dtype if options.dtype is None else DTYPES[options.dtype]
    weights = source.tensors["weight"]
    raise_mistakes(
        [
            f"{source.checkpoint.directory}: {tensor.name}: found {tensor.dtype}, expected {', '.join(FLOAT_DTYPES)}"
            for tensor in weights.values()
            if tensor.dtype not in FLOAT_DTYPES
        ]
    )
    new_dtype = dtype if options.dtype or len({tensor.dtype for tensor in weights.values()}) == 1 else None
    plan = _plan_shards(weights, new_dtype, shard_bytes(options.max_shard_size))
    beside, ids = _beside(source)
    config = hf_config(source.model, dtype=dtype, **ids)
    code = module_files(source.model)
    beside |= {**code, CONFIG_NAME: (json.dumps(config, indent=2) + "\n").encode()}
    index = _index(plan)

    def small_files(checksums: Mapping[str, str]) -> Mapping[str, bytes]:
        return {**beside, **index}

    def publish(work: Path) -> Path:
        publish_hf(work, options.hf, options.overwrite)
        return options.hf

    checkpoint = source.checkpoint
    return Conversion(
        plan=plan,
        work=hf_work(options.hf, plan.fingerprint(sorted(beside.items()))),
        target=options.hf,
        checksums=False,
        small_files=small_files,
        publish=publish,
        facts=(
            f"{checkpoint.directory}: iteration {checkpoint.iteration}, wiring: {wiring_text(source.model)}",
            f"written as {model_type} in {dtype}"
            + (f", with {', '.join(code)}: readers give trust_remote_code=True" if code else ""),
        ),
        notes=checkpoint.warnings,
        source_checksums=checksums_of_sources(checkpoint, plan),
        check_logits=lambda work: compare_logits(
            work, source.model, checkpoint.directory, model_type, dtype, own_code=True
        ),
    )


def _plan_shards(weights: Mapping[str, SourceTensor], dtype: str | None, most_bytes: int) -> Plan:
    """Cuts the weights into files in their order; a tensor that is larger than a file may be has one for itself.

    Args:
        dtype: of all weights; None leaves each as it is.
    """
    shards = list(_shards(weights, dtype, most_bytes))
    count = len(shards)
    names = [f"model-{place:05d}-of-{count:05d}.safetensors" for place in range(1, count + 1)]
    groups = []
    for file, names_in_shard in zip(names if count > 1 else [WEIGHTS_NAME], shards, strict=True):
        group = []
        for name in names_in_shard:
            tensor = weights[name]
            whole = TargetBox(file, hf_name(name), tensor.whole)
            group.append(CopiedTensor(name, "weight", tensor, dtype or tensor.dtype, (whole,)))
        groups.append(group)
    return make_plan(groups)


def _shards(weights: Mapping[str, SourceTensor], dtype: str | None, most_bytes: int) -> Iterator[list[str]]:
    shard: list[str] = []
    filled = 0
    for name, tensor in weights.items():
        size = tensor.whole.numel * BY_NAME[dtype or tensor.dtype].size
        if shard and filled + size > most_bytes:
            yield shard
            shard, filled = [], 0
        shard.append(name)
        filled += size
    yield shard


def _index(plan: Plan) -> dict[str, bytes]:
    """The index of several files; none for one."""
    if len(plan.files) == 1:
        return {}
    weight_map = {key: file.name for file in plan.files for key in file.entries}
    index = {"metadata": {"total_size": plan.bytes_in_all}, "weight_map": dict(sorted(weight_map.items()))}
    return {INDEX_NAME: (json.dumps(index, indent=2) + "\n").encode()}


def _beside(source: TrainingCheckpoint) -> tuple[dict[str, bytes], dict[str, Any]]:
    """Tokenizer and generation_config.json, and the ids of special tokens: those of the directory that the model was
    imported from, or by its tokenizer."""
    files, ids = exported_tokenizer(source.checkpoint.directory, source.files_beside)
    imported = source.checkpoint.manifest.get("hugging_face")
    if isinstance(imported, dict):
        ids |= {key: imported[key] for key in TOKEN_KEYS if key in imported}
    files.setdefault(GENERATION_CONFIG, generation_config(ids))
    return files, ids

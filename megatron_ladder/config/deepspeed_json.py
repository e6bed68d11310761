"""DeepSpeed's JSON, derived from the run; a user's own file is merged and must not contradict it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_ladder.config.run import RunConfig

REFUSED_SECTIONS = {
    "optimizer": "the optimizer comes from --lr, --weight-decay, --adam-beta1 and so on; remove it",
    "scheduler": "the schedule comes from --lr-decay-style and so on; remove it",
    "fp16": "half precision is --bf16; remove it",
    "amp": "half precision is --bf16; remove it",
    "pipeline": "remove it",
    "activation_checkpointing": "use --recompute-granularity full; remove it",
    "torch_autocast": "half precision is --bf16; remove it",
    "tensor_parallel": "use --tensor-model-parallel-size; remove it",
}
"""Sections of DeepSpeed's JSON that would take over what the command line decides."""

FLAGS = {
    "train_batch_size": "--global-batch-size",
    "train_micro_batch_size_per_gpu": "--micro-batch-size",
    "gradient_accumulation_steps": "--global-batch-size over --micro-batch-size and data-parallel processes",
    "gradient_clipping": "--clip-grad",
    "zero_optimization.stage": "--zero-stage",
    "bf16.enabled": "--bf16",
    "data_types.grad_accum_dtype": "--bf16",
}
"""Keys that the command line decides, with the flag to name when a file contradicts it."""


def deepspeed_json(run: RunConfig, mistakes: list[str]) -> dict[str, Any]:
    """The configuration that the engine is built from.

    Clipping is computed by this package in every layout, so the engine's own is off, whatever --clip-grad says.
    A line is appended to `mistakes` for each key of `--deepspeed_config` that contradicts the command line.
    """
    stage = int(run.parallel.zero_stage)
    derived: dict[str, Any] = {
        "train_batch_size": run.global_batch_size,
        "train_micro_batch_size_per_gpu": run.training.micro_batch_size,
        "gradient_accumulation_steps": run.accumulation_steps,
        "gradient_clipping": run.optimizer.clip_grad,
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": run.training.bf16},
        "data_types": {"grad_accum_dtype": "fp32"},
        # DeepSpeed's own progress lines would come between ours.
        "steps_per_print": 2**31,
    }
    path = run.parallel.deepspeed_config
    if path is not None:
        given = _read(path, mistakes)
        for section in sorted(set(given) & set(REFUSED_SECTIONS)):
            mistakes.append(f"--deepspeed_config {path}: {section}: {REFUSED_SECTIONS[section]}")
            del given[section]
        derived = _merge(derived, given, f"--deepspeed_config {path}", "", mistakes)
    derived["gradient_clipping"] = 0.0
    if stage > 0 and not run.training.bf16:
        # The norm is ours, so the engine need not compute another; its bf16 optimizer cannot leave it out.
        derived["zero_optimization"]["compute_grad_norm"] = False
    if run.parallel.pipeline_model_parallel_size > 1:
        # It would send each rank's share of what crosses a stage, taking it for the same on all tensor-parallel
        # ranks; the partial sums that cross here are not.
        derived["pipeline"] = {"pipe_partitioned": False, "grad_partitioned": False}
    # AdamW of torch or of apex is handed over as an object, which DeepSpeed calls untested.
    derived["zero_allow_untested_optimizer"] = True
    return derived


def _read(path: Path, mistakes: list[str]) -> dict[str, Any]:
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        mistakes.append(f"--deepspeed_config {path}: cannot be read: {error.strerror}")
        return {}
    except ValueError as error:
        mistakes.append(f"--deepspeed_config {path}: is no JSON: {error}")
        return {}
    if not isinstance(given, dict):
        mistakes.append(f"--deepspeed_config {path}: found a {type(given).__name__}, expected an object")
        return {}
    return given


def _merge(
    derived: Mapping[str, Any], given: Mapping[str, Any], source: str, prefix: str, mistakes: list[str]
) -> dict[str, Any]:
    """What the command line decides, plus what only the file says."""
    merged = dict(derived)
    for key, value in given.items():
        path = prefix + key
        if isinstance(derived.get(key), Mapping) and isinstance(value, Mapping):
            merged[key] = _merge(derived[key], value, source, path + ".", mistakes)
        elif isinstance(derived.get(key), Mapping):
            mistakes.append(f"{source}: {path} is {json.dumps(value)}, expected an object")
        elif path.startswith("zero_optimization.offload"):
            mistakes.append(f"{source}: {path} is not supported by this version: remove it")
        elif value == "auto":
            if path not in FLAGS:
                mistakes.append(f'{source}: {path} is "auto", and no flag decides it: give a value or leave it out')
        elif path in FLAGS and value != derived[key]:
            mistakes.append(
                f"{source}: {path} is {value}, and the command line says {derived[key]} ({FLAGS[path]}): "
                'change one of them, or write "auto"'
            )
        else:
            merged[key] = value
    return merged

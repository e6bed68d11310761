"""DeepSpeed's configuration, derived from the run. The user's file may set a few keys, and must not contradict it."""

import difflib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_ladder.blueprint.tensors import model_tensors
from megatron_ladder.config.run import RunConfig
from megatron_ladder.errors import Problem, UserError, raise_user_errors
from megatron_ladder.typed import read_json

_BUCKET_NUMBERS = 500_000_000
"""DeepSpeed's default size of a bucket of gradients."""
_SHARDED_BUCKET_NUMBERS = 40_000_000
"""Size of a bucket of `ShardedOptimizer`, as in Megatron: the reduce of the last bucket of a step is not hidden."""
_SHARDED_BUCKETS = 16
"""Least number of its buckets, so that the first ones are reduced under the backward of the others."""
_BUCKET_KEY = "zero_optimization.reduce_bucket_size"
_FLAGS = {
    "train_batch_size": "{global_batch_size}",
    "train_micro_batch_size_per_gpu": "{micro_batch_size}",
    "gradient_accumulation_steps": "{global_batch_size} over {micro_batch_size} and data-parallel processes",
    "gradient_clipping": "{clip_grad}",
    "zero_optimization.stage": "{zero_stage}",
    "zero_optimization.offload_optimizer.device": "{offload_optimizer}",
    "bf16.enabled": "{bf16}",
}
"""Keys that the command line determines, with the template that names the field if a file contradicts it."""
_SETTINGS = {
    "steps_per_print": int,
    "wall_clock_breakdown": bool,
    "zero_optimization.overlap_comm": bool,
    "zero_optimization.contiguous_gradients": bool,
    "zero_optimization.reduce_scatter": bool,
    "zero_optimization.round_robin_gradients": bool,
    _BUCKET_KEY: int,
    "zero_optimization.allgather_partitions": bool,
    "zero_optimization.allgather_bucket_size": int,
    "zero_optimization.sub_group_size": int,
    "zero_optimization.stage3_prefetch_bucket_size": int,
    "zero_optimization.stage3_param_persistence_threshold": int,
    "zero_optimization.stage3_max_live_parameters": int,
    "zero_optimization.stage3_max_reuse_distance": int,
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": bool,
    "zero_optimization.offload_optimizer.pin_memory": bool,
}
"""Keys that a file may set, and their types; "auto" leaves the default."""
_INSTEAD = {
    "optimizer": "give {optimizer} and its flags",
    "scheduler": "give {lr_decay_style} and {lr_warmup_iters}",
    "fp16": "use {bf16}",
    "amp": "use {bf16}",
    "activation_checkpointing": "use {recompute_granularity} full",
    "pipeline": "use {pipeline_model_parallel_size}",
    "tensor_parallel": "use {tensor_model_parallel_size}",
    "zero_optimization.offload_param": "only the optimizer can be offloaded, with {offload_optimizer} cpu",
}
"""Blocks that are refused, with the template that names the replacement."""


def bucket_numbers(run: RunConfig) -> int:
    """Return the most elements of a bucket of `ShardedOptimizer`; raises UserError as `deepspeed_json`.

    A file for DeepSpeed sets it, too, under DeepSpeed's name.
    """
    default = min(_SHARDED_BUCKET_NUMBERS, -(-_local_parameters(run) // _SHARDED_BUCKETS))
    return int(_values(run).get(_BUCKET_KEY, default))


def _local_parameters(run: RunConfig) -> int:
    ranks = run.parallel.tensor_model_parallel_size
    return sum(tensor.local_numel(ranks) for tensor in model_tensors(run.model))


def deepspeed_json(run: RunConfig) -> dict[str, Any]:
    """Return DeepSpeed's configuration; raises UserError with one line per key of the file that cannot be used.

    Its clipping is always off, because this package clips by the norm that it computes in every layout.
    """
    values = _values(run)
    values["gradient_clipping"] = 0.0
    # Our own guard looks at every gradient; DeepSpeed's check is two more collectives and one more wait per step.
    values["bf16.check_grad_overflow"] = False
    # DeepSpeed allocates a whole bucket, even for a model with fewer gradients.
    values.setdefault(_BUCKET_KEY, min(_BUCKET_NUMBERS, _local_parameters(run)))
    if run.parallel.offload_optimizer == "none":
        values = {key: value for key, value in values.items() if ".offload_optimizer." not in key}
        if values["zero_optimization.stage"] in (1, 2):
            # This package computes the norm.
            values["zero_optimization.compute_grad_norm"] = False
    if values["zero_optimization.stage"] == 3:
        # It would replace torch's linear function in the whole process.
        values["zero_optimization.memory_efficient_linear"] = False
    return _nested(values)


def _values(run: RunConfig) -> dict[str, Any]:
    """Return the values of the command line and of the user's file by dotted key; raises UserError."""
    values: dict[str, Any] = {
        "train_batch_size": run.global_batch_size,
        "train_micro_batch_size_per_gpu": run.training.micro_batch_size,
        "gradient_accumulation_steps": run.accumulation_steps,
        "gradient_clipping": run.optimizer.clip_grad,
        "zero_optimization.stage": int(run.parallel.zero_stage),
        "zero_optimization.offload_optimizer.device": run.parallel.offload_optimizer,
        "bf16.enabled": run.training.bf16,
        "data_types.grad_accum_dtype": "fp32",
        # By default gradients would be summed over data-parallel ranks in the precision of the model.
        "communication_data_type": "fp32",
        # Allows torch's AdamW on offloaded state; DeepSpeed's own AdamW needs a compiler.
        "zero_force_ds_cpu_optimizer": False,
        # DeepSpeed considers any optimizer that it receives as an object untested.
        "zero_allow_untested_optimizer": True,
        # No progress lines of DeepSpeed between ours.
        "steps_per_print": 2**31,
        # It would wait for the device twice per micro-batch.
        "timers.throughput.enabled": False,
    }
    path = run.parallel.deepspeed_config
    if path is not None:
        raise_user_errors(_merge(values, read_deepspeed_config(path), path))
    return values


def read_deepspeed_config(path: Path) -> dict[str, Any]:
    """Return the values of a file by dotted key, without blocks that are switched off; raises UserError."""
    try:
        config = read_json(path.read_bytes())
    except OSError as error:
        raise UserError(_problem(path, "cannot be read: {error}", error=error.strerror)) from None
    except ValueError as error:
        raise UserError(_problem(path, "{error}", error=error)) from None
    if not isinstance(config, Mapping):
        raise UserError(_problem(path, f"found a {type(config).__name__}, expected an object"))
    return dict(_leaves(config, ""))


def _problem(path: Path, reason: str, fix: str = "", **texts: object) -> Problem:
    return Problem({"deepspeed_config": path}, f"{{}}: {reason}", fix, **texts)


def _leaves(section: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield dotted keys and values. Many files have sections for both precisions, one of them switched off."""
    for key, value in section.items():
        if not isinstance(value, Mapping) or not value:
            yield prefix + key, value
            continue
        switch = next((name for name in ("enabled", "device") if name in value), None)
        if switch is None or f"{prefix}{key}.{switch}" in _FLAGS or value[switch] not in (False, None, "auto", "none"):
            yield from _leaves(value, f"{prefix}{key}.")


def _merge(values: dict[str, Any], settings: Mapping[str, Any], path: Path) -> Iterator[Problem]:
    """Add the settings of a file to `values`; yield one problem per key that cannot be used."""
    known = [*values, *_SETTINGS]
    refused: set[str] = set()
    for key, value in settings.items():
        kind = _SETTINGS.get(key)
        block = next((name for name in _INSTEAD if f"{key}.".startswith(f"{name}.")), None)
        if block is not None:
            refused.add(block)
        elif kind is not None:
            # Sizes such as 5e8 are floats.
            fits = isinstance(value, bool) if kind is bool else type(value) in (int, float) and value >= 0
            if fits:
                values[key] = value
            elif value != "auto":
                expected = "true or false" if kind is bool else "a number"
                reason = f'{{key}} is {{value}}, expected {expected}, or "auto"'
                yield _problem(path, reason, key=key, value=json.dumps(value))
        elif key in values:
            if value not in ("auto", values[key]):
                flag = f" ({_FLAGS[key]})" if key in _FLAGS else ""
                ours = f"the command line says {values[key]}" if flag else f"the trainer has {values[key]}"
                fix = 'change one of them, or write "auto"'
                yield _problem(path, "{key} is {value}, and " + ours + flag, fix, key=key, value=value)
        elif any(name.startswith(f"{key}.") for name in known):
            yield _problem(path, "{key} is {value}, expected an object", key=key, value=json.dumps(value))
        else:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.8)
            fix = f"did you mean {near[0]}?" if near else "remove it"
            yield _problem(path, "{key} is not used by this trainer", fix, key=key)
    for block in sorted(refused):
        yield _problem(path, "{block}: is not read here", f"{_INSTEAD[block]}, and remove the block", block=block)


def _nested(values: Mapping[str, Any]) -> dict[str, Any]:
    whole: dict[str, Any] = {}
    for key, value in values.items():
        *blocks, name = key.split(".")
        section = whole
        for block in blocks:
            section = section.setdefault(block, {})
        section[name] = value
    return whole

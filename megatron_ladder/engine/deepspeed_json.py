"""DeepSpeed's configuration, derived from the run and merged with the user's file, which must not contradict it."""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_ladder.blueprint.tensors import model_tensors
from megatron_ladder.config.run import RunConfig

REFUSED_KEYS = {
    "amp": "half precision is --bf16 or --fp16",
    "pipeline": "stages come from --pipeline-model-parallel-size",
    "activation_checkpointing": "use --recompute-granularity full",
    "torch_autocast": "half precision is --bf16 or --fp16",
    "zenflow": "every gradient is applied in its step",
    "compression_training": "weights are not compressed",
    "tensor_parallel": "use --tensor-model-parallel-size",
    "zero_optimization.offload_param": "only the optimizer can be offloaded; use --offload-optimizer cpu",
    "zero_optimization.zenflow": "every gradient is applied in its step",
    "zero_optimization.zero_hpz_partition_size": "weights have one level of partitions",
    "zero_optimization.zero_quantized_weights": "weights are sent without quantization",
    "zero_optimization.zero_quantized_gradients": "gradients are sent without quantization",
    "zero_optimization.zero_quantized_nontrainable_weights": "weights are sent without quantization",
    "zero_optimization.mics_shard_size": "weights are partitioned over all data-parallel processes",
    "zero_optimization.offload_optimizer.nvme_path": "the optimizer can only be offloaded to host memory",
    "zero_optimization.offload_optimizer.ratio": "the optimizer is offloaded completely or not at all",
    "zero_optimization.offload_optimizer.super_offload": "the optimizer is torch's",
    "zero_optimization.memory_efficient_linear": "it replaces torch's linear function in the whole process",
    "zero_force_ds_cpu_optimizer": "the optimizer is torch's",
    "bf16.bf16_master_weights_and_grads": "master weights and gradients are fp32",
    "bf16.bf16_optimizer_states": "the optimizer's state is fp32",
    "fp16.fp16_master_weights_and_grads": "master weights and gradients are fp32",
    "fp16.auto_cast": "the model casts its inputs itself",
    "communication_data_type": "gradients are reduced in fp32",
    "managed_gradient_accumulation": "a step is --global-batch-size samples",
}
"""Settings that would override the command line, or that the engine does not support, with the reason."""

_BUCKET_NUMBERS = 500_000_000
"""DeepSpeed's default size of a bucket of gradients."""
_SHARDED_BUCKET_NUMBERS = 40_000_000
"""That of `ShardedOptimizer`, Megatron's: the reduce of the last bucket of a step is not hidden."""
_SHARDED_BUCKETS = 16
"""Least number of buckets of a model, so that the first ones are reduced under the backward of the others."""
_OFF = (False, None, "auto", "none")
"""Values that do not request a refused setting."""
_LEFT_TO_DEEPSPEED = {
    f"zero_optimization.{name}"
    for name in ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
}
"""Sizes that transformers derives if they are "auto"; here they are as without a file."""

FLAGS = {
    "train_batch_size": "--global-batch-size",
    "train_micro_batch_size_per_gpu": "--micro-batch-size",
    "gradient_accumulation_steps": "--global-batch-size over --micro-batch-size and data-parallel processes",
    "gradient_clipping": "--clip-grad",
    "zero_optimization.stage": "--zero-stage",
    "zero_optimization.offload_optimizer.device": "--offload-optimizer",
    "bf16.enabled": "--bf16",
    "fp16.enabled": "--fp16",
    "fp16.loss_scale": "--loss-scale, 0 being dynamic",
    "fp16.initial_scale_power": "--initial-loss-scale, as a power of two",
    "fp16.loss_scale_window": "--loss-scale-window",
    "fp16.min_loss_scale": "--min-loss-scale",
    "fp16.hysteresis": "--hysteresis",
    "data_types.grad_accum_dtype": "--bf16",
}
"""Keys that the command line determines, with the flag to name if a file contradicts it."""


def deepspeed_json(run: RunConfig, errors: list[str]) -> dict[str, Any]:
    """Return DeepSpeed's configuration; `errors` receives one line per key that contradicts the command line.

    Its clipping is always off, because this package clips by the norm that it computes in every layout.
    """
    training, stage, offload = run.training, int(run.parallel.zero_stage), run.parallel.offload_optimizer
    fp16: dict[str, Any] = {"enabled": training.fp16}
    if training.fp16:
        fp16 |= {
            "loss_scale": training.loss_scale or 0,
            "initial_scale_power": round(math.log2(max(training.initial_loss_scale, 1.0))),
            "loss_scale_window": training.loss_scale_window,
            "min_loss_scale": int(training.min_loss_scale),
            "hysteresis": training.hysteresis,
        }
    derived: dict[str, Any] = {
        "train_batch_size": run.global_batch_size,
        "train_micro_batch_size_per_gpu": training.micro_batch_size,
        "gradient_accumulation_steps": run.accumulation_steps,
        "gradient_clipping": run.optimizer.clip_grad,
        "zero_optimization": {"stage": stage, "offload_optimizer": {"device": offload}},
        # Our own guard looks at every gradient; DeepSpeed's check is two more collectives and one more wait per step.
        "bf16": {"enabled": training.bf16, "check_grad_overflow": False},
        "fp16": fp16,
        "data_types": {"grad_accum_dtype": "fp32"},
        # By default gradients would be summed over data-parallel ranks in the precision of the model.
        "communication_data_type": "fp32",
        # No progress lines of DeepSpeed between ours.
        "steps_per_print": 2**31,
        # It would wait for the device twice per micro-batch.
        "timers": {"throughput": {"enabled": False}},
    }
    path = run.parallel.deepspeed_config
    if path is not None:
        try:
            given = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            errors.append(f"--deepspeed_config {path}: cannot be read: {error.strerror}")
        except (ValueError, RecursionError) as error:
            errors.append(f"--deepspeed_config {path}: not JSON: {error}")
        else:
            if isinstance(given, Mapping):
                given = dict(given)
                for block, kinds in (("optimizer", _optimizers(run)), ("scheduler", _schedulers(run))):
                    if block in given:
                        source = f"--deepspeed_config {path}: {block}"
                        errors += [f"{source}{error}" for error in _block_errors(given.pop(block), *kinds)]
            derived = _merge(derived, given, path, "", errors)
    derived["gradient_clipping"] = 0.0
    zero = derived["zero_optimization"]
    # DeepSpeed allocates a whole bucket, even for a model with fewer gradients.
    ranks = run.parallel.tensor_model_parallel_size
    local_parameters = sum(tensor.local_numel(ranks) for tensor in model_tensors(run.model))
    bucket_numbers = min(_BUCKET_NUMBERS, local_parameters)
    if run.shards_optimizer:
        bucket_numbers = min(_SHARDED_BUCKET_NUMBERS, -(-local_parameters // _SHARDED_BUCKETS))
        # DeepSpeed is to leave weights, gradients and optimizer as they are.
        zero["stage"] = stage = 0
        derived["bf16"] = {"enabled": False}
    zero.setdefault("reduce_bucket_size", bucket_numbers)
    if offload == "none":
        del zero["offload_optimizer"]
        if stage in (1, 2):
            # This package computes the norm.
            zero["compute_grad_norm"] = False
    if stage == 3:
        # It would replace torch's linear function in the whole process.
        zero["memory_efficient_linear"] = False
    # Allows torch's AdamW on offloaded state; DeepSpeed's own AdamW needs a compiler.
    derived["zero_force_ds_cpu_optimizer"] = False
    if run.parallel.pipeline_model_parallel_size > 1:
        # DeepSpeed would send only a part of a stage's output from each tensor-parallel rank, assuming that all ranks
        # have the same output; the partial sums that cross stages here differ.
        derived["pipeline"] = {"pipe_partitioned": False, "grad_partitioned": False}
    # DeepSpeed considers any optimizer that it receives as an object untested.
    derived["zero_allow_untested_optimizer"] = True
    return derived


def _merge(derived: Mapping[str, Any], given: object, file: Path, prefix: str, errors: list[str]) -> dict[str, Any]:
    """Return `derived` with the additional keys of the file, or of its section at `prefix`."""
    merged, source = dict(derived), f"--deepspeed_config {file}"
    if not isinstance(given, Mapping):
        found = f"{prefix.removesuffix('.')} is {json.dumps(given)}" if prefix else f"found a {type(given).__name__}"
        errors.append(f"{source}: {found}, expected an object")
        return merged
    for key, value in given.items():
        path = prefix + key
        if path in REFUSED_KEYS and (_is_off(value) or (key in derived and value == derived[key])):
            continue
        if path in REFUSED_KEYS:
            errors.append(f"{source}: {path}: {REFUSED_KEYS[path]}; remove it")
        elif isinstance(derived.get(key), Mapping):
            merged[key] = _merge(derived[key], value, file, path + ".", errors)
        elif value == "auto":
            if path not in FLAGS and path not in _LEFT_TO_DEEPSPEED:
                errors.append(f'{source}: {path} is "auto", but no flag determines it: give a value or leave it out')
        elif path in FLAGS and key in derived and value != derived[key]:
            errors.append(
                f"{source}: {path} is {value}, and the command line says {derived[key]} ({FLAGS[path]}): "
                'change one of them, or write "auto"'
            )
        else:
            merged[key] = value
    return merged


def _is_off(value: Any) -> bool:
    if isinstance(value, Mapping):
        switches = [value[name] for name in ("enabled", "device") if name in value] or value.values()
        return all(switch in _OFF for switch in switches)
    return value in _OFF


_Kinds = tuple[str, str, Mapping[str, tuple[str, Mapping[str, tuple[Any, str]]]]]
"""A flag, its value, and for each type in the file the value that means the same, and the parameters of the type: their
values on the command line and the flags that set them."""


def _optimizers(run: RunConfig) -> _Kinds:
    config = run.optimizer
    common = {"lr": (config.lr, "--lr"), "weight_decay": (config.weight_decay, "--weight-decay")}
    adamw = common | {
        "betas": ([config.adam_beta1, config.adam_beta2], "--adam-beta1 and --adam-beta2"),
        "eps": (config.adam_eps, "--adam-eps"),
        "adam_w_mode": (True, "weight decay is decoupled"),
        "bias_correction": (True, "moments are corrected"),
        "torch_adam": (True, "the optimizer is torch's"),
    }
    muon = common | {"momentum": (config.muon_momentum, "--muon-momentum")}
    ours = "muon" if config.optimizer == "muon" else "adamw"
    return "--optimizer", ours, {"AdamW": ("adamw", adamw), "Adam": ("adamw", adamw), "Muon": ("muon", muon)}


def _schedulers(run: RunConfig) -> _Kinds:
    config = run.optimizer.completed(run.training.train_iters)
    steps = {
        "last_batch_iteration": (-1, "--load continues a schedule"),
        "warmup_num_steps": (config.lr_warmup_iters, "--lr-warmup-iters"),
        "warmup_type": ("linear", "the warm-up is linear"),
    }
    rates = {"warmup_min_lr": (0, "the warm-up starts at 0"), "warmup_max_lr": (config.lr, "--lr")}
    total = {"total_num_steps": (config.lr_decay_iters, "--lr-decay-iters, which is --train-iters by default")}
    ratios = {
        "warmup_min_ratio": (0, "the warm-up starts at 0"),
        "cos_min_ratio": (config.min_lr / config.lr, "--min-lr over --lr"),
    }
    kinds = {
        "WarmupLR": ("constant", steps | rates),
        "WarmupDecayLR": ("linear", steps | rates | total),
        "WarmupCosineLR": ("cosine", steps | total | ratios),
    }
    # The linear decay of DeepSpeed ends at 0.
    ends = f" with --min-lr {config.min_lr}" if config.lr_decay_style == "linear" and config.min_lr else ""
    return "--lr-decay-style", config.lr_decay_style + ends, kinds


def _block_errors(given: Any, flag: str, ours: str, kinds: Mapping[str, Any]) -> Iterator[str]:
    """Yield the ends of errors about a block `{"type": ..., "params": {...}}` that must agree with the command line."""
    params = given.get("params", {}) if isinstance(given, Mapping) else None
    if not isinstance(params, Mapping) or given.keys() - {"type", "params"} or "type" not in given:
        yield f' is {json.dumps(given)}, expected {{"type": ..., "params": {{...}}}}'
        return
    kind = next((kind for kind in kinds if kind.lower() == str(given["type"]).lower()), None)
    if kind is None:
        yield f".type {given['type']} is not supported: use {', '.join(kinds)}, or remove the block and give {flag}"
        return
    theirs, values = kinds[kind]
    if theirs != ours:
        yield (
            f".type is {kind}, which is {flag} {theirs}, and the command line says {ours}: change one of them, or "
            "remove the block"
        )
        return
    for name, value in params.items():
        if name not in values:
            yield f".params.{name} is not supported: remove it"
        elif value != "auto" and not _equal(value, values[name][0]):
            yield (
                f".params.{name} is {json.dumps(value)}, and the command line says {json.dumps(values[name][0])} "
                f'({values[name][1]}): change one of them, or write "auto"'
            )


def _equal(given: Any, ours: Any) -> bool:
    numbers = isinstance(given, int | float) and isinstance(ours, int | float) and not isinstance(ours, bool)
    return math.isclose(given, ours, rel_tol=1e-9) if numbers else given == ours

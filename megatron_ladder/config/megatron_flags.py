"""Megatron's flags that this trainer does not have.

Users bring launch scripts from Megatron-DeepSpeed. A flag that requests what the trainer does anyway is accepted, and
any other flag is rejected with its replacement. No flag is silently ignored.
"""

from collections.abc import Sequence

from megatron_ladder.flags import is_flag

ACCEPTED: dict[str, tuple[str, ...]] = {
    "--swiglu": (),
    "--normalization": ("rmsnorm",),
    "--use-rotary-position-embeddings": (),
    "--position-embedding-type": ("rope",),
    "--untie-embeddings-and-output-weights": (),
    "--disable-bias-linear": (),
    "--attention-dropout": ("0",),
    "--hidden-dropout": ("0",),
    "--use-flash-attn": (),
    "--use-flash-attn-v2": (),
    "--group-query-attention": (),
    "--no-query-key-layer-scaling": (),
    "--no-gradient-accumulation-fusion": (),
    "--no-masked-softmax-fusion": (),
    "--no-bias-gelu-fusion": (),
    "--no-bias-dropout-fusion": (),
    "--no-async-tensor-model-parallel-allreduce": (),
    "--accumulate-allreduce-grads-in-fp32": (),
    "--attention-softmax-in-fp32": (),
    "--use-mcore-models": (),
    "--make-vocab-size-divisible-by": ("128",),
    "--optimizer": ("adam", "adamw"),
    "--data-impl": ("mmap",),
    "--transformer-impl": ("local",),
    "--attention-backend": ("auto", "flash"),
    "--no-bias-swiglu-fusion": (),
    "--no-rope-fusion": (),
    "--no-persist-layer-norm": (),
    "--log-throughput": (),
    "--use-pytorch-profiler": (),
    "--log-timers-to-tensorboard": (),
    "--log-memory-to-tensorboard": (),
    "--log-batch-size-to-tensorboard": (),
    "--log-validation-ppl-to-tensorboard": (),
    "--timing-log-level": ("0",),
    "--dataloader-type": ("single",),
    "--distributed-backend": ("nccl", "gloo"),
    "--no-pipeline-parallel": (),
    "--no-create-moe-param-group": (),
    "--rotary-percent": ("1",),
    "--ds-sequence-parallel-size": ("1",),
    "--context-parallel-size": ("1",),
    "--expert-model-parallel-size": ("1",),
    "--exit-signal-handler": (),
    "--check-for-nan-in-loss-and-grad": (),
}
"""Flag -> the values that mean what is done anyway; an empty tuple marks a switch."""

_NO_MOE = "layers are dense; there are no experts"
_NO_CONTEXT = "use --tensor-model-parallel-size, and --recompute-granularity full for long sequences"
_NO_FP8 = "use --bf16"
_ITERATIONS = "count in steps: use --train-iters, --lr-decay-iters and --lr-warmup-iters"
_ROTARY = "positions are rotary: use --rotary-base and --rope-scaling"
_RECOMPUTE = "use --recompute-granularity full"
_LLAMA = "the model is Llama's: RMSNorm and SwiGLU without dropout"

REFUSED: dict[str, str] = {
    "--num-experts": _NO_MOE,
    "--moe-router-topk": _NO_MOE,
    "--moe-expert-parallel-size": _NO_MOE,
    "--moe-grouped-gemm": _NO_MOE,
    "--topk": _NO_MOE,
    "--cp-comm-type": _NO_CONTEXT,
    "--force-ds-sequence-parallel": _NO_CONTEXT,
    "--fp8-format": _NO_FP8,
    "--fp8-hybrid": _NO_FP8,
    "--fp8-margin": _NO_FP8,
    "--num-layers-per-virtual-pipeline-stage": "stages hold one contiguous range of layers; leave the flag out",
    "--num-virtual-stages-per-pipeline-rank": "stages hold one contiguous range of layers; leave the flag out",
    "--gradient-accumulation-fusion": "gradients are accumulated by the optimizer; leave the flag out",
    "--use-distributed-optimizer": "use --zero-stage 1",
    "--overlap-grad-reduce": "gradients are reduced once a step; leave the flag out",
    "--overlap-param-gather": "leave the flag out",
    "--tp-comm-overlap": "all-reduces overlap by the wiring: use --residual-mode ladder",
    "--parallel-attn-mlp": "use --residual-mode parallel",
    "--train-samples": _ITERATIONS,
    "--train-tokens": _ITERATIONS,
    "--lr-decay-samples": _ITERATIONS,
    "--lr-warmup-samples": _ITERATIONS,
    "--lr-decay-tokens": _ITERATIONS,
    "--lr-warmup-tokens": _ITERATIONS,
    "--lr-warmup-fraction": "use --lr-warmup-iters",
    "--rampup-batch-size": "use one --global-batch-size",
    "--checkpoint-activations": _RECOMPUTE,
    "--deepspeed-activation-checkpointing": _RECOMPUTE,
    "--checkpoint-num-layers": "use --recompute-num-layers",
    "--recompute-activations": _RECOMPUTE,
    "--recompute-method": "the first --recompute-num-layers layers are recomputed; leave the flag out",
    "--distribute-saved-activations": _RECOMPUTE,
    "--add-position-embedding": _ROTARY,
    "--use-rope-scaling": "use --rope-scaling llama3 or linear",
    "--rope-scaling-type": "use --rope-scaling llama3 or linear",
    "--squared-relu": _LLAMA,
    "--openai-gelu": _LLAMA,
    "--apply-layernorm-1p": _LLAMA,
    "--apply-residual-connection-post-layernorm": _LLAMA,
    "--window-size": "attention is causal over the whole sequence",
    "--start-weight-decay": "use one --weight-decay",
    "--end-weight-decay": "use one --weight-decay",
    "--merge-file": "put merges.txt beside the --vocab-file, where GPT2BPETokenizer finds it",
    "--mmap-warmup": "leave the flag out",
    "--rotary-seq-len-interpolation-factor": "use --rope-scaling linear --rope-scaling-factor",
    "--num-workers": "samples are read by the training process; leave the flag out",
    "--use-checkpoint-args": "give the model's flags: a contradiction with the checkpoint is an error",
    "--no-load-lr-state": "use --override-opt-param-scheduler",
    "--universal-checkpoint": "every checkpoint is read in any layout; leave the flag out",
    "--cpu-optimizer": "use --offload-optimizer cpu",
    "--partition-activations": _RECOMPUTE,
    "--checkpoint-in-cpu": _RECOMPUTE,
    "--encoder-seq-length": "use --seq-length",
    "--lr-warmup-init": "the warm-up begins at 0; leave the flag out",
    "--weight-decay-incr-style": "use one --weight-decay",
    "--wandb-project": "use --tensorboard-dir",
    "--wandb-exp-name": "use --tensorboard-dir",
    "--fp8-recipe": _NO_FP8,
    "--moe-router-load-balancing-type": _NO_MOE,
    "--moe-aux-loss-coeff": _NO_MOE,
    "--ckpt-format": "checkpoints have one format; leave the flag out",
    "--use-torch-fsdp2": "use --zero-stage 3",
    "--no-save-optim": "leave the flag out: a checkpoint is saved whole",
    "--no-save-rng": "leave the flag out: a checkpoint is saved whole",
    "--no-check-for-nan-in-loss-and-grad": "the check is part of the gradient's norm; leave the flag out",
    "--check-for-spiky-loss": "use --loss-spike-factor",
    "--check-for-large-grads": "large gradients are clipped: use --clip-grad",
    "--rerun-mode": "a step with bad numbers is left out: use --max-consecutive-bad-steps",
    "--error-injection-rate": "leave the flag out: faults are injected by tests alone",
}
"""Flag -> what to use instead."""


def take_megatron_flags(words: Sequence[str], errors: list[str]) -> list[str]:
    """Return the words of a command line without these flags and their values, appending one line per error."""
    kept: list[str] = []
    position = 0
    while position < len(words):
        name, equals, attached = words[position].partition("=")
        position += 1
        if name not in REFUSED and name not in ACCEPTED:
            kept.append(words[position - 1])
            continue
        values = [attached] if equals else []
        while not equals and position < len(words) and not is_flag(words[position]):
            values.append(words[position])
            position += 1
        if name in REFUSED:
            errors.append(f"{name} is not supported: {REFUSED[name]}")
        elif ACCEPTED[name] and (len(values) != 1 or not _matches(values[0], ACCEPTED[name])):
            expected = " or ".join(ACCEPTED[name])
            errors.append(f"{name} {' '.join(values)}: only {expected} is supported; leave the flag out")
        elif not ACCEPTED[name] and values:
            errors.append(f"{name} takes no value, found {' '.join(values)}")
    return kept


def _matches(value: str, allowed: Sequence[str]) -> bool:
    if value.lower() in [word.lower() for word in allowed]:
        return True
    try:
        return float(value) in [float(word) for word in allowed]
    except ValueError:
        return False

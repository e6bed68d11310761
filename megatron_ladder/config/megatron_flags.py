"""Flags of Megatron and of other trainers that this trainer does not have.

Users bring launch scripts from Megatron-DeepSpeed. A flag that requests what the trainer does anyway is accepted, and
any other flag is rejected with its replacement. No flag is silently ignored.
"""

from collections.abc import Sequence

from megatron_ladder.errors import Problem

_SWITCHES = """
    --swiglu --use-rotary-position-embeddings --untie-embeddings-and-output-weights --disable-bias-linear
    --use-flash-attn --use-flash-attn-v2 --group-query-attention --no-query-key-layer-scaling
    --no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-dropout-fusion
    --accumulate-allreduce-grads-in-fp32 --attention-softmax-in-fp32
    --use-mcore-models --no-bias-swiglu-fusion --no-rope-fusion --no-persist-layer-norm --log-throughput
    --use-pytorch-profiler --log-memory-to-tensorboard --log-validation-ppl-to-tensorboard --no-pipeline-parallel
    --no-create-moe-param-group --exit-signal-handler --check-for-nan-in-loss-and-grad --use-checkpoint-args
    --moe-grouped-gemm --disable-moe-token-dropping
"""
ACCEPTED: dict[str, tuple[str, ...]] = dict.fromkeys(_SWITCHES.split(), ()) | {
    "--normalization": ("rmsnorm",),
    "--position-embedding-type": ("rope",),
    "--attention-dropout": ("0",),
    "--hidden-dropout": ("0",),
    "--make-vocab-size-divisible-by": ("128",),
    "--data-impl": ("mmap",),
    "--transformer-impl": ("local",),
    "--attention-backend": ("auto", "flash"),
    "--timing-log-level": ("0",),
    "--dataloader-type": ("single",),
    "--ds-sequence-parallel-size": ("1",),
    "--context-parallel-size": ("1",),
    "--expert-model-parallel-size": ("1",),
    "--moe-router-dtype": ("fp32",),
}
"""Flag -> its accepted values, which request the default behaviour; switches have none."""

_REFUSED_BY_REASON = {
    "experts are divided over the tensor-parallel ranks; leave the flag out": (
        "--moe-expert-parallel-size --expert-tensor-parallel-size --enable-expert-tensor-parallelism "
        "--moe-extended-tp --create-moe-param-group"
    ),
    "every rank has all tokens and sends none; leave the flag out": (
        "--moe-token-dispatcher-type --moe-enable-deepep --moe-deepep-num-sms --moe-flex-dispatcher-backend "
        "--moe-permute-fusion --overlap-moe-expert-parallel-comm --use-tutel"
    ),
    "no token is dropped; leave the flag out": (
        "--moe-expert-capacity-factor --moe-train-capacity-factor --moe-eval-capacity-factor --moe-min-capacity "
        "--moe-token-drop-policy --moe-pad-expert-input-to-capacity"
    ),
    "use --moe-router-topk": "--topk",
    "use --moe-router-unnormalized": "--moe-router-pre-softmax",
    "use --moe-aux-loss-coeff": "--moe-loss-coeff",
    "list the layers in --moe-layers": "--moe-layer-freq --expert-interval",
    "use --residual-mode shortcut, or farskip": "--moe-shared-expert-overlap",
    "the loads of the experts are always logged; leave the flag out": "--moe-per-layer-logging",
    "the router adds no noise; leave the flag out": "--moe-input-jitter-eps",
    "use --tensor-model-parallel-size, and --recompute-granularity full for long sequences": (
        "--cp-comm-type --force-ds-sequence-parallel"
    ),
    "use --bf16": (
        "--fp16 --loss-scale --initial-loss-scale --min-loss-scale --loss-scale-window --hysteresis "
        "--fp8-format --fp8-hybrid --fp8-margin --fp8-recipe"
    ),
    "each stage holds one contiguous range of layers; leave the flag out": (
        "--num-layers-per-virtual-pipeline-stage --num-virtual-stages-per-pipeline-rank"
    ),
    "gradients are accumulated by the optimizer; leave the flag out": "--gradient-accumulation-fusion",
    "use --zero-stage 1": "--use-distributed-optimizer",
    "gradients are reduced once per step; leave the flag out": "--overlap-grad-reduce",
    "leave the flag out": "--overlap-param-gather --mmap-warmup",
    "training does not read test data: evaluate it with --skip-train --valid-data-path": "--test-data-path",
    "use --no-tp-overlap": "--no-async-tensor-model-parallel-allreduce",
    "the device determines the backend; leave the flag out": "--distributed-backend",
    "the seconds of a step are always logged, and --profile shows its parts; leave the flag out": (
        "--log-timers-to-tensorboard"
    ),
    "the batch size is constant; leave the flag out": "--log-batch-size-to-tensorboard",
    "the wiring overlaps all-reduces: use --residual-mode ladder": "--tp-comm-overlap",
    "use --residual-mode parallel": "--parallel-attn-mlp",
    "lengths are counted in steps: use --train-iters, --lr-decay-iters and --lr-warmup-iters": (
        "--train-samples --train-tokens --lr-decay-samples --lr-warmup-samples --lr-decay-tokens --lr-warmup-tokens"
    ),
    "the order of samples takes seconds to compute; leave the flag out": "--data-cache-path",
    "use --lr-warmup-iters": "--lr-warmup-fraction --warmup-steps --warmup-ratio --num-warmup-steps",
    "use one --global-batch-size": "--rampup-batch-size --batch-size --train-batch-size --gradient-accumulation-steps",
    "use --micro-batch-size": "--per-device-train-batch-size",
    "use --lr": "--learning-rate --max-lr",
    "use --lr-decay-style": "--lr-scheduler-type",
    "use --clip-grad": "--max-grad-norm --gradient-clipping",
    "use --train-iters": "--max-steps --num-train-epochs",
    "use --seq-length": "--encoder-seq-length --max-seq-length --max-length",
    "use --save": "--output-dir",
    "use --save-interval": "--save-steps",
    "use --log-interval": "--logging-steps",
    "use --eval-interval": "--eval-steps",
    "use --load": "--resume-from-checkpoint",
    "import it with `tools/convert_checkpoint.py import`, and use --load": "--model-name-or-path",
    "use --recompute-granularity full": (
        "--checkpoint-activations --deepspeed-activation-checkpointing --recompute-activations "
        "--distribute-saved-activations --partition-activations --checkpoint-in-cpu --moe-layer-recompute"
    ),
    "use --recompute-num-layers": "--checkpoint-num-layers",
    "the first --recompute-num-layers layers are recomputed; leave the flag out": "--recompute-method",
    "positions are rotary: use --rotary-base and --rope-scaling": "--add-position-embedding",
    "use --rope-scaling llama3 or linear": "--use-rope-scaling --rope-scaling-type",
    "the architecture is Llama's: RMSNorm and SwiGLU without dropout": (
        "--squared-relu --openai-gelu --apply-layernorm-1p --apply-residual-connection-post-layernorm"
    ),
    "attention is causal over the whole sequence": "--window-size",
    "use one --weight-decay": "--start-weight-decay --end-weight-decay --weight-decay-incr-style",
    "use --tokenizer-type HuggingFaceTokenizer with GPT-2's tokenizer.json, which holds both files": (
        "--vocab-file --merge-file"
    ),
    "use --rope-scaling linear --rope-scaling-factor": "--rotary-seq-len-interpolation-factor",
    "the training process reads the samples; leave the flag out": "--num-workers",
    "use --override-opt-param-scheduler": "--no-load-lr-state",
    "every checkpoint can be loaded in any layout; leave the flag out": "--universal-checkpoint",
    "use --offload-optimizer cpu": "--cpu-optimizer",
    "the warm-up starts at 0; leave the flag out": "--lr-warmup-init",
    "set the environment variable WANDB_ENTITY": "--wandb-entity",
    "there is only one checkpoint format; leave the flag out": "--ckpt-format",
    "use --zero-stage 3": "--use-torch-fsdp2",
    "checkpoints always contain the complete state; leave the flag out": "--no-save-optim --no-save-rng",
    "the check is part of the gradient norm; leave the flag out": "--no-check-for-nan-in-loss-and-grad",
    "use --loss-spike-factor": "--check-for-spiky-loss",
    "large gradients are clipped: use --clip-grad": "--check-for-large-grads",
    "a step with non-finite numbers is skipped: use --max-consecutive-bad-steps": "--rerun-mode",
    "only tests inject faults; leave the flag out": "--error-injection-rate",
}
REFUSED: dict[str, str] = {flag: reason for reason, flags in _REFUSED_BY_REASON.items() for flag in flags.split()}
"""Flag -> the reason why it is rejected, or its replacement."""


def read_megatron_flag(name: str, values: Sequence[str], taken: set[str]) -> list[str] | None:
    """Return the errors of a flag with its values, or None if it is not Megatron's; `taken` receives accepted flags."""
    name = name.replace("_", "-")
    if name in REFUSED:
        # A file may say that it does not want it.
        return [] if values == ["false"] else [Problem(name, f" is not supported: {REFUSED[name]}")]
    if name not in ACCEPTED:
        return None
    allowed = ACCEPTED[name]
    if allowed and (len(values) != 1 or not _matches(values[0], allowed)):
        return [Problem(name, f" {' '.join(values)}: only {' or '.join(allowed)} is supported; leave the flag out")]
    if not allowed and values:
        return [Problem(name, f" takes no value, found {' '.join(values)}")]
    taken.add(name)
    return []


def _matches(value: str, allowed: Sequence[str]) -> bool:
    try:
        return value.lower() in allowed or float(value) in map(float, allowed)
    except ValueError:
        return False

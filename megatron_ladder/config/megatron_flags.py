"""Flags of Megatron and of other trainers that this trainer does not have.

Users bring launch scripts from Megatron-DeepSpeed. A flag that requests what the trainer does anyway is accepted. Any
other flag is rejected, with its replacement if there is one. No flag is silently ignored.
"""

import re
from collections.abc import Sequence

from megatron_ladder.command_line import FlagWords
from megatron_ladder.errors import Problem

_DEFAULTS = """
    --swiglu --use-rotary-position-embeddings --untie-embeddings-and-output-weights --disable-bias-linear
    --use-flash-attn --use-flash-attn-v2 --group-query-attention --no-query-key-layer-scaling
    --no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-dropout-fusion
    --accumulate-allreduce-grads-in-fp32 --attention-softmax-in-fp32
    --use-mcore-models --no-bias-swiglu-fusion --no-rope-fusion --no-persist-layer-norm --log-throughput
    --use-pytorch-profiler --log-memory-to-tensorboard --log-validation-ppl-to-tensorboard --no-pipeline-parallel
    --no-create-moe-param-group --exit-signal-handler --check-for-nan-in-loss-and-grad --use-checkpoint-args
    --moe-grouped-gemm --disable-moe-token-dropping
    --normalization=rmsnorm --position-embedding-type=rope --attention-dropout=0 --hidden-dropout=0
    --make-vocab-size-divisible-by=128 --data-impl=mmap --transformer-impl=local --attention-backend=auto,flash
    --timing-log-level=0 --dataloader-type=single --ds-sequence-parallel-size=1 --context-parallel-size=1
    --expert-model-parallel-size=1 --moe-router-dtype=fp32
"""
_PAIRS = (word.partition("=") for word in _DEFAULTS.split())
ACCEPTED = {flag: tuple(values.split(",")) if values else () for flag, _, values in _PAIRS}
"""Flag -> its accepted values, which request the default behaviour; switches have none."""

_INSTEAD = """
    --topk -> use --moe-router-topk
    --moe-router-pre-softmax -> use --moe-router-unnormalized
    --moe-loss-coeff -> use --moe-aux-loss-coeff
    --moe-layer-freq --expert-interval -> list the layers in --moe-layers
    --moe-shared-expert-overlap -> use --residual-mode shortcut, or farskip
    --cp-comm-type --force-ds-sequence-parallel
    -> use --tensor-model-parallel-size, and --recompute-granularity full for long sequences
    --fp16 --loss-scale --initial-loss-scale --min-loss-scale --loss-scale-window --hysteresis --fp8-format --fp8-hybrid
    --fp8-margin --fp8-recipe -> use --bf16
    --use-distributed-optimizer -> use --zero-stage 1
    --use-torch-fsdp2 -> use --zero-stage 3
    --cpu-optimizer -> use --offload-optimizer cpu
    --test-data-path -> training does not read test data: evaluate it with --skip-train --valid-data-path
    --no-async-tensor-model-parallel-allreduce -> use --no-tp-overlap
    --tp-comm-overlap -> the wiring overlaps all-reduces: use --residual-mode ladder
    --parallel-attn-mlp -> use --residual-mode parallel
    --train-samples --train-tokens --lr-decay-samples --lr-warmup-samples --lr-decay-tokens --lr-warmup-tokens
    -> lengths are counted in steps: use --train-iters, --lr-decay-iters and --lr-warmup-iters
    --lr-warmup-fraction --warmup-steps --warmup-ratio --num-warmup-steps -> use --lr-warmup-iters
    --rampup-batch-size --train-batch-size --gradient-accumulation-steps -> use one --global-batch-size
    --batch-size --per-device-train-batch-size -> use --micro-batch-size
    --learning-rate --max-lr -> use --lr
    --lr-scheduler-type -> use --lr-decay-style
    --max-grad-norm --gradient-clipping -> use --clip-grad
    --max-steps --num-train-epochs -> use --train-iters
    --encoder-seq-length --max-seq-length --max-length -> use --seq-length
    --output-dir -> use --save
    --save-steps -> use --save-interval
    --logging-steps -> use --log-interval
    --eval-steps -> use --eval-interval
    --resume-from-checkpoint -> use --load
    --model-name-or-path -> import it with `tools/convert_checkpoint.py import`, and use --load
    --data-args-path --per-split-data-args-path -> list data sets in a file for --config
    --checkpoint-activations --deepspeed-activation-checkpointing --recompute-activations --distribute-saved-activations
    --partition-activations --checkpoint-in-cpu --moe-layer-recompute -> use --recompute-granularity full
    --checkpoint-num-layers -> use --recompute-num-layers
    --add-position-embedding -> positions are rotary: use --rotary-base and --rope-scaling
    --use-rope-scaling --rope-scaling-type -> use --rope-scaling llama3 or linear
    --rotary-seq-len-interpolation-factor -> use --rope-scaling linear --rope-scaling-factor
    --start-weight-decay --end-weight-decay --weight-decay-incr-style -> use one --weight-decay
    --vocab-file --merge-file
    -> use --tokenizer-type HuggingFaceTokenizer with GPT-2's tokenizer.json, which holds both files
    --no-load-lr-state -> use --override-opt-param-scheduler
    --wandb-entity -> set the environment variable WANDB_ENTITY
    --check-for-spiky-loss -> use --loss-spike-factor
    --check-for-large-grads -> large gradients are clipped: use --clip-grad
    --rerun-mode -> a step with non-finite numbers is skipped: use --max-consecutive-bad-steps
"""
_ROWS = re.findall(r"((?:--\S+\s+)+)-> (.+)", _INSTEAD)
REFUSED: dict[str, str] = {flag: reason for flags, reason in _ROWS for flag in flags.split()}
"""Flag -> what to use instead."""


def read_megatron_flag(name: str, values: Sequence[str], found: FlagWords) -> bool:
    """Accept a flag of Megatron with its values, or add a problem to `found`; return whether it is Megatron's."""
    name, shown = name.replace("_", "-"), " ".join(values)
    if name not in REFUSED and name not in ACCEPTED:
        return False
    allowed = ACCEPTED.get(name)
    if allowed is None:
        found.problems.append(Problem(name, f" is not supported: {REFUSED[name]}"))
    elif not allowed and values:
        found.problems.append(Problem(name, f" takes no value, found {shown}"))
    elif allowed and (len(values) != 1 or not _matches(shown, allowed)):
        text = f" {shown}: only {' or '.join(allowed)} is supported; leave the flag out"
        found.problems.append(Problem(name, text))
    else:
        found.accepted.add(name)
    return True


def _matches(value: str, allowed: Sequence[str]) -> bool:
    try:
        return value.lower() in allowed or float(value) in map(float, allowed)
    except ValueError:
        return False

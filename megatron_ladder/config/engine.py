"""What DeepSpeed's engine cannot do, or does wrong, told before it is built."""

import math
from collections.abc import Iterator

from megatron_ladder.config.parallel import ParallelConfig
from megatron_ladder.config.training import OptimizerConfig, TrainingConfig


def engine_mistakes(
    training: TrainingConfig, optimizer: OptimizerConfig, parallel: ParallelConfig
) -> Iterator[str]:
    """A line for each combination of precision, ZeRO stage and offloading that cannot be."""
    stage = parallel.zero_stage
    half = [flag for flag, given in (("--bf16", training.bf16), ("--fp16", training.fp16)) if given]
    if len(half) > 1:
        yield "--bf16 and --fp16 exclude each other: give one"
    if half and stage == "0":
        yield (
            f"{half[0]} needs --zero-stage 1, 2 or 3: fp32 master weights and gradients live in those optimizers"
        )
    if parallel.pipeline_model_parallel_size > 1:
        if stage in ("2", "3"):
            yield (
                f"--zero-stage {stage} with --pipeline-model-parallel-size {parallel.pipeline_model_parallel_size}: "
                "gradients of a stage stay whole over its micro-batches, so use --zero-stage 0 or 1"
            )
        if training.fp16:
            yield "--fp16 with --pipeline-model-parallel-size is not supported: use --bf16"
        if parallel.offload_optimizer != "none":
            yield "--offload-optimizer cpu with --pipeline-model-parallel-size is not supported: leave it out"
    if parallel.offload_optimizer != "none" and stage == "0":
        yield "--offload-optimizer cpu needs --zero-stage 1, 2 or 3: DeepSpeed offloads what ZeRO partitions"
    if optimizer.optimizer_implementation == "apex":
        if parallel.offload_optimizer != "none":
            yield "--optimizer-implementation apex runs on a GPU, not with --offload-optimizer cpu: use torch"
        if stage == "3":
            # Its one step count for a group would grow with each of the subgroups that ZeRO-3 updates in turn.
            yield "--optimizer-implementation apex miscounts steps with --zero-stage 3: use torch"
    if training.fp16 and parallel.offload_optimizer != "none" and stage != "3":
        # After an overflow its buffers keep what is not finite, and every later step overflows.
        yield "--fp16 with --offload-optimizer cpu does not recover from overflows below --zero-stage 3: use --bf16"
    if training.fp16:
        yield from _loss_scale_mistakes(training)


def _loss_scale_mistakes(training: TrainingConfig) -> Iterator[str]:
    scale = training.initial_loss_scale
    if training.loss_scale is None and (scale < 1 or not math.log2(scale).is_integer()):
        yield f"--initial-loss-scale {scale:g} must be a power of two, 1 at least"
    elif not training.min_loss_scale.is_integer():
        yield f"--min-loss-scale {training.min_loss_scale:g} must be a whole number"
    elif training.loss_scale is None and training.min_loss_scale > scale:
        yield f"--min-loss-scale {training.min_loss_scale:g} is above --initial-loss-scale {scale:g}"

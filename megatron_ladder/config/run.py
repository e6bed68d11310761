"""One run: all its configuration, with nothing left open, and the arithmetic that must hold."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_ladder.blueprint.model import ModelConfig, ModelFlags, resolve_model, tensor_parallel_mistakes
from megatron_ladder.config.data import DataConfig
from megatron_ladder.config.engine import engine_mistakes
from megatron_ladder.config.megatron_flags import take_megatron_flags
from megatron_ladder.config.parallel import ParallelConfig
from megatron_ladder.config.profile import ProfileConfig, profile_mistakes
from megatron_ladder.config.reliability import ReliabilityConfig, reliability_mistakes
from megatron_ladder.config.training import (
    CheckpointConfig,
    LoggingConfig,
    OptimizerConfig,
    TrainingConfig,
    checkpoint_mistakes,
)
from megatron_ladder.flags import parse_command_line, to_plain

PROGRAM = "pretrain_ladder.py"
DESCRIPTION = "Pretrains a Llama-family transformer with Ladder Residual, tensor-, pipeline- and data-parallel."


@dataclass(frozen=True)
class RunFlags:
    """What was given on the command line."""

    model: ModelFlags
    training: TrainingConfig
    optimizer: OptimizerConfig
    parallel: ParallelConfig
    data: DataConfig
    checkpoint: CheckpointConfig
    logging: LoggingConfig
    profile: ProfileConfig
    reliability: ReliabilityConfig


SECTIONS = (
    ModelFlags, TrainingConfig, OptimizerConfig, ParallelConfig, DataConfig, CheckpointConfig, LoggingConfig,
    ProfileConfig, ReliabilityConfig,
)  # fmt: skip


@dataclass(frozen=True)
class RunConfig:
    """A run that can be started."""

    model: ModelConfig
    training: TrainingConfig
    optimizer: OptimizerConfig
    parallel: ParallelConfig
    data: DataConfig
    checkpoint: CheckpointConfig
    logging: LoggingConfig
    profile: ProfileConfig
    reliability: ReliabilityConfig
    world_size: int
    data_parallel_size: int
    global_batch_size: int
    accumulation_steps: int

    @property
    def tokens_per_step(self) -> int:
        """Tokens of a global batch."""
        return self.global_batch_size * self.training.seq_length

    @property
    def loads_weights_alone(self) -> bool:
        """Whether nothing else is taken from --load, which may be of another schedule and other data."""
        return self.checkpoint.finetune or self.logging.skip_train

    @property
    def recompute_layers(self) -> int:
        """Layers whose sub-blocks are recomputed in backward."""
        if self.training.recompute_granularity is None:
            return 0
        layers = self.training.recompute_num_layers
        return self.model.num_layers if layers is None else layers

    def to_dict(self) -> dict[str, Any]:
        """JSON-able, for the record in checkpoints and in TensorBoard."""
        sections = {name: to_plain(getattr(self, name)) for name in RunFlags.__dataclass_fields__}
        derived = ("world_size", "data_parallel_size", "global_batch_size", "accumulation_steps")
        return {**sections, **{name: getattr(self, name) for name in derived}}


def parse_run(argv: Sequence[str], mistakes: list[str]) -> RunFlags:
    """Reads the command line, appending a line to `mistakes` for each word that cannot be read."""
    words = take_megatron_flags(argv, mistakes)
    return RunFlags(*parse_command_line(SECTIONS, words, PROGRAM, DESCRIPTION, found=mistakes))


def resolve_run(flags: RunFlags, vocab_size: int, world_size: int, mistakes: list[str]) -> RunConfig:
    """Derives what the flags leave open, and appends a line to `mistakes` for each number that cannot be."""
    training, parallel = flags.training, flags.parallel
    tensor_parallel, stages = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    model = resolve_model(flags.model, vocab_size, training.seq_length, tensor_parallel, mistakes)
    _check_numbers(flags, mistakes)
    _check_schedule(flags, mistakes)
    _check_cuts(flags, model, mistakes)
    mistakes += engine_mistakes(training, flags.optimizer, parallel)
    _check_recomputation(training, model, mistakes)
    mistakes += checkpoint_mistakes(flags.checkpoint)
    mistakes += profile_mistakes(flags.profile, training.train_iters, world_size, flags.logging.tensorboard_dir)
    mistakes += reliability_mistakes(flags.reliability)
    if tensor_parallel < 1 or stages < 1 or world_size % (tensor_parallel * stages):
        mistakes.append(
            f"--tensor-model-parallel-size {tensor_parallel}"
            + (f" x --pipeline-model-parallel-size {stages}" if stages != 1 else "")
            + f" does not divide the {world_size} launched processes: "
            "launch a multiple of it, as in `deepspeed --num_gpus N`"
        )
        data_parallel = 1
    else:
        mistakes.extend(tensor_parallel_mistakes(model, tensor_parallel))
        data_parallel = world_size // (tensor_parallel * stages)
    samples_at_once = max(training.micro_batch_size, 1) * data_parallel
    global_batch_size = samples_at_once if training.global_batch_size is None else training.global_batch_size
    if global_batch_size % samples_at_once:
        mistakes.append(
            f"--global-batch-size {global_batch_size} is not a multiple of --micro-batch-size "
            f"{training.micro_batch_size} x {data_parallel} data-parallel processes = {samples_at_once}"
        )
    return RunConfig(
        model=model,
        training=training,
        optimizer=flags.optimizer,
        parallel=parallel,
        data=flags.data,
        checkpoint=flags.checkpoint,
        logging=flags.logging,
        profile=flags.profile,
        reliability=flags.reliability,
        world_size=world_size,
        data_parallel_size=data_parallel,
        global_batch_size=global_batch_size,
        accumulation_steps=max(1, global_batch_size // samples_at_once),
    )


def _check_numbers(flags: RunFlags, mistakes: list[str]) -> None:
    """What every number must be by itself."""
    training, optimizer, parallel, logging = flags.training, flags.optimizer, flags.parallel, flags.logging
    above_zero = {
        "--train-iters": training.train_iters,
        "--seq-length": training.seq_length,
        "--micro-batch-size": training.micro_batch_size,
        "--lr": optimizer.lr,
        "--adam-eps": optimizer.adam_eps,
        "--log-interval": logging.log_interval,
        "--eval-interval": logging.eval_interval,
        "--distributed-timeout-minutes": parallel.distributed_timeout_minutes,
        "--distributed-timeout-seconds-after-first-step": parallel.distributed_timeout_seconds_after_first_step,
        "--min-loss-scale": training.min_loss_scale,
        "--loss-scale-window": training.loss_scale_window,
        "--hysteresis": training.hysteresis,
    }
    optional = {
        "--save-interval": flags.checkpoint.save_interval,
        "--global-batch-size": training.global_batch_size,
        "--lr-decay-iters": optimizer.lr_decay_iters,
        "--lr-wsd-decay-iters": optimizer.lr_wsd_decay_iters,
        "--loss-scale": training.loss_scale,
    }
    above_zero |= {name: value for name, value in optional.items() if value is not None}
    mistakes.extend(f"{name} {value} must be above zero" for name, value in above_zero.items() if value <= 0)
    not_negative = {
        "--min-lr": optimizer.min_lr,
        "--lr-warmup-iters": optimizer.lr_warmup_iters,
        "--weight-decay": optimizer.weight_decay,
        "--clip-grad": optimizer.clip_grad,
        "--eval-iters": logging.eval_iters,
        "--recompute-num-layers": training.recompute_num_layers or 0,
    }
    mistakes.extend(f"{name} {value} must not be negative" for name, value in not_negative.items() if value < 0)
    if not 0 <= parallel.tp_comm_max_ctas <= 32:
        mistakes.append(f"--tp-comm-max-ctas {parallel.tp_comm_max_ctas} must lie in 0 to 32, the most that NCCL has")
    for name, beta in (("--adam-beta1", optimizer.adam_beta1), ("--adam-beta2", optimizer.adam_beta2)):
        if not 0 <= beta < 1:
            mistakes.append(f"{name} {beta} must lie in [0, 1)")


def _check_schedule(flags: RunFlags, mistakes: list[str]) -> None:
    """The learning rate's phases and heights, beside one another."""
    training, optimizer = flags.training, flags.optimizer
    if optimizer.min_lr > optimizer.lr:
        mistakes.append(f"--min-lr {optimizer.min_lr} is above --lr {optimizer.lr}")
    decay_iters = training.train_iters if optimizer.lr_decay_iters is None else optimizer.lr_decay_iters
    if (optimizer.lr_wsd_decay_iters or 0) > max(0, decay_iters - optimizer.lr_warmup_iters):
        mistakes.append(
            f"--lr-wsd-decay-iters {optimizer.lr_wsd_decay_iters} is more than the {decay_iters} decay iterations "
            f"leave after --lr-warmup-iters {optimizer.lr_warmup_iters}"
        )
    if optimizer.lr_warmup_iters and optimizer.lr_warmup_iters >= decay_iters:
        mistakes.append(
            f"--lr-warmup-iters {optimizer.lr_warmup_iters} leaves no step of the {decay_iters} decay iterations"
        )


def _check_cuts(flags: RunFlags, model: ModelConfig, mistakes: list[str]) -> None:
    """The sequence's length beside the model's, and what is cut into parts."""
    training, parallel = flags.training, flags.parallel
    if training.seq_length > model.max_position_embeddings:
        mistakes.append(
            f"--seq-length {training.seq_length} is longer than --max-position-embeddings "
            f"{model.max_position_embeddings}"
        )
    if parallel.sequence_parallel:
        if model.residual_mode == "desync":
            mistakes.append(
                "--sequence-parallel cuts one stream, and with --residual-mode desync every process has its own: "
                "leave one of them out"
            )
        tensor_parallel = max(1, parallel.tensor_model_parallel_size)
        if training.seq_length % tensor_parallel:
            mistakes.append(
                f"--seq-length {training.seq_length} cannot be cut by --sequence-parallel into "
                f"{tensor_parallel} equal parts: make it a multiple of --tensor-model-parallel-size"
            )
    if parallel.pipeline_model_parallel_size > model.num_layers > 0:
        mistakes.append(
            f"--pipeline-model-parallel-size {parallel.pipeline_model_parallel_size} is above --num-layers "
            f"{model.num_layers}: a stage holds at least one layer"
        )


def _check_recomputation(training: TrainingConfig, model: ModelConfig, mistakes: list[str]) -> None:
    """What a sub-block's pass is compiled to, and what of it is done again."""
    if training.compile_sub_blocks and training.norm_implementation == "apex":
        mistakes.append(
            "--compile-sub-blocks compiles torch's norm: leave --norm-implementation apex out, or --compile-sub-blocks"
        )
    if training.recompute_granularity == "selective":
        mistakes.append(
            "--recompute-granularity selective recomputes the score matrix, which the attention used here never "
            "keeps: leave it out, or use full"
        )
    if training.recompute_num_layers is not None and training.recompute_granularity is None:
        mistakes.append("--recompute-num-layers has no meaning without --recompute-granularity full")
    if training.recompute_num_layers is not None and training.recompute_num_layers > model.num_layers > 0:
        mistakes.append(
            f"--recompute-num-layers {training.recompute_num_layers} is above --num-layers {model.num_layers}"
        )

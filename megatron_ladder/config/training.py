"""Batches, precision, optimizer and schedule of a run."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatron_ladder.flags import flag


@dataclass(frozen=True)
class TrainingConfig:
    """Training. Batches, length, precision and recomputation."""

    train_iters: int
    """Optimizer steps of the whole run, earlier runs that it resumes included."""
    seq_length: int = 2048
    """Tokens of a sample."""
    micro_batch_size: int = 1
    """Samples that a process computes at once."""
    global_batch_size: int | None = None
    """Samples of an optimizer step; micro batch x data-parallel processes if not given. It must be a multiple of
    that, the factor being the accumulation steps."""
    bf16: bool = False
    """Compute in bfloat16 with fp32 master weights and fp32 gradient accumulation; without it, all is fp32."""
    fp16: bool = False
    """Compute in float16 on CUDA, otherwise as with --bf16, the loss multiplied so that small gradients survive. A
    step whose gradient overflows is left out, and the scale is lowered."""
    loss_scale: float | None = None
    """What --fp16 multiplies the loss by in every step, an overflow ending the run; found and adapted while training
    if not given."""
    initial_loss_scale: float = 65536.0
    """First loss scale of --fp16, a power of two."""
    min_loss_scale: float = 1.0
    """Lowest loss scale of --fp16; an overflow at it ends the run."""
    loss_scale_window: int = 1000
    """Steps without overflow after which --fp16 doubles the loss scale."""
    hysteresis: int = 2
    """Overflows that --fp16 bears before it halves the loss scale."""
    seed: int = 1234
    """Decides the initial weights and the order of samples."""
    recompute_granularity: Literal["full", "selective"] | None = None
    """full: keep only the input of each sub-block and compute it again in backward. selective, which in Megatron
    recomputes the score matrix, is not needed: the attention used here keeps none."""
    recompute_num_layers: int | None = None
    """Layers whose sub-blocks are recomputed, from the first; all if not given."""
    norm_implementation: Literal["auto", "torch", "apex"] = "auto"
    """RMSNorm by torch or by NVIDIA apex; auto takes apex on CUDA if it is there."""
    compile_sub_blocks: bool = False
    """torch.compile for norms, SwiGLU and rotary embedding, between the products of each sub-block; all-reduces are
    in flight as without it. Needs a C++ compiler at run time."""
    deterministic_mode: bool = False
    """On CUDA, use deterministic kernels only."""


@dataclass(frozen=True)
class OptimizerConfig:
    """Optimizer. AdamW and its learning rate."""

    lr: float
    """Highest learning rate."""
    min_lr: float = 0.0
    """Lowest learning rate after decay."""
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = "cosine"
    """Course of the learning rate after warm-up. WSD (warm-up, stable, decay) stays at --lr until its last
    --lr-wsd-decay-iters."""
    lr_warmup_iters: int = 0
    """Steps over which the learning rate rises linearly from 0."""
    lr_decay_iters: int | None = None
    """Step at which the decay ends; --train-iters if not given."""
    lr_wsd_decay_iters: int | None = None
    """Steps of WSD's decay; a tenth of the decay iterations if not given."""
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = "exponential"
    """Course of WSD's decay."""
    weight_decay: float = 0.1
    """Decoupled weight decay of matrices; norms and biases have none."""
    clip_grad: float = 1.0
    """Highest norm of the whole gradient; 0 does not clip."""
    adam_beta1: float = 0.9
    """Decay of the mean of gradients."""
    adam_beta2: float = 0.95
    """Decay of the mean of squared gradients."""
    adam_eps: float = 1e-8
    """Added to the root of the mean square."""
    optimizer_implementation: Literal["auto", "torch", "apex"] = "auto"
    """AdamW by torch or by NVIDIA apex; auto takes apex on CUDA if it is there."""


@dataclass(frozen=True)
class CheckpointConfig:
    """Checkpoints. Where the state of the run is kept."""

    save: Path | None = None
    """Directory to save checkpoints in, every --save-interval steps and at the end."""
    load: Path | None = None
    """Directory (or one checkpoint in it) to continue from; starts anew, and says so, if it has no checkpoint."""
    save_interval: int | None = None
    """Steps between checkpoints; only at the end if not given."""
    async_save: bool = False
    """Copy the state to host memory and write it while training goes on, one checkpoint at a time. Takes host memory
    for the state of the processes of a host."""
    keep_last_n_checkpoints: int | None = None
    """Remove older checkpoints than so many; all are kept if neither this nor --save-retain-interval is given."""
    save_retain_interval: int | None = None
    """Keep the checkpoints of iterations that are multiples of it, besides the last one or
    --keep-last-n-checkpoints, and remove the others."""
    checksum: Literal["xxh3_128", "sha256"] = "xxh3_128"
    """Checksum of the files of checkpoints, computed while they are written."""
    exit_on_missing_checkpoint: bool = False
    """End with an error if --load has no checkpoint, instead of starting anew."""
    finetune: bool = False
    """Take only the weights from --load: start at iteration 0, with a new optimizer, other data if given."""
    load_optim: bool = True
    """Do not load the optimizer's moments; AdamW begins anew, at the checkpoint's iteration."""
    load_rng: bool = True
    """Do not load the states of random generators."""
    override_opt_param_scheduler: bool = flag(False, aliases=("--override-opt_param-scheduler",))
    """On --load, take learning rate, its schedule and the optimizer's numbers from the command line even if the
    checkpoint was trained with others, which is refused otherwise."""
    use_checkpoint_opt_param_scheduler: bool = flag(False, aliases=("--use-checkpoint-opt_param-scheduler",))
    """On --load, take them from the checkpoint, whatever the command line says."""


def checkpoint_mistakes(checkpoint: CheckpointConfig) -> list[str]:
    """A line for each number that cannot be, and for flags that contradict each other."""
    numbers = {
        "--keep-last-n-checkpoints": checkpoint.keep_last_n_checkpoints,
        "--save-retain-interval": checkpoint.save_retain_interval,
    }
    mistakes = [f"{name} {n} must be above zero" for name, n in numbers.items() if n is not None and n <= 0]
    if checkpoint.override_opt_param_scheduler and checkpoint.use_checkpoint_opt_param_scheduler:
        mistakes.append(
            "--override-opt-param-scheduler takes the schedule from the command line, and "
            "--use-checkpoint-opt-param-scheduler from the checkpoint: give one of them"
        )
    if checkpoint.finetune and checkpoint.load is None:
        mistakes.append("--finetune takes the weights of a checkpoint: give --load as well")
    return mistakes


@dataclass(frozen=True)
class LoggingConfig:
    """Logging and evaluation."""

    log_interval: int = 10
    """Steps between lines on the console and in TensorBoard."""
    eval_interval: int = 1000
    """Steps between evaluations on the validation split."""
    eval_iters: int = 100
    """Global batches of one evaluation; 0 does not evaluate."""
    skip_train: bool = False
    """Take no step and save nothing: evaluate the model of --load on the validation data and end. --save is where
    the record of it goes."""
    tensorboard_dir: Path | None = None
    """Directory for TensorBoard."""

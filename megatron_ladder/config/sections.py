"""Flags of a run, except those of its model: a dataclass for each section of the help."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from megatron_ladder.blueprint.optimizers import OPTIMIZERS, FlagOptimizer, optimizer_kind
from megatron_ladder.blueprint.wiring import WIRINGS
from megatron_ladder.errors import Problem, counted
from megatron_ladder.flags import Check, flag, rule
from megatron_ladder.tokenizers.kinds import TokenizerType

_LAUNCH = "launch a multiple of it, as in `deepspeed --num_gpus N`"


def _streams_differ(cause: str) -> str:
    """Return why a stream cannot be sharded, with the field that makes ranks read different streams."""
    return (
        f"{{sequence_parallel}} shards one stream that all ranks read, but with {{{cause}}} each rank reads another one"
    )


def _decay_checks(end: str, is_end: Callable[[int | None], bool]) -> tuple[Check, ...]:
    """Return the checks of a schedule whose decay ends at the value of a field."""
    return (
        rule(
            lambda decay_iters, end_iters, wsd_iters, warmup: (
                is_end(decay_iters) and (wsd_iters or 0) > max(0, end_iters - warmup)
            ),
            f"{{lr_wsd_decay_iters}} is more than {{{end}}} leaves after {{lr_warmup_iters}}",
            reads=("lr_decay_iters", end, "lr_wsd_decay_iters", "lr_warmup_iters"),
        ),
        rule(
            lambda decay_iters, end_iters, style, warmup: (
                is_end(decay_iters) and style != "constant" and warmup and warmup >= end_iters
            ),
            f"{{lr_warmup_iters}} leaves no step of {{{end}}} for the decay",
            reads=("lr_decay_iters", end, "lr_decay_style", "lr_warmup_iters"),
        ),
    )


def _divides_either_way(a: int, b: int) -> bool:
    return a % b == 0 or b % a == 0


def _ranks_of_an_expert(expert_parallel: int, sharding: str, tensor_parallel: int) -> int:
    """Return how many ranks divide the width of an expert."""
    return 1 if expert_parallel > 1 or sharding == "experts" else tensor_parallel


def _virtual_stage_problems(stages: int, virtual: int | None, layers: int) -> Iterator[Problem]:
    if virtual is None or stages > layers:
        return
    ranges = -(-layers // (stages * virtual))
    lowest = -(-layers // (stages * (layers // stages)))
    highest = (layers - 1) // stages
    if lowest <= virtual <= highest:
        return
    fix = f"use {' to '.join(map(str, sorted({lowest, highest})))}" if lowest <= highest else "leave it out"
    reason = f"{{}}: {stages} stages x {ranges} ranges are more than {{num_layers}}"
    if ranges == 1:
        most = counted(-(-layers // stages), "layer")
        reason = f"{{}}: each of {stages} stages has at most {most}, so only one range"
    yield Problem({"num_layers_per_virtual_pipeline_stage": virtual, "num_layers": layers}, reason, fix)


@dataclass(frozen=True)
class TrainingConfig:
    """Training. Batches, length, precision and recomputation."""

    train_iters: int = flag(minimum=1)
    """Optimizer steps of the whole run, including the steps of earlier runs that it resumes."""
    config: tuple[Path, ...] = flag((), repeats=True, on_resume="ignore")
    """YAML files with values of flags, as in `micro_batch_size: 4` and `bf16: true`. Later files override
    earlier ones, and the command line overrides all."""
    seq_length: int = flag(2048, minimum=1, on_resume="keep")
    """Tokens per sample."""
    micro_batch_size: int = flag(1, minimum=1)
    """Samples per micro-batch on each data-parallel rank."""
    global_batch_size: int | None = flag(None, minimum=1, on_resume="report")
    """Samples per optimizer step: a multiple of micro-batch size x data-parallel size, which is the default. The
    quotient is the number of accumulation steps."""
    bf16: bool = flag(False, excludes="zero_stage 0", on_resume="report")
    """Compute in bfloat16, with fp32 master weights and fp32 gradient accumulation. Without it, everything is fp32."""
    z_loss_coeff: float = flag(0.0, minimum=0, on_resume="report")
    """Coefficient of the z-loss, the squared log of the softmax's normaliser, which keeps logits from drifting; PaLM
    uses 1e-4. It is reported separately."""
    moe_aux_loss_coeff: float = flag(0.0, minimum=0, requires="num_experts", on_resume="report")
    """Coefficient of the load balancing loss of each layer with experts; 0.01 to 0.001 are usual."""
    moe_router_load_balancing_type: Literal["seq_aux_loss", "aux_loss"] = flag(
        "seq_aux_loss", requires="moe_aux_loss_coeff", on_resume="report"
    )
    """What the load balancing loss balances: each sequence, or each micro-batch, on whose size it then depends."""
    moe_z_loss_coeff: float = flag(0.0, minimum=0, requires="num_experts", on_resume="report")
    """Coefficient of the squared log of the normaliser of the router's softmax; ST-MoE uses 1e-3."""
    moe_router_bias_update_rate: float = flag(
        0.001, minimum=0, requires="moe_router_enable_expert_bias", on_resume="report"
    )
    """How far each step moves an expert's bias: up if the global batch chose it less often than the mean, else down."""
    mtp_depths: int = flag(1, minimum=1, requires="mtp_num_layers", on_resume="report")
    """How many tokens the drafting head learns to draft in a row, each time after the first from its own output; as in
    Megatron with --mtp-use-repeated-layer. Their losses are averaged. Each depth takes the time of a layer and of the
    output head."""
    mtp_loss_scaling_factor: float = flag(0.1, minimum=0, requires="mtp_num_layers", on_resume="report")
    """Factor of the mean loss of the drafting head in the gradient. The loss is reported separately, without it."""
    mtp_detach_heads: bool = flag(False, requires="mtp_num_layers", on_resume="report")
    """The loss of the drafting head trains only the head, not the embedding, the output head and the other layers."""
    distill_from: Path | None = flag(None, excludes="pipeline_model_parallel_size", on_resume="report")
    """Checkpoint, directory of checkpoints, or Hugging Face directory of a frozen teacher, whose distribution of the
    next token the model learns. It has the same vocabulary, any sizes and any wiring."""
    distill_weight: float = flag(0.9, minimum=0, maximum=1, requires="distill_from", on_resume="report")
    """Weight W of the distillation loss; the cross entropy has 1 - W. 1 learns from the teacher alone, as Minitron
    (arXiv 2407.14679); 0 leaves the teacher of a resumed run out."""
    distill_temperature: float = flag(1.0, above=0, requires="distill_from", on_resume="report")
    """Temperature T that divides the logits of both models, usually 1. The loss of a token is T^2 KL(teacher ||
    student), reported separately."""
    seed: int = flag(1234, minimum=0, maximum=2**32 - 1, on_resume="keep")
    """Random seed of the initial weights and of the order of samples."""
    recompute_granularity: Literal["full", "selective"] | None = None
    """full: store only the input of each sub-block, and recompute the sub-block in the backward pass. selective: the
    default, because the score matrix of attention is never stored."""
    recompute_num_layers: int | None = flag(None, minimum=0, requires="recompute_granularity full")
    """Recompute only the first N layers of the model; all layers by default. Megatron counts those of each stage."""
    norm_implementation: Literal["auto", "torch", "apex"] = "auto"
    """Implementation of RMSNorm where it is not compiled. auto: apex on CUDA if it is installed."""
    linear_attention_implementation: Literal["torch", "fla"] = flag("torch", requires="experimental_attention_variant")
    """Implementation of gated DeltaNet's rule in training. fla: the kernels of flash-linear-attention, on CUDA and in
    bf16."""
    compile_sub_blocks: Literal["auto", "true", "false"] = "auto"
    """Use torch.compile for norms, SwiGLU and rotary embedding; all-reduces overlap as without it. auto: true on CUDA
    if a compiler and Triton are installed, unless --norm-implementation apex is given. Without a value: true."""
    cuda_graph: Literal["auto", "true", "false"] = flag(
        "auto",
        excludes=("zero_stage 2", "zero_stage 3", "offload_optimizer", "reset_attention_mask", "profile"),
    )
    """Capture forward and backward of a micro-batch as CUDA graphs and replay them, so that the host does not launch
    each kernel. auto: on CUDA if nothing excludes it, and five steps with graphs are faster than five without. Without
    a value: true."""
    deterministic_mode: bool = False
    """Use only deterministic CUDA kernels and NCCL algorithms."""

    checks = (
        rule(
            lambda seq_length, max_position_embeddings: seq_length > max_position_embeddings,
            "{seq_length} is longer than {max_position_embeddings}",
        ),
        rule(
            lambda recompute_num_layers, num_layers: (recompute_num_layers or 0) > num_layers,
            "{recompute_num_layers} is above {num_layers}",
        ),
        rule(
            lambda mtp_num_layers, mtp_depths, seq_length: mtp_num_layers and mtp_depths >= seq_length,
            "{mtp_depths} is not below {seq_length}: no row has a target token for the last depth",
        ),
        rule(
            lambda linear_attention_implementation, bf16: linear_attention_implementation == "fla" and not bf16,
            "{linear_attention_implementation} without {bf16}: its kernels do not multiply in fp32",
        ),
        rule(
            lambda compile_sub_blocks, norm_implementation: (
                (compile_sub_blocks, norm_implementation) == ("true", "apex")
            ),
            "{compile_sub_blocks!f} compiles torch's norm",
            "leave out {norm_implementation} apex or {compile_sub_blocks}",
        ),
        rule(
            lambda cuda_graph, expert_model_parallel_size, moe_expert_capacity: (
                cuda_graph == "true" and expert_model_parallel_size > 1 and moe_expert_capacity is None
            ),
            "{cuda_graph} with {expert_model_parallel_size}: the host reads how many tokens arrive",
            "add {moe_expert_capacity}, or leave it out",
        ),
    )


@dataclass(frozen=True)
class OptimizerConfig:
    """Optimizer. The update of the weights, and the learning-rate schedule."""

    lr: float = flag(above=0)
    """Peak learning rate."""
    optimizer: FlagOptimizer = flag("adamw", details=" ".join(f"{one.name}: {one.description}" for one in OPTIMIZERS))
    """Optimizer."""
    min_lr: float = flag(0.0, minimum=0, excludes="lr_decay_style constant")
    """Learning rate at the end of the decay."""
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = "cosine"
    """Schedule after the warm-up. WSD (warm-up, stable, decay) keeps --lr constant until the last --lr-wsd-decay-iters
    steps."""
    lr_warmup_iters: int = flag(0, minimum=0)
    """Steps over which the learning rate rises linearly from 0."""
    lr_decay_iters: int | None = flag(None, minimum=1, excludes="lr_decay_style constant")
    """Step at which the decay ends; --train-iters by default."""
    lr_wsd_decay_iters: int | None = flag(None, minimum=1, requires="lr_decay_style WSD")
    """Steps of the WSD decay; a tenth of the decay iterations by default."""
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = flag(
        "exponential", requires="lr_decay_style WSD"
    )
    """Shape of the WSD decay."""
    weight_decay: float = flag(0.1, minimum=0)
    """Decoupled weight decay of matrices. Norms and biases are not decayed."""
    clip_grad: float = flag(1.0, minimum=0)
    """Maximum norm of the gradient over all parameters; 0 disables clipping."""
    adam_beta1: float = flag(0.9, minimum=0, below=1)
    """Decay rate of the first moment."""
    adam_beta2: float = flag(0.95, minimum=0, below=1)
    """Decay rate of the second moment."""
    adam_eps: float = flag(1e-8, above=0)
    """Term added to the denominator of the update."""
    muon_momentum: float = flag(0.95, minimum=0, below=1, requires="optimizer muon")
    """Decay rate of Muon's momentum."""
    muon_nesterov: bool = flag(True, requires="optimizer muon")
    """Add Nesterov's step ahead to the momentum before it is orthogonalised."""
    muon_ns_steps: int = flag(5, aliases=("--muon-num-ns-steps",), minimum=1, maximum=99, requires="optimizer muon")
    """Newton-Schulz iterations that orthogonalise a matrix."""
    muon_scale_mode: Literal["match_rms_adamw", "original"] = flag("match_rms_adamw", requires="optimizer muon")
    """Scale of the update of a matrix. match_rms_adamw: 0.2 sqrt(max(rows, columns)), for the learning rates of AdamW;
    original: sqrt(max(1, rows / columns)), for rates around 0.02."""
    optimizer_implementation: Literal["auto", "torch", "apex"] = "auto"
    """Implementation of AdamW. auto: apex on CUDA if it is installed."""

    checks = (
        rule(lambda min_lr, lr: min_lr > lr, "{min_lr} is above {lr}"),
        *_decay_checks("lr_decay_iters", lambda decay_iters: decay_iters is not None),
        *_decay_checks("train_iters", lambda decay_iters: decay_iters is None),
        rule(
            lambda optimizer, offload_optimizer: (
                optimizer_kind(optimizer).needs_whole_gradients and offload_optimizer != "none"
            ),
            "{optimizer} needs whole gradients on the device, not {offload_optimizer}",
            "use {zero_stage} 0, 1 or 2",
        ),
        rule(
            lambda optimizer, offload_optimizer, zero_stage: (
                optimizer_kind(optimizer).needs_whole_gradients and (offload_optimizer, zero_stage) == ("none", "3")
            ),
            "{optimizer} needs whole gradients on the device, not {zero_stage}",
            "use {zero_stage} 0, 1 or 2",
        ),
        rule(
            lambda optimizer, optimizer_implementation: (
                optimizer_implementation == "apex" and not optimizer_kind(optimizer).has_apex
            ),
            "{optimizer} has no {optimizer_implementation}",
            "leave it out",
        ),
        rule(
            lambda optimizer_implementation, optimizer, offload_optimizer: (
                (optimizer_implementation == "apex" and optimizer_kind(optimizer).has_apex)
                and offload_optimizer != "none"
            ),
            "{optimizer_implementation} needs a GPU, not {offload_optimizer}",
            "use torch",
        ),
        rule(
            # ZeRO-3 updates its sub-groups one by one, and apex counts each update of a group as a step.
            lambda optimizer_implementation, optimizer, offload_optimizer, zero_stage: (
                optimizer_kind(optimizer).has_apex
                and (optimizer_implementation, offload_optimizer, zero_stage) == ("apex", "none", "3")
            ),
            "{optimizer_implementation} miscounts steps with {zero_stage}",
            "use torch",
        ),
    )

    def completed(self, train_iters: int) -> "OptimizerConfig":
        """Return the same schedule with all parts that its style uses."""
        decay_iters = self.lr_decay_iters
        wsd_decay_iters = self.lr_wsd_decay_iters
        if decay_iters is None and self.lr_decay_style != "constant":
            decay_iters = train_iters
        if wsd_decay_iters is None and decay_iters is not None and self.lr_decay_style == "WSD":
            wsd_decay_iters = max(1, decay_iters // 10)
        return replace(self, lr_decay_iters=decay_iters, lr_wsd_decay_iters=wsd_decay_iters)


@dataclass(frozen=True)
class ParallelConfig:
    """Processes. How the model, the batch and the optimizer state are distributed."""

    tensor_model_parallel_size: int = flag(1, aliases=("--tp",), minimum=1)
    """Tensor-parallel ranks; each holds a shard of every layer."""
    pipeline_model_parallel_size: int = flag(1, aliases=("--pp",), minimum=1)
    """Pipeline stages; each holds a contiguous range of layers. Use several times as many accumulation steps as
    stages."""
    data_parallel_size: int | None = flag(None, aliases=("--dp",), minimum=1)
    """Data-parallel ranks, to check the number of processes: processes / tensor-parallel ranks / stages."""
    pipeline_partition: Literal["uniform", "parameters"] = flag("uniform", requires="pipeline_model_parallel_size")
    """How layers are assigned to stages. uniform: equal numbers, or one more in the first stages. parameters: minimise
    the parameters of the largest stage, with embedding and output head."""
    num_layers_per_virtual_pipeline_stage: int | None = flag(
        None, minimum=1, requires="pipeline_model_parallel_size", excludes="pipeline_partition parameters"
    )
    """Cut a stage into v ranges of at most this many layers, which run alternately (interleaved 1F1B). Divides the
    idle time by v, and multiplies the sends by v. Gains little with fewer accumulation steps than stages."""
    zero_stage: Literal["0", "1", "2", "3"] = "1"
    """State that ZeRO shards over the data-parallel ranks. 0: nothing; 1: optimizer state; 2: also gradients; 3: also
    weights. --bf16 needs at least 1; pipeline parallelism allows at most 1."""
    offload_optimizer: Literal["none", "cpu"] = flag("none", excludes=("zero_stage 0", "pipeline_model_parallel_size"))
    """cpu: keep optimizer state and fp32 master weights in host memory, and update them there."""
    expert_sharding: Literal["width", "experts"] = flag("width", requires="num_experts")
    """What a tensor-parallel rank holds of a layer's experts: a part of the width of each, or whole experts."""
    expert_model_parallel_size: int = flag(
        1,
        aliases=("--ep",),
        minimum=1,
        requires="num_experts",
        excludes=("expert_sharding experts", "offload_optimizer"),
    )
    """Ranks of a pipeline stage, tensor- and data-parallel, that divide a layer's experts, whole ones, and exchange
    tokens. One of it and the tensor-parallel size divides the other. With 1, only tensor-parallel ranks divide experts.
    ZeRO then shards the state of an expert over the ranks that hold it."""
    expert_tensor_parallel_size: int | None = flag(None, minimum=1, requires="num_experts")
    """Ranks that divide the width of an expert, to check it: 1 with --expert-model-parallel-size or --expert-sharding
    experts, otherwise the tensor-parallel size, which Megatron's default always is."""
    moe_expert_capacity: int | None = flag(None, minimum=1, requires="expert_model_parallel_size")
    """Rows that each rank sends to each expert in a training pass, with padding, so that steps can be captured in CUDA
    graphs. A step that needs more is repeated with a larger capacity: no token is dropped. By default, ranks send as
    many rows as they have, and the host reads their numbers."""
    tp_overlap: bool = True
    """Leave tensor-parallel all-reduces, and the all-to-alls of experts, in flight under later sub-blocks. Without this
    overlap, each is waited for immediately after its launch; for comparison, as results are the same."""
    sequence_parallel: bool = False
    """Shard the residual stream along the sequence over the tensor-parallel ranks, which saves activation memory. Each
    all-reduce becomes a reduce-scatter and an all-gather. Not with --residual-mode desync."""
    tp_comm_max_ctas: int = flag(16, minimum=0, maximum=32)
    """Maximum number of multiprocessors that a tensor-, data- or expert-parallel NCCL collective, or a message between
    pipeline stages, takes from the computation it overlaps with. 0 leaves the choice to NCCL: up to 32, which costs
    large collectives more than half of the time that the overlap saves."""
    distributed_timeout_minutes: float = flag(10.0, above=0)
    """Minutes to wait for other ranks at start-up, and in collectives until the first step is done, in saves and in
    evaluations."""
    distributed_timeout_seconds_after_first_step: float = flag(120.0, above=0)
    """Seconds to wait in a collective after the first step, plus the longest step so far; at most
    --distributed-timeout-minutes. Shortly before, ranks without progress print their stacks and what they wait for."""
    deepspeed: bool = False
    """Accepted for compatibility with existing scripts."""
    deepspeed_config: Path | None = flag(None, aliases=("--deepspeed_config",))
    """A DeepSpeed JSON file, also one for transformers. Values that the command line determines may be omitted or
    "auto"; contradictions are errors. Without DeepSpeed, only reduce_bucket_size has an effect."""
    local_rank: int | None = flag(None, aliases=("--local_rank",))
    """Set by launchers and ignored: the environment variable LOCAL_RANK is used."""

    checks = (
        rule(
            lambda sequence_parallel, residual_mode, lanes: (
                sequence_parallel and not lanes and WIRINGS[residual_mode].stream == "per rank"
            ),
            _streams_differ("residual_mode"),
            "leave one out",
        ),
        rule(
            lambda sequence_parallel, lanes: sequence_parallel and lanes,
            _streams_differ("lanes"),
            "leave one out",
        ),
        rule(
            lambda sequence_parallel, seq_length, tensor_model_parallel_size: (
                sequence_parallel and seq_length % tensor_model_parallel_size
            ),
            "{seq_length} cannot be cut by {sequence_parallel} into {tensor_model_parallel_size!v} equal parts",
            "make it a multiple of {tensor_model_parallel_size}",
        ),
        rule(
            lambda pipeline_model_parallel_size, num_layers: pipeline_model_parallel_size > num_layers,
            "{pipeline_model_parallel_size} is above {num_layers}: each stage needs at least one layer",
        ),
        Check(
            _virtual_stage_problems,
            ("pipeline_model_parallel_size", "num_layers_per_virtual_pipeline_stage", "num_layers"),
        ),
        rule(
            lambda zero_stage, pipeline_model_parallel_size: (
                zero_stage in ("2", "3") and pipeline_model_parallel_size > 1
            ),
            "{zero_stage} with {pipeline_model_parallel_size}: a stage needs whole gradients over all its "
            "micro-batches, so use {zero_stage} 0 or 1",
        ),
        rule(
            lambda expert_model_parallel_size, zero_stage: expert_model_parallel_size > 1 and zero_stage in ("2", "3"),
            "{zero_stage} with {expert_model_parallel_size}: DeepSpeed would sum the gradients of experts over ranks "
            "that hold others",
            "use {zero_stage} 0 or 1",
        ),
        rule(
            lambda expert_model_parallel_size, tensor_model_parallel_size: (
                not _divides_either_way(expert_model_parallel_size, tensor_model_parallel_size)
            ),
            "{expert_model_parallel_size} and {tensor_model_parallel_size}: one must divide the other",
        ),
        rule(
            lambda expert_model_parallel_size, tensor_model_parallel_size, data_parallel_ranks: (
                _divides_either_way(expert_model_parallel_size, tensor_model_parallel_size)
                and tensor_model_parallel_size * data_parallel_ranks % expert_model_parallel_size
            ),
            "{expert_model_parallel_size} does not divide the {tensor_model_parallel_size} x {data_parallel_ranks!v} "
            "data-parallel ranks of a stage",
        ),
        rule(
            lambda expert_model_parallel_size, tensor_model_parallel_size, sequence_parallel: (
                expert_model_parallel_size > 1 and tensor_model_parallel_size > 1 and not sequence_parallel
            ),
            "{expert_model_parallel_size} with {tensor_model_parallel_size}: each rank sends its own tokens, so the "
            "sequence must be sharded",
            "add {sequence_parallel}",
        ),
        rule(
            lambda given, *layout: given not in (None, _ranks_of_an_expert(*layout)),
            "{expert_tensor_parallel_size} with {expert_model_parallel_size}, {expert_sharding} and "
            "{tensor_model_parallel_size}",
            "leave it out: a rank holds whole experts with {expert_model_parallel_size} or {expert_sharding} experts, "
            "and otherwise a part of the width of each",
            reads=(
                *("expert_tensor_parallel_size", "expert_model_parallel_size"),
                *("expert_sharding", "tensor_model_parallel_size"),
            ),
        ),
        rule(
            lambda world_size, tensor_model_parallel_size, pipeline_model_parallel_size: (
                pipeline_model_parallel_size == 1 and world_size % tensor_model_parallel_size
            ),
            "{tensor_model_parallel_size} does not divide the {world_size!v} launched processes",
            _LAUNCH,
        ),
        rule(
            lambda world_size, tensor_model_parallel_size, pipeline_model_parallel_size: (
                pipeline_model_parallel_size > 1
                and world_size % (tensor_model_parallel_size * pipeline_model_parallel_size)
            ),
            "{tensor_model_parallel_size} x {pipeline_model_parallel_size} does not divide the {world_size!v} launched "
            "processes",
            _LAUNCH,
        ),
        rule(
            lambda data_parallel_size, data_parallel_ranks, world_size: (
                data_parallel_size not in (None, data_parallel_ranks)
            ),
            "{data_parallel_size}: {world_size!v} launched processes with this layout have {data_parallel_ranks!v}",
            "leave it out, or launch another number",
        ),
        rule(
            lambda global_batch_size, samples_at_once, *_: (global_batch_size or samples_at_once) % samples_at_once,
            "{global_batch_size} is not a multiple of {micro_batch_size} x {data_parallel_ranks!v} data-parallel "
            "processes = {samples_at_once!v} ({world_size!v} processes / {tensor_model_parallel_size} / "
            "{pipeline_model_parallel_size})",
            reads=(
                *("global_batch_size", "samples_at_once", "micro_batch_size", "data_parallel_ranks", "world_size"),
                *("tensor_model_parallel_size", "pipeline_model_parallel_size"),
            ),
        ),
    )


@dataclass(frozen=True)
class DataConfig:
    """Data. Tokenized text and its tokenizer."""

    data_path: tuple[Path, ...] = flag((), on_resume="data")
    """Prefix of an indexed data set (its .bin and .idx files), which --split divides into training, validation and test
    data. Several data sets are blended: PREFIX1 PREFIX2 by their sizes, WEIGHT1 PREFIX1 WEIGHT2 PREFIX2 by weights."""
    train_data_path: tuple[Path, ...] = flag((), on_resume="data")
    """Prefix or blend of the training data, if it is a separate data set."""
    valid_data_path: tuple[Path, ...] = flag((), on_resume="data")
    """Prefix or blend of the validation data, if it is a separate data set. Several sets have names: NAME1=PREFIX1
    NAME2=WEIGHT2 PREFIX2 WEIGHT3 PREFIX3. Give a path that itself begins with a word and = as an absolute path."""
    split: str = flag("969,30,1", excludes=("train_data_path", "valid_data_path", "streaming"))
    """Proportions of training, validation and test documents in --data-path. The run leaves test documents out."""
    allow_data_change: bool = flag(False, requires="load", on_resume="ignore")
    """Resume a checkpoint with data, or an order of data, that differs from its earlier training."""
    tokenizer_type: TokenizerType | None = flag(None, on_resume="ignore")
    """Type of the tokenizer: Hugging Face (two names), SentencePiece (three names), bytes, or numbers that already are
    token ids."""
    tokenizer_model: Path | None = flag(None, on_resume="ignore")
    """File or directory of the tokenizer. It determines the vocabulary, and every checkpoint contains a copy."""
    eod_token: str | None = flag(None, requires="tokenizer_model", on_resume="ignore")
    """End-of-document token of a tokenizer.json, if the files next to it name none or another."""
    reset_position_ids: bool = flag(False, on_resume="report")
    """Restart rotary positions at 0 after each end-of-document token."""
    reset_attention_mask: bool = flag(False, on_resume="report")
    """Restrict attention to the token's own document; documents end with the end-of-document token."""
    eod_mask_loss: bool = flag(False, on_resume="report")
    """Exclude the label after each end-of-document token from the loss."""
    loss_on: Literal["all", "assistant"] | None = flag(None, on_resume="report")
    """Tokens of conversations that are labels: all, or those of the assistant, which is the default if the data marks
    them."""
    streaming: tuple[str, ...] = flag(
        (), excludes=("data_path", "train_data_path", "loss_on assistant"), on_resume="data"
    )
    """Text that is tokenized during training, instead of --data-path: JSON lines (also .gz and .zst), Parquet or plain
    text files, glob patterns, or hf://NAME[:CONFIG][@SPLIT]."""
    streaming_key: str = flag("text", requires="streaming")
    """Key of JSON objects, or column of tables, that --streaming reads."""
    streaming_shuffle_buffer: int = flag(10000, minimum=1, requires="streaming")
    """Documents in the shuffle buffers of all streams together."""
    streaming_shards: int | None = flag(None, minimum=1, requires="streaming")
    """Streams into which --streaming divides its input, a multiple of the data-parallel size; by default 64, or fewer
    for small inputs."""
    streaming_skip_bad_lines: int = flag(0, minimum=0, requires="streaming")
    """Malformed, non-UTF-8 or oversized lines of --streaming to skip and list; one more ends the run."""
    streaming_parse_special_tokens: bool = flag(False, requires="streaming")
    """Convert the spelling of a special token in the texts of --streaming to that token; by default it stays text."""


@dataclass(frozen=True)
class CheckpointConfig:
    """Checkpoints. Where the state of the run is saved and loaded."""

    save: Path | None = flag(None, on_resume="ignore")
    """Directory for checkpoints."""
    load: Path | None = flag(None, on_resume="ignore")
    """Directory of checkpoints, or one checkpoint, to resume from. It determines sizes and wiring of the model. Without
    a checkpoint there, the run reports that and starts from scratch."""
    overwrite_checkpoints: bool = flag(False, requires="save", on_resume="ignore")
    """Start a new run in a --save directory that holds checkpoints of another run, which is otherwise an error.
    `latest` names the new ones. The old ones stay, unless flags that remove checkpoints count them: those of iterations
    that the new run has passed."""
    save_interval: int | None = flag(None, minimum=1, requires="save")
    """Steps between checkpoints; by default only the end of the run is saved."""
    async_save: bool = flag(False, requires="save")
    """Copy the state to host memory, which must hold that of all ranks of a host, and write it while training
    continues."""
    keep_last_n_checkpoints: int | None = flag(None, minimum=1, requires="save")
    """Keep only the newest N checkpoints. Without this flag and --save-retain-interval, all are kept."""
    save_retain_interval: int | None = flag(None, minimum=1, requires="save")
    """Keep checkpoints whose iteration is a multiple of N and those of --keep-last-n-checkpoints, or else the newest
    one; remove all others."""
    exit_on_missing_checkpoint: bool = flag(False, requires="load", on_resume="ignore")
    """Exit with an error if --load has no checkpoint, instead of starting from scratch."""
    finetune: bool = flag(False, requires="load", on_resume="ignore")
    """Load only the weights: start at iteration 0 with a new optimizer, and with other data if given."""
    load_optim: bool = flag(True, requires="load", on_resume="ignore")
    """Load the optimizer state. Without it, the optimizer starts from zero moments at the checkpoint's iteration."""
    load_rng: bool = flag(True, requires="load", on_resume="ignore")
    """Load the states of the random number generators."""
    override_opt_param_scheduler: bool = flag(
        False,
        aliases=("--override-opt_param-scheduler",),
        requires="load",
        excludes="use_checkpoint_opt_param_scheduler",
        on_resume="ignore",
    )
    """Use the given values of the learning rate, its schedule and the optimizer's hyperparameters where they differ
    from the checkpoint's, which is otherwise an error. The decay ends at --lr-decay-iters, or with the run."""
    use_checkpoint_opt_param_scheduler: bool = flag(
        False, aliases=("--use-checkpoint-opt_param-scheduler",), requires="load", on_resume="ignore"
    )
    """Take the learning rate, its schedule and the optimizer's hyperparameters from the checkpoint, and ignore those of
    the command line."""


@dataclass(frozen=True)
class LoggingConfig:
    """Logging and evaluation."""

    log_interval: int = flag(10, minimum=1)
    """Steps between log lines on the console and points in --tensorboard-dir."""
    eval_interval: int = flag(1000, minimum=1)
    """Steps between evaluations."""
    eval_iters: int = flag(100, minimum=0)
    """Global batches per validation set; 0 disables the evaluation of losses."""
    sample_prompts: Path | None = None
    """File of prompts that each evaluation continues greedily and logs: one per line, or JSON lines (.jsonl) with the
    key prompt."""
    sample_tokens: int = flag(64, minimum=1, requires="sample_prompts")
    """New tokens for each of --sample-prompts. Each costs a forward pass over --seq-length positions."""
    skip_train: bool = flag(False, requires="load", on_resume="ignore")
    """Evaluate the model from --load, record the results in --save, and exit."""
    tensorboard_dir: Path | None = None
    """Directory for TensorBoard event files."""
    wandb_project: str | None = flag(None, requires="tensorboard_dir")
    """Project of Weights & Biases to which the package wandb sends the curves of --tensorboard-dir. Its environment
    variables apply, such as WANDB_MODE=offline, and WANDB_RUN_ID to continue curves."""
    wandb_exp_name: str | None = flag(None, requires="wandb_project")
    """Name of the run in --wandb-project."""
    wandb_save_dir: Path | None = flag(None, requires="wandb_project")
    """Directory for the files of wandb; --save by default."""


@dataclass(frozen=True)
class ProfileConfig:
    """Profile. Traces of some steps, with sub-blocks and all-reduces by name."""

    profile: bool = False
    """Write a trace of some steps for each of --profile-ranks. Perfetto, chrome://tracing and
    tools/exposed_communication.py read it."""
    profile_step_start: int = flag(10, minimum=0, requires="profile")
    """Completed steps when the profile starts; it begins with the next one."""
    profile_step_end: int = flag(12, minimum=1, requires="profile")
    """Completed steps when the profile ends."""
    profile_ranks: tuple[int, ...] = flag((0,), minimum=0, requires="profile")
    """Global ranks that write traces. All ranks wait for them before and after the profile."""
    profile_dir: Path | None = flag(None, requires="profile")
    """Directory for traces; --tensorboard-dir by default."""

    checks = (
        rule(
            lambda profile, profile_step_start, profile_step_end: profile and profile_step_start >= profile_step_end,
            "{profile_step_start} and {profile_step_end} select no step",
            "make the end larger than the start",
        ),
        rule(
            lambda profile, profile_step_start, profile_step_end, train_iters: (
                profile and profile_step_end > max(profile_step_start, train_iters)
            ),
            "{profile_step_end} is above {train_iters}: the profile would not end",
        ),
        rule(
            lambda profile, profile_ranks, world_size: (
                profile and not (profile_ranks and max(profile_ranks) < world_size)
            ),
            "{profile_ranks}: expected ranks below {world_size!v}, the number of launched processes",
        ),
        rule(
            lambda profile, profile_dir, tensorboard_dir: profile and profile_dir is None and tensorboard_dir is None,
            "{profile} needs a directory for its traces",
            "give {profile_dir} or {tensorboard_dir}",
        ),
    )

    def folder(self, tensorboard_dir: Path | None) -> Path | None:
        """Return the directory for traces; None if neither directory was given."""
        return tensorboard_dir if self.profile_dir is None else self.profile_dir


@dataclass(frozen=True)
class ReliabilityConfig:
    """Stopping and bad numbers. SIGTERM and SIGINT also save a checkpoint and end the run with exit code 0."""

    exit_interval: int | None = flag(None, minimum=1, on_resume="ignore")
    """Save, evaluate if --eval-interval requires it, and exit after a step whose number is a multiple of N."""
    exit_duration_in_mins: float | None = flag(None, above=0, on_resume="ignore")
    """Save and exit after the first step that ends when the process has been running for this many minutes."""
    kill_switch_file: Path | None = flag(None, aliases=("--kill-switch-path",), on_resume="ignore")
    """Save and exit when this file exists. Rank 0 checks about once per second."""
    max_consecutive_bad_steps: int = flag(3, minimum=1)
    """Consecutive steps with a non-finite loss or gradient after which the run exits with code 3. Such a step only
    advances the position in the data."""
    loss_spike_factor: float | None = flag(None, above=1, on_resume="report")
    """Report a step whose loss exceeds this multiple of the median of the last --loss-spike-window steps."""
    loss_spike_window: int = flag(64, minimum=1, requires="loss_spike_factor", on_resume="report")
    """Previous steps, including spikes, whose median loss --loss-spike-factor multiplies."""
    skip_loss_spikes: bool = flag(False, requires="loss_spike_factor", on_resume="report")
    """Skip the update of steps that --loss-spike-factor reports."""


@dataclass(frozen=True, kw_only=True)
class Sections:
    """All sections, which hold for a run as they are."""

    training: TrainingConfig
    optimizer: OptimizerConfig
    parallel: ParallelConfig
    data: DataConfig
    checkpoint: CheckpointConfig
    logging: LoggingConfig
    profile: ProfileConfig
    reliability: ReliabilityConfig

"""The configuration of one run: parses its flags, derives open values, and checks their combinations."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megatron_ladder.blueprint.model import ModelConfig, learning_errors, resolve_model, tensor_parallel_errors
from megatron_ladder.blueprint.model_flags import ModelFlags
from megatron_ladder.command_line import FlagWords, build_sections, read_words
from megatron_ladder.config.file import NOT_IN_FILES, read_config_file
from megatron_ladder.config.megatron_flags import read_megatron_flag
from megatron_ladder.config.sections import OptimizerConfig, ParallelConfig, Sections, TrainingConfig
from megatron_ladder.errors import ErrorCollector, Problem, UserError, Vocabulary, counted, raise_user_errors
from megatron_ladder.flags import flag_name, section_flags, to_plain

PROGRAM = "pretrain_ladder.py"
DESCRIPTION = """Pretrains a Llama-family transformer with Ladder Residual, tensor-, pipeline- and data-parallel.

Most runs need these flags; a file (--config) can hold them:
  data         --data-path --split --tokenizer-type --tokenizer-model
  model        --residual-mode --num-layers --hidden-size --num-attention-heads --seq-length
  steps        --train-iters --micro-batch-size --global-batch-size --bf16 --lr --min-lr --lr-warmup-iters
  processes    --tensor-model-parallel-size --sequence-parallel --zero-stage
  checkpoints  --save --load --save-interval
  reports      --log-interval --eval-interval --tensorboard-dir"""


@dataclass(frozen=True, kw_only=True)
class RunFlags(Sections):
    """The values of the command line and of the files of --config."""

    model: ModelFlags
    """Sizes and wiring, some of them still open."""
    given: frozenset[str] = frozenset()
    """Names of the fields that have a value on the command line or in a file."""
    written: Vocabulary = field(default_factory=Vocabulary)

    def describe(self, run: "RunConfig", checkpoint: Path | None = None) -> dict[str, Any]:
        """Return the values of all flags, by key of a configuration file that repeats a run that loads a checkpoint."""
        # A tokenizer or a checkpoint determines the vocabulary unless the flag was given.
        model = replace(run.model.to_flags(), vocab_size=self.model.vocab_size)
        completed = replace(run, optimizer=run.optimizer.completed(run.training.train_iters))
        sections = [model, *(getattr(completed, name) for name in Sections.__annotations__)]
        values = {name: value for section in sections for name, value in to_plain(section).items()}
        values |= {"global_batch_size": run.global_batch_size, "load": None if checkpoint is None else str(checkpoint)}
        if checkpoint is None:
            # These flags had no effect.
            values |= {flag.field_name: flag.default for flag in section_flags(*SECTIONS) if "--load" in flag.requires}
        return {name: value for name, value in values.items() if name not in NOT_IN_FILES}


def _is_sharded_by_deepspeed(zero_stage: str, data_parallel_size: int) -> bool:
    # On one rank ZeRO 2 shards nothing more.
    return zero_stage == "3" or (zero_stage == "2" and data_parallel_size > 1)


def layout_captures(zero_stage: str, data_parallel_size: int) -> bool:
    """Whether --cuda-graph auto captures the passes of a layout; the planner asks, too."""
    return not _is_sharded_by_deepspeed(zero_stage, data_parallel_size)


SECTION_TYPES: dict[str, type] = {"model": ModelFlags, **Sections.__annotations__}
SECTIONS = tuple(SECTION_TYPES.values())


@dataclass(frozen=True, kw_only=True)
class RunConfig(Sections):
    """A run whose values are all known."""

    model: ModelConfig
    world_size: int
    data_parallel_size: int
    global_batch_size: int
    accumulation_steps: int

    @property
    def tokens_per_step(self) -> int:
        """Tokens per global batch."""
        return self.global_batch_size * self.training.seq_length

    @property
    def needs_deepspeed(self) -> bool:
        """Whether DeepSpeed runs the passes and updates, instead of `engine/sharded.py`."""
        return self.parallel.offload_optimizer != "none" or _is_sharded_by_deepspeed(
            self.parallel.zero_stage, self.data_parallel_size
        )

    @property
    def captures_by_default(self) -> bool:
        """Whether --cuda-graph auto captures the passes of a step, if the host need not wait for chosen experts."""
        parallel = self.parallel
        is_excluded = self.needs_deepspeed or self.data.reset_attention_mask or self.profile.profile
        return not is_excluded and layout_captures(parallel.zero_stage, self.data_parallel_size)

    @property
    def chunks(self) -> int:
        """Number of ranges of layers that a pipeline stage runs alternately."""
        stages = self.parallel.pipeline_model_parallel_size
        most = self.parallel.num_layers_per_virtual_pipeline_stage
        return 1 if most is None else -(-self.model.num_layers // (stages * most))

    @property
    def loads_only_weights(self) -> bool:
        """Whether --load provides only weights, so that its schedule and data may differ from this run's."""
        return self.checkpoint.finetune or self.logging.skip_train

    @property
    def recompute_layers(self) -> int:
        """Number of layers whose sub-blocks are recomputed in the backward pass."""
        if self.training.recompute_granularity != "full":
            return 0
        layers = self.training.recompute_num_layers
        return self.model.num_layers if layers is None else layers

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-compatible values, which are recorded in checkpoints and TensorBoard."""
        sections = {name: to_plain(getattr(self, name)) for name in SECTION_TYPES}
        derived = ("world_size", "data_parallel_size", "global_batch_size", "accumulation_steps")
        return {**sections, **{name: getattr(self, name) for name in derived}}


def read_run_words(argv: Sequence[str], function: str | None = None) -> FlagWords:
    """Read the command line, and the files of --config, of which later ones and the command line override earlier ones.

    The words may be those of a Python function, see `read_words`. Problems are kept for `to_flags`.
    """
    typed = read_words(SECTIONS, argv, function or PROGRAM, DESCRIPTION, read_megatron_flag, function is not None)
    in_files = FlagWords()
    for path in typed.words.get("config") or ():
        try:
            read_config_file(Path(path), SECTIONS, in_files)
        except UserError as error:
            in_files.problems += error.problems
            # The flags that the file would set are unknown.
            in_files.faulty |= {flag.field_name for flag in section_flags(*SECTIONS)} - typed.words.keys()
    overridden = {spelling for name in typed.words for spelling in (name, f"no_{name}")}
    places = {flag: place for flag, place in in_files.written.places.items() if flag not in overridden}
    return replace(
        typed,
        words=in_files.words | typed.words,
        problems=in_files.problems + typed.problems,
        faulty=in_files.faulty | typed.faulty,
        accepted=in_files.accepted | typed.accepted,
        written=Vocabulary(typed.written.spell, in_files.written.spellings | typed.written.spellings, places),
    )


def to_flags(flag_words: FlagWords, world_size: int = 1) -> RunFlags:
    """Convert the words of a run of `world_size` processes to values.

    Raises UserError with one line per word and value that is not valid. If only required flags are missing, the errors
    of `resolve_run` follow.
    """
    errors = ErrorCollector()
    # A checkpoint may provide values.
    has_load = "load" in flag_words.words
    sections = build_sections(SECTIONS, flag_words, may_lack_values=has_load, errors=errors)
    given = frozenset(name for name, words in flag_words.words.items() if words is not None)
    flags = RunFlags(**dict(zip(SECTION_TYPES, sections, strict=True)), given=given, written=flag_words.written)
    with flag_words.written.in_messages():
        contradictions = _megatron_problems(flags)
        errors.add(*(problem for problem in contradictions if {*map(flag_name, problem.fields)} & flag_words.accepted))
        if errors.problems and not has_load:
            with errors.collect():
                resolve_run(flags, flags.model.vocab_size or 1, world_size)
        errors.raise_if_any()
    return flags


def parse_run(argv: Sequence[str], known: Sequence[Problem] = (), world_size: int = 1) -> RunFlags:
    """Read the command line; raises UserError with `known` errors and those of `to_flags`."""
    words = read_run_words(argv)
    return to_flags(replace(words, problems=[*known, *words.problems]), world_size)


def _megatron_problems(flags: RunFlags) -> Iterator[Problem]:
    """Yield one line for each accepted flag of Megatron that these flags contradict."""
    model = flags.model
    stages = flags.parallel.pipeline_model_parallel_size
    zero_stage = flags.parallel.zero_stage
    bias = "--add-attention-output-bias" if model.add_attention_output_bias else ""
    if model.add_mlp_bias:
        bias = "--add-mlp-bias"
    by_deepspeed = f"--zero-stage {zero_stage}" if zero_stage != "1" else ""
    if flags.parallel.offload_optimizer != "none":
        by_deepspeed = f"--offload-optimizer {flags.parallel.offload_optimizer}"
    contradictions = {
        "--untie-embeddings-and-output-weights": "--tie-embeddings" if model.tie_embeddings else "",
        "--disable-bias-linear": bias,
        "--use-distributed-optimizer": "--zero-stage 0" if zero_stage == "0" else "",
        "--overlap-grad-reduce": by_deepspeed,
        "--overlap-param-gather": by_deepspeed,
        # In Megatron, it replaces `full`.
        "--recompute-activations": "--recompute-granularity full"
        if flags.training.recompute_granularity == "full"
        else "",
        "--no-pipeline-parallel": f"--pipeline-model-parallel-size {stages}" if stages > 1 else "",
    }
    for flag, other in contradictions.items():
        if other:
            yield Problem(flag, f" and {other} exclude each other: give one of them")
    if flags.checkpoint.load is not None:
        return
    if model.num_key_value_heads is None:
        yield Problem("--group-query-attention", " requires --num-query-groups")
    yield Problem("--use-checkpoint-args", " requires --load")


def resolve_run(flags: RunFlags, vocab_size: int, world_size: int) -> RunConfig:
    """Derive the values that the flags leave open; raises UserError with one line per invalid combination."""
    errors: list[str | Problem] = []
    training = flags.training
    parallel = flags.parallel
    tensor_parallel = parallel.tensor_model_parallel_size
    stages = parallel.pipeline_model_parallel_size
    model = resolve_model(flags.model, vocab_size, training.seq_length, tensor_parallel, errors)
    if not flags.logging.skip_train:
        errors += learning_errors(model)
    errors += _schedule_problems(flags.optimizer, training.train_iters)
    errors += _layout_problems(training, parallel, model)
    errors += _implementation_problems(training, flags.optimizer, parallel)
    errors += _profile_problems(flags, world_size)
    # What each rank processes: the layout divides the processes, and the batch the samples.
    data_parallel = 1
    if world_size % (tensor_parallel * stages):
        sizes = f" {tensor_parallel}" + (f" x --pipeline-model-parallel-size {stages}" if stages != 1 else "")
        fix = "launch a multiple of it, as in `deepspeed --num_gpus N`"
        text = f"{sizes} does not divide the {world_size} launched processes: {fix}"
        errors.append(Problem("--tensor-model-parallel-size", text))
    else:
        errors += tensor_parallel_errors(model, tensor_parallel, parallel.expert_sharding == "experts")
        data_parallel = world_size // (tensor_parallel * stages)
    if parallel.data_parallel_size not in (None, data_parallel):
        text = f" {parallel.data_parallel_size}: {world_size} launched processes with this layout have {data_parallel}"
        errors.append(Problem("--data-parallel-size", f"{text}: leave it out, or launch another number"))
    samples_at_once = training.micro_batch_size * data_parallel
    global_batch_size = samples_at_once if training.global_batch_size is None else training.global_batch_size
    if global_batch_size % samples_at_once:
        product = f"--micro-batch-size {training.micro_batch_size} x {data_parallel} data-parallel processes"
        ranks = f"{world_size} processes / --tensor-model-parallel-size {tensor_parallel}"
        ranks += f" / --pipeline-model-parallel-size {stages}"
        text = f" {global_batch_size} is not a multiple of {product} = {samples_at_once} ({ranks})"
        errors.append(Problem("--global-batch-size", text))
    with flags.written.in_messages():
        raise_user_errors(errors)
    return RunConfig(
        **{name: getattr(flags, name) for name in SECTION_TYPES} | {"model": model},
        world_size=world_size,
        data_parallel_size=data_parallel,
        global_batch_size=global_batch_size,
        accumulation_steps=global_batch_size // samples_at_once,
    )


def _schedule_problems(optimizer: OptimizerConfig, train_iters: int) -> Iterator[Problem]:
    warmup = optimizer.lr_warmup_iters
    if optimizer.min_lr > optimizer.lr:
        yield Problem("--min-lr", f" {optimizer.min_lr} is above --lr {optimizer.lr}")
    decay_iters = optimizer.lr_decay_iters
    end = f"--lr-decay-iters {decay_iters}"
    if decay_iters is None:
        decay_iters = train_iters
        end = f"--train-iters {train_iters}"
    wsd_iters = optimizer.lr_wsd_decay_iters
    if wsd_iters is not None and wsd_iters > max(0, decay_iters - warmup):
        text = f" {wsd_iters} is more than {end} leaves after --lr-warmup-iters {warmup}"
        yield Problem("--lr-wsd-decay-iters", text)
    if optimizer.lr_decay_style != "constant" and warmup and warmup >= decay_iters:
        yield Problem("--lr-warmup-iters", f" {warmup} leaves no step of {end} for the decay")


def _layout_problems(training: TrainingConfig, parallel: ParallelConfig, model: ModelConfig) -> Iterator[Problem]:
    length = training.seq_length
    layers = model.num_layers
    stages = parallel.pipeline_model_parallel_size
    if length > model.max_position_embeddings:
        text = f" {length} is longer than --max-position-embeddings {model.max_position_embeddings}"
        yield Problem("--seq-length", text)
    if parallel.sequence_parallel and not model.shares_stream:
        other = f"{flag_name(model.separating_field)} {getattr(model, model.separating_field)}"
        text = f" shards one stream that all ranks read, but with {other} each rank reads another one: leave one out"
        yield Problem("--sequence-parallel", text)
    if parallel.sequence_parallel and length % parallel.tensor_model_parallel_size:
        text = f" {length} cannot be cut by --sequence-parallel into {parallel.tensor_model_parallel_size} equal parts"
        yield Problem("--seq-length", f"{text}: make it a multiple of --tensor-model-parallel-size")
    if stages > layers:
        text = f" {stages} is above --num-layers {layers}: each stage needs at least one layer"
        yield Problem("--pipeline-model-parallel-size", text)
    virtual = parallel.num_layers_per_virtual_pipeline_stage
    if virtual is not None and stages <= layers:
        ranges = -(-layers // (stages * virtual))
        lowest = -(-layers // (stages * (layers // stages)))
        highest = (layers - 1) // stages
        if not lowest <= virtual <= highest:
            fix = f"use {' to '.join(map(str, sorted({lowest, highest})))}" if lowest <= highest else "leave it out"
            text = f" {virtual}: {stages} stages x {ranges} ranges are more than --num-layers {layers}: {fix}"
            if ranges == 1:
                most = counted(-(-layers // stages), "layer")
                text = f" {virtual}: each of {stages} stages has at most {most}, so only one range: {fix}"
            yield Problem("--num-layers-per-virtual-pipeline-stage", text)
    recomputed = training.recompute_num_layers
    if recomputed is not None and recomputed > layers:
        yield Problem("--recompute-num-layers", f" {recomputed} is above --num-layers {layers}")


def _implementation_problems(
    training: TrainingConfig, optimizer: OptimizerConfig, parallel: ParallelConfig
) -> Iterator[Problem]:
    """Reject combinations that DeepSpeed, apex or Muon does not support."""
    zero_stage = parallel.zero_stage
    stages = parallel.pipeline_model_parallel_size
    offloads = parallel.offload_optimizer != "none"
    has_apex = optimizer.optimizer_implementation == "apex"
    if zero_stage in ("2", "3") and stages > 1:
        why = "a stage needs whole gradients over all its micro-batches, so use --zero-stage 0 or 1"
        yield Problem("--zero-stage", f" {zero_stage} with --pipeline-model-parallel-size {stages}: {why}")
    if optimizer.optimizer == "muon" and (zero_stage == "3" or offloads):
        other = "--offload-optimizer cpu" if offloads else "--zero-stage 3"
        text = f" muon needs whole gradients on the device, not {other}: use --zero-stage 0, 1 or 2"
        yield Problem("--optimizer", text)
    if training.compile_sub_blocks == "true" and training.norm_implementation == "apex":
        text = " compiles torch's norm: leave out --norm-implementation apex or --compile-sub-blocks"
        yield Problem("--compile-sub-blocks", text)
    if has_apex and optimizer.optimizer == "muon":
        yield Problem("--optimizer", " muon has no --optimizer-implementation apex: leave it out")
    elif has_apex and offloads:
        yield Problem("--optimizer-implementation", " apex needs a GPU, not --offload-optimizer cpu: use torch")
    elif has_apex and zero_stage == "3":
        # ZeRO-3 updates its sub-groups one by one, and apex counts each update of a group as a step.
        yield Problem("--optimizer-implementation", " apex miscounts steps with --zero-stage 3: use torch")


def _profile_problems(flags: RunFlags, world_size: int) -> Iterator[Problem]:
    profile = flags.profile
    if not profile.profile:
        return
    train_iters = flags.training.train_iters
    start, end = profile.profile_step_start, profile.profile_step_end
    if start >= end:
        text = f" {start} and --profile-step-end {end} select no step: make the end larger than the start"
        yield Problem("--profile-step-start", text)
    elif end > train_iters:
        yield Problem("--profile-step-end", f" {end} is above --train-iters {train_iters}: the profile would not end")
    absent = " ".join(str(rank) for rank in sorted(set(profile.profile_ranks)) if rank >= world_size)
    if absent or not profile.profile_ranks:
        text = f" {absent}: expected ranks from 0 to {world_size - 1} of the {world_size} launched processes"
        yield Problem("--profile-ranks", text)
    if profile.folder(flags.logging.tensorboard_dir) is None:
        yield Problem("--profile", " needs a directory for its traces: give --profile-dir or --tensorboard-dir")

"""The configuration of one run: parses its flags, derives open values, and checks their combinations."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from megatron_ladder.blueprint.model import ModelConfig, examine_model, model_of
from megatron_ladder.blueprint.model_flags import LEARNING_CHECKS, TENSOR_PARALLEL_CHECKS, ModelFlags
from megatron_ladder.command_line import Settings, build_sections, read_command_line
from megatron_ladder.config.file import NOT_IN_FILES, read_config_file
from megatron_ladder.config.megatron_flags import read_megatron_flag
from megatron_ladder.config.sections import Sections
from megatron_ladder.errors import Problem, UserError, raise_user_errors
from megatron_ladder.flags import derive, find_problems, section_checks, section_flags, to_plain

PROGRAM = "pretrain_ladder.py"
DESCRIPTION = """Pretrains a Llama-family transformer with Ladder Residual, tensor-, pipeline- and data-parallel.

Most runs need these flags; a file (--config) can hold them:
  data         --data-path --split --tokenizer-type --tokenizer-model
  model        --residual-mode --num-layers --hidden-size --num-attention-heads --seq-length
  steps        --train-iters --micro-batch-size --global-batch-size --bf16 --lr --min-lr --lr-warmup-iters
  processes    --tensor-model-parallel-size --sequence-parallel --zero-stage
  checkpoints  --save --load --save-interval
  reports      --log-interval --eval-interval --tensorboard-dir"""


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
        is_excluded = self.needs_deepspeed or self.data.reset_attention_mask or self.profile.profile
        return not is_excluded and layout_captures(self.parallel.zero_stage, self.data_parallel_size)

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


def describe_run(settings: Settings, run: RunConfig, checkpoint: Path | None = None) -> dict[str, Any]:
    """Return the values of all flags, by key of a configuration file that repeats a run that loads a checkpoint."""
    # A tokenizer or a checkpoint determines the vocabulary unless the flag was given.
    model = replace(run.model.to_flags(), vocab_size=settings.values["vocab_size"])
    completed = replace(run, optimizer=run.optimizer.completed(run.training.train_iters))
    sections = [model, *(getattr(completed, name) for name in Sections.__annotations__)]
    values = {name: value for section in sections for name, value in to_plain(section).items()}
    values |= {"global_batch_size": run.global_batch_size, "load": None if checkpoint is None else str(checkpoint)}
    if checkpoint is None:
        # These flags had no effect.
        values |= {one.field_name: one.default for one in section_flags(*SECTIONS) if "load" in one.requires}
    return {name: value for name, value in values.items() if name not in NOT_IN_FILES}


def read_run(argv: Sequence[str], function: str | None = None) -> Settings:
    """Read the command line, and the files of --config, of which later ones and the command line override earlier ones.

    The words may be those of a Python function, see `read_command_line`. Problems are kept for `check_run`.
    """
    flags = section_flags(*SECTIONS)
    typed = read_command_line(SECTIONS, argv, function or PROGRAM, DESCRIPTION, read_megatron_flag, bool(function))
    settings = Settings(flags)
    for path in typed.given.get("config", ()):
        in_file = Settings(flags)
        try:
            read_config_file(path, in_file)
        except UserError as error:
            in_file.problems += error.problems
            # The flags that the file would set are unknown.
            in_file.faulty = {one.field_name for one in flags}
        settings = in_file.over(settings)
    settings = typed.over(settings)
    # In a file, null leaves a flag out.
    settings.given = {name: value for name, value in settings.given.items() if value is not None}
    return settings


def check_run(settings: Settings, world_size: int = 1) -> None:
    """Raise a UserError with all problems of words and values of a run of `world_size` processes, if there are any.

    With them come all others that can be known without files.
    """
    if "load" in settings.given:
        # A checkpoint may provide the others.
        given = tuple(one for one in settings.flags if one.field_name in settings.given)
        settings = replace(settings, flags=given)
    values, problems = settings.examine()
    if problems:
        problems += _examine(values | {"world_size": world_size})[1]
    with settings.words.in_messages():
        raise_user_errors(problems)


def parse_run(argv: Sequence[str], known: Sequence[Problem] = (), world_size: int = 1) -> Settings:
    """Read the command line; raises UserError with `known` problems and those of `check_run`."""
    settings = read_run(argv)
    settings.problems[:0] = known
    check_run(settings, world_size)
    return settings


def resolve_run(settings: Settings, vocab_size: int | None, world_size: int) -> RunConfig:
    """Derive the values that the settings leave open; raises UserError with one line per problem."""
    valid, invalid = settings.examine()
    values, impossible = _examine(valid | {"vocab_size": vocab_size, "world_size": world_size})
    with settings.words.in_messages():
        raise_user_errors([*invalid, *impossible])
    sections = build_sections(Sections.__annotations__.values(), valid)
    samples = values["global_batch_size"] or values["samples_at_once"]
    return RunConfig(
        **dict(zip(Sections.__annotations__, sections, strict=True)),
        model=model_of(values),
        world_size=world_size,
        data_parallel_size=values["data_parallel_ranks"],
        global_batch_size=samples,
        accumulation_steps=samples // values["samples_at_once"],
    )


def _examine(values: Mapping[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    """Return values, by field, with those that they leave open, and all combinations that no run can have."""
    # No check reads the size of the vocabulary, which a tokenizer may determine.
    values, problems = examine_model({**values, "vocab_size": values.get("vocab_size") or 1})
    if not problems and values.keys() >= {one.name for one in fields(ModelConfig)}:
        values |= vars(model_of(values))
    values = derive(_DERIVED, values)
    if not values.get("skip_train"):
        problems += find_problems(LEARNING_CHECKS, values)
    problems += find_problems(section_checks(*SECTIONS), values)
    if "data_parallel_ranks" in values:
        problems += find_problems(TENSOR_PARALLEL_CHECKS, values)
    return values, problems


_DERIVED: Mapping[str, Callable[..., Any]] = {
    "data_parallel_ranks": lambda world_size, tensor_model_parallel_size, pipeline_model_parallel_size: (
        None
        if world_size % (tensor_model_parallel_size * pipeline_model_parallel_size)
        else world_size // (tensor_model_parallel_size * pipeline_model_parallel_size)
    ),
    "samples_at_once": lambda micro_batch_size, data_parallel_ranks: micro_batch_size * data_parallel_ranks,
}
"""What each rank processes: the layout divides the processes, and the batch the samples."""

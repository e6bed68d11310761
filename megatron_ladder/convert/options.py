"""The command line of `tools/convert_checkpoint.py`; does not import torch."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatron_ladder.blueprint.wiring import LATE_MODES, ResidualMode
from megatron_ladder.checkpoint.hf_types import TEXT_TYPES, TYPES
from megatron_ladder.command_line import parse_command_line, take_subcommand
from megatron_ladder.errors import Problem, UserError
from megatron_ladder.flags import flag


@dataclass(frozen=True, kw_only=True)
class ConversionOptions:
    """Options of every conversion."""

    dry_run: bool = False
    """Print what would be written, and write nothing."""
    verify: bool = False
    """Read the result again and compare it bit by bit. If transformers is installed, import and export also compare the
    logits of its model and of ours, in the wiring of the Hugging Face directory."""
    overwrite: bool = False
    """Replace an existing target."""


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions(ConversionOptions):
    """Options of the training checkpoint to write: its directory and its wiring."""

    save: Path = flag(output="directory")
    """Directory of checkpoints to write to, as for pretrain_ladder.py."""
    residual_mode: ResidualMode | None = None
    """Wiring of the model. Default: the wiring of the source."""
    ladder_layers: str | None = None
    """Layers that read the residual stream late: all, none, N (the upper N), 16-31, 3,7,9-12, [16], or best:16@FILE,
    the cheapest 16 in a file of `convert_checkpoint.py sensitivity`. Implies --residual-mode ladder, or that of FILE,
    if no mode is given."""
    residual_staleness: int | None = flag(None, minimum=1)
    """Number of sub-blocks by which they read it late. Default: that of the source if its mode stays the same, or 1."""
    lanes: int | None = flag(None, aliases=("--own-partials",), minimum=0)
    """Number of lanes that read their own parts of the outputs in flight, as for pretrain_ladder.py; 0 for none.
    Default: that of the source if its mode stays the same, or 0."""


@dataclass(frozen=True, kw_only=True)
class HeadOptions(ConversionOptions):
    """Options of conversions from and to Hugging Face directories."""

    drop_mtp: bool = False
    """Leave out the drafting head (multi-token prediction) of the source, if it has one."""


@dataclass(frozen=True, kw_only=True)
class ImportOptions(HeadOptions, CheckpointOptions):
    """Import. From a Hugging Face directory to a training checkpoint."""

    hf: Path = flag(details=f"{', '.join((*TYPES, *TEXT_TYPES))}.")
    """Directory with config.json and safetensors. Its model_type must be one of"""


@dataclass(frozen=True, kw_only=True)
class ExportOptions(HeadOptions):
    """Export. From a training checkpoint to a Hugging Face directory."""

    load: Path
    """A directory of checkpoints, whose current one is read, or one checkpoint."""
    hf: Path = flag(output="directory")
    """Directory to write."""
    dtype: Literal["fp32", "bf16", "fp16"] | None = None
    """Element type of the weights. Default: the one in which the model was trained."""
    max_shard_size: str = "5GB"
    """Largest file, in bytes or as 500MB, 5GB, 2GiB."""


@dataclass(frozen=True, kw_only=True)
class ReshapeOptions(CheckpointOptions):
    """Reshape. A training checkpoint of whole tensors, in another wiring if given, optimizer state included."""

    load: Path
    """A directory of checkpoints, whose current one is read, or one checkpoint."""


@dataclass(frozen=True, kw_only=True)
class MergeOptions(ConversionOptions):
    """Merge. The weighted mean of checkpoints of one run, without optimizer state."""

    load: Path
    """Directory of checkpoints."""
    save: Path = flag(output="directory")
    """Directory of checkpoints to write to; the result has the number of the last merged iteration."""
    iterations: tuple[int, ...] = flag((), minimum=0, excludes=("last",))
    """Iterations of the checkpoints."""
    last: int | None = flag(None, minimum=2)
    """Number of checkpoints, the newest of the directory."""
    weights: Literal["mean", "linear", "minus-sqrt"] = "mean"
    """Weights of n checkpoints at equal distances. mean: equal ones, which emulate a linear decay of the learning rate
    (arXiv 2507.17634; Megatron's `linear`); linear: 1 to n, the newest most; minus-sqrt: those that emulate a decay by
    1 - sqrt(x)."""


@dataclass(frozen=True, kw_only=True)
class MeasuredOptions:
    """Options of commands that run a model over text."""

    data: Path
    """Prefix of the token file (.bin, .idx), as for --data-path of pretrain_ladder.py. Use data like that of the
    training, and its flags for documents and labels."""
    tokens: int = flag(65_536, minimum=1)
    """Tokens to measure with, in rows that are spread evenly over the data."""
    seq_length: int | None = flag(None, minimum=1)
    """Tokens of a row; by default 2048, or the model's positions if they are fewer."""
    batch_size: int = flag(8, minimum=1)
    """Rows per forward pass."""
    reset_position_ids: bool | None = None
    """Restart rotary positions with each document, by default if the checkpoint's run did."""
    reset_attention_mask: bool | None = None
    """Restrict attention to the token's own document, by default if the run did."""
    eod_mask_loss: bool | None = None
    """Exclude the label after each end-of-document token from the loss, by default if the run did."""
    loss_on: Literal["all", "assistant"] | None = None
    """Labels of conversations. Default: the run's, or the assistant's tokens, if the data marks them."""
    dtype: Literal["fp32", "bf16", "fp16"] | None = None
    """Data type of the computation. Default: fp32 on a CPU and bf16 on a GPU."""


@dataclass(frozen=True, kw_only=True)
class ArrangeOptions(MeasuredOptions, ReshapeOptions):
    """Arrange. A training checkpoint in lanes (--lanes), with heads and neurons in the order that suits these lanes."""


@dataclass(frozen=True, kw_only=True)
class SensitivityOptions(MeasuredOptions):
    """Sensitivity. Forward passes over the same tokens, each with other layers that read late."""

    load: Path
    """A directory of checkpoints, whose current one is read, one checkpoint, or a Hugging Face directory."""
    output: Path = flag(output="file")
    """JSON file to write, for --ladder-layers best:N@FILE."""
    residual_mode: str | None = flag(None, choices=LATE_MODES)
    """Wiring of the late layers; by default ladder, or ladder-parallel for models with one norm per layer."""
    residual_staleness: int | None = flag(None, minimum=1)
    """Number of sub-blocks by which they read late; by default that of the model, or 1."""
    greedy_layers: int | None = flag(None, minimum=1)
    """Layers to choose one after another, each time the one that costs least together with the chosen ones; all by
    default. For L layers that takes L (L + 1) / 2 passes."""
    tensor_model_parallel_size: int | None = flag(None, aliases=("--tp",), minimum=1)
    """Number of processes that share the model, which are started on this machine; under a launcher, their number."""


Options = ImportOptions | ExportOptions | ReshapeOptions | MergeOptions | ArrangeOptions | SensitivityOptions
VERBS: dict[str, tuple[type, str]] = {
    "import": (ImportOptions, "Converts a Hugging Face directory to a training checkpoint."),
    "export": (ExportOptions, "Converts a training checkpoint to a Hugging Face directory."),
    "reshape": (ReshapeOptions, "Writes a training checkpoint of whole tensors, or with another wiring."),
    "merge": (MergeOptions, "Writes the weighted mean of several checkpoints of a run."),
    "arrange": (ArrangeOptions, "Chooses which heads and neurons share a lane with own partials; needs scipy."),
    "sensitivity": (SensitivityOptions, "Measures which layers cost the least when they read late."),
}
_PROGRAM = "convert_checkpoint.py"
_DESCRIPTION = "Converts checkpoints between Hugging Face and training; needs no GPU."
INSPECT = "Prints what a directory contains and what is missing."


def parse_conversion(argv: Sequence[str]) -> Options | Path:
    """Parse the verb and its flags; a path is a directory to inspect. Raises UserError with one line per error."""
    texts = {verb: text for verb, (_, text) in VERBS.items()} | {"inspect": INSPECT}
    verb, words = take_subcommand(argv, texts, _PROGRAM, _DESCRIPTION)
    if verb == "inspect":
        flags = [word for word in words if word.startswith("-")]
        parse_command_line([], flags, f"{_PROGRAM} inspect DIR", INSPECT)
        if len(words) != 1:
            raise UserError(f"{' '.join(['inspect', *words])}: expected one directory")
        return Path(words[0])
    kind, description = VERBS[verb]
    (options,) = parse_command_line([kind], words, f"{_PROGRAM} {verb}", description)
    assert isinstance(options, Options)
    return options


def shard_bytes(text: str) -> int:
    """Parse `5GB`, `500MB`, `2GiB` or a number of bytes; raise UserError if it is none of these."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([KMG])(I?)B)?", text.strip().upper())
    size = 0
    if match is not None:
        unit = 1024 if match[3] else 1000
        size = int(float(match[1]) * unit ** ("KMG".index(match[2]) + 1 if match[2] else 0))
    if size < 1:
        reason = "{}: expected a number of bytes, such as 500MB, 5GB or 2GiB"
        raise UserError(Problem({"max_shard_size": text}, reason))
    return size

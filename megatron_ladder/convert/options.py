"""The command line of `tools/convert_checkpoint.py`; does not import torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatron_ladder.blueprint.wiring import ResidualMode
from megatron_ladder.command_line import parse_command_line, take_subcommand
from megatron_ladder.errors import UserError
from megatron_ladder.flags import flag


@dataclass(frozen=True, kw_only=True)
class ConversionOptions:
    """Options of every conversion."""

    dry_run: bool = False
    """Print what would be written, and write nothing."""
    verify: bool = False
    """Read the result again and compare it bit by bit; compare logits too if torch and transformers are installed."""
    overwrite: bool = False
    """Replace an existing target."""


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions(ConversionOptions):
    """Options of the training checkpoint to write: its directory, the cut of its files, its wiring."""

    save: Path = flag(output="directory")
    """Directory of checkpoints to write to, as for pretrain_ladder.py."""
    tensor_model_parallel_size: int = flag(1, minimum=1)
    """Cut the files for this many tensor-parallel ranks; any other number can read them too."""
    pipeline_model_parallel_size: int = flag(1, minimum=1)
    """Cut the files for this many pipeline stages; any other number can read them too."""
    residual_mode: ResidualMode | None = None
    """Wiring of the model. Default: the wiring of the source."""
    ladder_layers: str | None = None
    """Layers that read the residual stream late: all, none, N (the upper N), 16-31, 3,7,9-12 or [16]. Implies
    --residual-mode ladder if that is not given."""
    residual_staleness: int | None = flag(None, minimum=1)
    """Number of sub-blocks by which they read it late. Default: 1."""


@dataclass(frozen=True, kw_only=True)
class ImportOptions(CheckpointOptions):
    """Import. From a Hugging Face directory to a training checkpoint."""

    hf: Path
    """Directory with config.json and safetensors: Llama, Mistral, Qwen2, Qwen3, the paper's llamaLadder, or a directory
    that `export` wrote."""


@dataclass(frozen=True, kw_only=True)
class ExportOptions(ConversionOptions):
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
    """Reshape. A training checkpoint with other files or another wiring, optimizer state included."""

    load: Path
    """A directory of checkpoints, whose current one is read, or one checkpoint."""


Options = ImportOptions | ExportOptions | ReshapeOptions
VERBS: dict[str, tuple[type, str]] = {
    "import": (ImportOptions, "Converts a Hugging Face directory to a training checkpoint."),
    "export": (ExportOptions, "Converts a training checkpoint to a Hugging Face directory."),
    "reshape": (ReshapeOptions, "Writes a training checkpoint with other files or another wiring."),
}
_PROGRAM = "convert_checkpoint.py"
_DESCRIPTION = "Converts checkpoints between Hugging Face and training, in any layout; needs no GPU."
INSPECT = "Prints what a directory contains and what is missing."


def parse_options(argv: Sequence[str]) -> Options | Path:
    """Parse the verb and its flags; a path is a directory to inspect.

    Raises:
        UserError: the command line is invalid; one line per error.
    """
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
    if isinstance(options, ExportOptions):
        try:
            shard_bytes(options.max_shard_size)
        except ValueError as error:
            raise UserError(f"--max-shard-size {options.max_shard_size}: {error}") from None
    assert isinstance(options, ImportOptions | ExportOptions | ReshapeOptions)
    return options


def shard_bytes(text: str) -> int:
    """Parse `5GB`, `500MB`, `2GiB` or a number of bytes; raise ValueError if it is none of these."""
    units = {"GIB": 1 << 30, "MIB": 1 << 20, "KIB": 1 << 10, "GB": 10**9, "MB": 10**6, "KB": 10**3, "": 1}
    words = text.strip().upper()
    unit = next(unit for unit in units if words.endswith(unit))
    try:
        size = int(float(words.removesuffix(unit)) * units[unit])
    except (ValueError, OverflowError):
        raise ValueError("expected bytes, or a number with KB, MB, GB, KiB, MiB or GiB") from None
    if size < 1:
        raise ValueError("expected more than 0")
    return size

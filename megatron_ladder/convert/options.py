"""The command line of `tools/convert_checkpoint.py`. No torch here."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from megatron_ladder.blueprint.wiring import ResidualMode
from megatron_ladder.errors import UserError
from megatron_ladder.flags import flag_name, parse_command_line

Verb = Literal["import", "export", "reshape", "inspect"]
VERBS: tuple[Verb, ...] = get_args(Verb)


@dataclass(frozen=True, kw_only=True)
class Caution:
    """What every conversion can do besides."""

    dry_run: bool = False
    """Print what would be written, and write nothing."""
    verify: bool = False
    """Read everything back and compare it bit by bit; compare logits too where torch and transformers are installed."""
    overwrite: bool = False
    """Replace what stands at the target."""


@dataclass(frozen=True, kw_only=True)
class Rewiring(Caution):
    """What a training checkpoint can be made with."""

    residual_mode: ResidualMode | None = None
    """Wiring of the model; that of the source if neither this nor --ladder-layers is given."""
    ladder_layers: str | None = None
    """Layers that read the stream late: all, none, N (the upper N), 16-31, 3,7,9-12 or [16]. Alone it implies
    --residual-mode ladder."""
    residual_staleness: int | None = None
    """By how many sub-blocks they read it late; 1 if not given."""


@dataclass(frozen=True, kw_only=True)
class ImportOptions(Rewiring):
    """Import. From a Hugging Face directory to a training checkpoint."""

    hf: Path
    """Directory with config.json and safetensors: Llama, Mistral, Qwen2, Qwen3, the paper's authors' llamaLadder, or
    what `export` wrote."""
    save: Path
    """Directory of checkpoints, as of pretrain_ladder.py."""
    tensor_model_parallel_size: int = 1
    """Files are cut for so many tensor-parallel ranks; any other number can read them."""
    pipeline_model_parallel_size: int = 1
    """Files are cut for so many pipeline stages; any other number can read them."""


@dataclass(frozen=True, kw_only=True)
class ExportOptions(Caution):
    """Export. From a training checkpoint to a Hugging Face directory."""

    load: Path
    """A directory of checkpoints, of which the one in use is taken, or a checkpoint's own."""
    hf: Path
    """Directory to write."""
    dtype: Literal["fp32", "bf16", "fp16"] | None = None
    """Element type of the weights; if not given, that in which the model was trained."""
    max_shard_size: str = "5GB"
    """Largest file, in bytes or as 500MB, 5GB, 2GiB."""


@dataclass(frozen=True, kw_only=True)
class ReshapeOptions(Rewiring):
    """Reshape. A training checkpoint with other files or another wiring, optimizer state included."""

    load: Path
    """A directory of checkpoints, of which the one in use is taken, or a checkpoint's own."""
    save: Path
    """Directory of checkpoints to write to."""
    tensor_model_parallel_size: int = 1
    """Files are cut for so many tensor-parallel ranks."""
    pipeline_model_parallel_size: int = 1
    """Files are cut for so many pipeline stages."""


Options = ImportOptions | ExportOptions | ReshapeOptions
KINDS: dict[str, tuple[type, str]] = {
    "import": (ImportOptions, "Makes a training checkpoint of a Hugging Face directory."),
    "export": (ExportOptions, "Makes a Hugging Face directory of a training checkpoint."),
    "reshape": (ReshapeOptions, "Writes a training checkpoint with other files or another wiring."),
}
PROGRAM = "convert_checkpoint.py"
COUNTS = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "residual_staleness")
USAGE = f"usage: {PROGRAM} import|export|reshape [flags], or {PROGRAM} inspect DIR; see {PROGRAM} VERB --help"


def parse_options(argv: Sequence[str]) -> Options | Path:
    """Reads the verb and its flags; a path is a directory to inspect.

    Raises:
        UserError: a line for each mistake.
    """
    if list(argv) in (["--help"], ["-h"]):
        print(USAGE)
        raise SystemExit(0)
    if not argv or argv[0] not in VERBS:
        raise UserError(f"{argv[0] if argv else 'no verb'}: expected one of {', '.join(VERBS)} first; {USAGE}")
    verb, *words = argv
    if verb == "inspect":
        if len(words) != 1 or words[0].startswith("-"):
            raise UserError(f"inspect {' '.join(words)}: expected one directory")
        return Path(words[0])
    kind, description = KINDS[verb]
    (options,) = parse_command_line([kind], words, f"{PROGRAM} {verb}", description)
    counts = {name: getattr(options, name, None) for name in COUNTS}
    mistakes = [
        f"{flag_name(name)} {count}: expected 1 or more"
        for name, count in counts.items()
        if count is not None and count < 1
    ]
    if isinstance(options, ExportOptions):
        try:
            shard_bytes(options.max_shard_size)
        except ValueError as error:
            mistakes.append(f"--max-shard-size {options.max_shard_size}: {error}")
    if mistakes:
        raise UserError(*mistakes)
    assert isinstance(options, ImportOptions | ExportOptions | ReshapeOptions)
    return options


def shard_bytes(text: str) -> int:
    """`5GB`, `500MB`, `2GiB` or a number of bytes -> bytes; raises ValueError."""
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

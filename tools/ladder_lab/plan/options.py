"""The command line of `tools/plan.py`. It needs no torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from ladder_lab.bench.sizes import SHAPE, SIZES, find_size
from ladder_lab.cost.hardware import CLUSTERS
from ladder_lab.cost.machines import GPUS, PRESETS
from ladder_lab.plan.layouts import PLANNED_WIRINGS
from megatron_ladder.blueprint.wiring import SHARED_STREAM_MODES
from megatron_ladder.command_line import parse_command_line
from megatron_ladder.errors import UserError
from megatron_ladder.files import write_atomically
from megatron_ladder.flags import flag

Command = Literal["layouts", "inference"]
COMMANDS: tuple[Command, ...] = get_args(Command)


@dataclass(frozen=True)
class LayoutOptions:
    """Layouts. The model to train, and the cluster."""

    model: str = flag("llama-8b", details=f"Names: {', '.join(SIZES)}; numbers: {SHAPE}.")
    """Shape of the model, by name or in numbers as in 8x192x512x6x6x4096."""
    cluster: str = flag("h100", choices=CLUSTERS)
    """Preset of the GPUs and links; h100 is the paper's nodes. The flags below replace single figures."""
    gpus: int = flag(8, minimum=1)
    """GPUs of the whole cluster."""
    global_batch_size: int = flag(512, aliases=("--batch",), minimum=1)
    """Samples per step."""
    seq_length: int = flag(4096, minimum=1)
    """Tokens per sample."""
    wirings: tuple[str, ...] = flag(SHARED_STREAM_MODES, choices=PLANNED_WIRINGS)
    """Wirings to compare. desync-2x and desync-4x are planned with tensor parallelism only, and without sequence
    parallelism."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """Optimizer, for the memory of its state; the time of its step is not estimated."""
    top: int = flag(10, minimum=1)
    """Number of layouts to list."""
    gpus_per_node: int | None = flag(None, minimum=1)
    """GPUs per node."""
    gpu_memory_gb: float | None = flag(None, above=0)
    """Memory of one GPU, in 10^9 bytes."""
    peak_tflops: float | None = flag(None, above=0)
    """Dense bf16 TFLOP/s of one GPU: 100 % utilisation."""
    flops_share: float | None = flag(None, above=0, maximum=1)
    """Share of the peak that the products of a model reach."""
    node_latency_us: float | None = flag(None, minimum=0)
    """Time of a small all-reduce inside a node."""
    node_bandwidth_gbs: float | None = flag(None, above=0)
    """10^9 bytes per second that an all-reduce moves in and out of each GPU inside a node (the bus bandwidth of
    nccl-tests)."""
    network_latency_us: float | None = flag(None, minimum=0)
    """Additional time of a small all-reduce for each doubling of the nodes."""
    network_bandwidth_gbs: float | None = flag(None, above=0)
    """10^9 bytes per second from one GPU to another node, in one direction."""
    contention: float | None = flag(None, minimum=0, maximum=1)
    """Share of an overlap that a large collective gives back; about 0.2 if its multiprocessors are bounded."""
    json: Path | None = flag(None, output="file")
    """File for all layouts."""


@dataclass(frozen=True)
class InferenceOptions:
    """Inference. The model, and the machine that generates with it."""

    model: str = flag("llama-70b", details=f"Names: {', '.join(SIZES)}; numbers: {SHAPE}.")
    """Shape of the model, by name (llama-70b, or just 70b) or in numbers as in 8x192x512x6x6x4096."""
    gpu: str = flag("h100", choices=GPUS)
    """GPU."""
    tp: int = flag(8, minimum=1)
    """Tensor-parallel GPUs."""
    link: str = flag("nvlink", choices=PRESETS)
    """Interconnect between them."""
    link_latency_us: float | None = flag(None, minimum=0, requires=("--link-bandwidth-gbs",))
    """Time of a small all-reduce on your interconnect, instead of --link."""
    link_bandwidth_gbs: float | None = flag(None, above=0, requires=("--link-latency-us",))
    """10^9 bytes per second that a large all-reduce moves in and out of each GPU (the bus bandwidth of nccl-tests)."""
    batch: int = flag(4, minimum=1)
    """Equal requests at a time."""
    prompt: int = flag(1024, minimum=1)
    """Tokens of each prompt."""
    generate: int = flag(512, minimum=2)
    """New tokens of each request."""
    weight_bits: float = flag(16, minimum=1, maximum=16)
    """Bits of a weight of the layers: 16, 8 or 4; 4.5 with scales of groups."""
    ladder_layers: int | None = flag(None, minimum=1)
    """Ladder layers of the hybrid, the last ones of the model; half of them by default."""
    measurements: Path | None = None
    """CSV of measured standard models, whose columns replace these flags: prints the error of each prediction."""
    json: Path | None = flag(None, output="file")
    """File for all predictions."""


DESCRIPTIONS: dict[Command, str] = {
    "layouts": "Lists the layouts that fit a cluster, fastest first, and where each wiring pays. Needs no GPU.",
    "inference": "Predicts tokens per second of each wiring, and says whether a ladder would help a machine.",
}
KINDS: dict[Command, type] = {"layouts": LayoutOptions, "inference": InferenceOptions}


def parse_options(argv: Sequence[str]) -> LayoutOptions | InferenceOptions:
    """Read the subcommand (`layouts` by default) and its flags; raise UserError with one message per error."""
    words = list(argv)
    command: Command = "layouts"
    if words and words[0] in COMMANDS:
        command = COMMANDS[COMMANDS.index(words.pop(0))]
    elif words and not words[0].startswith("-"):
        raise UserError(f"{words[0]}: expected one of {', '.join(COMMANDS)} first")
    others = "".join(f"\n  plan.py {name:10} {text}" for name, text in DESCRIPTIONS.items() if name != command)
    description = f"{DESCRIPTIONS[command]}\n\nOther subcommands:{others}"
    (options,) = parse_command_line([KINDS[command]], words, f"plan.py {command}", description)
    assert isinstance(options, LayoutOptions | InferenceOptions)
    try:
        find_size(options.model)
    except ValueError as error:
        raise UserError(f"--model {options.model}: {error}") from None
    return options


def write_output(path: Path, text: str) -> None:
    """Replace a file that the command line names; raise UserError if it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text)
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror}") from None

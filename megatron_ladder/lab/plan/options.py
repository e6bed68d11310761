"""The command line of `tools/plan.py`. No torch here: planning needs none."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from megatron_ladder.blueprint.wiring import SHARED_STREAM_MODES
from megatron_ladder.errors import UserError
from megatron_ladder.flags import flag, flag_name, parse_command_line
from megatron_ladder.lab.bench.sizes import find_size
from megatron_ladder.lab.cost.hardware import CLUSTERS

Command = Literal["layouts", "calibrate", "paper"]
COMMANDS: tuple[Command, ...] = get_args(Command)


@dataclass(frozen=True)
class LayoutOptions:
    """Layouts. What is to be trained, and on what."""

    model: str = "llama-8b"
    """Shape of the model: paper-1.2b, paper-1.5b, paper-3.5b, paper-4.5b, llama-1b, llama-3b, llama-8b, llama-34b,
    llama-70b, llama-405b, or in numbers, LAYERSxHIDDENxFFNxHEADSxKEY_VALUE_HEADSxVOCABULARY as in
    8x192x512x6x6x4096."""
    cluster: str = "h100"
    """Figures of the GPUs and links: h100 (the paper's nodes) or h200. The flags below replace single ones."""
    gpus: int = 8
    """GPUs of the whole cluster."""
    global_batch_size: int = flag(512, aliases=("--batch",))
    """Samples of one step."""
    seq_length: int = 4096
    """Tokens of a sample."""
    wirings: tuple[str, ...] = SHARED_STREAM_MODES
    """Wirings to compare: any --residual-mode of pretrain_ladder.py except desync."""
    top: int = 10
    """Layouts to list."""
    calibration: Path | None = None
    """File that `plan.py calibrate` wrote on a machine of this cluster; what it measured replaces the figures."""
    gpus_per_node: int | None = None
    """GPUs of one node."""
    gpu_memory_gb: float | None = None
    """Memory of one GPU, in 10^9 bytes."""
    peak_tflops: float | None = None
    """Dense bf16 TFLOP/s of one GPU: the 100 % of the utilisation."""
    flops_share: float | None = None
    """Share of it that the products of a model reach, up to 1."""
    node_latency_us: float | None = None
    """Time of a small all-reduce inside a node."""
    node_bandwidth_gbs: float | None = None
    """10^9 bytes a second that an all-reduce moves in and out of each GPU inside a node (nccl-tests' bus bandwidth)."""
    network_latency_us: float | None = None
    """Further time of a small all-reduce for each doubling of the nodes."""
    network_bandwidth_gbs: float | None = None
    """10^9 bytes a second from one GPU to another node, in one direction."""
    contention: float | None = None
    """Share of an overlap that a large collective gives back; about 0.2 if its multiprocessors are bounded."""
    json: Path | None = None
    """File for all layouts."""
    plot: Path | None = None
    """PNG of the wirings' speed-up over the interconnect's time, at the best tensor-parallel layout."""


@dataclass(frozen=True)
class CalibrateOptions:
    """Calibration. Measures this machine, with a process for each GPU or CPU core that shares a model."""

    output: Path
    """File to keep the measurements in, for --calibration."""
    tp: int = 2
    """Processes; they are started here."""
    rounds: int = 9
    """Measurements of each kind, of which the median counts."""
    small: bool = False
    """Sizes that two CPU cores measure in seconds; implied without a GPU."""


@dataclass(frozen=True)
class PaperOptions:
    """Published runs. Fits the serving model to one table of the paper's program and predicts another."""

    fit: Path
    """CSV with columns model, p2p, tensor_parallel, batch, wiring, prefill_seconds, decode_511_tokens_seconds."""
    predict: Path
    """CSV with the first five of them; it keeps what else it has."""
    json: Path
    """File for the rows of the second table with what is predicted."""


PROGRAM = "plan.py {layouts,calibrate,paper}"
DESCRIPTIONS: dict[Command, str] = {
    "layouts": "Lists the layouts that fit a cluster, fastest first, and where each wiring pays. Needs no GPU.",
    "calibrate": "Measures what the predictions need on this machine.",
    "paper": "Predicts runs of the paper's program from others.",
}
KINDS: dict[Command, type] = {"layouts": LayoutOptions, "calibrate": CalibrateOptions, "paper": PaperOptions}


def parse_options(argv: Sequence[str]) -> LayoutOptions | CalibrateOptions | PaperOptions:
    """Reads `layouts|calibrate|paper` and the flags; `--calibrate` is the second.

    Raises:
        UserError: a line for each mistake.
    """
    words = ["calibrate" if word == "--calibrate" else word for word in argv]
    words.sort(key=lambda word: word != "calibrate")
    mistakes: list[str] = []
    command: Command = "layouts"
    if words and words[0] in COMMANDS:
        command = COMMANDS[COMMANDS.index(words.pop(0))]
    elif words and not words[0].startswith("-"):
        raise UserError(f"{words[0]}: expected one of {', '.join(COMMANDS)} first")
    (options,) = parse_command_line(
        [KINDS[command]], words, f"plan.py {command}", f"{DESCRIPTIONS[command]} {PROGRAM}", found=mistakes
    )
    if isinstance(options, LayoutOptions):
        mistakes += _layout_mistakes(options)
    if isinstance(options, CalibrateOptions):
        mistakes += [f"--tp {options.tp}: there is nothing to reduce below 2"] * (options.tp < 2)
        mistakes += [f"--rounds {options.rounds}: expected 3 or more"] * (options.rounds < 3)
    if mistakes:
        raise UserError(*mistakes)
    assert isinstance(options, LayoutOptions | CalibrateOptions | PaperOptions)
    return options


def _layout_mistakes(options: LayoutOptions) -> list[str]:
    mistakes = []
    try:
        find_size(options.model)
    except ValueError as error:
        mistakes.append(f"--model {options.model}: {error}")
    if options.cluster not in CLUSTERS:
        mistakes.append(f"--cluster {options.cluster}: expected one of {', '.join(CLUSTERS)}")
    unknown = [name for name in options.wirings if name not in SHARED_STREAM_MODES]
    if unknown:
        mistakes.append(f"--wirings {' '.join(unknown)}: expected some of {', '.join(SHARED_STREAM_MODES)}")
    for name in ("gpus", "global_batch_size", "seq_length", "top", "gpus_per_node", "gpu_memory_gb", "peak_tflops",
                 "flops_share", "node_bandwidth_gbs", "network_bandwidth_gbs"):  # fmt: skip
        value = getattr(options, name)
        if value is not None and value <= 0:
            mistakes.append(f"{flag_name(name)} {value}: expected more than 0")
    for name in ("node_latency_us", "network_latency_us", "contention"):
        value = getattr(options, name)
        if value is not None and value < 0:
            mistakes.append(f"{flag_name(name)} {value}: expected 0 or more")
    for name in ("flops_share", "contention"):
        value = getattr(options, name)
        if value is not None and value > 1:
            mistakes.append(f"{flag_name(name)} {value}: is a share, expected 1 at most")
    return mistakes

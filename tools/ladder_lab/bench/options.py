"""The command lines of `tools/benchmark.py` and `tools/throughput.py`."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, cast

from ladder_lab.bench.sizes import POSITIONS, SHAPE, SIZES, find_size
from ladder_lab.bench.variants import VARIANTS
from ladder_lab.cost.machines import PRESETS
from megatron_ladder.blueprint.model import model_errors, tensor_parallel_errors
from megatron_ladder.blueprint.wiring import EXPERT_MODES, SHARED_STREAM_MODES
from megatron_ladder.command_line import parse_command_line, take_subcommand
from megatron_ladder.errors import Problem, raise_user_errors
from megatron_ladder.flags import Check, flag

Case = Literal["decode", "prefill", "train", "forward"]
CASES = {
    "decode": "Time wirings in alternation: decoding tokens.",
    "prefill": "Time wirings in alternation: prefilling a prompt.",
    "train": "Time wirings in alternation: forward and backward of a micro-batch.",
    "forward": "Time wirings in alternation: forward of a micro-batch, as in evaluation.",
}
TRAINING: tuple[Case, ...] = ("train", "forward")
"""The cases of a micro-batch, whose ranks may be expert-parallel."""
UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
DEFAULT_ALPHA = ("0", "0.5c", "1c", "2c")
OWN = "own"
"""Interconnect time that stands for the GPUs' own interconnect."""
FEWEST_ROUNDS = 4
"""With fewer rounds, quartiles are meaningless."""
DEFAULT_SMS = (16,)
MOST_SMS = 32
"""Thread blocks of NCCL's largest collectives."""


@dataclass(frozen=True)
class BenchmarkOptions:
    """Passes. Wirings to compare, their interconnect, and the size of the timed passes."""

    tp: int | None = flag(None, minimum=2, excludes="ep")
    """Tensor-parallel processes, each with a dedicated core or GPU; 2 if neither this nor --ep is given. The program
    starts them, unless `deepspeed` or `torchrun` did, on one or several hosts."""
    ep: int | None = flag(None, minimum=2)
    """Expert-parallel processes instead, which are data-parallel to each other: the interconnect carries their
    all-to-alls, and --alpha is the time of one. For train and forward; on GPUs, requires --emulate."""
    emulate: bool = flag(False, excludes=("tp_all_reduce", "link pipelined"))
    """Play rank 0 of --tp or --ep in one process, on one GPU: a collective is a kernel that takes --comm-sms
    multiprocessors for the time of --alpha, and moves its message through memory. On a CPU, a rehearsal whose times
    mean nothing."""
    wirings: tuple[str, ...] = flag(("standard", "ladder", "parallel", "ladder-parallel"), choices=VARIANTS)
    """Ways to compute, interleaved in every round. -blocking waits for every all-reduce at once, ladder-autograd leaves
    backward to autograd, -early-weights computes gradients of weights at once, and no-comm omits the all-reduces."""
    sizes: tuple[str, ...] = flag((), aliases=("--size",), details=f"Names: {', '.join(SIZES)}; numbers: {SHAPE}.")
    """Shapes of the model, measured one after the other, by name or in numbers such as 8x192x512x6x6x4096. If not
    given: small-train for train and forward, or small-ep with --ep; small otherwise."""
    alpha: tuple[str, ...] = flag(DEFAULT_ALPHA, details=f"Among {', '.join(PRESETS)}.")
    """Times of one all-reduce (with --ep, all-to-all) on the emulated wire: 500us, 2ms, or multiples of a sub-block's
    measured computation: 1c of the mean sub-block, 1a of the attention; or that of a real interconnect for this number
    of ranks and size of message. On GPUs, requires --emulate."""
    skew: tuple[str, ...] = flag(("0",), requires="emulate")
    """Times by which the latest rank prolongs each collective, such as 3us."""
    link: Literal["serial", "pipelined"] = "serial"
    """Whether the emulated wire carries collectives one after another, as NCCL does, or concurrently."""
    clock: Literal["wall", "processor"] = flag("wall", excludes=("emulate", "device cuda"))
    """Clock of CPUs and of their emulated wire. processor leaves out what other programs do on the same cores."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Device: cpu computes in fp32 over an emulated wire; cuda computes in bf16 over the GPUs' interconnect."""
    comm_sms: tuple[int, ...] = flag(DEFAULT_SMS, minimum=1, maximum=MOST_SMS)
    """Multiprocessors that a collective of NCCL occupies on a GPU at most; with --emulate, those that it takes, and
    several values are measured one after the other."""
    tp_all_reduce: Literal["auto", "nccl", "symmetric"] = flag("nccl", requires="device cuda")
    """Implementation of small all-reduces between GPUs: NCCL, or a one-shot kernel over symmetric memory, which needs
    NVLink; auto uses the latter where it is possible."""
    compile_sub_blocks: Literal["auto", "true", "false"] = flag("auto", requires="device cuda")
    """Use torch.compile between matrix products. auto: the default of training, or that of generation (false)."""
    cuda_graph: bool = flag(True, requires="device cuda")
    """Replay captured training and decode steps. Without them, the host launches every kernel. Training and generation
    on GPUs replay steps by default. A prefill is not captured."""
    batch: int = flag(1, minimum=1)
    """Samples per batch."""
    sequence: int = flag(128, minimum=1)
    """Tokens of a sample; for decode, of the prompt."""
    tokens: int = flag(8, minimum=1)
    """Tokens decoded per timing."""
    draft_tokens: int | None = flag(None, minimum=1)
    """Tokens that a drafting head proposes in each decode step. Its weights are random, so all are wrong, and a step
    gives one token."""
    rounds: int = flag(7, minimum=FEWEST_ROUNDS)
    """Rounds that count; every wiring runs once in each."""
    local_rank: int | None = flag(None, aliases=("--local_rank",))
    """Passed by the deepspeed launcher; ignored."""
    json: Path | None = flag(None, output="file")
    """File for the results: a list of rows."""

    @property
    def tensor_parallel(self) -> int:
        """Number of tensor-parallel ranks."""
        return 1 if self.ep else self.tp or 2

    @property
    def ranks(self) -> int:
        """Number of ranks of the interconnect."""
        return self.ep or self.tensor_parallel


def parse_benchmark(argv: Sequence[str]) -> tuple[Case, BenchmarkOptions]:
    """Parse `decode|prefill|train|forward` and the flags; raise UserError with one message per error."""
    subcommand, words = take_subcommand(argv, CASES, "benchmark.py", "Times wirings in alternation.")
    case = cast(Case, subcommand)
    (options,) = parse_command_line([BenchmarkOptions], words, f"benchmark.py {case}", CASES[case])
    default_size = ("small-ep" if options.ep else "small-train") if case in TRAINING else "small"
    options = replace(options, sizes=options.sizes or (default_size,))
    raise_user_errors(_find_errors(case, options))
    return case, replace(
        options,
        alpha=(OWN,) if options.device == "cuda" and not options.emulate else options.alpha,
        cuda_graph=options.cuda_graph and options.device == "cuda",
    )


def _find_errors(case: Case, options: BenchmarkOptions) -> Iterator[str]:
    if not options.emulate and options.device == "cuda" and options.alpha != DEFAULT_ALPHA:
        yield "--alpha requires --device cpu or --emulate: GPUs have their own interconnect"
    if options.ep and case not in TRAINING:
        yield f"--ep requires train or forward: {case} divides experts over tensor-parallel ranks"
    if options.draft_tokens and case != "decode":
        yield f"--draft-tokens {options.draft_tokens} requires decode"
    if options.ep and options.device == "cuda" and not options.emulate:
        yield "--ep requires --device cpu or --emulate"
    if not options.emulate and len(options.comm_sms) > 1:
        yield f"--comm-sms {' '.join(map(str, options.comm_sms))}: several values require --emulate"
    if not options.emulate and options.device == "cpu" and options.comm_sms != DEFAULT_SMS:
        yield "--comm-sms requires --device cuda or --emulate: a wire on CPUs takes no multiprocessors"
    for text in options.skew:
        parsed = parse_alpha(text)
        if parsed is None or parsed[1] != "s":
            yield f"--skew {text}: expected a time such as 3us"
    # Wires share captured steps, and so a conversation.
    timings = len(options.alpha) * len(options.skew) if options.emulate else 1
    most = (POSITIONS - options.sequence - 1 - (options.draft_tokens or 0)) // (timings * (options.rounds + 1))
    if case == "decode" and options.tokens > most:
        yield f"--tokens {options.tokens}: a conversation has {POSITIONS} positions, enough for {most} in each timing"
    for size in options.sizes:
        try:
            shape = find_size(size)
            errors = tensor_parallel_errors(shape, options.tensor_parallel)
            yield from (f"--tp {options.ranks} does not divide --sizes {size}: {error}" for error in errors)
            if options.ep and (not shape.num_experts or shape.num_experts % options.ep):
                yield f"--ep {options.ep} does not divide the {shape.num_experts} experts of --sizes {size}"
            for name in options.wirings:
                wiring = VARIANTS[name].wiring
                if wiring.lacks_layers(shape):
                    yield f"--wirings {name}: no layer of {size} would read late: leave it out"
                if wiring.mode in EXPERT_MODES:
                    yield from (f"--sizes {size}: {error}" for error in model_errors(wiring.of(shape, options.ranks)))
                if options.ep and not wiring.shares_stream:
                    yield f"--wirings {name}: its ranks read different streams: leave it out with --ep"
        except ValueError as error:
            yield f"--sizes {size}: {error}"
    for text in options.alpha:
        try:
            if text in PRESETS:
                PRESETS[text].seconds(1, options.ranks)
            elif parse_alpha(text) is None:
                yield f"--alpha {text}: expected 500us, 2ms, 1c, 0.5a, or one of {', '.join(PRESETS)}"
        except ValueError as error:
            yield f"--alpha {error}: change --{'ep' if options.ep else 'tp'}"


def parse_alpha(text: str) -> tuple[float, str] | None:
    """Parse an interconnect time: `2ms` -> (0.002, "s"), `1c` -> (1.0, "c"); None if it is neither."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?(?:e-?\d+)?)(us|ms|s|c|a)?", text)
    if match is None or (match[2] is None and float(match[1]) != 0):
        return None
    unit = match[2] or "s"
    return (float(match[1]), unit) if unit in "ca" else (float(match[1]) * UNITS[unit], "s")


def _size_problems(size: str) -> Iterator[Problem]:
    try:
        find_size(size)
    except ValueError as error:
        yield Problem({"size": size}, "{}: {error}", error=error)


@dataclass(frozen=True)
class ThroughputOptions:
    """Throughput. Forward and backward passes of a micro-batch; all variants run once per round."""

    size: str = flag("paper-1.2b", details=f"Names: {', '.join(SIZES)}; numbers: {SHAPE}.")
    """Shape of the model, by name or in numbers such as 8x192x512x6x6x4096. Weights and gradients of two models must
    fit: give fewer layers in numbers."""
    wirings: tuple[str, ...] = flag(("standard", "ladder"), choices=SHARED_STREAM_MODES)
    """Wirings to measure."""
    sequence: tuple[int, ...] = flag((2048, 4096), minimum=1)
    """Tokens per sample; each length is measured separately."""
    batch: int = flag(1, minimum=1)
    """Samples per micro-batch."""
    backend: str = "inductor"
    """Backend of torch.compile; "none" compiles neither our models nor those of transformers."""
    cuda_graph: bool = True
    """Replay captured passes of our models on GPUs. Without them, the host launches every kernel."""
    matrix: int = flag(8192, minimum=1)
    """Size of the square matrix product whose rate defines the lower bound of the time."""
    rounds: int = flag(7, minimum=FEWEST_ROUNDS)
    """Measured rounds; every variant runs once per round."""
    json: Path | None = flag(None, output="file")
    """File for the results, as a list of rows."""

    checks = (Check(_size_problems, ("size",)),)

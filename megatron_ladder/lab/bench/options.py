"""The command line of `tools/benchmark.py`."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

from megatron_ladder.blueprint.model import tensor_parallel_mistakes
from megatron_ladder.errors import UserError
from megatron_ladder.flags import flag, parse_command_line
from megatron_ladder.lab.bench.sizes import find_size
from megatron_ladder.lab.cost.links import PRESETS

Case = Literal["decode", "prefill", "train"]
CASES: tuple[Case, ...] = get_args(Case)
UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
DEFAULT_ALPHA = ("0", "0.5c", "1c", "2c")
OWN = "own"
"""In the place of an interconnect's time: the one that there is."""
MOST_SMS = 32
"""Thread blocks of NCCL's largest collectives."""


@dataclass(frozen=True)
class BenchmarkOptions:
    """Benchmark. What is set side by side, and on which interconnect. Lists are given as A B C or A,B,C."""

    tp: int = 2
    """Tensor-parallel processes; they are started here, each with a core of its own, or a GPU."""
    wirings: tuple[str, ...] = ("standard", "ladder", "parallel", "ladder-parallel")
    """Ways to compute, interleaved in every round: standard, ladder, parallel, ladder-parallel, staleness-2, desync-2,
    desync-4, ladder-autograd (backward left to autograd), standard-blocking, ladder-blocking."""
    sizes: tuple[str, ...] = flag((), aliases=("--size",))
    """Shapes of the model, one after the other: small, small-llama, small-train, paper-1.2b, paper-3.5b, llama-1b and
    so on to llama-405b, or any other one in numbers, LAYERSxHIDDENxFFNxHEADSxKEY_VALUE_HEADSxVOCABULARY as in
    8x192x512x6x6x4096; small-train for train and small otherwise if not given."""
    batch: int = 1
    """Samples at once."""
    sequence: int = 128
    """Tokens of a sample; for decode, of the prompt before the timed tokens."""
    tokens: int = 8
    """Tokens decoded in one timing."""
    alpha: tuple[str, ...] = ()
    """Times of one all-reduce on the emulated wire: 500us, 2ms, or multiples of the measured computation of a
    sub-block: 1c of the mean one, 1a of the attention. 0 0.5c 1c 2c if neither this nor --link-preset is given."""
    link_preset: tuple[str, ...] = ()
    """Further times of one all-reduce: those of nvlink, no-p2p or infiniband for this many ranks and this size of
    message."""
    link: Literal["serial", "pipelined"] = "serial"
    """Whether collectives take the emulated wire one after another, as NCCL's do, or side by side."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where to compute: in fp32 on cores, over an emulated wire; or in bf16 on GPUs, over their own one, or over an
    emulated one with --emulated-tp."""
    emulated_tp: int | None = None
    """One process on one GPU runs one rank's share of so many; the other ranks and the wire are emulated, and results
    are wrong numbers."""
    comm_sms: int = 16
    """Multiprocessors that a collective takes on a GPU: an emulated one exactly, NCCL at most."""
    tp_all_reduce: Literal["nccl", "symmetric-memory"] = "nccl"
    """Between GPUs, what small reduces go by: NCCL, or a one-shot kernel over shared memory."""
    rounds: int = 7
    """Rounds that count; every wiring runs once in each."""
    json: Path | None = None
    """File for the results: a list of rows."""
    plot: Path | None = None
    """PNG of the speed-up over the interconnect's time, for one size."""

    @property
    def ranks(self) -> int:
        """Of the tensor-parallel group, real or emulated."""
        return self.tp if self.emulated_tp is None else self.emulated_tp

    @property
    def processes(self) -> int:
        """To be started."""
        return self.tp if self.emulated_tp is None else 1

    @property
    def own_interconnect(self) -> bool:
        """Whether reduces go over the wire that there is."""
        return self.device == "cuda" and self.emulated_tp is None


def parse_options(argv: Sequence[str]) -> tuple[Case, BenchmarkOptions]:
    """Reads `decode|prefill|train` and the flags.

    Raises:
        UserError: a line for each mistake.
    """
    mistakes: list[str] = []
    words = list(argv)
    if words and words[0] in CASES:
        case = CASES[CASES.index(words.pop(0))]
    else:
        case = "decode"
        if "--help" not in words and "-h" not in words:
            mistakes.append(f"what to time comes first: one of {', '.join(CASES)}")
    (given,) = parse_command_line(
        [BenchmarkOptions], words, "benchmark.py {decode,prefill,train}", "Times wirings side by side.", found=mistakes
    )
    assert isinstance(given, BenchmarkOptions)
    options = _with_defaults(given, case)
    if options.ranks < 2:
        name = "--tp" if given.emulated_tp is None else "--emulated-tp"
        mistakes.append(f"{name} {options.ranks}: there is nothing to reduce below 2")
    else:
        mistakes += _size_mistakes(options)
    if options.rounds < 4:
        mistakes.append(f"--rounds {options.rounds}: below 4 there is no spread to judge by")
    for text in _words(given.alpha):
        if parse_alpha(text) is None:
            mistakes.append(f"--alpha {text}: expected a time such as 500us or 2ms, or a multiple such as 1c or 0.5a")
    mistakes += _interconnect_mistakes(options, given)
    if mistakes:
        raise UserError(*mistakes)
    return case, options


def _with_defaults(given: BenchmarkOptions, case: Case) -> BenchmarkOptions:
    """With lists taken apart, and what was left out."""
    sizes = _words(given.sizes) or ("small-train" if case == "train" else "small",)
    alpha, presets = _words(given.alpha), _words(given.link_preset)
    if given.device == "cuda" and given.emulated_tp is None:
        alpha = (OWN,)
    elif not alpha and not presets:
        alpha = DEFAULT_ALPHA
    return replace(given, wirings=_words(given.wirings), sizes=sizes, alpha=alpha, link_preset=presets)


def _words(values: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(word for value in values for word in value.split(",") if word)


def _size_mistakes(options: BenchmarkOptions) -> list[str]:
    mistakes = []
    for size in options.sizes:
        try:
            mistakes += tensor_parallel_mistakes(find_size(size), options.ranks)
        except ValueError as error:
            mistakes.append(f"--sizes {size}: {error}")
    if options.plot is not None and len(options.sizes) > 1:
        mistakes.append(f"--plot {options.plot}: a picture shows one size, and --sizes has {len(options.sizes)}")
    return mistakes


def _interconnect_mistakes(options: BenchmarkOptions, given: BenchmarkOptions) -> list[str]:
    mistakes = []
    for preset in options.link_preset:
        if preset not in PRESETS:
            mistakes.append(f"--link-preset {preset}: expected some of {', '.join(PRESETS)}")
            continue
        try:
            PRESETS[preset].seconds(1, max(options.ranks, 1))
        except ValueError as error:
            mistakes.append(f"--link-preset {error}: another --tp, or with --device cuda another --emulated-tp")
    if not 1 <= options.comm_sms <= MOST_SMS:
        mistakes.append(f"--comm-sms {options.comm_sms}: expected 1 to {MOST_SMS}, the most that NCCL takes")
    if options.emulated_tp is not None and options.device != "cuda":
        mistakes.append("--emulated-tp needs --device cuda: on cores every rank is a process of its own, see --tp")
    if options.own_interconnect and (given.alpha or given.link_preset):
        mistakes.append(
            "--alpha and --link-preset are for emulated wires, and with --device cuda the GPUs' own is timed: leave "
            "them out, or give --emulated-tp"
        )
    if options.tp_all_reduce == "symmetric-memory" and not options.own_interconnect:
        mistakes.append(
            "--tp-all-reduce symmetric-memory is for several GPUs that are joined by NVLink: give --device cuda "
            "without --emulated-tp, or leave it out"
        )
    return mistakes


def parse_alpha(text: str) -> tuple[float, str] | None:
    """`2ms` -> (0.002, "s"); `1c` -> (1.0, "c"); None if it is neither."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?(?:e-?\d+)?)(us|ms|s|c|a)?", text)
    if match is None or (match[2] is None and float(match[1]) != 0):
        return None
    unit = match[2] or "s"
    return (float(match[1]), unit) if unit in "ca" else (float(match[1]) * UNITS[unit], "s")

"""The command line of `tools/benchmark.py`."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from megatron_ladder.bench.sizes import SIZES
from megatron_ladder.config.fields import parse_command_line
from megatron_ladder.config.model import tensor_parallel_mistakes
from megatron_ladder.errors import UserError

Case = Literal["decode", "prefill", "train"]
CASES: tuple[Case, ...] = get_args(Case)
UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


@dataclass(frozen=True)
class BenchmarkOptions:
    """Benchmark. What is set side by side, and on which interconnect."""

    tp: int = 2
    """Tensor-parallel processes; they are started here, one thread and one core each."""
    wirings: tuple[str, ...] = ("standard", "ladder", "parallel", "ladder-parallel")
    """Ways to compute, interleaved in every round: standard, ladder, parallel, ladder-parallel, staleness-2,
    ladder-autograd (backward left to autograd), standard-blocking, ladder-blocking."""
    size: str | None = None
    """Shape of the model: small, small-llama, small-train, paper-1.2b, paper-3.5b, llama-1b and so on to
    llama-405b; small-train for train and small otherwise if not given."""
    batch: int = 1
    """Samples at once."""
    sequence: int = 128
    """Tokens of a sample; for decode, of the prompt before the timed tokens."""
    tokens: int = 8
    """Tokens decoded in one timing."""
    alpha: tuple[str, ...] = ("0", "0.5c", "1c", "2c")
    """Times of one all-reduce on the emulated wire: 500us, 2ms, or multiples of the measured computation of a
    sub-block: 1c of the mean one, 1a of the attention."""
    link: Literal["serial", "pipelined"] = "serial"
    """Whether collectives take the wire one after another, as NCCL's do, or side by side."""
    rounds: int = 7
    """Rounds that count; every wiring runs once in each."""
    json: Path | None = None
    """File for the results: a list of rows."""
    plot: Path | None = None
    """PNG of the speed-up over the interconnect's time."""


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
    (options,) = parse_command_line(
        [BenchmarkOptions], words, "benchmark.py {decode,prefill,train}", "Times wirings side by side.", found=mistakes
    )
    assert isinstance(options, BenchmarkOptions)
    size = options.size or ("small-train" if case == "train" else "small")
    if size not in SIZES:
        mistakes.append(f"--size {size}: expected one of {', '.join(SIZES)}")
    else:
        mistakes += tensor_parallel_mistakes(SIZES[size], max(options.tp, 1))
    if options.tp < 2:
        mistakes.append(f"--tp {options.tp}: there is nothing to reduce below 2")
    if options.rounds < 4:
        mistakes.append(f"--rounds {options.rounds}: below 4 there is no spread to judge by")
    for text in options.alpha:
        if parse_alpha(text) is None:
            mistakes.append(f"--alpha {text}: expected a time such as 500us or 2ms, or a multiple such as 1c or 0.5a")
    if mistakes:
        raise UserError(*mistakes)
    return case, BenchmarkOptions(**{**vars(options), "size": size})


def parse_alpha(text: str) -> tuple[float, str] | None:
    """`2ms` -> (0.002, "s"); `1c` -> (1.0, "c"); None if it is neither."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?(?:e-?\d+)?)(us|ms|s|c|a)?", text)
    if match is None or (match[2] is None and float(match[1]) != 0):
        return None
    unit = match[2] or "s"
    return (float(match[1]), unit) if unit in "ca" else (float(match[1]) * UNITS[unit], "s")

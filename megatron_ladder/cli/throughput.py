"""Training throughput of one device, side by side with transformers."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NoReturn

import torch

from megatron_ladder.blueprint.wiring import SHARED_STREAM_MODES
from megatron_ladder.errors import BadNumbersError, UserError, run_program
from megatron_ladder.flags import parse_command_line
from megatron_ladder.lab.bench.paired import FEWEST_ROUNDS, RatioVerdict
from megatron_ladder.lab.bench.sizes import find_size
from megatron_ladder.lab.bench.throughput import ThroughputWorkload, check_transformers, run
from megatron_ladder.lab.bench.variants import VARIANTS
from megatron_ladder.model.operations import require_compiler

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class ThroughputOptions:
    """Throughput. Forward and backward of a micro-batch, all ways interleaved in every round."""

    size: str = "paper-1.2b"
    """Shape of the model, as in tools/benchmark.py: paper-1.2b, llama-8b, small-train and so on, or in numbers such as
    8x192x512x6x6x4096."""
    layers: int | None = None
    """Layers, where memory does not hold all of the shape's: weights and gradients of two models have to fit."""
    wirings: tuple[str, ...] = ("standard", "ladder")
    """Our models: any --residual-mode of pretrain_ladder.py except desync."""
    sequence: tuple[int, ...] = (2048, 4096)
    """Tokens of a sample; each length is measured by itself."""
    batch: int = 1
    """Samples at once."""
    dtype: Literal["fp32", "bf16"] | None = None
    """bf16 on a GPU and fp32 on a CPU if not given."""
    backend: str = "inductor"
    """Of torch.compile; "none" compiles neither our models nor transformers'."""
    transformers: bool = True
    """Leave transformers' Llama out."""
    matrix: int = 8192
    """Side of the square product whose rate is the floor's."""
    rounds: int = 7
    """Rounds that count; every way runs once in each."""
    json: Path | None = None
    """File for the results: a list of rows."""


def option_mistakes(options: ThroughputOptions) -> list[str]:
    """A line for each value that cannot be."""
    mistakes = []
    try:
        layers = find_size(options.size).num_layers
        if not 1 <= (options.layers or 1) <= layers:
            mistakes.append(f"--layers {options.layers}: {options.size} has 1 to {layers}")
    except ValueError as error:
        mistakes.append(f"--size {options.size}: {error}")
    strange = [wiring for wiring in options.wirings if wiring not in SHARED_STREAM_MODES]
    if strange:
        mistakes.append(f"--wirings {' '.join(strange)}: expected some of {', '.join(SHARED_STREAM_MODES)}")
    numbers = {"--batch": (options.batch,), "--matrix": (options.matrix,), "--sequence": options.sequence}
    for name, values in numbers.items():
        if min(values, default=0) < 1:
            mistakes.append(f"{name} {' '.join(map(str, values))}: expected 1 or more")
    if options.rounds < FEWEST_ROUNDS:
        mistakes.append(f"--rounds {options.rounds}: below {FEWEST_ROUNDS} there is no spread to judge by")
    return mistakes


def parse_options(argv: Sequence[str], found: list[str] | None = None) -> ThroughputOptions:
    """Reads the command line.

    Args:
        found: where to append mistakes instead of raising them, for a caller that looks for more.

    Raises:
        UserError: a line for each mistake.
    """
    mistakes: list[str] = []
    options: ThroughputOptions
    (options,) = parse_command_line(
        [ThroughputOptions], argv, "throughput.py",
        "Training throughput of one device, side by side with transformers.", found=mistakes,
    )  # fmt: skip
    mistakes += option_mistakes(options)
    if found is not None:
        found.extend(mistakes)
    elif mistakes:
        raise UserError(*mistakes)
    return options


def main(argv: Sequence[str]) -> None:
    """Measures, prints a table and writes the rows.

    Raises:
        UserError: a line for each mistake.
        BadNumbersError: the machine was too noisy to judge a ratio.
    """
    mistakes: list[str] = []
    options = parse_options(argv, mistakes)
    for check in (_check_compiler, _check_transformers):
        try:
            check(options)
        except UserError as error:
            mistakes += error.mistakes
    if mistakes:
        raise UserError(*mistakes)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape = find_size(options.size)
    config = replace(
        shape, num_layers=options.layers or shape.num_layers,
        max_position_embeddings=max(shape.max_position_embeddings, *options.sequence),
    )  # fmt: skip
    dtype = options.dtype or ("bf16" if device.type == "cuda" else "fp32")
    workload = ThroughputWorkload(
        config, options.sequence[0], options.batch, DTYPES[dtype], device,
        None if options.backend == "none" else options.backend, options.matrix,
    )  # fmt: skip
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(
        f"{options.size}, {config.num_layers} of {shape.num_layers} layers, {dtype}, torch.compile {options.backend}, "
        f"on {name}, torch {torch.__version__}\n",
        flush=True,
    )
    variants = [VARIANTS[wiring] for wiring in options.wirings]
    found = run(workload, options.sequence, variants, options.rounds, options.transformers, options.json)
    doubtful = [row for row in found if row.verdict != RatioVerdict.SOUND.value]
    if doubtful:
        raise BadNumbersError("; ".join(f"{row.way} at {row.sequence}: {row.verdict}" for row in doubtful))


def _check_compiler(options: ThroughputOptions) -> None:
    if options.backend == "inductor":
        require_compiler("--backend inductor")


def _check_transformers(options: ThroughputOptions) -> None:
    if options.transformers:
        check_transformers()


def entry_point() -> NoReturn:
    """Console entry point."""
    run_program(main)

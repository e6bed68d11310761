"""Measures the training throughput of one device, compared with transformers."""

import functools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

sys.path.append(str(Path(__file__).resolve().parents[1]))

from ladder_lab.bench.options import FEWEST_ROUNDS  # noqa: E402
from ladder_lab.bench.sizes import SHAPE, SIZES, find_size  # noqa: E402
from ladder_lab.bench.variants import VARIANTS  # noqa: E402
from megatron_ladder.blueprint.wiring import SHARED_STREAM_MODES  # noqa: E402
from megatron_ladder.command_line import parse_config  # noqa: E402
from megatron_ladder.errors import BadNumbersError, ErrorCollector, run_program  # noqa: E402
from megatron_ladder.flags import flag  # noqa: E402


@dataclass(frozen=True)
class ThroughputOptions:
    """Throughput. Forward and backward passes of a micro-batch; all variants run once per round."""

    size: str = flag("paper-1.2b", details=f"Names: {', '.join(SIZES)}; numbers: {SHAPE}.")
    """Shape of the model, by name or in numbers such as 8x192x512x6x6x4096."""
    layers: int | None = flag(None, minimum=1)
    """Use fewer layers than the shape has, to save memory: weights and gradients of two models must fit."""
    wirings: tuple[str, ...] = flag(("standard", "ladder"), choices=SHARED_STREAM_MODES)
    """Wirings to measure."""
    sequence: tuple[int, ...] = flag((2048, 4096), minimum=1)
    """Tokens per sample; each length is measured separately."""
    batch: int = flag(1, minimum=1)
    """Samples per micro-batch."""
    dtype: Literal["fp32", "bf16"] | None = None
    """Data type; by default bf16 on a GPU and fp32 on a CPU."""
    backend: str = "inductor"
    """Backend of torch.compile; "none" compiles neither our models nor those of transformers."""
    transformers: bool = True
    """Do not measure the Llama model of transformers."""
    matrix: int = flag(8192, minimum=1)
    """Size of the square matrix product whose rate defines the lower bound of the time."""
    rounds: int = flag(7, minimum=FEWEST_ROUNDS)
    """Measured rounds; every variant runs once per round."""
    json: Path | None = flag(None, output="file")
    """File for the results, as a list of rows."""


def _find_errors(options: ThroughputOptions) -> Iterator[str]:
    try:
        shape = find_size(options.size)
        if (options.layers or 1) > shape.num_layers:
            yield f"--layers {options.layers}: {options.size} has {shape.num_layers} layers"
        if shape.num_experts and options.transformers:
            yield f"--size {options.size}: the Llama of transformers has no experts; add --no-transformers"
    except ValueError as error:
        yield f"--size {options.size}: {error}"


parse_options = functools.partial(
    parse_config, ThroughputOptions, program="throughput.py", description=__doc__, find_errors=_find_errors
)


def main(argv: Sequence[str]) -> None:
    """Measure, print a table and write the rows.

    Raises:
        UserError: with one message per error.
        BadNumbersError: the machine was too noisy to judge a ratio.
    """
    errors = ErrorCollector()
    options = parse_options(argv)
    import torch

    from ladder_lab.bench.paired import RatioVerdict
    from ladder_lab.bench.throughput import ThroughputWorkload, check_transformers, run
    from megatron_ladder.comm.launch import read_rank_info
    from megatron_ladder.model.operations import require_compiler

    device = read_rank_info().device()
    with errors.collect():
        if options.backend == "inductor":
            require_compiler("--backend inductor", device)
    with errors.collect():
        if options.transformers:
            check_transformers()
    errors.raise_if_any()
    shape = find_size(options.size)
    config = replace(
        shape,
        num_layers=options.layers or shape.num_layers,
        max_position_embeddings=max(shape.max_position_embeddings, *options.sequence),
    )
    dtype = options.dtype or ("bf16" if device.type == "cuda" else "fp32")
    workload = ThroughputWorkload(
        config,
        options.sequence[0],
        options.batch,
        {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype],
        device,
        None if options.backend == "none" else options.backend,
        options.matrix,
    )
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(
        f"{options.size}, {config.num_layers} of {shape.num_layers} layers, {dtype}, torch.compile {options.backend}, "
        f"on {name}, torch {torch.__version__}\n",
        flush=True,
    )
    variants = [VARIANTS[wiring] for wiring in options.wirings]
    found = run(workload, options.sequence, variants, options.rounds, options.transformers, options.json)
    doubtful = [row for row in found if row["verdict"] != RatioVerdict.SOUND.value]
    if doubtful:
        raise BadNumbersError("; ".join(f"{row['way']} at {row['sequence']}: {row['verdict']}" for row in doubtful))


if __name__ == "__main__":
    run_program(main)

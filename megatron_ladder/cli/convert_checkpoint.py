"""Converts checkpoints between Hugging Face and training; needs no GPU."""

import functools
import os
from collections.abc import Sequence
from pathlib import Path

from megatron_ladder.comm.ranks import run_ranks
from megatron_ladder.convert.options import (
    ArrangeOptions,
    ExportOptions,
    ImportOptions,
    MergeOptions,
    SensitivityOptions,
    parse_conversion,
)
from megatron_ladder.errors import run_program

parse_options = parse_conversion


def main(argv: Sequence[str]) -> None:
    """Read the command line and run its subcommand."""
    options = parse_options(argv)
    if isinstance(options, SensitivityOptions):
        ranks = options.tensor_model_parallel_size or 1
        if ranks > 1 and "WORLD_SIZE" not in os.environ:
            run_ranks(__name__, argv, ranks)
            return
        from megatron_ladder.convert.sensitivity import measure_sensitivity

        measure_sensitivity(options)
        return
    from megatron_ladder.convert.conversions import plan_export, plan_import, plan_merge, plan_reshape
    from megatron_ladder.convert.copying import carry_out
    from megatron_ladder.convert.inspection import inspect_directory

    if isinstance(options, Path):
        for line in inspect_directory(options):
            print(line)
        return
    if isinstance(options, ImportOptions):
        conversion = plan_import(options)
    elif isinstance(options, ExportOptions):
        conversion = plan_export(options)
    elif isinstance(options, MergeOptions):
        conversion = plan_merge(options)
    else:
        conversion = plan_reshape(options)
    if isinstance(options, ArrangeOptions):
        from megatron_ladder.convert.arrangement import arrange

        conversion = plan_reshape(options, arrange(options))
    carry_out(conversion, options, functools.partial(print, flush=True))


entry_point = functools.partial(run_program, main)

"""Checkpoints between Hugging Face directories and training, in any layout; without a GPU and without torch."""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from megatron_ladder.convert.measures import Measures
from megatron_ladder.convert.options import ExportOptions, ImportOptions, parse_options
from megatron_ladder.errors import run_program


def main(argv: Sequence[str]) -> None:
    """Reads the command line and does what its first word says."""
    options = parse_options(argv)
    # Not above: a command line with mistakes is told of at once.
    from megatron_ladder.convert.carry_out import carry_out
    from megatron_ladder.convert.exporting import plan_export
    from megatron_ladder.convert.importing import plan_import
    from megatron_ladder.convert.inspection import inspect_directory
    from megatron_ladder.convert.reshaping import plan_reshape

    if isinstance(options, Path):
        for line in inspect_directory(options):
            print(line)
        return
    measures = Measures()
    if isinstance(options, ImportOptions):
        conversion = plan_import(options)
    elif isinstance(options, ExportOptions):
        conversion = plan_export(options)
    else:
        conversion = plan_reshape(options)
    carry_out(conversion, options, functools.partial(print, flush=True), measures)


def entry_point() -> NoReturn:
    """Console entry point."""
    run_program(main)

"""Predicts layouts, memory and step times of a training run before it starts; needs no GPU."""

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

from ladder_lab.plan.options import LayoutOptions, parse_plan, planned_model  # noqa: E402
from megatron_ladder.errors import run_program  # noqa: E402

parse_options = parse_plan


def main(argv: Sequence[str]) -> None:
    """Read the command line and run its subcommand."""
    machine, options, flags = parse_options(argv)
    name, model = planned_model(options, flags)
    if isinstance(options, LayoutOptions):
        from ladder_lab.plan.program import print_layouts

        print_layouts(name, model, machine, options)
        return
    from ladder_lab.plan.inference import print_inference

    print_inference(name, model, machine, options, flags.ladder_layers)


if __name__ == "__main__":
    run_program(main)

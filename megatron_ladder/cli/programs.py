"""The table of programs. `setup.py` runs this file, so it must not import anything of the package at its top level.

A program NAME has a module NAME in this folder, with `entry_point`, `parse_options` and `COMMANDS`. From a checkout it
is started as `tools/NAME.py`, after an installation as `megatron-ladder-NAME`.
"""

import importlib
from dataclasses import dataclass
from types import ModuleType

PROGRAMS = (
    "pretrain",
    "benchmark",
    "benchmark_data",
    "convert_checkpoint",
    "exposed_communication",
    "generate",
    "inspect_data",
    "merge_datasets",
    "plan",
    "plot_loss",
    "prepare_corpus",
    "preprocess_data",
    "report_run",
    "run_resilient",
    "study",
    "throughput",
    "train_tokenizer",
    "write_reference",
)


@dataclass(frozen=True)
class Command:
    """A program, or one of its subcommands.

    `sections` are the dataclasses of its flags, in the order of `--help`. `words` precede the flags, such as `DIR` or a
    subcommand. The description is one sentence, or empty if the docstring of the program's module describes it.
    """

    sections: tuple[type, ...]
    words: str = ""
    description: str = ""


def script_of(program: str) -> str:
    """Return the path of a program's script in a checkout."""
    return "pretrain_ladder.py" if program == "pretrain" else f"tools/{program}.py"


def load_program(program: str) -> ModuleType:
    """Import the module of a program."""
    return importlib.import_module(f"megatron_ladder.cli.{program}")


def console_scripts() -> list[str]:
    """Return the entry points for setuptools."""
    return [
        f"megatron-ladder-{program.replace('_', '-')} = megatron_ladder.cli.{program}:entry_point"
        for program in PROGRAMS
        # It writes to the checkout.
        if program != "write_reference"
    ]

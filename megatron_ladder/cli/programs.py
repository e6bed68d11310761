"""The table of programs. `setup.py` runs this file, so it must not import anything of the package at its top level.

A program NAME has a module NAME in this folder, with `entry_point` and `parse_options`. From a checkout it is
started as `tools/NAME.py`, after an installation as `megatron-ladder-NAME`.

A program answers `--help` and wrong flags at once: its module, and the modules that it imports at the top, need only
the standard library. Its `main` calls `parse_options` first, and then imports the modules that do the work.
"""

import importlib
import sys

PROGRAMS = (
    "pretrain",
    "convert_checkpoint",
    "generate",
    "inspect_data",
    "preprocess_data",
    "report_run",
    "train_tokenizer",
)


def start(program: str) -> None:
    """Run a program from its script in a checkout."""
    if sys.version_info < (3, 11):  # noqa: UP036
        sys.stderr.write(f"error: {sys.executable} is Python {sys.version.split()[0]}: use Python 3.11 or newer\n")
        raise SystemExit(2)
    importlib.import_module(f"megatron_ladder.cli.{program}").entry_point()


def console_scripts() -> list[str]:
    """Return the entry points for setuptools."""
    return [
        f"megatron-ladder-{program.replace('_', '-')} = megatron_ladder.cli.{program}:entry_point"
        for program in PROGRAMS
    ]

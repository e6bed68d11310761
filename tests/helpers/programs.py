"""All programs of a checkout by name: those of the package, and the experiments, which live in `tools/` alone."""

import importlib
from types import ModuleType

from megatron_ladder.cli import programs
from megatron_ladder.cli.programs import script_of

__all__ = ["EXPERIMENTS", "PROGRAMS", "load_program", "script_of"]

EXPERIMENTS = ("benchmark", "dry_run", "exposed_communication", "plan", "study", "throughput")
PROGRAMS = (*programs.PROGRAMS, *EXPERIMENTS)


def load_program(program: str) -> ModuleType:
    """Import the module of a program."""
    return importlib.import_module(f"tools.{program}") if program in EXPERIMENTS else programs.load_program(program)

"""All programs of a checkout by name: those of the package, and the experiments, which live in `tools/` alone."""

import importlib
from types import ModuleType

from megatron_ladder.cli import programs

EXPERIMENTS = ("benchmark", "dry_run", "exposed_communication", "host_time", "plan", "study", "throughput")
PROGRAMS = (*programs.PROGRAMS, *EXPERIMENTS)
SUBCOMMANDS = {
    "benchmark": ("decode", "prefill", "train"),
    "convert_checkpoint": ("import", "export", "reshape", "arrange", "sensitivity", "inspect"),
    "plan": ("inference",),
    "study": ("run", "report"),
}


def script_of(program: str) -> str:
    """Return the path of a program's script in a checkout."""
    return "pretrain_ladder.py" if program == "pretrain" else f"tools/{program}.py"


def load_program(program: str) -> ModuleType:
    """Import the module of a program."""
    return importlib.import_module(f"tools.{program}" if program in EXPERIMENTS else f"megatron_ladder.cli.{program}")

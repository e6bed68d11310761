"""Lists the programs of the package, or runs one."""

import importlib
import sys
from collections.abc import Sequence

from megatron_ladder.cli.programs import PROGRAMS, start
from megatron_ladder.errors import UserError, run_program


def _list_programs(argv: Sequence[str]) -> None:
    names = {
        program.replace("_", "-"): importlib.import_module(f"megatron_ladder.cli.{program}") for program in PROGRAMS
    }
    if argv and argv[0] not in ("-h", "--help"):
        raise UserError(f"{argv[0]}: expected one of {', '.join(names)}")
    print("usage: python -m megatron_ladder PROGRAM [flags]; in an installed package also megatron-ladder-PROGRAM\n")
    for name, module in names.items():
        print(f"  {name:20} {(module.__doc__ or '').splitlines()[0]}")


if __name__ == "__main__":
    program = "".join(sys.argv[1:2]).replace("-", "_")
    if program in PROGRAMS:
        del sys.argv[1]
        start(program)
    run_program(_list_programs)

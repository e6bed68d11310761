"""The one table of exit codes, the errors behind it, and the boundary at which a program ends.

A program is a function `main(argv)`; `run_program` turns what escapes from it into one message on stderr
and an exit code, the same for every program of the project.
"""

import contextlib
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import NoReturn


class ExitCode(IntEnum):
    """What a program's exit status says."""

    DONE = 0
    """The work is done, or a stop was asked for and the state is saved."""
    INTERNAL = 1
    """A fault of ours, or of the machine: the traceback is on stderr."""
    USER_MISTAKE = 2
    """A flag, a file or their combination is wrong: one line for each mistake is on stderr."""
    BAD_NUMBERS = 3
    """Loss or gradients are not finite, and the run must not go on."""
    LOST_PEER = 4
    """Another rank ended or stopped answering."""


class UserError(Exception):
    """One or several mistakes of the user, a line each: the flag or file, what was found, the mend."""

    def __init__(self, *mistakes: str) -> None:
        super().__init__("\n".join(mistakes))
        self.mistakes = mistakes


class BadNumbersError(Exception):
    """Loss or gradients are not finite."""


class LostPeerError(Exception):
    """A collective failed because another rank is gone."""

    def __init__(self, message: str, lost: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.lost = tuple(lost)
        """The ranks that may be gone, as far as they are known."""


EXIT_CODES: dict[type[BaseException], ExitCode] = {
    UserError: ExitCode.USER_MISTAKE,
    BadNumbersError: ExitCode.BAD_NUMBERS,
    LostPeerError: ExitCode.LOST_PEER,
}

GRACE_SECONDS = 5.0
"""How long a rank waits before it ends with a failure that another rank knows more of.

A launcher stops all ranks as soon as one has failed, and reports that one's exit code. Most mistakes of a user are
seen by every rank alike, so the first rank speaks for all; a rank that is still there afterwards met a mistake of
its own (in its share of the data, say). And a rank that lost a peer lets that peer's failure be reported.
"""


def run_program(main: Callable[[Sequence[str]], None], argv: Sequence[str] | None = None) -> NoReturn:
    """Runs `main` and ends the process with the exit code of the table.

    Under a launcher (RANK is set) a user's mistake is printed by rank 0, or by the rank that alone met it; every
    other failure is printed by the rank that met it, with its number, and ends that process at once, so that no
    rank stays behind in a collective.
    """
    rank = int(os.environ.get("RANK", "0"))
    try:
        main(sys.argv[1:] if argv is None else argv)
    except UserError as error:
        if rank != 0:
            time.sleep(GRACE_SECONDS)
        for mistake in error.mistakes:
            print(f"error: {mistake}", file=sys.stderr, flush=True)
        _end(ExitCode.USER_MISTAKE)
    except KeyboardInterrupt:
        _end(ExitCode.INTERNAL)
    except Exception as error:
        fail(error)
    _end(ExitCode.DONE)


def fail(error: Exception) -> NoReturn:
    """Prints an error that is no mistake of the user, and ends the process, from any thread of it."""
    code = exit_code_of(error)
    if code is ExitCode.INTERNAL:
        traceback.print_exception(error)
    where = f"rank {os.environ['RANK']}: " if "RANK" in os.environ else ""
    print(f"error: {where}{type(error).__name__}: {error}", file=sys.stderr, flush=True)
    if code is ExitCode.LOST_PEER:
        time.sleep(GRACE_SECONDS)
    _end(code)


def exit_code_of(error: BaseException) -> ExitCode:
    """What a program ends with that raises it."""
    return next((code for kind, code in EXIT_CODES.items() if isinstance(error, kind)), ExitCode.INTERNAL)


def _end(code: ExitCode) -> NoReturn:
    """Ends the process now when it failed or is one of several.

    Destructors of process groups may wait for ranks that never come, and their threads may abort a process whose
    work is done when a peer leaves a moment earlier.
    """
    for stream in (sys.stdout, sys.stderr):
        # A terminal may be gone.
        with contextlib.suppress(OSError):
            stream.flush()
    if code is ExitCode.DONE and "RANK" not in os.environ:
        sys.exit(0)
    os._exit(code)

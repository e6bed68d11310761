"""Exit codes, the exceptions behind them, and the boundary at which a program ends.

A program is a function `main(argv)`. `run_program` turns every exception that leaves it into messages on stderr and
an exit code, in the same way for all programs.
"""

import contextlib
import difflib
import errno
import faulthandler
import os
import re
import select
import sys
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, NoReturn, TypeVar


class ExitCode(IntEnum):
    """Exit status of a program."""

    DONE = 0
    """The work is done, or the program was asked to stop and has saved its state."""
    INTERNAL = 1
    """A bug, or a failure of the machine: the traceback is on stderr."""
    USER_ERROR = 2
    """A flag, a file or their combination is invalid, or a disk is full: stderr has one line per error."""
    BAD_NUMBERS = 3
    """The loss or the gradients are not finite, and the run must not continue."""
    LOST_PEER = 4
    """Another rank ended or stopped responding."""


def flag_name(field_name: str) -> str:
    """`micro_batch_size` -> `--micro-batch-size`."""
    return "--" + field_name.replace("_", "-")


@dataclass
class Vocabulary:
    """The words for fields in messages: flags, keywords of Python, or keys of a file, as the user wrote them."""

    spell: Callable[[str], str] = flag_name
    """Returns the word for a field that the user did not write."""
    spellings: dict[str, str] = field(default_factory=dict)
    """The user's word by field."""
    places: dict[str, str] = field(default_factory=dict)
    """File and line of each field that a file sets."""

    def name(self, field_name: str) -> str:
        """Return the word for a field."""
        return self.spellings.get(field_name) or self.spell(field_name)

    @contextlib.contextmanager
    def in_messages(self) -> Iterator[None]:
        """Render the problems of an error that ends the block in this vocabulary."""
        try:
            yield
        except UserError as error:
            raise UserError(*(problem.render(self) for problem in error.problems)) from None


def _shown(value: object) -> str | None:
    """Return a value as users write it; None for switches, which have none, and for no value."""
    if value is None or isinstance(value, bool):
        return None
    return " ".join(map(str, value)) or "none" if isinstance(value, tuple) else str(value)


@dataclass(init=False)
class Problem:
    """One error that the user can fix, as data: the fields that it is about, and templates that name them in braces.

    `{}` is the first field, its subject.

        Problem({"hidden_size": 250, "num_attention_heads": 7},
                "{hidden_size} is not divisible by {num_attention_heads}", "change one of them, or give {head_dim}")

    Rendered for a command line, this is `--hidden-size 250 is not divisible by --num-attention-heads 7: change one of
    them, or give --head-dim`; from Python, `hidden_size 250 is not ...`. A message follows the place of its first
    field, if a file sets it: `(run.yaml:3)`. A switch that is turned off is a field `no_...`.

    Code below the command line never spells a flag. It raises a UserError with problems, or with plain texts that begin
    with a path, for which `ErrorCollector.collect` adds the field. The boundary of a program, which knows the words of
    its user, renders them once.
    """

    fields: dict[str, str | None]
    """The values in the message by field; a switch has none. Each is shown where the reason first names its field."""
    reason: str
    fix: str
    """What the user can do, which follows a colon; it names fields without values."""
    texts: dict[str, str]
    """Other texts that the templates name in braces, such as paths, which may hold braces themselves."""
    before: str
    after: str

    def __init__(self, fields: Mapping[str, object], reason: str, fix: str = "", /, **texts: object) -> None:
        self.fields = {name: _shown(value) for name, value in fields.items()}
        self.reason = reason
        self.fix = fix
        self.texts = {name: str(text) for name, text in texts.items()}
        self.before = self.after = ""

    @staticmethod
    def of(message: "str | Problem") -> "Problem":
        """Return a plain text as a problem of no field."""
        return message if isinstance(message, Problem) else Problem({}, "{text}", text=message)

    @staticmethod
    def read(sent: Mapping[str, Any]) -> "Problem":
        """Return a problem from its `vars`, which another rank sent."""
        problem = Problem({}, "")
        vars(problem).update(sent)
        return problem

    def __hash__(self) -> int:
        return hash(str(self))

    def __str__(self) -> str:
        return self.render(Vocabulary())

    def render(self, vocabulary: Vocabulary) -> str:
        """Return the message in the words of a user."""
        values = dict(self.fields)

        def word(match: re.Match[str]) -> str:
            name = match[1] or next(iter(self.fields))
            if name in self.texts:
                return self.texts[name]
            value = values.pop(name, None)
            return vocabulary.name(name) + ("" if value is None else f" {value}")

        message = re.sub(r"{(\w*)}", word, self.reason)
        values.clear()
        if self.fix:
            message += ": " + re.sub(r"{(\w*)}", word, self.fix)
        place = vocabulary.places.get(next(iter(self.fields), ""))
        return self.before + message + (f" ({place})" if place else "") + self.after

    def about(self, field_name: str) -> "Problem":
        """Return the problem with a field as its subject, if it names none itself."""
        if self.fields:
            return self
        problem = Problem({field_name: None}, "{} " + self.reason, self.fix, **self.texts)
        return problem.noted(self.before, self.after)

    def among(self, known: Collection[str]) -> "Problem":
        """Return the problem for a program that has only some fields: without a fix, and with others as texts."""
        reason = self.reason.replace("{}", "{" + next(iter(self.fields), "") + "}")
        named = re.findall(r"{(\w+)}", reason)
        others = {name: self.fields.get(name) for name in named if name not in (*known, *self.texts)}
        texts = self.texts | {name: name if value is None else f"{name} {value}" for name, value in others.items()}
        return Problem({name: value for name, value in self.fields.items() if name in known}, reason, **texts)

    def noted(self, before: str = "", after: str = "") -> "Problem":
        """Return the problem with a note before its message, or after it."""
        problem = Problem(self.fields, self.reason, self.fix, **self.texts)
        problem.before = before + self.before
        problem.after = self.after + after
        return problem


class UserError(Exception):
    """Errors that the user can fix, each kept once; `messages` are for a command line."""

    def __init__(self, *problems: str | Problem) -> None:
        self.problems = tuple(dict.fromkeys(map(Problem.of, problems)))
        super().__init__("\n".join(self.messages))

    @property
    def messages(self) -> tuple[str, ...]:
        """The message of each problem, which names the flag or file, what is wrong, and the fix."""
        return tuple(map(str, self.problems))


_Message = TypeVar("_Message", str, Problem)


class BadNumbersError(Exception):
    """The loss or the gradients are not finite."""


class LostPeerError(Exception):
    """A collective failed because another rank is gone."""

    def __init__(self, message: str, lost: Sequence[int] = (), timed_out: bool = False) -> None:
        super().__init__(message)
        self.lost = tuple(lost)
        """Ranks that are possibly gone, as far as known."""
        self.timed_out = timed_out
        """Whether they did not answer in time; otherwise their connections were closed, because they ended."""


class ErrorCollector:
    """Collects the problems of several user errors, so that one run reports all of them."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []

    def add(self, *problems: str | Problem) -> None:
        self.problems += map(Problem.of, problems)

    @contextlib.contextmanager
    def collect(self, field_name: str = "") -> Iterator[None]:
        """Add the problems of a UserError that ends the block; code after the block runs in any case.

        A field, if it is given, is the subject of those that name none: `--load DIR: holds no checkpoint`.
        """
        try:
            yield
        except UserError as error:
            self.problems += [problem.about(field_name) if field_name else problem for problem in error.problems]

    def raise_if_any(self) -> None:
        """Raise a UserError with all problems if there are any."""
        raise_user_errors(self.problems)


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: `1 file`, `1,234 files`, `2 boxes`."""
    plural = "es" if noun.endswith("x") else "s"
    return f"{number:,} {noun}{'' if number == 1 else plural}"


def size_text(count: int) -> str:
    """Return a number of bytes in decimal units."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count} bytes"


def expected_one_of(word: str, names: Iterable[str], likely: Iterable[str] = ()) -> str:
    """Return `expected one of` the names, after the one that a word probably means, among `likely` ones if there are.

    Upper case, dashes and other signs make no difference.
    """

    def plain(text: str) -> str:
        return re.sub(r"[^a-z0-9]", "", text.lower())

    listed = list(names)
    by_plain = {plain(name): name for name in likely or listed}
    near = difflib.get_close_matches(plain(word), by_plain, n=1, cutoff=0.8)
    expected = f"did you mean {by_plain[near[0]]}? Expected" if near else "expected"
    return f"{expected} one of {', '.join(listed)}"


def limited(problems: Sequence[_Message]) -> list[_Message | str]:
    """Return the first twenty problems, and the number of others."""
    shown: list[_Message | str] = list(problems[:20])
    if others := len(problems[20:]):
        shown.append(f"and {others} more errors")
    return shown


def raise_user_errors(problems: Iterable[str | Problem]) -> None:
    """Raise a UserError with the problems if there are any."""
    if listed := list(problems):
        raise UserError(*listed)


GRACE_SECONDS = 5.0
"""Time that a rank waits before it exits with a failure that another rank can explain better.

A launcher stops all ranks as soon as one fails, and reports the exit code of that rank. Most user errors occur on
every rank, so rank 0 reports them; a rank that still runs after the grace period has an error that no other rank has
(in its part of the data, for example). A rank that lost a peer gives that peer the time to report its failure.
"""


def run_program(main: Callable[[Sequence[str]], None], argv: Sequence[str] | None = None) -> NoReturn:
    """Run `main` and end the process with the exit code that belongs to its outcome.

    Under a launcher (RANK is set), rank 0 prints a user error, unless only another rank has it. The rank that has any
    other failure prints it with its rank, and ends its process at once, so that no rank hangs in a collective.
    """
    # By default, the threads of torch spin while they wait for each other. On a busy machine, this takes the cores from
    # the threads that they wait for, and a program becomes 30 times slower.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    # Prints the stack if the system ends the process, for example because a mapped file was truncated.
    with contextlib.suppress(OSError, ValueError, RuntimeError):
        faulthandler.enable()
    if sys.stdout is not None and sys.stdout.errors == "strict":
        # A terminal may lack characters of a text or of a path.
        sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    try:
        main(sys.argv[1:] if argv is None else argv)
    except KeyboardInterrupt:
        _end(ExitCode.INTERNAL)
    except Exception as error:
        if isinstance(error, BrokenPipeError) and _reader_is_gone():
            _end(ExitCode.INTERNAL)
        fail(error)
    _end(ExitCode.DONE)


def _reader_is_gone() -> bool:
    """Whether the program that reads stdout has ended, such as `head`."""
    stdout = select.poll()
    stdout.register(1, 0)
    return any(event & select.POLLERR for _, event in stdout.poll(0))


def fail(error: Exception) -> NoReturn:
    """Print an error, with its traceback if it is a bug, and end the process; any thread may call this."""
    rank = os.environ.get("RANK")
    # A module of this or of another package that lacks one is a bug.
    if isinstance(error, ModuleNotFoundError) and error.name and "." not in error.name and error.name != __package__:
        error = UserError(
            f"the Python package {error.name} is not installed for {sys.executable}: activate the environment of the "
            "checkout (source .venv/bin/activate), which `bash examples/quickstart.sh` creates, or install this "
            "project with pip"
        )
    code = exit_code_of(error)
    if isinstance(error, UserError):
        lines = [f"error: {message}" for message in error.messages]
        if rank not in (None, "0"):
            time.sleep(GRACE_SECONDS)
    else:
        described = describe_full_disk(error) or f"{type(error).__name__}: {error}"
        lines = ["error: " + ("" if rank is None else f"rank {rank}: ") + described]
    if code is ExitCode.INTERNAL:
        lines = ["".join(traceback.format_exception(error)) + lines[0]]
    print(without_passwords("\n".join(lines)), file=sys.stderr, flush=True)
    if code is ExitCode.LOST_PEER:
        time.sleep(GRACE_SECONDS)
    _end(code)


def describe_full_disk(error: BaseException) -> str | None:
    """Return the file that does not fit on its disk, or into a quota, and what helps; None for other errors."""
    if not isinstance(error, OSError) or error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return None
    # A write does not know the name of its file; `files.naming` adds it.
    file = "" if error.filename is None else f"{error.filename}: "
    return f"{file}{error.strerror}: free some space, or write to another disk, and run the same command again"


def without_passwords(text: str) -> str:
    """Return a text without the credentials of addresses, as in `https://name:password@host`."""
    return re.sub(r"://[^/\s@]+@", "://", text)


def exit_code_of(error: BaseException) -> ExitCode:
    """Return the exit code of a program that ends with this exception."""
    match error:
        case UserError():
            return ExitCode.USER_ERROR
        case BadNumbersError():
            return ExitCode.BAD_NUMBERS
        case LostPeerError():
            return ExitCode.LOST_PEER
        case OSError(errno=errno.ENOSPC | errno.EDQUOT):
            return ExitCode.USER_ERROR
    return ExitCode.INTERNAL


def _end(code: ExitCode) -> NoReturn:
    """End the process, without running destructors if it failed or is one of several ranks.

    Destructors of process groups may wait for ranks that never arrive, and their threads may abort a process that has
    finished its work when a peer leaves slightly earlier.
    """
    # Each is None if it was closed before the start.
    for stream in filter(None, (sys.stdout, sys.stderr)):
        # The terminal may have been closed since.
        with contextlib.suppress(OSError):
            stream.flush()
    if code is ExitCode.DONE and "RANK" not in os.environ:
        sys.exit(0)
    os._exit(code)

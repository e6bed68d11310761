"""The common part of all conversions: report, check, copy, write the other files, verify, publish."""

import contextlib
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError

from megatron_ladder.convert.copying import Files, UnusableNumberError, total_bytes, verify_files, write_files
from megatron_ladder.convert.options import ConversionOptions
from megatron_ladder.convert.outputs import check_space, size_text, work_directory
from megatron_ladder.errors import UserError
from megatron_ladder.files import write_atomically

_FILES_LISTED = 8


@dataclass(frozen=True)
class Conversion:
    """A conversion whose input and target were checked.

    `work` is the temporary directory next to the target; `facts` and `notes` are lines and warnings for the user.
    """

    files: Files
    work: Path
    target: Path
    small_files: Callable[[Path], Mapping[str, bytes]]
    """The temporary directory with the files of tensors -> the other files by name, in the order of writing."""
    publish: Callable[[Path], Path]
    """The complete temporary directory -> the published directory."""
    facts: Sequence[str]
    notes: Sequence[str] = ()
    verify_source: Callable[[], None] = lambda: None
    """Raises UserError if files of the source are damaged."""
    reading: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
    """Called around all reading."""
    check_logits: Callable[[Path], str] | None = None
    """The complete temporary directory -> a line about logits; for --verify."""


def carry_out(conversion: Conversion, options: ConversionOptions, report: Callable[[str], None]) -> None:
    """Execute a conversion, or with --dry-run only report it.

    Raises:
        UserError: a source is damaged, has a weight that cannot be converted, or can no longer be read, or there is no
            space.
        RuntimeError: verification failed.
    """
    began, files, work = time.monotonic(), conversion.files, conversion.work
    for line in (*conversion.facts, *(f"*** {note} ***" for note in conversion.notes)):
        report(line)
    names = [*files]
    listed = names if len(names) <= _FILES_LISTED else names[: _FILES_LISTED - 1]
    for name in listed:
        report(f"  {name}: {size_text(total_bytes({name: files[name]}))}, {len(files[name])} tensors")
    if len(listed) < len(names):
        report(f"  and {len(names) - len(listed)} more files")
    size = size_text(total_bytes(files))
    report(f"{size} in {len(names)} files -> {conversion.target}")
    if options.dry_run:
        report("nothing was written (--dry-run)")
        return
    continued = work.exists()
    if not continued:
        check_space(conversion.target, total_bytes(files))
    conversion.verify_source()
    try:
        with work_directory(work, report), conversion.reading():
            if continued:
                report(f"continues an interrupted conversion in {work}")
            write_files(files, work)
            for name, content in conversion.small_files(work).items():
                write_atomically(work / name, content)
            if options.verify:
                verify_files(files, work)
                count = sum(map(len, files.values()))
                report(f"verified: all {count} tensors are bitwise equal to their sources")
                if conversion.check_logits is not None:
                    report(conversion.check_logits(work))
            published = conversion.publish(work)
    except UnusableNumberError as error:
        # No source that can be converted has the same plan.
        shutil.rmtree(work)
        raise UserError(f"{error}; nothing was written") from None
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{work}: {reason}; run the same command again to continue") from error
    report(f"wrote {size} in {time.monotonic() - began:.1f} s")
    report(f"wrote {published}")

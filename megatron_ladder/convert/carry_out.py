"""The common part of all conversions: report, check, copy, write the other files, verify, publish."""

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatron_ladder.checkpoint.checksum import file_error
from megatron_ladder.convert.copying import UnusableNumberError, copy_tensors, verify_files
from megatron_ladder.convert.measures import Measures, Report, size_text
from megatron_ladder.convert.options import ConversionOptions
from megatron_ladder.convert.outputs import check_space, work_directory
from megatron_ladder.convert.plan import CopyPlan
from megatron_ladder.errors import UserError, raise_user_errors
from megatron_ladder.files import write_atomically
from megatron_ladder.progress import ProgressBar

_FILES_LISTED = 8


@dataclass(frozen=True)
class Conversion:
    """A conversion whose input and target were checked.

    `work` is the temporary directory next to the target; `facts` and `notes` are lines and warnings for the user.
    """

    plan: CopyPlan
    work: Path
    target: Path
    checksums: bool
    """Whether checksums of the planned files are needed."""
    small_files: Callable[[Mapping[str, str]], Mapping[str, bytes]]
    """Checksums of the planned files -> the other files by name, in the order of writing."""
    publish: Callable[[Path], Path]
    """The complete temporary directory -> the published directory."""
    facts: Sequence[str]
    check_logits: Callable[[Path], str] | None = None
    """The complete temporary directory -> a line about logits; for --verify."""
    notes: Sequence[str] = ()
    source_checksums: Mapping[Path, str] = field(default_factory=dict)
    """Source file -> the checksum in its manifest; empty if the source has none."""


def carry_out(conversion: Conversion, options: ConversionOptions, report: Report, measures: Measures) -> None:
    """Execute a conversion, or with --dry-run only report it.

    Raises:
        UserError: a source is damaged, has a weight that cannot be converted, or can no longer be read, or there is no
            space.
        RuntimeError: verification failed.
    """
    plan = conversion.plan
    for line in (*conversion.facts, *(f"*** {note} ***" for note in conversion.notes)):
        report(line)
    listed = plan.files if len(plan.files) <= _FILES_LISTED else plan.files[: _FILES_LISTED - 1]
    for file in listed:
        report(f"  {file.name}: {size_text(file.data_bytes)}, {len(file.entries)} tensors")
    if len(listed) < len(plan.files):
        report(f"  and {len(plan.files) - len(listed)} more files")
    report(f"{size_text(plan.total_bytes)} in {len(plan.files)} files -> {conversion.target}")
    if options.dry_run:
        report("nothing was written (--dry-run)")
        return
    work = conversion.work
    continued = work.exists()
    if not continued:
        check_space(conversion.target, plan.total_bytes)
    # Tensors are copied in the order of the model, which rarely is that of their files, while a checksum needs a file
    # from beginning to end. So the files are read twice.
    recorded = conversion.source_checksums
    total = sum(path.stat().st_size for path in recorded)
    with measures.checksum(), ProgressBar("verifying the source", total) as progress:
        damaged = [file_error(path, expected, progress.advance) for path, expected in recorded.items()]
    raise_user_errors(f"{error}; choose another checkpoint with --load" for error in damaged if error is not None)
    try:
        with work_directory(work, report):
            if continued:
                report(f"continues an interrupted conversion in {work}")
            with ProgressBar("copying", plan.total_bytes) as progress:
                checksums = copy_tensors(plan, work, measures, progress, conversion.checksums)
            for name, content in conversion.small_files(checksums).items():
                write_atomically(work / name, content)
            if options.verify:
                with measures.verifying():
                    with ProgressBar("verifying", plan.total_bytes) as progress:
                        verify_files(plan, work, measures, progress)
                    report(f"verified: all {len(plan.tensors)} tensors are bitwise equal to their sources")
                    if conversion.check_logits is not None:
                        report(conversion.check_logits(work))
            published = conversion.publish(work)
    except UnusableNumberError as error:
        # No source that can be converted has the same plan.
        shutil.rmtree(work)
        raise UserError(f"{error}; nothing was written") from None
    except OSError as error:
        raise UserError(f"{work}: {error.strerror or error}; run the same command again to continue") from error
    report(measures.summary(plan.total_bytes))
    report(f"wrote {published}")

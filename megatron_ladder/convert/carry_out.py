"""What all conversions share: say what will be done, copy, write what belongs to the tensors, check, publish."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatron_ladder.convert.copying import copy_tensors, verify_files
from megatron_ladder.convert.measures import Measures, Progress, Report, size_text
from megatron_ladder.convert.options import Caution
from megatron_ladder.convert.outputs import check_space, work_directory, write_small_files
from megatron_ladder.convert.plan import Plan
from megatron_ladder.convert.source_checksums import check_sources
from megatron_ladder.errors import UserError

_FILES_LISTED = 8


@dataclass(frozen=True)
class Conversion:
    """A checked conversion: all that is left is work."""

    plan: Plan
    work: Path
    """Directory beside the target."""
    target: Path
    checksums: bool
    """Whether the files' checksums are needed."""
    small_files: Callable[[Mapping[str, str]], Mapping[str, bytes]]
    """Checksums of the plan's files -> what is written after them, in that order."""
    publish: Callable[[Path], Path]
    """The complete directory -> where it stands then."""
    facts: Sequence[str]
    """Lines about source and target for the user."""
    check_logits: Callable[[Path], str] | None = None
    """The complete directory -> a line about logits; for --verify."""
    notes: Sequence[str] = field(default=())
    """Lines that must not be overlooked."""
    source_checksums: Mapping[Path, str] = field(default_factory=dict)
    """File of the source -> the checksum that it should have; empty if the source has none."""


def carry_out(conversion: Conversion, caution: Caution, report: Report, measures: Measures) -> None:
    """Converts, or only says what would be done.

    Raises:
        UserError: a source is damaged or cannot be read any more, or there is no space.
        RuntimeError: what was read back is not what was written.
    """
    plan = conversion.plan
    for line in (*conversion.facts, *(f"*** {note} ***" for note in conversion.notes)):
        report(line)
    listed = plan.files if len(plan.files) <= _FILES_LISTED else plan.files[: _FILES_LISTED - 1]
    for file in listed:
        report(f"  {file.name}: {size_text(file.data_bytes)}, {len(file.entries)} tensors")
    if len(listed) < len(plan.files):
        report(f"  and {len(plan.files) - len(listed)} files more")
    report(f"{size_text(plan.bytes_in_all)} in {len(plan.files)} files -> {conversion.target}")
    if caution.dry_run:
        report("nothing was written (--dry-run)")
        return
    work = conversion.work
    taken_over = work.exists()
    if not taken_over:
        check_space(conversion.target, plan.bytes_in_all)
    check_sources(conversion.source_checksums, report, measures)
    try:
        with work_directory(work, report):
            if taken_over:
                report(f"goes on in {work}, which an earlier conversion left")
            progress = Progress("copied", plan.bytes_in_all, report, measures)
            checksums = copy_tensors(plan, work, measures, progress, conversion.checksums)
            write_small_files(work, conversion.small_files(checksums))
            if caution.verify:
                _verify(conversion, report, measures)
            published = conversion.publish(work)
    except OSError as error:
        raise UserError(f"{work}: {error.strerror or error}: the same command goes on from there") from error
    report(measures.summary(plan.bytes_in_all))
    report(f"wrote {published}")


def _verify(conversion: Conversion, report: Report, measures: Measures) -> None:
    plan = conversion.plan
    with measures.verifying():
        names = {file.name for file in plan.files}
        verify_files(plan, conversion.work, names, Progress("compared", plan.bytes_in_all, report, measures))
        report(f"verified: all {len(plan.tensors)} tensors are bit by bit what was read")
        if conversion.check_logits is not None:
            report(conversion.check_logits(conversion.work))

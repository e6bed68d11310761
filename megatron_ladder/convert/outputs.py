"""How a conversion's result comes to stand where it was asked for: in a directory beside, renamed when it is whole.

    MODEL.tmp-0123456789abcdef/                  a Hugging Face directory that is being written, or that died
    SAVE/iter_0000000.tmp-0123456789abcdef/      a checkpoint likewise

The digits are those of the plan, so that the same command goes on where it died, file by file, and another begins
anew. Nothing has the target's name before everything is written and fsynced.
"""

import errno
import fcntl
import os
import secrets
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from megatron_ladder.checkpoint.publish import (
    is_published_name,
    publish,
    published_checkpoints,
    publishing_order,
    temporary_directory,
)
from megatron_ladder.convert.copying import PARTIAL
from megatron_ladder.convert.measures import Report, size_text
from megatron_ladder.errors import UserError


@contextmanager
def work_directory(path: Path, report: Report) -> Iterator[Path]:
    """Makes the directory beside the target, or takes it over from a conversion that died.

    On a file system without locks it cannot be known whether that one died, and a line says so.

    Raises:
        UserError: a conversion that is alive writes there, or the directory cannot be made.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise UserError(f"{path}: cannot be made: {error.strerror}") from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise UserError(f"{path}: the same conversion is under way: wait for it") from None
            # Not only where locks are missing: NFS locks for writing, and no directory can be opened for that (EBADF).
            report(f"*** {path}: cannot be locked ({error.strerror}): see that no other conversion writes there ***")
        for partial in path.glob(f"*{PARTIAL}"):
            partial.unlink()
        yield path
    finally:
        os.close(descriptor)


def check_space(target: Path, needed: int) -> None:
    """Raises UserError if the file system of a directory that may not exist yet has too few bytes."""
    existing = next(folder for folder in (target.absolute(), *target.absolute().parents) if folder.exists())
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise UserError(f"{target}: {size_text(needed)} are to be written, and {size_text(free)} are free there")


def write_small_files(directory: Path, files: Mapping[str, bytes]) -> None:
    """Writes and fsyncs files in their order, each under its name only when it is whole."""
    for name, content in files.items():
        partial = directory / (name + PARTIAL)
        with open(partial, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.rename(partial, directory / name)
    fsync_directory(directory)


def fsync_directory(path: Path) -> None:
    """Makes the names in a directory outlive a crash of the machine."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def hf_work(target: Path, fingerprint: str) -> Path:
    """Where a Hugging Face directory is written."""
    return target.absolute().with_name(f"{target.absolute().name}.tmp-{fingerprint}")


def check_hf_target(target: Path, overwrite: bool) -> None:
    """Raises UserError if the directory may not be written to, or is not one that may be replaced."""
    if not os.path.lexists(target):
        return
    if target.is_symlink() or not target.is_dir():
        raise UserError(f"--hf {target}: is not a directory: name another")
    if not any(target.iterdir()):
        return
    if not overwrite:
        raise UserError(f"--hf {target}: exists and is not empty: name another, or give --overwrite")
    if not (target / "config.json").is_file():
        raise UserError(f"--hf {target}: has no config.json, so it is no model that --overwrite would replace")


def publish_hf(work: Path, target: Path, overwrite: bool) -> None:
    """Gives a complete directory the target's name; what had it is removed after that.

    Raises:
        UserError: something stands there since the target was checked before; it is not touched, and `work` stays.
    """
    try:
        check_hf_target(target, overwrite)
    except UserError as error:
        raise UserError(f"{error}: the converted model is whole in {work}: rename that") from None
    old = work.with_name(f"{work.name}.old")
    if target.exists():
        if old.exists():
            # Of the same conversion, killed while it removed this: the target had been replaced by then.
            shutil.rmtree(old)
        os.rename(target, old)
    os.rename(work, target)
    fsync_directory(target.absolute().parent)
    if old.exists():
        shutil.rmtree(old)


def check_save_target(save: Path, iteration: int, overwrite: bool) -> list[str]:
    """Sees whether a checkpoint of that iteration may be written into a directory of checkpoints.

    Returns:
        Names of the published checkpoints that it will replace.

    Raises:
        UserError: it may not.
    """
    if is_published_name(save.name):
        raise UserError(f"--save {save}: is the name of one checkpoint: name the directory that it is to stand in")
    if save.exists() and not save.is_dir():
        raise UserError(f"--save {save}: is not a directory: name another")
    published = published_checkpoints(save)
    others = [name for name in published if publishing_order(name)[0] != iteration]
    if others:
        raise UserError(
            f"--save {save}: holds {', '.join(others[:3])}{' and more' if len(others) > 3 else ''}, checkpoints of "
            "another run: name another directory"
        )
    if published and not overwrite:
        raise UserError(f"--save {save}: holds {published[-1]}: name another directory, or give --overwrite")
    return published


def save_work(save: Path, iteration: int, fingerprint: str) -> Path:
    """Where a checkpoint is written."""
    return temporary_directory(save, iteration, fingerprint)


def publish_save(work: Path, save: Path, iteration: int, replaced: Collection[str]) -> Path:
    """Publishes a complete checkpoint; what it replaces is removed after that.

    Args:
        replaced: what `check_save_target` returned before anything was written.

    Raises:
        UserError: others were published since then; nothing of them is touched, and `work` stays.
    """
    others = [name for name in published_checkpoints(save) if name not in replaced]
    if others:
        raise UserError(
            f"--save {save}: {', '.join(others)}: published there while this conversion ran, by another program: "
            f"the converted checkpoint is whole in {work}: move it to another directory, as iter_{iteration:07d}"
        )
    published = publish(work, save, iteration)
    for name in replaced:
        # Under the name of a save that died, so that no checkpoint ever lacks files.
        doomed = temporary_directory(save, iteration, secrets.token_hex(8))
        os.rename(save / name, doomed)
        shutil.rmtree(doomed)
    return published

"""Publication of a conversion: written to a temporary directory next to the target, renamed when complete.

    MODEL.tmp-0123456789abcdef/                  a Hugging Face directory that is being written, or was interrupted
    SAVE/iter_0000000.tmp-0123456789abcdef/      a checkpoint likewise

The digits identify the plan: the same command continues an interrupted conversion file by file, any other starts from
scratch. Nothing has the target's name before everything is written and fsynced.
"""

import os
import shutil
from pathlib import Path

from megatron_ladder.checkpoint.format import HF_CONFIG, is_hf_directory
from megatron_ladder.checkpoint.publish import (
    Retention,
    is_published_name,
    publish,
    published_checkpoints,
    publishing_order,
    remove_old_checkpoints,
)
from megatron_ladder.errors import Problem, UserError, size_text
from megatron_ladder.files import sync_directory


def check_space(target: Path, needed: int) -> None:
    """Raise UserError if the file system of a directory, which may not exist yet, has too little space."""
    existing = next(folder for folder in (target.absolute(), *target.absolute().parents) if folder.exists())
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise UserError(f"{target}: needs {size_text(needed)}, and {size_text(free)} are free")


def check_hf_target(target: Path, overwrite: bool) -> None:
    """Raise UserError if the target exists and must not be replaced."""
    if not target.exists() or not any(target.iterdir()):
        return
    is_model = is_hf_directory(target)
    if not is_model and (published_checkpoints(target) or is_published_name(target.name)):
        fix = "give it to {load}, and to {hf} a directory to write"
        raise UserError(Problem({"hf": target}, "{hf}: holds training checkpoints", fix))
    if not overwrite:
        raise UserError(Problem({"hf": target}, "{hf}: exists and is not empty", "choose another, or add {overwrite}"))
    if not is_model:
        reason = f"{{hf}}: has no {HF_CONFIG}, and {{overwrite}} replaces only models"
        raise UserError(Problem({"hf": target}, reason, "choose another"))


def publish_hf(work: Path, target: Path, overwrite: bool) -> Path:
    """Rename a complete directory to the target's name, remove an old target afterwards, and return the new one."""
    old = work.with_name(f"{work.name}.old")
    if overwrite and target.exists():
        if old.exists():
            # Left by the same conversion, killed after it had replaced the target.
            shutil.rmtree(old)
        os.rename(target, old)
    os.rename(work, target)
    sync_directory(target.absolute().parent)
    if old.exists():
        shutil.rmtree(old)
    return target


def check_save_target(save: Path, iteration: int, overwrite: bool) -> None:
    """Raise UserError if a checkpoint of that iteration must not be written into a directory of checkpoints."""
    if is_published_name(save.name):
        reason = "{save}: is the name of a single checkpoint"
        raise UserError(Problem({"save": save}, reason, "choose the directory above it"))
    if is_hf_directory(save):
        reason = "{save}: is a Hugging Face directory, which import reads as {hf}"
        raise UserError(Problem({"save": save}, reason, "choose another"))
    published = published_checkpoints(save)
    others = [name for name in published if publishing_order(name)[0] != iteration]
    if others:
        listed = ", ".join(others[:3]) + (" and more" if len(others) > 3 else "")
        reason = "{save}: holds {listed}, checkpoints of another run"
        raise UserError(Problem({"save": save}, reason, "choose another directory", listed=listed))
    if published and not overwrite:
        reason = f"{{save}}: holds {published[-1]}"
        raise UserError(Problem({"save": save}, reason, "choose another directory, or add {overwrite}"))


def publish_save(work: Path, save: Path, iteration: int, overwrite: bool) -> Path:
    """Publish a complete checkpoint, and remove an older one of the same iteration afterwards."""
    published = publish(work, save, iteration)
    if overwrite:
        remove_old_checkpoints(save, Retention(keep_last=1))
    return published

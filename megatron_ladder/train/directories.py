"""A look at the directories of --load and --save before a run starts, on rank 0."""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatron_ladder.checkpoint.format import Checkpoint, find_checkpoint, is_hf_directory, reporting_os_errors
from megatron_ladder.checkpoint.publish import REPLACED_FILES, is_published_name, published_checkpoints, read_latest
from megatron_ladder.command_line import Settings
from megatron_ladder.config.file import CONFIG_NAME
from megatron_ladder.errors import ErrorCollector, Problem, UserError
from megatron_ladder.train.record import RECORD_NAME

_REQUIRED = ("num_layers", "hidden_size", "num_attention_heads", "train_iters", "lr")
"""Fields without which no model is trained from scratch under --load."""


def look_for_checkpoint(settings: Settings) -> Checkpoint | None:
    """Return the checkpoint that --load names, if any; raise UserError if it is damaged, or the run requires one."""
    values = settings.values
    load = values["load"]
    if load is None:
        return None
    subject = {"load": load}
    errors = ErrorCollector()
    with errors.collect("load"), reporting_os_errors(load):
        if is_published_name(load.name) and not load.exists():
            fix = "give {parent} to load the newest one"
            raise UserError(Problem(subject, "{}: there is no such checkpoint", fix, parent=load.parent))
        if (checkpoint := find_checkpoint(load)) is not None:
            return checkpoint
    errors.raise_if_any()
    for name in ("finetune", "exit_on_missing_checkpoint", "skip_train"):
        if values[name]:
            reason = f"{{}}: holds no checkpoint, and {{{name}}} requires one"
            raise UserError(Problem(subject, reason, "give a directory that does"))
    if missing := [f"{{{name}}}" for name in _REQUIRED if name not in settings.given]:
        fix = "give them to start from scratch, or a directory with a checkpoint"
        raise UserError(Problem(subject, f"{{}}: holds no checkpoint that would provide {', '.join(missing)}", fix))
    return None


def look_into_save(values: Mapping[str, Any]) -> None:
    """Create --save, if it is given; raise UserError if the run cannot save there, or must not."""
    save = values["save"]
    if save is None:
        return
    subject = {"save": save}
    if is_published_name(save.name):
        raise UserError(Problem(subject, "{}: is the name of a single checkpoint", "give the directory above it"))
    errors = ErrorCollector()
    with errors.collect("save"), reporting_os_errors(save):
        if is_hf_directory(save):
            errors.add(Problem(subject, "{}: is a Hugging Face directory", "give another"))
        for path in (save / name for name in (*REPLACED_FILES, RECORD_NAME, CONFIG_NAME)):
            if path.exists() and not path.is_file():
                reason = f"{{}}: {path.name} is not a file"
                errors.add(Problem(subject, reason, "remove it, or give another directory"))
        if not (values["skip_train"] or values["overwrite_checkpoints"]):
            _check_save_directory(save, values["load"], values["finetune"])
    errors.raise_if_any()
    # Now, so that no other rank has to. Every host reports why it cannot write there.
    with suppress(OSError):
        save.mkdir(parents=True, exist_ok=True)


def _check_save_directory(save: Path, load: Path | None, finetune: bool) -> None:
    """Raise UserError if --save holds checkpoints that the run does not continue."""
    names = published_checkpoints(save)
    fix = "continue {current} with {load} {save_path}"
    if load is None:
        why = "{load} is not given, so this run would start from scratch"
    elif not is_within(load.resolve(), save.resolve()):
        why = "this run starts from {load}"
    elif finetune:
        why = "{finetune} starts at iteration 0 again"
    else:
        return
    if finetune:
        fix += " and without {finetune}"
    if names:
        raise UserError(
            Problem(
                {"save": save, "load": load},
                f"{{}}: holds {{current}} of another run, and {why}",
                f"{fix}, or give another {{save}}, or {{overwrite_checkpoints}}, after which {{load}} continues the "
                "new run and no longer the old one",
                current=read_latest(save) or names[-1],
                save_path=save,
            )
        )


def is_within(load: Path, save: Path) -> bool:
    """Return whether a directory is --save or one of its checkpoints, going by their names."""
    directory = load.parent if is_published_name(load.name) else load
    return directory.absolute() == save.absolute()

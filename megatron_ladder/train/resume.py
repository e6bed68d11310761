"""Completion of a run from the checkpoint that it resumes, and comparison with it: model, steps, schedule and data.

A resumed run takes every value of the model, the steps, the optimizer and the data that is not given. The schedule
determines the loss curve, so another value on the command line is an error unless one of two flags decides between the
values; their names and meaning are Megatron's. Only --train-iters may change freely, and the decay of the learning rate
still ends where it did. Other changes of what is learned are reported.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, get_type_hints

import msgspec

from megatron_ladder.blueprint.wiring import WIRING_FIELDS
from megatron_ladder.checkpoint.format import (
    Checkpoint,
    find_checkpoint,
    is_hf_directory,
    reporting_os_errors,
)
from megatron_ladder.checkpoint.publish import REPLACED_FILES, is_published_name, published_checkpoints, read_latest
from megatron_ladder.config.file import CONFIG_NAME
from megatron_ladder.config.run import SECTION_TYPES, SECTIONS, RunConfig, RunFlags
from megatron_ladder.config.sections import CheckpointConfig, OptimizerConfig
from megatron_ladder.data.identity import data_changes
from megatron_ladder.errors import ErrorCollector, Problem, UserError, raise_user_errors
from megatron_ladder.flags import flag_name, section_flags, to_plain, value_errors
from megatron_ladder.progress import print_rank_0
from megatron_ladder.tokenizers.copies import find_tokenizer
from megatron_ladder.tokenizers.kinds import Tokenizer, same_tokenizer
from megatron_ladder.train.record import RECORD_NAME
from megatron_ladder.typed import typed

_FREE_TO_CHANGE = ("init_method_std", "max_position_embeddings")
"""Fields of the model that a resumed run may change, because they affect no stored tensor and no step."""
_DEFINES_ORDER = ("seed", "seq_length")
"""Fields that a resumed run must not change, because they determine the order of samples."""
_REQUIRED = ("num_layers", "hidden_size", "num_attention_heads", "train_iters", "lr")
"""Flags without which no model is trained from scratch under --load."""
_TAKEN = ("training", "data", "checkpoint", "logging", "reliability", "optimizer")
"""Sections whose values a resumed run takes, unless a flag declares otherwise."""
_IGNORED, _REPORTED, _DATA = (
    {flag.field_name for flag in section_flags(*SECTIONS) if flag.on_resume == rule}
    for rule in ("ignore", "report", "data")
)
"""Names of flags by their `on_resume`."""


def look_for_checkpoint(flags: RunFlags) -> Checkpoint | None:
    """Return the checkpoint that --load names, if any; raise UserError if it is damaged, or the run requires one."""
    load = flags.checkpoint.load
    if load is None:
        return None
    with reporting_os_errors(f"--load {load}"):
        if is_published_name(load.name) and not load.exists():
            raise UserError(f"--load {load}: there is no such checkpoint: give {load.parent} to load the newest one")
        if (checkpoint := find_checkpoint(load)) is not None:
            return checkpoint
    for flag, required in (
        ("--finetune", flags.checkpoint.finetune),
        ("--exit-on-missing-checkpoint", flags.checkpoint.exit_on_missing_checkpoint),
        ("--skip-train", flags.logging.skip_train),
    ):
        if required:
            raise UserError(f"--load {load}: holds no checkpoint, and {flag} requires one: give a directory that does")
    if missing := [flag_name(name) for name in _REQUIRED if name not in flags.given]:
        raise UserError(
            f"--load {load}: holds no checkpoint that would provide {', '.join(missing)}: give them to start from "
            "scratch, or a directory with a checkpoint"
        )
    return None


def look_into_save(flags: RunFlags) -> None:
    """Create --save, if it is given; raise UserError if the run cannot save there, or must not."""
    save = flags.checkpoint.save
    if save is None:
        return
    if is_published_name(save.name):
        raise UserError(f"--save {save}: is the name of a single checkpoint: give the directory above it")
    errors = ErrorCollector()
    with errors.collect(), reporting_os_errors(f"--save {save}"):
        if is_hf_directory(save):
            errors.add(f"--save {save}: is a Hugging Face directory: give another")
        for path in (save / name for name in (*REPLACED_FILES, RECORD_NAME, CONFIG_NAME)):
            if path.exists() and not path.is_file():
                errors.add(f"--save {save}: {path.name} is not a file: remove it, or give another directory")
        if not flags.logging.skip_train:
            _check_save_directory(flags.checkpoint)
    errors.raise_if_any()
    # Now, so that no other rank has to. Every host reports why it cannot write there.
    with suppress(OSError):
        save.mkdir(parents=True, exist_ok=True)


def _check_save_directory(options: CheckpointConfig) -> None:
    """Raise UserError if --save holds checkpoints that the run does not continue, unless --overwrite-checkpoints."""
    save, load = options.save, options.load
    if save is None or options.overwrite_checkpoints or not (names := published_checkpoints(save)):
        return
    current = read_latest(save) or names[-1]
    if load is None:
        why = "--load is not given, so this run would start from scratch"
    elif not _is_within(load.resolve(), save.resolve()):
        why = f"this run starts from --load {load}"
    elif options.finetune:
        why = "--finetune starts at iteration 0 again"
    else:
        return
    fix = f"continue {current} with --load {save}{' and without --finetune' * options.finetune}"
    raise UserError(
        f"--save {save}: holds {current} of another run, and {why}: {fix}, or give another --save, or "
        "--overwrite-checkpoints, after which --load continues the new run and no longer the old one"
    )


def _is_within(load: Path, save: Path) -> bool:
    """Return whether --load is --save or one of its checkpoints, going by their names."""
    directory = load.parent if is_published_name(load.name) else load
    return directory.absolute() == save.absolute()


def complete_flags(flags: RunFlags, checkpoint: Checkpoint) -> RunFlags:
    """Return flags with the checkpoint's model and sequence length, and without --finetune its data, steps, optimizer,
    reports and intervals of saves, where no value was given.

    Raises UserError if the checkpoint provides no value of a required flag.
    """
    stored, given = checkpoint.model(), flags.given
    values = {name: value for name, value in vars(stored.to_flags()).items() if name not in given}
    if flags.model.residual_mode != stored.residual_mode and "residual_mode" in given:
        values = {name: value for name, value in values.items() if name not in WIRING_FIELDS}
    # The tokenizer may determine the size of the vocabulary.
    values.pop("vocab_size", None)
    # Values of the run may require those of the model.
    flags = replace(flags, model=replace(flags.model, **values))
    if not flags.checkpoint.finetune:
        flags = _with_values_of_the_run(flags, checkpoint)
    elif "seq_length" not in given:
        length = _values(checkpoint.manifest.get("run", {})).get("seq_length", flags.training.seq_length)
        flags = replace(flags, training=replace(flags.training, seq_length=length))
    required = {"--train-iters": flags.training.train_iters, "--lr": flags.optimizer.lr}
    raise_user_errors(Problem(name, " is required: --load lacks it") for name in required if required[name] is None)
    positions = flags.model.max_position_embeddings
    if "max_position_embeddings" in values:
        positions = max(stored.max_position_embeddings, flags.training.seq_length)
    return replace(flags, model=replace(flags.model, max_position_embeddings=positions))


def _with_values_of_the_run(flags: RunFlags, checkpoint: Checkpoint) -> RunFlags:
    """Return flags with the values of the checkpoint's run, unless given ones replace or exclude them."""
    stored = _values(checkpoint.manifest.get("run", {}))
    unchanged = {*flags.given, *_IGNORED}
    given_data = flags.given & _DATA
    if given_data:
        unchanged |= _DATA - ({"train_data_path", "streaming"} if given_data == {"valid_data_path"} else set())
    if flags.checkpoint.override_opt_param_scheduler:
        # By default, the decay that replaces the stored one is as long as the run.
        unchanged |= {"lr_decay_iters", "lr_wsd_decay_iters"}
    if flags.checkpoint.use_checkpoint_opt_param_scheduler:
        unchanged -= {flag.field_name for flag in section_flags(OptimizerConfig) if "optimizer" not in flag.field_name}
    load, save = flags.checkpoint.load, flags.checkpoint.save
    if load is None or save is None or not _is_within(load, save):
        unchanged |= {"tensorboard_dir", "wandb_project", "wandb_exp_name", "wandb_save_dir"}
    for section_name, section_type in SECTION_TYPES.items():
        types = get_type_hints(section_type)
        for name in (flag.field_name for flag in section_flags(section_type)):
            if name not in stored or name in unchanged:
                continue
            try:
                value = typed(stored[name], types[name], dec_hook=lambda kind, text: kind(text))
            except ValueError as error:
                raise UserError(f"--load {checkpoint.directory}: {flag_name(name)}: {error}: give the flag") from None
            section = replace(getattr(flags, section_name), **{name: value})
            completed = replace(flags, **{section_name: section})
            # A value that a given one excludes has no effect any more.
            if len(flag_errors(completed)) <= len(flag_errors(flags)):
                flags = completed
    return flags


def flag_errors(flags: RunFlags) -> list[Problem]:
    """Check all values against what their flags allow; return one line per error."""
    return value_errors([getattr(flags, name) for name in SECTION_TYPES])


def _values(run: dict[str, Any]) -> dict[str, Any]:
    """Return the values that a resumed run takes by field, with the derived ones, of what `RunConfig.to_dict` gave."""
    values = {name: value for section in _TAKEN for name, value in run.get(section, {}).items()}
    if "global_batch_size" in run:
        values["global_batch_size"] = run["global_batch_size"]
    if "optimizer" in run:
        values |= to_plain(msgspec.convert(run["optimizer"], OptimizerConfig).completed(values["train_iters"]))
    return values


def model_differences(run: RunConfig, checkpoint: Checkpoint) -> list[Problem]:
    """Return one line per difference between the run's model and order of samples and those of a checkpoint.

    Each is of a given flag, because a run takes other values from its checkpoint.
    """
    model = checkpoint.model()
    stored, resumed = model.to_dict(), run.model.to_dict()
    pairs = {name: (resumed[name], stored[name]) for name in stored if name not in _FREE_TO_CHANGE}
    # Derived values are compared only if the wirings agree, and reported under the name of a flag.
    streams = pairs.pop("desync_tp")
    if model.residual_mode == run.model.residual_mode:
        pairs["tensor_model_parallel_size"] = streams
    else:
        pairs = {name: values for name, values in pairs.items() if name not in WIRING_FIELDS}
    if model.num_layers != run.model.num_layers:
        # The default, all layers, depends on their number.
        pairs.pop("ladder_layers", None)
    if not run.loads_only_weights:
        recorded = _values(checkpoint.manifest.get("run", {}))
        pairs |= {name: (getattr(run.training, name), recorded[name]) for name in _DEFINES_ORDER if name in recorded}
    fixes = dict.fromkeys(pairs, "leave the flag out, or train a new model without --load")
    rewire = "leave the flag out, or change the wiring with `tools/convert_checkpoint.py reshape`"
    fixes |= dict.fromkeys(("residual_mode", *WIRING_FIELDS), rewire)
    fixes["tensor_model_parallel_size"] = "use that many"
    fixes |= dict.fromkeys(_DEFINES_ORDER, "leave the flag out, or give --finetune to start at iteration 0")
    return [
        Problem(flag_name(name), f" {ours}: {checkpoint.directory} was trained with {theirs}: {fixes[name]}")
        for name, (ours, theirs) in pairs.items()
        if ours != theirs
    ]


def resume_problems(flags: RunFlags, run: RunConfig, checkpoint: Checkpoint) -> Iterator[str | Problem]:
    """Yield one line per reason why a run cannot continue with the checkpoint's optimizer and schedule."""
    options, directory = run.checkpoint, checkpoint.directory
    if run.loads_only_weights:
        return
    if options.load_optim and not checkpoint.stored("exp_avg"):
        yield f"--load {directory}: holds weights and no optimizer: give --finetune, or --no-load-optim"
    saved, chosen = checkpoint.optimizer, run.optimizer.optimizer
    if options.load_optim and (saved == "muon") != (chosen == "muon"):
        fix = f"give --optimizer {saved}, or --no-load-optim to start the optimizer from scratch"
        yield Problem("--optimizer", f" {chosen}: {directory} was trained with {saved}: {fix}")
        return
    stored = {} if options.override_opt_param_scheduler else _values(checkpoint.manifest.get("run", {}))
    for name, ours in vars(run.optimizer).items():
        if name in flags.given and ours != stored.get(name, ours) and not name.startswith("optimizer"):
            fix = "give --override-opt-param-scheduler to change it, or leave the flag out to keep the stored value"
            yield Problem(flag_name(name), f" {ours}: {directory} was trained with {stored[name]}: {fix}")


def learned_changes(run: RunConfig, checkpoint: Checkpoint) -> list[str]:
    """Return one line for each given value with which a resumed run learns something else than before."""
    ours, theirs = _values(run.to_dict()), _values(checkpoint.manifest.get("run", {}))
    return [
        f"*** {flag_name(name)} {ours[name]}: the checkpoint was trained with {theirs[name]} ***"
        for name in ours
        if (name in _REPORTED or name in vars(run.optimizer)) and ours[name] != theirs.get(name, ours[name])
    ]


def schedule_note(run: RunConfig, checkpoint: Checkpoint) -> str | None:
    """Return a note if a longer or shorter run than the one that saved the checkpoint keeps the end of its decay."""
    stored = _values(checkpoint.manifest.get("run", {})).get("train_iters")
    iterations, end = run.training.train_iters, run.optimizer.lr_decay_iters
    if stored in (None, iterations) or run.optimizer.lr_decay_style == "constant" or end in (None, iterations):
        return None
    return (
        f"--train-iters {iterations}, and the checkpoint was trained for {stored}: the decay of the "
        f"learning rate ends at iteration {end}; --lr-decay-iters with --override-opt-param-scheduler moves it"
    )


def has_another_tokenizer(checkpoint: Checkpoint, tokenizer: Tokenizer | None) -> bool:
    """Return whether a run has another tokenizer than a checkpoint; False if either of them is unknown."""
    identity = (checkpoint.manifest.get("tokenizer") or {}).get("sha256")
    if tokenizer is None or identity == tokenizer.sha256:
        return False
    with suppress(UserError):
        stored = find_tokenizer(checkpoint.directory)
        identity = identity if stored is None else stored.identity
    return identity is not None and not same_tokenizer(identity, tokenizer.identity)


def check_same_data(checkpoint: Checkpoint, data: dict[str, Any], allowed: bool, rank: int) -> None:
    """Compare the data with the checkpoint's; raises UserError if it changed, or reports that if `allowed`."""
    changes = data_changes(checkpoint.manifest.get("data", {}), data)
    if changes and not allowed:
        fix = "give the same data, or --allow-data-change to read other samples"
        raise UserError(*(f"{change}: {fix}" for change in changes))
    for change in changes:
        print_rank_0(f"*** --allow-data-change: {change} ***", rank)
    if changes:
        print_rank_0(f"*** the run continues at sample {checkpoint.consumed_samples} of the new order ***", rank)

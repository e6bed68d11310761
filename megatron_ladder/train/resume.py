"""Completion of a run from the checkpoint that it resumes, and comparison with it: model, steps, schedule and data.

A resumed run takes every value of the model, the steps, the optimizer and the data that is not given. The schedule
determines the loss curve, so another value on the command line is an error unless one of two flags decides between the
values; their names and meaning are Megatron's. Only --train-iters may change freely, and the decay of the learning rate
still ends where it did. Other changes of what is learned are reported.
"""

from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any, get_type_hints

import msgspec

from megatron_ladder.blueprint.model_flags import ModelFlags
from megatron_ladder.blueprint.optimizers import optimizer_kind
from megatron_ladder.blueprint.wiring import WIRING_FIELDS
from megatron_ladder.checkpoint.format import Checkpoint
from megatron_ladder.command_line import Settings
from megatron_ladder.config.run import SECTIONS, RunConfig
from megatron_ladder.config.sections import OptimizerConfig
from megatron_ladder.data.identity import data_changes
from megatron_ladder.errors import Problem, UserError, raise_user_errors
from megatron_ladder.flags import section_flags, to_plain
from megatron_ladder.progress import print_rank_0
from megatron_ladder.tokenizers.copies import find_tokenizer
from megatron_ladder.tokenizers.kinds import Tokenizer, same_tokenizer
from megatron_ladder.train.directories import is_within
from megatron_ladder.typed import typed

_MTP_FIELDS = ("mtp_num_layers", "mtp_before_final_norm")
"""Fields of the drafting head."""
_FREE_TO_CHANGE = {"init_method_std", "max_position_embeddings"}
"""Fields of the model that a resumed run may change, because they affect no stored tensor and no step."""
_TAKEN = ("training", "data", "checkpoint", "logging", "reliability", "optimizer")
"""Sections whose values a resumed run takes, unless a flag declares otherwise."""
_TYPES = {name: kind for section in SECTIONS for name, kind in get_type_hints(section).items()}
_CURVES = {"tensorboard_dir", "wandb_project", "wandb_exp_name", "wandb_save_dir"}
_SCHEDULE = {one.field_name for one in section_flags(OptimizerConfig) if "optimizer" not in one.field_name}


def _declared(rule: str) -> set[str]:
    """Return the fields with which a resumed run does the same; see `Flag.on_resume`."""
    return {one.field_name for one in section_flags(*SECTIONS) if one.on_resume == rule}


def with_checkpoint(settings: Settings, checkpoint: Checkpoint) -> Settings:
    """Return settings with the checkpoint's model and sequence length, and without --finetune its data, steps,
    optimizer, reports and intervals of saves, where no value was given.

    Raises UserError if the checkpoint provides no value of a required flag.
    """
    given = dict(settings.given)
    recorded = _values(checkpoint.manifest.get("run", {}))
    if settings.values["use_checkpoint_opt_param_scheduler"] and not settings.values["finetune"]:
        given = {name: value for name, value in given.items() if name not in _SCHEDULE & recorded.keys()}
    settings = replace(settings, flags=section_flags(*SECTIONS), given=given)
    model = vars(checkpoint.model().to_flags())
    # The tokenizer may determine the size of the vocabulary.
    left = {"vocab_size"}
    if given.get("residual_mode", model["residual_mode"]) != model["residual_mode"]:
        left |= {*WIRING_FIELDS}
    left |= {name for one in section_flags(ModelFlags) if one.field_name in given for name in one.excludes}
    model = {name: value for name, value in model.items() if name not in left}
    taken = {"seq_length"} if settings.values["finetune"] else _taken(settings)
    run = {name: _read(name, recorded[name], checkpoint) for name in recorded if name in taken - given.keys()}
    settings = settings.with_stored(model, run)
    absent = [name for name in ("train_iters", "lr") if name not in settings.values]
    raise_user_errors(Problem({name: None}, "{} is required", "{load} lacks it") for name in absent)
    positions = max(model["max_position_embeddings"], settings.values["seq_length"])
    settings.stored["max_position_embeddings"] = positions
    return settings


def _taken(settings: Settings) -> set[str]:
    """Return the fields whose value a resumed run takes from its checkpoint, unless it is given."""
    values = settings.values
    left = _declared("ignore")
    data = _declared("data")
    given_data = data & settings.given.keys()
    if given_data == {"valid_data_path"}:
        left |= data - {"train_data_path", "streaming"}
    elif given_data:
        left |= data
    if values["override_opt_param_scheduler"]:
        # By default, the decay that replaces the stored one is as long as the run.
        left |= {"lr_decay_iters", "lr_wsd_decay_iters"}
    if values["load"] is None or values["save"] is None or not is_within(values["load"], values["save"]):
        left |= _CURVES
    return _TYPES.keys() - left


def _read(name: str, stored: Any, checkpoint: Checkpoint) -> Any:
    try:
        return typed(stored, _TYPES[name], dec_hook=lambda kind, text: kind(text))
    except ValueError as error:
        problem = Problem({"load": checkpoint.directory}, f"{{}}: {{{name}}}: {{error}}", "give the flag", error=error)
        raise UserError(problem) from None


def _values(run: dict[str, Any]) -> dict[str, Any]:
    """Return the values that a resumed run takes by field, with the derived ones, of what `RunConfig.to_dict` gave."""
    values = {name: value for section in _TAKEN for name, value in run.get(section, {}).items()}
    if "global_batch_size" in run:
        values["global_batch_size"] = run["global_batch_size"]
    if "optimizer" in run:
        values |= to_plain(msgspec.convert(run["optimizer"], OptimizerConfig).completed(values["train_iters"]))
    return values


def _model_differences(run: RunConfig, checkpoint: Checkpoint) -> Iterator[Problem]:
    """Yield one problem for each difference of the run's model and order of samples to those of a checkpoint.

    Each is of a given flag, because a run takes other values from its checkpoint.
    """
    model = checkpoint.model()
    stored = model.to_dict()
    resumed = run.model.to_dict()
    fixes = dict.fromkeys(stored.keys() - _FREE_TO_CHANGE, "leave the flag out, or train a new model without {load}")
    rewire = "leave the flag out, or change the wiring with `tools/convert_checkpoint.py reshape`"
    fixes |= dict.fromkeys(("residual_mode", *WIRING_FIELDS), rewire)
    fixes["desync_tp"] = "use that many"
    # Values that depend on others are compared only if those agree.
    if model.residual_mode != run.model.residual_mode:
        for name in (*WIRING_FIELDS, "desync_tp"):
            del fixes[name]
    elif model.num_layers != run.model.num_layers:
        del fixes["ladder_layers"]
    if model.num_layers != run.model.num_layers:
        del fixes["moe_layers"]
    if (model.num_layers, model.window_size) != (run.model.num_layers, run.model.window_size):
        del fixes["window_layers"]
    variants = model.experimental_attention_variant, run.model.experimental_attention_variant
    if model.num_layers != run.model.num_layers or variants[0] != variants[1]:
        del fixes["linear_attention_layers"]
    if run.loads_only_weights:
        # Only the head has other weights: it starts from scratch, or those of the checkpoint are left out.
        for name in _MTP_FIELDS:
            del fixes[name]
    else:
        fixes |= dict.fromkeys(_MTP_FIELDS, "leave the flag out, or give {finetune} to start with another head")
        recorded = _values(checkpoint.manifest.get("run", {}))
        order = {name: recorded[name] for name in sorted(_declared("keep")) if name in recorded}
        stored |= order
        resumed |= {name: getattr(run.training, name) for name in order}
        fixes |= dict.fromkeys(order, "leave the flag out, or give {finetune} to start at iteration 0")
    names = {"desync_tp": "tensor_model_parallel_size"}
    for name, theirs in stored.items():
        if name in fixes and resumed[name] != theirs:
            yield _difference(names.get(name, name), resumed[name], theirs, checkpoint, fixes[name])


def _difference(name: str, ours: Any, theirs: Any, checkpoint: Checkpoint, fix: str) -> Problem:
    reason = "{}: {directory} was trained with {theirs}"
    return Problem({name: str(ours)}, reason, fix, directory=checkpoint.directory, theirs=theirs)


def resume_problems(given: Collection[str], run: RunConfig, checkpoint: Checkpoint) -> Iterator[Problem]:
    """Yield one problem for each reason why a run with these given fields cannot continue with a checkpoint."""
    yield from _model_differences(run, checkpoint)
    options = run.checkpoint
    if run.loads_only_weights:
        return
    if options.load_optim and not checkpoint.has_moments:
        fix = "give {finetune}, or {no_load_optim}"
        yield Problem({"load": checkpoint.directory}, "{}: holds weights and no optimizer", fix)
    saved, chosen = checkpoint.optimizer, run.optimizer.optimizer
    if options.load_optim and optimizer_kind(saved) is not optimizer_kind(chosen):
        fix = f"give {{optimizer}} {saved}, or {{no_load_optim}} to start the optimizer from scratch"
        yield _difference("optimizer", chosen, saved, checkpoint, fix)
        return
    stored = {} if options.override_opt_param_scheduler else _values(checkpoint.manifest.get("run", {}))
    fix = "give {override_opt_param_scheduler} to change it, or leave the flag out to keep the stored value"
    for name, ours in vars(run.optimizer).items():
        if name in _SCHEDULE.intersection(given) and ours != stored.get(name, ours):
            yield _difference(name, ours, stored[name], checkpoint, fix)


def learned_changes(run: RunConfig, checkpoint: Checkpoint) -> list[Problem]:
    """Return one note for each given value with which a resumed run learns something else than before."""
    ours = _values(run.to_dict())
    theirs = _values(checkpoint.manifest.get("run", {}))
    reported = _declared("report") | vars(run.optimizer).keys()
    return [
        Problem({name: str(ours[name])}, "{}: the checkpoint was trained with {theirs}", theirs=theirs[name])
        for name in ours
        if name in reported and ours[name] != theirs.get(name, ours[name])
    ]


def schedule_note(run: RunConfig, checkpoint: Checkpoint) -> Problem | None:
    """Return a note if a longer or shorter run than the one that saved the checkpoint keeps the end of its decay."""
    stored = _values(checkpoint.manifest.get("run", {})).get("train_iters")
    iterations, end = run.training.train_iters, run.optimizer.lr_decay_iters
    if stored in (None, iterations) or run.optimizer.lr_decay_style == "constant" or end in (None, iterations):
        return None
    reason = (
        f"{{}}, and the checkpoint was trained for {stored}: the decay of the learning rate ends at iteration {end}"
    )
    fix = "{lr_decay_iters} with {override_opt_param_scheduler} moves it"
    return Problem({"train_iters": iterations}, f"{reason}; {fix}")


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
        fix = "give the same data, or {allow_data_change} to read other samples"
        raise UserError(*(Problem({}, "{change}", fix, change=change) for change in changes))
    for change in changes:
        print_rank_0(f"*** {Problem({'allow_data_change': None}, '{}: {change}', change=change)} ***", rank)
    if changes:
        print_rank_0(f"*** the run continues at sample {checkpoint.consumed_samples} of the new order ***", rank)

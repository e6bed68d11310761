"""The wiring of a converted model: its own, or the one of the command line."""

from dataclasses import replace
from itertools import groupby

from megatron_ladder.blueprint.model import ModelConfig, model_errors, parse_layers
from megatron_ladder.blueprint.wiring import SHARED_STREAM_MODES, WIRINGS
from megatron_ladder.convert.cheapest_layers import BEST, cheapest_layers
from megatron_ladder.convert.options import CheckpointOptions
from megatron_ladder.errors import raise_user_errors


def wiring_text(model: ModelConfig) -> str:
    """Describe a model's wiring in a few words."""
    text = model.residual_mode
    if model.wiring.late:
        # Layers minus their position in the list is constant over a run of neighbours.
        runs = groupby(enumerate(model.ladder_layers), lambda item: item[1] - item[0])
        ranges = ((layers[0][1], layers[-1][1]) for layers in (list(run) for _, run in runs))
        listed = ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)
        is_whole = len(model.ladder_layers) == model.num_layers
        text += " in all layers" if is_whole else f" in layers {listed} of {model.num_layers}"
        if model.residual_staleness != 1:
            text += f", {model.residual_staleness} sub-blocks late"
        if model.lanes:
            text += f", in {model.lanes} lanes with own partials"
    if model.wiring.stream == "per rank":
        text += f", interval {model.desync_interval}, of {model.desync_tp} tensor-parallel ranks"
    return text


def rewired(model: ModelConfig, options: CheckpointOptions) -> tuple[ModelConfig, list[str]]:
    """Return the model with the requested wiring, and a line if that overrides its own.

    Raises:
        UserError: the wiring needs other weights than the model has, or its flags contradict each other.
    """
    mode, layers, staleness = options.residual_mode, options.ladder_layers, options.residual_staleness
    # No lanes is what a model without late layers has.
    lanes = options.lanes if options.lanes or model.lanes else None
    if layers is not None and layers.startswith(BEST):
        chosen, mode, staleness = cheapest_layers(layers, model, mode, staleness)
        layers = ",".join(map(str, chosen)) or "none"
    if mode is None and layers is None and staleness is None and lanes is None:
        return model, []
    if mode is None:
        mode = model.residual_mode if model.wiring.late else "ladder"
    old, new = model.wiring, WIRINGS[mode]
    errors = []
    if old.stream == "per rank":
        errors.append(
            f"--residual-mode {mode}: the source is {old.name}, whose norms differ from rank to rank, so its wiring "
            "cannot change: leave --residual-mode, --ladder-layers, --residual-staleness and --lanes out"
        )
    elif new.stream == "per rank":
        errors.append(
            f"--residual-mode {mode}: its norms differ from rank to rank, and the source has one for all ranks: "
            "such a model can only be trained from the start"
        )
    if new.one_norm != old.one_norm:
        has, needs = ("one norm", "two") if old.one_norm else ("two norms", "one")
        possible = [name for name in SHARED_STREAM_MODES if WIRINGS[name].one_norm == old.one_norm]
        errors.append(
            f"--residual-mode {mode}: every layer of the source has {has}, and this wiring needs {needs}: "
            f"give --residual-mode {' or '.join(possible)}, or leave it out"
        )
    for flag, value in (("--ladder-layers", layers), ("--residual-staleness", staleness), ("--lanes", lanes or None)):
        if value is not None and not new.late:
            errors.append(f"{flag} {value} has no meaning with --residual-mode {mode}: leave it out")
    late_layers: tuple[int, ...] = ()
    keeps_mode = old.late and new is old
    if new.late and not errors:
        keeps_layers = layers is None and keeps_mode and options.residual_mode is None
        try:
            late_layers = model.ladder_layers if keeps_layers else parse_layers(layers or "all", model.num_layers)
        except ValueError as error:
            errors.append(f"--ladder-layers {layers}: {error}")
    raise_user_errors(errors)
    if keeps_mode:
        staleness, lanes = staleness or model.residual_staleness, model.lanes if lanes is None else lanes
    changed = replace(
        model, residual_mode=mode, ladder_layers=late_layers, residual_staleness=staleness or 1, lanes=lanes or 0
    )
    raise_user_errors(model_errors(changed))
    changed = changed.canonical()
    if wiring_text(changed) == wiring_text(model):
        return changed, []
    return changed, [f"the wiring of the source, {wiring_text(model)}, is overridden: {wiring_text(changed)}"]

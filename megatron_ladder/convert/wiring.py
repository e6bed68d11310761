"""The wiring that a converted model gets: its own, or the one that the command line asks for."""

from dataclasses import replace

from megatron_ladder.blueprint.model import ONE_NORM_MODES, STALE_MODES, ModelConfig, model_mistakes, parse_layers
from megatron_ladder.convert.mistakes import raise_mistakes
from megatron_ladder.convert.options import Rewiring


def wiring_text(model: ModelConfig) -> str:
    """A few words about a model's wiring."""
    text: str = model.residual_mode
    if model.residual_mode in STALE_MODES:
        some = f"in layers {_ranges(model.ladder_layers)} of {model.num_layers}"
        text += {0: " in no layer", model.num_layers: " in all layers"}.get(len(model.ladder_layers), f" {some}")
        if model.residual_staleness != 1:
            text += f", {model.residual_staleness} sub-blocks late"
    if model.residual_mode == "desync":
        text += f", interval {model.desync_interval}, of {model.desync_tp} tensor-parallel ranks"
    return text


def _ranges(layers: tuple[int, ...]) -> str:
    parts: list[list[int]] = []
    for layer in layers:
        if parts and parts[-1][1] == layer - 1:
            parts[-1][1] = layer
        else:
            parts.append([layer, layer])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)


def rewired(model: ModelConfig, options: Rewiring) -> tuple[ModelConfig, list[str]]:
    """The model with the wiring that was asked for, and a line if that overrides its own.

    Raises:
        UserError: the wiring needs other weights than the model has, or its flags contradict each other.
    """
    mode, layers, staleness = options.residual_mode, options.ladder_layers, options.residual_staleness
    if mode is None and layers is None and staleness is None:
        return model, []
    if mode is None:
        mode = model.residual_mode if model.residual_mode in STALE_MODES else "ladder"
    mistakes = []
    if model.residual_mode == "desync":
        mistakes.append(
            f"--residual-mode {mode}: the source is desync, whose norms differ from rank to rank, so it can only stay "
            "what it is: leave --residual-mode, --ladder-layers and --residual-staleness out"
        )
    elif mode == "desync":
        mistakes.append(
            "--residual-mode desync: its norms differ from rank to rank, and the source has one for all: "
            "such a model can only be trained from the start"
        )
    if (mode in ONE_NORM_MODES) != (model.residual_mode in ONE_NORM_MODES):
        has, needs = ("one norm", "two") if model.residual_mode in ONE_NORM_MODES else ("two norms", "one")
        mistakes.append(
            f"--residual-mode {mode}: every layer of the source has {has}, and of such a model {needs}: "
            f"give --residual-mode {'ladder-parallel' if has == 'one norm' else 'ladder'} or standard"
        )
    for flag, value in (("--ladder-layers", layers), ("--residual-staleness", staleness)):
        if value is not None and mode not in STALE_MODES:
            mistakes.append(f"{flag} {value} has no meaning with --residual-mode {mode}: leave it out")
    late: tuple[int, ...] = ()
    if mode in STALE_MODES and not mistakes:
        keep = layers is None and model.residual_mode in STALE_MODES and options.residual_mode is None
        try:
            late = model.ladder_layers if keep else parse_layers(layers or "all", model.num_layers)
        except ValueError as error:
            mistakes.append(f"--ladder-layers {layers}: {error}")
    raise_mistakes(mistakes)
    new = replace(model, residual_mode=mode, ladder_layers=late, residual_staleness=staleness or 1)
    raise_mistakes(model_mistakes(new))
    if wiring_text(new) == wiring_text(model):
        return new, []
    return new, [f"the wiring of the source, {wiring_text(model)}, is overridden: {wiring_text(new)}"]

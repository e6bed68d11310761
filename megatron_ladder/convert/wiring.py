"""The wiring of a converted model: its own, the one of the command line, or the cheapest layers of a measurement.

`convert_checkpoint.py sensitivity` measures what it costs to let layers of a model read late and writes a file of
`Sensitivity`, of which `--ladder-layers best:N@FILE` takes the first N layers.
"""

import re
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import msgspec

from megatron_ladder.blueprint.model import ModelConfig, model_errors
from megatron_ladder.blueprint.model_flags import parse_layers
from megatron_ladder.blueprint.wiring import EXPERT_MODES, LATE_MODES, SHARED_STREAM_MODES, WIRINGS, layers_text
from megatron_ladder.convert.options import CheckpointOptions, ReshapeOptions, SensitivityOptions
from megatron_ladder.errors import Problem, UserError, counted, raise_user_errors
from megatron_ladder.files import write_atomically
from megatron_ladder.flags import section_flags
from megatron_ladder.typed import read_json, typed

_BEST = "best:"
"""How a value of --ladder-layers begins that refers to such a file."""
_FIELDS = {flag.field_name for flag in section_flags(CheckpointOptions)}
_Count = Annotated[int, msgspec.Meta(ge=1)]
_LateMode = Literal[LATE_MODES]  # type: ignore[valid-type]


class Price(NamedTuple):
    """A difference of two losses, in nats per token."""

    increase: float
    standard_error: float


class SubBlockPrices(msgspec.Struct, frozen=True):
    """The increases of the loss when sub-blocks of one kind alone read late.

    Attributes:
        kind: the token mixer, or another kind of sub-block.
        layers: the layers that have it, but for the first sub-block of the model, which has nothing to miss.
        alone: for each of them, the price when only its sub-block reads late.
        together: the price when all of them read late.
    """

    kind: str
    layers: tuple[int, ...]
    alone: tuple[Price, ...]
    together: Price


class Sensitivity(msgspec.Struct, frozen=True):
    """The increases of a model's loss, without training, when some of its layers read late.

    Attributes:
        model: the directory that was measured.
        num_layers: its number of layers.
        residual_mode, residual_staleness: the wiring of the late layers.
        data: prefix of the token file.
        tokens: target tokens of each measurement.
        loss: the loss without a late layer, in nats per token.
        layers: for each layer, the price when it alone reads late.
        order: all layers, the cheapest first.
        greedy_layers: how many layers of `order` were chosen by measuring every remaining layer together with those
            before it. The others follow by the last of these measurements.
        cheapest: for each n from 1 to `greedy_layers`, the price of the first n layers of `order`.
        upper: the same for the upper n layers.
        sub_blocks: of a model with several token mixers, the prices of each of them, and of the other sub-blocks.
    """

    model: str
    num_layers: _Count
    residual_mode: _LateMode
    residual_staleness: _Count
    data: str
    tokens: int
    loss: float
    layers: tuple[Price, ...]
    order: tuple[int, ...]
    greedy_layers: int
    cheapest: tuple[Price, ...]
    upper: tuple[Price, ...]
    sub_blocks: tuple[SubBlockPrices, ...] = ()


def write_sensitivity(path: Path, sensitivity: Sensitivity) -> None:
    write_atomically(path, msgspec.json.format(msgspec.json.encode(sensitivity), indent=1) + b"\n")


def _read_sensitivity(path: Path) -> Sensitivity:
    """Read a file that `write_sensitivity` wrote. Raises UserError."""
    try:
        sensitivity = typed(read_json(path.read_bytes()), Sensitivity)
        if sorted(sensitivity.order) != list(range(sensitivity.num_layers)):
            raise ValueError(f"order {sensitivity.order} does not contain each of {sensitivity.num_layers} layers once")
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}: give the output of `convert_checkpoint.py sensitivity`") from None
    except ValueError as error:
        raise UserError(
            f"{path}: not a file of `convert_checkpoint.py sensitivity`: {error}: run it again, or give another file"
        ) from None
    return sensitivity


def wiring_text(model: ModelConfig) -> str:
    """Describe a model's wiring in a few words."""
    text = model.residual_mode
    if model.wiring.late:
        text += f" in {layers_text(model.ladder_layers, model.num_layers)}"
        if model.residual_staleness != 1:
            text += f", {model.residual_staleness} sub-blocks late"
        if model.lanes:
            text += f", in {model.lanes} lanes with own partials"
    if model.wiring.stream == "per rank":
        text += f", interval {model.desync_interval}, of {model.desync_tp} tensor-parallel ranks"
    return text


def rewired(model: ModelConfig, options: CheckpointOptions) -> tuple[ModelConfig, list[str]]:
    """Return the model with the requested wiring, and a line if that overrides its own.

    Raises UserError if the wiring needs other weights than the model has, or its flags contradict each other.
    """
    mode = options.residual_mode
    layers = options.ladder_layers
    staleness = options.residual_staleness
    # No lanes is what a model without late layers has.
    lanes = options.lanes if options.lanes or model.lanes else None
    if layers is not None and layers.startswith(_BEST):
        chosen, mode, staleness = _cheapest_layers(layers, model, mode, staleness)
        layers = ",".join(map(str, chosen)) or "none"
    if mode is None and layers is None and staleness is None and lanes is None:
        return model, []
    if mode is None:
        mode = model.residual_mode if model.wiring.late else "ladder"
    # Weights that do not suit the wiring, and flags without a meaning.
    old, new = model.wiring, WIRINGS[mode]
    errors = []
    wanted = {"residual_mode": mode}
    if old.stream == "per rank":
        reason = f"{{}}: the source is {old.name}, whose norms differ from rank to rank, so its wiring cannot change"
        fix = "leave {residual_mode}, {ladder_layers}, {residual_staleness} and {lanes} out"
        errors.append(Problem(wanted, reason, fix))
    elif new.stream == "per rank":
        reason = (
            "{}: its norms differ from rank to rank, and the source has one for all ranks: such a model can only be "
            "trained from the start"
        )
        errors.append(Problem(wanted, reason))
    if new.sub_blocks != old.sub_blocks:
        usable = (*SHARED_STREAM_MODES, *(EXPERT_MODES if model.moe_layers else ()))
        # Without late layers, their list has no meaning.
        usable = tuple(name for name in usable if WIRINGS[name].late or layers is None)
        possible = [name for name in usable if WIRINGS[name].sub_blocks == old.sub_blocks]
        norms = counted(len(old.sub_blocks), "norm")
        reason = f"{{}}: every layer of the source has {norms}, and this wiring needs {len(new.sub_blocks)}"
        errors.append(Problem(wanted, reason, f"give {{}} {' or '.join(possible)}, or leave it out"))
    # One sub-block late and no lanes are what every wiring has.
    late_by = None if staleness == 1 else staleness
    for name, value in (("ladder_layers", layers), ("residual_staleness", late_by), ("lanes", lanes or None)):
        if value is not None and name not in new.takes:
            errors.append(Problem({name: value, **wanted}, "{} has no meaning with {residual_mode}", "leave it out"))
    late_layers: tuple[int, ...] = ()
    keeps_mode = old.late and new is old
    if new.late and not errors:
        keeps_layers = layers is None and keeps_mode and options.residual_mode is None
        try:
            late_layers = model.ladder_layers if keeps_layers else parse_layers(layers or "all", model.num_layers)
        except ValueError as error:
            errors.append(Problem({"ladder_layers": layers}, "{}: {error}", error=error))
    raise_user_errors(errors)
    # The wiring, in which the source's values hold where its mode stays.
    if keeps_mode:
        staleness = staleness or model.residual_staleness
        lanes = model.lanes if lanes is None else lanes
    changed = replace(
        model, residual_mode=mode, ladder_layers=late_layers, residual_staleness=staleness or 1, lanes=lanes or 0
    )
    raise_user_errors(map(_about_source, model_errors(changed)))
    changed = changed.canonical()
    if wiring_text(changed) == wiring_text(model):
        return changed, []
    return changed, [f"the wiring of the source, {wiring_text(model)}, is overridden: {wiring_text(changed)}"]


def late_model(model: ModelConfig, options: SensitivityOptions) -> ModelConfig:
    """Return the model with all layers late, to measure each. Raises UserError if the wiring needs other tensors."""
    if model.lanes:
        reason = f"{{load}}: a model of {model.lanes} lanes with own partials"
        raise UserError(Problem({"load": options.load}, reason, "measure the standard model that it was made from"))
    if model.wiring.stream == "per rank":
        reason = f"{{load}}: a {model.residual_mode} model, whose norms differ from rank to rank, so its wiring cannot "
        raise UserError(Problem({"load": options.load}, reason + "change", "measure another model"))
    default = "ladder-parallel" if len(model.wiring.sub_blocks) == 1 else "ladder"
    if model.wiring.late:
        default = model.residual_mode
    every = ReshapeOptions(
        load=options.load,
        save=options.output,
        residual_mode=options.residual_mode or default,
        ladder_layers="all",
        residual_staleness=options.residual_staleness or model.residual_staleness,
    )
    return rewired(model, every)[0]


def _about_source(problem: Problem) -> Problem:
    """Return a problem of the rewired model for a conversion, whose fields are fewer: the others are the source's."""
    return problem.among(_FIELDS).noted(after="; a conversion changes only the wiring: give another one, or none")


def _cheapest_layers(
    text: str, model: ModelConfig, mode: str | None, staleness: int | None
) -> tuple[list[int], str, int]:
    """Return the layers that `best:N@FILE` names, and the wiring for which the file was measured.

    Raises UserError if the file does not belong to a model of so many layers, or to another requested wiring.
    """
    match = re.fullmatch(rf"{_BEST}(\d+)@(.+)", text)
    if match is None:
        reason = f"{{}}: expected {_BEST}N@FILE, such as {_BEST}16@sensitivity.json"
        raise UserError(Problem({"ladder_layers": text}, reason))
    count = int(match[1])
    path = Path(match[2])
    sensitivity = _read_sensitivity(path)
    measured = {
        "layers": (sensitivity.num_layers, model.num_layers),
        "{residual_mode}": (sensitivity.residual_mode, mode or sensitivity.residual_mode),
        "{residual_staleness}": (sensitivity.residual_staleness, staleness or sensitivity.residual_staleness),
    }
    errors = [
        Problem(
            {"ladder_layers": text},
            f"{{}}: {{path}} was measured with {name} {before}, not {now}",
            "measure this model and wiring",
            path=path,
        )
        for name, (before, now) in measured.items()
        if before != now
    ]
    if not errors and count > sensitivity.num_layers:
        reason = f"{{}}: the model has only {sensitivity.num_layers} layers"
        errors.append(Problem({"ladder_layers": text}, reason))
    raise_user_errors(errors)
    return sorted(sensitivity.order[:count]), sensitivity.residual_mode, sensitivity.residual_staleness

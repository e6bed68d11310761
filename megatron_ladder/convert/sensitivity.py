"""Measures which layers of a model cost the least when they read late: `convert_checkpoint.py sensitivity`.

Every measurement is a forward pass over the same rows of tokens. The tensors of a model do not depend on how late its
sub-blocks read, so the model is loaded once. All ranks make the same passes, and rank 0 writes the result.
"""

from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from megatron_ladder.blueprint.model import ModelConfig
from megatron_ladder.comm.launch import naming_lost_peers, read_rank_info, stop_process_group
from megatron_ladder.convert.cheapest_layers import Price, Sensitivity, write_sensitivity
from megatron_ladder.convert.options import MeasuredOptions, ReshapeOptions, SensitivityOptions
from megatron_ladder.convert.wiring import rewired
from megatron_ladder.data.indexed import IndexedDataset
from megatron_ladder.errors import UserError
from megatron_ladder.generate.engine import GenerationEngine
from megatron_ladder.generate.loading import open_model
from megatron_ladder.generate.options import ModelOptions
from megatron_ladder.generate.program import build_engine, check_hardware
from megatron_ladder.progress import ProgressBar

_LONGEST_ROW = 2048
Rows = NDArray[np.int64]
"""Token ids [rows, seq_length + 1]; each but the first of a row is a target."""
Losses = NDArray[np.float64]
"""The mean loss of each row, [rows], in nats per token."""


def measure_sensitivity(options: SensitivityOptions) -> None:
    """Measure, as one rank or alone, and write the result. Raises UserError before any process group exists."""
    place = read_rank_info()
    model = ModelOptions(options.load, options.tensor_model_parallel_size, options.dtype)
    stored = open_model(options.load, None, None, flag="--load")
    check_hardware(place, model, stored.config)
    target = _late_model(stored.config, options)
    rows = read_rows(options, stored.config)
    with naming_lost_peers():
        with closing(build_engine(place, model, stored)) as engine:
            found = _measure(engine, target, rows, options)
        stop_process_group()
    if place.rank == 0:
        write_sensitivity(options.output, found)
        print(_report(found), flush=True)


def _late_model(model: ModelConfig, options: SensitivityOptions) -> ModelConfig:
    """Return the model with all layers late. Raises UserError if the wiring needs other tensors."""
    if model.lanes:
        raise UserError(
            f"--load {options.load}: a model of {model.lanes} lanes with own partials: measure the standard model that "
            "it was made from"
        )
    late = "ladder-parallel" if model.wiring.one_norm else "ladder"
    mode = options.residual_mode or (model.residual_mode if model.wiring.late else late)
    every = ReshapeOptions(
        load=options.load,
        save=options.output,
        residual_mode=mode,
        ladder_layers="all",
        residual_staleness=options.residual_staleness or model.residual_staleness,
    )
    return rewired(model, every)[0]


def read_rows(options: MeasuredOptions, model: ModelConfig) -> Rows:
    """Read rows that are spread evenly over the token file. Raises UserError if it is too short or of another model."""
    length = options.seq_length or min(_LONGEST_ROW, model.max_position_embeddings)
    if length > model.max_position_embeddings:
        raise UserError(f"--seq-length {length}: the model has only {model.max_position_embeddings} positions")
    tokens = IndexedDataset(options.data).tokens
    count = min(options.tokens, len(tokens) - 1) // length
    if count < 2:
        raise UserError(
            f"--tokens {options.tokens}, --data {options.data}: {len(tokens)} tokens are in the file, and two rows of "
            f"--seq-length {length} are the least for a standard error: give more tokens, or shorter rows"
        )
    begins = np.linspace(0, len(tokens) - 1 - length, count).astype(np.int64)
    rows = np.stack([tokens[begin : begin + length + 1] for begin in begins]).astype(np.int64)
    if (largest := int(rows.max())) >= model.vocab_size:
        raise UserError(
            f"--data {options.data}: contains id {largest}, but the vocabulary of the model has {model.vocab_size}: "
            "use data of the model's tokenizer"
        )
    return rows


class _Passes:
    def __init__(self, engine: GenerationEngine, target: ModelConfig, rows: Rows, batch_size: int) -> None:
        self._engine, self._target, self._batch_size = engine, target, batch_size
        self._texts = [(row[:1], row[1:]) for row in rows.tolist()]
        self.bar: ProgressBar | None = None

    def losses(self, late: Iterable[int]) -> Losses:
        """Return the losses of the model when only these layers read late; a collective."""
        wired = replace(self._target, ladder_layers=tuple(sorted(late))).wired_layers
        self._engine.model.stack.rewire(wired)
        found = []
        for first in range(0, len(self._texts), self._batch_size):
            scores = self._engine.score_batch(self._texts[first : first + self._batch_size])
            found += [-np.mean(score.logprobs) for score in scores]
        if self.bar is not None:
            self.bar.advance(1)
        return np.array(found)


def _measure(engine: GenerationEngine, target: ModelConfig, rows: Rows, options: SensitivityOptions) -> Sensitivity:
    """Measure every layer alone, the greedy order, and the upper layers; every rank must call it."""
    layers = target.num_layers
    greedy = min(options.greedy_layers or layers, layers)
    passes = _Passes(engine, target, rows, options.batch_size)
    total = 1 + sum(layers - chosen for chosen in range(greedy)) + greedy
    if engine.group.rank == 0:
        passes.bar = ProgressBar("sensitivity", total, " passes")
    try:
        base = passes.losses(())
        alone: Mapping[int, Losses] = {}
        chosen, cheapest, last = list[int](), list[Price](), dict[int, float]()
        while len(chosen) < greedy:
            tried = {layer: passes.losses([*chosen, layer]) for layer in range(layers) if layer not in chosen}
            alone = alone or tried
            last = {layer: float(losses.mean()) for layer, losses in tried.items()}
            chosen.append(min(last, key=lambda layer: last[layer]))
            cheapest.append(_price(tried[chosen[-1]], base))
        upper = [_price(passes.losses(range(layers - count, layers)), base) for count in range(1, greedy + 1)]
    finally:
        if passes.bar is not None:
            passes.bar.close()
    others = sorted(set(range(layers)) - set(chosen), key=lambda layer: last[layer])
    return Sensitivity(
        model=str(options.load),
        num_layers=layers,
        residual_mode=target.residual_mode,
        residual_staleness=target.residual_staleness,
        data=str(options.data),
        tokens=rows.shape[0] * (rows.shape[1] - 1),
        loss=float(base.mean()),
        layers=tuple(_price(alone[layer], base) for layer in range(layers)),
        order=(*chosen, *others),
        greedy_layers=greedy,
        cheapest=tuple(cheapest),
        upper=tuple(upper),
    )


def _price(losses: Losses, base: Losses) -> Price:
    """Return the mean difference of the rows, and its standard error."""
    differences = losses - base
    return Price(float(differences.mean()), float(differences.std(ddof=1) / np.sqrt(len(differences))))


def _report(found: Sensitivity) -> str:
    def cell(price: Price) -> str:
        return f"{price.increase:+.4f} ± {price.standard_error:.4f}"

    places = {layer: place for place, layer in enumerate(found.order, start=1)}
    alone = [f"| {layer} | {cell(price)} | {places[layer]} |" for layer, price in enumerate(found.layers)]
    together = [
        f"| {number} | {layer} | {cell(cheapest)} | {cell(upper)} |"
        for number, (layer, cheapest, upper) in enumerate(
            zip(found.order, found.cheapest, found.upper, strict=False), start=1
        )
    ]
    return "\n".join(
        [
            f"Increase of the loss in nats per token, without training, when layers read late ({found.residual_mode}, "
            f"{found.residual_staleness} sub-blocks late), with standard errors over rows. Loss without a late layer: "
            f"{found.loss:.4f}, over {found.tokens:,} tokens of {found.data}.\n",
            "| layer | increase of the loss | place in the order |",
            "| --- | ---: | ---: |",
            *alone,
            "\nSeveral layers: the cheapest, added in this order, and the upper ones:\n",
            "| layers | added | cheapest | upper |",
            "| --- | ---: | ---: | ---: |",
            *together,
        ]
    )

"""Measures which layers of a model cost the least when they read late: `convert_checkpoint.py sensitivity`.

Every measurement is a forward pass over the same rows, read as training reads them. The tensors of a model do not
depend on how late its sub-blocks read, so the model is loaded once. All ranks make the same passes, and rank 0 writes
the result.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_ladder.blueprint.model import ModelConfig
from megatron_ladder.blueprint.wiring import Wiring
from megatron_ladder.comm.launch import read_rank_info, stop_process_group
from megatron_ladder.comm.watch import naming_lost_peers
from megatron_ladder.command_line import flag_words
from megatron_ladder.convert.options import MeasuredOptions, SensitivityOptions
from megatron_ladder.convert.wiring import Price, Sensitivity, SubBlockPrices, late_model, write_sensitivity
from megatron_ladder.data.batches import DocumentRules, MicroBatch, make_micro_batches
from megatron_ladder.data.indexed import IndexedDataset
from megatron_ladder.data.loader import OrderOptions, check_tokenizer, open_source
from megatron_ladder.errors import BadNumbersError, ErrorCollector, Problem, UserError
from megatron_ladder.generate.engine import GenerationEngine
from megatron_ladder.generate.loading import StoredModel, open_model
from megatron_ladder.generate.options import ModelOptions
from megatron_ladder.generate.program import check_hardware, load_engine
from megatron_ladder.generate.slots import BAD_NUMBERS_CAUSE
from megatron_ladder.model.language_model import LanguageModel
from megatron_ladder.progress import ProgressBar, print_rank_0

_LONGEST_ROW = 2048
_CUTS = ("reset_position_ids", "reset_attention_mask")
"""Flags with which documents are independent."""
Losses = NDArray[np.float64]
"""The loss of each row, [rows], summed over its labels, in nats."""


def measure_sensitivity(options: SensitivityOptions) -> None:
    """Measure, as one rank or alone, and write the result. Raises UserError before any process group exists."""
    rank_info = read_rank_info()
    model = ModelOptions(options.load, options.tensor_model_parallel_size, options.dtype)
    stored = open_model(options.load, None, None, "load")
    target = late_model(stored.config, options)
    check_hardware(rank_info, model, stored.config)
    batches = read_batches(options, stored)
    with naming_lost_peers():
        # Some wirings have other sub-blocks of experts, with the same tensors.
        with closing(load_engine(rank_info, model, stored, target)) as engine:
            sensitivity = _measure(engine, target, batches, options)
        stop_process_group()
    if rank_info.rank == 0:
        write_sensitivity(options.output, sensitivity)
        print(_report(sensitivity), flush=True)


def read_batches(options: MeasuredOptions, stored: StoredModel) -> list[MicroBatch]:
    """Read rows that are spread evenly over the data, with the labels and documents of training.

    Raises UserError if the data is too short, has no labels, or belongs to another model.
    """
    options = _with_flags_of_the_run(options, stored)
    model = stored.config
    tokenizer = stored.tokenizer
    length = options.seq_length or min(_LONGEST_ROW, model.max_position_embeddings)
    if length > model.max_position_embeddings:
        reason = f"{{seq_length}}: the model has only {model.max_position_embeddings} positions"
        raise UserError(Problem({"seq_length": length}, reason))
    errors = ErrorCollector()
    with errors.collect("data"):
        dataset = IndexedDataset(options.data)
        if tokenizer is not None:
            check_tokenizer([dataset], tokenizer)
        _report_unused_ends(options, stored, dataset)
        source = open_source("measured", dataset, range(len(dataset)), OrderOptions(length, 0, loss_on=options.loss_on))
    errors.raise_if_any()
    describes = dataset.sidecar if tokenizer is None else tokenizer
    eod_id = None if describes is None else describes.eod_id
    rules = DocumentRules(
        eod_id, bool(options.reset_position_ids), bool(options.reset_attention_mask), bool(options.eod_mask_loss)
    )
    if eod_id is None and (rules.eod_mask_loss or (rules.cuts_rows and not source.has_begins)):
        reason = "{load}: has no tokenizer, whose end-of-document token these flags need"
        raise UserError(Problem({"load": stored.directory}, reason))
    count = min(options.tokens // length, len(source))
    if count < 2:
        reason = (
            f"{{tokens}}, {{data}}: {len(source)} rows of {{seq_length}} are in the file, and two are the least for a "
            "standard error"
        )
        values = {"tokens": options.tokens, "data": options.data, "seq_length": length}
        raise UserError(Problem(values, reason, "give more tokens, or shorter rows"))
    rows = source.samples(np.linspace(0, len(source) - 1, count).astype(np.int64))
    if (largest := int(rows.tokens.max())) >= model.vocab_size:
        reason = f"{{data}}: contains id {largest}, but the vocabulary of the model has {model.vocab_size}"
        raise UserError(Problem({"data": options.data}, reason, "use data of the model's tokenizer"))
    batches = make_micro_batches(rows, rules, options.batch_size)
    with_labels = [batch for batch in batches if _counted(batch).any()]
    if not with_labels:
        reason = "{data}: no token of these rows is a label"
        raise UserError(Problem({"data": options.data}, reason, "give other data, or {loss_on} all"))
    return with_labels


def _with_flags_of_the_run(options: MeasuredOptions, stored: StoredModel) -> MeasuredOptions:
    """Return the options, with the values of the run that trained the model for flags that are not given."""
    names = [name for name in (*_CUTS, "eod_mask_loss", "loss_on") if getattr(options, name) is None]
    taken = {name: stored.data_flags[name] for name in names if stored.data_flags.get(name)}
    if taken:
        flags = " ".join(flag_words(taken))
        print_rank_0(f"reads the data as the checkpoint's run did: {flags}", read_rank_info().rank)
    return replace(options, **taken)


def _report_unused_ends(options: MeasuredOptions, stored: StoredModel, dataset: IndexedDataset) -> None:
    """Warn if the checkpoint does not record how training read the data, and no flag separates its documents."""
    sidecar = dataset.sidecar
    if stored.data_flags or sidecar is None or any(getattr(options, name) is not None for name in _CUTS):
        return
    if sidecar.append_eod or sidecar.conversations:
        reason = "{model} does not record its training: tokens of {prefix} read earlier documents; if they did not in "
        reason += f"training, give {' '.join(f'{{{name}}}' for name in _CUTS)}"
        note = Problem({}, reason, model=stored.directory, prefix=dataset.prefix)
        print_rank_0(f"*** {note} ***", read_rank_info().rank)


def _counted(batch: MicroBatch) -> Tensor:
    """Return which labels count, [b, s]."""
    return torch.ones_like(batch.labels, dtype=torch.bool) if batch.loss_mask is None else batch.loss_mask > 0


def run_model(model: LanguageModel, batch: MicroBatch) -> Tensor:
    """Return the stream after the last layer, [s, b, h]."""
    device = model.embedding.weight.device
    tokens = batch.tokens.to(device)
    positions = None if batch.positions is None else batch.positions.to(device)
    return model.hidden_states(tokens, model.training_context(tokens, positions, document_bounds=batch.document_bounds))


class _Passes:
    def __init__(self, engine: GenerationEngine, target: ModelConfig, batches: Sequence[MicroBatch]) -> None:
        self._engine = engine
        self._target = target
        self._batches = batches
        self.bar: ProgressBar | None = None
        self.counts = np.concatenate([_counted(batch).sum(1).numpy() for batch in batches])
        """Labels of each row."""

    @torch.inference_mode()
    def losses(self, late: Iterable[int], wiring: Wiring | None = None) -> Losses:
        """Return the losses when only these layers read late, by default in the target's wiring; a collective."""
        model = self._engine.model
        target = self._target
        wiring = wiring or target.wiring
        model.stack.rewire(wiring.layers(target.layer_kinds, sorted(late), target.residual_staleness, 0))
        of_batches = []
        for batch in self._batches:
            hidden_states = run_model(model, batch)
            counted = _counted(batch)
            hidden_states = hidden_states.transpose(0, 1)[counted.to(hidden_states.device)]
            labels = batch.labels[counted].unsqueeze(0).to(hidden_states.device)
            rows = torch.zeros(counted.shape, dtype=torch.float64)
            rows[counted] = model.predictions(hidden_states.unsqueeze(1), labels)[0, :, 0].cpu()
            of_batches.append(rows.sum(1).numpy())
        losses = np.concatenate(of_batches)
        if not np.isfinite(losses).all():
            raise BadNumbersError(f"the logits are not finite: {BAD_NUMBERS_CAUSE}")
        if self.bar is not None:
            self.bar.advance(1)
        return losses

    def mean(self, losses: Losses) -> float:
        """Return the loss per label."""
        return float(losses.sum() / self.counts.sum())

    def price(self, losses: Losses, base: Losses) -> Price:
        """Return the difference of two losses per label, and its standard error over rows."""
        count = len(self.counts)
        differences = losses - base
        increase = self.mean(differences)
        deviations = differences - increase * self.counts
        error = np.sqrt((deviations**2).sum() * count / (count - 1)) / self.counts.sum()
        return Price(increase, float(error))


def _measure(
    engine: GenerationEngine, target: ModelConfig, batches: Sequence[MicroBatch], options: SensitivityOptions
) -> Sensitivity:
    """Measure every layer alone, the greedy order, the upper layers, and kinds of sub-blocks; a collective."""
    layers = target.num_layers
    greedy = min(options.greedy_layers or layers, layers)
    passes = _Passes(engine, target, batches)
    kinds = _late_kinds(target)
    total = 1 + sum(layers - chosen for chosen in range(greedy)) + greedy
    total += sum(len(with_kind) + 1 for _, with_kind in kinds.values())
    is_first = engine.group.rank == 0
    with ProgressBar("sensitivity", total, "pass") if is_first else nullcontext() as passes.bar:
        base = passes.losses(())
        # The greedy order: each time the layer that costs least with those before it.
        alone: Mapping[int, Losses] = {}
        chosen = list[int]()
        cheapest = list[Price]()
        last = dict[int, float]()
        unclear = 0
        while len(chosen) < greedy:
            tried = {layer: passes.losses([*chosen, layer]) for layer in range(layers) if layer not in chosen}
            alone = alone or tried
            last = {layer: passes.mean(losses) for layer, losses in tried.items()}
            best, *others = sorted(last, key=lambda layer: last[layer])
            chosen.append(best)
            cheapest.append(passes.price(tried[best], base))
            if others:
                lead = passes.price(tried[others[0]], tried[best])
                unclear += int(lead.increase < lead.standard_error)
        upper = [passes.price(passes.losses(range(layers - count, layers)), base) for count in range(1, greedy + 1)]
        sub_blocks = tuple(_measure_kind(passes, name, *kind, base) for name, kind in kinds.items())
    if unclear and is_first:
        print(
            f"*** {unclear} of {greedy} layers were chosen by less than one standard error over the next best: "
            "more tokens make the order reliable ***",
            flush=True,
        )
    rest = sorted(set(range(layers)) - set(chosen), key=lambda layer: last[layer])
    return Sensitivity(
        model=str(options.load),
        num_layers=layers,
        residual_mode=target.residual_mode,
        residual_staleness=target.residual_staleness,
        data=str(options.data),
        tokens=int(passes.counts.sum()),
        loss=passes.mean(base),
        layers=tuple(passes.price(alone[layer], base) for layer in range(layers)),
        order=(*chosen, *rest),
        greedy_layers=greedy,
        cheapest=tuple(cheapest),
        upper=tuple(upper),
        sub_blocks=sub_blocks,
    )


def _measure_kind(passes: _Passes, name: str, wiring: Wiring, layers: Sequence[int], base: Losses) -> SubBlockPrices:
    alone = tuple(passes.price(passes.losses([layer], wiring), base) for layer in layers)
    return SubBlockPrices(name, tuple(layers), alone, passes.price(passes.losses(layers, wiring), base))


def _late_kinds(target: ModelConfig) -> dict[str, tuple[Wiring, list[int]]]:
    """Return, by kind, the wiring in which only sub-blocks of this kind read late, and the layers that have them.

    The kinds are the token mixers and the other sub-blocks. A model with a single mixer has none.
    """
    mixers = [target.mixer_of(layer).name for layer in range(target.num_layers)]
    if len({*mixers}) == 1:
        return {}
    late = target.wiring.late
    # The first sub-block has nothing to miss.
    _, *others = [(kind, layer) for layer, kinds in enumerate(target.layer_kinds) for kind in kinds]
    sub_blocks = [sub_block for sub_block in others if sub_block[0] in late]
    found: dict[str, tuple[Wiring, list[int]]] = {}
    for kind, layer in sorted(sub_blocks, key=lambda sub_block: not sub_block[0].has_mixer):
        name = mixers[layer] if kind.has_mixer else kind.value
        alike = [other for other in late if other is kind or (kind.has_mixer and other.has_mixer)]
        only = replace(target.wiring, late={other: late[other] for other in alike})
        found.setdefault(name, (only, []))[1].append(layer)
    return found


def _report(sensitivity: Sensitivity) -> str:
    """Return a table of the layers in their order, and one of the kinds of sub-blocks if they were measured."""

    def cell(prices: Sequence[Price], index: int) -> str:
        return _cell(prices[index]) if index < len(prices) else ""

    staleness = f", {sensitivity.residual_staleness} sub-blocks late" if sensitivity.residual_staleness != 1 else ""
    lines = [
        "Increase of the loss in nats per token, without training, when layers read late (wiring: "
        f"{sensitivity.residual_mode}{staleness}), with standard errors over rows: of each layer alone, of the "
        f"cheapest N layers, and of the upper N. Loss without a late layer: {sensitivity.loss:.4f}, over "
        f"{sensitivity.tokens:,} tokens of {sensitivity.data}.\n",
        "| N | layer | alone | cheapest N | upper N |",
        "| ---: | ---: | ---: | ---: | ---: |",
    ]
    for index, layer in enumerate(sensitivity.order):
        together = f"{cell(sensitivity.cheapest, index)} | {cell(sensitivity.upper, index)}"
        lines.append(f"| {index + 1} | {layer} | {cell(sensitivity.layers, layer)} | {together} |")
    return "\n".join([*lines, *_kinds_report(sensitivity)])


def _kinds_report(sensitivity: Sensitivity) -> list[str]:
    """Return a table with a column for each kind of sub-block."""
    kinds = sensitivity.sub_blocks
    if not kinds:
        return []
    alone = [dict(zip(kind.layers, kind.alone, strict=True)) for kind in kinds]
    rows: dict[str, list[Price | None]] = {
        str(layer): [prices.get(layer) for prices in alone] for layer in range(sensitivity.num_layers)
    }
    rows["all"] = [kind.together for kind in kinds]
    rows["all, per layer"] = [Price(*(value / len(kind.layers) for value in kind.together)) for kind in kinds]
    return [
        "\nThe same when only sub-blocks of one kind read late: in one layer, and in all.\n",
        f"| layer | {' | '.join(kind.kind for kind in kinds)} |",
        f"| ---: |{' ---: |' * len(kinds)}",
        *(f"| {name} | {' | '.join(map(_cell, prices))} |" for name, prices in rows.items()),
    ]


def _cell(price: Price | None) -> str:
    return "" if price is None else f"{price.increase:+.4f} ± {price.standard_error:.4f}"

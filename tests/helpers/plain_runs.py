"""What a whole run in one process must log, computed by the plain model from rows that the product reads."""

import itertools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from megatron_ladder.checkpoint.format import Checkpoint
from megatron_ladder.comm.mesh import ProcessMesh
from megatron_ladder.config.run import RunConfig, parse_run, resolve_run
from megatron_ladder.data.loader import OrderOptions, open_sources
from megatron_ladder.data.samples import Samples
from megatron_ladder.model.language_model import LanguageModel
from tests.helpers.sharded import weight_pieces_of
from tests.helpers.steps import everything
from tests.helpers.whole_runs import BEGIN, END, EOD, RATES, START, VOCABULARY, Curves
from tests.reference import MicroBatch, ReferenceConfig, Routed, Sight, Weights, reference_logits, reference_training
from tests.reference.documents import begins_after, loss_mask_of, sight_of

ASSISTANT = 0
"""The token of the letter a, by which the role of an answer is given."""


def expected_curves(argv: Sequence[str]) -> Curves:
    """Return the scalars of every step, and those of the evaluation after the last step, computed in fp64."""
    run = resolve_run(parse_run(argv), VOCABULARY, 1)
    sources = open_sources(run.data, OrderOptions(run.training.seq_length, run.training.seed, run.data.loss_on))
    assert sources.train is not None
    steps = [_micro_batches(run, sources.train, step) for step in range(len(RATES))]
    model = LanguageModel(run.model, ProcessMesh.single(), seed=run.training.seed)
    config = ReferenceConfig.like(run.model, run.training)
    losses = _Losses(run, steps)
    history, final = reference_training(
        {name: values.double() for name, _, values in weight_pieces_of(model)},
        config,
        steps,
        lambda iteration: RATES[iteration - 1],
        (run.optimizer.adam_beta1, run.optimizer.adam_beta2),
        run.optimizer.adam_eps,
        run.optimizer.weight_decay,
        run.optimizer.clip_grad,
        no_decay=lambda name: name.endswith(("norm.weight", ".bias", ".sinks", "_conv.weight", ".A_log", ".dt_bias")),
        gradients_of=losses,
    )
    curves: Curves = {"train/learning rate": dict(enumerate(map(_rounded, RATES), start=1))}
    for place, name in enumerate(("lm loss", "grad norm", *losses.names)):
        curves[f"train/{name}"] = {step: values[place] for step, values in enumerate(history, start=1)}
    if run.model.moe_layers:
        described = [_describe(sum(loads)) for loads in losses.loads]
        for name in described[0]:
            curves[f"train/{name}"] = {step: _rounded(values[name]) for step, values in enumerate(described, start=1)}
    loss = _evaluate(final, config, _micro_batches(run, sources.valid[""], 0))
    return curves | {"valid/lm loss": {len(RATES): loss}, "valid/ppl": {len(RATES): math.exp(loss)}}


class _Losses:
    """Returns a micro-batch's part of the losses and the gradients of their sum, and remembers the loads of each step.

    The losses of the output are means over the labels that count, those of the experts means over all tokens.
    """

    def __init__(self, run: RunConfig, steps: Sequence[Sequence[MicroBatch]]) -> None:
        self.names: list[str] = []
        self.loads: list[list[Tensor]] = [[] for _ in steps]
        self._step_of_call = iter([step for step, micro_batches in enumerate(steps) for _ in micro_batches])
        self._training = run.training
        self._teacher = None if run.training.distill_from is None else _read_model(run.training.distill_from)

    def __call__(
        self,
        weights: Weights,
        config: ReferenceConfig,
        tokens: Tensor,
        labels: Tensor,
        mask: Tensor,
        targets: float,
        all_tokens: int,
        sight: Sight,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        leaves = {name: weight.detach().clone().requires_grad_() for name, weight in weights.items()}
        record: list[Routed] = []
        logits, step = reference_logits(leaves, config, tokens, sight, record), next(self._step_of_call)
        normalizers = logits.logsumexp(-1)
        of_labels = normalizers - logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
        losses = {"lm loss": (of_labels * mask).sum() / targets}
        factors = dict[str, float]()
        if config.z_loss_coeff:
            losses["z loss"] = config.z_loss_coeff * (normalizers.square() * mask).sum() / targets
        if self._teacher is not None:
            share, temperature = self._training.distill_weight, self._training.distill_temperature
            log_q = (logits / temperature).log_softmax(-1)
            log_p = (reference_logits(*self._teacher, tokens, sight) / temperature).log_softmax(-1)
            distances = (log_p.exp() * (log_p - log_q)).sum(-1)
            losses["distillation loss"] = temperature**2 * (distances * mask).sum() / targets
            factors = {"lm loss": 1 - share, "distillation loss": share}
        if record and config.moe_aux_loss_coeff:
            losses["load balancing loss"] = sum(routed.auxiliary_loss for routed in record) / all_tokens
        if record and config.moe_z_loss_coeff:
            losses["router z loss"] = sum(routed.z_loss for routed in record) / all_tokens
        if record:
            self.loads[step].append(torch.stack([routed.loads for routed in record]))
        trained = [name for name in leaves if not name.endswith(".expert_bias")]
        objective = sum(factors.get(name, 1.0) * loss for name, loss in losses.items())
        gradients = torch.autograd.grad(objective, [leaves[name] for name in trained])
        self.names = [*losses][1:]
        return torch.stack([*losses.values()]).detach(), dict(zip(trained, gradients, strict=True))


def _read_model(save: Path) -> tuple[Weights, ReferenceConfig]:
    """Return the newest checkpoint in a folder."""
    weights = {name: values.double() for (name, kind), values in everything(save).items() if kind == "weight"}
    return weights, ReferenceConfig.like(Checkpoint.open(save).model())


def _micro_batches(run: RunConfig, source: Samples, step: int) -> list[MicroBatch]:
    """Return the global batch of a step, counted from 0."""
    size = run.global_batch_size
    rows = torch.from_numpy(source.samples(np.arange(step * size, (step + 1) * size)).tokens.astype(np.int64))
    tokens, labels = rows[:, :-1], rows[:, 1:]
    if BEGIN in rows:
        begins, token_mask, mask = (tokens == BEGIN).tolist(), tokens != EOD, (labels != BEGIN) & (labels != EOD)
        if run.data.loss_on != "all":
            mask = torch.tensor([[*_answers(row)][1:] for row in rows.tolist()])
    else:
        begins, token_mask, mask = begins_after(tokens, EOD), tokens >= 0, labels >= 0
    mask = mask * loss_mask_of(tokens, EOD) if run.data.eod_mask_loss else mask.float()
    sight = sight_of(begins, run.data.reset_position_ids, run.data.reset_attention_mask)
    parts = (tokens, labels, mask, sight.positions, sight.visible, token_mask)
    split = zip(*(part.split(run.training.micro_batch_size) for part in parts), strict=True)
    return [(*batch[:3], Sight(*batch[3:])) for batch in split]


def _answers(row: Sequence[int]) -> Iterator[bool]:
    """Yield whether each token of a row of conversations belongs to an answer, which includes its end."""
    role = None
    for previous, token in itertools.pairwise([EOD, *row]):
        yield role == ASSISTANT
        if previous == START:
            role = token
        elif token == END:
            role = None


def _describe(loads: Tensor) -> dict[str, float]:
    """Return what the log says about loads [layers, E]."""
    layers = [[float(load) for load in layer] for layer in loads]
    largest = max(max(layer) / (sum(layer) / len(layer)) for layer in layers)
    shares = [[load / sum(layer) for load in layer if load] for layer in layers]
    # That of a single expert is 0.
    most = math.log(max(loads.shape[1], 2))
    entropies = [-sum(share * math.log(share) for share in layer) / most for layer in shares]
    dead = sum(load == 0 for layer in layers for load in layer)
    return {"largest expert load": largest, "expert load entropy": sum(entropies) / len(layers), "dead experts": dead}


def _evaluate(weights: Weights, config: ReferenceConfig, micro_batches: Sequence[MicroBatch]) -> float:
    """Return the mean loss of the labels that count."""
    total = count = 0.0
    for tokens, labels, mask, sight in micro_batches:
        losses = -reference_logits(weights, config, tokens, sight).log_softmax(-1)
        total += float((losses.gather(-1, labels.unsqueeze(-1)).squeeze(-1) * mask).sum())
        count += float(mask.sum())
    return total / count


def _rounded(value: float) -> float:
    """Return the value in the precision of the log's files."""
    return float(np.float32(value))

"""Evaluations during training: losses on validation sets, and continuations of prompts."""

from collections.abc import Callable, Collection, Sequence
from contextlib import closing
from itertools import takewhile

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_ladder.data.batches import DocumentRules, make_micro_batches
from megatron_ladder.data.samples import SampleRows
from megatron_ladder.parallel.scoring import Request, Score, cut_requests
from megatron_ladder.train.inputs import RunInputs
from megatron_ladder.train.log import RunLog
from megatron_ladder.train.reading import sample_batches
from megatron_ladder.train.setup import Trainer
from megatron_ladder.train.step import evaluate


class Predictor:
    """Scores and continues token ids with the engine that trains, in every layout. Every rank makes the same calls.

    Several texts share a row of --seq-length positions as separate documents, so every forward pass has the shape of a
    training micro-batch. There is no key-value cache: each new token costs a pass over its row.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.max_length = trainer.run.training.seq_length

    def score(self, requests: Sequence[Request]) -> list[Score]:
        """Return the score of each continuation; see `cut_requests`."""
        requests = self._cut(requests)
        whole = [np.array([*context, *following], np.int64) for context, following in requests]
        predicted = self._predict([ids[:-1] for ids in whole], [ids[1:] for ids in whole])
        return [
            Score.of(predictions[:, -len(following) :], following)
            for predictions, (_, following) in zip(predicted, requests, strict=True)
        ]

    def generate(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, stop_ids: Collection[int] = ()
    ) -> list[list[int]]:
        """Return the greedy continuation of each prompt, ending before a token of `stop_ids`; see `cut_requests`."""
        starts = [list(prompt) for prompt, _ in self._cut([(prompt, [0] * max_new_tokens) for prompt in prompts])]
        generated: list[list[int]] = [[] for _ in prompts]
        active = list(range(len(prompts)))
        for _ in range(max_new_tokens):
            texts = [np.array(starts[i] + generated[i], np.int64) for i in active]
            predicted = self._predict(texts, texts)
            likeliest = {i: int(tokens[-1]) for i, (_, tokens) in zip(active, predicted, strict=True)}
            active = [i for i in active if likeliest[i] not in stop_ids]
            for i in active:
                generated[i].append(likeliest[i])
            if not active:
                break
        return generated

    def _cut(self, requests: Sequence[Request]) -> list[Request]:
        return cut_requests(requests, self._trainer.run.model.vocab_size, self.max_length)

    def _predict(self, texts: Sequence[NDArray[np.int64]], labels: Sequence[NDArray[np.int64]]) -> list[Tensor]:
        """Return `LanguageModel.predictions` for the labels of each text of at most `max_length` ids.

        Each result is [2, ids]. A text that does not fit into a row begins the next one; the rest of a row is padding.
        """
        mesh, size = self._trainer.mesh, self._trainer.run.training.micro_batch_size
        row = end = 0
        positions: list[tuple[int, slice]] = []
        for text in texts:
            if end + len(text) > self.max_length:
                row, end = row + 1, 0
            positions.append((row, slice(end, end + len(text))))
            end += len(text)
        # All data-parallel ranks process equally many: with ZeRO-3, they gather the weights together, and
        # expert-parallel ones exchange tokens.
        rows = -(-(row + 1) // (size * mesh.data.size)) * size * mesh.data.size
        tokens, targets = np.zeros((2, rows, self.max_length + 1), np.int64)
        begins = np.zeros(tokens.shape, bool)
        for (row, columns), text, of_text in zip(positions, texts, labels, strict=True):
            tokens[row, columns] = text
            targets[row, columns] = of_text
            begins[row, [columns.start, columns.stop]] = True
        batches = make_micro_batches(SampleRows(tokens, None, begins), DocumentRules(None, True, True), size)
        of_batches = torch.from_numpy(targets[:, :-1].copy()).split(size)
        labelled = [batch._replace(labels=part) for batch, part in zip(batches, of_batches, strict=True)]
        predictions = []
        # A pass takes at most as many micro-batches as a training step.
        at_once = mesh.data.size * self._trainer.run.accumulation_steps
        for first in range(0, len(labelled), at_once):
            step = labelled[first : first + at_once]
            of_rank = step[mesh.data.rank :: mesh.data.size]
            outputs, _ = self._trainer.engine.run_passes(of_rank, trains=False, predicts=True)
            results = torch.zeros(len(step), 2, self.max_length, size, dtype=torch.float64, device=self._trainer.device)
            if outputs:
                results[mesh.data.rank :: mesh.data.size] = torch.stack(outputs)
            mesh.pipeline.all_reduce(mesh.data.all_reduce(results))
            predictions.append(results.cpu())
        # [micro-batches, 2, s, b] -> [rows, 2, s]
        of_rows = torch.cat(predictions).permute(0, 3, 1, 2).flatten(0, 1)
        return [of_rows[row, :, columns] for row, columns in positions]


def evaluation_is_due(trainer: Trainer, inputs: RunInputs, iteration: int) -> bool:
    """Return whether there is something to evaluate after a step."""
    is_time = iteration == trainer.run.training.train_iters or iteration % trainer.run.logging.eval_interval == 0
    return is_time and bool(inputs.sources.valid or inputs.sample_prompts)


def run_evaluations(
    trainer: Trainer, inputs: RunInputs, iteration: int, log: RunLog, stops: Callable[[], str | None]
) -> None:
    """Evaluate the model after a step and report the results, until `stops` returns a reason; all ranks call it."""
    for name, source in inputs.sources.valid.items():
        with closing(sample_batches(trainer, source, 0)) as batches:
            # Without another batch, `evaluate` ends with StopIteration.
            remaining = takewhile(lambda _: not stops(), batches)
            try:
                result = evaluate(trainer, remaining, trainer.run.logging.eval_iters)
            except StopIteration:
                return
        log.validation(iteration, result, name)
    if inputs.sample_prompts and not stops():
        log.samples(iteration, _continue_prompts(trainer, inputs))


def _continue_prompts(trainer: Trainer, inputs: RunInputs) -> list[tuple[str, str]]:
    tokenizer = inputs.tokenizer
    assert tokenizer is not None
    # The file may differ between hosts.
    prompts = trainer.mesh.world.broadcast_object(inputs.sample_prompts)
    new_tokens = trainer.run.logging.sample_tokens
    generated = Predictor(trainer).generate([ids for _, ids in prompts], new_tokens, inputs.end_ids)
    samples = []
    for (prompt, ids), new_ids in zip(prompts, generated, strict=True):
        # A model's vocabulary may be larger than its tokenizer's; the additional tokens have no text.
        known = [number for number in new_ids if number < tokenizer.vocab_size]
        # Some tokenizers drop the space before the first word.
        text = tokenizer.decode([*ids, *known])[len(tokenizer.decode(ids)) :]
        samples.append((prompt, text))
    return samples

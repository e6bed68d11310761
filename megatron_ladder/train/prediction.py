"""Likelihoods and greedy continuations of token ids, computed by the engine that trains, in every layout.

Several texts share a row of --seq-length positions as separate documents, so every forward pass has the shape of a
training micro-batch. There is no key-value cache: each new token costs a pass over its row.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_ladder.data.batches import MicroBatch
from megatron_ladder.train.setup import Trainer

Request = tuple[Sequence[int], Sequence[int]]
"""Ids of a context, and of its continuation."""
_Item = TypeVar("_Item")


class Score(NamedTuple):
    """The log-likelihood of a continuation, and whether each of its tokens is the most likely one."""

    logprob: float
    is_greedy: bool


class Predictor:
    """Scores and continues token ids. Every rank must make the same calls."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.max_length = trainer.run.training.seq_length

    def check(self, requests: Sequence[Request]) -> None:
        """Raise ValueError if a text is empty, too long, or has an id outside of the vocabulary."""
        vocab_size = self._trainer.run.model.vocab_size
        for number, (context, continuation) in enumerate(requests):
            wrong = [token for token in (*context, *continuation) if not 0 <= token < vocab_size]
            if wrong:
                raise ValueError(f"request {number}: id {wrong[0]} is outside of the vocabulary, 0 to {vocab_size - 1}")
            if not context or not 0 < len(continuation) <= self.max_length:
                raise ValueError(
                    f"request {number}: found {len(context)} ids of context and {len(continuation)} that follow: "
                    f"expected 1 or more, and 1 to {self.max_length}"
                )

    def score(self, requests: Sequence[Request]) -> list[Score]:
        """Return the score of each continuation; contexts that are too long lose their beginnings."""
        whole = [np.array([*context, *following], np.int64)[-self.max_length - 1 :] for context, following in requests]
        predicted = self._predict([ids[:-1] for ids in whole], [ids[1:] for ids in whole])
        scores = []
        for ids, (_, following), (losses, likeliest) in zip(whole, requests, predicted, strict=True):
            last = len(following)
            scores.append(Score(-float(losses[-last:].sum()), bool((likeliest[-last:] == ids[-last:]).all())))
        return scores

    def generate(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, stop_ids: Sequence[int] = ()
    ) -> list[list[int]]:
        """Return the greedy continuation of each prompt, ending before a token of `stop_ids`.

        Prompts that are too long lose their beginnings.
        """
        starts = [list(prompt)[-(self.max_length - max_new_tokens + 1) :] for prompt in prompts]
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

    def _predict(
        self, texts: Sequence[NDArray[np.int64]], labels: Sequence[NDArray[np.int64]]
    ) -> list[NDArray[np.float64]]:
        """Return, for each text of at most `max_length` ids, the losses of its labels and the likeliest next tokens.

        Each result is [2, ids].
        """
        run, mesh = self._trainer.run, self._trainer.mesh
        rows = list(_pack([len(text) for text in texts], self.max_length))
        batches = _chunks(rows, run.training.micro_batch_size)
        found: dict[int, NDArray[np.float64]] = {}
        # A pass takes at most as many micro-batches as a training step.
        for step in _chunks(batches, mesh.data.size * run.accumulation_steps):
            # All data-parallel ranks process equally many: with ZeRO-3, they gather the weights together.
            share = -(-len(step) // mesh.data.size)
            padded = [*step, *([[]] * (mesh.data.size * share - len(step)))]
            own = padded[mesh.data.rank * share : (mesh.data.rank + 1) * share]
            part = self._trainer.engine.predict([self._micro_batch(batch, texts, labels) for batch in own])
            results = part.new_zeros(mesh.data.size, *part.shape)
            results[mesh.data.rank] = part
            mesh.pipeline.all_reduce(mesh.data.all_reduce(results))
            of_batches = results.flatten(0, 1).cpu().numpy()
            for batch, predictions in zip(step, of_batches, strict=False):
                for number, row in enumerate(batch):
                    position = 0
                    for text in row:
                        found[text] = predictions[:, position : position + len(texts[text]), number]
                        position += len(texts[text])
        return [found[number] for number in range(len(texts))]

    def _micro_batch(
        self, rows: Sequence[Sequence[int]], texts: Sequence[NDArray[np.int64]], labels: Sequence[NDArray[np.int64]]
    ) -> MicroBatch:
        """Return rows of texts, by their numbers; the rest of a row is a document of padding."""
        shape = (self._trainer.run.training.micro_batch_size, self.max_length)
        tokens, targets, positions = (torch.zeros(shape, dtype=torch.int64) for _ in range(3))
        bounds = []
        for number in range(shape[0]):
            position = 0
            for text in rows[number] if number < len(rows) else ():
                place = slice(position, position + len(texts[text]))
                tokens[number, place] = torch.from_numpy(texts[text])
                targets[number, place] = torch.from_numpy(labels[text])
                positions[number, place] = torch.arange(len(texts[text]))
                bounds.append(number * self.max_length + position)
                position = place.stop
            if position < self.max_length:
                positions[number, position:] = torch.arange(self.max_length - position)
                bounds.append(number * self.max_length + position)
        ends = torch.tensor([*bounds, tokens.numel()], dtype=torch.int32)
        return MicroBatch(tokens, targets, positions=positions, document_bounds=ends)


def _pack(lengths: Sequence[int], row: int) -> Iterator[list[int]]:
    """Yield the numbers of the texts in each row; a text that does not fit into a row begins the next one."""
    texts: list[int] = []
    room = row
    for number, length in enumerate(lengths):
        if length > room:
            yield texts
            texts, room = [], row
        texts.append(number)
        room -= length
    if texts:
        yield texts


def _chunks(items: Sequence[_Item], size: int) -> list[Sequence[_Item]]:
    return [items[first : first + size] for first in range(0, len(items), size)]

"""Evaluations during training: losses on validation sets, continuations of prompts, and a function of the user."""

import importlib
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from itertools import takewhile
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_ladder.comm.agreement import raising_on_all_ranks
from megatron_ladder.comm.group import CommGroup
from megatron_ladder.data.batches import DocumentRules, make_micro_batches
from megatron_ladder.data.samples import SampleRows
from megatron_ladder.data.tokenizers import Tokenizer
from megatron_ladder.errors import UserError
from megatron_ladder.train.inputs import RunInputs
from megatron_ladder.train.log import RunLog
from megatron_ladder.train.reading import sample_batches
from megatron_ladder.train.setup import Trainer
from megatron_ladder.train.step import evaluate

_DONE = "done"
Request = tuple[Sequence[int], Sequence[int]]
"""Ids of a context, and of its continuation."""


class Score(NamedTuple):
    """The log-likelihood of a continuation, and whether each of its tokens is the most likely one."""

    logprob: float
    is_greedy: bool


class Predictor:
    """Scores and continues token ids with the engine that trains, in every layout. Every rank makes the same calls.

    Several texts share a row of --seq-length positions as separate documents, so every forward pass has the shape of a
    training micro-batch. There is no key-value cache: each new token costs a pass over its row.
    """

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

        Each result is [2, ids]. A text that does not fit into a row begins the next one; the rest of a row is padding.
        """
        mesh, size, row, end = self._trainer.mesh, self._trainer.run.training.micro_batch_size, 0, 0
        places: list[tuple[int, slice]] = []
        for text in texts:
            if end + len(text) > self.max_length:
                row, end = row + 1, 0
            places.append((row, slice(end, end + len(text))))
            end += len(text)
        # All data-parallel ranks process equally many: with ZeRO-3, they gather the weights together.
        rows = -(-(row + 1) // (size * mesh.data.size)) * size * mesh.data.size
        tokens, targets = np.zeros((2, rows, self.max_length + 1), np.int64)
        begins = np.zeros(tokens.shape, bool)
        for (row, place), text, of_text in zip(places, texts, labels, strict=True):
            tokens[row, place], targets[row, place] = text, of_text
            begins[row, [place.start, place.stop]] = True
        batches = make_micro_batches(SampleRows(tokens, None, begins), DocumentRules(None, True, True), size)
        of_batches = torch.from_numpy(targets[:, :-1].copy()).split(size)
        found = []
        # A pass takes at most as many micro-batches as a training step.
        at_once = mesh.data.size * self._trainer.run.accumulation_steps
        for first in range(0, len(batches), at_once):
            step = list(zip(batches, of_batches, strict=True))[first : first + at_once]
            own = step[len(step) // mesh.data.size * mesh.data.rank :][: len(step) // mesh.data.size]
            part = self._trainer.engine.predict([batch._replace(labels=of_batch) for batch, of_batch in own])
            results = part.new_zeros(mesh.data.size, *part.shape)
            results[mesh.data.rank] = part
            mesh.pipeline.all_reduce(mesh.data.all_reduce(results))
            found.append(results.flatten(0, 1).cpu())
        # [micro-batches, 2, s, b] -> [rows, 2, s]
        predictions = torch.cat(found).permute(0, 3, 1, 2).flatten(0, 1).numpy()
        return [predictions[row, :, place] for row, place in places]


class EvaluatedModel:
    """What the function of --eval-callable receives: the model in training, on rank 0.

    The other ranks wait in `call`, and take part in the passes that this object requests.

    Attributes:
        iteration: number of steps done.
        tokenizer: the run's tokenizer; None without --tokenizer-type.
        max_length: --seq-length. A continuation may have as many ids; a longer context loses its beginning.
    """

    def __init__(self, predictor: Predictor, world: CommGroup, iteration: int, tokenizer: Tokenizer | None) -> None:
        self.iteration, self.tokenizer, self.max_length = iteration, tokenizer, predictor.max_length
        self._predictor, self._world = predictor, world
        self._failure: Exception | None = None

    def score(self, requests: Sequence[Request]) -> list[Score]:
        """Return the log-likelihood of each continuation after its context, and whether greedy decoding yields it.

        A request is a pair of ids, `(context, continuation)`. Raises ValueError if one is empty, too long, or has an id
        outside of the vocabulary.
        """
        pairs = [(tuple(map(int, context)), tuple(map(int, following))) for context, following in requests]
        self._predictor.check(pairs)
        scores: list[Score] = self._together("score", pairs)
        return scores

    def generate(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, stop_ids: Sequence[int] = ()
    ) -> list[list[int]]:
        """Return the greedy continuation of each prompt, ending before a token of `stop_ids`; raises as `score`."""
        ids = [tuple(map(int, prompt)) for prompt in prompts]
        self._predictor.check([(prompt, [0] * max_new_tokens) for prompt in ids])
        generated: list[list[int]] = self._together("generate", ids, max_new_tokens, tuple(stop_ids))
        return generated

    def _together(self, method: str, *arguments: Any) -> Any:
        try:
            self._world.broadcast_object((method, arguments))
            return getattr(self._predictor, method)(*arguments)
        except Exception as error:
            # The ranks are out of step, so this error must end the run even if the user's function handles it.
            self._failure = error
            raise

    def call(self, function: Callable[["EvaluatedModel"], Mapping[str, float]] | None) -> tuple[dict[str, float], str]:
        """Call the function on rank 0; return its metrics, and the message of its error, on every rank."""
        outcome: tuple[dict[str, float], str] = ({}, "")
        if function is not None:
            try:
                metrics = function(self)
                if not isinstance(metrics, Mapping):
                    raise TypeError(f"expected numbers by name, found {type(metrics).__name__}")
                outcome = ({str(name): float(value) for name, value in metrics.items()}, "")
            except (Exception, SystemExit) as error:
                traceback.print_exc()
                outcome = ({}, f"{type(error).__name__}: {error}")
            if self._failure is not None:
                raise self._failure
            self._world.broadcast_object((_DONE, outcome))
            return outcome
        while (request := self._world.broadcast_object(None))[0] != _DONE:
            method, arguments = request
            getattr(self._predictor, method)(*arguments)
        done: tuple[dict[str, float], str] = request[1]
        return done


class Evaluations:
    """The evaluations of a run. Every rank must make the same calls."""

    def __init__(self, trainer: Trainer, inputs: RunInputs) -> None:
        """Raises UserError on every rank if --eval-callable cannot be imported."""
        self._trainer, self._inputs = trainer, inputs
        self._predictor = Predictor(trainer)
        self._function: Callable[[EvaluatedModel], Mapping[str, float]] | None = None
        if trainer.run.logging.eval_callable is not None:
            with raising_on_all_ranks(trainer.mesh.world):
                if trainer.mesh.world.rank == 0:
                    self._function = _import_callable(trainer.run.logging.eval_callable)

    def are_due(self, iteration: int) -> bool:
        """Whether there is something to evaluate after a step."""
        return any(self._due(iteration))

    def _due(self, iteration: int) -> tuple[bool, bool]:
        """Return whether losses and samples, and whether the metrics of --eval-callable, are due after a step."""
        logging, last = self._trainer.run.logging, iteration == self._trainer.run.training.train_iters
        has_inputs = bool(self._inputs.sources.valid or self._inputs.sample_prompts)
        interval = logging.eval_callable_interval or logging.eval_interval
        return (
            has_inputs and (last or iteration % logging.eval_interval == 0),
            logging.eval_callable is not None and (last or iteration % interval == 0),
        )

    def run(self, iteration: int, log: RunLog, stops: Callable[[], str | None], everything: bool = False) -> None:
        """Run and report what is due after a step, or `everything`, until `stops` returns a reason.

        Raises UserError on every rank if the function of --eval-callable fails.
        """
        logging, prompts = self._trainer.run.logging, self._inputs.sample_prompts
        validates, calls = self._due(iteration)
        if everything or validates:
            for name, source in self._inputs.sources.valid.items():
                with closing(sample_batches(self._trainer, source, 0)) as batches:
                    # Without another batch, `evaluate` ends with StopIteration.
                    remaining = takewhile(lambda _: not stops(), batches)
                    try:
                        loss = evaluate(self._trainer, remaining, logging.eval_iters)
                    except StopIteration:
                        return
                log.validation(iteration, loss, name)
            if prompts and not stops():
                log.samples(iteration, self._continue_prompts(prompts))
        if (calls or (everything and logging.eval_callable is not None)) and not stops():
            model = EvaluatedModel(self._predictor, self._trainer.mesh.world, iteration, self._inputs.tokenizer)
            metrics, problem = model.call(self._function)
            if problem:
                raise UserError(
                    f"--eval-callable {logging.eval_callable} failed after iteration {iteration}: {problem} (traceback "
                    "on rank 0): fix it, and resume from the last checkpoint"
                )
            log.metrics(iteration, metrics)

    def _continue_prompts(self, prompts: Sequence[tuple[str, tuple[int, ...]]]) -> list[tuple[str, str]]:
        tokenizer = self._inputs.tokenizer
        assert tokenizer is not None
        # The file may differ between hosts.
        prompts = self._trainer.mesh.world.broadcast_object(prompts)
        generated = self._predictor.generate(
            [ids for _, ids in prompts], self._trainer.run.logging.sample_tokens, [tokenizer.eod_id]
        )
        samples = []
        for (prompt, ids), new_ids in zip(prompts, generated, strict=True):
            # A model's vocabulary may be larger than its tokenizer's; the additional tokens have no text.
            known = [number for number in new_ids if number < tokenizer.vocab_size]
            # Some tokenizers drop the space before the first word.
            text = tokenizer.decode([*ids, *known])[len(tokenizer.decode(ids)) :]
            samples.append((prompt, text))
        return samples


def _import_callable(name: str) -> Callable[[EvaluatedModel], Mapping[str, float]]:
    """Return `module:function`, also from the current directory; raises UserError if that fails."""
    module, _, function = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        found = getattr(importlib.import_module(module), function)
    except (Exception, SystemExit) as error:
        raise UserError(
            f"--eval-callable {name}: cannot be imported: {type(error).__name__}: {error}: give a function of a module "
            "in PYTHONPATH or the current directory"
        ) from error
    if not callable(found):
        raise UserError(f"--eval-callable {name}: found {type(found).__name__}, expected a function")
    called: Callable[[EvaluatedModel], Mapping[str, float]] = found
    return called

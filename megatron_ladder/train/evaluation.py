"""Evaluations during training: losses on validation sets, continuations of prompts, and a function of the user."""

import importlib
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from itertools import takewhile
from typing import Any

from megatron_ladder.comm.agreement import raising_on_all_ranks
from megatron_ladder.comm.group import CommGroup
from megatron_ladder.data.tokenizers import Tokenizer
from megatron_ladder.errors import UserError
from megatron_ladder.train.inputs import RunInputs
from megatron_ladder.train.log import RunLog
from megatron_ladder.train.prediction import Predictor, Request, Score
from megatron_ladder.train.reading import sample_batches
from megatron_ladder.train.setup import Trainer
from megatron_ladder.train.step import evaluate

_DONE = "done"


class EvaluatedModel:
    """What the function of --eval-callable receives: the model in training, on rank 0.

    The other ranks wait in `_follow`, and take part in the passes that this object requests.

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

    def call(self, function: Callable[["EvaluatedModel"], Mapping[str, float]]) -> tuple[dict[str, float], str]:
        """Call the function on rank 0; return its metrics, and the message of its error, on every rank."""
        outcome: tuple[dict[str, float], str] = ({}, "")
        if self._world.rank == 0:
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
        return self._validates_after(iteration) or self._calls_after(iteration)

    def run(self, iteration: int, log: RunLog, stops: Callable[[], str | None], everything: bool = False) -> None:
        """Run and report what is due after a step, or `everything`, until `stops` returns a reason.

        Raises UserError on every rank if the function of --eval-callable fails.
        """
        logging, prompts = self._trainer.run.logging, self._inputs.sample_prompts
        if everything or self._validates_after(iteration):
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
        if (everything or self._calls_after(iteration)) and not stops():
            self._call(iteration, log)

    def _validates_after(self, iteration: int) -> bool:
        run = self._trainer.run
        has_work = bool(self._inputs.sources.valid) or bool(self._inputs.sample_prompts)
        return has_work and (iteration == run.training.train_iters or iteration % run.logging.eval_interval == 0)

    def _calls_after(self, iteration: int) -> bool:
        run = self._trainer.run
        interval = run.logging.eval_callable_interval or run.logging.eval_interval
        is_due = iteration == run.training.train_iters or iteration % interval == 0
        return is_due and run.logging.eval_callable is not None

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

    def _call(self, iteration: int, log: RunLog) -> None:
        logging, world = self._trainer.run.logging, self._trainer.mesh.world
        if logging.eval_callable is None:
            return
        model = EvaluatedModel(self._predictor, world, iteration, self._inputs.tokenizer)
        metrics, problem = model.call(self._function or (lambda _: {}))
        if problem:
            raise UserError(
                f"--eval-callable {logging.eval_callable} failed after iteration {iteration}: {problem} (traceback on "
                "rank 0): fix it, and resume from the last checkpoint"
            )
        log.metrics(iteration, metrics)


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

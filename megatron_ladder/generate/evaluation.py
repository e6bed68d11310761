"""Evaluation of a stored model by one process, which directs all tensor-parallel ranks.

The process that evaluates is rank 0. Before each batch it broadcasts the call of the engine, and the other ranks make
the same call. It starts these ranks itself, unless a launcher did.
"""

import functools
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch

from megatron_ladder.comm.group import CommGroup
from megatron_ladder.comm.launch import RankInfo, read_rank_info, stop_process_group
from megatron_ladder.comm.ranks import OtherRanks
from megatron_ladder.comm.watch import naming_lost_peers
from megatron_ladder.command_line import flag_words, parse_config
from megatron_ladder.errors import Problem, UserError, run_program
from megatron_ladder.generate.engine import GenerationEngine
from megatron_ladder.generate.loading import StoredModel
from megatron_ladder.generate.options import ModelOptions
from megatron_ladder.generate.program import check_hardware, load_engine, open_model_of
from megatron_ladder.generate.requests import Generation, GenerationRequest
from megatron_ladder.parallel.scoring import Request, Score, cut_requests
from megatron_ladder.progress import ProgressBar
from megatron_ladder.tokenizers.kinds import Tokenizer

_TIMEOUT = timedelta(days=30)
"""Time that rank 0 can take between two batches. The end of a process is noticed immediately in any case."""


class Evaluator:
    """A model that scores and continues texts of token ids, `batch_size` at a time, on any number of ranks.

    Attributes:
        stored: the model's directory.
        tokenizer: its tokenizer.
        max_length: number of the model's positions.
        device: rank 0's device.
    """

    def __init__(self, batch_size: int, **flags: Any) -> None:
        """`flags` are those of generate.py that concern the model, such as `model`, `tp` and `dtype`.

        If a launcher started the processes, this call returns only on rank 0. The other ranks take part in the
        evaluation and then end with SystemExit. Raises UserError.
        """
        words = flag_words(flags)
        options = parse_config(ModelOptions, words, "evaluation", None)
        place = read_rank_info()
        starts_ranks = "WORLD_SIZE" not in os.environ and (options.tp or 1) > 1
        if starts_ranks:
            place = RankInfo(0, options.tp or 1, 0)
        self.stored = open_model_of(options)
        check_hardware(place, options, self.stored.config)
        if self.stored.tokenizer is None:
            reason = "{model}: the directory has no tokenizer; use {tokenizer_type} and {tokenizer_model}"
            raise UserError(Problem({"model": self.stored.directory}, reason))
        self.tokenizer: Tokenizer = self.stored.tokenizer
        self.max_length = self.stored.config.max_position_embeddings
        self._batch_size = batch_size
        self._others = OtherRanks(__name__, words, place.world_size) if starts_ranks else None
        try:
            with _environment(self._others):
                self._engine, self._group = _join(place, options, self.stored)
        except BaseException:
            self._end_others()
            raise
        if place.rank > 0:
            _follow(self._engine, self._group)
            raise SystemExit(0)
        self.device: torch.device = self._engine.model.embedding.weight.device
        self._in_step = True

    def score(self, texts: Sequence[Request]) -> list[Score]:
        """Score the continuation of each (context, continuation); a context that is too long loses its beginning.

        A continuation without ids has the log-likelihood 0. Raises UserError if one has more ids than the model has
        positions.
        """
        order = [number for number, (_, continuation) in enumerate(texts) if continuation]
        try:
            vocab_size = self.stored.config.vocab_size
            requests = cut_requests([texts[number] for number in order], vocab_size, self.max_length)
        except ValueError as error:
            fix = "leave this task out, or use the model's own {tokenizer_model}, or a model with more positions"
            raise UserError(Problem({}, f"{{error}}; {fix}", error=error)) from None
        cut = dict(zip(order, requests, strict=True))
        scores = [Score((), True)] * len(texts)
        # Long texts first, so that a lack of memory shows early. Texts of similar lengths need little padding.
        order.sort(key=lambda number: -sum(map(len, cut[number])))
        for numbers in self._batches("scoring", order):
            batch = self._on_all_ranks("score_batch", [cut[number] for number in numbers])
            for number, score in zip(numbers, batch, strict=True):
                scores[number] = score
        return scores

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
        """Continue prompts; no result depends on the other requests."""
        largest = max((token for request in requests for token in request.prompt_ids), default=0)
        if largest >= (size := self.stored.config.vocab_size):
            reason = f"a text has the id {largest}, and the model's vocabulary {size}; use the model's own "
            raise UserError(Problem({}, reason + "{tokenizer_model}"))
        by_number: dict[int, Generation] = {}
        order = sorted(range(len(requests)), key=lambda number: -len(requests[number].prompt_ids))
        for numbers in self._batches("generating", order):
            generations = self._on_all_ranks("generate", [requests[number] for number in numbers])
            by_number.update(zip(numbers, generations, strict=True))
        return [by_number[number] for number in range(len(requests))]

    def close(self) -> None:
        """End the other ranks and leave the process group."""
        in_step, self._in_step = self._in_step, False
        try:
            if in_step:
                self._group.broadcast_object(None)
                self._engine.close()
                stop_process_group()
        finally:
            self._end_others()

    def _batches(self, description: str, order: Sequence[int]) -> Iterator[Sequence[int]]:
        with ProgressBar(description, len(order), "text") as bar:
            for first in range(0, len(order), self._batch_size):
                numbers = order[first : first + self._batch_size]
                yield numbers
                bar.advance(len(numbers))

    def _on_all_ranks(self, method: str, *arguments: Any) -> Any:
        # After an error the ranks are out of step.
        self._in_step = False
        with naming_lost_peers():
            self._group.broadcast_object((method, arguments))
            result = getattr(self._engine, method)(*arguments)
        self._in_step = True
        return result

    def _end_others(self) -> None:
        if self._others is not None:
            self._others.close()


@contextmanager
def _environment(others: OtherRanks | None) -> Iterator[None]:
    """Add the variables of rank 0 inside the block, so that no other library takes this process for one of several."""
    before = dict(os.environ)
    os.environ.update({} if others is None else others.environment)
    try:
        yield
    finally:
        if others is not None:
            os.environ.clear()
            os.environ.update(before)


def _join(place: RankInfo, options: ModelOptions, stored: StoredModel) -> tuple[GenerationEngine, CommGroup]:
    """Return this rank's engine, and a group in which ranks wait for calls."""
    engine = load_engine(place, options, stored)
    return engine, engine.group.over_gloo(_TIMEOUT)


def _follow(engine: GenerationEngine, group: CommGroup) -> None:
    """Make the calls that rank 0 broadcasts, until it closes."""
    with naming_lost_peers():
        while (call := group.broadcast_object(None)) is not None:
            method, arguments = call
            getattr(engine, method)(*arguments)
    engine.close()
    stop_process_group()


def _main(argv: Sequence[str]) -> None:
    """Run a rank that an `Evaluator` started."""
    options = parse_config(ModelOptions, argv, "evaluation", None)
    _follow(*_join(read_rank_info(), options, open_model_of(options)))


entry_point = functools.partial(run_program, _main)

"""The one decode loop: prompts in, tokens out as they come.

Layouts: token ids [b, s]; hidden_states [s, b, h]; logits [b, V], of the newest token of each sample alone.

Every tensor-parallel rank runs the loop in step with the others. Rank 0 chooses the tokens and broadcasts them,
so that no rounding can lead two ranks to different texts.
"""

import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from megatron_ladder.comm.mesh import ProcessMesh
from megatron_ladder.data.tokenizers import Tokenizer
from megatron_ladder.errors import BadNumbersError
from megatron_ladder.generate.cache import StaticKeyValueCache
from megatron_ladder.generate.graph import CapturedDecode, StepGraph
from megatron_ladder.generate.sampling import NO_TOKEN, Sampler, SamplingParameters
from megatron_ladder.generate.text import TextStream
from megatron_ladder.model.attention import SequenceContext
from megatron_ladder.model.language_model import LanguageModel
from megatron_ladder.model.rotary import RotaryTable, rotary_table

FinishReason = Literal["eos", "length"]

FILLING = 0
"""The token behind shorter prompts; no result depends on which it is."""


@dataclass(frozen=True)
class GenerationRequest:
    """One prompt, and how it is to be continued."""

    prompt_ids: tuple[int, ...]
    """At least one, each below the model's vocabulary size."""
    max_new_tokens: int
    """At least one; with the prompt at most as many as the model has positions."""
    sampling: SamplingParameters = SamplingParameters()
    eos_ids: frozenset[int] = frozenset()
    """Tokens that end the continuation; none means that only `max_new_tokens` does."""


class NewToken(NamedTuple):
    """One step of one sample."""

    sample: int
    """Index of the request."""
    id: int
    text: str
    """What has become readable with it; the pieces joined are the continuation's text. "" without a tokenizer."""
    finish_reason: FinishReason | None
    """Why it is the sample's last token."""


class Timings(NamedTuple):
    """Of the whole batch that a request was in; the time in which the caller holds the loop is left out."""

    time_to_first_token: float
    """Seconds from the request to the first token."""
    prefill_tokens_per_second: float
    """Tokens of all prompts over that time."""
    decode_tokens_per_second: float | None
    """Tokens of all samples after their first, over the time after the first; None when there are none."""


@dataclass(frozen=True)
class Generation:
    """A finished request."""

    prompt_ids: tuple[int, ...]
    ids: tuple[int, ...]
    """The generated tokens alone, the one that ended them included."""
    text: str | None
    """Text of the generated tokens, without that of an ending one; None without a tokenizer."""
    finish_reason: FinishReason
    timings: Timings


@dataclass
class _Sample:
    """A request on its way."""

    request: GenerationRequest
    text_stream: TextStream | None
    ids: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    @property
    def column(self) -> int:
        """Where the newest token goes in the cache: behind the prompt and the tokens before it."""
        return len(self.request.prompt_ids) + len(self.ids) - 1

    def append(self, token: int) -> str:
        """Takes the next token, and returns the text that has become readable."""
        self.ids.append(token)
        if token in self.request.eos_ids:
            self.finish_reason = "eos"
        elif len(self.ids) == self.request.max_new_tokens:
            self.finish_reason = "length"
        piece = ""
        if self.text_stream is not None:
            piece = "" if self.finish_reason == "eos" else self.text_stream.push(token)
            if self.finish_reason is not None:
                piece += self.text_stream.finish()
        self.pieces.append(piece)
        return piece


class GenerationEngine:
    """A model that continues batches of prompts of unequal lengths."""

    def __init__(
        self,
        model: LanguageModel,
        mesh: ProcessMesh,
        tokenizer: Tokenizer | None = None,
        new_graph: Callable[[], StepGraph] | None = None,
    ) -> None:
        """
        Args:
            model: this rank's slices, with their weights.
            tokenizer: for texts; ids need none.
            new_graph: makes what a batch's decode step is captured in; None runs it anew for every token.
        """
        self.model = model.eval()
        self.group = mesh.tensor
        self.tokenizer = tokenizer
        self.new_graph = new_graph
        self.device = model.embedding.weight.device

    def generate(
        self, requests: Sequence[GenerationRequest], on_token: Callable[[NewToken], None] | None = None
    ) -> list[Generation]:
        """Continues all prompts to their ends, telling `on_token` of each token; see `stream`."""
        stream = self.stream(requests)
        while True:
            try:
                token = next(stream)
            except StopIteration as finished:
                generations: list[Generation] = finished.value
                return generations
            if on_token is not None:
                on_token(token)

    def stream(self, requests: Sequence[GenerationRequest]) -> Generator[NewToken, None, list[Generation]]:
        """Continues all prompts side by side and yields tokens as they come, in the order of the requests.

        Every rank must call it alike and take all tokens. A result does not depend on the other requests.

        Returns:
            What was generated for each request.

        Raises:
            BadNumbersError: the model's logits are not finite.
        """
        samples = [_Sample(request, self._text_stream(request)) for request in requests]
        positions = max(len(request.prompt_ids) + request.max_new_tokens for request in requests)
        config, dtype = self.model.config, self.model.compute_dtype
        cache = StaticKeyValueCache(config, self.group.size, len(samples), positions, dtype, self.device)
        rotary = rotary_table(config, torch.arange(positions, device=self.device).unsqueeze(1), dtype)
        sampler = Sampler([request.sampling for request in requests], self.device)
        captured: CapturedDecode | None = None
        if self.new_graph is not None:
            captured = CapturedDecode(
                lambda tokens, columns: self._one_token(tokens, columns, cache, rotary, positions, masked=True),
                len(samples), self.device, self.new_graph(),
            )  # fmt: skip

        begun = time.perf_counter()
        chosen = self._choose(sampler, self._prefill(samples, cache, rotary))
        prefill_seconds, decode_seconds = time.perf_counter() - begun, 0.0
        yield from _append(samples, chosen)
        while any(sample.finish_reason is None for sample in samples):
            begun = time.perf_counter()
            chosen = self._choose(sampler, self._decode(samples, cache, rotary, captured))
            decode_seconds += time.perf_counter() - begun
            yield from _append(samples, chosen)
        return _generations(samples, prefill_seconds, decode_seconds)

    @torch.inference_mode()
    def _prefill(self, samples: Sequence[_Sample], cache: StaticKeyValueCache, rotary: RotaryTable) -> Tensor:
        """All prompts at once -> logits [b, V] behind the last token of each."""
        lengths = torch.tensor([len(sample.request.prompt_ids) for sample in samples], device=self.device)
        longest = max(len(sample.request.prompt_ids) for sample in samples)
        tokens = torch.full((len(samples), longest), FILLING, device=self.device)
        for row, sample in zip(tokens, samples, strict=True):
            row[: len(sample.request.prompt_ids)] = torch.tensor(sample.request.prompt_ids)
        context = SequenceContext(RotaryTable(rotary.cos[:longest], rotary.sin[:longest]), cache.for_prompts())
        hidden_states = self.model.hidden_states(tokens, context)
        newest = hidden_states[lengths - 1, torch.arange(len(samples), device=self.device)]
        return self._logits(newest.unsqueeze(0))

    @torch.inference_mode()
    def _decode(
        self,
        samples: Sequence[_Sample],
        cache: StaticKeyValueCache,
        rotary: RotaryTable,
        captured: CapturedDecode | None,
    ) -> Tensor:
        """The newest token of each sample -> logits [b, V] behind it.

        A sample that has ended stays in the batch: its last token is fed again, and what comes of it is dropped.
        """
        columns = torch.tensor([sample.column for sample in samples], device=self.device)
        tokens = torch.tensor([sample.ids[-1:] for sample in samples], device=self.device)
        if captured is not None:
            return captured(tokens, columns)
        extent = max(sample.column for sample in samples) + 1
        masked = any(sample.column + 1 < extent for sample in samples)
        return self._one_token(tokens, columns, cache, rotary, extent, masked)

    def _one_token(
        self,
        tokens: Tensor,
        columns: Tensor,
        cache: StaticKeyValueCache,
        rotary: RotaryTable,
        extent: int,
        masked: bool,
    ) -> Tensor:
        """Ids [b, 1] for columns [b] -> logits [b, V]. Attention is given `extent` columns, and looks at all of them
        unless `masked` hides those ahead."""
        mask = None
        if masked:
            seen = torch.arange(extent, device=self.device) <= columns.unsqueeze(1)
            mask = seen[:, None, None, :]
        turns = RotaryTable(rotary.cos[columns].transpose(0, 1), rotary.sin[columns].transpose(0, 1))
        context = SequenceContext(turns, cache.for_one_token(columns, extent), mask)
        return self._logits(self.model.hidden_states(tokens, context))

    def _logits(self, hidden_states: Tensor) -> Tensor:
        """[1, b, h] -> [b, V] in fp32 at least, without the vocabulary's padding."""
        logits_shard_v = self.model.logits_shard(hidden_states)[0]
        logits = self.group.all_gather(logits_shard_v, dim=-1)[:, : self.model.config.vocab_size]
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    @torch.inference_mode()
    def _choose(self, sampler: Sampler, logits: Tensor) -> list[int]:
        """The next token of each sample, alike on every rank."""
        tokens = torch.empty(logits.shape[0], dtype=torch.int64, device=self.device)
        if self.group.rank == 0:
            tokens = sampler(logits)
        chosen: list[int] = self.group.broadcast(tokens).tolist()
        if NO_TOKEN in chosen:
            raise BadNumbersError(
                f"the logits of prompt {chosen.index(NO_TOKEN)} (counted from 0) are not finite: the weights are "
                "damaged, or too large for --dtype"
            )
        return chosen

    def _text_stream(self, request: GenerationRequest) -> TextStream | None:
        return None if self.tokenizer is None else TextStream(self.tokenizer, request.prompt_ids)


def _append(samples: Sequence[_Sample], chosen: Sequence[int]) -> Generator[NewToken, None, None]:
    for index, (sample, token) in enumerate(zip(samples, chosen, strict=True)):
        if sample.finish_reason is None:
            piece = sample.append(token)
            yield NewToken(index, token, piece, sample.finish_reason)


def _generations(samples: Sequence[_Sample], prefill_seconds: float, decode_seconds: float) -> list[Generation]:
    prompt_tokens = sum(len(sample.request.prompt_ids) for sample in samples)
    later_tokens = sum(len(sample.ids) - 1 for sample in samples)
    timings = Timings(
        prefill_seconds, prompt_tokens / prefill_seconds, later_tokens / decode_seconds if later_tokens else None
    )
    generations = []
    for sample in samples:
        assert sample.finish_reason is not None
        text = None if sample.text_stream is None else "".join(sample.pieces)
        generations.append(
            Generation(sample.request.prompt_ids, tuple(sample.ids), text, sample.finish_reason, timings)
        )
    return generations

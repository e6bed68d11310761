"""Continuous batching over a static cache: slots of a batch are filled and freed while it decodes.

Layouts: token ids [b, s]; hidden_states [s, b, h]; logits_shard_v [b, padded V / t], of each sample's newest token.

    admit     prompts of any lengths, as one batch into free slots    -> the first token of each
    step      the newest token of every slot through the model        -> the next token of each unfinished sample
    release   a slot becomes free for another request

Every tensor-parallel rank makes the same calls in the same order.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_ladder.comm.group import CommGroup
from megatron_ladder.data.tokenizers import Tokenizer
from megatron_ladder.errors import BadNumbersError
from megatron_ladder.generate.cache import StaticKeyValueCache
from megatron_ladder.generate.graph import CapturedDecode, StepGraph
from megatron_ladder.generate.requests import FinishReason, GenerationRequest, NewToken
from megatron_ladder.generate.sampling import GREEDY, NO_TOKEN, Alternatives, Sampler
from megatron_ladder.generate.text import IncrementalDecoder, StopFinder
from megatron_ladder.model.language_model import LanguageModel
from megatron_ladder.model.rotary import RotaryTable, rotary_table
from megatron_ladder.model.sub_block import SequenceContext

PADDING = 0
"""The token after shorter prompts and in free slots; no result depends on its value."""


@dataclass
class _ActiveSample:
    """A request that is being decoded."""

    request: GenerationRequest
    decoder: IncrementalDecoder | None
    stop_finder: StopFinder
    ids: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    alternatives: list[Alternatives] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    @property
    def column(self) -> int:
        """The newest token's column in the cache: after the prompt and the tokens before it."""
        return len(self.request.prompt_ids) + len(self.ids) - 1

    def append(self, token: int) -> str:
        """Append the next token, and return the text that has become complete."""
        self.ids.append(token)
        if token in self.request.eos_ids:
            self.finish_reason = "eos"
        elif len(self.ids) == self.request.max_new_tokens:
            self.finish_reason = "length"
        piece = ""
        if self.decoder is not None:
            piece = "" if self.finish_reason == "eos" else self.decoder.push(token)
            if self.finish_reason is not None:
                piece += self.decoder.finish()
            piece = self.stop_finder.push(piece)
            if self.stop_finder.stopped:
                self.finish_reason = "stop"
            elif self.finish_reason is not None:
                piece += self.stop_finder.finish()
        self.pieces.append(piece)
        return piece


class SlotBatch:
    """Samples in slots 0 .. slots - 1 over one static cache."""

    def __init__(
        self,
        model: LanguageModel,
        group: CommGroup,
        tokenizer: Tokenizer | None,
        graph: StepGraph | None,
        slots: int,
        positions: int,
    ) -> None:
        """
        Args:
            graph: captures the decode step; None launches its kernels for every token.
            positions: maximum length of prompt and continuation together, per slot.
        """
        self._model, self._tokenizer, self._device = model, tokenizer, model.embedding.weight.device
        self.samples: list[_ActiveSample | None] = [None] * slots
        self._cache = StaticKeyValueCache(model.config, group.size, slots, positions, model.compute_dtype, self._device)
        all_positions = torch.arange(positions, device=self._device).unsqueeze(1)
        self._rotary = rotary_table(model.config, all_positions, model.compute_dtype)
        self._sampler = Sampler(slots, model.config.vocab_size, model.head.start, group, self._device)
        self._captured: CapturedDecode | None = None
        if graph is not None:
            self._captured = CapturedDecode(
                lambda tokens, columns: self._one_token(tokens, columns, positions, masked=True),
                slots, self._device, graph,
            )  # fmt: skip

    def is_busy(self) -> bool:
        """Return whether any sample is unfinished."""
        return any(sample is not None and sample.finish_reason is None for sample in self.samples)

    def release(self, slot: int) -> None:
        """Free a slot, finished or not."""
        self.samples[slot] = None
        self._sampler.assign(slot, GREEDY, ())

    def admit(self, requests: Mapping[int, GenerationRequest]) -> list[NewToken]:
        """Fill free slots, with all prompts in one batch.

        Returns:
            The first token of each, in the order of `requests`.

        Raises:
            BadNumbersError: logits are not finite.
        """
        for slot, request in requests.items():
            self._sampler.assign(slot, request.sampling, request.prompt_ids)
        logits_shard_v = self._prefill(requests)
        for slot, request in requests.items():
            stream = None if self._tokenizer is None else IncrementalDecoder(self._tokenizer, request.prompt_ids)
            self.samples[slot] = _ActiveSample(request, stream, StopFinder(request.stop))
        return self._choose(logits_shard_v, list(requests))

    def step(self) -> list[NewToken]:
        """Return the next token of every unfinished sample, in the order of the slots.

        Free and finished slots stay in the batch; their results are dropped.

        Raises:
            BadNumbersError: logits are not finite.
        """
        return self._choose(self._decode(), range(len(self.samples)))

    @torch.inference_mode()
    def _prefill(self, requests: Mapping[int, GenerationRequest]) -> Tensor:
        """All prompts as one batch -> logits after the last token of each."""
        prompts = [request.prompt_ids for request in requests.values()]
        longest = max(map(len, prompts))
        tokens = torch.tensor([[*ids, *[PADDING] * (longest - len(ids))] for ids in prompts], device=self._device)
        turns = RotaryTable(self._rotary.cos[:longest], self._rotary.sin[:longest])
        context = SequenceContext(turns, self._cache.for_prompts(list(requests)))
        hidden_states = self._model.hidden_states(tokens, context)
        lengths = torch.tensor([len(ids) for ids in prompts], device=self._device)
        newest = hidden_states[lengths - 1, torch.arange(len(prompts), device=self._device)]
        return self._model.logits_shard(newest.unsqueeze(0))[0]

    @torch.inference_mode()
    def _decode(self) -> Tensor:
        """The newest token of each slot -> logits after it."""
        newest = [(sample.ids[-1], sample.column) if sample else (PADDING, 0) for sample in self.samples]
        tokens = torch.tensor([[token] for token, _ in newest], device=self._device)
        columns = torch.tensor([column for _, column in newest], device=self._device)
        if self._captured is not None:
            return self._captured(tokens, columns)
        extent = max(column for _, column in newest) + 1
        return self._one_token(tokens, columns, extent, any(column + 1 < extent for _, column in newest))

    def _one_token(self, tokens: Tensor, columns: Tensor, extent: int, masked: bool) -> Tensor:
        """Ids [b, 1] for columns [b] -> logits. Attention gets `extent` columns; `masked` hides later ones."""
        mask = None
        if masked:
            seen = torch.arange(extent, device=self._device) <= columns.unsqueeze(1)
            mask = seen[:, None, None, :]
        turns = RotaryTable(self._rotary.cos[columns].transpose(0, 1), self._rotary.sin[columns].transpose(0, 1))
        context = SequenceContext(turns, self._cache.for_one_token(columns, extent), mask)
        return self._model.logits_shard(self._model.hidden_states(tokens, context))[0]

    @torch.inference_mode()
    def _choose(self, logits_shard_v: Tensor, slots: Sequence[int]) -> list[NewToken]:
        chosen = self._sampler.choose(logits_shard_v, slots)
        new_tokens = []
        for row, slot in enumerate(slots):
            sample = self.samples[slot]
            if sample is None or sample.finish_reason is not None:
                continue
            token = chosen.tokens[row]
            if token == NO_TOKEN:
                raise BadNumbersError(
                    f"the logits of prompt {slot} (counted from 0) are not finite: the weights are damaged, or too "
                    "large for --dtype"
                )
            logprob = chosen.logprobs[row] if chosen.logprobs and sample.request.sampling.logprobs else None
            if logprob is not None:
                sample.logprobs.append(logprob)
            alternatives = chosen.alternatives[row] if chosen.alternatives else ()
            if alternatives:
                sample.alternatives.append(alternatives)
            piece = sample.append(token)
            new_tokens.append(NewToken(slot, token, piece, sample.finish_reason, logprob, alternatives or None))
        return new_tokens

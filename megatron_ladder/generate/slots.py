"""Continuous batching: slots of a batch are filled and freed while it decodes, over a cache that is allocated once.

    admit     prompts of any lengths, as one batch into free slots    -> the first token of each
    step      the newest token of every slot through the model        -> the next token of each unfinished sample
    release   a slot becomes free for another request

Every tensor-parallel rank makes the same calls in the same order.

Layouts: token ids [b, s]; hidden_states [s, b, h]; logits_shard_v [b, padded V / t], of each sample's newest token;
keys and values of a layer [b, kv_heads/t, positions, d].

Every sample begins in column 0 of the cache, so that a token's column is its position, independent of the other
samples' lengths:

    column       0  1  2  3  4  5
    sample 0     a  b  c  d  e  .       the prompt a b c, then d e
    sample 1     p  q  x  x  .  .       the prompt p q, then x x

Prompts are processed as one batch, padded on the right. Attention is causal, so no token sees the padding after it. The
padding's columns of the cache are overwritten by the sample's next tokens, or hidden by the mask.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_ladder.blueprint.model import ModelConfig, key_value_replicas, local_lanes
from megatron_ladder.comm.group import CommGroup
from megatron_ladder.data.tokenizers import Tokenizer
from megatron_ladder.errors import BadNumbersError
from megatron_ladder.generate.attention import CachedRows, FilledColumns, attend_by_sums, counts_filled_columns
from megatron_ladder.generate.graph import DecodeStep, StepGraph, captured_decode
from megatron_ladder.generate.large_pages import zeros_in_large_pages
from megatron_ladder.generate.requests import FinishReason, Generation, GenerationRequest, NewToken, Timings
from megatron_ladder.generate.sampling import GREEDY, NO_TOKEN, Sampler, to_device
from megatron_ladder.generate.scoring import Alternatives, score_text
from megatron_ladder.generate.structured import TokenMatcher
from megatron_ladder.generate.text import IncrementalDecoder, StopFinder
from megatron_ladder.model.language_model import LanguageModel
from megatron_ladder.model.rotary import RotaryTable, rotary_table
from megatron_ladder.model.sub_block import SequenceContext

PADDING = 0
"""The token after shorter prompts and in free slots; no result depends on its value."""
_PROMPT_WIDTHS = 128
"""Prompts on a GPU are padded to a multiple of this."""
BAD_NUMBERS_CAUSE = "the weights are damaged, or too large for --dtype"


class _StaticCache:
    """Keys and values of this rank's heads, for all layers."""

    def __init__(
        self, config: ModelConfig, ranks: int, slots: int, positions: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        # Each lane of a rank is a layer of the cache, as `TransformerStack` numbers them.
        lanes = local_lanes(config, ranks)
        kv_heads = config.num_key_value_heads * key_value_replicas(config, ranks) // (ranks * lanes)
        shape = (config.num_layers * lanes, 2, slots, kv_heads, positions, config.head_dim)
        # Zeros, because masked values are multiplied by 0, and 0 times NaN is NaN.
        on_cpu = device.type == "cpu"
        stored = zeros_in_large_pages(shape, dtype) if on_cpu else torch.zeros(shape, dtype=dtype, device=device)
        self.keys, self.values = ([layer[part] for layer in stored] for part in range(2))
        # All columns of all heads one after another, and the first row of each head of each sample among them.
        self.key_rows = [keys.flatten(0, 2) for keys in self.keys]
        self.value_rows = [values.flatten(0, 2) for values in self.values]
        self.first_rows = torch.arange(0, slots * kv_heads * positions, positions, device=device).view(slots, kv_heads)
        # For attention to filled columns, in which each key-value head of each sample is a sequence.
        self.query_starts = torch.arange(slots * kv_heads + 1, dtype=torch.int32, device=device)
        self.key_starts = self.query_starts * positions

    def erase(self, slot: int) -> None:
        """Remove numbers that are not finite, which would also reach the slot's next sample."""
        for stored in (*self.keys, *self.values):
            stored[slot].zero_()


class _PromptColumns(NamedTuple):
    """A `KeyValueCache` that stores the prompts of some slots, which attend to themselves only."""

    cache: _StaticCache
    slots: Tensor

    def extend(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store keys and values [n, kv_heads/t, s, d] in the first s columns, and return them."""
        for stored, new in (self.cache.keys[layer], keys), (self.cache.values[layer], values):
            stored[self.slots, :, : new.shape[2]] = new.to(stored.dtype)
        return keys, values


class _TokenColumns(NamedTuple):
    """A `KeyValueCache` that stores one token per sample, and returns it with all earlier ones."""

    cache: _StaticCache
    rows: Tensor
    """[b kv_heads/t] int64, rows among the columns of all heads."""
    extent: int

    def extend(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store keys and values [b, kv_heads/t, 1, d]; return those of the first `extent` columns."""
        for rows, new in (self.cache.key_rows[layer], keys), (self.cache.value_rows[layer], values):
            rows.index_copy_(0, self.rows, new.flatten(0, 2).to(rows.dtype))
        # Views of what was written: `cache.keys` would be another input of a compiled step over the same memory.
        shape = (*self.cache.first_rows.shape, -1)
        stored_keys, stored_values = (
            rows[layer].unflatten(0, shape)[: len(keys)] for rows in (self.cache.key_rows, self.cache.value_rows)
        )
        return stored_keys.narrow(2, 0, self.extent), stored_values.narrow(2, 0, self.extent)


def prompt_width(longest: int, positions: int, device: torch.device) -> int:
    """Return the length to which prompts are padded on the right: on GPUs one of few, as cuDNN plans each length."""
    if device.type != "cuda":
        return longest
    return min(positions, math.ceil(longest / _PROMPT_WIDTHS) * _PROMPT_WIDTHS)


@dataclass
class _ActiveSample:
    request: GenerationRequest
    decoder: IncrementalDecoder | None
    stop_finder: StopFinder
    matcher: TokenMatcher | None = None
    ids: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    alternatives: list[Alternatives] = field(default_factory=list)
    finish_reason: FinishReason | None = None

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

    def result(self, timings: Timings) -> Generation:
        assert self.finish_reason is not None
        text = None if self.decoder is None else "".join(self.pieces)
        logprobs = tuple(self.logprobs) if self.request.sampling.logprobs else None
        alternatives = tuple(self.alternatives) or None
        ids = tuple(self.ids)
        return Generation(self.request.prompt_ids, ids, text, self.finish_reason, timings, logprobs, alternatives)


class SlotBatch:
    """Samples in slots 0 .. slots - 1 over one static cache.

    A sample whose logits are not finite ends with the reason "bad numbers", and one whose matcher fails with the reason
    "failed grammar". BadNumbersError is raised if the model's logits are not finite for any input.
    """

    def __init__(
        self,
        model: LanguageModel,
        decode_one: DecodeStep | None,
        group: CommGroup,
        tokenizer: Tokenizer | None,
        graph: StepGraph | None,
        slots: int,
        positions: int,
    ) -> None:
        """`positions` limits prompt and continuation together, per slot; `decode_one` is that of the engine.

        `graph`, if given, captures the decode step here; the batch must then be closed. Every rank must call this.
        """
        self._model, self._tokenizer, self._device = model, tokenizer, model.embedding.weight.device
        self._decode_one, self._group = decode_one, group
        self.samples: list[_ActiveSample | None] = [None] * slots
        in_fp32 = self._device.type == "cpu" and model.compute_dtype in (torch.bfloat16, torch.float16)
        cache_dtype = torch.float32 if in_fp32 else model.compute_dtype
        self._cache = _StaticCache(model.config, group.size, slots, positions, cache_dtype, self._device)
        self._counts_filled = counts_filled_columns(model.compute_dtype, model.config.head_dim, self._device)
        all_positions = torch.arange(positions, device=self._device).unsqueeze(1)
        self._rotary = rotary_table(model.config, all_positions, model.compute_dtype)
        self._sampler = Sampler(slots, model.config.vocab_size, model.head.start, group, self._device)
        self._positions, self._graph = positions, graph
        self._captured: Callable[[Tensor, Tensor], Tensor] | None = None
        if graph is not None:
            step = partial(self._one_token, extent=positions, masked=True)
            with torch.inference_mode():
                self._captured = captured_decode(step, slots, self._device, graph)

    def close(self) -> None:
        """Free the captured step, which would otherwise keep itself, the cache and the communicators alive."""
        if self._graph is not None:
            self._graph.close()
        self._graph = self._captured = None

    def fits(self, slots: int, positions: int) -> bool:
        """Return whether the batch has as many slots, of as many positions."""
        return slots <= len(self.samples) and positions <= self._positions

    def is_busy(self) -> bool:
        """Return whether any sample is unfinished."""
        return any(sample is not None and sample.finish_reason is None for sample in self.samples)

    @torch.inference_mode()
    def release(self, slot: int) -> None:
        """Free a slot, finished or not."""
        self.samples[slot] = None
        self._sampler.assign(slot, GREEDY, ())

    @torch.inference_mode()
    def admit(self, requests: Mapping[int, GenerationRequest]) -> list[NewToken]:
        """Fill free slots, with all prompts in one batch, and return the first token of each, in the same order."""
        for slot, request in requests.items():
            matcher = None
            if request.grammar is not None and self._tokenizer is not None:
                matcher = TokenMatcher(request.grammar, self._tokenizer, request.eos_ids)
            self._sampler.assign(slot, request.sampling, request.prompt_ids, matcher)
            decoder = None if self._tokenizer is None else IncrementalDecoder(self._tokenizer, request.prompt_ids)
            self.samples[slot] = _ActiveSample(request, decoder, StopFinder(request.stop), matcher)
        slots, prompts = list(requests), [request.prompt_ids for request in requests.values()]
        longest = prompt_width(max(map(len, prompts)), self._positions, self._device)
        tokens = torch.tensor([[*ids, *[PADDING] * (longest - len(ids))] for ids in prompts], device=self._device)
        turns = RotaryTable(self._rotary.cos[:longest], self._rotary.sin[:longest])
        columns = _PromptColumns(self._cache, torch.tensor(slots, device=self._device))
        context = SequenceContext(turns, columns)
        hidden_states = self._model.hidden_states(tokens, context)
        last = torch.tensor([len(ids) - 1 for ids in prompts], device=self._device)
        newest = hidden_states[last, torch.arange(len(prompts), device=self._device)]
        scores = {
            slot: score_text(
                self._model,
                self._group,
                hidden_states[: len(request.prompt_ids) - 1, row : row + 1],
                request.prompt_ids[1:],
                request.sampling.top_logprobs,
            )
            for row, (slot, request) in enumerate(requests.items())
            if request.score_prompt
        }
        chosen = self._choose(self._model.logits_shard(newest.unsqueeze(0))[0], slots)
        finite = {slot: all(map(math.isfinite, found.logprobs)) for slot, found in scores.items()}
        return [
            token._replace(prompt_scores=scores.get(token.sample))
            if finite.get(token.sample, True)
            else self._fail(token.sample)
            for token in chosen
        ]

    @torch.inference_mode()
    def step(self) -> list[NewToken]:
        """Return the next token of every unfinished sample, by slot; results of other slots are dropped.

        A captured step computes all slots, and any other one the slots up to the last unfinished sample.
        """
        unfinished = [slot for slot, sample in enumerate(self.samples) if sample and sample.finish_reason is None]
        count = unfinished[-1] + 1 if self._captured is None else len(self.samples)
        newest = [
            (sample.ids[-1], len(sample.request.prompt_ids) + len(sample.ids) - 1) if sample else (PADDING, 0)
            for sample in self.samples[:count]
        ]
        tokens, columns = to_device(torch.tensor(newest), self._device).split(1, dim=1)
        columns = columns.squeeze(1)
        if self._captured is not None:
            logits_shard_v = self._captured(tokens, columns)
        else:
            lowest, highest = min(column for _, column in newest), max(column for _, column in newest)
            logits_shard_v = self._one_token(tokens, columns, highest + 1, masked=lowest < highest)
        return self._choose(logits_shard_v, range(count))

    def _one_token(self, tokens: Tensor, columns: Tensor, extent: int, masked: bool) -> Tensor:
        """Ids [b, 1] for columns [b] -> logits. Attention gets `extent` columns; `masked` hides later ones."""
        cache = self._cache
        first_rows = cache.first_rows[: len(columns)]
        decode_one = self._decode_one if len(columns) == 1 else None
        mask, attend = None, None
        if masked and not self._counts_filled:
            mask = (torch.arange(extent, device=self._device) <= columns.unsqueeze(1))[:, None, None, :]
        if self._counts_filled:
            filled = (columns + 1).to(torch.int32).unsqueeze(1).expand_as(first_rows).flatten()
            ends = len(filled) + 1
            attend = FilledColumns(cache.query_starts[:ends], cache.key_starts[:ends], filled).attend
            extent = self._positions
        elif decode_one is not None:
            attend = attend_by_sums
        elif self._device.type == "cpu":
            config = self._model.config
            heads = config.num_attention_heads // (config.lanes or self._group.size)
            attend = CachedRows.of(first_rows, extent, heads).attend
            # It selects the columns.
            extent = self._positions
        turns = RotaryTable(self._rotary.cos[columns].transpose(0, 1), self._rotary.sin[columns].transpose(0, 1))
        rows = (first_rows + columns.unsqueeze(1)).flatten()
        context = SequenceContext(turns, _TokenColumns(self._cache, rows, extent), mask, attend=attend)
        if decode_one is not None:
            return decode_one(tokens, context)
        return self._model.logits_shard(self._model.hidden_states(tokens, context))[0]

    def _choose(self, logits_shard_v: Tensor, slots: Sequence[int]) -> list[NewToken]:
        chosen = self._sampler.choose(logits_shard_v, slots)
        new_tokens = []
        for row, slot in enumerate(slots):
            sample = self.samples[slot]
            if sample is None or sample.finish_reason is not None:
                continue
            token = chosen.tokens[row]
            if token == NO_TOKEN:
                new_tokens.append(self._fail(slot))
                continue
            logprob = chosen.logprobs[row] if chosen.logprobs and sample.request.sampling.logprobs else None
            if logprob is not None:
                sample.logprobs.append(logprob)
            alternatives = chosen.alternatives[row] if chosen.alternatives else ()
            if alternatives:
                sample.alternatives.append(alternatives)
            piece = sample.append(token)
            new_tokens.append(NewToken(slot, token, piece, sample.finish_reason, logprob, alternatives or None))
        if set(chosen.tokens) == {NO_TOKEN} and not self._is_sound(slots[0]):
            raise BadNumbersError(f"the model's logits are not finite: {BAD_NUMBERS_CAUSE}")
        return new_tokens

    def _fail(self, slot: int) -> NewToken:
        """End the sample of a slot, which has no next token."""
        sample = self.samples[slot]
        assert sample is not None
        sample.finish_reason = "failed grammar" if sample.matcher and sample.matcher.failed else "bad numbers"
        self._cache.erase(slot)
        return NewToken(slot, NO_TOKEN, "", sample.finish_reason)

    def _is_sound(self, slot: int) -> bool:
        """Return whether the logits of a text of one token are finite; the sample of the slot must be finished."""
        self._sampler.assign(slot, GREEDY, ())
        tokens = torch.tensor([[PADDING]], device=self._device)
        hidden_states = self._model.hidden_states(tokens, self._model.training_context(tokens))
        return self._sampler.choose(self._model.logits_shard(hidden_states)[0], [slot]).tokens != [NO_TOKEN]

"""A batch of samples in slots, over states that are allocated once.

    begin     all prompts as one batch                              -> the first token of each
    step      the newest token of every sample through the model    -> the next token of each unfinished sample

With drafts (`drafting.py`), a step processes the newest token and the drafts after it, and returns one or more tokens
of each sample.

A captured step includes the choice of the tokens: the host only sends the newest tokens and reads the next ones.

Every tensor-parallel rank makes the same calls in the same order.

Layouts: token ids [b, s]; hidden_states [s, b, h]; logits_shard_v [b, padded V / t], of each sample's newest token.

Every sample begins at position 0, independent of the other samples' lengths:

    position     0  1  2  3  4  5
    sample 0     a  b  c  d  e  .       the prompt a b c, then d e
    sample 1     p  q  x  x  .  .       the prompt p q, then x x

Prompts are processed as one batch, padded on the right, all positions at once or some at a time. No token reads the
padding after it. Mixers know the lengths of the prompts and keep no padding in their states.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from megatron_ladder.comm.group import CommGroup, to_device
from megatron_ladder.errors import BadNumbersError
from megatron_ladder.generate.drafting import Drafter
from megatron_ladder.generate.graph import StepGraph
from megatron_ladder.generate.requests import FinishReason, Generation, GenerationRequest, NewToken, Timings
from megatron_ladder.generate.sampling import NO_TOKEN, Sampler, SamplingPlan
from megatron_ladder.model.language_model import LanguageModel
from megatron_ladder.model.mixers import columns
from megatron_ladder.model.mixers.mixer import States
from megatron_ladder.model.sub_block import SequenceContext
from megatron_ladder.tokenizers.kinds import Tokenizer

PADDING = 0
"""The token after shorter prompts and in unused slots; no result depends on its value."""
_PROMPT_WIDTHS = 128
"""Prompts on a GPU are padded to a multiple of this."""
_INCOMPLETE = "\ufffd"
"""Replacement character, to which tokenizers decode bytes that are not, or not yet, a whole character."""
_PROMPT_CONTEXT = 8
"""Last tokens of the prompt to decode along with a continuation: enough for a split character and a leading space."""
BAD_NUMBERS_CAUSE = "the weights are damaged, or too large for this data type"


def prompt_width(longest: int, positions: int, device: torch.device) -> int:
    """Return the length to which prompts are padded on the right: on GPUs one of few, as cuDNN plans each length."""
    if device.type != "cuda":
        return longest
    return min(positions, math.ceil(longest / _PROMPT_WIDTHS) * _PROMPT_WIDTHS)


class IncrementalDecoder:
    """Decodes a continuation token by token; the pieces joined are its text.

    A token can be a part of a character, and some tokenizers drop the space before the first word. Each piece is
    therefore what the token adds to the text of the tokens just before it.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._ids = [number for number in prompt_ids[-_PROMPT_CONTEXT:] if number < tokenizer.vocab_size]
        self._shown_ids = len(self._ids)
        self._shown = tokenizer.decode(self._ids)

    def push(self, token: int) -> str:
        """Return the text that this token completes; empty within a character."""
        # A model's vocabulary may be larger than its tokenizer's; the additional tokens have no text.
        if token >= self._tokenizer.vocab_size:
            return ""
        self._ids.append(token)
        piece = self.finish()
        if piece.endswith(_INCOMPLETE) or not piece:
            return ""
        self._ids = self._ids[self._shown_ids :]
        self._shown_ids = len(self._ids)
        self._shown = self._tokenizer.decode(self._ids)
        return piece

    def spelling(self, token: int) -> str:
        """Return the spelling of a control token, which is no part of the text; empty for other tokens."""
        return self._tokenizer.control_tokens.get(token, "")

    def finish(self) -> str:
        """Return the text of trailing tokens that did not complete a character."""
        text = self._tokenizer.decode(self._ids)
        # Otherwise a token has completed the prompt's last character.
        return text.removeprefix(self._shown if text.startswith(self._shown) else self._shown.rstrip(_INCOMPLETE))


class StopFinder:
    """Cuts an incremental text before the first stop string, and holds back text that may begin one.

    A stop string may spell out control tokens, which are hidden: they do not belong to the text to show.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """`stops`: non-empty strings."""
        self._stops, self._held = stops, ""
        self._is_shown: list[bool] = []
        self.stopped = False

    def push(self, piece: str, hidden: bool = False) -> str:
        """Take the next piece and return the text to show; empty after a stop string was found."""
        if self.stopped or not self._stops:
            return "" if self.stopped or hidden else piece
        self._held += piece
        self._is_shown += [not hidden] * len(piece)
        text = self._held
        starts = [start for start in (text.find(stop) for stop in self._stops) if start >= 0]
        if starts:
            shown, self.stopped, self._held = self._take(min(starts)), True, ""
            return shown
        longest = min(len(text), max(map(len, self._stops)) - 1)
        held = next((n for n in range(longest, 0, -1) if any(stop.startswith(text[-n:]) for stop in self._stops)), 0)
        return self._take(len(text) - held)

    def finish(self) -> str:
        """Return the text that was held back."""
        return self._take(len(self._held))

    def _take(self, characters: int) -> str:
        shown = "".join(itertools.compress(self._held[:characters], self._is_shown))
        self._held, self._is_shown = self._held[characters:], self._is_shown[characters:]
        return shown


@dataclass
class _ActiveSample:
    request: GenerationRequest
    decoder: IncrementalDecoder | None
    stop_finder: StopFinder
    ids: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    accepted: int = 0
    """The number of drafts that the newest step accepted; their ids precede the last one."""

    def step_inputs(self, draft_tokens: int) -> list[int]:
        """Return inputs of the next step: `draft_tokens` + 1 tokens, the number of accepted drafts, and a position.

        The tokens are the accepted drafts and the newest token, which is repeated to fill the row. The position is that
        of the newest token.
        """
        newest, surplus = self.ids[-1 - self.accepted :], draft_tokens - self.accepted
        return [*newest, *newest[-1:] * surplus, self.accepted, len(self.request.prompt_ids) + len(self.ids) - 1]

    def append(self, token: int) -> str:
        """Append the next token, and return the text that has become complete."""
        self.ids.append(token)
        if token in self.request.eos_ids:
            self.finish_reason = "eos"
        elif len(self.ids) == self.request.max_new_tokens:
            self.finish_reason = "length"
        piece = "" if self.decoder is None else self._decode(self.decoder, token)
        self.pieces.append(piece)
        return piece

    def _decode(self, decoder: IncrementalDecoder, token: int) -> str:
        """Return the text that a token completes, up to a stop string, which ends the sample."""
        piece, spelling = "", ""
        if self.finish_reason != "eos":
            piece, spelling = decoder.push(token), decoder.spelling(token)
        if self.finish_reason is not None:
            piece += decoder.finish()
        shown = self.stop_finder.push(piece) + self.stop_finder.push(spelling, hidden=True)
        if self.stop_finder.stopped:
            if spelling and self.finish_reason is None:
                # An incomplete character before the control token.
                shown += decoder.finish()
            self.finish_reason = "stop"
        elif self.finish_reason is not None:
            shown += self.stop_finder.finish()
        return shown

    def result(self, timings: Timings, state_bytes: int) -> Generation:
        assert self.finish_reason is not None
        text = None if self.decoder is None else "".join(self.pieces)
        logprobs = tuple(self.logprobs) if self.request.sampling.logprobs else None
        ids = tuple(self.ids)
        return Generation(self.request.prompt_ids, ids, text, self.finish_reason, timings, state_bytes, logprobs)


class SlotBatch:
    """Samples in the first slots of states that stay where they are."""

    def __init__(
        self,
        model: LanguageModel,
        group: CommGroup,
        tokenizer: Tokenizer | None,
        new_graph: Callable[[], StepGraph] | None,
        slots: int,
        positions: int,
        prefill_chunk_size: int | None = None,
        draft_tokens: int = 0,
    ) -> None:
        """`positions` limits prompt and continuation together, per slot.

        Prompts are processed `prefill_chunk_size` positions at a time, by default all at once. `new_graph`, if given,
        captures decode steps; the batch must then be closed. `draft_tokens` is the number of drafts in a step; above 0,
        the model must have a drafting head.
        """
        self._model, self._tokenizer, self._device = model, tokenizer, model.embedding.weight.device
        self._group, self._new_graph, self._slots = group, new_graph, slots
        config, dtype = model.config, model.compute_dtype
        self._columns = positions + draft_tokens
        """Drafts of the last step can be behind the last position."""
        if columns.counts_filled_columns(dtype, config.head_dim, self._device):
            self._columns = math.ceil(self._columns / columns.PAGE) * columns.PAGE
        self._positions = self._columns - draft_tokens
        self._draft_tokens = draft_tokens
        self._prefill_chunk_size = prefill_chunk_size or self._positions
        self._samples: list[_ActiveSample] = []
        # As `PACKED_OPERATIONS` compute the heads.
        on_cpu = self._device.type == "cpu"
        state_dtype = torch.promote_types(dtype, torch.float32) if on_cpu else dtype
        new_states = partial(
            States.allocate, config, group.size, slots, self._columns, state_dtype, self._device, draft_tokens
        )
        self._states = new_states()
        self._drafter: Drafter | None = None
        if draft_tokens:
            assert model.mtp is not None
            self._drafter = Drafter(model, model.mtp, new_states(of_head=True), slots, draft_tokens)
        self._sampler = self._new_sampler(SamplingPlan.of([]))
        self._numbers = 2 * draft_tokens + 1
        """Random numbers of a step: to draw and to accept each draft, and to choose the last token."""
        width = draft_tokens + 3 + self._numbers
        self._inputs = torch.zeros(slots, width, dtype=torch.float64, device=self._device)
        self._captured: tuple[StepGraph, Tensor] | None = None

    def _new_sampler(self, plan: SamplingPlan) -> Sampler:
        start, vocab_size = self._model.head.start, self._model.config.vocab_size
        return Sampler(plan, self._slots, vocab_size, start, self._group, self._device)

    def close(self) -> None:
        """Free the captured step, which would otherwise keep itself, the states and the communicators alive."""
        if self._captured is not None:
            self._captured[0].close()
        self._captured = None

    def _begin_sampling(self, requests: Sequence[GenerationRequest]) -> None:
        """Prepare the sampler for new samples; capture a decode step if they need one, or operators that it lacks."""
        parameters = [request.sampling for request in requests]
        plan = SamplingPlan._make(map(max, self._sampler.plan, SamplingPlan.of(parameters)))
        if self._sampler.plan != plan:
            self.close()
            self._sampler = self._new_sampler(plan)
        # The prompts give the first token.
        decodes = any(request.max_new_tokens > 1 for request in requests)
        if self._new_graph is not None and self._captured is None and decodes:
            self._capture(self._new_graph())
        self._sampler.begin(parameters, [request.prompt_ids for request in requests])

    def _capture(self, graph: StepGraph) -> None:
        """Capture the decode step, which runs several times for token 0 at position 0."""
        self._inputs.zero_()
        chosen = graph.capture(lambda: self._next_tokens(self._inputs, self._columns, is_even=False))
        self._captured = graph, chosen

    def fits(self, slots: int, positions: int) -> bool:
        """Return whether the batch has as many slots, of as many positions."""
        return slots <= self._slots and positions <= self._positions

    def is_busy(self) -> bool:
        """Return whether any sample is unfinished."""
        return any(sample.finish_reason is None for sample in self._samples)

    def results(self, timings: Timings) -> list[Generation]:
        """Return the results of all samples, which must be finished."""
        state_bytes = self._states.slot_bytes
        if self._drafter is not None:
            state_bytes += self._drafter.states.slot_bytes
        return [sample.result(timings, state_bytes) for sample in self._samples]

    @torch.inference_mode()
    def begin(self, requests: Sequence[GenerationRequest]) -> list[NewToken]:
        """Begin all requests, instead of earlier ones, and return the first token of each.

        Raises BadNumbersError if the logits of a prompt are not finite; the batch cannot be used again afterwards.
        """
        prompts = [request.prompt_ids for request in requests]
        decoders = [None if self._tokenizer is None else IncrementalDecoder(self._tokenizer, ids) for ids in prompts]
        self._samples = [
            _ActiveSample(request, decoder, StopFinder(request.stop))
            for request, decoder in zip(requests, decoders, strict=True)
        ]
        self._begin_sampling(requests)
        longest = prompt_width(max(map(len, prompts)), self._positions, self._device)
        tokens = torch.tensor([[*ids, *[PADDING] * (longest - len(ids))] for ids in prompts], device=self._device)
        lengths = torch.tensor([len(ids) for ids in prompts], device=self._device)
        newest = self._read_prompts(tokens, lengths).unsqueeze(0)
        if self._drafter is not None:
            self._drafter.store_streams(newest)
        logits = self._model.logits_shard(newest)[0]
        numbers = self._sampler.draw(len(prompts))
        uniform = to_device(torch.tensor(numbers, dtype=torch.float64), self._device)
        return self._finish(self._sampler.choose(logits, uniform))

    def _read_prompts(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """Process prompts [b, s] of `lengths` [b]; return the hidden state of each one's last token, [b, h]."""
        all_rows = torch.arange(len(tokens), device=self._device)
        newest: Tensor | None = None
        for before in range(0, tokens.shape[1], self._prefill_chunk_size):
            part = tokens[:, before : before + self._prefill_chunk_size]
            positions = torch.arange(before, before + part.shape[1], device=self._device).unsqueeze(1)
            states = self._states._replace(before=before, lengths=lengths)
            hidden_states = self._hidden_states(part, positions, states)
            if self._drafter is not None:
                self._drafter.read_prompts(tokens, hidden_states, positions, states)
            last = (lengths - 1 - before).clamp(max=part.shape[1] - 1)
            of_part = hidden_states[last.clamp(min=0), all_rows]
            newest = of_part if newest is None else torch.where((last < 0).unsqueeze(1), newest, of_part)
        assert newest is not None
        return newest

    def _hidden_states(self, tokens: Tensor, positions: Tensor, states: States) -> Tensor:
        context = self._model.stack.prepare(SequenceContext(positions, states))
        return self._model.hidden_states(tokens, context)

    @torch.inference_mode()
    def step(self) -> list[NewToken]:
        """Return the next tokens of every unfinished sample, at least one; raises BadNumbersError as `begin`.

        A captured step computes all slots, and any other one the slots up to the last unfinished sample.
        """
        count = 1 + max(row for row, sample in enumerate(self._samples) if sample.finish_reason is None)
        step_inputs = [sample.step_inputs(self._draft_tokens) for sample in self._samples[:count]]
        uniform = self._sampler.draw(count, self._numbers)
        rows = [[*inputs, *numbers] for inputs, numbers in zip(step_inputs, uniform, strict=True)]
        if self._captured is not None:
            rows += [[PADDING] * len(rows[0])] * (self._slots - count)
        # Doubles represent all ids and positions exactly.
        inputs = to_device(torch.tensor(rows, dtype=torch.float64), self._device)
        if self._captured is None:
            positions = [position for *_, position in step_inputs]
            extent = max(positions) + 1 + self._draft_tokens
            return self._finish(self._next_tokens(inputs, extent, is_even=min(positions) == max(positions)))
        graph, chosen = self._captured
        self._inputs.copy_(inputs)
        graph.replay()
        return self._finish(chosen)

    def _next_tokens(self, inputs: Tensor, extent: int, is_even: bool) -> Tensor:
        """Choose the next tokens.

        Args:
            inputs: for each row, `_ActiveSample.step_inputs` and random numbers.
            extent: at least the number of positions of the longest sample, with drafts.
            is_even: whether all newest tokens have the same position.
        """
        width = self._draft_tokens + 1
        tokens, accepted, positions = inputs[:, : width + 2].long().split((width, 1, 1), dim=1)
        uniform = inputs[:, width + 2 :]
        self._sampler.count(tokens)
        states = self._states._replace(extent=extent)
        if self._drafter is None:
            states = states._replace(is_even=is_even)
            logits = self._model.logits_shard(self._hidden_states(tokens, positions.t(), states))[0]
            return self._sampler.choose(logits, uniform)
        draft_uniform, verify_uniform = uniform.tensor_split((self._draft_tokens,), dim=1)
        drafts = self._drafter.draft(tokens, accepted, positions, draft_uniform, extent, self._sampler)
        newest = torch.cat((tokens.gather(1, accepted), drafts.tokens), dim=1)
        step_positions = positions + torch.arange(width, device=self._device)
        hidden_states = self._hidden_states(newest, step_positions.t(), states)
        self._drafter.store_streams(hidden_states)
        chosen, accepted = self._sampler.verify(self._model.logits_shard(hidden_states), drafts, verify_uniform)
        states.keep(accepted)
        return chosen

    def _finish(self, choice: Tensor) -> list[NewToken]:
        chosen = self._sampler.read(choice)
        new_tokens = []
        for row, tokens in enumerate(chosen.tokens):
            sample = self._samples[row]
            for number, token in enumerate(tokens):
                if sample.finish_reason is not None:
                    break
                if token == NO_TOKEN:
                    raise BadNumbersError(
                        f"the logits of prompt {row} (counted from 0) are not finite: {BAD_NUMBERS_CAUSE}"
                    )
                if chosen.logprobs is not None:
                    sample.logprobs.append(chosen.logprobs[row][number])
                piece = sample.append(token)
                sample.accepted = number
                new_tokens.append(NewToken(row, token, piece, sample.finish_reason))
        return new_tokens

"""The decode loop: prompts in, tokens out as they come.

All tensor-parallel ranks run the loop in lockstep, and all choose the same tokens.
"""

import time
from collections.abc import Callable, Generator, Sequence

import torch

from megatron_ladder.comm.mesh import ProcessMesh
from megatron_ladder.errors import BadNumbersError
from megatron_ladder.generate.graph import StepGraph
from megatron_ladder.generate.requests import Generation, GenerationRequest, NewToken, Timings
from megatron_ladder.generate.slots import BAD_NUMBERS_CAUSE, PADDING, SlotBatch, prompt_width
from megatron_ladder.model.language_model import LanguageModel
from megatron_ladder.parallel.scoring import Score
from megatron_ladder.tokenizers.kinds import Tokenizer

_CAPTURED_TOKENS = 4096
"""Least positions, of all slots together, of a captured batch, so that few later calls need a larger one."""


class GenerationEngine:
    """A model that continues batches of prompts of unequal lengths.

    An engine that captures decode steps keeps its batch for later calls, and must be closed. A stream of such an engine
    ends when the next call begins.
    """

    def __init__(
        self,
        model: LanguageModel,
        mesh: ProcessMesh,
        tokenizer: Tokenizer | None = None,
        new_graph: Callable[[], StepGraph] | None = None,
        prefill_chunk_size: int | None = None,
        draft_tokens: int = 0,
    ) -> None:
        """`tokenizer` decodes ids, if text is needed; the others are those of `SlotBatch`."""
        self.model, self.group, self.tokenizer, self.new_graph = model.eval(), mesh.tensor, tokenizer, new_graph
        self.prefill_chunk_size, self.draft_tokens = prefill_chunk_size, draft_tokens
        self._captured: SlotBatch | None = None

    def close(self) -> None:
        """Free the captured step, and with it its batch; call it while the process groups exist."""
        if self._captured is not None:
            self._captured.close()
        self._captured = None

    def _batch(self, slots: int, positions: int) -> SlotBatch:
        """Return a batch: a new one, or with captured steps that of earlier calls if it is large enough."""
        if self.new_graph is None:
            return self._new_batch(slots, positions)
        if self._captured is None or not self._captured.fits(slots, positions):
            self.close()
            # A quarter more than needed, so that growing conversations need few batches.
            roomy = max(_CAPTURED_TOKENS // slots, positions + positions // 4)
            positions = min(roomy, self.model.config.max_position_embeddings)
            self._captured = self._new_batch(slots, positions)
        return self._captured

    def _new_batch(self, slots: int, positions: int) -> SlotBatch:
        return SlotBatch(
            self.model,
            self.group,
            self.tokenizer,
            self.new_graph,
            slots,
            positions,
            self.prefill_chunk_size,
            self.draft_tokens,
        )

    def generate(
        self, requests: Sequence[GenerationRequest], on_token: Callable[[NewToken], None] | None = None
    ) -> list[Generation]:
        """Continue all prompts to their ends and pass each token to `on_token`; see `stream`."""
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
        """Continue all prompts in one batch, yield the tokens as they come, and return the result of each request.

        Every rank must pass the same requests and consume all tokens. A result does not depend on the other requests.
        Raises BadNumbersError if the logits of a prompt are not finite.
        """
        positions = max(len(request.prompt_ids) + request.max_new_tokens for request in requests)
        batch = self._batch(len(requests), positions)
        try:
            begun = time.perf_counter()
            tokens = batch.begin(requests)
            prefill_seconds, decode_seconds = time.perf_counter() - begun, 0.0
            later_tokens, sample_steps = 0, 0
            yield from tokens
            while batch.is_busy():
                begun = time.perf_counter()
                tokens = batch.step()
                decode_seconds += time.perf_counter() - begun
                later_tokens += len(tokens)
                sample_steps += len({token.sample for token in tokens})
                yield from tokens
        except BadNumbersError:
            self.close()
            raise
        prompt_tokens = sum(len(request.prompt_ids) for request in requests)
        decode_rate = later_tokens / decode_seconds if later_tokens else None
        accepted_length = later_tokens / sample_steps if later_tokens and self.draft_tokens else None
        timings = Timings(prefill_seconds, prompt_tokens / prefill_seconds, decode_rate, accepted_length)
        return batch.results(timings)

    def score(self, ids: Sequence[int]) -> list[float]:
        """Return the log-probability of each of `ids` (at least two) but the first; see `score_batch`."""
        return list(self.score_batch([(ids[:1], ids[1:])])[0].logprobs)

    @torch.inference_mode()
    def score_batch(self, texts: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[Score]:
        """Score the ids of continuations after their contexts, in one batch.

        A context and a continuation have at least one id each, and together at most one more than the model has
        positions. Every rank must call this method. Raises BadNumbersError if the logits of a text are not finite.
        """
        device = self.model.embedding.weight.device
        inputs = [[*context, *continuation][:-1] for context, continuation in texts]
        width = prompt_width(max(map(len, inputs)), self.model.config.max_position_embeddings, device)
        # No token reads the padding after it.
        tokens = torch.tensor([[*ids, *[PADDING] * (width - len(ids))] for ids in inputs], device=device)
        hidden_states = self.model.hidden_states(tokens, self.model.training_context(tokens))
        rows = [
            hidden_states[len(context) - 1 : len(ids), row]
            for row, (ids, (context, _)) in enumerate(zip(inputs, texts, strict=True))
        ]
        following = torch.tensor([[token for _, continuation in texts for token in continuation]], device=device)
        predictions = self.model.predictions(torch.cat(rows).unsqueeze(1), following)[:, :, 0].cpu()
        if not predictions.isfinite().all():
            raise BadNumbersError(f"the logits of the text are not finite: {BAD_NUMBERS_CAUSE}")
        parts = predictions.split(list(map(len, rows)), 1)
        return [Score.of(part, continuation) for part, (_, continuation) in zip(parts, texts, strict=True)]

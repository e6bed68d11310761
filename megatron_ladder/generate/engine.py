"""The one decode loop: prompts in, tokens out as they come.

Every tensor-parallel rank runs the loop in step with the others. Rank 0 chooses the tokens and broadcasts them,
so that no rounding can lead two ranks to different texts.
"""

import time
from collections.abc import Callable, Generator, Sequence

import torch

from megatron_ladder.comm.mesh import ProcessMesh
from megatron_ladder.data.tokenizers import Tokenizer
from megatron_ladder.generate.graph import StepGraph
from megatron_ladder.generate.requests import Generation, GenerationRequest, NewToken, Timings
from megatron_ladder.generate.slots import SlotBatch
from megatron_ladder.model.language_model import LanguageModel
from megatron_ladder.parallel.vocabulary import vocab_parallel_cross_entropy

SCORED_AT_ONCE = 256
"""Positions of which `score` has logits at a time."""


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

    def new_batch(self, slots: int, positions: int) -> SlotBatch:
        """An empty batch; see `SlotBatch`."""
        graph = None if self.new_graph is None else self.new_graph()
        return SlotBatch(self.model, self.group, self.tokenizer, graph, slots, positions)

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
        positions = max(len(request.prompt_ids) + request.max_new_tokens for request in requests)
        batch = self.new_batch(len(requests), positions)
        begun = time.perf_counter()
        tokens = batch.admit(dict(enumerate(requests)))
        prefill_seconds, decode_seconds = time.perf_counter() - begun, 0.0
        yield from tokens
        while batch.is_busy():
            begun = time.perf_counter()
            tokens = batch.step()
            decode_seconds += time.perf_counter() - begun
            yield from tokens
        return _generations(batch, prefill_seconds, decode_seconds)

    @torch.inference_mode()
    def score(self, ids: Sequence[int]) -> list[float]:
        """The log-probability of each token of a text but the first, given those before it; every rank must call it.

        Args:
            ids: two at least, and at most as many as the model has positions.
        """
        model = self.model
        tokens = torch.tensor([ids], device=self.device)
        hidden_states = model.hidden_states(tokens[:, :-1], model.training_context(tokens[:, :-1]))
        logprobs: list[float] = []
        for part, targets in zip(
            hidden_states.split(SCORED_AT_ONCE), tokens[:, 1:].split(SCORED_AT_ONCE, dim=1), strict=True
        ):
            logits = model.logits_shard(part)
            losses = vocab_parallel_cross_entropy(logits, targets.t(), model.head.start, model.head.valid, self.group)
            logprobs += (-losses[:, 0]).tolist()
        return logprobs


def _generations(batch: SlotBatch, prefill_seconds: float, decode_seconds: float) -> list[Generation]:
    samples = [sample for sample in batch.samples if sample is not None]
    prompt_tokens = sum(len(sample.request.prompt_ids) for sample in samples)
    later_tokens = sum(len(sample.ids) - 1 for sample in samples)
    timings = Timings(
        prefill_seconds, prompt_tokens / prefill_seconds, later_tokens / decode_seconds if later_tokens else None
    )
    generations = []
    for sample in samples:
        assert sample.finish_reason is not None
        text = None if sample.text_stream is None else "".join(sample.pieces)
        logprobs = tuple(sample.logprobs) if sample.request.sampling.logprobs else None
        alternatives = tuple(sample.alternatives) or None
        generations.append(
            Generation(
                sample.request.prompt_ids, tuple(sample.ids), text, sample.finish_reason, timings, logprobs,
                alternatives,
            )
        )  # fmt: skip
    return generations

"""The decode loop: prompts in, tokens out as they come.

All tensor-parallel ranks run the loop in lockstep. Rank 0 chooses the tokens and broadcasts them, so that rounding
cannot make ranks diverge.
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

_SCORED_AT_ONCE = 256
"""Number of positions for which `score` computes logits at a time."""


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
            model: this rank's part, with its weights.
            tokenizer: decodes the generated ids; None if only ids are needed.
            new_graph: creates the graph in which a batch captures its decode step; None runs the step eagerly.
        """
        self.model = model.eval()
        self.group = mesh.tensor
        self.tokenizer = tokenizer
        self.new_graph = new_graph
        self.device = model.embedding.weight.device

    def new_batch(self, slots: int, positions: int) -> SlotBatch:
        """Return an empty batch; see `SlotBatch`."""
        graph = None if self.new_graph is None else self.new_graph()
        return SlotBatch(self.model, self.group, self.tokenizer, graph, slots, positions)

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
        """Continue all prompts in one batch and yield the tokens as they come, in the order of the requests.

        Every rank must pass the same requests and consume all tokens. A result does not depend on the other requests.

        Returns:
            The result of each request.

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
        """Return the log-probability of each token of a text given the tokens before it; every rank must call it.

        Args:
            ids: at least two, and at most as many as the model has positions. The first token has no score.
        """
        model = self.model
        tokens = torch.tensor([ids], device=self.device)
        hidden_states = model.hidden_states(tokens[:, :-1], model.training_context(tokens[:, :-1]))
        logprobs: list[float] = []
        for part, targets in zip(
            hidden_states.split(_SCORED_AT_ONCE), tokens[:, 1:].split(_SCORED_AT_ONCE, dim=1), strict=True
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
        generations.append(
            Generation(
                sample.request.prompt_ids,
                tuple(sample.ids),
                text=None if sample.decoder is None else "".join(sample.pieces),
                finish_reason=sample.finish_reason,
                timings=timings,
                logprobs=tuple(sample.logprobs) if sample.request.sampling.logprobs else None,
                alternatives=tuple(sample.alternatives) or None,
            )
        )
    return generations

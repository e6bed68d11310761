"""The timed workloads: decoding tokens, prefilling a prompt, and forward and backward of a micro-batch."""

from collections.abc import Callable, Generator
from dataclasses import dataclass

import torch

from megatron_ladder.comm.mesh import ProcessMesh
from megatron_ladder.generate.engine import GenerationEngine
from megatron_ladder.generate.requests import GenerationRequest, NewToken
from megatron_ladder.generate.sampling import GREEDY
from megatron_ladder.lab.bench.options import Case
from megatron_ladder.model.language_model import LanguageModel


@dataclass(frozen=True)
class Workload:
    """A benchmark's case and sizes."""

    case: Case
    batch: int
    """Samples."""
    sequence: int
    """decode: tokens of the prompt. prefill and train: tokens of a sample."""
    tokens: int = 8
    """decode: tokens per timing."""

    @property
    def units(self) -> int:
        """Passes through the model in one timing."""
        return self.tokens if self.case == "decode" else 1

    def prepare(self, model: LanguageModel, mesh: ProcessMesh, runs: int) -> Callable[[], object]:
        """Return the function to time, which can be called `runs` times; each call runs `units` passes."""
        if self.case == "train":
            return _Training(model, self)
        engine = GenerationEngine(model, mesh)
        if self.case == "prefill":
            return lambda: engine.generate(self._requests(model, new_tokens=1))
        return _Decoding(engine, self, self._requests(model, new_tokens=1 + runs * self.tokens))

    def _requests(self, model: LanguageModel, new_tokens: int) -> list[GenerationRequest]:
        ids = _random_ids(model, self.batch, self.sequence)
        # Greedy, because a sampled token might belong to an emulated rank.
        return [GenerationRequest(tuple(row), new_tokens, GREEDY) for row in ids.tolist()]


class _Decoding:
    """Decodes the next tokens at each call."""

    def __init__(self, engine: GenerationEngine, workload: Workload, requests: list[GenerationRequest]) -> None:
        self._stream: Generator[NewToken, None, object] = engine.stream(requests)
        self._tokens = workload.tokens * workload.batch
        for _ in requests:
            next(self._stream)

    def __call__(self) -> None:
        for _ in range(self._tokens):
            next(self._stream)


class _Training:
    """Runs forward and backward of one micro-batch at each call."""

    def __init__(self, model: LanguageModel, workload: Workload) -> None:
        self._model = model.train()
        self._ids = _random_ids(model, workload.batch, workload.sequence + 1)

    def __call__(self) -> None:
        for parameter in self._model.parameters():
            parameter.grad = None
        self._model(self._ids[:, :-1], self._ids[:, 1:]).backward()


def _random_ids(model: LanguageModel, batch: int, length: int) -> torch.Tensor:
    """Return token ids [batch, length] on the model's device, identical on every rank and at every call."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, model.config.vocab_size, (batch, length), generator=generator)
    return ids.to(model.embedding.weight.device)

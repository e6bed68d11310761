"""The timed workloads: decoding tokens, prefilling a prompt, and forward and backward of a micro-batch."""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from megatron_ladder.comm.mesh import ProcessMesh
from megatron_ladder.generate.engine import GenerationEngine
from megatron_ladder.generate.requests import GenerationRequest
from megatron_ladder.generate.sampling import GREEDY
from megatron_ladder.lab.bench.options import Case
from megatron_ladder.model.language_model import LanguageModel


@dataclass(frozen=True)
class Workload:
    """A benchmark's case and sizes: `sequence` tokens of a sample or prompt, and `tokens` decoded per timing."""

    case: Case
    batch: int
    sequence: int
    tokens: int = 8

    @property
    def units(self) -> int:
        """Passes through the model in one timing."""
        return self.tokens if self.case == "decode" else 1

    def prepare(self, model: LanguageModel, mesh: ProcessMesh, runs: int) -> Callable[[], object]:
        """Return the function to time, which can be called `runs` times; each call runs `units` passes.

        Token ids are identical on every rank and for every model.
        """

        def random_ids(length: int) -> torch.Tensor:
            generator = torch.Generator().manual_seed(0)
            ids = torch.randint(0, model.config.vocab_size, (self.batch, length), generator=generator)
            return ids.to(model.embedding.weight.device)

        def requests(new_tokens: int) -> list[GenerationRequest]:
            # Greedy, because a sampled token might belong to an emulated rank.
            return [GenerationRequest(tuple(row), new_tokens, GREEDY) for row in random_ids(self.sequence).tolist()]

        if self.case == "train":
            ids = random_ids(self.sequence + 1)
            model.train()

            def train() -> None:
                for parameter in model.parameters():
                    parameter.grad = None
                model(ids[:, :-1], ids[:, 1:]).backward()

            return train
        engine = GenerationEngine(model, mesh)
        if self.case == "prefill":
            return lambda: engine.generate(requests(1))
        stream = engine.stream(requests(1 + runs * self.tokens))

        def decode(tokens: int) -> None:
            for _ in range(tokens * self.batch):
                next(stream)

        decode(1)
        return functools.partial(decode, self.tokens)

"""The timed workloads (decoding, prefilling, forward and backward of a micro-batch), and their models."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from megatron_ladder.blueprint.model import ModelConfig
from megatron_ladder.comm.group import CommGroup
from megatron_ladder.comm.mesh import ProcessMesh
from megatron_ladder.generate.engine import GenerationEngine
from megatron_ladder.generate.graph import CudaStepGraph
from megatron_ladder.generate.requests import GenerationRequest
from megatron_ladder.generate.sampling import GREEDY
from megatron_ladder.lab.bench.options import Case
from megatron_ladder.lab.bench.variants import Variant
from megatron_ladder.model.language_model import LanguageModel
from megatron_ladder.model.operations import Operations
from megatron_ladder.model.stack import StackOptions


@dataclass(frozen=True)
class Workload:
    """A benchmark's case and sizes: `sequence` tokens of a sample or prompt, and `tokens` decoded per timing."""

    case: Case
    batch: int
    sequence: int
    tokens: int = 8
    cuda_graph: bool = False
    """Whether to decode by replaying a captured step."""

    @property
    def units(self) -> int:
        """Passes through the model in one timing."""
        return self.tokens if self.case == "decode" else 1

    @contextlib.contextmanager
    def prepare(self, model: LanguageModel, mesh: ProcessMesh, runs: int) -> Iterator[Callable[[], object]]:
        """Provide the function to time, which can be called `runs` times; each call runs `units` passes.

        Token ids are identical on every rank and for every model. The end of the block frees a captured step.
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

            yield train
            return
        engine = GenerationEngine(model, mesh, new_graph=CudaStepGraph if self.cuda_graph else None)
        if self.case == "prefill":
            yield lambda: engine.generate(requests(1))
            return
        stream = engine.stream(requests(1 + runs * self.tokens))

        def decode(tokens: int) -> None:
            for _ in range(tokens * self.batch):
                next(stream)

        with contextlib.closing(engine):
            decode(1)
            yield functools.partial(decode, self.tokens)


def build_models(
    variants: Sequence[Variant],
    model: ModelConfig,
    mesh: ProcessMesh,
    link: CommGroup,
    no_comm: CommGroup,
    dtype: torch.dtype,
    device: torch.device,
    operations: Operations | None = None,
) -> dict[str, LanguageModel]:
    """Build a model of each variant, with timed reduces or with none; those with the same modules share weights."""
    models: dict[str, LanguageModel] = {}
    owners: dict[bool, LanguageModel] = {}
    for variant in variants:
        group = no_comm if variant.without_reduces else link
        config = model.in_wiring(
            variant.residual_mode, staleness=variant.residual_staleness, desync_interval=variant.desync_interval,
            ranks=link.size,
        )  # fmt: skip
        options = StackOptions(
            tp_overlap=variant.tp_overlap, mirrored_backward=variant.mirrored_backward,
            operations=operations or Operations(),
        )
        built = LanguageModel(
            config, replace(mesh, tensor=group), options, dtype=dtype, device=device,
            seed=None if variant.one_norm in owners else 1,
        )  # fmt: skip
        if variant.one_norm in owners:
            shapes = {name: parameter.shape for name, parameter in built.named_parameters()}
            weights = owners[variant.one_norm].state_dict(keep_vars=True)
            for name, weight in weights.items():
                # Norms of per-rank streams have a row for each rank.
                if weight.shape != shapes[name]:
                    weights[name] = nn.Parameter(weight.detach().view(shapes[name]))
            built.load_state_dict(weights, assign=True)
        owners.setdefault(variant.one_norm, built)
        models[variant.name] = built
    return models

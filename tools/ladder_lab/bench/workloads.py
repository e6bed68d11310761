"""The timed workloads (decoding, prefilling, forward and backward of a micro-batch), and their models."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ladder_lab.bench.options import TRAINING, Case
from ladder_lab.bench.variants import Variant
from megatron_ladder.blueprint.model import ModelConfig
from megatron_ladder.comm.group import CommGroup
from megatron_ladder.comm.mesh import ProcessMesh
from megatron_ladder.errors import UserError
from megatron_ladder.generate.engine import GenerationEngine
from megatron_ladder.generate.graph import CudaStepGraph
from megatron_ladder.generate.requests import GenerationRequest
from megatron_ladder.generate.sampling import GREEDY
from megatron_ladder.model.experts import waits_for_choices
from megatron_ladder.model.language_model import LanguageModel
from megatron_ladder.model.norm import RMSNorm
from megatron_ladder.model.operations import Operations
from megatron_ladder.model.stack import StackOptions

INITIAL_STD = 0.02
"""Standard deviation of all matrices but the embedding's."""
ALIGNMENT = 128
"""Elements."""


@dataclass(frozen=True)
class Workload:
    """A benchmark's case and sizes: `sequence` tokens of a sample or prompt, and `tokens` decoded per timing."""

    case: Case
    batch: int
    sequence: int
    tokens: int = 8
    cuda_graph: bool = False
    """Whether to replay captured steps in training and decoding, unless the host waits for the choice of experts."""
    draft_tokens: int = 0
    """Tokens that the drafting head proposes in a decode step."""

    @property
    def units(self) -> int:
        """Passes through the model in one timing."""
        return self.tokens if self.case == "decode" else 1

    @contextlib.contextmanager
    def prepare(self, model: LanguageModel, mesh: ProcessMesh, runs: int) -> Iterator[Callable[[], object]]:
        """Provide the function to time, which can be called `runs` times; each call runs `units` passes.

        Token ids are identical for every model, and differ between data-parallel ranks. The end of the block frees a
        captured step.
        """

        def requests(new_tokens: int) -> list[GenerationRequest]:
            # Greedy, because a sampled token might belong to an emulated rank.
            ids = _random_ids(model.config, self.batch, self.sequence, seed=0)
            return [GenerationRequest(tuple(row), new_tokens, GREEDY) for row in ids.tolist()]

        if self.case in TRAINING:
            ids = _random_ids(model.config, self.batch, self.sequence + 1, mesh.data.rank)
            ids = ids.to(model.embedding.weight.device)
            forward = functools.partial(model, ids[:, :-1], ids[:, 1:])
            if self.case == "forward":
                yield torch.no_grad()(forward)
                return
            with training_pass(model, forward, self.cuda_graph) as train:
                yield train
            return
        captures = self.cuda_graph and not waits_for_choices(model)
        mesh = replace(mesh, tensor=model.group)
        new_graph = CudaStepGraph if captures else None
        engine = GenerationEngine(model, mesh, new_graph=new_graph, draft_tokens=self.draft_tokens)
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


@contextlib.contextmanager
def training_pass(model: nn.Module, loss: Callable[[], Tensor], cuda_graph: bool) -> Iterator[Callable[[], object]]:
    """Provide forward and backward of a loss; with `cuda_graph` a replay, unless the host has to wait in a pass.

    The end of the block frees the graph and the gradients.
    """
    model.train()

    def run() -> Tensor:
        for parameter in model.parameters():
            parameter.grad = None
        result = loss()
        result.backward()
        return result

    if cuda_graph and not waits_for_choices(model):
        with contextlib.closing(CudaStepGraph()) as graph:
            graph.capture(run)
            yield graph.replay
    else:
        yield run
    for parameter in model.parameters():
        parameter.grad = None


def _random_ids(model: ModelConfig, batch: int, length: int, seed: int) -> torch.Tensor:
    """Return token ids [batch, length], the same in every process."""
    return torch.randint(0, model.vocab_size, (batch, length), generator=torch.Generator().manual_seed(seed))


def build_models(
    variants: Sequence[Variant],
    shape: ModelConfig,
    mesh: ProcessMesh,
    link: CommGroup,
    no_comm: CommGroup,
    dtype: torch.dtype,
    device: torch.device,
    operations: Operations | None = None,
) -> dict[str, LanguageModel]:
    """Build a model of each variant, with timed collectives of expert- or tensor-parallel ranks, or with none.

    All models share the memory of one: their matrices are views of the same random numbers.

    Raises:
        UserError: the device has too little memory.
    """
    models: dict[str, LanguageModel] = {}
    for variant in variants:
        group = no_comm if variant.without_reduces else link
        options = StackOptions(
            tp_overlap=variant.tp_overlap,
            mirrored_backward=variant.mirrored_backward,
            late_weight_gradients=variant.late_weight_gradients,
            operations=operations or Operations(),
        )
        config = variant.wiring.of(shape, mesh.tensor.size)
        of_variant = replace(mesh, experts=group) if mesh.experts.size > 1 else replace(mesh, tensor=group)
        models[variant.name] = LanguageModel(config, of_variant, options, dtype=dtype, device=torch.device("meta"))

    def reserved(model: LanguageModel) -> int:
        return sum(_room(matrix) for module in model.modules() for matrix in module.parameters(recurse=False))

    # One memory for all of them.
    room = max(map(reserved, models.values()))
    try:
        numbers = torch.empty(room, dtype=dtype, device=device)
    except RuntimeError as error:
        # torch has a separate class only for GPUs.
        if "memory" not in str(error):
            raise
        size = f"{room * dtype.itemsize / 1e9:,.0f} GB"
        raise UserError(
            f"--size: a rank's weights take {size}, more than {device} has free: give fewer layers, or more ranks"
        ) from error
    numbers.normal_(std=INITIAL_STD, generator=torch.Generator(device).manual_seed(1))
    # Views of it, in the order of the modules.
    for model in models.values():
        begin = 0
        for module in model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                if isinstance(module, RMSNorm):
                    values = torch.ones(parameter.shape, dtype=dtype, device=device)
                else:
                    values = numbers[begin : begin + parameter.numel()].view(parameter.shape)
                    begin += _room(parameter)
                setattr(module, name, nn.Parameter(values))
            for name, state in module.named_buffers(recurse=False):
                setattr(module, name, torch.zeros_like(state, device=device))
        # Streams that differ more between tokens than sub-blocks add, so that tokens choose different experts.
        with torch.no_grad():
            model.embedding.weight.normal_(generator=torch.Generator(device).manual_seed(2))
    return models


def _room(matrix: nn.Parameter) -> int:
    """Return the elements to reserve for a matrix, so that the next one begins at an address that kernels prefer."""
    return -(-matrix.numel() // ALIGNMENT) * ALIGNMENT

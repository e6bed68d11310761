"""What a training step calls: passes over this rank's layers, their reduction, and updates.

`ShardedEngine` implements ZeRO 0 and 1, and `engine/deepspeed.py` the other stages.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from megatron_ladder.comm.group import to_device
from megatron_ladder.comm.mesh import ProcessMesh
from megatron_ladder.engine.graph import CapturedPasses
from megatron_ladder.engine.schedule import Backward, Forward, Pass, PassClock, make_schedule, run_schedule
from megatron_ladder.engine.sharded import ShardedOptimizer
from megatron_ladder.engine.state import EngineState, ShardedState
from megatron_ladder.model.language_model import LanguageModel, LossScales

ModelInputs = tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]
"""One micro-batch: token ids and labels [b, s]; loss mask, positions, lengths and document bounds or None, as
`LanguageModel.forward` takes them."""


def batch_to_device(batch: ModelInputs, device: torch.device) -> list[Any]:
    """Move all tensors except the document bounds, which the model needs on the CPU."""
    *others, document_bounds = batch
    return [*(None if tensor is None else to_device(tensor, device) for tensor in others), document_bounds]


class Engine(ABC):
    """This rank's part of the model, in training. All ranks call its methods alike.

    A training step runs passes inside `accumulating`, may change the gradients in `state.gradients()`, and ends with
    `step` or `discard_gradients`.

    Attributes:
        state: masters, moments and gradients.
        passes: the captured forward and backward passes; None for none.
        clock: that of the last training step's passes.
    """

    passes: CapturedPasses | None = None
    clock = PassClock(is_cuda=False)

    def __init__(self, model: LanguageModel, state: EngineState, mesh: ProcessMesh, device: torch.device) -> None:
        self.state = state
        self._model = model
        self._mesh = mesh
        self._device = device

    @abstractmethod
    def accumulating(self, micro_batches: int) -> AbstractContextManager[None]:
        """Return the context of this many forward and backward passes, at whose end gradients are reduced.

        Gradients are those of the scaled losses, summed over all tokens of all data-parallel ranks.
        """

    @abstractmethod
    def step(self) -> None:
        """Update the weights with the reduced gradients.

        Other ranks' parts of the weights may arrive later, at the latest under the next forward pass.
        """

    @abstractmethod
    def discard_gradients(self) -> None:
        """End a step that updates nothing: neither weights, moments nor the optimizer's step count change."""

    @abstractmethod
    def finish_step(self) -> None:
        """Wait for the weights of the last step, for readers other than the model's forward pass."""

    def run_passes(self, micro_batches: Sequence[ModelInputs], forward: Forward, backward: Backward | None) -> None:
        """Run forward, and with `backward` also backward, of each micro-batch, by the schedule of this rank's stage."""
        pipeline, chunks = self._mesh.pipeline, self._model.chunks
        slots = make_schedule(pipeline.size, chunks, len(micro_batches), backward is not None)[pipeline.rank]

        def allocate(work: Pass) -> Tensor:
            return self._model.allocate_state(micro_batches[work.micro_batch][0], work.chunk)

        clock = PassClock(self._device.type == "cuda")
        run_schedule(slots, pipeline, forward, backward, allocate, clock)
        if backward is not None:
            self.clock = clock

    def forward(self, batch: ModelInputs, scales: LossScales, chunk: int, entering: Tensor | None) -> Tensor:
        """Return what `LanguageModel.forward` returns: a state, or the scaled loss."""
        inputs = batch_to_device(batch, self._device)
        leaving: Tensor = self._model(*inputs, entering=entering, chunk=chunk, scales=scales)
        return leaving

    def backward(self, leaving: Tensor, gradient: Tensor | None) -> None:
        """Run backward from what `forward` returned, with its gradient, or None for the loss."""
        leaving.backward(gradient)

    @torch.no_grad()
    def infer(self, micro_batches: Sequence[ModelInputs], predicts: bool = False) -> list[Tensor]:
        """Return the summed loss of each micro-batch, or its `LanguageModel.predictions`.

        The list is empty on pipeline stages other than the last.
        """
        outputs: list[Tensor] = []

        def forward(work: Pass, entering: Tensor | None) -> Tensor:
            inputs = batch_to_device(micro_batches[work.micro_batch], self._device)
            leaving: Tensor = self._model(*inputs, entering=entering, chunk=work.chunk, predicts=predicts)
            if self._model.ends_in(work.chunk):
                outputs.append(leaving)
            return leaving

        self.run_passes(micro_batches, forward, None)
        return outputs

    @contextmanager
    def keeping_frozen(self) -> Iterator[None]:
        """Train inside the block, but leave the parameters that need no gradient as they are.

        Backward computes their gradients all the same: buckets, DeepSpeed and captured passes expect one of each.
        """
        frozen = [parameter for parameter in self._model.parameters() if not parameter.requires_grad]
        unchanged = set(frozen)
        tied = self._model.tied_weight
        if tied is not None:
            # The copies of the two stages remain equal if only one of them is frozen.
            votes = self._mesh.ends.all_reduce(torch.tensor(float(tied in unchanged), device=self._device))
            if votes:
                unchanged.add(tied)
        for parameter in frozen:
            parameter.requires_grad_(True)
        try:
            with self.state.keeping(unchanged) if unchanged else nullcontext():
                yield
        finally:
            for parameter in frozen:
                parameter.requires_grad_(False)

    def close(self) -> None:
        """Free what was captured, while its process groups exist."""
        if self.passes is not None:
            self.passes.close()


class ShardedEngine(Engine):
    """ZeRO 0 and 1, also on the stages of a pipeline."""

    def __init__(
        self, model: LanguageModel, optimizer: ShardedOptimizer, mesh: ProcessMesh, device: torch.device
    ) -> None:
        super().__init__(model, ShardedState(model, optimizer, mesh.data.rank == 0), mesh, device)
        self.optimizer = optimizer

    def accumulating(self, micro_batches: int) -> AbstractContextManager[None]:
        if self._mesh.pipeline.size > 1:
            self._model.stack.partial_sums.expect(micro_batches * self._model.chunks)
        return self.optimizer.reducing(micro_batches)

    def step(self) -> None:
        self.optimizer.step()

    def discard_gradients(self) -> None:
        pass  # The first gradients of the next step replace these.

    def finish_step(self) -> None:
        self.optimizer.finish_gather()

"""Passes over this rank's layers, in the order of its schedule."""

import functools
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megatron_ladder.comm.mesh import ProcessMesh
from megatron_ladder.engine.graph import CapturedPasses, RunPass
from megatron_ladder.engine.schedule import Pass, PassClock, Slot, make_schedule, run_schedule
from megatron_ladder.engine.state import ZeroOptimizer
from megatron_ladder.model.language_model import LanguageModel, LossScales, StageInputs
from megatron_ladder.model.stats import PassStats, StepStats

ModelInputs = tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]
"""One micro-batch: token ids and labels [b, s]; loss mask, positions, lengths and document bounds or None, as
`LanguageModel.stage` takes them."""


class Engine:
    """Runs passes over this rank's part of the model, in training. All ranks call its methods alike.

    Attributes:
        passes: the captured forward and backward passes; None for none.
        clock: that of the last training step's passes.
    """

    passes: CapturedPasses | None = None
    clock = PassClock(is_cuda=False)

    def __init__(self, model: LanguageModel, optimizer: ZeroOptimizer, mesh: ProcessMesh, device: torch.device) -> None:
        self.optimizer = optimizer
        self._model = model
        self._mesh = mesh
        self._device = device

    def train(self, micro_batches: Sequence[ModelInputs], scales: LossScales) -> StepStats:
        """Run forward and backward of a step, with reduced gradients at the end.

        Return the sums of this rank's passes, which the next step may overwrite.
        """
        if self.passes is not None:
            run_slots = functools.partial(self._run_slots, micro_batches, True)
            captured = self.passes.run(self._slots(len(micro_batches), True), micro_batches, scales, run_slots)
            if captured is not None:
                return captured
        with self.optimizer.reducing(len(micro_batches)):
            losses, stats = self.run_passes(micro_batches, trains=True, scales=scales)
        for loss in losses:
            stats.loss += loss
        return stats

    def run_passes(
        self, micro_batches: Sequence[ModelInputs], trains: bool, **options: Any
    ) -> tuple[list[Tensor], StepStats]:
        """Run the passes of this rank's stage over each micro-batch, in the order of its schedule, without graphs.

        Return the loss or the predictions of each micro-batch, without its graph, which stages other than the last do
        not have, and the sums of the passes. `options` are keyword arguments of `LanguageModel.stage`. If `trains` is
        set, backward runs too.
        """
        outputs: list[Tensor] = []
        stats = self._model.new_step_stats()
        graphs: dict[Pass, tuple[Tensor | None, Tensor | GradientEdge]] = {}
        """For each backward pass, the state that entered the chunk, and where its graph ends."""

        def run_pass(work: Pass, inputs: StageInputs, received: Tensor | None) -> Tensor | None:
            if not work.is_forward:
                entered, end = graphs.pop(work)
                self.backward(end, received)
                return None if entered is None else entered.grad
            if received is not None:
                received.requires_grad_(trains)
            leaving, pass_stats = self.forward(inputs, entering=received, chunk=work.chunk, **options)
            stats.add(pass_stats)
            ends = self._model.ends_in(work.chunk)
            if ends:
                outputs.append(leaving.detach())
            if trains:
                # Not the state itself, which is freed when it has been sent.
                graphs[work._replace(is_forward=False)] = received, leaving if ends else get_gradient_edge(leaving)
            return leaving.detach()

        def run_measured(work: Pass, inputs: StageInputs, received: Tensor | None) -> Tensor | None:
            with self.passes.measuring(work) if trains and self.passes is not None else nullcontext():
                return run_pass(work, inputs, received)

        self._run_slots(micro_batches, trains, run_measured)
        return outputs, stats

    def _slots(self, micro_batches: int, trains: bool) -> Sequence[Slot]:
        pipeline = self._mesh.pipeline
        return make_schedule(pipeline.size, self._model.chunks, micro_batches, trains)[pipeline.rank]

    def _run_slots(self, micro_batches: Sequence[ModelInputs], trains: bool, run_pass: RunPass) -> None:
        inputs: dict[int, StageInputs] = {}
        last_chunk = 0 if trains else self._model.chunks - 1

        def run(work: Pass, received: Tensor | None) -> Tensor | None:
            number = work.micro_batch
            if work == Pass(True, 0, number):
                inputs[number] = self._model.stage_inputs(*micro_batches[number])
            is_last = work == Pass(not trains, last_chunk, number)
            return run_pass(work, inputs.pop(number) if is_last else inputs[number], received)

        def allocate(work: Pass) -> Tensor:
            tokens = micro_batches[work.micro_batch][0]
            return self._model.allocate_state(tokens, work.chunk, leaves=not work.is_forward)

        clock = PassClock(self._device.type == "cuda")
        blocks = os.environ.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0")
        slots = self._slots(len(micro_batches), trains)
        with torch.set_grad_enabled(trains):
            run_schedule(slots, self._mesh.pipeline, run, allocate, clock, receives_early=not blocks)
        if trains:
            self.clock = clock

    def forward(self, inputs: StageInputs, **options: Any) -> tuple[Tensor, PassStats]:
        """See `LanguageModel.stage`."""
        return self._model.stage(*inputs.tensors, context=inputs.context, **options)

    def backward(self, end: Tensor | GradientEdge, gradient: Tensor | None) -> None:
        """Run backward from the loss, or from the end of a graph with the gradient of its state."""
        torch.autograd.backward(end, gradient)

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
            with self.optimizer.keeping(unchanged) if unchanged else nullcontext():
                yield
        finally:
            for parameter in frozen:
                parameter.requires_grad_(False)

    def close(self) -> None:
        """Free what was captured, while its process groups exist."""
        if self.passes is not None:
            self.passes.close()

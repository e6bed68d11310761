"""Passes over this rank's layers, in the order of its schedule."""

import functools
import os
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megatron_ladder.comm.mesh import ProcessMesh
from megatron_ladder.engine.graph import CapturedPasses, RunPass
from megatron_ladder.engine.optimizer import distribute_matrices
from megatron_ladder.engine.schedule import Arrival, Pass, PassClock, Send, Slot, make_schedule, run_schedule
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
        self._frozen: set[nn.Parameter] = set()
        self._lowest = 0
        """Place in the pipeline of the first chunk with weights that train, where backward ends."""

    def train(self, micro_batches: Sequence[ModelInputs], scales: LossScales) -> StepStats:
        """Run forward and backward of a step, with reduced gradients at the end.

        Return the sums of this rank's passes, which the next step may overwrite.
        """
        if self.passes is not None:
            run_slots = functools.partial(self._run_slots, micro_batches, True, replays=True)
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
                received.requires_grad_(trains and self._place(work.chunk) > self._lowest)
            leaving, pass_stats = self.forward(inputs, entering=received, chunk=work.chunk, **options)
            stats.add(pass_stats)
            ends = self._model.ends_in(work.chunk)
            if ends:
                outputs.append(leaving.detach())
            if leaving.requires_grad:
                # Not the state itself, which is freed when it has been sent.
                graphs[work._replace(is_forward=False)] = received, leaving if ends else get_gradient_edge(leaving)
            return None if ends else leaving.detach()

        def run_measured(work: Pass, inputs: StageInputs, received: Tensor | None) -> Tensor | None:
            with self.passes.measuring(work) if trains and self.passes is not None else nullcontext():
                return run_pass(work, inputs, received)

        self._run_slots(micro_batches, trains, run_measured)
        return outputs, stats

    def _slots(self, micro_batches: int, trains: bool) -> Sequence[Slot]:
        pipeline = self._mesh.pipeline
        return make_schedule(pipeline.size, self._model.chunks, micro_batches, trains, self._lowest)[pipeline.rank]

    def _run_slots(
        self, micro_batches: Sequence[ModelInputs], trains: bool, run_pass: RunPass, replays: bool = False
    ) -> None:
        inputs: dict[int, StageInputs] = {}
        states: dict[Pass, Tensor] = {}
        """Buffers of the states that are being received."""
        last_chunk = 0 if trains else self._model.chunks - 1
        stack = self._model.stack
        # Neither a graph nor autograd can wait for messages, or send them.
        has_messages = stack.mirrors and not replays

        def run(work: Pass, arrivals: Sequence[Arrival], send: Send) -> Sequence[Tensor]:
            number = work.micro_batch
            if work == Pass(True, 0, number):
                inputs[number] = self._model.stage_inputs(*micro_batches[number])
            is_last = work == Pass(not trains, last_chunk, number)
            arriving = arrivals if work.is_forward else arrivals[::-1]
            if not has_messages:
                for arrival in arrivals:
                    arrival.wait()
            with stack.messages.of_pass(arriving, send) if has_messages else nullcontext():
                result = run_pass(work, inputs.pop(number) if is_last else inputs[number], states.pop(work, None))
            return () if result is None else self._messages_of(work, result, enters=False)

        def allocate(work: Pass) -> Sequence[Tensor]:
            tokens = micro_batches[work.micro_batch][0]
            state = self._model.allocate_state(tokens, work.chunk, leaves=not work.is_forward)
            states[work] = state
            return self._messages_of(work, state, enters=True)

        clock = PassClock(self._device.type == "cuda")
        blocks = os.environ.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0")
        slots = self._slots(len(micro_batches), trains)
        with torch.set_grad_enabled(trains):
            run_schedule(slots, self._mesh.pipeline, run, allocate, clock, receives_early=not blocks)
        if trains:
            self.clock = clock

    def _messages_of(self, work: Pass, state: Tensor, enters: bool) -> Sequence[Tensor]:
        """Return the messages of what enters or leaves a pass, in the order in which they are sent."""
        messages = self._model.messages_of(state, work.chunk, leaves=work.is_forward is not enters)
        return messages if work.is_forward else messages[::-1]

    def forward(self, inputs: StageInputs, **options: Any) -> tuple[Tensor, PassStats]:
        """See `LanguageModel.stage`."""
        result, stats = self._model(*inputs.tensors, context=inputs.context, with_stats=True, **options)
        return result, stats

    def backward(self, end: Tensor | GradientEdge, gradient: Tensor | None) -> None:
        """Run backward from the loss, or from the end of a graph with the gradient of its state."""
        torch.autograd.backward(end, gradient)

    def follow_frozen(self) -> None:
        """Train only the parameters that require a gradient now, from the next step on; all ranks must call it.

        A tied embedding is frozen if one of the two stages' copies is, so that they remain equal.
        """
        frozen = {parameter for parameter in self._model.parameters() if not parameter.requires_grad}
        if not self._largest(frozen != self._frozen)[0]:
            return
        self._frozen = frozen
        tied, pipeline = self._model.tied_weight, self._mesh.pipeline
        trained = (self._place(chunk) for chunk in range(self._model.chunks) if self._model.trains_in(chunk))
        is_tied_frozen, highest = self._largest(tied in frozen, -next(trained, self._model.chunks * pipeline.size))
        self._lowest = int(-highest)
        self.optimizer.freeze({*frozen, tied} if is_tied_frozen and tied is not None else frozen)
        distribute_matrices(self.optimizer, self._mesh.world)
        if self.passes is not None:
            self.passes.restart()

    def set_expert_capacity(self, rows: int) -> None:
        """Let each rank send so many rows to each expert from the next pass on; all ranks must call it."""
        self._model.set_expert_capacity(rows)
        if self.passes is not None:
            self.passes.restart()

    def _place(self, chunk: int) -> int:
        return chunk * self._mesh.pipeline.size + self._mesh.pipeline.rank

    def _largest(self, *numbers: float) -> list[float]:
        """Return the largest of each of the numbers of all pipeline stages."""
        pipeline = self._mesh.pipeline
        if pipeline.size == 1:
            return [*numbers]
        return pipeline.all_reduce(torch.tensor(numbers, device=self._device), dist.ReduceOp.MAX).tolist()

    def close(self) -> None:
        """Free what was captured, while its process groups exist."""
        if self.passes is not None:
            self.passes.close()

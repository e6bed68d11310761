"""Forward and backward of micro-batches as CUDA graphs.

Below some thousand tokens, the host needs longer to launch the kernels of a pass than the device to run them. A graph
launches all at once: it replays captured kernels on captured addresses, and runs no Python. Each pass of the schedule
replays one graph; messages between pipeline stages are sent and received between them:

    received ~> entering state       -> [ forward graph  ] -> state that leaves ~> sent
                                               | activations
    sent     <~ its gradient         <- [ backward graph ] <- its gradient      <~ received

A graph has fixed addresses, so micro-batches that are in flight at the same time need different graphs. If at most k
micro-batches are in flight in a chunk, micro-batch i takes slot i mod k of the chunk. A slot has up to three pairs of a
forward and a backward graph:

    first     of micro-batch 0: forward of chunk 0 contains the gathers of weights, unless `step` does them; backward
              writes the sums of gradients
    middle    backward adds to the sums
    last      backward adds to the sums, with the reduces of complete buckets under it

The slots of a chunk of which k = 3 micro-batches of m = 8 are in flight, where F and B are the graphs of a pair:

    slot 0    F first 0     B first 0     F middle 3    B middle 3    F middle 6    B middle 6
    slot 1       F middle 1    B middle 1    F middle 4    B middle 4    F last 7      B last 7
    slot 2          F middle 2    B middle 2    F middle 5    B middle 5

**Memory.** Graphs that share a pool write to the same addresses. The graphs of a slot share a pool; two slots never do.
This is safe, because the activations of a micro-batch are all that a graph leaves in its pool, and no other graph of
the slot runs until the backward graph of the pair has read them. States and gradients are copied to buffers outside.
With one pool for all slots, a forward graph could write an intermediate result over activations that another slot still
needs, because that memory was free when the first graph was captured. The price: intermediate results need their
memory once per slot, and with several chunks, which have their most micro-batches in flight at different times,
activations need up to half as much again as in passes without graphs.

**Reduces.** All work of a graph ends with it, so the reduces that a last backward graph starts run under the backward
of its chunk only. Another graph reduces tied embeddings after the last pass: their two stages wait for each other, and
the first one needs gradients that the last one sends after its last graph.

All ranks capture, or none. Before the capture they agree whether all have the memory for it. A rank that fails later
may leave others stuck in it, because NCCL may exchange the buffers of a captured collective among its ranks. The rank
prints its error and waits for the others. If they can record without it, they join it, and all ranks run without
graphs. Otherwise its wait ends at the timeout, and theirs after its process has ended (`comm/watch.py`).
"""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megatron_ladder.comm.capture import PeakMemory, capturing
from megatron_ladder.comm.group import CommGroup
from megatron_ladder.engine.schedule import Pass, Slot
from megatron_ladder.engine.sharded import ShardedOptimizer
from megatron_ladder.errors import Problem, UserError
from megatron_ladder.model.language_model import LanguageModel, LossScales, StageInputs
from megatron_ladder.model.mixers.mixer import map_tensors, tensors_in
from megatron_ladder.model.stats import StepStats
from megatron_ladder.progress import print_rank_0

_WARM_UP_STEPS = 3
"""Steps before a capture, in which operations are compiled, and libraries and NCCL initialise."""
_MEASURED_STEPS = 5
"""Steps without graphs, and with them, whose times are compared."""

RunPass = Callable[[Pass, StageInputs, Tensor | None], Tensor | None]
"""Runs a pass for a micro-batch's inputs; otherwise as in `schedule.py`."""


class _Key(NamedTuple):
    """Which graph runs a pass."""

    is_forward: bool
    chunk: int
    slot: int
    is_first: bool
    is_last: bool


class _Chunk(NamedTuple):
    """What the graphs of a chunk read and write, outside of their pools. None at the ends of the model, and gradients
    also where nothing trains below."""

    in_flight: int
    """The most micro-batches at a time, the number of slots."""
    leaving: Tensor | None
    """The state that leaves it, which the next forward graph overwrites."""
    gradient: Tensor | None
    """The gradient of that state."""
    entering_gradient: Tensor | None
    """The gradient of the state that has entered, which the next backward graph overwrites."""


class _GraphSlot(NamedTuple):
    """What the graphs of a slot read, and their memory."""

    pool: Any
    inputs: StageInputs
    entering: Tensor | None


class _Recorded(NamedTuple):
    """The autograd graph of a captured forward pass."""

    entered: Tensor | None
    end: Tensor | GradientEdge


class CapturedPasses:
    """Replays the passes of a step, after some steps without graphs."""

    def __init__(self, module: LanguageModel, sharded: ShardedOptimizer, world: CommGroup, measures: bool) -> None:
        """With `measures`, graphs are kept only if all ranks can capture, and the slowest rank's fastest step gets
        faster."""
        self._module = module
        self._sharded = sharded
        self._world = world
        self._measures = measures
        self._first = _WARM_UP_STEPS + _MEASURED_STEPS * measures
        """Number of steps before the capture."""
        self._closed = False
        self._starts: list[float] = []
        """When the steps up to the end of the measurement started."""
        self._memory: PeakMemory | None = None
        """Measures the last step before the capture."""
        self._graphs: dict[_Key | None, torch.cuda.CUDAGraph] = {}
        """None stands for the reduces after the last pass, if there are any."""
        self._chunks: list[_Chunk] = []
        self._slots: dict[tuple[int, int], _GraphSlot] = {}
        """By chunk and number."""
        self._micro_batches = 0
        self._device = module.device
        zero = torch.zeros((), dtype=torch.float64, device=self._device)
        self._scales = LossScales(zero, zero.clone(), zero.new_zeros(module.mtp_depths))
        self._stats = module.new_step_stats()

    def run(
        self,
        slots: Sequence[Slot],
        micro_batches: Sequence[Sequence[Any]],
        scales: LossScales,
        run_slots: Callable[[RunPass], None],
    ) -> StepStats | None:
        """Run forward and backward of a step, and return the sums of its passes, which the next step overwrites.

        Return None if the step uses no graphs. `run_slots` runs the slots with what runs a pass.
        """
        if not self._uses_graphs():
            return None
        if not self._graphs and not self._captures(slots, micro_batches):
            return None
        assert len(micro_batches) == self._micro_batches, "all steps have equally many micro-batches"
        for captured_scale, scale in zip(self._scales, scales, strict=True):
            captured_scale.copy_(scale)
        self._stats.clear()
        run_slots(self._replay)
        if None in self._graphs:
            self._graphs[None].replay()
        return self._stats

    def measuring(self, work: Pass) -> AbstractContextManager[None]:
        """Return a context that measures the memory of a pass without graphs, if the next step is captured."""
        if self._memory is None:
            return nullcontext()
        return self._memory.measuring((work.chunk, work.micro_batch))

    def restart(self) -> None:
        """Free the graphs, because passes differ from now on; the next step runs without graphs, and is measured."""
        self._free()
        self._memory = None
        del self._starts[_WARM_UP_STEPS if self._measures else self._first - 1 :]

    def close(self) -> None:
        """Free the graphs, and use none from now on; the groups of their collectives must still exist."""
        self._closed = True
        self._free()

    def _free(self) -> None:
        self._sharded.gathers_late = False
        for graph in self._graphs.values():
            graph.reset()
        self._graphs.clear()
        self._slots.clear()
        self._chunks.clear()

    def _replay(self, work: Pass, inputs: StageInputs, received: Tensor | None) -> Tensor | None:
        key = self._key(work)
        chunk, slot = self._chunks[work.chunk], self._slots[key.chunk, key.slot]
        into = slot.entering if work.is_forward else chunk.gradient
        if received is not None:
            assert into is not None
            into.copy_(received)
        if work.is_forward:
            read_parts = self._read_parts(inputs, work.chunk)
            for captured, part in zip(self._read_parts(slot.inputs, work.chunk), read_parts, strict=True):
                if captured is not part:
                    assert captured is not None and part is not None, "the inputs of all micro-batches are alike"
                    captured.copy_(part)
        self._graphs[key].replay()
        result = chunk.leaving if work.is_forward else chunk.entering_gradient
        # The next pass of the chunk may run while this is being sent.
        return None if result is None else result.clone()

    def _key(self, work: Pass) -> _Key:
        number = work.micro_batch
        slot = self._slot_number(work.chunk, number)
        return _Key(work.is_forward, work.chunk, slot, number == 0, number == self._micro_batches - 1)

    def _slot_number(self, chunk: int, micro_batch: int) -> int:
        return micro_batch % self._chunks[chunk].in_flight

    def _read_parts(self, inputs: StageInputs, chunk: int) -> list[Tensor | None]:
        """Return the parts of the inputs that a chunk reads."""
        tokens, labels, loss_mask, positions, *_ = inputs.tensors
        parts = [*tensors_in(inputs.context.prepared), inputs.context.token_mask]
        if self._module.begins_in(chunk):
            parts += [tokens, positions]
        if self._module.ends_in(chunk):
            parts += [labels, loss_mask]
            parts += [] if self._module.mtp is None else [tokens]
        return parts

    def _copy_of(self, inputs: StageInputs, chunk: int) -> StageInputs:
        """Return the inputs with copies of what a chunk reads and what differs between micro-batches."""
        positions = inputs.tensors[3]
        read = {id(part) for part in self._read_parts(inputs, chunk) if part is not None}
        if positions is None:
            # All micro-batches share these.
            read -= {id(part) for part in tensors_in(inputs.context.prepared)}

        def copied(part: Any) -> Any:
            return part.clone() if id(part) in read else part

        prepared = map_tensors(copied, inputs.context.prepared)
        context = inputs.context._replace(prepared=prepared, token_mask=copied(inputs.context.token_mask))
        return StageInputs([copied(part) for part in inputs.tensors], context)

    def _captures(self, slots: Sequence[Slot], micro_batches: Sequence[Sequence[Any]]) -> bool:
        """Capture a step on all ranks; if one of them cannot, return False or raise UserError on all."""
        assert self._memory is not None, "the step before the capture was measured"
        self._micro_batches = len(micro_batches)
        self._allocate(slots, micro_batches[0])
        problem = self._first_problem(self._memory.capture_problem(lambda key: (key[0], self._slot_number(*key))))
        self._memory = None
        if problem is None:
            failure = ""
            try:
                self._capture()
            except Exception as error:
                failure = f"{type(error).__name__}: {error}"
                reason = f"{{}}: rank {self._world.rank} cannot capture a step: {{failure}}"
                note = Problem({"cuda_graph": None}, reason, failure=failure)
                print(f"*** {note} ***", file=sys.stderr, flush=True)
            problem = self._first_problem(failure)
            if problem is None:
                return True
            self._sharded.forget_capture()
        self.close()
        if not self._measures:
            reason = "{}: a step cannot be captured {problem}; use auto or false"
            raise UserError(Problem({"cuda_graph": "true"}, reason, problem=problem))
        self._measures = False
        reason = "{}: no graphs, because a step cannot be captured {problem}"
        print_rank_0(f"*** {Problem({'cuda_graph': 'auto'}, reason, problem=problem)} ***", self._world.rank)
        return False

    def _first_problem(self, problem: str) -> str | None:
        """Return the problem of the first rank that has one, with its number; a collective call."""
        problems = self._world.broadcast_object(self._world.gather_objects(problem))
        return next((f"on rank {rank}: {text}" for rank, text in enumerate(problems) if text), None)

    def _allocate(self, slots: Sequence[Slot], micro_batch: Sequence[Any]) -> None:
        module, tokens = self._module, micro_batch[0]
        inputs = module.stage_inputs(*micro_batch)
        for chunk in range(module.chunks):
            of_chunk = [slot for slot in slots if slot.work is not None and slot.work.chunk == chunk]
            backward = [slot for slot in of_chunk if slot.work is not None and not slot.work.is_forward]
            # A chunk without backward keeps nothing of a micro-batch.
            changes = (-1 if slot in backward else 1 for slot in of_chunk)
            in_flight = max(accumulate(changes)) if backward else 1
            rank = module.stack.mesh.pipeline.rank
            sends = any(transfer.source == rank for slot in backward for transfer in slot.transfers)
            leaving = gradient = entering_gradient = None
            if not module.ends_in(chunk):
                leaving = module.allocate_state(tokens, chunk, leaves=True)
                gradient = torch.zeros_like(leaving) if backward else None
            if sends:
                entering_gradient = module.allocate_state(tokens, chunk)
            self._chunks.append(_Chunk(in_flight, leaving, gradient, entering_gradient))
            for number in range(in_flight):
                entering = None if module.begins_in(chunk) else module.allocate_state(tokens, chunk).zero_()
                copied = self._copy_of(inputs, chunk)
                self._slots[chunk, number] = _GraphSlot(torch.cuda.graph_pool_handle(), copied, entering)

    def _capture(self) -> None:
        stream = torch.cuda.Stream(self._device)
        last = self._micro_batches - 1
        self._sharded.gather_late()
        with ExitStack() as step:
            step.enter_context(self._sharded.reducing(min(self._micro_batches, 2)))
            for number in range(self._micro_batches):
                works = [Pass(True, chunk, number) for chunk in range(self._module.chunks)]
                works = [work for work in works if self._key(work) not in self._graphs]
                with self._sharded.uncounted() if 0 < number < last else nullcontext():
                    recorded = [self._capture_forward(work, stream) for work in works]
                    for work, graph in zip(reversed(works), reversed(recorded), strict=True):
                        if graph is not None:
                            self._capture_backward(work._replace(is_forward=False), graph, stream)
            if self._sharded.has_unreduced:
                with self._capturing(stream, self._slots[0, 0].pool, None):
                    step.close()

    def _capture_forward(self, work: Pass, stream: torch.cuda.Stream) -> _Recorded | None:
        """Capture a pass; return None if nothing trains up to its chunk."""
        key = self._key(work)
        chunk, slot = self._chunks[work.chunk], self._slots[key.chunk, key.slot]
        entered = None if slot.entering is None else slot.entering.detach()
        if entered is not None:
            entered.requires_grad_(chunk.entering_gradient is not None)
        with self._capturing(stream, slot.pool, key):
            tensors, context = slot.inputs
            leaving, stats = self._module(
                *tensors,
                context=context,
                entering=entered,
                chunk=work.chunk,
                scales=self._scales,
                with_stats=True,
            )
            self._stats.add(stats)
            if chunk.leaving is None:
                self._stats.loss += leaving.detach()
                return _Recorded(entered, leaving) if leaving.requires_grad else None
            chunk.leaving.copy_(leaving.detach())
            return _Recorded(entered, get_gradient_edge(leaving)) if leaving.requires_grad else None

    def _capture_backward(self, work: Pass, recorded: _Recorded, stream: torch.cuda.Stream) -> None:
        key = self._key(work)
        chunk, slot = self._chunks[work.chunk], self._slots[key.chunk, key.slot]
        with self._capturing(stream, slot.pool, key):
            torch.autograd.backward(recorded.end, chunk.gradient)
            if chunk.entering_gradient is not None:
                assert recorded.entered is not None and recorded.entered.grad is not None
                chunk.entering_gradient.copy_(recorded.entered.grad)

    @contextmanager
    def _capturing(self, stream: torch.cuda.Stream, pool: Any, key: _Key | None) -> Iterator[None]:
        graph = torch.cuda.CUDAGraph()
        with capturing(graph, stream, pool):
            yield
            self._sharded.end_captured_pass()
        self._graphs[key] = graph

    def _uses_graphs(self) -> bool:
        """Count a step, and after the last measured one compare their times."""
        last = self._first + _MEASURED_STEPS + 1
        if len(self._starts) <= last:
            self._starts.append(time.perf_counter())
        if len(self._starts) == self._first:
            self._memory = PeakMemory(self._device)
        if self._measures and len(self._starts) > last:
            self._measures = False
            durations = [after - before for before, after in pairwise(self._starts)]
            fastest = [min(durations[_WARM_UP_STEPS : self._first]), min(durations[self._first + 1 :])]
            times = torch.tensor(fastest, dtype=torch.float64).to(self._device)
            without, captured = self._world.all_reduce(times, dist.ReduceOp.MAX).tolist()
            times_of = f"{1e3 * captured:.1f} ms with graphs, {1e3 * without:.1f} ms without"
            verdict = f"{'keeps' if captured < without else 'drops'} them"
            note = Problem({"cuda_graph": "auto"}, f"{{}}: steps take {times_of}: {verdict}")
            print_rank_0(str(note), self._world.rank)
            if captured >= without:
                self.close()
        return not self._closed and len(self._starts) > self._first

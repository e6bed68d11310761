"""Forward and backward of micro-batches as CUDA graphs.

Below some thousand tokens, the host needs longer to launch the kernels of a micro-batch than the device to run them. A
graph launches all at once: it replays captured kernels on captured addresses, and runs no Python. A step has up to
three graphs:

    first     gathers of weights under forward, unless `step` does it; backward writes the sums of gradients
    middle    forward; backward adds to the sums; replayed for all micro-batches between the other two
    last      forward; backward adds to the sums, with their reduces under it

They share memory: they are captured in this order and replayed in no other.

All ranks capture, or none. Before the capture they agree whether all have the memory for it. A rank that fails later
may leave others stuck in it, because NCCL may exchange the buffers of a captured collective among its ranks. The rank
prints its error and waits for the others. If they can record without it, they join it, and all ranks run without
graphs. Otherwise its wait ends at the timeout, and theirs after its process has ended (`comm/watch.py`).
"""

import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ladder.comm.capture import PeakMemory, capturing
from megatron_ladder.comm.group import CommGroup, to_device
from megatron_ladder.engine.sharded import ShardedOptimizer
from megatron_ladder.errors import UserError
from megatron_ladder.model.language_model import LanguageModel, LossScales
from megatron_ladder.progress import print_rank_0

_WARM_UP_STEPS = 3
"""Steps before a capture, in which operations are compiled, and libraries and NCCL initialise."""
_MEASURED_STEPS = 5
"""Steps without graphs, and with them, whose times are compared."""


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
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._inputs: list[Tensor | None] = []
        self._device = next(module.parameters()).device
        zero = torch.zeros((), dtype=torch.float64, device=self._device)
        self._scales = LossScales(zero, zero.clone())
        self._loss_sum = torch.zeros((), device=self._device)

    def run(self, micro_batches: Sequence[Sequence[Tensor | None]], scales: LossScales) -> Tensor | None:
        """Run forward and backward of a step, and return its loss, or None if it uses no graphs."""
        if not self._uses_graphs():
            return None
        if not self._graphs and not self._captures(micro_batches):
            return None
        for captured_scale, scale in zip(self._scales, scales, strict=True):
            captured_scale.copy_(scale)
        self._loss_sum.zero_()
        for index, batch in enumerate(micro_batches):
            for captured, part in zip(self._inputs, batch, strict=True):
                if captured is not part:
                    assert captured is not None and part is not None, "the inputs of all micro-batches are alike"
                    captured.copy_(to_device(part, self._device))
            self._graphs[-1 if index == len(micro_batches) - 1 else min(index, 1)].replay()
        return self._loss_sum.clone()

    def close(self) -> None:
        """Free the graphs, and use none from now on; the groups of their collectives must still exist."""
        self._closed = True
        self._sharded.gathers_late = False
        for graph in self._graphs:
            graph.reset()
        self._graphs.clear()

    def _captures(self, micro_batches: Sequence[Sequence[Tensor | None]]) -> bool:
        """Capture a step on all ranks; if one of them cannot, return False or raise UserError on all."""
        assert self._memory is not None, "the step before the capture was measured"
        problem = self._first_problem(self._memory.capture_problem())
        if problem is None:
            failure = ""
            try:
                self._capture(micro_batches)
            except Exception as error:
                failure = f"{type(error).__name__}: {error}"
                text = f"*** --cuda-graph: rank {self._world.rank} cannot capture a step: {failure} ***"
                print(text, file=sys.stderr, flush=True)
            problem = self._first_problem(failure)
            if problem is None:
                return True
            self.close()
            self._sharded.forget_capture()
        if not self._measures:
            raise UserError(f"--cuda-graph true: a step cannot be captured {problem}; use auto or false")
        self._measures = False
        self._closed = True
        text = f"*** --cuda-graph auto: no graphs, because a step cannot be captured {problem} ***"
        print_rank_0(text, self._world.rank)
        return False

    def _first_problem(self, problem: str) -> str | None:
        """Return the problem of the first rank that has one, with its number; a collective call."""
        problems = self._world.broadcast_object(self._world.gather_objects(problem))
        return next((f"on rank {rank}: {text}" for rank, text in enumerate(problems) if text), None)

    def _capture(self, micro_batches: Sequence[Sequence[Tensor | None]]) -> None:
        self._inputs = [None if part is None else part.to(self._device, copy=True) for part in micro_batches[0]]
        passes = min(len(micro_batches), 3)
        stream, pool = torch.cuda.Stream(self._device), torch.cuda.graph_pool_handle()
        self._sharded.gather_late()
        with ExitStack() as step:
            step.enter_context(self._sharded.reducing(passes))
            for _ in range(passes):
                graph = torch.cuda.CUDAGraph()
                with capturing(graph, stream, pool):
                    self._run_pass()
                    if len(self._graphs) == passes - 1:
                        # The last graph also waits for the reduces.
                        step.close()
                self._graphs.append(graph)

    def _run_pass(self) -> None:
        loss = self._module(*self._inputs, scales=self._scales)
        self._loss_sum += loss.detach()
        loss.backward()

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
            print_rank_0(f"--cuda-graph auto: steps take {times_of}: {verdict}", self._world.rank)
            if captured >= without:
                self.close()
        return not self._closed and len(self._starts) > self._first

"""Own partials: the walk and its mirror for a model whose heads and neurons form lanes, and each lane misses less.

Lane k is the k-th part of every weight, and y_j^k its part of output y_j; a rank computes one lane or several. A lane
adds its own parts of the outputs in flight to the stream, and misses only those of the other lanes. Ladder, two lanes:

    lane 0   [ y_1^0 = h_1^0(r + y_0^0) ][ y_2^0 = h_2^0(r + y_1^0) ][ ...           r = r + y_0 before h_2
    lane 1   [ y_1^1 = h_1^1(r + y_0^1) ][ y_2^1 = h_2^1(r + y_1^1) ][ ...
    wire     ~~ y_0 = y_0^0 + y_0^1 ~~~~~ ~~ y_1 = y_1^0 + y_1^1 ~~~~~

Backward, with d_i^k the gradient at the input of h_i^k: g grows by all_reduce(sum over lanes of d_i^k), as without
lanes, and a part also gets the gradients of the inputs that it was added to:

    gradient of y_j^k = g at f_j + sum over positions i < f_j that miss y_j of d_i^k

So a norm goes backward before the sum over the ranks, each rank's gradient of its weight is a partial sum, and d_i^k
is kept until the last of these outputs has gone backward. A single lane reads every output in flight.

Layouts: inputs, parts of an output and their gradients are [lanes, s, b, h], of this rank's lanes. A state has a slot
for each part. There is no sequence parallelism, and no experts.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from megatron_ladder.blueprint.model import local_lanes
from megatron_ladder.blueprint.specs import TensorSpec
from megatron_ladder.blueprint.tensors import SubBlockTensors
from megatron_ladder.blueprint.wiring import ReadPlan
from megatron_ladder.comm.group import CommGroup
from megatron_ladder.comm.inflight import InFlight, Launch, leave_unreduced
from megatron_ladder.comm.side_queue import CudaSideQueue
from megatron_ladder.comm.stream import StreamLayout
from megatron_ladder.model.backward import BackwardWalk, ForwardRecord, LocalGraphs, run_norm_backward
from megatron_ladder.model.cut import StateMessages, output_slots
from megatron_ladder.model.norm import RMSNorm
from megatron_ladder.model.operations import BuildContext
from megatron_ladder.model.stats import PassStats
from megatron_ladder.model.sub_block import (
    Body,
    BodyOutput,
    ForwardPass,
    SequenceContext,
    SubBlock,
    walk,
)
from megatron_ladder.parallel.products import InputGradient
from megatron_ladder.torch_private import run_backward


class LaneNorm(RMSNorm):
    """The norm of the inputs of this rank's lanes, all with the same weight."""

    def __init__(self, build: BuildContext, tensor: TensorSpec) -> None:
        super().__init__(build, tensor, own_input=True)

    def forward(self, x: Tensor, *args: Any, **options: Any) -> Tensor:
        """See `RMSNorm.forward`; the last lane first, so that autograd adds gradients of the weight from lane 0 on."""
        normed: list[Any] = [RMSNorm.forward(self, lane, *args, **options) for lane in reversed(x.unbind())]
        return _stack(normed[::-1])


class LaneBodies(Body):
    """The bodies of a sub-block for this rank's lanes: maps their normed inputs to their parts of the output."""

    def __init__(self, body: type[Body], build: BuildContext, number: int, tensors: SubBlockTensors) -> None:
        """Build a body for each lane; `number` counts the sub-blocks with a mixer before this one."""
        super().__init__()
        lanes = local_lanes(build.config, build.mesh.tensor.size)
        # Each lane has another gradient of its part.
        tensors = replace(tensors, wired=tensors.wired._replace(leaves_shared=False))
        self.lanes = nn.ModuleList()
        for lane in range(lanes):
            lane_build = build
            if lanes > 1:
                # Describes the lane's slices of tensors, and cannot communicate.
                group = CommGroup(range(build.config.lanes), build.mesh.tensor.rank * lanes + lane, None)
                lane_build = replace(build, mesh=replace(build.mesh, tensor=group))
            self.lanes.append(body(lane_build, number * lanes + lane, tensors))

    def forward(
        self, normed: Tensor, context: SequenceContext, input_gradient: InputGradient | None = None
    ) -> BodyOutput:
        """See `Body`."""
        lane_gradients: list[InputGradient | None] = [None for _ in self.lanes]
        if input_gradient is not None:
            input_gradient.use(normed, trains=False)
            grads: list[Tensor | None] = [None for _ in self.lanes]
            collect = functools.partial(_collect, input_gradient, grads)
            lane_gradients = [InputGradient(functools.partial(collect, lane)) for lane in range(len(self.lanes))]
        lanes = zip(self.lanes, normed.unbind(), lane_gradients, strict=True)
        return BodyOutput(_stack([body(x, context, gradient).partial for body, x, gradient in lanes]))


def _collect(input_gradient: InputGradient, grads: list[Tensor | None], lane: int, grad_x: Tensor) -> InFlight:
    """Store the gradient of a lane's input; add those of all lanes once the last one has arrived."""
    grads[lane] = grad_x
    complete = [grad for grad in grads if grad is not None]
    if len(complete) == len(grads):
        input_gradient.add(_stack(complete))
    return leave_unreduced(grad_x)


def _stack(lanes: list[Tensor]) -> Tensor:
    return torch.stack(lanes) if len(lanes) > 1 else lanes[0].unsqueeze(0)


def _sum_lanes(parts: Tensor) -> Tensor:
    """Return the sum over this rank's lanes in new memory, because a reduce overwrites it and the parts are needed."""
    first, *others = parts.unbind()
    return functools.reduce(torch.add, others, first) if others else first.clone()


class _LanesPass:
    """A `ForwardPass` that computes with the inputs and parts of all lanes by means of another one."""

    def __init__(self, inner: ForwardPass[Any], plan: ReadPlan, first: int, parts: dict[int, Tensor]) -> None:
        self.steps: Sequence[SubBlock] = inner.steps
        self.parts = parts
        """Those of the missing outputs."""
        self._inner = inner
        self._plan = plan
        self._first = first

    def start_input(self, step: int, stream: Tensor, output: Tensor | None) -> tuple[Tensor, Any]:
        """See `ForwardPass.start_input`."""
        body: Any = self.steps[step].body
        stream = stream if output is None else stream + output
        self.parts = {output: self.parts[output] for output in self._plan.missing(self._first + step)}
        inputs = stream.expand(len(body.lanes), *stream.shape)
        _, started = self._inner.start_input(step, functools.reduce(torch.add, self.parts.values(), inputs), None)
        return stream, started

    def compute(self, step: int, input: Any) -> tuple[Tensor, Launch, PassStats]:
        """See `ForwardPass.compute`."""
        parts, start, stats = self._inner.compute(step, input)
        self.parts[self._first + step] = parts
        return _sum_lanes(parts), start, stats


def walk_own_partials(
    state: Tensor,
    forward: ForwardPass[Any],
    plan: ReadPlan,
    first: int,
    layout: StreamLayout,
    queue: CudaSideQueue | None,
    overlap: bool,
    messages: StateMessages,
) -> tuple[Tensor, PassStats]:
    """Walk a range of sub-blocks whose bodies are `LaneBodies`; see `walk`."""
    entering, leaving = plan.missing(first), plan.missing(first + len(forward.steps))
    parts = dict(zip(entering, output_slots(state, entering, plan), strict=True))
    lanes = _LanesPass(forward, plan, first, parts)
    summed = torch.stack([state[0], *map(_sum_lanes, parts.values())])
    left, stats = walk(summed, lanes, plan, first, layout, queue, overlap, messages)
    return torch.cat([left[:1], *(lanes.parts[output] for output in leaving)]), stats


class OwnPartialsRecord(ForwardRecord):
    """Records what the mirrored backward of a model with own partials needs."""

    def walk(self, state: Tensor) -> tuple[Tensor, PassStats]:
        """See `ForwardRecord.walk`."""
        arguments = self.plan, self.first, self.layout, self.queue, self.overlap, self.messages
        return walk_own_partials(state, self, *arguments)

    def walk_backward(self, entered: torch.Size, state_gradient: Tensor, losses: Mapping[str, Tensor]) -> Tensor | None:
        """See `ForwardRecord.walk_backward`."""
        return _OwnPartialsBackward(self, state_gradient, losses).run(entered)

    def _first_input_after(self, outputs: Sequence[int]) -> int:
        # The lanes of this rank add their parts at once.
        return min(outputs) + 1


class _OwnPartialsBackward(BackwardWalk):
    def __init__(self, record: ForwardRecord, state_gradient: Tensor, losses: Mapping[str, Tensor]) -> None:
        entered = () if record.mirror.crosses_unreduced else record.plan.missing(record.first)
        self._unreduced: dict[int, list[Tensor]] = {
            output: [] for output in (*entered, *range(record.first, record.last))
        }
        """For outputs that have not gone backward the gradients of the inputs to which their parts were added."""
        super().__init__(record, state_gradient, losses)

    def _in_slots(self, slots: Tensor) -> Tensor:
        return slots

    def _start_sum(self, unreduced: Tensor) -> InFlight:
        return self._record.layout.start_write(_sum_lanes(unreduced))

    def _pass_on(self, position: int, unreduced: Tensor) -> None:
        for output in self._unreduced.keys() & {*self._record.plan.missing(position)}:
            self._unreduced[output].append(unreduced)
        super()._pass_on(position, unreduced)

    def _output_gradient(self, output: int) -> Tensor:
        return functools.reduce(torch.add, self._unreduced.pop(output), super()._output_gradient(output))

    def _differentiate(self, position: int, graphs: LocalGraphs, gradient: Tensor) -> None:
        input = graphs.input
        # Without the graphs, whose nodes lead to this function: a cycle through C++ would never be freed.
        end_input = functools.partial(self._end_input, position, input.edges, input.stream)
        input.input_gradient.launch = end_input
        assert input.sent is not None
        run_backward((graphs.partial,), (gradient.expand_as(input.sent),))

    def _end_input(
        self, position: int, edges: tuple[GradientEdge, ...], stream: Tensor, grad_normed: Tensor
    ) -> InFlight:
        """Run the backward of a norm before the sum over the ranks, which starts if the stream needs a gradient."""
        unreduced = run_norm_backward(edges, stream, (grad_normed,))
        if unreduced is not None:
            self._pass_on(position, unreduced)
        return leave_unreduced(grad_normed)

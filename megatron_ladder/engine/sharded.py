"""ZeRO stages 0 and 1 with their communication under computation.

Parameters are stored in buckets: contiguous vectors of weights and of their fp32 gradients. In stage 1, each
data-parallel rank owns an equal part of every bucket, whose master weights and moments it holds and updates. In stage
0, an all-reduce replaces the two collectives, and every rank updates the whole bucket.

    compute   [ backward of the last micro-batch ][ norm, clip, step ][ forward of the next step
    wire          [ reduce-scatter ... ]                                [ all-gather ... ]

A bucket is reduced when its last gradient of the step has been added. All ranks start the reduces in the same order, in
which backward completes the buckets. After the update the weights are gathered in the opposite order, in which forward
reads them, and every module waits for its weights before it runs.

With expert parallelism, the ranks that hold the same routed experts are not those that hold the same other parameters.
So experts have separate buckets, which their ranks reduce and, in stage 1, divide.

Frozen parameters have no gradients. They cut a bucket into segments, but all elements stay where they are:

    bucket        [ a ][ b ][ c ][ d ][ e ][ padding ]       weights, and this rank's part of masters and moments
    segments      [ a    b ][ c ][ d    e    padding ]       if c is frozen; with everything trained, there is one
    gradients     [ a    b ]     [ d    e    padding ]

A rank's part of the bucket is another part of each segment, so stage 1 sums segments that are not a whole bucket with
an all-reduce, and a rank uses its elements of the result.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, groupby
from typing import Any

import torch
from torch import Tensor, nn

from megatron_ladder.checkpoint.optimizer_state import Span
from megatron_ladder.comm.group import CommGroup
from megatron_ladder.comm.inflight import InFlight
from megatron_ladder.comm.mesh import ProcessMesh
from megatron_ladder.engine.state import GROUP_MOMENTS, ZeroOptimizer
from megatron_ladder.model.language_model import LanguageModel
from megatron_ladder.parallel.layout import data_groups
from megatron_ladder.parallel.products import add_product


class _Segment:
    """Neighbouring parameters of a bucket that all train, or are all frozen. The segments of a bucket tile it.

    Attributes:
        parameters, offsets: with the index of the first element of each in the bucket.
        start: index in the bucket of the first element of `master`.
        master: this rank's part in fp32, which may be empty, with its gradient if the parameters train.
        gradients: summed over micro-batches, flat, fp32; this rank's part is then summed over the ranks, in place. None
            if the parameters are frozen.
        unfinished: number of parameters that will get another gradient in this step.
        streams: CUDA streams that have added gradients.
    """

    def __init__(self, bucket: "_Bucket", first: int, count: int, trains: bool) -> None:
        """Take `count` parameters of a bucket, from number `first` on; the last one takes the padding, too."""
        self.bucket = bucket
        self.parameters = bucket.parameters[first : first + count]
        *self.offsets, stop = [*bucket.offsets, len(bucket.weights)][first : first + count + 1]
        low = bucket.divided_over.rank * len(bucket.master)
        self.start = max(self.offsets[0], low)
        own_length = max(min(stop, low + len(bucket.master)) - self.start, 0)
        self.master = nn.Parameter(bucket.master[self.start - low :][:own_length])
        self.gradients: Tensor | None = None
        if trains:
            self.gradients = bucket.master.new_zeros(stop - self.offsets[0])
            self.master.grad = self.gradients[self.start - self.offsets[0] :][:own_length]
        self.unfinished = 0
        self.streams: set[Any] = set()


class _Bucket:
    """Parameters of one group whose weights are gathered together.

    Attributes:
        group: number of the parameter group.
        parameters: their weights are views of `weights`.
        offsets: index of the first element of each parameter.
        weights: flat, in the precision of the model, padded to a multiple of the number of ranks.
        own_weights: this rank's part of `weights`.
        master: this rank's part in fp32. In an fp32 model it is `own_weights`.
        segments: in the order of their parameters.
        reduce_over: ranks with the same parameters and other samples.
        divided_over: ranks that own a part of the bucket each: those of `reduce_over`, or this rank alone.
        copies: pipeline stages with copies of the parameters, over which gradients are summed first.
    """

    def __init__(
        self,
        group: int,
        parameters: Sequence[nn.Parameter],
        dtype: torch.dtype,
        reduce_over: CommGroup,
        shards: bool,
        copies: CommGroup | None,
    ) -> None:
        self.group = group
        self.parameters = parameters
        self.reduce_over = reduce_over
        self.divided_over = divided_over = reduce_over if shards else CommGroup.alone()
        self.copies = copies
        *self.offsets, length = accumulate((parameter.numel() for parameter in parameters), initial=0)
        own_length = -(-length // divided_over.size)
        self.weights = torch.zeros(own_length * divided_over.size, dtype=dtype, device=parameters[0].device)
        for parameter, offset in zip(parameters, self.offsets, strict=True):
            view = self.weights.narrow(0, offset, parameter.numel()).view(parameter.shape)
            view.copy_(parameter.detach())
            parameter.data = view
        self.own_weights = self.weights.narrow(0, divided_over.rank * own_length, own_length)
        self.master = self.own_weights.to(torch.promote_types(dtype, torch.float32))
        self.segments: list[_Segment] = []
        self.divide(())

    @property
    def trains(self) -> bool:
        """Whether some of the parameters train."""
        return any(segment.gradients is not None for segment in self.segments)

    def divide(self, frozen: Collection[nn.Parameter]) -> bool:
        """Make segments for these frozen parameters; return whether they differ from those before."""
        lengths = [(trains, len([*same])) for trains, same in groupby(one not in frozen for one in self.parameters)]
        if lengths == [(segment.gradients is not None, len(segment.parameters)) for segment in self.segments]:
            return False
        firsts = accumulate((count for _, count in lengths), initial=0)
        self.segments = [
            _Segment(self, first, count, trains) for first, (trains, count) in zip(firsts, lengths, strict=False)
        ]
        return True


class ShardedOptimizer(ZeroOptimizer):
    """Reduces gradients into this rank's parts of the buckets, which torch's optimizer updates, and gathers weights.

    Attributes:
        shards: whether ranks divide the buckets (stage 1).
        buckets: in the order in which their gradients are reduced.
        groups: the parameter groups of this rank's parts that train, for `base`.
        gathers_late: whether the next forward pass starts the gathers instead of `step`.
    """

    def __init__(
        self,
        model: LanguageModel,
        groups: Sequence[dict[str, Any]],
        mesh: ProcessMesh,
        dtype: torch.dtype,
        bucket_numbers: int,
        shards: bool = True,
    ) -> None:
        """Move the parameters into buckets of at most `bucket_numbers` elements of `dtype`, or of one parameter.

        `groups` are the parameter groups of the model, the last one of norms and biases. All parameters train.
        """
        super().__init__(model, mesh.data.rank == 0)
        self.shards = shards
        position = {parameter: index for index, parameter in enumerate(model.parameters())}
        data = data_groups(model)
        tied = model.tied_weight if mesh.pipeline.size > 1 else None
        order: dict[_Bucket, tuple[bool, bool, int]] = {}
        for index, group in enumerate(groups):
            ordered = sorted(group["params"], key=position.__getitem__, reverse=True)
            # Norms and biases are the first weights to arrive, because some are read outside of their modules.
            is_last = index == len(groups) - 1
            for reduce_over in dict.fromkeys(data[parameter] for parameter in ordered):
                alike = [parameter for parameter in ordered if data[parameter] is reduce_over]
                for parameters in _cut(alike, bucket_numbers, tied):
                    copies = mesh.ends if parameters[0] is tied else None
                    bucket = _Bucket(index, parameters, dtype, reduce_over, shards, copies)
                    order[bucket] = copies is not None, is_last, -position[parameters[-1]]
        self.buckets = sorted(order, key=order.__getitem__)
        self.groups = [{**group} for group in groups]
        self._trained: list[_Segment] = []
        """Segments in the order in which they are reduced."""
        self._sums: dict[Tensor, tuple[_Segment, Tensor]] = {}
        """For each parameter that trains, its segment and its gradient."""
        self._list_trained()
        self._micro_batches = 0
        self._counts = True
        """Whether gradients are counted."""
        self._added: dict[Tensor, int] = {}
        """Number of gradients of each parameter in this step."""
        self._reduces: list[InFlight] = []
        """Reduces in flight, of the first segments."""
        self._gathers: deque[tuple[_Bucket, InFlight]] = deque()
        self.gathers_late = self._is_due = False
        bucket_of = {parameter: bucket for bucket in self.buckets for parameter in bucket.parameters}
        for parameter in bucket_of:
            parameter.register_post_accumulate_grad_hook(self._add_gradient)
        if dtype != torch.promote_types(dtype, torch.float32):
            model.gradient_sink.add = self._add_product
        for module in model.modules():
            needed = [bucket_of[parameter] for parameter in module.parameters(recurse=False)]
            if needed:
                module.register_forward_pre_hook(lambda *_, needed=needed: self._wait_for(needed))

    def freeze(self, frozen: Collection[nn.Parameter]) -> None:
        # The weights of a bucket that no longer trains may not have arrived.
        self.finish_step()
        for bucket in self.buckets:
            before = bucket.segments
            if bucket.divide(frozen):
                self._move_moments(bucket, before)
        self._list_trained()

    def _move_moments(self, bucket: _Bucket, before: Sequence[_Segment]) -> None:
        """Make moments keyed by the masters of earlier segments those of the present ones."""
        states = [self.base.state.pop(segment.master, {}) for segment in before]
        if not self.steps:
            return
        for which in self.groups[bucket.group][GROUP_MOMENTS]:
            parts = zip(before, states, strict=True)
            # Parameters that have never trained have no moments.
            moments = [state.get(which, torch.zeros_like(segment.master.detach())) for segment, state in parts]
            lengths = [len(segment.master) for segment in bucket.segments]
            for segment, moment in zip(bucket.segments, torch.cat(moments).split(lengths), strict=True):
                self.base.state[segment.master][which] = moment
        for segment in bucket.segments:
            self._count_steps(segment.master)

    def _list_trained(self) -> None:
        self._trained = [one for bucket in self.buckets for one in bucket.segments if one.gradients is not None]
        self._sums.clear()
        for group in self.groups:
            group["params"] = []
        for segment in self._trained:
            assert segment.gradients is not None
            if len(segment.master):
                self.groups[segment.bucket.group]["params"].append(segment.master)
            for parameter, offset in zip(segment.parameters, segment.offsets, strict=True):
                total = segment.gradients.narrow(0, offset - segment.offsets[0], parameter.numel())
                self._sums[parameter] = segment, total.view(parameter.shape)

    @contextmanager
    def reducing(self, micro_batches: int) -> Iterator[None]:
        self._micro_batches = micro_batches
        self._added.clear()
        for segment in self._trained:
            segment.unfinished = len(segment.parameters)
        yield
        for segment in self._trained[len(self._reduces) :]:
            self._start_reduce(segment)
        for in_flight in self._reduces:
            in_flight.wait()
        self._reduces.clear()

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Add gradients inside the block to the sums of earlier ones without counting them, for passes that are
        captured once and repeated."""
        self._counts = False
        try:
            yield
        finally:
            self._counts = True

    @property
    def has_unreduced(self) -> bool:
        """Whether the reduces of some segments have not started in this step."""
        return len(self._reduces) < len(self._trained)

    def step(self) -> None:
        self.base.step()
        self.steps += 1
        self._is_due = True
        if self.finishes_steps:
            self.finish_step()
        elif not self.gathers_late:
            self._start_gathers(self._trained_buckets())

    def discard_gradients(self) -> None:
        pass  # The first gradients of the next step replace these.

    def spans(self) -> Iterator[Span]:
        for bucket in self.buckets:
            owned = self.shards or bucket.reduce_over.rank == 0
            group = self.groups[bucket.group]
            for part in bucket.segments:
                yield from self._spans_in(group, part.parameters, part.offsets, part.master, part.start, owned)

    def gather_late(self) -> None:
        """Leave the gathers to the forward passes, the next of which is captured, unless `finishes_steps`."""
        self.finish_step()
        self.gathers_late = self._is_due = not self.finishes_steps

    def end_captured_pass(self) -> None:
        """Wait for all collectives and streams of a captured pass, because no other graph can."""
        self.finish_step()
        for in_flight in self._reduces:
            in_flight.wait()
        self._reduces[:] = [InFlight(in_flight.partial, None) for in_flight in self._reduces]
        for segment in self._trained:
            segment.streams.clear()

    def forget_capture(self) -> None:
        """Forget the collectives of a capture that has failed; the next forward pass gathers the weights again."""
        self._reduces.clear()
        self._gathers.clear()
        for segment in self._trained:
            segment.streams.clear()
        self._is_due = True

    def copy_masters_to_weights(self) -> None:
        """Start to give every rank the weights of all masters."""
        self._start_gathers(self.buckets)

    def _trained_buckets(self) -> list[_Bucket]:
        return [bucket for bucket in self.buckets if bucket.trains]

    @torch.no_grad()
    def _start_gathers(self, buckets: Sequence[_Bucket]) -> None:
        self._is_due = False
        for bucket in reversed(buckets):
            if bucket.own_weights.dtype != bucket.master.dtype:
                bucket.own_weights.copy_(bucket.master)
            in_flight = InFlight(*bucket.divided_over.start_all_gather(bucket.own_weights, into=bucket.weights))
            self._gathers.append((bucket, in_flight))

    def finish_step(self) -> None:
        self._wait_for(self.buckets)

    def _add_gradient(self, parameter: nn.Parameter) -> None:
        gradient, parameter.grad = parameter.grad, None
        # None if `_add_product` has added it. Of a tied embedding, the other stage's copy may be frozen.
        if gradient is not None and parameter in self._sums:
            self._add(parameter, lambda total, first: total.copy_(gradient) if first else total.add_(gradient))

    def _add_product(self, parameter: Tensor, a: Tensor, b: Tensor) -> None:
        self._add(parameter, lambda total, first: add_product(total, a, b, replace=first))

    @torch.no_grad()
    def _add(self, parameter: Tensor, add: Callable[[Tensor, bool], object]) -> None:
        """Call `add` with the parameter's sum, and whether it replaces those of an earlier step."""
        segment, total = self._sums[parameter]
        earlier = self._added.get(parameter, 0)
        count = self._added[parameter] = earlier + 1 if self._counts else earlier
        if count > self._micro_batches:
            raise RuntimeError(f"gradient {count} of a parameter in a step of {self._micro_batches} backward passes")
        add(total, earlier == 0)
        if total.is_cuda:
            segment.streams.add(torch.cuda.current_stream())
        segment.unfinished -= count == self._micro_batches
        for ready in self._trained[len(self._reduces) :]:
            if ready.unfinished or ready.bucket.copies is not None:
                break
            self._start_reduce(ready)

    @torch.no_grad()
    def _start_reduce(self, segment: _Segment) -> None:
        gradients, bucket = segment.gradients, segment.bucket
        assert gradients is not None
        for parameter in segment.parameters:
            if parameter not in self._added:
                self._sums[parameter][1].zero_()
        for stream in segment.streams:
            torch.cuda.current_stream().wait_stream(stream)
        segment.streams.clear()
        if bucket.copies is not None:
            bucket.copies.all_reduce(gradients)
        if self.shards and len(gradients) == len(bucket.weights):
            started = bucket.reduce_over.start_reduce_scatter(gradients, into=segment.master.grad)
            self._reduces.append(InFlight(*started))
        else:
            self._reduces.append(InFlight(gradients, bucket.reduce_over.start_all_reduce(gradients)))

    def _wait_for(self, buckets: Iterable[_Bucket]) -> None:
        if self._is_due:
            self._start_gathers(self._trained_buckets())
        while self._gathers and any(bucket is waiting for bucket in buckets for waiting, _ in self._gathers):
            _, in_flight = self._gathers.popleft()
            in_flight.wait()


def _cut(
    parameters: Sequence[nn.Parameter], bucket_numbers: int, alone: nn.Parameter | None
) -> Iterator[list[nn.Parameter]]:
    """Yield successive parameters of together at most `bucket_numbers` elements; `alone` shares with no other."""
    part: list[nn.Parameter] = []
    for parameter in parameters:
        numbers = sum(weight.numel() for weight in (*part, parameter))
        if part and (numbers > bucket_numbers or parameter is alone or part[0] is alone):
            yield part
            part = []
        part.append(parameter)
    if part:
        yield part

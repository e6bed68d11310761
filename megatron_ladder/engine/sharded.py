"""ZeRO stages 0 and 1 with their communication under computation.

Parameters are stored in buckets: contiguous vectors of weights and of their fp32 gradients. In stage 1, each
data-parallel rank owns an equal part of every bucket, whose master weights and moments it holds and updates. In stage
0, an all-reduce replaces the two collectives, and every rank updates the whole bucket.

    compute   [ backward of the last micro-batch ][ norm, clip, step ][ forward of the next step
    wire          [ reduce-scatter ... ]                                [ all-gather ... ]

A bucket is reduced when its last gradient of the step has been added. All ranks start the reduces in the same order, in
which backward completes the buckets. After the update the weights are gathered in the opposite order, in which forward
reads them, and every module waits for its weights before it runs.
"""

import functools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from megatron_ladder.checkpoint.optimizer_state import Span
from megatron_ladder.comm.group import CommGroup
from megatron_ladder.comm.inflight import InFlight
from megatron_ladder.comm.mesh import ProcessMesh
from megatron_ladder.engine.state import ZeroOptimizer
from megatron_ladder.model.language_model import LanguageModel
from megatron_ladder.parallel.products import SUM, add_product


class _Bucket:
    """Parameters of one group whose gradients are reduced together.

    Attributes:
        parameters: their weights are views of `weights`.
        offsets: index of the first element of each parameter.
        weights: flat, in the precision of the model, padded to a multiple of the number of ranks.
        own_weights: this rank's part of `weights`.
        gradients: summed over micro-batches, flat, fp32; this rank's part is then summed over the ranks, in place.
        master: this rank's part in fp32, with its gradient. In an fp32 model it is `own_weights`.
        reduce_over: ranks with the same parameters and other samples.
        divided_over: ranks that own a part of the bucket each: those of `reduce_over`, or this rank alone.
        copies: pipeline stages with copies of the parameters, over which gradients are summed first.
        unfinished: number of parameters that will get another gradient in this step.
        streams: CUDA streams that have added gradients.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], dtype: torch.dtype, mesh: ProcessMesh, shards: bool, is_copied: bool
    ) -> None:
        self.parameters = parameters
        self.reduce_over = mesh.data
        self.divided_over = divided_over = mesh.data if shards else CommGroup.alone()
        self.copies = mesh.ends if is_copied else None
        *self.offsets, length = accumulate((parameter.numel() for parameter in parameters), initial=0)
        own_length = -(-length // divided_over.size)
        self.weights = torch.zeros(own_length * divided_over.size, dtype=dtype, device=parameters[0].device)
        self.gradients = torch.zeros_like(self.weights, dtype=torch.promote_types(dtype, torch.float32))
        for parameter, offset in zip(parameters, self.offsets, strict=True):
            view = self.weights.narrow(0, offset, parameter.numel()).view(parameter.shape)
            view.copy_(parameter.detach())
            parameter.data = view
        first = divided_over.rank * own_length
        self.own_weights = self.weights.narrow(0, first, own_length)
        self.master = nn.Parameter(self.own_weights.to(self.gradients.dtype))
        self.master.grad = self.gradients.narrow(0, first, own_length)
        self.unfinished = 0
        self.streams: set[Any] = set()


class ShardedOptimizer(ZeroOptimizer):
    """Reduces gradients into this rank's parts of the buckets, which torch's optimizer updates, and gathers weights.

    Attributes:
        shards: whether ranks divide the buckets (stage 1).
        buckets: in the order in which their gradients are reduced.
        groups: the parameter groups of this rank's parts, for `base`.
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

        `groups` are the parameter groups of the model, the last one of norms and biases.
        """
        super().__init__(model, mesh.data.rank == 0)
        self.shards = shards
        position = {parameter: index for index, parameter in enumerate(model.parameters())}
        tied = model.tied_weight if mesh.pipeline.size > 1 else None
        order: dict[_Bucket, tuple[bool, bool, int]] = {}
        self.groups: list[dict[str, Any]] = []
        for index, group in enumerate(groups):
            ordered = sorted(group["params"], key=position.__getitem__, reverse=True)
            # Norms and biases are the first weights to arrive, because some are read outside of their modules.
            is_last = index == len(groups) - 1
            buckets = []
            for parameters in _cut(ordered, bucket_numbers, tied):
                bucket = _Bucket(parameters, dtype, mesh, shards, parameters[0] is tied)
                buckets.append(bucket)
                order[bucket] = bucket.copies is not None, is_last, -position[parameters[-1]]
            self.groups.append({**group, "params": [bucket.master for bucket in buckets]})
        self.buckets = sorted(order, key=order.__getitem__)
        self._sums = {
            parameter: (bucket, bucket.gradients.narrow(0, offset, parameter.numel()).view(parameter.shape))
            for bucket in self.buckets
            for parameter, offset in zip(bucket.parameters, bucket.offsets, strict=True)
        }
        self._micro_batches = 0
        self._counts = True
        """Whether gradients are counted."""
        self._added: dict[nn.Parameter, int] = {}
        """Number of gradients of each parameter in this step."""
        self._reduces: list[InFlight] = []
        """Reduces in flight, of the first buckets."""
        self._gathers: deque[tuple[_Bucket, InFlight]] = deque()
        self.gathers_late = self._is_due = False
        for parameter, (_, total) in self._sums.items():
            parameter.register_post_accumulate_grad_hook(self._add_gradient)
            if total.dtype != parameter.dtype:
                setattr(parameter, SUM, functools.partial(self._add_product, parameter))
        for module in model.modules():
            needed = [self._sums[parameter][0] for parameter in module.parameters(recurse=False)]
            if needed:
                module.register_forward_pre_hook(lambda *_, needed=needed: self._wait_for(needed))

    @contextmanager
    def reducing(self, micro_batches: int) -> Iterator[None]:
        self._micro_batches = micro_batches
        self._added.clear()
        for bucket in self.buckets:
            bucket.unfinished = len(bucket.parameters)
        yield
        for bucket in self.buckets[len(self._reduces) :]:
            self._start_reduce(bucket)
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
        """Whether the reduces of some buckets have not started in this step."""
        return len(self._reduces) < len(self.buckets)

    def step(self) -> None:
        self.base.step()
        self._is_due = True
        if self.finishes_steps:
            self.finish_step()
        elif not self.gathers_late:
            self.copy_masters_to_weights()

    def discard_gradients(self) -> None:
        pass  # The first gradients of the next step replace these.

    def spans(self) -> Iterator[Span]:
        groups = {id(master): group for group in self.base.param_groups for master in group["params"]}
        owned = self.shards or self._is_first_copy
        for bucket in self.buckets:
            group = groups[id(bucket.master)]
            part = bucket.divided_over.rank
            yield from self._spans_in(group, bucket.parameters, bucket.offsets, bucket.master, part, owned)

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
        for bucket in self.buckets:
            bucket.streams.clear()

    def forget_capture(self) -> None:
        """Forget the collectives of a capture that has failed; the next forward pass gathers the weights again."""
        self._reduces.clear()
        self._gathers.clear()
        for bucket in self.buckets:
            bucket.streams.clear()
        self._is_due = True

    @torch.no_grad()
    def copy_masters_to_weights(self) -> None:
        """Start to give every rank the weights of all masters."""
        self._is_due = False
        for bucket in reversed(self.buckets):
            if bucket.own_weights.dtype != bucket.master.dtype:
                bucket.own_weights.copy_(bucket.master)
            in_flight = InFlight(*bucket.divided_over.start_all_gather(bucket.own_weights, into=bucket.weights))
            self._gathers.append((bucket, in_flight))

    def finish_step(self) -> None:
        self._wait_for(self.buckets)

    def _add_gradient(self, parameter: nn.Parameter) -> None:
        gradient, parameter.grad = parameter.grad, None
        # None if `_add_product` has added it.
        if gradient is not None:
            self._add(parameter, lambda total, first: total.copy_(gradient) if first else total.add_(gradient))

    def _add_product(self, parameter: nn.Parameter, a: Tensor, b: Tensor) -> None:
        self._add(parameter, lambda total, first: add_product(total, a, b, replace=first))

    @torch.no_grad()
    def _add(self, parameter: nn.Parameter, add: Callable[[Tensor, bool], object]) -> None:
        """Call `add` with the parameter's sum, and whether it replaces those of an earlier step."""
        bucket, total = self._sums[parameter]
        earlier = self._added.get(parameter, 0)
        count = self._added[parameter] = earlier + 1 if self._counts else earlier
        if count > self._micro_batches:
            raise RuntimeError(f"gradient {count} of a parameter in a step of {self._micro_batches} backward passes")
        add(total, earlier == 0)
        if total.is_cuda:
            bucket.streams.add(torch.cuda.current_stream())
        bucket.unfinished -= count == self._micro_batches
        for ready in self.buckets[len(self._reduces) :]:
            if ready.unfinished or ready.copies is not None:
                break
            self._start_reduce(ready)

    @torch.no_grad()
    def _start_reduce(self, bucket: _Bucket) -> None:
        for parameter in bucket.parameters:
            if parameter not in self._added:
                self._sums[parameter][1].zero_()
        for stream in bucket.streams:
            torch.cuda.current_stream().wait_stream(stream)
        bucket.streams.clear()
        if bucket.copies is not None:
            bucket.copies.all_reduce(bucket.gradients)
        if self.shards:
            started = bucket.reduce_over.start_reduce_scatter(bucket.gradients, into=bucket.master.grad)
            self._reduces.append(InFlight(*started))
        else:
            work = bucket.reduce_over.start_all_reduce(bucket.gradients)
            self._reduces.append(InFlight(bucket.gradients, work))

    def _wait_for(self, buckets: Iterable[_Bucket]) -> None:
        if self._is_due:
            self.copy_masters_to_weights()
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

"""Routed experts: of E gated MLPs, each token uses the k that the router chooses for it.

    scores   softmax or sigmoid of (x W_r^T + b_r), in fp32 at least, on every rank alike
    choice   the k highest scores (with a bias that only the choice sees; within the best groups of experts)
    y        sum over the chosen experts e of  weight_e * (down_e(silu(gate_e x) * up_e x) + b_e)

Tokens are sorted by expert, so that each matrix multiplies one block of rows (`parallel/products.py`). A rank holds a
part of the width of every expert, or whole experts; either way its y is a partial sum. So are all gradients inside: of
the input, of the chosen weights, and so of the router's matrix, which all ranks hold; the last one is summed with those
of the norms. The biases b_e are no sums over ranks: each enters the partial sum of one rank, which has its gradient.

Expert-parallel ranks hold whole experts and exchange tokens instead (`DividedExperts`): each rank routes its own
tokens, sends each one to the ranks of its experts, and adds up what returns, in the order of the choices. There, the
gradients of the router are sums over this rank's tokens, as those of norms.

Layouts: x [s, b, h]; n = s b tokens; scores [s, b, E]; rows of tokens sorted by expert [n k, ...].
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megatron_ladder.blueprint.model import ModelConfig
from megatron_ladder.blueprint.specs import Branch
from megatron_ladder.blueprint.tensors import SubBlockTensors, kept_expert_rows
from megatron_ladder.blueprint.wiring import BranchKind
from megatron_ladder.comm.group import CommGroup
from megatron_ladder.comm.inflight import InFlight
from megatron_ladder.comm.stream import Crossing, copy_to_tensor_parallel_region, share_gradient, start_exchange
from megatron_ladder.model.bodies import MLP, MixerBody
from megatron_ladder.model.operations import BALANCING_LOSS, ROUTER_Z_LOSS, BuildContext
from megatron_ladder.model.stats import PassStats
from megatron_ladder.model.sub_block import Body, BodyOutput, SentInput, SequenceContext
from megatron_ladder.parallel.layout import ParallelModule
from megatron_ladder.parallel.products import (
    ExpertPass,
    ExpertWeights,
    InputGradient,
    SortedRows,
    linear,
    reads_on_host,
    run_experts,
)

_PARALLEL_BODIES: dict[BranchKind, type[Body]] = {BranchKind.MIXER: MixerBody, BranchKind.MLP: MLP}
"""Bodies of what a sub-block computes besides routed experts."""


class Router(ParallelModule):
    """The matrix [E, h] of the router, its bias [E] if it has one, and the bias that follows the loads of the experts.

    Attributes:
        expert_bias: what the choice adds to the scores, [E] fp32, or None.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    expert_bias: Tensor | None

    def __init__(self, build: BuildContext, branch: Branch) -> None:
        super().__init__(build)
        for name in ("weight", "bias"):
            tensors = [branch.router[name]] if name in branch.router else []
            # Each rank has the gradient of its part of the experts' outputs.
            self.add_parameter(name, tensors, build, is_partial=True)
        if "expert_bias" in branch.router:
            self.add_state("expert_bias", branch.router["expert_bias"], build)
        else:
            self.expert_bias = None

    def forward(self, x: Tensor, input_gradient: InputGradient | None = None) -> Tensor:
        """[s, b, h] -> logits [s, b, E] in fp32, or fp64 for an fp64 model."""
        return linear(x, self.weight, self.bias, input_gradient, wide=True)


class _ExpertMatrices(ParallelModule):
    """The stacked matrices of all experts that this rank holds, or its part of the width of each, and their biases."""

    gate: nn.Parameter
    up: nn.Parameter
    down: nn.Parameter
    gate_bias: nn.Parameter | None
    up_bias: nn.Parameter | None
    down_bias: nn.Parameter | None

    def __init__(self, build: BuildContext, branch: Branch) -> None:
        super().__init__(build, routed=True)
        self.swiglu = build.operations.swiglu
        self.sink = build.gradient_sink
        whole = build.experts.sharding == "experts" or build.mesh.experts.size > 1
        for name, matrix in (*branch.inputs.items(), ("down", branch.output)):
            for attribute, tensor in ((name, matrix.weight), (f"{name}_bias", matrix.bias)):
                tensors = [] if tensor is None else [replace(tensor, sharded_dim=0) if whole else tensor]
                # Of biases that all ranks hold, each rank adds some.
                self.add_parameter(attribute, tensors, build, is_partial=True)
        self.first = self.sections["gate"][0].start if whole else 0
        self.count = self.gate.shape[0]


class _SummedMatrices(_ExpertMatrices):
    """The matrices of a tensor-parallel rank, which computes its part of the output of every token."""

    def __init__(self, build: BuildContext, branch: Branch) -> None:
        super().__init__(build, branch)
        self.has_all = self.count == build.config.num_experts
        rank, ranks = self.group.rank, self.group.size
        first, last = (build.config.num_experts * each // ranks for each in (rank, rank + 1))
        self.added_biases = range(first, last)
        self.kept_rows = kept_expert_rows(build.config.num_experts // self.count)

    def forward(
        self, x: Tensor, chosen: Tensor, weights: Tensor, input_gradient: InputGradient | None = None
    ) -> Tensor:
        """x [s, b, h], and the experts and weights of each token [s, b, k], -> this rank's part of y [s, b, h]."""
        rows = SortedRows.of(chosen, self.first, self.count, self.has_all)
        kept_rows = math.ceil(self.kept_rows * chosen.numel())
        matrices = ExpertWeights(self.gate, self.up, self.down, self.gate_bias, self.up_bias)
        partial = run_experts(x, matrices, weights, ExpertPass(rows, kept_rows, self.swiglu, self.sink, input_gradient))
        if self.down_bias is None:
            return partial
        return partial + self._weigh_biases(chosen, weights) @ self.down_bias

    def _weigh_biases(self, chosen: Tensor, weights: Tensor) -> Tensor:
        """Return the factor of each expert's down bias that this rank adds for each token, [s, b, local experts]."""
        is_added = (chosen >= self.added_biases.start) & (chosen < self.added_biases.stop)
        # One column more, for experts whose biases other ranks add.
        columns = torch.where(is_added, chosen - self.first, self.count)
        factors = weights.new_zeros(*chosen.shape[:-1], self.count + 1).scatter(-1, columns, weights)
        return factors[..., :-1].to(self.down.dtype)


class _DividedMatrices(_ExpertMatrices):
    """The matrices of an expert-parallel rank, which computes rows of its experts only."""

    def forward(self, rows: Tensor, experts: Tensor, input_gradient: InputGradient | None, has_padding: bool) -> Tensor:
        """Return the weighted output of one local expert for each row [m, h + 1], which ends in its weight.

        Nothing reads the output of padding, which has no local expert.
        """
        sorted_rows = SortedRows.of(experts.unsqueeze(-1), 0, self.count, all_local=not has_padding)
        matrices = ExpertWeights(self.gate, self.up, self.down, self.gate_bias, self.up_bias, self.down_bias)
        return run_experts(
            rows, matrices, None, ExpertPass(sorted_rows, len(rows), self.swiglu, self.sink, input_gradient)
        )


class _Choice(NamedTuple):
    """What a router finds for the tokens of a micro-batch."""

    chosen: Tensor
    """The experts of each token, [s, b, k]."""
    weights: Tensor
    """[s, b, k]"""
    stats: PassStats
    kept: tuple[Tensor, ...]
    """What a repetition does not find again."""


class _RoutedExperts(nn.Module):
    """Router and experts.

    Attributes:
        sequence: ranks that route different positions of the same sequences, if expert-parallel ranks divide the
            experts. All their sums are parts then; otherwise the tensor-parallel ranks route all positions alike.
    """

    def __init__(self, build: BuildContext, tensors: SubBlockTensors, branch: Branch) -> None:
        super().__init__()
        self.config = build.config
        self.options = build.experts
        self.layer = tensors.layer
        self.sums_input = build.mesh.stream.shards == 1
        self.sequence = build.mesh.tensor if tensors.wired.moves_tokens else None
        self.router = Router(build, branch)
        self.matrices = (_DividedMatrices if tensors.wired.moves_tokens else _SummedMatrices)(build, branch)

    def forward(
        self, normed: Tensor, context: SequenceContext, input_gradient: InputGradient | None, earlier: Sequence[Tensor]
    ) -> BodyOutput:
        """Return what `Experts` does without its other branches; `earlier`: what an earlier run kept."""
        x = normed
        if input_gradient is None and self.sums_input:
            x = copy_to_tensor_parallel_region(normed, self.router.group)
        chosen, weights, stats, kept = self.route(x, context, input_gradient, earlier)
        return BodyOutput(self.matrices(x, chosen, weights, input_gradient), stats, kept)

    def route(
        self,
        x: Tensor,
        context: SequenceContext,
        input_gradient: InputGradient | None = None,
        earlier: Sequence[Tensor] = (),
    ) -> _Choice:
        """Choose the experts of tokens x [s, b, h]; `earlier`: what an earlier choice kept."""
        logits = self.router(x, input_gradient)
        scores = logits.softmax(-1) if self.config.moe_router_score_function == "softmax" else logits.sigmoid()
        chosen, *loads = earlier or (_choose(self.config, scores.detach(), self.router.expert_bias),)
        stats = PassStats()
        if context.counts:
            counted = self._counted(chosen, context.token_mask)
            loads = loads or [self._loads(chosen, counted)]
            stats = self._stats(logits, scores, counted, *loads)
        return _Choice(chosen, self._weights(scores, chosen), stats, (chosen, *loads))

    def _weights(self, scores: Tensor, chosen: Tensor) -> Tensor:
        weights = scores.gather(-1, chosen)
        if not self.config.moe_router_unnormalized:
            total = weights.sum(-1, keepdim=True)
            # Sigmoids can all be zero.
            weights = weights / (total + 1e-20 if self.config.moe_router_score_function == "sigmoid" else total)
        return weights * self.config.moe_router_topk_scaling_factor

    def _counted(self, chosen: Tensor, token_mask: Tensor | None) -> Tensor:
        """Return for each token, [s, b], whether it counts in losses and loads: 1, or 0 for padding."""
        if token_mask is None:
            return torch.ones_like(chosen[..., 0])
        if self.sequence is not None:
            token_mask = token_mask.chunk(self.sequence.size)[self.sequence.rank]
        return token_mask.long()

    def _loads(self, chosen: Tensor, counted: Tensor) -> Tensor:
        """Return how many tokens of each sequence chose each expert, [b, E]."""
        loads = _count(chosen, counted, self.config.num_experts)
        return loads if self.sequence is None else self.sequence.all_reduce(loads)

    def _stats(self, logits: Tensor, scores: Tensor, counted: Tensor, loads: Tensor) -> PassStats:
        """Return losses and loads.

        The balancing loss of a sequence of n tokens is n E sum f P (arXiv 2101.03961), where f is each expert's
        share of the choices, and P its mean score.
        """
        options = self.options
        top = self.config.moe_router_topk
        losses = {}
        if options.balancing:
            shares = (scores / scores.sum(-1, keepdim=True) * counted.unsqueeze(-1)).sum(0)
            balanced = loads
            if options.balancing_of == "aux_loss":
                shares, balanced = (each.sum(0, keepdim=True) for each in (shares, loads))
            tokens = balanced.sum(-1) // top
            unbalanced = ((balanced * shares).sum(-1) / tokens.clamp(min=1)).sum()
            losses[BALANCING_LOSS] = options.balancing * scores.shape[-1] / top * unbalanced
        if options.z_loss:
            losses[ROUTER_Z_LOSS] = options.z_loss * (logits.logsumexp(-1).square() * counted).sum()
        if self.sequence is None:
            # Every rank computes the losses.
            losses = {name: share_gradient(loss, self.router.group) for name, loss in losses.items()}
        return PassStats(losses, {self.layer: loads.sum(0)})


class Experts(Body):
    """Routed experts, and beside them attention, a shared expert or both: one norm, and one sum of all outputs."""

    def __init__(self, build: BuildContext, number: int, tensors: SubBlockTensors) -> None:
        super().__init__()
        self.parallel_bodies = nn.ModuleList()
        for branch in tensors.branches:
            if branch.kind is BranchKind.EXPERTS:
                self.routed = _RoutedExperts(build, tensors, branch)
            else:
                body = _PARALLEL_BODIES[branch.kind](build, number, replace(tensors, branches=(branch,)))
                self.parallel_bodies.append(body)

    def forward(
        self,
        normed: Tensor,
        context: SequenceContext,
        input_gradient: InputGradient | None = None,
        *earlier: Tensor,
    ) -> BodyOutput:
        """See `Body`; what it keeps are the experts of each token, [s, b, k], and loads. Recomputation does not choose
        again."""
        routed: BodyOutput = self.routed(normed, context, input_gradient, earlier)
        others = [body(normed, context, input_gradient).partial for body in self.parallel_bodies]
        return routed._replace(partial=functools.reduce(torch.add, others, routed.partial))


class _TokenExchange:
    """The crossing of divided experts: tokens travel to the ranks of their experts, and products return.

    Layouts: tokens [s, b, h]; rows [m, h], sorted by source rank, then expert. What travels with the tokens of an input
    are the weights of their choices: sent are [s, b, h + k], and received rows [m, h + 1]. In backward, the gradient of
    an output travels as tokens, and that of an input returns as [m, h + 1], summed over the choices of each token, with
    the gradients of the weights.

    Without a capacity, the host reads how many rows it sends and receives. With one, every rank sends so many rows of
    each expert. Some are padding: rows that no expert multiplies, and whose results nothing reads.

    Attributes:
        counts: how many rows of each expert this rank sends, without padding and limit, [ranks, local experts].
        kept: the choices and loads.
    """

    def __init__(
        self,
        group: CommGroup,
        chosen: Tensor,
        experts: int,
        width: int,
        kept: tuple[Tensor, ...],
        capacity: int | None,
    ) -> None:
        """Send the numbers of rows ahead; `chosen` [s, b, k] of so many experts, for tokens of this width."""
        self.kept = kept
        self._group = group
        self._width = width
        self._capacity = capacity
        self._rows = SortedRows.of(chosen, 0, experts, all_local=True)
        self.counts = self._rows.counts.view(group.size, -1)
        each = [1] * group.size
        self._arriving = InFlight(*group.start_all_to_all(self.counts, each, each))
        if capacity is not None:
            self._rows = self._rows.padded(capacity)

    @functools.cached_property
    def _received_counts(self) -> Tensor:
        return self._arriving.wait()

    @functools.cached_property
    def _splits(self) -> tuple[list[int], list[int]]:
        """How many rows go to and come from each rank; the only time when the host waits for the choices."""
        if self._capacity is not None:
            each = [self.counts.shape[1] * self._capacity] * self._group.size
            return each, each
        sent, received = torch.stack([self.counts.sum(1), self._received_counts.sum(1)]).tolist()
        return sent, received

    @functools.cached_property
    def arguments(self) -> tuple[Tensor, ...]:
        """The local expert of each row, [m]; padding has the number after the last one."""
        counts = self._received_counts
        ranks, experts = counts.shape
        numbers = torch.arange(experts, device=counts.device)
        if self._capacity is None:
            _, received = self._splits
            return (numbers.repeat(ranks).repeat_interleave(counts.flatten(), output_size=sum(received)),)
        is_row = torch.arange(self._capacity, device=counts.device) < counts.unsqueeze(-1)
        return (torch.where(is_row, numbers.unsqueeze(-1), experts).flatten(),)

    def start_read(self, stream: Tensor) -> InFlight:
        """See `Crossing`."""
        sent, received = self._splits
        tokens, weights = stream.flatten(0, -2).tensor_split([self._width], dim=-1)
        rows = tokens[self._rows.tokens]
        if weights.shape[-1]:
            rows = torch.cat([rows, self._rows.sort(weights).unsqueeze(-1)], dim=-1)
        return start_exchange(rows, sent, received, self._group)

    def start_write(self, partial: Tensor) -> InFlight:
        """See `Crossing`."""
        sent, received = self._splits
        return start_exchange(partial, received, sent, self._group)._replace(finish=self._sum_choices)

    def _sum_choices(self, rows: Tensor) -> Tensor:
        products, weights = rows.tensor_split([self._width], dim=-1)
        total = self._rows.sum_by_token(products)
        if not weights.shape[-1]:
            return total
        return torch.cat([total, weights[self._rows.back].view(self._rows.shape)], dim=-1)


class DividedExperts(Body):
    """Routed experts of which each expert-parallel rank has some; also the border where it chooses and sends tokens.

    Attributes:
        capacity: how many rows each rank sends to each expert in training, used or not; None: as many as are used.
    """

    def __init__(self, build: BuildContext, number: int, tensors: SubBlockTensors) -> None:
        super().__init__()
        (branch,) = tensors.branches
        self.group = build.mesh.experts
        self.capacity = build.experts.capacity
        self.routed = _RoutedExperts(build, tensors, branch)

    @property
    def trains(self) -> bool:
        """See `Border`."""
        return any(weight.requires_grad for weight in self.routed.router.parameters())

    def open(self, normed: Tensor, context: SequenceContext, earlier: Crossing | None = None) -> SentInput:
        """See `Border`."""
        chosen, weights, stats, kept = self.routed.route(normed, context, earlier=earlier.kept if earlier else ())
        sent = torch.cat([normed, weights.to(normed.dtype)], dim=-1)
        if earlier is not None:
            return SentInput(sent, earlier, stats)
        experts, capacity = self.routed.config.num_experts, self._capacity(context)
        crossing = _TokenExchange(self.group, chosen, experts, normed.shape[-1], kept, capacity)
        if capacity is not None:
            stats = stats._replace(most_rows=crossing.counts.max())
        return SentInput(sent, crossing, stats)

    def forward(
        self, rows: Tensor, context: SequenceContext, input_gradient: InputGradient | None, experts: Tensor
    ) -> BodyOutput:
        """Received rows [m, h + 1] of these local experts [m] -> their weighted products [m, h]."""
        has_padding = self._capacity(context) is not None
        return BodyOutput(self.routed.matrices(rows, experts, input_gradient, has_padding))

    def _capacity(self, context: SequenceContext) -> int | None:
        # A step can be repeated, a pass without backward cannot.
        return self.capacity if context.counts else None


def waits_for_choices(model: nn.Module) -> bool:
    """Whether the host waits in a training pass on CUDA until experts are chosen, so that no graph can contain it."""
    modules = [*model.modules()]
    reads_counts = any(isinstance(module, DividedExperts) and module.capacity is None for module in modules)
    return reads_counts or any(reads_on_host(module.gate) for module in modules if isinstance(module, _ExpertMatrices))


def _choose(config: ModelConfig, scores: Tensor, bias: Tensor | None) -> Tensor:
    """Return the experts of each token: scores [s, b, E] -> [s, b, k] int64.

    Groups are ranked as in DeepSeek-V3, or without a bias as in DeepSeek-V2.
    """
    if bias is not None:
        scores = scores + bias
    groups = config.moe_router_num_groups
    if groups > 1:
        grouped = scores.unflatten(-1, (groups, -1))
        group_scores = grouped.amax(-1) if bias is None else grouped.topk(2, dim=-1).values.sum(-1)
        best = group_scores.topk(config.moe_router_group_topk, dim=-1).indices
        outside = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter(-1, best, False)
        scores = grouped.masked_fill(outside.unsqueeze(-1), -torch.inf).flatten(-2)
    return scores.topk(config.moe_router_topk, dim=-1).indices


def _count(chosen: Tensor, counted: Tensor, experts: int) -> Tensor:
    """Return how many tokens of each sequence chose each expert, [b, E]; the host does not wait.

    `chosen` is [s, b, k], and `counted` [s, b] is 1, or 0 for padding.
    """
    loads = torch.zeros(chosen.shape[1], experts, dtype=torch.int64, device=chosen.device)
    counts = counted.unsqueeze(-1).expand_as(chosen)
    return loads.scatter_add_(1, *(each.transpose(0, 1).flatten(1) for each in (chosen, counts)))

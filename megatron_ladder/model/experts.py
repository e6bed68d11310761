"""Routed experts: of E gated MLPs, each token uses the k that the router chooses for it.

    scores   softmax or sigmoid of (x W_r^T + b_r), in fp32 at least, on every rank alike
    choice   the k highest scores (with a bias that only the choice sees; within the best groups of experts)
    y        sum over the chosen experts e of  weight_e * (down_e(silu(gate_e x) * up_e x) + b_e)

Tokens are sorted by expert, so that each matrix multiplies one block of rows (`parallel/products.py`). A rank holds a
part of the width of every expert, or whole experts; either way its y is a partial sum. So are all gradients inside: of
the input, of the chosen weights, and so of the router's matrix, which all ranks hold; the last one is summed with those
of the norms. The biases b_e are no sums over ranks: each enters the partial sum of one rank, which has its gradient.

Layouts: x [s, b, h]; n = s b tokens; scores [s, b, E]; rows of tokens sorted by expert [n k, ...].
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from megatron_ladder.blueprint.model import ModelConfig
from megatron_ladder.blueprint.specs import Branch
from megatron_ladder.blueprint.tensors import SubBlockTensors, kept_expert_rows
from megatron_ladder.blueprint.wiring import BranchKind
from megatron_ladder.comm.stream import copy_to_tensor_parallel_region
from megatron_ladder.model.bodies import MLP, MixerBody
from megatron_ladder.model.operations import BALANCING_LOSS, ROUTER_Z_LOSS, BuildContext
from megatron_ladder.model.stats import PassStats
from megatron_ladder.model.sub_block import Body, BodyOutput, SequenceContext
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
        whole = build.experts.sharding == "experts" or build.mesh.experts.size > 1
        for name, matrix in (*branch.inputs.items(), ("down", branch.output)):
            for attribute, tensor in ((name, matrix.weight), (f"{name}_bias", matrix.bias)):
                tensors = [] if tensor is None else [replace(tensor, sharded_dim=0) if whole else tensor]
                # Of biases that all ranks hold, each rank adds some.
                self.add_parameter(attribute, tensors, build, is_partial=True)
        self.first = self.sections["gate"][0].start if whole else 0
        self.count = self.gate.shape[0]
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
        partial = run_experts(x, matrices, weights, ExpertPass(rows, kept_rows, self.swiglu, input_gradient))
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


class _RoutedExperts(nn.Module):
    """Router and experts."""

    def __init__(self, build: BuildContext, tensors: SubBlockTensors, branch: Branch) -> None:
        super().__init__()
        self.config = build.config
        self.options = build.experts
        self.layer = tensors.layer
        self.sums_input = build.mesh.stream.shards == 1
        self.router = Router(build, branch)
        self.matrices = _ExpertMatrices(build, branch)

    def forward(
        self, normed: Tensor, context: SequenceContext, input_gradient: InputGradient | None, choice: Sequence[Tensor]
    ) -> BodyOutput:
        """Return what `Experts` does without its other branches; `choice` may contain the experts of each token."""
        x = normed
        if input_gradient is None and self.sums_input:
            x = copy_to_tensor_parallel_region(normed, self.router.group)
        logits = self.router(x, input_gradient)
        scores = logits.softmax(-1) if self.config.moe_router_score_function == "softmax" else logits.sigmoid()
        (chosen,) = choice or (_choose(self.config, scores.detach(), self.router.expert_bias),)
        stats = self._stats(logits, scores, chosen, context.token_mask) if context.counts else PassStats()
        return BodyOutput(self.matrices(x, chosen, self._weights(scores, chosen), input_gradient), stats, (chosen,))

    def _weights(self, scores: Tensor, chosen: Tensor) -> Tensor:
        weights = scores.gather(-1, chosen)
        if not self.config.moe_router_unnormalized:
            total = weights.sum(-1, keepdim=True)
            # Sigmoids can all be zero.
            weights = weights / (total + 1e-20 if self.config.moe_router_score_function == "sigmoid" else total)
        return weights * self.config.moe_router_topk_scaling_factor

    def _stats(self, logits: Tensor, scores: Tensor, chosen: Tensor, token_mask: Tensor | None) -> PassStats:
        """Return losses and loads.

        The balancing loss of a sequence of n tokens is n E sum f P (arXiv 2101.03961), where f is each expert's
        share of the choices, and P its mean score.
        """
        options = self.options
        counted = torch.ones_like(chosen[..., 0]) if token_mask is None else token_mask.long()
        loads = _count(chosen, counted, scores.shape[-1])
        losses = {}
        if options.balancing:
            shares = (scores / scores.sum(-1, keepdim=True) * counted.unsqueeze(-1)).sum(0)
            balanced = loads
            tokens = counted.sum(0)
            if options.balancing_of == "aux_loss":
                shares, balanced, tokens = (each.sum(0, keepdim=True) for each in (shares, loads, tokens))
            unbalanced = ((balanced * shares).sum(-1) / tokens.clamp(min=1)).sum()
            losses[BALANCING_LOSS] = options.balancing * scores.shape[-1] / chosen.shape[-1] * unbalanced
        if options.z_loss:
            losses[ROUTER_Z_LOSS] = options.z_loss * (logits.logsumexp(-1).square() * counted).sum()
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
        *earlier_choice: Tensor,
    ) -> BodyOutput:
        """See `Body`; what it keeps are the experts of each token, [s, b, k]. Recomputation does not choose again."""
        routed: BodyOutput = self.routed(normed, context, input_gradient, earlier_choice)
        others = [body(normed, context, input_gradient).partial for body in self.parallel_bodies]
        return routed._replace(partial=functools.reduce(torch.add, others, routed.partial))


def waits_for_choices(model: nn.Module) -> bool:
    """Whether the host waits in a pass on CUDA until experts are chosen, so that no graph can contain it."""
    return any(reads_on_host(module.gate) for module in model.modules() if isinstance(module, _ExpertMatrices))


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

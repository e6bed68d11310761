"""Training of the reference model: AdamW with clipping by the global norm, in independent arithmetic."""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from tests.reference.experts import Routed
from tests.reference.model import ReferenceConfig, Sight, Weights, reference_gradients, reference_logits, token_count
from tests.reference.mtp import drafting_logits, drafting_targets

MicroBatch = tuple[Tensor, Tensor, Tensor] | tuple[Tensor, Tensor, Tensor, Sight]
"""Token ids, labels and loss mask, each [b, s]; and optionally the visible tokens."""
LossAndGradients = Callable[..., tuple[Tensor, Mapping[str, Tensor]]]
"""A function with the arguments of `reference_gradients`; its loss may be several losses, [k]."""


def reference_training(
    weights: Weights,
    config: ReferenceConfig,
    batches: Sequence[Sequence[MicroBatch]],
    learning_rate: Callable[[int], float],
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    clip: float,
    no_decay: Callable[[str], bool],
    gradients_of: LossAndGradients = reference_gradients,
) -> tuple[list[tuple[float, ...]], dict[str, Tensor]]:
    """Train over `batches`, one optimizer step for each.

    AdamW is algorithm 2 of Loshchilov and Hutter (arXiv 1711.05101), with weight decay multiplied by the
    learning rate. Everything is kept in the dtype of the weights.

    Args:
        batches: the global batch of each step as micro-batches, those of all data-parallel ranks included. The
            losses are divided by the number of unmasked targets, or of tokens, of the whole global batch.
        learning_rate: of an iteration, counted from 1.
        clip: maximum of the gradient's global norm; 0 disables clipping.
        no_decay: whether the weight of this name is exempt from weight decay.
        gradients_of: returns the losses to report, and the gradients to follow.

    Returns:
        Loss, gradient norm (before clipping) and further losses of each step, and the final weights.
    """
    current = {name: weight.detach().clone() for name, weight in weights.items()}
    first_moment = {name: torch.zeros_like(weight) for name, weight in current.items()}
    second_moment = {name: torch.zeros_like(weight) for name, weight in current.items()}
    history = []
    for iteration, batch in enumerate(batches, start=1):
        losses, gradients = _accumulate(current, config, batch, gradients_of)
        biases = _moved_biases(current, config, batch)
        norm = math.sqrt(sum(float((gradient.double() ** 2).sum()) for gradient in gradients.values()))
        scale = clip / norm if 0 < clip < norm else 1.0
        rate = learning_rate(iteration)
        for name, gradient in gradients.items():
            clipped = gradient * scale
            first_moment[name] = betas[0] * first_moment[name] + (1 - betas[0]) * clipped
            second_moment[name] = betas[1] * second_moment[name] + (1 - betas[1]) * clipped**2
            mean = first_moment[name] / (1 - betas[0] ** iteration)
            mean_square = second_moment[name] / (1 - betas[1] ** iteration)
            decay = 0.0 if no_decay(name) else weight_decay
            weight = current[name] * (1 - rate * decay)
            current[name] = weight - rate * mean / (mean_square.sqrt() + eps)
        current |= biases
        history.append((losses[0], norm, *losses[1:]))
    return history, current


def _accumulate(
    weights: Weights, config: ReferenceConfig, batch: Sequence[MicroBatch], gradients_of: LossAndGradients
) -> tuple[list[float], dict[str, Tensor]]:
    targets = sum(float(loss_mask.sum()) for _, _, loss_mask, *_ in batch)
    all_tokens = sum(token_count(tokens, *sight) for tokens, _, _, *sight in batch)
    totals: dict[str, Tensor] = {}
    if config.mtp_num_layers:
        targets_of = [drafting_targets(config, mask, *sight) for _, _, mask, *sight in batch]
        totals["total_drafting_targets"] = torch.tensor([[part.sum() for part in parts] for parts in targets_of]).sum(0)
    total_losses = torch.zeros(1, dtype=torch.float64)
    total: dict[str, Tensor] = {}
    for tokens, labels, loss_mask, *sight in batch:
        losses, gradients = gradients_of(
            weights, config, tokens, labels, loss_mask, targets, all_tokens, *sight, **totals
        )
        total_losses = total_losses + losses.double()
        for name, gradient in gradients.items():
            total[name] = total[name] + gradient if name in total else gradient
    return total_losses.tolist(), total


def _moved_biases(weights: Weights, config: ReferenceConfig, batch: Sequence[MicroBatch]) -> dict[str, Tensor]:
    """Return the experts' biases after a step: those of experts with more tokens than the mean fall, others rise."""
    loads: dict[str, Tensor] = defaultdict(lambda: torch.zeros(config.num_experts))
    if config.moe_router_enable_expert_bias:
        for tokens, _, _, *sight in batch:
            record: list[Routed] = []
            reference_logits(weights, config, tokens, *sight, record=record)
            if config.mtp_num_layers:
                drafting_logits(weights, config, tokens, *sight, record=record)
            for routed in record:
                loads[f"{routed.layer}.router.expert_bias"] += routed.loads
    rate = config.moe_router_bias_update_rate
    return {name: weights[name] + rate * torch.sign(load.mean() - load) for name, load in loads.items()}

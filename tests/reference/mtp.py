"""The drafting head in plain arithmetic: position i predicts token i + 2 from the stream at i and token i + 1.

At depth d, counted from 0, it predicts token i + 2 + d from its output at depth d - 1 and token i + 1 + d.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from tests.reference.attention import linear, model_norm
from tests.reference.experts import Routed
from tests.reference.model import (
    ReferenceConfig,
    Sight,
    Weights,
    last_stream,
    logits_of,
    reference_logits,
    reference_loss,
    sub_blocks_of,
    with_head_layer,
)


def drafting_logits(
    weights: Weights,
    config: ReferenceConfig,
    tokens: Tensor,
    sight: Sight | None = None,
    record: list[Routed] | None = None,
) -> list[Tensor]:
    """Return the logits [b, s - 1 - d, V] of each depth d for tokens [b, s]: those of token d + 2 up to token s."""
    words, head = weights["embedding.weight"], _output_head(weights, config)
    x = _read_stream(weights, config, tokens, sight)
    if config.mtp_detach_heads:
        words, x, head = words.detach(), x.detach(), head.detach()
    logits = []
    for depth in range(config.mtp_depths):
        # The last positions have no such token in the row; in the product they read token 0.
        following = torch.zeros_like(tokens)
        following[:, : -1 - depth] = tokens[:, 1 + depth :]
        x = _layer_output(weights, config, _layer_input(weights, config, words[following], x), sight, record)
        logits.append(logits_of(x, head, config)[:, : -1 - depth])
    return logits


def _output_head(weights: Weights, config: ReferenceConfig) -> Tensor:
    return weights["embedding.weight" if config.tie_embeddings else "lm_head.weight"]


def _read_stream(weights: Weights, config: ReferenceConfig, tokens: Tensor, sight: Sight | None) -> Tensor:
    stream = last_stream(weights, config, weights["embedding.weight"][tokens], sight, None)
    return stream if config.mtp_before_final_norm else model_norm(stream, weights["final_norm.weight"], config)


def _layer_input(weights: Weights, config: ReferenceConfig, words: Tensor, stream: Tensor) -> Tensor:
    prefix = f"layers.{config.num_layers}"
    named = {"enorm": words, "hnorm": stream}
    normed = [model_norm(x, weights[f"{prefix}.{name}.weight"], config) for name, x in named.items()]
    return linear(weights, f"{prefix}.eh_proj", torch.cat(normed, dim=-1))


def _layer_output(
    weights: Weights, config: ReferenceConfig, x: Tensor, sight: Sight | None, record: list[Routed] | None
) -> Tensor:
    for sub_block in sub_blocks_of(weights, config.num_layers, with_head_layer(config), sight, record).values():
        x = x + sub_block(x)
    return model_norm(x, weights[f"layers.{config.num_layers}.head_norm.weight"], config)


@torch.no_grad()
def greedy_drafts(weights: Weights, config: ReferenceConfig, ids: Sequence[int], count: int) -> list[int]:
    """Return `count` drafts after at least two `ids`. From the second draft on, the head reads its own outputs."""
    tokens, words = torch.tensor([ids]), weights["embedding.weight"]
    x = _layer_input(weights, config, words[tokens[:, 1:]], _read_stream(weights, config, tokens[:, :-1], None))
    drafts: list[int] = []
    while True:
        newest = _layer_output(weights, config, x, None, None)[:, -1:]
        token = logits_of(newest, _output_head(weights, config), config).argmax(-1)
        drafts.append(int(token))
        if len(drafts) == count:
            return drafts
        x = torch.cat((x, _layer_input(weights, config, words[token], newest)), dim=1)


def drafting_targets(config: ReferenceConfig, mask: Tensor, sight: Sight | None = None) -> list[Tensor]:
    """Return the weights [b, s - 1 - d] of the targets of each depth d, given those of the model, `mask` [b, s]."""
    shifts = range(1, config.mtp_depths + 1)
    if sight is None:
        return [mask[:, shift:] for shift in shifts]
    # A token sees an earlier one if both are in one document.
    return [mask[:, shift:] * sight.visible.diagonal(-shift, 1, 2).to(mask.dtype) for shift in shifts]


def drafting_loss(
    weights: Weights,
    config: ReferenceConfig,
    tokens: Tensor,
    labels: Tensor,
    mask: Tensor,
    sight: Sight | None = None,
    record: list[Routed] | None = None,
) -> Tensor:
    """Return the cross entropy at each depth, summed over its targets, [depths]."""
    sums = []
    targets = drafting_targets(config, mask, sight)
    for shift, logits in enumerate(drafting_logits(weights, config, tokens, sight, record), start=1):
        losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels[:, shift:], reduction="none")
        sums.append((losses * targets[shift - 1]).sum())
    return torch.stack(sums)


def confirmed_drafts(
    weights: Weights, config: ReferenceConfig, tokens: Tensor, mask: Tensor, sight: Sight | None = None
) -> Tensor:
    """Return the sum of the mask over the targets of each depth where head and model have the same most likely token,
    [depths]."""
    chosen = reference_logits(weights, config, tokens, sight).argmax(-1)
    sums = []
    targets = drafting_targets(config, mask, sight)
    for shift, logits in enumerate(drafting_logits(weights, config, tokens, sight), start=1):
        sums.append(((logits.argmax(-1) == chosen[:, shift:]) * targets[shift - 1]).sum())
    return torch.stack(sums)


def drafting_gradients(
    weights: Weights,
    config: ReferenceConfig,
    tokens: Tensor,
    labels: Tensor,
    mask: Tensor,
    total_targets: float,
    total_tokens: float,
    sight: Sight | None = None,
    *,
    total_drafting_targets: Tensor,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of the model, the losses of the head's experts, and the loss of each depth, [2 + depths], and the
    gradients of their sum, in which the losses of the depths are a mean with the factor `mtp_loss_scaling_factor`.

    The loss of the model includes those of its own experts. The totals are those of the global batch;
    `total_drafting_targets` are [depths].
    """
    leaves = {name: weight.detach().clone().requires_grad_() for name, weight in weights.items()}
    record: list[Routed] = []
    of_head = drafting_loss(leaves, config, tokens, labels, mask, sight, record) / total_drafting_targets
    balancing = (
        torch.stack([torch.zeros(()), *(one.auxiliary_loss + one.z_loss for one in record)]).sum() / total_tokens
    )
    balancing = balancing / config.mtp_depths
    of_model = reference_loss(leaves, config, tokens, labels, mask, total_targets, total_tokens, sight)
    total = of_model + config.mtp_loss_scaling_factor * of_head.mean() + balancing
    trained = [name for name in leaves if not name.endswith(".expert_bias")]
    gradients = torch.autograd.grad(total, [leaves[name] for name in trained])
    return torch.stack([of_model, balancing, *of_head]).detach(), dict(zip(trained, gradients, strict=True))

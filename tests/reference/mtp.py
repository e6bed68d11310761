"""The drafting head in plain arithmetic: position i predicts token i + 2 from the stream at i and token i + 1."""

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
) -> Tensor:
    """Return the logits [b, s - 1, V] of the tokens from the third on, and of one more, after tokens [b, s]."""
    words, head = weights["embedding.weight"], _output_head(weights, config)
    stream = _read_stream(weights, config, tokens, sight)
    if config.mtp_detach_heads:
        words, stream, head = words.detach(), stream.detach(), head.detach()
    # The last position has a next token only outside of the row; in the product it reads token 0.
    following = torch.cat((tokens[:, 1:], torch.zeros_like(tokens[:, :1])), dim=1)
    x = _layer_input(weights, config, words[following], stream)
    return logits_of(_layer_output(weights, config, x, sight, record), head, config)[:, :-1]


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


def drafting_targets(mask: Tensor, sight: Sight | None = None) -> Tensor:
    """Return the weights [b, s - 1] of the targets of the head, where `mask` [b, s] has those of the model."""
    if sight is None:
        return mask[:, 1:]
    # A token sees the one before it if both are in one document.
    return mask[:, 1:] * sight.visible.diagonal(-1, 1, 2).to(mask.dtype)


def drafting_loss(
    weights: Weights,
    config: ReferenceConfig,
    tokens: Tensor,
    labels: Tensor,
    mask: Tensor,
    sight: Sight | None = None,
    record: list[Routed] | None = None,
) -> Tensor:
    """Return the cross entropy of the head, summed over its targets."""
    logits = drafting_logits(weights, config, tokens, sight, record)
    losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels[:, 1:], reduction="none")
    return (losses * drafting_targets(mask, sight)).sum()


def confirmed_drafts(
    weights: Weights, config: ReferenceConfig, tokens: Tensor, mask: Tensor, sight: Sight | None = None
) -> Tensor:
    """Return the sum of the mask over the head's targets where head and model have the same most likely token."""
    drafts = drafting_logits(weights, config, tokens, sight).argmax(-1)
    chosen = reference_logits(weights, config, tokens, sight).argmax(-1)
    return ((drafts == chosen[:, 1:]) * drafting_targets(mask, sight)).sum()


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
    total_drafting_targets: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of the model, that of the head, and the losses of the head's experts, and the gradients of the
    sum of the first, the second times its factor, and the third.

    The first includes the losses of the other experts. The totals are those of the global batch.
    """
    leaves = {name: weight.detach().clone().requires_grad_() for name, weight in weights.items()}
    record: list[Routed] = []
    of_head = drafting_loss(leaves, config, tokens, labels, mask, sight, record) / total_drafting_targets
    balancing = (
        torch.stack([torch.zeros(()), *(one.auxiliary_loss + one.z_loss for one in record)]).sum() / total_tokens
    )
    of_model = reference_loss(leaves, config, tokens, labels, mask, total_targets, total_tokens, sight)
    total = of_model + config.mtp_loss_scaling_factor * of_head + balancing
    trained = [name for name in leaves if not name.endswith(".expert_bias")]
    gradients = torch.autograd.grad(total, [leaves[name] for name in trained])
    return torch.stack([of_model, of_head, balancing]).detach(), dict(zip(trained, gradients, strict=True))

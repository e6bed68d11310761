"""The drafting head (multi-token prediction, arXiv 2404.19737 and DeepSeek-V3's): predicts the token after the next.

    token i + 1 -> embedding -> norm --+
                                       +-> [2 h] -> eh_proj -> [h] -> a layer -> norm -> output head: token i + 2
    stream after the last layer, i -> norm

Embedding and output head are those of the model. The layer is a stack of one. Layouts as in `language_model.py`.

Applied again, it reads its own output instead of the stream, and predicts one token further:

    token i + 2 ----+
                    +-> ... -> token i + 3
    output for i ---+
"""

from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megatron_ladder.blueprint.specs import TensorSpec
from megatron_ladder.blueprint.tensors import MTPTensors
from megatron_ladder.model.norm import RMSNorm
from megatron_ladder.model.operations import BuildContext
from megatron_ladder.model.stack import StackOptions, TransformerStack
from megatron_ladder.model.stats import PassStats
from megatron_ladder.model.sub_block import SequenceContext
from megatron_ladder.parallel.layout import ParallelModule
from megatron_ladder.parallel.products import GradientSink, linear
from megatron_ladder.parallel.vocabulary import IGNORED


class MTPOptions(NamedTuple):
    """How a model with a drafting head trains."""

    loss_scale: float = 0.1
    """Factor of the head's mean loss in the gradient."""
    detaches: bool = False
    """Whether the head's loss trains only the head."""
    depths: int = 1
    """How often the head is applied; after the first time, it reads its own output and predicts one token further."""


class _WholeLinear(ParallelModule):
    """A product of the stream with a matrix that every tensor-parallel rank holds."""

    weight: nn.Parameter

    def __init__(self, build: BuildContext, tensor: TensorSpec) -> None:
        super().__init__(build)
        self.linear = build.linear
        self.add_parameter("weight", [tensor], build, build.mesh.stream.shards > 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x, self.weight, None)


class DraftingHead(nn.Module):
    """This rank's slices of a drafting head, without embedding and output head."""

    def __init__(self, build: BuildContext, tensors: MTPTensors, options: StackOptions, depths: int) -> None:
        """`options.recompute_layers` is 1 to recompute the layer; training applies it `depths` times in a pass."""
        super().__init__()
        config = build.config.mtp_config
        if depths > 1:
            # An optimizer takes one gradient of a weight from each pass, so autograd sums those of the depths.
            sink = GradientSink()
            product = build.operations.linear or partial(linear, sink=sink)
            build = replace(build, linear=product, gradient_sink=sink)
            options = replace(options, mirrored_backward=False)
        self.enorm = RMSNorm(build, tensors.enorm)
        self.hnorm = RMSNorm(build, tensors.hnorm)
        self.eh_proj = _WholeLinear(build, tensors.eh_proj)
        layer = range(config.num_layers - 1, config.num_layers)
        self.stack = TransformerStack(replace(build, config=config), [layer], options)
        self.head_norm = RMSNorm(build, tensors.head_norm)

    def forward(
        self, next_embeddings: Tensor, hidden_states: Tensor, context: SequenceContext
    ) -> tuple[Tensor, PassStats]:
        """Return what the output head reads, [s, b, h], and what the layer's pass counts.

        Args:
            next_embeddings: the embedding of the token after each, in the layout of the stream.
            hidden_states: the complete stream after the last layer, or its norm; to predict one token further, what the
                head returned before.
        """
        both = torch.cat((self.enorm(next_embeddings), self.hnorm(hidden_states)), dim=-1)
        state, stats = self.stack(self.eh_proj(both).unsqueeze(0), context)
        return self.head_norm(state[0]), stats


def names_of_depth(depth: int) -> tuple[str, str]:
    """Return the names of the loss at a depth, counted from 0, and of the share of confirmed predictions.

    A prediction is confirmed if it is also the most likely token of the model, which reads all true tokens before it.
    """
    head = f"mtp {depth + 1}" if depth else "mtp"
    return f"{head} loss", f"{head} confirmed"


def shift_targets(
    labels: Tensor, loss_mask: Tensor | None, document_bounds: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return labels and loss mask [b, s] of a depth of the drafting head, given those of the model or previous depth.

    Each position takes label and weight of the next one, if both are in the same document. Otherwise, it has no loss.

    Args:
        document_bounds: see `LanguageModel.training_context`, on the device of the labels.
    """
    shifted = _shift(labels, IGNORED)
    if document_bounds is not None:
        shifted.view(-1)[document_bounds[1:].long() - 1] = IGNORED
    return shifted, None if loss_mask is None else _shift(loss_mask, 0).masked_fill_(shifted == IGNORED, 0)


def shift_tokens(tokens: Tensor) -> Tensor:
    """Return the token after each one, [b, s]. The last position of a row has none, and gets 0."""
    return _shift(tokens, 0)


def _shift(values: Tensor, last: int) -> Tensor:
    return torch.cat((values[:, 1:], torch.full_like(values[:, :1], last)), dim=1)

"""A Llama-family decoder whose sub-blocks may read the residual stream late (Ladder Residual, arXiv 2501.06589).

A sub-block (attention or MLP with its norm, or both side by side) reads a residual stream [b, s, h] from which some
outputs of earlier sub-blocks are missing: none in the ordinary transformer, its predecessor's in the ladder. An output
that a sub-block has seen stays in the stream. A layer therefore passes on the complete stream, and if the next layer
misses something, also the stream that it reads and the missing outputs, oldest first. Everything else is the Llama and
Qwen3 of transformers.

With T lanes (own partials), heads and neurons form T groups. With y_j^k the partial sum of output j over group k, lane
k reads

    stream + sum over the missing outputs j of y_j^k

and normalises it separately. A layer then also passes on the partial sums [b, s, T, h] of the missing outputs. This is
desync as well, with its tensor-parallel ranks as lanes: the outputs since the last sum of the ranks' streams are
missing, only the mean over the ranks of all but the last of them enters the summed stream, and norms that read
different streams have one weight per rank.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GenericForSequenceClassification, GradientCheckpointingLayer
from transformers.models.gemma2.modeling_gemma2 import Gemma2ForCausalLM
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaForCausalLM,
    LlamaMLP,
    LlamaModel,
    LlamaPreTrainedModel,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from .configuration_megatron_ladder import MegatronLadderConfig


class _LaneProjection(nn.Linear):
    """A projection of which lane k computes the k-th block of outputs from its own input."""

    lanes = 1

    def forward(self, x: Tensor) -> Tensor:
        """Inputs of all lanes [b, s, lanes * in], or one input of all [b, s, in], -> [b, s, out]."""
        if x.shape[-1] == self.in_features:
            return super().forward(x)
        inputs = x.unflatten(-1, (self.lanes, self.in_features))
        output = torch.einsum("...ki,koi->...ko", inputs, self.weight.unflatten(0, (self.lanes, -1))).flatten(-2)
        return output if self.bias is None else output + self.bias


class _PartialSums(nn.Linear):
    """A projection whose output is not summed over the lanes; the bias belongs to the first lane."""

    lanes = 1

    def forward(self, x: Tensor) -> Tensor:
        """[b, s, in] -> [b, s, lanes, out]."""
        inputs = x.unflatten(-1, (self.lanes, -1))
        output = torch.einsum("...ki,oki->...ko", inputs, self.weight.unflatten(1, (self.lanes, -1)))
        return output if self.bias is None else output + nn.functional.pad(self.bias[None], (0, 0, 0, self.lanes - 1))


def _divide_into_lanes(module: nn.Module, lanes: int) -> None:
    """Replace the projections of attention or of an MLP by those of several lanes."""
    for name, linear in list(module.named_children()):
        if isinstance(linear, nn.Linear):
            kind = _PartialSums if name in ("o_proj", "down_proj") else _LaneProjection
            divided = kind(linear.in_features, linear.out_features, bias=linear.bias is not None)
            divided.lanes = lanes
            setattr(module, name, divided)


def _see(
    stream: Tensor, pending: list[tuple[int, Tensor, Any]], missing: tuple[int, ...]
) -> tuple[Tensor, list[tuple[int, Tensor, Any]]]:
    """Add the pending outputs that are not missing to the stream, oldest first; return it and those left."""
    for back, output, _ in pending:
        if back not in missing:
            stream = stream + output
    return stream, [one for one in pending if one[0] in missing]


class MegatronLadderDecoderLayer(GradientCheckpointingLayer):
    """One layer: a state in, a state out. If no output is missing, the state is one stream, otherwise a tuple.

    The tuple is the complete stream, the stream without the missing outputs, these outputs, and with lanes their
    partial sums.
    """

    def __init__(self, config: MegatronLadderConfig, layer_idx: int) -> None:
        super().__init__()
        attention = Qwen3Attention if config.qk_norm else LlamaAttention
        self.self_attn = attention(config=config, layer_idx=layer_idx)
        if config.attention_output_bias != config.attention_bias:
            width = config.num_attention_heads * config.head_dim
            self.self_attn.o_proj = nn.Linear(width, config.hidden_size, bias=config.attention_output_bias)
        self.mlp = LlamaMLP(config)
        self.lanes = config.lane_count
        if self.lanes:
            _divide_into_lanes(self.self_attn, self.lanes)
            _divide_into_lanes(self.mlp, self.lanes)
        self.sub_blocks, self.averaged = config.sub_blocks(layer_idx), config.averaged(layer_idx)
        shapes = [config.norm_shape(missing) for _, missing in self.sub_blocks]
        self.input_layernorm = LlamaRMSNorm(shapes[0], eps=config.rms_norm_eps)
        if len(self.sub_blocks) > 1:
            self.post_attention_layernorm = LlamaRMSNorm(shapes[1], eps=config.rms_norm_eps)
        self.layer_idx = layer_idx
        self.missing_in, self.missing_out = config.missing_before(layer_idx), config.missing_before(layer_idx + 1)
        of_outputs = len(self.missing_in) * (2 if self.lanes else 1)
        self.tensors_in = 2 + of_outputs if of_outputs else 1

    def __call__(self, hidden_states: Tensor | tuple[Tensor, ...], **kwargs: Any) -> Any:
        # Recomputation supports gradients of positional tensors, but not of a tuple of tensors.
        streams = hidden_states if isinstance(hidden_states, tuple) else (hidden_states,)
        return super().__call__(*streams, **kwargs)

    def forward(self, *state: Tensor, **kwargs: Any) -> Tensor | tuple[Tensor, ...]:
        """Map one state to the next, partial sums being [b, s, lanes, h]; `kwargs` are those of Llama's attention.

        Raises:
            ValueError: too few tensors, as in a pipeline of another program that passes on only one.
        """
        if len(state) < self.tensors_in:
            partial_sums = " and their partial sums" if self.lanes else ""
            raise ValueError(
                f"layer {self.layer_idx} needs two residual streams and {len(self.missing_in)} missing "
                f"outputs{partial_sums} and was given {len(state)} tensor(s): a ladder cannot be cut into pipeline "
                "stages here, use tensor parallelism"
            )
        complete, count = state[0], len(self.missing_in)
        stream = state[1] if count else complete
        # Each with its number counted back from the newest, and None without lanes.
        outputs, partials = state[2 : 2 + count], state[2 + count :] or (None,) * count
        pending = list(zip(sorted(self.missing_in, reverse=True), outputs, partials, strict=True))
        for (kind, missing), averaged in zip(self.sub_blocks, self.averaged, strict=True):
            stream, pending = _see(stream, pending, missing)
            norm = self.post_attention_layernorm if kind == "mlp" else self.input_layernorm
            normed = self._normed(norm, stream, [partial for *_, partial in reversed(pending) if partial is not None])
            if kind == "mlp":
                output = self.mlp(normed)
            else:
                output, _ = self.self_attn(hidden_states=normed, **kwargs)
                if kind == "attention_mlp":
                    output = output + self.mlp(normed)
            if self.lanes and output.dim() == normed.dim():
                raise ValueError(
                    f"layer {self.layer_idx} returned no partial sums of its {self.lanes} lanes: its linear layers "
                    "were replaced, as quantisation and adapters do, which this wiring does not support"
                )
            partial = output if self.lanes else None
            if self.lanes:
                output = output.mean(-2) if averaged else output.sum(-2)
            complete = complete + output
            pending = [(back + 1, earlier, parts) for back, earlier, parts in pending] + [(1, output, partial)]
        stream, pending = _see(stream, pending, self.missing_out)
        if not pending:
            return complete
        _, outputs, partials = zip(*pending, strict=True)
        return (complete, stream, *outputs, *(partials if self.lanes else ()))

    def _normed(self, norm: nn.Module, stream: Tensor, partials: list[Tensor]) -> Tensor:
        """Return the normed read: [b, s, h] if all lanes read the same, and [b, s, lanes * h] with partial sums."""
        if not partials:
            return norm(stream)
        return norm(sum(partials, stream.unsqueeze(-2))).flatten(-2)


class MegatronLadderPreTrainedModel(LlamaPreTrainedModel):
    """The base class that transformers requires of every model of a type."""

    config: MegatronLadderConfig
    _no_split_modules = ["MegatronLadderDecoderLayer"]
    _can_record_outputs = {
        "hidden_states": MegatronLadderDecoderLayer,
        "attentions": [LlamaAttention, Qwen3Attention],
    }


class _NewestRMSNorm(LlamaRMSNorm):
    """The final norm. After a layer that is not the last, as in early exit, it reads the complete stream."""

    def forward(self, hidden_states: Tensor | tuple[Tensor, ...]) -> Tensor:
        return super().forward(hidden_states[0] if isinstance(hidden_states, tuple) else hidden_states)


class MegatronLadderModel(MegatronLadderPreTrainedModel, LlamaModel):
    """The decoder without its head. `hidden_states` are the newest streams, which include every output."""

    def __init__(self, config: MegatronLadderConfig) -> None:
        # The constructor of LlamaModel would create and initialise Llama's layers.
        super(LlamaModel, self).__init__(config)
        self.padding_idx = config.pad_token_id
        self.vocab_size = config.vocab_size
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, self.padding_idx)
        self.layers = nn.ModuleList(
            [MegatronLadderDecoderLayer(config, layer) for layer in range(config.num_hidden_layers)]
        )
        self.norm = _NewestRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = LlamaRotaryEmbedding(config=config)
        self.gradient_checkpointing = False
        self.post_init()


class MegatronLadderForCausalLM(MegatronLadderPreTrainedModel, LlamaForCausalLM):
    """The decoder with its head. Logits are bounded outside of the head, which adapters wrap and users resize."""

    forward = Gemma2ForCausalLM.forward

    def __init__(self, config: MegatronLadderConfig) -> None:
        super(LlamaForCausalLM, self).__init__(config)
        self.model = MegatronLadderModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()


class MegatronLadderForSequenceClassification(GenericForSequenceClassification, MegatronLadderPreTrainedModel):
    """The decoder with a head for classes, which reads the last token."""

    def __init__(self, config: MegatronLadderConfig) -> None:
        # The constructor of the generic class would look the decoder up, which remote code does not allow.
        super(GenericForSequenceClassification, self).__init__(config)
        self.num_labels = config.num_labels
        self.model = MegatronLadderModel(config)
        self.score = nn.Linear(config.hidden_size, config.num_labels, bias=False)
        self.post_init()


__all__ = [
    "MegatronLadderForCausalLM",
    "MegatronLadderForSequenceClassification",
    "MegatronLadderModel",
    "MegatronLadderPreTrainedModel",
]

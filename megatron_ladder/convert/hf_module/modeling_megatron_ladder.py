"""A Llama-family decoder whose sub-blocks may read the residual stream late (Ladder Residual, arXiv 2501.06589).

With x_i the residual stream [b, s, h] after sub-block h_i (attention or MLP with its norm, or both side by side), and s
how late the sub-block reads it,

    x_i = x_{i-1} + h_i(x_{i-1-s})

so s = 0 is the ordinary transformer and s = 1 the ladder. A sub-block that reads less late than its predecessor sees
every output in between, and no later sub-block can read an older stream. A layer therefore passes on the streams that
the next layer may still read, newest first. Everything else is the Llama and Qwen3 of transformers.
"""

from typing import Any

from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer
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


class MegatronLadderDecoderLayer(GradientCheckpointingLayer):
    """One layer: streams in, streams out, newest first. A single stream is a tensor, several are a tuple."""

    def __init__(self, config: MegatronLadderConfig, layer_idx: int) -> None:
        super().__init__()
        attention = Qwen3Attention if config.qk_norm else LlamaAttention
        self.self_attn = attention(config=config, layer_idx=layer_idx)
        if config.attention_output_bias != config.attention_bias:
            width = config.num_attention_heads * config.head_dim
            self.self_attn.o_proj = nn.Linear(width, config.hidden_size, bias=config.attention_output_bias)
        self.mlp = LlamaMLP(config)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.sub_blocks = config.sub_blocks(layer_idx)
        if len(self.sub_blocks) > 1:
            self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layer_idx = layer_idx
        self.streams_in = 1 + config.missing_before(layer_idx)
        self.streams_out = 1 + config.missing_before(layer_idx + 1)

    def __call__(self, hidden_states: Tensor | tuple[Tensor, ...], **kwargs: Any) -> Any:
        # Recomputation supports gradients of positional tensors, but not of a tuple of tensors.
        streams = hidden_states if isinstance(hidden_states, tuple) else (hidden_states,)
        return super().__call__(*streams, **kwargs)

    def forward(self, *streams: Tensor, **kwargs: Any) -> Tensor | tuple[Tensor, ...]:
        """Streams [b, s, h] -> streams [b, s, h]; `kwargs` are those of Llama's attention.

        Raises:
            ValueError: too few streams, as in a pipeline of another program that passes on only one tensor.
        """
        if len(streams) < self.streams_in:
            raise ValueError(
                f"layer {self.layer_idx} needs the last {self.streams_in} residual streams and was given "
                f"{len(streams)}: a ladder cannot be cut into pipeline stages here, use tensor parallelism"
            )
        for kind, staleness in self.sub_blocks:
            # The first sub-blocks of the model have no stream as old as they may read.
            read = streams[min(staleness, len(streams) - 1)]
            if kind == "mlp":
                output = self.mlp(self.post_attention_layernorm(read))
            else:
                normed = self.input_layernorm(read)
                output, _ = self.self_attn(hidden_states=normed, **kwargs)
                if kind == "attention_mlp":
                    output = output + self.mlp(normed)
            streams = (streams[0] + output, *streams)
        return streams[0] if self.streams_out == 1 else streams[: self.streams_out]


class MegatronLadderPreTrainedModel(LlamaPreTrainedModel):
    """The base class that transformers requires of every model of a type."""

    config: MegatronLadderConfig
    _no_split_modules = ["MegatronLadderDecoderLayer"]
    _can_record_outputs = {
        "hidden_states": MegatronLadderDecoderLayer,
        "attentions": [LlamaAttention, Qwen3Attention],
    }


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
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = LlamaRotaryEmbedding(config=config)
        self.gradient_checkpointing = False
        self.post_init()


class _Head(nn.Linear):
    """The output head, with bounded logits if `cap` is not None."""

    cap: float | None = None

    def forward(self, hidden_states: Tensor) -> Tensor:
        logits = super().forward(hidden_states)
        return logits if self.cap is None else (logits / self.cap).tanh() * self.cap


class MegatronLadderForCausalLM(MegatronLadderPreTrainedModel, LlamaForCausalLM):
    """The decoder with its head."""

    def __init__(self, config: MegatronLadderConfig) -> None:
        super(LlamaForCausalLM, self).__init__(config)
        self.model = MegatronLadderModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = _Head(config.hidden_size, config.vocab_size, bias=False)
        self.lm_head.cap = config.final_logit_softcapping
        self.post_init()

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        """Replace the head, as `resize_token_embeddings` does, and keep the bound of the logits."""
        if type(new_embeddings) is nn.Linear:
            head = _Head(new_embeddings.in_features, new_embeddings.out_features, bias=False, device="meta")
            head.weight, head.cap = new_embeddings.weight, self.config.final_logit_softcapping
            new_embeddings = head
        super().set_output_embeddings(new_embeddings)


__all__ = ["MegatronLadderForCausalLM", "MegatronLadderModel", "MegatronLadderPreTrainedModel"]

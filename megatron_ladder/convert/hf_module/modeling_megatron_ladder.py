"""A Llama-family decoder whose sub-blocks may read the residual stream late (Ladder Residual, arXiv 2501.06589).

With x_i the residual stream [b, s, h] after sub-block h_i (attention or MLP with its norm, or both side by side), and s
how late the sub-block reads it,

    x_i = x_{i-1} + h_i(x_{i-1-s})

so s = 0 is the ordinary transformer and s = 1 the ladder. A sub-block that reads less late than the one before it has
waited for everything in between, and from then on nothing older can be read. What layers hand on is therefore the
streams that may still be read, newest first. Everything else is Llama's and Qwen3's as transformers has it.
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

from .configuration_megatron_ladder import ONE_NORM_MODES, MegatronLadderConfig


class MegatronLadderDecoderLayer(GradientCheckpointingLayer):
    """One layer: streams in, streams out, newest first; the last layer returns the newest alone."""

    def __init__(self, config: MegatronLadderConfig, layer_idx: int) -> None:
        super().__init__()
        attention = Qwen3Attention if config.qk_norm else LlamaAttention
        self.self_attn = attention(config=config, layer_idx=layer_idx)
        if config.attention_output_bias != config.attention_bias:
            width = config.num_attention_heads * config.head_dim
            self.self_attn.o_proj = nn.Linear(width, config.hidden_size, bias=config.attention_output_bias)
        self.mlp = LlamaMLP(config)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = None
        if config.residual_mode not in ONE_NORM_MODES:
            self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.staleness = config.staleness(layer_idx)
        self.most_streams = 1 + (config.residual_staleness if config.ladder_layers else 0)
        self.is_last = layer_idx == config.num_hidden_layers - 1

    def __call__(self, hidden_states: Tensor | tuple[Tensor, ...], **kwargs: Any) -> Any:
        # Recomputation follows the gradients of positional tensors, and not of a tuple of them.
        streams = hidden_states if isinstance(hidden_states, tuple) else (hidden_states,)
        return super().__call__(*streams, **kwargs)

    def forward(self, *streams: Tensor, **kwargs: Any) -> Tensor | tuple[Tensor, ...]:
        """Streams [b, s, h] -> streams [b, s, h]; `kwargs` are those of Llama's attention."""
        normed = self.input_layernorm(self._read(streams))
        output, _ = self.self_attn(hidden_states=normed, **kwargs)
        if self.post_attention_layernorm is None:
            streams = self._add(streams, output + self.mlp(normed))
        else:
            streams = self._add(streams, output)
            normed = self.post_attention_layernorm(self._read(streams))
            streams = self._add(streams, self.mlp(normed))
        return streams[0] if self.is_last else streams

    def _missing(self, streams: tuple[Tensor, ...]) -> int:
        """Outputs that are missing from the stream that a sub-block of this layer reads now."""
        return min(self.staleness, len(streams) - 1)

    def _read(self, streams: tuple[Tensor, ...]) -> Tensor:
        return streams[self._missing(streams)]

    def _add(self, streams: tuple[Tensor, ...], output: Tensor) -> tuple[Tensor, ...]:
        """The streams after a sub-block's output, without those that nothing reads any more."""
        readable = streams[: self._missing(streams) + 1]
        return (streams[0] + output, *readable)[: self.most_streams]


class MegatronLadderPreTrainedModel(LlamaPreTrainedModel):
    """What transformers asks of every model of a type."""

    config: MegatronLadderConfig
    _no_split_modules = ["MegatronLadderDecoderLayer"]
    _can_record_outputs = {
        "hidden_states": MegatronLadderDecoderLayer,
        "attentions": [LlamaAttention, Qwen3Attention],
    }


class MegatronLadderModel(MegatronLadderPreTrainedModel, LlamaModel):
    """The decoder without its head. `hidden_states` are the newest streams, in which no output is missing."""

    def __init__(self, config: MegatronLadderConfig) -> None:
        # Llama's own would make, and initialise, layers that are not wanted.
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


class MegatronLadderForCausalLM(MegatronLadderPreTrainedModel, LlamaForCausalLM):
    """The decoder with its head."""

    def __init__(self, config: MegatronLadderConfig) -> None:
        super(LlamaForCausalLM, self).__init__(config)
        self.model = MegatronLadderModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()


__all__ = ["MegatronLadderForCausalLM", "MegatronLadderModel", "MegatronLadderPreTrainedModel"]

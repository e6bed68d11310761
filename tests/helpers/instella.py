"""Instella-MoE as published (arXiv 2609.00791), built from the parts of transformers' DeepSeek-V3.

Attention reads the stream without the routed experts of the layer before. The MLP, or the router and all experts, read
the stream without the attention before them. The sigmoid of a projection of attention's input multiplies its output,
before the output projection.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MLP


class InstellaMoEForCausalLM(DeepseekV3ForCausalLM):  # type: ignore[misc]
    """Tests clear `is_gated` or `is_late` to leave out the gates or the late reads, as a wrong reader would."""

    is_gated = True
    is_late = True

    def __init__(self, config: DeepseekV3Config) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            attention = layer.self_attn
            attention.gate_proj = nn.Linear(config.hidden_size, attention.o_proj.in_features, bias=False)
        # `generate` then passes all tokens for each new one.
        self.generation_config.use_cache = False

    def forward(self, input_ids: Tensor, **_: Any) -> CausalLMOutputWithPast:
        """Map tokens [b, s] to logits [b, s, V]."""
        stream = self.model.embed_tokens(input_ids)
        angles = self.model.rotary_emb(stream, torch.arange(input_ids.shape[1])[None])
        without_routed = stream
        for layer in self.model.layers:
            entering = stream
            attended = self._attended(layer.self_attn, layer.input_layernorm(without_routed), angles)
            before_experts = entering if self.is_late else entering + attended
            normed = layer.post_attention_layernorm(before_experts)
            if isinstance(layer.mlp, DeepseekV3MLP):
                stream = without_routed = entering + attended + layer.mlp(normed)
                continue
            shared = layer.mlp.shared_experts(normed)
            stream = entering + attended + layer.mlp(normed)
            without_routed = entering + attended + shared if self.is_late else stream
        return CausalLMOutputWithPast(logits=self.lm_head(self.model.norm(stream)))

    def _attended(self, attention: Any, normed: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        gate = torch.sigmoid(attention.gate_proj(normed)) if self.is_gated else 1.0
        length = normed.shape[1]
        future = torch.full((length, length), -torch.inf).triu(1)[None, None]
        handle = attention.o_proj.register_forward_pre_hook(lambda _, inputs: inputs[0] * gate)
        output: Tensor = attention(normed, angles, future)[0]
        handle.remove()
        return output

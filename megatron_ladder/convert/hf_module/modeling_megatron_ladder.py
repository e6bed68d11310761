"""A Llama-family decoder whose sub-blocks may read the residual stream late (Ladder Residual, arXiv 2501.06589).

A sub-block (attention, MLP or experts with their norm, or several of them side by side) reads a residual stream
[b, s, h] from which some outputs of earlier sub-blocks are missing: none in the ordinary transformer, its predecessor's
in the ladder. An output that a sub-block has seen stays in the stream. A layer therefore passes on the complete stream,
and if the next layer misses something, also the stream that it reads and the missing outputs, oldest first. Everything
else is the Llama, Qwen, GLM and DeepSeek-V3 of transformers.

With T lanes (own partials), heads and neurons form T groups. With y_j^k the partial sum of output j over group k, lane
k reads

    stream + sum over the missing outputs j of y_j^k

and normalises it separately. A layer then also passes on the partial sums [b, s, T, h] of the missing outputs. This is
desync as well, with its tensor-parallel ranks as lanes: the outputs since the last sum of the ranks' streams are
missing, only the mean over the ranks of all but the last of them enters the summed stream, and norms that read
different streams have one weight per rank.
"""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import conversion_mapping
from transformers import initialization as init
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter
from transformers.masking_utils import create_sliding_window_causal_mask
from transformers.modeling_layers import GenericForSequenceClassification, GradientCheckpointingLayer
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention
from transformers.models.gemma2.modeling_gemma2 import Gemma2ForCausalLM
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeAttention, Glm4MoeRotaryEmbedding
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssAttention, GptOssRotaryEmbedding
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaForCausalLM,
    LlamaMLP,
    LlamaModel,
    LlamaPreTrainedModel,
    LlamaRMSNorm,
)
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from .configuration_megatron_ladder import MegatronLadderConfig, norm_name

# Files have one tensor for each matrix of an expert, as those of Qwen3-MoE, and for each bias.
_GATE, _UP, _DOWN = (f"mlp.experts.*.{name}_proj.bias" for name in ("gate", "up", "down"))
_FILES = [
    *conversion_mapping.get_checkpoint_conversion_mapping("qwen3_moe"),
    WeightConverter([_GATE, _UP], "mlp.experts.gate_up_bias", operations=[MergeModulelist(dim=0), Concatenate(dim=1)]),
    WeightConverter(_DOWN, "mlp.experts.down_bias", operations=[MergeModulelist(dim=0)]),
]
conversion_mapping.register_checkpoint_conversion_mapping(MegatronLadderConfig.model_type, _FILES, overwrite=True)


class _LaneProjection(nn.Linear):
    """A projection of which lane k computes the k-th block of every section of outputs from its own input."""

    lanes = 1
    sections: Any = None
    """Sizes of the sections; None for one."""

    def forward(self, x: Tensor) -> Tensor:
        """Inputs of all lanes [b, s, lanes * in], or one input of all [b, s, in], -> [b, s, out]."""
        if x.shape[-1] == self.in_features:
            return super().forward(x)
        inputs = x.unflatten(-1, (self.lanes, self.in_features))
        blocks = [rows.unflatten(0, (self.lanes, -1)) for rows in self.weight.split(self.sections or self.out_features)]
        output = torch.cat([torch.einsum("...ki,koi->...ko", inputs, rows).flatten(-2) for rows in blocks], dim=-1)
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
    """Replace the projections of a token mixer or of an MLP by those of several lanes."""
    for name, linear in list(module.named_children()):
        if isinstance(linear, nn.Linear):
            kind = _PartialSums if name in ("o_proj", "out_proj", "down_proj") else _LaneProjection
            divided = kind(linear.in_features, linear.out_features, bias=linear.bias is not None)
            divided.lanes = lanes
            if name == "in_proj_qkv":
                divided.sections = module.key_dim, module.key_dim, module.value_dim
            setattr(module, name, divided)


def _see(
    stream: Tensor, pending: list[tuple[int, Tensor, Any]], missing: tuple[int, ...]
) -> tuple[Tensor, list[tuple[int, Tensor, Any]]]:
    """Add the pending outputs that are not missing to the stream, oldest first; return it and those left."""
    for back, output, _ in pending:
        if back not in missing:
            stream = stream + output
    return stream, [one for one in pending if one[0] in missing]


class _WithGate:
    """Stands for an attention in its `forward`, with an output projection that first multiplies its input by a gate."""

    def __init__(self, attention: nn.Module, gate: Tensor) -> None:
        self._attention: Any = attention
        self._gate = gate

    def __getattr__(self, name: str) -> Any:
        return getattr(self._attention, name)

    def o_proj(self, x: Tensor) -> Any:
        return self._attention.o_proj(x * self._gate)


class _Gated(nn.Module):
    """The first base class of attentions with an output gate, the sigmoid of a projection of their input."""

    without_gate: Any
    o_proj: Any

    def __init__(self, config: MegatronLadderConfig, layer_idx: int) -> None:
        super().__init__(config=config, layer_idx=layer_idx)
        self.gate_proj = nn.Linear(config.hidden_size, self.o_proj.in_features, bias=False)

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Any:
        attention = _WithGate(self, self.gate_proj(hidden_states).sigmoid())
        return self.without_gate.forward(attention, hidden_states=hidden_states, **kwargs)


class GatedLlamaAttention(_Gated, LlamaAttention):
    without_gate = LlamaAttention


class GatedQwen3Attention(_Gated, Qwen3Attention):
    without_gate = Qwen3Attention


class GatedGlm4MoeAttention(_Gated, Glm4MoeAttention):
    without_gate = Glm4MoeAttention


class GatedGptOssAttention(_Gated, GptOssAttention):
    without_gate = GptOssAttention


class GatedDeepseekV3Attention(_Gated, DeepseekV3Attention):
    without_gate = DeepseekV3Attention


class ZeroCenteredRMSNorm(LlamaRMSNorm):
    """A norm that multiplies by 1 + its weight, in float32."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        wide = hidden_states.to(torch.promote_types(hidden_states.dtype, torch.float32))
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.variance_epsilon)
        return (normed * (1.0 + self.weight.to(wide.dtype))).to(hidden_states.dtype)


def _norm(config: MegatronLadderConfig, *shape: int) -> nn.Module:
    return (ZeroCenteredRMSNorm if config.zero_centered_gamma else LlamaRMSNorm)(shape, eps=config.rms_norm_eps)


def _attention(config: MegatronLadderConfig, index: int) -> nn.Module:
    """Return an attention whose keys and values have a place in the cache."""
    plain, gated = (Qwen3Attention, GatedQwen3Attention) if config.qk_norm else (LlamaAttention, GatedLlamaAttention)
    if (config.rope_parameters or {}).get("partial_rotary_factor", 1.0) != 1:
        plain, gated = Glm4MoeAttention, GatedGlm4MoeAttention
    if config.has_sinks:
        plain, gated = GptOssAttention, GatedGptOssAttention
    if config.kv_lora_rank:
        plain, gated = DeepseekV3Attention, GatedDeepseekV3Attention
    attention: Any = (gated if config.gated_attention else plain)(config=config, layer_idx=index)
    if config.attention_output_bias != (attention.o_proj.bias is not None):
        width = attention.o_proj.in_features
        attention.o_proj = nn.Linear(width, config.hidden_size, bias=config.attention_output_bias)
    if config.zero_centered_gamma and config.qk_norm:
        attention.q_norm, attention.k_norm = _norm(config, config.head_dim), _norm(config, config.head_dim)
    return attention


class GatedDeltaNet(Qwen3_5GatedDeltaNet):
    """Gated DeltaNet, called as attentions are."""

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: Any = None,
        position_ids: Any = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        return super().forward(hidden_states, cache_params=past_key_values, **kwargs), None


def _padding_mask(inputs_embeds: Tensor, attention_mask: Tensor | None, **_: Any) -> Tensor | None:
    """Return which of the inputs [b, s, h] are no padding, [b, s]; None without a mask of tokens."""
    # Old versions of transformers have no function for it.
    return None if attention_mask is None or attention_mask.dim() > 2 else attention_mask[:, -inputs_embeds.shape[1] :]


_MIXERS: Mapping[str, tuple[str, Callable[[MegatronLadderConfig, int], nn.Module]]] = {
    "full_attention": ("self_attn", _attention),
    "sliding_attention": ("self_attn", _attention),
    "linear_attention": ("linear_attn", GatedDeltaNet),
}
"""Type of a layer -> its token mixer: the name in the layer, and what makes one with a place in the cache."""
_MASKS: Mapping[str, Callable[..., Any]] = {
    "sliding_attention": create_sliding_window_causal_mask,
    "linear_attention": _padding_mask,
}
"""Type of a layer -> what makes its mask, if it is not that of Llama."""


def _gated(config: MegatronLadderConfig, gate: Tensor, up: Tensor) -> Tensor:
    """Return what the gates let through."""
    if config.swiglu_limit is not None:
        gate, up = gate.clamp(max=config.swiglu_limit), up.clamp(-config.swiglu_limit, config.swiglu_limit)
    open_part = gate * torch.sigmoid(1.702 * gate) if config.quick_geglu else nn.functional.silu(gate)
    return open_part * (up + config.glu_linear_offset)


class MegatronLadderMLP(LlamaMLP):
    """An MLP with the activation of the configuration."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(_gated(self.config, self.gate_proj(x), self.up_proj(x)))


class MegatronLadderExperts(Qwen3MoeExperts):
    """Experts with the activation of the configuration, and biases if it has them."""

    gate_up_bias: nn.Parameter | None
    down_bias: nn.Parameter | None

    def __init__(self, config: MegatronLadderConfig) -> None:
        super().__init__(config)
        for name, width in (("gate_up_bias", 2 * self.intermediate_dim), ("down_bias", self.hidden_dim)):
            bias = nn.Parameter(torch.empty(self.num_experts, width)) if config.moe_bias else None
            self.register_parameter(name, bias)

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Tokens [n, h], their experts and these experts' weights [n, k] -> [n, h]."""
        output = torch.zeros_like(x)
        for expert in range(self.num_experts):
            tokens, ranks = torch.where(chosen == expert)
            biases = [None if bias is None else bias[expert] for bias in (self.gate_up_bias, self.down_bias)]
            gate, up = nn.functional.linear(x[tokens], self.gate_up_proj[expert], biases[0]).chunk(2, dim=-1)
            of_expert = nn.functional.linear(_gated(self.config, gate, up), self.down_proj[expert], biases[1])
            output.index_add_(0, tokens, (of_expert * weights[tokens, ranks, None]).to(output.dtype))
        return output


class MegatronLadderRouter(nn.Module):
    """Chooses the experts of each token, computing in float32 as in training."""

    def __init__(self, config: MegatronLadderConfig) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        self.bias = nn.Parameter(torch.empty(config.num_experts)) if config.moe_bias else None
        if config.use_expert_bias:
            self.e_score_correction_bias = nn.Buffer(torch.zeros(config.num_experts, dtype=torch.float32))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens [n, h] -> the chosen experts [n, k] and their weights [n, k]."""
        config, wide = self.config, torch.promote_types(x.dtype, torch.float32)
        bias = None if self.bias is None else self.bias.to(wide)
        logits = nn.functional.linear(x.to(wide), self.weight.to(wide), bias)
        uses_softmax = config.scoring_func == "softmax"
        scores = logits.softmax(-1) if uses_softmax else logits.sigmoid()
        choice = scores + self.e_score_correction_bias if config.use_expert_bias else scores
        if config.n_group > 1:
            groups = choice.unflatten(-1, (config.n_group, -1))
            group_scores = groups.topk(2, dim=-1).values.sum(-1) if config.use_expert_bias else groups.amax(-1)
            best = group_scores.topk(config.topk_group, dim=-1).indices
            outside = torch.ones_like(groups[..., 0], dtype=torch.bool).scatter(-1, best, False)
            choice = groups.masked_fill(outside.unsqueeze(-1), float("-inf")).flatten(-2)
        chosen = choice.topk(config.num_experts_per_tok, dim=-1).indices
        weights = scores.gather(-1, chosen)
        if config.norm_topk_prob:
            weights = weights / (weights.sum(-1, keepdim=True) + (0 if uses_softmax else 1e-20))
        return chosen, weights * config.routed_scaling_factor


def _mlp(config: MegatronLadderConfig) -> nn.Module:
    return (LlamaMLP if config.has_swiglu else MegatronLadderMLP)(config)


def _feed_forward(config: MegatronLadderConfig, layer: int) -> nn.Module:
    """Return the MLP of a layer, its experts, or both."""
    is_dense = any("mlp" in one.kind.branches for one in config.wired_layers()[layer])
    module = _mlp(config) if is_dense else nn.Module()
    if layer in config.expert_layers:
        experts = Qwen3MoeExperts if config.has_swiglu and not config.moe_bias else MegatronLadderExperts
        module.gate, module.experts = MegatronLadderRouter(config), experts(config)
        if config.shared_expert_intermediate_size:
            of_shared = copy.copy(config)
            of_shared.intermediate_size = config.shared_expert_intermediate_size
            module.shared_experts = _mlp(of_shared)
        if config.gated_shared_expert:
            module.shared_expert_gate = nn.Linear(config.hidden_size, 1, bias=False)
    return module


class MegatronLadderDecoderLayer(GradientCheckpointingLayer):
    """One layer: a state in, a state out. If no output is missing, the state is one stream, otherwise a tuple.

    The tuple is the complete stream, the stream without the missing outputs, these outputs, and with lanes their
    partial sums.
    """

    def __init__(self, config: MegatronLadderConfig, layer_idx: int) -> None:
        super().__init__()
        attentions = config.attentions_per_layer
        first = layer_idx * attentions
        self.window = config.window_of(first)
        self.layer_type = config.layer_type_of(first)
        self.mixer_name, new_mixer = _MIXERS[self.layer_type]
        mixer = new_mixer(config, first)
        setattr(self, self.mixer_name, mixer)
        self.mlp: Any = _feed_forward(config, layer_idx)
        self.lanes = config.lane_count
        if self.lanes:
            _divide_into_lanes(mixer, self.lanes)
            _divide_into_lanes(self.mlp, self.lanes)
        self.sub_blocks = config.wired_layers()[layer_idx]
        if attentions > 1:
            setattr(self, f"{self.mixer_name}_2", new_mixer(config, first + 1))
            self.mlp_2 = _mlp(config)
        for one in self.sub_blocks:
            shape = (config.hidden_size,) if one.reads_shared else (self.lanes, config.hidden_size)
            # Experts and MLP of a layer share a norm.
            setattr(self, norm_name(one.kind), _norm(config, *shape))
        self.layer_idx = layer_idx
        self.missing_in, self.missing_out = config.missing_before(layer_idx), config.missing_before(layer_idx + 1)

    def __call__(self, hidden_states: Tensor | tuple[Tensor, ...], **kwargs: Any) -> Any:
        # Recomputation supports gradients of positional tensors, but not of a tuple of tensors.
        streams = hidden_states if isinstance(hidden_states, tuple) else (hidden_states,)
        return super().__call__(*streams, **kwargs)

    def forward(
        self, *state: Tensor, other_masks: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> Tensor | tuple[Tensor, ...]:
        """Map one state to the next, partial sums being [b, s, lanes, h]; `kwargs` are those of Llama's attention.

        `other_masks` has the masks of layers of other types.
        """
        if self.layer_type in _MASKS:
            kwargs["attention_mask"] = (other_masks or {})[self.layer_type]
        if self.window is not None and not hasattr(self.self_attn, "sliding_window"):
            # Flash attention needs the window, which not all classes give it themselves.
            kwargs["sliding_window"] = self.window
        complete, count = state[0], len(self.missing_in)
        stream = state[1] if count else complete
        # Each with its number counted back from the newest, and None without lanes.
        outputs, partials = state[2 : 2 + count], state[2 + count :] or (None,) * count
        pending = list(zip(sorted(self.missing_in, reverse=True), outputs, partials, strict=True))
        for one in self.sub_blocks:
            stream, pending = _see(stream, pending, one.missing)
            norm = getattr(self, norm_name(one.kind))
            normed = self._normed(norm, stream, [partial for *_, partial in reversed(pending) if partial is not None])
            output = self._output(one.kind.branches, normed, kwargs)
            if self.lanes and output.dim() == normed.dim():
                raise ValueError(
                    f"layer {self.layer_idx} returned no partial sums of its {self.lanes} lanes: its linear layers "
                    "were replaced, as quantisation and adapters do, which this wiring does not support"
                )
            partial = output if self.lanes else None
            if self.lanes:
                output = output.sum(-2) if one.leaves_shared else output.mean(-2)
            complete = complete + output
            pending = [(back + 1, earlier, parts) for back, earlier, parts in pending] + [(1, output, partial)]
        stream, pending = _see(stream, pending, self.missing_out)
        if not pending:
            return complete
        _, outputs, partials = zip(*pending, strict=True)
        return (complete, stream, *outputs, *(partials if self.lanes else ()))

    def _output(self, branches: tuple[str, ...], x: Tensor, kwargs: dict[str, Any]) -> Tensor:
        """Return the output of a sub-block for its normed stream [b, s, h]."""
        outputs = []
        for branch in branches:
            if branch in ("attention", "attention_2"):
                mixer = getattr(self, branch.replace("attention", self.mixer_name))
                outputs.append(mixer(hidden_states=x, **kwargs)[0])
            elif branch == "experts":
                tokens = x.flatten(0, 1)
                outputs.append(self.mlp.experts(tokens, *self.mlp.gate(tokens)).view(x.shape))
            elif branch in ("mlp", "mlp_2"):
                outputs.append(self.mlp_2(x) if branch == "mlp_2" else self.mlp(x))
            elif branch != "shared_expert":
                raise KeyError(branch)
            elif hasattr(self.mlp, "shared_expert_gate"):
                outputs.append(self.mlp.shared_experts(x) * self.mlp.shared_expert_gate(x).sigmoid())
            elif hasattr(self.mlp, "shared_experts"):
                outputs.append(self.mlp.shared_experts(x))
        return sum(outputs[1:], outputs[0])

    def _normed(self, norm: nn.Module, stream: Tensor, partials: list[Tensor]) -> Tensor:
        """Return the normed read: [b, s, h] if all lanes read the same, and [b, s, lanes * h] with partial sums."""
        if not partials:
            return norm(stream)
        return norm(sum(partials, stream.unsqueeze(-2))).flatten(-2)


class MegatronLadderPreTrainedModel(LlamaPreTrainedModel):
    """The base class that transformers requires of every model of a type."""

    config: MegatronLadderConfig
    _no_split_modules = ["MegatronLadderDecoderLayer"]
    # A drafting head, which servers load.
    _keys_to_ignore_on_load_unexpected = [r"^mtp\."]
    _can_record_outputs = {
        "hidden_states": MegatronLadderDecoderLayer,
        "attentions": [LlamaAttention, Qwen3Attention, Glm4MoeAttention, GptOssAttention, DeepseekV3Attention],
    }

    @property
    def _is_stateful(self) -> bool:
        return self.config.has_linear_attention

    @property
    def _supports_sdpa(self) -> bool:
        return not self.config.has_sinks

    @property
    def _supports_flash_attn(self) -> bool:
        # Only some of its versions have sinks.
        return not self.config.has_sinks

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, GptOssAttention):
            init.normal_(module.sinks, mean=0.0, std=self.config.initializer_range)
        if isinstance(module, ZeroCenteredRMSNorm):
            init.zeros_(module.weight)
        if isinstance(module, GatedDeltaNet):
            init.ones_(module.dt_bias)
            init.copy_(module.A_log, torch.empty_like(module.A_log).uniform_(0.01, 16).log())
        if isinstance(module, MegatronLadderRouter | Qwen3MoeExperts):
            for name, weight in module.named_parameters(recurse=False):
                init.normal_(weight, mean=0.0, std=0.0 if "bias" in name else self.config.initializer_range)
            for bias in module.buffers(recurse=False):
                init.zeros_(bias)


class _ReadsNewest:
    """Makes a norm the final one, which after another layer than the last (early exit) reads the complete stream."""

    def forward(self, hidden_states: Tensor | tuple[Tensor, ...]) -> Tensor:
        newest = hidden_states[0] if isinstance(hidden_states, tuple) else hidden_states
        return super().forward(newest)  # type: ignore[misc]


class _NewestRMSNorm(_ReadsNewest, LlamaRMSNorm):
    pass


class _NewestZeroCenteredRMSNorm(_ReadsNewest, ZeroCenteredRMSNorm):
    pass


class MegatronLadderModel(MegatronLadderPreTrainedModel, LlamaModel):
    """The decoder without its head. `hidden_states` are the newest streams, which include every output."""

    def __init__(self, config: MegatronLadderConfig) -> None:
        # The constructor of LlamaModel would create and initialise Llama's layers.
        super(LlamaModel, self).__init__(config)
        implementation = config._attn_implementation
        if config.has_sinks and implementation not in ("eager", "flex_attention"):
            raise ValueError(f"attn_implementation {implementation!r} could ignore sinks: use eager or flex_attention")
        self.padding_idx = config.pad_token_id
        self.vocab_size = config.vocab_size
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, self.padding_idx)
        self.layers = nn.ModuleList([MegatronLadderDecoderLayer(config, layer) for layer in range(config.layer_count)])
        final_norm = _NewestZeroCenteredRMSNorm if config.zero_centered_gamma else _NewestRMSNorm
        self.norm = final_norm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = (GptOssRotaryEmbedding if config.has_sinks else Glm4MoeRotaryEmbedding)(config=config)
        self.gradient_checkpointing = False
        if config.has_linear_attention:
            # They compute in float32, and files can have them in that type.
            mixers = ("linear_attn", "linear_attn_2")[: config.attentions_per_layer]
            self._keep_in_fp32_modules_strict = ["A_log", "dt_bias", *(f"{mixer}.norm" for mixer in mixers)]
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Any = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """Llama's, with other masks for layers of other types. `generate` can pass a mask for each type."""
        types = [name for name in _MASKS if any(layer.layer_type == name for layer in self.layers)]
        if types:
            if inputs_embeds is None:
                inputs_embeds, input_ids = self.embed_tokens(input_ids), None
            if isinstance(attention_mask, dict):
                kwargs["other_masks"] = attention_mask
                attention_mask = attention_mask.get("full_attention")
            else:
                kwargs["other_masks"] = {
                    name: _MASKS[name](
                        config=self.config,
                        inputs_embeds=inputs_embeds,
                        attention_mask=attention_mask,
                        past_key_values=past_key_values,
                        position_ids=position_ids,
                    )
                    for name in types
                }
        return super().forward(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            **kwargs,
        )


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

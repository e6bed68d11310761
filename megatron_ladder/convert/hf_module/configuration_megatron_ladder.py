"""The configuration of a Llama-family decoder whose sub-blocks may read the residual stream late."""

import itertools
from typing import Any

from transformers import PreTrainedConfig
from transformers.models.deepseek_v2.configuration_deepseek_v2 import DeepseekV2Config
from transformers.models.glm4_moe.configuration_glm4_moe import Glm4MoeConfig
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig

# In exported files, the content of that module.
from megatron_ladder.blueprint.wiring import WIRINGS, SubBlockKind, WiredSubBlock


class MegatronLadderConfig(PreTrainedConfig):
    """Llama's keys, and the keys of biases, norms, windows, latent and linear attention, experts and the wiring.

    `attention_bias` applies only to queries, keys and values, or to their latents, unlike in Llama. Other keys of
    experts are as in GLM-4.5, those of latent attention as in DeepSeek-V3, and those of linear attention (gated
    DeltaNet) as in Qwen3.5. `num_hidden_layers` counts a layer with two attentions twice, as in LongCat-Flash.

    Attributes:
        attention_output_bias: whether the attention's output projection has a bias.
        moe_bias: whether the projections of routed experts and the router have biases.
        quick_geglu: whether gates are `x sigmoid(1.702 x)` instead of SiLU, in MLPs and experts.
        swiglu_limit: bound from above of the inputs of gates, and on both sides of what they multiply; None for none.
        glu_linear_offset: number that is added to what gates multiply.
        qk_norm: whether each head's queries and keys are normed before the rotary embedding.
        sliding_window: positions that queries of `sliding_attention` see, their own included.
        layer_types: `linear_attention`, `sliding_attention` or `full_attention` for each attention; absent if all are
            the last.
        softmax_type: `learnable` if each head's softmax has a sink in its denominator, as in gpt-oss.
        zero_centered_gamma: whether norms multiply by 1 + their weight; those of latents and of linear attention never
            do.
        mamba_ssm_dtype: element type of the states of linear attention, which servers read.
        kv_lora_rank: width of the latent of keys and values; None: attention is not latent.
        gated_attention: whether the sigmoid of a projection of its input multiplies the attention's output.
        final_logit_softcapping: bound of the logits, as in Gemma 2; None for no bound.
        num_experts: routed experts of a layer; 0: all layers are dense.
        expert_layers: indices of the layers with experts.
        shared_expert_intermediate_size: width of the expert of all tokens; 0 for none.
        gated_shared_expert: whether the sigmoid of one number, a projection of its input, multiplies its output.
        scoring_func: what makes scores of the router's logits: `softmax` over the experts, or `sigmoid`.
        use_expert_bias: whether a bias is added to the scores for the choice of experts.
        residual_mode: `standard`, `ladder` (Ladder Residual, arXiv 2501.06589), `parallel` (attention and MLP side by
            side), or another key of `WIRINGS`.
        ladder_layers: layers that read the residual stream late: their indices, an integer N for the upper N, or None
            for none; sorted indices in an instance.
        residual_staleness: how many sub-blocks late they read it.
        lanes: number of groups of heads and neurons that read their own partial sums of the outputs that are missing
            from a late stream; 0 for none.
        desync_interval: sub-blocks between two sums of the ranks' streams (desync).
        desync_tp: number of ranks with separate streams (desync).
    """

    model_type = "megatron_ladder"
    keys_to_ignore_at_inference = ["past_key_values"]
    base_model_tp_plan = LlamaConfig.base_model_tp_plan
    # A pipeline stage would have to pass on several tensors.
    base_model_pp_plan = None
    attribute_map = {"use_qk_norm": "qk_norm"}
    rope_interleave = True

    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    # An int; None in a file stands for a value that depends on others.
    num_key_value_heads: Any = None
    head_dim: Any = None
    hidden_act: str = "silu"
    max_position_embeddings: int = 2048
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-5
    rope_parameters: dict[str, Any] | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    attention_output_bias: bool = False
    attention_dropout: float = 0.0
    mlp_bias: bool = False
    moe_bias: bool = False
    quick_geglu: bool = False
    swiglu_limit: float | None = None
    glu_linear_offset: float = 0.0
    qk_norm: bool = False
    sliding_window: int | None = None
    softmax_type: str = "vanilla"
    linear_conv_kernel_dim: int = 4
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128
    linear_num_key_heads: int = 16
    linear_num_value_heads: int = 32
    mamba_ssm_dtype: str = "float32"
    zero_centered_gamma: bool = False
    kv_lora_rank: int | None = None
    q_lora_rank: int | None = None
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    gated_attention: bool = False
    final_logit_softcapping: float | None = None
    num_experts: int = 0
    num_experts_per_tok: int = 2
    moe_intermediate_size: int = 0
    shared_expert_intermediate_size: int = 0
    gated_shared_expert: bool = False
    expert_layers: Any = None
    scoring_func: str = "softmax"
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    use_expert_bias: bool = False
    n_group: int = 1
    topk_group: int = 1
    residual_mode: str = "ladder"
    ladder_layers: Any = None
    residual_staleness: int = 1
    lanes: int = 0
    desync_interval: int = 0
    desync_tp: int | None = None
    use_cache: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    def __init__(self, **kwargs: Any) -> None:
        """Raises ValueError for an unknown wiring, missing layers, or parts that attention with sinks cannot have."""
        for name in MegatronLadderConfig.__annotations__:
            setattr(self, name, kwargs.pop(name, getattr(MegatronLadderConfig, name)))
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        self.expert_layers = list(self.expert_layers or ())
        self.ladder_layers = self._late_layers()
        rotary_percent = (self.rope_parameters or {}).get("partial_rotary_factor", 1.0)
        if self.has_sinks and (self.qk_norm or rotary_percent != 1):
            raise ValueError("softmax_type 'learnable' with qk_norm or a partial_rotary_factor: expected neither")
        if self.qk_norm:
            # The same matrices plus the norms of queries and keys.
            self.base_model_tp_plan = Qwen3Config.base_model_tp_plan
        if self.kv_lora_rank:
            absent = "expert", "q_proj" if self.q_lora_rank else "q_b_proj"
            plan = DeepseekV2Config.base_model_tp_plan.items()
            self.base_model_tp_plan = {key: how for key, how in plan if not any(part in key for part in absent)}
            # The rotary embedding of transformers is as wide as a head.
            self.head_dim = self.qk_rope_head_dim
            self.qk_head_dim = self.qk_nope_head_dim + self.qk_rope_head_dim
        if self.gated_attention:
            self.base_model_tp_plan = {**self.base_model_tp_plan, "layers.*.self_attn.gate_proj": "colwise"}
        if "linear_attention" in (kwargs.get("layer_types") or ()):
            linear = {key: how for key, how in Qwen3_5TextConfig.base_model_tp_plan.items() if "linear_attn" in key}
            self.base_model_tp_plan = {**self.base_model_tp_plan, **linear}
        if self.num_experts:
            experts = {key: how for key, how in Glm4MoeConfig.base_model_tp_plan.items() if "expert" in key}
            self.base_model_tp_plan = {**self.base_model_tp_plan, **experts}
        if self.lane_count or self.moe_bias or self.has_sinks:
            # A plan would shard the heads of one lane but no sinks, and add biases of experts on every rank.
            self.base_model_tp_plan = None
        super().__init__(**kwargs)

    def _late_layers(self) -> list[int]:
        """Return `ladder_layers` as sorted indices."""
        if self.residual_mode not in WIRINGS:
            raise ValueError(f"residual_mode {self.residual_mode!r}: transformers can run {', '.join(WIRINGS)}")
        given, layers = self.ladder_layers, self.layer_count
        late = list(range(layers - given, layers)) if isinstance(given, int) else sorted(given or ())
        if len(set(late)) < len(late) or any(not 0 <= layer < layers for layer in late):
            raise ValueError(f"ladder_layers {given}: expected different layers of 0-{layers - 1}")
        return late

    @property
    def lane_count(self) -> int:
        """The number of lanes, or of ranks of desync, that read different streams; 0 if there are none."""
        return self.lanes or self.desync_tp or 0

    @property
    def has_sinks(self) -> bool:
        """Whether each head's softmax has a sink."""
        return self.softmax_type == "learnable"

    @property
    def has_linear_attention(self) -> bool:
        """Whether the token mixer of some layers is gated DeltaNet."""
        return "linear_attention" in (getattr(self, "layer_types", None) or ())

    def layer_type_of(self, attention: int) -> str:
        """Return the type of an attention."""
        return (getattr(self, "layer_types", None) or ["full_attention"] * self.num_hidden_layers)[attention]

    def window_of(self, attention: int) -> int | None:
        """Return the window of an attention; None if it has none."""
        return self.sliding_window if self.layer_type_of(attention) == "sliding_attention" else None

    @property
    def has_swiglu(self) -> bool:
        """Whether the activation is SwiGLU, without bound and offset."""
        return not self.quick_geglu and self.swiglu_limit is None and self.glu_linear_offset == 0

    @property
    def attentions_per_layer(self) -> int:
        """The number of attentions of a layer."""
        return sum(kind.has_mixer for kind in WIRINGS[self.residual_mode].sub_blocks)

    @property
    def layer_count(self) -> int:
        """The number of layers."""
        return self.num_hidden_layers // self.attentions_per_layer

    def wired_layers(self) -> list[tuple[WiredSubBlock, ...]]:
        """Return the sub-blocks of every layer, each with the existing outputs that it misses.

        In desync, the outputs since the last sum of the streams are missing: a rank has only its partial sums of them.
        """
        wiring, has_shared_expert = WIRINGS[self.residual_mode], self.shared_expert_intermediate_size > 0
        kinds = [wiring.kinds(layer in self.expert_layers, has_shared_expert) for layer in range(self.layer_count)]
        layers = wiring.layers(kinds, self.ladder_layers, self.residual_staleness, self.desync_interval)
        numbers = itertools.count()

        def of_existing(one: WiredSubBlock) -> WiredSubBlock:
            number = next(numbers)
            missing = range(1, 1 + number % self.desync_interval) if wiring.stream == "per rank" else one.missing
            return one._replace(missing=tuple(back for back in missing if back <= number))

        return [tuple(map(of_existing, sub_blocks)) for sub_blocks in layers]

    def missing_before(self, layer: int) -> tuple[int, ...]:
        """Return what the first sub-block of a layer misses; nothing is missing after the last layer."""
        return () if layer == self.layer_count else self.wired_layers()[layer][0].missing


def norm_name(kind: SubBlockKind) -> str:
    """Return the name of the norm of a sub-block."""
    return kind.norm.replace("attention_norm", "input_layernorm").replace("mlp_norm", "post_attention_layernorm")


__all__ = ["MegatronLadderConfig"]

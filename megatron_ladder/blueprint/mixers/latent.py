"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from megatron_ladder.blueprint.mixers.attention import Attention, yarn_mscale
from megatron_ladder.blueprint.mixers.mixer import Mixer, StateKind, StateSpec
from megatron_ladder.blueprint.specs import Branch, Matrix, TensorSpec, column, whole
from megatron_ladder.flags import Check, rule

if TYPE_CHECKING:
    from megatron_ladder.blueprint.model import ModelConfig


@dataclass(frozen=True)
class LatentAttention(Attention):
    """Attention whose keys and values are computed from a latent.

    Inputs are the queries `q` or their latent `q_a`, and `kv_a`, the latent of keys and values with the rotated key,
    which all heads share: such latents are whole on every rank. Each is normed and multiplied with a column-parallel
    matrix, `q_b` and `kv_b`. Published models have no biases where these have none.
    """

    repeats_states: ClassVar[bool] = False
    checks: ClassVar[Sequence[Check]] = (
        rule(
            lambda kv_lora_rank, window_size: kv_lora_rank and window_size,
            "{kv_lora_rank} with {window_size}: queries see all latents",
            "leave it out",
        ),
        rule(
            lambda kv_lora_rank, softmax_type: kv_lora_rank and softmax_type == "learnable",
            "{kv_lora_rank} with {softmax_type}: latent attention has no sinks",
            "leave it out",
        ),
        rule(
            lambda kv_lora_rank, qk_rope_head_dim: kv_lora_rank and qk_rope_head_dim % 2,
            "{qk_rope_head_dim} is odd: the rotary embedding needs pairs",
        ),
        rule(
            lambda kv_lora_rank, num_key_value_heads: kv_lora_rank and num_key_value_heads != 1,
            "{kv_lora_rank} with {num_key_value_heads}: all heads share one latent",
            "leave it out",
        ),
        rule(
            lambda kv_lora_rank, head_dim, qk_nope_head_dim, qk_rope_head_dim: (
                kv_lora_rank and head_dim != qk_nope_head_dim + qk_rope_head_dim
            ),
            "{kv_lora_rank} with {head_dim}: the sum of {qk_nope_head_dim!f} and {qk_rope_head_dim!f}",
            "leave it out",
        ),
        rule(
            lambda kv_lora_rank, rotary_percent: kv_lora_rank and rotary_percent != 1,
            "{kv_lora_rank} with {rotary_percent}: {qk_rope_head_dim} is the rotated part",
            "leave it out",
        ),
        rule(
            lambda kv_lora_rank, qk_layernorm: kv_lora_rank and qk_layernorm,
            "{kv_lora_rank} with {qk_layernorm} {qk_layernorm!v}: the latents are normed",
            "leave it out",
        ),
    )

    @classmethod
    def of(cls, config: "ModelConfig", layer: int) -> Mixer | None:
        """See `Mixer.of`."""
        return cls(config) if config.kv_lora_rank else None

    @property
    def name(self) -> str:
        """See `Mixer.name`."""
        return "latent attention"

    @property
    def rotary_dim(self) -> int:
        """See `Attention.rotary_dim`."""
        return self.config.qk_rope_head_dim

    @property
    def value_dim(self) -> int:
        """See `Attention.value_dim`."""
        return self.config.v_head_dim

    @property
    def softmax_scale(self) -> float:
        """See `Attention.softmax_scale`; it includes YaRN's m(mscale_all_dim)^2."""
        mscale = yarn_mscale(self.config.rope_scaling_factor, self.config.rope_mscale_all_dim)
        return mscale**2 * super().softmax_scale

    def branch(self, name: str) -> Branch:
        """See `Mixer.branch`."""
        config = self.config
        heads = config.num_attention_heads
        inputs: dict[str, Matrix] = {}
        norms: dict[str, TensorSpec] = {}
        expansions: dict[str, Matrix] = {}

        def add_latent(which: str, rank: int, rotated: int, head_width: int) -> None:
            # A latent is one head, which all ranks hold.
            latent, expansion = f"{which}_a", f"{which}_b"
            inputs[latent] = column(f"{name}.{latent}_proj", rank + rotated, config, config.add_qkv_bias, 1)
            norms[latent] = whole(f"{name}.{latent}_norm.weight", rank, mean=1.0)
            expansions[expansion] = column(f"{name}.{expansion}_proj", heads * head_width, config, False, heads, rank)

        if config.q_lora_rank:
            add_latent("q", config.q_lora_rank, 0, config.head_dim)
        else:
            inputs["q"] = column(f"{name}.q_proj", heads * config.head_dim, config, False, heads)
        add_latent("kv", config.kv_lora_rank, config.qk_rope_head_dim, config.qk_nope_head_dim + config.v_head_dim)
        return self._with_output(name, inputs, inner=norms, expansions=expansions)

    def states(self, parts: int) -> Sequence[StateSpec]:
        """See `Mixer.states`: the latent and the rotated key, on every rank."""
        return [StateSpec("latent", (1, self.config.kv_lora_rank + self.config.qk_rope_head_dim), StateKind.GROWS)]

    def kept_numbers(self, ranks: int) -> int:
        """See `Mixer.kept_numbers`: normed latents, and queries, keys and values of the heads."""
        config = self.config
        # Values that are not padded are a part of what is expanded.
        is_padded = config.v_head_dim < config.head_dim
        values = 2 * config.head_dim if is_padded else config.qk_nope_head_dim + config.v_head_dim
        heads = config.num_attention_heads // ranks * (2 * config.head_dim + values)
        return config.q_lora_rank + config.kv_lora_rank + heads + self._kept_of_gate(ranks)

    def decode_flops(self, positions: float) -> float:
        """See `Mixer.decode_flops`: each latent serves as key and as value."""
        width = 2 * self.config.kv_lora_rank + self.config.qk_rope_head_dim
        return 2 * positions * self.config.num_attention_heads * width

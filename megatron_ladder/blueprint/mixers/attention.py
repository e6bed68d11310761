"""Causal softmax attention whose heads are grouped: each key-value head serves as many query heads."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from megatron_ladder.blueprint.mixers.mixer import Mixer, StateKind, StateSpec
from megatron_ladder.blueprint.specs import Branch, Matrix, Role, TensorSpec, column, norm_weight, row
from megatron_ladder.blueprint.wiring import BranchKind
from megatron_ladder.flags import Check, rule

if TYPE_CHECKING:
    from megatron_ladder.blueprint.model import ModelConfig


@dataclass(frozen=True)
class Attention(Mixer):
    """Softmax attention over heads.

    Inputs are `q`, `k`, `v` and, if there is an output gate, `gate`; with `qk_layernorm` the heads of queries and keys
    are normed by `q` and `k`. `sinks` are the logarithms of what the softmax of each head adds to its denominator.
    """

    window: int = 0
    """The newest positions, its own included, that a query sees; 0: all."""

    is_exported: ClassVar[bool] = True
    repeats_states: ClassVar[bool] = True
    checks: ClassVar[Sequence[Check]] = (
        rule(
            lambda num_attention_heads, num_key_value_heads: num_attention_heads % num_key_value_heads,
            "{num_attention_heads} is not divisible by {num_key_value_heads}: every key head serves as many query "
            "heads",
        ),
        rule(
            lambda window_size, window_layers: bool(window_size) != bool(window_layers),
            "{window_size} with {window_layers}: expected both or none of them",
        ),
        rule(
            lambda kv_lora_rank, head_dim, rotary_percent: (
                not kv_lora_rank and rotary_percent == 1 and (head_dim % 2 or head_dim < 2)
            ),
            "{head_dim} is odd or below 2: the rotary embedding needs pairs",
        ),
        rule(
            lambda kv_lora_rank, head_dim, rotary_percent: (
                not kv_lora_rank and rotary_percent < 1 and int(head_dim * rotary_percent) not in range(2, head_dim, 2)
            ),
            "{head_dim} x {rotary_percent} is odd or below 2: the rotary embedding needs pairs",
        ),
    )

    @classmethod
    def of(cls, config: "ModelConfig", layer: int) -> Mixer | None:
        """See `Mixer.of`."""
        return cls(config, config.window_size if layer in config.window_layers else 0)

    @property
    def name(self) -> str:
        """See `Mixer.name`."""
        seen = f" to {self.window} positions" if self.window else ""
        return f"attention{seen}{' with sinks' if self.config.softmax_type == 'learnable' else ''}"

    @property
    def rotary_dim(self) -> int:
        """Width of the rotated part of a query."""
        return int(self.config.head_dim * self.config.rotary_percent)

    @property
    def value_dim(self) -> int:
        """Width of a head's value."""
        return self.config.head_dim

    @property
    def softmax_scale(self) -> float:
        """The factor on the scores."""
        return 1 / math.sqrt(self.config.head_dim)

    def branch(self, name: str) -> Branch:
        """See `Mixer.branch`."""
        config = self.config
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        inputs = {
            which: column(f"{name}.{which}_proj", count * config.head_dim, config, config.add_qkv_bias, count)
            for which, count in (("q", heads), ("k", kv_heads), ("v", kv_heads))
        }
        normed = ("q", "k") if config.qk_layernorm else ()
        inner = {which: norm_weight(f"{name}.{which}_norm.weight", config.head_dim, config) for which in normed}
        if config.softmax_type == "learnable":
            inner["sinks"] = TensorSpec(f"{name}.sinks", (heads,), Role.VECTOR, 0, std=config.init_method_std)
        return self._with_output(name, inputs, inner=inner)

    def _with_output(self, name: str, inputs: dict[str, Matrix], **others: Any) -> Branch:
        """Add the output gate and the output matrix to the inputs and the `others`, which are fields of `Branch`."""
        config, heads = self.config, self.config.num_attention_heads
        width = heads * self.value_dim
        if config.attention_output_gate:
            inputs["gate"] = column(f"{name}.gate_proj", width, config, False, heads)
        output = row(f"{name}.o_proj", width, config, config.add_attention_output_bias, block=self.value_dim)
        return Branch(BranchKind.MIXER, inputs, output, mixer=self, **others)

    def states(self, parts: int) -> Sequence[StateSpec]:
        """See `Mixer.states`: keys and values."""
        # With fewer heads than parts, several parts hold the same.
        shape = max(1, self.config.num_key_value_heads // parts), self.config.head_dim
        kind = StateKind.WINDOW if self.window else StateKind.GROWS
        return [StateSpec(name, shape, kind, self.window) for name in ("k", "v")]

    def flops(self, tokens: int, positions: float) -> float:
        """See `Mixer.flops`: those of scores and of weighted values."""
        seen = min(positions, self.window or positions)
        return 2 * tokens * seen * self.config.num_attention_heads * (self.config.head_dim + self.value_dim)

    def kept_numbers(self, ranks: int) -> int:
        """See `Mixer.kept_numbers`: queries and keys after the rotary embedding."""
        config = self.config
        heads = config.num_attention_heads // ranks + max(1, config.num_key_value_heads // ranks)
        return heads * config.head_dim + self._kept_of_gate(ranks)

    def _kept_of_gate(self, ranks: int) -> int:
        """Return the numbers of the gate's sigmoid, and of the output that it multiplies."""
        config = self.config
        return 2 * config.num_attention_heads // ranks * self.value_dim if config.attention_output_gate else 0

    def causal_positions(self, length: int) -> float:
        """See `Mixer.causal_positions`."""
        window = min(length, self.window or length)
        return window - window**2 / (2 * length)


def attention_factor(config: "ModelConfig") -> float:
    """Return the factor on cosines and sines: 1 except with YaRN (arXiv 2309.00071)."""
    if config.rope_scaling != "yarn":
        return 1.0
    factor = config.rope_scaling_factor
    return yarn_mscale(factor, config.rope_mscale) / yarn_mscale(factor, config.rope_mscale_all_dim)


def yarn_mscale(factor: float, mscale: float) -> float:
    """Return YaRN's m(mscale) = 0.1 mscale ln(factor) + 1, where the context grows by a factor."""
    return 0.1 * mscale * math.log(max(factor, 1.0)) + 1.0

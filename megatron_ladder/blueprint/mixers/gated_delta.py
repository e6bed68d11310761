"""Gated DeltaNet (arXiv 2412.06464), with the convolutions and gates of Qwen3-Next."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from megatron_ladder.blueprint.mixers.mixer import Mixer, StateKind, StateSpec
from megatron_ladder.blueprint.specs import Branch, Role, TensorSpec, column, row, whole
from megatron_ladder.blueprint.wiring import BranchKind
from megatron_ladder.flags import Check, rule

if TYPE_CHECKING:
    from megatron_ladder.blueprint.model import ModelConfig

_FIRST_DECAYS = (0.01, 16.0)
"""Bounds of the initial factors of the decay, whose logarithms are trained."""
CHUNK = 64
"""Tokens that training and prompts compute together."""


@dataclass(frozen=True)
class GatedDelta(Mixer):
    """A state for each value head, from which every token first removes what its key reads, and then adds its value.

    Inputs are `q`, `k` and `v`, which a causal convolution of each channel mixes, the output gate `gate`, and for each
    value head the strength `b` of its update and the decay `a`. Value heads in a row share a query and key head.
    """

    is_exported: ClassVar[bool] = True
    checks: ClassVar[Sequence[Check]] = (
        rule(
            lambda linear_attention_layers, linear_num_key_heads, linear_num_value_heads: (
                linear_attention_layers and linear_num_value_heads % linear_num_key_heads
            ),
            "{linear_num_value_heads} is not divisible by {linear_num_key_heads}: every key head serves as many value "
            "heads",
        ),
        rule(
            lambda linear_attention_layers, experimental_attention_variant: (
                linear_attention_layers and experimental_attention_variant == "none"
            ),
            "{linear_attention_layers} with {experimental_attention_variant}: these layers have no mixer",
        ),
    )

    @classmethod
    def of(cls, config: "ModelConfig", layer: int) -> Mixer | None:
        """See `Mixer.of`."""
        return cls(config) if layer in config.linear_attention_layers else None

    @property
    def name(self) -> str:
        """See `Mixer.name`."""
        return "gated DeltaNet"

    def branch(self, name: str) -> Branch:
        """See `Mixer.branch`."""
        config = self.config
        key_heads, value_heads = config.linear_num_key_heads, config.linear_num_value_heads
        widths = {
            "q": (key_heads, config.linear_key_head_dim),
            "k": (key_heads, config.linear_key_head_dim),
            "v": (value_heads, config.linear_value_head_dim),
            "gate": (value_heads, config.linear_value_head_dim),
            "b": (value_heads, 1),
            "a": (value_heads, 1),
        }
        inputs = {
            which: column(f"{name}.{which}_proj", heads * width, config, False, heads)
            for which, (heads, width) in widths.items()
        }
        inner = {f"{which}_conv": self._filters(f"{name}.{which}_conv", *widths[which]) for which in ("q", "k", "v")}
        inner["A_log"] = TensorSpec(f"{name}.A_log", (value_heads,), Role.VECTOR, 0, log_of=_FIRST_DECAYS)
        inner["dt_bias"] = TensorSpec(f"{name}.dt_bias", (value_heads,), Role.VECTOR, 0, mean=1.0)
        inner["norm"] = whole(f"{name}.norm.weight", config.linear_value_head_dim, mean=1.0)
        width = config.linear_value_head_dim
        output = row(f"{name}.o_proj", value_heads * width, config, False, block=width)
        return Branch(BranchKind.MIXER, inputs, output, mixer=self, inner=inner)

    def _filters(self, name: str, heads: int, width: int) -> TensorSpec:
        kernel = self.config.linear_conv_kernel_dim
        # The variance of torch's initial filters.
        std = (3 * kernel) ** -0.5
        shape = heads * width, kernel
        return TensorSpec(f"{name}.weight", shape, Role.CONVOLUTION, 0, block=width, heads=heads, std=std)

    def states(self, parts: int) -> Sequence[StateSpec]:
        """See `Mixer.states`: the newest inputs of the convolution, and the matrix of each value head."""
        config = self.config
        # With fewer heads than parts, several parts hold the same.
        key_heads = max(1, config.linear_num_key_heads // parts)
        value_heads = config.linear_num_value_heads // parts
        channels = 2 * key_heads * config.linear_key_head_dim + value_heads * config.linear_value_head_dim
        matrix = value_heads, config.linear_key_head_dim, config.linear_value_head_dim
        return [
            StateSpec("convolution", (1, config.linear_conv_kernel_dim - 1, channels), StateKind.FIXED),
            StateSpec("memory", matrix, StateKind.FIXED, is_fp32=True),
        ]

    def flops(self, tokens: int, positions: float) -> float:
        """See `Mixer.flops`: those of reading, updating and reading the states token by token."""
        config = self.config
        state = config.linear_num_value_heads * config.linear_key_head_dim * config.linear_value_head_dim
        return 6 * tokens * state

    def kept_numbers(self, ranks: int) -> int:
        """See `Mixer.kept_numbers`: backward starts from the projections."""
        return 0

    def recomputed_numbers(self, ranks: int) -> int:
        """See `Mixer.recomputed_numbers`. The factors are fitted to the peak of allocations in backward."""
        config = self.config
        value_heads = config.linear_num_value_heads // ranks
        key_heads = max(1, config.linear_num_key_heads // ranks)
        keys, values = key_heads * config.linear_key_head_dim, value_heads * config.linear_value_head_dim
        # For each value head: keys with its decays, triangles, and the matrix before each chunk.
        matrix = config.linear_key_head_dim * config.linear_value_head_dim
        of_head = 3 * config.linear_key_head_dim + 8 * CHUNK + matrix // CHUNK
        return 15 * keys + 14 * values + value_heads * of_head

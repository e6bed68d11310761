"""The configuration of a Llama-family decoder whose sub-blocks may read the residual stream late."""

from typing import Any

from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config

ONE_NORM_MODES = ("parallel", "ladder-parallel")
"""Attention and MLP of a layer read one norm, side by side."""
LATE_MODES = ("ladder", "ladder-parallel")
"""Some layers read the residual stream late."""


class MegatronLadderConfig(LlamaConfig):
    """Llama's configuration, and what Llama does not have.

    Of Llama's own keys one means less here: `attention_bias` is about queries, keys and values alone.
    """

    model_type = "megatron_ladder"
    # A pipeline stage would have to hand several tensors on.
    base_model_pp_plan = None

    def __init__(
        self,
        residual_mode: str = "ladder",
        ladder_layers: int | list[int] | None = None,
        residual_staleness: int = 1,
        attention_output_bias: bool = False,
        qk_norm: bool = False,
        **kwargs: Any,
    ) -> None:
        """
        Args:
            residual_mode: `ladder` (Ladder Residual, arXiv 2501.06589), `parallel` (attention and MLP side by side),
                `ladder-parallel` (both), or `standard`.
            ladder_layers: layers that read the residual stream late: their indices, an integer N for the upper N,
                or None for none.
            residual_staleness: by how many sub-blocks they read it late.
            attention_output_bias: whether the attention's output projection has a bias.
            qk_norm: whether each head's queries and keys are normed before they are turned.

        Raises:
            ValueError: a wiring that one process cannot compute, or that does not fit the number of layers.
        """
        super().__init__(**kwargs)
        modes = ("standard", "ladder", *ONE_NORM_MODES)
        if residual_mode not in modes:
            raise ValueError(f"residual_mode {residual_mode!r}: transformers can run {', '.join(modes)}")
        if residual_staleness < 1:
            raise ValueError(f"residual_staleness {residual_staleness} must be at least 1")
        layers = self.num_hidden_layers
        if isinstance(ladder_layers, int):
            late = list(range(layers - ladder_layers, layers))
        else:
            late = sorted(ladder_layers or ())
        if late and residual_mode not in LATE_MODES:
            raise ValueError(f"ladder_layers {ladder_layers} has no meaning with residual_mode {residual_mode!r}")
        if len(set(late)) < len(late) or any(not 0 <= layer < layers for layer in late):
            raise ValueError(f"ladder_layers {ladder_layers}: expected different layers of 0-{layers - 1}")
        self.residual_mode = residual_mode
        self.ladder_layers = late
        self.residual_staleness = residual_staleness
        self.attention_output_bias = attention_output_bias
        self.qk_norm = qk_norm
        if qk_norm:
            # The same matrices as Llama's, and the norms of queries and keys.
            self.base_model_tp_plan = dict(Qwen3Config.base_model_tp_plan)

    def staleness(self, layer: int) -> int:
        """By how many sub-blocks this layer reads the residual stream late."""
        return self.residual_staleness if layer in self.ladder_layers else 0


__all__ = ["MegatronLadderConfig"]

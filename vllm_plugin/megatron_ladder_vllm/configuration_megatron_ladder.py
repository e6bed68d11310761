"""The configuration of a Llama-family decoder whose sub-blocks may read the residual stream late."""

from typing import Any

from transformers import PreTrainedConfig
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config

# Wiring -> the sub-blocks of a layer, and whether each reads the residual stream late in ladder layers.
SUB_BLOCK_TABLE = {
    'standard': (('attention', False), ('mlp', False)),
    'ladder': (('attention', True), ('mlp', True)),
    'parallel': (('attention_mlp', False),),
    'ladder-parallel': (('attention_mlp', True),),
    'ladder-attention': (('attention', True), ('mlp', False)),
}


class MegatronLadderConfig(PreTrainedConfig):
    """Llama's keys, and the keys of biases, norms and the wiring.

    `attention_bias` applies only to queries, keys and values, unlike in Llama.
    """

    model_type = "megatron_ladder"
    keys_to_ignore_at_inference = ["past_key_values"]
    base_model_tp_plan = LlamaConfig.base_model_tp_plan
    # A pipeline stage would have to pass on several tensors.
    base_model_pp_plan = None

    def __init__(
        self,
        *,
        vocab_size: int = 32000,
        hidden_size: int = 4096,
        intermediate_size: int = 11008,
        num_hidden_layers: int = 32,
        num_attention_heads: int = 32,
        num_key_value_heads: int | None = None,
        head_dim: int | None = None,
        hidden_act: str = "silu",
        max_position_embeddings: int = 2048,
        initializer_range: float = 0.02,
        rms_norm_eps: float = 1e-5,
        rope_parameters: dict[str, Any] | None = None,
        tie_word_embeddings: bool = False,
        attention_bias: bool = False,
        attention_output_bias: bool = False,
        attention_dropout: float = 0.0,
        mlp_bias: bool = False,
        qk_norm: bool = False,
        final_logit_softcapping: float | None = None,
        residual_mode: str = "ladder",
        ladder_layers: int | list[int] | None = None,
        residual_staleness: int = 1,
        use_cache: bool = True,
        bos_token_id: int | None = None,
        eos_token_id: int | list[int] | None = None,
        pad_token_id: int | None = None,
        **kwargs: Any,
    ) -> None:
        """
        Args:
            attention_bias: whether the projections of queries, keys and values have biases.
            attention_output_bias: whether the attention's output projection has a bias.
            qk_norm: whether each head's queries and keys are normed before the rotary embedding.
            final_logit_softcapping: bound of the logits, as in Gemma 2; None for no bound.
            residual_mode: `standard`, `ladder` (Ladder Residual, arXiv 2501.06589), `parallel` (attention and MLP side
                by side), or another key of `SUB_BLOCK_TABLE`.
            ladder_layers: layers that read the residual stream late: their indices, an integer N for the upper N,
                or None for none.
            residual_staleness: how many sub-blocks late they read it.

        Raises:
            ValueError: a wiring that one process cannot compute, or that does not match the number of layers.
        """
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_attention_heads if num_key_value_heads is None else num_key_value_heads
        self.head_dim = hidden_size // num_attention_heads if head_dim is None else head_dim
        self.hidden_act = hidden_act
        self.max_position_embeddings = max_position_embeddings
        self.initializer_range = initializer_range
        self.rms_norm_eps = rms_norm_eps
        self.rope_parameters = rope_parameters
        self.tie_word_embeddings = tie_word_embeddings
        self.attention_bias = attention_bias
        self.attention_output_bias = attention_output_bias
        self.attention_dropout = attention_dropout
        self.mlp_bias = mlp_bias
        self.qk_norm = qk_norm
        self.final_logit_softcapping = final_logit_softcapping
        self.residual_mode = residual_mode
        self.ladder_layers = self._late_layers(residual_mode, ladder_layers, residual_staleness)
        self.residual_staleness = residual_staleness
        self.use_cache = use_cache
        self.bos_token_id = bos_token_id
        self.eos_token_id = eos_token_id
        self.pad_token_id = pad_token_id
        if qk_norm:
            # The same matrices plus the norms of queries and keys.
            self.base_model_tp_plan = Qwen3Config.base_model_tp_plan
        super().__init__(**kwargs)

    def _late_layers(self, residual_mode: str, ladder_layers: int | list[int] | None, staleness: int) -> list[int]:
        """Return `ladder_layers` as sorted indices."""
        if residual_mode not in SUB_BLOCK_TABLE:
            raise ValueError(f"residual_mode {residual_mode!r}: transformers can run {', '.join(SUB_BLOCK_TABLE)}")
        if staleness < 1:
            raise ValueError(f"residual_staleness {staleness} must be at least 1")
        layers = self.num_hidden_layers
        if isinstance(ladder_layers, int):
            late = list(range(layers - ladder_layers, layers))
        else:
            late = sorted(ladder_layers or ())
        if late and not any(reads_late for _, reads_late in SUB_BLOCK_TABLE[residual_mode]):
            raise ValueError(f"ladder_layers {ladder_layers} has no meaning with residual_mode {residual_mode!r}")
        if len(set(late)) < len(late) or any(not 0 <= layer < layers for layer in late):
            raise ValueError(f"ladder_layers {ladder_layers}: expected different layers of 0-{layers - 1}")
        return late

    def sub_blocks(self, layer: int) -> list[tuple[str, int]]:
        """Return the sub-blocks of a layer, each with how many sub-blocks late it reads the residual stream."""
        staleness = self.residual_staleness if layer in self.ladder_layers else 0
        return [(kind, staleness if late else 0) for kind, late in SUB_BLOCK_TABLE[self.residual_mode]]

    def missing_before(self, layer: int) -> int:
        """Return how many outputs may be missing from the stream that enters a layer; none after the last layer."""
        if layer == self.num_hidden_layers:
            return 0
        pending = 0
        for earlier in range(layer):
            for _, staleness in self.sub_blocks(earlier):
                pending = min(pending, staleness) + 1
        return min(pending, self.sub_blocks(layer)[0][1])


__all__ = ["MegatronLadderConfig"]

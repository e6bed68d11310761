"""Which tensors a model has: their canonical names and shapes, and what a Hugging Face directory calls them."""

import re

from megatron_ladder.blueprint.model import ONE_NORM_MODES, ModelConfig, synchronised_after

_PARTS = (
    ("embedding.", "model.embed_tokens."),
    ("final_norm.", "model.norm."),
    ("layers.", "model.layers."),
    (".attention_norm.", ".input_layernorm."),
    (".mlp_norm.", ".post_attention_layernorm."),
    (".attention.", ".self_attn."),
)
"""Canonical, and as transformers' Llama, Mistral, Qwen2 and Qwen3 name it; the rest of a name is the same."""

_LAYER = re.compile(r"layers\.(\d+)\.")


def hf_name(name: str) -> str:
    """What a Hugging Face directory calls a canonical tensor."""
    for ours, theirs in _PARTS:
        name = name.replace(ours, theirs)
    return name


def layer_of(name: str) -> int | None:
    """The layer that a canonical tensor belongs to; None for embedding, final norm and head."""
    match = _LAYER.match(name)
    return None if match is None else int(match[1])


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Canonical name -> shape of every weight, in the order in which the model computes with them.

    Matrices are [out, in]. In a desync model the norm of a stream that is each rank's own is [ranks, h].
    """
    h, vocabulary = config.hidden_size, config.vocab_size
    shapes: dict[str, tuple[int, ...]] = {"embedding.weight": (vocabulary, h)}
    for layer in range(config.num_layers):
        shapes |= _layer_shapes(config, layer)
    shapes["final_norm.weight"] = (h,)
    if not config.tie_embeddings:
        shapes["lm_head.weight"] = (vocabulary, h)
    return shapes


def _layer_shapes(config: ModelConfig, layer: int) -> dict[str, tuple[int, ...]]:
    h, f, d = config.hidden_size, config.ffn_hidden_size, config.head_dim
    q, kv = config.num_attention_heads * d, config.num_key_value_heads * d
    attention, mlp = f"layers.{layer}.attention", f"layers.{layer}.mlp"
    shapes = {f"layers.{layer}.attention_norm.weight": _norm_shape(config, 2 * layer)}
    for name, rows in (("q_proj", q), ("k_proj", kv), ("v_proj", kv)):
        shapes |= _matrix(f"{attention}.{name}", rows, h, config.add_qkv_bias)
    if config.qk_layernorm:
        shapes |= {f"{attention}.q_norm.weight": (d,), f"{attention}.k_norm.weight": (d,)}
    shapes |= _matrix(f"{attention}.o_proj", h, q, config.add_attention_output_bias)
    if config.residual_mode not in ONE_NORM_MODES:
        shapes[f"layers.{layer}.mlp_norm.weight"] = _norm_shape(config, 2 * layer + 1)
    for name in ("gate_proj", "up_proj"):
        shapes |= _matrix(f"{mlp}.{name}", f, h, config.add_mlp_bias)
    return shapes | _matrix(f"{mlp}.down_proj", h, f, config.add_mlp_bias)


def _matrix(name: str, rows: int, columns: int, bias: bool) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (rows, columns)}
    return shapes | {f"{name}.bias": (rows,)} if bias else shapes


def _norm_shape(config: ModelConfig, sub_block: int) -> tuple[int, ...]:
    if synchronised_after(config, sub_block - 1):
        return (config.hidden_size,)
    assert config.desync_tp is not None
    return config.desync_tp, config.hidden_size

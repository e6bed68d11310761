"""Small models with known weights, and training checkpoints of them."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_ladder.blueprint.boxes import Box
from megatron_ladder.blueprint.model import ModelConfig
from megatron_ladder.checkpoint.optimizer_state import Piece
from megatron_ladder.comm.mesh import ProcessMesh
from megatron_ladder.data.tokenizer_training import train_sentencepiece
from megatron_ladder.generate.engine import GenerationEngine
from megatron_ladder.model.language_model import LanguageModel
from megatron_ladder.model.operations import Operations
from megatron_ladder.model.stack import StackOptions
from megatron_ladder.tokenizers.sentencepiece import SentencePieceTokenizer
from tests.helpers.sharded import build_on, small_model
from tests.helpers.tokenizer_copies import copy_tokenizer
from tests.reference import ReferenceConfig, make_weights
from tests.unit.checkpoint.tiny_training import publish_pieces

PROMPTS = ((5, 9, 3), (17,), (1, 2, 3, 4, 5, 6, 7, 8, 40), (60, 60, 2, 11, 9))
"""Prompts of unequal lengths."""

EXPERTS = {"num_experts": 6, "moe_ffn_hidden_size": 12, "ladder_layers": (0, 2)}
SHARED_EXPERT = EXPERTS | {"moe_layers": (1, 2), "moe_shared_expert_intermediate_size": 8}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 1,
    "head_dim": 18,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 6,
    "v_head_dim": 10,
}
DELTA: dict[str, Any] = {
    "experimental_attention_variant": "gated_delta_net",
    "linear_attention_layers": (0, 2),
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 5,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
WINDOWS: dict[str, Any] = {"window_size": 4, "window_layers": (0, 2)}
MODELS: dict[str, dict[str, Any]] = {
    "standard": {"residual_mode": "standard", "add_qkv_bias": True},
    "ladder": {"residual_mode": "ladder", "ladder_layers": (0, 1, 2), "num_key_value_heads": 1},
    "hybrid": {"residual_mode": "ladder", "ladder_layers": (1,), "qk_layernorm": True, "tie_embeddings": True},
    "parallel": {
        "residual_mode": "parallel",
        "add_mlp_bias": True,
        "num_key_value_heads": 1,
        "attention_output_gate": True,
    },
    "ladder-parallel": {
        "residual_mode": "ladder-parallel",
        "ladder_layers": (0, 1, 2),
        "num_key_value_heads": 4,
        "add_qkv_bias": True,
        "add_attention_output_bias": True,
        "add_mlp_bias": True,
    },
    "lanes": {
        "residual_mode": "ladder",
        "ladder_layers": (0, 1, 2),
        "residual_staleness": 2,
        "lanes": 4,
        "num_key_value_heads": 4,
    },
    "farskip": SHARED_EXPERT | {"residual_mode": "farskip"},
    "longcat": EXPERTS | {"residual_mode": "longcat", "moe_layers": (0, 1, 2), "rotary_percent": 0.5},
    "biased experts": EXPERTS
    | {
        "residual_mode": "ladder",
        "moe_layers": (0, 1),
        "add_moe_bias": True,
        "quick_geglu": True,
        "activation_func_clamp_value": 0.4,
        "glu_linear_offset": 1.0,
        "rope_scaling": "yarn",
        "rope_scaling_factor": 8.0,
        "rope_original_max_position_embeddings": 8,
        "yarn_correction_range_round_to_int": False,
    },
    "windows": WINDOWS | {"residual_mode": "ladder", "ladder_layers": (1, 2), "num_key_value_heads": 2},
    "sinks": WINDOWS | {"residual_mode": "parallel", "softmax_type": "learnable", "num_key_value_heads": 1},
    # With a smaller epsilon, norms would amplify the rounding of small outputs in bf16.
    "delta": DELTA | {"residual_mode": "ladder", "ladder_layers": (0, 1), "norm_epsilon": 0.05},
    "delta-parallel": DELTA
    | {"residual_mode": "parallel", "linear_num_key_heads": 1, "linear_conv_kernel_dim": 2, "num_key_value_heads": 1},
    "latent": LATENT | {"residual_mode": "standard", "add_qkv_bias": True},
    "latent-ladder": LATENT
    | {"residual_mode": "ladder", "ladder_layers": (1, 2), "residual_staleness": 2, "q_lora_rank": 14},
    "latent-parallel": LATENT | {"residual_mode": "ladder-parallel", "ladder_layers": (0, 1, 2), "q_lora_rank": 14},
    "latent-shortcut": LATENT | SHARED_EXPERT | {"residual_mode": "shortcut", "v_head_dim": 24},
    "latent-longcat": LATENT | EXPERTS | {"residual_mode": "longcat", "moe_layers": (0, 1, 2)},
    "instella": LATENT
    | SHARED_EXPERT
    | {
        "residual_mode": "farskip",
        "attention_output_gate": True,
        "rope_scaling": "yarn",
        "rope_scaling_factor": 8.0,
        "rope_original_max_position_embeddings": 8,
        "rope_mscale_all_dim": 1.0,
    },
}


SOMETIMES, ALWAYS, NEVER = (1.0, 1.0), (3.0, 3.0), (3.0, -3.0)
"""Sharpness and trust of `drafting_reference` for models whose drafts are accepted so often."""


def tiny_config(**changes: Any) -> ModelConfig:
    return small_model(**({"num_layers": 3, "vocab_size": 67, "max_position_embeddings": 96} | changes))


def reference_of(config: ModelConfig, seed: int = 3) -> tuple[dict[str, Tensor], ReferenceConfig]:
    """Return weights and sizes for `tests.reference`."""
    reference = ReferenceConfig.like(config)
    return make_weights(reference, seed), reference


def drafting_reference(
    config: ModelConfig, sharpness: float, trust: float = 1.0, dtype: torch.dtype = torch.float32
) -> tuple[dict[str, Tensor], ReferenceConfig]:
    """Return weights of a model with a drafting head, and sizes, for `tests.reference`.

    Every word has a usual next word. With a larger `sharpness`, the model more often chooses that word, whatever the
    context. With a larger `trust`, so does the head; with a negative one, it is the word that the head expects least.
    """
    reference = ReferenceConfig.like(config)
    weights = make_weights(reference, 3, dtype)
    generator = torch.Generator().manual_seed(5)
    words = weights["embedding.weight"]
    words *= sharpness / words.std()
    if not config.tie_embeddings:
        following = torch.randperm(config.vocab_size, generator=generator)
        noise = torch.randn(words.shape, generator=generator, dtype=torch.float64)
        weights["lm_head.weight"][following] = words / words.norm(dim=1, keepdim=True) + 0.1 * noise.to(dtype)
    of_words = weights[f"layers.{config.num_layers}.eh_proj.weight"][:, : config.hidden_size]
    of_words += trust * torch.eye(config.hidden_size, dtype=dtype)
    return weights, reference


def tiny_model(
    config: ModelConfig,
    weights: Mapping[str, Tensor],
    packed: bool = False,
    dtype: torch.dtype = torch.float32,
    operations: Operations | None = None,
) -> LanguageModel:
    """Build a model of one rank."""
    options = StackOptions(operations=operations or Operations())
    return build_on(ProcessMesh.single(), config, weights, options, packed, dtype)


def tiny_engine(
    config: ModelConfig, weights: Mapping[str, Tensor] | None = None, draft_tokens: int = 0
) -> GenerationEngine:
    """Build an engine of one rank."""
    model = tiny_model(config, weights or reference_of(config)[0])
    return GenerationEngine(model, ProcessMesh.single(), draft_tokens=draft_tokens)


def write_checkpoint(
    save: Path, config: ModelConfig | None = None, weights: Mapping[str, Tensor] | None = None, **more: Any
) -> Path:
    """Write the checkpoint of iteration 10, with `more` in its header; return its directory."""
    config = config or tiny_config()
    weights = weights or reference_of(config)[0]
    pieces = [Piece(name, "weight", one.shape, Box.whole(one.shape), one) for name, one in weights.items()]
    header = {"iteration": 10, "consumed_samples": 80, "model": config.to_dict()} | more
    return publish_pieces(save, header, [pieces])


def greedy_by_transformers(
    model: Any, prompts: Iterable[tuple[int, ...]] = PROMPTS, new_tokens: int = 10
) -> list[tuple[int, ...]]:
    """Return the continuations by `generate` of transformers."""
    options = {"max_new_tokens": new_tokens, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    found = [model.generate(torch.tensor([prompt]), **options)[0, len(prompt) :] for prompt in prompts]
    return [tuple(ids.tolist()) for ids in found]


def train_tokenizer(folder: Path, texts: Iterable[str]) -> SentencePieceTokenizer:
    model = folder / "tokenizer.model"
    model.write_bytes(train_sentencepiece(texts, vocab_size=300))
    return SentencePieceTokenizer(model)


def write_checkpoint_with_tokenizer(folder: Path) -> tuple[Path, ModelConfig, SentencePieceTokenizer]:
    """Write a directory with one checkpoint of a hybrid model and a tokenizer of 300 ids."""
    tokenizer = train_tokenizer(folder, ["def add(a, b):\n    return a + b\n", "class Point:\n    pass\n"] * 20)
    config = tiny_config(vocab_size=tokenizer.vocab_size, residual_mode="ladder", ladder_layers=(1, 2))
    checkpoint = write_checkpoint(folder / "run", config)
    copy_tokenizer(tokenizer, checkpoint)
    return folder / "run", config, tokenizer

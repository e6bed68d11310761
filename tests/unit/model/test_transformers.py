"""The standard wiring compared with transformers' Llama, Qwen2 and Qwen3."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from megatron_ladder.blueprint.model import ModelConfig
from megatron_ladder.comm.mesh import ProcessMesh
from megatron_ladder.model.language_model import LanguageModel
from megatron_ladder.parallel.layout import parameter_sections

SIZES = {
    "vocab_size": 103,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
OURS_LLAMA3 = {
    "rope_scaling": "llama3",
    "rotary_base": 5e5,
    "rope_scaling_factor": 8.0,
    "rope_original_max_position_embeddings": 32,
}


def canonical(name: str) -> str:
    """Return transformers' name of a canonical tensor."""
    for ours, theirs in (
        ("embedding.", "model.embed_tokens."),
        ("final_norm.", "model.norm."),
        ("layers.", "model.layers."),
        (".attention_norm.", ".input_layernorm."),
        (".mlp_norm.", ".post_attention_layernorm."),
        (".attention.", ".self_attn."),
    ):
        name = name.replace(ours, theirs)
    return name


def ours(theirs: torch.nn.Module, **changes: Any) -> LanguageModel:
    """Return our model with the same weights."""
    config = ModelConfig(
        num_layers=3,
        hidden_size=64,
        ffn_hidden_size=96,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=changes.pop("head_dim", 16),
        vocab_size=103,
        max_position_embeddings=256,
        **changes,
    )
    model = LanguageModel(config, ProcessMesh.single())
    weights = theirs.state_dict()
    with torch.no_grad():
        for parameter, sections in parameter_sections(model):
            for section in sections:
                section.view(parameter).copy_(weights[canonical(section.name)])
    return model


@pytest.mark.parametrize(
    ("theirs", "changes"),
    [
        (lambda: LlamaForCausalLM(LlamaConfig(**SIZES, rms_norm_eps=1e-5)), {}),
        (lambda: LlamaForCausalLM(LlamaConfig(**SIZES, rms_norm_eps=1e-5, rope_parameters=LLAMA3)), OURS_LLAMA3),
        (
            lambda: LlamaForCausalLM(
                LlamaConfig(**SIZES, rms_norm_eps=1e-5, attention_bias=True, mlp_bias=True, tie_word_embeddings=True)
            ),
            {"add_qkv_bias": True, "add_attention_output_bias": True, "add_mlp_bias": True, "tie_embeddings": True},
        ),
        (lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES)), {"add_qkv_bias": True, "norm_epsilon": 1e-6}),
        (
            lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=24)),
            {"qk_layernorm": True, "norm_epsilon": 1e-6, "head_dim": 24},
        ),
    ],
    ids=["llama", "llama3-rope", "llama-biases-tied", "qwen2", "qwen3"],
)
def test_logits_equal_those_of_transformers(theirs: Any, changes: dict[str, Any]) -> None:
    torch.manual_seed(0)
    reference = theirs().eval()
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.1 + (parameter.dim() == 1))
    model = ours(reference, **changes)
    tokens = torch.randint(0, 103, (2, 48))
    with torch.no_grad():
        expected = reference(tokens).logits
        hidden_states = model.hidden_states(tokens, model.training_context(tokens))
        found = model.logits_shard(hidden_states)[..., :103].transpose(0, 1)
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()

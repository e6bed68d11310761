"""Counts against transformers' models, torch's FLOP counter, and published sizes."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from megatron_ladder.blueprint.model import ModelConfig
from megatron_ladder.blueprint.tensors import ModelFlops, parameter_count

SMALL = ModelConfig(
    num_layers=3,
    hidden_size=24,
    ffn_hidden_size=40,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=10,
    vocab_size=37,
    max_position_embeddings=64,
)


def arguments(model: ModelConfig) -> dict[str, Any]:
    return {
        "num_hidden_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_key_value_heads,
        "head_dim": model.head_dim,
        "vocab_size": model.vocab_size,
        "max_position_embeddings": model.max_position_embeddings,
        "tie_word_embeddings": model.tie_embeddings,
        "attn_implementation": "eager",
    }


def llama(model: ModelConfig) -> PreTrainedModel:
    biases: dict[str, Any] = {"attention_bias": model.add_qkv_bias, "mlp_bias": model.add_mlp_bias}
    return LlamaForCausalLM(LlamaConfig(**arguments(model), **biases))


def qwen2(model: ModelConfig) -> PreTrainedModel:
    return Qwen2ForCausalLM(Qwen2Config(**arguments(model)))


def qwen3(model: ModelConfig) -> PreTrainedModel:
    return Qwen3ForCausalLM(Qwen3Config(**arguments(model)))


@pytest.mark.parametrize(
    ("make", "model"),
    [
        (llama, SMALL),
        (llama, replace(SMALL, tie_embeddings=True)),
        (llama, replace(SMALL, add_mlp_bias=True)),
        (llama, replace(SMALL, add_qkv_bias=True, add_attention_output_bias=True)),
        (qwen2, replace(SMALL, head_dim=6, add_qkv_bias=True)),
        (qwen3, replace(SMALL, qk_layernorm=True)),
    ],
)
def test_parameters_are_those_of_transformers(make: Any, model: ModelConfig) -> None:
    with torch.device("meta"):
        other = make(model)
    count = parameter_count(model)
    assert count.total == sum(parameter.numel() for parameter in other.parameters())
    layers = tuple(sum(parameter.numel() for parameter in layer.parameters()) for layer in other.model.layers)
    assert count.layers == layers


def test_a_parallel_layer_has_one_norm_less() -> None:
    for mode, layers, saved in (("ladder", (1, 2), 0), ("parallel", (), 3), ("ladder-parallel", (2,), 3)):
        count = parameter_count(replace(SMALL, residual_mode=mode, ladder_layers=layers))
        assert parameter_count(SMALL).total - count.total == saved * SMALL.hidden_size


@pytest.mark.parametrize(
    ("layers", "hidden", "heads", "ffn", "published", "published_untied"),
    [
        (40, 1536, 24, 4096, 1.208, 1.284),
        (40, 2304, 36, 9216, 3.511, 3.624),
        (52, 1536, 24, 4096, 1.548, 1.623),
        (52, 2304, 36, 9216, 4.530, 4.643),
    ],
)
def test_published_sizes(
    layers: int, hidden: int, heads: int, ffn: int, published: float, published_untied: float
) -> None:
    star_coder_vocabulary = 49152
    model = ModelConfig(
        num_layers=layers,
        hidden_size=hidden,
        ffn_hidden_size=ffn,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=hidden // heads,
        vocab_size=star_coder_vocabulary,
        max_position_embeddings=2048,
    )
    count = parameter_count(model)
    assert round((count.total - count.lm_head) / 1e9, 3) == published
    assert round(count.total / 1e9, 3) == published_untied
    tied = parameter_count(replace(model, tie_embeddings=True))
    assert tied.lm_head == 0 and tied.total == count.total - count.lm_head


def counted(model: PreTrainedModel, tokens: torch.Tensor, backward: bool) -> int:
    """Operations of one sequence."""
    counter = FlopCounterMode(display=False)
    with counter:
        loss = model(tokens).logits.float().square().sum()
        if backward:
            loss.backward()
    assert not any("rotary" in module for module in counter.get_flop_counts())
    return int(counter.get_total_flops()) // len(tokens)


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("length", [1, 17])
def test_operations_are_those_that_torch_counts(heads: tuple[int, int], length: int) -> None:
    model = replace(SMALL, num_attention_heads=heads[0], num_key_value_heads=heads[1])
    other, flops = llama(model), ModelFlops(model, length)
    tokens = torch.arange(2 * length).view(2, length) % model.vocab_size
    assert flops.forward == counted(other, tokens, backward=False)
    assert flops.training == counted(other, tokens, backward=True)

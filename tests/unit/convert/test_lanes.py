"""The exported module in float64, with lanes, ranks of desync, experts or none of them, compared with the reference."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RMSNorm
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from megatron_ladder.blueprint.model import ModelConfig
from megatron_ladder.checkpoint.hf_config import hf_config, hf_type
from megatron_ladder.convert.hf_module.configuration_megatron_ladder import MegatronLadderConfig
from megatron_ladder.convert.hf_module.modeling_megatron_ladder import MegatronLadderForCausalLM
from tests.helpers.hugging_face import module_tensors
from tests.helpers.pairwise import quick_share
from tests.helpers.runs import errors_of
from tests.reference import ReferenceConfig, make_weights, reference_logits
from tests.unit.convert.hf_models import (
    BIASES,
    DELTA,
    EXPERTS,
    GATED,
    GLM,
    LATENT,
    QWEN3_5,
    SINKS,
    WINDOWS,
    some_tokens,
    tiny_config,
)

ALL = tuple(range(6))
FOUR = {"lanes": 4, "num_key_value_heads": 4}


def laned(mode: str, staleness: int, layers: tuple[int, ...] = ALL, **changes: Any) -> ModelConfig:
    return tiny_config(
        residual_mode=mode, ladder_layers=layers, residual_staleness=staleness, **({"lanes": 2} | changes)
    )


def desynced(interval: int, ranks: int, **changes: Any) -> ModelConfig:
    return tiny_config(residual_mode="desync", desync_interval=interval, desync_tp=ranks, **changes)


LADDERS = [
    laned("ladder", 1, (1, 2), lanes=0, num_layers=4),
    laned("ladder", 3, (1, 2, 4), lanes=0, qk_layernorm=True),
    laned("ladder-parallel", 1, (1, 2, 4), lanes=0),
    laned("ladder-attention", 1, (1, 2, 4), lanes=0),
]
LANED = [
    laned("ladder", 1),
    laned("ladder", 2, **FOUR, qk_layernorm=True, add_qkv_bias=True),
    laned("ladder", 4, **FOUR, head_dim=12, hidden_size=34),
    laned("ladder", 4, (2, 3, 5), **FOUR, logit_soft_cap=0.5),
    laned("ladder-parallel", 1, **BIASES),
    laned("ladder-parallel", 2, **FOUR, qk_layernorm=True, **BIASES),
    laned("ladder-attention", 2, (0, 2, 3), **BIASES),
]
DESYNCED = [
    desynced(2, 2),
    desynced(2, 4, num_key_value_heads=4, add_attention_output_bias=True),
    desynced(4, 4, num_key_value_heads=4, num_layers=5, tie_embeddings=True, **BIASES),
]


SHARED = {"moe_shared_expert_intermediate_size": 28}


def with_experts(mode: str, layers: tuple[int, ...] = (1, 2, 4), **changes: Any) -> ModelConfig:
    wiring = {"residual_mode": mode, "ladder_layers": layers, "moe_layers": (1, 2, 3, 5)}
    return tiny_config(**(EXPERTS | changes | wiring))


MIXTURES = [
    with_experts("standard", (), **GLM),
    with_experts("ladder", residual_staleness=2, moe_router_unnormalized=True),
    with_experts("ladder-parallel", **GLM),
    with_experts("farskip", **GLM, add_mlp_bias=True),
    with_experts("farskip", ALL),
    with_experts("shortcut", **SHARED),
    with_experts("longcat", (1, 2, 4)),
]
ATTENTIONS = [
    laned("ladder", 2, **GATED),
    laned("ladder", 1, (1, 2, 4), lanes=0, **GATED, qk_layernorm=True),
    with_experts("farskip", **GLM, **GATED),
    with_experts("farskip", **SHARED, **LATENT, **GATED, add_attention_output_bias=True),
    laned("ladder-parallel", 1, (1, 2, 4), lanes=0, **LATENT, q_lora_rank=11, **BIASES),
    with_experts("longcat", (1, 2, 4), **LATENT),
]
WINDOWED = [
    laned("ladder", 1, (1, 2), lanes=0, **WINDOWS),
    laned("ladder-parallel", 2, (1, 2, 4), lanes=0, **WINDOWS, **GATED, qk_layernorm=True),
    laned("ladder-attention", 2, **WINDOWS, **SINKS, add_qkv_bias=True),
    laned("ladder", 1, (1, 2, 4), lanes=0, **SINKS, **BIASES),
    desynced(4, 2, **SINKS, **WINDOWS, tie_embeddings=True),
    with_experts("farskip", **GLM, **WINDOWS),
    with_experts("shortcut", **SHARED, **WINDOWS | {"window_layers": ALL}),
    with_experts("longcat", **WINDOWS, **SINKS, **GATED),
]
HYBRIDS = [
    laned("ladder", 1, (1, 2, 4), lanes=0, **QWEN3_5),
    laned("ladder-attention", 2, lanes=0, **DELTA, **WINDOWS | {"window_layers": (2,)}),
    laned("ladder", 1, **QWEN3_5),
    with_experts("farskip", **QWEN3_5, **SHARED, moe_shared_expert_gate=True),
]


def text_of(config: ModelConfig) -> str:
    lanes = f"{config.lanes}-lanes" if config.lanes else f"{config.desync_tp}-ranks-{config.desync_interval}"
    lanes = f"{config.num_experts}-experts" if config.num_experts else lanes
    return f"{config.residual_mode}-{lanes}-staleness-{config.residual_staleness}-{len(config.ladder_layers)}"


class ExactRotary(nn.Module):
    """Cosines and sines in float64; those of transformers are rounded to float32. gpt-oss needs each only once."""

    def __init__(self, d: int, copies: int) -> None:
        super().__init__()
        self.d = d
        self.copies = copies

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angles = position_ids.double()[..., None] * 1e4 ** (-torch.arange(0, self.d, 2).double() / self.d)
        angles = torch.cat([angles] * self.copies, dim=-1)
        return angles.cos(), angles.sin()


Build = Callable[[ModelConfig], tuple[MegatronLadderForCausalLM, dict[str, Tensor]]]


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> Build:
    """Return a function from a configuration to the module in float64 and its weights by canonical names."""

    def norm(self: Any, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon)

    for norms in (LlamaRMSNorm, Qwen3RMSNorm, Glm4MoeRMSNorm, DeepseekV3RMSNorm):
        monkeypatch.setattr(norms, "forward", norm)

    def build(config: ModelConfig) -> tuple[MegatronLadderForCausalLM, dict[str, Tensor]]:
        weights = make_weights(ReferenceConfig.like(config), 3, torch.float64)
        written = hf_config(config, dtype="float64") | {"experts_implementation": "eager"}
        module = MegatronLadderForCausalLM(MegatronLadderConfig(**written)).double().eval()
        tied = {"lm_head.weight": weights["embedding.weight"]} if config.tie_embeddings else {}
        module.load_state_dict(module_tensors(weights) | tied)
        copies = 1 if config.softmax_type == "learnable" else 2
        softmax = min({*range(config.num_layers)} - {*config.linear_attention_layers})
        module.model.rotary_emb = ExactRotary(config.mixer_of(softmax).rotary_dim, copies)
        return module, weights

    return build


def gradients_of(module: MegatronLadderForCausalLM, tokens: Tensor) -> dict[str, Tensor]:
    """The logits and the gradients of all weights by transformers' names."""
    module.zero_grad()
    logits = module(tokens).logits
    cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
    found = {name: weight.grad for name, weight in module.named_parameters()}
    return {"logits": logits.detach(), **{name: gradient for name, gradient in found.items() if gradient is not None}}


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-11) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        error = (found[name] - value).abs().max() / value.abs().max()
        assert error < tolerance, f"{name}: {error}"


@pytest.mark.parametrize(
    "config", quick_share(LADDERS + LANED + DESYNCED + MIXTURES + ATTENTIONS + WINDOWED, 3), ids=text_of
)
def test_logits_and_gradients_are_those_of_the_reference(config: ModelConfig, exact: Build) -> None:
    module, weights = exact(config)
    tokens = some_tokens(2, 10)
    leaves = {name: weight.clone().requires_grad_() for name, weight in weights.items()}
    logits = reference_logits(leaves, ReferenceConfig.like(config), tokens)
    cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
    gradients = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    assert_close(gradients_of(module, tokens), {"logits": logits.detach(), **module_tensors(gradients)})
    assert hf_type(config) == "megatron_ladder"


@pytest.mark.parametrize(
    "config", [LADDERS[1], LANED[3], LANED[5], DESYNCED[2], MIXTURES[3], ATTENTIONS[3], WINDOWED[2]], ids=text_of
)
def test_recomputation_gives_the_same_gradients(config: ModelConfig, exact: Build) -> None:
    module, _ = exact(config)
    tokens = some_tokens(2, 10)
    expected = gradients_of(module.train(), tokens)
    for reentrant in (True, False):
        module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        assert_close(gradients_of(module, tokens), expected, 1e-13)


@pytest.mark.parametrize(
    "config",
    quick_share(
        [LADDERS[1], LANED[6], DESYNCED[1], MIXTURES[3], MIXTURES[6], *ATTENTIONS[2:4], *WINDOWED, *HYBRIDS], 4
    ),
    ids=text_of,
)
def test_greedy_tokens_are_the_same_with_every_cache_and_padding(config: ModelConfig, exact: Build) -> None:
    module, weights = exact(config)
    prompts = [some_tokens(1, length) for length in (3, 9, 6)]
    expected = []
    for tokens in prompts:
        for _ in range(6):
            newest = reference_logits(weights, ReferenceConfig.like(config), tokens)[:, -1:].argmax(-1)
            tokens = torch.cat([tokens, newest], dim=1)
        expected.append(tokens[:, -6:])
    padded = torch.cat([pad(prompt, (9 - prompt.shape[1], 0)) for prompt in prompts])
    for options in ({"cache_implementation": "dynamic"}, {"cache_implementation": "static"}, {"use_cache": False}):
        options |= {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        alone = [module.generate(prompt, **options)[:, -6:] for prompt in prompts]
        assert torch.equal(torch.cat(alone), torch.cat(expected)), options
        together = module.generate(padded, attention_mask=(padded != 0).long(), **options)[:, -6:]
        assert torch.equal(together, torch.cat(expected)), options


def test_wirings_that_transformers_cannot_compute_are_rejected() -> None:
    for key, value in (("residual_mode", "other"), ("ladder_layers", [4])):
        with pytest.raises(ValueError, match=re.escape(f"{key} {value!r}")):
            MegatronLadderConfig(num_hidden_layers=4, **{key: value})


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (laned("ladder", 1, lanes=4), "a model of 4 lanes with 2 key-value heads: with a shared head"),
        (desynced(2, 4), "a desync model of 4 ranks with 2 key-value heads: with a shared head"),
    ],
)
def test_shared_key_and_value_heads_have_no_hugging_face_form(config: ModelConfig, words: str) -> None:
    (error,) = errors_of(hf_config, config, dtype="float32")
    assert words in error

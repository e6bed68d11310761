"""The reference model against transformers and torch's optimizer."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    DeepseekV2ForCausalLM,
    DeepseekV3ForCausalLM,
    Glm4MoeForCausalLM,
    Glm4MoeLiteForCausalLM,
    LlamaForCausalLM,
    MixtralForCausalLM,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
    Qwen3MoeForCausalLM,
)

from tests.helpers.hugging_face import Family, module_tensors, transformers_model
from tests.helpers.sharded import small_model
from tests.reference import (
    ReferenceConfig,
    Routed,
    make_weights,
    reference_gradients,
    reference_logits,
    reference_loss,
    reference_training,
)

SIZES = {"num_layers": 2, "hidden_size": 24, "ffn_hidden_size": 40, "num_key_value_heads": 4, "head_dim": 6}
BASE = ReferenceConfig.like(small_model(**SIZES, vocab_size=53))
QWEN2 = replace(BASE, num_key_value_heads=2, add_qkv_bias=True)
QWEN3 = replace(BASE, num_key_value_heads=2, head_dim=8, qk_layernorm=True)

MIXTRAL = replace(
    BASE, num_key_value_heads=2, num_experts=5, moe_ffn_hidden_size=40, moe_layers=(0, 1), moe_router_topk=3
)
QWEN3_MOE = replace(QWEN3, num_experts=9, moe_ffn_hidden_size=10, moe_layers=(1,), moe_router_unnormalized=True)
GLM = replace(
    BASE,
    num_layers=3,
    head_dim=12,
    rotary_percent=0.5,
    add_qkv_bias=True,
    num_experts=12,
    moe_ffn_hidden_size=10,
    moe_shared_expert_intermediate_size=20,
    moe_layers=(1, 2),
    moe_router_score_function="sigmoid",
    moe_router_topk_scaling_factor=2.5,
    moe_router_enable_expert_bias=True,
    moe_router_num_groups=4,
    moe_router_group_topk=2,
)
DEEPSEEK = replace(
    GLM,
    num_key_value_heads=1,
    head_dim=14,
    rotary_percent=1.0,
    kv_lora_rank=12,
    qk_nope_head_dim=8,
    qk_rope_head_dim=6,
    v_head_dim=10,
    norm_epsilon=0.05,
    add_qkv_bias=False,
)
DEEPSEEK_V2 = replace(
    DEEPSEEK,
    moe_router_score_function="softmax",
    moe_router_enable_expert_bias=False,
    moe_router_unnormalized=True,
)
ONE_GROUP = {"moe_router_num_groups": 1, "moe_router_group_topk": 1}


def random_ids(config: ReferenceConfig, *shape: int, seed: int = 5) -> Tensor:
    return torch.randint(config.vocab_size, shape, generator=torch.Generator().manual_seed(seed))


def largest_error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).detach().abs().max() / expected.detach().abs().max())


ROPE = {"rope_scaling": "llama3", "rope_scaling_factor": 8.0, "rope_original_max_position_embeddings": 64}
YARN = ROPE | {"rope_scaling": "yarn", "rope_original_max_position_embeddings": 32, "rotary_base": 100.0}
SCALES = {"rope_beta_fast": 4.0, "rope_beta_slow": 0.5, "rope_mscale": 0.7, "rope_mscale_all_dim": 1.2}
BIASES = {"add_qkv_bias": True, "add_attention_output_bias": True, "add_mlp_bias": True}
CASES: dict[str, tuple[Family, ReferenceConfig, dict[str, Any]]] = {
    "plain": (LlamaForCausalLM, BASE, {}),
    "base and epsilon": (LlamaForCausalLM, BASE, {"rotary_base": 500.0, "norm_epsilon": 0.05}),
    "linear": (LlamaForCausalLM, BASE, {"rope_scaling": "linear", "rope_scaling_factor": 3.0}),
    "llama3": (LlamaForCausalLM, BASE, {**ROPE, "rotary_base": 100.0, "rope_high_freq_factor": 3.0}),
    "yarn": (LlamaForCausalLM, BASE, YARN),
    "yarn, magnitudes": (Qwen3ForCausalLM, QWEN3, YARN | SCALES),
    "yarn, partial": (Glm4MoeForCausalLM, GLM, YARN | SCALES),
    "grouped queries": (LlamaForCausalLM, BASE, {"num_key_value_heads": 2}),
    "one key head, wide heads": (LlamaForCausalLM, BASE, {"num_key_value_heads": 1, "head_dim": 10}),
    "tied": (LlamaForCausalLM, BASE, {"tie_embeddings": True}),
    "biases": (LlamaForCausalLM, BASE, BIASES),
    "qwen2": (Qwen2ForCausalLM, QWEN2, {}),
    "qwen3": (Qwen3ForCausalLM, QWEN3, {}),
    "mixtral": (MixtralForCausalLM, MIXTRAL, {}),
    "qwen3-moe": (Qwen3MoeForCausalLM, QWEN3_MOE, {}),
    "qwen3-moe, normalised": (
        Qwen3MoeForCausalLM,
        QWEN3_MOE,
        {"moe_router_unnormalized": False, "moe_layers": (0, 1)},
    ),
    "glm": (Glm4MoeForCausalLM, GLM, {}),
    "glm, one group": (
        Glm4MoeForCausalLM,
        GLM,
        ONE_GROUP | {"qk_layernorm": True},
    ),
    "deepseek-v2": (DeepseekV2ForCausalLM, DEEPSEEK_V2, {"q_lora_rank": 9}),
    "deepseek-v2, lite": (DeepseekV2ForCausalLM, DEEPSEEK_V2, ONE_GROUP | YARN | SCALES),
    "deepseek-v3": (DeepseekV3ForCausalLM, DEEPSEEK, YARN | SCALES | {"q_lora_rank": 9}),
    "deepseek-v3, queries without a latent": (DeepseekV3ForCausalLM, DEEPSEEK, ONE_GROUP),
    "glm-lite": (Glm4MoeLiteForCausalLM, DEEPSEEK, {"q_lora_rank": 9, "v_head_dim": 16, "moe_layers": (0, 2)}),
}


@pytest.mark.parametrize("name", CASES)
def test_logits_and_gradients_are_transformers(name: str) -> None:
    family, base, changes = CASES[name]
    config = replace(base, **changes)
    weights = make_weights(config, seed=1)
    model = transformers_model(config, weights, family)
    tokens, labels = random_ids(config, 2, 70), random_ids(config, 2, 70, seed=6)
    mask = (random_ids(config, 2, 70, seed=8) % 3 > 0).float()
    logits = model(tokens).logits
    assert largest_error(reference_logits(weights, config, tokens), logits) < 1e-5

    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.where(mask > 0, -100).flatten())
    loss.backward()
    our_loss, gradients = reference_gradients(weights, config, tokens, labels, mask)
    assert our_loss.item() == pytest.approx(loss.item(), rel=1e-6)
    found = module_tensors(gradients)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert largest_error(found.pop(name), parameter.grad) < 1e-5
    assert not found, "transformers has no such parameters"


def test_balancing_losses_are_transformers() -> None:
    config = replace(QWEN3_MOE, moe_aux_loss_coeff=1.0, moe_router_load_balancing_type="aux_loss", moe_z_loss_coeff=1.0)
    weights, tokens = make_weights(config, seed=1), random_ids(config, 2, 70)
    outputs = transformers_model(config, weights, Qwen3MoeForCausalLM)(tokens, output_router_logits=True)
    (logits,) = outputs.router_logits
    record: list[Routed] = []
    reference_logits(weights, config, tokens, record=record)
    (routed,) = record
    # They sum the choices of a token, instead of taking their mean.
    assert routed.auxiliary_loss.item() == pytest.approx(
        140 * outputs.aux_loss.item() / config.moe_router_topk, rel=1e-6
    )
    assert routed.z_loss.item() == pytest.approx(logits.logsumexp(-1).square().sum().item(), rel=1e-6)
    assert routed.loads.tolist() == logits.topk(config.moe_router_topk).indices.flatten().bincount(minlength=9).tolist()

    alone: list[Routed] = []
    for row in tokens:
        reference_logits(weights, config, row[None], record=alone)
    reference_logits(weights, replace(config, moe_router_load_balancing_type="seq_aux_loss"), tokens, record=record)
    of_rows = sum(one.auxiliary_loss.item() for one in alone)
    assert record[1].auxiliary_loss.item() == pytest.approx(of_rows, rel=1e-6) != routed.auxiliary_loss.item()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_key_value_heads": 2},
        {"num_key_value_heads": 1, "qk_layernorm": True},
        {"add_qkv_bias": True, "add_attention_output_bias": True, "add_mlp_bias": True},
    ],
)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_desync_summed_after_every_sub_block_is_standard(ranks: int, changes: dict[str, Any]) -> None:
    """So the ranks' slices together are the whole."""
    config = replace(BASE, **changes)
    weights, tokens = make_weights(config, seed=3, dtype=torch.float64), random_ids(config, 2, 9)
    desync = replace(config, residual_mode="desync", desync_interval=1, desync_tp=ranks)
    difference = reference_logits(weights, desync, tokens) - reference_logits(weights, config, tokens)
    assert difference.abs().max() < 1e-12


@pytest.mark.parametrize("clip", [0.0, 0.3])
def test_training_is_torch_adamw_over_unequal_micro_batches(clip: float) -> None:
    config = replace(BASE, residual_mode="ladder", ladder_layers=(1,))
    weights = make_weights(config, seed=9, dtype=torch.float64)
    batches = []
    for step in range(4):
        masks = [torch.ones(2, 5), torch.zeros(2, 5)]
        masks[1][0, : step + 1] = 1
        batches.append(
            [
                (random_ids(config, 2, 5, seed=4 * step + i), random_ids(config, 2, 5, seed=4 * step + i + 2), mask)
                for i, mask in enumerate(masks)
            ]
        )

    def rate(iteration: int) -> float:
        return 0.03 * (1 + math.cos(math.pi * iteration / 6)) / 2

    def no_decay(name: str) -> bool:
        return name.endswith("norm.weight")

    history, final = reference_training(weights, config, batches, rate, (0.8, 0.95), 1e-6, 0.1, clip, no_decay)

    leaves = {name: weight.clone().requires_grad_() for name, weight in weights.items()}
    groups = [
        {"params": [leaf for name, leaf in leaves.items() if no_decay(name) == exempt], "weight_decay": decay}
        for exempt, decay in ((True, 0.0), (False, 0.1))
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.8, 0.95), eps=1e-6)
    for step, batch in enumerate(batches):
        tokens, labels, mask = (torch.cat([micro[i] for micro in batch]) for i in range(3))
        loss = reference_loss(leaves, config, tokens, labels, mask)
        optimizer.zero_grad()
        loss.backward()
        gradients = [leaf.grad for leaf in leaves.values() if leaf.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        for gradient in gradients:
            # Not clip_grad_norm_, which divides by the norm + 1e-6.
            gradient *= min(1.0, clip / float(norm)) if clip else 1.0
        for group in optimizer.param_groups:
            group["lr"] = rate(step + 1)
        optimizer.step()
        assert history[step] == pytest.approx((loss.item(), norm.item()), rel=1e-10)
        assert norm > 0.3
    for name, leaf in leaves.items():
        assert largest_error(final[name], leaf.detach()) < 1e-10
        assert not torch.equal(final[name], weights[name])

"""The reference model against transformers, torch's optimizer and arithmetic written out by hand."""

import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tests.reference import (
    ReferenceConfig,
    greedy_continuation,
    make_weights,
    reference_gradients,
    reference_logits,
    reference_loss,
    reference_training,
)

Family = Callable[..., Any]
"""A model class of transformers."""

BASE = ReferenceConfig(
    num_layers=2,
    hidden_size=24,
    ffn_hidden_size=40,
    num_attention_heads=4,
    num_key_value_heads=4,
    head_dim=6,
    vocab_size=53,
)
LLAMA3 = replace(
    BASE,
    rope_scaling="llama3",
    rope_scaling_factor=8.0,
    rope_low_freq_factor=1.0,
    rope_high_freq_factor=4.0,
    rope_original_max_position_embeddings=64,
    rotary_base=100.0,
)

LLAMA_CASES = {
    "plain": BASE,
    "base and epsilon": replace(BASE, rotary_base=500.0, norm_epsilon=0.05),
    "linear": replace(BASE, rope_scaling="linear", rope_scaling_factor=3.0),
    "llama3": LLAMA3,
    "grouped queries": replace(BASE, num_key_value_heads=2),
    "one key head, wide heads": replace(BASE, num_key_value_heads=1, head_dim=10),
    "tied": replace(BASE, tie_embeddings=True),
    "biases": replace(BASE, add_qkv_bias=True, add_attention_output_bias=True, add_mlp_bias=True),
}
QWEN2 = replace(BASE, num_key_value_heads=2, add_qkv_bias=True)
QWEN3 = replace(BASE, num_key_value_heads=2, head_dim=8, qk_layernorm=True)

HUGGING_FACE_NAMES = {
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "attention": "self_attn",
    "embedding": "embed_tokens",
    "final_norm": "norm",
}


def hugging_face_model(
    config: ReferenceConfig,
    weights: dict[str, Tensor],
    family: Family = LlamaForCausalLM,
    dtype: torch.dtype = torch.float32,
) -> Any:
    """transformers' own model of this configuration with these weights."""
    shared: dict[str, Any] = {
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.ffn_hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": 512,
        "rms_norm_eps": config.norm_epsilon,
        "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": None,
        "eos_token_id": None,
        "rope_parameters": {
            "rope_type": {"none": "default"}.get(config.rope_scaling, config.rope_scaling),
            "rope_theta": config.rotary_base,
            "factor": config.rope_scaling_factor,
            "low_freq_factor": config.rope_low_freq_factor,
            "high_freq_factor": config.rope_high_freq_factor,
            "original_max_position_embeddings": config.rope_original_max_position_embeddings,
        },
    }
    theirs: Any
    if family is LlamaForCausalLM:
        theirs = LlamaConfig(**shared, attention_bias=config.add_qkv_bias, mlp_bias=config.add_mlp_bias)
    elif family is Qwen2ForCausalLM:
        theirs = Qwen2Config(**shared)
    else:
        theirs = Qwen3Config(**shared)
    model = family(theirs).to(dtype).eval()
    state = {}
    for name, weight in weights.items():
        words = [HUGGING_FACE_NAMES.get(word, word) for word in name.split(".")]
        state[".".join(words if name == "lm_head.weight" else ["model", *words])] = weight
    if config.tie_embeddings:
        state["lm_head.weight"] = weights["embedding.weight"]
    model.load_state_dict(state, strict=True)
    return model


def random_ids(config: ReferenceConfig, *shape: int, seed: int = 5) -> Tensor:
    return torch.randint(config.vocab_size, shape, generator=torch.Generator().manual_seed(seed))


def largest_error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).detach().abs().max() / expected.detach().abs().max())


FAMILIES: list[tuple[str, ReferenceConfig, Family]] = [
    (name, config, LlamaForCausalLM) for name, config in LLAMA_CASES.items()
]
FAMILIES += [("qwen2", QWEN2, Qwen2ForCausalLM), ("qwen3", QWEN3, Qwen3ForCausalLM)]


@pytest.mark.parametrize(
    ("config", "family"), [pytest.param(config, family, id=name) for name, config, family in FAMILIES]
)
def test_logits_and_gradients_are_transformers(config: ReferenceConfig, family: Family) -> None:
    weights = make_weights(config, seed=1)
    model = hugging_face_model(config, weights, family)
    tokens, labels = random_ids(config, 2, 70), random_ids(config, 2, 70, seed=6)
    logits = model(tokens).logits
    assert largest_error(reference_logits(weights, config, tokens), logits) < 1e-5

    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    loss.backward()
    our_loss, gradients = reference_gradients(weights, config, tokens, labels)
    assert our_loss.item() == pytest.approx(loss.item(), rel=1e-6)
    for name in ("embedding.weight", "layers.0.attention.k_proj.weight", "layers.1.mlp_norm.weight"):
        words = [HUGGING_FACE_NAMES.get(word, word) for word in name.split(".")]
        theirs = model.get_parameter(".".join(["model", *words])).grad
        assert theirs is not None
        assert largest_error(gradients[name], theirs) < 2e-5


# Wirings on sequences of one token, for which attention is o_proj(v_proj(x)): no other key, no rotation.

TINY = ReferenceConfig(
    num_layers=2,
    hidden_size=4,
    ffn_hidden_size=6,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=2,
    vocab_size=7,
)


def by_hand(config: ReferenceConfig, weights: dict[str, Tensor]) -> SimpleNamespace:
    """Sub-blocks of a two-layer model as numpy functions of one token's stream."""
    w = {name: weight.numpy() for name, weight in weights.items()}

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt(np.mean(x**2) + config.norm_epsilon) * w[f"{name}.weight"]

    def attention(layer: int, x: np.ndarray) -> np.ndarray:
        prefix = f"layers.{layer}.attention"
        return w[f"{prefix}.o_proj.weight"] @ (w[f"{prefix}.v_proj.weight"] @ x)

    def mlp(layer: int, x: np.ndarray) -> np.ndarray:
        gate = w[f"layers.{layer}.mlp.gate_proj.weight"] @ x
        up = w[f"layers.{layer}.mlp.up_proj.weight"] @ x
        return w[f"layers.{layer}.mlp.down_proj.weight"] @ (gate / (1 + np.exp(-gate)) * up)

    def sub_block(compute: Callable[[int, np.ndarray], np.ndarray], layer: int, kind: str) -> Callable[..., Any]:
        return lambda x: compute(layer, norm(x, f"layers.{layer}.{kind}"))

    return SimpleNamespace(
        embedding=w["embedding.weight"],
        head=lambda x: w["lm_head.weight"] @ norm(x, "final_norm"),
        attention_0=sub_block(attention, 0, "attention_norm"),
        attention_1=sub_block(attention, 1, "attention_norm"),
        mlp_0=sub_block(mlp, 0, "mlp_norm"),
        mlp_1=sub_block(mlp, 1, "mlp_norm"),
        parallel_mlp_0=sub_block(mlp, 0, "attention_norm"),
        parallel_mlp_1=sub_block(mlp, 1, "attention_norm"),
    )


def standard(m: SimpleNamespace, x0: np.ndarray) -> np.ndarray:
    x1 = x0 + m.attention_0(x0)
    x2 = x1 + m.mlp_0(x1)
    x3 = x2 + m.attention_1(x2)
    return x3 + m.mlp_1(x3)


def ladder(m: SimpleNamespace, x0: np.ndarray) -> np.ndarray:
    x1 = x0 + m.attention_0(x0)
    x2 = x1 + m.mlp_0(x0)
    x3 = x2 + m.attention_1(x1)
    return x3 + m.mlp_1(x2)


def upper_layer_is_ladder(m: SimpleNamespace, x0: np.ndarray) -> np.ndarray:
    x1 = x0 + m.attention_0(x0)
    x2 = x1 + m.mlp_0(x1)
    x3 = x2 + m.attention_1(x1)
    return x3 + m.mlp_1(x2)


def lower_layer_is_ladder(m: SimpleNamespace, x0: np.ndarray) -> np.ndarray:
    x1 = x0 + m.attention_0(x0)
    x2 = x1 + m.mlp_0(x0)
    x3 = x2 + m.attention_1(x2)
    return x3 + m.mlp_1(x3)


def parallel(m: SimpleNamespace, x0: np.ndarray) -> np.ndarray:
    x1 = x0 + m.attention_0(x0) + m.parallel_mlp_0(x0)
    return x1 + m.attention_1(x1) + m.parallel_mlp_1(x1)


def ladder_parallel(m: SimpleNamespace, x0: np.ndarray) -> np.ndarray:
    x1 = x0 + m.attention_0(x0) + m.parallel_mlp_0(x0)
    return x1 + m.attention_1(x0) + m.parallel_mlp_1(x0)


def ladder_attention(m: SimpleNamespace, x0: np.ndarray) -> np.ndarray:
    x1 = x0 + m.attention_0(x0)
    x2 = x1 + m.mlp_0(x1)
    x3 = x2 + m.attention_1(x1)
    return x3 + m.mlp_1(x3)


def two_late(m: SimpleNamespace, x0: np.ndarray) -> np.ndarray:
    x1 = x0 + m.attention_0(x0)
    x2 = x1 + m.mlp_0(x0)
    x3 = x2 + m.attention_1(x0)
    return x3 + m.mlp_1(x1)


def upper_layer_is_two_late(m: SimpleNamespace, x0: np.ndarray) -> np.ndarray:
    x1 = x0 + m.attention_0(x0)
    x2 = x1 + m.mlp_0(x1)
    # The lower layer's MLP has read x1, so x1 is what there is; it cannot be unread.
    x3 = x2 + m.attention_1(x1)
    return x3 + m.mlp_1(x1)


@pytest.mark.parametrize(
    ("mode", "layers", "staleness", "expected"),
    [
        ("standard", (), 1, standard),
        ("ladder", (0, 1), 1, ladder),
        ("ladder", (1,), 1, upper_layer_is_ladder),
        ("ladder", (0,), 1, lower_layer_is_ladder),
        ("ladder", (), 1, standard),
        ("ladder", (0, 1), 2, two_late),
        ("ladder", (1,), 2, upper_layer_is_two_late),
        ("parallel", (), 1, parallel),
        ("ladder-parallel", (0, 1), 1, ladder_parallel),
        ("ladder-parallel", (0,), 1, parallel),
        ("ladder-attention", (0, 1), 1, ladder_attention),
        ("ladder-attention", (0, 1), 3, ladder_attention),
        ("ladder-attention", (0,), 1, standard),
    ],
)
def test_wirings_are_those_written_by_hand(
    mode: str,
    layers: tuple[int, ...],
    staleness: int,
    expected: Callable[[SimpleNamespace, np.ndarray], np.ndarray],
) -> None:
    config = replace(TINY, residual_mode=mode, ladder_layers=layers, residual_staleness=staleness)
    weights = make_weights(config, seed=3, dtype=torch.float64)
    model = by_hand(config, weights)
    logits = reference_logits(weights, config, torch.tensor([[4], [2]])).numpy()
    for row, token in enumerate((4, 2)):
        by_arithmetic = model.head(expected(model, model.embedding[token]))
        assert np.abs(logits[row, 0] - by_arithmetic).max() < 1e-12


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


def test_desync_is_that_written_by_hand() -> None:
    """Two ranks, a head each; the streams are summed after the first MLP and after the last."""
    config = replace(TINY, residual_mode="desync", desync_interval=2, desync_tp=2)
    weights = make_weights(config, seed=3, dtype=torch.float64)
    assert weights["layers.0.attention_norm.weight"].shape == (4,)
    assert weights["layers.1.mlp_norm.weight"].shape == (2, 4)
    models = []
    for rank in range(2):
        own = dict(weights)
        for name, weight in weights.items():
            if "mlp_norm" in name:
                own[name] = weight[rank]
            elif "v_proj" in name or "gate_proj" in name or "up_proj" in name:
                own[name] = weight.chunk(2, 0)[rank]
            elif "o_proj" in name or "down_proj" in name:
                own[name] = weight.chunk(2, 1)[rank]
        models.append(by_hand(config, own))
    a, b = models
    logits = reference_logits(weights, config, torch.tensor([[4], [2]])).numpy()
    for row, token in enumerate((4, 2)):
        x = a.embedding[token]
        xa, xb = x + a.attention_0(x), x + b.attention_0(x)
        x = (a.mlp_0(xa) + xa / 2) + (b.mlp_0(xb) + xb / 2)
        xa, xb = x + a.attention_1(x), x + b.attention_1(x)
        x = (a.mlp_1(xa) + xa / 2) + (b.mlp_1(xb) + xb / 2)
        assert np.abs(logits[row, 0] - a.head(x)).max() < 1e-12


def test_a_token_sees_only_its_past() -> None:
    config = replace(BASE, residual_mode="ladder", ladder_layers=(0, 1))
    weights = make_weights(config, seed=4)
    tokens = random_ids(config, 1, 12)
    changed = tokens.clone()
    changed[0, 7] = (tokens[0, 7] + 1) % config.vocab_size
    difference = (reference_logits(weights, config, tokens) - reference_logits(weights, config, changed)).abs()
    assert difference[0, :7].max() == 0
    assert (difference[0, 7:].amax(dim=-1) > 1e-3).all()


def test_loss_counts_unmasked_targets_of_the_global_batch() -> None:
    weights = make_weights(BASE, seed=5, dtype=torch.float64)
    tokens, labels = random_ids(BASE, 2, 9), random_ids(BASE, 2, 9, seed=7)
    loss_mask = (random_ids(BASE, 2, 9, seed=8) % 3 > 0).float()
    logits = reference_logits(weights, BASE, tokens)
    ignored = torch.where(loss_mask > 0, labels, -100)
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ignored.flatten(), ignore_index=-100)
    loss = reference_loss(weights, BASE, tokens, labels, loss_mask)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    share = reference_loss(weights, BASE, tokens, labels, loss_mask, total_tokens=100)
    assert share.item() == pytest.approx(expected.item() * float(loss_mask.sum()) / 100, rel=1e-12)


def test_greedy_continuation_is_transformers() -> None:
    weights = make_weights(QWEN2, seed=6)
    prompt = [3, 1, 4, 1, 5]
    model = hugging_face_model(QWEN2, weights, Qwen2ForCausalLM)
    theirs = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)[0, 5:].tolist()
    continuation = greedy_continuation(weights, QWEN2, prompt, 12)
    assert continuation == theirs
    assert len(set(continuation)) > 3


@pytest.mark.parametrize("clip", [0.0, 0.3])
def test_training_is_torch_adamw_over_unequal_micro_batches(clip: float) -> None:
    config = replace(TINY, residual_mode="ladder", ladder_layers=(1,))
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

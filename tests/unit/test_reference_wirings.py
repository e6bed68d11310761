"""The wirings of the reference model against arithmetic written out by hand."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.reference import ReferenceConfig, make_weights, reference_logits

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


ALL = (0, 1, 2)
MISSED = [
    # Wiring, late layers, layers with experts; for each layer, what its sub-blocks miss.
    ("farskip", ALL, (0, 2), [[(), (1,), (1, 2)], [(1,), (1,)], [(), (1,), (1, 2)]]),  # A S R, A M, A S R
    ("farskip", ALL, ALL, [[(), (1,), (1, 2)], [(1,), (1,), (1, 2)], [(1,), (1,), (1, 2)]]),
    ("farskip", (0, 2), (0, 1), [[(), (1,), (1, 2)], [(), ()], [(), (1,)]]),  # A S R, A and experts, A M
    ("shortcut", ALL, (0, 2), [[(), (1,), (1,)], [(), ()], [(), (1,), (1,)]]),  # A R S, A M, A R S
    ("shortcut", (0, 2), (1, 2), [[(), ()], [(), ()], [(), (1,), (1,)]]),
    ("longcat", ALL, (0, 2), [[(), (), (1,), (2,), (3,)], [()] * 4, [(), (), (1,), (2,), (3,)]]),  # A R S B T, A S B T
    ("longcat", (0,), ALL, [[(), (), (1,), (2,), (3,)], [()] * 5, [()] * 5]),
]


@pytest.mark.parametrize(("mode", "late", "moe_layers", "missed"), MISSED)
def test_wirings_of_experts_miss_what_was_published(
    mode: str, late: tuple[int, ...], moe_layers: tuple[int, ...], missed: list[list[tuple[int, ...]]]
) -> None:
    """Their recurrences compute the same as the rule of the other wirings with the outputs missed as published."""
    config = replace(
        TINY,
        num_layers=3,
        residual_mode=mode,
        ladder_layers=late,
        num_experts=5,
        moe_ffn_hidden_size=3,
        moe_shared_expert_intermediate_size=0 if mode == "longcat" else 5,
        moe_layers=moe_layers,
    )
    weights = make_weights(config, seed=3, dtype=torch.float64)
    tokens = torch.tensor([[4, 2, 1, 0, 6], [1, 5, 5, 3, 2]])
    missing = tuple(backs for layer in missed for backs in layer)
    by_rule, standard = (
        reference_logits(weights, replace(config, missing=sets), tokens) for sets in (missing, ((),) * len(missing))
    )
    assert (by_rule - reference_logits(weights, config, tokens)).abs().max() < 1e-12
    assert (by_rule - standard).abs().max() > 1e-3


def test_farskip_without_shared_expert_and_dense_layers_is_ladder() -> None:
    config = replace(TINY, ladder_layers=(0, 1), num_experts=5, moe_ffn_hidden_size=3, moe_layers=(0, 1))
    weights, tokens = make_weights(config, seed=3, dtype=torch.float64), torch.tensor([[4, 2, 1, 0, 6]])
    ladder, farskip = (
        reference_logits(weights, replace(config, residual_mode=mode), tokens) for mode in ("ladder", "farskip")
    )
    assert (farskip - ladder).abs().max() < 1e-12

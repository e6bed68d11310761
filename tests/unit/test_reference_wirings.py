"""The wirings of the reference model against arithmetic written out by hand."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.helpers.sharded import small_model
from tests.reference import ReferenceConfig, make_weights, reference_logits

# Wirings on sequences of one token, for which attention is o_proj(v_proj(x)): no other key, no rotation.

HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 2}
TINY = ReferenceConfig.like(small_model(num_layers=2, hidden_size=4, ffn_hidden_size=6, vocab_size=7, **HEADS))


class ByHand:
    """The parts of a model as numpy functions of one token's stream."""

    def __init__(self, config: ReferenceConfig, weights: dict[str, Tensor]) -> None:
        self.epsilon, self.one_norm = config.norm_epsilon, config.one_norm
        self.weights = {name.removesuffix(".weight"): weight.numpy() for name, weight in weights.items()}

    def norm(self, x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt(np.mean(x**2) + self.epsilon) * self.weights[name]

    def attention(self, layer: int, x: np.ndarray) -> np.ndarray:
        x = self.norm(x, f"layers.{layer}.attention_norm")
        v, o = (self.weights[f"layers.{layer}.attention.{which}_proj"] for which in "vo")
        return o @ (v @ x)

    def mlp(self, layer: int, x: np.ndarray) -> np.ndarray:
        x = self.norm(x, f"layers.{layer}.{'attention' if self.one_norm else 'mlp'}_norm")
        gate, up, down = (self.weights[f"layers.{layer}.mlp.{which}_proj"] for which in ("gate", "up", "down"))
        return down @ (gate @ x / (1 + np.exp(-gate @ x)) * (up @ x))

    def head(self, x: np.ndarray) -> np.ndarray:
        return self.weights["lm_head"] @ self.norm(x, "final_norm")


STANDARD, LADDER, PARALLEL, LADDER_ATTENTION = (0, 1, 2, 3), (0, 0, 1, 2), (0, 0, 2, 2), (0, 1, 1, 3)
"""What attention and MLP of two layers read: the stream after so many sub-blocks."""


@pytest.mark.parametrize(
    ("mode", "layers", "staleness", "reads"),
    [
        ("standard", (), 1, STANDARD),
        ("ladder", (0, 1), 1, LADDER),
        ("ladder", (1,), 1, (0, 1, 1, 2)),
        ("ladder", (0,), 1, (0, 0, 2, 3)),
        ("ladder", (), 1, STANDARD),
        ("ladder", (0, 1), 2, (0, 0, 0, 1)),
        # The lower layer's MLP has read the first output, which cannot be unread.
        ("ladder", (1,), 2, (0, 1, 1, 1)),
        ("parallel", (), 1, PARALLEL),
        ("ladder-parallel", (0, 1), 1, (0, 0, 0, 0)),
        ("ladder-parallel", (0,), 1, PARALLEL),
        ("ladder-attention", (0, 1), 1, LADDER_ATTENTION),
        ("ladder-attention", (0, 1), 3, LADDER_ATTENTION),
        ("ladder-attention", (0,), 1, STANDARD),
    ],
)
def test_wirings_are_those_written_by_hand(
    mode: str, layers: tuple[int, ...], staleness: int, reads: tuple[int, ...]
) -> None:
    config = replace(TINY, residual_mode=mode, ladder_layers=layers, residual_staleness=staleness)
    weights = make_weights(config, seed=3, dtype=torch.float64)
    model = ByHand(config, weights)
    logits = reference_logits(weights, config, torch.tensor([[4], [2]])).numpy()
    for row, token in enumerate((4, 2)):
        stream = [model.weights["embedding"][token]]
        for number, read in enumerate(reads):
            compute = (model.attention, model.mlp)[number % 2]
            stream.append(stream[-1] + compute(number // 2, stream[read]))
        assert np.abs(logits[row, 0] - model.head(stream[-1])).max() < 1e-12


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
        models.append(ByHand(config, own))
    a, b = models
    logits = reference_logits(weights, config, torch.tensor([[4], [2]])).numpy()
    for row, token in enumerate((4, 2)):
        x = a.weights["embedding"][token]
        for layer in range(2):
            xa, xb = x + a.attention(layer, x), x + b.attention(layer, x)
            x = (a.mlp(layer, xa) + xa / 2) + (b.mlp(layer, xb) + xb / 2)
        assert np.abs(logits[row, 0] - a.head(x)).max() < 1e-12

"""Loss and full gradients for every wiring, layout and stack option, compared with a plain single-process model."""

import itertools
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_ladder.blueprint.model import ModelConfig, key_value_replicas
from megatron_ladder.comm.group import CommGroup
from megatron_ladder.comm.mesh import ProcessMesh
from megatron_ladder.model.language_model import LanguageModel
from megatron_ladder.model.stack import StackOptions
from megatron_ladder.parallel.layout import parameter_sections
from tests.helpers.pairwise import pairwise
from tests.helpers.pool import GlooPools
from tests.helpers.recording import InlineQueue
from tests.helpers.sharded import Pieces, assert_pieces, build, gradient_pieces, mesh_of, small_model
from tests.reference import ReferenceConfig, Weights, make_weights, reference_gradients

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-11}

WIRINGS: dict[str, dict[str, Any]] = {
    "standard": {},
    "ladder": {"residual_mode": "ladder", "ladder_layers": (0, 1, 2, 3)},
    "parallel": {"residual_mode": "parallel"},
    "hybrid": {"residual_mode": "ladder", "ladder_layers": (1, 3)},
}
MORE_WIRINGS: dict[str, dict[str, Any]] = {
    "ladder-parallel": {"residual_mode": "ladder-parallel", "ladder_layers": (0, 1, 2, 3)},
    "hybrid-parallel": {"residual_mode": "ladder-parallel", "ladder_layers": (1, 2)},
    "ladder-attention": {"residual_mode": "ladder-attention", "ladder_layers": (0, 1, 3)},
    "staleness-2": {"residual_mode": "ladder", "ladder_layers": (0, 1, 2, 3), "residual_staleness": 2},
    "staleness-3-hybrid": {"residual_mode": "ladder", "ladder_layers": (1, 2), "residual_staleness": 3},
    "ladder-parallel-2": {"residual_mode": "ladder-parallel", "ladder_layers": (0, 1, 2), "residual_staleness": 2},
}


def desync(tensor_parallel: int, interval: int) -> dict[str, Any]:
    """Return the desync wiring, whose tensor-parallel size is part of the model."""
    return {"residual_mode": "desync", "desync_interval": interval, "desync_tp": tensor_parallel}


FEATURES: dict[str, dict[str, Any]] = {
    "tied": {"tie_embeddings": True, "rope_scaling": "linear", "rope_scaling_factor": 2.0, "logit_soft_cap": 1.5},
    "biases": {"add_qkv_bias": True, "add_attention_output_bias": True, "add_mlp_bias": True},
    "qwen": {"add_qkv_bias": True, "qk_layernorm": True, "num_key_value_heads": 1},
    "multi-head": {
        "num_key_value_heads": 4,
        "head_dim": 12,
        "vocab_size": 257,
        "rope_scaling": "llama3",
        "rope_scaling_factor": 8.0,
        "rope_original_max_position_embeddings": 16,
    },
}


def run_case(
    config: ModelConfig,
    weights: Weights,
    tensor_parallel: int,
    options: StackOptions,
    tokens: Tensor,
    labels: Tensor,
    mask: Tensor,
    sequence_parallel: bool,
    reads_ahead: bool,
) -> tuple[float, Pieces]:
    """Return the loss per unmasked token, and every gradient that this rank holds."""
    model = build(config, weights, tensor_parallel, options, sequence_parallel)
    model.stack.side_queue = InlineQueue() if reads_ahead else None
    loss = model(tokens, labels, mask) / mask.sum()
    loss.backward()
    return loss.item(), gradient_pieces(model)


def batch(config: ModelConfig, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, config.vocab_size, (2, 13), generator=generator)
    mask = (torch.rand(2, 12, generator=generator) < 0.7).to(dtype)
    return tokens[:, :-1], tokens[:, 1:], mask


def check(
    gloo_pools: GlooPools,
    tensor_parallel: int,
    config: ModelConfig,
    options: StackOptions,
    dtype: torch.dtype,
    sequence_parallel: bool = False,
    reads_ahead: bool = False,
) -> None:
    reference = ReferenceConfig.like(config)
    weights = make_weights(reference, seed=1, dtype=dtype)
    tokens, labels, mask = batch(config, dtype)
    loss, gradients = reference_gradients(weights, reference, tokens, labels, mask)
    results = gloo_pools(tensor_parallel).run(
        run_case, config, weights, tensor_parallel, options, tokens, labels, mask, sequence_parallel, reads_ahead
    )
    for found, _ in results:
        assert found == pytest.approx(float(loss), rel=TOLERANCE[dtype])
    assert_pieces([pieces for _, pieces in results], gradients, TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("tensor_parallel", "wiring", "overlap", "recompute", "dtype"),
    pairwise(
        ([1, 2, 4], list(WIRINGS), [True, False], [0, 3], [torch.float64, torch.float32]),
        (str, str, ["overlap", "blocking"], ["kept", "recomputed"], ["fp64", "fp32"]),
    ),
)
def test_wirings(
    gloo_pools: GlooPools, tensor_parallel: int, wiring: str, overlap: bool, recompute: int, dtype: torch.dtype
) -> None:
    config = small_model(**WIRINGS[wiring])
    check(gloo_pools, tensor_parallel, config, StackOptions(overlap, recompute), dtype)


@pytest.mark.parametrize(
    ("tensor_parallel", "wiring", "overlap", "recompute"),
    pairwise(
        ([1, 2], list(MORE_WIRINGS), [True, False], [0, 3]),
        (str, str, ["overlap", "blocking"], ["kept", "recomputed"]),
    ),
)
def test_more_wirings(gloo_pools: GlooPools, tensor_parallel: int, wiring: str, overlap: bool, recompute: int) -> None:
    config = small_model(**MORE_WIRINGS[wiring])
    check(gloo_pools, tensor_parallel, config, StackOptions(overlap, recompute), torch.float64)


@pytest.mark.parametrize(
    ("tensor_parallel", "wiring", "overlap", "recompute"),
    pairwise(
        ([2, 4], [*WIRINGS, *MORE_WIRINGS], [(True, True), (True, False), (False, True)], [0, 3]),
        (str, str, ["overlap", "forward-overlap", "blocking"], ["kept", "recomputed"]),
    ),
)
def test_sequence_parallel(
    gloo_pools: GlooPools, tensor_parallel: int, wiring: str, overlap: tuple[bool, bool], recompute: int
) -> None:
    config = small_model(**(WIRINGS | MORE_WIRINGS)[wiring])
    options = StackOptions(overlap[0], recompute, mirrored_backward=overlap[1])
    check(gloo_pools, tensor_parallel, config, options, torch.float64, sequence_parallel=True)


@pytest.mark.parametrize("recompute", [0, 3], ids=["kept", "recomputed"])
@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "blocking"])
@pytest.mark.parametrize("interval", [2, 4])
@pytest.mark.parametrize("tensor_parallel", [2, 4])
def test_desync(gloo_pools: GlooPools, tensor_parallel: int, interval: int, overlap: bool, recompute: int) -> None:
    # With ten sub-blocks, the last interval of four is shorter.
    config = small_model(num_layers=5, **desync(tensor_parallel, interval))
    check(gloo_pools, tensor_parallel, config, StackOptions(overlap, recompute), torch.float64)


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize(("tensor_parallel", "interval"), [(2, 4), (4, 2)])
def test_desync_features(gloo_pools: GlooPools, tensor_parallel: int, interval: int, feature: str) -> None:
    config = small_model(num_layers=3, **desync(tensor_parallel, interval), **FEATURES[feature])
    check(gloo_pools, tensor_parallel, config, StackOptions(recompute_layers=2), torch.float64)


LANE_WIRINGS: dict[str, dict[str, Any]] = {
    "ladder": WIRINGS["ladder"],
    "hybrid": WIRINGS["hybrid"],
    "ladder-attention": MORE_WIRINGS["ladder-attention"],
    "staleness-2": MORE_WIRINGS["staleness-2"],
    "staleness-4": {**WIRINGS["ladder"], "residual_staleness": 4},
    "ladder-parallel-2": MORE_WIRINGS["ladder-parallel-2"],
}


@pytest.mark.parametrize(
    ("lanes", "wiring", "overlap", "recompute"),
    pairwise(
        ([(2, 1), (2, 2), (4, 1), (4, 2), (4, 4)], list(LANE_WIRINGS), [True, False], [0, 3]),
        (lambda lanes: f"{lanes[0]}-lanes-on-{lanes[1]}", str, ["overlap", "blocking"], ["kept", "recomputed"]),
    ),
)
def test_own_partials(
    gloo_pools: GlooPools, lanes: tuple[int, int], wiring: str, overlap: bool, recompute: int
) -> None:
    config = small_model(lanes=lanes[0], num_key_value_heads=4, add_qkv_bias=True, **LANE_WIRINGS[wiring])
    check(gloo_pools, lanes[1], config, StackOptions(overlap, recompute), torch.float64)


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("lanes", [2, 4])
def test_own_partials_features(gloo_pools: GlooPools, lanes: int, feature: str) -> None:
    config = small_model(lanes=lanes, **MORE_WIRINGS["staleness-2"], **FEATURES[feature])
    check(gloo_pools, lanes, config, StackOptions(recompute_layers=2), torch.float64)


@pytest.mark.parametrize(
    ("tensor_parallel", "wiring", "feature"),
    list(itertools.product([1, 2, 4], ["ladder", "parallel"], FEATURES)),
)
def test_features(gloo_pools: GlooPools, tensor_parallel: int, wiring: str, feature: str) -> None:
    config = small_model(**WIRINGS[wiring], **FEATURES[feature])
    check(gloo_pools, tensor_parallel, config, StackOptions(recompute_layers=2), torch.float64)


@pytest.mark.parametrize("recompute", [0, 3], ids=["kept", "recomputed"])
@pytest.mark.parametrize("mirrored", [True, False], ids=["overlap", "forward-overlap"])
@pytest.mark.parametrize("wiring", ["ladder", "hybrid", "staleness-2", "ladder-parallel-2", "ladder-attention"])
def test_side_queue(gloo_pools: GlooPools, wiring: str, mirrored: bool, recompute: int) -> None:
    """The order on CUDA, where the side queue is a second stream."""
    config = small_model(**(WIRINGS | MORE_WIRINGS)[wiring])
    options = StackOptions(recompute_layers=recompute, mirrored_backward=mirrored)
    check(gloo_pools, 2, config, options, torch.float64, sequence_parallel=True, reads_ahead=True)


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "blocking"])
@pytest.mark.parametrize(
    ("tensor_parallel", "wiring", "feature"),
    [(2, "ladder", "biases"), (4, "ladder", "qwen"), (2, "parallel", "tied"), (4, "hybrid", "multi-head")],
)
def test_sequence_parallel_features(
    gloo_pools: GlooPools, tensor_parallel: int, wiring: str, feature: str, overlap: bool
) -> None:
    config = small_model(**WIRINGS[wiring], **FEATURES[feature])
    check(gloo_pools, tensor_parallel, config, StackOptions(overlap, 2), torch.float64, sequence_parallel=True)


def initial_pieces(config: ModelConfig, tensor_parallel: int) -> Pieces:
    """Return this rank's slices of the initial weights."""
    mesh = mesh_of(tensor_parallel, key_value_replicas(config, tensor_parallel))
    model = LanguageModel(config, mesh, seed=7)
    for matrix in (model.embedding, model.lm_head):
        assert matrix is not None and not matrix.weight[matrix.valid :].any(), "padding is not zero"
    return [
        (section.name, section.box.offset, section.view(parameter.detach()).clone())
        for parameter, sections in parameter_sections(model)
        for section in sections
    ]


@pytest.mark.parametrize("wiring", ["hybrid", "parallel"])
def test_initial_model_does_not_depend_on_the_layout(gloo_pools: GlooPools, wiring: str) -> None:
    config = small_model(**WIRINGS[wiring], ffn_hidden_size=200, add_qkv_bias=True, init_method_std=0.5)
    (whole,) = gloo_pools(1).run(initial_pieces, config, 1)
    full = {name: values for name, _, values in whole}
    for tensor_parallel in (2, 4):
        assert_pieces(gloo_pools(tensor_parallel).run(initial_pieces, config, tensor_parallel), full, 0.0)
    assert full["layers.0.attention.q_proj.weight"].std().item() == pytest.approx(0.5, rel=0.05)
    assert full["layers.0.mlp.down_proj.weight"].std().item() == pytest.approx(0.5 / 8**0.5, rel=0.05)
    assert not torch.equal(full["layers.0.mlp.up_proj.weight"], full["layers.0.mlp.gate_proj.weight"])
    assert not torch.equal(full["layers.0.mlp.up_proj.weight"], full["layers.1.mlp.up_proj.weight"])
    assert not torch.equal(full["embedding.weight"][:37], full["embedding.weight"][64:])


@pytest.mark.parametrize("tensor_parallel", [2, 4])
def test_initial_desync_model_is_standard_with_more_norms(gloo_pools: GlooPools, tensor_parallel: int) -> None:
    (whole,) = gloo_pools(1).run(initial_pieces, small_model(), 1)
    full = {name: values for name, _, values in whole}
    for layer, kind in ((0, "mlp"), (1, "attention"), (1, "mlp"), (2, "mlp"), (3, "attention"), (3, "mlp")):
        full[f"layers.{layer}.{kind}_norm.weight"] = torch.ones(tensor_parallel, 32)
    config = small_model(**desync(tensor_parallel, 4))
    assert_pieces(gloo_pools(tensor_parallel).run(initial_pieces, config, tensor_parallel), full, 0.0)


def test_a_desync_model_has_one_tensor_parallel_size() -> None:
    with pytest.raises(ValueError, match="of 2 tensor-parallel ranks on 1"):
        LanguageModel(small_model(**desync(2, 2)), ProcessMesh.single())


def test_a_mesh_must_have_the_key_value_replicas_of_the_model() -> None:
    """Otherwise the gradients of shared heads would miss the other ranks' parts."""
    four = replace(ProcessMesh.single(), tensor=CommGroup(range(4), 0, None))
    for heads, replicas, fits in ((2, 2, True), (2, 1, False), (2, 4, False), (4, 1, True), (4, 2, False)):
        mesh = replace(four, kv_replica=CommGroup(range(replicas), 0, None))
        with nullcontext() if fits else pytest.raises(ValueError, match=f"{heads} key and value heads on 4 "):
            LanguageModel(small_model(num_key_value_heads=heads), mesh, device=torch.device("meta"))

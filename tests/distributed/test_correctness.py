"""Loss and full gradients for every wiring, layout and stack option, compared with a plain single-process model."""

import itertools
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from megatron_ladder.blueprint.model import ModelConfig, head_replicas
from megatron_ladder.comm.group import CommGroup
from megatron_ladder.comm.mesh import ProcessMesh
from megatron_ladder.model.language_model import LanguageModel
from megatron_ladder.model.mtp import MTPOptions, names_of_depth
from megatron_ladder.model.operations import ExpertOptions
from megatron_ladder.model.stack import StackOptions
from megatron_ladder.model.stats import PassStats
from tests.helpers.pairwise import pairwise
from tests.helpers.pool import GlooPools
from tests.helpers.recording import InlineQueue
from tests.helpers.sharded import (
    LATENT_WIDTHS,
    Pieces,
    assert_pieces,
    fill_slices,
    gradient_pieces,
    mesh_of,
    run_chain,
    small_model,
    weight_pieces_of,
)
from tests.reference import (
    ReferenceConfig,
    Routed,
    Sight,
    Weights,
    make_weights,
    reference_gradients,
    reference_logits,
)
from tests.reference.mtp import drafting_gradients, drafting_logits

TOLERANCE = 1e-11
ALL = (0, 1, 2, 3)
QWEN: dict[str, Any] = {
    "num_experts": 8,
    "moe_router_topk": 3,
    "moe_ffn_hidden_size": 8,
    "moe_layers": ALL,
    "qk_layernorm": True,
    "moe_router_num_groups": 4,
    "moe_router_group_topk": 2,
}
GLM: dict[str, Any] = {
    "num_experts": 8,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 12,
    "moe_shared_expert_intermediate_size": 20,
    "moe_layers": (1, 2, 3),
    "moe_router_score_function": "sigmoid",
    "moe_router_topk_scaling_factor": 2.5,
    "moe_router_enable_expert_bias": True,
    "moe_router_num_groups": 4,
    "moe_router_group_topk": 2,
    "rotary_percent": 0.5,
}
GPT_OSS: dict[str, Any] = {
    "num_experts": 8,
    "moe_router_topk": 3,
    "moe_ffn_hidden_size": 12,
    "moe_layers": (0, 2, 3),
    "add_moe_bias": True,
    "quick_geglu": True,
    "activation_func_clamp_value": 0.4,
    "glu_linear_offset": 1.0,
}
"""Its gates are often above the bound, and some of what they multiply is on each side of it."""
SHARED = GLM | {"moe_layers": ALL, "moe_router_unnormalized": True, "moe_router_score_function": "softmax"}
SHARED["moe_shared_expert_gate"] = True
SHARED_BIASED = {
    "moe_shared_expert_intermediate_size": 20,
    "moe_shared_expert_gate": True,
    "moe_router_unnormalized": True,
    "moe_router_topk_scaling_factor": 1.5,
    "add_mlp_bias": True,
}


def late(mode: str, layers: tuple[int, ...] = ALL, staleness: int = 1, **more: Any) -> dict[str, Any]:
    return {"residual_mode": mode, "ladder_layers": layers, "residual_staleness": staleness, **more}


WIRINGS: dict[str, dict[str, Any]] = {
    "standard": {},
    "ladder": late("ladder"),
    "parallel": {"residual_mode": "parallel"},
    "hybrid": late("ladder", (1, 3)),
    "ladder-parallel": late("ladder-parallel"),
    "ladder-attention": late("ladder-attention", (0, 1, 3)),
    "staleness-3-hybrid": late("ladder", (1, 2), 3),
    "ladder-parallel-2": late("ladder-parallel", (0, 1, 2), 2),
    "experts": GLM,
    "experts-ladder": late("ladder", **QWEN),
    "experts-biased": late("ladder", (1, 2, 3), 2, **GPT_OSS),
    "experts-parallel": {**GLM, "residual_mode": "parallel"},
    "experts-ladder-parallel": late("ladder-parallel", **SHARED),
    "experts-ladder-attention": late("ladder-attention", (0, 1, 3), **QWEN),
    "farskip": late("farskip", **SHARED),
    "farskip-dense": late("farskip", **GLM | {"moe_layers": (0, 2)}),
    "farskip-hybrid": late("farskip", (0, 2), **SHARED),
    "farskip-biased": late("farskip", (0, 2), **GPT_OSS | SHARED_BIASED),
    "farskip-routed-only": late("farskip", (1, 2, 3), **QWEN),
    "shortcut": late("shortcut", **GLM),
    "shortcut-hybrid": late("shortcut", (1, 2), **SHARED),
    "longcat": late("longcat", **QWEN),
    "longcat-hybrid": late("longcat", (0, 1), **QWEN | {"moe_layers": (0, 2)}),
}
FEATURES: dict[str, dict[str, Any]] = {
    "tied": {"tie_embeddings": True, "rope_scaling": "linear", "rope_scaling_factor": 2.0, "logit_soft_cap": 1.5},
    "biases": {"add_qkv_bias": True, "add_attention_output_bias": True, "add_mlp_bias": True},
    "qwen": {
        "add_qkv_bias": True,
        "qk_layernorm": True,
        "apply_layernorm_1p": True,
        "num_key_value_heads": 1,
        "rope_scaling": "yarn",
        "rope_scaling_factor": 8.0,
        "rope_original_max_position_embeddings": 16,
        "rope_beta_fast": 2.0,
        "rope_mscale": 0.7,
        "rope_mscale_all_dim": 1.2,
    },
    "clipped": {
        "activation_func_clamp_value": 0.4,
        "glu_linear_offset": -0.5,
        "rope_scaling": "yarn",
        "rope_scaling_factor": 8.0,
        "rope_original_max_position_embeddings": 16,
        "rope_beta_fast": 2.0,
        "yarn_correction_range_round_to_int": False,
    },
    "multi-head": {
        "num_key_value_heads": 4,
        "head_dim": 12,
        "vocab_size": 257,
        "rope_scaling": "llama3",
        "rope_scaling_factor": 8.0,
        "rope_original_max_position_embeddings": 16,
    },
}
DELTA: dict[str, Any] = {
    "experimental_attention_variant": "gated_delta_net",
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 5,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 8,
}
LATENT = LATENT_WIDTHS | {"qk_layernorm": False, "rotary_percent": 1.0}
ATTENTIONS: dict[str, dict[str, Any]] = {
    "grouped": {},
    "gated": {"attention_output_gate": True, "apply_layernorm_1p": True},
    "windows": {"window_size": 4, "window_layers": (0, 2, 3)},
    "sinks": {"window_size": 3, "window_layers": (1, 2), "softmax_type": "learnable", "attention_output_gate": True},
    "delta": {"linear_attention_layers": (0, 1, 3), **DELTA, "num_key_value_heads": 4, "norm_epsilon": 0.05},
    "delta-one-key": {"linear_attention_layers": ALL, **DELTA, "linear_num_key_heads": 1, "linear_conv_kernel_dim": 2},
    "latent": LATENT | {"norm_epsilon": 0.05},
    "latent-queries": LATENT
    | {"q_lora_rank": 9, "v_head_dim": 13, "attention_output_gate": True, "add_qkv_bias": True}
    | {"rope_scaling": "yarn", "rope_scaling_factor": 8.0, "rope_original_max_position_embeddings": 16}
    | {"rope_mscale": 0.7, "rope_mscale_all_dim": 1.2, "apply_layernorm_1p": True},
}
"""Kinds of attention. Values of latent ones are narrower or wider than their keys."""
LAYOUTS = {"tp1": (1, ""), "tp2": (2, ""), "tp2-ahead": (2, "ahead"), "tp4-sharded": (4, "sharded")}
"""Tensor-parallel size, and how the stream is sharded; `ahead` of the computation, as on a second stream of CUDA."""


def desync(ranks: int, interval: int) -> dict[str, Any]:
    """Return a model whose tensor-parallel size is part of it. The last interval of its ten sub-blocks is shorter."""
    return {"num_layers": 5, "residual_mode": "desync", "desync_interval": interval, "desync_tp": ranks}


NOT_SHARED = {
    "num_key_value_heads": 4,
    "qk_layernorm": False,
    "add_attention_output_bias": False,
    "add_mlp_bias": False,
}
"""Lanes of one rank must not share weights."""
OWN_STREAMS: dict[str, tuple[int, dict[str, Any]]] = {
    "2-lanes-on-1": (1, WIRINGS["ladder-parallel-2"] | {"lanes": 2} | NOT_SHARED),
    "2-lanes-on-2": (2, WIRINGS["hybrid"] | {"lanes": 2}),
    "4-lanes-on-2": (2, WIRINGS["ladder-attention"] | {"lanes": 4} | NOT_SHARED),
    "4-lanes-on-4": (4, late("ladder", ALL, 4, lanes=4)),
    "desync-2-on-2": (2, desync(2, 2)),
    "desync-4-on-2": (2, desync(2, 4)),
    "desync-2-on-4": (4, desync(4, 2)),
    "desync-4-on-4": (4, desync(4, 4)),
}
"""Models whose ranks or lanes read streams of their own, and on how many ranks."""

PER_SEQUENCE = {"moe_aux_loss_coeff": 0.3, "moe_z_loss_coeff": 0.1}
VARIANTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "overlap": ("overlap", "experts", PER_SEQUENCE),
    "forward-overlap": ("forward-overlap", "width", PER_SEQUENCE | {"moe_router_load_balancing_type": "aux_loss"}),
    "blocking": ("blocking", "experts", {}),
}
"""Overlap, sharding of experts, and balancing losses."""
RECOMPUTED, CUTS = {"kept": 0, "recomputed": 3}, {"whole": (), "cut": (1, 3)}


class How(NamedTuple):
    """What must not change the result."""

    ranks: int
    sharded_stream: str
    sharding: str
    overlap: str
    recompute: int
    cuts: tuple[int, ...]
    micro_batches: int


class Batch(NamedTuple):
    """Rows with padding."""

    tokens: Tensor
    labels: Tensor
    loss_mask: Tensor
    lengths: Tensor
    """[b]: number of tokens of each row before its padding."""

    @property
    def targets(self) -> float:
        """The divisor of the losses of the head."""
        return max(1.0, float(self.loss_mask.sum()))

    def drafting_targets(self, depths: int) -> list[float]:
        """The divisor of the loss of each depth of a drafting head."""
        return [max(1.0, float(self.loss_mask[:, 1 + depth :].sum())) for depth in range(depths)]

    @property
    def sight(self) -> Sight:
        """Causal attention, and which tokens are padding."""
        (rows, length), columns = self.tokens.shape, torch.arange(self.tokens.shape[1])
        visible = torch.ones(rows, length, length, dtype=torch.bool).tril()
        return Sight(columns.expand(rows, -1), visible, columns < self.lengths.unsqueeze(1))


class Outcome(NamedTuple):
    """What a rank found."""

    loss: float
    """With the balancing losses."""
    loads: list[list[int]]
    """How many tokens chose each expert, by layer."""
    gradients: Pieces


def run_case(
    config: ModelConfig, weights: Weights, experts: ExpertOptions, how: How, batch: Batch, mtp: MTPOptions
) -> Outcome:
    """Run the micro-batches of a batch through one or several ranges of layers."""
    replicas = head_replicas(config, how.ranks)
    mesh = mesh_of(how.ranks, replicas) if how.ranks > 1 else ProcessMesh.single()
    mesh = replace(mesh, sequence_parallel=bool(how.sharded_stream))
    options = StackOptions(how.overlap != "blocking", how.recompute, mirrored_backward=how.overlap != "forward-overlap")
    parts = []
    for bound in itertools.pairwise((0, *how.cuts, config.num_layers)):
        chunks = [range(*bound)]
        part = LanguageModel(config, mesh, options, chunks=chunks, dtype=torch.float64, experts=experts, mtp=mtp)
        fill_slices(part, weights)
        part.stack.side_queue = InlineQueue() if how.sharded_stream == "ahead" else None
        parts.append(part)
    loss_sum = 0.0
    sums = PassStats()
    all_tokens = int(batch.lengths.sum())
    for tokens, labels, mask, lengths in micro_batches(batch, how.micro_batches):
        totals = all_tokens, batch.drafting_targets(parts[-1].mtp_depths)
        loss, stats = run_chain(parts, tokens, labels, mask, batch.targets, lengths, *totals)
        loss_sum += loss.item()
        sums = sums.plus(stats)
    of_head = {}
    for depth, targets in enumerate(batch.drafting_targets(mtp.depths)):
        of_head |= zip(names_of_depth(depth), (mtp.loss_scale / mtp.depths / targets, 0.0), strict=True)
    for name, loss in sums.losses.items():
        loss_sum += float(loss) * of_head.get(name, 1 / all_tokens)
    if parts[-1].copies_embedding:
        share_gradient_of_copies(parts[0].embedding.weight, parts[-1].embedding.weight)
    loads = [loads.tolist() for loads in sums.loads.values()]
    return Outcome(loss_sum, loads, [piece for part in parts for piece in gradient_pieces(part)])


def share_gradient_of_copies(*copies: Tensor) -> None:
    """Sum the gradients of the copies of a matrix on pipeline stages; a copy may have none."""
    total = sum((copy.grad for copy in copies if copy.grad is not None), torch.zeros_like(copies[0]))
    for copy in copies:
        copy.grad = total.clone()


def make_batch(config: ModelConfig) -> Batch:
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, config.vocab_size, (4, 9), generator=generator)
    mask, lengths = (torch.rand(4, 8, generator=generator) < 0.6).double(), torch.tensor([8, 3, 6, 7])
    return Batch(tokens[:, :-1], tokens[:, 1:], mask, lengths)


def micro_batches(batch: Batch, count: int) -> list[Batch]:
    return [Batch(*parts) for parts in zip(*(part.chunk(count) for part in batch), strict=True)]


def check(gloo_pools: GlooPools, config: ModelConfig, how: How, batch: Batch, **losses: Any) -> None:
    reference = replace(ReferenceConfig.like(config), **losses)
    weights = make_weights(reference, seed=1, dtype=torch.float64)
    expected_loss, expected = 0.0, dict[str, Tensor]()
    # All losses but that of whole micro-batches are the same for the whole batch at once.
    is_whole = reference.moe_router_load_balancing_type == "seq_aux_loss"
    for part in micro_batches(batch, 1 if is_whole else how.micro_batches):
        totals = batch.targets, int(batch.lengths.sum())
        arguments = weights, reference, *part[:3], *totals, part.sight
        if config.mtp_num_layers:
            total = {"total_drafting_targets": torch.tensor(batch.drafting_targets(reference.mtp_depths))}
            (loss, of_experts, *of_head), gradients = drafting_gradients(*arguments, **total)
            loss = loss + reference.mtp_loss_scaling_factor * torch.stack(of_head).mean() + of_experts
        else:
            loss, gradients = reference_gradients(*arguments)
        expected_loss += loss.item()
        expected = {name: expected[name] + one if expected else one for name, one in gradients.items()}
    record: list[Routed] = []
    reference_logits(weights, reference, batch.tokens, batch.sight, record)
    if config.mtp_num_layers:
        drafting_logits(weights, reference, batch.tokens, batch.sight, record)
    routings = itertools.groupby(record, key=lambda routed: routed.layer)
    expected_loads = [sum(routed.loads for routed in of_layer).tolist() for _, of_layer in routings]
    mtp = MTPOptions(reference.mtp_loss_scaling_factor, reference.mtp_detach_heads, reference.mtp_depths)
    experts = ExpertOptions(
        reference.moe_aux_loss_coeff,
        reference.moe_router_load_balancing_type,
        reference.moe_z_loss_coeff,
        how.sharding,
    )
    outcomes = gloo_pools(how.ranks).run(run_case, config, weights, experts, how, batch, mtp)
    for loss, loads, _ in outcomes:
        assert loss == pytest.approx(expected_loss, rel=TOLERANCE)
        assert loads == expected_loads
    assert_pieces([outcome.gradients for outcome in outcomes], expected, TOLERANCE)


@pytest.mark.parametrize(
    ("wiring", "layout", "attention", "recompute", "cuts", "micro_batches", "variant"),
    pairwise(list(WIRINGS), LAYOUTS, ATTENTIONS, RECOMPUTED, CUTS, {"one": 1, "accumulated": 2}, list(VARIANTS)),
)
def test_every_wiring_and_layout(
    gloo_pools: GlooPools,
    wiring: str,
    layout: tuple[int, str],
    attention: dict[str, Any],
    recompute: int,
    cuts: tuple[int, ...],
    micro_batches: int,
    variant: str,
) -> None:
    overlap, sharding, losses = VARIANTS[variant]
    how = How(*layout, sharding, overlap, recompute, cuts, micro_batches)
    config = small_model(**WIRINGS[wiring] | attention)
    check(gloo_pools, config, how, make_batch(config), **losses)


@pytest.mark.parametrize(
    ("name", "feature", "recompute", "cuts", "micro_batches", "overlap"),
    pairwise(
        list(OWN_STREAMS),
        ["biases", "qwen", "multi-head", "clipped"],
        RECOMPUTED,
        CUTS,
        {"one": 1, "accumulated": 2},
        ["overlap", "blocking"],
    ),
)
def test_separate_streams(
    gloo_pools: GlooPools,
    name: str,
    feature: str,
    recompute: int,
    cuts: tuple[int, ...],
    micro_batches: int,
    overlap: str,
) -> None:
    ranks, changes = OWN_STREAMS[name]
    config = small_model(**FEATURES[feature] | changes)
    how = How(ranks, "", "width", overlap, recompute, cuts, micro_batches)
    check(gloo_pools, config, how, make_batch(config))


@pytest.mark.parametrize(
    ("name", "attention", "recompute"),
    pairwise(
        ["2-lanes-on-2", "4-lanes-on-4", "desync-4-on-2", "desync-2-on-4"],
        {name: ATTENTIONS[name] for name in ("latent", "latent-queries", "sinks", "delta")},
        RECOMPUTED,
    ),
)
def test_attention_of_separate_streams(
    gloo_pools: GlooPools, name: str, attention: dict[str, Any], recompute: int
) -> None:
    """Lanes of one rank cannot share a latent."""
    ranks, changes = OWN_STREAMS[name]
    config = small_model(**changes | attention)
    check(gloo_pools, config, How(ranks, "", "width", "overlap", recompute, (1, 3), 2), make_batch(config))


@pytest.mark.parametrize(
    ("feature", "layout", "wiring", "overlap"),
    pairwise(list(FEATURES), LAYOUTS | {"tp4": (4, "")}, ["ladder", "parallel", "hybrid"], ["overlap", "blocking"]),
)
def test_features(gloo_pools: GlooPools, feature: str, layout: tuple[int, str], wiring: str, overlap: str) -> None:
    config = small_model(**WIRINGS[wiring], **FEATURES[feature])
    check(gloo_pools, config, How(*layout, "width", overlap, 2, (), 1), make_batch(config))


@pytest.mark.parametrize(
    ("wiring", "layout", "recompute", "micro_batches", "kind"),
    pairwise(["experts", "farskip"], LAYOUTS, RECOMPUTED, {"one": 1, "accumulated": 4}, ["seq_aux_loss", "aux_loss"]),
)
def test_balancing_losses_alone(
    gloo_pools: GlooPools, wiring: str, layout: tuple[int, str], recompute: int, micro_batches: int, kind: str
) -> None:
    """No target counts, so that a balancing loss multiplied by the ranks is not hidden by the gradient of the rest."""
    how = How(*layout, "width", "overlap", recompute, (), micro_batches)
    config = small_model(**WIRINGS[wiring])
    batch = make_batch(config)
    losses = PER_SEQUENCE | {"moe_router_load_balancing_type": kind}
    check(gloo_pools, config, how, batch._replace(loss_mask=torch.zeros_like(batch.loss_mask)), **losses)


def initial_pieces(config: ModelConfig, ranks: int, sharding: Any) -> Pieces:
    """Return this rank's slices of the initial weights."""
    mesh = mesh_of(ranks, head_replicas(config, ranks))
    model = LanguageModel(config, mesh, seed=7, experts=ExpertOptions(sharding=sharding))
    for matrix in (model.embedding, model.lm_head):
        assert matrix is not None and not matrix.weight[matrix.valid :].any(), "padding is not zero"
    return weight_pieces_of(model)


def initial_weights(gloo_pools: GlooPools, config: ModelConfig, sharding: str = "width") -> dict[str, Tensor]:
    """Return the initial weights, which must not depend on the layout."""
    (whole,) = gloo_pools(1).run(initial_pieces, config, 1, sharding)
    full = {name: values for name, _, values in whole}
    for ranks in (2, 4):
        assert_pieces(gloo_pools(ranks).run(initial_pieces, config, ranks, sharding), full, 0.0)
    return full


@pytest.mark.parametrize("wiring", ["hybrid", "parallel"])
def test_initial_model_does_not_depend_on_the_layout(gloo_pools: GlooPools, wiring: str) -> None:
    config = small_model(**WIRINGS[wiring], ffn_hidden_size=200, add_qkv_bias=True, init_method_std=0.5)
    full = initial_weights(gloo_pools, config)
    assert full["layers.0.attention.q_proj.weight"].std().item() == pytest.approx(0.5, rel=0.05)
    assert full["layers.0.mlp.down_proj.weight"].std().item() == pytest.approx(0.5 / 8**0.5, rel=0.05)
    assert not torch.equal(full["layers.0.mlp.up_proj.weight"], full["layers.0.mlp.gate_proj.weight"])
    assert not torch.equal(full["layers.0.mlp.up_proj.weight"], full["layers.1.mlp.up_proj.weight"])
    assert not torch.equal(full["embedding.weight"][:37], full["embedding.weight"][64:])


@pytest.mark.parametrize("sharding", ["width", "experts"])
def test_initial_experts_do_not_depend_on_the_layout(gloo_pools: GlooPools, sharding: str) -> None:
    changes = {"moe_ffn_hidden_size": 200, "init_method_std": 0.5, "num_layers": 2, "moe_layers": (1,)}
    full = initial_weights(gloo_pools, small_model(**GLM | changes), sharding)
    experts = full["layers.1.experts.gate_proj.weight"]
    assert experts.std().item() == pytest.approx(0.5, rel=0.05)
    assert full["layers.1.experts.down_proj.weight"].std().item() == pytest.approx(0.5 / 4**0.5, rel=0.05)
    assert len({tuple(values) for values in experts.flatten(1)[:, :8].tolist()}) == 8, "some experts are equal"
    assert not torch.equal(experts, full["layers.1.experts.up_proj.weight"])


@pytest.mark.parametrize("ranks", [2, 4])
def test_initial_desync_model_is_standard_with_more_norms(gloo_pools: GlooPools, ranks: int) -> None:
    (whole,) = gloo_pools(1).run(initial_pieces, small_model(), 1, "width")
    full = {name: values for name, _, values in whole}
    for layer, kind in ((0, "mlp"), (1, "attention"), (1, "mlp"), (2, "mlp"), (3, "attention"), (3, "mlp")):
        full[f"layers.{layer}.{kind}_norm.weight"] = torch.ones(ranks, 32)
    config = small_model(**desync(ranks, 4) | {"num_layers": 4})
    assert_pieces(gloo_pools(ranks).run(initial_pieces, config, ranks, "width"), full, 0.0)


def test_a_desync_model_has_one_tensor_parallel_size() -> None:
    with pytest.raises(ValueError, match="of 2 tensor-parallel ranks on 1"):
        LanguageModel(small_model(**desync(2, 2)), ProcessMesh.single())


def test_a_mesh_must_have_the_head_replicas_of_the_model() -> None:
    """Otherwise the gradients of shared heads would miss the other ranks' parts."""
    four = replace(ProcessMesh.single(), tensor=CommGroup(range(4), 0, None))
    for heads, replicas, fits in ((2, (2,), True), (2, (), False), (2, (4,), False), (4, (), True), (4, (2,), False)):
        mesh = replace(four, head_replicas={count: CommGroup(range(count), 0, None) for count in replicas})
        with nullcontext() if fits else pytest.raises(ValueError, match=f"{heads} key and value heads on 4 "):
            LanguageModel(small_model(num_key_value_heads=heads), mesh, device=torch.device("meta"))

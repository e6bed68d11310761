"""Memory against what a real model keeps, counted storage by storage, and against tables by hand."""

from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from typing import Any, Literal

import pytest
import torch

from ladder_lab.bench.sizes import SIZES
from ladder_lab.cost.layout import Layout, stage_chunks
from ladder_lab.cost.memory import (
    Precision,
    _graph_slots,
    _head_activation_bytes,
    _layers_activation_bytes,
    _passes_in_flight,
    _stage_moments,
    stage_memory,
    stage_parameters,
)
from ladder_lab.dry_run.one_rank import OPERATIONS
from ladder_lab.wirings import NAMED_WIRINGS
from megatron_ladder.blueprint.model import ModelConfig, head_replicas
from megatron_ladder.blueprint.specs import padded_vocab_size
from megatron_ladder.blueprint.tensors import parameter_count
from megatron_ladder.blueprint.wiring import SHARED_STREAM_MODES
from megatron_ladder.comm.group import CommGroup
from megatron_ladder.comm.mesh import ProcessMesh
from megatron_ladder.engine.schedule import make_schedule
from megatron_ladder.model.language_model import LanguageModel
from megatron_ladder.model.operations import ExpertOptions, with_norm
from megatron_ladder.model.stack import StackOptions
from tests.helpers.live_bytes import LiveBytes
from tests.helpers.sharded import small_model

SMALL = small_model(num_layers=3, hidden_size=128, ffn_hidden_size=352, head_dim=32, vocab_size=384)
TOLERANCE = 0.03
"""Rotary tables, root mean squares and the softmax's sums are not counted."""
FUSED = with_norm(OPERATIONS.norm)
"""The norm of CUDA, without numbers."""


def saved_bytes(module: LanguageModel, forward: Callable[[], torch.Tensor]) -> int:
    """Storages that autograd holds after a forward pass, each once, without the weights."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = forward()
    assert result.requires_grad
    return sum(storage.nbytes() for storage in kept.values())


def kept_bytes(model: ModelConfig, recompute: bool, dtype: torch.dtype, samples: int, sequence: int) -> int:
    options = StackOptions(operations=FUSED, recompute_layers=model.num_layers if recompute else 0)
    module = LanguageModel(model, ProcessMesh.single(), options, dtype=dtype, seed=1)
    ids = torch.randint(0, model.vocab_size, (samples, sequence + 1))
    return saved_bytes(module, lambda: module(ids[:, :-1], ids[:, 1:]))


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("wiring", SHARED_STREAM_MODES)
@pytest.mark.parametrize(("dtype", "precision"), [(torch.float32, "fp32"), (torch.bfloat16, "bf16")])
def test_activations_are_those_of_a_real_forward_pass(
    dtype: torch.dtype, precision: Precision, wiring, recompute: bool
) -> None:
    model = replace(NAMED_WIRINGS[wiring].of(SMALL, 1), logit_soft_cap=30.0 if wiring == "ladder" else None)
    layout = Layout(micro_batch=2, recompute=recompute)
    counted = _layers_activation_bytes(model, layout, 0, 128, precision)
    counted += _head_activation_bytes(model, layout, 128, precision)
    assert counted == pytest.approx(kept_bytes(model, recompute, dtype, 2, 64), rel=TOLERANCE)


LATENT = {"num_key_value_heads": 1, "kv_lora_rank": 80, "qk_nope_head_dim": 24, "qk_rope_head_dim": 8}
GATE = {"attention_output_gate": True}
DELTA: dict[str, Any] = {
    "experimental_attention_variant": "gated_delta_net",
    "linear_attention_layers": (0, 1),
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}


@pytest.mark.parametrize("wiring", ["farskip", "ladder-parallel"])
@pytest.mark.parametrize(
    "kind",
    [
        GATE,
        LATENT | {"q_lora_rank": 48, "v_head_dim": 16},
        LATENT | {"q_lora_rank": 48, "v_head_dim": 32} | GATE,
        LATENT | {"v_head_dim": 32} | GATE,
        LATENT | {"v_head_dim": 16} | GATE,
        DELTA | GATE,
    ],
)
def test_activations_of_other_mixers_are_those_of_a_real_forward_pass(kind: dict[str, Any], wiring) -> None:
    experts = {"num_experts": 4, "moe_ffn_hidden_size": 64, "moe_layers": (2,)} if wiring == "farskip" else {}
    model = NAMED_WIRINGS[wiring].of(replace(SMALL, **kind, **experts), 1)
    counted = _layers_activation_bytes(model, Layout(micro_batch=2), 0, 128, "bf16")
    counted += _head_activation_bytes(model, Layout(micro_batch=2), 128, "bf16")
    assert counted == pytest.approx(kept_bytes(model, False, torch.bfloat16, 2, 64), rel=TOLERANCE)


EXPERTS = {"num_experts": 16, "moe_ffn_hidden_size": 512, "moe_layers": (0, 1, 2), "moe_router_topk": 4}


def choose_first(config: ModelConfig, scores: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return torch.arange(config.moe_router_topk).expand(*scores.shape[:2], -1)


@pytest.mark.parametrize("is_even", [True, False])
@pytest.mark.parametrize("ranks", [1, 4, 8])
@pytest.mark.parametrize("sharding", ["width", "experts"])
def test_a_rank_keeps_its_part_of_the_rows_of_experts(
    monkeypatch: pytest.MonkeyPatch, sharding: Literal["width", "experts"], ranks: int, is_even: bool
) -> None:
    """The measured sizes of saved tensors equal the planned ones, also if the first rank has all rows."""
    if not is_even:
        monkeypatch.setattr("megatron_ladder.model.experts._choose", choose_first)
    sizes = {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64}
    model = NAMED_WIRINGS["ladder"].of(replace(SMALL, **sizes, **EXPERTS), 1)
    mesh = replace(ProcessMesh.single(), tensor=CommGroup(range(ranks), 0, None))
    options, experts = StackOptions(operations=FUSED), ExpertOptions(sharding=sharding)
    module = LanguageModel(model, mesh, options, dtype=torch.bfloat16, seed=1, experts=experts)
    tokens = torch.randint(0, model.vocab_size, (2, 64))
    found = saved_bytes(module, lambda: module.hidden_states(tokens, module.training_context(tokens)))
    layout = Layout(tensor=ranks, micro_batch=2, whole_experts=sharding == "experts")
    counted = _layers_activation_bytes(model, layout, 0, 128, "bf16")
    # The scores of routers are not counted.
    assert counted == pytest.approx(found, rel=2 * TOLERANCE)


@pytest.mark.parametrize(("dtype", "precision"), [(torch.float32, "fp32"), (torch.bfloat16, "bf16")])
def test_the_peak_of_the_loss_is_that_of_a_real_step(dtype: torch.dtype, precision: Precision) -> None:
    model = replace(SMALL, num_layers=1, vocab_size=16384)
    module = LanguageModel(model, ProcessMesh.single(), StackOptions(operations=FUSED), dtype=dtype, seed=1)
    ids = torch.randint(0, model.vocab_size, (4, 257))
    with LiveBytes() as memory:
        module(ids[:, :-1], ids[:, 1:]).backward()
    layout = Layout(zero=1, micro_batch=4)
    counted = stage_memory(model, layout, 0, 256, 1, precision).activations
    assert counted == pytest.approx(memory.peak, rel=TOLERANCE)


@pytest.mark.parametrize(
    "widths", [{}, {"linear_key_head_dim": 64}, {"linear_value_head_dim": 256}, {"linear_num_key_heads": 8}]
)
def test_backward_recomputes_as_many_numbers_of_a_mixer_as_declared(widths: dict[str, int]) -> None:
    sizes = {"linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_value_heads": 16}
    model = replace(SMALL, **DELTA | sizes | widths)
    options, device = StackOptions(operations=FUSED), torch.device("meta")
    with device:
        module = LanguageModel(model, ProcessMesh.single(), options, dtype=torch.bfloat16, device=device)
    body: Any = module.stack.sub_blocks()[0].body
    context = module.training_context(torch.empty(2, 512, dtype=torch.int64, device=device))
    projected = torch.empty(512, 2, sum(body.heads.widths), dtype=torch.bfloat16, device=device, requires_grad=True)
    with LiveBytes() as memory:
        mixed = body.heads(projected, context)
        mixed.backward(torch.empty_like(mixed))
    assert 4 * 1024 * model.mixer_of(0).recomputed_numbers(1) == pytest.approx(memory.peak, rel=TOLERANCE)


@pytest.mark.parametrize("tensor", [1, 2, 4])
@pytest.mark.parametrize("wiring", ["ladder", "parallel"])
@pytest.mark.parametrize(
    "kind", [{"qk_layernorm": True}, LATENT | GATE | {"q_lora_rank": 48, "v_head_dim": 16}, DELTA | GATE]
)
def test_parameters_are_those_of_the_modules(kind: dict[str, Any], tensor: int, wiring) -> None:
    model = replace(NAMED_WIRINGS[wiring].of(SMALL, 1), vocab_size=200, add_qkv_bias=True, **kind)
    replicas = {count: CommGroup(range(count), 0, None) for count in head_replicas(model, tensor)}
    mesh = replace(ProcessMesh.single(), tensor=CommGroup(range(tensor), 0, None), head_replicas=replicas)
    with torch.device("meta"):
        module = LanguageModel(model, mesh, device=torch.device("meta"))
    parameters = sum(parameter.numel() for parameter in module.parameters())
    assert stage_parameters(model, Layout(tensor=tensor), 0) == parameters
    parts = module.stack.named_parameters()
    matrices = sum(part.numel() for name, part in parts if part.dim() > 1 and "filters" not in name)
    assert _stage_moments(model, Layout(tensor=tensor), 0) == 2 * parameters
    assert _stage_moments(model, Layout(tensor=tensor, optimizer="muon"), 0) == 2 * parameters - matrices


def test_stages_hold_the_whole_model() -> None:
    model = SIZES["llama-8b"]
    layout = Layout(pipeline=3)
    for chunks, lengths in ((1, [[11], [11], [10]]), (2, [[6, 5], [6, 5], [5, 5]])):
        ranges = [stage_chunks(model, Layout(pipeline=3, chunks=chunks), stage) for stage in range(3)]
        assert [[len(layers) for layers in of_stage] for of_stage in ranges] == lengths
    padding = 2 * (padded_vocab_size(model.vocab_size, 1) - model.vocab_size) * model.hidden_size
    total = sum(stage_parameters(model, layout, stage) for stage in range(3))
    assert total - padding == parameter_count(model).total
    tied = replace(model, tie_embeddings=True)
    matrix = padded_vocab_size(model.vocab_size, 1) * model.hidden_size
    assert stage_parameters(tied, layout, 2) == stage_parameters(model, layout, 2)
    assert stage_parameters(tied, Layout(), 0) == stage_parameters(model, Layout(), 0) - matrix


@pytest.mark.parametrize("chunks", [1, 2, 4])
@pytest.mark.parametrize("stages", [2, 4, 6])
def test_graphs_have_as_many_slots_as_micro_batches_are_in_flight(stages: int, chunks: int) -> None:
    layout = Layout(pipeline=stages, chunks=chunks)
    for micro_batches in range(1, 5 * stages):
        for stage, slots in enumerate(make_schedule(stages, chunks, micro_batches)):
            passes = [slot.work for slot in slots if slot.work is not None]
            most = [
                max(accumulate(1 if work.is_forward else -1 for work in passes if work.chunk == chunk))
                for chunk in range(chunks)
            ]
            assert _graph_slots(layout, stage, micro_batches) == most
            at_once = max(accumulate(1 if work.is_forward else -1 for work in passes))
            assert _passes_in_flight(layout, stage, micro_batches) * chunks == at_once


def test_graphs_need_what_a_pass_needs_for_each_micro_batch_in_flight() -> None:
    """The second of four stages has three in flight. It recomputes one of its layers in the memory of each."""
    model = SIZES["llama-8b"]
    layout = Layout(pipeline=4, recompute=True, micro_batch=2)
    captured, eager = (
        stage_memory(model, replace(layout, captures=captures), 1, 4096, 8).activations for captures in (True, False)
    )
    projections, outputs, mlp = 4096 + 2 * 1024, 4096, 4 * 14336
    rotated = 4096 + 1024
    state = 4096
    assert captured - eager == 2 * 8192 * (2 * (projections + rotated + outputs + mlp) + 3 * state)
    last = replace(layout, pipeline=1)
    assert stage_memory(model, last, 0, 4096, 8) == stage_memory(model, replace(last, captures=False), 0, 4096, 8)

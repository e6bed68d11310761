"""No predicted step is faster than the traffic through memory that no implementation can avoid."""

import random

import pytest

from ladder_lab.bench.sizes import SIZES
from ladder_lab.cost import training
from ladder_lab.cost.layout import Layout
from ladder_lab.cost.machines import GPUS, Machine
from ladder_lab.cost.training import LayerTime, step_time
from ladder_lab.plan.layouts import PLANNED_WIRINGS, PlanRequest, _has, _layouts
from ladder_lab.wirings import NAMED_WIRINGS
from megatron_ladder.blueprint.model import ModelConfig
from megatron_ladder.blueprint.tensors import uniform_partition

CLUSTERS = (
    ("h100", 8, 64, 4096),
    ("h100", 8, 8, 128),
    ("h100", 64, 256, 1024),
    ("h100", 512, 1024, 4096),
    ("h100", 512, 512, 512),
    ("h100", 1024, 4096, 8192),
    ("h200", 8, 32, 2048),
    ("h200", 16, 64, 8192),
    ("h200", 256, 1024, 512),
    ("h20", 8, 64, 4096),
    ("h20", 128, 128, 256),
    ("b200", 8, 64, 4096),
    ("b200", 72, 144, 1024),
    ("a100", 8, 64, 2048),
    ("a100", 256, 512, 512),
    ("l40s", 8, 16, 1024),
    ("rtx-pro-6000", 4, 16, 512),
    ("rtx-3090", 4, 8, 256),
    ("rtx-5090", 16, 64, 1024),
    ("gb10", 2, 8, 64),
)
"""GPU, number, samples of a step, tokens of a sample."""
PAIRS = [
    pytest.param(name, cluster, marks=() if (7 * model - index) % 20 == 0 else pytest.mark.slow)
    for model, name in enumerate(SIZES)
    for index, cluster in enumerate(CLUSTERS)
]
"""Every run takes one cluster of each model, and `--slow` all."""
LAYOUTS = 8


def layer_matrices(model: ModelConfig, layer: int) -> tuple[float, float]:
    """Return the numbers in the matrices of a layer that every token multiplies with, and in those of its experts."""
    h, heads = model.hidden_size, model.num_attention_heads
    if model.kv_lora_rank:
        key, value = model.qk_nope_head_dim + model.qk_rope_head_dim, model.v_head_dim
        queries = model.q_lora_rank * (h + heads * key) if model.q_lora_rank else h * heads * key
        latents = h * (model.kv_lora_rank + model.qk_rope_head_dim)
        expanded = model.kv_lora_rank * heads * (model.qk_nope_head_dim + value)
        attention = queries + latents + expanded + heads * value * h
    else:
        attention = 2 * h * model.head_dim * (heads + model.num_key_value_heads)
    if layer not in model.moe_layers:
        return attention + 3 * h * model.ffn_hidden_size, 0
    shared = 3 * h * model.moe_shared_expert_intermediate_size
    return attention + shared + model.num_experts * h, 3 * h * model.moe_ffn_hidden_size * model.num_experts


def traffic_seconds(model: ModelConfig, layout: Layout, sequence: int, micro_batches: int, rate: float) -> float:
    """Return the least time of the fullest stage.

    In each micro-batch it reads its matrices in bf16 in forward and backward, and adds each gradient in fp32 (the first
    one is written). Once, it updates its part of the optimizer's state.
    """
    divided = layout.experts if layout.divides_experts else layout.tensor
    tokens = sequence * layout.micro_batch * divided / layout.tensor
    passes = 3 if layout.recompute else 2
    of_stages = []
    ranges = uniform_partition(model.num_layers, layout.pipeline * layout.chunks)
    for stage in range(layout.pipeline):
        dense = experts = 0.0
        for layer in (layer for chunk in ranges[stage :: layout.pipeline] for layer in chunk):
            of_all, of_experts = layer_matrices(model, layer)
            dense += of_all / layout.tensor
            experts += of_experts / divided
        if stage == layout.pipeline - 1:
            dense += model.vocab_size * model.hidden_size / layout.tensor
        # Tokens that choose evenly leave some experts without any.
        chosen = 1 - (1 - model.moe_router_topk / model.num_experts) ** tokens if experts else 0.0
        moved = micro_batches * 2 * passes + (4 + 8 * (micro_batches - 1))
        # Gradient, master copy and moments, the latter read and written, and the weight.
        updated = 4 + 3 * 8 + 2
        owned = (dense + experts * divided / layout.tensor) / layout.data
        of_stages.append(moved * (dense + chosen * experts) + updated * owned)
    return max(of_stages) / rate


@pytest.mark.parametrize(("name", "cluster"), PAIRS)
def test_a_step_computes_at_least_as_long_as_its_traffic(
    name: str, cluster: tuple[str, int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does without waiting for the host or for other ranks."""
    monkeypatch.setattr(training, "HOST_SECONDS", 0.0)
    gpu, gpus, batch, sequence = cluster
    machine = Machine.usual(gpu)
    request = PlanRequest(SIZES[name], machine, gpus, batch, sequence, PLANNED_WIRINGS)
    layouts = list(_layouts(request))
    assert layouts
    chosen = random.Random(f"{name} {cluster}")
    for layout in chosen.sample(layouts, min(LAYOUTS, len(layouts))):
        fitting = [w for w in PLANNED_WIRINGS if _has(layout, w) and NAMED_WIRINGS[w].fits(SIZES[name], layout.tensor)]
        wiring = chosen.choice(fitting)
        model = NAMED_WIRINGS[wiring].of(SIZES[name], layout.tensor)
        step = step_time(LayerTime(model, machine, layout, sequence), layout, batch)
        micro_batches = batch // (layout.data * layout.micro_batch)
        rate = GPUS[gpu].memory_bytes_per_second
        computing = step.compute + step.exposed_tensor
        assert computing >= traffic_seconds(SIZES[name], layout, sequence, micro_batches, rate), (layout, wiring)

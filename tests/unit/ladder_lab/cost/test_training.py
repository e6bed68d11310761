"""The step's time by hand: no reduces, all exposed, a pipeline's triangle, data-parallel bytes."""

from dataclasses import replace

import pytest
import torch

from ladder_lab.bench.sizes import SIZES
from ladder_lab.cost.layout import Layout
from ladder_lab.cost.machines import PRESETS, LinkPreset, Machine
from ladder_lab.cost.memory import _outputs_at_cuts, stage_memory, stage_parameters, worst_memory
from ladder_lab.cost.training import LayerTime, model_flop_utilisation, step_time
from ladder_lab.plan.layouts import PlanRequest, _layouts
from ladder_lab.wirings import NAMED_WIRINGS
from megatron_ladder.blueprint.flops import ModelFlops
from megatron_ladder.blueprint.specs import padded_vocab_size
from megatron_ladder.blueprint.tensors import parameter_count
from megatron_ladder.comm.mesh import ProcessMesh
from megatron_ladder.command_line import flag_words
from megatron_ladder.config.run import parse_run, resolve_run
from megatron_ladder.engine.build import _captures
from megatron_ladder.engine.schedule import make_schedule
from megatron_ladder.model.language_model import LanguageModel
from megatron_ladder.parallel.products import reads_on_host
from tests.helpers.commands import REPOSITORY_ROOT
from tests.helpers.nccl_rules import Rules, programs_of
from tests.helpers.pairwise import pairwise

LLAMA = SIZES["llama-8b"]
H100 = Machine.usual("h100")
NO_CONTENTION = replace(H100, contention=0.0)


def times_of(
    wiring="standard", tensor: int = 8, machine: Machine = NO_CONTENTION, factor: float = 1.0, recompute: bool = False
) -> LayerTime:
    layout = Layout(tensor=tensor, recompute=recompute)
    return LayerTime(NAMED_WIRINGS[wiring].of(LLAMA, 1), machine, layout, 4096, factor)


def product_seconds(numbers: float, rows: float = 4096, times: int = 1) -> float:
    """Return the time of forward and backward of a matrix, which is read or added to so many times."""
    operations = 2 * rows * numbers / (0.58 * 989e12)
    read, added = (times * num_bytes * numbers / 3.35e12 for num_bytes in (2, 4 + 4))
    return 2 * max(operations, read) + max(operations, added)


def expert_seconds(experts: int, numbers: float, rows: float) -> float:
    """Return the time of one matrix of all experts, whose gradients are written in bf16, read and added."""
    operations = 2 * rows * numbers / (0.58 * 989e12)
    return 3 * max(operations, experts * 2 * numbers / 3.35e12) + experts * (2 + 4 + 4) * numbers / 3.35e12


def head_seconds(tensor: int, vocabulary: int = 128256) -> float:
    """Return the time of the head for 4,096 tokens in eight chunks."""
    rows = padded_vocab_size(vocabulary, tensor) / tensor
    return product_seconds(4096 * rows, times=8) + 24 * 4096 * rows / 3.35e12


def embedding_seconds(vocabulary: int = 128256) -> float:
    return 12 * 4096 * padded_vocab_size(vocabulary, 1) / 3.35e12


def update_seconds(layout: Layout) -> float:
    return 34 * stage_parameters(LLAMA, layout, 0) / layout.data / 3.35e12


def test_one_gpu_is_products_and_memory() -> None:
    step = step_time(times_of(tensor=1), Layout(zero=0), 3)
    projections, scores, mlp = 2 * 4096 * (2 * 4096 + 2 * 1024), 4 * 4096 * 4096, 6 * 4096 * 14336
    useful = 3 * 32 * 4096 * (projections + scores / 2 + mlp)
    stream = 2 * 32 * 3 * 5.5 * 2 * 4096 * 4096 / 3.35e12
    pass_seconds = useful / (0.58 * 989e12) + stream + embedding_seconds() + head_seconds(1)
    assert step.compute == pytest.approx(3 * pass_seconds + update_seconds(Layout()))
    assert (step.exposed_tensor, step.bubble, step.exposed_data) == pytest.approx((0, 0, 0))
    again = step_time(times_of(tensor=1, recompute=True), Layout(zero=0), 3)
    layers = 3 * pass_seconds - 3 * (embedding_seconds() + head_seconds(1))
    assert again.total - step.total == pytest.approx(layers / 3)


@pytest.mark.parametrize(("wiring", "gain"), [("ladder", 1.25), ("parallel", 1.35), ("ladder-parallel", 1.50)])
def test_gains_of_training_with_bounded_collectives(wiring: str, gain: float) -> None:
    """A step-time model that was fitted to runs on H100 gives them, with Megatron's overlap as the baseline."""
    link = LinkPreset("fit", range(2, 9), 282, "those runs", latency=4.1, per_rank=2.12, root=14)
    bounded = replace(H100, link=link, contention=0.2)
    standard, other = (times_of(name, machine=bounded).passes(range(32))[1] for name in ("standard", wiring))
    assert standard / other == pytest.approx(gain, abs=0.02)


@pytest.mark.parametrize("interval", [2, 4])
def test_desync_exposes_one_reduce_per_interval_in_each_pass(interval: int) -> None:
    standard = times_of(factor=3.0)
    assert standard.reduce_seconds == 3 * times_of().reduce_seconds
    model = NAMED_WIRINGS[f"desync-{interval}x"].of(LLAMA, 8)
    compute, total = replace(standard, model=model).passes(range(32))
    assert compute == pytest.approx(standard.passes(range(32))[0])
    assert total - compute == pytest.approx(2 * 64 / interval * standard.reduce_seconds)


def with_messages(seconds: float) -> Machine:
    """Return a machine in which the message of two ranks takes so long, whatever its size."""
    return replace(NO_CONTENTION, link=LinkPreset("wire", range(2, 9), None, "", latency=1e6 * seconds))


def test_a_pipeline_waits_for_its_other_stages() -> None:
    times = times_of(tensor=1, machine=with_messages(0.0))
    one, four = step_time(times, Layout(), 8), step_time(times, Layout(pipeline=4), 8)
    layer = times.passes(range(1))[1]
    slowest = 8 * layer + head_seconds(1)
    update = update_seconds(Layout(pipeline=4))
    assert four.compute == pytest.approx(8 * slowest + update, rel=1e-6)
    assert four.bubble == pytest.approx(24 * layer + embedding_seconds(), rel=1e-6)
    assert one.bubble == 0.0


@pytest.mark.parametrize("micro_batches", [1, 2, 3, 4, 6, 8])
@pytest.mark.parametrize("chunks", [1, 2, 4])
def test_a_pipeline_of_chunks_waits_as_long_as_its_schedule(chunks: int, micro_batches: int) -> None:
    times, layout = times_of(tensor=1, machine=with_messages(0.0)), Layout(pipeline=4, chunks=chunks)
    step = step_time(times, layout, micro_batches)
    # Forward and backward of a chunk, also of one that has no head.
    slots = make_schedule(4, chunks, micro_batches)[0]
    idle = sum(slot.work is None for slot in slots) / 2
    stage = times.passes(range(8))[1]
    waiting = (idle * stage + (idle - 3) * head_seconds(1) + embedding_seconds()) / chunks
    assert step.bubble == pytest.approx(waiting, rel=1e-6)


@pytest.mark.parametrize(
    ("stages", "chunks", "groups", "recomputes"),
    pairwise(
        {f"{stages} stages": stages for stages in (2, 4, 8)},
        {f"{chunks} chunks": chunks for chunks in (1, 2, 4)},
        {f"{groups} groups": groups for groups in (0.5, 1.0, 1.5, 3.0)},
        {"recomputed": True, "kept": False},
    ),
)
def test_messages_cost_as_much_as_in_a_played_schedule(
    stages: int, chunks: int, groups: float, recomputes: bool
) -> None:
    """A group has as many micro-batches as there are stages. The planner plays nothing."""
    micro_batches = int(groups * stages)
    layout = Layout(pipeline=stages, chunks=chunks, recompute=recomputes)
    slowest = times_of(tensor=1, recompute=recomputes).passes(range(32 // stages))[1] + head_seconds(1)
    forward = slowest / chunks / (4 if recomputes else 3)
    backward = slowest / chunks - forward
    schedule = make_schedule(stages, chunks, micro_batches)
    programs = programs_of(schedule, seconds=lambda work: forward if work.is_forward else backward)

    def times_with(message: float) -> tuple[float, float]:
        """Return the bubble that is predicted, and the time that is played."""
        times = times_of(tensor=1, machine=with_messages(message), recompute=recomputes)
        return step_time(times, layout, micro_batches).bubble, Rules(message).play(programs)

    without = times_with(0.0)
    for length, tolerance in ((0.1, 0.02), (0.6, 0.08), (1.5, 0.08), (3.0, 0.08), (8.0, 0.15)):
        predicted, played = times_with(length * forward)
        added = predicted - without[0], played - without[1]
        assert added[0] == pytest.approx(added[1], abs=tolerance * played), length


def test_late_wirings_send_longer_messages() -> None:
    """They hand on one more tensor. Eight micro-batches of four stages are 6 + 7 * 6 / 4 messages."""
    layout = Layout(pipeline=4)
    late, standard = (step_time(times_of(wiring, tensor=1), layout, 8) for wiring in ("ladder", "standard"))
    assert late.bubble - standard.bubble == pytest.approx(16.5 * (254.57e-6 - 143.55e-6))


def test_tensor_parallel_groups_that_straddle_boxes_use_the_network() -> None:
    """Four ranks, of which two are in each of two boxes of six."""
    times = LayerTime(LLAMA, replace(NO_CONTENTION, per_box=6), Layout(tensor=4, data=3), 4096)
    stream = 2 * 4096 * 4096
    assert times.reduce_seconds == pytest.approx(20e-6 + 6.18e-6 + 0.5 * stream / 47e9)
    # In boxes of three, some groups have one rank in a box, which exchanges the whole sum with the three others.
    uneven = replace(times, machine=replace(NO_CONTENTION, per_box=3))
    assert uneven.reduce_seconds == pytest.approx(20e-6 + (6.18e-6 + 9.46e-6) / 2 + stream / 47e9)


def test_a_tied_embedding_is_summed_over_the_ends_of_a_pipeline() -> None:
    """One GPU of each of two boxes: all bytes of the fp32 gradient pass through its adapter."""
    tied, layout = SIZES["llama-1b"], Layout(pipeline=2, data=8)
    steps = [
        step_time(LayerTime(model, NO_CONTENTION, layout, 4096), layout, 64)
        for model in (tied, replace(tied, tie_embeddings=False))
    ]
    seconds = 20e-6 + 4 * padded_vocab_size(128256, 1) * 2048 / 47e9
    assert steps[0].bubble - steps[1].bubble == pytest.approx(seconds)


def test_ranks_compute_whole_latents_and_sum_their_gradients() -> None:
    """DeepSeek-V3 at TP 8: queries have 192 elements, of which 64 are the rotated key's, and values 128."""
    model, layout = SIZES["deepseek-v3"], Layout(tensor=8)
    whole, per_head = (1536, 512 + 64), 1536 * 192 + 512 * (128 + 128) + 128 * 7168
    attention = product_seconds(7168 * sum(whole)) + product_seconds(16 * per_head)
    attention += 3 * 2 * 4096 * 16 * 4096 * (192 + 128) / 2 / (0.58 * 989e12)
    dense = product_seconds(3 * 7168 * 18432 / 8)
    expert = 7168 * 2048 / 8
    routed = 3 * expert_seconds(256, expert, 4096 * 8) + product_seconds(3 * expert) + product_seconds(256 * 7168)
    streams = 3 * 2 * 5.5 * 2 * 4096 * 7168 / 3.35e12
    compute = 4 * (attention + streams) + dense + 3 * routed
    times = LayerTime(model, NO_CONTENTION, layout, 4096)
    found, total = times.passes(range(2, 6))
    assert found == pytest.approx(compute)
    # In backward, a reduce runs under the gradients of its sub-block's matrices.
    numbers = (*[7168 * sum(whole) + 16 * per_head] * 4, 3 * 7168 * 18432 / 8)
    covers = [2 * 4096 * count / (0.58 * 989e12) for count in numbers]
    # Gradients of routed experts are written and added to the sums, those of the shared one and the router computed.
    of_experts = 256 * 3 * (2 + 2 + 4 + 4) * expert / 3.35e12
    of_experts += 2 * 4096 * (3 * expert + 256 * 7168) / (0.58 * 989e12)
    reduce = times.reduce_seconds
    uncovered = (max(0.0, reduce - cover) for cover in (*covers, *[of_experts] * 3))
    assert total - found == pytest.approx(8 * reduce + sum(uncovered))
    assert ModelFlops(model, 4096).layers[0] == 2 * 4096 * (
        7168 * sum(whole) + 128 * (per_head + 4096 * (192 + 128)) + 3 * 7168 * 18432
    )
    # Once per step, each of two data-parallel ranks sums one half of the gradients of all 61 layers, in fp32.
    for zero, share in ((0, 1), (1, 2)):
        layout = Layout(tensor=8, data=2, zero=zero)
        one, three = (step_time(times, layout, 2 * micro_batches).exposed_tensor for micro_batches in (1, 3))
        sums = PRESETS["nvlink"].seconds(61 * 4 * 7168 * sum(whole) / share, 8)
        assert (3 * one - three) / 2 == pytest.approx(sums)


def test_each_layer_counts_as_what_it_is() -> None:
    """The first of 46 layers is dense."""
    model = SIZES["glm-4.5-air"]
    attention, mlp, expert, router = 2 * 4096 * 128 * (96 + 8), 3 * 4096 * 10944, 3 * 4096 * 1408, 128 * 4096
    vectors = 128 * (96 + 2 * 8) + 2 * 4096
    dense, routed = attention + vectors + mlp, attention + vectors + 129 * expert + router + 128
    assert parameter_count(model).layers == (dense, *[routed] * 45)
    scores = 4 * 4096 * 96 * 128
    flops = [4096 * 2 * (attention + one) for one in (mlp, *[9 * expert + router] * 45)]
    assert ModelFlops(model, 4096).layers == tuple(one + 4096 * scores for one in flops)
    shared = product_seconds(attention) + 3 * 4096 * scores / 2 / (0.58 * 989e12)
    shared += 2 * 3 * 5.5 * 2 * 4096 * 4096 / 3.35e12
    of_experts = 3 * expert_seconds(128, expert / 3, 4096 * 8) + product_seconds(expert) + product_seconds(router)
    seconds = [shared + one for one in (product_seconds(mlp), *[of_experts] * 45)]
    times = LayerTime(model, NO_CONTENTION, Layout(), 4096)
    for layers in (range(46), range(1), range(3), range(7, 30)):
        assert times.passes(layers)[0] == pytest.approx(sum(seconds[layers.start : layers.stop]), rel=1e-9)
    layout, matrix = Layout(pipeline=23), padded_vocab_size(151552, 1) * 4096
    assert stage_parameters(model, layout, 0) == dense + routed + matrix
    assert stage_parameters(model, layout, 7) == 2 * routed
    last = 2 * routed + matrix + 4096
    expected = 64 * (sum(seconds[44:]) + head_seconds(1, 151552)) + 34 * last / 3.35e12
    assert step_time(times, layout, 64).compute == pytest.approx(expected)
    # The second stage has more parameters than the first, and holds more micro-batches than the last.
    second = stage_memory(model, layout, 1, 4096, 64)
    assert worst_memory(model, layout, 4096, 64) == second
    assert second.total > 1.1 * max(stage_memory(model, layout, stage, 4096, 64).total for stage in (0, 22))


def test_outputs_that_cross_a_cut() -> None:
    """With routed experts in layers 0 and 3 only, the attention above a dense layer misses nothing."""
    model = NAMED_WIRINGS["farskip"].of(replace(SIZES["small-moe"], num_layers=5, moe_layers=(0, 3)), 1)
    assert _outputs_at_cuts(model, Layout()) == [(0, 0), (1, 0), (0, 0), (0, 0), (1, 0)]
    assert _outputs_at_cuts(model, Layout(experts=2)) == [(0, 0), (0, 1), (0, 0), (0, 0), (0, 1)]


def test_the_host_launches_for_longer_than_one_gpu_computes() -> None:
    """16 layers of an 8B at TP 8 without communication: 20 ms captured and 73 ms otherwise, on one H200."""
    layout = Layout(tensor=8, zero=1)
    times = LayerTime(replace(LLAMA, num_layers=16), Machine.usual("h200"), layout, 2048, reduce_factor=0.0)
    captured, eager = (step_time(times, replace(layout, zero=zero), 1).total for zero in (1, 3))
    assert captured == pytest.approx(20e-3, rel=0.15)
    assert eager == pytest.approx(73e-3, rel=0.1)
    again = replace(times, layout=replace(layout, recompute=True))
    assert step_time(again, replace(layout, zero=3), 1).total > 1.4 * eager


def test_layouts_are_captured_where_training_captures_them() -> None:
    request = PlanRequest(SIZES["small"], H100, 8, 8, 512, ("standard",))
    model = LanguageModel(SIZES["small"], ProcessMesh.single(), device=torch.device("meta"))
    seen = set()
    for layout in _layouts(request):
        words = flag_words(
            {
                "tensor_model_parallel_size": layout.tensor,
                "pipeline_model_parallel_size": layout.pipeline,
                "zero_stage": layout.zero,
                "global_batch_size": 8,
                "micro_batch_size": layout.micro_batch,
                "seq_length": 512,
                "train_iters": 1,
                "lr": 0.1,
                "bf16": True,
            }
        )
        run = resolve_run(parse_run([*request.model.to_words(), *words], world_size=8), 4096, 8)
        assert _captures(run, model, torch.device("cuda")) == layout.is_captured, layout
        seen.add((layout.is_captured, layout.zero, layout.pipeline > 1, layout.data > 1))
    assert {is_captured for is_captured, *_ in seen} == {True, False}


@pytest.mark.parametrize(
    ("gpu", "capability"), [("a100", 8), ("l40s", 8), ("h100", 9), ("h200", 9), ("b200", 10), ("rtx-5090", 12)]
)
@pytest.mark.parametrize(("width", "ranks"), [(512, 1), (512, 8), (96, 8), (120, 8), (100, 1)])
def test_the_host_waits_for_experts_where_training_does(
    gpu: str, capability: int, width: int, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = replace(SIZES["small-moe"], moe_ffn_hidden_size=width)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (capability, 0))
    gate = torch.empty(16, width // ranks, model.hidden_size, dtype=torch.bfloat16)
    times = LayerTime(model, Machine.usual(gpu), Layout(tensor=ranks), 4096)
    assert times.waits_for_choices == reads_on_host(gate)


@pytest.mark.parametrize(
    ("name", "active", "widths"),
    [
        # The head, and not the embedding.
        ("llama-8b", 32 * (4096 * (2 * 4096 + 2 * 1024) + 3 * 4096 * 14336) + 4096 * 128256, 32 * 32 * (128 + 128)),
        # A tied embedding counts as the head.
        ("llama-1b", 16 * (2048 * (2 * 2048 + 2 * 512) + 3 * 2048 * 8192) + 2048 * 128256, 16 * 32 * (64 + 64)),
        # Each token uses 8 of 128 experts.
        (
            "qwen3-30b-a3b",
            48 * (2 * 2048 * 128 * (32 + 4) + 8 * 3 * 2048 * 768 + 128 * 2048) + 2048 * 151936,
            48 * 32 * (128 + 128),
        ),
    ],
)
def test_mfu_counts_what_torchtitan_counts(name: str, active: int, widths: int) -> None:
    """Its operations of a token: 6 for each active parameter, and 6 s (query width + value width) for each head."""
    operations = ModelFlops(SIZES[name], 8192).training / 8192
    assert operations == pytest.approx(6 * active + 6 * 8192 * widths, rel=1e-9)


@pytest.mark.parametrize(("tokens_per_second", "published"), [(5762, 0.33), (6667, 0.39)])
def test_mfu_of_torchtitan_s_speeds_is_the_one_it_states(tokens_per_second: int, published: float) -> None:
    operations = ModelFlops(LLAMA, 8192).training / 8192
    assert tokens_per_second * operations / 989e12 == pytest.approx(published, abs=0.01)


def test_the_page_states_what_is_predicted_next_to_measurements() -> None:
    page = " ".join((REPOSITORY_ROOT / "docs" / "plan.md").read_text(encoding="utf-8").split())
    machine = replace(H100, gpu=replace(H100.gpu, memory_bytes_per_second=2.4e12))
    shares = []
    for recompute in (True, False):
        layout = Layout(data=8, zero=3, micro_batch=2, recompute=recompute)
        times = LayerTime(LLAMA, machine, layout, 8192)
        seconds = step_time(times, layout, 16).total
        shares.append(f"{100 * model_flop_utilisation(times, layout, 16, seconds):.0f} %")
    assert "predicts {} if everything is recomputed and {} if nothing is".format(*shares) in page
    layout = Layout(tensor=8)
    times = LayerTime(replace(LLAMA, num_layers=16), Machine.usual("h200"), layout, 2048, reduce_factor=0.0)
    assert f"is predicted to take {1e3 * step_time(times, layout, 1).total:.1f}." in page

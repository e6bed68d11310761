"""The layouts that are found, their memory, and the rule for a winner."""

import shlex
from dataclasses import replace

import pytest

from ladder_lab.bench.sizes import SIZES
from ladder_lab.cost.machines import PRESETS, Machine
from ladder_lab.cost.memory import RESERVED_BYTES, stage_memory, worst_memory
from ladder_lab.plan.layouts import LayoutPlan, PlanRequest, _layouts, best_of_each_grid, fitting_plans, verdict
from ladder_lab.plan.program import _command
from ladder_lab.wirings import NAMED_WIRINGS
from megatron_ladder.blueprint.wiring import SHARED_STREAM_MODES
from megatron_ladder.config.run import RunConfig, parse_run, resolve_run

H100 = Machine.usual("h100")


def request_of(
    model: str = "llama-8b", gpus: int = 16, batch: int = 32, wirings: tuple[str, ...] = SHARED_STREAM_MODES
):
    return PlanRequest(SIZES[model], H100, gpus, batch, 4096, wirings)


def test_layouts_share_out_everything() -> None:
    asked = request_of(gpus=24, batch=48)
    found = list(_layouts(asked))
    assert len(set(found)) == len(found)
    for layout in found:
        assert layout.gpus == 24 and 48 % (layout.data * layout.micro_batch) == 0
        assert layout.tensor in (1, 2, 4, 8), "3, 6 and 12 do not divide 32 heads"
        assert layout.zero == 1 or (layout.pipeline == 1 and layout.data > 1)
        assert not (layout.sequence_parallel and layout.tensor == 1)
    assert {layout.pipeline for layout in found if layout.tensor == 1} == {1, 2, 3, 4, 6, 8, 12, 24}
    assert max(layout.tensor for layout in _layouts(request_of(gpus=64, batch=64))) == 16, "two nodes at most"
    # 32 layers in 3 x 8 ranges of at most two would be 3 x 6.
    chunks = {stages: {layout.chunks for layout in found if layout.pipeline == stages} for stages in (1, 2, 3, 6, 24)}
    assert chunks == {1: {1}, 2: {1, 2, 4, 8}, 3: {1, 2, 4}, 6: {1, 2}, 24: {1}}


def grid(request: PlanRequest) -> dict[int, LayoutPlan]:
    """Return the fastest plans of two stages without tensor parallelism by their ranges of layers per stage."""
    best: dict[int, LayoutPlan] = {}
    for plan in fitting_plans(request):
        if (plan.layout.tensor, plan.layout.pipeline) == (1, 2):
            best.setdefault(plan.layout.chunks, plan)
    return best


def test_stages_are_interleaved_where_it_pays() -> None:
    """A slow network takes longer for the additional sends than the bubble lasts, and memory may be too small."""
    asked = request_of("llama-1b", gpus=2, batch=4, wirings=("standard",))
    usual = grid(asked)
    assert [*usual][-1] == 1 and {*usual} == {1, 2, 4, 8}
    assert usual[4].time.bubble < usual[2].time.bubble < 0.6 * usual[1].time.bubble
    assert usual[1].memory.activations < 0.9 * min(plan.memory.activations for plan in [*usual.values()][:-1])
    slow = replace(H100, per_box=1, network=PRESETS["10gbe"], adapters=1)
    assert [*grid(replace(asked, machine=slow))][0] == 1
    memory_bytes = usual[1].memory.total + RESERVED_BYTES
    small = replace(H100, gpu=replace(H100.gpu, memory_bytes=memory_bytes))
    assert [*grid(replace(asked, machine=small))][0] == 1


def test_graphs_are_planned_where_they_fit_and_the_host_waits_for_no_experts() -> None:
    """Without graphs a layout needs less memory, and runs as `--cuda-graph auto` runs it."""
    asked = request_of("small-moe", gpus=4, batch=8, wirings=("standard",))
    captured = {plan.layout: plan for plan in fitting_plans(asked) if plan.layout.pipeline == 4}
    assert captured and all(layout.captures for layout in captured)
    largest = max(captured.values(), key=lambda plan: plan.memory.total)
    size = largest.memory.total + RESERVED_BYTES - 1
    small = replace(H100, gpu=replace(H100.gpu, memory_bytes=size))
    eager = replace(largest.layout, captures=False)
    (plan,) = (plan for plan in fitting_plans(replace(asked, machine=small)) if plan.layout == eager)
    assert plan.memory.total < largest.memory.total
    assert plan.time.total > largest.time.total
    others = fitting_plans(replace(asked, machine=Machine.usual("a100")))
    assert {plan.layout.captures for plan in others if plan.layout.zero < 2} == {False}


@pytest.mark.parametrize(("model", "wiring"), [("llama-1b", "standard"), ("deepseek-v2-lite", "farskip")])
def test_the_fullest_stage_is_found_among_unlike_ones(model: str, wiring: str) -> None:
    asked = request_of(model, gpus=8, batch=24, wirings=(wiring,))
    layouts = [layout for layout in _layouts(asked) if layout.pipeline > 1 and layout.micro_batch == 1]
    assert len(layouts) > 10
    for layout in layouts:
        wired = NAMED_WIRINGS[wiring].of(asked.model, layout.tensor)
        totals = [stage_memory(wired, layout, stage, 4096, 24).total for stage in range(layout.pipeline)]
        assert worst_memory(wired, layout, 4096, 24).total == max(totals)


def test_a_winner_needs_more_than_three_per_cent() -> None:
    assert verdict([("a", 1.0), ("b", 1.031)]) == "a"
    assert verdict([("a", 1.03), ("b", 1.0), ("c", 1.2)]) == "tie: a, b"
    assert verdict([("a", 2.0), ("b", 2.0)]) == "tie: a, b"


def run_of_plan(asked: PlanRequest, plan: LayoutPlan) -> RunConfig:
    """Return what the trainer reads from the command of a plan."""
    _, _, command = _command(asked, plan).partition(" pretrain_ladder.py ")
    words = [*shlex.split(command.replace("\\\n", "")), "--train-iters", "10", "--lr", "1e-3"]
    return resolve_run(parse_run(words), asked.model.vocab_size, asked.gpus)


@pytest.mark.parametrize("model", ["instella-moe", "deepseek-v2-lite", "glm-4.7-flash"])
def test_the_trainer_reads_the_model_of_a_plan_with_latent_attention(model: str) -> None:
    asked = request_of(model, 16, 64, ("standard", "farskip"))
    plans = best_of_each_grid(fitting_plans(asked))
    assert {plan.wiring for plan in plans} == {"standard", "farskip"}
    for plan in plans:
        run = run_of_plan(asked, plan)
        assert run.model == NAMED_WIRINGS[plan.wiring].of(asked.model, plan.layout.tensor)


@pytest.mark.parametrize("model", ["llama-1b", "llama-70b"])
def test_the_trainer_reads_the_command_of_a_plan(model: str) -> None:
    asked = replace(request_of(model, 64, 128), optimizer="muon" if model == "llama-1b" else "adamw")
    plans = best_of_each_grid(fitting_plans(asked))
    named = fitting_plans(replace(asked, wirings=("staleness-2", "desync-2x", "desync-4x")))
    assert {plan.wiring for plan in named} == {"staleness-2", "desync-2x", "desync-4x"}
    plans += [next(plan for plan in named if plan.wiring == name) for name in ("staleness-2", "desync-2x", "desync-4x")]
    assert {plan.layout.chunks for plan in plans} > {1, 2}
    for plan in plans:
        run = run_of_plan(asked, plan)
        layout, parallel = plan.layout, run.parallel
        assert run.model == NAMED_WIRINGS[plan.wiring].of(asked.model, plan.layout.tensor)
        assert parallel.tensor_model_parallel_size == layout.tensor
        assert (parallel.pipeline_model_parallel_size, run.chunks) == (layout.pipeline, layout.chunks)
        assert (run.data_parallel_size, int(parallel.zero_stage)) == (layout.data, layout.zero)
        assert run.optimizer.optimizer == asked.optimizer
        assert (run.training.micro_batch_size, run.global_batch_size) == (layout.micro_batch, 128)
        assert (run.recompute_layers > 0, parallel.sequence_parallel) == (layout.recompute, layout.sequence_parallel)
        assert run.training.bf16 and run.training.seq_length == 4096

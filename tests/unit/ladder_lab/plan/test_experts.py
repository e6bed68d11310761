"""What plans say of divided experts: gains that others have published, and the sentences of the report."""

import csv
import statistics
from contextlib import suppress
from itertools import product
from typing import Any

from ladder_lab.bench.sizes import SIZES
from ladder_lab.cost.all_to_all import ALL_TO_ALLS
from ladder_lab.cost.layout import Layout
from ladder_lab.cost.machines import Machine
from ladder_lab.plan.experts import BASELINE, NOTHING_AHEAD, RIVAL, expert_gains, experts_report
from ladder_lab.plan.layouts import PlanRequest, _layouts, fitting_plans
from ladder_lab.plan.options import parse_plan, planned_model
from megatron_ladder.command_line import flag_words
from megatron_ladder.config.run import parse_run, resolve_run
from megatron_ladder.errors import UserError
from tests.helpers.commands import REPOSITORY_ROOT


def request_of(row: dict[str, str]) -> PlanRequest:
    ranks, sequence = int(row["experts"]), int(row["sequence"])
    model = row["model"] if row["model"].startswith("-") else f"--model {row['model']}"
    words = f"{model} {row['machine']} --seq-length {sequence} --gpus {ranks}"
    machine, options, flags = parse_plan(words.split())
    wirings = ("farskip", "shortcut")
    all_to_all = ALL_TO_ALLS[row["all_to_all"]]
    shape = planned_model(options, flags)[1]
    return PlanRequest(shape, machine.machine(ranks), ranks, ranks, sequence, wirings, "adamw", all_to_all, 1.0)


def predicted(row: dict[str, str]) -> float:
    """Return the predicted percentage of a published one."""
    ranks = int(row["experts"])
    layout = Layout(data=ranks, experts=ranks, micro_batch=int(row["micro_batch"]), imbalance=1.0)
    gains = {gain.wiring: gain for gain in expert_gains(request_of(row), layout)}
    gain = gains[row["wiring"]]
    if row["figure"] == "hidden":
        return 100 * statistics.mean(gain.hidden)
    baseline = {"gain over shared": BASELINE, "gain over blocked": NOTHING_AHEAD}[row["figure"]]
    return 100 * (gain.passes / gains[baseline].passes - 1)


def test_published_gains_are_predicted_as_well_as_the_page_says() -> None:
    """Nothing was fitted to them."""
    with open(REPOSITORY_ROOT / "docs" / "plan_expert_gains.csv", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [f"{predicted(row):.1f}" for row in rows] == [row["predicted"] for row in rows]
    errors = [abs(float(row["predicted"]) / float(row["published"]) - 1) for row in rows]
    page = (REPOSITORY_ROOT / "docs" / "plan.md").read_text(encoding="utf-8")
    assert len(rows) == 6 and f"their median error is {100 * statistics.median(errors):.0f} %" in page
    for row in rows:
        assert f"| {row['case']} |" in page and f"| {row['published']} | {row['predicted']} |" in page


def gains_of(ranks: int, library: str) -> dict[str, Any]:
    wirings = ("standard", "ladder", "farskip", "shortcut", "staleness-2")
    asked = PlanRequest(
        SIZES["deepseek-v3"], Machine.usual("h100"), ranks, ranks, 4096, wirings, "adamw", ALL_TO_ALLS[library], 1.0
    )
    gains = expert_gains(asked, Layout(data=ranks, experts=ranks, imbalance=1.0))
    return {gain.wiring: gain for gain in gains}


def test_late_reads_pay_between_boxes_and_hardly_inside_one() -> None:
    inside, between = gains_of(8, "deepep"), gains_of(64, "deepep")
    for gains in (inside, between):
        assert gains[BASELINE].passes == gains[BASELINE].forward == 1.0
        assert gains[NOTHING_AHEAD].passes < 1.0 < gains["no communication"].passes
        bound = gains["no communication"].passes
        assert all(gains[name].passes < bound for name in ("ladder", "farskip", "shortcut", "staleness-2", RIVAL))
    assert max(gain.passes for name, gain in inside.items() if name != "no communication") < 1.03
    assert 1.0 < between["shortcut"].passes < between["farskip"].passes < between["staleness-2"].passes
    assert between["farskip"].passes > 1.08
    assert between[RIVAL].forward == between[NOTHING_AHEAD].forward


def test_the_report_compares_with_experts_within_tensor_parallel_ranks() -> None:
    asked = PlanRequest(SIZES["small-moe-train"], Machine.usual("h100"), 4, 8, 2048, ("standard", "farskip"))
    plans = fitting_plans(asked)
    assert {plan.layout.experts for plan in plans} == {1, 2, 4}
    text = "\n".join(experts_report(asked, plans)[0])
    assert "(--expert-sharding) takes" in text and "Inside a box, over nvlink" in text
    assert "two micro-batches" in text and "DualPipe" in text
    assert experts_report(asked, [plan for plan in plans if not plan.layout.divides_experts]) == ([], [])


def test_layouts_with_expert_parallelism_are_those_that_the_trainer_accepts() -> None:
    asked = PlanRequest(SIZES["small-moe-train"], Machine.usual("h100"), 4, 8, 2048, ("standard",))
    accepted = set()
    for tensor, experts, zero, sequence_parallel in product((1, 2, 4), (2, 3, 4, 8), (1, 2, 3), (False, True)):
        if sequence_parallel and tensor == 1:
            # It has no effect.
            continue
        words = flag_words(
            {
                "tensor_model_parallel_size": tensor,
                "expert_model_parallel_size": experts,
                "zero_stage": zero,
                "sequence_parallel": sequence_parallel,
                "seq_length": asked.sequence,
                "micro_batch_size": 1,
                "global_batch_size": asked.global_batch,
                "train_iters": 9,
                "lr": 1e-3,
            }
        )
        with suppress(UserError):
            resolve_run(parse_run([*asked.model.to_words(), *words], world_size=asked.gpus), 4096, asked.gpus)
            accepted.add((tensor, experts, zero, sequence_parallel))
    planned = {
        (one.tensor, one.experts, one.zero, one.sequence_parallel)
        for one in _layouts(asked)
        if one.divides_experts and one.pipeline == 1
    }
    assert planned == accepted and len(planned) == 6

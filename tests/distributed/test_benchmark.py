"""Benchmarks on two ranks: exposed communication, and that all variants compute the same model."""

from contextlib import closing
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from ladder_lab.bench.comparison import WiringComparison
from ladder_lab.bench.options import BenchmarkOptions, Case
from ladder_lab.bench.program import Wire, _rows
from ladder_lab.bench.results import BenchmarkRow
from ladder_lab.bench.sizes import SIZES
from ladder_lab.bench.variants import VARIANTS
from ladder_lab.bench.workloads import Workload
from ladder_lab.cost.links import WireModel
from ladder_lab.link.link import EmulatedLink
from megatron_ladder.blueprint.wiring import EXPERT_MODES, SHARED_STREAM_MODES
from megatron_ladder.comm.launch import RankInfo
from megatron_ladder.model.language_model import LanguageModel
from tests.helpers.pool import GlooPools
from tests.helpers.sharded import mesh_of

ALPHA = 0.004


def comparison_of(wirings: tuple[str, ...]) -> WiringComparison:
    place = RankInfo(torch.distributed.get_rank(), 2, 0)
    options = BenchmarkOptions(wirings=wirings, rounds=4)
    return WiringComparison(options, SIZES["small-train"], place, torch.device("cpu"))


def timed_rows(case: Case) -> list[BenchmarkRow]:
    """Return the rows of two wirings and their bound at one interconnect time."""
    comparison = comparison_of(("standard", "ladder"))
    workload = Workload(case, batch=1, sequence=16, tokens=1)
    prediction = comparison.calibrate(workload)
    calibration = prediction.by_bound["no-comm"]
    assert 0 < min(one.forward for one in calibration.by_computation.values()) < calibration.pass_seconds
    # On a busy machine, differences of times (the head, the processor time of a collective) are noise.
    prediction = replace(prediction, wire=WireModel())
    with comparison.prepare(workload, comparison.compared, timings=1) as passes:
        rows = _rows(comparison, passes, workload, "small-train", prediction, Wire(f"{ALPHA}s"))
    comparison.interconnect.close()
    return rows


@pytest.mark.parametrize(("case", "reduces_a_layer"), [("decode", 2), ("train", 4)])
def test_standard_waits_for_every_reduce_and_no_comm_for_none(
    gloo_pools: GlooPools, case: Case, reduces_a_layer: int
) -> None:
    for rows in gloo_pools(2).run(timed_rows, case):
        by_wiring = {row.wiring: row for row in rows}
        assert list(by_wiring) == ["standard", "ladder", "no-comm"]
        assert by_wiring["no-comm"].exposed_seconds_per_layer == 0
        # Training hides backward reduces behind the weight's gradient, but no forward reduce.
        waiting = reduces_a_layer if case != "train" else reduces_a_layer / 2
        assert by_wiring["standard"].exposed_seconds_per_layer >= waiting * ALPHA * 0.9
        assert by_wiring["standard"].ratio_to_standard == 1.0
        assert 1.0 < by_wiring["ladder"].predicted_ratio < by_wiring["no-comm"].predicted_ratio


EXPERT_WIRINGS = ("standard", "farskip", "shortcut", "staleness-2")


def expert_rows() -> list[BenchmarkRow]:
    """Return the rows of two wirings whose experts two ranks divide, on a wire that takes 100 ms for an all-to-all."""
    place = RankInfo(torch.distributed.get_rank(), 2, 0)
    options = BenchmarkOptions(ep=2, wirings=("standard", "shortcut"), rounds=4, sequence=16, clock="processor")
    comparison = WiringComparison(options, SIZES["small-ep"], place, torch.device("cpu"))
    workload = Workload("forward", batch=1, sequence=16)
    prediction = comparison.calibrate(workload)
    assert prediction.by_bound["no-comm"].attention > 0
    with comparison.prepare(workload, comparison.compared, timings=1) as passes:
        rows = _rows(comparison, passes, workload, "small-ep", prediction, Wire("100ms"))
    comparison.interconnect.close()
    return rows


def test_expert_parallel_passes_wait_for_their_tokens(gloo_pools: GlooPools) -> None:
    """Such an all-to-all hides nothing but the sub-block that it travels under; its numbers of rows take no time."""
    for rows in gloo_pools(2).run(expert_rows):
        by_wiring = {row.wiring: row for row in rows}
        assert list(by_wiring) == ["standard", "shortcut", "no-comm", "no-comm-shortcut"]
        for name in ("standard", "shortcut"):
            exposed = by_wiring[name].exposed_seconds_per_layer
            assert exposed is not None and 0.14 < exposed < 0.22
        assert by_wiring["no-comm"].exposed_seconds_per_layer == 0


def over_the_wire() -> dict[str, bool]:
    """Return for each wiring whether loss and gradients over the emulated wire are those over gloo, bit for bit."""
    mesh = mesh_of(1, expert_parallel=2)
    ids = torch.randint(0, 512, (2, 13), generator=torch.Generator().manual_seed(dist.get_rank()))
    equal = {}
    with closing(EmulatedLink(mesh.experts, 20e-6, 1e-9, slot_bytes=1 << 20)) as link:
        for name in EXPERT_WIRINGS:
            config = VARIANTS[name].wiring.of(SIZES["small-ep"], 1)
            results = []
            for experts in (mesh.experts, link):
                model = LanguageModel(config, replace(mesh, experts=experts), seed=1)
                loss = model(ids[:, :-1], ids[:, 1:])
                loss.backward()
                results.append([loss, *(parameter.grad for parameter in model.parameters())])
            equal[name] = all(torch.equal(gloo, wire) for gloo, wire in zip(*results, strict=True))
    return equal


def test_loss_and_gradients_over_the_wire_are_those_over_gloo(gloo_pools: GlooPools) -> None:
    assert gloo_pools(2).run(over_the_wire) == [dict.fromkeys(EXPERT_WIRINGS, True)] * 2


def losses_of_variants() -> dict[str, float]:
    """Return the loss of every variant with reduces, on the same weights."""
    names = tuple(
        name
        for name, variant in VARIANTS.items()
        if not variant.without_reduces and variant.wiring.mode not in EXPERT_MODES
    )
    comparison = comparison_of(names)
    ids = torch.arange(34).view(2, 17)
    losses = {name: comparison.models[name](ids[:, :-1], ids[:, 1:]).item() for name in names}
    comparison.interconnect.close()
    return losses


def test_variants_of_one_wiring_are_the_same_model(gloo_pools: GlooPools) -> None:
    for losses in gloo_pools(2).run(losses_of_variants):
        for name in ("standard", "ladder"):
            same = [value for variant, value in losses.items() if VARIANTS[variant].wiring.mode == name]
            same = same if name == "standard" else [losses[v] for v in ("ladder", "ladder-blocking", "ladder-autograd")]
            assert same == pytest.approx([same[0]] * len(same), rel=1e-6) and len(same) > 1
        wirings = [losses[name] for name in (*SHARED_STREAM_MODES, "staleness-2")]
        assert len({round(value, 4) for value in wirings}) == len(SHARED_STREAM_MODES) + 1

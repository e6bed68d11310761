"""A fixed number of rows for each expert: padding changes nothing, and a step that needs more rows is repeated."""

import functools
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_ladder.comm.group import CommGroup
from megatron_ladder.comm.mesh import ProcessMesh
from megatron_ladder.engine.build import _captures
from megatron_ladder.model import experts
from megatron_ladder.model.experts import waits_for_choices
from megatron_ladder.model.language_model import Distillation, LanguageModel
from megatron_ladder.model.operations import ExpertOptions
from megatron_ladder.model.stats import PassStats, StepStats
from megatron_ladder.train.guards import Finding
from megatron_ladder.train.step import train_step
from tests.helpers.pool import GlooPools
from tests.helpers.sharded import Pieces, small_model
from tests.helpers.steps import RECIPE, Batch, check_same, launch_of, steps_of_batches
from tests.helpers.training import build_trainer_here, own_batches, run_of, weight_pieces

EXPERTS = (
    "--num-experts 8 --moe-router-topk 3 --moe-ffn-hidden-size 16 --moe-layers 1-2 --moe-aux-loss-coeff 0.05 "
    "--moe-z-loss-coeff 0.01 --moe-router-score-function sigmoid --moe-router-enable-expert-bias "
    "--moe-router-bias-update-rate 0.05 --expert-model-parallel-size"
)
CAPACITY = "--moe-expert-capacity"
MOST_ROWS = 2 * 12
"""Tokens of a micro-batch, each of which chooses an expert at most once."""

Steps = tuple[list[Any], Pieces]


def steps(argv: list[str], batches: list[list[Batch]]) -> tuple[list[int | None], Steps]:
    """On each rank: the capacities with which steps were repeated, and all else that steps return and leave."""
    trainer = build_trainer_here(argv)
    capacities = []
    history: list[Any] = []
    calls = []
    for iteration, batch in enumerate(batches, start=1):
        result = train_step(
            trainer,
            own_batches(trainer, batch),
            iteration,
            lambda: [float(len(calls))],
            lambda: calls.append("meanwhile"),
        )
        capacities.append(result.expert_capacity)
        history += [result.loss, result.gradient_norm, result.learning_rate, *result.extra_losses.values()]
        history += [*result.loads.flatten().tolist(), *result.extra_sums, trainer.guard.state()]
        history += [router.expert_bias.tolist() for router in trainer.model.routers]
        history.append((trainer.engine.optimizer.steps_taken(), len(calls)))
    return capacities, (history, weight_pieces(trainer))


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        ("1x1x2", f"{EXPERTS} 2 --residual-mode ladder --bf16"),
        ("1x1x4", f"{EXPERTS} 4 --residual-mode farskip --moe-shared-expert-intermediate-size 16 --zero-stage 0"),
        ("1x1x4", f"{EXPERTS} 2 --residual-mode ladder --residual-staleness 2 --recompute-granularity full"),
        ("2x1x2", f"{EXPERTS} 4 --residual-mode longcat --sequence-parallel --add-moe-bias --loss-spike-factor 9"),
        ("1x2x2", f"{EXPERTS} 2 --residual-mode ladder-parallel --optimizer muon"),
        ("1x1x2", f"{EXPERTS} 2 --no-tp-overlap --mtp-num-layers 1"),
    ],
)
def test_steps_equal_those_without_a_capacity_bitwise(gloo_pools: GlooPools, layout: str, words: str) -> None:
    """With one row, the first step is repeated until the rows suffice; with enough of them, no step is."""
    world, words_of_layout = launch_of(layout, words)
    argv = [*RECIPE, *words_of_layout, "--global-batch-size", "8"]
    batches = steps_of_batches(3, 4)
    expected = gloo_pools(world).run(steps, argv, batches)
    assert {capacity for capacities, _ in expected for capacity in capacities} == {None}
    for rows in (1, MOST_ROWS):
        found = gloo_pools(world).run(steps, [*argv, CAPACITY, str(rows)], batches)
        check_same([outcome for _, outcome in found], [outcome for _, outcome in expected])
        ((first, *others),) = {tuple(capacities) for capacities, _ in found}
        if rows == MOST_ROWS:
            assert (first, *others) == (None, None, None)
        else:
            assert first is not None and 1 < first <= MOST_ROWS * 9 / 8
            assert all(before is None or before > first for before in others)


def repeated_twice(argv: list[str], batch: list[Batch]) -> tuple[int, float, float]:
    """On each rank: return how often the passes of a step ran, its loss and its norm, if the first try found two rows
    to be enough, as layers do whose inputs lack rows."""
    trainer = build_trainer_here(argv)
    train = trainer.engine.train
    tries = 0

    def run(*arguments: Any) -> StepStats:
        nonlocal tries
        tries += 1
        stats = train(*arguments)
        if tries == 1:
            stats.most_rows.clamp_(max=2)
        return stats

    with mock.patch.object(trainer.engine, "train", run):
        result = train_step(trainer, own_batches(trainer, batch), 1)
    return tries, result.loss, result.gradient_norm


def test_a_step_is_repeated_until_the_rows_suffice(gloo_pools: GlooPools) -> None:
    argv = [*RECIPE, *f"{EXPERTS} 2 --residual-mode ladder --global-batch-size 4".split()]
    batch = steps_of_batches(1, 2)[0]
    expected = gloo_pools(2).run(repeated_twice, argv, batch)
    found = gloo_pools(2).run(repeated_twice, [*argv, CAPACITY, "1"], batch)
    assert [tries for tries, *_ in expected] == [1, 1] and [tries for tries, *_ in found] == [3, 3]
    assert [numbers for _, *numbers in found] == [numbers for _, *numbers in expected]


def test_only_a_capacity_spares_the_host_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in the passes of a teacher, which have none."""
    monkeypatch.setattr(experts, "reads_on_host", lambda weight: False)
    mesh = replace(ProcessMesh.single(), experts=CommGroup(range(2), 0, None))
    config = small_model(num_experts=4, moe_ffn_hidden_size=8, moe_layers=(1,))
    device = torch.device("meta")
    waits, limited, whole = (
        LanguageModel(config, on, device=device, experts=ExpertOptions(capacity=rows))
        for on, rows in ((mesh, None), (mesh, 8), (ProcessMesh.single(), None))
    )
    assert [*map(waits_for_choices, (waits, limited, whole))] == [True, False, False]
    run = run_of(f"{' '.join(RECIPE)} {EXPERTS} 2 {CAPACITY} 8".split(), 2)
    for teacher, captures in ((None, True), (waits, False), (whole, True)):
        limited.distillation = None if teacher is None else Distillation(teacher, 0.5, 1.0)
        assert _captures(run, limited, torch.device("cuda")) is captures


def test_the_most_rows_of_all_layers_and_passes_count() -> None:
    sums = StepStats([], [], 0, torch.float32, torch.device("cpu"))
    for of_layers in ([3, 7, None, 5], [None], [6]):
        layers = (PassStats(most_rows=None if rows is None else torch.tensor(rows)) for rows in of_layers)
        sums.add(functools.reduce(PassStats.plus, layers))
    assert sums.most_rows == 7
    sums.clear()
    assert sums.most_rows == 0


def bad_step(argv: list[str], batch: list[Batch]) -> tuple[Finding | None, int | None, int | None]:
    """On each rank: return the finding of a step that has no finite numbers, and the capacities of it and after it."""
    trainer = build_trainer_here(argv)
    with torch.no_grad():
        trainer.model.stack.sub_blocks()[0].norm.weight.fill_(float("nan"))
    result = train_step(trainer, own_batches(trainer, batch), 1)
    return result.finding, result.expert_capacity, trainer.model.expert_capacity


def test_a_step_with_bad_numbers_is_not_repeated(gloo_pools: GlooPools) -> None:
    """Scores that are not numbers choose the same experts for all tokens."""
    argv = [*RECIPE, *f"{EXPERTS} 2 {CAPACITY} 2 --residual-mode ladder --global-batch-size 4".split()]
    for finding, repeated_with, capacity in gloo_pools(2).run(bad_step, argv, steps_of_batches(1, 2)[0]):
        assert finding is not None and finding.kind == "bad numbers"
        assert (repeated_with, capacity) == (None, 2)

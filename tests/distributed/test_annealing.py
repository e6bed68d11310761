"""Models and training steps between two wirings (--anneal-staleness), compared with a plain model."""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_ladder.blueprint.model import ModelConfig
from megatron_ladder.model.operations import Operations, compile_operations
from megatron_ladder.model.stack import StackOptions
from megatron_ladder.train.step import evaluate, train_step
from tests.helpers.pairwise import pairwise
from tests.helpers.pool import GlooPools
from tests.helpers.recording import recorded_model
from tests.helpers.sharded import Pieces, assert_pieces, build, gradient_pieces, small_model
from tests.helpers.steps import RECIPE, Batch, check_outcome, check_resume, plain_steps, steps_of_batches, train
from tests.helpers.training import build_trainer_here, own_batches, run_of, weight_pieces
from tests.reference import (
    LossAndGradients,
    ReferenceConfig,
    Weights,
    make_weights,
    reference_gradients,
    reference_loss,
)

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-11}
WIRINGS: dict[str, dict[str, Any]] = {
    "ladder": {"residual_mode": "ladder", "ladder_layers": (0, 1, 2, 3)},
    "hybrid": {"residual_mode": "ladder", "ladder_layers": (1, 3)},
    "ladder-attention": {"residual_mode": "ladder-attention", "ladder_layers": (0, 1, 3)},
    "ladder-parallel": {"residual_mode": "ladder-parallel", "ladder_layers": (0, 1, 2, 3)},
    "staleness-2": {"residual_mode": "ladder", "ladder_layers": (0, 1, 2, 3), "residual_staleness": 2},
    "staleness-3-hybrid": {"residual_mode": "ladder", "ladder_layers": (1, 2), "residual_staleness": 3},
    "ladder-parallel-2": {"residual_mode": "ladder-parallel", "ladder_layers": (0, 1, 2), "residual_staleness": 2},
}
LATENESS = {
    "fresh": (0.0, 0.0, 0.0, 0.0),
    "between": (0.3, 0.3, 0.3, 0.3),
    "late": (1.0, 1.0, 1.0, 1.0),
    "different": (0.5, 1.0, 0.2, 0.0),
}
"""Lateness of each layer."""
OPTIONS = {
    "overlap": StackOptions(),
    "blocking": StackOptions(tp_overlap=False),
    "recomputed": StackOptions(recompute_layers=3),
}
LAYOUTS = {"TP1": (1, False), "TP2": (2, False), "TP2-sequence": (2, True)}


def batch(config: ModelConfig, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, config.vocab_size, (2, 13), generator=generator)
    mask = (torch.rand(2, 12, generator=generator) < 0.7).to(dtype)
    return tokens[:, :-1], tokens[:, 1:], mask


def annealed(
    config: ModelConfig,
    weights: Weights,
    layout: tuple[int, bool],
    options: StackOptions,
    lateness: tuple[float, ...],
    inputs: tuple[Tensor, Tensor, Tensor],
    compiled: bool = False,
) -> tuple[list[Tensor], Pieces]:
    """Return the summed loss of a training pass and of an evaluation, and every gradient that this rank holds."""
    if compiled:
        # This backend traces forward and backward without a C++ compiler.
        options = replace(options, operations=compile_operations(Operations(), "aot_eager"))
    model = build(config, weights, layout[0], options, layout[1])
    model.stack.lateness = {layer: lateness[layer] for layer in config.ladder_layers}
    loss = model(*inputs)
    loss.backward()
    with torch.no_grad():
        evaluated = model(*inputs)
    return [loss.detach(), evaluated], gradient_pieces(model)


def check(
    gloo_pools: GlooPools,
    layout: str,
    wiring: str,
    lateness: str,
    options: str,
    dtype: torch.dtype,
    compiled: bool = False,
) -> None:
    config = small_model(**WIRINGS[wiring])
    reference = replace(ReferenceConfig.like(config), freshness=tuple(1 - a for a in LATENESS[lateness]))
    weights, inputs = make_weights(reference, seed=1, dtype=dtype), batch(config, dtype)
    loss, gradients = reference_gradients(weights, reference, *inputs, total_tokens=1)
    results = gloo_pools(LAYOUTS[layout][0]).run(
        annealed, config, weights, LAYOUTS[layout], OPTIONS[options], LATENESS[lateness], inputs, compiled
    )
    for losses, _ in results:
        assert [float(one) for one in losses] == pytest.approx([float(loss)] * 2, rel=TOLERANCE[dtype])
    assert_pieces([pieces for _, pieces in results], gradients, TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("layout", "wiring", "lateness", "options", "dtype"),
    pairwise(
        (list(LAYOUTS), list(WIRINGS), list(LATENESS), list(OPTIONS), [torch.float64, torch.float32]),
        (str, str, str, str, ["fp64", "fp32"]),
        lambda *case: case == ("TP2", "ladder", "between", "overlap", torch.float64),
    ),
)
def test_a_model_between_two_wirings(
    gloo_pools: GlooPools, layout: str, wiring: str, lateness: str, options: str, dtype: torch.dtype
) -> None:
    check(gloo_pools, layout, wiring, lateness, options, dtype)


def test_a_compiled_model_between_two_wirings(gloo_pools: GlooPools) -> None:
    check(gloo_pools, "TP2", "ladder", "different", "overlap", torch.float64, compiled=True)


@pytest.mark.parametrize("options", ["overlap", "recomputed"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("wiring", "lateness", "equal"),
    [
        ("ladder", "fresh", "standard"),
        ("hybrid", "fresh", "standard"),
        ("ladder-attention", "fresh", "standard"),
        ("ladder-parallel", "fresh", "parallel"),
        ("ladder", "late", "ladder"),
        ("staleness-3-hybrid", "late", "staleness-3-hybrid"),
    ],
)
def test_both_ends_equal_a_wiring_bitwise(
    gloo_pools: GlooPools, wiring: str, lateness: str, equal: str, layout: str, options: str
) -> None:
    config, other = small_model(**WIRINGS[wiring]), small_model(**WIRINGS.get(equal, {"residual_mode": equal}))
    weights, inputs = make_weights(ReferenceConfig.like(config), seed=1), batch(config, torch.float32)
    pool = gloo_pools(LAYOUTS[layout][0])
    found = pool.run(annealed, config, weights, LAYOUTS[layout], OPTIONS[options], LATENESS[lateness], inputs)
    expected = pool.run(annealed, other, weights, LAYOUTS[layout], OPTIONS[options], LATENESS["late"], inputs)
    for (losses, pieces), (wanted_losses, wanted) in zip(found, expected, strict=True):
        assert [float(loss) for loss in losses] == [float(loss) for loss in wanted_losses]
        for (name, _, values), (_, _, wanted_values) in zip(pieces, wanted, strict=True):
            # A fresh model adds up the same gradients as a standard one in another order.
            assert torch.allclose(values, wanted_values, rtol=0, atol=0 if lateness == "late" else 1e-5), name


def launches_and_waits(config: ModelConfig, sequence_parallel: bool, lateness: tuple[float, ...]) -> list[str]:
    """Return those of a forward and backward pass."""
    model, group = recorded_model(config, StackOptions(), sequence_parallel)
    model.stack.lateness = dict(enumerate(lateness))
    tokens = torch.arange(24).view(2, 12)
    model(tokens, tokens).backward()
    return group.events


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["all-reduce", "reduce-scatter"])
def test_reduces_overlap_as_soon_as_all_layers_are_late(gloo_pools: GlooPools, sequence_parallel: bool) -> None:
    config = small_model(**WIRINGS["ladder"])

    def events(*lateness: float) -> list[str]:
        found: list[str] = gloo_pools(2).run(launches_and_waits, config, sequence_parallel, lateness)[0]
        return found

    usual = events()
    assert events(1.0, 1.0, 1.0, 1.0) == usual
    exposed = [event for event in events(1.0, 1.0, 1.0, 0.9) if event[0] in "LW"]
    pairs = list(zip(exposed[::2], exposed[1::2], strict=True))
    assert len(pairs) >= 8 and all((launch[0], wait) == ("L", f"W{launch[1:]}") for launch, wait in pairs), exposed


def annealed_gradients(argv: list[str]) -> LossAndGradients:
    """Return `reference_gradients` of the steps of `--anneal-staleness 2`, which it must be called for in their order.

    Step k has lateness (k - 1) / 2: 0, 0.5 and 1. If layers 2 and 1 become late one after another, the first one has 0,
    1, 1, and the second one 0, 0, 1.
    """
    by_step = [(1.0, 1.0, 1.0), (0.5, 0.5, 0.5), (0.0, 0.0, 0.0)]
    if "--convert-schedule" in argv:
        by_step = [(0.0, 1.0, 1.0), (0.0, 1.0, 0.0), (0.0, 0.0, 0.0)]
    calls = itertools.count()

    def gradients_of(weights: Weights, config: ReferenceConfig, *inputs: Any) -> tuple[Tensor, dict[str, Tensor]]:
        # Four micro-batches per step.
        return reference_gradients(weights, replace(config, freshness=by_step[next(calls) // 4]), *inputs)

    return gradients_of


@pytest.mark.parametrize(
    ("world", "words"),
    [
        (1, "--zero-stage 0 --residual-mode ladder --residual-staleness 2"),
        (2, "--zero-stage 0 --residual-mode ladder-attention --tensor-model-parallel-size 2"),
        (4, "--zero-stage 1 --residual-mode ladder --tensor-model-parallel-size 2 --sequence-parallel"),
        (4, "--zero-stage 2 --residual-mode ladder --tensor-model-parallel-size 2 --recompute-granularity full"),
        (4, "--zero-stage 3 --residual-mode ladder --tensor-model-parallel-size 2"),
        (2, "--zero-stage 3 --residual-mode ladder-parallel --recompute-granularity full"),
        (
            2,
            "--zero-stage 1 --residual-mode ladder --ladder-layers 1,2 --convert-schedule 2,0,1 "
            "--tensor-model-parallel-size 2",
        ),
    ],
)
def test_steps_equal_a_plain_model(gloo_pools: GlooPools, world: int, words: str) -> None:
    """Over the end of the annealing, with accumulation."""
    argv = [*RECIPE, *words.split(), "--global-batch-size", "8", "--anneal-staleness", "2"]
    weights, batches, expected, final = plain_steps(argv, world, annealed_gradients(argv))
    check_outcome(gloo_pools(world).run(train, argv, weights, batches), expected, final)


@pytest.mark.parametrize(
    ("world", "words"),
    [
        (2, "--zero-stage 1 --bf16 --tensor-model-parallel-size 2"),
        (4, "--zero-stage 3 --tensor-model-parallel-size 2 --convert-schedule 2,0,1"),
    ],
)
def test_a_run_resumes_bitwise_while_it_anneals(gloo_pools: GlooPools, tmp_path: Path, world: int, words: str) -> None:
    argv = [*RECIPE, *words.split(), *"--residual-mode ladder --global-batch-size 8".split()]
    check_resume(gloo_pools, tmp_path, [*argv, "--anneal-staleness", "3", "--anneal-schedule", "cosine"], world)


def evaluations(argv: list[str], weights: Weights, batches: list[list[Batch]]) -> list[tuple[float, Pieces]]:
    """On one rank: return the loss of the first batch and the weights after each step."""
    trainer, found = build_trainer_here(argv, weights), []
    first = own_batches(trainer, batches[0])
    for iteration, micro_batches in enumerate(batches, start=1):
        train_step(trainer, own_batches(trainer, micro_batches), iteration)
        found.append((evaluate(trainer, iter([first]), 1), weight_pieces(trainer)))
    return found


def test_an_evaluation_reads_as_the_next_step(gloo_pools: GlooPools) -> None:
    """So the evaluation after the last step of the annealing is that of the wiring."""
    argv = [*RECIPE, *"--residual-mode ladder --global-batch-size 8 --anneal-staleness 3".split()]
    config, batches = ReferenceConfig.like(run_of(argv, 1).model), steps_of_batches(3, 4)
    tokens, labels, mask = (torch.cat(parts) for parts in zip(*batches[0], strict=True))
    (found,) = gloo_pools(1).run(evaluations, argv, make_weights(config, seed=1), batches)
    for (loss, pieces), freshness in zip(found, (2 / 3, 1 / 3, 0.0), strict=True):
        weights = {name: values for name, _, values in pieces}
        expected = reference_loss(weights, replace(config, freshness=(freshness,) * 3), tokens, labels, mask)
        assert loss == pytest.approx(float(expected), rel=1e-5)

"""Compiled operations yield the same gradients and the same order of launches and waits."""

from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from megatron_ladder.blueprint.model import ModelConfig
from megatron_ladder.model.operations import Operations, compile_operations
from megatron_ladder.model.stack import StackOptions
from tests.helpers.pairwise import usual_share
from tests.helpers.pool import GlooPools
from tests.helpers.recording import HYBRID, LADDER, PARALLEL, recorded_model
from tests.helpers.sharded import LATENT_WIDTHS, small_model
from tests.helpers.steps import RECIPE, Batch, steps_of_batches, train
from tests.helpers.training import run_of
from tests.reference import ReferenceConfig, Weights, make_weights

GATED_LATENT = LADDER | LATENT_WIDTHS | {"q_lora_rank": 9, "attention_output_gate": True}
BACKEND = "aot_eager"
"""Traces forward and backward as inductor does, without a C++ compiler."""


def gradients_and_events(
    config: ModelConfig, options: StackOptions, sequence_parallel: bool, compiled: bool
) -> tuple[list[Tensor], list[str]]:
    """Return loss, all gradients, launches and waits of a forward and backward pass."""
    if compiled:
        torch.compiler.reset()
        counters.clear()
        options = replace(options, operations=compile_operations(Operations(), BACKEND))
    model, group = recorded_model(config, options, sequence_parallel)
    tokens = torch.arange(24).view(2, 12)
    loss = model(tokens, tokens)
    loss.backward()
    if compiled:
        # One graph per function and kind of arguments, independent of the number of layers.
        most = 17 if config.kv_lora_rank else 12
        assert 2 < counters["stats"]["unique_graphs"] <= most, counters["stats"]
        assert not counters["graph_break"]
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert len(gradients) == len(list(model.parameters()))
    return [loss.detach(), *gradients], group.events


@pytest.mark.parametrize(
    ("wiring", "options", "sequence_parallel"),
    usual_share(
        [
            (LADDER, StackOptions(recompute_layers=3), False),
            (HYBRID, StackOptions(tp_overlap=False, recompute_layers=2), False),
            (PARALLEL, StackOptions(), False),
            (LADDER | {"qk_layernorm": True, "apply_layernorm_1p": True}, StackOptions(recompute_layers=2), True),
            ({}, StackOptions(mirrored_backward=False), False),
            (GATED_LATENT, StackOptions(recompute_layers=2), True),
        ],
        3,
    ),
    ids=[
        "ladder-recomputed",
        "hybrid-blocking",
        "parallel",
        "ladder-sequence-parallel",
        "standard-autograd",
        "latent-sequence-parallel",
    ],
)
def test_compilation_keeps_gradients_and_order(
    gloo_pools: GlooPools, wiring: dict[str, Any], options: StackOptions, sequence_parallel: bool
) -> None:
    config = small_model(num_layers=3, **wiring)
    plain = gloo_pools(2).run(gradients_and_events, config, options, sequence_parallel, compiled=False)
    compiled = gloo_pools(2).run(gradients_and_events, config, options, sequence_parallel, compiled=True)
    for (wanted, order), (found, order_compiled) in zip(plain, compiled, strict=True):
        assert order and order_compiled == order
        for a, b in zip(found, wanted, strict=True):
            assert (a - b).abs().max() <= 1e-5 * b.abs().max()


def compiled_history(argv: list[str], weights: Weights, batches: list[list[Batch]]) -> list[tuple[float, float]]:
    """Return loss and gradient norm of every step, with compiled sub-blocks."""
    torch.compiler.reset()
    counters.clear()
    compiled = partial(compile_operations, backend=BACKEND)
    with mock.patch("megatron_ladder.model.operations.compile_operations", compiled):
        history, _ = train([*argv, "--compile-sub-blocks"], weights, batches)
    assert counters["stats"]["unique_graphs"] > 2 and not counters["graph_break"]
    return history


@pytest.mark.parametrize(
    "words", ["--zero-stage 1 --bf16", "--zero-stage 3 --qk-layernorm --recompute-granularity full"]
)
def test_compiled_steps_equal_eager_ones(gloo_pools: GlooPools, words: str) -> None:
    argv = [*RECIPE, *words.split(), "--residual-mode", "ladder"]
    weights = make_weights(ReferenceConfig.like(run_of(argv, 2).model), seed=1, dtype=torch.float32)
    batches = steps_of_batches(3, 2)
    eager = gloo_pools(2).run(train, argv, weights, batches)
    compiled = gloo_pools(2).run(compiled_history, argv, weights, batches)
    tolerance = 2e-2 if "--bf16" in argv else 1e-5
    for (wanted, _), found in zip(eager, compiled, strict=True):
        for one, other in zip(found, wanted, strict=True):
            assert one == pytest.approx(other, rel=tolerance)

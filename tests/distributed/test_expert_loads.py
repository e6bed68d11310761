"""Loads of experts, and the biases that follow them: the same in every layout, and kept by checkpoints."""

import pytest
import torch
from torch import Tensor

from megatron_ladder.train.log import _describe_loads
from megatron_ladder.train.step import train_step
from tests.helpers.pool import GlooPools
from tests.helpers.steps import RECIPE, STEPS, Batch, steps_of_batches
from tests.helpers.training import build_trainer_here, own_batches, weight_pieces

RATE = 0.01
EXPERTS = (
    "--num-experts 8 --moe-router-topk 3 --moe-ffn-hidden-size 16 --moe-shared-expert-intermediate-size 16 "
    "--moe-layers 1-2 --moe-router-score-function sigmoid --moe-router-enable-expert-bias --residual-mode farskip "
    f"--moe-router-bias-update-rate {RATE}"
)
ARGV = [*RECIPE, *f"--lr 1e-3 --global-batch-size 8 {EXPERTS}".split()]


def loads_and_biases(argv: list[str], batches: list[list[Batch]]) -> tuple[list[Tensor], dict[str, Tensor]]:
    """On each rank: the loads of every step, and the final biases of its layers."""
    trainer = build_trainer_here(argv)
    results = [train_step(trainer, own_batches(trainer, batch), 1 + step) for step, batch in enumerate(batches)]
    biases = {name: values for name, _, values in weight_pieces(trainer) if name.endswith("expert_bias")}
    return [result.loads for result in results], biases


@pytest.mark.parametrize(
    ("world", "words"),
    [
        (1, "--recompute-granularity full"),
        (2, "--zero-stage 3"),
        (2, "--tensor-model-parallel-size 2 --recompute-granularity full --expert-sharding experts"),
        (4, "--tensor-model-parallel-size 2 --sequence-parallel --zero-stage 2"),
        (4, "--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2 --recompute-granularity full"),
    ],
)
def test_every_layout_counts_each_token_once(gloo_pools: GlooPools, world: int, words: str) -> None:
    batches = steps_of_batches(STEPS, 4)
    # A step without targets is left out.
    batches[1] = [(tokens, labels, torch.zeros_like(mask)) for tokens, labels, mask in batches[1]]
    ((loads, biases),) = gloo_pools(1).run(loads_and_biases, [*ARGV, "--zero-stage", "0"], batches)
    tokens = sum(ids.numel() for ids, _, _ in batches[0])
    assert [step.sum(-1).tolist() for step in loads] == [[3 * tokens] * 2] * STEPS
    moves = sum(torch.sign(step.mean(-1, keepdim=True) - step) for step in (loads[0], loads[2]))
    assert moves.any()
    for layer, values in enumerate(moves, start=1):
        torch.testing.assert_close(biases[f"layers.{layer}.router.expert_bias"], RATE * values.float())
    found = dict[str, Tensor]()
    for own_loads, own_biases in gloo_pools(world).run(loads_and_biases, [*ARGV, *words.split()], batches):
        assert torch.equal(torch.stack(own_loads), torch.stack(loads))
        assert all(torch.equal(values, found.setdefault(name, values)) for name, values in own_biases.items())
    assert found.keys() == biases.keys()
    assert all(torch.equal(values, biases[name]) for name, values in found.items())


def test_the_log_describes_the_loads_of_a_step() -> None:
    even, one = torch.full((1, 8), 5.0), torch.tensor([[0.0, 0.0, 0.0, 40.0, 0.0, 0.0, 0.0, 0.0]])
    half = torch.tensor([[0.0, 10.0, 0.0, 10.0, 0.0, 10.0, 0.0, 10.0]])
    names = ("largest expert load", "expert load entropy", "dead experts")
    for loads, expected in (
        (even, (1.0, 1.0, 0)),
        (one, (8.0, 0.0, 7)),
        (half, (2.0, 2 / 3, 4)),
        (torch.cat([even, one, half]), (8.0, 5 / 9, 11)),
    ):
        assert _describe_loads(loads.double()) == pytest.approx(dict(zip(names, expected, strict=True)))
    assert _describe_loads(torch.zeros(0, 0)) == {}

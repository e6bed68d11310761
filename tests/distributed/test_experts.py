"""Loads of experts, and the biases that follow them: the same in every layout, and kept by checkpoints."""

import pytest
import torch
from torch import Tensor

from megatron_ladder.train.log import _describe_loads
from megatron_ladder.train.step import train_step
from tests.helpers.pool import GlooPools
from tests.helpers.sharded import Pieces, assert_pieces
from tests.helpers.steps import RECIPE, STEPS, Batch, steps_of_batches
from tests.helpers.training import build_trainer_here, own_batches, weight_pieces

RATE = 0.01
EXPERTS = (
    "--num-experts 8 --moe-router-topk 3 --moe-ffn-hidden-size 16 --moe-shared-expert-intermediate-size 16 "
    "--moe-layers 1-2 --moe-router-score-function sigmoid --moe-router-enable-expert-bias --residual-mode farskip "
    f"--moe-router-bias-update-rate {RATE}"
)
ARGV = [*RECIPE, *f"--lr 1e-3 --global-batch-size 8 {EXPERTS}".split()]


def loads_and_weights(argv: list[str], batches: list[list[Batch]]) -> tuple[list[Tensor], Pieces]:
    """On each rank: the loads of every step, and the final weights and biases."""
    trainer = build_trainer_here(argv)
    results = [train_step(trainer, own_batches(trainer, batch), 1 + step) for step, batch in enumerate(batches)]
    return [result.loads for result in results], weight_pieces(trainer)


@pytest.mark.parametrize("stage", "123")
def test_biases_stay_in_fp32(gloo_pools: GlooPools, stage: str) -> None:
    argv = [*ARGV, "--bf16", "--zero-stage", stage]
    for loads, pieces in gloo_pools(2).run(loads_and_weights, argv, steps_of_batches(1, 4)):
        biases = torch.stack([values for name, _, values in pieces if name.endswith("expert_bias")])
        moves = torch.sign(loads[0].mean(-1, keepdim=True) - loads[0])
        assert moves.any() and torch.equal(biases, RATE * moves.float())


@pytest.mark.parametrize(
    ("world", "words"),
    [
        (2, "--zero-stage 1"),
        (2, "--zero-stage 2 --offload-optimizer cpu"),
        (2, "--zero-stage 3 --recompute-granularity full"),
        (4, "--zero-stage 1 --tensor-model-parallel-size 2 --expert-sharding experts --sequence-parallel"),
        (4, "--zero-stage 1 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"),
    ],
)
def test_experts_without_tokens_move_by_their_momentum(gloo_pools: GlooPools, world: int, words: str) -> None:
    """With a step of the bias that exceeds any score, experts with many tokens in one step have none in the next."""
    argv = [*ARGV, *"--moe-router-bias-update-rate 10 --lr-warmup-iters 0".split()]
    batches = steps_of_batches(STEPS, 4)
    ((loads, pieces),) = gloo_pools(1).run(loads_and_weights, [*argv, "--zero-stage", "0"], batches)
    assert all(((loads[0] > 0) & (loads[1] == 0)).sum(-1) >= 3)
    assert (torch.stack(loads).sum(-1) == 3 * sum(tokens.numel() for tokens, _, _ in batches[0])).all()
    experts = {name: values for name, _, values in pieces if ".experts." in name}
    results = gloo_pools(world).run(loads_and_weights, [*argv, *words.split()], batches)
    assert all(torch.equal(torch.stack(own_loads), torch.stack(loads)) for own_loads, _ in results)
    first = dict[str, Tensor]()
    for name, _, values in (piece for _, own in results for piece in own if ".router." in piece[0]):
        assert torch.equal(values, first.setdefault(name, values)), f"ranks have different values of {name}"
    # A step moves a weight by up to the learning rate, 1e-3, and decays it by a ten-thousandth.
    assert_pieces([[piece for piece in own if piece[0] in experts] for _, own in results], experts, 1e-5)


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

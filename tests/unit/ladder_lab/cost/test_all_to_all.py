"""What all-to-alls send and how long they take: against counted choices, and by hand."""

import random
from dataclasses import replace

import pytest

from ladder_lab.bench.sizes import SIZES
from ladder_lab.cost.all_to_all import ALL_TO_ALLS, all_to_all_seconds, copies
from ladder_lab.cost.machines import Machine
from ladder_lab.cost.placement import Spread

DEEPSEEK = SIZES["deepseek-v3"]
ANYWHERE = replace(DEEPSEEK, moe_router_num_groups=1, moe_router_group_topk=1)
H100 = Machine.usual("h100")


@pytest.mark.parametrize("holders", [2, 4, 8, 16, 64])
def test_a_token_is_sent_to_each_holder_of_some_of_its_experts(holders: int) -> None:
    draw = random.Random(0)
    per_holder = 256 // holders
    counted = [len({expert // per_holder for expert in draw.sample(range(256), 8)}) for _ in range(4000)]
    assert copies(ANYWHERE, holders, sends_once=True) == pytest.approx(sum(counted) / 4000, rel=0.01)
    assert copies(ANYWHERE, holders, sends_once=False) == 8


def test_groups_of_experts_limit_the_boxes_of_a_token() -> None:
    assert copies(DEEPSEEK, 8, sends_once=True) == 4
    assert copies(ANYWHERE, 8, sends_once=True) == pytest.approx(5.295, abs=0.001)
    assert copies(DEEPSEEK, 2, sends_once=True) == copies(ANYWHERE, 2, sends_once=True) < 2


@pytest.mark.parametrize(("library", "inside", "between"), [("nccl", 370e9, 47e9), ("deepep", 338e9, 44e9)])
def test_the_wire_that_takes_longest_counts(library: str, inside: float, between: float) -> None:
    """A quarter of 4096 tokens of 7168 numbers in bf16, on eight GPUs of a box and on eight boxes."""
    exchange = ALL_TO_ALLS[library]
    row = 1024 * 2 * 7168
    one = all_to_all_seconds(exchange, H100, DEEPSEEK, 1024, 2 * 7168, Spread(1, 8, 8, 0))
    to_ranks = copies(DEEPSEEK, 8, exchange.sends_once)
    assert one == pytest.approx(60e-6 + row * to_ranks * 7 / 8 / inside, rel=0.02)
    many = all_to_all_seconds(exchange, H100, DEEPSEEK, 1024, 2 * 7168, Spread(8, 8, 8, 8))
    to_boxes = 4 if exchange.sends_once else 8
    assert many == pytest.approx(60e-6 + row * to_boxes * 7 / 8 / between, rel=0.02)
    shared = replace(H100, adapters=2)
    fourth = all_to_all_seconds(exchange, shared, DEEPSEEK, 1024, 2 * 7168, Spread(8, 8, 8, 8))
    assert fourth - 60e-6 == pytest.approx(4 * (many - 60e-6))

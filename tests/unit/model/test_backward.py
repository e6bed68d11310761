"""Which reads the gradients of a range need, and which cross its cuts: by hand, and as rules of random wirings."""

import functools
import random
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from megatron_ladder.blueprint.wiring import ReadPlan
from megatron_ladder.comm.group import CommGroup
from megatron_ladder.comm.mesh import ProcessMesh
from megatron_ladder.comm.side_queue import CudaSideQueue
from megatron_ladder.model.backward import ForwardRecord, MirrorPlan
from megatron_ladder.model.cut import StateMessages
from megatron_ladder.model.language_model import LanguageModel
from tests.helpers.sharded import small_model
from tests.unit.comm import fake_cuda

STALENESS_2 = ReadPlan((3, 4, 5, 6, 7, 7, 7))
LONGCAT = ReadPlan((1, 5, 3, 4, 5, 6))
"""Two layers: the routed experts, output 1, arrive with the second MLP. The next layer is an attention alone."""


def test_middle_range_of_staleness_2_is_the_example_of_the_file() -> None:
    plan = MirrorPlan.of(STALENESS_2, 2, 5, sharded=False)
    assert plan == (True, [range(2, 3), range(3, 4)], [range(5, 6), range(6, 7)], 4, 7, {7: [4], 6: [3], 5: [2], 4: []})


def test_whole_model_crosses_no_cut() -> None:
    plan = MirrorPlan.of(STALENESS_2, 0, 7, sharded=False)
    completed = {7: [4, 5, 6], 6: [3], 5: [2], 4: [1], 3: [0], 2: [], 1: [], 0: []}
    assert plan == (True, [], [], 0, 7, completed)


def test_gradients_of_a_sharded_stream_cross_complete() -> None:
    plan = MirrorPlan.of(STALENESS_2, 2, 5, sharded=True)
    assert plan == (False, [], [], 2, 5, {5: [2], 4: [1], 3: [0], 2: []})


def test_gradients_cross_complete_if_an_output_overtakes_another() -> None:
    plan = MirrorPlan.of(LONGCAT, 2, 4, sharded=False)
    assert plan == (False, [], [], 2, 4, {4: [3], 3: [2], 2: []})
    plan = MirrorPlan.of(LONGCAT, 2, 6, sharded=False)
    assert plan == (False, [], [], 2, 6, {6: [5], 5: [1, 4], 4: [3], 3: [2], 2: []})


def test_an_output_that_passes_through_a_range_leaves_its_reads_to_the_range_before() -> None:
    plan = MirrorPlan.of(ReadPlan((4, 4, 4, 4)), 1, 2, sharded=False)
    assert plan == (True, [range(1, 4)], [range(2, 4), range(4, 4)], 4, 4, {4: [1]})


@pytest.mark.parametrize("seed", range(20))
def test_ranges_agree_on_what_crosses(seed: int) -> None:
    dice = random.Random(seed)
    arrivals = [min(output + dice.choice((1, 1, 2, 3)), 12) for output in range(12)]
    if seed % 2:
        arrivals = [max(arrivals[: output + 1]) for output in range(12)]
    wiring = ReadPlan(tuple(arrivals))
    cuts = [0, *sorted(dice.sample(range(1, 12), 3)), 12]
    plans = [MirrorPlan.of(wiring, first, last, sharded=False) for first, last in pairwise(cuts)]
    for before, behind in pairwise(plans):
        assert before.behind == behind.crossing and before.start == behind.first_reduced
    taken = [output for plan in plans for outputs in plan.completed.values() for output in outputs]
    if wiring.in_order:
        # Every range takes those of its own outputs.
        assert sorted(taken) == list(range(12))
    # g_f of an output that a range takes includes the reads from its first read on, and no other.
    assert all(arrivals[output] == read for plan in plans for read, outs in plan.completed.items() for output in outs)


def test_gradients_arrive_on_the_stream_of_the_computation(monkeypatch: pytest.MonkeyPatch) -> None:
    """ZeRO-2 copies a gradient to a bucket where it arrives, and reduces the bucket where another one arrives."""
    mesh = replace(ProcessMesh.single(), tensor=CommGroup([0, 1], 0, None), sequence_parallel=True)
    model = LanguageModel(small_model(residual_mode="ladder"), mesh)
    stack, context = model.stack, model.training_context(torch.zeros(1, 4, dtype=torch.int64))
    device = fake_cuda.install(monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    streams, view_as = [], Tensor.view_as
    monkeypatch.setattr(Tensor, "view_as", lambda *tensors: streams.append(device.current) or view_as(*tensors))
    queue = CudaSideQueue(torch.device("cuda"))
    options = queue, True, (), True, StateMessages(), None
    record = ForwardRecord(stack.sub_blocks(), context, stack.plan, 0, stack.layout, *options)
    queue.run(functools.partial(record._stand_in, 1, stack.sub_blocks()[1].norm.weight), uses=None)
    # The backward of an operation runs on the stream of its forward.
    assert streams == [device.compute]

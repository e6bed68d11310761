"""Wirings in which each output arrives at any later sub-block, compared with the plain formula."""

import random
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from megatron_ladder.blueprint.model import ModelConfig
from megatron_ladder.blueprint.wiring import ReadPlan, WiredSubBlock
from megatron_ladder.comm.mesh import ProcessMesh
from megatron_ladder.model.language_model import LanguageModel
from megatron_ladder.model.stack import StackOptions
from tests.helpers.pairwise import usual_share
from tests.helpers.pool import GlooPools
from tests.helpers.recording import InlineQueue, recorded_model
from tests.helpers.sharded import Pieces, assert_pieces, fill_slices, gradient_pieces, mesh_of, run_chain, small_model
from tests.reference import ReferenceConfig, make_weights, reference_gradients

TOLERANCE = 1e-11
SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "ffn_hidden_size": 16,
    "num_key_value_heads": 4,
    "head_dim": 4,
    "vocab_size": 17,
}
EXPERTS = {"num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 8}


class Case(NamedTuple):
    """A random model and how it is computed."""

    config: ModelConfig
    arrivals: tuple[int, ...]
    missing: tuple[tuple[int, ...], ...]
    joined: tuple[bool, ...]
    """Whether each output travels in the sum of the next one."""
    shares: tuple[bool, ...]
    """Whether each sub-block shares the read of the one before it."""
    bounds: tuple[int, ...]
    """First layers of the ranges, and the number of layers."""
    options: StackOptions
    sequence_parallel: bool


def random_case(seed: int, ranks: int) -> Case:
    """Choose for each output the first sub-block that sees it, and from that what each sub-block misses."""
    dice = random.Random(seed)
    mode = dice.choice(("ladder", "ladder", "ladder-parallel", "farskip", "shortcut", "longcat"))
    layers = dice.randrange(3, 6) if mode == "ladder-parallel" else dice.randrange(2, 4)
    sizes = dict(SIZES)
    if mode in ("farskip", "shortcut", "longcat") or dice.random() < 0.3:
        sizes |= EXPERTS | {"moe_layers": tuple(sorted(dice.sample(range(layers), dice.randrange(1, layers + 1))))}
        sizes["moe_shared_expert_intermediate_size"] = 0 if mode == "longcat" else 8
    lanes = 0 if "moe_layers" in sizes else dice.choice((0, 0, 2))
    config = small_model(
        num_layers=layers,
        residual_mode=mode,
        ladder_layers=tuple(range(layers)),
        lanes=lanes,
        qk_layernorm=lanes <= ranks and dice.random() < 0.5,
        apply_layernorm_1p=seed % 2 == 0,
        **sizes,
    )
    ends = list(accumulate(map(len, config.wired_layers), initial=0))
    count = ends[-1]
    reads = tuple(min(output + 1 + dice.choice((0, 0, 1, 1, 2, 3)), count) for output in range(count))
    if dice.random() < 0.5:
        # In order, so that gradients cross cuts unreduced.
        reads = tuple(accumulate(reads, max))
    missing = tuple(tuple(i - j for j in reversed(range(i)) if reads[j] > i) for i in range(count))
    cuts = sorted(dice.sample(range(1, layers), dice.randrange(layers)))
    # Outputs that are first seen together, in their range.
    joined = tuple(
        not lanes and first == second and not any(output < ends[cut] < first for cut in cuts) and dice.random() < 0.5
        for output, (first, second) in enumerate(pairwise((*reads, 0)))
    )
    norms = [(layer, one.kind.norm) for layer, of_layer in enumerate(config.wired_layers) for one in of_layer]
    shares = tuple(
        index > 0 and norms[index] == norms[index - 1] and index not in reads and dice.random() < 0.7
        for index in range(count)
    )
    options = StackOptions(
        tp_overlap=dice.random() < 0.9, recompute_layers=dice.choice((0, 9)), mirrored_backward=dice.random() < 0.9
    )
    is_sharded = ranks > 1 and not lanes and dice.random() < 0.5
    return Case(config, reads, missing, joined, shares, (0, *cuts, layers), options, is_sharded)


def wired(case: Case) -> list[tuple[WiredSubBlock, ...]]:
    """Return the model's sub-blocks with what they miss and which outputs travel together."""
    sets = iter(zip(case.missing, case.joined, case.shares, strict=True))

    def changed(one: WiredSubBlock) -> WiredSubBlock:
        missing, joins_next, shares_input = next(sets)
        return one._replace(missing=missing, joins_next=joins_next, shares_input=shares_input)

    return [tuple(map(changed, layer)) for layer in case.config.wired_layers]


def inputs(seed: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, 17, (2, 7), generator=torch.Generator().manual_seed(seed))
    return tokens[:, :-1], tokens[:, 1:]


def run_cases(seeds: range, ranks: int) -> list[tuple[float, Pieces]]:
    """Return loss and gradients of each case."""
    found = []
    for seed in seeds:
        case = random_case(seed, ranks)
        mesh = replace(mesh_of(2) if ranks > 1 else ProcessMesh.single(), sequence_parallel=case.sequence_parallel)
        weights = make_weights(ReferenceConfig.like(case.config), seed, torch.float64)
        parts = []
        for bound in pairwise(case.bounds):
            part = LanguageModel(case.config, mesh, case.options, chunks=[range(*bound)], dtype=torch.float64)
            fill_slices(part, weights)
            part.stack.rewire(wired(case))
            part.stack.side_queue = InlineQueue() if case.sequence_parallel and seed % 2 else None
            parts.append(part)
        loss, _ = run_chain(parts, *inputs(seed))
        found.append((loss.item(), [piece for part in parts for piece in gradient_pieces(part)]))
    return found


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("seeds", usual_share([range(0, 75), range(75, 150)], 2), ids=str)
def test_random_wirings(gloo_pools: GlooPools, seeds: range, ranks: int) -> None:
    """Experts, joined sums, cuts, recomputation, own partials, sequence parallelism, reads ahead."""
    results = gloo_pools(ranks).run(run_cases, seeds, ranks)
    for seed, *of_ranks in zip(seeds, *results, strict=True):
        case = random_case(seed, ranks)
        assert ReadPlan.of(case.missing).arrivals == case.arrivals
        reference = replace(ReferenceConfig.like(case.config), missing=case.missing)
        weights = make_weights(reference, seed, torch.float64)
        loss, gradients = reference_gradients(weights, reference, *inputs(seed), total_targets=1.0, total_tokens=1.0)
        assert [found for found, _ in of_ranks] == pytest.approx([float(loss)] * ranks, rel=TOLERANCE), case
        assert_pieces([pieces for _, pieces in of_ranks], gradients, TOLERANCE)


def events_of_cases(seeds: range) -> list[list[str]]:
    """Return for each case launches and waits of reduces (`L3`, `W3`) and starts of sub-blocks forward (`B3`)."""
    found = []
    for seed in seeds:
        case = random_case(seed, 2)
        model, group = recorded_model(case.config, StackOptions())
        model.stack.rewire(wired(case))
        for number, step in enumerate(model.stack.sub_blocks()):
            assert isinstance(step.body, nn.Module)
            step.body.register_forward_pre_hook(lambda *_, name=f"B{number}", group=group: group.events.append(name))
        state = torch.randn(1, 6, 2, case.config.hidden_size, requires_grad=True)
        output, _ = model.stack(state, model.training_context(inputs(seed)[0]))
        output.sum().backward()
        found.append([event for event in group.events if event != "S"])
    return found


def test_an_output_is_waited_for_right_before_the_first_sub_block_that_sees_it(gloo_pools: GlooPools) -> None:
    """Backward: the reduce of a read is waited for right before the first output that needs it."""
    seeds = range(40)
    for seed, events in zip(seeds, gloo_pools(2).run(events_of_cases, seeds)[0], strict=True):
        case = random_case(seed, 2)
        reads, count = case.arrivals, len(case.arrivals)
        launched = [output for output in range(count) if not case.joined[output]]
        numbers = {output: number for number, output in enumerate(launched)}
        expected = []
        for index in range(count):
            expected += [f"W{numbers[j]}" for j in launched if reads[j] == index] + [f"B{index}"]
            expected += [f"L{numbers[index]}"] if index in numbers else []
        expected += [f"W{numbers[j]}" for j in launched if reads[j] == count]
        # Backward's reduces continue the numbers.
        read_numbers = {}
        for index in reversed(range(count)):
            # The first of several sub-blocks that share a read launches its reduce.
            read_numbers |= {} if case.shares[index] else {index: len(launched) + len(read_numbers)}
        flying = list[int]()
        for index in reversed(range(count)):
            expected += [f"W{read_numbers[read]}" for read in flying if read >= reads[index]]
            flying = [read for read in flying if read < reads[index]]
            if index in read_numbers:
                flying.append(index)
                expected.append(f"L{read_numbers[index]}")
        expected += [f"W{read_numbers[read]}" for read in flying]
        assert events == expected, seed

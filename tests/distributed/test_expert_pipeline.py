"""Pipeline stages whose experts are divided over expert-parallel ranks: order of messages, losses and gradients."""

import functools
import itertools
import random
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_ladder.blueprint.model import ModelConfig
from megatron_ladder.blueprint.wiring import SubBlockKind
from megatron_ladder.comm.group import CommGroup, Work
from megatron_ladder.engine.engine import Engine, ModelInputs
from megatron_ladder.model.language_model import LanguageModel, LossScales
from megatron_ladder.model.operations import ExpertOptions
from megatron_ladder.model.stack import StackOptions
from tests.distributed.test_correctness import PER_SEQUENCE, Batch, micro_batches
from tests.distributed.test_expert_parallel import (
    LETTERS,
    MODELS,
    UNUSED,
    VARIANTS,
    How,
    Layout,
    Outcome,
    check,
    expert_mesh,
    freeze,
    make_batch,
    part_of_rank,
    routed_model,
    summed_gradients,
)
from tests.helpers.pairwise import usual_share
from tests.helpers.pool import GlooPools
from tests.helpers.recording import InlineQueue, RecordedWork, RecordingGroup
from tests.helpers.sharded import fill_slices, small_model
from tests.reference import Weights

CPU = torch.device("cpu")


class RecordingPipeline(CommGroup):
    """Records the starts of sends (`>0`) and the waits for receives (`.0`), numbered from the first message."""

    def __init__(self, group: CommGroup, events: list[str]) -> None:
        super().__init__(group.ranks, group.rank, group.process_group, group.descending)
        self.events = events
        self.sends = 0
        self.receives = 0

    def start_send(self, tensor: Tensor, target: int) -> Work:
        self.events.append(f">{self.sends}")
        self.sends += 1
        return super().start_send(tensor, target)

    def start_receive(self, into: Tensor, source: int) -> Work:
        number = self.receives
        self.receives += 1
        return RecordedWork(super().start_receive(into, source), lambda: self.events.append(f".{number}"))


def body_name(name: str) -> str:
    """Return the letter and layer of `layers.3.attention`."""
    _, layer, kind = name.split(".")
    return LETTERS[SubBlockKind(kind)] + layer


def events_of_a_stage(config: ModelConfig, chunks: Sequence[Sequence[range]], trains: bool, overlap: bool) -> str:
    """Return the events of one micro-batch in this rank's stage.

    They are those of `RecordingPipeline`, launches and waits of dispatches and combines, and of their gradients (`D`,
    `d`, `C`, `c`), and starts of bodies by layer, forward (`A3`) and backward (`A3'`).
    """
    mesh = expert_mesh(config, 1, 2, len(chunks))
    experts = RecordingGroup(mesh.experts)
    experts.width = config.hidden_size
    events = experts.events
    pipeline = RecordingPipeline(mesh.pipeline, events)
    mesh = replace(mesh, experts=experts, pipeline=pipeline)

    def span(activity: str) -> AbstractContextManager[None]:
        name, _, what = activity.partition(" ")
        events.extend([f"{body_name(name)}'"] if what == "backward" else [])
        return nullcontext()

    model = LanguageModel(config, mesh, StackOptions(overlap, span=span), chunks=chunks[pipeline.rank], seed=1)
    for step in itertools.chain.from_iterable(map(model.stack.sub_blocks, range(model.chunks))):
        note = functools.partial(events.append, body_name(step.name))
        step.body.register_forward_pre_hook(lambda *_, note=note: note())
    engine: Any = Engine(model, None, mesh, CPU)  # type: ignore[arg-type]
    ids = torch.arange(26).view(2, 13)
    batches: list[ModelInputs] = [(ids[:, :-1], ids[:, 1:], None, None, None, None)]
    engine.run_passes(batches, trains=trains, scales=LossScales(*torch.ones(3)))
    return " ".join(event[0] if event[0] in "CcDd" else event for event in events if event[0] not in "Kk")


# One layer in each of two stages. The first stage receives no state, and the last one no gradient.
STAGES = [[range(0, 1)], [range(1, 2)]]
FIRST, LAST = "D A0 S0 d R0 C >0 c >1 .0 C c R0' D .1 S0' A0' d", ".0 A1 .1 D S1 d R1 C c C S1' c R1' D d >0 A1' >1"


@pytest.mark.parametrize(
    ("model", "first", "last"),
    [
        ("standard", "A0 D S0 d R0 C c >0 .0 C S0' c R0' D d A0'", ".0 A1 D S1 d R1 C c C S1' c R1' D d A1' >0"),
        ("ladder", FIRST, LAST),
        ("farskip", FIRST, LAST),
        (
            "ladder 2",
            "D A0 S0 d R0 C >0 c >1 .0 C c R0' D .1 S0' A0' d",
            ".0 D A1 S1 d R1 C .1 c C >0 S1' c R1' D A1' d >1",
        ),
        (
            "ladder-parallel",
            "D A0 d R0 C >0 c >1 .0 C c R0' D .1 A0' d",
            ".0 D A1 d R1 C .1 c C >0 A1' c R1' D d >1",
        ),
        ("shortcut", "D A0 d R0 C S0 c >0 .0 C S0' c R0' D A0' d", ".0 D A1 d R1 C S1 c C S1' c R1' D A1' d >0"),
        (
            "longcat",
            "A0 D M0 d R0 C B0 N0 c >0 .0 C N0' B0' c R0' D M0' d A0'",
            ".0 A1 D M1 d R1 C B1 N1 c C N1' B1' c R1' D M1' d A1' >0",
        ),
    ],
)
def test_an_output_of_experts_does_not_delay_the_stream(
    gloo_pools: GlooPools, model: str, first: str, last: str
) -> None:
    """Where R is missing at the cut, the stream leaves before its combine is waited for, and it is waited for where it
    is seen. Its gradient leaves first, and R goes backward before the gradient of the stream is waited for."""
    events = gloo_pools(4).run(events_of_a_stage, routed_model(model), STAGES, True, True)
    assert events == [first, first, last, last]


def test_every_cut_has_its_messages(gloo_pools: GlooPools) -> None:
    """Three stages, the first of which has two layers, and two stages of two chunks."""
    three = [[range(0, 2)], [range(2, 3)], [range(3, 4)]]
    first, _, middle, _, last, _ = gloo_pools(6).run(events_of_a_stage, routed_model("farskip", 4), three, True, True)
    assert first == "D A0 S0 d R0 C A1 c D S1 d R1 C >0 c >1 .0 C c R1' D .1 S1' d C A1' c R0' D S0' A0' d"
    assert middle == ".0 A2 .1 D S2 d R2 C >0 c >1 .2 C c R2' D .3 S2' d >2 A2' >3"
    assert last == ".0 A3 .1 D S3 d R3 C c C S3' c R3' D d >0 A3' >1"
    chunks = [[range(0, 1), range(2, 3)], [range(1, 2), range(3, 4)]]
    first, _, last, _ = gloo_pools(4).run(events_of_a_stage, routed_model("farskip", 4), chunks, True, True)
    backward = ".2 C c R2' D .3 S2' d >4 A2' >5 .4 C c R0' D .5 S0' A0' d"
    assert first == f"D A0 S0 d R0 C >0 c >1 .0 A2 .1 D S2 d R2 C >2 c >3 {backward}"
    backward = "C S3' c R3' D d >2 A3' >3 .4 C c R1' D .5 S1' d >4 A1' >5"
    assert last == f".0 A1 .1 D S1 d R1 C >0 c >1 .2 A3 .3 D S3 d R3 C c {backward}"


def test_an_output_passes_through_a_stage(gloo_pools: GlooPools) -> None:
    """The last stage is the first one that sees the experts of layer 0, and receives them from the one before it."""
    stages = [[range(0, 2)], [range(2, 3)], [range(3, 4)]]
    first, _, middle, _, last, _ = gloo_pools(6).run(events_of_a_stage, routed_model("ladder 4", 4), stages, True, True)
    assert first == "D A0 D S0 d R0 C A1 S1 d R1 C >0 c c >1 >2 .0 C c .1 C R1' D .2 S1' A1' c R0' D S0' A0' d d"
    assert middle == ".0 D A2 S2 d R2 C .1 >0 .2 c >1 >2 .3 C c .4 >3 .5 >4 R2' D S2' A2' d >5"
    assert last == ".0 D A3 S3 d R3 C .1 .2 c C >0 >1 S3' c R3' D A3' d >2"


@pytest.mark.parametrize(
    ("trains", "overlap", "first", "last"),
    [
        pytest.param(
            True,
            False,
            "A0 S0 D d R0 C c >0 >1 .0 .1 C c D d",
            ".0 .1 A1 S1 D d R1 C c C c D d >0 >1",
            id="everything is waited for at once",
        ),
        pytest.param(False, True, "D A0 S0 d R0 C >0 c >1", ".0 A1 .1 D S1 d R1 C c", id="evaluation"),
    ],
)
def test_passes_without_overlap_or_backward(
    gloo_pools: GlooPools, trains: bool, overlap: bool, first: str, last: str
) -> None:
    events = gloo_pools(4).run(events_of_a_stage, routed_model("farskip"), STAGES, trains, overlap)
    assert events == [first, first, last, last]


def run_stages(
    config: ModelConfig, weights: Weights, experts: ExpertOptions, how: How, batch: Batch, frozen: str
) -> Outcome:
    """Run this stage's passes of a step, with messages between stages; as `run_case`. The cuts bound chunks."""
    layout = how.layout
    mesh = expert_mesh(config, layout.tensor, layout.experts, layout.stages)
    bounds = [range(*bound) for bound in itertools.pairwise((0, *how.cuts, config.num_layers))]
    chunks = bounds[mesh.pipeline.rank :: layout.stages]
    model = LanguageModel(config, mesh, how.options, chunks=chunks, dtype=torch.float64, experts=experts)
    fill_slices(model, weights)
    freeze(model, frozen)
    model.stack.side_queue = InlineQueue() if layout.queue else None
    engine: Any = Engine(model, None, mesh, CPU)  # type: ignore[arg-type]
    own = part_of_rank(batch, mesh.data)
    all_tokens = int(batch.lengths.sum())
    scales = LossScales(*(torch.tensor(1 / count, dtype=torch.float64) for count in (batch.targets, all_tokens, 1)))
    inputs: list[ModelInputs] = [
        (part.tokens, part.labels, part.loss_mask, None, part.lengths, None)
        for part in micro_batches(own, how.micro_batches)
    ]
    losses, sums = engine.run_passes(inputs, trains=True, scales=scales)
    assert model.stack.messages.stream is None, "messages of a pass are kept"
    loss = torch.stack([*losses, sums.losses.sum() / all_tokens]).sum().view(1)
    for group in (mesh.pipeline, mesh.data):
        group.all_reduce(loss)
        group.all_reduce(sums.loads)
    return Outcome(loss.item(), sums.loads.double().tolist(), summed_gradients(model))


LAYOUTS = {
    "ep1-dp2": Layout(2, 1, 1),
    "ep2": Layout(2, 1, 2),
    "ep4": Layout(4, 1, 4),
    "ep1-tp2": Layout(2, 2, 1),
    "ep2-tp2": Layout(2, 2, 2),
    "ep2-tp2-dp2": Layout(4, 2, 2),
    "ep4-tp2-ahead": Layout(4, 2, 4, queue=True),
}
PIPELINES = {
    "pp1": (1, ()),
    "pp2": (2, (2,)),
    "pp2-uneven": (2, (1,)),
    "pp2-interleaved": (2, (1, 2, 3)),
    "pp3": (3, (1, 3)),
    "pp3-uneven": (3, (1, 2)),
}
"""Stages, and the cuts between chunks."""


def cases() -> list[Any]:
    """Return every wiring in every layout and pipeline, with other options at random, in random order."""
    generator = random.Random(0)
    options = list(itertools.product((0, 4), (1, 2), VARIANTS, UNUSED))
    grid = [(*case, *generator.choice(options)) for case in itertools.product(MODELS, LAYOUTS, PIPELINES)]
    generator.shuffle(grid)
    return usual_share(grid, 12)


@pytest.mark.parametrize(("model", "layout", "pipeline", "recompute", "micro_batches", "variant", "unused"), cases())
def test_every_wiring_and_layout(
    gloo_pools: GlooPools,
    model: str,
    layout: str,
    pipeline: str,
    recompute: int,
    micro_batches: int,
    variant: str,
    unused: str,
) -> None:
    stages, cuts = PIPELINES[pipeline]
    overlap, losses = VARIANTS[variant]
    config = small_model(**MODELS[model])
    how = How(LAYOUTS[layout]._replace(stages=stages), overlap, recompute, cuts, micro_batches)
    check(gloo_pools, config, how, make_batch(config), UNUSED[unused], run=run_stages, **losses)


@pytest.mark.parametrize("layout", ["ep2", "ep4", "ep2-tp2"])
@pytest.mark.parametrize("model", ["farskip", "staleness-2"])
def test_a_micro_batch_of_one_token(gloo_pools: GlooPools, model: str, layout: str) -> None:
    """See `test_expert_parallel.py`."""
    config = small_model(**MODELS[model])
    how = How(LAYOUTS[layout]._replace(stages=3), "overlap", 0, (1, 2), 1)
    batch = make_batch(config, rows=how.layout.data, length=how.layout.tensor)
    check(gloo_pools, config, how, batch, (), "[qkv]_proj", run_stages, **PER_SEQUENCE)

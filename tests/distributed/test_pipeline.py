"""Pipeline stages: overlap of reduces at their border, gradients, the amount of computation, and logging."""

import contextlib
import io
import re
import weakref
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from megatron_ladder.data.loader import Sources
from megatron_ladder.engine.engine import ModelInputs
from megatron_ladder.engine.schedule import PassClock
from megatron_ladder.model.stats import PassStats
from megatron_ladder.train.log import RunLog, _stages, banner
from megatron_ladder.train.record import RunRecord
from megatron_ladder.train.setup import Trainer
from megatron_ladder.train.step import train_step
from tests.helpers.live_bytes import LiveBytes
from tests.helpers.pool import GlooPools
from tests.helpers.recording import RecordingGroup
from tests.helpers.steps import Batch, steps_of_batches
from tests.helpers.training import build_trainer_here, own_batches, run_of
from tests.reference import ReferenceConfig, Weights, make_weights

RECIPE = "--train-iters 5 --lr 1e-3 --micro-batch-size 2 --qk-layernorm".split()
STAGES = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2".split()


def record(trainer: Trainer) -> tuple[Trainer, list[str]]:
    """Return a trainer that records the events of this stage's stack, numbered within the stage, and the events.

    The events are launches and waits of reduces (`L3`, `W3`), starts of sub-blocks (`B3`), gradients of their first
    weights (`G3`), and sums of partial gradients (`S`).
    """
    stack = trainer.model.stack
    group = RecordingGroup(stack.mesh.tensor)
    stack.mesh = replace(stack.mesh, tensor=group)
    stack.layout = stack.mesh.stream
    stack.rewire(trainer.model.config.wired_layers)
    for number, step in enumerate(stack.sub_blocks()):
        step.norm.register_forward_pre_hook(lambda *_, number=number: group.events.append(f"B{number}"))
        names = ("in_proj.weight", "gate_up_proj.weight")
        first = next(parameter for name, parameter in step.body.named_parameters() if name.endswith(names))
        first.register_post_accumulate_grad_hook(lambda _, number=number: group.events.append(f"G{number}"))
    return replace(trainer, mesh=replace(trainer.mesh, tensor=group)), group.events


def events_of_a_step(argv: list[str], micro_batches: int) -> str:
    """On each rank: return the events of one step."""
    trainer, events = record(build_trainer_here(argv))
    train_step(trainer, own_batches(trainer, steps_of_batches(1, micro_batches)[0]), 1)
    return " ".join(events)


# Sub-blocks 0 to 3 of three ladder layers are on the first stage, 4 and 5 on the last, where they are 0 and 1.
FIRST_FORWARD = "B0 L0 B1 L1 W0 B2 L2 W1 B3 W2"
FIRST_BACKWARD = "L3 L4 G3 W3 L5 G2 W4 L6 G1 W5 L7 G0 W6 W7"
LAST_FORWARD = "L0 B0 L1 W0 B1 L2 W1 W2"
LAST_BACKWARD = "L3 G1 G0 W3"


@pytest.mark.parametrize("lanes", ["0", "2"])
def test_nothing_is_exposed_at_a_ladder_border(gloo_pools: GlooPools, lanes: str) -> None:
    """Forward: the last stage reduces the last output of the first stage (B3) under its first sub-block (L0).

    Backward: the last stage sends the gradient of that sub-block's input unreduced (no launch between G1 and the end),
    and the first stage reduces it (L3) under its first backward.
    """
    argv = [*RECIPE, *STAGES, *"--residual-mode ladder --lanes".split(), lanes]
    first, _, last, _ = gloo_pools(4).run(events_of_a_step, argv, 1)
    assert first == f"{FIRST_FORWARD} {FIRST_BACKWARD} S"
    assert last == f"{LAST_FORWARD} {LAST_BACKWARD} S"


def test_norms_at_a_border_are_summed_once_a_step(gloo_pools: GlooPools) -> None:
    argv = [*RECIPE, *STAGES, *"--residual-mode ladder --global-batch-size 6".split()]
    _, _, last, _ = gloo_pools(4).run(events_of_a_step, argv, 3)
    assert last.split().count("S") == 1 and last.endswith("S")
    assert last.split().count("B0") == last.split().count("G0") == 3


def test_norms_of_all_chunks_are_summed_once_a_step(gloo_pools: GlooPools) -> None:
    chunks = "--num-layers 4 --num-layers-per-virtual-pipeline-stage 1 --residual-mode ladder --global-batch-size 6"
    for events in gloo_pools(4).run(events_of_a_step, [*RECIPE, *STAGES, *chunks.split()], 3):
        assert events.split().count("S") == 1 and events.endswith("S")


class Operations(TorchDispatchMode):
    """Counts the floating-point operations of products with torch's formulas.

    torch's FlopCounterMode also tracks modules, and fails if an input requires a gradient without receiving one.
    """

    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func._overloadpacket in flop_registry:
            self.total += flop_registry[func._overloadpacket](*args, **(kwargs or {}), out_val=result)
        return result


def operations(argv: list[str], micro_batches: int) -> tuple[int, list[int]]:
    """On each rank: return the floating-point operations of a step, and how often each matrix received a gradient."""
    trainer = build_trainer_here(argv)
    backward_passes = {id(weight): 0 for weight in trainer.model.stack.parameters() if weight.dim() == 2}
    optimizer: Any = trainer.engine.optimizer
    add = optimizer._add

    def count(weight: Tensor, *args: Any) -> None:
        if id(weight) in backward_passes:
            backward_passes[id(weight)] += 1
        add(weight, *args)

    optimizer._add = count
    batches = own_batches(trainer, steps_of_batches(1, micro_batches)[0])
    with Operations() as operations:
        train_step(trainer, batches, 1)
    return operations.total, list(backward_passes.values())


@pytest.mark.parametrize("flags", ["--residual-mode ladder", "--recompute-granularity full --recompute-num-layers 1"])
@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_stages_need_no_additional_computation(gloo_pools: GlooPools, tensor_parallel: int, flags: str) -> None:
    """The operations of two stages add up to those of one stage."""
    argv = [*RECIPE, "--global-batch-size", "6", "--tensor-model-parallel-size", str(tensor_parallel), *flags.split()]
    whole = gloo_pools(tensor_parallel).run(operations, argv, 3)
    stages = gloo_pools(2 * tensor_parallel).run(operations, [*argv, "--pipeline-model-parallel-size", "2"], 3)
    assert sum(flops for flops, _ in stages) == sum(flops for flops, _ in whole) > 0
    for _, backward_passes in stages:
        assert backward_passes and set(backward_passes) == {3}


def logged(argv: list[str], weights: Weights | None, batch: list[Batch]) -> tuple[str, float, str]:
    """On each rank: return a step's log line, its loss, and the banner."""
    trainer = build_trainer_here(argv, weights)
    printing = contextlib.redirect_stdout(io.StringIO())
    with printing as printed, RunLog(trainer, 1, RunRecord(None)) as log:
        result = train_step(trainer, own_batches(trainer, batch), 1)
        log.training(1, result.loss, result)
    return printed.getvalue(), result.loss, banner(trainer, Sources(None, {}))


def test_only_rank_0_logs_the_loss_of_the_last_stage(gloo_pools: GlooPools) -> None:
    wiring = ["--residual-mode", "ladder", "--ladder-layers", "1"]
    windows = ["--window-size", "3", "--window-layers", "[1]"]
    argv = [*RECIPE, *STAGES, *wiring, *windows, "--global-batch-size", "8"]
    weights = make_weights(ReferenceConfig.like(run_of(argv, 4).model), seed=1, dtype=torch.float32)
    results = gloo_pools(4).run(logged, argv, weights, steps_of_batches(1, 4)[0])
    lines, losses, banners = zip(*results, strict=True)
    assert lines[1:] == ("", "", "") and len({*losses}) == 1
    assert lines[0].count("\n") == 1 and f"| lm loss {losses[0]:.4f} |" in lines[0]
    # Four micro-batches need five slots to pass two stages, and one slot of each stage is idle. Two chunks halve that.
    assert " ladder in layer 2 (of 3)\n" in banners[0]
    assert " attention in layers 0,2 (of 3); attention to 3 positions in layer 1 (of 3)\n" in banners[0]
    assert "layers 0-1, 2; the pipeline idles 20% of a step with 4 accumulation steps" in banners[0]


class StoppedClock(PassClock):
    """Shows fixed times: those without and with waits."""

    def __init__(self, busy: float, whole: float) -> None:
        super().__init__(is_cuda=False)
        self._seconds = busy, whole

    def seconds(self) -> tuple[float, float]:
        return self._seconds


def idle_shares(argv: list[str]) -> tuple[list[float | None], str]:
    """On each rank: return the idle shares of three steps, and log the last one; replace the clock after the second."""
    trainer = build_trainer_here(argv)
    batches = own_batches(trainer, steps_of_batches(1, 4)[0])
    rank = trainer.mesh.world.rank
    results = [train_step(trainer, batches, 1), train_step(trainer, batches, 2)]
    clock = trainer.engine.clock
    trainer.engine.run_passes(batches, trains=False)
    assert trainer.engine.clock is clock, "the clock of an evaluation replaced that of a step"
    trainer.engine.clock = StoppedClock(busy=5.0 - rank, whole=10.0 + rank)
    results.append(train_step(trainer, batches, 3))
    with contextlib.redirect_stdout(io.StringIO()) as printed, RunLog(trainer, 1, RunRecord(None)) as log:
        log.training(3, results[-1].loss, results[-1])
    return [result.pipeline_idle for result in results], printed.getvalue()


def logged_with_peak(argv: list[str], peak: float | None) -> str:
    """On each rank: return the log line of a step on devices of so many FLOP/s."""
    with patch("megatron_ladder.train.log.peak_flops", lambda name: peak):
        return logged(argv, None, steps_of_batches(1, 4)[0])[0]


def test_the_log_has_the_utilisation_of_all_devices(gloo_pools: GlooPools) -> None:
    argv = [*RECIPE, *STAGES, "--global-batch-size", "8"]
    line = gloo_pools(4).run(logged_with_peak, [*argv, "--bf16"], 1e9)[0]
    number, prefix, share = re.search(r"\| ([\d.]+) ([GM])FLOP/s .*\| MFU ([\d.]+)%", line).groups()
    rate = float(number) * {"G": 1e9, "M": 1e6}[prefix]
    assert float(share) == pytest.approx(100 * rate / 4e9, rel=0.01, abs=0.06)
    for flags, peak in ((["--bf16"], None), ([], 1e9)):
        (line,) = gloo_pools(1).run(logged_with_peak, [*RECIPE, "--global-batch-size", "8", *flags], peak)
        assert "lm loss" in line and "MFU" not in line


def test_the_idle_time_is_that_of_all_ranks_in_the_step_before(gloo_pools: GlooPools) -> None:
    """A step takes as long as on the first stage, whose two ranks are those of a tensor-parallel group."""
    results = gloo_pools(4).run(idle_shares, [*RECIPE, *STAGES, "--global-batch-size", "8"])
    (first, second, third), line = results[0]
    assert all(shares == [first, second, third] for shares, _ in results)
    assert first is None and 0 < second < 1
    assert third == pytest.approx(1 - (5 + 4 + 3 + 2) / 4 / 10.5)
    assert "s/step | pipeline idle 66.7% | ETA" in line
    shares, line = gloo_pools(2).run(idle_shares, [*RECIPE, "--global-batch-size", "8"])[0]
    assert shares == [None] * 3 and "idle" not in line


def test_the_banner_knows_chunks() -> None:
    interleaved = "--num-layers 4 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"
    run = run_of([*RECIPE, *interleaved.split(), "--global-batch-size", "8"], 2)
    assert _stages(run) == "layers 0, 1, 2, 3; the pipeline idles 11% of a step with 4 accumulation steps"
    # The only micro-batch passes four ranges one after the other, so that each stage works half of the time.
    run = run_of([*RECIPE, *interleaved.split(), "--global-batch-size", "2"], 2)
    assert _stages(run) == "layers 0, 1, 2, 3; the pipeline idles 50% of a step with 1 accumulation step"


def peak_of_a_step(argv: list[str], micro_batches: int) -> int:
    """On each rank: return the most bytes of tensors that a second step holds in addition to what it began with."""
    trainer = build_trainer_here([*argv, "--global-batch-size", str(2 * micro_batches)])
    batches = own_batches(trainer, steps_of_batches(1, micro_batches)[0])
    train_step(trainer, batches, 1)
    with LiveBytes() as memory:
        train_step(trainer, batches, 2)
    return memory.peak


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (2, "--pipeline-model-parallel-size 2 --residual-mode ladder"),
        (3, "--pipeline-model-parallel-size 3 --residual-mode ladder --tie-embeddings"),
        (2, "--pipeline-model-parallel-size 2 --num-layers 4 --num-layers-per-virtual-pipeline-stage 1"),
    ],
)
def test_memory_of_a_stage_does_not_grow_with_micro_batches(gloo_pools: GlooPools, ranks: int, words: str) -> None:
    few, many = (gloo_pools(ranks).run(peak_of_a_step, [*RECIPE, *words.split()], n * ranks) for n in (2, 8))
    for before, after in zip(few, many, strict=True):
        assert 0 < after <= 1.02 * before


def most_outputs_alive(argv: list[str], micro_batches: int) -> int:
    """On each rank: return the most states that chunks return whose memory a step holds at once."""
    trainer = build_trainer_here([*argv, "--global-batch-size", str(2 * micro_batches)])
    batches = own_batches(trainer, steps_of_batches(1, micro_batches)[0])
    alive, numbers = set[int](), []
    forward = trainer.engine.forward

    def noting(batch: ModelInputs, **options: Any) -> tuple[Tensor, PassStats]:
        leaving, stats = forward(batch, **options)
        if leaving.dim():
            identity = len(numbers)
            alive.add(identity)
            weakref.finalize(leaving.untyped_storage(), alive.discard, identity)
            numbers.append(len(alive))
        return leaving, stats

    with patch.object(trainer.engine, "forward", noting):
        train_step(trainer, batches, 1)
    assert not alive
    return max(numbers, default=0)


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (2, "--residual-mode standard"),
        (2, "--recompute-granularity full"),
        (2, "--num-experts 4 --moe-layers 0-3 --moe-aux-loss-coeff 0.01"),
        (4, "--tensor-model-parallel-size 2 --residual-mode ladder"),
        (4, "--tensor-model-parallel-size 2 --residual-mode ladder --sequence-parallel"),
        (4, "--tensor-model-parallel-size 2 --residual-mode desync --desync-interval 2"),
    ],
)
def test_a_state_that_was_sent_is_freed(gloo_pools: GlooPools, ranks: int, words: str) -> None:
    """Backward needs the graph behind it, not its numbers; the last one is under way while the next one is computed."""
    stages = "--pipeline-model-parallel-size 2 --num-layers 4 --num-layers-per-virtual-pipeline-stage 1"
    most = gloo_pools(ranks).run(most_outputs_alive, [*RECIPE, *stages.split(), *words.split()], 8)
    assert most == [2] * ranks

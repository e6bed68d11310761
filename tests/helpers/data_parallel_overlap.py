"""Measures how much of the data-parallel communication training hides: `python -m tests.helpers.data_parallel_overlap`.

Two processes of one core each train a small model in bf16 with ZeRO 1, over an emulated wire (`ladder_lab/link`) where
all reduces of a step together take half as long as the backward of its last micro-batch.
"""

import statistics
import time
from typing import NamedTuple

import torch

from ladder_lab.link.link import EmulatedLink
from megatron_ladder.comm.group import CommGroup
from megatron_ladder.train.step import train_step
from tests.helpers.pool import RankPool
from tests.helpers.steps import Batch
from tests.helpers.training import build_trainer_here, own_batches

ROUNDS = 9
MICRO_BATCHES = 2
ARGV = (
    "--train-iters 100 --lr 1e-3 --zero-stage 1 --micro-batch-size 1 --seq-length 256 --num-layers 8 --hidden-size 256 "
    f"--ffn-hidden-size 704 --vocab-size 512 --bf16 --global-batch-size {2 * MICRO_BATCHES}"
).split()


class Overlap(NamedTuple):
    """Medians over the rounds, in seconds."""

    backward: float
    """Backward of the last micro-batch, without a wire."""
    wire: float
    """All reduces of a step, one after another; the gathers of bf16 weights take half as long."""
    exposed: float
    """Waits of a step for reduces and gathers, beyond those without a wire."""


def _batches() -> list[Batch]:
    ids = torch.randint(0, 512, (2 * MICRO_BATCHES, 1, 257), generator=torch.Generator().manual_seed(1))
    return [(one[:, :-1], one[:, 1:], torch.ones(1, 256)) for one in ids]


def measure(rounds: int = ROUNDS) -> Overlap:
    """On each of two ranks: train with and without a wire in alternation."""
    links: list[EmulatedLink] = []

    def emulated(group: CommGroup) -> CommGroup:
        links.append(EmulatedLink(group, spin_seconds=0.1))
        return links[0]

    trainer = build_trainer_here(ARGV, wrap_data=emulated)
    (link,) = links
    batches = own_batches(trainer, _batches())
    backwards: list[float] = []
    inner = trainer.engine.backward

    def timed_backward(*args: object, **kwargs: object) -> object:
        begun = time.perf_counter()
        result = inner(*args, **kwargs)
        backwards.append(time.perf_counter() - begun)
        return result

    trainer.engine.backward = timed_backward

    def step(seconds_per_byte: float) -> tuple[float, float]:
        """Return the backward time of the last micro-batch, and the waits of the step and the next forward."""
        trainer.mesh.world.barrier()
        link.set_wire(0.0, seconds_per_byte)
        link.waited_seconds = 0.0
        train_step(trainer, batches, 1)
        backward = backwards[-1]
        trainer.engine.run_passes(batches[:1], trains=False)
        return backward, link.waited_seconds

    for _ in range(3):
        step(0.0)
    backward = statistics.median(step(0.0)[0] for _ in range(rounds))
    backward = float(trainer.mesh.world.all_reduce(torch.tensor(backward))) / 2
    # A reduce-scatter takes half of an all-reduce's time.
    num_bytes = sum(2 * bucket.weights.nbytes for bucket in trainer.engine.optimizer.buckets)
    wire = backward / 2
    exposed = []
    for _ in range(rounds):
        without, with_wire = (step(seconds_per_byte)[1] for seconds_per_byte in (0.0, 2 * wire / num_bytes))
        exposed.append(with_wire - without)
    link.close()
    return Overlap(backward, wire, statistics.median(exposed))


def main() -> None:
    pool = RankPool(2)
    try:
        found = pool.run(measure)
    finally:
        pool.close()
    for rank, one in enumerate(found):
        share = one.exposed / one.wire
        print(
            f"rank {rank}: backward {1e3 * one.backward:.1f} ms, reduces {1e3 * one.wire:.1f} ms, "
            f"exposed {1e3 * one.exposed:.1f} ms, {share:.0%} of the reduces"
        )


if __name__ == "__main__":
    main()

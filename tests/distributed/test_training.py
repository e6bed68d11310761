"""Whole optimizer steps with DeepSpeed in every layout, compared with a plain AdamW on a plain model."""

from pathlib import Path

import pytest

from megatron_ladder.train.step import train_step
from tests.helpers.live_bytes import LiveBytes
from tests.helpers.pool import GlooPools
from tests.helpers.steps import RECIPE, Batch, check_resume, check_steps, steps_of_batches
from tests.helpers.training import (
    build_trainer_here,
    own_batches,
)

LADDER = "--residual-mode ladder --ladder-layers 2 --qk-layernorm --add-attention-output-bias"
DESYNC = "--residual-mode desync --add-attention-output-bias --desync-interval"
"""Norm weights of every rank count in the gradient norm and do not decay, although they are rows of a matrix."""


@pytest.mark.parametrize(
    ("world", "words"),
    [
        (4, f"--tensor-model-parallel-size 4 --zero-stage 1 {LADDER}"),
        (2, f"--tensor-model-parallel-size 2 --zero-stage 0 --sequence-parallel --recompute-granularity full {LADDER}"),
        (4, f"--tensor-model-parallel-size 2 --zero-stage 1 --sequence-parallel {LADDER}"),
        (2, f"--tensor-model-parallel-size 2 --zero-stage 0 {DESYNC} 2"),
        (4, f"--tensor-model-parallel-size 2 --zero-stage 1 {DESYNC} 4"),
        (4, f"--tensor-model-parallel-size 4 --zero-stage 1 {DESYNC} 2"),
    ],
)
def test_steps_equal_a_plain_model(gloo_pools: GlooPools, world: int, words: str) -> None:
    """`test_zero.py` has more layouts and stages."""
    check_steps(gloo_pools, [*RECIPE, "--global-batch-size", "8", *words.split()], world)


def kept_for_backward(argv: list[str], batches: list[list[Batch]]) -> int:
    """On each rank: return the bytes that one forward pass keeps, including its output."""
    trainer = build_trainer_here(argv)
    kept: list[int] = []
    memory = LiveBytes()
    trainer.model.register_forward_pre_hook(lambda *_: memory.__enter__() and None, prepend=True)

    def end(*_: object) -> None:
        memory.__exit__(None, None, None)
        kept.append(memory.live)

    trainer.model.register_forward_hook(end)
    train_step(trainer, own_batches(trainer, batches[0]), 1)
    return kept[0]


@pytest.mark.parametrize(("mode", "recompute"), [("standard", False), ("ladder", True), ("ladder-parallel", False)])
def test_sequence_parallelism_keeps_less_memory(gloo_pools: GlooPools, mode: str, recompute: bool) -> None:
    """A sub-block keeps only a slice of the stream and of the normed stream, or with recomputation of the stream."""
    argv = [*RECIPE, "--tensor-model-parallel-size", "2", "--global-batch-size", "2", "--residual-mode", mode]
    argv += ["--recompute-granularity", "full"] if recompute else []
    batches = steps_of_batches(1, 1)
    whole, *_ = gloo_pools(2).run(kept_for_backward, argv, batches)
    cut, *_ = gloo_pools(2).run(kept_for_backward, [*argv, "--sequence-parallel"], batches)
    stream = 12 * 2 * 32 * 4
    sub_blocks = 3 if mode == "ladder-parallel" else 6
    # Half of each. The first norm of `standard` reads the output of the embedding, which is kept in either case.
    assert whole - cut >= sub_blocks * (1 if recompute else 2) * stream / 2


@pytest.mark.parametrize(("world", "precision"), [(2, "--zero-stage 0"), (4, "--bf16")])
def test_desync_resumes_bitwise(gloo_pools: GlooPools, tmp_path: Path, world: int, precision: str) -> None:
    argv = [*RECIPE, *precision.split(), *"--tensor-model-parallel-size 2 --global-batch-size 8".split()]
    check_resume(gloo_pools, tmp_path, [*argv, "--residual-mode", "desync", "--desync-interval", "4"], world)

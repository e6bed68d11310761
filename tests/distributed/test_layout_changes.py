"""A run that continues in several other layouts, including its optimizer."""

from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_ladder.train.step import train_step
from tests.helpers.pool import GlooPools
from tests.helpers.steps import DELTA, Batch, everything, launch_of, steps_of_batches
from tests.helpers.training import build_trainer_here, load_trainer, own_batches, save_trainer

RECIPE = (
    "--lr 1e-3 --clip-grad 0.5 --weight-decay 0.1 --micro-batch-size 2 --global-batch-size 4 --train-iters 100 "
    "--residual-mode ladder"
).split()
HYBRID = "--ladder-layers 1,2 --qk-layernorm --tie-embeddings"
EXPERTS = (
    f"{HYBRID} --num-experts 8 --moe-ffn-hidden-size 16 --moe-layers 1-2 --moe-shared-expert-intermediate-size 16 "
    "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-aux-loss-coeff 0.01"
)
BIASES = "--qk-layernorm --add-mlp-bias"
# A pipeline allows ZeRO 0 and 1.
LONG = ["2x1x1 --zero-stage 1", "1x2x1 --zero-stage 1", "1x1x2 --zero-stage 2", "1x1x2 --zero-stage 3"]
TO_EXPERTS = "2x2x1 --zero-stage 1 --expert-sharding experts"
EXCHANGED = [
    "1x1x2 --zero-stage 1 --expert-model-parallel-size 2",
    "2x1x2 --zero-stage 1 --expert-model-parallel-size 4 --sequence-parallel",
    "1x1x1 --zero-stage 0",
    "2x2x1 --zero-stage 0 --expert-model-parallel-size 2 --sequence-parallel",
]
"""Experts over data-parallel ranks, over both kinds, on one rank, and over tensor-parallel ranks of stages."""
WHOLE, SHARDED, OFFLOADED = (
    "1x1x1 --zero-stage 0",
    "2x1x2 --zero-stage 3",
    "2x1x1 --zero-stage 3 --offload-optimizer cpu",
)
INTERLEAVED = "--num-layers-per-virtual-pipeline-stage 1"
LANES = "--lanes 4 --num-key-value-heads 4"
"""A rank of the first layout computes one lane, and the ranks of the others two or all four."""
OF_KEY_HEADS = ["4x1x1 --zero-stage 1", WHOLE, "2x2x1", "1x1x2 --zero-stage 2"]
"""Two ranks of the first layout have the same key head, of attention and of the delta rule."""
OF_LANES = ["4x1x1 --zero-stage 1", WHOLE, "2x1x2 --zero-stage 1", "4x1x1 --zero-stage 1"]


def stay(
    argv: list[str], batches: list[list[Batch]], first: int, load: Path | None, saves: tuple[Path, Path]
) -> tuple[list[float], int]:
    """On each rank: save the loaded state, take steps from `first` on, and save before the last one.

    Returns the losses, and the steps that AdamW knew of once it had loaded.
    """
    # Another seed: loading must replace all initial weights.
    trainer = build_trainer_here([*argv, "--seed", "1" if load is None else "99"])
    if load is not None:
        load_trainer(trainer, load)
        save_trainer(trainer, saves[0], first - 1)
    losses, steps = [], trainer.engine.optimizer.steps_taken()
    for iteration, batch in enumerate(batches, start=first):
        if iteration == first + len(batches) - 1:
            save_trainer(trainer, saves[1], iteration - 1)
        loss = train_step(trainer, own_batches(trainer, batch), iteration).loss
        # Sums over ranks are in fp64, sums over micro-batches in fp32; rounded, they agree for two terms.
        losses.append(float(np.float32(loss)))
    return losses, steps


@pytest.mark.parametrize(
    ("words", "steps", "journey"),
    [
        pytest.param(HYBRID, 10, [*LONG, "2x2x1 --zero-stage 1"], id="fp32", marks=pytest.mark.slow),
        pytest.param(f"{HYBRID} --bf16", 2, [*LONG, "2x2x1 --zero-stage 1"], id="bf16"),
        pytest.param(EXPERTS, 1, [*LONG, TO_EXPERTS], id="experts"),
        pytest.param(EXPERTS, 1, EXCHANGED, id="experts over data-parallel ranks"),
        pytest.param(BIASES, 1, [SHARDED, WHOLE, SHARDED], id="ZeRO 3 to one rank"),
        pytest.param(
            BIASES,
            1,
            ["1x1x2 --zero-stage 2", OFFLOADED, "1x1x2 --zero-stage 2"],
            id="ZeRO 2 to offloading",
            marks=pytest.mark.slow,
        ),
        pytest.param(f"{BIASES} --bf16", 1, [LONG[-1], "2x1x2 --zero-stage 1", LONG[-1]], id="bf16, ZeRO 3 to ZeRO 1"),
        pytest.param(
            f"{HYBRID} --num-layers 4",
            1,
            [f"1x2x1 {INTERLEAVED}", "1x2x1", f"2x2x1 {INTERLEAVED}", "1x1x2 --zero-stage 3"],
            id="schedules",
        ),
        pytest.param(DELTA, 1, OF_KEY_HEADS, id="DeltaNet"),
        pytest.param(f"{DELTA} --optimizer muon", 1, OF_KEY_HEADS, id="DeltaNet, Muon", marks=pytest.mark.slow),
        pytest.param(LANES, 1, OF_LANES, id="lanes", marks=pytest.mark.slow),
        pytest.param(f"{LANES} --optimizer muon", 1, OF_LANES, id="lanes, Muon"),
        pytest.param(
            "--add-mlp-bias --optimizer muon", 1, [WHOLE, "2x1x2 --zero-stage 1", "2x2x1", "2x1x1"], id="Muon"
        ),
    ],
)
def test_a_run_continues_in_several_layouts(
    gloo_pools: GlooPools, tmp_path: Path, words: str, steps: int, journey: list[str]
) -> None:
    """Every layout saves bitwise the state that it has loaded, and the losses are those of a single run."""
    batches = steps_of_batches(steps * len(journey) + 1, 2)

    def take_steps(place: str, first: int, count: int, load: Path | None, saves: tuple[Path, Path]) -> list[float]:
        layout, _, flags = place.partition(" ")
        world, argv = launch_of(layout, words, flags)
        found = gloo_pools(world).run(stay, [*RECIPE, *argv], batches[first : first + count], first + 1, load, saves)
        assert [taken for _, taken in found] == [first] * world
        return found[0][0]

    unchanged = take_steps(journey[0], 0, len(batches), None, (tmp_path / "none", tmp_path / "end"))
    load, before, tensor_parallel = None, None, journey[0][0]
    for number, place in enumerate(journey):
        first = steps * number
        saves = tmp_path / f"{number}.loaded", tmp_path / f"{number}.saved"
        losses = take_steps(place, first, steps + 1, load, saves)
        if load is not None:
            carried, loaded = everything(load), everything(saves[0])
            assert carried.keys() == loaded.keys() and all(torch.equal(carried[key], loaded[key]) for key in carried)
            squares = {name: values for (name, kind), values in carried.items() if kind == "exp_avg_sq"}
            assert any(values.any() for values in squares.values())
            # Muon has no second moments of matrices.
            assert ("layers.0.attention.q_proj.weight" in squares) == ("muon" not in words)
        if before is not None:
            # More tensor-parallel ranks round partial sums differently.
            exact, tolerance = place[0] == tensor_parallel, 2e-2 if "--bf16" in words else 1e-6
            assert losses[0] == (before if exact else pytest.approx(before, rel=tolerance))
        if "--bf16" not in words:
            assert losses == pytest.approx(unchanged[first : first + steps + 1], rel=1e-5)
        load, before, tensor_parallel = saves[1], losses[-1], place[0]

"""A run that continues in several other layouts, including its optimizer."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from torch import equal

from megatron_ladder.train.step import train_step
from tests.helpers.pool import GlooPools
from tests.helpers.steps import Batch, everything, steps_of_batches
from tests.helpers.training import build_trainer_here, load_trainer, own_batches, save_trainer

RECIPE = (
    "--lr 1e-3 --clip-grad 0.5 --weight-decay 0.1 --micro-batch-size 2 --global-batch-size 4 --train-iters 100 "
    "--residual-mode ladder --ladder-layers 1,2 --qk-layernorm --tie-embeddings"
).split()
EXPERTS = (
    "--num-experts 8 --moe-ffn-hidden-size 16 --moe-layers 1-2 --moe-shared-expert-intermediate-size 16 "
    "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-aux-loss-coeff 0.01"
)


class Stay(NamedTuple):
    """A layout (TP, PP, DP) in which the run takes some steps."""

    layout: tuple[int, int, int]
    zero_stage: int

    @property
    def flags(self) -> list[str]:
        tensor, stages, _ = self.layout
        sizes = f"--tensor-model-parallel-size {tensor} --pipeline-model-parallel-size {stages}"
        return f"{sizes} --zero-stage {self.zero_stage}".split()

    @property
    def world(self) -> int:
        tensor, stages, data = self.layout
        return tensor * stages * data


# A pipeline allows ZeRO 0 and 1.
JOURNEY = [Stay((2, 1, 1), 1), Stay((1, 2, 1), 1), Stay((1, 1, 2), 2), Stay((1, 1, 2), 3), Stay((2, 2, 1), 1)]


def stay(
    argv: list[str], batches: list[list[Batch]], first: int, load: Path | None, saves: tuple[Path, Path]
) -> list[float]:
    """On each rank: save the loaded state, take steps from `first` on, and save before the last one.

    Returns the losses.
    """
    # Another seed: loading must replace all initial weights.
    trainer = build_trainer_here([*argv, "--seed", "1" if load is None else "99"])
    if load is not None:
        load_trainer(trainer, load)
        save_trainer(trainer, saves[0], first - 1)
    losses = []
    for iteration, batch in enumerate(batches, start=first):
        if iteration == first + len(batches) - 1:
            save_trainer(trainer, saves[1], iteration - 1)
        loss = train_step(trainer, own_batches(trainer, batch), iteration).loss
        # Sums over ranks are in fp64, sums over micro-batches in fp32; rounded, they agree for two terms.
        losses.append(float(np.float32(loss)))
    return losses


@pytest.mark.parametrize(
    ("words", "steps", "tolerance"),
    [
        pytest.param("", 10, 1e-6, id="fp32", marks=pytest.mark.slow),
        pytest.param("--bf16", 2, 2e-2, id="bf16"),
        pytest.param(EXPERTS, 1, 1e-6, id="experts"),
    ],
)
def test_a_run_continues_in_several_layouts(
    gloo_pools: GlooPools, tmp_path: Path, words: str, steps: int, tolerance: float
) -> None:
    """Every layout saves bitwise the state that it has loaded, and the losses are those of a single run."""
    argv = [*RECIPE, *words.split()]
    batches = steps_of_batches(steps * len(JOURNEY) + 1, 2)
    unchanged = gloo_pools(2).run(
        stay, [*argv, *JOURNEY[0].flags], batches, 1, None, (tmp_path / "none", tmp_path / "end")
    )[0]
    load, before, tensor_parallel = None, None, 2
    for number, place in enumerate(JOURNEY):
        first, flags = steps * number, place.flags
        if words == EXPERTS and number == len(JOURNEY) - 1:
            flags += ["--expert-sharding", "experts"]
        saves = tmp_path / f"{number}.loaded", tmp_path / f"{number}.saved"
        losses = gloo_pools(place.world).run(
            stay, [*argv, *flags], batches[first : first + steps + 1], first + 1, load, saves
        )[0]
        if load is not None:
            carried, loaded = everything(load), everything(saves[0])
            assert carried.keys() == loaded.keys() and all(equal(carried[key], loaded[key]) for key in carried)
        if before is not None:
            # More tensor-parallel ranks round partial sums differently.
            exact = place.layout[0] == tensor_parallel
            assert losses[0] == (before if exact else pytest.approx(before, rel=tolerance))
        if words != "--bf16":
            assert losses == pytest.approx(unchanged[first : first + steps + 1], rel=1e-5)
        load, before, tensor_parallel = saves[1], losses[-1], place.layout[0]

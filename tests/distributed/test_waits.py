"""The host waits for the device once per training step: whatever else it reads or sends would idle the device."""

import pytest

from tests.helpers.pool import GlooPools
from tests.helpers.steps import RECIPE
from tests.helpers.waits import waits_of_steps


@pytest.mark.parametrize(
    ("words", "world"),
    [
        ("--tensor-model-parallel-size 2 --residual-mode ladder", 2),
        ("--tensor-model-parallel-size 2 --sequence-parallel --zero-stage 1 --bf16 --z-loss-coeff 1e-4", 2),
        ("--zero-stage 2 --bf16 --residual-mode ladder", 2),
        ("--zero-stage 3 --bf16 --residual-mode ladder", 2),
        ("--pipeline-model-parallel-size 2 --tie-embeddings --bf16", 2),
    ],
)
def test_host_waits_once_per_step(gloo_pools: GlooPools, words: str, world: int) -> None:
    argv = [*RECIPE, *words.split(), "--global-batch-size", "8"]
    for places in gloo_pools(world).run(waits_of_steps, argv):
        for of_step in places:
            assert len(of_step) == 1, "\n".join(of_step)

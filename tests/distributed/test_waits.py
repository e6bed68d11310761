"""The host waits for the device once per training step: whatever else it reads or sends would idle the device.

With ZeRO 3, DeepSpeed also waits for the last reduces of every micro-batch, and after a step for the gather of small
parameters.
"""

import pytest

from tests.helpers.pool import GlooPools
from tests.helpers.steps import RECIPE
from tests.helpers.waits import waits_of_steps

EXPERTS = "--num-experts 4 --moe-ffn-hidden-size 16 --moe-aux-loss-coeff 1e-2 --moe-router-enable-expert-bias"


@pytest.mark.parametrize(
    ("words", "of_deepspeed"),
    [
        ("--tensor-model-parallel-size 2 --residual-mode ladder", 0),
        ("--tensor-model-parallel-size 2 --sequence-parallel --zero-stage 1 --bf16 --z-loss-coeff 1e-4", 0),
        ("--zero-stage 2 --bf16 --residual-mode ladder --reset-attention-mask --reset-position-ids", 0),
        ("--zero-stage 3 --bf16 --residual-mode ladder", 3),
        ("--pipeline-model-parallel-size 2 --tie-embeddings --bf16 --reset-attention-mask", 0),
        (f"--tensor-model-parallel-size 2 --bf16 {EXPERTS}", 0),
        (f"--zero-stage 0 --recompute-granularity full --residual-mode farskip {EXPERTS}", 0),
    ],
)
def test_host_waits_once_per_step(gloo_pools: GlooPools, words: str, of_deepspeed: int) -> None:
    argv = [*RECIPE, *words.split(), "--global-batch-size", "8"]
    for places in gloo_pools(2).run(waits_of_steps, argv):
        for of_step in places:
            named = [place for place in of_step if "/deepspeed/" in place.split(" < ")[0]]
            assert (len(named), len(of_step)) == (of_deepspeed, 1 + of_deepspeed), "\n".join(of_step)


@pytest.mark.parametrize("words", ["--bf16", "--residual-mode farskip --recompute-granularity full --bf16"])
def test_the_host_reads_how_many_tokens_arrive_in_forward_only(gloo_pools: GlooPools, words: str) -> None:
    """Two micro-batches have three routed layers each. With a fixed number of rows, the host does not read it."""
    argv = [*RECIPE, *f"{EXPERTS} {words} --global-batch-size 8 --expert-model-parallel-size 2".split()]
    for capacity, counts in (([], 2 * 3), (["--moe-expert-capacity", "24"], 0)):
        for places in gloo_pools(2).run(waits_of_steps, [*argv, *capacity]):
            for of_step in places:
                of_counts = [place for place in of_step if "/model/experts.py" in place.split(" < ")[0]]
                assert (len(of_counts), len(of_step)) == (counts, 1 + counts), "\n".join(of_step)

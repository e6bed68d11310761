"""Gradients of which tensor-parallel ranks have parts are summed once per step, together."""

import re
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_ladder.comm.group import CommGroup
from megatron_ladder.train.step import train_step
from tests.helpers.pairwise import usual_share
from tests.helpers.pool import GlooPools
from tests.helpers.steps import LATENT, RECIPE, launch_of, steps_of_batches
from tests.helpers.training import build_trainer_here, own_batches, run_of
from tests.reference import ReferenceConfig, make_weights

LATENTS = f"{LATENT} --q-lora-rank 12 --residual-mode ladder"
OF_LATENTS = r"(q|kv)_a_(proj|norm)\.weight"
EXPERTS = "--num-experts 4 --moe-ffn-hidden-size 16 --residual-mode farskip"


def summed_elements(argv: list[str], micro_batches: int) -> list[int]:
    """On each rank: return the number of elements of each all-reduce over tensor-parallel ranks in a step."""
    trainer = build_trainer_here(argv)
    batches = own_batches(trainer, steps_of_batches(1, micro_batches * trainer.mesh.data.size)[0])
    groups = [group for group in (trainer.mesh.tensor, *trainer.mesh.head_replicas.values()) if group.size > 1]
    found: list[int] = []

    def recorded(name: str) -> Any:
        run = getattr(CommGroup, name)

        def all_reduce(group: CommGroup, tensor: torch.Tensor, *options: Any) -> Any:
            if group in groups:
                found.append(tensor.numel())
            return run(group, tensor, *options)

        return mock.patch.object(CommGroup, name, all_reduce)

    with recorded("all_reduce"), recorded("start_all_reduce"):
        train_step(trainer, batches, 1)
    return found


@pytest.mark.parametrize(
    ("layout", "flags", "partial"),
    usual_share(
        [
            ("2x1x1", LATENTS, OF_LATENTS),
            ("2x1x1", f"{LATENTS} --no-tp-overlap --bf16", OF_LATENTS),
            ("2x1x2", f"{LATENTS} --zero-stage 1 --sequence-parallel", rf"{OF_LATENTS}|norm\.weight"),
            ("2x1x2", f"{LATENTS} --zero-stage 0 --recompute-granularity full", OF_LATENTS),
            ("2x1x2", f"{LATENTS} --zero-stage 2 --optimizer muon", OF_LATENTS),
            ("2x1x2", f"{LATENTS} --zero-stage 3", OF_LATENTS),
            # The last stage, of one layer, passes on the gradient of its first read unreduced.
            ("2x2x1", LATENTS, rf"{OF_LATENTS}|layers\.2\.attention_norm"),
            ("2x1x1", f"{EXPERTS} --qk-layernorm", r"router|[qk]_norm\.weight"),
            ("4x1x1", "--add-qkv-bias", r"[kv]_proj\.(weight|bias)"),
        ],
        2,
    ),
)
def test_partial_gradients_are_summed_once_a_step(gloo_pools: GlooPools, layout: str, flags: str, partial: str) -> None:
    world, argv = launch_of(layout, *RECIPE, flags)
    tensor, _, data = map(int, layout.split("x"))

    def summed(micro_batches: int) -> list[list[int]]:
        size = str(2 * data * micro_batches)
        return gloo_pools(world).run(summed_elements, [*argv, "--global-batch-size", size], micro_batches)

    last = []
    for one, four in zip(summed(1), summed(4), strict=True):
        assert len(four) == 4 * (len(one) - 1) + 1
        assert four[-1] == one[-1]
        last.append(one[-1])
    weights = make_weights(ReferenceConfig.like(run_of(argv, world).model), seed=1)
    whole = sum(weight.numel() for name, weight in weights.items() if re.search(partial, name))
    holders = 2 if tensor == 4 else tensor
    # The data-parallel ranks divide them, except in stage 0.
    assert sum(last) == whole * holders * (data if "--zero-stage 0" in flags else 1)

"""Drafting heads: loss and gradients in every layout, compared with plain arithmetic."""

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ladder.blueprint.flops import ModelFlops
from megatron_ladder.blueprint.tensors import active_parameters, model_tensors, parameter_count
from megatron_ladder.checkpoint.format import Checkpoint
from megatron_ladder.engine.build import partition
from megatron_ladder.model.mtp import shift_targets, shift_tokens
from megatron_ladder.parallel.vocabulary import IGNORED
from tests.distributed.test_checkpoint_saver import saver_of
from tests.distributed.test_correctness import (
    ATTENTIONS,
    LAYOUTS,
    OWN_STREAMS,
    VARIANTS,
    WIRINGS,
    How,
    check,
    make_batch,
)
from tests.helpers.pairwise import pairwise, usual_share
from tests.helpers.pool import GlooPools
from tests.helpers.sharded import Pieces, small_model
from tests.helpers.steps import (
    DELTA,
    GENTLE_RECIPE,
    LATENT,
    RECIPE,
    check_outcome,
    check_resume,
    everything,
    launch_of,
    plain_steps,
    train,
    with_drafting_loss,
)
from tests.helpers.training import run_of, save_trainer, weight_pieces

EXPERTS = (
    "--num-experts 8 --moe-ffn-hidden-size 16 --moe-layers 1,2 --moe-router-score-function sigmoid "
    "--moe-router-enable-expert-bias --moe-router-bias-update-rate 0.05 --moe-aux-loss-coeff 0.05"
)
HEAD = {"mtp_num_layers": 1}
HEADS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "usual": ({}, {"mtp_loss_scaling_factor": 0.3}),
    "before-norm": ({"mtp_before_final_norm": True}, {"mtp_loss_scaling_factor": 2.0}),
    "detached": ({"tie_embeddings": True}, {"mtp_loss_scaling_factor": 1.0, "mtp_detach_heads": True}),
    "capped": ({"logit_soft_cap": 1.5}, {"mtp_loss_scaling_factor": 1.0}),
    "three deep": ({}, {"mtp_loss_scaling_factor": 1.0, "mtp_depths": 3}),
}
"""Changes of the model, and how it trains."""


PASSES: dict[str, tuple[int, tuple[int, ...], int, str]] = {
    "kept": (0, (1, 3), 1, "overlap"),
    "recomputed": (9, (), 2, "forward-overlap"),
    "cut": (2, (2,), 2, "blocking"),
}
"""Recomputed layers, where the layers are cut, micro-batches, and the variant."""


@pytest.mark.parametrize(
    ("wiring", "layout", "attention", "passes", "head"),
    pairwise(
        ["hybrid", "ladder-parallel", "experts-ladder", "farskip"],
        LAYOUTS,
        {name: ATTENTIONS[name] for name in ("windows", "sinks", "delta-one-key", "latent-queries")},
        list(PASSES),
        list(HEADS),
    ),
)
def test_every_wiring_and_layout(
    gloo_pools: GlooPools, wiring: str, layout: tuple[int, str], attention: dict[str, Any], passes: str, head: str
) -> None:
    recompute, cuts, micro_batches, variant = PASSES[passes]
    overlap, sharding, losses = VARIANTS[variant]
    changes, training = HEADS[head]
    config = small_model(**WIRINGS[wiring] | attention | changes | HEAD)
    how = How(*layout, sharding, overlap, recompute, cuts, micro_batches)
    check(gloo_pools, config, how, make_batch(config), **losses, **training)


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        ("1x1x1", "--zero-stage 0"),
        ("2x1x2", "--zero-stage 1 --residual-mode ladder --sequence-parallel --recompute-granularity full"),
        ("1x2x2", "--zero-stage 0 --residual-mode ladder"),
        # Both ranks have words.
        ("2x2x1", "--zero-stage 0 --residual-mode ladder --sequence-parallel --vocab-size 400"),
        ("2x2x1", "--zero-stage 1 --tie-embeddings --mtp-detach-heads --pipeline-partition parameters"),
        ("1x2x2", "--zero-stage 1 --mtp-detach-heads --residual-mode ladder-parallel"),
        ("1x4x1", "--num-layers 6 --pipeline-partition parameters --mtp-before-final-norm"),
        ("2x1x1", f"{DELTA} --zero-stage 1"),
        ("2x2x1", f"{LATENT} --residual-mode ladder --ladder-layers 1"),
        ("1x2x2", f"{EXPERTS} --residual-mode farskip"),
        ("1x1x2", "--zero-stage 2 --residual-mode ladder --mtp-depths 2"),
        ("1x1x2", "--zero-stage 3 --residual-mode ladder --tie-embeddings"),
        ("1x2x1", "--num-layers 4 --num-layers-per-virtual-pipeline-stage 1 --residual-mode ladder"),
        ("2x1x2", f"{EXPERTS} --zero-stage 3 --sequence-parallel"),
        ("1x2x2", f"{EXPERTS} --expert-model-parallel-size 2 --residual-mode ladder"),
        ("2x1x2", "--zero-stage 1 --mtp-depths 3 --residual-mode ladder --sequence-parallel"),
        ("1x2x1", "--num-layers 4 --num-layers-per-virtual-pipeline-stage 1 --mtp-depths 2 --tie-embeddings"),
        ("2x1x1", f"{EXPERTS} --zero-stage 3 --mtp-depths 2 --mtp-detach-heads"),
        ("1x2x2", f"{EXPERTS} --expert-model-parallel-size 2 --residual-mode farskip --mtp-depths 3"),
        ("2x1x2", f"{EXPERTS} --expert-model-parallel-size 4 --residual-mode farskip --sequence-parallel"),
    ],
)
def test_steps_equal_a_plain_model(gloo_pools: GlooPools, layout: str, words: str) -> None:
    """With several stages, the last one has a copy of the embedding, even if the output head is another matrix."""
    world, argv = launch_of(layout, f"--mtp-num-layers 1 --mtp-loss-scaling-factor 0.5 {words}")
    argv = [*GENTLE_RECIPE, *argv]
    weights, batches, expected, final = plain_steps(argv, world, with_drafting_loss)
    results = gloo_pools(world).run(train, argv, weights, batches)
    # The fast decays of gated DeltaNet cost digits in fp32: one rank's gradient norm is off by 0.9e-6, too.
    check_outcome(results, expected, final, tolerance=1e-5 if DELTA in words else 1e-6)


@pytest.mark.parametrize("name", usual_share(OWN_STREAMS, 3))
def test_separate_streams(gloo_pools: GlooPools, name: str) -> None:
    ranks, changes = OWN_STREAMS[name]
    config = small_model(**changes | HEAD)
    check(gloo_pools, config, How(ranks, "", "width", "overlap", 0, (1, 3), 2), make_batch(config))


def test_resumed_steps_equal_uninterrupted_ones_bitwise(gloo_pools: GlooPools, tmp_path: Path) -> None:
    world, argv = launch_of(
        "1x2x2", "--global-batch-size 8 --residual-mode ladder --mtp-num-layers 1 --mtp-depths 2 --bf16"
    )
    check_resume(gloo_pools, tmp_path, [*RECIPE, *argv], world)


def saved(argv: list[str], load: Path | None, save: Path) -> Pieces:
    """On each rank: start with the weights of a checkpoint as a run with --finetune does, take no step, and save."""
    words = [] if load is None else ["--load", str(load), "--finetune", "--seed", "99"]
    trainer, saver, _ = saver_of([*argv, *words], None if load is None else Checkpoint.open(load))
    if load is not None:
        saver.resume()
    save_trainer(trainer, save, 1)
    return weight_pieces(trainer)


def test_a_head_starts_from_scratch_or_is_left_out(gloo_pools: GlooPools, tmp_path: Path) -> None:
    plain, headed, dropped = (tmp_path / name for name in ("plain", "headed", "dropped"))
    layout = ["--pipeline-model-parallel-size", "2", "--residual-mode", "ladder"]
    gloo_pools(2).run(saved, layout, None, plain)
    fresh = gloo_pools(2).run(saved, [*layout, "--mtp-num-layers", "1"], plain, headed)
    gloo_pools(1).run(saved, ["--residual-mode", "ladder"], headed, dropped)
    (initial,) = gloo_pools(1).run(
        saved, ["--residual-mode", "ladder", "--mtp-num-layers", "1", "--seed", "99"], None, tmp_path / "x"
    )
    before, after = everything(plain), everything(headed)
    assert {key: after[key] for key in before}.keys() == before.keys()
    assert all(torch.equal(after[key], before[key]) for key in before if key[1] == "weight")
    assert all(torch.equal(values, before[key]) for key, values in everything(dropped).items() if key[1] == "weight")
    of_head = {name: values for name, _, values in initial if name.startswith("layers.3.")}
    assert len(of_head) == 13 and all(torch.equal(after[name, "weight"], values) for name, values in of_head.items())
    # Both stages have the embedding of the checkpoint.
    copies = [values for pieces in fresh for name, _, values in pieces if name == "embedding.weight"]
    assert len(copies) == 2 and torch.equal(*copies)


@pytest.mark.parametrize("words", ["", "--tie-embeddings", f"{EXPERTS} --moe-layers 0-3"])
def test_a_head_counts_in_parameters_flops_and_stages(words: str) -> None:
    h, v, s = 32, 101, 64
    arguments = [
        *RECIPE,
        *words.split(),
        "--num-layers",
        "4",
        "--pipeline-partition",
        "parameters",
        "--pipeline-model-parallel-size",
        "2",
    ]
    plain, headed = (run_of([*arguments, *more], 2) for more in ([], ["--mtp-num-layers", "1"]))
    before, after = (parameter_count(run.model) for run in (plain, headed))
    of_head = before.layers[-1] + 3 * h + 2 * h * h
    assert after == before._replace(mtp=of_head) and after.total == before.total + of_head
    assert sum(tensor.numel for tensor in model_tensors(headed.model)) == after.total
    flops, more_flops = (ModelFlops(run.model, s) for run in (plain, headed))
    assert more_flops.layers == (*flops.layers, flops.layers[-1])
    of_depth = flops.layers[-1] + 2 * s * (h * v + 2 * h * h)
    assert more_flops.forward == flops.forward + of_depth
    assert ModelFlops(headed.model, s, mtp_depths=3).forward == flops.forward + 3 * of_depth
    unused = 6 * 3 * h * 16 if EXPERTS in words else 0
    assert active_parameters(headed.model) - active_parameters(plain.model) == of_head - unused
    # The head is more than a layer.
    assert [len(layers) for layers in partition(plain)] == [2, 2]
    assert [len(layers) for layers in partition(headed)] == [3, 1]


def test_the_shift_stays_inside_documents() -> None:
    labels, mask = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]]), torch.tensor([[1.0, 0, 1, 1], [1, 1, 1, 0.5]])
    # The documents are tokens 0 and 1, 2 and 3, 0, and 1 to 3 of the rows.
    bounds = torch.tensor([0, 2, 4, 5, 8], dtype=torch.int32)
    shifted, weights = shift_targets(labels, mask, bounds)
    no = IGNORED
    assert shifted.tolist() == [[2, no, 4, no], [no, 7, 8, no]]
    assert weights is not None and weights.tolist() == [[0, 0, 1, 0], [0, 1, 0.5, 0]]
    shifted, weights = shift_targets(shifted, weights, bounds)
    assert shifted.tolist() == [[no, no, no, no], [no, 8, no, no]]
    assert weights is not None and weights.tolist() == [[0, 0, 0, 0], [0, 0.5, 0, 0]]
    shifted, weights = shift_targets(labels, None, None)
    assert shifted.tolist() == [[2, 3, 4, no], [6, 7, 8, no]] and weights is None
    assert shift_tokens(labels).tolist() == [[2, 3, 4, 0], [6, 7, 8, 0]]

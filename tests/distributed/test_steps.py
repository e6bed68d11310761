"""Whole optimizer steps in every layout, compared with a plain AdamW on a plain model, and resumed."""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DeepseekV3ForCausalLM, PreTrainedModel, Qwen3MoeForCausalLM

from megatron_ladder.blueprint.tensors import model_tensors
from megatron_ladder.checkpoint.hf_directory import open_hf_directory
from megatron_ladder.train.step import Evaluation, evaluate, train_step
from tests.helpers.hugging_face import Family, transformers_model
from tests.helpers.live_bytes import LiveBytes
from tests.helpers.pairwise import pairwise, usual_share
from tests.helpers.pool import GlooPools
from tests.helpers.steps import (
    DELTA,
    GENTLE_RECIPE,
    LATENT,
    RECIPE,
    Batch,
    check_outcome,
    check_resume,
    launch_of,
    plain_steps,
    steps_of_batches,
    torch_steps,
    train,
    with_drafting_loss,
    with_extra_losses,
)
from tests.helpers.training import build_trainer_here, own_batches, run_of
from tests.reference import ReferenceConfig, Weights, make_weights, reference_loss
from tests.reference.mtp import confirmed_drafts, drafting_loss, drafting_targets
from tests.unit.convert.saved_models import save_model
from tests.unit.convert.test_hybrid_types import CASES as HYBRIDS

# With two stages, the first one has layers 0 and 1 of the three.
WIRINGS = {
    "standard": "--residual-mode standard --tie-embeddings --add-mlp-bias",
    "ladder": "--residual-mode ladder --qk-layernorm --add-attention-output-bias",
    "hybrid-cut-inside": "--residual-mode ladder --ladder-layers 1,2 --qk-layernorm --add-attention-output-bias",
    "hybrid-cut-at-the-border": "--residual-mode ladder --ladder-layers 2 --qk-layernorm --tie-embeddings",
}
DESYNC = "--residual-mode desync --add-attention-output-bias --desync-interval"
"""Norm weights of every rank count in the gradient norm and do not decay, although they are rows of a matrix."""
QWEN = "--num-experts 8 --moe-router-topk 3 --moe-ffn-hidden-size 16 --qk-layernorm --moe-aux-loss-coeff 0.05"
GLM = (
    "--num-experts 8 --moe-ffn-hidden-size 16 --moe-shared-expert-intermediate-size 24 --moe-layers 1,2 "
    "--moe-router-score-function sigmoid --moe-router-topk-scaling-factor 2.5 --moe-router-num-groups 4 "
    "--moe-router-group-topk 2 --moe-router-enable-expert-bias --moe-router-bias-update-rate 0.05 "
    "--moe-aux-loss-coeff 0.05 --moe-z-loss-coeff 0.01"
)
SPARSE = "--num-experts 64 --moe-router-topk 1 --moe-router-unnormalized --moe-ffn-hidden-size 8"
"""More experts than tokens of a micro-batch."""


def slow(layout: str, words: str) -> Any:
    """Mark a case whose parts other cases and `test_correctness` check in other combinations."""
    return pytest.param(layout, words, marks=pytest.mark.slow)


def check_steps(gloo_pools: GlooPools, layout: str, words: str, tolerance: float) -> None:
    """Compare losses and gradient norms of all steps, and the final weights and biases, which ranks have alike."""
    world, argv = launch_of(layout, words)
    argv = [*GENTLE_RECIPE, *argv]
    weights, batches, expected, final = plain_steps(argv, world)
    results = gloo_pools(world).run(train, argv, weights, batches)
    check_outcome(results, expected, final, tolerance=tolerance)
    copies: dict[tuple[str, tuple[int, ...]], Tensor] = {}
    for name, offset, values in (piece for _, pieces in results for piece in pieces):
        assert torch.equal(copies.setdefault((name, offset), values), values), f"the ranks' copies of {name} differ"


@pytest.mark.parametrize(
    ("layout", "wiring", "stage"),
    [
        *pairwise(("1x1x1", "1x1x2", "2x1x2"), list(WIRINGS), "0123"),
        *pairwise(("1x2x1", "2x2x1", "1x2x2"), list(WIRINGS), "01"),
        *(pytest.param("2x1x1", *case, marks=pytest.mark.slow) for case in itertools.product(WIRINGS, "0123")),
        *(pytest.param("2x2x2", *case, marks=pytest.mark.slow) for case in itertools.product(WIRINGS, "01")),
    ],
)
def test_steps_equal_a_plain_model(gloo_pools: GlooPools, layout: str, wiring: str, stage: str) -> None:
    check_steps(gloo_pools, layout, f"{WIRINGS[wiring]} --zero-stage {stage}", 1e-5)


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        ("4x1x1", f"{WIRINGS['hybrid-cut-at-the-border']} --zero-stage 1"),
        ("2x1x1", f"{WIRINGS['ladder']} --zero-stage 0 --sequence-parallel --recompute-granularity full"),
        ("2x1x1", f"{DESYNC} 2 --zero-stage 0"),
        ("2x1x2", f"{DESYNC} 4 --zero-stage 1"),
        slow("2x1x2", f"{DESYNC} 4 --zero-stage 2"),
        ("2x1x2", "--zero-stage 3 --residual-mode ladder --sequence-parallel --qk-layernorm --tie-embeddings"),
        ("1x1x2", "--zero-stage 3 --residual-mode ladder-parallel --recompute-granularity full"),
        ("1x1x2", "--zero-stage 2 --residual-mode ladder --offload-optimizer cpu"),
        ("1x1x2", "--zero-stage 3 --residual-mode ladder --offload-optimizer cpu"),
        ("2x1x2", "--zero-stage 2 --residual-mode ladder --lanes 4 --num-key-value-heads 4"),
        slow("2x1x2", "--zero-stage 3 --residual-mode ladder --lanes 2 --residual-staleness 2"),
        ("2x2x2", "--zero-stage 0 --residual-mode parallel --qk-layernorm"),
        # Outputs pass through stages of one layer that neither read nor compute them.
        ("2x4x1", "--residual-mode ladder-parallel --residual-staleness 3 --num-layers 5 --add-attention-output-bias"),
        ("2x2x1", f"{DESYNC} 4 --zero-stage 0"),
        ("1x2x2", "--zero-stage 0 --residual-mode ladder --tie-embeddings"),
        ("1x4x1", "--residual-mode ladder --tie-embeddings --num-layers 6 --pipeline-partition parameters"),
        slow("2x2x1", f"{WIRINGS['ladder']} --recompute-granularity full --recompute-num-layers 2"),
        slow("2x2x1", f"{WIRINGS['ladder']} --no-tp-overlap"),
        ("2x2x1", f"{WIRINGS['ladder']} --sequence-parallel"),
        ("2x2x1", f"{WIRINGS['ladder']} --residual-staleness 3 --lanes 2"),
        ("1x1x2", "--zero-stage 0 --z-loss-coeff 0.02"),
        ("2x2x1", "--zero-stage 1 --z-loss-coeff 0.02"),
        ("1x1x2", f"{GLM} --zero-stage 0 --z-loss-coeff 0.02"),
        ("1x1x2", f"{SPARSE} --zero-stage 1"),
        ("1x1x2", f"{SPARSE} --zero-stage 3 --residual-mode parallel"),
        ("2x1x2", f"{GLM} --zero-stage 1 --sequence-parallel --residual-mode farskip --expert-sharding experts"),
        ("2x1x2", f"{QWEN} --zero-stage 2 --residual-mode ladder --tie-embeddings"),
        slow("2x1x2", f"{GLM} --zero-stage 3 --residual-mode shortcut"),
        slow("4x1x1", f"{GLM} --zero-stage 1 --sequence-parallel --residual-mode farskip"),
        ("2x2x1", f"{QWEN} --zero-stage 1"),
        (
            "2x1x2",
            f"{QWEN} --zero-stage 3 --residual-mode longcat --expert-sharding experts "
            "--recompute-granularity full --sequence-parallel",
        ),
        slow("4x1x1", f"{LATENT} --sequence-parallel --residual-mode ladder --recompute-granularity full"),
        ("2x1x2", f"{LATENT} --zero-stage 2 --residual-mode ladder-parallel --q-lora-rank 12"),
        ("2x1x2", f"{LATENT} --zero-stage 1 --residual-mode ladder --offload-optimizer cpu --sequence-parallel"),
        ("2x1x2", f"{LATENT} {GLM} --zero-stage 3 --residual-mode farskip --q-lora-rank 12 --attention-output-gate"),
        ("1x3x1", f"{LATENT} --residual-mode standard --tie-embeddings --add-qkv-bias"),
        slow("2x2x2", f"{LATENT} --zero-stage 1 --residual-mode ladder --lanes 2 --attention-output-gate"),
        slow("2x1x2", f"{LATENT} {DESYNC} 4 --zero-stage 0 --q-lora-rank 12"),
        # Two ranks have the same key head.
        ("4x1x1", f"{DELTA} --zero-stage 1 --residual-mode ladder --apply-layernorm-1p --attention-output-gate"),
        slow("2x1x2", f"{DELTA} {QWEN} --zero-stage 3 --residual-mode farskip --norm-epsilon 1e-2"),
        slow("2x1x2", f"{DELTA} {DESYNC} 4 --zero-stage 1 --linear-num-key-heads 1 --norm-epsilon 1e-2"),
        slow("2x1x2", f"{DELTA} --zero-stage 2 --residual-mode ladder --lanes 2 --norm-epsilon 1e-2"),
    ],
)
def test_more_wirings_and_features_equal_a_plain_model(gloo_pools: GlooPools, layout: str, words: str) -> None:
    check_steps(gloo_pools, layout, words, 1e-6)


EXCHANGED = "--expert-model-parallel-size"
VIRTUAL = "--num-layers-per-virtual-pipeline-stage"


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        ("1x1x2", f"{SPARSE} {EXCHANGED} 2 --zero-stage 1 --residual-mode ladder"),
        ("1x1x4", f"{GLM} {EXCHANGED} 4 --zero-stage 0 --residual-mode farskip"),
        ("1x1x4", f"{QWEN} {EXCHANGED} 2 --zero-stage 1 --residual-mode ladder --residual-staleness 2"),
        ("1x2x2", f"{QWEN} {EXCHANGED} 2 --zero-stage 1 --residual-mode ladder-parallel"),
        ("2x1x1", f"{GLM} {EXCHANGED} 2 --zero-stage 1 --sequence-parallel --residual-mode standard"),
        ("2x1x2", f"{GLM} {EXCHANGED} 4 --zero-stage 1 --sequence-parallel --residual-mode shortcut"),
        ("2x1x2", f"{QWEN} {EXCHANGED} 2 --zero-stage 0 --sequence-parallel --residual-mode longcat"),
        (
            "2x1x2",
            f"{GLM} {EXCHANGED} 4 --zero-stage 1 --sequence-parallel --residual-mode farskip --add-moe-bias "
            "--recompute-granularity full",
        ),
        ("2x2x1", f"{GLM} {EXCHANGED} 2 --zero-stage 1 --sequence-parallel --residual-mode ladder"),
        ("1x2x2", f"{GLM} {EXCHANGED} 2 --residual-mode farskip --num-layers 4 {VIRTUAL} 1"),
        ("1x3x2", f"{QWEN} {EXCHANGED} 2 --residual-mode ladder --residual-staleness 2 --num-layers 4"),
        slow("2x3x1", f"{QWEN} {EXCHANGED} 2 --sequence-parallel --residual-mode farskip --num-layers 4"),
        slow("1x2x4", f"{GLM} {EXCHANGED} 4 --residual-mode ladder --no-tp-overlap"),
    ],
)
def test_experts_over_data_parallel_ranks_equal_a_plain_model(gloo_pools: GlooPools, layout: str, words: str) -> None:
    check_steps(gloo_pools, layout, words, 1e-6)


TWENTY_STEPS = (
    "--train-iters 20 --lr 1e-3 --clip-grad 0.5 --weight-decay 0.1 --micro-batch-size 2 --global-batch-size 4"
)
FAMILIES = {
    Qwen3MoeForCausalLM: "--qk-layernorm --num-experts 8 --moe-router-topk 3 --moe-ffn-hidden-size 16 --moe-layers 1-2",
    DeepseekV3ForCausalLM: f"{LATENT} --q-lora-rank 12 --num-experts 8 --moe-ffn-hidden-size 16 --moe-layers 1-2 "
    "--moe-shared-expert-intermediate-size 16 --moe-router-score-function sigmoid --moe-router-topk-scaling-factor 2.5 "
    "--moe-router-num-groups 4 --moe-router-group-topk 2 --moe-router-enable-expert-bias "
    "--moe-router-bias-update-rate 0 --rope-scaling yarn --rope-scaling-factor 4 --rope-mscale 0.7 "
    "--rope-mscale-all-dim 1.2 --rope-original-max-position-embeddings 6",
}


@pytest.mark.parametrize(
    ("family", "words"),
    [
        (Qwen3MoeForCausalLM, "--zero-stage 1"),
        (DeepseekV3ForCausalLM, "--zero-stage 0 --tensor-model-parallel-size 2"),
        pytest.param(Qwen3MoeForCausalLM, "--zero-stage 0 --tensor-model-parallel-size 2", marks=pytest.mark.slow),
        pytest.param(DeepseekV3ForCausalLM, "--zero-stage 1", marks=pytest.mark.slow),
    ],
)
def test_twenty_steps_equal_transformers(gloo_pools: GlooPools, family: Family, words: str) -> None:
    argv = f"{TWENTY_STEPS} {FAMILIES[family]} {words}".split()
    config = ReferenceConfig.like(run_of(argv, 2).model)
    weights = make_weights(config, seed=1)
    check_twenty_steps(gloo_pools, argv, weights, transformers_model(config, weights, family), 1e-6)


@pytest.mark.parametrize(
    ("name", "words"),
    usual_share(itertools.product(HYBRIDS, ("--zero-stage 1", "--zero-stage 0 --tensor-model-parallel-size 2")), 5),
)
def test_twenty_steps_of_hybrids_equal_transformers(
    gloo_pools: GlooPools, tmp_path: Path, name: str, words: str
) -> None:
    kind, changes = HYBRIDS[name]
    module = save_model(tmp_path, kind, **changes)
    directory = open_hf_directory(tmp_path)
    weights = {spec.name: directory.tensors[spec.name].whole() for spec in model_tensors(directory.model)}
    argv = [*f"{TWENTY_STEPS} {words} --vocab-size 301 --init-method-std 0.02".split(), *directory.model.to_words()]
    assert run_of(argv, 2).model == directory.model
    check_twenty_steps(gloo_pools, argv, weights, module, 2e-5)


def check_twenty_steps(
    gloo_pools: GlooPools, argv: list[str], weights: Weights, module: PreTrainedModel, tolerance: float
) -> None:
    """Train a model of transformers with torch's AdamW, and compare losses on two ranks to this relative tolerance."""
    batches = steps_of_batches(20, 2)
    parameters = dict(module.named_parameters())
    fixed = [name for name, weight in parameters.items() if weight.dim() == 1 or name.endswith("conv1d.weight")]
    without_decay = [parameters.pop(name) for name in fixed]
    groups = [
        {"params": [*parameters.values()], "weight_decay": 0.1},
        {"params": without_decay, "weight_decay": 0.0},
    ]

    def loss_of(tokens: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
        losses = torch.nn.functional.cross_entropy(module(tokens).logits.transpose(1, 2), labels, reduction="none")
        return (losses * mask).sum()

    expected = torch_steps(run_of(argv, 2), batches, loss_of, [torch.optim.AdamW(groups, betas=(0.9, 0.95))])
    for history, _ in gloo_pools(2).run(train, argv, weights, batches):
        assert [loss for loss, _ in history] == pytest.approx([loss for loss, _ in expected], rel=tolerance)
        assert [norm for _, norm in history] == pytest.approx([norm for _, norm in expected], rel=1e-4)


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        ("1x1x1", "--zero-stage 0"),
        ("1x1x2", "--zero-stage 1 --tie-embeddings"),
        ("2x1x2", "--bf16 --ladder-layers 0,2"),
        ("1x1x2", "--zero-stage 2 --bf16"),
        ("1x1x2", "--zero-stage 3 --bf16 --offload-optimizer cpu --num-experts 4 --moe-router-enable-expert-bias"),
        slow("2x1x2", "--zero-stage 3 --bf16 --num-experts 4 --moe-router-enable-expert-bias"),
        ("1x1x2", "--bf16 --num-experts 4 --moe-router-enable-expert-bias --expert-model-parallel-size 2"),
        ("2x1x2", "--bf16 --residual-mode desync --desync-interval 4"),
        ("1x1x2", "--zero-stage 1 --bf16 --residual-mode standard --optimizer muon"),
        slow("2x1x2", f"{LATENT} --zero-stage 1 --bf16 --q-lora-rank 12 --attention-output-gate"),
        ("2x1x2", f"{DELTA} --zero-stage 1 --bf16"),
        slow("4x1x1", f"{DELTA} --zero-stage 1"),
        slow("1x1x2", f"{DELTA} --zero-stage 3 --bf16"),
        slow("1x2x2", f"{DELTA} --zero-stage 1 --optimizer muon"),
    ],
)
def test_resumed_steps_equal_uninterrupted_ones_bitwise(
    gloo_pools: GlooPools, tmp_path: Path, layout: str, words: str
) -> None:
    world, argv = launch_of(layout, "--global-batch-size 8 --residual-mode ladder", words)
    check_resume(gloo_pools, tmp_path, [*RECIPE, *argv], world)


def evaluated(
    argv: list[str], weights: Weights, batches: list[list[Batch]]
) -> tuple[Evaluation, list[float], Evaluation]:
    """On each rank: return evaluations before and after all steps, and the losses of steps with others between."""
    trainer = build_trainer_here(argv, weights)
    own = [own_batches(trainer, batch) for batch in batches]
    before = evaluate(trainer, iter(own), len(own))
    losses = []
    for iteration, batch in enumerate(own, start=1):
        losses.append(train_step(trainer, batch, iteration).loss)
        evaluate(trainer, iter(own), 1)
    return before, losses, evaluate(trainer, iter(own), len(own))


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        ("1x1x2", f"{WIRINGS['hybrid-cut-at-the-border']} --zero-stage 3 --mtp-num-layers 1"),
        ("1x2x2", "--residual-mode ladder --z-loss-coeff 0.02"),
        ("1x2x2", "--residual-mode ladder --z-loss-coeff 0.02 --mtp-num-layers 1 --mtp-depths 2"),
    ],
)
def test_evaluation_is_the_mean_over_tokens_and_affects_no_step(gloo_pools: GlooPools, layout: str, words: str) -> None:
    """ZeRO-3 evaluates before the first step, when no weight was gathered yet, and between steps. No z-loss counts."""
    world, argv = launch_of(layout, words)
    argv = [*GENTLE_RECIPE, *argv]
    run = run_of(argv, world)
    config = replace(ReferenceConfig.like(run.model, run.training), z_loss_coeff=0.0)
    weights, batches, _, final = plain_steps(
        argv, world, with_drafting_loss if config.mtp_num_layers else with_extra_losses
    )
    tokens, labels, mask = (torch.cat(parts) for parts in zip(*(b for step in batches for b in step), strict=True))

    def losses_of(of_model: Weights) -> list[float]:
        expected = [float(reference_loss(of_model, config, tokens, labels, mask))]
        if config.mtp_num_layers:
            counts = torch.stack([targets.sum() for targets in drafting_targets(config, mask)])
            of_head = drafting_loss(of_model, config, tokens, labels, mask) / counts
            confirmed = confirmed_drafts(of_model, config, tokens, mask) / counts
            expected += torch.stack([of_head, confirmed], dim=1).flatten().tolist()
        return expected

    first, last = losses_of(weights), losses_of(final)
    undisturbed = [loss for loss, *_ in gloo_pools(world).run(train, argv, weights, batches)[0][0]]
    for before, losses, after in gloo_pools(world).run(evaluated, argv, weights, batches):
        assert [before.loss, *before.mtp_losses.values()] == pytest.approx(first, rel=1e-5)
        assert [after.loss, *after.mtp_losses.values()] == pytest.approx(last, rel=1e-5)
        assert losses == undisturbed
    assert first[0] != pytest.approx(last[0], rel=1e-4)


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

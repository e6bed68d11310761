"""Whole optimizer steps with DeepSpeed in every layout, compared with a plain AdamW on a plain model."""

from pathlib import Path

import pytest
import torch
from transformers import Qwen3MoeForCausalLM

from megatron_ladder.engine.optimizer import learning_rate
from megatron_ladder.train.step import train_step
from tests.helpers.hugging_face import transformers_model
from tests.helpers.live_bytes import LiveBytes
from tests.helpers.pool import GlooPools
from tests.helpers.steps import RECIPE, Batch, check_resume, check_steps, steps_of_batches, train
from tests.helpers.training import build_trainer_here, own_batches, run_of
from tests.reference import ReferenceConfig, make_weights

LADDER = "--residual-mode ladder --ladder-layers 2 --qk-layernorm --add-attention-output-bias"
DESYNC = "--residual-mode desync --add-attention-output-bias --desync-interval"
"""Norm weights of every rank count in the gradient norm and do not decay, although they are rows of a matrix."""


@pytest.mark.parametrize(
    ("world", "words"),
    [
        (4, f"--tensor-model-parallel-size 4 --zero-stage 1 {LADDER}"),
        (2, f"--tensor-model-parallel-size 2 --zero-stage 0 --sequence-parallel --recompute-granularity full {LADDER}"),
        (2, f"--tensor-model-parallel-size 2 --zero-stage 0 {DESYNC} 2"),
        (4, f"--tensor-model-parallel-size 2 --zero-stage 1 {DESYNC} 4"),
    ],
)
def test_steps_equal_a_plain_model(gloo_pools: GlooPools, world: int, words: str) -> None:
    """`test_zero.py` has more layouts and stages."""
    check_steps(gloo_pools, [*RECIPE, "--global-batch-size", "8", *words.split()], world)


QWEN3_MOE = (
    "--train-iters 20 --lr 1e-3 --clip-grad 0.5 --weight-decay 0.1 --micro-batch-size 2 --global-batch-size 4 "
    "--qk-layernorm --num-experts 8 --moe-router-topk 3 --moe-ffn-hidden-size 16 --moe-layers 1-2"
).split()


@pytest.mark.parametrize("words", ["--zero-stage 1", "--zero-stage 0 --tensor-model-parallel-size 2"])
def test_twenty_steps_equal_transformers(gloo_pools: GlooPools, words: str) -> None:
    argv = [*QWEN3_MOE, *words.split()]
    run = run_of(argv, 2)
    config = ReferenceConfig.like(run.model)
    weights, batches = make_weights(config, seed=1), steps_of_batches(20, 2)
    model = transformers_model(config, weights, Qwen3MoeForCausalLM)
    vectors = [weight for weight in model.parameters() if weight.dim() == 1]
    others = [weight for weight in model.parameters() if weight.dim() > 1]
    groups = [{"params": others, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer, expected = torch.optim.AdamW(groups, betas=(0.9, 0.95)), []
    for iteration, batch in enumerate(batches, start=1):
        targets = sum(mask.sum() for _, _, mask in batch)
        loss = torch.zeros(())
        for tokens, labels, mask in batch:
            losses = torch.nn.functional.cross_entropy(model(tokens).logits.transpose(1, 2), labels, reduction="none")
            loss = loss + (losses * mask).sum() / targets
        loss.backward()
        expected.append((loss.item(), torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item()))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(run.optimizer, run.training.train_iters, iteration)
        optimizer.step()
        optimizer.zero_grad()
    for history, _ in gloo_pools(2).run(train, argv, weights, batches):
        assert [loss for loss, _ in history] == pytest.approx([loss for loss, _ in expected], rel=1e-6)
        assert [norm for _, norm in history] == pytest.approx([norm for _, norm in expected], rel=1e-4)


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


def test_desync_resumes_bitwise(gloo_pools: GlooPools, tmp_path: Path) -> None:
    words = "--bf16 --tensor-model-parallel-size 2 --global-batch-size 8 --residual-mode desync --desync-interval 4"
    check_resume(gloo_pools, tmp_path, [*RECIPE, *words.split()], 4)

"""The arithmetic of a run, and the spelling of its flags."""

import pytest

from megatron_ladder.config.run import RunConfig
from tests.helpers.runs import run_or_errors

BASE = "--train-iters 100 --lr 1e-3 --seq-length 128 --hidden-size 64 --num-attention-heads 4"


def read(words: str, world_size: int = 4) -> tuple[RunConfig, list[str]]:
    return run_or_errors((BASE + " " + words).split(), 1000, world_size)


def test_batches_follow_from_the_layout() -> None:
    run, errors = read("--micro-batch-size 2 --global-batch-size 16 --tensor-model-parallel-size 2")
    assert not errors
    assert (run.data_parallel_size, run.accumulation_steps, run.tokens_per_step) == (2, 4, 2048)
    assert read("--micro-batch-size 3")[0].global_batch_size == 12
    staged, errors = read("--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --global-batch-size 8", 8)
    assert not errors and (staged.data_parallel_size, staged.accumulation_steps) == (2, 4)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--micro-batch-size 3 --global-batch-size 16", "--global-batch-size 16 is not a multiple of --micro-batch"),
        ("--tensor-model-parallel-size 3", "--tensor-model-parallel-size 3 does not divide the 4 launched processes"),
        ("--tp 2 --dp 4", "--data-parallel-size 4: 4 launched processes with this layout have 2"),
        ("--max-position-embeddings 64", "--seq-length 128 is longer than --max-position-embeddings 64"),
        ("--min-lr 1", "--min-lr 1.0 is above --lr"),
        ("--lr-warmup-iters 100", "--lr-warmup-iters 100 leaves no step"),
        (
            "--pipeline-model-parallel-size 3",
            "--tensor-model-parallel-size 1 x --pipeline-model-parallel-size 3 does not divide the 4 launched",
        ),
        ("--pipeline-model-parallel-size 4 --num-layers 3", "--pipeline-model-parallel-size 4 is above --num-layers 3"),
        (
            "--sequence-parallel --residual-mode desync --desync-interval 2 --tensor-model-parallel-size 2",
            "--sequence-parallel shards one stream that all ranks read, but with --residual-mode desync each rank",
        ),
        (
            "--sequence-parallel --residual-mode ladder --lanes 2 --tensor-model-parallel-size 2",
            "--sequence-parallel shards one stream that all ranks read, but with --lanes 2 each rank reads another one",
        ),
        (
            "--residual-mode ladder --lanes 2 --tensor-model-parallel-size 4",
            "--lanes 2 is not a multiple of --tensor-model-parallel-size 4",
        ),
        (
            "--sequence-parallel --tensor-model-parallel-size 4 --seq-length 126",
            "--seq-length 126 cannot be cut by --sequence-parallel into 4 equal parts",
        ),
        ("--bf16 --zero-stage 0", "--bf16 and --zero-stage 0 exclude each other"),
        ("--offload-optimizer cpu --zero-stage 0", "--offload-optimizer cpu and --zero-stage 0 exclude each other"),
        ("--optimizer-implementation apex --zero-stage 3", "--optimizer-implementation apex miscounts steps"),
        ("--optimizer-implementation apex --offload-optimizer cpu", "--optimizer-implementation apex needs a GPU"),
        ("--pipeline-model-parallel-size 2 --zero-stage 2", "--zero-stage 2 with --pipeline-model-parallel-size 2: a"),
        (
            "--pipeline-model-parallel-size 2 --offload-optimizer cpu",
            "--offload-optimizer cpu and --pipeline-model-parallel-size exclude each other",
        ),
        (
            "--pipeline-model-parallel-size 2 --distill-from d",
            "--distill-from d and --pipeline-model-parallel-size exclude each other",
        ),
        ("--rope-low-freq-factor 2 --rope-scaling linear", "--rope-low-freq-factor 2.0 requires --rope-scaling"),
        ("--recompute-granularity full --recompute-num-layers 13", "--recompute-num-layers 13 is above --num-layers"),
        ("--compile-sub-blocks --norm-implementation apex", "--compile-sub-blocks compiles torch's norm"),
        ("--cuda-graph --zero-stage 2", "--cuda-graph true and --zero-stage 2 exclude each other"),
        ("--cuda-graph --reset-attention-mask", "--cuda-graph true and --reset-attention-mask exclude each other"),
        ("--profile --profile-step-end 9 --profile-dir p", "--profile-step-start 10 and --profile-step-end 9"),
        ("--profile", "--profile needs a directory for its traces"),
        (
            "--optimizer muon --zero-stage 3",
            "--optimizer muon needs whole gradients on the device, not --zero-stage 3:",
        ),
        (
            "--lr-decay-style WSD --lr-warmup-iters 5 --lr-wsd-decay-iters 96",
            "--lr-wsd-decay-iters 96 is more than --train-iters 100",
        ),
        ("--train-iters 1_0", "--train-iters: '1_0' is not a whole number"),
        ("--lr 1_0", "--lr: '1_0' is not a number"),
        # Another value or flag is wrong in consequence.
        ("--train-iters 1e3 --lr-warmup-iters 99 --profile --profile-dir p", "--train-iters: '1e3' is not a whole"),
        ("--residual-mod ladder --ladder-layers 4", "--residual-mod is not a flag of this program: did you mean"),
        ("--optimizer mun --muon-momentum 0.9", "--optimizer: 'mun' is not one of"),
    ],
)
def test_an_invalid_value_or_combination_is_one_error(words: str, message: str) -> None:
    found = read(words)[1]
    assert len(found) == 1 and found[0].startswith(message), found


def test_all_errors_are_reported_together() -> None:
    """Values first, then how they fit together."""
    found = read("--colour 3 --topk 4 --seed x --lr 0 --finetune")[1]
    assert [line.split(" ")[0].rstrip(":") for line in found] == ["--colour", "--topk", "--seed", "--lr", "--finetune"]
    found = read("--hidden-size 65 --global-batch-size 6 --min-lr 5")[1]
    assert [line.split(" ")[0] for line in found] == ["--hidden-size", "--min-lr", "--global-batch-size"]


def test_megatron_spellings_are_accepted() -> None:
    """Flags that users bring from Megatron-DeepSpeed."""
    words = (
        "--num-query-groups 2 --kv-channels 16 --ffn-hidden-size 128 --max-position-embeddings 256 "
        "--deepspeed --local_rank=3 --recompute-granularity full --recompute-num-layers 2 "
        "--swiglu --normalization rmsnorm --use-rotary-position-embeddings --disable-bias-linear "
        "--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0.0 --use-flash-attn "
        "--lr-decay-style cosine --clip-grad 1.0 --adam-beta1 0.9 --adam-beta2 0.95 --adam-eps 1e-8 "
        "--init-method-std 0.02 --split 969,30,1 --save s --save-interval 10 --eval-interval 10 --eval-iters 0 "
        "--log-interval 1 --tensorboard-dir tb --profile --use-pytorch-profiler --profile-ranks 0 1 "
        "--pipeline-model-parallel-size 1 --deterministic-mode --optimizer adam"
    )
    run, errors = read(words)
    assert errors == []
    assert (run.model.num_key_value_heads, run.model.head_dim, run.recompute_layers) == (2, 16, 2)

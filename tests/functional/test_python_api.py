"""The Python interface, as examples/python_api.py uses it."""

import math
import sys
from pathlib import Path

import pytest
import torch

from megatron_ladder.checkpoint.hf_directory import open_hf_directory
from megatron_ladder.errors import UserError
from tests.helpers.commands import REPOSITORY_ROOT, free_port, run_command

SCRIPT = REPOSITORY_ROOT / "examples" / "python_api.py"
PROGRAM = """
import runpy, shutil, sys
from pathlib import Path
from megatron_ladder.api import TextGenerator, training
from megatron_ladder.errors import BadNumbersError, UserError

script, corpus, folder = sys.argv[1:]
for name in folder, folder + "_again":
    sys.argv = [script, corpus, name]
    runpy.run_path(script)

def attempt(call, *values, **flags):
    try:
        print(">", call(*values, **flags))
    except (UserError, BadNumbersError, ValueError) as error:
        print(">", error)

files = {
    "tokenizer_type": "SentencePieceTokenizer", "tokenizer_model": f"{corpus}/tokenizer.model",
    "train_data_path": f"{corpus}/train_text_document", "valid_data_path": f"held={corpus}/valid_text_document",
}
sizes = {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 1, "seq_length": 8, "micro_batch_size": 1}
limits = {"train_iters": 9, "lr": 1e-3, "max_consecutive_bad_steps": 2}
with training(**files, **sizes, **limits) as run:
    attempt(run.save)
    attempt(run.evaluate)
    attempt(run.score, ((text, [1]) for text in ["ab"]))
    attempt(run.generate, [[1]], 9)
    next(run.model.parameters()).data.fill_(float("nan"))
    attempt(run.score, [([1], [2])])
    print(">", run.step().skipped)
    attempt(run.step)
for layout in {}, {"offload_optimizer": "cpu"}, {"zero_stage": 3}:
    place = folder + "_".join(["", "bf16", *layout])
    with training(**files, **sizes, train_iters=9, lr=1e-7, bf16=True, **layout, save=place) as run:
        run.step()
        import deepspeed
        with deepspeed.zero.GatheredParameters(list(run.model.parameters()), modifier_rank=0):
            for weight in run.model.parameters():
                weight.data.zero_()
        run.save()
        print(">", run.score([([1], [0])])[0].is_greedy, run.generate([[1]], 2))
        run.step()
        attempt(training(**files, **sizes, **limits).__enter__)
        print(">", round(run.evaluate("held"), 3))
gone = Path(folder + "_gone")
with training(**files, **sizes, **limits, save=gone) as run:
    shutil.rmtree(gone)
    gone.touch()
    attempt(run.save)
attempt(TextGenerator, folder + "/checkpoints", tp=2)
generator = TextGenerator(folder + "/checkpoints")
attempt(generator.generate, [])
attempt(generator.generate, "x", score=True)
(one,) = generator.generate(("x",), max_new_tokens=1, logprobs=True)
print(">", len(one.logprobs))
"""
"""Runs the example twice in one process, and then makes mistakes in it."""


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    words = ["--output-dir", tmp_path / "corpus", "--vocab-size", "512", "--max-megabytes", "0.05"]
    done = run_command([sys.executable, REPOSITORY_ROOT / "examples" / "prepare_corpus.py", *words], timeout=120)
    assert done.returncode == 0, done.stderr
    return tmp_path / "corpus"


UNIFORM = f"{math.log(512):.3f}"
"""Loss of a model whose weights are all zero."""


def check_results(folder: Path) -> None:
    exported = open_hf_directory(folder / "exported")
    assert exported.model.ladder_layers == (0, 1)
    assert (folder / "hybrid" / "latest").read_text().strip() == "iter_0000000"


def test_the_example_runs_twice_in_one_process(corpus: Path, tmp_path: Path) -> None:
    done = run_command([sys.executable, "-c", PROGRAM, SCRIPT, corpus, tmp_path / "run"], timeout=120)
    assert done.returncode == 0, done.stderr
    summaries = [line for line in done.stdout.splitlines() if line.startswith("loss ")]
    assert len(summaries) == 2 and summaries[0] == summaries[1], "the same seed"
    first, last = (float(word) for word in summaries[0].split(",")[0].split()[1::2])
    assert last < first - 1
    for name in ("run", "run_again"):
        check_results(tmp_path / name)
    assert [line[2:] for line in done.stdout.splitlines() if line.startswith("> ")] == [
        "save: the run has no directory; give save",
        "evaluate: the run has no validation set ''; name one of 'held'",
        "expected a list of token ids, as run.tokenizer.encode returns it: 'str' object cannot be interpreted as an "
        "integer",
        "max_new_tokens 9: expected 1 to seq_length 8",
        "score: a likelihood is not a number: weights are not finite, or too large",
        "True",
        "iteration 2: the gradient's norm is nan, the loss nan: first bad parameter embedding.weight, on rank 0: 2 in "
        "a row, as many as --max-consecutive-bad-steps allows",
        *[
            "True [[0, 0]]",
            "training: this process has process groups already: end the other training() block, or destroy them",
            UNIFORM,
        ]
        * 3,
        f"--save {tmp_path}/run_gone: the last checkpoint could not be written",
        "--tp 2: the launcher started 1 processes; remove --tp, or start as many",
        "[]",
        "generate: score=True: this call only continues texts; engine.score computes likelihoods",
        "1",
    ]


@pytest.mark.slow
def test_the_example_runs_on_two_ranks(corpus: Path, tmp_path: Path) -> None:
    launcher = ["deepspeed", "--num_gpus", "2", "--no_local_rank", "--master_port", str(free_port())]
    done = run_command([*launcher, SCRIPT, corpus, tmp_path / "run"], timeout=180)
    assert done.returncode == 0, done.stderr
    check_results(tmp_path / "run")


def test_errors_are_exceptions_with_one_message_each() -> None:
    from megatron_ladder.api import TextGenerator, build_model, training

    with pytest.raises(UserError) as caught, training(num_layers=0, hiden_size=8, train_iters=1, lr=1e-3):
        raise AssertionError
    assert any("--num-layers 0" in message for message in caught.value.messages)
    assert any("--hiden-size" in message and "--hidden-size" in message for message in caught.value.messages)
    with pytest.raises(UserError, match="--num-attention-heads 3"):
        build_model(vocab_size=10, num_attention_heads=3, hidden_size=64)
    with pytest.raises(UserError, match="--moe-router-unnormalized"):
        build_model(vocab_size=10, num_attention_heads=4, hidden_size=64, num_experts=4, moe_router_topk=1)
    with pytest.raises(UserError, match="no/such"):
        TextGenerator("no/such")
    words = torch.tensor([[3, 5]])
    model = build_model(vocab_size=5, num_attention_heads=1, num_layers=1, hidden_size=8)
    for tokens, labels in (words, -words), (words % 5, words), (-words, words % 5):
        with pytest.raises(RuntimeError, match="expected 0 to 4; labels may be -100"):
            model(tokens, labels)

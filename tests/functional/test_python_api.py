"""The Python interface, as examples/python_api.py uses it."""

import sys
from pathlib import Path

import pytest

from megatron_ladder.convert.hf_directory import open_hf_directory
from megatron_ladder.data.corpus import prepare_corpus
from megatron_ladder.errors import UserError
from tests.helpers.commands import REPOSITORY_ROOT, free_port, run_command

SCRIPT = REPOSITORY_ROOT / "examples" / "python_api.py"
TWICE = "import runpy, sys; runpy.run_path(sys.argv[1]); sys.argv[3] += '_again'; runpy.run_path(sys.argv[1])"


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    prepare_corpus(tmp_path / "corpus", 512, 0.05, lambda line: None)
    return tmp_path / "corpus"


def check_results(folder: Path) -> None:
    exported = open_hf_directory(folder / "exported")
    assert exported.model.ladder_layers == (0, 1)
    assert (folder / "hybrid" / "latest").read_text().strip() == "iter_0000000"


def test_the_example_runs_twice_in_one_process(corpus: Path, tmp_path: Path) -> None:
    program = TWICE.replace("sys.argv[1]", repr(str(SCRIPT))).replace("sys.argv[3]", "sys.argv[2]")
    done = run_command([sys.executable, "-c", program, corpus, tmp_path / "run"], timeout=120)
    assert done.returncode == 0, done.stderr
    summaries = [line for line in done.stdout.splitlines() if line.startswith("loss ")]
    assert len(summaries) == 2 and summaries[0] == summaries[1], "the same seed"
    first, last = (float(word) for word in summaries[0].split(",")[0].split()[1::2])
    assert last < first - 1
    for name in ("run", "run_again"):
        check_results(tmp_path / name)


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
    with pytest.raises(UserError, match="no/such"):
        TextGenerator("no/such")

"""An evaluation that starts and directs a second rank."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.commands import REPOSITORY_ROOT, run_command
from tests.reference import greedy_continuation
from tests.unit.generate.test_evaluation import CONFIG, TEXTS, reference_score
from tests.unit.generate.tiny_model import PROMPTS, reference_of, tiny_config, write_checkpoint

DESYNC = tiny_config(residual_mode="desync", desync_interval=2, desync_tp=2, vocab_size=257)
DIRECTED = """
import json, sys
from megatron_ladder.generate.evaluation import Evaluator
from megatron_ladder.generate.requests import GenerationRequest
from megatron_ladder.generate.sampling import GREEDY

options = {"model": sys.argv[1], "tp": 2, "tokenizer_type": "ByteTokenizer"}
texts, prompts = json.loads(sys.argv[2])
evaluator = Evaluator(2, **options)
scores = evaluator.score(texts)
evaluator.close()
# The second rank is a new process, in which this is the first run.
evaluator = Evaluator(2, **options)
generations = evaluator.generate([GenerationRequest(tuple(prompt), 5, GREEDY) for prompt in prompts])
evaluator.close()
print(json.dumps([[score.logprob for score in scores], [generation.ids for generation in generations]]))
"""


def directed(model: Path, path: Path = REPOSITORY_ROOT) -> "subprocess.CompletedProcess[str]":
    """Run a program that looks for modules in a directory first."""
    words = [sys.executable, "-c", DIRECTED, model, json.dumps([TEXTS, PROMPTS])]
    return run_command(words, timeout=120, env={"PYTHONPATH": os.pathsep.join([str(path), str(REPOSITORY_ROOT)])})


def test_two_ranks_equal_one_process_with_separate_streams(tmp_path: Path) -> None:
    weights, reference = reference_of(DESYNC)
    write_checkpoint(tmp_path, DESYNC, weights)
    done = directed(tmp_path)
    assert done.returncode == 0, done.stderr
    scores, generated = json.loads(done.stdout)
    expected = [reference_score(weights, reference, *text, 96) for text in TEXTS]
    assert scores == pytest.approx([logprob for logprob, _ in expected], abs=1e-4)
    assert generated == [greedy_continuation(weights, reference, prompt, 5) for prompt in PROMPTS]


def test_a_rank_that_ends_early_ends_the_evaluation(tmp_path: Path) -> None:
    """Otherwise rank 0 would wait for it."""
    write_checkpoint(tmp_path / "run", CONFIG)
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text("import os\nif os.environ.get('RANK') == '1':\n    os._exit(7)\n")
    done = directed(tmp_path / "run", site)
    assert (done.returncode, done.stdout) == (7, "")
    assert done.stderr.splitlines()[-1] == "error: rank 1 of 2 ended with exit code 7"

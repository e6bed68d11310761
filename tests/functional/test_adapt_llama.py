"""The example that adapts a Llama: its command lines for the 8B, and the whole of its small version."""

import json
import math
import re
import shlex
import struct
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from examples.adapt_llama import tiny_llama
from examples.adapt_llama.evaluate import HeldOut, perplexity
from megatron_ladder import progress
from megatron_ladder.blueprint.model_flags import ModelFlags
from megatron_ladder.checkpoint.hf_directory import open_hf_directory
from megatron_ladder.config.run import parse_run, resolve_run
from megatron_ladder.data.chat import Conversation
from tests.helpers.commands import REPOSITORY_ROOT, run_command
from tests.unit.convert.test_remote_code import LLAMA31

SCRIPT = REPOSITORY_ROOT / "examples" / "adapt_llama" / "adapt.sh"


def headers_alone(folder: Path) -> Path:
    """A directory whose weights are as long as the 8B's, and hold a header and nothing else: a hole of 16 GB."""
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**LLAMA31))
    header, end = dict[str, Any](), 0
    for name, weight in model.state_dict().items():
        begin, end = end, end + 2 * weight.numel()
        header[name] = {"dtype": "BF16", "shape": weight.shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA31))
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    return folder


def test_the_command_lines_for_the_8b(tmp_path: Path) -> None:
    source = headers_alone(tmp_path / "Llama-3.1-8B-Instruct")
    flags = ["--dry-run", "--source", source, "--run", tmp_path / "run", "--python", sys.executable]
    done = run_command(["bash", SCRIPT, *flags, "--", "--seed", "7"], timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "8,030,261,248 parameters" in done.stdout
    assert "nothing was written" in done.stdout and not (tmp_path / "run").exists()
    training, measuring = (
        next(line for line in done.stdout.splitlines() if f" {word} " in line)
        for word in ("pretrain_ladder.py", "sensitivity")
    )
    words = shlex.split(training.partition(" pretrain_ladder.py ")[2])
    # The checkpoint that the conversion writes provides the model.
    assert "wiring: ladder in layers 16-31 (of 32)" in done.stdout
    assert "--greedy-layers 16 " in measuring and str(source) in measuring
    assert f"--ladder-layers best:16@{tmp_path}/run/sensitivity.json" in done.stdout
    assert not parse_run(words).given.keys() & {field.name for field in fields(ModelFlags)}
    model = open_hf_directory(source).model
    run = resolve_run(parse_run([*words, *model.to_words()]), model.vocab_size, 8)
    assert run.model == model
    assert (run.optimizer.lr, run.optimizer.lr_warmup_iters) == (5e-6, 200)
    assert 0 <= run.training.train_iters * run.tokens_per_step - 3_000_000_000 < run.tokens_per_step
    assert run.data.loss_on == "assistant" and run.training.seed == 7


def test_perplexity_counts_only_tokens_of_the_assistant() -> None:
    """By hand: probabilities 1/2, 1/4, 1/8 and 1/2 of four tokens have a geometric mean of 2 ** (-7 / 4)."""
    # The last two of four tokens are the assistant's.
    tokens = Conversation(np.array([1, 2, 3, 4]), np.array([0, 0, 1, 1], np.uint8))
    held_out = [HeldOut([{"role": "user", "content": "?"}, {"role": "assistant", "content": "a"}], "", tokens)]
    logs = [[-9.0, math.log(1 / 2), math.log(1 / 4)], [-9.0, math.log(1 / 8), math.log(1 / 2)]]
    scores = [{"prompt_ids": [1, 2, 3, 4], "logprobs": some} for some in logs]
    assert perplexity(held_out * 2, scores) == pytest.approx(2 ** (7 / 4))
    with pytest.raises(RuntimeError, match="scored tokens that training does not read"):
        perplexity(held_out, [{"prompt_ids": [0, 1, 2, 3, 4], "logprobs": [0.0] * 4}])


def test_the_training_of_the_source_shows_its_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "PLAIN_SECONDS", 0.0)
    tiny_llama.main(["--output", str(tmp_path), "--conversations", "1000", "--steps", "2"])
    assert "training the source: 100% 2/2" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("lanes", [0, 2])
def test_a_tiny_llama_is_adapted(lanes: int, tmp_path: Path) -> None:
    """Healing is interrupted and resumed.

    The imported hybrid is worse than its source, and the healed model is better than the hybrid. Finished stages are
    skipped, and a run does not resume from other weights.
    """
    command = ["bash", SCRIPT, "--tiny", "--run", tmp_path / "run", "--python", sys.executable]
    command += ["--lanes", str(lanes)] if lanes else []
    cache = {"HF_HOME": str(tmp_path / "hf")}
    stopped = run_command([*command, "--", "--exit-interval", "40"], timeout=1200, env=cache)
    assert stopped.returncode == 1 and "training stopped at iter_0000040 of 120 steps" in stopped.stderr
    done = run_command(command, timeout=1200, env=cache)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "40 steps done" in done.stdout and "are bitwise equal to their sources" in done.stdout
    found = json.loads((tmp_path / "run" / "evaluation" / "table.json").read_text())
    source, unhealed, healed = (found[name]["perplexity"] for name in ("source", "unhealed", "healed"))
    assert source < 1.02 and healed < 1.02 and unhealed > 1.05
    assert lanes or re.search(r"^\| healed \| [0-9.]+ \| below 1.02 \|$", done.stdout, re.MULTILINE)
    config = json.loads((tmp_path / "run" / "healed" / "config.json").read_text())
    cheapest = json.loads((tmp_path / "run" / "sensitivity.json").read_text())["order"][:3]
    assert (config["model_type"], config["ladder_layers"]) == ("megatron_ladder", sorted(cheapest))
    assert config["lanes"] == lanes
    again = run_command(command, timeout=120, env=cache)
    assert again.returncode == 0 and again.stdout.count("already done:") == 7 + bool(lanes), again.stdout + again.stderr
    (tmp_path / "run" / "done" / "began_with").write_text("another import")
    (tmp_path / "run" / "done" / "heal").unlink()
    other = run_command(command, timeout=120, env=cache)
    assert other.returncode == 2 and "started from other weights" in other.stderr

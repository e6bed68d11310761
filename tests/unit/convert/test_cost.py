"""The cost of converting a large model, compared with a plain copy of the same bytes."""

import json
import re
import resource
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from megatron_ladder.blueprint.model import ModelConfig
from megatron_ladder.blueprint.tensors import model_tensors
from megatron_ladder.checkpoint.hf_directory import hf_name
from megatron_ladder.convert.remote_code import hf_config
from tests.helpers.patience import patient
from tests.unit.convert.hand_made import entries

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = [sys.executable, str(ROOT / "tools" / "convert_checkpoint.py")]
ROUNDS = 5


def write_large(path: Path, layers: int) -> int:
    """Write a Llama of random bits with 0.26 + 0.09 x layers GB in bf16; return the bytes of its tensors."""
    config = ModelConfig(
        num_layers=layers,
        hidden_size=2048,
        ffn_hidden_size=5632,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        vocab_size=32003,
        max_position_embeddings=4096,
    )
    path.mkdir()
    (path / "config.json").write_text(json.dumps(hf_config(config, dtype="bfloat16")))
    header = entries({hf_name(tensor.name): list(tensor.shape) for tensor in model_tensors(config)})
    text = json.dumps(header).encode()
    size = max(entry["data_offsets"][1] for entry in header.values())
    # Without the highest bit of the exponent, which NaN and infinity have.
    random = np.frombuffer(np.random.default_rng(0).bytes(1 << 24), "<u2")
    block = (random & np.uint16(0xBFFF)).tobytes()
    with open(path / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for begin in range(0, size, len(block)):
            file.write(block[: min(len(block), size - begin)])
    return size


def child_cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def imported(hf: Path, save: Path) -> tuple[float, float]:
    """Import for two ranks; return CPU seconds of copying and megabytes of anonymous memory."""
    words = ["import", "--hf", str(hf), "--save", str(save), "--tensor-model-parallel-size", "2"]
    printed = subprocess.run([*PROGRAM, *words], capture_output=True, text=True, check=True).stdout
    print(printed.splitlines()[-2])
    copying, memory = re.search(r"copying ([\d.]+).*anonymous memory ([\d.]+) MB", printed).groups()  # type: ignore[union-attr]
    shutil.rmtree(save)
    return float(copying), float(memory)


@pytest.mark.slow
def test_cpu_time_compared_with_cp_and_memory(tmp_path: Path) -> None:
    """Copies and conversions alternate, because the state of the page cache changes."""
    write_large(tmp_path / "one", 9)
    ratios = []
    for _ in range(ROUNDS):
        began = child_cpu()
        subprocess.run(["cp", "-r", tmp_path / "one", tmp_path / "copy"], check=True)
        plain = child_cpu() - began
        shutil.rmtree(tmp_path / "copy")
        copying, memory = imported(tmp_path / "one", tmp_path / "ours")
        ratios.append(copying / plain)
        print(f"cp: {plain:.2f} CPU seconds; ratio {ratios[-1]:.2f}")
        assert memory <= 300
    assert statistics.median(ratios) <= 3.0


@pytest.mark.slow
def test_memory_of_four_gigabytes(tmp_path: Path) -> None:
    assert write_large(tmp_path / "four", 43) > 4e9
    assert imported(tmp_path / "four", tmp_path / "ours")[1] <= 300


def test_start_up(tmp_path: Path) -> None:
    """Take the fastest of several starts, because other processes may use the machine."""
    times = []
    for _ in range(5):
        began = time.perf_counter()
        subprocess.run([*PROGRAM, "import", "--help"], capture_output=True, check=True)
        times.append(time.perf_counter() - began)
    assert min(times) <= patient(0.5), times

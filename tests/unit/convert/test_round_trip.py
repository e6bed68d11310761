"""From a Hugging Face directory to a training checkpoint of any layout and back: equal bits and logits."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megatron_ladder.checkpoint.format import Checkpoint
from tests.unit.convert.saved_models import assert_equal_bits, convert, our_logits, save_model, tensors_of

LAYOUTS = [(1, 1), (2, 1), (2, 2), (4, 1)]


@pytest.mark.parametrize(("tensor_parallel", "stages"), LAYOUTS)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_round_trip_is_bitwise(tmp_path: Path, tensor_parallel: int, stages: int, tied: bool) -> None:
    hf, ours, back = tmp_path / "hf", tmp_path / "ours", tmp_path / "back"
    save_model(hf, dtype=torch.bfloat16, tie_word_embeddings=tied, max_shard_size="60KB")
    assert len(list(hf.glob("*.safetensors"))) > 1
    layout = "--tensor-model-parallel-size", tensor_parallel, "--pipeline-model-parallel-size", stages
    convert("import", "--hf", hf, "--save", ours, *layout)
    checkpoint = Checkpoint.open(ours)
    checkpoint.verify()
    files = [file["name"] for file in checkpoint.manifest["files"] if file["name"].endswith(".safetensors")]
    assert files == [f"weights_rank_{rank:05d}.safetensors" for rank in range(tensor_parallel * stages)]
    first, last = (load_file(checkpoint.directory / files[rank]) for rank in (0, (stages - 1) * tensor_parallel))
    assert any("embedding" in key for key in first) and any("final_norm" in key for key in last)
    assert tied or any("lm_head" in key for key in last)
    assert stages == 1 or not any("final_norm" in key or "lm_head" in key for key in first)
    convert("export", "--load", ours, "--hf", back, "--max-shard-size", "100KB")
    assert_equal_bits(tensors_of(hf), tensors_of(back))
    index = json.loads((back / "model.safetensors.index.json").read_text())
    for name, file in index["weight_map"].items():
        assert name in load_file(back / file)


LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("llama", {"rope_parameters": LLAMA3_ROPE}),
        ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 16}),
        ("mistral", {}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen3", {}),
    ],
    ids=["llama3", "llama-biases", "mistral", "qwen2", "qwen3"],
)
def test_logits_match_transformers(tmp_path: Path, kind: str, changes: dict[str, Any]) -> None:
    hf, ours, back = tmp_path / "hf", tmp_path / "ours", tmp_path / "back"
    reference = save_model(hf, kind, **changes)
    convert("import", "--hf", hf, "--save", ours)
    tokens = torch.randint(0, 301, (2, 48))
    with torch.no_grad():
        expected = reference(tokens).logits
    assert (our_logits(ours, tokens) - expected).abs().max() <= 1e-5 * expected.abs().max()
    convert("export", "--load", ours, "--hf", back)
    again = type(reference).from_pretrained(back).eval()
    with torch.no_grad():
        assert (again(tokens).logits - expected).abs().max() <= 1e-5 * expected.abs().max()

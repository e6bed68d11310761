"""The output of `inspect` for complete and broken directories."""

from pathlib import Path

from megatron_ladder.convert.inspection import inspect_directory
from tests.helpers.runs import errors_of
from tests.unit.convert.hand_made import CONFIG, write_directory
from tests.unit.convert.saved_models import convert, save_model, small_config, write_cut_checkpoint


def test_complete_directories(tmp_path: Path) -> None:
    hf = write_directory(tmp_path / "hf", {**CONFIG, "model_type": "llamaLadder", "ladder_layers": 1})
    convert("import", "--hf", hf, "--save", tmp_path / "ours")
    write_cut_checkpoint(
        tmp_path / "run", small_config(residual_mode="ladder", ladder_layers=(0, 1, 2)), {"bf16": True}
    )
    (tmp_path / "run" / "iter_0000040.tmp-abc").mkdir()
    save_model(tmp_path / "experts", "glm4_moe")
    windows = {"window_size": 8, "window_layers": (0, 2), "softmax_type": "learnable", "num_key_value_heads": 2}
    write_cut_checkpoint(tmp_path / "windows", small_config(**windows), {})
    expected = {
        "hf": """: a Hugging Face directory, model_type llamaLadder
            wiring: ladder in layer 1 (of 2)
            2 layers, hidden 8, MLP 12, heads 2 over 1 key-value of width 4, vocabulary 16, positions 32
            token mixers: attention in all layers; generation keeps 1.02 kB in bf16 for 32 positions
            weights: 21 tensors, bfloat16, 2.51 kB
            without a tokenizer
            other files: none""",
        "run": """with iter_0000030; latest names iter_0000030
            iter_0000040.tmp-abc: incomplete
            iteration 30, 240 samples
            in all layers
            exp_avg_sq: 30 tensors in 122 boxes, float32
            optimizer: adamw""",
        # Keys and values of width 2 x 12, of 64 + 2 x 8 positions.
        "windows": "token mixers: attention to 8 positions with sinks in layers 0,2 (of 3); "
        "attention with sinks in layer 1 (of 3); generation keeps 7.68 kB in bf16 for 64 positions",
        "ours": "continue with `pretrain_ladder.py --load DIR --finetune`",
        "experts": "experts: 6 of width 10, 2 a token, in 3 layers, with a shared",
    }
    for name, words in expected.items():
        printed = "\n".join(inspect_directory(tmp_path / name))
        for line in words.split("\n"):
            assert line.strip() in printed, line


def test_broken_directories(tmp_path: Path) -> None:
    write_directory(tmp_path / "hf", weights=b"")
    write_cut_checkpoint(tmp_path / "run", small_config(), {})
    (tmp_path / "run" / "iter_0000030" / "weights_rank_00001.safetensors").unlink()
    assert "latest names iter_0000030" in next(inspect_directory(tmp_path / "run"))
    for name, words in (
        ("hf", "model.safetensors"),
        ("run", "weights_rank_00001.safetensors: missing"),
        (".", "no checkpoint of a supported kind"),
        ("absent", "no such directory"),
    ):
        errors = errors_of(list, inspect_directory(tmp_path / name))
        assert any(words in error for error in errors), errors

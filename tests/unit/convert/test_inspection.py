"""The output of `inspect` for complete and broken directories."""

from pathlib import Path

import pytest

from megatron_ladder.convert.inspection import inspect_directory
from megatron_ladder.errors import UserError
from tests.unit.convert.hand_made import CONFIG, write_directory
from tests.unit.convert.saved_models import convert, save_model, small_config, write_cut_checkpoint


def lines_of(path: Path) -> str:
    return "\n".join(inspect_directory(path))


def test_a_hugging_face_directory(tmp_path: Path) -> None:
    directory = write_directory(tmp_path / "hf", {**CONFIG, "model_type": "llamaLadder", "ladder_layers": 1})
    expected = [
        f"{directory}: a Hugging Face directory, model_type llamaLadder",
        "wiring: ladder in layers 1 of 2",
        "2 layers, hidden 8, MLP 12, heads 2 over 1 key-value of width 4, vocabulary 16, positions 32",
        "weights: 21 tensors, bfloat16, 2.51 kB",
        "other files: none; without a tokenizer",
    ]
    assert lines_of(directory).splitlines() == expected
    (directory / "model.safetensors").write_bytes(b"")
    with pytest.raises(UserError, match=r"model\.safetensors"):
        lines_of(directory)


def test_a_run_with_a_damaged_and_an_unfinished_checkpoint(tmp_path: Path) -> None:
    run = tmp_path / "run"
    write_cut_checkpoint(run, small_config(residual_mode="ladder", ladder_layers=(0, 1, 2)), {"bf16": True})
    (run / "iter_0000040.tmp-abc").mkdir()
    printed = lines_of(run)
    for words in (
        "with iter_0000030; latest names iter_0000030",
        "iter_0000040.tmp-abc: incomplete",
        "iteration 30, 240 samples",
        "in all layers",
        "exp_avg_sq: 30 tensors in 122 boxes, float32",
        "optimizer: adamw",
    ):
        assert words in printed, words
    (run / "iter_0000030" / "weights_rank_00001.safetensors").unlink()
    found = inspect_directory(run)
    assert "latest names iter_0000030" in next(found)
    with pytest.raises(UserError, match=r"weights_rank_00001\.safetensors: missing"):
        list(found)
    convert("import", "--hf", write_directory(tmp_path / "hf"), "--save", tmp_path / "ours")
    assert "continue with pretrain_ladder.py --load DIR --finetune" in lines_of(tmp_path / "ours")
    save_model(tmp_path / "experts", "glm4_moe")
    assert "\nexperts: 6 of width 10, 2 a token, in 3 layers, with a shared" in lines_of(tmp_path / "experts")
    for path, words in ((tmp_path, "no checkpoint of a supported kind"), (tmp_path / "absent", "no such directory")):
        with pytest.raises(UserError, match=words):
            lines_of(path)

"""The wiring of imported models, compared with the recurrence of the paper for every mask of layers."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from megatron_ladder.checkpoint.format import Checkpoint
from megatron_ladder.config.run import parse_run, resolve_run
from megatron_ladder.errors import UserError
from megatron_ladder.train.resume import model_differences
from tests.unit.convert.hand_made import CONFIG, write_directory
from tests.unit.convert.saved_models import convert, our_logits, save_model

MASKS = [mask for size in range(5) for mask in itertools.combinations(range(4), size)]


def by_recurrence(llama: LlamaForCausalLM, ladder: tuple[int, ...], tokens: Tensor) -> Tensor:
    """Compute logits with transformers' sub-blocks and the recurrence of arXiv 2501.06589.

    With x_i the stream after sub-block i (x_{-1} = x_{-2} the embedding): x_i = x_{i-1} + h_i(x_{i-2}) in a ladder
    layer, x_i = x_{i-1} + h_i(x_{i-1}) in all other layers.
    """
    base: Any = llama.model
    newest = before = base.embed_tokens(tokens)
    length = tokens.shape[1]
    rotary = base.rotary_emb(newest, torch.arange(length).unsqueeze(0))
    mask = torch.full((length, length), float("-inf")).triu(1)[None, None]
    for index, layer in enumerate(base.layers):

        def attention(x: Tensor, layer: nn.Module = layer) -> Tensor:
            normed = layer.input_layernorm(x)
            output: Tensor = layer.self_attn(normed, position_embeddings=rotary, attention_mask=mask)[0]
            return output

        def mlp(x: Tensor, layer: nn.Module = layer) -> Tensor:
            output: Tensor = layer.mlp(layer.post_attention_layernorm(x))
            return output

        for sub_block in (attention, mlp):
            read = before if index in ladder else newest
            newest, before = newest + sub_block(read), newest
    logits: Tensor = llama.lm_head(base.norm(newest))
    return logits


def test_every_mask_of_four_layers_follows_the_recurrence(tmp_path: Path) -> None:
    llama = save_model(tmp_path / "hf")
    assert isinstance(llama, LlamaForCausalLM)
    tokens = torch.randint(0, 301, (2, 20))
    seen: list[Tensor] = []
    for mask in MASKS:
        layers = "[" + ",".join(map(str, mask)) + "]" if mask else "none"
        words = "--ladder-layers", layers, "--overwrite"
        convert("import", "--hf", tmp_path / "hf", "--save", tmp_path / "ours", *words)
        with torch.no_grad():
            expected = by_recurrence(llama, mask, tokens)
        assert (our_logits(tmp_path / "ours", tokens) - expected).abs().max() <= 1e-5 * expected.abs().max()
        assert all((expected - other).abs().max() > 1e-3 for other in seen), "two masks give the same logits"
        seen.append(expected)
    with torch.no_grad():
        assert torch.allclose(seen[0], llama(tokens).logits, atol=1e-5)


@pytest.mark.parametrize(
    ("source", "words", "expected"),
    [
        ({}, [], ("standard", (), 1)),
        ({}, ["--ladder-layers", "1"], ("ladder", (1,), 1)),
        ({}, ["--residual-mode", "ladder"], ("ladder", (0, 1), 1)),
        ({}, ["--ladder-layers", "all", "--residual-staleness", "2"], ("ladder", (0, 1), 2)),
        ({"model_type": "llamaLadder", "ladder_layers": 1}, [], ("ladder", (1,), 1)),
        ({"model_type": "llamaLadder", "ladder_layers": [0]}, [], ("ladder", (0,), 1)),
        ({"model_type": "llamaLadder", "ladder_layers": None}, [], ("standard", (), 1)),
        ({"model_type": "llamaLadder", "ladder_layers": 1}, ["--residual-mode", "standard"], ("standard", (), 1)),
        ({"model_type": "llamaLadder", "ladder_layers": 1}, ["--ladder-layers", "0"], ("standard", (), 1)),
        ({"model_type": "llamaLadder", "ladder_layers": 1}, ["--residual-staleness", "2"], ("ladder", (1,), 2)),
    ],
)
def test_wirings(
    tmp_path: Path, source: dict[str, Any], words: list[str], expected: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = write_directory(tmp_path / "hf", {**CONFIG, **source})
    convert("import", "--hf", directory, "--save", tmp_path / "ours", *words)
    model = Checkpoint.open(tmp_path / "ours").model()
    assert (model.residual_mode, model.ladder_layers, model.residual_staleness) == expected
    assert ("is overridden" in capsys.readouterr().out) == bool(words)


@pytest.mark.parametrize("words", [[], ["--residual-mode", "ladder"]])
def test_no_ladder_layers_are_the_standard_wiring(
    tmp_path: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    directory = write_directory(tmp_path / "hf")
    convert("import", "--hf", directory, "--save", tmp_path / "ours", "--ladder-layers", "none", *words)
    assert "is overridden" not in capsys.readouterr().out
    checkpoint = Checkpoint.open(tmp_path / "ours")
    sizes = "--num-layers 2 --hidden-size 8 --ffn-hidden-size 12 --num-attention-heads 2 --num-key-value-heads 1"
    for wiring in ("standard", "ladder --ladder-layers none"):
        errors: list[str] = []
        given = f"{sizes} --seq-length 32 --train-iters 1 --lr 1e-3 --load c --finetune --residual-mode {wiring}"
        run = resolve_run(parse_run(given.split(), errors), 16, 1, errors)
        assert not errors and not model_differences(run, checkpoint, vocabulary_is_known=True)


def test_code_in_a_directory_is_neither_run_nor_copied(tmp_path: Path) -> None:
    config = {**CONFIG, "model_type": "llamaLadder", "ladder_layers": 1, "auto_map": {"AutoConfig": "evil.Config"}}
    directory = write_directory(tmp_path / "hf", config)
    (directory / "evil.py").write_text("raise SystemExit(7)")
    convert("import", "--hf", directory, "--save", tmp_path / "ours", "--verify")
    convert("export", "--load", tmp_path / "ours", "--hf", tmp_path / "back")
    assert not list(tmp_path.glob("ours/*/*.py")) and not (tmp_path / "back" / "evil.py").exists()


def test_an_exported_hybrid_can_be_imported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_model(tmp_path / "hf", dtype=torch.bfloat16)
    convert("import", "--hf", tmp_path / "hf", "--save", tmp_path / "ours", "--ladder-layers", "2", "--verify")
    printed = capsys.readouterr().out
    assert "all 39 tensors are bitwise equal" in printed and "verified: logits on 64 random tokens agree" in printed
    convert("export", "--load", tmp_path / "ours", "--hf", tmp_path / "back", "--verify")
    printed = capsys.readouterr().out
    assert "all 39 tensors are bitwise equal" in printed and "verified: logits on 64 random tokens agree" in printed
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert config["model_type"] == "megatron_ladder" and config["ladder_layers"] == [2, 3]
    convert("import", "--hf", tmp_path / "back", "--save", tmp_path / "again")
    models = [Checkpoint.open(tmp_path / name).model() for name in ("ours", "again")]
    assert models[0] == models[1] and models[0].ladder_layers == (2, 3)


def test_a_model_of_several_element_types_is_verified_exactly(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_model(tmp_path / "hf", dtype=torch.bfloat16)
    path = tmp_path / "hf" / "model.safetensors"
    tensors = {name: tensor.float() if "norm" in name else tensor for name, tensor in load_file(path).items()}
    save_file({name: tensor + 1e-4 * (tensor.dtype == torch.float32) for name, tensor in tensors.items()}, path)
    convert("import", "--hf", tmp_path / "hf", "--save", tmp_path / "ours", "--verify")
    convert("export", "--load", tmp_path / "ours", "--hf", tmp_path / "back", "--verify")
    assert capsys.readouterr().out.count("verified: logits on 64 random tokens agree") == 2


def test_verify_compares_logits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory with intact tensors whose config.json has another wiring."""
    from megatron_ladder.convert import conversions

    save_model(tmp_path / "hf")
    convert("import", "--hf", tmp_path / "hf", "--save", tmp_path / "ours", "--ladder-layers", "2")
    real = conversions.hf_config
    monkeypatch.setattr(conversions, "hf_config", lambda model, **ids: real(model, **ids) | {"ladder_layers": 1})
    with pytest.raises(RuntimeError, match="logits of transformers and ours differ"):
        convert("export", "--load", tmp_path / "ours", "--hf", tmp_path / "back", "--verify")
    assert not (tmp_path / "back").exists()


def test_wirings_of_one_norm_need_weights_of_one_norm(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="every layer of the source has two norms"):
        convert(
            "import",
            "--hf",
            write_directory(tmp_path / "hf"),
            "--save",
            tmp_path / "ours",
            "--residual-mode",
            "ladder-parallel",
        )

"""Invalid, damaged and hostile directories are rejected with a message, and nothing is written."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, save

from megatron_ladder.checkpoint import hf_config
from megatron_ladder.checkpoint.hf_types import OWN_TYPE, TYPES, WINDOWS
from megatron_ladder.checkpoint.publish import write_manifest
from megatron_ladder.checkpoint.tensor_file import checksum_of
from megatron_ladder.generate.loading import open_model
from tests.helpers.runs import errors_of
from tests.unit.convert.hand_made import CONFIG, SHAPES, write_directory, write_sharded, zeros
from tests.unit.convert.hf_models import SINKS
from tests.unit.convert.saved_models import convert, small_config, write_cut_checkpoint
from tests.unit.convert.test_remote_code import LLAMA31

Q = "model.layers.1.self_attn.q_proj.weight"


def rejection(directory: Path) -> str:
    """Return the message of a rejected import, which must write nothing."""
    before = sorted(directory.parent.iterdir())
    messages = errors_of(convert, "import", "--hf", directory, "--save", directory.parent / "refused")
    assert messages and sorted(directory.parent.iterdir()) == before
    return "\n".join(messages)


def test_swapped_directories_and_those_of_both_formats(tmp_path: Path) -> None:
    hf, ours, both = write_directory(tmp_path / "hf"), tmp_path / "ours", tmp_path / "both"
    convert("import", "--hf", hf, "--save", ours)
    shutil.copytree(ours, both)
    shutil.copytree(hf, both, dirs_exist_ok=True)
    shutil.copytree(hf, ours / "both" / "iter_0000000")
    new = tmp_path / "new"
    commands: list[tuple[list[object], str]] = [
        (["import", "--hf", ours, "--save", new], f"--hf {ours}: holds training checkpoints"),
        (["import", "--hf", ours, "--save", hf], f"--save {hf}: is a Hugging Face directory, which import reads"),
        (["export", "--load", hf, "--hf", ours], f"--hf {ours}: holds training checkpoints: give it to --load"),
        (["export", "--load", hf, "--hf", new], f"import --hf {hf} --save DIR"),
        (["reshape", "--load", hf, "--save", new], f"import --hf {hf} --save DIR"),
        (["export", "--load", ours, "--hf", both, "--overwrite"], f"{both}: holds config.json "),
    ]
    unclear = (both, ours / "both" / "iter_0000000")
    for path in unclear:
        opening = ["import", "--save", new, "--hf"], ["export", "--hf", new, "--load"], ["inspect"]
        commands += [([*words, path], f"{path}: holds config.json ") for words in opening]
    for command, words in commands:
        (error,) = errors_of(convert, *command)
        assert words in error and not new.exists(), error
    for path in unclear:
        (error,) = errors_of(open_model, path, None, None)
        assert "unclear" in error


HOSTILE_NUMBERS = ["1e400", "NaN", "-1", '"8"', "0"]
"""Values in JSON that are not acceptable for any of the numbers below."""
LLAMA3 = LLAMA31["rope_scaling"]


@pytest.mark.parametrize("value", HOSTILE_NUMBERS)
def test_numbers_of_a_configuration(tmp_path: Path, value: str) -> None:
    directory = write_directory(tmp_path / "hf")
    valid = {**CONFIG, "initializer_range": 0.02, "rope_scaling": LLAMA3}
    (directory / "config.json").write_text(json.dumps(valid))
    convert("import", "--hf", directory, "--save", tmp_path / "ours", "--dry-run")
    tokens = {key: 1 for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    for key, number in {**valid, **LLAMA3, **tokens}.items():
        is_valid = (key in (*tokens, "initializer_range") and value == "0") or (
            (key, value) in (("bos_token_id", "-1"), ("pad_token_id", "-1"))
        )
        if type(number) not in (int, float) or is_valid:
            continue
        changed = {**valid, **tokens, "rope_scaling": {**LLAMA3}}
        (changed["rope_scaling"] if key in LLAMA3 else changed)[key] = "HOSTILE"  # type: ignore[index]
        (directory / "config.json").write_text(json.dumps(changed).replace('"HOSTILE"', value))
        message = rejection(directory)
        assert "config.json" in message and len(message) < 1000, key


def reshaped(name: str, shape: list[int]) -> bytes:
    return zeros(SHAPES | {name: shape})


MIXTRAL = {"model_type": "mixtral", "num_local_experts": 3, "num_experts_per_tok": 2}
EXPERTS = [{f"block_sparse_moe.experts.{one}.w2.weight": [8, 12 - one] for one in range(4)}]
EXPERTS += [{"mlp.experts.gate_up_proj": [2, 24, 8], "mlp.experts.down_proj": [4, 8, 12]}]
WRONG, STACKED = (zeros(SHAPES | {f"model.layers.0.{name}": of[name] for name in of}) for of in EXPERTS)


@pytest.mark.parametrize(
    ("changes", "weights", "words"),
    [
        ({"auto_map": {"AutoModel": "evil.Model"}}, zeros(), ["config.json", "not run"]),
        ({"auto_map": {}, "architectures": ["OddForCausalLM"]}, zeros(), ["['OddForCausalLM']", "LlamaForCausalLM"]),
        (
            {"model_type": "longcat_flash", "auto_map": {}},
            zeros(),
            ["model_type longcat_flash needs experts that compute nothing, which are not supported"],
        ),
        # Memory for a thousand million layers would not be available.
        ({"num_hidden_layers": 10**9}, zeros(), ["found 1000000000, expected at most 21, the number of stored"]),
        # No import of a model drops its experts without a word.
        (MIXTRAL, zeros(), ["1.block_sparse_moe.experts.0.w1.weight: is missing (and 2", "up_proj.weight: unexpected"]),
        (MIXTRAL, WRONG, ["1.w2.weight: found shape [8, 11], expected [8, 12]", "3.w2.weight: unexpected tensor"]),
        (
            MIXTRAL,
            STACKED,
            ["experts.gate_up_proj: found shape [2, 24, 8], expected [3, 24, 8]", "found shape [4, 8, 12]"],
        ),
        ({}, zeros()[:-1], ["model.safetensors: not a complete safetensors file: truncated"]),
        *(({}, data, ["not a complete safetensors file"]) for data in (b"\2\0\0", b"\0\0\0\0\0\0\0\x40{}")),
        ({}, reshaped(Q, [8, 4]), [Q, "found shape [8, 4]", "expected [8, 8]"]),
        ({}, zeros(SHAPES | {f"{Q}s": [8, 8]}), [f"{Q}s: unexpected tensor"]),
        ({}, zeros({name: SHAPES[name] for name in SHAPES if name != Q}), [f"{Q}: is missing"]),
        ({}, zeros(dtype=torch.int8), ["model.embed_tokens.weight", "found int8", "quantised"]),
        (
            {"tie_word_embeddings": True},
            reshaped("lm_head.weight", [15, 8]),
            ["differs from model.embed_tokens.weight"],
        ),
    ],
)
def test_models_that_cannot_be_imported(
    tmp_path: Path, changes: dict[str, Any], weights: bytes, words: list[str]
) -> None:
    message = rejection(write_directory(tmp_path / "hf", CONFIG | changes, weights))
    for word in words:
        assert word in message, message


@pytest.mark.parametrize(
    ("listed", "stored", "words"),
    [
        ({Q: "a.safetensors"}, {}, f"{Q}: is in b.safetensors, but listed in a.safetensors"),
        ({}, {"stray": [2]}, "model.safetensors.index.json: stray: is in a.safetensors, but listed in no file"),
        ({"absent": "c.safetensors"}, {}, "c.safetensors: no such file"),
        *(({Q: name}, {}, repr(name)) for name in ("../x.safetensors", "/x.safetensors", "\0.safetensors")),
    ],
)
def test_an_index_lists_the_tensors_of_files_in_the_directory(
    tmp_path: Path, listed: dict[str, str], stored: dict[str, list[int]], words: str
) -> None:
    (tmp_path / "x.safetensors").write_bytes(zeros())
    assert words in rejection(write_sharded(tmp_path / "hf", listed, stored))


def test_only_links_into_the_hugging_face_cache_leave_a_directory(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "models--a--b" / "blobs", tmp_path / "models--a--b" / "snapshots" / "0123"
    blobs.mkdir(parents=True)
    write_directory(snapshot)
    for name in ("config.json", "model.safetensors"):
        os.rename(snapshot / name, blobs / f"hash-{name}")
        os.symlink(f"../../blobs/hash-{name}", snapshot / name)
    convert("import", "--hf", snapshot, "--save", tmp_path / "ours")
    for name in ("model.safetensors", "config.json", "LICENSE"):
        linked = write_directory(tmp_path / name)
        (linked / name).unlink(missing_ok=True)
        os.symlink(blobs / "hash-model.safetensors", linked / name)
        assert f"{name!r} is {blobs}/hash-model.safetensors, outside of the directory" in rejection(linked)


def test_a_stored_head_of_a_tied_model_must_be_the_embedding(tmp_path: Path) -> None:
    tied = {**CONFIG, "tie_word_embeddings": True}
    convert("import", "--hf", write_directory(tmp_path / "equal", tied), "--save", tmp_path / "ours")
    weights = load(zeros())
    weights["lm_head.weight"][-1, -1] = 1
    other = write_directory(tmp_path / "hf", tied, save(weights))
    assert "differs from model.embed_tokens.weight" in rejection(other)
    (error,) = errors_of(open_model, other, None, None)
    assert error.startswith(f"--model {other}: lm_head.weight differs from model.embed_tokens.weight")
    weights["lm_head.weight"] = torch.zeros(())
    assert "differs from model.embed_tokens.weight" in rejection(write_directory(other, tied, save(weights)))


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"qk_layernorm": True}, "--qk-layernorm"), ({"rotary_percent": 0.5}, "--rotary-percent 0.5")],
)
def test_attentions_that_transformers_lacks_are_not_exported(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    write_cut_checkpoint(tmp_path / "run", small_config(**SINKS | changes), {})
    (error,) = errors_of(convert, "export", "--load", tmp_path / "run", "--hf", tmp_path / "hf")
    assert error == (
        f"--softmax-type learnable with {words}: transformers has no such attention: generate from the checkpoint "
        "instead"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_models_that_no_type_expresses_are_not_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All models have a type today, so a key is taken from it."""
    own = TYPES[OWN_TYPE]
    keys = tuple(key for key in own.keys if key not in WINDOWS)
    monkeypatch.setitem(hf_config.TYPES, OWN_TYPE, replace(own, keys=keys))
    write_cut_checkpoint(tmp_path / "run", small_config(window_size=4, window_layers=(0, 2), add_qkv_bias=True), {})
    (error,) = errors_of(convert, "export", "--load", tmp_path / "run", "--hf", tmp_path / "hf")
    lost = "--window-size 4 and --window-layers 0 2"
    assert error == f"no type of Hugging Face models has {lost}: generate from the checkpoint instead"
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize("verb", ["reshape", "export"])
def test_damaged_files_are_reported(tmp_path: Path, verb: str) -> None:
    """An export reads no optimizer state, and a dry run no tensors."""
    write_cut_checkpoint(tmp_path / "run", small_config(), {})
    directory = tmp_path / "run" / "iter_0000030"
    manifest = json.loads((directory / "manifest.json").read_bytes())
    del manifest["manifest_checksum"]
    names = ["weights_rank_00001.safetensors", "optimizer_rank_00001.safetensors", "merges.txt"]
    content = (directory / names[2]).read_bytes()
    manifest["files"].append({"name": names[2], "size": len(content), "checksum": checksum_of(content)})
    write_manifest(directory, manifest)
    words = [verb, "--load", tmp_path / "run", "--hf" if verb == "export" else "--save", tmp_path / "result"]
    for name in names:
        damaged = bytearray((directory / name).read_bytes())
        damaged[-1] ^= 1
        (directory / name).write_bytes(damaged)
    convert(*words, "--dry-run")
    messages = errors_of(convert, *words)
    expected = {names[0], names[2]} if verb == "export" else {*names}
    assert {line.split(": ")[0].split("/")[-1] for line in messages} == expected
    assert all(line.endswith("choose another checkpoint with --load") for line in messages)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]

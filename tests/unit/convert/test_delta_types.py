"""Directories of Qwen3-Next and of the text models of Qwen3.5, compared with transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ladder.blueprint.boxes import Box
from megatron_ladder.checkpoint.hf_config import hf_config, hf_type, model_config_from_hf
from megatron_ladder.checkpoint.hf_directory import open_hf_directory
from tests.helpers.runs import errors_of
from tests.unit.convert.saved_models import (
    MODELS,
    SIZES,
    assert_equal_bits,
    convert,
    our_logits,
    save_model,
    tensors_of,
)

KINDS = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
TOLERANCE = 1e-4


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_round_trips_are_bitwise_and_logits_those_of_transformers(tmp_path: Path, kind: str, tied: bool) -> None:
    theirs = save_model(tmp_path / "hf", kind, tie_word_embeddings=tied)
    for name, parameter in theirs.named_parameters():
        # Slow decay, of which transformers' chunks lose less, and queries and keys far from length 0.
        if name.endswith("A_log"):
            parameter.data -= 3
        elif "conv1d" in name:
            parameter.data *= 10
    theirs.save_pretrained(tmp_path / "hf")
    convert("import", "--hf", tmp_path / "hf", "--save", tmp_path / "ours")
    tokens = torch.randint(0, 301, (2, 70), generator=torch.Generator().manual_seed(1))
    expected = theirs(tokens).logits
    assert (our_logits(tmp_path / "ours", tokens) - expected).abs().max() <= TOLERANCE * expected.abs().max()
    convert("export", "--load", tmp_path / "ours", "--hf", tmp_path / "back")
    assert_equal_bits(tensors_of(tmp_path / "back"), tensors_of(tmp_path / "hf"))
    reread = open_hf_directory(tmp_path / "back")
    assert reread.model_type == kind and reread.model == open_hf_directory(tmp_path / "hf").model


def test_types_of_elements_are_kept(tmp_path: Path) -> None:
    """Files in bf16 have decays and norms of heads in fp32."""
    theirs = save_model(tmp_path / "hf", "qwen3_5_text", torch.bfloat16)
    for name, parameter in theirs.named_parameters():
        if name.endswith((".A_log", "linear_attn.norm.weight")):
            parameter.data = parameter.data.float() + 1e-5
    theirs.save_pretrained(tmp_path / "hf")
    assert {tensor.dtype for tensor in tensors_of(tmp_path / "hf").values()} == {torch.bfloat16, torch.float32}
    convert("import", "--hf", tmp_path / "hf", "--save", tmp_path / "ours")
    convert("export", "--load", tmp_path / "ours", "--hf", tmp_path / "back")
    assert_equal_bits(tensors_of(tmp_path / "back"), tensors_of(tmp_path / "hf"))


@pytest.mark.parametrize("kind", KINDS)
def test_parts_of_packs_are_read_as_of_the_whole(tmp_path: Path, kind: str) -> None:
    save_model(tmp_path / "hf", kind)
    directory = open_hf_directory(tmp_path / "hf")
    for name, weight in directory.tensors.items():
        if ".attention." in name:
            whole = weight.whole()
            rows = whole.shape[0]
            for start, stop in ((0, rows), (1, rows - 1), (rows // 2, rows)):
                box = Box((start, *[0] * (whole.dim() - 1)), (stop - start, *whole.shape[1:]))
                out = torch.empty(box.extent, dtype=whole.dtype)
                directory.read_weight(name, box, out)
                assert torch.equal(out, whole[start:stop]), name


def keys_of(kind: str, **changes: Any) -> dict[str, Any]:
    family, own = MODELS[kind]
    keys: dict[str, Any] = family.config_class(**{**SIZES, **own}).to_dict()
    return keys | changes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"output_gate_type": "sigmoid"}, "output_gate_type: found 'sigmoid', expected 'swish'"),
        ({"attn_output_gate": False}, "attn_output_gate: found False, expected True"),
        ({"linear_num_value_heads": 3}, "linear_num_value_heads 3 is not divisible by linear_num_key_heads 2"),
        ({"layer_types": ["linear_attention"]}, "layer_types: found ['linear_attention'], expected one for each of 4"),
    ],
)
def test_what_is_not_computed_is_refused(changes: dict[str, Any], message: str) -> None:
    (error,) = errors_of(model_config_from_hf, keys_of("qwen3_5_text", **changes))
    assert message in error


def test_linear_attention_in_other_types_is_refused() -> None:
    changes = {"layer_types": ["full_attention", "linear_attention", "full_attention", "full_attention"]}
    (error,) = errors_of(model_config_from_hf, keys_of("llama", **changes))
    assert "layer_types[1]: found 'linear_attention', expected 'full_attention'" in error


def test_the_type_of_a_model_from_scratch() -> None:
    dense, sparse = (model_config_from_hf(keys_of(kind)) for kind in ("qwen3_5_text", "qwen3_5_moe_text"))
    assert hf_type(dense) == "qwen3_5_text" and hf_type(sparse) == "qwen3_5_moe_text"
    assert hf_type(model_config_from_hf(keys_of("qwen3_next", mlp_only_layers=[])), "qwen3_next") == "qwen3_next"
    assert hf_config(dense, dtype="bfloat16")["mamba_ssm_dtype"] == "float32"
    late = {"residual_mode": "ladder", "ladder_layers": (0, 1, 2, 3)}
    (error,) = errors_of(hf_type, type(dense)(**vars(dense) | late))
    assert "--residual-mode ladder with --experimental-attention-variant gated_delta_net: only the model of" in error


def test_without_layer_types_each_fourth_layer_has_softmax_attention() -> None:
    keys = keys_of("qwen3_5_text")
    del keys["layer_types"]
    assert model_config_from_hf(keys).linear_attention_layers == (0, 1, 2)
    assert model_config_from_hf(keys | {"full_attention_interval": 2}).linear_attention_layers == (0, 2)

"""Directories of gpt-oss: stacks of experts with alternating columns, in bf16 and in MXFP4."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from ladder_lab.bench.sizes import SIZES as SHAPES
from megatron_ladder.blueprint.boxes import Box
from megatron_ladder.blueprint.model_flags import ModelTraits
from megatron_ladder.blueprint.tensors import parameter_count
from megatron_ladder.checkpoint.hf_config import hf_config, hf_type, model_config_from_hf
from megatron_ladder.checkpoint.hf_directory import open_hf_directory
from megatron_ladder.convert.conversions import plan_import
from megatron_ladder.convert.copying import carry_out
from megatron_ladder.convert.options import ImportOptions
from tests.helpers.live_bytes import LiveBytes
from tests.helpers.pairwise import quick_share
from tests.helpers.runs import errors_of
from tests.unit.checkpoint.test_mxfp4 import PUBLISHED
from tests.unit.convert.saved_models import (
    YARN,
    assert_equal_bits,
    check_round_trip,
    config_of,
    convert,
    save_model,
    tensors_of,
)
from tests.unit.convert.test_latent_types import edit_config
from tests.unit.convert.test_refusals import rejection

KINDS = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
CASES: dict[str, dict[str, Any]] = {
    "alternating windows": {},
    "odd sizes": {"intermediate_size": 21, "num_local_experts": 5, "hidden_size": 50, "layer_types": KINDS},
    "tied": {"tie_word_embeddings": True, "attention_bias": False, "rope_parameters": YARN},
    "no windows": {"layer_types": ["full_attention"] * 4, "swiglu_limit": 7.0},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", quick_share(CASES, 3))
def test_round_trips_are_bitwise_and_logits_those_of_transformers(
    tmp_path: Path, name: str, dtype: torch.dtype
) -> None:
    check_round_trip(tmp_path, "gpt_oss", dtype, "gpt_oss", **CASES[name])


def save_mxfp4(folder: Path, layers: int = 2) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Save a model whose experts are in MXFP4; return the stored tensors, and the weights that they mean."""
    sizes = {"num_hidden_layers": layers, "hidden_size": 64, "intermediate_size": 96}
    save_model(folder, "gpt_oss", torch.bfloat16, **sizes)
    stored, weights = tensors_of(folder), tensors_of(folder)
    generator = torch.Generator().manual_seed(3)
    for name, stack in weights.items():
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, columns, rows = stored.pop(name).shape
            shape = (experts, rows, columns // 32)
            blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
            scales = torch.randint(120, 125, shape, dtype=torch.uint8, generator=generator)
            stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            weights[name] = convert_moe_packed_tensors(blocks, scales)
            assert weights[name].shape == stack.shape
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    edit_config(folder, quantization_config=PUBLISHED)
    return stored, weights


def test_experts_in_mxfp4_are_dequantised_as_in_transformers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hf, ours, back = tmp_path / "hf", tmp_path / "ours", tmp_path / "back"
    stored, weights = save_mxfp4(hf)
    convert("inspect", hf)
    assert f"weights: {len(stored)} tensors, MXFP4 and bfloat16" in capsys.readouterr().out
    convert("import", "--hf", hf, "--save", ours, "--verify")
    printed = capsys.readouterr().out
    assert "*** weights are stored in MXFP4 and read as bfloat16 ***" in printed
    assert "bitwise equal to their sources, converted from MXFP4" in printed
    assert "verified: the logits of the dequantised source in transformers" in printed
    convert("export", "--load", ours, "--hf", back, "--verify", "--max-shard-size", "100KB")
    assert_equal_bits(weights, tensors_of(back))
    assert "quantization_config" not in config_of(back)


@pytest.mark.parametrize("quantised", [True, False])
def test_a_rank_reads_its_part_of_a_stack(tmp_path: Path, quantised: bool) -> None:
    stored, weights = save_mxfp4(tmp_path)
    if not quantised:
        save_file(weights, tmp_path / "model.safetensors")
        edit_config(tmp_path, quantization_config=None)
    directory = open_hf_directory(tmp_path)
    prefix = "model.layers.1.mlp.experts"
    gates, ups = (weights[f"{prefix}.gate_up_proj"][..., kind::2].mT for kind in (0, 1))
    expected = {
        "gate_proj.weight": gates,
        "up_proj.weight": ups,
        "down_proj.weight": weights[f"{prefix}.down_proj"].mT,
        "gate_proj.bias": weights[f"{prefix}.gate_up_proj_bias"][:, 0::2],
        "up_proj.bias": weights[f"{prefix}.gate_up_proj_bias"][:, 1::2],
        "down_proj.bias": weights[f"{prefix}.down_proj_bias"],
    }
    for kind, whole in expected.items():
        # The second of four ranks.
        dim = 2 if kind == "down_proj.weight" else 1
        size = whole.shape[dim] // 4
        offset, extent = [0] * whole.dim(), list(whole.shape)
        offset[dim], extent[dim] = size, size
        out = torch.empty(extent)
        # The first read of all makes a table.
        directory.read_weight("layers.0.experts.up_proj.weight", Box((0, 0, 0), (1, 1, 1)), torch.empty(1, 1, 1))
        with LiveBytes() as memory:
            directory.read_weight(f"layers.1.experts.{kind}", Box(tuple(offset), tuple(extent)), out)
        assert out.equal(whole.narrow(dim, size, size).float()), kind
        # Groups of 32 and indices of 4 bytes, for one expert.
        assert memory.peak <= 8 * out[0].numel() * 2, kind


def test_memory_does_not_grow_with_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_ladder.convert.training_checkpoint._MOST_BYTES", 100_000)
    peaks = []
    for layers in (2, 6):
        save_mxfp4(tmp_path / f"hf_{layers}", layers)
        options = ImportOptions(hf=tmp_path / f"hf_{layers}", save=tmp_path / f"ours_{layers}")
        conversion = plan_import(options)
        # The mapped files are open already.
        with LiveBytes() as memory:
            carry_out(conversion, options, lambda line: None)
        peaks.append(memory.peak)
    assert peaks[1] <= 1.01 * peaks[0]


X = "model.layers.1.mlp.experts.gate_up_proj"
REFUSED: dict[str, tuple[dict[str, Tensor | None], str]] = {
    "no scales": ({f"{X}_scales": None}, f"{X}_scales: is missing; expected shape [6, 192, 2], one for each group"),
    "groups": (
        {f"{X}_blocks": torch.zeros(6, 192, 4, 8, dtype=torch.uint8)},
        f"{X}_blocks: found shape [6, 192, 4, 8]",
    ),
    "neither": ({f"{X}_blocks": None, f"{X}_scales": None}, f"{X}: is missing; expected shape [6, 64, 192]"),
    "other experts": (
        {f"{X}_blocks": torch.zeros(5, 192, 2, 16).byte(), f"{X}_scales": torch.zeros(5, 192, 2).byte()},
        f"{X}: found shape [5, 64, 192], expected [6, 64, 192]",
    ),
    "transposed": ({f"{X}_bias": torch.zeros(192, 6)}, f"{X}_bias: found shape [192, 6], expected [6, 192]"),
    "one tensor each": (
        {X.replace("gate_up", "0.gate") + ".weight": torch.zeros(96, 64)},
        "unexpected tensor in this g",
    ),
    "both": ({X: torch.zeros(6, 64, 192)}, f"{X}: is in the files, and so is {X}_blocks: remove one of them"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_stacks_that_cannot_be_read_are_refused(tmp_path: Path, name: str) -> None:
    changes, sentence = REFUSED[name]
    changed = {**save_mxfp4(tmp_path / "hf")[0], **changes}
    stored = {key: tensor for key, tensor in changed.items() if tensor is not None}
    save_file(stored, tmp_path / "hf" / "model.safetensors")
    message = rejection(tmp_path / "hf")
    assert message.startswith(f"--hf {tmp_path / 'hf'}: ") and sentence in message, message
    assert "\n" not in message, message


def test_scales_too_large_for_bfloat16_are_refused(tmp_path: Path) -> None:
    stored, _ = save_mxfp4(tmp_path / "hf")
    stored[f"{X}_scales"].fill_(255)
    save_file(stored, tmp_path / "hf" / "model.safetensors")
    (error,) = errors_of(convert, "import", "--hf", tmp_path / "hf", "--save", tmp_path / "ours")
    assert f"{X}: contains NaN or infinity" in error and not (tmp_path / "ours" / "latest").exists()


FOUR = {"num_hidden_layers": 4}
WRONG_KEYS: dict[str, tuple[dict[str, Any], str]] = {
    "method": (
        {"quant_method": "awq"},
        "quant_method: found 'awq', expected 'mxfp4': only MXFP4 in blocks of 32 is read",
    ),
    "FP8": (
        {"quant_method": "fp8"},
        "FineGrainedFP8Config(dequantize=True)).save_pretrained(NEW, save_original_format",
    ),
}


@pytest.mark.parametrize("name", WRONG_KEYS)
def test_other_quantisations_are_refused(tmp_path: Path, name: str) -> None:
    changes, sentence = WRONG_KEYS[name]
    save_mxfp4(tmp_path / "hf")
    edit_config(tmp_path / "hf", quantization_config=PUBLISHED | changes)
    assert sentence in rejection(tmp_path / "hf")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"layer_types": ["full_attention"] * 3}, "layer_types: found ['full_attention', 'full_attention', 'full_att"),
        ({"layer_types": ["chunked_attention"] * 4}, "layer_types[0]: found 'chunked_attention', expected "),
        ({"sliding_window": None}, "sliding_window: found nothing, expected a number of positions, since layer_types"),
        ({"swiglu_alpha": 1.0}, "swiglu_alpha: found 1.0, expected 1.702: other gpt_oss models are not supported"),
        ({"swiglu_limit": None}, "swiglu_limit: found nothing, expected a value"),
        ({"experts_per_token": 3}, "experts_per_token and num_experts_per_tok: found '3 and 2', expected one number"),
        ({"head_dim": None}, "head_dim: found nothing, expected a value"),
    ],
)
def test_other_configurations_are_refused(tmp_path: Path, changes: dict[str, Any], sentence: str) -> None:
    save_model(tmp_path / "hf", "gpt_oss")
    edit_config(tmp_path / "hf", **changes)
    assert sentence in rejection(tmp_path / "hf")


GPT_OSS_20B: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "quantization_config": PUBLISHED,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        **{"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096},
        **{"rope_type": "yarn", "truncate": False},
    },
    "rope_theta": 150000,
    "router_aux_loss_coef": 0.9,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
}
"""openai/gpt-oss-20b."""


def test_published_models_are_read() -> None:
    """The counts are those of the tensors that their cards name, gpt-oss-20b and gpt-oss-120b."""
    large = {"num_hidden_layers": 36, "num_local_experts": 128, "layer_types": GPT_OSS_20B["layer_types"][:2] * 18}
    for name, changes, total in (("gpt-oss-20b", {}, 20_914_757_184), ("gpt-oss-120b", large, 116_829_156_672)):
        model = model_config_from_hf(GPT_OSS_20B | changes)
        assert parameter_count(model).total == total
        assert model.window_size == 128 and model.window_layers == tuple(range(0, model.num_layers, 2))
        assert not model.yarn_correction_range_round_to_int and model.softmax_type == "learnable"
        assert hf_type(model) == "gpt_oss" and model_config_from_hf(hf_config(model, dtype="bfloat16")) == model
        same = {key: getattr(SHAPES[name], key) for key in ("max_position_embeddings", "norm_epsilon", "rotary_base")}
        rope = {key: value for key, value in vars(ModelTraits()).items() if key.startswith(("rope_", "yarn_"))}
        assert replace(model, **same, **rope) == SHAPES[name]
    silent = {key: value for key, value in GPT_OSS_20B.items() if key not in ("attention_bias", "swiglu_limit")}
    assert model_config_from_hf(silent) == model_config_from_hf(GPT_OSS_20B)


def test_late_gpt_oss_keeps_its_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hf, ours, late, back = (tmp_path / name for name in ("hf", "ours", "late", "back"))
    save_model(hf, "gpt_oss", torch.bfloat16)
    convert("import", "--hf", hf, "--save", ours, "--residual-mode", "farskip", "--verify")
    convert("export", "--load", ours, "--hf", late, "--verify")
    assert "verified: the logits of the checkpoint and of the exported model in transformers" in capsys.readouterr().out
    assert config_of(late)["model_type"] == "megatron_ladder"
    convert("import", "--hf", late, "--save", tmp_path / "same", "--residual-mode", "standard")
    convert("export", "--load", tmp_path / "same", "--hf", back)
    assert config_of(back)["model_type"] == "gpt_oss" and not list(back.glob("*.py"))
    assert_equal_bits(tensors_of(hf), tensors_of(back))

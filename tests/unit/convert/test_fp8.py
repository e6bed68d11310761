"""Directories of weights in FP8: what they mean, and which are refused."""

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from megatron_ladder.blueprint.boxes import Box
from megatron_ladder.checkpoint.hf_directory import hf_name, open_hf_directory
from megatron_ladder.convert.conversions import plan_import
from megatron_ladder.convert.copying import carry_out
from megatron_ladder.convert.options import ImportOptions
from tests.helpers.fp8 import PUBLISHED, dequantised, quantise
from tests.helpers.live_bytes import LiveBytes
from tests.helpers.pairwise import quick_share
from tests.helpers.runs import errors_of
from tests.unit.convert.saved_models import assert_equal_bits, convert, save_model, tensors_of
from tests.unit.convert.test_latent_types import edit_config
from tests.unit.convert.test_refusals import rejection

COMMON: dict[str, Any] = {"num_hidden_layers": 2, "hidden_size": 256, "intermediate_size": 256}
LATENT: dict[str, Any] = COMMON | {"num_attention_heads": 4, "num_key_value_heads": 4, "n_routed_experts": 3}
LATENT |= {"moe_intermediate_size": 128, "first_k_dense_replace": 1, "num_experts_per_tok": 2}
DIVISIBLE = {"q_lora_rank": 128, "kv_lora_rank": 128, "qk_nope_head_dim": 64, "qk_rope_head_dim": 128, "v_head_dim": 64}
ODD = {"q_lora_rank": 130, "kv_lora_rank": 512, "qk_nope_head_dim": 32, "qk_rope_head_dim": 64, "v_head_dim": 33}
CASES: dict[str, tuple[str, dict[str, Any], torch.dtype]] = {
    "deepseek_v3": ("deepseek_v3", LATENT | DIVISIBLE, torch.float32),
    "deepseek_v3, incomplete blocks": (
        "deepseek_v3",
        LATENT | ODD | {"moe_intermediate_size": 192, "intermediate_size": 321},
        torch.float32,
    ),
    "qwen3": ("qwen3", COMMON | {"num_attention_heads": 4, "head_dim": 64}, torch.bfloat16),
    "qwen3_moe": ("qwen3_moe", COMMON | {"moe_intermediate_size": 96, "head_dim": 40}, torch.float32),
    "glm4_moe": ("glm4_moe", COMMON | {"moe_intermediate_size": 128}, torch.float32),
}
"""Model type, sizes, and element type of the factors. In the second case, `kv_a_proj_with_mqa` has 576 rows."""
Q = "model.layers.0.self_attn.q_proj.weight"


def save_fp8(folder: Path, name: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Save a case; return the stored tensors, and the weights that they mean."""
    kind, changes, dtype = CASES[name]
    save_model(folder, kind, torch.bfloat16, **changes)
    return quantise(folder, dtype)


@pytest.mark.parametrize("name", quick_share(CASES, 5))
def test_weights_are_the_products_rounded_once(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    hf, ours, back = tmp_path / "hf", tmp_path / "ours", tmp_path / "back"
    stored, weights = save_fp8(hf, name)
    is_divided = [all(size % 128 == 0 for size in stored[one].shape) for one in stored if f"{one}_scale_inv" in stored]
    assert any(is_divided) and all(is_divided) == (name in ("deepseek_v3", "qwen3"))
    for one in weights:
        if f"{one}_scale_inv" in stored and all(size % 128 == 0 for size in stored[one].shape):
            pair = stored[one], stored[f"{one}_scale_inv"]
            assert weights[one].equal(Fp8Dequantize(None)._dequantize_one(*pair, output_dtype=torch.bfloat16)), one
    convert("inspect", hf)
    assert "FP8 and bfloat16" in capsys.readouterr().out
    convert("import", "--hf", hf, "--save", ours, "--verify")
    assert "verified: the logits of the dequantised source in transformers" in capsys.readouterr().out
    convert("export", "--load", ours, "--hf", back, "--verify")
    assert_equal_bits(weights, tensors_of(back))
    assert "quantization_config" not in json.loads((back / "config.json").read_text())


def test_any_part_is_read_without_the_rest(tmp_path: Path) -> None:
    """Boxes of tensor-parallel ranks begin anywhere, also inside a block and in a stack of experts."""
    _, weights = save_fp8(tmp_path / "hf", "deepseek_v3, incomplete blocks")
    directory = open_hf_directory(tmp_path / "hf")
    columns = Box((0, 100), (256, 32)), "layers.1.attention.o_proj.weight"
    rows = Box((125, 0), (131, 512)), "layers.1.attention.kv_b_proj.weight"
    inside = Box((300, 100), (7, 140)), "layers.0.attention.kv_a_proj.weight"
    stack = Box((1, 95, 250), (2, 97, 6)), "layers.1.experts.up_proj.weight"
    for box, name in (columns, rows, inside, stack):
        out = torch.empty(box.extent, dtype=torch.float32)
        with LiveBytes() as memory:
            directory.read_weight(name, box, out)
        experts = [hf_name(name, expert) for expert in range(3)] if "experts" in name else []
        whole = torch.stack([weights[one] for one in experts]) if experts else weights[hf_name(name)]
        assert out.equal(whole[box.slices()].float()), name
        # Values, factors and products of a block of rows.
        assert memory.peak <= 5 * 4 * 128 * (box.extent[-1] + 128), name


def test_memory_does_not_grow_with_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_ladder.convert.training_checkpoint._MOST_BYTES", 500_000)
    peaks = []
    for layers in (2, 8):
        hf = tmp_path / f"hf_{layers}"
        save_model(hf, "deepseek_v3", torch.bfloat16, **LATENT | DIVISIBLE | {"num_hidden_layers": layers})
        quantise(hf)
        options = ImportOptions(hf=hf, save=tmp_path / f"ours_{layers}")
        conversion = plan_import(options)
        # The mapped files are open already.
        with LiveBytes() as memory:
            carry_out(conversion, options, lambda line: None)
        peaks.append(memory.peak)
    assert peaks[1] <= 1.01 * peaks[0]


def test_stacks_of_experts_and_scales(tmp_path: Path) -> None:
    """The rows of an up projection begin inside a block of the stack."""
    hf, stacks, ours, back = (tmp_path / name for name in ("hf", "stacks", "ours", "back"))
    for folder, original in ((hf, True), (stacks, False)):
        save_model(folder, "qwen3_moe", torch.bfloat16, **CASES["qwen3_moe"][1], save_original_format=original)
    weights, expected = tensors_of(stacks), tensors_of(hf)
    generator = torch.Generator().manual_seed(3)
    for name, stack in [*weights.items()]:
        if ".mlp.experts." not in name:
            continue
        values = (stack.float() * 100).to(torch.float8_e4m3fn)
        blocks = [stack.shape[0], *(-(-size // 128) for size in stack.shape[1:])]
        factors = torch.rand(blocks, generator=generator) + 0.1
        weights |= {name: values, f"{name}_scale_inv": factors}
        for expert, pair in enumerate(zip(values, factors, strict=True)):
            place, _, kind = name.rpartition(".")
            kinds = ["gate_proj", "up_proj"] if kind == "gate_up_proj" else [kind]
            for part, matrix in zip(kinds, dequantised(*pair).chunk(len(kinds)), strict=True):
                expected[f"{place}.{expert}.{part}.weight"] = matrix
    save_file(weights, stacks / "model.safetensors")
    edit_config(stacks, quantization_config=PUBLISHED)
    convert("import", "--hf", stacks, "--save", ours)
    convert("export", "--load", ours, "--hf", back)
    assert_equal_bits(expected, tensors_of(back))


def test_layers_that_predict_further_tokens_are_dropped_with_their_scales(tmp_path: Path) -> None:
    hf, ours, back = tmp_path / "hf", tmp_path / "ours", tmp_path / "back"
    stored, weights = save_fp8(hf, "deepseek_v3")
    more = {name.replace(".1.", ".2.", 1): one for name, one in stored.items() if name.startswith("model.layers.1.")}
    save_file(stored | {name: one.clone() for name, one in more.items()}, hf / "model.safetensors")
    edit_config(hf, num_nextn_predict_layers=1)
    convert("import", "--hf", hf, "--save", ours, "--drop-mtp")
    convert("export", "--load", ours, "--hf", back)
    assert_equal_bits(weights, tensors_of(back))


ONES = torch.ones(2, 2)
PUBLISHED_AS: dict[str, dict[str, Any]] = {
    "deepseek-ai/DeepSeek-V3.1": {"scale_fmt": "ue8m0"},
    "Qwen/Qwen3-30B-A3B-FP8": {
        "modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate", "model.layers.0.mlp.g"]
    },
    "transformers": {
        "dequantize": False,
        "modules_to_convert": None,
        "modules_to_not_convert": None,
        "expert_dtype": "fp8",
    },
    "vLLM": {"ignored_layers": ["lm_head"]},
}


@pytest.mark.parametrize("name", PUBLISHED_AS)
def test_published_spellings_are_read(tmp_path: Path, name: str) -> None:
    _, weights = save_fp8(tmp_path, "qwen3")
    edit_config(tmp_path, quantization_config=PUBLISHED | PUBLISHED_AS[name])
    assert_equal_bits(weights, open_hf_directory(tmp_path).dequantised())


def test_scales_in_another_file(tmp_path: Path) -> None:
    stored, weights = save_fp8(tmp_path, "deepseek_v3")
    (tmp_path / "model.safetensors").unlink()
    index = {name: "scales" if name.endswith("_scale_inv") else "weights" for name in stored}
    for file in ("scales", "weights"):
        save_file({name: stored[name] for name in stored if index[name] == file}, tmp_path / f"{file}.safetensors")
    weight_map = {name: f"{file}.safetensors" for name, file in index.items()}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert_equal_bits(weights, open_hf_directory(tmp_path).dequantised())


def test_kimi_is_read_as_a_deepseek(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both ends of its YaRN have the same wavelength."""
    hf, ours, back = tmp_path / "hf", tmp_path / "ours", tmp_path / "back"
    yarn = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 16, "rope_theta": 5e4}
    yarn |= {"beta_fast": 1.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}
    save_model(hf, "deepseek_v3", torch.bfloat16, **LATENT | ODD, rope_parameters=yarn, routed_scaling_factor=2.827)
    _, weights = quantise(hf)
    edit_config(hf, model_type="kimi_k2", auto_map={"AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"})
    convert("import", "--hf", hf, "--save", ours, "--verify")
    printed = capsys.readouterr().out
    assert "the model is read as kimi_k2" in printed and "verified: the logits of the dequantised" in printed
    convert("export", "--load", ours, "--hf", back)
    assert_equal_bits(weights, tensors_of(back))
    assert json.loads((back / "config.json").read_text())["model_type"] == "deepseek_v3"


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Tensor | None], str]] = {
    "no scales": ({}, {f"{Q}_scale_inv": None}, f"{Q}_scale_inv: is missing; expected shape [2, 2]"),
    "no weight": ({}, {Q: None}, f"{Q}_scale_inv: scales FP8 weights, but there is no {Q}"),
    "in bf16": ({}, {Q: torch.ones(256, 256).bfloat16()}, f"{Q}_scale_inv: scales FP8 weights, but {Q} is bfloat16"),
    "surplus": ({}, {"model.norm.weight_scale_inv": ONES}, "model.norm.weight_scale_inv: scales FP8 weights, but"),
    "shape": ({}, {f"{Q}_scale_inv": torch.ones(2, 1)}, f"{Q}_scale_inv: found shape [2, 1], expected [2, 2]"),
    "type": ({}, {f"{Q}_scale_inv": ONES.half()}, f"{Q}_scale_inv: found float16, expected float32 or bfloat16"),
    "infinite": ({}, {f"{Q}_scale_inv": ONES / 0}, f"{Q}_scale_inv: contains NaN or infinity"),
    "NaN": ({}, {f"{Q}_scale_inv": (ONES * torch.nan).bfloat16()}, f"{Q}_scale_inv: contains NaN or infinity"),
    "vector": (
        {},
        {"model.norm.weight": torch.ones(256).to(torch.float8_e4m3fn), "model.norm.weight_scale_inv": ONES[0]},
        "model.norm.weight: is in FP8 and has the shape [256]: only matrices are read in FP8",
    ),
    "e5m2": ({}, {Q: torch.ones(256, 256).to(torch.float8_e5m2)}, f"{Q}_scale_inv: scales FP8 weights, but {Q} is "),
    "kept": (
        {"modules_to_not_convert": ["model.layers.0"]},
        {},
        f"{Q}: is in FP8, but config.json lists model.layers.0",
    ),
    "ignored": ({"ignored_layers": [Q[:-7]]}, {}, f"{Q}: is in FP8, but config.json lists {Q[:-7]} as not quantised"),
    "list": ({"modules_to_not_convert": "lm_head"}, {}, "modules_to_not_convert: found 'lm_head', expected a list"),
    "e5m2 in config.json": ({"fmt": "e5m2"}, {}, "quantization_config.fmt: found 'e5m2', expected 'e4m3'"),
    "blocks": ({"weight_block_size": [64, 128]}, {}, "weight_block_size: found [64, 128], expected [128, 128]"),
    "no blocks": ({"weight_block_size": None}, {}, "FineGrainedFP8Config(dequantize=True)).save_pretrained(NEW, save_"),
    "static": ({"activation_scheme": "static"}, {}, "activation_scheme: found 'static', expected 'dynamic'"),
    "scale_fmt": ({"scale_fmt": "int"}, {}, "scale_fmt: found 'int', expected 'float' or 'ue8m0'"),
    "FP4": ({"expert_dtype": "fp4"}, {}, "expert_dtype: found 'fp4', expected 'fp8'"),
    "method": (
        {"quant_method": "awq"},
        {},
        "quant_method: found 'awq', expected 'fp8': only FP8 in blocks of 128 x 128",
    ),
    "none": ({"quant_method": None}, {}, "quant_method: found None, expected 'fp8'"),
    "compressed": ({"quant_method": "compressed-tensors"}, {}, "quantization_config=CompressedTensorsConfig("),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_dequantised_is_refused(tmp_path: Path, name: str) -> None:
    changes, tensors, words = REFUSED[name]
    stored, _ = save_fp8(tmp_path / "hf", "qwen3")
    edit_config(tmp_path / "hf", quantization_config=PUBLISHED | changes)
    for key, tensor in tensors.items():
        stored.pop(key, None)
        if tensor is not None:
            stored[key] = tensor
    save_file(stored, tmp_path / "hf" / "model.safetensors")
    message = rejection(tmp_path / "hf")
    assert words in message, message
    assert tensors or "import the" in message or "list" in message


def test_fp8_weights_without_a_description_are_refused(tmp_path: Path) -> None:
    """transformers writes such a directory when it saves a dequantised model."""
    save_fp8(tmp_path / "hf", "qwen3")
    edit_config(tmp_path / "hf", quantization_config=None)
    assert f"{Q}: is in FP8, but config.json has no quantization_config" in rejection(tmp_path / "hf")
    edit_config(tmp_path / "hf", quantization_config=[])
    assert "quantization_config: found [], expected an object or null" in rejection(tmp_path / "hf")


def test_weights_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    stored, _ = save_fp8(tmp_path / "hf", "qwen3")
    stored[Q] = torch.full((256, 256), torch.nan).to(torch.float8_e4m3fn)
    save_file(stored, tmp_path / "hf" / "model.safetensors")
    (error,) = errors_of(convert, "import", "--hf", tmp_path / "hf", "--save", tmp_path / "ours")
    assert f"{Q}: contains NaN or infinity" in error and not (tmp_path / "ours" / "latest").exists()


@pytest.mark.parametrize("name", ["CompressedTensorsConfig", "FineGrainedFP8Config"])
def test_classes_in_messages_exist(name: str) -> None:
    assert "dequantize" in inspect.signature(getattr(transformers, name)).parameters

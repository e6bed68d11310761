"""Directories of Qwen3-Next and of Qwen3.5's language models, also next to a vision tower."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from ladder_lab.bench.sizes import SIZES as SHAPES
from megatron_ladder.api import TextGenerator
from megatron_ladder.blueprint.boxes import Box
from megatron_ladder.blueprint.tensors import parameter_count
from megatron_ladder.checkpoint.format import Checkpoint
from megatron_ladder.checkpoint.hf_config import hf_config, hf_type, model_config_from_hf
from megatron_ladder.checkpoint.hf_directory import open_hf_directory
from megatron_ladder.generate.requests import GenerationRequest
from megatron_ladder.generate.sampling import GREEDY
from tests.helpers.pairwise import quick_share
from tests.helpers.runs import errors_of
from tests.unit.convert.hf_models import opened
from tests.unit.convert.saved_models import (
    SIZES,
    assert_equal_bits,
    check_round_trip,
    config_of,
    convert,
    our_logits,
    save_model,
    tensors_of,
)
from tests.unit.generate.tiny_model import PROMPTS, greedy_by_transformers, write_checkpoint

FOUR = {"num_key_value_heads": 4, "linear_num_key_heads": 4, "linear_num_value_heads": 8}
STACKS = {"save_original_format": False}
"""As published."""
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3.5": ("qwen3_5_text", {}),
    "qwen3.5, tied": ("qwen3_5_text", {"tie_word_embeddings": True, "layer_types": None, **FOUR}),
    "qwen3.5-moe": ("qwen3_5_moe_text", STACKS),
    "qwen3.5-moe, tied": ("qwen3_5_moe_text", {"tie_word_embeddings": True, **FOUR, **STACKS}),
    "next": ("qwen3_next", {}),
    "next, tied": (
        "qwen3_next",
        {"tie_word_embeddings": True, "mlp_only_layers": [1], "norm_topk_prob": False, **FOUR},
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", quick_share(CASES, 2))
def test_round_trips_are_bitwise_and_logits_those_of_transformers(
    tmp_path: Path, name: str, dtype: torch.dtype
) -> None:
    """In fp32, transformers' two forms of the delta rule are as far apart as its logits and ours."""
    kind, changes = CASES[name]
    check_round_trip(tmp_path, kind, dtype, kind, 1e-4, **changes)


def save_with_vision_tower(path: Path, kind: str) -> dict[str, torch.Tensor]:
    """Save a language model as a part of a model with a vision tower and a layer for further tokens; return its own
    weights."""
    save_model(path, kind, torch.bfloat16, **STACKS)
    weights = tensors_of(path)
    for name in weights:
        if name.endswith(("A_log", "linear_attn.norm.weight")):
            weights[name] = weights[name].float() + 2**-12
    stored = {name.replace("model.", "model.language_model.", 1): weight for name, weight in weights.items()}
    stored |= {"model.visual.merger.norm.weight": torch.ones(2), "mtp.fc.weight": torch.ones(2, 2)}
    (path / "model.safetensors").unlink()
    save_file(stored | {"mtp.norm.weight": torch.ones(2)}, path / "model.safetensors")
    config = config_of(path)
    outer = {key: config.pop(key) for key in ("tie_word_embeddings", "transformers_version")}
    whole = {"model_type": kind.removesuffix("_text"), "text_config": config, "vision_config": {"depth": 1}, **outer}
    (path / "config.json").write_text(json.dumps(whole | {"architectures": ["Qwen3_5ForConditionalGeneration"]}))
    return weights


@pytest.mark.parametrize("kind", ["qwen3_5_text", "qwen3_5_moe_text"])
def test_language_models_next_to_a_vision_tower(tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    hf, ours, back, late, cast = (tmp_path / name for name in ("hf", "ours", "back", "late", "cast"))
    weights = save_with_vision_tower(hf, kind)
    convert("import", "--hf", hf, "--save", ours, "--verify")
    printed = capsys.readouterr().out
    assert "1 tensors of the vision tower (model.visual) are dropped" in printed
    assert "2 tensors of layers that predict further tokens (mtp) are dropped" in printed
    assert "verified: the logits of the source in transformers" in printed
    convert("export", "--load", ours, "--hf", back, "--verify")
    assert config_of(back)["model_type"] == kind and "text_config" not in config_of(back)
    assert_equal_bits(tensors_of(back), weights)
    convert("import", "--hf", hf, "--save", tmp_path / "ladder", "--ladder-layers", "2")
    convert("export", "--load", tmp_path / "ladder", "--hf", late)
    fp32 = {name: weight for name, weight in tensors_of(late).items() if weight.dtype == torch.float32}
    assert_equal_bits(fp32, {name: weight for name, weight in weights.items() if weight.dtype == torch.float32})
    in_module = AutoModelForCausalLM.from_pretrained(late, trust_remote_code=True, dtype=torch.bfloat16).state_dict()
    assert_equal_bits({name: in_module[name] for name in fp32}, fp32)
    convert("inspect", hf)
    assert "3 of them in parts that an import drops" in capsys.readouterr().out
    convert("export", "--load", ours, "--hf", cast, "--dtype", "bf16")
    assert {weight.dtype for weight in tensors_of(cast).values()} == {torch.bfloat16}


def test_trained_weights_get_the_element_types_of_the_source_again(tmp_path: Path) -> None:
    """A training checkpoint has fp32 masters of all weights."""
    hf, ours, trained = (tmp_path / name for name in ("hf", "ours", "trained"))
    weights = save_with_vision_tower(hf, "qwen3_5_text")
    convert("import", "--hf", hf, "--save", ours)
    checkpoint = Checkpoint.open(ours)
    masters = {
        name: torch.empty(shape.shape, dtype=torch.float32) for name, shape in checkpoint.stored("weight").items()
    }
    for name, master in masters.items():
        checkpoint.read(name, "weight", Box.whole(master.shape), master)
    run = {"training": {"bf16": True}}
    write_checkpoint(trained, checkpoint.model(), masters, hugging_face=checkpoint.manifest["hugging_face"], run=run)
    convert("export", "--load", trained, "--hf", tmp_path / "back")
    assert_equal_bits(tensors_of(tmp_path / "back"), weights)


LATE = [
    ("qwen3_5_text", "ladder"),
    ("qwen3_5_text", "ladder-attention"),
    ("qwen3_5_moe_text", "farskip"),
    ("qwen3_5_moe_text", "shortcut"),
    ("qwen3_next", "ladder"),
]


@pytest.mark.parametrize(("kind", "mode"), quick_share(LATE, 2))
def test_late_imports_have_the_same_logits_and_tokens_in_transformers(tmp_path: Path, kind: str, mode: str) -> None:
    hf, ours, late, again, back = (tmp_path / name for name in ("hf", "ours", "late", "again", "back"))
    save_model(hf, kind)
    convert("import", "--hf", hf, "--save", ours, "--residual-mode", mode, "--ladder-layers", "1,2,3")
    convert("export", "--load", ours, "--hf", late, "--verify")
    module, tokens = opened(late), torch.arange(1, 141).view(2, 70)
    found, expected = our_logits(ours, tokens), module(tokens).logits.detach()
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
    # Another wiring would not do.
    standard = AutoModelForCausalLM.from_pretrained(hf, experts_implementation="eager")(tokens).logits
    assert (standard - expected).abs().max() > 1e-2 * expected.abs().max()
    generated = TextGenerator(ours).engine.generate([GenerationRequest(prompt, 25, GREEDY) for prompt in PROMPTS])
    assert [generation.ids for generation in generated] == greedy_by_transformers(module, PROMPTS, 25)
    convert("import", "--hf", late, "--save", again)
    assert Checkpoint.open(again).model() == Checkpoint.open(ours).model()
    convert("export", "--load", again, "--hf", back)
    assert_equal_bits(tensors_of(back), tensors_of(late))
    assert config_of(back) == config_of(late)


@pytest.mark.parametrize("kind", [kind for kind, _ in CASES.values()][::2])
def test_parts_of_joined_tensors_are_read_as_of_the_whole(tmp_path: Path, kind: str) -> None:
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


LINEAR: dict[str, Any] = {
    "head_dim": 256,
    "hidden_size": 2048,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262144,
    "moe_intermediate_size": 512,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "shared_expert_intermediate_size": 512,
    "tie_word_embeddings": False,
}
NEXT = LINEAR | {
    "model_type": "qwen3_next",
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "full_attention_interval": 4,
    "intermediate_size": 5120,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "num_hidden_layers": 48,
    "partial_rotary_factor": 0.25,
    "rope_scaling": None,
    "rope_theta": 10000000,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
"""Qwen3-Next-80B-A3B."""
TEXT = LINEAR | {
    "model_type": "qwen3_5_moe_text",
    "attn_output_gate": True,
    "full_attention_interval": 4,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 10,
    "mamba_ssm_dtype": "float32",
    "mlp_only_layers": [],
    "mtp_num_hidden_layers": 1,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 40,
    "output_gate_type": "swish",
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000000,
        "rope_type": "default",
    },
    "vocab_size": 248320,
}
VISION = {
    "model_type": "qwen3_5_moe",
    "text_config": TEXT,
    "vision_config": {"depth": 27, "hidden_size": 1152},
    "image_token_id": 248056,
    "tie_word_embeddings": False,
}
"""Qwen3.6-35B-A3B."""
DENSE = {key: value for key, value in TEXT.items() if "expert" not in key and not key.startswith("moe_")} | {
    "model_type": "qwen3_5_text",
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 16,
    "linear_num_value_heads": 48,
    "num_attention_heads": 24,
    "num_hidden_layers": 64,
    "num_key_value_heads": 4,
}
"""Qwen3.5-27B."""
LATE_TEXT = hf_config(
    replace(model_config_from_hf(TEXT), residual_mode="ladder", ladder_layers=(1, 2)), dtype="bfloat16"
)
QWEN3 = SIZES | {"model_type": "qwen3", "head_dim": 12, "num_hidden_layers": 2, "rms_norm_eps": 1e-6}


@pytest.mark.parametrize(
    ("config", "kind", "shape"),
    [
        (NEXT, "qwen3_next", "qwen3-next-80b"),
        (VISION, "qwen3_5_moe_text", "qwen3.6-35b-a3b"),
        (DENSE, "qwen3_5_text", "qwen3.5-27b"),
    ],
)
def test_published_models_are_read_and_written(config: dict[str, Any], kind: str, shape: str) -> None:
    model = model_config_from_hf(config)
    named = SHAPES[shape]
    lengths = {"max_position_embeddings": named.max_position_embeddings, "rotary_base": 1e4, "norm_epsilon": 1e-5}
    assert replace(model, **lengths) == named
    text = config.get("text_config", config)
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**text))
    assert parameter_count(model).total == sum(weight.numel() for weight in theirs.parameters())
    written = hf_config(model, dtype="bfloat16", model_type=kind)
    assert hf_type(model, kind) == kind and model_config_from_hf(written) == model
    keys = ["linear_num_value_heads", *["mamba_ssm_dtype", "attn_output_gate"] * (kind != "qwen3_next")]
    assert {key: written[key] for key in keys} == {key: text[key] for key in keys}
    completed = AutoConfig.for_model(**written)
    assert completed.layer_types == theirs.config.layer_types
    assert model.linear_attention_layers == tuple(n for n in range(model.num_layers) if n % 4 != 3)
    key_heads = text["num_key_value_heads"]
    assert (model.rotary_percent, model.rotary_base, model.num_key_value_heads) == (0.25, 1e7, key_heads)
    # From scratch, the newer type.
    assert hf_type(model) == kind.replace("qwen3_next", "qwen3_5_moe_text")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (TEXT | {"output_gate_type": "sigmoid"}, "output_gate_type: found 'sigmoid', expected 'swish'"),
        (TEXT | {"attn_output_gate": False}, "attn_output_gate: found False, expected True"),
        (TEXT | {"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype: found 'bfloat16', expected 'float32'"),
        (TEXT | {"linear_num_key_heads": 12}, "linear_num_value_heads 32 is not divisible by linear_num_key_heads 12"),
        (TEXT | {"layer_types": ["sliding_attention"] * 40}, "layer_types: found"),
        (TEXT | {"layer_types": ["mamba"] * 40}, "layer_types[0]: found 'mamba', expected 'full_attention' or "),
        (TEXT | {"layer_types": ["linear_attention"] * 39}, "linear_attention or full_attention for each of 40 layers"),
        (TEXT | {"mlp_only_layers": [3]}, "mlp_only_layers: found [3], expected []"),
        (TEXT | {"rope_parameters": TEXT["rope_parameters"] | {"rope_type": "dynamic"}}, "rope_parameters.rope_type"),
        (NEXT | {"attention_bias": True}, "attention_bias: found True, expected False"),
        (NEXT | {"output_gate_type": "sigmoid"}, "output_gate_type: found 'sigmoid', expected 'swish'"),
        (LATE_TEXT | {"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype: found 'bfloat16', expected 'float32'"),
        (
            LATE_TEXT | {"linear_num_key_heads": 12},
            "linear_num_value_heads 32 is not divisible by linear_num_key_heads",
        ),
        (LATE_TEXT | {"linear_num_key_heads": None}, "a value, since layer_types has linear_attention"),
        (LATE_TEXT | {"layer_types": ["linear_attention"] * 39}, "expected one for each of 40 layers"),
        (NEXT | {"linear_key_head_dim": None}, "linear_key_head_dim: found nothing, expected a value"),
        (VISION | {"tie_word_embeddings": True}, "tie_word_embeddings and text_config.tie_word_embeddings differ"),
        (VISION | {"text_config": None}, "text_config: found None, expected an object"),
        (QWEN3 | {"layer_types": ["full_attention", "linear_attention"]}, "layer_types[1]: found 'linear_attention'"),
    ],
)
def test_other_models_are_rejected(config: dict[str, Any], words: str) -> None:
    (error,) = errors_of(model_config_from_hf, config)
    assert error.startswith("config.json: ") and words in error


@pytest.mark.parametrize(
    ("kind", "name", "shape"),
    [
        ("qwen3_5_text", "0.linear_attn.conv1d.weight", "[64, 1, 3]"),
        ("qwen3_5_moe_text", "1.self_attn.q_proj.weight", "[192, 48]"),
        ("qwen3_next", "2.linear_attn.in_proj_ba.weight", "[8, 48]"),
        ("megatron_ladder", "0.linear_attn.A_log", "[4]"),
        ("megatron_ladder", "1.self_attn.gate_proj.weight", "[96, 48]"),
    ],
)
def test_a_missing_tensor_of_a_mixer_is_named(tmp_path: Path, kind: str, name: str, shape: str) -> None:
    folder = tmp_path / "hf"
    if kind == "megatron_ladder":
        save_model(tmp_path / "standard", "qwen3_5_text")
        convert("import", "--hf", tmp_path / "standard", "--save", tmp_path / "ours", "--ladder-layers", "2")
        convert("export", "--load", tmp_path / "ours", "--hf", folder)
    else:
        save_model(folder, kind, **STACKS)
    weights = tensors_of(folder)
    del weights[f"model.layers.{name}"]
    save_file(weights, folder / "model.safetensors")
    (error,) = errors_of(open_hf_directory, folder)
    assert error.endswith(f"model.layers.{name}: is missing; expected shape {shape}")


def test_a_late_model_has_the_keys_that_servers_read() -> None:
    late = replace(model_config_from_hf(VISION), residual_mode="ladder", ladder_layers=(1, 2))
    assert LATE_TEXT["model_type"] == "megatron_ladder" and model_config_from_hf(LATE_TEXT) == late
    keys = ["layer_types", "mamba_ssm_dtype", *(key for key in TEXT if key.startswith("linear_"))]
    assert {key: LATE_TEXT[key] for key in keys} == {key: TEXT[key] for key in keys}
    absent = hf_config(model_config_from_hf(QWEN3), dtype="bfloat16", model_type="megatron_ladder").keys() & keys
    assert not absent


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"residual_mode": "ladder", "ladder_layers": (1, 2), "linear_attention_layers": tuple(range(40))},
            "--linear-attention-layers 0 1 ",
        ),
        (
            {"residual_mode": "ladder", "ladder_layers": (1, 2), "lanes": 2, "linear_num_key_heads": 1},
            "a model of 2 lanes with 1 key heads of gated DeltaNet",
        ),
    ],
)
def test_models_for_which_transformers_has_no_cache_are_not_exported(changes: dict[str, Any], words: str) -> None:
    (error,) = errors_of(hf_type, replace(model_config_from_hf(TEXT), **changes))
    assert error.startswith(words) and error.endswith(": generate from the checkpoint instead")

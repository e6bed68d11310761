"""Directories of Qwen2-MoE, and of Hy3, dots.llm1 and Solar-Open, whose routers are sigmoids; late ones, too."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import HYV3ForCausalLM

from ladder_lab.bench.sizes import SIZES as SHAPES
from megatron_ladder.blueprint.mixers.attention import attention_factor
from megatron_ladder.blueprint.tensors import parameter_count
from megatron_ladder.checkpoint.hf_config import hf_config, hf_type, model_config_from_hf
from tests.helpers.pairwise import quick_share
from tests.helpers.runs import errors_of
from tests.reference import ReferenceConfig, reference_logits
from tests.unit.convert.hf_models import opened
from tests.unit.convert.saved_models import (
    MODELS,
    MSCALES,
    SIZES,
    YARN,
    add_predicting_layer,
    assert_equal_bits,
    check_round_trip,
    config_of,
    convert,
    export,
    save_model,
    tensors_of,
)

ONE_GROUP = {"n_group": 1, "topk_group": 1}
WIDTH = {"moe_intermediate_size": 12}
"""Four ranks divide it."""
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("qwen2_moe", {"mlp_only_layers": [2]}),
    "qwen2, tied": ("qwen2_moe", {"tie_word_embeddings": True, "norm_topk_prob": True, "decoder_sparse_step": 2}),
    "hy3": ("hy_v3", {}),
    "hy3, tied": ("hy_v3", {"tie_word_embeddings": True, "mlp_layer_types": ["dense", "dense", "sparse", "sparse"]}),
    "dots": ("dots1", WIDTH),
    "dots, one group": ("dots1", ONE_GROUP | WIDTH | {"norm_topk_prob": False, "attention_bias": False}),
    "solar": ("solar_open", WIDTH | {"rope_parameters": YARN | MSCALES}),
    "solar, tied": ("solar_open", ONE_GROUP | WIDTH | {"tie_word_embeddings": True, "attention_bias": False}),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", quick_share(CASES, 3))
def test_round_trips_are_bitwise_and_logits_those_of_transformers(
    tmp_path: Path, name: str, dtype: torch.dtype
) -> None:
    kind, changes = CASES[name]
    check_round_trip(tmp_path, kind, dtype, kind, **changes)
    biases = [tensor.dtype for name, tensor in tensors_of(tmp_path / "back").items() if name.endswith("_bias")]
    assert all(dtype == torch.float32 for dtype in biases)


def test_dense_layers_that_only_transformers_understands_need_our_type(tmp_path: Path) -> None:
    """vLLM reads only first_k_dense_replace."""
    kinds = ["dense", "sparse", "dense", "sparse"]
    save_model(tmp_path / "hf", "hy_v3", mlp_layer_types=kinds)
    convert("import", "--hf", tmp_path / "hf", "--save", tmp_path / "ours", "--verify")
    convert("export", "--load", tmp_path / "ours", "--hf", tmp_path / "back", "--verify")
    assert config_of(tmp_path / "back")["model_type"] == "megatron_ladder"


LATE = {"residual_mode": "ladder", "ladder_layers": (1, 2, 3)}


@pytest.mark.parametrize(
    ("kind", "wiring"),
    [
        ("hy_v3", LATE),
        ("hy_v3", LATE | {"residual_mode": "farskip"}),
        ("dots1", LATE | {"residual_mode": "farskip"}),
        ("qwen2_moe", LATE),
        ("qwen2_moe", LATE | {"residual_mode": "shortcut", "ladder_layers": (0, 1, 2, 3)}),
        ("solar_open", LATE | {"residual_mode": "shortcut", "ladder_layers": (0, 1, 2, 3)}),
        ("youtu", LATE),
    ],
)
def test_late_versions_compute_the_same_in_the_exported_module(
    tmp_path: Path, kind: str, wiring: dict[str, Any]
) -> None:
    save_model(tmp_path / "source", kind)
    config = replace(model_config_from_hf(config_of(tmp_path / "source")), **wiring)
    assert hf_type(config, kind) == "megatron_ladder"
    folder, weights = export(tmp_path, config, "--verify")
    tokens = torch.randint(0, 301, (2, 48), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        found = opened(folder)(tokens).logits
    expected = reference_logits(weights, ReferenceConfig.like(config), tokens)
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
    # Back in the wiring of the source, but without a source.
    assert hf_type(replace(config, residual_mode="standard", ladder_layers=())) in (
        "qwen2_moe",
        "glm4_moe",
        "megatron_ladder",
    )


@pytest.mark.parametrize("mode", ["ladder", "farskip"])
def test_a_model_in_the_wiring_of_its_source_has_the_type_of_its_source(tmp_path: Path, mode: str) -> None:
    hf, late, plain, back = (tmp_path / name for name in ("hf", "late", "plain", "back"))
    save_model(hf, "hy_v3")
    convert("import", "--hf", hf, "--save", late, "--residual-mode", mode)
    convert("export", "--load", late, "--hf", tmp_path / "exported")
    assert config_of(tmp_path / "exported")["model_type"] == "megatron_ladder"
    convert("reshape", "--load", late, "--save", plain, "--residual-mode", mode, "--ladder-layers", "none")
    convert("export", "--load", plain, "--hf", back)
    assert config_of(back)["model_type"] == "hy_v3" and not list(back.glob("*.py"))
    assert_equal_bits(tensors_of(hf), tensors_of(back))


HY3: dict[str, Any] = {
    "architectures": ["HYV3ForCausalLM"],
    "enable_attention_fp32_softmax": False,
    "enable_lm_head_fp32": True,
    "enable_moe_fp32_combine": False,
    "expert_hidden_dim": 1536,
    "first_k_dense_replace": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.006,
    "intermediate_size": 13312,
    "max_position_embeddings": 262144,
    "model_type": "hy_v3",
    "moe_intermediate_size": 1536,
    "moe_router_enable_expert_bias": True,
    "moe_router_use_sigmoid": True,
    "num_attention_heads": 64,
    "num_experts": 192,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 80,
    "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1,
    "num_shared_experts": 1,
    "output_router_logits": True,
    "qk_norm": True,
    "rms_norm_eps": 1e-05,
    "rope_parameters": {"rope_theta": 11158840.0, "rope_type": "default"},
    "route_norm": True,
    "router_scaling_factor": 2.826,
    "tie_word_embeddings": False,
    "use_grouped_mm": False,
    "vocab_size": 120832,
}
"""tencent/Hy3."""
DOTS: dict[str, Any] = {
    "model_type": "dots1",
    "attention_bias": False,
    "first_k_dense_replace": 1,
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 10944,
    "max_position_embeddings": 32768,
    "max_window_layers": 62,
    "moe_intermediate_size": 1408,
    "moe_layer_freq": 1,
    "n_group": None,
    "n_routed_experts": 128,
    "n_shared_experts": 2,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 62,
    "num_key_value_heads": 32,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1e7,
    "routed_scaling_factor": 2.5,
    "scoring_func": "noaux_tc",
    "sliding_window": 4096,
    "topk_group": None,
    "vocab_size": 152064,
}
"""rednote-hilab/dots.llm1.base."""
SOLAR: dict[str, Any] = {
    "model_type": "solar_open",
    "first_k_dense_replace": 0,
    "head_dim": 128,
    "hidden_size": 4096,
    "intermediate_size": 10240,
    "max_position_embeddings": 131072,
    "moe_intermediate_size": 1280,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 8,
    "partial_rotary_factor": 1.0,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 65536},
    "rope_theta": 1000000,
    "routed_scaling_factor": 1.0,
    "tie_word_embeddings": False,
    "vocab_size": 196608,
}
"""upstage/Solar-Open-100B."""
YOUTU: dict[str, Any] = {
    "model_type": "youtu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 6144,
    "kv_lora_rank": 512,
    "max_position_embeddings": 131072,
    "num_attention_heads": 16,
    "num_hidden_layers": 32,
    "num_key_value_heads": 16,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-6,
    "rope_interleave": True,
    "rope_theta": 1600000,
    "v_head_dim": 128,
    "vocab_size": 128256,
}
"""tencent/Youtu-LLM-2B. It ties its embeddings, and does not say so."""


def test_published_models_are_read() -> None:
    """With the parameters, in thousand millions, that their cards give."""
    hy3, dots, solar, youtu = map(model_config_from_hf, (HY3, DOTS, SOLAR, YOUTU))
    sizes = [round(parameter_count(model).total / 1e9, 2) for model in (hy3, dots, solar, youtu)]
    assert sizes == [295.03, 142.77, 102.65, 1.96]
    assert hy3.moe_layers == tuple(range(1, 80)) and dots.moe_layers == tuple(range(1, 62))
    assert (dots.moe_router_num_groups, dots.moe_router_group_topk, dots.rotary_base) == (1, 1, 1e7)
    assert not solar.qk_layernorm and solar.rotary_percent == 1 and attention_factor(solar) > 1
    assert youtu.tie_embeddings and not youtu.num_experts
    for source, model in ((HY3, hy3), (DOTS, dots), (SOLAR, solar), (YOUTU, youtu)):
        kind = source["model_type"]
        written = hf_config(model, dtype="bfloat16", model_type=kind)
        assert hf_type(model, kind) == kind and model_config_from_hf(written) == model
    # As in vLLM's class, which requires all of these.
    keys = "expert_hidden_dim", "first_k_dense_replace", "num_shared_experts", "route_norm", "qk_norm"
    written = hf_config(hy3, dtype="bfloat16", model_type="hy_v3")
    assert {key: written[key] for key in keys} == {key: HY3[key] for key in keys}
    same = {"max_position_embeddings": SHAPES["hy3"].max_position_embeddings, "init_method_std": 0.02}
    assert replace(hy3, **same, rotary_base=1e4, norm_epsilon=SHAPES["hy3"].norm_epsilon) == SHAPES["hy3"]


def without(config: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in keys}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (HY3 | {"expert_hidden_dim": 768}, "moe_intermediate_size and expert_hidden_dim: found '1536 and 768'"),
        (HY3 | {"first_k_dense_replace": 2}, "first_k_dense_replace: found 2, expected 1 without mlp_layer_types"),
        (HY3 | {"mlp_layer_types": ["dense"] * 2 + ["sparse"] * 78}, "mlp_layer_types: found"),
        (HY3 | {"num_shared_experts": 0}, "num_shared_experts: found 0, expected a whole number from 1"),
        (HY3 | {"route_norm": False}, "route_norm: found False, expected True"),
        (HY3 | {"qk_norm": False}, "qk_norm: found False, expected True"),
        (HY3 | {"moe_router_use_sigmoid": False}, "moe_router_use_sigmoid: found False, expected True"),
        (HY3 | {"attention_bias": True}, "attention_bias: found True, expected False"),
        (HY3 | {"mlp_bias": True}, "mlp_bias: found True, expected False"),
        (without(HY3, "router_scaling_factor"), "router_scaling_factor: found nothing"),
        (without(HY3, "head_dim"), "head_dim: found nothing"),
        (DOTS | {"scoring_func": "softmax"}, "scoring_func: found 'softmax', expected 'sigmoid'"),
        (DOTS | {"n_group": 3}, "n_group 3: n_routed_experts 128 has no groups of 2"),
        (SOLAR | {"first_k_dense_replace": 1}, "first_k_dense_replace: found 1, expected 0"),
        (SOLAR | {"use_qk_norm": True}, "use_qk_norm: found True, expected False"),
        (SOLAR | {"partial_rotary_factor": 0.5}, "partial_rotary_factor: found 0.5, expected 1 in a solar_open model"),
        (YOUTU | {"rope_interleave": False}, "rope_interleave: found False, expected True"),
        (without(YOUTU, "q_lora_rank"), "q_lora_rank: found nothing"),
    ],
)
def test_other_models_are_rejected(config: dict[str, Any], words: str) -> None:
    (error,) = errors_of(model_config_from_hf, config)
    assert error.startswith("config.json: ") and words in error


def test_windows_that_no_layer_has_do_not_count() -> None:
    dots = model_config_from_hf(DOTS)
    assert dots == model_config_from_hf(DOTS | {"max_window_layers": None}) == model_config_from_hf(DOTS | ONE_GROUP)
    listed = {"layer_types": ["full_attention"] * 62, "max_window_layers": 0}
    assert dots == model_config_from_hf(DOTS | listed) == model_config_from_hf(DOTS | {"sliding_window": None})
    assert model_config_from_hf(DOTS | {"max_window_layers": 61}).window_layers == (61,)


def test_keys_that_transformers_does_not_have_are_optional(tmp_path: Path) -> None:
    """Layer 0 is dense, and a Solar-Open has no width of dense layers."""
    for key in ("expert_hidden_dim", "first_k_dense_replace"):
        assert model_config_from_hf(without(HY3, key)) == model_config_from_hf(HY3)
    family, changes = MODELS["solar_open"]
    config = family.config_class(**{**without(SIZES, "intermediate_size"), **changes}).to_dict()
    assert "intermediate_size" not in config
    assert model_config_from_hf(config).moe_layers == (0, 1, 2, 3)


def test_sums_of_experts_are_the_same_in_fp32(tmp_path: Path) -> None:
    """`enable_moe_fp32_combine`, which published models differ in, does not change a sum of two bfloat16 numbers."""
    save_model(tmp_path, "hy_v3", torch.bfloat16)
    tokens = torch.randint(0, 301, (2, 48))
    logits = []
    for combines in (False, True):
        (tmp_path / "config.json").write_text(json.dumps(config_of(tmp_path) | {"enable_moe_fp32_combine": combines}))
        module = HYV3ForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16, experts_implementation="eager")
        assert module.model.layers[1].mlp.enable_moe_fp32_combine is combines
        with torch.no_grad():
            logits.append(module(tokens).logits)
    assert logits[0].dtype == torch.bfloat16 and logits[0].equal(logits[1])


def test_the_layer_of_hy3_that_predicts_a_further_token_is_dropped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hf, ours = tmp_path / "hf", tmp_path / "ours"
    save_model(hf, "hy_v3")
    weights = tensors_of(hf)
    count = add_predicting_layer(hf, "enorm", "hnorm", "eh_proj", "final_layernorm")
    (hf / "config.json").write_text(json.dumps(config_of(hf) | {"num_nextn_predict_layers": 1}))
    convert("import", "--hf", hf, "--save", ours, "--drop-mtp", "--verify")
    printed = capsys.readouterr().out
    assert f"{count} tensors of layers that predict further tokens" in printed and "verified: the logits" in printed
    convert("export", "--load", ours, "--hf", tmp_path / "back")
    assert_equal_bits(weights, tensors_of(tmp_path / "back"))
    assert config_of(tmp_path / "back")["num_nextn_predict_layers"] == 0

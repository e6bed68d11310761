"""Directories of models with latent attention: DeepSeek-V2 and V3, Moonlight, GLM-4.7-Flash, Youtu-LLM, Instella."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Glm4MoeLiteConfig

from megatron_ladder.blueprint.tensors import parameter_count
from megatron_ladder.checkpoint.hf_config import hf_config, hf_type, model_config_from_hf
from megatron_ladder.generate.loading import open_model
from tests.helpers.pairwise import quick_share
from tests.helpers.runs import errors_of
from tests.unit.convert.saved_models import (
    MSCALES,
    YARN,
    add_predicting_layer,
    assert_equal_bits,
    check_round_trip,
    config_of,
    convert,
    our_logits,
    save_model,
    tensors_of,
)

LATENT_QUERIES: dict[str, Any] = {"q_lora_rank": 22, "attention_bias": True}
GROUPS = {"n_group": 3, "topk_group": 2}
V2_GROUPS = {"n_group": 3, "topk_group": 1, "topk_method": "group_limited_greedy", "mlp_bias": True}
HEADS = {"num_attention_heads": 3, "num_key_value_heads": 3, "v_head_dim": 23, "intermediate_size": 66}
UNTIED = {"tie_word_embeddings": False}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "v2 lite": ("deepseek_v2", {"rope_parameters": YARN | MSCALES}),
    "v2": ("deepseek_v2", LATENT_QUERIES | V2_GROUPS),
    "v3": ("deepseek_v3", LATENT_QUERIES | GROUPS | {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.2}}),
    "moonlight": ("deepseek_v3", HEADS | {"first_k_dense_replace": 2, "norm_topk_prob": False}),
    "glm": ("glm4_moe_lite", HEADS | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "youtu": ("youtu", LATENT_QUERIES | UNTIED | {"rope_parameters": YARN | MSCALES}),
    "youtu, tied": ("youtu", HEADS | {"tie_word_embeddings": True}),
    "instella": ("instella_moe", {}),
    "instella, all layers of experts": ("instella_moe", LATENT_QUERIES | {"first_k_dense_replace": 0}),
}


def edit_config(folder: Path, **changes: Any) -> None:
    """Change keys of config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", quick_share(CASES, 4))
def test_round_trips_are_bitwise_and_logits_those_of_transformers(
    tmp_path: Path, name: str, dtype: torch.dtype
) -> None:
    kind, changes = CASES[name]
    types = {"glm4_moe_lite": "deepseek_v3", "instella_moe": "megatron_ladder"}
    check_round_trip(tmp_path, kind, dtype, types.get(kind, kind), **changes)
    written = tensors_of(tmp_path / "back")
    biases = [tensor.dtype for name, tensor in written.items() if name.endswith("e_score_correction_bias")]
    assert all(dtype == torch.float32 for dtype in biases) and bool(biases) == (kind not in ("deepseek_v2", "youtu"))


def test_a_publishers_code_and_layers_that_predict_further_tokens_are_ignored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in Moonlight and DeepSeek-V3, whose config.json has keys for training besides."""
    hf, ours = tmp_path / "hf", tmp_path / "ours"
    save_model(hf, "deepseek_v3")
    weights = tensors_of(hf)
    count = add_predicting_layer(hf, "eh_proj", "embed_tokens")
    code = {"AutoConfig": "configuration_deepseek.DeepseekV3Config", "AutoModelForCausalLM": "modeling_deepseek.Model"}
    (hf / "modeling_deepseek.py").write_text("raise RuntimeError")
    training = {"ep_size": 1, "aux_loss_alpha": 0.001, "seq_aux": True, "pretraining_tp": 1}
    routing = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}
    edit_config(hf, auto_map=code, num_nextn_predict_layers=1, **training, **routing)
    model = model_config_from_hf(config_of(hf))
    convert("import", "--hf", hf, "--save", ours, "--drop-mtp", "--verify")
    printed = capsys.readouterr().out
    assert "remote code (auto_map) is ignored: the model is read as deepseek_v3" in printed
    assert f"{count} tensors of layers that predict further tokens" in printed
    assert all(f"*** {warning} ***" in printed for warning in open_model(hf, None, None).warnings)
    assert len(open_model(hf, None, None).warnings) == 2
    convert("export", "--load", ours, "--hf", tmp_path / "back", "--verify")
    assert_equal_bits(weights, tensors_of(tmp_path / "back"))
    written = config_of(tmp_path / "back")
    assert "auto_map" not in written and written["num_nextn_predict_layers"] == 0
    assert model_config_from_hf(written) == model and written["topk_method"] == "noaux_tc"
    assert not list((tmp_path / "back").glob("*.py"))
    edit_config(hf, architectures=["OddForCausalLM"])
    (error,) = errors_of(convert, "import", "--hf", hf, "--save", tmp_path / "new")
    assert "for architectures ['OddForCausalLM']" in error and "architectures to ['DeepseekV3ForCausalLM']" in error


def test_instella_keeps_its_wiring_and_licence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hf, ours, back = tmp_path / "hf", tmp_path / "ours", tmp_path / "back"
    save_model(hf, "instella_moe")
    edit_config(hf, auto_map={"AutoModel": "modeling_instella_moe.InstellaMoEModel"}, farskip_end_idx=1e4)
    assert config_of(hf)["model_type"] == "deepseek_v3"
    terms = "license: other\nlicense_name: researchrail\nlicense_link: LICENSE\n"
    (hf / "README.md").write_text(f"---\n{terms}---\n")
    (hf / "LICENSE").write_text("research only")
    convert("import", "--hf", hf, "--save", ours, "--verify")
    printed = capsys.readouterr().out
    assert "instella_moe, " in printed and "wiring: farskip in all layers" in printed
    assert "the code of this instella_moe directory is not trusted" in printed
    assert "remote code (auto_map) is ignored: the model is read as instella_moe" in printed
    convert("export", "--load", ours, "--hf", back)
    written = (back / "README.md").read_text()
    assert all(line in written for line in terms.splitlines()) and (back / "LICENSE").read_text() == "research only"
    assert sorted(path.name for path in back.glob("*.py")) == [
        "configuration_megatron_ladder.py",
        "modeling_megatron_ladder.py",
    ]
    for changes, wiring in (
        ({"farskip_start_idx": 1}, ("farskip", (1, 2, 3))),
        ({"farskip_start_idx": 1, "farskip_end_idx": 2}, ("farskip", (1, 2))),
        ({"farskip_end_idx": 0.0}, ("farskip", (0,))),
        ({"farskip_start_idx": 3, "farskip_end_idx": 2}, ("standard", ())),
        ({"farskip": False, "attn_only_farskip": True}, ("standard", ())),
    ):
        model = model_config_from_hf(config_of(hf) | changes)
        assert (model.residual_mode, model.ladder_layers) == wiring and model.attention_output_gate


def use_epsilon_of_other_norms(module: Any) -> None:
    for layer in module.model.layers:
        layer.self_attn.kv_a_layernorm.variance_epsilon = module.config.rms_norm_eps


def scale_scores_without_yarn(module: Any) -> None:
    for layer in module.model.layers:
        layer.self_attn.scaling = layer.self_attn.qk_head_dim**-0.5


def round_biases(module: Any) -> None:
    for layer in module.model.layers[1:]:
        layer.mlp.gate.e_score_correction_bias = layer.mlp.gate.e_score_correction_bias.bfloat16().float()


FAULTS: dict[str, Callable[[Any], Any]] = {
    "epsilon": use_epsilon_of_other_norms,
    "no factor on the scores": scale_scores_without_yarn,
    "no gate": lambda module: setattr(module, "is_gated", False),
    "standard wiring": lambda module: setattr(module, "is_late", False),
    "rounded biases": round_biases,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_wrong_readings_of_instella_are_noticed(tmp_path: Path, fault: str) -> None:
    reference = save_model(tmp_path / "hf", "instella_moe")
    # Rounded to bfloat16, they choose other experts.
    for layer in reference.model.layers[1:]:
        layer.mlp.gate.e_score_correction_bias = 4 + torch.randn(6, generator=torch.Generator().manual_seed(5)) * 0.01
    reference.save_pretrained(tmp_path / "hf")
    convert("import", "--hf", tmp_path / "hf", "--save", tmp_path / "ours")
    tokens = torch.randint(0, 301, (2, 48), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        found, expected = our_logits(tmp_path / "ours", tokens), reference(tokens).logits
        FAULTS[fault](reference)
        wrong = reference(tokens).logits
    size = expected.abs().max()
    assert (found - expected).abs().max() <= 1e-5 * size < 1e-3 * size <= (found - wrong).abs().max()


BASE: dict[str, Any] = {
    "vocab_size": 128896,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 17,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 96,
    "qk_rope_head_dim": 32,
    "v_head_dim": 128,
    "n_routed_experts": 64,
    "num_experts_per_tok": 6,
    "n_shared_experts": 2,
    "moe_intermediate_size": 1408,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "rope_theta": 8e6,
    "rope_scaling": {
        **{"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1},
        **MSCALES,
        "original_max_position_embeddings": 4096,
    },
}
V3 = BASE | {"model_type": "deepseek_v3"}
V2 = BASE | {"model_type": "deepseek_v2", "norm_topk_prob": False, "topk_method": "greedy"}
GLM = BASE | {"model_type": "glm4_moe_lite"}
AMD = V3 | {"architectures": ["InstellaMoEForCausalLM"], "farskip": True, "gated_attention": True, "qk_layernorm": True}


ODD = {"model_type": "odd", "ep_size": 8, "farskip_end_idx": 1e4}


def test_the_published_instella_is_read() -> None:
    model = model_config_from_hf(AMD | {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "rope_interleave": True})
    # The publisher's files have 31,725,581,824 bytes, with 2 for each number but 4 for the 26 x 64 biases of routers.
    assert parameter_count(model).total * 2 + 26 * 64 * 2 == 31_725_581_824
    assert model == model_config_from_hf(AMD | {"model_type": "instella_moe"}) == model_config_from_hf(AMD | ODD)
    assert model.ladder_layers == tuple(range(27)) and model.moe_layers == tuple(range(1, 27))
    assert (model.num_key_value_heads, model.head_dim, model.qk_layernorm) == (1, 128, False)


def test_keys_of_the_types_are_those_of_their_authors() -> None:
    v2 = model_config_from_hf(V2 | {"n_group": None, "topk_group": None})
    assert v2 == model_config_from_hf(V2 | {"n_group": 8, "topk_group": 3}), "greedy choice has no groups"
    groups = model_config_from_hf(V2 | {"n_group": 8, "topk_group": 3, "topk_method": "group_limited_greedy"})
    assert (groups.moe_router_num_groups, groups.moe_router_group_topk) == (8, 3)
    assert hf_config(groups, dtype="float32")["topk_method"] == "group_limited_greedy"
    assert v2.moe_router_unnormalized and v2.moe_router_score_function == "softmax" and hf_type(v2) == "deepseek_v2"
    # transformers rejects the first as a DeepSeek-V2, and normalises no choice of one.
    for changes in ({"hidden_size": 2050}, {"moe_router_unnormalized": False}):
        own = hf_config(replace(v2, **changes), dtype="float32")
        assert own["model_type"] == "megatron_ladder" and own["kv_lora_rank"] == 512 and "gated_attention" not in own
    kinds = {"mlp_layer_types": ["dense"] + ["sparse"] * 26}
    without = {key: value for key, value in GLM.items() if key != "first_k_dense_replace"}
    glm = model_config_from_hf(GLM)
    assert glm == model_config_from_hf(GLM | kinds) == model_config_from_hf(without | kinds)
    written = hf_config(glm, dtype="float32", model_type="glm4_moe_lite")
    assert written.items() >= kinds.items() and model_config_from_hf(written) == glm
    assert Glm4MoeLiteConfig.from_dict(written).mlp_layer_types == kinds["mlp_layer_types"]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (V3 | {"rope_interleave": False}, "rope_interleave: found False, expected True"),
        (V3 | {"scoring_func": "softmax"}, "scoring_func: found 'softmax', expected 'sigmoid'"),
        (V3 | {"topk_method": "greedy"}, "topk_method: found 'greedy', expected 'noaux_tc'"),
        (V3 | {"moe_layer_freq": 2}, "moe_layer_freq: found 2, expected 1"),
        (V3 | {"kv_lora_rank": None}, "kv_lora_rank: found nothing"),
        (V3 | {"quantization_config": {"quant_method": "gptq"}}, "quant_method: found 'gptq', expected 'fp8'"),
        (V3 | {"farskip": True}, "farskip: found True, expected null in a deepseek_v3 model"),
        (V3 | {"gated_attention": True}, "gated_attention: found True, expected null in a deepseek_v3 model"),
        (V2 | {"norm_topk_prob": True}, "norm_topk_prob: found True, expected False"),
        (V2 | {"topk_method": None}, "topk_method: found nothing"),
        (V2 | {"topk_method": "noaux_tc"}, "topk_method: found 'noaux_tc', expected greedy or group_limited_greedy"),
        (GLM | {"mlp_layer_types": ["dense"] * 2 + ["sparse"] * 25}, "mlp_layer_types: found"),
        (AMD | {"farskip": None}, "farskip: found nothing"),
        (AMD | {"attn_only_farskip": True}, "attn_only_farskip: found True, expected false"),
        (AMD | {"mlp_only_farskip": True}, "mlp_only_farskip: found True, expected false"),
        (AMD | {"farskip_start_idx": 2}, "farskip_start_idx: found 2, expected at most first_k_dense_replace, 1"),
        (AMD | {"farskip_start_idx": 1, "first_k_dense_replace": 0}, "farskip_start_idx: found 1, expected at most"),
    ],
)
def test_other_models_are_rejected(config: dict[str, Any], words: str) -> None:
    (error,) = errors_of(model_config_from_hf, config)
    assert error.startswith("config.json: ") and words in error

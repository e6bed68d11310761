"""Exported directories in transformers, compared with the reference; test_lanes.py compares the formulas."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import AttentionInterface, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from megatron_ladder.checkpoint.format import Checkpoint
from megatron_ladder.checkpoint.hf_config import hf_config, hf_type, model_config_from_hf
from megatron_ladder.convert.hf_module.configuration_megatron_ladder import MegatronLadderConfig
from megatron_ladder.convert.hf_module.modeling_megatron_ladder import MegatronLadderForCausalLM
from megatron_ladder.convert.small_files import module_files
from tests.helpers.commands import REPOSITORY_ROOT
from tests.helpers.pairwise import quick_share
from tests.reference import ReferenceConfig, reference_logits
from tests.unit.convert.hf_models import (
    BIASES,
    DELTA,
    EXPERTS,
    GATED,
    GLM,
    QWEN3_5,
    SINKS,
    VOCAB,
    WINDOWS,
    opened,
    some_tokens,
    tiny_config,
)
from tests.unit.convert.saved_models import assert_equal_bits, convert, export, tensors_of
from tests.unit.convert.test_remote_code import LLAMA3

ROPE = LLAMA3 | {"rope_original_max_position_embeddings": 16}
YARN = ROPE | {"rope_scaling": "yarn", "rope_beta_fast": 4.0, "rotary_base": 100.0}
del YARN["rope_low_freq_factor"], YARN["rope_high_freq_factor"]
SCALES = {"rope_mscale": 0.7, "rope_mscale_all_dim": 1.2}
HYBRID = {"residual_mode": "ladder", "ladder_layers": (1, 2, 4)}
DESYNC = {"residual_mode": "desync", "desync_interval": 4, "desync_tp": 2}
GATED_EXPERT = {"moe_shared_expert_gate": True}
ONE_MORE = {"apply_layernorm_1p": True}
ROUTED = EXPERTS | {"moe_shared_expert_intermediate_size": 28}
UPPER = {"moe_layers": (1, 2, 3, 4, 5)}
CLIPPED = {"activation_func_clamp_value": 0.4, "glu_linear_offset": 1.0}
GPT_OSS = EXPERTS | CLIPPED | {"add_moe_bias": True, "quick_geglu": True}
NOT_ROUNDED = YARN | {"yarn_correction_range_round_to_int": False}


def assert_close(found: Tensor, expected: Tensor) -> None:
    assert found.shape == expected.shape
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize(
    ("model_type", "changes"),
    quick_share(
        [
            ("llama", {"rope_scaling": "linear", "rope_scaling_factor": 2.0, "rotary_base": 5e5, "head_dim": 12}),
            ("llama", BIASES | ROPE | {"tie_embeddings": True, "init_method_std": 0.01}),
            ("llama", YARN),
            ("mistral", {"hidden_size": 34}),
            ("qwen2", {"add_qkv_bias": True, "tie_embeddings": True, "norm_epsilon": 1e-6}),
            ("qwen3", {"qk_layernorm": True, "head_dim": 12}),
            ("qwen3", YARN | {"qk_layernorm": True, "rope_mscale": 0.5}),
            ("qwen3_moe", EXPERTS | {"qk_layernorm": True, "moe_layers": (0, 3), "moe_router_unnormalized": True}),
            ("glm4_moe", GLM | UPPER),
            ("megatron_ladder", GLM | HYBRID | YARN | SCALES),
            ("megatron_ladder", GLM | HYBRID | {"residual_mode": "farskip"}),
            ("megatron_ladder", HYBRID | {"logit_soft_cap": 0.5, "tie_embeddings": True}),
            ("megatron_ladder", {"add_qkv_bias": True, "head_dim": 12}),
            ("megatron_ladder", {"add_attention_output_bias": True}),
            ("megatron_ladder", {"residual_mode": "parallel"}),
            ("megatron_ladder", HYBRID | ONE_MORE | {"residual_staleness": 2, "lanes": 2}),
            ("megatron_ladder", DESYNC | ONE_MORE | {"add_mlp_bias": True}),
            ("megatron_ladder", ONE_MORE | {"qk_layernorm": True, "rotary_percent": 0.5}),
            ("megatron_ladder", HYBRID | {"residual_mode": "ladder-attention", "residual_staleness": 3}),
            ("megatron_ladder", HYBRID | BIASES | ROPE),
            ("megatron_ladder", HYBRID | YARN),
            ("llama", NOT_ROUNDED),
            ("megatron_ladder", GPT_OSS | HYBRID | NOT_ROUNDED),
            (
                "megatron_ladder",
                GPT_OSS | UPPER | {"residual_mode": "farskip", "moe_shared_expert_intermediate_size": 8},
            ),
            ("megatron_ladder", HYBRID | CLIPPED | {"lanes": 2}),
            ("megatron_ladder", EXPERTS | {"add_moe_bias": True}),
            ("megatron_ladder", HYBRID | WINDOWS | {"add_qkv_bias": True, "head_dim": 12}),
            ("megatron_ladder", GLM | HYBRID | WINDOWS | {"residual_mode": "farskip"}),
            ("megatron_ladder", GPT_OSS | HYBRID | NOT_ROUNDED | WINDOWS | SINKS | BIASES),
            ("megatron_ladder", EXPERTS | HYBRID | WINDOWS | SINKS | GATED | {"residual_mode": "longcat"}),
            ("megatron_ladder", DESYNC | SINKS),
            ("megatron_ladder", GLM | HYBRID | GATED_EXPERT),
            ("megatron_ladder", GLM | HYBRID | GATED_EXPERT | {"residual_mode": "farskip"}),
            ("qwen3_5_text", QWEN3_5),
            ("megatron_ladder", QWEN3_5 | HYBRID),
            ("megatron_ladder", QWEN3_5 | HYBRID | {"residual_mode": "ladder-attention", "residual_staleness": 2}),
            ("megatron_ladder", QWEN3_5 | HYBRID | {"residual_mode": "ladder-parallel", "tie_embeddings": True}),
            ("megatron_ladder", QWEN3_5 | HYBRID | ROUTED | GATED_EXPERT | {"residual_mode": "farskip"}),
            ("megatron_ladder", QWEN3_5 | HYBRID | ROUTED | {"residual_mode": "shortcut"}),
            ("megatron_ladder", QWEN3_5 | HYBRID | EXPERTS | {"residual_mode": "longcat"}),
            ("megatron_ladder", QWEN3_5 | HYBRID | WINDOWS | {"lanes": 2, "window_layers": (2,)}),
            ("megatron_ladder", DESYNC | QWEN3_5),
            ("megatron_ladder", DELTA | SINKS),
        ],
        5,
    ),
)
def test_exported_directories_match_the_reference_and_can_be_imported(
    model_type: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    config = tiny_config(**changes)
    folder, weights = export(tmp_path, config, "--verify")
    module, tokens = opened(folder), some_tokens(2, 40)
    written = json.loads((folder / "config.json").read_text())
    assert module.config.model_type == written["model_type"] == hf_type(config) == model_type
    # As in constraints.txt, with which the tests run.
    assert written["transformers_version"] == transformers.__version__
    for dropped in ("", "rope_parameters", "rope_scaling"):
        left = {key: value for key, value in written.items() if key != dropped}
        assert model_config_from_hf(left) == config.canonical()
    module.save_pretrained(tmp_path / "saved")
    body = AutoModel.from_pretrained(tmp_path / "saved", trust_remote_code=True).eval()
    with torch.no_grad():
        assert_close(module(tokens).logits, reference_logits(weights, ReferenceConfig.like(config), tokens))
        assert torch.equal(body(tokens).last_hidden_state, module.model(tokens).last_hidden_state)
    # transformers keeps only one spelling of the rotary embedding when it saves our config.
    assert "rope_scaling" not in json.loads((tmp_path / "saved" / "config.json").read_text())
    convert("import", "--hf", tmp_path / "saved", "--save", tmp_path / "again")
    assert Checkpoint.open(tmp_path / "again").model() == config.canonical()
    convert("export", "--load", tmp_path / "again", "--hf", tmp_path / "back")
    assert_equal_bits(tensors_of(tmp_path / "back"), tensors_of(folder))


def test_models_with_sinks_run_only_where_transformers_has_them(tmp_path: Path) -> None:
    folder = export(tmp_path, tiny_config(**HYBRID | SINKS))[0]
    assert opened(folder).config._attn_implementation == "eager"
    for name in ("sdpa", "flash_attention_2"):
        with pytest.raises((ValueError, ImportError), match="does not support"):
            AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, attn_implementation=name)
    # As servers do.
    AttentionInterface.register("server", AttentionInterface()["sdpa"])
    with pytest.raises(ValueError, match="'server' could ignore sinks"):
        AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, attn_implementation="server")
    for changes in ({"qk_norm": True}, {"rope_parameters": {"partial_rotary_factor": 0.5}}):
        with pytest.raises(ValueError, match="expected neither"):
            MegatronLadderConfig(softmax_type="learnable", **changes)


@pytest.mark.parametrize(("model_type", "wiring"), [("llama", {}), ("megatron_ladder", HYBRID)])
def test_experts_in_no_layer_need_no_type_with_experts(model_type: str, wiring: dict[str, Any]) -> None:
    config = tiny_config(**EXPERTS | wiring | {"moe_layers": ()})
    assert hf_type(config) == model_type
    assert model_config_from_hf(hf_config(config, dtype="float32")) == tiny_config(**wiring)


@pytest.mark.parametrize("tied", [True, False])
def test_a_larger_or_another_head_keeps_its_weights_and_the_bound_of_the_logits(tmp_path: Path, tied: bool) -> None:
    config, tokens = tiny_config(logit_soft_cap=0.5, tie_embeddings=tied), some_tokens(1, 8)
    module = opened(export(tmp_path, config)[0])
    with torch.no_grad():
        before = module(tokens).logits
        module.resize_token_embeddings(VOCAB + 3)
        # As a composite model does, which contains this one.
        module.post_init()
        after = module(tokens).logits
        assert_close(after[..., :VOCAB], before)
        assert after.shape[-1] == VOCAB + 3 and after.abs().max() < 0.5
        # As adapters do.
        module.lm_head = nn.Linear(config.hidden_size, VOCAB)
        unbounded = module.lm_head(module.model(tokens).last_hidden_state)
        assert_close(module(tokens).logits, 0.5 * (unbounded / 0.5).tanh())


def test_the_first_layers_are_a_shorter_model(tmp_path: Path) -> None:
    module, prompt = opened(export(tmp_path, tiny_config(**HYBRID))[0]), some_tokens(1, 8)
    written = hf_config(tiny_config(**HYBRID | {"num_layers": 2, "ladder_layers": (1,)}), dtype="float32")
    shorter = MegatronLadderForCausalLM(MegatronLadderConfig(**written)).eval()
    shorter.load_state_dict(module.state_dict(), strict=False)
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    assert module.generate(prompt, assistant_early_exit=2, **options).equal(module.generate(prompt, **options))
    module.model.layers = module.model.layers[:2]
    with torch.no_grad():
        assert module(prompt).logits.equal(shorter(prompt).logits)


def test_a_classifier_reads_the_last_token(tmp_path: Path) -> None:
    folder, tokens = export(tmp_path, tiny_config(**HYBRID))[0], some_tokens(1, 8)
    module = AutoModelForSequenceClassification.from_pretrained(folder, trust_remote_code=True, num_labels=3).eval()
    with torch.no_grad():
        last = opened(folder).model(tokens).last_hidden_state[:, -1]
        assert_close(module(tokens).logits, module.score(last))


def test_the_plugin_for_vllm_contains_the_configuration_of_exported_directories(tmp_path: Path) -> None:
    command = [sys.executable, "setup.py", "--quiet", "build", "--build-base", str(tmp_path)]
    subprocess.run(command, cwd=REPOSITORY_ROOT / "vllm_plugin", check=True)
    name = "configuration_megatron_ladder.py"
    built = tmp_path / "lib" / "megatron_ladder_vllm" / name
    assert built.read_bytes() == module_files("megatron_ladder")[name]

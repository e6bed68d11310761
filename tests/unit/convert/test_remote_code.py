"""`config.json` of published models, values that are rejected, model cards, and the build of the plugin."""

import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ladder_lab.bench.sizes import SIZES
from megatron_ladder.blueprint.mixers.attention import attention_factor
from megatron_ladder.checkpoint.hf_config import hf_config, model_config_from_hf
from megatron_ladder.convert.small_files import imported_card
from tests.helpers.commands import run_command
from tests.helpers.runs import errors_of

LLAMA3 = {
    "rope_scaling": "llama3",
    "rotary_base": 5e5,
    "rope_scaling_factor": 8.0,
    "rope_low_freq_factor": 1.0,
    "rope_high_freq_factor": 4.0,
    "rope_original_max_position_embeddings": 8192,
}
LLAMA31 = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-05,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
    "pretraining_tp": 1,
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
}
"""Configuration of Llama-3.1-8B, written by transformers 4."""
WINDOWS = {"sliding_window": 8, "layer_types": ["sliding_attention"] * 31 + ["full_attention"]}
OURS = replace(SIZES["llama-8b"], max_position_embeddings=131072, **LLAMA3)


def test_the_card_of_an_import_names_the_repository_of_a_cached_model(tmp_path: Path) -> None:
    cached = tmp_path / "models--meta-llama--Llama-2-7b" / "snapshots" / "0123"
    assert imported_card(cached, b"---\n" + b"[" * 9999 + b"\n---") == imported_card(cached, b"---\n{[\n---")
    assert imported_card(cached, b"---\n{[\n---") == b"---\nbase_model: meta-llama/Llama-2-7b\n---\n"


def test_configs_of_published_models() -> None:
    assert model_config_from_hf(LLAMA31) == OURS
    upper_two = model_config_from_hf(LLAMA31 | {"model_type": "llamaLadder", "ladder_layers": 2})
    assert upper_two == replace(OURS, residual_mode="ladder", ladder_layers=(30, 31))
    listed = model_config_from_hf(LLAMA31 | {"model_type": "llamaLadder", "ladder_layers": [7, 3]})
    assert listed.ladder_layers == (3, 7)
    assert model_config_from_hf(LLAMA31 | {"model_type": "llamaLadder", "ladder_layers": None}) == OURS
    assert model_config_from_hf(LLAMA31 | {"model_type": "mistral", "sliding_window": None}) == OURS
    qwen2 = LLAMA31 | {"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 131072}
    assert model_config_from_hf(qwen2) == replace(OURS, add_qkv_bias=True)
    qwen3 = LLAMA31 | {"model_type": "qwen3", "head_dim": 128, "layer_types": ["full_attention"] * 32}
    assert model_config_from_hf(qwen3) == replace(OURS, qk_layernorm=True)
    old = {key: value for key, value in LLAMA31.items() if key not in ("rope_theta", "rope_scaling")}
    del old["num_key_value_heads"]
    plain = {"rope_scaling": "none", "rotary_base": 1e4, "rope_scaling_factor": 1.0, "num_key_value_heads": 32}
    assert model_config_from_hf(old) == replace(OURS, **plain)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


def test_yarn_of_published_models() -> None:
    """Qwen3 by transformers 4, Yarn-Llama-2, OLMo-3, and the scales of DeepSeek, in one of the spellings or both."""
    plain = {key: value for key, value in LLAMA31.items() if key != "rope_scaling"}
    fields = {"rope_scaling": "yarn", "rope_scaling_factor": 4.0, "rope_original_max_position_embeddings": 32768}
    expected = replace(OURS, **fields, rope_low_freq_factor=1.0, rope_high_freq_factor=4.0)
    assert model_config_from_hf(plain | {"rope_scaling": YARN}) == expected
    assert attention_factor(expected) == 0.1 * math.log(4) + 1
    both = {"rope_parameters": YARN | {"rope_theta": 5e5, "beta_fast": 32}, "rope_scaling": YARN}
    assert model_config_from_hf(plain | both) == expected
    old = {"type": "yarn", "factor": 16.0, "original_max_position_embeddings": 4096, "finetuned": True}
    assert attention_factor(model_config_from_hf(plain | {"rope_scaling": old})) == 0.1 * math.log(16) + 1
    factor = {"attention_factor": 1.138629436111989, "truncate": True}
    assert model_config_from_hf(plain | {"rope_scaling": YARN | factor}) == expected
    not_rounded = replace(expected, yarn_correction_range_round_to_int=False)
    assert model_config_from_hf(plain | {"rope_scaling": YARN | {"truncate": False}}) == not_rounded
    assert hf_config(not_rounded, dtype="float32")["rope_parameters"]["truncate"] is False
    assert "truncate" not in hf_config(expected, dtype="float32")["rope_parameters"]
    implied = {"rope_type": "yarn", "factor": 4.0}
    assert model_config_from_hf(plain | {"rope_scaling": implied}).rope_original_max_position_embeddings == 131072
    deepseek = {"factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096}
    read = model_config_from_hf(plain | {"rope_scaling": YARN | deepseek})
    assert (attention_factor(read), read.rope_mscale_all_dim) == (1.0, 1.0)
    assert "attention_factor" not in hf_config(read, dtype="float32")["rope_parameters"]
    assert hf_config(expected, dtype="float32")["rope_parameters"]["attention_factor"] == attention_factor(expected)


OWN = {"model_type": "megatron_ladder", "residual_mode": "ladder"}
DESYNC = OWN | {"residual_mode": "desync"}
MIXTRAL = {"model_type": "mixtral", "num_experts_per_tok": 2}
GLM = {"model_type": "glm4_moe", "num_experts_per_tok": 2, "moe_intermediate_size": 8, "routed_scaling_factor": 1.0}
GLM |= {"n_group": 1, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1}


def test_keys_of_types_with_experts_are_those_of_transformers() -> None:
    plain = {key: value for key, value in LLAMA31.items() if key not in ("rope_theta", "rope_scaling")}
    mixtral = model_config_from_hf(plain | MIXTRAL | {"num_local_experts": 4})
    assert (mixtral.rotary_base, mixtral.rotary_percent, mixtral.moe_ffn_hidden_size) == (1e6, 1.0, 14336)
    written = hf_config(replace(mixtral, ffn_hidden_size=8), dtype="float32")
    assert (written["model_type"], written["intermediate_size"]) == ("mixtral", 14336), "no layer is dense"
    glm = model_config_from_hf(plain | GLM | {"n_routed_experts": 4, "norm_topk_prob": True})
    assert (glm.rotary_base, glm.rotary_percent, glm.moe_ffn_hidden_size) == (1e4, 0.5, 8)
    assert glm.moe_layers == tuple(range(1, 32)) and glm.moe_router_score_function == "sigmoid"
    routers = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "norm_topk_prob": True}
    qwen3 = {"model_type": "qwen3_moe", **routers, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
    assert model_config_from_hf(plain | qwen3).moe_layers == (1, *range(5, 32, 2))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "gemma2"}, "model_type gemma2 needs GeGLU, scaled embeddings, "),
        ({"model_type": ["llama"]}, "model_type: found ['llama'], expected one of llama, mistral"),
        ({"hidden_act": "gelu"}, "hidden_act: found 'gelu', expected 'silu' or 'swish'"),
        ({"num_key_value_heads": 5}, "is not divisible by num_key_value_heads 5"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping: found 30.0, expected null"),
        ({"swiglu_limit": 7.0}, "swiglu_limit: found 7.0, expected null in a llama model"),
        ({"softmax_type": "learnable"}, "softmax_type: found 'learnable', expected null in a llama model"),
        (OWN | {"softmax_type": "off-by-one"}, "softmax_type: found 'off-by-one', expected 'learnable' or 'vanilla'"),
        (OWN | WINDOWS | {"layer_types": ["chunked_attention"]}, "layer_types[0]: found 'chunked_attention', expected"),
        (OWN | {"sliding_window": 8}, "layer_types: found nothing, expected one for each of 32 layers"),
        (OWN | WINDOWS | {"num_hidden_layers": 2}, "layer_types: found ['sliding_attention', "),
        (
            OWN | WINDOWS | {"sliding_window": None},
            "sliding_window: found nothing, expected a number of positions, since",
        ),
        (
            OWN | WINDOWS | {"residual_mode": "longcat"},
            "expected the same for both attentions of a layer of longcat",
        ),
        (OWN | {"swiglu_limit": 0}, "swiglu_limit 0.0: expected above 0"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: found 0.5, expected 1 in a llama model"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope_scaling.rope_type: found 'longrope', expected"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_scaling.factor: found nothing"),
        ({"rope_scaling": YARN | {"attention_factor": 1.0}}, "attention_factor: found 1.0, expected 1.13862944"),
        ({"rope_scaling": YARN | {"mscale": 0.5}}, "attention_factor: found nothing, expected 1.06931472"),
        ({"rope_scaling": YARN | {"mscale_all_dim": 1.0}}, "attention_factor: found nothing, expected 1, which"),
        ({"rope_scaling": YARN | {"beta_fast": 0.9}}, "beta_fast 0.9 must not be below beta_slow 1.0"),
        ({"rope_scaling": YARN, "rope_theta": 1.0}, "rope_theta 1.0 with rope_scaling yarn"),
        (
            {"rope_scaling": YARN, "original_max_position_embeddings": 4096},
            "found '4096 and 32768', expected one number",
        ),
        ({"rope_parameters": LLAMA31["rope_scaling"] | {"rope_theta": 1e4}}, "expected one rope_theta"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "one for each kind of layer"),
        (
            {"layer_types": ["full_attention", "sliding_attention"]},
            "layer_types[1]: found 'sliding_attention', expected 'full_attention'",
        ),
        ({"model_type": "qwen3"}, "head_dim: found nothing"),
        ({"rope_scaling": LLAMA31["rope_scaling"] | {"type": "linear"}}, "rope_scaling.type: found 'linear'"),
        ({"original_max_position_embeddings": 4096}, "found '4096 and 8192', expected one number"),
        ({"ladder_layers": [3]}, "ladder_layers: found [3], expected none in a llama model"),
        ({"model_type": "llamaLadder", "ladder_layers": 33}, "ladder_layers: found 33, expected at most the 32"),
        (OWN | {"residual_mode": "parallel", "ladder_layers": [1]}, "found [1], expected none with residual_mode 'par"),
        (OWN | {"intermediate_size": 49, "lanes": 2}, "intermediate_size 49 is not divisible by lanes 2"),
        (OWN | {"lanes": "2"}, "lanes: found '2', expected a whole number from 0"),
        (OWN | {"desync_interval": 2}, "desync_interval: found 2, expected 0"),
        (DESYNC | {"desync_interval": 2}, "desync_tp: found 0"),
        (DESYNC | {"desync_interval": 3, "desync_tp": 2}, "desync_interval 3 is not 2 or 4"),
        (MIXTRAL, "num_experts, num_local_experts or n_routed_experts: found nothing"),
        (MIXTRAL | {"num_local_experts": 3, "sliding_window": 8}, "sliding_window: found 8"),
        (MIXTRAL | {"num_local_experts": 1}, "num_experts_per_tok 2: a token chooses among 1 experts"),
        (GLM | {"n_routed_experts": 3}, "norm_topk_prob: found nothing"),
        (GLM | {"norm_topk_prob": True, "n_routed_experts": 3, "num_experts": 4}, "found [3, 4], expected one number"),
    ],
)
def test_unsupported_values_are_rejected(changes: dict[str, Any], words: str) -> None:
    (error,) = errors_of(model_config_from_hf, LLAMA31 | changes, "there/config.json")
    assert error.startswith("there/config.json: ") and words in error


def test_the_plugin_for_vllm_is_built_with_the_standard_library_alone() -> None:
    """Its build, in an environment without our packages, copies the configuration module."""
    code = "import megatron_ladder.convert.hf_module as m; print(len(m.exported_module(m.CONFIGURATION)))"
    done = run_command([sys.executable, "-S", "-c", code], timeout=60)
    assert int(done.stdout) > 1000, done.stderr

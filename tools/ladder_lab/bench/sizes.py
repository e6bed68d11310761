"""Model shapes, by name or in numbers."""

import re
from typing import Any

from megatron_ladder.blueprint.model import ModelConfig, model_errors
from megatron_ladder.errors import Vocabulary, expected_one_of

POSITIONS = 8192
SHAPE = "LAYERSxHIDDENxFFNxHEADSxKEY_VALUE_HEADSxVOCABULARY"


def _shape(text: str, tied: bool = False, **more: Any) -> ModelConfig:
    """Return the shape for numbers in the order of `SHAPE`."""
    layers, hidden, ffn, heads, key_value_heads, vocabulary = map(int, text.split("x"))
    figures = {
        "num_layers": layers,
        "hidden_size": hidden,
        "ffn_hidden_size": ffn,
        "num_attention_heads": heads,
        "num_key_value_heads": key_value_heads,
        "head_dim": hidden // heads,
        "vocab_size": vocabulary,
    }
    return ModelConfig(**figures | more, max_position_embeddings=POSITIONS, tie_embeddings=tied)


def _experts(count: int, chosen: int, width: int, layers: range, shared: int = 0, **more: Any) -> dict[str, Any]:
    return {
        "num_experts": count,
        "moe_router_topk": chosen,
        "moe_ffn_hidden_size": width,
        "moe_shared_expert_intermediate_size": shared,
        "moe_layers": tuple(layers),
        **more,
    }


_SIGMOID: dict[str, Any] = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
_GLM: dict[str, Any] = {"head_dim": 128, "add_qkv_bias": True, "rotary_percent": 0.5, **_SIGMOID}


def _gpt_oss(layers: int, experts: int) -> ModelConfig:
    return _shape(
        f"{layers}x2880x2880x64x8x201088",
        head_dim=64,
        add_qkv_bias=True,
        add_attention_output_bias=True,
        add_moe_bias=True,
        quick_geglu=True,
        activation_func_clamp_value=7.0,
        glu_linear_offset=1.0,
        softmax_type="learnable",
        window_size=128,
        window_layers=tuple(range(0, layers, 2)),
        **_experts(experts, 4, 2880, range(layers)),
    )


def _hybrid(sizes: str, value_heads: int, **more: Any) -> ModelConfig:
    layers = int(sizes.split("x")[0])
    return _shape(
        sizes,
        qk_layernorm=True,
        attention_output_gate=True,
        experimental_attention_variant="gated_delta_net",
        linear_attention_layers=tuple(layer for layer in range(layers) if (layer + 1) % 4),
        linear_num_value_heads=value_heads,
        **more,
    )


def _qwen_hybrid(sizes: str, value_heads: int, **more: Any) -> ModelConfig:
    return _hybrid(sizes, value_heads, head_dim=256, rotary_percent=0.25, apply_layernorm_1p=True, **more)


def _study_hybrid(sizes: str, width: int) -> ModelConfig:
    return _hybrid(sizes, 2, linear_num_key_heads=1, linear_key_head_dim=width, linear_value_head_dim=width)


def _latent(nope: int, rope: int, value: int, of_queries: int = 0, **more: Any) -> dict[str, Any]:
    return {
        "kv_lora_rank": 512,
        "q_lora_rank": of_queries,
        "qk_nope_head_dim": nope,
        "qk_rope_head_dim": rope,
        "v_head_dim": value,
        "head_dim": nope + rope,
        **more,
    }


SIZES: dict[str, ModelConfig] = {
    "small": _shape("8x1024x1408x16x16x4096"),
    "small-llama": _shape("8x1024x2816x16x4x4096"),
    "small-train": _shape("6x512x704x8x8x2048"),
    "small-moe": _shape("8x1024x1408x16x16x4096", **_experts(16, 2, 512, range(8), 384)),
    "small-moe-train": _shape("6x512x704x8x8x2048", **_experts(8, 2, 256, range(6), 192)),
    "small-ep": _shape("4x512x640x8x8x512", **_experts(8, 2, 320, range(4), 640)),
    "small-ep-routed": _shape("4x512x640x8x8x512", **_experts(16, 4, 224, range(4), 128)),
    "small-ep-unshared": _shape("4x512x640x8x8x512", **_experts(16, 4, 224, range(4))),
    "small-hybrid": _qwen_hybrid("4x512x1408x4x2x2048", 8, linear_num_key_heads=4),
    "study-moe-smaller": _shape("8x24x48x2x2x512", **_experts(16, 2, 24, range(8), 24)),
    "study-moe": _shape("8x48x96x2x2x512", **_experts(16, 2, 48, range(8), 48)),
    "study-hybrid-smaller": _study_hybrid("8x16x48x2x2x512", 16),
    "study-hybrid": _study_hybrid("8x24x72x2x2x512", 24),
    "paper-1.2b": _shape("40x1536x4096x24x24x49152"),
    "paper-1.5b": _shape("52x1536x4096x24x24x49152"),
    "paper-3.5b": _shape("40x2304x9216x36x36x49152"),
    "paper-4.5b": _shape("52x2304x9216x36x36x49152"),
    "paper-3.5b-tp8": _shape("40x2304x9216x32x32x49152"),
    "paper-4.5b-tp8": _shape("52x2304x9216x32x32x49152"),
    "llama-2-7b": _shape("32x4096x11008x32x32x32000"),
    "llama-2-13b": _shape("40x5120x13824x40x40x32000"),
    "llama-2-70b": _shape("80x8192x28672x64x8x32000"),
    "qwen-2.5-72b": _shape("80x8192x29568x64x8x152064"),
    "llama-1b": _shape("16x2048x8192x32x8x128256", tied=True),
    "llama-3b": _shape("28x3072x8192x24x8x128256", tied=True),
    "llama-8b": _shape("32x4096x14336x32x8x128256"),
    "llama-34b": _shape("48x8192x22016x64x8x32000"),
    "llama-70b": _shape("80x8192x28672x64x8x128256"),
    "mixtral-8x7b": _shape("32x4096x14336x32x8x32000", **_experts(8, 2, 14336, range(32))),
    "mixtral-8x22b": _shape("56x6144x16384x48x8x32768", **_experts(8, 2, 16384, range(56))),
    "qwen3-30b-a3b": _shape(
        "48x2048x6144x32x4x151936", head_dim=128, qk_layernorm=True, **_experts(128, 8, 768, range(48))
    ),
    "qwen3-235b-a22b": _shape(
        "94x4096x12288x64x4x151936", head_dim=128, qk_layernorm=True, **_experts(128, 8, 1536, range(94))
    ),
    "glm-4.5-air": _shape("46x4096x10944x96x8x151552", **_GLM, **_experts(128, 8, 1408, range(1, 46), 1408)),
    "glm-4.6": _shape(
        "92x5120x12288x96x8x151552", qk_layernorm=True, **_GLM, **_experts(160, 8, 1536, range(3, 92), 1536)
    ),
    "instella-moe": _shape(
        "27x2048x10944x16x1x128896",
        **_latent(96, 32, 128, attention_output_gate=True),
        **_SIGMOID,
        **_experts(64, 6, 1408, range(1, 27), 2816),
    ),
    "deepseek-v2-lite": _shape(
        "27x2048x10944x16x1x102400",
        **_latent(128, 64, 128),
        **_experts(64, 6, 1408, range(1, 27), 2816, moe_router_unnormalized=True),
    ),
    "glm-4.7-flash": _shape(
        "47x2048x10240x20x1x154880",
        **_latent(192, 64, 256, 768),
        **_SIGMOID,
        **_experts(64, 4, 1536, range(1, 47), 1536),
    ),
    "deepseek-v3": _shape(
        "61x7168x18432x128x1x129280",
        **_latent(128, 64, 128, 1536),
        **_SIGMOID,
        **_experts(256, 8, 2048, range(3, 61), 2048, moe_router_num_groups=8, moe_router_group_topk=4),
    ),
    "hy3": _shape(
        "80x4096x13312x64x8x120832",
        head_dim=128,
        qk_layernorm=True,
        moe_router_topk_scaling_factor=2.826,
        **_SIGMOID,
        **_experts(192, 8, 1536, range(1, 80), 1536),
    ),
    "gpt-oss-20b": _gpt_oss(24, 32),
    "gpt-oss-120b": _gpt_oss(36, 128),
    "qwen3.5-27b": _qwen_hybrid("64x5120x17408x24x4x248320", 48),
    "qwen3.6-35b-a3b": _qwen_hybrid(
        "40x2048x512x16x2x248320", 32, **_experts(256, 8, 512, range(40), 512, moe_shared_expert_gate=True)
    ),
    "qwen3-next-80b": _qwen_hybrid(
        "48x2048x5120x16x2x151936", 32, **_experts(512, 10, 512, range(48), 512, moe_shared_expert_gate=True)
    ),
    "bloom-176b": _shape("70x14336x50176x112x112x250880"),
    "llama-405b": _shape("126x16384x53248x128x8x128256"),
}
"""small and small-train: attention and MLP cost the same, for two CPU cores; small-moe*: so do attention and the
experts that a token uses. small-ep*: for --ep (docs/benchmark.md). small-hybrid: dense, and a quarter as wide as
qwen3.6-35b-a3b. study-*: for docs/studies.md.
small-llama: the MLP costs twice as much, as in Llama. paper-*: the models of the paper (arXiv 2501.06589); paper-1.5b
and paper-4.5b are its deeper ladders, with the 52 layers of 1.55b and 3.9bh in the authors' inference program
(github.com/mayank31398/ladder-residual-inference, gpt_fast/gpt_ladder_TP.py). paper-*-tp8: as in that program, with 32
heads of 72 instead of the 36 of 64 that the authors trained, so that 8 ranks divide them; parameters and matrices have
the same sizes.
bloom-176b: BLOOM's layers and widths with a gated MLP, as in the authors' source. llama-*: Llama 3, except 34b, which
is CodeLlama, and those with a 2. instella-moe, deepseek-*, glm-*: `config.json` of amd/Instella-MoE-16B-A3B-Think,
deepseek-ai/DeepSeek-V2-Lite, deepseek-ai/DeepSeek-V3, zai-org/GLM-4.5-Air, GLM-4.6 and GLM-4.7-Flash, without the layer
that predicts a further token. hy3: that of tencent/Hy3, without such a layer. gpt-oss-*: those of openai/gpt-oss-20b
and openai/gpt-oss-120b, without YaRN. qwen3.5-27b (also 3.6), qwen3.6-35b-a3b (also 3.5), qwen3-next-80b: the language
models of Qwen/Qwen3.5-27B, Qwen/Qwen3.6-35B-A3B and Qwen/Qwen3-Next-80B-A3B-Instruct, without the layer that predicts a
further token."""


def find_size(text: str) -> ModelConfig:
    """Return the shape for a name (`llama-70b`, or just `70b`), or for numbers in the order of `SHAPE`.

    Raises:
        ValueError: it is neither.
    """
    names = [name for name in SIZES if text == name or (text[:1].isdigit() and name.endswith(f"-{text}"))]
    if names:
        return SIZES[min(names, key=len)]
    if re.fullmatch(r"\d+(x\d+){5}", text) is None:
        # llama-13b is rather llama-2-13b than llama-3b.
        as_large = [name for name in SIZES if name.endswith(f"-{text.lower().rpartition('-')[2]}")]
        raise ValueError(f"{expected_one_of(text, SIZES, as_large)}, or {SHAPE} such as 8x192x512x6x6x4096")
    _, hidden, _, heads, *_ = map(int, text.split("x"))
    if heads == 0 or hidden % heads:
        raise ValueError(f"hidden {hidden} is not divisible by {heads} heads")
    shape = _shape(text)
    if problems := [problem.render(Vocabulary(str)) for problem in model_errors(shape)]:
        raise ValueError("; ".join(problems))
    return shape

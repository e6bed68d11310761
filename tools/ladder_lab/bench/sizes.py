"""Model shapes, by name or in numbers."""

import re
from typing import Any

from megatron_ladder.blueprint.model import ModelConfig, model_errors

LLAMA3_VOCABULARY = 128256
STARCODER_VOCABULARY = 49152
QWEN3_VOCABULARY = 151936
POSITIONS = 8192


def _shape(
    layers: int,
    hidden: int,
    ffn: int,
    heads: int,
    key_value_heads: int,
    vocabulary: int,
    tied: bool = False,
    **more: Any,
) -> ModelConfig:
    more.setdefault("head_dim", hidden // heads)
    return ModelConfig(
        num_layers=layers,
        hidden_size=hidden,
        ffn_hidden_size=ffn,
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
        vocab_size=vocabulary,
        max_position_embeddings=POSITIONS,
        tie_embeddings=tied,
        **more,
    )


def _experts(count: int, chosen: int, width: int, layers: range, shared: int = 0, **more: Any) -> dict[str, Any]:
    return {
        "num_experts": count,
        "moe_router_topk": chosen,
        "moe_ffn_hidden_size": width,
        "moe_shared_expert_intermediate_size": shared,
        "moe_layers": tuple(layers),
        **more,
    }


_GLM: dict[str, Any] = {
    "head_dim": 128,
    "add_qkv_bias": True,
    "rotary_percent": 0.5,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
}
SIZES: dict[str, ModelConfig] = {
    "small": _shape(8, 1024, 1408, 16, 16, 4096),
    "small-llama": _shape(8, 1024, 2816, 16, 4, 4096),
    "small-train": _shape(6, 512, 704, 8, 8, 2048),
    "small-moe": _shape(8, 1024, 1408, 16, 16, 4096, **_experts(16, 2, 512, range(8), 384)),
    "small-moe-train": _shape(6, 512, 704, 8, 8, 2048, **_experts(8, 2, 256, range(6), 192)),
    "study-moe": _shape(8, 48, 96, 2, 2, 512, **_experts(16, 2, 48, range(8), 48)),
    "study-moe-larger": _shape(8, 96, 192, 4, 4, 512, **_experts(16, 2, 96, range(8), 96)),
    "paper-1.2b": _shape(40, 1536, 4096, 24, 24, STARCODER_VOCABULARY),
    "paper-1.5b": _shape(52, 1536, 4096, 24, 24, STARCODER_VOCABULARY),
    "paper-3.5b": _shape(40, 2304, 9216, 36, 36, STARCODER_VOCABULARY),
    "paper-4.5b": _shape(52, 2304, 9216, 36, 36, STARCODER_VOCABULARY),
    "paper-3.5b-tp8": _shape(40, 2304, 9216, 32, 32, STARCODER_VOCABULARY),
    "paper-4.5b-tp8": _shape(52, 2304, 9216, 32, 32, STARCODER_VOCABULARY),
    "llama-2-7b": _shape(32, 4096, 11008, 32, 32, 32000),
    "llama-2-13b": _shape(40, 5120, 13824, 40, 40, 32000),
    "llama-2-70b": _shape(80, 8192, 28672, 64, 8, 32000),
    "qwen-2.5-72b": _shape(80, 8192, 29568, 64, 8, 152064),
    "llama-1b": _shape(16, 2048, 8192, 32, 8, LLAMA3_VOCABULARY, tied=True),
    "llama-3b": _shape(28, 3072, 8192, 24, 8, LLAMA3_VOCABULARY, tied=True),
    "llama-8b": _shape(32, 4096, 14336, 32, 8, LLAMA3_VOCABULARY),
    "llama-34b": _shape(48, 8192, 22016, 64, 8, 32000),
    "llama-70b": _shape(80, 8192, 28672, 64, 8, LLAMA3_VOCABULARY),
    "mixtral-8x7b": _shape(32, 4096, 14336, 32, 8, 32000, **_experts(8, 2, 14336, range(32))),
    "mixtral-8x22b": _shape(56, 6144, 16384, 48, 8, 32768, **_experts(8, 2, 16384, range(56))),
    "qwen3-30b-a3b": _shape(
        48, 2048, 6144, 32, 4, QWEN3_VOCABULARY, head_dim=128, qk_layernorm=True, **_experts(128, 8, 768, range(48))
    ),
    "qwen3-235b-a22b": _shape(
        94, 4096, 12288, 64, 4, QWEN3_VOCABULARY, head_dim=128, qk_layernorm=True, **_experts(128, 8, 1536, range(94))
    ),
    "glm-4.5-air": _shape(46, 4096, 10944, 96, 8, 151552, **_GLM, **_experts(128, 8, 1408, range(1, 46), 1408)),
    "glm-4.6": _shape(
        92, 5120, 12288, 96, 8, 151552, qk_layernorm=True, **_GLM, **_experts(160, 8, 1536, range(3, 92), 1536)
    ),
    "bloom-176b": _shape(70, 14336, 50176, 112, 112, 250880),
    "llama-405b": _shape(126, 16384, 53248, 128, 8, LLAMA3_VOCABULARY),
}
"""small and small-train: attention and MLP cost the same, for two CPU cores; small-moe*: so do attention and the
experts that a token uses. study-moe*: for docs/studies.md. small-llama: the MLP costs twice as much,
as in Llama. paper-*: the models of the paper (arXiv 2501.06589); paper-1.5b and paper-4.5b are its deeper ladders, with
the 52 layers of 1.55b and 3.9bh in the authors' inference program (github.com/mayank31398/ladder-residual-inference,
gpt_fast/gpt_ladder_TP.py). paper-*-tp8: as in that program, with 32 heads of 72 instead of the 36 of 64 that the
authors trained, so that 8 ranks divide them; parameters and matrices have the same sizes.
bloom-176b: BLOOM's layers and widths with a gated MLP, as in the authors' source. llama-*: Llama 3, except 34b, which
is CodeLlama, and those with a 2."""
SHAPE = "LAYERSxHIDDENxFFNxHEADSxKEY_VALUE_HEADSxVOCABULARY"


def find_size(text: str) -> ModelConfig:
    """Return the shape for a name (`llama-70b`, or just `70b`), or for numbers in the order of `SHAPE`.

    Raises:
        ValueError: it is neither.
    """
    names = [name for name in SIZES if text == name or (text[:1].isdigit() and name.endswith(f"-{text}"))]
    if names:
        return SIZES[min(names, key=len)]
    if re.fullmatch(r"\d+(x\d+){5}", text) is None:
        raise ValueError(f"expected one of {', '.join(SIZES)}, or {SHAPE} such as 8x192x512x6x6x4096")
    layers, hidden, ffn, heads, key_value_heads, vocabulary = map(int, text.split("x"))
    if heads and hidden % heads:
        raise ValueError(f"hidden {hidden} is not divisible by {heads} heads")
    shape = _shape(layers, hidden, ffn, max(heads, 1), key_value_heads, vocabulary)
    errors = [*model_errors(shape)] if heads else ["--num-attention-heads 0: expected 1 or more"]
    if errors:
        raise ValueError("; ".join(error.removeprefix("--") for error in errors))
    return shape

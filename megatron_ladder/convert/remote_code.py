"""The `config.json` of a Hugging Face directory, to and from `ModelConfig`, and the code that goes beside it.

A model whose wiring is the ordinary one is written as the plain type that expresses it exactly, so that everything
that knows Llama opens it. Any other is of the project's own type, whose code stands in the directory: a reader that
does not run that code refuses the directory, where one that took it for a Llama would compute nonsense.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_ladder.blueprint.model import ModelConfig, model_errors
from megatron_ladder.blueprint.wiring import SHARED_STREAM_MODES, SUB_BLOCK_TABLE, WIRINGS
from megatron_ladder.convert.hf_keys import HFKeys
from megatron_ladder.errors import UserError

OWN_TYPE = "megatron_ladder"
"""`model_type` of what no plain type expresses; as in `hf_module/configuration_megatron_ladder.py`."""
CONFIGURATION, MODELING = "configuration_megatron_ladder", "modeling_megatron_ladder"
"""Modules of `hf_module/` that are written beside the weights."""
CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    OWN_TYPE: "MegatronLadderForCausalLM",
}
"""`model_type` -> the class of a language model."""
AUTHORS_TYPE = "llamaLadder"
"""`model_type` of the paper's authors: Llama, with `ladder_layers`."""
READABLE_TYPES = (*CLASSES, AUTHORS_TYPE)
_TABLE_IMPORT = b"from megatron_ladder.blueprint.wiring import SUB_BLOCK_TABLE\n"
"""Line of the configuration module that an exported directory has the table instead of."""


def module_files(model: ModelConfig) -> dict[str, bytes]:
    """File name -> content of the code that an exported directory needs; empty for a plain type.

    Raises:
        UserError: see `hf_type`.
    """
    if hf_type(model) != OWN_TYPE:
        return {}
    folder = Path(__file__).with_name("hf_module")
    files = {f"{name}.py": (folder / f"{name}.py").read_bytes() for name in (CONFIGURATION, MODELING)}
    configuration = files[f"{CONFIGURATION}.py"]
    assert configuration.count(_TABLE_IMPORT) == 1
    rows = "".join(f"    {name!r}: {row!r},\n" for name, row in SUB_BLOCK_TABLE.items())
    files[f"{CONFIGURATION}.py"] = configuration.replace(_TABLE_IMPORT, f"SUB_BLOCK_TABLE = {{\n{rows}}}\n".encode())
    return files


def hf_type(model: ModelConfig) -> str:
    """`model_type` of the Hugging Face model that computes exactly what `model` does.

    Raises:
        UserError: a desync model, whose tensor-parallel ranks each have a stream and norms of their own.
    """
    if model.wiring.stream == "per rank":
        raise UserError(
            f"--residual-mode {model.residual_mode}: each of the {model.desync_tp} tensor-parallel ranks has its own "
            "stream, which no Hugging Face model can express: generate from the checkpoint instead"
        )
    divides = model.hidden_size % model.num_attention_heads == 0
    usual_heads = divides and model.head_dim == model.hidden_size // model.num_attention_heads
    q_bias, o_bias, mlp_bias = model.add_qkv_bias, model.add_attention_output_bias, model.add_mlp_bias
    if model.ladder_layers or model.wiring.one_norm:
        return OWN_TYPE
    if model.qk_layernorm:
        return "qwen3" if q_bias == o_bias and not mlp_bias else OWN_TYPE
    if q_bias == o_bias and divides:
        return "llama"
    if q_bias and not o_bias and not mlp_bias and usual_heads:
        return "qwen2"
    # transformers refuses a Llama whose heads do not divide the hidden size; Mistral is the same without biases.
    return OWN_TYPE if q_bias or o_bias or mlp_bias else "mistral"


def hf_config(
    model: ModelConfig,
    *,
    dtype: str,
    bos_token_id: int | None = None,
    eos_token_id: int | Sequence[int] | None = None,
    pad_token_id: int | None = None,
) -> dict[str, Any]:
    """The content of `config.json`.

    Args:
        dtype: of the weights beside it, as torch calls it: `bfloat16`.

    Raises:
        UserError: see `hf_type`.
    """
    model_type = hf_type(model)
    config: dict[str, Any] = {
        "architectures": [CLASSES[model_type]],
        "model_type": model_type,
        "dtype": dtype,
        "torch_dtype": dtype,
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_key_value_heads,
        "head_dim": model.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": model.max_position_embeddings,
        "initializer_range": model.init_method_std,
        "rms_norm_eps": model.norm_epsilon,
        "tie_word_embeddings": model.tie_embeddings,
        "attention_dropout": 0.0,
        "use_cache": True,
        "bos_token_id": bos_token_id,
        "eos_token_id": eos_token_id if eos_token_id is None or isinstance(eos_token_id, int) else list(eos_token_id),
        "pad_token_id": pad_token_id,
        **_rope_keys(model),
    }
    if model_type == "llama":
        config |= {"attention_bias": model.add_qkv_bias, "mlp_bias": model.add_mlp_bias}
    elif model_type == "mistral":
        config |= {"sliding_window": None}
    elif model_type in ("qwen2", "qwen3"):
        config |= {"use_sliding_window": False, "sliding_window": None}
        if model_type == "qwen3":
            config |= {"attention_bias": model.add_qkv_bias}
    else:
        config |= _own_keys(model)
    return config


def _own_keys(model: ModelConfig) -> dict[str, Any]:
    """What only the project's own type has."""
    return {
        "auto_map": {
            "AutoConfig": f"{CONFIGURATION}.MegatronLadderConfig",
            "AutoModel": f"{MODELING}.MegatronLadderModel",
            "AutoModelForCausalLM": f"{MODELING}.MegatronLadderForCausalLM",
        },
        "attention_bias": model.add_qkv_bias,
        "attention_output_bias": model.add_attention_output_bias,
        "mlp_bias": model.add_mlp_bias,
        "qk_norm": model.qk_layernorm,
        "residual_mode": model.residual_mode,
        "residual_staleness": model.residual_staleness,
        "ladder_layers": list(model.ladder_layers),
    }


def _rope_keys(model: ModelConfig) -> dict[str, Any]:
    """The rotary embedding in both spellings: transformers from 5 on reads the first, everything older the others."""
    scaling: dict[str, Any] = {}
    if model.rope_scaling != "none":
        scaling = {"rope_type": model.rope_scaling, "factor": model.rope_scaling_factor}
    if model.rope_scaling == "llama3":
        scaling |= {
            "low_freq_factor": model.rope_low_freq_factor,
            "high_freq_factor": model.rope_high_freq_factor,
            "original_max_position_embeddings": model.rope_original_max_position_embeddings,
        }
    return {
        "rope_parameters": {"rope_type": "default", **scaling, "rope_theta": model.rotary_base},
        "rope_theta": model.rotary_base,
        "rope_scaling": scaling or None,
    }


def model_config_from_hf(config: Mapping[str, Any], source: str = "config.json") -> ModelConfig:
    """Reads the `config.json` of a Llama, Mistral, Qwen2, Qwen3, of the paper's authors' or of the project's own type.

    Sizes must be there: what a reader would fill in from its own defaults is refused.

    Raises:
        UserError: something that the project's models cannot compute, or that contradicts itself; each mistake names
            `source`, the key, what was found and what was expected.
    """
    keys = HFKeys(config, source)
    model_type = config.get("model_type")
    if model_type not in READABLE_TYPES:
        raise UserError(f"{source}: model_type {model_type!r}: only {', '.join(READABLE_TYPES)} can be converted")
    if config.get("quantization_config") is not None:
        keys.mistake("quantization_config", "a quantised checkpoint", "weights in float32, float16 or bfloat16")
    keys.expect("hidden_act", ("silu", "swish"), default="silu")
    keys.expect("partial_rotary_factor", (1.0, None))
    keys.check_full_attention(model_type)
    heads = keys.integer("num_attention_heads")
    hidden_size = keys.integer("hidden_size")
    usual_head_dim = max(hidden_size // heads, 1) if model_type != "qwen3" else None
    default_heads = heads if model_type in ("llama", AUTHORS_TYPE) else None
    values: dict[str, Any] = {
        "num_layers": keys.integer("num_hidden_layers"),
        "hidden_size": hidden_size,
        "ffn_hidden_size": keys.integer("intermediate_size"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.integer("num_key_value_heads", default_heads),
        "head_dim": keys.integer("head_dim", usual_head_dim),
        "vocab_size": keys.integer("vocab_size"),
        "max_position_embeddings": keys.integer("max_position_embeddings"),
        "norm_epsilon": keys.number("rms_norm_eps"),
        "tie_embeddings": keys.truth("tie_word_embeddings", False),
        "init_method_std": keys.number("initializer_range", 0.02),
        **keys.rope(),
        **_biases(keys, model_type),
        **_wiring(keys, model_type),
    }
    keys.raise_mistakes()
    model = ModelConfig(**values)
    mistakes = model_errors(model)
    if mistakes:
        raise UserError(*(f"{source}: {mistake}" for mistake in mistakes))
    return model


def _biases(keys: HFKeys, model_type: str) -> dict[str, bool]:
    """Which projections have biases, and whether queries and keys have norms."""
    if model_type == OWN_TYPE:
        return {
            "add_qkv_bias": keys.truth("attention_bias", False),
            "add_attention_output_bias": keys.truth("attention_output_bias", False),
            "add_mlp_bias": keys.truth("mlp_bias", False),
            "qk_layernorm": keys.truth("qk_norm", False),
        }
    attention = model_type in ("llama", AUTHORS_TYPE, "qwen3") and keys.truth("attention_bias", False)
    return {
        "add_qkv_bias": attention or model_type == "qwen2",
        "add_attention_output_bias": attention,
        "add_mlp_bias": model_type in ("llama", AUTHORS_TYPE) and keys.truth("mlp_bias", False),
        "qk_layernorm": model_type == "qwen3",
    }


def _wiring(keys: HFKeys, model_type: str) -> dict[str, Any]:
    """`residual_mode`, `ladder_layers` and `residual_staleness`."""
    layers = keys.layers("ladder_layers", keys.integer("num_hidden_layers"))
    if model_type == AUTHORS_TYPE:
        return {"residual_mode": "ladder" if layers else "standard", "ladder_layers": layers}
    if model_type != OWN_TYPE:
        if layers:
            keys.mistake("ladder_layers", list(layers), f"none in a {model_type} model, which computes no ladder")
        return {}
    mode = str(keys.expect("residual_mode", SHARED_STREAM_MODES))
    if layers and not WIRINGS[mode].late:
        keys.mistake("ladder_layers", list(layers), f"none with residual_mode {mode!r}")
    return {
        "residual_mode": mode,
        "ladder_layers": layers,
        "residual_staleness": keys.integer("residual_staleness", 1),
    }

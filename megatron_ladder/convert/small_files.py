"""The files next to the weights: `config.json`, model card, code, tokenizer, chat template, generation settings.

A model with the ordinary wiring is written as the plain type that expresses it exactly, so that every program that
reads Llama can open it. Any other model gets the project's own type, whose code is part of the directory: programs that
do not run that code reject the directory, whereas they would silently compute wrong results for a type such as llama.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from megatron_ladder.blueprint.model import ModelConfig
from megatron_ladder.checkpoint.format import (
    CARRIED,
    CHAT_TEMPLATE,
    GENERATION_CONFIG,
    Checkpoint,
    is_card_or_licence,
)
from megatron_ladder.checkpoint.hf_config import (
    CLASSES,
    EXPERT_FIELDS,
    EXPERT_KEYS,
    OWN_TYPE,
    attentions_per_layer,
    end_ids,
    model_config_from_hf,
)
from megatron_ladder.checkpoint.hf_directory import safe_path
from megatron_ladder.convert.hf_module import CONFIGURATION, MODELING, exported_module
from megatron_ladder.errors import UserError
from megatron_ladder.files import reject_pointer

_TRANSFORMERS = "5.23.0"
"""The version with which exported directories are tested."""
_TERMS = ("license", "license_name", "license_link")
"""Keys of a model card that hold for every model made from it."""
_CONFIG = "tokenizer_config.json"
_MORE_TEMPLATES = "additional_chat_templates"
_OWN_CODE = " The model needs the code in this directory: as a Llama, it would compute wrong results."


def module_files(model: ModelConfig) -> dict[str, bytes]:
    """Return file name -> content of the code that an exported directory needs; raise UserError as `hf_type`."""
    if hf_type(model) != OWN_TYPE:
        return {}
    return {f"{name}.py": exported_module(name) for name in (CONFIGURATION, MODELING)}


def hf_type(model: ModelConfig) -> str:
    """Return the `model_type` of the Hugging Face model that computes exactly what `model` does.

    Raises:
        UserError: lanes, or ranks of desync, that read different streams share key and value heads.
    """
    lanes = model.lanes or model.desync_tp
    if lanes and model.num_key_value_heads % lanes:
        name = f"a model of {lanes} lanes" if model.lanes else f"a {model.residual_mode} model of {lanes} ranks"
        raise UserError(
            f"{name} with {model.num_key_value_heads} key-value heads: with a shared head, each lane computes "
            "different keys and values from it, for which the cache of transformers has no space: generate from the "
            "checkpoint instead"
        )
    divides = model.hidden_size % model.num_attention_heads == 0
    usual_heads = divides and model.head_dim == model.hidden_size // model.num_attention_heads
    # transformers rejects a Llama whose heads do not divide the hidden size; Mistral is the same without biases.
    possible = {"llama": divides, "qwen2": usual_heads}
    return next((name for name in CLASSES if possible.get(name, True) and _expresses(name, model)), OWN_TYPE)


def _expresses(model_type: str, model: ModelConfig) -> bool:
    """Return whether a model that is written as this type is read as the same model."""
    try:
        found = model_config_from_hf(hf_config(model, dtype="float32", model_type=model_type))
    except UserError:
        return False
    # Nothing uses the width of dense layers in a model without any.
    unused = 0 < len(model.moe_layers) == model.num_layers
    return (replace(found, ffn_hidden_size=model.ffn_hidden_size) if unused else found) == model.canonical()


def hf_config(
    model: ModelConfig,
    *,
    dtype: str,
    bos_token_id: int | None = None,
    eos_token_id: int | Sequence[int] | None = None,
    pad_token_id: int | None = None,
    model_type: str | None = None,
) -> dict[str, Any]:
    """Return the content of `config.json` for weights of a dtype in torch's spelling; raise UserError as `hf_type`."""
    model_type = model_type or hf_type(model)
    config: dict[str, Any] = {
        "architectures": [CLASSES[model_type]],
        "model_type": model_type,
        "dtype": dtype,
        "torch_dtype": dtype,
        "transformers_version": _TRANSFORMERS,
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_hidden_size,
        "num_hidden_layers": model.num_layers * attentions_per_layer(model.residual_mode),
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
        **_rope_keys(model, with_part=model_type == "glm4_moe" or model.rotary_percent != 1),
        **_expert_keys(model, model_type),
    }
    if model_type == "llama":
        config |= {"attention_bias": model.add_qkv_bias, "mlp_bias": model.add_mlp_bias}
    elif model_type in ("mistral", "mixtral"):
        config |= {"sliding_window": None}
    elif model_type in ("qwen2", "qwen3", "qwen3_moe"):
        config |= {"use_sliding_window": False, "sliding_window": None}
        if model_type != "qwen2":
            config |= {"attention_bias": model.add_qkv_bias}
    elif model_type == "glm4_moe":
        config |= {"attention_bias": model.add_qkv_bias, "use_qk_norm": model.qk_layernorm}
    else:
        config |= {
            "auto_map": {
                "AutoConfig": f"{CONFIGURATION}.MegatronLadderConfig",
                "AutoModel": f"{MODELING}.MegatronLadderModel",
                "AutoModelForCausalLM": f"{MODELING}.MegatronLadderForCausalLM",
                "AutoModelForSequenceClassification": f"{MODELING}.MegatronLadderForSequenceClassification",
            },
            "attention_bias": model.add_qkv_bias,
            "attention_output_bias": model.add_attention_output_bias,
            "mlp_bias": model.add_mlp_bias,
            "qk_norm": model.qk_layernorm,
            "final_logit_softcapping": model.logit_soft_cap,
            "residual_mode": model.residual_mode,
            "residual_staleness": model.residual_staleness,
            "lanes": model.lanes,
            "ladder_layers": list(model.ladder_layers),
            "desync_interval": model.desync_interval,
            "desync_tp": model.desync_tp,
        }
    return config


def _expert_keys(model: ModelConfig, model_type: str) -> dict[str, Any]:
    """Return the keys of the experts in the words of the model type; none for a model without."""
    if not model.moe_layers or model_type not in EXPERT_KEYS:
        return {}
    layers, width = list(model.moe_layers), model.moe_ffn_hidden_size
    values = {key: getattr(model, field) for key, field in EXPERT_FIELDS.items()} | {
        "norm_topk_prob": not model.moe_router_unnormalized,
        "n_shared_experts": model.moe_shared_expert_intermediate_size // width,
        "first_k_dense_replace": layers[0],
        "expert_layers": layers,
        "mlp_only_layers": sorted({*range(model.num_layers)} - {*layers}),
    }
    count = {"mixtral": "num_local_experts", "glm4_moe": "n_routed_experts"}.get(model_type, "num_experts")
    more = {"mixtral": {"intermediate_size": width}, "glm4_moe": {"num_nextn_predict_layers": 0}}.get(model_type, {})
    return {count: model.num_experts, **{key: values[key] for key in EXPERT_KEYS[model_type]}, **more}


def imported_card(directory: Path, source: bytes) -> bytes:
    """Return the card that a checkpoint keeps of a Hugging Face directory: its name, and the terms of its own card."""
    real, terms = directory.resolve(), _metadata(source)
    # The cache's directories are models--OWNER--NAME/snapshots/REVISION.
    cached = real.parent.parent.name if real.parent.name == "snapshots" else real.name
    name = cached.removeprefix("models--").replace("--", "/")
    return _card({"base_model": name, **{key: terms[key] for key in _TERMS if isinstance(terms.get(key), str)}}, "")


def model_card(model: ModelConfig, wiring: str, name: str, imported: bytes, has_tokenizer: bool) -> bytes:
    """Return the card of an exported model, given that of `imported_card`, which is empty without an import."""
    own, first = hf_type(model) == OWN_TYPE, {"library_name": "transformers", "pipeline_tag": "text-generation"}
    trust, terms = ", trust_remote_code=True" * own, _metadata(imported)
    classes = "AutoModelForCausalLM" + ", AutoTokenizer" * has_tokenizer
    tokenizer = f'    tokenizer = AutoTokenizer.from_pretrained("{name}"{trust})\n' * has_tokenizer
    steps = f"{'check' if 'license' in terms else 'set'} `license`"
    if "base_model" in terms and "/" not in str(terms["base_model"]):
        steps += ", and replace `base_model` by its full name on the Hub"
    text = f"""
# {name}

{model.num_layers} layers of hidden size {model.hidden_size}; wiring: {wiring}.{own * _OWN_CODE}

    from transformers import {classes}

{tokenizer}    model = AutoModelForCausalLM.from_pretrained("{name}"{trust}, dtype="auto")

Before you publish the model, {steps}.
"""
    return _card({**first, "license": "unknown", **terms}, text)


def _metadata(card: bytes) -> dict[str, Any]:
    """Return the metadata of a model card; nothing if it has none that can be read."""
    match = re.match(rb"---[ \r]*\n(.*?)\n---", card, re.DOTALL)
    try:
        values = None if match is None else yaml.safe_load(match[1])
    except (yaml.YAMLError, ValueError, RecursionError):
        values = None
    return values if isinstance(values, dict) else {}


def _card(metadata: dict[str, Any], text: str) -> bytes:
    return f"---\n{yaml.safe_dump(metadata, sort_keys=False)}---\n{text}".encode()


def _rope_keys(model: ModelConfig, with_part: bool) -> dict[str, Any]:
    """Return the rotary embedding in both spellings: transformers 5 reads the first, older versions the others.

    `with_part` adds the rotated part of each head, which is all of it in most types.
    """
    scaling: dict[str, Any] = {}
    if model.rope_scaling != "none":
        scaling = {"rope_type": model.rope_scaling, "factor": model.rope_scaling_factor}
    if model.rope_scaling == "llama3":
        scaling |= {
            "low_freq_factor": model.rope_low_freq_factor,
            "high_freq_factor": model.rope_high_freq_factor,
            "original_max_position_embeddings": model.rope_original_max_position_embeddings,
        }
    part = {"partial_rotary_factor": model.rotary_percent} if with_part else {}
    return {
        "rope_parameters": {"rope_type": "default", **scaling, **part, "rope_theta": model.rotary_base},
        **part,
        "rope_theta": model.rotary_base,
        "rope_scaling": scaling or None,
    }


def read_carried(directory: Path) -> dict[str, bytes]:
    """Return the contents, by name, of the files of a directory that travel with its model.

    Additional chat templates become a list in tokenizer_config.json, as transformers wrote them before.

    Raises:
        UserError: a file is a link out of the directory, or has templates that cannot be read.
    """
    found, more = {}, sorted(f"{path.parent.name}/{path.name}" for path in directory.glob(f"{_MORE_TEMPLATES}/*.jinja"))
    for name in [*sorted(entry.name for entry in directory.iterdir()), *more]:
        if name in (*CARRIED, *more) or (is_card_or_licence(name) and (directory / name).is_file()):
            found[name] = safe_path(directory, name).read_bytes()
            reject_pointer(directory / name, found[name])
    if more:
        templates = {"default": found.pop(CHAT_TEMPLATE, None)} | {Path(name).stem: found.pop(name) for name in more}
        try:
            named = [{"name": name, "template": text.decode()} for name, text in templates.items() if text is not None]
            found[_CONFIG] = json_file({**json.loads(found.get(_CONFIG, b"{}")), "chat_template": named})
        except (ValueError, TypeError, RecursionError) as error:
            raise UserError(f"{directory}: {_CONFIG} or {_MORE_TEMPLATES} cannot be read: {error}") from None
    return found


def describe_tokenizer(directory: Path) -> tuple[dict[str, bytes], dict[str, Any] | None, int]:
    """Return what a training checkpoint records about the tokenizer of a directory, besides what `read_carried` found.

    Returns:
        Files by name, the entry of the manifest, and one more than the largest id; {}, None and 0 without a tokenizer.

    Raises:
        UserError: the tokenizer's file cannot be read, or has no end-of-text token.
    """
    # Imports the tokenizer libraries, which nothing else here needs.
    from megatron_ladder.data.tokenizers import find_tokenizer, tokenizer_files

    tokenizer = find_tokenizer(directory)
    if tokenizer is None:
        return {}, None, 0
    files = {name: content for name, content in tokenizer_files(tokenizer).items() if name not in CARRIED}
    return files, {"type": tokenizer.kind, "sha256": tokenizer.sha256}, tokenizer.vocab_size


def json_file(values: Mapping[str, Any]) -> bytes:
    """Return the content of a JSON file."""
    return (json.dumps(values, indent=2) + "\n").encode()


def exported_tokenizer(
    checkpoint: Checkpoint, other_files: Mapping[str, bytes]
) -> tuple[dict[str, bytes], dict[str, Any], list[str]]:
    """Return the tokenizer's files of a training checkpoint in the form that transformers expects.

    `other_files` are the files of the checkpoint besides manifest and tensors.

    Returns:
        Files by name, the ids of special tokens by their keys in `config.json`, and notes for the user.

    Raises:
        UserError: the tokenizer cannot be read, or is not the one that was saved.
    """
    directory, files = checkpoint.directory, {name: other_files[name] for name in other_files if name in CARRIED}
    # Imports the tokenizer libraries, which nothing else here needs.
    from megatron_ladder.data import tokenizers as kinds

    source = kinds.parse_json_object(directory / _CONFIG, files[_CONFIG]) if _CONFIG in files else {}
    # It names code of the model's source, which the directory does not have.
    settings = {key: value for key, value in source.items() if key != "auto_map"}
    tokenizer, notes = kinds.find_tokenizer(directory), list[str]()
    if isinstance(tokenizer, kinds.SentencePieceTokenizer):
        described = kinds.parse_json_object(directory / kinds.DESCRIPTION_FILE, other_files[kinds.DESCRIPTION_FILE])
        files[kinds.DESCRIPTION_FILE] = json_file({**described, "file": "tokenizer.model"})
        files |= {"tokenizer.model": tokenizer.contents[0], "tokenizer.json": tokenizer.as_json().encode()}
        if "chat_template" not in settings and CHAT_TEMPLATE not in files:
            # Only a template writes special tokens; in a text they are spelt out.
            settings.setdefault("split_special_tokens", True)
    elif isinstance(tokenizer, kinds.HuggingFaceTokenizer):
        files["tokenizer.json"] = tokenizer.contents[0]
        around = [number for part in tokenizer.added_around() for number in part]
        added = " ".join(tokenizer.control_tokens.get(number, str(number)) for number in around)
        if added and not checkpoint.is_imported:
            files["tokenizer.json"] = tokenizer.without_added()
            notes.append(f"training did not add {added} to a text, so the exported tokenizer.json does not, either")
        elif added and "run" in checkpoint.manifest:
            notes.append(f"tokenizer.json adds {added} to a text, as for the imported model; training here did not")
    if not checkpoint.answers_end and tokenizer is not None:
        # Imports the library of templates.
        from megatron_ladder.generate.prompts import OPEN_ANSWERS, PromptEncoder

        if not PromptEncoder(tokenizer, (), True, None).turn_ends:
            notes.append(OPEN_ANSWERS)
    if tokenizer is not None and tokenizer.files:
        # Other classes of transformers rebuild a tokenizer from parts of its file, without the normalizer.
        defaults = tokenizer.named_tokens() | ({} if source else {"clean_up_tokenization_spaces": False})
        settings = {**defaults, **settings, "tokenizer_class": "PreTrainedTokenizerFast"}
    if settings != source:
        files[_CONFIG] = json_file(settings)
    # transformers has no tokenizer of bytes or numbers.
    ids = ({} if tokenizer is None else {"eos_token_id": tokenizer.eod_id}) | checkpoint.imported_ids
    listed = end_ids(ids)
    if learned := [number for number in checkpoint.end_ids if number not in listed]:
        ids["eos_token_id"] = [*listed, *learned]
        if GENERATION_CONFIG in files:
            values = kinds.parse_json_object(directory / GENERATION_CONFIG, files[GENERATION_CONFIG])
            files[GENERATION_CONFIG] = json_file({**values, "eos_token_id": ids["eos_token_id"]})
    files.setdefault(GENERATION_CONFIG, json_file({**ids, "_from_model_config": True}))
    return files, ids, notes

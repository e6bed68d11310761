"""The files next to the weights and `config.json`: model card, code, tokenizer, chat template, generation settings."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from megatron_ladder.blueprint.model import ModelConfig
from megatron_ladder.checkpoint.format import (
    CARRIED,
    CHAT_TEMPLATE,
    GENERATION_CONFIG,
    Checkpoint,
    end_ids,
    is_card_or_licence,
)
from megatron_ladder.checkpoint.hf_config import OWN_TYPE, hf_type
from megatron_ladder.checkpoint.hf_directory import safe_path
from megatron_ladder.convert.hf_module import CONFIGURATION, MODELING, exported_module
from megatron_ladder.errors import UserError
from megatron_ladder.files import reject_pointer

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

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
from megatron_ladder.checkpoint.hf_directory import safe_path
from megatron_ladder.checkpoint.hf_types import OWN_TYPE
from megatron_ladder.convert.hf_module import CONFIGURATION, MODELING, exported_module
from megatron_ladder.errors import UserError
from megatron_ladder.files import reject_pointer
from megatron_ladder.tokenizers.kinds import tokenizer_kind
from megatron_ladder.typed import json_object

_TERMS = ("license", "license_name", "license_link")
"""Keys of a model card that hold for every model made from it."""
_CONFIG = "tokenizer_config.json"
_MORE_TEMPLATES = "additional_chat_templates"
_OWN_CODE = " The model needs the code in this directory: as a Llama, it would compute wrong results."


def module_files(model_type: str) -> dict[str, bytes]:
    """Return file name -> content of the code that an exported directory of a type needs."""
    if model_type != OWN_TYPE:
        return {}
    return {f"{name}.py": exported_module(name) for name in (CONFIGURATION, MODELING)}


def imported_card(directory: Path, source: bytes) -> bytes:
    """Return the card that a checkpoint keeps of a Hugging Face directory: its name, and the terms of its own card."""
    real = directory.resolve()
    # The cache's directories are models--OWNER--NAME/snapshots/REVISION.
    cached = real.parent.parent.name if real.parent.name == "snapshots" else real.name
    name = cached.removeprefix("models--").replace("--", "/")
    metadata = _metadata(source)
    terms = {key: metadata[key] for key in _TERMS if isinstance(metadata.get(key), str)}
    return _card({"base_model": name, **terms}, "")


def model_card(
    model: ModelConfig, wiring: str, name: str, imported: bytes, *, has_tokenizer: bool, needs_code: bool
) -> bytes:
    """Return the card of an exported model, given that of `imported_card`, which is empty without an import."""
    trust = ", trust_remote_code=True" if needs_code else ""
    classes = "AutoModelForCausalLM"
    tokenizer = ""
    if has_tokenizer:
        classes += ", AutoTokenizer"
        tokenizer = f'    tokenizer = AutoTokenizer.from_pretrained("{name}"{trust})\n'
    terms = _metadata(imported)
    steps = f"{'check' if 'license' in terms else 'set'} `license`"
    if "base_model" in terms and "/" not in str(terms["base_model"]):
        steps += ", and replace `base_model` by its full name on the Hub"
    text = f"""
# {name}

{model.num_layers} layers of hidden size {model.hidden_size}; wiring: {wiring}.{_OWN_CODE if needs_code else ""}

    from transformers import {classes}

{tokenizer}    model = AutoModelForCausalLM.from_pretrained("{name}"{trust}, dtype="auto")

Before you publish the model, {steps}.
"""
    metadata = {"library_name": "transformers", "pipeline_tag": "text-generation", "license": "unknown"}
    return _card(metadata | terms, text)


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

    Additional chat templates become a list in tokenizer_config.json, as transformers wrote them before. Raises
    UserError if a file is a link out of the directory, or has templates that cannot be read.
    """
    carried = {}
    more = sorted(f"{path.parent.name}/{path.name}" for path in directory.glob(f"{_MORE_TEMPLATES}/*.jinja"))
    for name in [*sorted(entry.name for entry in directory.iterdir()), *more]:
        if name in (*CARRIED, *more) or (is_card_or_licence(name) and (directory / name).is_file()):
            carried[name] = safe_path(directory, name).read_bytes()
            reject_pointer(directory / name, carried[name])
    if more:
        templates = {} if CHAT_TEMPLATE not in carried else {"default": carried.pop(CHAT_TEMPLATE)}
        templates |= {Path(name).stem: carried.pop(name) for name in more}
        try:
            named = [{"name": name, "template": text.decode()} for name, text in templates.items()]
        except UnicodeDecodeError:
            raise UserError(f"{directory}: a chat template has bytes that are not UTF-8") from None
        settings = json_object(directory / _CONFIG, carried.get(_CONFIG, b"{}"))
        carried[_CONFIG] = json_file({**settings, "chat_template": named})
    return carried


def describe_tokenizer(directory: Path) -> tuple[dict[str, bytes], dict[str, Any] | None, int]:
    """Return what a training checkpoint records about the tokenizer of a directory, besides what `read_carried` found.

    These are files by name, the entry of the manifest, and one more than the largest id; {}, None and 0 without a
    tokenizer. Raises UserError if the tokenizer's file cannot be read, or has no end-of-text token.
    """
    # Imports the tokenizer libraries, which nothing else here needs.
    from megatron_ladder.tokenizers.copies import find_tokenizer, tokenizer_files

    tokenizer = find_tokenizer(directory)
    if tokenizer is None:
        return {}, None, 0
    files = {name: content for name, content in tokenizer_files(tokenizer).items() if name not in CARRIED}
    return files, {"type": tokenizer.kind, "sha256": tokenizer.sha256}, tokenizer.vocab_size


def json_file(values: Mapping[str, Any]) -> bytes:
    return (json.dumps(values, indent=2) + "\n").encode()


def exported_tokenizer(
    checkpoint: Checkpoint, other_files: Mapping[str, bytes]
) -> tuple[dict[str, bytes], dict[str, Any], list[str]]:
    """Return the tokenizer's files of a training checkpoint in the form that transformers expects.

    `other_files` are the files of the checkpoint besides manifest and tensors. Also return the ids of special tokens by
    their keys in `config.json`, and notes for the user. Raises UserError if the tokenizer cannot be read, or is not the
    one that was saved.
    """
    directory = checkpoint.directory
    files = {name: other_files[name] for name in other_files if name in CARRIED}
    # Imports the tokenizer libraries, which nothing else here needs.
    from megatron_ladder.tokenizers.copies import DESCRIPTION_FILE, find_tokenizer

    source = json_object(directory / _CONFIG, files[_CONFIG]) if _CONFIG in files else {}
    # It names code of the model's source, which the directory does not have.
    settings = {key: value for key, value in source.items() if key != "auto_map"}
    tokenizer = find_tokenizer(directory)
    notes = list[str]()
    # The vocabulary.
    as_json = None if tokenizer is None else tokenizer.as_json(checkpoint.is_imported)
    if tokenizer is not None and as_json is not None:
        files["tokenizer.json"] = as_json
        (name,) = tokenizer_kind(tokenizer.kind).files
        if name != "tokenizer.json":
            described = json_object(directory / DESCRIPTION_FILE, other_files[DESCRIPTION_FILE])
            files[DESCRIPTION_FILE] = json_file({**described, "file": name})
            files[name] = tokenizer.contents[0]
        if not (tokenizer.finds_tokens or "chat_template" in settings or CHAT_TEMPLATE in files):
            # Only a template writes special tokens; in a text they are spelt out.
            settings.setdefault("split_special_tokens", True)
        before, after = tokenizer.added_around()
        added = " ".join(tokenizer.control_tokens.get(number, str(number)) for number in (*before, *after))
        if added and not checkpoint.is_imported:
            notes.append(f"training did not add {added} to a text, so the exported tokenizer.json does not, either")
        elif added and "run" in checkpoint.manifest:
            notes.append(f"tokenizer.json adds {added} to a text, as for the imported model; training here did not")
    if not checkpoint.answers_end and tokenizer is not None:
        # Imports the library of templates.
        from megatron_ladder.generate.prompts import OPEN_ANSWERS, PromptEncoder

        if not PromptEncoder(tokenizer, (), True, None).turn_ends:
            notes.append(OPEN_ANSWERS)
    # The settings, unless transformers has no such tokenizer: of bytes or numbers.
    if tokenizer is not None and as_json is not None:
        # Other classes of transformers rebuild a tokenizer from parts of its file, without the normalizer.
        defaults = {} if source else {"clean_up_tokenization_spaces": False}
        settings = {**tokenizer.named_tokens(), **defaults, **settings, "tokenizer_class": "PreTrainedTokenizerFast"}
    if settings != source:
        files[_CONFIG] = json_file(settings)
    # The tokens that end a text.
    ids: dict[str, Any] = {} if tokenizer is None else {"eos_token_id": tokenizer.eod_id}
    ids |= checkpoint.imported_ids
    listed = end_ids(ids)
    if learned := [number for number in checkpoint.end_ids if number not in listed]:
        ids["eos_token_id"] = [*listed, *learned]
        if GENERATION_CONFIG in files:
            values = json_object(directory / GENERATION_CONFIG, files[GENERATION_CONFIG])
            files[GENERATION_CONFIG] = json_file({**values, "eos_token_id": ids["eos_token_id"]})
    files.setdefault(GENERATION_CONFIG, json_file({**ids, "_from_model_config": True}))
    return files, ids, notes

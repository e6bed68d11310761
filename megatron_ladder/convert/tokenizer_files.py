"""The small files next to the weights: tokenizer, chat template, generation settings."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_ladder.checkpoint.format import CARRIED, CHAT_TEMPLATE, is_card_or_licence
from megatron_ladder.checkpoint.hf_directory import safe_path
from megatron_ladder.errors import UserError

_CONFIG = "tokenizer_config.json"
_MORE_TEMPLATES = "additional_chat_templates"


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


def exported_tokenizer(directory: Path, other_files: Mapping[str, bytes]) -> tuple[dict[str, bytes], dict[str, Any]]:
    """Return the tokenizer's files of a training checkpoint in the form that transformers expects.

    `other_files` are the files of the checkpoint besides manifest and tensors.

    Returns:
        Files by name, and the id of the end-of-text token as `eos_token_id` if there is a tokenizer.

    Raises:
        UserError: the tokenizer cannot be read, or is not the one that was saved.
    """
    files = {name: content for name, content in other_files.items() if name in CARRIED}
    # Imports the tokenizer libraries, which nothing else here needs.
    from megatron_ladder.data import tokenizers as kinds

    source = kinds.parse_json_object(directory / _CONFIG, files[_CONFIG]) if _CONFIG in files else {}
    # It names code of the model's source, which the directory does not have.
    settings = {key: value for key, value in source.items() if key != "auto_map"}
    tokenizer = kinds.find_tokenizer(directory)
    if isinstance(tokenizer, kinds.SentencePieceTokenizer):
        described = kinds.parse_json_object(directory / kinds.DESCRIPTION_FILE, other_files[kinds.DESCRIPTION_FILE])
        files[kinds.DESCRIPTION_FILE] = json_file({**described, "file": "tokenizer.model"})
        files |= {"tokenizer.model": tokenizer.contents[0], "tokenizer.json": tokenizer.as_json().encode()}
        if "chat_template" not in settings and CHAT_TEMPLATE not in files:
            # Only a template writes special tokens; in a text they are spelt out.
            settings.setdefault("split_special_tokens", True)
    elif isinstance(tokenizer, kinds.HuggingFaceTokenizer):
        files["tokenizer.json"] = tokenizer.contents[0]
    if tokenizer is not None and tokenizer.files:
        # Other classes of transformers rebuild a tokenizer from parts of its file, without the normalizer.
        defaults = tokenizer.named_tokens() | ({} if source else {"clean_up_tokenization_spaces": False})
        settings = {**defaults, **settings, "tokenizer_class": "PreTrainedTokenizerFast"}
    if settings != source:
        files[_CONFIG] = json_file(settings)
    # transformers has no tokenizer of bytes or numbers.
    return files, {} if tokenizer is None else {"eos_token_id": tokenizer.eod_id}

"""The small files beside the weights: tokenizer, chat template, settings of generation."""

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_ladder.convert.hf_directory import read_json_file, safe_path
from megatron_ladder.errors import UserError

GENERATION_CONFIG = "generation_config.json"
CARRIED = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "chat_template.jinja", GENERATION_CONFIG,
)  # fmt: skip
"""Files of a Hugging Face directory that travel with the model; none holds code."""
TOKEN_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")
_MOST_BYTES = 100_000_000


def read_carried(directory: Path) -> dict[str, bytes]:
    """File name -> content of what travels with a model.

    Raises:
        UserError: such a file is a link that leads elsewhere, or larger than any tokenizer.
    """
    found = {}
    for name in CARRIED:
        if (directory / name).exists() or (directory / name).is_symlink():
            path = safe_path(directory, name)
            if path.stat().st_size > _MOST_BYTES:
                raise UserError(f"{directory / name}: has {path.stat().st_size} bytes, more than any tokenizer")
            found[name] = path.read_bytes()
    return found


def describe_tokenizer(carried: Mapping[str, bytes]) -> tuple[dict[str, bytes], dict[str, Any] | None, int]:
    """What a training checkpoint keeps of a tokenizer besides its files.

    Returns:
        Files, by name; the manifest's entry; and one more than its largest id. None and 0 if there is no tokenizer.

    Raises:
        UserError: the tokenizer's file cannot be read, or names no token that ends a text.
    """
    kinds = {"tokenizer.json": "HuggingFaceTokenizer", "tokenizer.model": "SentencePieceTokenizer"}
    file = next((name for name in kinds if name in carried), None)
    if file is None:
        return {}, None, 0
    # They load the libraries that encode and decode, which nothing else here needs.
    from megatron_ladder.data.tokenizers import DESCRIPTION_FILE, copy_tokenizer, load_tokenizer

    with tempfile.TemporaryDirectory() as folder:
        beside = Path(folder)
        for name, content in carried.items():
            (beside / name).write_bytes(content)
        tokenizer = load_tokenizer(kinds[file], beside / file)
        copy_tokenizer(tokenizer, beside / "copy")
        description = (beside / "copy" / DESCRIPTION_FILE).read_bytes()
    entry = {"type": tokenizer.kind, "sha256": tokenizer.sha256}
    return {DESCRIPTION_FILE: description}, entry, tokenizer.vocab_size


def token_ids(config: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    """The ids of special tokens that a Hugging Face directory names; generation_config.json counts first."""
    ids: dict[str, Any] = {}
    sources: list[Mapping[str, Any]] = [config]
    if (directory / GENERATION_CONFIG).is_file():
        sources.append(read_json_file(directory, GENERATION_CONFIG))
    for key in TOKEN_KEYS:
        for source in sources:
            value = source.get(key)
            if isinstance(value, int) or (isinstance(value, list) and all(isinstance(one, int) for one in value)):
                ids[key] = value
    return ids


def end_of_text(directory: Path) -> int | None:
    """The id of the token that ends a text, by the tokenizer of a training checkpoint; None if that has none."""
    from megatron_ladder.data.tokenizers import DESCRIPTION_FILE, load_tokenizer_from_directory

    if not (directory / DESCRIPTION_FILE).is_file():
        return None
    return load_tokenizer_from_directory(directory).eod_id


def generation_config(ids: Mapping[str, Any]) -> bytes:
    """A generation_config.json that says no more than which tokens begin and end a text."""
    return (json.dumps({**ids, "_from_model_config": True}, indent=2) + "\n").encode()

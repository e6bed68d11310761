"""The small files next to the weights: tokenizer, chat template, generation settings."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_ladder.checkpoint.format import CARRIED
from megatron_ladder.checkpoint.hf_directory import safe_path
from megatron_ladder.errors import UserError

_CONFIG = "tokenizer_config.json"
_MAX_BYTES = 100_000_000


def read_carried(directory: Path) -> dict[str, bytes]:
    """Return the contents, by name, of the files of a directory that travel with its model.

    Raises:
        UserError: a file is a link out of the directory, or too large.
    """
    found = {}
    for name in CARRIED:
        if (directory / name).exists() or (directory / name).is_symlink():
            path = safe_path(directory, name)
            if path.stat().st_size > _MAX_BYTES:
                raise UserError(f"{directory / name}: has {path.stat().st_size} bytes, expected at most {_MAX_BYTES}")
            found[name] = path.read_bytes()
    return found


def describe_tokenizer(
    directory: Path, carried: Mapping[str, bytes]
) -> tuple[dict[str, bytes], dict[str, Any] | None, int]:
    """Return what a training checkpoint records about a tokenizer besides its files, which `read_carried` has read.

    Returns:
        Files by name, the entry of the manifest, and one more than the largest id; {}, None and 0 without a tokenizer.

    Raises:
        UserError: the tokenizer's file cannot be read, or has no end-of-text token.
    """
    kinds = {"tokenizer.json": "HuggingFaceTokenizer", "tokenizer.model": "SentencePieceTokenizer"}
    file = next((name for name in kinds if name in carried), None)
    if file is None:
        return {}, None, 0
    # Imports the tokenizer libraries, which nothing else here needs.
    from megatron_ladder.data.tokenizers import DESCRIPTION_FILE, load_tokenizer, tokenizer_files

    tokenizer = load_tokenizer(kinds[file], directory / file)
    entry = {"type": tokenizer.kind, "sha256": tokenizer.sha256}
    return {DESCRIPTION_FILE: tokenizer_files(tokenizer)[DESCRIPTION_FILE]}, entry, tokenizer.vocab_size


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
    from megatron_ladder.data.tokenizers import (
        DESCRIPTION_FILE,
        GPT2BPETokenizer,
        SentencePieceTokenizer,
        load_tokenizer_from_directory,
        parse_json_object,
    )

    if b'"auto_map"' in files.get(_CONFIG, b""):
        # Names code of the model's source, which the directory does not have.
        settings = parse_json_object(directory / _CONFIG, files[_CONFIG])
        files[_CONFIG] = json_file({key: value for key, value in settings.items() if key != "auto_map"})
    if DESCRIPTION_FILE not in other_files:
        return files, {}
    tokenizer = load_tokenizer_from_directory(directory)
    end = {"eos_token_id": tokenizer.eod_id}
    if not tokenizer.files:
        # Bytes or numbers: transformers has no such tokenizer.
        return files, end
    contents = [other_files[file.name] for file in tokenizer.files]
    config: dict[str, Any]
    if tokenizer.kind == SentencePieceTokenizer.kind:
        files.setdefault("tokenizer.model", contents[0])
        import sentencepiece

        pieces = sentencepiece.SentencePieceProcessor(model_proto=contents[0])
        # Some models encode the first word of a text as if a blank preceded it.
        prefix = pieces.encode("a", out_type=str)[0].startswith("\u2581")
        config = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": False, "legacy": False}
        config["add_prefix_space"] = prefix
        numbers = {f"{token}_token": getattr(pieces, f"{token}_id")() for token in ("bos", "eos", "unk")}
        config |= {token: pieces.id_to_piece(number) for token, number in numbers.items() if number >= 0}
    elif isinstance(tokenizer, GPT2BPETokenizer):
        # PreTrainedTokenizerFast, which needs no configuration and so runs no code, reads only the third file.
        files |= {"vocab.json": contents[0], "merges.txt": contents[1], "tokenizer.json": tokenizer.as_json().encode()}
        config = {"tokenizer_class": "GPT2Tokenizer", "eos_token": GPT2BPETokenizer.END}
    else:
        import tokenizers

        files.setdefault("tokenizer.json", contents[0])
        token = tokenizers.Tokenizer.from_buffer(contents[0]).id_to_token(tokenizer.eod_id)
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": token}
    config["clean_up_tokenization_spaces"] = False
    files.setdefault(_CONFIG, json_file(config))
    return files, end

"""The small files beside the weights: tokenizer, chat template, settings of generation."""

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_ladder.checkpoint.carried import CARRIED, GENERATION_CONFIG
from megatron_ladder.convert.hf_directory import read_json_file, safe_path
from megatron_ladder.errors import UserError

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


def exported_tokenizer(directory: Path, beside: Mapping[str, bytes]) -> tuple[dict[str, bytes], dict[str, Any]]:
    """The tokenizer's files of a training checkpoint, as transformers looks for them.

    Args:
        beside: what lies beside the checkpoint's tensors.

    Returns:
        Files, by name; and the id of the token that ends a text, as `eos_token_id`, if there is a tokenizer.

    Raises:
        UserError: the tokenizer cannot be read, or is not the one that was saved.
    """
    files = {name: content for name, content in beside.items() if name in CARRIED}
    # They load the libraries that encode and decode, which nothing else here needs.
    from megatron_ladder.data.tokenizers import (
        DESCRIPTION_FILE,
        GPT2BPETokenizer,
        SentencePieceTokenizer,
        load_tokenizer_from_directory,
    )

    if DESCRIPTION_FILE not in beside:
        return files, {}
    tokenizer = load_tokenizer_from_directory(directory)
    end = {"eos_token_id": tokenizer.eod_id}
    if not tokenizer.files:  # Bytes, or numbers: transformers has no tokenizer of that kind.
        return files, end
    contents = [beside[file.name] for file in tokenizer.files]
    config: dict[str, Any]
    if tokenizer.kind == SentencePieceTokenizer.kind:
        files.setdefault("tokenizer.model", contents[0])
        config = _sentencepiece_config(contents[0])
    elif tokenizer.kind == GPT2BPETokenizer.kind:
        files |= {"vocab.json": contents[0], "merges.txt": contents[1]}
        config = {"tokenizer_class": "GPT2Tokenizer", "eos_token": GPT2BPETokenizer.END}
    else:
        import tokenizers

        files.setdefault("tokenizer.json", contents[0])
        token = tokenizers.Tokenizer.from_buffer(contents[0]).id_to_token(tokenizer.eod_id)
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": token}
    config["clean_up_tokenization_spaces"] = False
    files.setdefault("tokenizer_config.json", (json.dumps(config, indent=2) + "\n").encode())
    return files, end


def _sentencepiece_config(content: bytes) -> dict[str, Any]:
    """With which transformers encodes as a SentencePiece model does, and puts nothing in front."""
    import sentencepiece

    pieces = sentencepiece.SentencePieceProcessor(model_proto=content)
    config: dict[str, Any] = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": False, "legacy": False}
    # A text's first word is encoded as if a blank stood before it, or it is not.
    config["add_prefix_space"] = pieces.encode("a", out_type=str)[0].startswith("\u2581")
    for token in ("bos", "eos", "unk"):
        number = getattr(pieces, f"{token}_id")()
        config |= {f"{token}_token": pieces.id_to_piece(number)} if number >= 0 else {}
    return config


def generation_config(ids: Mapping[str, Any]) -> bytes:
    """A generation_config.json that says no more than which tokens begin and end a text."""
    return (json.dumps({**ids, "_from_model_config": True}, indent=2) + "\n").encode()

"""From a directory to a model that can generate. Wiring and sizes come from the directory, never from a flag."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
import torch
from torch import nn

from megatron_ladder.blueprint.model import ModelConfig, tensor_parallel_mistakes
from megatron_ladder.checkpoint.format import Checkpoint
from megatron_ladder.checkpoint.weights import load_weights, stored_model
from megatron_ladder.comm.mesh import ProcessMesh
from megatron_ladder.convert.hf_directory import CONFIG_NAME, open_hf_directory, safe_path
from megatron_ladder.convert.tokenizer_files import token_ids
from megatron_ladder.data.tokenizers import (
    DESCRIPTION_FILE,
    Tokenizer,
    load_tokenizer,
    load_tokenizer_from_directory,
)
from megatron_ladder.errors import UserError
from megatron_ladder.generate.lean import LEAN_OPERATIONS, load_for_cpu
from megatron_ladder.generate.weights import load_hf_weights
from megatron_ladder.model.language_model import LanguageModel
from megatron_ladder.model.operations import Operations, compile_operations
from megatron_ladder.model.stack import StackOptions

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Values of --dtype."""
TOKENIZER_FILES = {"tokenizer.json": "HuggingFaceTokenizer", "tokenizer.model": "SentencePieceTokenizer"}
"""What a Hugging Face directory may hold, and the --tokenizer-type that reads it; the first that is there counts."""


@dataclass(frozen=True)
class StoredModel:
    """A model on disk: everything but the weights has been read."""

    directory: Path
    config: ModelConfig
    tokenizer: Tokenizer | None
    """None when the directory holds none, and none was named."""
    eos_ids: frozenset[int]
    """Tokens that end a text, by the directory and by the tokenizer."""
    prefix: tuple[int, ...]
    """Tokens that the directory's tokenizer puts before a text, such as a beginning of sequence."""
    fill: Callable[[nn.Module], None]
    """Reads this rank's weights of the model, or of a part of it; raises UserError."""
    warnings: tuple[str, ...] = ()
    """What was passed over, a line each."""


def open_model(directory: Path, tokenizer_type: str | None, tokenizer_model: Path | None) -> StoredModel:
    """Opens a training checkpoint, the one in use of a directory of checkpoints, or a Hugging Face directory.

    Raises:
        UserError: it is none of these, or one that is not whole or contradicts itself, or its tokenizer cannot be
            read or has more ids than the model.
    """
    given = None
    if tokenizer_type is not None and tokenizer_model is not None:
        given = load_tokenizer(tokenizer_type, tokenizer_model)
    try:
        is_hf = (directory / CONFIG_NAME).exists()
        stored = _open_hf(directory, given) if is_hf else _open_checkpoint(directory, given)
    except UserError as error:
        first, *more = error.mistakes
        named = first if first.startswith("--") else f"--model {first}"
        raise UserError(named, *more) from None
    tokenizer, config = stored.tokenizer, stored.config
    if tokenizer is not None and tokenizer.vocab_size > config.vocab_size:
        name = tokenizer.files[0] if tokenizer.files else tokenizer.kind
        raise UserError(
            f"{name}: the tokenizer has {tokenizer.vocab_size} ids and the model {config.vocab_size}: "
            "it is of another model"
        )
    return stored


def _open_checkpoint(directory: Path, tokenizer: Tokenizer | None) -> StoredModel:
    checkpoint = Checkpoint.open(directory)
    if tokenizer is None and (checkpoint.directory / DESCRIPTION_FILE).is_file():
        tokenizer = load_tokenizer_from_directory(checkpoint.directory)
    eos_ids = _eos_ids(checkpoint.manifest.get("hugging_face") or {}, tokenizer)
    return StoredModel(
        checkpoint.directory, stored_model(checkpoint), tokenizer, eos_ids, (),
        lambda model: load_weights(model, checkpoint), tuple(checkpoint.warnings),
    )  # fmt: skip


def _open_hf(directory: Path, tokenizer: Tokenizer | None) -> StoredModel:
    found = open_hf_directory(directory)
    prefix: tuple[int, ...] = ()
    kept = next((name for name in TOKENIZER_FILES if (directory / name).exists()), None)
    if tokenizer is None and kept is not None:
        safe_path(directory, kept)
        tokenizer = load_tokenizer(TOKENIZER_FILES[kept], directory / kept)
        prefix = _prefix(tokenizer)
    eos_ids = _eos_ids(token_ids(found.config, directory), tokenizer)
    return StoredModel(
        directory, found.model, tokenizer, eos_ids, prefix, lambda model: load_hf_weights(model, found)
    )  # fmt: skip


def _eos_ids(named: Mapping[str, Any], tokenizer: Tokenizer | None) -> frozenset[int]:
    ids = named.get("eos_token_id")
    listed = ids if isinstance(ids, list) else [] if ids is None else [ids]
    return frozenset(listed) | (frozenset() if tokenizer is None else {tokenizer.eod_id})


def _prefix(tokenizer: Tokenizer) -> tuple[int, ...]:
    """What the template of special tokens in a tokenizer.json puts before a text."""
    path = tokenizer.files[0]
    if path.suffix != ".json":
        return ()
    whole = tokenizers.Tokenizer.from_file(str(path))
    bare, dressed = (whole.encode("a", add_special_tokens=special).ids for special in (False, True))
    places = [place for place in range(len(dressed)) if dressed[place : place + len(bare)] == bare]
    return tuple(dressed[: places[0]]) if places else ()


def check_tensor_parallel(config: ModelConfig, tensor_parallel: int) -> None:
    """Raises one UserError if so many ranks cannot share the model, with the sizes that can."""
    mistakes = tensor_parallel_mistakes(config, tensor_parallel)
    if mistakes:
        possible = [n for n in range(1, config.num_attention_heads + 1) if not tensor_parallel_mistakes(config, n)]
        sizes = ", ".join(map(str, possible))
        raise UserError(f"--tp {tensor_parallel} does not fit the model; {sizes} would: {'; '.join(mistakes)}")


def load_model(
    stored: StoredModel, mesh: ProcessMesh, dtype: torch.dtype, device: torch.device, overlap: bool,
    compiled: bool = False,
) -> LanguageModel:  # fmt: skip
    """This rank's slices of the model, made ready to generate; every rank must call it.

    Args:
        compiled: use torch.compile between the products.

    Raises:
        UserError: on every rank, when any of them cannot read its share.
    """
    on_cpu = device.type == "cpu"
    operations = LEAN_OPERATIONS if on_cpu else Operations()
    options = StackOptions(overlap, operations=compile_operations(operations) if compiled else operations)
    memory = torch.device("meta") if on_cpu else device
    model = LanguageModel(stored.config, mesh, options, dtype=dtype, device=memory).requires_grad_(False)
    mistakes: tuple[str, ...] = ()
    try:
        if on_cpu:
            load_for_cpu(model, stored.fill)
        else:
            stored.fill(model)
    except UserError as error:
        mistakes = error.mistakes
    found = mesh.world.broadcast_object(mesh.world.gather_objects(mistakes))
    everyones = dict.fromkeys(mistake for of_one_rank in found for mistake in of_one_rank)
    if everyones:
        raise UserError(*everyones)
    return model

"""From a directory to a model that can generate. Wiring and sizes come from the checkpoint, never from a flag."""

from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_ladder.checkpoint.format import Checkpoint
from megatron_ladder.checkpoint.weights import load_weights, stored_model
from megatron_ladder.comm.mesh import ProcessMesh
from megatron_ladder.config.model import ModelConfig, tensor_parallel_mistakes
from megatron_ladder.data.tokenizers import (
    DESCRIPTION_FILE,
    Tokenizer,
    load_tokenizer,
    load_tokenizer_from_directory,
)
from megatron_ladder.errors import UserError
from megatron_ladder.model.language_model import LanguageModel
from megatron_ladder.model.stack import StackOptions

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""Values of --dtype."""


@dataclass(frozen=True)
class StoredModel:
    """A model on disk: everything but the weights has been read."""

    checkpoint: Checkpoint
    config: ModelConfig
    tokenizer: Tokenizer | None
    """None when the directory holds none, and none was named."""


def open_model(directory: Path, tokenizer_type: str | None, tokenizer_model: Path | None) -> StoredModel:
    """Opens a training checkpoint, or the one in use of a directory of checkpoints.

    Raises:
        UserError: it is no checkpoint, or one that is not whole, or its tokenizer cannot be read or has more ids
            than the model.
    """
    try:
        checkpoint = Checkpoint.open(directory)
    except UserError as error:
        first, *more = error.mistakes
        raise UserError(f"--model {first}", *more) from None
    config = stored_model(checkpoint)
    tokenizer: Tokenizer | None = None
    if tokenizer_type is not None and tokenizer_model is not None:
        tokenizer = load_tokenizer(tokenizer_type, tokenizer_model)
    elif (checkpoint.directory / DESCRIPTION_FILE).is_file():
        tokenizer = load_tokenizer_from_directory(checkpoint.directory)
    if tokenizer is not None and tokenizer.vocab_size > config.vocab_size:
        raise UserError(
            f"{tokenizer.files[0]}: the tokenizer has {tokenizer.vocab_size} ids and the model {config.vocab_size}: "
            "it is of another model"
        )
    return StoredModel(checkpoint, config, tokenizer)


def check_tensor_parallel(config: ModelConfig, tensor_parallel: int) -> None:
    """Raises one UserError if so many ranks cannot share the model, with the sizes that can."""
    mistakes = tensor_parallel_mistakes(config, tensor_parallel)
    if mistakes:
        possible = [n for n in range(1, config.num_attention_heads + 1) if not tensor_parallel_mistakes(config, n)]
        sizes = ", ".join(map(str, possible))
        raise UserError(f"--tp {tensor_parallel} does not fit the model; {sizes} would: {'; '.join(mistakes)}")


def load_model(
    stored: StoredModel, mesh: ProcessMesh, dtype: torch.dtype, device: torch.device, overlap: bool
) -> LanguageModel:
    """This rank's slices of the model; every rank must call it.

    Raises:
        UserError: on every rank, when any of them cannot read its share.
    """
    options = StackOptions(tp_overlap=overlap)
    model = LanguageModel(stored.config, mesh, options, dtype=dtype, device=device).requires_grad_(False)
    mistakes: tuple[str, ...] = ()
    try:
        load_weights(model, stored.checkpoint)
    except UserError as error:
        mistakes = error.mistakes
    found = mesh.world.broadcast_object(mesh.world.gather_objects(mistakes))
    everyones = dict.fromkeys(mistake for of_one_rank in found for mistake in of_one_rank)
    if everyones:
        raise UserError(*everyones)
    return model

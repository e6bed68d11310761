"""Load a model for generation from a directory.

`open_model` reads everything but the weights: configuration, wiring, tokenizer, and end-of-text ids. Flags cannot
override them. `load_model` then builds this rank's model and reads this rank's slices of the weights.
"""

import contextlib
import mmap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
import torch
from torch import Tensor, nn

from megatron_ladder.blueprint.model import ModelConfig, tensor_parallel_errors
from megatron_ladder.checkpoint.boxes import Box, flat_range, row_major_strides
from megatron_ladder.checkpoint.format import Checkpoint
from megatron_ladder.checkpoint.weights import load_weights, stored_model
from megatron_ladder.comm.mesh import ProcessMesh
from megatron_ladder.convert.hf_directory import CONFIG_NAME, HFDirectory, open_hf_directory, safe_path
from megatron_ladder.convert.sources import Reader, StoredBox
from megatron_ladder.convert.tokenizer_files import token_ids
from megatron_ladder.data.tokenizers import (
    DESCRIPTION_FILE,
    Tokenizer,
    load_tokenizer,
    load_tokenizer_from_directory,
)
from megatron_ladder.errors import UserError
from megatron_ladder.generate.lean import LEAN_OPERATIONS, load_for_cpu
from megatron_ladder.model.language_model import LanguageModel
from megatron_ladder.model.operations import Operations, compile_operations
from megatron_ladder.model.stack import StackOptions
from megatron_ladder.parallel.layout import has_padding, parameter_sections

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Values of --dtype."""
_TOKENIZER_FILES = {"tokenizer.json": "HuggingFaceTokenizer", "tokenizer.model": "SentencePieceTokenizer"}
"""Tokenizer files of a Hugging Face directory and the --tokenizer-type that reads each; the first one found is used."""


@dataclass(frozen=True)
class StoredModel:
    """A model on disk, of which everything but the weights has been read."""

    directory: Path
    config: ModelConfig
    tokenizer: Tokenizer | None
    """None if the directory has no tokenizer and the flags name none."""
    eos_ids: frozenset[int]
    """End-of-text tokens of the directory and of the tokenizer."""
    prefix: tuple[int, ...]
    """Tokens that the directory's tokenizer puts before a text, such as a beginning-of-text token."""
    fill: Callable[[nn.Module], None]
    """Reads this rank's weights of the model or of a part of it; raises UserError."""
    warnings: tuple[str, ...] = ()
    """One line for each problem that was ignored."""


def open_model(directory: Path, tokenizer_type: str | None, tokenizer_model: Path | None) -> StoredModel:
    """Open a training checkpoint, the latest one in a directory of checkpoints, or a Hugging Face directory.

    Raises:
        UserError: the directory is none of these, is incomplete or inconsistent, or its tokenizer cannot be read or
            has more ids than the model.
    """
    given = None
    if tokenizer_type is not None and tokenizer_model is not None:
        given = load_tokenizer(tokenizer_type, tokenizer_model)
    try:
        is_hf = (directory / CONFIG_NAME).exists()
        stored = _open_hf(directory, given) if is_hf else _open_checkpoint(directory, given)
    except UserError as error:
        first, *more = error.mistakes
        raise UserError(first if first.startswith("--") else f"--model {first}", *more) from None
    tokenizer, config = stored.tokenizer, stored.config
    if tokenizer is not None and tokenizer.vocab_size > config.vocab_size:
        name = tokenizer.files[0] if tokenizer.files else tokenizer.kind
        raise UserError(
            f"{name}: the tokenizer has {tokenizer.vocab_size} ids, but the model has only {config.vocab_size}: "
            "use the tokenizer that belongs to the model"
        )
    return stored


def _open_checkpoint(directory: Path, tokenizer: Tokenizer | None) -> StoredModel:
    checkpoint = Checkpoint.open(directory)
    if tokenizer is None and (checkpoint.directory / DESCRIPTION_FILE).is_file():
        tokenizer = load_tokenizer_from_directory(checkpoint.directory)
    return StoredModel(
        checkpoint.directory,
        stored_model(checkpoint),
        tokenizer,
        eos_ids=_eos_ids(checkpoint.manifest.get("hugging_face") or {}, tokenizer),
        prefix=(),
        fill=lambda model: load_weights(model, checkpoint),
        warnings=tuple(checkpoint.warnings),
    )


def _open_hf(directory: Path, tokenizer: Tokenizer | None) -> StoredModel:
    found = open_hf_directory(directory)
    prefix: tuple[int, ...] = ()
    name = next((name for name in _TOKENIZER_FILES if (directory / name).exists()), None)
    if tokenizer is None and name is not None:
        safe_path(directory, name)
        tokenizer = load_tokenizer(_TOKENIZER_FILES[name], directory / name)
        prefix = _prefix(tokenizer)
    eos_ids = _eos_ids(token_ids(found.config, directory), tokenizer)
    return StoredModel(
        directory, found.model, tokenizer, eos_ids, prefix, fill=lambda model: _load_hf_weights(model, found)
    )


def _eos_ids(config: Mapping[str, Any], tokenizer: Tokenizer | None) -> frozenset[int]:
    ids = config.get("eos_token_id")
    listed = ids if isinstance(ids, list) else [] if ids is None else [ids]
    return frozenset(listed) | (frozenset() if tokenizer is None else {tokenizer.eod_id})


def _prefix(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the special tokens that a tokenizer.json puts before every text."""
    path = tokenizer.files[0]
    if path.suffix != ".json":
        return ()
    whole = tokenizers.Tokenizer.from_file(str(path))
    plain, with_special = (whole.encode("a", add_special_tokens=special).ids for special in (False, True))
    starts = [start for start in range(len(with_special)) if with_special[start : start + len(plain)] == plain]
    return tuple(with_special[: starts[0]]) if starts else ()


def check_tensor_parallel(config: ModelConfig, tensor_parallel: int) -> None:
    """Raise UserError, with the sizes that are possible, if so many ranks cannot share the model."""
    errors = tensor_parallel_errors(config, tensor_parallel)
    if errors:
        possible = [n for n in range(1, config.num_attention_heads + 1) if not tensor_parallel_errors(config, n)]
        sizes = ", ".join(map(str, possible))
        raise UserError(f"--tp {tensor_parallel} does not fit the model; use {sizes}: {'; '.join(errors)}")


def load_model(
    stored: StoredModel, mesh: ProcessMesh, dtype: torch.dtype, device: torch.device, overlap: bool,
    compiled: bool = False,
) -> LanguageModel:  # fmt: skip
    """Build this rank's part of the model and read its weights; every rank must call it.

    Args:
        overlap: leave reduces in flight under the next sub-block.
        compiled: compile the operations between the matrix products with torch.compile.

    Raises:
        UserError: on every rank, if any rank cannot read its weights.
    """
    on_cpu = device.type == "cpu"
    operations = LEAN_OPERATIONS if on_cpu else Operations()
    options = StackOptions(overlap, operations=compile_operations(operations) if compiled else operations)
    memory = torch.device("meta") if on_cpu else device
    model = LanguageModel(stored.config, mesh, options, dtype=dtype, device=memory).requires_grad_(False)
    errors: tuple[str, ...] = ()
    try:
        if on_cpu:
            load_for_cpu(model, stored.fill)
        else:
            stored.fill(model)
    except UserError as error:
        errors = error.mistakes
    by_rank = mesh.world.broadcast_object(mesh.world.gather_objects(errors))
    all_errors = dict.fromkeys(message for errors in by_rank for message in errors)
    if all_errors:
        raise UserError(*all_errors)
    return model


@torch.no_grad()
def _load_hf_weights(model: nn.Module, directory: HFDirectory) -> None:
    """Fill this rank's parameters, reading only the bytes of their slices; padding becomes zero."""
    reader, mapped_files = Reader(), dict[Path, mmap.mmap]()
    with contextlib.closing(reader):
        for parameter, sections in parameter_sections(model):
            if has_padding(parameter, sections):
                parameter.zero_()
            for section in sections:
                source = directory.tensors[section.name]
                wanted = Box(section.offset, section.extent)
                target = section.view(parameter).detach()
                for stored, shared in source.in_rows(wanted):
                    part = target[shared.within(wanted).slices()]
                    _read_box(stored, shared, getattr(torch, source.dtype), part, reader, mapped_files)


def _read_box(
    stored: StoredBox,
    shared: Box,
    dtype: torch.dtype,
    out: Tensor,
    reader: Reader,
    mapped_files: dict[Path, mmap.mmap],
) -> None:
    """Copy the part `shared` of a stored box to `out`, which may have another dtype or device."""
    part = shared.within(stored.box)
    first, end = flat_range(stored.box.extent, part)
    begin, count = first * dtype.itemsize, end - first
    if count == part.numel and out.is_contiguous() and out.dtype == dtype and out.device.type == "cpu":
        reader.read_box(stored, begin, out.view(-1).view(torch.uint8).numpy().data)
        return
    try:
        if stored.mapped is None and stored.path not in mapped_files:
            with open(stored.path, "rb") as file:
                # Copy-on-write, because torch warns about read-only memory; nothing writes to it.
                mapped_files[stored.path] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        whole = mapped_files[stored.path] if stored.mapped is None else stored.mapped
        flat = torch.frombuffer(whole, dtype=dtype, count=count, offset=stored.begin + begin)
    except (OSError, ValueError) as error:
        raise UserError(f"{stored.path}: cannot be read: {error}") from None
    out.copy_(flat.as_strided(part.extent, row_major_strides(stored.box.extent)))

"""Load a model for generation from a directory.

`open_model` reads everything but the weights: configuration, wiring, tokenizer, and end-of-text ids. Flags cannot
override them. `load_model` then builds this rank's model and reads this rank's slices of the weights.

On CPUs, decoding a token takes about the time to read all weights. In the usual layout of a matrix [out, in], a product
with few rows reads the weight at half of the memory's rate, or less. oneDNN can reorder a weight once, into blocks of a
few output columns that its product reads from end to end. The product is as exact as the usual one, and also faster for
many rows. A packed weight is an opaque tensor, of which only the shape, the dtype and `to_dense` are known.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_ladder.blueprint.model import ModelConfig, tensor_parallel_errors
from megatron_ladder.checkpoint.format import Checkpoint, end_ids, is_hf_directory
from megatron_ladder.checkpoint.hf_directory import open_hf_directory
from megatron_ladder.checkpoint.loading import load_weights
from megatron_ladder.comm.agreement import raise_on_all_ranks
from megatron_ladder.comm.mesh import ProcessMesh
from megatron_ladder.errors import ErrorCollector, Problem, UserError, Vocabulary
from megatron_ladder.model.language_model import LanguageModel
from megatron_ladder.model.mixers.mixer import Heads
from megatron_ladder.model.operations import Operations, compile_operations
from megatron_ladder.model.stack import StackOptions
from megatron_ladder.parallel.layout import ParallelModule
from megatron_ladder.tokenizers.copies import find_tokenizer
from megatron_ladder.tokenizers.kinds import Tokenizer, load_tokenizer, same_tokenizer
from megatron_ladder.torch_private import can_pack, pack_weight, packed_linear

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_ROWS = 32
"""Rows of the products that oneDNN chooses the layout for. This layout is the fastest one for fewer rows, too."""


@dataclass(frozen=True)
class StoredModel:
    """A model on disk, of which everything but the weights has been read."""

    directory: Path
    config: ModelConfig
    tokenizer: Tokenizer | None
    """None if the directory has no tokenizer and the flags name none."""
    eos_ids: frozenset[int]
    """End-of-text tokens of the directory, of the model's training and of the tokenizer."""
    prefix: tuple[int, ...]
    """Tokens that the directory's tokenizer puts before a text, such as a beginning-of-text token."""
    export_prefix: tuple[int, ...]
    """Tokens that transformers puts before a text in this directory, or in an export of it."""
    fill: Callable[..., None]
    """Reads this rank's weights of the model or of a part of it; raises UserError."""
    answers_end: bool = True
    """See `Checkpoint.answers_end`."""
    data_flags: Mapping[str, Any] = field(default_factory=dict)
    """The flags for data of the training run that wrote the directory, if any, by field."""
    warnings: tuple[str, ...] = ()
    """One line for each problem that was ignored."""
    verify: Callable[[int, int], None] = lambda rank, ranks: None
    """Compares this rank's share of the files with their recorded checksums, if there are any; raises UserError."""


def open_model(
    directory: Path,
    tokenizer_type: str | None,
    tokenizer_model: Path | None,
    field_name: str = "model",
    draft: str | None = None,
) -> StoredModel:
    """Open a training checkpoint, the latest one in a directory of checkpoints, or a Hugging Face directory.

    `field_name` names the directory in errors. The model has its drafting head only if `draft` is set.

    Raises UserError if the directory is incomplete, or its tokenizer cannot be read, or it has no head to draft with.
    """
    given = None
    if tokenizer_type is not None:
        given = load_tokenizer(tokenizer_type, tokenizer_model)
    errors = ErrorCollector()
    with errors.collect(field_name):
        if is_hf_directory(directory):
            stored = _open_hf(directory, given, keeps_mtp=draft is not None)
        else:
            stored = _open_checkpoint(directory, given, field_name)
    errors.raise_if_any()
    if draft is None:
        stored = replace(stored, config=stored.config.without_mtp)
    elif not stored.config.mtp_num_layers:
        reason = "{}: {directory} has no drafting head of one layer; leave {} out, or train one with {mtp_num_layers}"
        raise UserError(Problem({"draft": draft}, reason, directory=stored.directory))
    warnings = [*stored.warnings]
    if given is not None:
        warnings += _another_tokenizer(stored.directory, given)
    size = stored.config.vocab_size
    if stored.tokenizer is not None and stored.tokenizer.vocab_size > size:
        ids = stored.tokenizer.vocab_size
        warnings.append(f"the tokenizer has {ids} ids, the model {size}: larger ids must not occur")
    return replace(stored, warnings=tuple(warnings))


def _another_tokenizer(directory: Path, given: Tokenizer) -> Iterator[str]:
    """Yield a warning if a directory's tokenizer is another one."""
    stored = None
    with suppress(UserError):
        stored = find_tokenizer(directory)
    if stored is not None and not same_tokenizer(stored.identity, given.identity):
        ours, theirs = (f"{one.vocab_size} ids, sha256 {one.sha256[:12]}" for one in (given, stored))
        reason = "{} ({ours}) is not the tokenizer in {directory} ({theirs})"
        fix = "leave it out, unless both give equal ids"
        yield str(Problem(given.selection, reason, fix, ours=ours, directory=directory, theirs=theirs))


def _open_checkpoint(directory: Path, tokenizer: Tokenizer | None, field_name: str) -> StoredModel:
    checkpoint = Checkpoint.open(directory)
    directory = checkpoint.directory
    tokenizer = find_tokenizer(directory) if tokenizer is None else tokenizer
    eos_ids = _eos_ids(checkpoint.end_ids, tokenizer)
    export_prefix = tokenizer.added_around()[0] if tokenizer is not None and checkpoint.is_imported else ()
    fill = partial(load_weights, source=checkpoint)

    def verify(rank: int, ranks: int) -> None:
        try:
            checkpoint.verify(None, rank, ranks, only_weights=True)
        except UserError as error:
            reason = "{} {problem}; use another checkpoint or copy"
            if field_name == "model":
                reason += ", or pass {no_verify} to load the file nevertheless"
            problems = (Problem({field_name: None}, reason, problem=problem) for problem in error.problems)
            raise UserError(*problems) from None

    model, warnings = checkpoint.model(), tuple(checkpoint.warnings)
    return StoredModel(
        directory,
        model,
        tokenizer,
        eos_ids,
        (),
        export_prefix,
        fill,
        checkpoint.answers_end,
        checkpoint.manifest.get("run", {}).get("data", {}),
        warnings,
        verify,
    )


def _open_hf(directory: Path, tokenizer: Tokenizer | None, keeps_mtp: bool) -> StoredModel:
    source = open_hf_directory(directory, keeps_mtp, mtp_fix="leave {draft} out")
    used = find_tokenizer(directory) if tokenizer is None else tokenizer
    eos_ids = _eos_ids(end_ids(source.token_ids), used)
    added = () if used is None else used.added_around()[0]
    prefix = added if tokenizer is None else ()
    fill = partial(load_weights, source=source)
    return StoredModel(directory, source.model, used, eos_ids, prefix, added, fill, warnings=tuple(source.notes))


def _eos_ids(listed: Iterable[int], tokenizer: Tokenizer | None) -> frozenset[int]:
    return frozenset(listed if tokenizer is None else [*listed, tokenizer.eod_id])


def check_tensor_parallel(config: ModelConfig, tensor_parallel: int) -> None:
    """Raise UserError, with the sizes that are possible, if so many ranks cannot share the model."""
    if errors := tensor_parallel_errors(config, tensor_parallel):
        possible = [n for n in range(1, config.num_attention_heads + 1) if not tensor_parallel_errors(config, n)]
        sizes = ", ".join(map(str, possible))
        # The model's sizes are no flags of generation.
        reasons = "; ".join(error.render(Vocabulary(str)) for error in errors)
        reason = "{tp} does not fit the model; use {sizes}: {reasons}"
        raise UserError(Problem({"tp": tensor_parallel}, reason, sizes=sizes, reasons=reasons))


def load_model(
    stored: StoredModel,
    mesh: ProcessMesh,
    dtype: torch.dtype,
    device: torch.device,
    overlap: bool,
    compiled: bool = False,
    verify: bool = True,
) -> LanguageModel:
    """Build this rank's part of the model and read its weights; every rank must call it.

    `overlap` leaves reduces in flight under the next sub-block; `compiled` applies torch.compile between matrix
    products; `verify` compares the files with their checksums at the same time, so that a disk is read only once.
    Raises UserError on every rank if any rank cannot read its weights, or finds a damaged file.
    """
    on_cpu = device.type == "cpu"
    operations = PACKED_OPERATIONS if on_cpu else Operations()
    options = StackOptions(overlap, operations=compile_operations(operations) if compiled else operations)
    memory = torch.device("meta") if on_cpu else device
    model = LanguageModel(stored.config, mesh, options, dtype=dtype, device=memory).requires_grad_(False)
    errors = ErrorCollector()
    with ThreadPoolExecutor(1) as thread:
        verified = thread.submit(stored.verify, mesh.world.rank, mesh.world.size) if verify else None
        with errors.collect():
            if on_cpu:
                _load_packed(model, stored.fill)
            else:
                stored.fill(model)
        with errors.collect():
            if verified is not None:
                verified.result()
    raise_on_all_ranks(mesh.world, errors.problems)
    return model


def _load_packed(model: LanguageModel, fill: Callable[..., None]) -> None:
    """Load a model that was built on the meta device with `PACKED_OPERATIONS`; `fill` is `StoredModel.fill`.

    The model can only generate afterwards: its parameters no longer correspond to their sections. Each matrix is packed
    as soon as it is read, and the next one is read into the same buffer, because fresh memory costs more time than
    reading a cached file. The embedding is looked up by rows, so it is not packed, even if it is also the head; nor are
    matrices of which mixers read rows. Routers compute in another element type, and experts are stacks.
    """
    modules = [module for module in model.modules() if isinstance(module, ParallelModule)]
    unpacked = [matrix for module in modules if isinstance(module, Heads) for matrix in module.unpacked]
    packed = {
        module
        for module in modules
        if hasattr(module, "linear")
        and module not in (model.embedding, *unpacked)
        and can_pack(module.get_parameter("weight").dtype)
    }
    largest = max((module.get_parameter("weight").numel() for module in packed), default=0)
    buffer = torch.empty(largest, dtype=model.compute_dtype)
    for module in modules:
        for name, described in list(module.named_parameters(recurse=False)):
            if name == "weight" and module in packed:
                memory = buffer[: described.numel()].view(described.shape)
            else:
                memory = torch.empty_like(described, device="cpu")
            module.register_parameter(name, nn.Parameter(memory, requires_grad=False))
        for name, state in list(module.named_buffers(recurse=False)):
            setattr(module, name, torch.zeros_like(state, device="cpu"))
        fill(module, recurse=False)
        if module in packed:
            weight = pack_weight(module.get_parameter("weight").detach(), _ROWS)
            module.register_parameter("weight", nn.Parameter(weight, requires_grad=False))


def _in_fp32(operation: Callable[..., Any], projections: int) -> Callable[..., Any]:
    """Return an operation on fp32 copies of its projections: attention on CPUs is several times as fast in fp32."""

    def compute(*operands: Any) -> Any:
        return operation(*map(_wide, operands[:projections]), *operands[projections:])

    return compute


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, _: object = None) -> Tensor:
    """`x @ weight^T + bias` for x [..., in] and a weight [out, in], packed or not -> [..., out], in its dtype."""
    x = x.to(weight.dtype)
    if weight.is_mkldnn:
        return packed_linear(x, weight, bias)
    return F.linear(x, weight, bias)


PACKED_OPERATIONS = Operations(
    of_heads=_in_fp32,
    linear=_linear,
)
"""For models that generate on a CPU."""

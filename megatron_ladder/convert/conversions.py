"""The conversions of `convert_checkpoint.py`: import and export of Hugging Face directories, reshape, and merge.

Each function reads headers and manifests only, and returns a checked `Conversion`. The comparison of logits before and
after is the one check that knows the meaning of the numbers.
"""

import hashlib
import importlib.util
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial, reduce
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil
import torch
from torch import Tensor

from megatron_ladder import __version__
from megatron_ladder.blueprint.boxes import Box
from megatron_ladder.blueprint.model import ModelConfig, tensor_parallel_errors
from megatron_ladder.blueprint.specs import Role
from megatron_ladder.blueprint.tensors import model_tensors
from megatron_ladder.checkpoint import hf_directory, publish
from megatron_ladder.checkpoint.format import (
    HF_CONFIG,
    IMPORTED,
    IMPORTED_DTYPES,
    MODEL_CARD,
    Checkpoint,
    is_card_or_licence,
)
from megatron_ladder.checkpoint.hf_config import hf_config, hf_type
from megatron_ladder.checkpoint.hf_joined import JoinedRows, joined_tensors, mtp_replacements, replaced
from megatron_ladder.checkpoint.hf_types import TYPES, plain_architecture
from megatron_ladder.checkpoint.loading import load_weights
from megatron_ladder.checkpoint.manifest import KINDS
from megatron_ladder.checkpoint.tensor_file import box_key
from megatron_ladder.comm.mesh import ProcessMesh
from megatron_ladder.convert import small_files
from megatron_ladder.convert.copying import Conversion, CopiedTensor, Files, Permutation, divide, total_bytes
from megatron_ladder.convert.options import (
    CheckpointOptions,
    ExportOptions,
    ImportOptions,
    MergeOptions,
    ReshapeOptions,
    shard_bytes,
)
from megatron_ladder.convert.outputs import check_hf_target, check_save_target, publish_hf, publish_save
from megatron_ladder.convert.training_checkpoint import (
    TrainingCheckpoint,
    checkpoint_files,
    manifest_bytes,
    open_training_checkpoint,
)
from megatron_ladder.convert.wiring import rewired, wiring_text
from megatron_ladder.errors import ErrorCollector, Problem, UserError, raise_user_errors, size_text
from megatron_ladder.model.language_model import LanguageModel

_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""Values of --dtype."""
_MAX_DIFFERENCE = 1e-4
"""Allowed difference of two programs that compute in fp32, relative to the largest logit."""
_TOKENS = 64
_FP32_BYTES = 4
_DERIVED_KEYS = ("format", "schema_version", "files")
"""Keys of a manifest that a reshape computes again."""


def plan_import(options: ImportOptions) -> Conversion:
    """Plan a training checkpoint, weights only, from a Hugging Face directory.

    Raises UserError if the source is inconsistent or not supported, or the target must not be written to.
    """
    check_save_target(options.save, 0, options.overwrite)
    errors = ErrorCollector()
    with errors.collect("hf"):
        fix = "leave the head out with {drop_mtp}"
        directory = hf_directory.open_hf_directory(options.hf, keeps_mtp=not options.drop_mtp, mtp_fix=fix)
    errors.raise_if_any()
    model_type = directory.model_type
    model, notes = rewired(directory.model, options)
    carried = small_files.read_carried(options.hf)
    carried[MODEL_CARD] = small_files.imported_card(options.hf, carried.get(MODEL_CARD, b""))
    description, tokenizer, token_count = small_files.describe_tokenizer(options.hf)
    if token_count > model.vocab_size:
        notes.append(f"the tokenizer has {token_count} ids, the model {model.vocab_size}: larger ids must not occur")
    header = {
        "iteration": 0,
        "consumed_samples": 0,
        "model": model.to_dict(),
        "tokenizer": tokenizer,
        IMPORTED: {"model_type": model_type, **_own_dtypes(directory), **directory.token_ids},
        "versions": {"megatron_ladder": __version__},
    }
    before, after = wiring_text(directory.model), wiring_text(model)
    compared = f"of the {'dequantised ' if directory.quantization else ''}source in transformers and of the checkpoint"
    if before != after:
        compared += f", in the wiring of the source, {before} (those of {after} were not compared)"
    tensors = [_imported(directory, name) for name in directory.tensors]
    parameters = sum(math.prod(tensor.shape) for tensor in directory.tensors.values())
    return _checkpoint_conversion(
        options,
        [options.hf],
        checkpoint_files(tensors),
        header,
        {**carried, **description},
        facts=(f"{options.hf}: {model_type}, {parameters:,} parameters, {directory.dtype}", f"wiring: {after}"),
        notes=[*notes, *directory.notes],
        made_of=f"their sources, converted from {directory.quantization}"
        if directory.quantization
        else "their sources",
        check_logits=lambda work: _compare_logits(
            options.hf,
            directory.model,
            work,
            model_type,
            None,
            own_code=False,
            compared=compared,
            weights=directory.dequantised if directory.quantization else None,
        ),
    )


def _own_dtypes(directory: hf_directory.HFDirectory) -> dict[str, dict[str, str]]:
    """Return the element types that differ from that of the embedding, by the name of the tensor."""
    dtypes = {name: tensor.dtype for name, tensor in directory.tensors.items() if tensor.dtype != directory.dtype}
    return {IMPORTED_DTYPES: dtypes} if dtypes else {}


def _imported(directory: hf_directory.HFDirectory, name: str) -> CopiedTensor:
    tensor = directory.tensors[name]
    key = box_key("weight", name, Box.whole(tensor.shape))
    return CopiedTensor(key, name, "weight", tensor.shape, tensor.dtype, tensor.source, tensor.whole)


def plan_reshape(options: ReshapeOptions, orders: Mapping[str, Permutation] = MappingProxyType({})) -> Conversion:
    """Plan a training checkpoint of whole tensors, possibly with another wiring, optimizer state included.

    `orders` are new orders of rows or columns, by the canonical name of a tensor; they also apply to its moments.
    Raises UserError if the checkpoint is incomplete, or the target must not be written to.
    """
    source = open_training_checkpoint(options.load)
    checkpoint = source.checkpoint
    iteration = checkpoint.iteration
    check_save_target(options.save, iteration, options.overwrite)
    model, notes = rewired(source.model, options)
    tensors = [replace(tensor, order=orders.get(tensor.name)) for tensor in source.tensors()]
    header = {key: value for key, value in checkpoint.manifest.items() if key not in _DERIVED_KEYS}
    header["model"] = model.to_dict()
    if "model" in header.get("run", {}):
        header["run"] = {**header["run"], "model": header["model"]}
    kinds = [kind for kind in KINDS if checkpoint.stored(kind)]
    return _checkpoint_conversion(
        options,
        [checkpoint.directory],
        checkpoint_files(tensors),
        header,
        source.other_files,
        facts=(f"{checkpoint.directory}: iteration {iteration}, {', '.join(kinds)}, wiring: {wiring_text(model)}",),
        notes=[*notes, *checkpoint.warnings],
        made_of="their sources, in the new order" if orders else "their sources",
        verify_source=lambda: source.verify(only_weights=False),
    )


def plan_merge(options: MergeOptions) -> Conversion:
    """Plan a training checkpoint, weights only, whose weights are weighted means of those of several checkpoints.

    Raises UserError if a checkpoint is incomplete or of another model, or the target must not be written to.
    """
    names = _merged_names(options)
    sources = [open_training_checkpoint(options.load / name) for name in names]
    newest = sources[-1]
    check_save_target(options.save, newest.checkpoint.iteration, options.overwrite)
    raise_user_errors(
        Problem(
            {"load": source.checkpoint.directory},
            "{load}: is of another model than {newest}",
            "merge checkpoints of one run",
            newest=newest.checkpoint.directory,
        )
        for source in sources
        if source.model != newest.model
    )
    weights = _merging_weights(options.weights, len(sources))
    tensors = [
        replace(tensor, read=partial(_weighted_mean, sources, weights, tensor.name))
        for tensor in newest.tensors()
        if tensor.kind == "weight"
    ]
    header = {key: value for key, value in newest.checkpoint.manifest.items() if key not in _DERIVED_KEYS}
    header["merged"] = {"checkpoints": names, "weights": weights}

    def verify_sources() -> None:
        for source in sources:
            source.verify(only_weights=True)

    shares = (f"{name} {weight / sum(weights):.3f}" for name, weight in zip(names, weights, strict=True))
    return _checkpoint_conversion(
        options,
        [source.checkpoint.directory for source in sources],
        checkpoint_files(tensors),
        header,
        newest.other_files,
        facts=(f"{options.load}: {', '.join(shares)}, wiring: {wiring_text(newest.model)}",),
        made_of="the means of their sources, computed again",
        verify_source=verify_sources,
    )


def _merged_names(options: MergeOptions) -> list[str]:
    """Return the names of the checkpoints to merge, the oldest first; raise UserError if they do not exist."""
    # The newest checkpoint of an iteration that was saved several times.
    names = {publish.publishing_order(name)[0]: name for name in publish.published_checkpoints(options.load)}
    if not names:
        source = open_training_checkpoint(options.load)
        fix = "give the directory that contains several"
        raise UserError(Problem({"load": source.checkpoint.directory}, "{load}: is one checkpoint", fix))
    existing = f"{options.load} contains iterations {', '.join(map(str, sorted(names)))}"
    if options.last is None and not options.iterations:
        reason = "{iterations} or {last} must choose the checkpoints to merge: {existing}"
        raise UserError(Problem({"iterations": None}, reason, existing=existing))
    iterations = sorted({*options.iterations})
    chosen: dict[str, object] = {"iterations": " ".join(map(str, options.iterations))}
    if options.last is not None:
        iterations = sorted(names)[-options.last :]
        chosen = {"last": options.last}
    if absent := [str(iteration) for iteration in iterations if iteration not in names]:
        reason = f"{{}}: no checkpoint of iteration {', '.join(absent)}: {{existing}}"
        raise UserError(Problem(chosen, reason, existing=existing))
    if len(iterations) < (options.last or 2):
        reason = f"{{}}: expected {options.last or 'two or more'} different checkpoints: {{existing}}"
        raise UserError(Problem(chosen, reason, existing=existing))
    return [names[iteration] for iteration in iterations]


def _merging_weights(kind: str, count: int) -> list[float]:
    """Return a weight for each of so many checkpoints, the oldest first; the mean divides by their sum.

    The weights c_0 .. c_(n-1) have the effect of a factor c_i + .. + c_(n-1) on the updates between checkpoints i - 1
    and i (arXiv 2507.17634, section 3). `minus-sqrt` makes that 1 - sqrt(i / n).
    """
    if kind == "minus-sqrt":
        return [math.sqrt((index + 1) / count) - math.sqrt(index / count) for index in range(count)]
    return [index + 1.0 if kind == "linear" else 1.0 for index in range(count)]


def _weighted_mean(sources: Sequence[TrainingCheckpoint], weights: Sequence[float], name: str) -> Tensor:
    """Return the mean of a weight over checkpoints in float64, added up in their order."""
    pairs = zip(sources, weights, strict=True)
    parts = (source.read(name, "weight").to(torch.float64).mul_(weight) for source, weight in pairs)
    return reduce(Tensor.add_, parts).div_(sum(weights))


def _checkpoint_conversion(
    options: CheckpointOptions | MergeOptions,
    sources: Sequence[Path],
    files: Files,
    header: Mapping[str, Any],
    other_files: Mapping[str, bytes],
    **more: Any,
) -> Conversion:
    """Return a conversion to a training checkpoint; `more` are other fields of `Conversion`."""
    iteration = header["iteration"]
    token = _fingerprint(sources, files, header, sorted(other_files.items()))
    return Conversion(
        files=files,
        work=publish.temporary_directory(options.save, iteration, token),
        target=options.save,
        small_files=lambda work: {
            **other_files,
            publish.MANIFEST_NAME: manifest_bytes(files, header, work, other_files),
        },
        publish=lambda work: publish_save(work, options.save, iteration, options.overwrite),
        **more,
    )


def _fingerprint(sources: Sequence[Path], files: Files, *more: object) -> str:
    """Return sixteen hexadecimal digits that identify a conversion: its sources, its files, and other values."""
    digest = hashlib.sha256(repr(more).encode())
    for path in sorted(path for source in sources for path in source.iterdir() if path.is_file()):
        state = path.stat()
        digest.update(f"{path}\0{state.st_size}\0{state.st_mtime_ns}\0".encode())
    for file, tensors in files.items():
        for tensor in tensors:
            order = None if tensor.order is None else (tensor.order.dim, tensor.order.source.tobytes())
            digest.update(repr((file, tensor.key, tensor.shape, tensor.dtype, order)).encode())
    return digest.hexdigest()[:16]


def plan_export(options: ExportOptions) -> Conversion:
    """Plan a Hugging Face directory from a training checkpoint of any layout.

    Raises UserError if the checkpoint is incomplete or not supported, or the target must not be written to.
    """
    most_bytes = shard_bytes(options.max_shard_size)
    check_hf_target(options.hf, options.overwrite)
    source = open_training_checkpoint(options.load)
    checkpoint = source.checkpoint
    wiring = wiring_text(source.model)
    model = source.model.without_mtp if options.drop_mtp else source.model
    model_type = hf_type(model, checkpoint.imported_type)
    dtype = source.trained_dtype if options.dtype is None else _DTYPES[options.dtype]
    exported_names = {spec.name for spec in model_tensors(model)}
    weights = [tensor for tensor in source.tensors() if tensor.kind == "weight" and tensor.name in exported_names]
    raise_user_errors(
        f"{tensor.source}: found {tensor.dtype}, expected {', '.join(hf_directory.FLOAT_DTYPES)}"
        for tensor in weights
        if tensor.dtype not in hf_directory.FLOAT_DTYPES
    )
    # The files of tensors.
    new_dtype = dtype if options.dtype or len({tensor.dtype for tensor in weights}) == 1 else None
    joined = joined_tensors(model, model_type)
    own_dtypes = {} if options.dtype else checkpoint.imported_dtypes
    exported = itertools.chain.from_iterable(
        _exported(source, model, tensor, model_type, joined, own_dtypes.get(tensor.name, new_dtype))
        for tensor in weights
    )
    shards = divide(exported, most_bytes)
    names = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    files = dict(zip([hf_directory.WEIGHTS_NAME] if len(shards) == 1 else names, shards, strict=True))
    # The other files: tokenizer, code, licence, card and index.
    other_files, ids, notes = small_files.exported_tokenizer(checkpoint, source.other_files)
    code = small_files.module_files(model_type)
    config = hf_config(model, dtype=dtype, model_type=model_type, **ids)
    other_files |= {**code, HF_CONFIG: small_files.json_file(config)}
    other_files |= {name: content for name, content in source.other_files.items() if is_card_or_licence(name)}
    other_files[MODEL_CARD] = small_files.model_card(
        source.model,
        wiring,
        options.hf.name,
        other_files.get(MODEL_CARD, b""),
        has_tokenizer="tokenizer.json" in other_files,
        needs_code=bool(code),
    )
    if len(files) > 1:
        weight_map = {tensor.key: file for file, tensors in files.items() for tensor in tensors}
        index = {"metadata": {"total_size": total_bytes(files)}, "weight_map": dict(sorted(weight_map.items()))}
        other_files[hf_directory.INDEX_NAME] = small_files.json_file(index)
    # What is reported.
    written = f"written as {model_type} in {dtype}"
    if code:
        written += f", with {', '.join(code)}: load it with trust_remote_code=True"
    compared = "of the checkpoint and of the exported model in transformers"
    cast_to = new_dtype if any(tensor.dtype != new_dtype for tensor in weights) else None
    if cast_to:
        compared += f", both with weights in {cast_to}"
    target = options.hf.resolve()
    token = _fingerprint([checkpoint.directory], files, sorted(other_files.items()))
    return Conversion(
        files=files,
        work=target.with_name(f"{target.name}.tmp-{token}"),
        target=options.hf,
        small_files=lambda work: other_files,
        publish=lambda work: publish_hf(work, target, options.overwrite),
        facts=(f"{checkpoint.directory}: iteration {checkpoint.iteration}, wiring: {wiring}", written),
        notes=[*notes, *checkpoint.warnings],
        made_of=f"their sources, cast to {cast_to}" if cast_to else "their sources",
        verify_source=lambda: source.verify(only_weights=True),
        check_logits=lambda work: _compare_logits(
            work, source.model, checkpoint.directory, model_type, new_dtype, own_code=True, compared=compared
        ),
    )


def _exported(
    source: TrainingCheckpoint,
    model: ModelConfig,
    tensor: CopiedTensor,
    model_type: str,
    joined: Mapping[str, JoinedRows],
    dtype: str | None,
) -> Iterator[CopiedTensor]:
    """Yield the tensors of a Hugging Face directory that hold a weight: of a stack of experts, one for each.

    A tensor that holds several is yielded for the first of them. `joined` are those with rows of several.
    """
    spec = source.specs[tensor.name]
    new_dtype = tensor.dtype if dtype is None or spec.role is Role.STATE else dtype
    cast = replace(tensor, dtype=new_dtype)
    names = hf_directory.type_names(model, model_type)
    for copy, original in hf_directory.mtp_copies(model, model_type).items():
        if original == tensor.name:
            yield replace(cast, key=copy)
    if rows := joined.get(tensor.name):
        if spec == rows.parts[0]:
            yield replace(cast, key=rows.name, shape=rows.shape, read=partial(_joined, source, rows))
        return
    if spec.expert_dim is None:
        yield replace(cast, key=hf_directory.hf_name(tensor.name, type_names=names))
        return
    stack, place = hf_directory.find_stack(tensor.name, model_type)
    if TYPES[model_type].expert_stacks:
        if place.index == 0:
            read = partial(_stack, source, tensor, model_type)
            stack = replaced(stack, mtp_replacements(model, model_type))
            yield replace(cast, key=stack, shape=place.stack_shape(tensor.shape), read=read)
        return
    for expert in range(tensor.shape[0]):
        key = hf_directory.hf_name(tensor.name, expert, names)
        read = partial(source.read, tensor.name, "weight", expert)
        yield replace(cast, key=key, shape=tensor.shape[1:], read=read)


def _stack(source: TrainingCheckpoint, first: CopiedTensor, model_type: str) -> Tensor:
    """Return the stack whose first kind is a tensor; the others are read one expert at a time, too."""
    layer, _, _ = first.name.partition(".experts.")
    name, place = hf_directory.find_stack(first.name, model_type)
    stack = torch.empty(place.stack_shape(first.shape), dtype=getattr(torch, first.dtype))
    for other in source.specs:
        if other.startswith(f"{layer}.experts.") and hf_directory.find_stack(other, model_type)[0] == name:
            _, of_other = hf_directory.find_stack(other, model_type)
            for expert, part in enumerate(of_other.view(stack)):
                weight = source.read(other, "weight", expert)
                # Transposing first takes a third of the time.
                part.t().copy_(weight.t().contiguous())
    return stack


def _joined(source: TrainingCheckpoint, rows: JoinedRows) -> Tensor:
    return rows.join([source.read(part.name, "weight") for part in rows.parts])


def _compare_logits(
    hf: Path,
    model: ModelConfig,
    checkpoint: Path,
    model_type: str,
    dtype: str | None,
    own_code: bool,
    compared: str,
    weights: Callable[[], dict[str, Tensor]] | None = None,
) -> str:
    """Compare transformers' model of a Hugging Face directory with ours of a training checkpoint, both in fp32.

    Both models are in memory as a whole. Return a line with the difference, or the reason why logits were not compared;
    raise RuntimeError if they differ.

    Args:
        model: sizes and wiring of the directory; the weights of the checkpoint are used in that wiring.
        model_type: model type of the directory.
        dtype: element type to which the weights of the directory were rounded, and those of the checkpoint are for the
            comparison; None if the directory has the exact weights.
        own_code: whether this process wrote the code in the directory, so that it may run.
        compared: describes whose logits these are.
        weights: returns the weights of a directory that transformers cannot be trusted to dequantise.
    """
    model = model.without_mtp
    plain = plain_architecture(model_type) != ""
    needed = 2 * _FP32_BYTES * sum(tensor.numel for tensor in model_tensors(model))
    available = psutil.virtual_memory().available
    if not plain and not own_code:
        return f"logits were not compared: the code of this {model_type} directory is not trusted"
    if importlib.util.find_spec("transformers") is None:
        return "logits were not compared: transformers is not installed"
    if tensor_parallel_errors(model, 1):
        return "logits were not compared: one process of the trainer cannot compute this model"
    if needed > available:
        free = f"{size_text(available)} of memory are free"
        return f"logits were not compared: two models in fp32 need {size_text(needed)}, and {free}"
    tokens = torch.randint(0, model.vocab_size, (1, min(_TOKENS, model.max_position_embeddings)))
    try:
        expected = _logits_of_transformers(hf, plain_architecture(model_type), tokens, weights)
    except Exception as error:  # transformers raises nothing narrower.
        if own_code:
            raise
        return f"logits were not compared: transformers does not open {hf} ({type(error).__name__})"
    built = LanguageModel(model, ProcessMesh.single()).requires_grad_(False)
    load_weights(built, Checkpoint.open(checkpoint))
    with torch.no_grad():
        if dtype is not None:
            for parameter in built.parameters():
                parameter.copy_(parameter.to(getattr(torch, dtype)))
        hidden_states = built.hidden_states(tokens, built.training_context(tokens))
        ours = built.logits_shard(hidden_states)[:, 0, : model.vocab_size]
    # The largest logit of a model of zeros is zero.
    largest = expected.abs().max().clamp(min=torch.finfo(expected.dtype).tiny)
    difference = float((ours - expected).abs().max() / largest)
    if not difference <= _MAX_DIFFERENCE:
        raise RuntimeError(f"{hf}: logits of transformers and ours differ by {difference:.1e} of the largest logit")
    return (
        f"verified: the logits {compared}, on {tokens.numel()} random tokens in fp32, differ by at most "
        f"{difference:.1e} of the largest logit"
    )


def _logits_of_transformers(
    hf: Path, architecture: str, tokens: Tensor, weights: Callable[[], dict[str, Tensor]] | None
) -> Tensor:
    """Return the logits [s, V] of tokens [1, s] in fp32; the code of a directory without `architecture` is run.

    `weights` replaces those of the directory.
    """
    # Imported here because it takes seconds.
    import transformers

    # The grouped products of transformers fail where a row is not a multiple of 16 bytes.
    exact = {"dtype": torch.float32, "experts_implementation": "eager", "local_files_only": True}
    if architecture:
        family = getattr(transformers, architecture)
        config = family.config_class.from_pretrained(hf, local_files_only=True)
        # transformers finds the conversion of experts by this name, and has none for that of Kimi-K2.
        config.model_type = family.config_class.model_type
        if weights is None:
            theirs = family.from_pretrained(hf, config=config, **exact)
        else:
            del config.quantization_config
            theirs = family.from_pretrained(None, config=config, state_dict=weights(), **exact)
    else:
        theirs = transformers.AutoModelForCausalLM.from_pretrained(hf, **exact, trust_remote_code=True)
    with torch.no_grad():
        logits: Tensor = theirs.eval()(tokens).logits[0]
    return logits

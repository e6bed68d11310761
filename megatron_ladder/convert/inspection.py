"""`convert_checkpoint.py inspect`: the contents of a directory, and what is wrong with them."""

from collections.abc import Iterator
from pathlib import Path

from megatron_ladder.blueprint.model import ModelConfig, mixers_text, state_bytes
from megatron_ladder.checkpoint.format import CARRIED, HF_CONFIG, is_hf_directory
from megatron_ladder.checkpoint.hf_directory import open_hf_directory
from megatron_ladder.checkpoint.manifest import KINDS
from megatron_ladder.checkpoint.publish import MANIFEST_NAME, published_checkpoints, read_latest
from megatron_ladder.convert.training_checkpoint import open_training_checkpoint
from megatron_ladder.convert.wiring import wiring_text
from megatron_ladder.errors import UserError, counted, size_text
from megatron_ladder.files import check_directory
from megatron_ladder.tokenizers.copies import find_tokenizer

_BF16_BYTES = 2


def inspect_directory(path: Path) -> Iterator[str]:
    """Yield a description of a directory, line by line; of several checkpoints, the current one is described.

    Raises UserError if the directory holds no supported checkpoint, or a damaged one.
    """
    check_directory(path)
    names = published_checkpoints(path)
    is_hf = is_hf_directory(path)
    if not (names or is_hf or read_latest(path) is not None or (path / MANIFEST_NAME).is_file()):
        raise UserError(
            f"{path}: no checkpoint of a supported kind: expected iter_*/{MANIFEST_NAME}, or {HF_CONFIG} and weights"
        )
    if names:
        yield f"{path}: a training run's directory with {', '.join(names)}; latest names {read_latest(path) or 'none'}"
    for entry in sorted(path.iterdir()):
        if ".tmp-" in entry.name and entry.is_dir():
            yield f"{entry.name}: incomplete: a save or a conversion that is running or has died"
    yield from _hugging_face(path) if is_hf else _training(path)


def _training(path: Path) -> Iterator[str]:
    opened = open_training_checkpoint(path)
    checkpoint = opened.checkpoint
    yield f"{checkpoint.directory}: iteration {checkpoint.iteration}, {checkpoint.consumed_samples} samples seen"
    yield from checkpoint.warnings
    yield from _model(opened.model)
    for kind in KINDS:
        if stored := checkpoint.stored(kind).values():
            dtypes = ", ".join(sorted({tensor.dtype for tensor in stored}))
            stacks = " (one for all experts)" if opened.model.moe_layers else ""
            boxes = sum(len(tensor.writers) for tensor in stored)
            yield f"{kind}: {counted(len(stored), 'tensor')}{stacks} in {counted(boxes, 'box')}, {dtypes}"
    files = checkpoint.manifest["files"]
    yield f"{counted(len(files), 'file')}, {size_text(sum(file['size'] for file in files))}"
    if checkpoint.has_moments:
        yield f"optimizer: {checkpoint.optimizer}"
    else:
        yield "without optimizer state: continue with `pretrain_ladder.py --load DIR --finetune`"
    yield "with a tokenizer" if checkpoint.manifest.get("tokenizer") else "without a tokenizer"


def _hugging_face(path: Path) -> Iterator[str]:
    directory = open_hf_directory(path, keeps_mtp=True)
    yield f"{path}: a Hugging Face directory, model_type {directory.model_type}"
    yield from _model(directory.model)
    size = size_text(sum(weight.nbytes for weight in directory.weights.values()))
    count = sum(directory.dropped.values())
    dropped = f", {count} of them in parts that an import drops" if count else ""
    dtype = f"{directory.quantization} and {directory.dtype}" if directory.quantization else directory.dtype
    yield f"weights: {counted(directory.stored, 'tensor')}{dropped}, {dtype}, {size}"
    tokenizer = find_tokenizer(path)
    yield "without a tokenizer" if tokenizer is None else f"tokenizer: {tokenizer.kind}, {tokenizer.vocab_size} ids"
    yield f"other files: {', '.join(name for name in CARRIED if (path / name).exists()) or 'none'}"


def _model(model: ModelConfig) -> Iterator[str]:
    yield f"wiring: {wiring_text(model)}"
    yield (
        f"{model.num_layers} layers, hidden {model.hidden_size}, MLP {model.ffn_hidden_size}, heads "
        f"{model.num_attention_heads} over {model.num_key_value_heads} key-value of width {model.head_dim}, vocabulary "
        f"{model.vocab_size}{', tied head' if model.tie_embeddings else ''}, positions {model.max_position_embeddings}"
    )
    positions = model.max_position_embeddings
    kept = size_text(state_bytes(model, model.desync_tp or 1, positions, _BF16_BYTES))
    yield f"token mixers: {mixers_text(model)}; generation keeps {kept} in bf16 for {positions} positions"
    if model.mtp_num_layers:
        yield "drafting head: one layer"
    if model.moe_layers:
        width = model.moe_shared_expert_intermediate_size
        shared = f", with a shared expert of width {width}" if width else ""
        yield (
            f"experts: {model.num_experts} of width {model.moe_ffn_hidden_size}, {model.moe_router_topk} a token, "
            f"in {counted(len(model.moe_layers), 'layer')}{shared}"
        )

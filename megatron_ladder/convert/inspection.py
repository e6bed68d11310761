"""`convert_checkpoint.py inspect`: the contents of a directory, and what is wrong with them."""

from collections.abc import Iterator
from pathlib import Path

from megatron_ladder.blueprint.model import ModelConfig
from megatron_ladder.checkpoint.format import CARRIED, Checkpoint
from megatron_ladder.checkpoint.hf_directory import CONFIG_NAME, open_hf_directory
from megatron_ladder.checkpoint.publish import (
    MANIFEST_NAME,
    is_published_name,
    published_checkpoints,
    read_latest,
)
from megatron_ladder.checkpoint.tilings import KINDS
from megatron_ladder.convert.outputs import size_text
from megatron_ladder.convert.training_checkpoint import open_training_checkpoint
from megatron_ladder.convert.wiring import wiring_text
from megatron_ladder.errors import UserError, limited
from megatron_ladder.files import hub_hint

_FOREIGN = {
    "latest_checkpointed_iteration.txt": "a directory of Megatron-LM",
    "mp_rank_00_model_states.pt": "a checkpoint of DeepSpeed",
    "zero_to_fp32.py": "a directory of DeepSpeed",
    "consolidated.00.pth": "Meta's original Llama files",
    "params.json": "original files of a model",
}
"""Files that identify directories of other programs."""


def inspect_directory(path: Path) -> Iterator[str]:
    """Yield a description of a directory, line by line.

    Raises:
        UserError: the directory holds no supported checkpoint.
    """
    if not path.is_dir():
        raise UserError(f"{path}: no such directory{hub_hint(path)}")
    names = published_checkpoints(path)
    if (path / MANIFEST_NAME).is_file() or is_published_name(path.name):
        yield from _training(path)
    elif names or read_latest(path) is not None:
        yield from _run(path, names)
    elif (path / CONFIG_NAME).is_file():
        yield from _hugging_face(path)
    else:
        known = next((text for name, text in _FOREIGN.items() if (path / name).exists()), None)
        found = f"{known}, which is not supported" if known else "no checkpoint of a supported kind"
        raise UserError(f"{path}: {found}: expected iter_*/{MANIFEST_NAME}, or {CONFIG_NAME} and safetensors")


def _run(path: Path, names: list[str]) -> Iterator[str]:
    latest = read_latest(path)
    yield f"{path}: a training run's directory with {len(names)} checkpoints"
    if latest not in names:
        yield f"  latest names {latest or 'none of them'!r}, which does not exist"
    for name in names:
        yield f"{'latest: ' if name == latest else ''}{name}"
        for line in _training(path / name):
            yield f"  {line}"
    for entry in sorted(path.iterdir()):
        if ".tmp-" in entry.name and entry.is_dir():
            files = sum(1 for _ in entry.iterdir())
            yield f"{entry.name}: incomplete: a save or a conversion that is running or has died; {files} files"


def _training(path: Path) -> Iterator[str]:
    try:
        checkpoint = Checkpoint.open(path)
    except UserError as error:
        yield from (f"incomplete: {line}" for line in limited(error.messages))
        return
    manifest = checkpoint.manifest
    yield f"a training checkpoint, iteration {checkpoint.iteration}, {checkpoint.consumed_samples} samples seen"
    try:
        model = checkpoint.model()
    except UserError as error:
        yield from (f"not readable: {line}" for line in limited(error.messages))
        return
    yield from _model(model)
    parallel = manifest.get("run", {}).get("parallel", {})
    if parallel:
        tensor, stages = (parallel.get(f"{which}_model_parallel_size", 1) for which in ("tensor", "pipeline"))
        yield (
            f"written by {manifest['run'].get('world_size', '?')} ranks: tensor-parallel {tensor}, pipeline {stages}, "
            f"ZeRO stage {parallel.get('zero_stage', '?')}; any layout reads it"
        )
    if checkpoint.stored("exp_avg"):
        yield f"optimizer: {checkpoint.optimizer}"
    for kind in KINDS:
        stored = checkpoint.stored(kind)
        if stored:
            dtypes = ", ".join(sorted({tensor.dtype for tensor in stored.values()}))
            boxes = sum(tensor.num_boxes for tensor in stored.values())
            yield f"{kind}: {len(stored)} tensors in {boxes} boxes, {dtypes}"
    files = manifest["files"]
    yield f"{len(files)} files, {size_text(sum(file['size'] for file in files))}"
    if not checkpoint.stored("exp_avg"):
        yield "without optimizer state: continue with pretrain_ladder.py --load DIR --finetune"
    yield "with a tokenizer" if manifest.get("tokenizer") else "without a tokenizer"
    try:
        open_training_checkpoint(path)
    except UserError as error:
        yield from (f"not usable: {line}" for line in limited(error.messages))


def _hugging_face(path: Path) -> Iterator[str]:
    yield f"{path}: a Hugging Face directory"
    try:
        directory = open_hf_directory(path)
    except UserError as error:
        yield from (f"not convertible: {line}" for line in limited(error.messages))
        return
    yield f"model_type {directory.config['model_type']}"
    yield from _model(directory.model)
    files = {stored.path for tensor in directory.tensors.values() for stored in tensor.boxes}
    size = sum(file.stat().st_size for file in files)
    yield f"weights: {len(directory.tensors)} tensors, mostly {directory.dtype}, {len(files)} files, {size_text(size)}"
    other = [name for name in CARRIED if (path / name).exists()]
    yield f"other files: {', '.join(other) or 'none; without a tokenizer'}"


def _model(model: ModelConfig) -> Iterator[str]:
    yield f"wiring: {wiring_text(model)}"
    yield (
        f"{model.num_layers} layers, hidden {model.hidden_size}, MLP {model.ffn_hidden_size}, heads "
        f"{model.num_attention_heads} over {model.num_key_value_heads} key-value of width {model.head_dim}, vocabulary "
        f"{model.vocab_size}{', tied head' if model.tie_embeddings else ''}, positions {model.max_position_embeddings}"
    )

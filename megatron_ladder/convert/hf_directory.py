"""A Hugging Face directory, read with distrust: nothing in it is run, and its files agree before any is copied.

    config.json                        what the model is
    model.safetensors                  weights; or several files and model.safetensors.index.json,
                                       {"weight_map": {tensor: file}}
    pytorch_model.bin                  pickled weights, or several files with such an index; see `pickled`

Names in an index stay in the directory, and links are followed only where the Hugging Face cache makes them:
`snapshots/<revision>/<file>` -> `../../blobs/<hash>`.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ladder.blueprint.model import ModelConfig
from megatron_ladder.checkpoint.header import BY_STORED_NAME, parse_json, read_header
from megatron_ladder.checkpoint.manifest import is_plain_name
from megatron_ladder.convert.mistakes import raise_mistakes
from megatron_ladder.convert.names import hf_name, tensor_shapes
from megatron_ladder.convert.remote_code import AUTHORS_TYPE, OWN_TYPE, model_config_from_hf
from megatron_ladder.convert.sources import SourceTensor, whole_tensor
from megatron_ladder.errors import UserError

CONFIG_NAME = "config.json"
WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
PICKLED_NAME = "pytorch_model.bin"
PICKLED_INDEX_NAME = "pytorch_model.bin.index.json"
FLOAT_DTYPES = ("float32", "bfloat16", "float16")
"""Element types that weights may have."""

_MAX_JSON_BYTES = 100_000_000
_DERIVED_SUFFIX = ".self_attn.rotary_emb.inv_freq"
"""Frequencies that old versions of transformers stored; they follow from config.json."""
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@dataclass(frozen=True)
class HFDirectory:
    """A directory whose files agree with its config.json."""

    path: Path
    config: Mapping[str, Any]
    """config.json."""
    model: ModelConfig
    tensors: dict[str, SourceTensor]
    """Canonical name -> weight, in the model's order."""
    tied_head: SourceTensor | None
    """A stored head of a model whose head is its embedding: the same numbers, or the directory is refused."""

    @property
    def dtype(self) -> str:
        """Element type of most of the weights."""
        sizes: dict[str, int] = {}
        for tensor in self.tensors.values():
            sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + max(tensor.shape)
        return max(sizes, key=lambda name: sizes[name])


def safe_path(directory: Path, name: str) -> Path:
    """The file of a directory, with its links followed.

    Raises:
        UserError: the name leads out of the directory, there is no such file, or it is a link that the Hugging Face
            cache would not make.
    """
    if not is_plain_name(name):
        raise UserError(f"{directory}: the file name {name!r} is not that of a file in the directory")
    path = directory / name
    if path.is_symlink():
        target = os.readlink(path)
        snapshot, found = directory.resolve(), path.resolve()
        as_cache = Path(target).parts[:-1] == ("..", "..", "blobs") and snapshot.parent.name == "snapshots"
        if not as_cache or found.parent != snapshot.parent.parent / "blobs":
            raise UserError(
                f"{path}: is a link to {target}: only links as the Hugging Face cache makes them, "
                "snapshots/*/FILE -> ../../blobs/HASH, are followed: copy the file here"
            )
        path = found
    if not path.is_file():
        raise UserError(f"{directory / name}: there is no such file")
    return path


def read_json_file(directory: Path, name: str) -> dict[str, Any]:
    """A JSON object of a directory.

    Raises:
        UserError: it is missing, too large, not a JSON object, or has a key twice.
    """
    path = safe_path(directory, name)
    try:
        if path.stat().st_size > _MAX_JSON_BYTES:
            raise ValueError(f"it has {path.stat().st_size} bytes, more than {_MAX_JSON_BYTES}")
        values = parse_json(path.read_bytes().decode())
        if not isinstance(values, dict):
            raise ValueError("it is not an object")
    except (OSError, ValueError) as error:
        raise UserError(f"{directory / name}: cannot be read: {error}") from None
    return values


def open_hf_directory(path: Path) -> HFDirectory:
    """Reads config.json, the index and the headers of the files, and compares them.

    Raises:
        UserError: a line for each mistake, twenty at most: the file, the tensor, what was expected and found.
    """
    if not path.is_dir():
        raise UserError(f"--hf {path}: there is no such directory")
    config = read_json_file(path, CONFIG_NAME)
    source = str(path / CONFIG_NAME)
    model_type = config.get("model_type")
    if "auto_map" in config and model_type not in (OWN_TYPE, AUTHORS_TYPE):
        raise UserError(
            f"{source}: auto_map names code of the directory's own, which is not run, and so what this {model_type} "
            "computes is not known: if it is a plain one, remove auto_map"
        )
    model = model_config_from_hf(config, source)
    found = read_tensors(path)
    mistakes: list[str] = []
    tensors = _expected_tensors(path, model, found, mistakes)
    tied_head = found.pop(_HEAD, None) if model.tie_embeddings else None
    embedding = tensors.get("embedding.weight")
    if tied_head is not None and embedding is not None and _described(tied_head) != _described(embedding):
        mistakes.append(
            f"{path}: {_HEAD}: found {_described(tied_head)}, expected that of {_EMBEDDING}, "
            f"{_described(embedding)}, since tie_word_embeddings is true"
        )
    mistakes += [
        f"{path}: {name}: no such tensor is expected in this {model_type} model"
        for name in sorted(found)
        if not name.endswith(_DERIVED_SUFFIX)
    ]
    raise_mistakes(mistakes)
    return HFDirectory(path, config, model, tensors, tied_head)


def read_tensors(path: Path) -> dict[str, SourceTensor]:
    """Name -> tensor of all files of weights.

    Raises:
        UserError: there are none, or two sets of them; the index and the files' headers disagree.
    """
    single, indexed = path / WEIGHTS_NAME, path / INDEX_NAME
    if _exists(single) and _exists(indexed):
        raise UserError(f"{path}: has both {WEIGHTS_NAME} and {INDEX_NAME}: remove the one that is not the model")
    if _exists(single):
        return _read_file(path, WEIGHTS_NAME)
    if _exists(indexed):
        return _read_indexed(path, INDEX_NAME, ".safetensors")
    if _exists(path / PICKLED_NAME):
        return _read_file(path, PICKLED_NAME)
    if _exists(path / PICKLED_INDEX_NAME):
        return _read_indexed(path, PICKLED_INDEX_NAME, ".bin")
    raise UserError(f"{path}: has neither {WEIGHTS_NAME} nor {INDEX_NAME} (nor {PICKLED_NAME}): there are no weights")


def _exists(path: Path) -> bool:
    """Whether there is such a name, be it a link that leads nowhere."""
    return os.path.lexists(path)


def _read_indexed(path: Path, index_name: str, suffix: str) -> dict[str, SourceTensor]:
    weight_map = read_json_file(path, index_name).get("weight_map")
    where = path / index_name
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise UserError(f"{where}: weight_map is not an object of file names")
    files = sorted(set(weight_map.values()))
    mistakes = [
        f"{where}: the file name {file!r} is not that of a {suffix} file" for file in files if not file.endswith(suffix)
    ]
    raise_mistakes(mistakes)
    found: dict[str, SourceTensor] = {}
    for file in files:
        try:
            held = _read_file(path, file)
        except UserError as error:
            mistakes.extend(error.mistakes)
            continue
        listed = {name for name, named in weight_map.items() if named == file}
        absent = sorted(listed - {*held})
        mistakes += [f"{path / file}: {name}: is missing, and {index_name} lists it" for name in absent]
        for name in sorted({*held} - listed):
            said = f"says {weight_map[name]}" if name in weight_map else "does not list it"
            mistakes.append(f"{path / file}: {name}: is here, and {index_name} {said}")
        found |= held
    raise_mistakes(mistakes)
    return found


def _read_file(path: Path, file: str) -> dict[str, SourceTensor]:
    real = safe_path(path, file)
    if file.endswith(".bin"):
        # Imports torch, which safetensors do without.
        from megatron_ladder.convert.pickled import read_pickled

        return read_pickled(real)
    found = {}
    for name, place in read_header(real).items():
        element = BY_STORED_NAME.get(place.dtype)
        dtype = place.dtype if element is None else element.name
        found[name] = whole_tensor(name, dtype, place.shape, real, place)
    return found


def _expected_tensors(
    path: Path, model: ModelConfig, found: dict[str, SourceTensor], mistakes: list[str]
) -> dict[str, SourceTensor]:
    """Takes out of `found` what the model has, and notes what is missing or is something else."""
    tensors = {}
    for name, shape in tensor_shapes(model).items():
        theirs = hf_name(name)
        tensor = found.pop(theirs, None)
        if tensor is None:
            mistakes.append(f"{path}: {theirs}: is missing; expected shape {list(shape)}")
        elif tensor.shape != shape:
            mistakes.append(f"{path}: {theirs}: found shape {list(tensor.shape)}, expected {list(shape)}")
        elif tensor.dtype not in FLOAT_DTYPES:
            mistakes.append(
                f"{path}: {theirs}: found {tensor.dtype}, expected {', '.join(FLOAT_DTYPES)}: is it quantised?"
            )
        else:
            tensors[name] = tensor
    return tensors


def _described(tensor: SourceTensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"

"""A Hugging Face directory, read without trust: none of its code runs, and its files must agree before any is copied.

    config.json                        the model
    model.safetensors                  weights; or several files and model.safetensors.index.json,
                                       {"weight_map": {tensor: file}}
    pytorch_model.bin                  pickled weights, or several files with such an index; read by torch's restricted
                                       unpickler, which runs no code

Names in an index must stay in the directory. Links are followed only in the form that the Hugging Face cache creates:
`snapshots/<revision>/<file>` -> `../../blobs/<hash>`.
"""

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_ladder.blueprint.boxes import Box
from megatron_ladder.blueprint.model import ModelConfig
from megatron_ladder.blueprint.tensors import model_tensors
from megatron_ladder.checkpoint.format import GENERATION_CONFIG, HF_CONFIG, find_checkpoint, is_hf_directory
from megatron_ladder.checkpoint.hf_config import AUTHORS_TYPE, OWN_TYPE, READABLE_TYPES, model_config_from_hf, token_ids
from megatron_ladder.checkpoint.manifest import is_plain_name, parse_json
from megatron_ladder.checkpoint.tensor_file import element_name, open_safetensors, stored_tensor
from megatron_ladder.errors import UserError, limited, raise_user_errors
from megatron_ladder.files import hub_hint

WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
PICKLED_NAME = "pytorch_model.bin"
PICKLED_INDEX_NAME = "pytorch_model.bin.index.json"
FLOAT_DTYPES = ("float32", "bfloat16", "float16")
"""Supported element types of weights."""

_MAX_JSON_BYTES = 100_000_000
_DERIVED_SUFFIX = ".self_attn.rotary_emb.inv_freq"
"""Frequencies that old versions of transformers stored; they are computed from config.json instead."""
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_PARTS = (
    ("embedding.", "model.embed_tokens."),
    ("final_norm.", "model.norm."),
    ("layers.", "model.layers."),
    (".attention_norm", ".input_layernorm"),
    (".mlp_norm", ".post_attention_layernorm"),
    (".attention", ".self_attn"),
    (".router.weight", ".mlp.gate.weight"),
    (".router.expert_bias", ".mlp.gate.e_score_correction_bias"),
    (".experts.", ".mlp.experts."),
    (".shared_expert.", ".mlp.shared_experts."),
)
"""Canonical part of a name, and the part in transformers' Llama, Qwen, GLM and ours; the rest is the same."""
_MIXTRAL_PARTS = (
    (".mlp.", ".block_sparse_moe."),
    (".gate_proj.", ".w1."),
    (".up_proj.", ".w3."),
    (".down_proj.", ".w2."),
)


def hf_name(name: str, expert: int | None = None, mixtral: bool = False) -> str:
    """Return the name of a canonical tensor, or of an expert's matrix in it, in a Hugging Face directory."""
    for ours, theirs in (*_PARTS, *(_MIXTRAL_PARTS if mixtral else ())):
        name = name.replace(ours, theirs)
    return name if expert is None else name.replace(".experts.", f".experts.{expert}.")


@dataclass(frozen=True)
class HFWeight:
    """A canonical tensor whose data stay in the mapped files."""

    source: str
    """Names of the stored tensors, for messages."""
    parts: tuple[Tensor, ...]
    """One stored tensor, or that of each expert of a stack."""
    shape: tuple[int, ...]

    @property
    def dtype(self) -> str:
        """Return the name of the element type."""
        return element_name(self.parts[0].dtype)

    def read(self, box: Box, out: Tensor) -> None:
        """Fill `out` with a box of the tensor."""
        if len(self.shape) == self.parts[0].dim():
            out.copy_(self.parts[0][box.slices()])
            return
        experts, *inside = box.slices()
        for part, target in zip(self.parts[experts], out, strict=True):
            target.copy_(part[tuple(inside)])

    def whole(self) -> Tensor:
        """Return the whole tensor."""
        return self.parts[0] if len(self.shape) == self.parts[0].dim() else torch.stack(self.parts)


@dataclass(frozen=True)
class HFDirectory:
    """A directory whose files agree with its config.json.

    `tensors` has the weights by canonical name, in the model's order. `tied_head` is the stored head of a model with
    tied embeddings; it must equal the embedding. `dropped` is the number of tensors of layers beyond the last one,
    which predict further tokens (`num_nextn_predict_layers`).
    """

    path: Path
    config: Mapping[str, Any]
    model: ModelConfig
    tensors: dict[str, HFWeight]
    tied_head: Tensor | None
    dropped: int

    @property
    def dtype(self) -> str:
        """Return the element type of most weights."""
        sizes: Counter[str] = Counter()
        for tensor in self.tensors.values():
            sizes[tensor.dtype] += max(tensor.shape)
        return sizes.most_common(1)[0][0]

    def token_ids(self) -> dict[str, Any]:
        """Return the ids of special tokens; generation_config.json takes precedence.

        Raises:
            UserError: as `hf_config.token_ids`, or generation_config.json cannot be read.
        """
        ids = token_ids(self.config, self.path / HF_CONFIG, self.model.vocab_size)
        if os.path.lexists(self.path / GENERATION_CONFIG):
            values = _read_json_file(self.path, GENERATION_CONFIG)
            ids |= token_ids(values, self.path / GENERATION_CONFIG, self.model.vocab_size)
        return ids

    def check_tied_head(self) -> None:
        """Raise UserError if the stored head of a model with tied embeddings differs from the embedding."""
        head, embedding = self.tied_head, self.tensors["embedding.weight"].whole()
        if head is not None and not torch.equal(*(one.contiguous().view(torch.uint8) for one in (head, embedding))):
            raise UserError(
                f"{self.path}: {_HEAD} differs from {_EMBEDDING} although tie_word_embeddings is true: it is unknown "
                "which of them is the head"
            )

    def read_weight(self, name: str, offset: Sequence[int], extent: Sequence[int], out: Tensor) -> None:
        """Fill `out` [*extent], of any dtype and on any device, with a box of a weight; raise UserError on failure."""
        self.tensors[name].read(Box(tuple(offset), tuple(extent)), out.detach())


def safe_path(directory: Path, name: str) -> Path:
    """Return the path of a file in a directory, with its links followed.

    Raises:
        UserError: the name is not plain, there is no such file, or it is a link that the Hugging Face cache would not
            create.
    """
    if not is_plain_name(name):
        raise UserError(f"{directory}: {name!r} is not a plain file name")
    path = directory / name
    if path.is_symlink():
        target = os.readlink(path)
        snapshot, found = directory.resolve(), path.resolve()
        as_cache = Path(target).parts[:-1] == ("..", "..", "blobs") and snapshot.parent.name == "snapshots"
        if not as_cache or found.parent != snapshot.parent.parent / "blobs":
            raise UserError(
                f"{path}: is a link to {target}; only links of the Hugging Face cache, "
                "snapshots/*/FILE -> ../../blobs/HASH, are followed: copy the file here"
            )
        path = found
    if not path.is_file():
        raise UserError(f"{directory / name}: file not found")
    return path


def _read_json_file(directory: Path, name: str) -> dict[str, Any]:
    """Read a JSON object from a file in a directory.

    Raises:
        UserError: the file is missing, too large, not a JSON object, or `parse_json` rejects it.
    """
    path = safe_path(directory, name)
    try:
        if path.stat().st_size > _MAX_JSON_BYTES:
            raise ValueError(f"it has {path.stat().st_size} bytes, more than {_MAX_JSON_BYTES}")
        values = parse_json(path.read_bytes())
        if not isinstance(values, dict):
            raise ValueError("it is not an object")
    except (OSError, ValueError) as error:
        raise UserError(f"{directory / name}: cannot be read: {error}") from None
    return values


def open_hf_directory(path: Path) -> HFDirectory:
    """Read config.json, the index and the headers of the files, and check that they agree.

    Raises:
        UserError: at most twenty errors, each with the file, the tensor, and what was found and expected.
    """
    if not path.is_dir():
        raise UserError(f"--hf {path}: no such directory{hub_hint(path)}")
    if not is_hf_directory(path) and find_checkpoint(path) is not None:
        raise UserError(f"--hf {path}: holds training checkpoints, which need no import: give it to --load")
    config = _read_json_file(path, HF_CONFIG)
    source = str(path / HF_CONFIG)
    model_type = config.get("model_type")
    if "auto_map" in config and model_type in READABLE_TYPES and model_type not in (OWN_TYPE, AUTHORS_TYPE):
        raise UserError(
            f"{source}: auto_map names custom code, which is not run, so the computation of this {model_type} is "
            f"unknown; if it is a plain {model_type}, remove auto_map"
        )
    found = _read_tensors(path)
    model = model_config_from_hf(config, source, len(found))
    errors: list[str] = []
    dropped = _drop_predicting_layers(config, model, found)
    _split_stacks(model, found)
    mixtral = model_type == "mixtral" and not any(".mlp.experts." in name for name in found)
    tensors = _expected_tensors(path, model, mixtral, found, errors)
    tied_head = found.pop(_HEAD, None) if model.tie_embeddings else None
    embedding = tensors.get("embedding.weight")
    if tied_head is not None and embedding is not None:
        head = f"{element_name(tied_head.dtype)} {list(tied_head.shape)}"
        expected = f"{embedding.dtype} {list(embedding.shape)}"
        if head != expected:
            reason = f"as in {_EMBEDDING}, since tie_word_embeddings is true"
            errors.append(f"{path}: {_HEAD}: found {head}, expected {expected} {reason}")
    errors += [
        f"{path}: {name}: unexpected tensor in this {model_type} model"
        for name in sorted(found)
        if not name.endswith(_DERIVED_SUFFIX)
    ]
    raise_user_errors(limited(errors))
    return HFDirectory(path, config, model, tensors, tied_head, dropped)


def _read_tensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of all files of weights by name.

    Raises:
        UserError: there are none, or two sets of them, or the index and the headers disagree.
    """
    names = (WEIGHTS_NAME, INDEX_NAME, PICKLED_NAME, PICKLED_INDEX_NAME)
    # A dangling link counts, so that reading it is reported as an error.
    first, *others = [name for name in names if os.path.lexists(path / name)] or [""]
    if not first:
        raise UserError(f"{path}: has neither {WEIGHTS_NAME} nor {INDEX_NAME} (nor {PICKLED_NAME}): no weights found")
    if INDEX_NAME in others:
        raise UserError(f"{path}: has both {WEIGHTS_NAME} and {INDEX_NAME}: remove one")
    return _read_indexed(path, first) if first.endswith(".json") else _read_file(path, first)


def _read_indexed(path: Path, index_name: str) -> dict[str, Tensor]:
    suffix = ".bin" if index_name == PICKLED_INDEX_NAME else ".safetensors"
    weight_map = _read_json_file(path, index_name).get("weight_map")
    where = path / index_name
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise UserError(f"{where}: weight_map is not an object of file names")
    files = sorted(set(weight_map.values()))
    errors = [f"{where}: {file!r} is not the name of a {suffix} file" for file in files if not file.endswith(suffix)]
    raise_user_errors(limited(errors))
    found, places = dict[str, Tensor](), dict[str, str]()
    for file in files:
        try:
            held = _read_file(path, file)
        except UserError as error:
            errors.extend(error.messages)
            continue
        found |= held
        places |= dict.fromkeys(held, file)
    errors += [
        f"{where}: {name}: is in {places.get(name, 'no file')}, but listed in {weight_map.get(name, 'no file')}"
        for name in sorted(places.keys() | weight_map.keys())
        if places.get(name) != weight_map.get(name) and not errors
    ]
    raise_user_errors(limited(errors))
    return found


def _read_file(path: Path, file: str) -> dict[str, Tensor]:
    real = safe_path(path, file)
    if file.endswith(".bin"):
        return _read_pickled(real)
    opened = open_safetensors(real)
    return {key: stored_tensor(real, opened, key) for key in opened.keys()}  # noqa: SIM118


def _read_pickled(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a pickled file, with their data left in the mapped file.

    Raises:
        UserError: the file is not a dictionary of tensors, or has the format before torch 1.6.
    """
    try:
        held = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # The unpickler raises errors of any kind for invalid files.
        reason = str(error).split("\n")[0] or type(error).__name__
        raise UserError(f"{path}: cannot be read with weights_only=True: {reason}") from None
    if not isinstance(held, dict) or not all(
        isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in held.items()
    ):
        raise UserError(f"{path}: is not a dictionary of tensors")
    for name, tensor in held.items():
        if tensor.device.type != "cpu":
            raise UserError(f"{path}: {name}: is a {tensor.device} tensor, whose data the file lacks; save it again")
        plain = type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
        if not plain or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
            raise UserError(f"{path}: {name}: is not a plain tensor; save the model as safetensors")
    return held


def _drop_predicting_layers(config: Mapping[str, Any], model: ModelConfig, found: dict[str, Tensor]) -> int:
    """Remove the tensors of GLM's layers that predict further tokens from `found`; return their number."""
    last = model.num_layers + (config.get("num_nextn_predict_layers") or 0) * (config["model_type"] == "glm4_moe")
    layers = {name: re.match(r"model\.layers\.(\d{1,9})\.", name) for name in found}
    names = [name for name, match in layers.items() if match and model.num_layers <= int(match[1]) < last]
    for name in names:
        del found[name]
    return len(names)


def _split_stacks(model: ModelConfig, found: dict[str, Tensor]) -> None:
    """Replace the stacks of experts that transformers writes on request by views of each expert's matrices."""
    for layer in model.moe_layers:
        experts = f"model.layers.{layer}.mlp.experts"
        for stack, parts in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
            stacked = found.pop(f"{experts}.{stack}", torch.empty(0))
            # One expert too many is enough for an error.
            for expert, matrix in enumerate(stacked[: model.num_experts + 1] if stacked.dim() == 3 else ()):
                for part, rows in zip(parts, matrix.chunk(len(parts)), strict=False):
                    found[f"{experts}.{expert}.{part}.weight"] = rows


def _expected_tensors(
    path: Path, model: ModelConfig, mixtral: bool, found: dict[str, Tensor], errors: list[str]
) -> dict[str, HFWeight]:
    """Remove the tensors of the model from `found` and return them; append an error for each missing or wrong one.

    `mixtral` is whether the experts have Mixtral's names.
    """
    tensors = {}
    for spec in model_tensors(model):
        experts = [None] if spec.expert_dim is None else range(spec.shape[0])
        names = [hf_name(spec.name, expert, mixtral) for expert in experts]
        shape = spec.shape if spec.expert_dim is None else spec.shape[1:]
        parts = {name: found.pop(name) for name in names if name in found}
        absent = [name for name in names if name not in parts]
        more = f" (and {len(absent) - 1} other experts)" if len(absent) > 1 else ""
        if absent:
            errors.append(f"{path}: {absent[0]}: is missing{more}; expected shape {list(shape)}")
            continue
        first = element_name(parts[names[0]].dtype)
        for name, tensor in parts.items():
            if tensor.shape != shape:
                errors.append(f"{path}: {name}: found shape {list(tensor.shape)}, expected {list(shape)}")
            elif (dtype := element_name(tensor.dtype)) not in FLOAT_DTYPES:
                errors.append(f"{path}: {name}: found {dtype}, expected {', '.join(FLOAT_DTYPES)}: is it quantised?")
            elif dtype != first:
                errors.append(f"{path}: {name}: found {dtype}, expected {first} as in {names[0]}")
        source = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
        tensors[spec.name] = HFWeight(source, tuple(parts.values()), spec.shape)
    return tensors

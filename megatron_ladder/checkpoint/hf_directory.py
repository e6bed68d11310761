"""A Hugging Face directory, whose files must agree before any is copied; none of its code runs.

config.json                        the model
model.safetensors                  weights; or several files and model.safetensors.index.json,
                                   {"weight_map": {tensor: file}}
"""

import itertools
import re
from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_ladder.blueprint.boxes import Box
from megatron_ladder.blueprint.model import ModelConfig
from megatron_ladder.blueprint.specs import TensorSpec
from megatron_ladder.blueprint.tensors import model_tensors
from megatron_ladder.checkpoint.dequantisation import take_quantised
from megatron_ladder.checkpoint.format import GENERATION_CONFIG, HF_CONFIG, find_checkpoint, is_hf_directory, token_ids
from megatron_ladder.checkpoint.hf_config import model_config_from_hf, text_config
from megatron_ladder.checkpoint.hf_joined import JoinedRows, joined_tensors, mtp_replacements, replaced
from megatron_ladder.checkpoint.hf_types import OWN_TYPE, TEXT_PREFIX, TYPES, MTPNames, plain_architecture, type_of
from megatron_ladder.checkpoint.stored_weights import (
    ALTERNATING_PLACES,
    STACK_PLACES,
    PlainWeight,
    ReadableWeight,
    RowsPlace,
    StackPlace,
    StoredWeight,
)
from megatron_ladder.checkpoint.tensor_file import all_finite, element_name, equal_bits, open_safetensors, stored_tensor
from megatron_ladder.errors import Problem, UserError, limited, raise_user_errors
from megatron_ladder.files import check_directory, reject_pointer
from megatron_ladder.typed import json_object

WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
FLOAT_DTYPES = ("float32", "bfloat16", "float16")
"""Supported element types of weights."""

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
    (".kv_a_proj.", ".kv_a_proj_with_mqa."),
    ("_a_norm.", "_a_layernorm."),
    (".router.weight", ".mlp.gate.weight"),
    (".router.bias", ".mlp.gate.bias"),
    (".router.expert_bias", ".mlp.gate.e_score_correction_bias"),
    (".experts.", ".mlp.experts."),
    (".shared_expert.", ".mlp.shared_experts."),
    (".shared_expert_gate.", ".mlp.shared_expert_gate."),
)
"""Canonical part of a name, and the part in transformers' Llama, Qwen, GLM, DeepSeek and ours; the rest is the same."""


def hf_name(name: str, expert: int | None = None, type_names: Sequence[tuple[str, str]] = ()) -> str:
    """Return the name of a canonical tensor, or of an expert's matrix in it, in a Hugging Face directory.

    `type_names` are the `names` of its type.
    """
    name = replaced(name, (*_PARTS, *type_names))
    return name if expert is None else name.replace(".experts.", f".experts.{expert}.")


def find_stack(name: str, model_type: str) -> tuple[str, StackPlace]:
    """Return the name of the stack that can hold the matrices or biases of experts in a type, and their place in it."""
    prefix, _, kind = hf_name(name).rpartition(".experts.")
    place = (ALTERNATING_PLACES if TYPES[model_type].expert_stacks == "alternating" else STACK_PLACES)[kind]
    return f"{prefix}.experts.{place.stack}", place


@dataclass(frozen=True)
class HFWeight:
    """A canonical tensor whose data stay in the mapped files."""

    source: str
    """Directory and names of the stored tensors, for messages."""
    parts: tuple[ReadableWeight, ...]
    """One tensor, or that of each expert."""
    shape: tuple[int, ...]

    @property
    def dtype(self) -> str:
        """Return the name of the element type."""
        return element_name(self.parts[0].dtype)

    def read(self, box: Box, out: Tensor) -> None:
        """Fill `out` with a box of the tensor; raise UserError for numbers that are not finite in its element type."""
        if len(self.shape) == len(self.parts[0].shape):
            self.parts[0].read(box.slices(), out)
        else:
            experts, *inside = box.slices()
            for part, target in zip(self.parts[experts], out, strict=True):
                part.read(tuple(inside), target)
        if not all_finite(out):
            if not all(all_finite(part.whole()) for part in self.parts):
                raise UserError(f"{self.source}: contains NaN or infinity")
            raise UserError(f"{self.source}: has values that do not fit in {element_name(out.dtype)}: use a wider type")

    def whole(self) -> Tensor:
        """Return the whole tensor."""
        if len(self.shape) == len(self.parts[0].shape):
            return self.parts[0].whole()
        out = torch.empty(self.shape, dtype=self.parts[0].dtype)
        self.read(Box.whole(self.shape), out)
        return out


@dataclass(frozen=True)
class HFDirectory:
    """A directory whose files agree with its config.json.

    `tensors` has the weights by canonical name, in the model's order, and `weights` by their names in the files.
    `token_ids` are the ids of special tokens. `stored` is the number of tensors in the files, some of which are
    `dropped`: their numbers by what they belong to.
    """

    path: Path
    config: Mapping[str, Any]
    model: ModelConfig
    tensors: dict[str, HFWeight]
    weights: Mapping[str, StoredWeight]
    token_ids: Mapping[str, Any]
    stored: int
    dropped: Mapping[str, int]

    @property
    def model_type(self) -> str:
        """Return the key of `TYPES`."""
        return type_of(self.config)

    @property
    def notes(self) -> list[str]:
        """Return one line for each part of the directory that is ignored or converted."""
        notes = [f"{count} tensors of {owner} are dropped" for owner, count in self.dropped.items()]
        announced = TYPES[self.model_type].mtp
        if announced and self.config.get(announced.key) and not self.model.mtp_num_layers and not self.dropped:
            notes.append(f"{announced.key} announces a drafting head, which the files do not hold")
        if self.quantization:
            notes.append(f"weights are stored in {self.quantization} and read as bfloat16")
        if "auto_map" in self.config and self.model_type != OWN_TYPE:
            notes.append(f"remote code (auto_map) is ignored: the model is read as {self.model_type}")
        return notes

    @property
    def quantization(self) -> str | None:
        """Return the format of quantised weights; None if there are none."""
        return next((weight.quantization for weight in self.weights.values() if weight.quantization), None)

    def dequantised(self) -> dict[str, Tensor]:
        """Return all weights by their names in the files."""
        return {name: weight.whole() for name, weight in self.weights.items()}

    @property
    def dtype(self) -> str:
        """Return the element type of the embedding."""
        return self.tensors["embedding.weight"].dtype

    def read_weight(self, name: str, box: Box, out: Tensor) -> None:
        """Fill `out` [*box.extent], of any dtype and on any device, with a box of a weight."""
        self.tensors[name].read(box, out.detach())


def safe_path(directory: Path, name: str) -> Path:
    """Return the path of a file in a directory; raise UserError if the name or a link leaves it.

    Links may end in `blobs` of the Hugging Face cache: `snapshots/REVISION/FILE` -> `../../blobs/HASH`.
    """
    home, path = directory.resolve(), directory / name
    try:
        real = path.resolve()
    except (OSError, ValueError):
        raise UserError(f"{directory}: {name!r} is not the name of a file") from None
    in_cache = home.parent.name == "snapshots" and real.parent == home.parent.parent / "blobs"
    if not in_cache and not real.is_relative_to(home):
        raise UserError(f"{directory}: {name!r} is {real}, outside of the directory: copy the file into it")
    return path


def _read_json_file(directory: Path, name: str) -> dict[str, Any]:
    path = safe_path(directory, name)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    reject_pointer(path, content)
    return json_object(path, content)


def open_hf_directory(path: Path, keeps_mtp: bool = False, mtp_fix: str = "") -> HFDirectory:
    """Read config.json, the index and the headers of the files; raise UserError if they do not agree.

    The model has a drafting head if `keeps_mtp` is set and the files have one, of one layer. `mtp_fix` is the fix of a
    `Problem` with that head. Of the data, only the scales of FP8 weights are read, which must be finite, and further
    copies of embedding and output head, which must equal them.
    """
    check_directory(path)
    if not is_hf_directory(path):
        if find_checkpoint(path) is not None:
            reason = "{path}: holds training checkpoints, which need no import: give it to {load}"
            raise UserError(Problem({}, reason, path=path))
        raise UserError(f"{path}: has no {HF_CONFIG}, expected a Hugging Face directory with safetensors")
    source = str(path / HF_CONFIG)
    config = text_config(_read_json_file(path, HF_CONFIG), source)
    model_type = type_of(config)
    plain = plain_architecture(model_type)
    if plain and "auto_map" in config and config.get("architectures") != [plain]:
        raise UserError(
            f"{source}: auto_map names custom code, which is not run, for architectures {config.get('architectures')}, "
            f"so the computation of this {model_type} is unknown; if it is plain, set architectures to {[plain]}"
        )
    stored = _read_tensors(path)
    count = len(stored)
    model = model_config_from_hf(config, source, count)
    has_mtp = keeps_mtp and _has_mtp(config, model, stored)
    before_norm = has_mtp and model_type == OWN_TYPE and config.get("mtp_before_final_norm") is True
    model = replace(model, mtp_num_layers=int(has_mtp), mtp_before_final_norm=before_norm)
    errors: list[str] = []
    dropped = _drop_tensors(config, model, stored)
    found = _stored_weights(path, config, stored)
    tensors, weights = _expected_tensors(path, model, model_type, found, errors)
    tied_head = found.pop(_HEAD, None) if model.tie_embeddings else None
    copies = {name: copy for name in mtp_copies(model, model_type) if (copy := found.pop(name, None)) is not None}
    errors += [
        f"{path}: {name}: unexpected tensor in this {model_type} model"
        for name in sorted(found.keys() - weights.keys())
        if not name.endswith(_DERIVED_SUFFIX)
    ]
    raise_user_errors(limited([*dict.fromkeys(errors)]))
    if tied_head is not None:
        _check_tied_head(path, tied_head.whole(), tensors["embedding.weight"].whole())
    for name, copy in copies.items():
        original = mtp_copies(model, model_type)[name]
        if not equal_bits(copy.whole(), tensors[original].whole()):
            own = hf_name(original)
            reason = f"{path}: {name} differs from {own}, but a drafting head shares the matrix of the model"
            raise UserError(Problem({}, reason, mtp_fix))
    return HFDirectory(path, config, model, tensors, weights, _token_ids(path, config, model), count, dropped)


def mtp_copies(model: ModelConfig, model_type: str) -> dict[str, str]:
    """Return the names of the copies of matrices in a drafting head, and the canonical names of these matrices."""
    names = TYPES[model_type].mtp
    if names is None or not names.has_copies or not model.mtp_num_layers:
        return {}
    prefix = names.layer.format(model.num_layers)
    head = "embedding.weight" if model.tie_embeddings else "lm_head.weight"
    return {f"{prefix}embed_tokens.weight": "embedding.weight", f"{prefix}shared_head.head.weight": head}


def _has_mtp(config: Mapping[str, Any], model: ModelConfig, stored: Collection[str]) -> bool:
    """Return whether files have a drafting head of one layer; other layers that predict further tokens are dropped."""
    names = TYPES[type_of(config)].mtp
    if names is None or _mtp_layers(config, names) != 1:
        return False
    return any(name.startswith(names.layer.format(model.num_layers)) for name in stored)


def _mtp_layers(config: Mapping[str, Any], names: MTPNames) -> int:
    """Return the number of layers of a drafting head, which some `config.json` do not mention."""
    return config.get(names.key, 1) or 0


def _check_tied_head(path: Path, head: Tensor, embedding: Tensor) -> None:
    if not equal_bits(head, embedding):
        raise UserError(
            f"{path}: {_HEAD} differs from {_EMBEDDING} although tie_word_embeddings is true, so programs disagree on "
            f"the head: set tie_word_embeddings to false to use {_HEAD}, or remove that tensor"
        )


def _token_ids(path: Path, config: Mapping[str, Any], model: ModelConfig) -> dict[str, Any]:
    """Return the ids of special tokens; generation_config.json takes precedence."""
    ids = token_ids(config, path / HF_CONFIG, model.vocab_size)
    if (path / GENERATION_CONFIG).exists():
        values = _read_json_file(path, GENERATION_CONFIG)
        ids |= token_ids(values, path / GENERATION_CONFIG, model.vocab_size)
    return ids


def _read_tensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of all files of weights by name, with their data left in the mapped files."""
    index, whole = path / INDEX_NAME, path / WEIGHTS_NAME
    if whole.exists() == index.exists():
        found, fix = ("both", "remove one") if whole.exists() else ("neither", "save the weights as safetensors")
        raise UserError(f"{path}: has {found} of {WEIGHTS_NAME} and {INDEX_NAME}: {fix}")
    if whole.exists():
        return _read_file(path, WEIGHTS_NAME)
    weight_map = _read_json_file(path, INDEX_NAME).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise UserError(f"{index}: weight_map is not an object of file names")
    held = {file: _read_file(path, file) for file in sorted(set(weight_map.values()))}
    places: dict[str, list[str]] = {name: [] for name in weight_map}
    for file, tensors in held.items():
        for name in tensors:
            places.setdefault(name, []).append(file)
    errors = [
        f"{index}: {name}: is in {' and '.join(files) or 'no file'}, but listed in {weight_map.get(name, 'no file')}"
        for name, files in sorted(places.items())
        if files != [weight_map.get(name)]
    ]
    raise_user_errors(limited(errors))
    return {name: tensor for tensors in held.values() for name, tensor in tensors.items()}


def _read_file(directory: Path, name: str) -> dict[str, Tensor]:
    path = safe_path(directory, name)
    opened = open_safetensors(path)
    return {key: stored_tensor(path, opened, key) for key in opened.keys()}  # noqa: SIM118


def _drop_tensors(config: Mapping[str, Any], model: ModelConfig, found: dict[str, Tensor]) -> dict[str, int]:
    """Remove tensors that are not read from `found`; return their numbers by what they belong to."""
    row, count = TYPES[type_of(config)], model.num_layers
    names = {owner: [name for name in found if name.startswith(prefix)] for prefix, owner in row.left_out.items()}
    if row.mtp is not None and not model.mtp_num_layers:
        beyond = range(count, count + _mtp_layers(config, row.mtp))
        owner = "layers that predict further tokens (mtp)"
        names[owner] = [name for name in found if row.mtp.is_of_head(name, beyond)]
    for name in itertools.chain.from_iterable(names.values()):
        del found[name]
    return {owner: len(dropped) for owner, dropped in names.items() if dropped}


def _stored_weights(path: Path, config: Mapping[str, Any], stored: dict[str, Tensor]) -> dict[str, StoredWeight]:
    """Return the tensors of a directory by name, quantised ones with their scales; raise UserError if they disagree."""
    plain, errors = dict(stored), list[str]()
    weights = take_quantised(config, plain, errors)
    raise_user_errors(limited([f"{path}: {error}" for error in errors]))
    weights |= {name: PlainWeight(tensor) for name, tensor in plain.items()}
    return {re.sub(f"^{re.escape(TEXT_PREFIX)}", "model.", name): weight for name, weight in weights.items()}


def _stored_as(
    spec: TensorSpec,
    model: ModelConfig,
    model_type: str,
    type_names: Sequence[tuple[str, str]],
    joined: Mapping[str, JoinedRows],
    found: Container[str],
) -> tuple[list[str], tuple[int, ...], StackPlace | RowsPlace | None]:
    """Return the names of the tensors that hold a weight, the shape of each, and the weight's place in one of many."""
    if spec.name in joined:
        rows = joined[spec.name]
        return [rows.name], rows.shape, rows.place_of(spec)
    if spec.expert_dim is None:
        return [hf_name(spec.name, type_names=type_names)], spec.shape, None
    stack, place = find_stack(spec.name, model_type)
    stack = replaced(stack, mtp_replacements(model, model_type))
    if place.alternating or stack in found:
        return [stack], place.stack_shape(spec.shape), place
    return [hf_name(spec.name, expert, type_names) for expert in range(spec.shape[0])], spec.shape[1:], None


def type_names(model: ModelConfig, model_type: str, found: Collection[str] = ()) -> Sequence[tuple[str, str]]:
    """Return the `names` of a type that stored tensors have: its own, or those of transformers' modules."""
    row = TYPES[model_type]
    has_module_names = any(part in name for part, _ in row.names[:1] for name in found)
    names = row.module_names if has_module_names else row.names
    return (*names, *mtp_replacements(model, model_type))


def _expected_tensors(
    path: Path,
    model: ModelConfig,
    model_type: str,
    found: Mapping[str, StoredWeight],
    errors: list[str],
) -> tuple[dict[str, HFWeight], dict[str, StoredWeight]]:
    """Return the tensors of the model, and the weights of `found` in use; append an error for each wrong one."""
    tensors, weights = dict[str, HFWeight](), dict[str, StoredWeight]()
    names_of_type = type_names(model, model_type, found)
    joined = joined_tensors(model, model_type)
    for spec in model_tensors(model):
        names, shape, place = _stored_as(spec, model, model_type, names_of_type, joined, found)
        parts = {name: found[name] for name in names if name in found}
        absent = [name for name in names if name not in parts]
        more = f" (and {len(absent) - 1} other experts)" if len(absent) > 1 else ""
        weights |= parts
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
        source = f"{path}: {names[0]}" if len(names) == 1 else f"{path}: {names[0]} to {names[-1]}"
        held = parts.values() if place is None else [place.part_of(parts[names[0]])]
        tensors[spec.name] = HFWeight(source, tuple(held), spec.shape)
    return tensors, weights

"""Stacks of experts in MXFP4: what they mean, in transformers, and which are refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from megatron_ladder.checkpoint.dequantisation import take_quantised
from megatron_ladder.checkpoint.stored_weights import PlainWeight, StackPart, StackPlace, StoredWeight
from megatron_ladder.checkpoint.tensor_file import equal_bits
from tests.helpers.live_bytes import LiveBytes

X = "model.layers.0.mlp.experts.gate_up_proj"
PUBLISHED: dict[str, Any] = {
    "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
    "quant_method": "mxfp4",
}
"""The `quantization_config` of gpt-oss."""
GATES, UPS = StackPlace("gate_up_proj", 0, 2, alternating=True), StackPlace("gate_up_proj", 1, 2, alternating=True)
DOWNS = StackPlace("down_proj", 0, 1, alternating=True)


def random_stack(experts: int, rows: int, groups: int) -> dict[str, Tensor]:
    """Return blocks and scales of all bytes, but without the scale that stands for NaN and those near it."""
    generator = torch.Generator().manual_seed(3)
    blocks = torch.randint(0, 256, (experts, rows, groups, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(0, 250, (experts, rows, groups), dtype=torch.uint8, generator=generator)
    return {f"{X}_blocks": blocks, f"{X}_scales": scales}


def of_transformers(stored: dict[str, Tensor]) -> Tensor:
    return convert_moe_packed_tensors(stored[f"{X}_blocks"], stored[f"{X}_scales"])


def taken(stored: dict[str, Tensor]) -> StoredWeight:
    """Return the weight of blocks and scales."""
    errors, found = list[str](), dict(stored)
    weights = take_quantised({"quantization_config": PUBLISHED}, found, errors)
    assert not errors and not found and weights.keys() == {X}
    return weights[X]


def test_every_byte_with_every_scale_is_as_in_transformers() -> None:
    pairs = torch.arange(256 * 256).view(4, 64, 16, 16)
    stored = {f"{X}_blocks": (pairs % 256).byte(), f"{X}_scales": (pairs[..., 0] // 256).byte()}
    weight = taken(stored).whole()
    assert equal_bits(weight, of_transformers(stored))
    assert weight.isinf().any() and len(weight.unique()) > 1000


@pytest.mark.parametrize("piece", [1 << 20, 100, 1])
def test_any_part_is_read_without_the_rest(monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    """Boxes of tensor-parallel ranks begin anywhere, also inside a byte; gates and ups alternate."""
    monkeypatch.setattr("megatron_ladder.checkpoint.dequantisation._PIECE", piece)
    stored = random_stack(3, 14, 5)
    weight, expected = taken(stored), of_transformers(stored)
    assert weight.shape == (3, 160, 14) and weight.dtype == torch.bfloat16 and weight.quantization == "MXFP4"
    assert weight.nbytes == 3 * 14 * 5 * 17
    kinds = {GATES: expected[..., ::2], UPS: expected[..., 1::2], DOWNS: expected}
    for place, matrices in kinds.items():
        part, whole = StackPart(weight, place), matrices.transpose(1, 2)
        assert part.shape == tuple(whole.shape) and equal_bits(part.whole(), whole.contiguous())
        for columns in (slice(0, 160), slice(33, 34), slice(31, 65), slice(96, 128), slice(159, 160)):
            for rows in (slice(0, 7), slice(2, 5), slice(6, 7)):
                box = slice(1, 3), rows, columns
                out = torch.empty(2, rows.stop - rows.start, columns.stop - columns.start)
                part.read(box, out)
                assert out.equal(whole[box].float()), (place, box)


def test_a_read_takes_the_memory_of_a_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_ladder.checkpoint.dequantisation._PIECE", 1 << 12)
    part, box = StackPart(taken(random_stack(8, 256, 8)), GATES), (slice(0, 8), slice(0, 128), slice(0, 256))
    out = torch.empty(8, 128, 256, dtype=torch.bfloat16)
    part.read(box, out)
    with LiveBytes() as memory:
        part.read(box, out)
    # Numbers of pairs of 4 bytes for two weights, and the weights.
    assert 0 < memory.peak <= 8 * (1 << 12)


def test_only_the_part_that_is_read_leaves_the_file(tmp_path: Path) -> None:
    """A part of a mapped file needs no tensor of the size of the stack."""
    save_file(random_stack(8, 256, 8), tmp_path / "stack.safetensors")
    with safe_open(tmp_path / "stack.safetensors", "pt") as file:
        stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    out = torch.empty(1, 4, 64)
    with LiveBytes() as memory:
        StackPart(taken(stored), UPS).read((slice(5, 6), slice(0, 4), slice(64, 128)), out)
    assert memory.peak <= 8 * 4 * 64
    assert out.equal(of_transformers(stored)[5, 64:128, 1:9:2].T.float()[None])


@pytest.mark.parametrize("kind", ["matrices", "biases", "rows in order"])
def test_parts_of_stacks_that_are_not_quantised(kind: str) -> None:
    stack = torch.randn(3, 10, 14) if kind != "biases" else torch.randn(3, 14)
    for index in range(2):
        place = StackPlace("", index, 2, alternating=kind != "rows in order")
        expected = stack[..., index::2] if kind != "rows in order" else stack[:, 5 * index : 5 * index + 5]
        expected = expected.mT if kind == "matrices" else expected
        part = StackPart(PlainWeight(stack), place)
        assert place.stack_shape(expected.shape) == stack.shape and part.shape == expected.shape
        assert part.whole().equal(expected)
        box = (slice(1, 3), slice(2, 5), *([slice(3, 9)] if expected.dim() == 3 else []))
        out = torch.empty(expected[box].shape)
        part.read(box, out)
        assert out.equal(expected[box])


BYTES = torch.zeros(2, 4, 3, 16, dtype=torch.uint8)
REFUSED: dict[str, tuple[dict[str, Tensor | None], str]] = {
    "no scales": (
        {f"{X}_scales": None},
        f"{X}_scales: is missing; expected shape [2, 4, 3], one for each group of {X}_blocks: copy both from one model",
    ),
    "no blocks": (
        {f"{X}_blocks": None},
        f"{X}_blocks: is missing, but there is {X}_scales: copy both from one model",
    ),
    "groups of 16": (
        {f"{X}_blocks": BYTES[..., :8]},
        f"{X}_blocks: found shape [2, 4, 3, 8], expected [experts, rows, groups, 16]: only groups of 32 weights are "
        "read; import the model in bf16",
    ),
    "matrix": ({f"{X}_blocks": BYTES[0]}, f"{X}_blocks: found shape [4, 3, 16], expected [experts, rows, groups, 16]"),
    "shape": (
        {f"{X}_scales": BYTES[:, :, :2, 0]},
        f"{X}_scales: found shape [2, 4, 2], expected [2, 4, 3], one for each group of {X}_blocks: copy both",
    ),
    "type": ({f"{X}_blocks": BYTES.char()}, f"{X}_blocks: found int8, expected uint8: download the file again"),
    "type of scales": ({f"{X}_scales": BYTES[..., 0].float()}, f"{X}_scales: found float32, expected uint8"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_dequantised_is_refused(name: str) -> None:
    changes, sentence = REFUSED[name]
    changed: dict[str, Tensor | None] = {f"{X}_blocks": BYTES, f"{X}_scales": BYTES[..., 0], **changes}
    stored = {key: tensor for key, tensor in changed.items() if tensor is not None}
    errors = list[str]()
    assert not take_quantised({"quantization_config": PUBLISHED}, stored, errors)
    assert len(errors) == 1 and errors[0].startswith(sentence), errors


def test_blocks_without_a_description_are_refused() -> None:
    errors, listed = list[str](), {**PUBLISHED, "modules_to_not_convert": ["model.layers.*.mlp"]}
    assert not take_quantised({}, random_stack(1, 1, 1), errors)
    assert errors == [f"{X}_blocks: is in MXFP4, but config.json has no quantization_config: restore the published one"]
    errors.clear()
    take_quantised({"quantization_config": listed}, random_stack(1, 1, 1), errors)
    expected = "config.json lists model.layers.*.mlp as not quantised: remove it from the list"
    assert errors == [f"{X}_blocks: is in MXFP4, but {expected}"]

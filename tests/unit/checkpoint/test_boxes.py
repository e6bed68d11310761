"""Boxes compared with element-by-element counting."""

import random

import numpy as np
import pytest
import torch

from megatron_ladder.blueprint.boxes import Box
from megatron_ladder.checkpoint.manifest import BoxRecord, FileRecord, Tiling, make_index, merge_manifest


def random_box(rng: random.Random, shape: list[int]) -> Box:
    low = [rng.randrange(size) for size in shape]
    return Box(tuple(low), tuple(rng.randint(1, size - a) for a, size in zip(low, shape, strict=True)))


def random_shape(rng: random.Random, longest: int = 5) -> list[int]:
    return [rng.randint(1, longest) for _ in range(rng.randint(1, 4))]


def test_pieces_cover_the_interval_in_order() -> None:
    rng = random.Random(1)
    for _ in range(400):
        extent = random_shape(rng)
        elements = torch.arange(int(np.prod(extent))).view(extent)
        start = rng.randrange(elements.numel())
        length = rng.randint(1, elements.numel() - start)
        pieces = Box.whole(extent).cut(start, length)
        values = [elements[box.slices()].reshape(-1) for box, _ in pieces]
        assert torch.equal(torch.cat(values), torch.arange(start, start + length))
        assert [begin for _, begin in pieces] == [int(value[0]) - start for value in values]
        assert len(pieces) <= 2 * len(extent) - 1


def test_intersection_holds_the_shared_elements() -> None:
    rng = random.Random(2)
    for _ in range(300):
        shape = random_shape(rng)
        a, b = random_box(rng, shape), random_box(rng, shape)
        count = np.zeros(shape, int)
        count[a.slices()] += 1
        count[b.slices()] += 1
        shared = a.intersection(b)
        assert (shared is None) == (not np.any(count == 2))
        if shared is not None:
            assert np.all(count[shared.slices()] == 2) and shared.numel == np.sum(count == 2)


def split_at_random(rng: random.Random, box: Box, depth: int) -> list[Box]:
    dimension = rng.randrange(len(box.extent))
    if depth == 0 or box.extent[dimension] == 1:
        return [box]
    cut = rng.randint(1, box.extent[dimension] - 1)
    low, high = list(box.extent), list(box.extent)
    low[dimension], high[dimension] = cut, box.extent[dimension] - cut
    corner = list(box.offset)
    corner[dimension] += cut
    parts = Box(box.offset, tuple(low)), Box(tuple(corner), tuple(high))
    return [piece for part in parts for piece in split_at_random(rng, part, depth - 1)]


def test_boxes_that_cannot_tile_a_tensor_are_rejected() -> None:
    """Drop, repeat or move one box of a tiling. An overlap as large as the gap goes unnoticed."""
    rng = random.Random(4)
    files = [FileRecord("rng_rank_00000.safetensors", 10**6, f"xxh3_128:{0:032x}")]
    header = {"iteration": 1, "consumed_samples": 1, "model": {}}
    for _ in range(300):
        shape = random_shape(rng, longest=7)
        boxes = split_at_random(rng, Box.whole(shape), depth=4)
        change = rng.choice(["none", "drop", "repeat"])
        boxes = {"none": boxes, "drop": boxes[1:], "repeat": [*boxes[1:], boxes[-1]]}[change]
        rng.shuffle(boxes)
        count = np.zeros(shape, int)
        for box in boxes:
            count[box.slices()] += 1
        tiling = Tiling(tuple(shape), tuple(BoxRecord(box.offset, box.extent, 0) for box in boxes))
        index = make_index(files, {("rng", "x"): ("uint8", tiling)})
        if np.all(count == 1):
            merge_manifest(header, [index])
        else:
            with pytest.raises(ValueError, match="rng of x of shape .*: its boxes hold"):
                merge_manifest(header, [index])

"""The manifest: merging the parts of ranks, its bytes, and the rejection of invalid ones."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import xxhash

from megatron_ladder.blueprint.boxes import Box
from megatron_ladder.checkpoint.manifest import (
    BoxRecord,
    FileRecord,
    Index,
    Tiling,
    decode_manifest,
    encode_manifest,
    make_index,
    merge_manifest,
)

HEADER = {"iteration": 100, "consumed_samples": 800, "model": {"num_layers": 2, "ladder_layers": [0, 1]}}
EMBEDDING = "embedding.weight"
FIRST, SECOND = ((0, 0), (2, 3)), ((0, 3), (2, 3))
LOWER = ((2, 0), (2, 6))

Corners = tuple[tuple[int, ...], tuple[int, ...]]


def index(rank: int, *boxes: Corners, dtype: str = "float32", shape: tuple[int, ...] = (4, 6), **more: Any) -> Index:
    """The index of a rank that wrote these boxes of the embedding, and boxes of other tensors."""
    names = {EMBEDDING: boxes, **more}
    tilings = {
        ("weight", name): (dtype, Tiling(shape, tuple(BoxRecord(*box, rank) for box in written)))
        for name, written in names.items()
    }
    return make_index([FileRecord(f"weights_rank_{rank:05d}.safetensors", 400, f"xxh3_128:{0:032x}")], tilings)


def two_ranks() -> list[Index]:
    return [index(1, LOWER), index(0, FIRST, SECOND)]


@pytest.fixture
def manifest() -> dict[str, Any]:
    return json.loads(json.dumps(merge_manifest(HEADER, two_ranks())))


@pytest.mark.parametrize("order", [1, -1])
def test_ranks_are_merged_in_any_order_and_boxes_found_by_elements(order: int) -> None:
    manifest = json.loads(json.dumps(merge_manifest(HEADER, two_ranks()[::order])))
    assert manifest["schema_version"] == 3 and manifest["format"] == "megatron_ladder checkpoint"
    assert {key: manifest[key] for key in HEADER} == HEADER
    assert [file["name"] for file in manifest["files"]] == [f"weights_rank_0000{r}.safetensors" for r in (0, 1)]
    assert manifest["tensors"] == [[EMBEDDING, "weight", "float32", 0]]
    boxes = [[[0, 0], [2, 3], 0], [[0, 3], [2, 3], 0], [[2, 0], [2, 6], 1]]
    assert manifest["tilings"] == [{"shape": [4, 6], "boxes": boxes}]
    data = encode_manifest(manifest)
    found, table = decode_manifest(data)
    assert {**found, "tilings": manifest["tilings"], "tensors": manifest["tensors"]} == manifest
    plain, (body, _, _) = json.loads(data), data.rpartition(b',\n "manifest_checksum"')
    assert plain.pop("manifest_checksum") == "xxh3_128:" + xxhash.xxh3_128(body).hexdigest()
    assert plain == manifest
    stored = table["weight"][EMBEDDING]
    assert stored.shape == (4, 6) and stored.dtype == "float32" and len(stored.writers) == 3
    assert stored.overlapping(Box((1, 3), (2, 1))) == [1, 2]
    assert stored.files() == {"weights_rank_00000.safetensors", "weights_rank_00001.safetensors"}


def test_tensors_that_are_distributed_alike_share_their_boxes() -> None:
    """Otherwise the manifest of a thousand ranks would have millions of boxes."""
    names = [f"layers.{layer}.weight" for layer in range(3)]
    upper = ((0, 0), (2, 6))
    first = index(0, upper, **{name: [upper] for name in names})
    second = index(1, ((2, 0), (1, 6)), **{name: [LOWER] for name in names})
    third = index(2, ((3, 0), (1, 6)))
    assert [len(part.tilings) for part in (first, second)] == [1, 2]
    data = encode_manifest(merge_manifest(HEADER, [first, second, third]))
    assert len(json.loads(data)["tilings"]) == 2
    table = decode_manifest(data)[1]["weight"]
    for name in names:
        stored = table[name]
        found = [(stored.box(i), stored.file(i)[-13], stored.key(i)) for i in range(2)]
        assert found == [(Box(*box), str(i), f"weight:{name}@{2 * i},0") for i, box in enumerate((upper, LOWER))]
    assert [table[EMBEDDING].file(i)[-13] for i in range(3)] == ["0", "1", "2"]


def test_every_flipped_bit_and_every_truncation_is_detected(manifest: dict[str, Any]) -> None:
    data = encode_manifest(manifest)
    for position in range(len(data)):
        altered = bytearray(data)
        altered[position] ^= 1 << (position % 8)
        with pytest.raises(ValueError):
            decode_manifest(bytes(altered))
        with pytest.raises(ValueError):
            decode_manifest(data[:position])


Change = Callable[[dict[str, Any]], object]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda manifest: manifest.update(schema_version=2), "schema_version is 2, and this program reads 3: use"),
        (lambda manifest: manifest.update(iteration="1"), "^iteration: found '1', expected a whole number$"),
        (
            lambda manifest: manifest["files"][0].update(size="4"),
            r"files\[0\].size: found '4', expected a whole number",
        ),
        (lambda manifest: manifest["files"][0].update(name="../a"), "'../a' is not a plain file name"),
        (lambda manifest: manifest.update(hugging_face=5), "hugging_face: found 5, expected an object"),
        (lambda manifest: manifest["tilings"][0]["boxes"][0].__setitem__(0, [9, 9]), "not inside"),
    ],
)
def test_invalid_manifests_are_rejected(manifest: dict[str, Any], change: Change, message: str) -> None:
    change(manifest)
    with pytest.raises(ValueError, match=message):
        decode_manifest(encode_manifest(manifest))

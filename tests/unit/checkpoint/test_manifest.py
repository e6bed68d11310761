"""The manifest: merging the parts of ranks, its bytes, and the rejection of invalid ones."""

import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import pytest
import xxhash

from megatron_ladder.checkpoint.boxes import Box
from megatron_ladder.checkpoint.manifest import decode_manifest, encode_manifest, merge_manifest
from megatron_ladder.checkpoint.tilings import BoxRecord, FileIndex, FileRecord, make_index
from megatron_ladder.config.training import OptimizerConfig

HEADER = {"iteration": 100, "consumed_samples": 800, "model": {"num_layers": 2, "ladder_layers": [0, 1]}}


def box(offset: list[int], extent: list[int]) -> BoxRecord:
    return BoxRecord("embedding.weight", "weight", (4, 6), Box(tuple(offset), tuple(extent)), "float32", 0)


def index(rank: int, *boxes: BoxRecord) -> FileIndex:
    name = f"weights_rank_{rank:05d}.safetensors"
    files: list[FileRecord] = [{"name": name, "size": 400, "checksum": "xxh3_128:00"}]
    return make_index(files, [box._replace(rank=rank) for box in boxes])


def two_ranks() -> list[FileIndex]:
    return [index(1, box([2, 0], [2, 6])), index(0, box([0, 0], [2, 3]), box([0, 3], [2, 3]))]


@pytest.fixture
def manifest() -> dict[str, Any]:
    return merge_manifest(HEADER, two_ranks())


def test_merging_groups_boxes_by_tensor_and_keeps_the_header(manifest: dict[str, Any]) -> None:
    assert manifest["schema_version"] == 2 and manifest["format"] == "megatron_ladder checkpoint"
    assert {key: manifest[key] for key in HEADER} == HEADER
    assert [file["name"] for file in manifest["files"]] == [f"weights_rank_0000{r}.safetensors" for r in (0, 1)]
    columns = {"name": ["embedding.weight"], "kind": ["weight"], "dtype": ["float32"], "tiling": [0]}
    assert manifest["tensors"] == columns
    offsets, extents = [[0, 0, 2], [0, 3, 0]], [[2, 2, 2], [3, 3, 6]]
    assert manifest["tilings"] == [
        {"global_shape": [4, 6], "offsets": offsets, "extents": extents, "writers": [0, 0, 1]}
    ]


def test_tensors_that_are_distributed_alike_share_their_boxes() -> None:
    """Otherwise the manifest of a thousand ranks would have millions of boxes."""
    names = [f"layers.{layer}.weight" for layer in range(3)]

    first = index(0, *(box([0, 0], [2, 6])._replace(name=name) for name in names), box([0, 0], [2, 6]))
    second = index(1, *(box([2, 0], [2, 6])._replace(name=name) for name in names), box([2, 0], [1, 6]))
    third = index(2, box([3, 0], [1, 6]))
    assert [len(part["tilings"]) for part in (first, second)] == [1, 2]
    data = encode_manifest(merge_manifest(HEADER, [first, second, third]))
    assert len(json.loads(data)["tilings"]) == 2
    table = decode_manifest(data)[1]["weight"]
    found = {
        name: [(stored.box(i), stored.file(i)[-13], stored.key(i)) for i in range(stored.num_boxes)]
        for name, stored in table.items()
    }
    halves = [(Box((0, 0), (2, 6)), "0"), (Box((2, 0), (2, 6)), "1")]
    for name in names:
        assert found[name] == [(*half, f"weight:{name}@{2 * number},0") for number, half in enumerate(halves)]
    assert [file for _, file, _ in found["embedding.weight"]] == ["0", "1", "2"]


def test_order_of_ranks_does_not_matter() -> None:
    manifests = [merge_manifest(HEADER, parts) for parts in (two_ranks(), two_ranks()[::-1])]
    tables = [decode_manifest(encode_manifest(manifest))[1] for manifest in manifests]
    found = [
        [(stored.box(i), stored.file(i)) for i in range(stored.num_boxes)]
        for stored in (table["weight"]["embedding.weight"] for table in tables)
    ]
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (two_ranks()[:1], r"weight of embedding.weight .*no box holds the element \[0, 0\]"),
        ([two_ranks()[0], index(0, box([0, 0], [2, 3]))], r"no box holds the element \[0, 3\]"),
        ([*two_ranks(), index(2, box([1, 5], [1, 1]))], r"more than one box holds the element \[1, 5\]"),
        ([index(0, box([0, 0], [2, 6])), index(0, box([2, 0], [2, 6]))], "listed twice"),
        ([*two_ranks(), index(2, box([0, 0], [1, 6])._replace(global_shape=(5, 6)))], "was written as"),
        ([*two_ranks(), index(2, box([0, 0], [1, 6])._replace(dtype="bfloat16"))], "was written as"),
        ([index(0, box([0, 0], [5, 6]))], "not inside the tensor"),
    ],
)
def test_bugs_of_writers_are_reported(parts: list[FileIndex], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        merge_manifest(HEADER, parts)


@pytest.mark.parametrize("key", ["files", "tilings", "tensors", "format", "schema_version", "manifest_checksum"])
def test_reserved_keys_of_a_header_are_rejected(key: str) -> None:
    with pytest.raises(ValueError, match=key):
        merge_manifest({**HEADER, key: 1}, two_ranks())


@pytest.mark.parametrize("key", list(HEADER))
def test_header_must_be_complete(key: str) -> None:
    with pytest.raises(ValueError, match=key):
        merge_manifest({name: value for name, value in HEADER.items() if name != key}, two_ranks())


def test_manifest_survives_encoding(manifest: dict[str, Any]) -> None:
    data = encode_manifest(manifest)
    plain = json.loads(data)
    body, _, _ = data.rpartition(b',\n "manifest_checksum"')
    assert plain.pop("manifest_checksum") == "xxh3_128:" + xxhash.xxh3_128(body).hexdigest()
    assert plain == manifest
    found, table = decode_manifest(data)
    assert {**found, "tilings": manifest["tilings"], "tensors": manifest["tensors"]} == manifest
    stored = table["weight"]["embedding.weight"]
    assert stored.global_shape == (4, 6) and stored.dtype == "float32" and stored.num_boxes == 3


def test_values_that_are_not_json_are_rejected(manifest: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        encode_manifest({**manifest, "schedule": {"lr": float("nan")}})


def test_every_flipped_bit_and_every_truncation_is_detected(manifest: dict[str, Any]) -> None:
    data = encode_manifest(manifest)
    for position in range(len(data)):
        altered = bytearray(data)
        altered[position] ^= 1 << (position % 8)
        with pytest.raises(ValueError):
            decode_manifest(bytes(altered))
        with pytest.raises(ValueError):
            decode_manifest(data[:position])


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("hugging_face", 5, "hugging_face is 5, expected dict"),
        ("hugging_face", None, "hugging_face is None, expected dict"),
        ("tokenizer", [], "tokenizer is "),
        ("tokenizer", {"sha256": 1}, "tokenizer.sha256 is 1, expected str"),
        ("run", {"optimizer": {"lr": "x"}}, "run.optimizer.lr is 'x', expected float or int"),
        ("run", {"optimizer": {"lr": True}}, "run.optimizer.lr is True"),
        ("run", {"training": 3}, "run.training is 3"),
        ("run", {"training": {"train_iters": 1.5}}, "run.training.train_iters is 1.5, expected int"),
        ("run", {"parallel": None}, "run.parallel is None"),
        ("data", {"stream": {"streams": []}}, "data.stream.streams is "),
        ("guard", {"losses": [1, 2.5, None]}, "guard.losses.2 is None, expected int or float"),
        ("optimizer", {"steps_taken": "7"}, "optimizer.steps_taken is '7'"),
        ("data_streams", {}, "data_streams is {}, expected list"),
        ("data_streams", [{}, 5], "data_streams.1 is 5, expected dict"),
        ("iteration", 10**15, "iteration is 1"),
        ("consumed_samples", -1, "consumed_samples is -1, expected 0 to"),
    ],
)
def test_other_keys_have_the_expected_types(manifest: dict[str, Any], key: str, value: Any, named: str) -> None:
    with pytest.raises(ValueError) as raised:
        decode_manifest(encode_manifest({**manifest, key: value}))
    assert str(raised.value).startswith(named)


def test_keys_of_runs_are_accepted(manifest: dict[str, Any]) -> None:
    run = {"optimizer": asdict(OptimizerConfig(lr=1)), "training": {"seed": 1, "bf16": True}, "world_size": 2}
    keys = {"tokenizer": None, "run": run, "guard": {"losses": [1, 2.5]}, "data_streams": [{"place": None}], "other": 5}
    assert decode_manifest(encode_manifest({**manifest, **keys}))[0]["run"] == run


def sealed(text: str) -> bytes:
    """Return the bytes of a manifest with a valid checksum, as an attacker would make them."""
    body = text.rstrip().removesuffix("}").rstrip().encode()
    digits = xxhash.xxh3_128(body).hexdigest()
    return body + f',\n "manifest_checksum": "xxh3_128:{digits}"\n}}\n'.encode()


def test_a_forged_checksum_is_possible(manifest: dict[str, Any]) -> None:
    decode_manifest(sealed(json.dumps(manifest)))


Change = Callable[[dict[str, Any]], object]


def set_in(*path: Any, to: Any) -> Change:
    def change(manifest: dict[str, Any]) -> None:
        *parents, last = path
        place: Any = manifest
        for key in parents:
            place = place[key]
        place[last] = to

    return change


TILING = ("tilings", 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (set_in("format", to="other"), "format"),
        (set_in("schema_version", to=1), "schema_version is 1, and this program reads 2: use the version"),
        (set_in("schema_version", to="1"), "schema_version"),
        (set_in("iteration", to=-1), "iteration"),
        (set_in("iteration", to=True), "iteration"),
        (set_in("iteration", to=1.0), "iteration"),
        (set_in("consumed_samples", to=None), "consumed_samples"),
        (set_in("model", to=[]), "model"),
        (set_in("files", to={}), "files"),
        (set_in("files", 0, "name", to="../a"), "plain file name"),
        (set_in("files", 0, "name", to="/etc/passwd"), "plain file name"),
        (set_in("files", 0, "name", to=".."), "plain file name"),
        (set_in("files", 0, "name", to=""), "plain file name"),
        (set_in("files", 0, "name", to="a/b"), "plain file name"),
        (set_in("files", 0, "name", to="a\\b"), "plain file name"),
        (set_in("files", 0, "name", to="a\0b"), "plain file name"),
        (set_in("files", 0, "name", to=".hidden"), "plain file name"),
        (set_in("files", 0, "name", to="weights_rank_00001.safetensors"), "listed twice"),
        (set_in("files", 0, "size", to="4"), "size"),
        (set_in("files", 0, "checksum", to="md5:00"), "unknown checksum"),
        (set_in("files", 0, to="x"), "no name"),
        (set_in("tilings", to={}), "tilings of the manifest is not of type list"),
        (set_in("tilings", to=[]), "tiling 0 does not exist"),
        (set_in(*TILING, to=[]), "has no global_shape"),
        (set_in(*TILING, "global_shape", to=[4, True]), "global_shape"),
        (set_in(*TILING, "global_shape", to=[1] * 9), "global_shape"),
        (set_in(*TILING, "global_shape", to=[2**63, 2**63]), "does not fit"),
        (set_in(*TILING, "global_shape", to=[4, 7]), r"weight of embedding.weight .*no box holds the element \[0, 6\]"),
        (set_in(*TILING, "offsets", to=[[0, 0, 2]]), "offsets: expected 2 x 3 integers"),
        (set_in(*TILING, "offsets", 0, to=[0, 0]), "offsets: expected 2 x 3 integers"),
        (set_in(*TILING, "offsets", 0, 0, to=2**63), "offsets: expected 2 x 3 integers"),
        (set_in(*TILING, "offsets", 0, 0, to=-1), "not inside"),
        (set_in(*TILING, "offsets", 0, 0, to=1), "a box is not inside|more than one box|no box holds"),
        (set_in(*TILING, "extents", 0, 0, to=2**63 - 1), "not inside"),
        (set_in(*TILING, "extents", 0, 0, to=1.5), "extents: expected 2 x 3 integers"),
        (set_in(*TILING, "writers", to=[0, 0]), "offsets: expected 2 x 2 integers"),
        (set_in(*TILING, "writers", to=[]), "offsets: expected 2 x 0 integers"),
        (set_in(*TILING, "writers", 0, to="0"), "writers: expected 3 integers"),
        (set_in(*TILING, "writers", 0, to=2), "the file 'weights_rank_00002.safetensors' is not listed"),
        (set_in(*TILING, "writers", 0, to=-1), "is not listed"),
        (set_in("tensors", to=[]), "tensors of the manifest is not of type dict"),
        (set_in("tensors", "name", to=[]), "columns of tensors do not have the same length"),
        (set_in("tensors", "name", to=[3]), "unknown kind"),
        (set_in("tensors", "kind", to=["momentum"]), "momentum"),
        (set_in("tensors", "kind", to=["exp_avg"]), "the file 'optimizer_rank_00000.safetensors' is not listed"),
        (set_in("tensors", "dtype", to=["complex64"]), "complex64"),
        (set_in("tensors", "dtype", to=[["float32"]]), "unknown kind"),
        (set_in("tensors", "tiling", to=[True]), "tiling True does not exist"),
        (set_in("tensors", "tiling", to=[-1]), "tiling -1 does not exist"),
        (lambda m: [column.append(column[0]) for column in m["tensors"].values()], "listed twice"),
        (lambda m: m["tensors"].pop("dtype"), "tensors has no dtype"),
        (lambda m: m.pop("tilings"), "no tilings"),
    ],
)
def test_hostile_manifests_are_rejected(manifest: dict[str, Any], change: Change, message: str) -> None:
    change(manifest)
    with pytest.raises(ValueError, match=message):
        decode_manifest(sealed(json.dumps(manifest)))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"iteration": 1, "iteration": 2}', "'iteration' occurs more than once"),
        ('{"manifest_checksum": "x"}', "'manifest_checksum' occurs more than once"),
        ('{"iteration": Infinity}', "Infinity"),
        ('{"a": ' + "[" * 100_000 + "}", "nested too deeply"),
        ('{"a": ' + "1" * 5000 + "}", "digits"),
        ("{[}", "Expecting"),
    ],
)
def test_ambiguous_json_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        decode_manifest(sealed(text))

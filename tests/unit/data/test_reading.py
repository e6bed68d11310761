"""Documents of every input format, and what is wrong with an input."""

import gzip
import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from backports import zstd

from megatron_ladder.data.reading.find import find_sources
from megatron_ladder.data.reading.parquet import check_columns
from megatron_ladder.data.reading.protocol import SPAN_BYTES, Block, Reading, Record, read_records
from megatron_ladder.errors import UserError
from tests.helpers.runs import errors_of

TEXTS = [f"number {number} é🎉\n" * (number * 37 % 700) for number in range(600)]
CONTENT = "".join(json.dumps({"id": 1, "text": text}) + "\n" for text in TEXTS).encode()
assert len(CONTENT) > 5 * SPAN_BYTES
USUAL = Reading()


def blocks_of(inputs: list[str | Path], reading: Reading = USUAL) -> Iterator[Block]:
    shards = (shard for source in find_sources(inputs, reading) for shard in source.shards(None))
    return (block for shard in shards for block in shard.blocks())


def read_all(inputs: list[str | Path], reading: Reading = USUAL) -> list[list[object]]:
    """Return the concatenated columns of all sources, which must not have bad records."""
    records = list(read_records(find_sources(inputs, reading)))
    return [[values[place] for values in records] for place in range(len(reading.keys))]


def bad_records(inputs: list[str | Path], reading: Reading) -> list[tuple[str, str]]:
    """Return locations and reasons."""
    found = [(block, block.read().bad) for block in blocks_of(inputs, reading)]
    bad = [(block.place(number), reason) for block, records in found for number, reason in records]
    return [(place, reason.removeprefix(f"{place}: ")) for place, reason in bad]


@pytest.fixture(scope="module")
def formats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with the same documents in every format."""
    folder = tmp_path_factory.mktemp("formats")
    (folder / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + CONTENT)
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(CONTENT, 1))
    (folder / "c.jsonl.zst").write_bytes(zstd.compress(CONTENT[:9000]) + zstd.compress(CONTENT[9000:]))
    table = pyarrow.table({"id": list(range(len(TEXTS))), "text": TEXTS})
    pyarrow.parquet.write_table(table, folder / "d.parquet", row_group_size=150)
    (folder / "part-00000").write_bytes(CONTENT)
    (folder / "e.JL").write_bytes(CONTENT)
    (folder / "set").mkdir()
    (folder / "set" / "train.jsonl").write_bytes(CONTENT)
    (folder / "set" / "test.jsonl").write_text('{"id": 0, "text": "only"}\n')
    return folder


@pytest.mark.parametrize(
    "name", ["a.jsonl", "b.jsonl.gz", "c.jsonl.zst", "d.parquet", "e.JL", "part-00000", "hf://{}/set", "-"]
)
def test_every_format_gives_the_same_documents(formats: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(CONTENT)))
    assert read_all([name.format(formats) if name.startswith(("hf", "-")) else formats / name]) == [TEXTS]


def test_a_directory_through_datasets(formats: Path, tmp_path: Path) -> None:
    name = f"hf://{formats}/set"
    (block,) = blocks_of([f"{name}@test"], Reading(texts_only=False))
    assert [record for _, record in block.rows()] == [Record({"text": "only"}, ("id",), True)]
    with pytest.raises(UserError, match=r"no column body \(columns found: id, text\)"):
        read_all([name], Reading(("body",)))
    with pytest.raises(UserError, match="a: column text occurs twice"):
        check_columns("a", ["text", "id", "text"], Reading())
    with pytest.raises(UserError, match="or read conversations with `tools/preprocess_data.py --chat`"):
        check_columns("a", ["messages"], Reading())
    with pytest.raises(UserError, match="hf://.*@dev: datasets cannot open it"):
        read_all([f"{name}@dev"])
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "train.jsonl").write_text('{"text": "whole"}\n{torn\n')
    with pytest.raises(UserError, match="hf://.*torn: datasets cannot read it"):
        read_all([f"hf://{tmp_path}/torn"])
    with pytest.raises(UserError, match=r"hf://.*a\.jsonl: is a file: leave out hf://"):
        read_all([f"hf://{formats}/a.jsonl"])
    for place in ("..", tmp_path):
        card = "---\nconfigs:\n- {config_name: default, data_files: [{split: train, path: PLACE/out.jsonl}]}\n---\n"
        (tmp_path / "torn" / "README.md").write_text(card.replace("PLACE", str(place)))
        (tmp_path / "out.jsonl").write_text('{"text": "secret"}\n')
        with pytest.raises(UserError, match=r"hf://.*torn: its README.md names .*out\.jsonl, which is outside of"):
            read_all([f"hf://{tmp_path}/torn"])


def test_all_unreadable_inputs_are_reported(formats: Path, tmp_path: Path) -> None:
    (tmp_path / "plain.txt").write_text("a")
    (tmp_path / "x.parquet").write_bytes(b"x" * 100)
    (tmp_path / "x.csv.gz").write_bytes(b"")
    (tmp_path / "x.CSV").write_text("text\na\n")
    inputs: list[str | Path] = [tmp_path / "missing", tmp_path]
    inputs += [tmp_path / name for name in ("plain.txt", "x.parquet", "x.csv.gz", "x.CSV")]
    inputs += [formats / "d.parquet", f"{tmp_path}/*.json", "-", "-"]
    for line, expected in zip(
        errors_of(find_sources, inputs, Reading(("text", "body"))),
        (
            "missing: no such file",
            "is a directory",
            "no keys text body",
            "x.parquet: not a Parquet file",
            "only JSON lines can be read compressed",
            "tables of text cannot be read",
            "no column body (columns found: id, text)",
            "*.json: no file matches",
            "standard input can be read only once",
        ),
        strict=True,
    ):
        assert expected in line


@pytest.mark.parametrize("name", ["b.jsonl.gz", "c.jsonl.zst"])
def test_a_damaged_compressed_file_is_reported(formats: Path, tmp_path: Path, name: str) -> None:
    whole = (formats / name).read_bytes()
    for content in (whole[:-20], b"no such format" * 100, whole[:50] + b"\x99" * 50 + whole[100:]):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError, match=rf"{name}: damaged, or not (gzip|Zstandard)"):
            read_all([tmp_path / name])


def test_damaged_parquet_is_reported(formats: Path, tmp_path: Path) -> None:
    content = bytearray((formats / "d.parquet").read_bytes())
    column = pyarrow.parquet.ParquetFile(formats / "d.parquet").metadata.row_group(1).column(1)
    begin = column.dictionary_page_offset or column.data_page_offset
    content[begin + 40 : begin + 400] = b"\xff" * 360
    (tmp_path / "d.parquet").write_bytes(content)
    blocks = blocks_of([tmp_path / "d.parquet"])
    assert next(blocks).read().records == [[text] for text in TEXTS[:150]]
    with pytest.raises(UserError, match=r"d\.parquet: row group 1: damaged \(.+\)"):
        next(blocks)


def test_rows_that_cannot_be_read_are_bad_records(tmp_path: Path) -> None:
    texts = pyarrow.array([b"one", b"two \xff", b"three", b"\xe6\x97"], pyarrow.binary()).view(pyarrow.string())
    contents = pyarrow.StructArray.from_arrays([texts], ["content"])
    messages = pyarrow.ListArray.from_arrays(pyarrow.array([0, 1, 2, 3, 4], pyarrow.int32()), contents)
    pyarrow.parquet.write_table(pyarrow.table({"text": texts, "messages": messages}), tmp_path / "a.parquet")
    for key, expected in (("text", ["one", "three"]), ("messages", [[{"content": "one"}], [{"content": "three"}]])):
        reading = Reading((key,), texts_only=key == "text", max_bad=9)
        (block,) = blocks_of([tmp_path / "a.parquet"], reading)
        values = block.read(lambda row: list(row.values.values()) if isinstance(row, Record) else list(row)).records
        assert values == [[value] for value in expected]
        assert [place for place, _ in bad_records([tmp_path / "a.parquet"], reading)] == [
            f"{tmp_path}/a.parquet: row 1",
            f"{tmp_path}/a.parquet: row 3",
        ]


def test_a_huge_line_is_never_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The third line is larger than a span and the limit together, the sixth only larger than the limit."""
    most, megabyte = [0], 1 << 20

    class Counted(io.BufferedReader):
        def read(self, size: int | None = -1, /) -> bytes:
            content = super().read(size)
            most[0] = max(most[0], len(content))
            return content

    monkeypatch.setattr("builtins.open", lambda path, mode: Counted(io.FileIO(path)))
    reading = Reading(max_bytes=megabyte, max_bad=9)
    sizes = (10, 2000, 9 * megabyte, 10, 900_000, megabyte, 10)
    content = "\n".join(json.dumps({"text": "y" * size}) for size in sizes).encode()
    Path(tmp_path / "a.jsonl").write_bytes(content)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(content, 1))
    for name in ("a.jsonl", "b.jsonl.gz"):
        found = bad_records([tmp_path / name], reading)
        assert [place for place, _ in found] == [f"{tmp_path}/{name}:{line}" for line in (3, 6)]
        assert all(r == "larger than 1 megabytes: raise --max-document-megabytes" for _, r in found)
        texts = [text for block in blocks_of([tmp_path / name], reading) for (text,) in block.read().records]
        assert [len(text) for text in texts] == [10, 2000, 10, 900_000, 10]
    assert most[0] <= SPAN_BYTES + reading.max_bytes + 1

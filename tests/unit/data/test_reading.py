import errno
import gzip
import io
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import huggingface_hub.errors
import pyarrow
import pyarrow.parquet
import pytest
import requests
from backports import zstd

from megatron_ladder.data.reading.files import HugeLine, _cut_lines, _parse_lines
from megatron_ladder.data.reading.find import find_sources, group_blocks
from megatron_ladder.data.reading.hub import _is_network_error
from megatron_ladder.data.reading.parquet import ParquetFile, RowGroup
from megatron_ladder.data.reading.protocol import Block, Reading, WrongInputError
from megatron_ladder.errors import UserError

TEXTS = [f"number {number} é🎉\n" * (number % 40) for number in range(400)]
CONTENT = "".join(json.dumps({"id": 1, "text": text}) + "\n" for text in TEXTS).encode()


def read_all(inputs: list[str | Path], reading: Reading | None = None, side_by_side: int = 1) -> list[list[object]]:
    """Return the concatenated columns of all sources, which must not have bad records."""
    reading = reading or Reading()
    columns: list[list[object]] = [[] for _ in reading.keys]
    for group in group_blocks(find_sources(inputs, reading), reading, side_by_side):
        for _, block in group:
            parsed = block.read(reading)
            assert not parsed.bad
            for column, values in zip(columns, parsed.columns, strict=True):
                column += values
    return columns


@pytest.fixture
def small_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("files.SPAN_BYTES", "find.GROUP_BYTES"):
        monkeypatch.setattr(f"megatron_ladder.data.reading.{name}", 3000)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a directory with the same documents in every format."""
    (tmp_path / "a.jsonl").write_bytes(CONTENT)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(CONTENT))
    (tmp_path / "c.jsonl.zst").write_bytes(zstd.compress(CONTENT[:9000]) + zstd.compress(CONTENT[9000:]))
    table = pyarrow.table({"id": list(range(len(TEXTS))), "text": TEXTS})
    pyarrow.parquet.write_table(table, tmp_path / "d.parquet", row_group_size=150)
    return tmp_path


@pytest.mark.parametrize("name", ["a.jsonl", "b.jsonl.gz", "c.jsonl.zst", "d.parquet", "hf://{folder}/a.jsonl"])
def test_every_format_gives_the_same_documents(folder: Path, name: str, small_spans: None) -> None:
    word = name.format(folder=folder) if name.startswith("hf") else str(folder / name)
    assert read_all([word]) == [TEXTS]


def test_a_directory_through_datasets(folder: Path) -> None:
    (folder / "set").mkdir()
    (folder / "set" / "train.jsonl").write_bytes(CONTENT)
    (folder / "set" / "test.jsonl").write_text('{"id": 0, "text": "only"}\n')
    assert read_all([f"hf://{folder}/set"]) == [TEXTS]
    assert read_all([f"hf://{folder}/set@test"], Reading(("text", "id"), texts_only=False)) == [["only"], [0]]
    with pytest.raises(UserError, match=r"no column body \(columns found: id, text\)"):
        read_all([f"hf://{folder}/set"], Reading(("body",)))
    with pytest.raises(UserError, match="hf://.*@dev: datasets cannot open it"):
        read_all([f"hf://{folder}/set@dev"])
    (folder / "torn").mkdir()
    (folder / "torn" / "train.jsonl").write_text('{"text": "whole"}\n{torn\n')
    with pytest.raises(UserError, match="hf://.*torn: datasets cannot read it"):
        read_all([f"hf://{folder}/torn"])


def test_a_name_on_the_hub_without_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **others: object) -> None:
        raise OSError("no network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    with pytest.raises(ConnectionError, match="hf://nobody/nothing:en@train: datasets cannot open it .*hf:///PATH"):
        read_all(["hf://nobody/nothing:en@train"])
    with pytest.raises(UserError, match=r"expected hf://NAME\[:CONFIG\]\[@SPLIT\]"):
        find_sources(["hf://"], Reading())


class Timeout(Exception):
    """An error of an HTTP library, without a known base class."""

    __module__ = "httpx2._exceptions"


def answered(status: int) -> Exception:
    response = requests.Response()
    response.status_code = status
    return requests.HTTPError(response=response)


def caused_by(error: Exception) -> Exception:
    """Return an error of a library that hides its cause."""
    try:
        try:
            raise error
        except Exception:
            raise ValueError("torn") from None
    except ValueError as wrapped:
        return wrapped


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ConnectionResetError(errno.ECONNRESET, "reset"), True),
        (OSError(errno.ESTALE, "stale"), True),
        (TimeoutError(), True),
        (requests.ConnectionError(), True),
        (huggingface_hub.errors.LocalEntryNotFoundError("cannot locate"), True),
        (Timeout(), True),
        (answered(503), True),
        (answered(429), True),
        (answered(404), False),
        (huggingface_hub.errors.HFValidationError("a/b/c"), False),
        (FileNotFoundError(errno.ENOENT, "none"), False),
        (OSError("a reader's word for damage"), False),
        (EOFError(), False),
    ],
)
def test_network_errors_are_distinguished_from_content_errors(error: Exception, expected: bool) -> None:
    assert _is_network_error(error) == _is_network_error(caused_by(error)) == expected


def test_structured_values_fill_groups(tmp_path: Path, small_spans: None) -> None:
    messages = [[{"role": "user", "content": text}, {"role": "assistant", "content": "ja"}] for text in TEXTS]
    lines = "".join(json.dumps({"messages": value}) + "\n" for value in messages)
    (tmp_path / "a.jsonl").write_text(lines * 4)
    reading = Reading(("messages",), texts_only=False)
    word = f"hf://{tmp_path}/a.jsonl"
    assert read_all([word], reading) == [messages * 4]
    blocks = [block for group in group_blocks(find_sources([word], reading), reading) for _, block in group]
    assert len(list(group_blocks(find_sources([word], reading), reading))) == len(blocks) > 5
    size = len("".join(json.dumps(value, ensure_ascii=False) for value in messages)) * 4
    assert sum(block.text_bytes for block in blocks) == pytest.approx(size, rel=0.1)


def test_patterns_are_sorted_and_expanded(folder: Path) -> None:
    names = [source.name for source in find_sources([f"{folder}/[ab].*", str(folder / "d.parquet")], Reading())]
    assert names == [str(folder / name) for name in ("a.jsonl", "b.jsonl.gz", "d.parquet")]
    (folder / "w[1].txt").write_text("odd name")
    assert read_all([str(folder / "w[1].txt")]) == [["odd name"]]
    with pytest.raises(UserError, match=r"--input .*\*\.json: no file matches"):
        find_sources([f"{folder}/*.json"], Reading())


def test_sources_read_concurrently_keep_their_order(folder: Path, small_spans: None) -> None:
    (folder / "other.jsonl.gz").write_bytes(gzip.compress(b'{"text": "other"}\n' * 900))
    inputs: list[str | Path] = [folder / name for name in ("b.jsonl.gz", "other.jsonl.gz", "c.jsonl.zst", "d.parquet")]
    for side_by_side in (1, 2, 7):
        assert read_all(inputs, side_by_side=side_by_side) == [TEXTS + ["other"] * 900 + TEXTS * 2]


def test_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(CONTENT)))
    assert read_all(["-"]) == [TEXTS]
    with pytest.raises(UserError, match="standard input can be read only once"):
        find_sources(["-", "-"], Reading())


@pytest.mark.parametrize("side_by_side", [1, 2])
@pytest.mark.parametrize("name", ["b.jsonl.gz", "c.jsonl.zst"])
def test_a_damaged_file_is_reported(folder: Path, name: str, side_by_side: int) -> None:
    whole = (folder / name).read_bytes()
    for content in (whole[:-20], b"no such format" * 100, whole[:50] + b"\x99" * 50 + whole[100:]):
        (folder / name).write_bytes(content)
        with pytest.raises(UserError, match=rf"{name}: damaged, or not (gzip|Zstandard)"):
            read_all([folder / name], side_by_side=side_by_side)


def test_a_read_error_is_not_reported_as_damage(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(gzip.GzipFile, "read", fail)
    with pytest.raises(OSError, match=r"Input/output error: '.*b\.jsonl\.gz'"):
        read_all([folder / "b.jsonl.gz"])


def cut_parquet(path: Path, texts: list[str], monkeypatch: pytest.MonkeyPatch) -> list[RowGroup]:
    """Return the blocks of a file with two row groups, in parts of about 1000 bytes."""
    table = pyarrow.table({"text": texts})
    pyarrow.parquet.write_table(table, path, row_group_size=-(-len(texts) // 2), use_dictionary=False)
    monkeypatch.setattr("megatron_ladder.data.reading.parquet.GROUP_BYTES", 1000)
    blocks = list(ParquetFile(path).blocks(Reading()))
    assert all(isinstance(block, RowGroup) for block in blocks)
    return blocks  # type: ignore[return-value]


def texts_of(block: Block) -> list[str]:
    (texts,) = block.read(Reading()).columns
    return texts


def test_a_large_row_group_is_divided(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = []
    open_file = pyarrow.parquet.ParquetFile

    def counted(path: Path, **others: object) -> object:
        opened.append(path)
        return open_file(path, **others)

    blocks = cut_parquet(folder / "e.parquet", TEXTS, monkeypatch)
    assert len(blocks) > 20 and [block.number for block in blocks] == sorted(block.number for block in blocks)
    monkeypatch.setattr(pyarrow.parquet, "ParquetFile", counted)
    parts = [texts_of(block) for block in blocks]
    assert len(opened) == 2, "rows in order are decoded once"
    assert [text for part in parts for text in part] == TEXTS
    assert 1000 <= max(sum(len(text.encode()) for text in part) for part in parts) < 3000
    assert [texts_of(block) for block in blocks[::-1]] == parts[::-1]
    metadata = open_file(folder / "e.parquet").metadata
    for number in range(2):
        column = metadata.row_group(number).column(0)
        shares = [(block.text_bytes, block.file_bytes) for block in blocks if block.number == number]
        assert tuple(map(sum, zip(*shares, strict=True))) == (
            column.total_uncompressed_size,
            column.total_compressed_size,
        )


def test_a_rewritten_file_is_read_from_its_beginning(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = cut_parquet(folder / "e.parquet", TEXTS, monkeypatch)
    assert texts_of(before[0]) == TEXTS[: len(before[0].rows)]
    # The same number of rows and parts.
    after = cut_parquet(folder / "e.parquet", [text.upper() for text in TEXTS], monkeypatch)
    rows = after[1].rows
    assert rows == before[1].rows and texts_of(after[1]) == [text.upper() for text in TEXTS[rows.start : rows.stop]]


def test_a_column_with_a_dot_in_its_name_has_a_size(folder: Path) -> None:
    table = pyarrow.table({"text.raw": TEXTS, "text.rawest": TEXTS, "talk": [[{"content": text}] for text in TEXTS]})
    pyarrow.parquet.write_table(table, folder / "e.parquet", use_dictionary=False)
    assert read_all([folder / "e.parquet"], Reading(("text.raw",))) == [TEXTS]
    sizes = [
        sum(block.text_bytes for block in ParquetFile(folder / "e.parquet").blocks(Reading((key,))))
        for key in ("text.raw", "talk")
    ]
    assert sizes == pytest.approx([sum(len(text.encode()) + 4 for text in TEXTS)] * 2, rel=0.02)


def test_damaged_parquet_is_reported(folder: Path) -> None:
    content = bytearray((folder / "d.parquet").read_bytes())
    column = pyarrow.parquet.ParquetFile(folder / "d.parquet").metadata.row_group(1).column(1)
    begin = column.dictionary_page_offset or column.data_page_offset
    content[begin + 40 : begin + 400] = b"\xff" * 360
    (folder / "d.parquet").write_bytes(content)
    reading = Reading()
    blocks = list(find_sources([folder / "d.parquet"], reading)[0].blocks(reading))
    assert texts_of(blocks[0]) == TEXTS[:150]
    for _ in range(2):
        with pytest.raises(WrongInputError, match=r"d\.parquet: row group 1: damaged \(.+\)"):
            blocks[1].read(reading)


def test_a_read_error_of_parquet_is_not_reported_as_damage(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (source,) = find_sources([folder / "d.parquet"], Reading())
    block = next(source.blocks(Reading()))

    def fail(*arguments: object, **others: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(pyarrow.parquet, "ParquetFile", fail)
    with pytest.raises(OSError, match="Input/output error"):
        block.read(Reading())
    monkeypatch.setattr(pyarrow.parquet, "read_schema", fail)
    with pytest.raises(OSError, match="Input/output error"):
        find_sources([folder / "d.parquet"], Reading())


def not_utf8(values: list[bytes]) -> pyarrow.Array:
    return pyarrow.array(values, pyarrow.binary()).view(pyarrow.string())


def test_rows_that_are_not_utf8_are_bad_records(tmp_path: Path) -> None:
    texts = [b"one", b"two \xff", b"three", b"\xe6\x97"]
    contents = pyarrow.StructArray.from_arrays([not_utf8(texts)], ["content"])
    messages = pyarrow.ListArray.from_arrays(pyarrow.array([0, 1, 2, 3, 4], pyarrow.int32()), contents)
    pyarrow.parquet.write_table(pyarrow.table({"text": not_utf8(texts), "messages": messages}), tmp_path / "a.parquet")
    for key, expected in (("text", ["one", "three"]), ("messages", [[{"content": "one"}], [{"content": "three"}]])):
        reading = Reading((key,), texts_only=key == "text", max_bad=9)
        (block,) = ParquetFile(tmp_path / "a.parquet").blocks(reading)
        parsed = block.read(reading)
        assert (parsed.columns, parsed.records, parsed.numbers) == ((expected,), 4, (0, 2))
        assert [bad.number for bad in parsed.bad] == [1, 3]
        assert parsed.bad[0].reason == f"byte 0xff under {key!r} is not UTF-8 (invalid start byte)"


def test_a_file_that_lacks_a_column(folder: Path) -> None:
    with pytest.raises(UserError, match=r"d\.parquet: no column body \(columns found: id, text\)"):
        find_sources([folder / "d.parquet"], Reading(("text", "body")))
    (folder / "d.parquet").write_bytes(b"x" * 100)
    with pytest.raises(UserError, match=r"d\.parquet: not a Parquet file"):
        find_sources([folder / "d.parquet"], Reading())


def test_a_missing_library_is_reported(folder: Path) -> None:
    script = (
        "import sys; sys.modules.update({name: None for name in ('pyarrow', 'backports', 'compression', 'datasets')})\n"
        "from megatron_ladder.data.reading.find import find_sources\n"
        "from megatron_ladder.data.reading.protocol import Reading\n"
        "for word in sys.argv[1:]:\n"
        "    try: next(find_sources([word], Reading())[0].blocks(Reading()))\n"
        "    except Exception as error: print(error)\n"
    )
    words = [str(folder / "d.parquet"), str(folder / "c.jsonl.zst"), f"hf://{folder}"]
    done = subprocess.run([sys.executable, "-c", script, *words], capture_output=True, text=True, env=environment())
    lines = done.stdout.splitlines()
    assert [line.rpartition("pip install ")[2] for line in lines] == ["pyarrow", "backports.zstd", "datasets"]


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[3])}


LINES = [
    b'{"text": "a"}',
    b'{"text": "b", "text": "twice"}',
    b'{"text": "\\ud83c\\udf89 \\u0000"}',
    b'{"text": "x", "n": NaN}',
    b'{"text": "x", "n": "\\ud800"}',
    b'{"te\\u0078t": "escaped key"}',
    b'{"text": "a"} {"text": "b"}',
    b'{"text":',
    b'{"text": "x", "n": "\xff"}',
    b'{"text": "\xed\xa0\x80"}',
    b'{"text": "\\ud83c"}',
    b'{"text": 1}',
    b'["text"]',
    b'{"text": "tab\there"}',
    b'{"text": "x", "n": 01}',
    b"  \t",
    b"",
    b'{"text": "crlf"}\r',
]


@pytest.mark.parametrize("line", LINES)
def test_blocks_are_parsed_like_single_lines(line: bytes) -> None:
    """Compare a block around one line with the result of Python's decoder for each line."""
    parsed = _parse_lines(b'{"text": "before"}\n' + line + b'\n{"text": "after"}', Reading(max_bad=9))
    expected = text_of(line)
    texts = ["before", "after"] if expected is None else ["before", expected, "after"]
    assert parsed.columns == (texts,) and parsed.records == 3
    is_bad = expected is None and bool(line.strip())
    assert [record.number for record in parsed.bad] == [1] * is_bad


def text_of(line: bytes) -> str | None:
    try:
        text = json.loads(line.decode())["text"]
        return text.encode().decode()
    except (ValueError, TypeError, AttributeError):
        return None


@pytest.mark.parametrize("filler", [b"z", b"zz ", " \u00e9\u65e5".encode(), "\u65e5".encode()])
@pytest.mark.parametrize("place", [0, 1, 2, 3, 9_000])
@pytest.mark.parametrize("wrong", [b"\xff", b"\xe6\x97", b"\xe6\x97 "])
def test_invalid_utf8_is_found_anywhere(
    filler: bytes, place: int, wrong: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test a key that is not read, which msgspec skips, with characters across any boundary."""
    notes = b"z" * place + filler * 5_000
    good = b'{"text": "a", "note": "' + notes + b'"}\n'
    bad = b'{"text": "b", "note": "' + notes + wrong + notes + b'"}\n'
    parsed = _parse_lines(good + bad + good, Reading(max_bad=9))
    assert parsed.columns == (["a", "a"],)
    assert [(record.number, "is not UTF-8" in record.reason) for record in parsed.bad] == [(1, True)]
    # Valid content is not read again.
    monkeypatch.delattr("megatron_ladder.data.reading.files._parse_line")
    assert _parse_lines(good * 3, Reading()).columns == (["a"] * 3,)


def test_an_object_on_two_lines_is_rejected() -> None:
    parsed = _parse_lines(b'{"text":\n"a"}\n', Reading(max_bad=9))
    assert parsed.columns == ([],) and [record.number for record in parsed.bad] == [0, 1]


def test_a_huge_line_is_never_in_memory(tmp_path: Path, small_spans: None) -> None:
    reading = Reading(max_bytes=10_000, max_bad=9)
    lines = [json.dumps({"text": "y" * size}) for size in (10, 2000, 40_000, 10, 9_000, 12_000, 10)]
    content = "\n".join(lines).encode()
    (tmp_path / "a.jsonl").write_bytes(content)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(content))
    for name in ("a.jsonl", "b.jsonl.gz"):
        (source,) = find_sources([tmp_path / name], reading)
        records, bad, texts = 0, [], []
        for block in source.blocks(reading):
            parsed = block.read(reading)
            bad += [(source.place(records + record.number)[-1], record.reason[:5]) for record in parsed.bad]
            records += parsed.records
            texts += parsed.columns[0]
            assert isinstance(block, HugeLine) or block.text_bytes < 20_000
        assert bad == [("3", "40,01"), ("6", "12,01")]
        assert ([len(text) for text in texts], records) == ([10, 2000, 10, 9000, 10], 7)


def test_blocks_of_a_stream_are_whole_lines(small_spans: None) -> None:
    cuts = list(_cut_lines(io.BytesIO(CONTENT), 1 << 20))
    contents = [cut.content for cut in cuts if not isinstance(cut, HugeLine)]
    assert len(contents) == len(cuts) > 10 and b"".join(contents) == CONTENT
    assert all(content.endswith(b"\n") for content in contents)

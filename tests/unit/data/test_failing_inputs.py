"""Progress that preprocessing keeps if its input, the network or the file system fails."""

import errno
import fcntl
import gzip
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import requests

from megatron_ladder.data.indexed import IndexedDataset
from megatron_ladder.data.partial import Partial
from megatron_ladder.data.preprocess import PreprocessOptions, _InputPosition, preprocess
from megatron_ladder.data.reading.protocol import Reading
from megatron_ladder.data.tokenizers import ByteTokenizer
from megatron_ladder.errors import ExitCode, UserError, exit_code_of

TEXTS = [f"document {number} of some" for number in range(3000)]
HUB = "hf://nobody/texts"
KEPT = "run the same command again to resume;"


@pytest.fixture(autouse=True)
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("files.SPAN_BYTES", "find.GROUP_BYTES", "parquet.GROUP_BYTES"):
        monkeypatch.setattr(f"megatron_ladder.data.reading.{name}", 2000)
    monkeypatch.setattr("megatron_ladder.data.preprocess._COMMIT_SECONDS", 0)


def run(folder: Path, inputs: Sequence[Path | str], reported: list[str], **reading: int) -> list[str]:
    """Preprocess bytes and return the documents; messages are appended to `reported`."""
    options = PreprocessOptions(report=reported.append)
    preprocess(inputs, folder / "out", ByteTokenizer(), False, Reading(**reading), options)
    dataset = IndexedDataset(folder / "out_text_document")
    return [bytes(dataset.document(number).tolist()).decode() for number in range(len(dataset))]


def write_lines(path: Path, texts: list[str]) -> Path:
    content = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def answered(status: int) -> Exception:
    response = requests.Response()
    response.status_code = status
    return requests.HTTPError(response=response)


class Hub:
    """A data set of the hub: `datasets.load_dataset` and its result."""

    column_names = None

    def __init__(self) -> None:
        self.fails_to_open: Exception | None = None
        self.fails_to_read: Exception | None = None

    def load_dataset(self, *arguments: object, **others: object) -> "Hub":
        if self.fails_to_open is not None:
            raise self.fails_to_open
        return self

    def select_columns(self, names: list[str]) -> "Hub":
        return self

    def iter(self, rows: int) -> Iterator[dict[str, Any]]:
        for begin in range(0, len(TEXTS), rows):
            if begin > len(TEXTS) // 2 and self.fails_to_read is not None:
                raise self.fails_to_read
            yield {"text": TEXTS[begin : begin + rows]}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    hub = Hub()
    monkeypatch.setattr("datasets.load_dataset", hub.load_dataset)
    return hub


def test_progress_survives_a_network_failure(tmp_path: Path, hub: Hub) -> None:
    reported: list[str] = []
    hub.fails_to_read = ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")
    with pytest.raises(ConnectionError, match=f"--input {HUB}: datasets cannot read it .*the same command") as caught:
        run(tmp_path, [HUB], reported)
    assert exit_code_of(caught.value) == ExitCode.INTERNAL and KEPT in reported[-1]
    hub.fails_to_open = TimeoutError("the hub does not answer")
    for _ in range(2):
        with pytest.raises(ConnectionError, match=f"--input {HUB}: datasets cannot open it .*the same command"):
            run(tmp_path, [HUB], reported)
    # The hub does not list it any more, which may be temporary.
    hub.fails_to_open = FileNotFoundError("doesn't exist on the Hub or cannot be accessed")
    with pytest.raises(UserError, match="datasets cannot open it"):
        run(tmp_path, [HUB], reported)
    hub.fails_to_open = hub.fails_to_read = None
    reported.clear()
    assert run(tmp_path, [HUB], reported) == TEXTS
    assert any(line.startswith("resuming after") for line in reported)


def test_wrong_content_on_the_hub_leaves_no_files(tmp_path: Path, hub: Hub) -> None:
    hub.fails_to_read = ValueError("JSON parse error")
    with pytest.raises(UserError, match="datasets cannot read it .ValueError: JSON parse error"):
        run(tmp_path, [HUB], [])
    assert os.listdir(tmp_path) == []


def test_progress_survives_errors_other_than_wrong_input(tmp_path: Path, hub: Hub) -> None:
    reported: list[str] = []
    hub.fails_to_read = PermissionError("the token is out of date")
    with pytest.raises(UserError, match="the token is out of date"):
        run(tmp_path, [HUB], reported)
    assert KEPT in reported[-1]
    hub.fails_to_read = None
    assert run(tmp_path, [HUB], reported) == TEXTS and any(line.startswith("resuming after") for line in reported)


def test_progress_survives_a_read_error_of_a_compressed_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_lines(tmp_path / "a.jsonl.gz", TEXTS)
    read, left = gzip.GzipFile.read, [20]

    def fail(self: gzip.GzipFile, size: int | None = -1) -> bytes:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ESTALE, "Stale file handle")
        return read(self, size)

    reported: list[str] = []
    with monkeypatch.context() as patched:
        patched.setattr(gzip.GzipFile, "read", fail)
        with pytest.raises(RuntimeError, match=r"a\.jsonl\.gz: Stale file handle"):
            run(tmp_path, [path], reported)
    assert KEPT in reported[-1]
    assert run(tmp_path, [path], reported) == TEXTS and any(line.startswith("resuming after") for line in reported)


def test_a_damaged_row_group_leaves_no_files(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": TEXTS}), path, row_group_size=1000, compression="gzip")
    assert run(tmp_path, [path], []) == TEXTS
    content = bytearray(path.read_bytes())
    begin = pyarrow.parquet.ParquetFile(path).metadata.row_group(2).column(0).data_page_offset
    content[begin + 50 : begin + 500] = b"\xff" * 450
    path.write_bytes(content)
    for name in os.listdir(tmp_path):
        if name != "a.parquet":
            (tmp_path / name).unlink()
    with pytest.raises(UserError, match=r"a\.parquet: row group 2: damaged"):
        run(tmp_path, [path], [])
    assert os.listdir(tmp_path) == ["a.parquet"]


def test_rows_that_are_not_utf8_can_be_skipped(tmp_path: Path) -> None:
    values = [text.encode() for text in TEXTS]
    values[1500] = b"\xff"
    column = pyarrow.array(values, pyarrow.binary()).view(pyarrow.string())
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), tmp_path / "a.parquet", row_group_size=1000)
    reported: list[str] = []
    with pytest.raises(UserError, match=r"a\.parquet: row 1500: byte 0xff under 'text' is not UTF-8"):
        run(tmp_path, [tmp_path / "a.parquet"], reported)
    assert run(tmp_path, [tmp_path / "a.parquet"], reported, max_bad=1) == TEXTS[:1500] + TEXTS[1501:]


@pytest.mark.parametrize("reason", [errno.ENOSYS, errno.ENOLCK])
def test_a_file_system_without_locks_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: int) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError(reason, os.strerror(reason))

    monkeypatch.setattr(fcntl, "flock", refuse)
    reported: list[str] = []
    assert run(tmp_path, [write_lines(tmp_path / "a.jsonl", TEXTS[:9])], reported) == TEXTS[:9]
    assert any(f"this file system has no locks ({os.strerror(reason)})" in line for line in reported)


def test_the_journal_lists_skipped_records_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_lines(tmp_path / "a.jsonl", TEXTS)
    lines = path.read_bytes().split(b"\n")
    lines[::3] = [b"oops"] * len(lines[::3])
    path.write_bytes(b"\n".join(lines))
    take, stop_at = _InputPosition.advance, [10]

    def interrupted(self: _InputPosition, *arguments: Any) -> list[str]:
        reported = take(self, *arguments)
        if self.groups == stop_at[0]:
            raise KeyboardInterrupt
        return reported

    monkeypatch.setattr(_InputPosition, "advance", interrupted)
    folder = tmp_path / ".out.partial"
    for stopped in (10, 20):
        stop_at[0] = stopped
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path, [path], [], max_bad=2000)
        journal = (folder / "journal").read_bytes()
        assert b"oops" not in journal and b"not JSON" not in journal and len(journal) < 600 * stopped
        skipped = (folder / "skipped").read_text().splitlines()
        assert len(skipped) == json.loads(journal.splitlines()[-1])["place"]["skipped"] > 100
        assert skipped[:2] == [f"{path}:{line}: not JSON: Expecting value at column 1" for line in (1, 4)]
        assert len(set(skipped)) == len(skipped)
    (folder / "skipped").write_text("other lines")
    stop_at[0] = -1
    reported: list[str] = []
    assert run(tmp_path, [path], reported, max_bad=2000) == [text for place, text in enumerate(TEXTS) if place % 3]
    assert any("are damaged: starting from scratch" in line for line in reported)


def test_an_error_before_any_progress_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Partial, *arguments: object, **others: object) -> None:
        raise UserError("--tokenizer-model: changed while it was used")

    monkeypatch.setattr(Partial, "commit", refuse)
    path = write_lines(tmp_path / "a.jsonl", TEXTS)
    with pytest.raises(UserError, match="changed while it was used"):
        run(tmp_path, [path], [])
    assert os.listdir(tmp_path) == ["a.jsonl"]

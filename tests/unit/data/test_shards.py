import gzip
import json
import pickle
import re
from pathlib import Path
from unittest import mock

import datasets
import msgspec
import pyarrow
import pyarrow.parquet
import pytest
from datasets.formatting.formatting import PythonFormatter

from megatron_ladder.data import streaming
from megatron_ladder.data.reading import lines as lines_module
from megatron_ladder.data.reading.protocol import Block
from megatron_ladder.data.streaming import StreamInput, find_input
from tests.helpers.operations import Operations
from tests.helpers.tokens import write_lines


def texts_of(inputs: list[Path | str], first: int = 0) -> list[list[str]]:
    """Return the texts of each shard."""
    shards, _ = find_input(list(map(str, inputs)), "text")
    return [[text for block in shard.blocks(first) for text in texts_in(block)] for shard in shards]


def texts_in(block: Block) -> list[str]:
    return [text for (text,) in block.read().records]


TEXTS = [f"text {number} " + "x" * (number * 37 % 400) for number in range(500)]


@pytest.mark.parametrize("least", [1, 64, 1 << 12, 1 << 30])
def test_shards_contain_every_line_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, least: int) -> None:
    monkeypatch.setattr(streaming, "_MIN_BYTES", least)
    path = write_lines(tmp_path / "a.jsonl", TEXTS)
    path.write_bytes(path.read_bytes().removesuffix(b"\n"))
    parts = texts_of([path])
    assert [text for part in parts for text in part] == TEXTS
    wanted = min(path.stat().st_size / least, streaming._ENOUGH_SHARDS)
    assert wanted / 1.1 <= len(parts) <= wanted + 2


def test_every_format(tmp_path: Path) -> None:
    table = pyarrow.table({"text": TEXTS[:100]})
    pyarrow.parquet.write_table(table, tmp_path / "b.parquet", row_group_size=30)
    write_lines(tmp_path / "c.jsonl.gz", TEXTS[100:200])
    (tmp_path / "d.txt").write_text("a\nb")
    hub = tmp_path / "hub"
    hub.mkdir()
    for number in range(3):
        write_lines(hub / f"{number}.jsonl", TEXTS[200 + 10 * number : 210 + 10 * number])
    found = texts_of([str(tmp_path / "b.par*"), tmp_path / "c.jsonl.gz", tmp_path / "d.txt", f"hf://{hub}"])
    assert [len(part) for part in found] == [30, 30, 30, 10, 100, 1, 10, 10, 10]
    assert [text for part in found for text in part] == [*TEXTS[:200], "a\nb", *TEXTS[200:230]]
    assert all(list(shard.blocks(1)) == [] for shard in find_input([str(tmp_path / "b.parquet")], "text")[0])
    names = find_input([str(tmp_path / "b.parquet"), f"hf://{hub}"], "text")[1].shards
    assert len(set(names)) == len(names) and not any(str(tmp_path) in name for name in names[:4])


def test_one_rank_looks_for_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pickled input is enough to read every shard, without another look at a directory or question to the hub."""
    (tmp_path / "hub").mkdir()
    for number in range(3):
        path = tmp_path / "hub" / f"{number}.parquet"
        pyarrow.parquet.write_table(pyarrow.table({"text": TEXTS[:300]}), path, row_group_size=100)
    for name in ("a.jsonl", "b.jsonl.gz", "c.txt"):
        write_lines(tmp_path / name, TEXTS[:10])
    asked = [mock.Mock(wraps=asks) for asks in (datasets.load_dataset, datasets.load_dataset_builder)]
    monkeypatch.setattr(datasets, "load_dataset", asked[0])
    monkeypatch.setattr(datasets, "load_dataset_builder", asked[1])
    words = [f"hf://{tmp_path}/hub", *(f"{tmp_path}/{name}" for name in ("a.jsonl", "b.jsonl.gz", "c.txt"))]
    found, first = find_input(words, "text")
    before_a_process_group, in_one = msgspec.json.encode(first), pickle.dumps(found)
    operations = Operations(tmp_path, monkeypatch)
    shards = pickle.loads(in_one)
    assert msgspec.json.decode(before_a_process_group, type=StreamInput) == first
    assert not operations.of_thread
    assert tuple(shard.label for shard in shards) == first.shards
    blocks = [[texts_in(block) for block in shard.blocks(number)] for shard in shards for number in (0, 1)]
    assert blocks[:6] == [[TEXTS[:256], TEXTS[256:300]], [TEXTS[256:300]]] * 3
    assert [asks.call_count for asks in asked] == [1, 1]
    assert find_input(words, "text")[1] == first


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "jsonl.gz"])
def test_a_hub_shard_can_be_entered_in_its_middle(tmp_path: Path, kind: str) -> None:
    """Parts of 1000 rows are four blocks; previous row groups of Parquet are not read."""
    texts = [[f"{part} {number}" for number in range(1000)] for part in range(2)]
    for part in range(2):
        path = tmp_path / f"{part}.{kind}"
        if kind == "parquet":
            table = pyarrow.table({"id": [0] * 1000, "text": texts[part]})
            pyarrow.parquet.write_table(table, path, row_group_size=150)
        else:
            write_lines(path, texts[part])
    for part, shard in enumerate(find_input([f"hf://{tmp_path}"], "text")[0]):
        whole = list(shard.blocks(0))
        assert [texts_in(block) for block in whole] == [
            texts[part][begin : begin + 256] for begin in range(0, 1000, 256)
        ]
        for first in (1, 2, 3, 4, 5):
            decode = PythonFormatter.format_batch
            with mock.patch.object(PythonFormatter, "format_batch", autospec=True, side_effect=decode) as decoded:
                assert list(shard.blocks(first)) == whole[first:]
            assert sum(len(call.args[1]) for call in decoded.mock_calls) == max(0, 1000 - 256 * first)


def bad_places(inputs: list[Path | str], first: int = 0) -> list[str]:
    """Return locations and reasons of all bad records."""
    return [
        bad.reason
        for shard in find_input(list(map(str, inputs)), "text", 9)[0]
        for block in shard.blocks(first)
        for bad in block.read().bad
    ]


def test_bad_records_are_located_in_their_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines_module, "SPAN_BYTES", 1000)
    monkeypatch.setattr(streaming, "_MIN_BYTES", 20_000)
    lines = [json.dumps({"text": text}) for text in TEXTS]
    lines[3], lines[250], lines[499] = '{"text": 1}', "{", '{"body": ""}'
    content = "".join(f"{line}\n" for line in lines).encode()
    (tmp_path / "a.jsonl").write_bytes(content)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(content))
    for name in ("a.jsonl", "b.jsonl.gz"):
        found = bad_places([tmp_path / name])
        assert [place.partition(" ")[0] for place in found] == [f"{tmp_path}/{name}:{line}:" for line in (4, 251, 500)]
        assert "expected a text" in found[0] and "not JSON" in found[1] and "--streaming-key" in found[2]
    assert bad_places([tmp_path / "b.jsonl.gz"], first=5) == bad_places([tmp_path / "b.jsonl.gz"])[1:]
    monkeypatch.setattr(lines_module, "_LINES_COUNTED_BYTES", 0)
    (_, far, _) = bad_places([tmp_path / "a.jsonl"])
    found_at = re.match(r".*/a\.jsonl: line (\d+) after byte (\d+): not JSON", far)
    assert found_at and content[int(found_at[2]) :].split(b"\n")[int(found_at[1]) - 1] == b"{"

    table = pyarrow.table({"text": [None if number in (5, 71) else text for number, text in enumerate(TEXTS)]})
    (tmp_path / "set").mkdir()
    pyarrow.parquet.write_table(table, tmp_path / "set" / "c.parquet", row_group_size=30)
    for word in (tmp_path / "set" / "c.parquet", f"hf://{tmp_path}/set"):
        found = bad_places([word])
        assert [re.findall(r"row (\d+): expected a text", place) for place in found] == [["5"], ["71"]]
    assert bad_places([f"hf://{tmp_path}/set"], first=1) == []
    (tmp_path / "d.txt").write_bytes(b"a\n\xff")
    assert bad_places([tmp_path / "d.txt"])[0].startswith(f"{tmp_path}/d.txt:2: byte 0xff")

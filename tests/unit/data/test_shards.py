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


def texts_in(block: Block) -> list[str]:
    return [text for (text,) in block.read().records]


TEXTS = [f"text {number} " + "x" * (number * 37 % 400) for number in range(500)]


@pytest.mark.parametrize("least", [1, 64, 1 << 12, 1 << 30])
def test_shards_contain_every_line_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, least: int) -> None:
    monkeypatch.setattr(streaming, "_MIN_BYTES", least)
    path = write_lines(tmp_path / "a.jsonl", TEXTS)
    path.write_bytes(path.read_bytes().removesuffix(b"\n"))
    shards, _ = find_input([str(path)], "text")
    assert [text for shard in shards for block in shard.blocks() for text in texts_in(block)] == TEXTS
    wanted = min(path.stat().st_size / least, streaming._ENOUGH_SHARDS)
    assert wanted / 1.1 <= len(shards) <= wanted + 2


def test_one_rank_looks_for_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pickled input is enough to read every shard, without another look at a directory or question to the hub."""
    pyarrow.parquet.write_table(pyarrow.table({"text": TEXTS[:100]}), tmp_path / "a.parquet", row_group_size=30)
    write_lines(tmp_path / "b.jsonl", TEXTS[:10])
    write_lines(tmp_path / "c.jsonl.gz", TEXTS[:100])
    (tmp_path / "d.txt").write_text("a\nb")
    (tmp_path / "hub").mkdir()
    for number in range(3):
        path = tmp_path / "hub" / f"{number}.parquet"
        pyarrow.parquet.write_table(pyarrow.table({"text": TEXTS[number:300]}), path, row_group_size=100)
    asked = [mock.Mock(wraps=asks) for asks in (datasets.load_dataset, datasets.load_dataset_builder)]
    monkeypatch.setattr(datasets, "load_dataset", asked[0])
    monkeypatch.setattr(datasets, "load_dataset_builder", asked[1])
    words = [f"{tmp_path}/{name}" for name in ("a.par*", "b.jsonl", "c.jsonl.gz", "d.txt")] + [f"hf://{tmp_path}/hub"]
    found, first = find_input(words, "text")
    before_a_process_group, in_one = msgspec.json.encode(first), pickle.dumps(found)
    operations = Operations(tmp_path, monkeypatch)
    shards = pickle.loads(in_one)
    assert msgspec.json.decode(before_a_process_group, type=StreamInput) == first
    assert not operations.of_thread
    assert tuple(shard.label for shard in shards) == first.shards and len(set(first.shards)) == 10
    assert not any(str(tmp_path) in name for name in first.shards[:7])
    local = [*(TEXTS[begin : min(begin + 30, 100)] for begin in range(0, 100, 30)), TEXTS[:10], TEXTS[:100], ["a\nb"]]
    hub = [[TEXTS[number : number + 256], TEXTS[number + 256 : 300]] for number in range(3)]
    blocks = [[texts_in(block) for block in shard.blocks()] for shard in shards]
    assert blocks == [*([texts] for texts in local), *hub]
    assert [[texts_in(block) for block in shard.blocks(1)] for shard in shards] == [whole[1:] for whole in blocks]
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

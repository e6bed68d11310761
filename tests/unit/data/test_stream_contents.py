"""A resumed run of streamed texts detects changed input and names the source."""

import gzip
import json
import random
import re
import shutil
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from megatron_ladder.data.identity import data_changes
from megatron_ladder.data.streaming import StreamPlan, find_input

LINES = [json.dumps({"text": f"text {number} " + "x" * (number * 37 % 400)}) for number in range(200)]


def write(path: Path, seed: int) -> None:
    """Write the same lines in the order of the seed, with row groups as Parquet."""
    lines = random.Random(seed).sample(LINES, len(LINES))
    if path.suffix == ".parquet":
        table = pyarrow.table({"text": [json.loads(line)["text"] for line in lines]})
        pyarrow.parquet.write_table(
            table, path, row_group_size=200, compression="none", use_dictionary=False, write_statistics=False
        )
        return
    content = "".join(line + "\n" for line in lines).encode()
    path.write_bytes(gzip.compress(content, 0, mtime=0) if path.suffix == ".gz" else content)


def described(*words: object) -> dict[str, Any]:
    """Return the description for a checkpoint."""
    _, (shards, sources) = find_input(list(map(str, words)), "text")
    plan = StreamPlan(shards, 1, 7, 1, 10, 0, sources)
    kept: dict[str, Any] = json.loads(json.dumps({"tokenizer_sha256": None, "stream": plan.describe()}))
    return kept


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "parquet"])
@pytest.mark.parametrize("is_hub", [False, True])
def test_reordered_lines_are_detected(tmp_path: Path, kind: str, is_hub: bool) -> None:
    """Sizes are equal, and the other files are unchanged."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for name in "abc":
        write(folder / f"{name}.{kind}", 1)
    words = [f"hf://{folder}"] if is_hub else sorted(folder.iterdir())
    before, size = described(*words), (folder / f"b.{kind}").stat().st_size
    assert data_changes(before, described(*words)) == []
    write(folder / f"b.{kind}", 2)
    assert (folder / f"b.{kind}").stat().st_size == size
    (line,) = data_changes(before, described(*words))
    name = "texts" if is_hub else f"b.{kind}"
    assert re.fullmatch(rf"--streaming: sources {re.escape(name)} sample is 'xxh3_128:\w+', was 'xxh3_128:\w+'", line)


def test_moved_files_are_not_a_change(tmp_path: Path) -> None:
    (tmp_path / "set" / "more").mkdir(parents=True)
    write(tmp_path / "set" / "a.jsonl", 1)
    write(tmp_path / "set" / "more" / "b.jsonl", 2)
    write(tmp_path / "c.jsonl", 3)
    before = described(tmp_path / "c.jsonl", f"hf://{tmp_path}/set")
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    shutil.copytree(tmp_path / "set", moved / "set")
    shutil.copyfile(tmp_path / "c.jsonl", moved / "c.jsonl")
    assert data_changes(before, described(moved / "c.jsonl", f"hf://{moved}/set")) == []
    (moved / "set" / "README.md").write_text("no data")
    assert data_changes(before, described(moved / "c.jsonl", f"hf://{moved}/set")) == []

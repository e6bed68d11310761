"""A resumed run continues with the same samples, or reports what changed."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_ladder.config.sections import DataConfig
from megatron_ladder.data.identity import data_changes
from megatron_ladder.data.indexed import loss_mask_path
from megatron_ladder.data.loader import OrderOptions, open_sources
from megatron_ladder.data.streaming import StreamPlan, find_input
from tests.helpers.tokens import MakeDataset, write_documents, write_lines

LENGTHS = [7, 30, 2, 60]


def changes(stored: dict[str, Any], current: dict[str, Any]) -> list[str]:
    return list(map(str, data_changes(stored, current)))


def describe(*words: Any, split: str = "1") -> dict[str, Any]:
    """Return the description as read from a checkpoint."""
    sources = open_sources(DataConfig(data_path=words, split=split), OrderOptions(4, 1), ["train"])
    described: dict[str, Any] = json.loads(json.dumps({"tokenizer_sha256": "ab", "train": sources.train.describe()}))
    return described


def test_other_tokens_with_equal_counts_are_detected(make_dataset: MakeDataset) -> None:
    prefix = make_dataset(LENGTHS).prefix
    before = describe(prefix)
    write_documents(prefix, *np.split(np.arange(99)[::-1], np.cumsum(LENGTHS)[:-1]), dtype=np.int32)
    (line,) = changes(before, describe(prefix))
    assert line == f"--data-path {prefix}: tokens changed after the checkpoint"
    make_dataset(LENGTHS[::-1])
    (line,) = changes(before, describe(prefix))
    assert line == f"--data-path {prefix}: documents changed after the checkpoint"
    make_dataset([*LENGTHS, 1])
    assert changes(before, describe(prefix)) == [
        f"--data-path {prefix}: documents and tokens changed after the checkpoint"
    ]
    other = make_dataset([*LENGTHS, 9], "other").prefix
    assert changes(before, describe(other)) == [f"--data-path {other}: the checkpoint was trained with {prefix}"]
    assert changes(before, describe(other) | {"tokenizer_sha256": "cd"})[0].startswith("--tokenizer-model: ")


def test_changes_of_loss_mask_split_weights_and_data_sets(make_dataset: MakeDataset) -> None:
    a, b = make_dataset([10] * 10, "a").prefix, make_dataset([10] * 10, "b", vocab_size=100).prefix
    before = describe("0.3", a, "0.7", b, split="8,2")
    assert changes(before, describe("3", a, "7", b, split="8,2")) == []
    assert changes(before, describe("3", a, "6", b, split="8,2")) == [
        f"--data-path {a}: weight 1, in the checkpoint 3",
        f"--data-path {b}: weight 2, in the checkpoint 7",
    ]
    assert changes(before, describe("3", a, "7", b, split="9,1")) == [
        f"--data-path {prefix}: documents [0, 9], in the checkpoint [0, 8]" for prefix in (a, b)
    ]
    (line,) = changes(before, describe(a, split="8,2"))
    assert line == f"--data-path {a}: the checkpoint was trained with {a} {b}"
    swapped = changes(before, describe("3", b, "7", a, split="8,2"))
    assert swapped[0] == f"--data-path {b}: the checkpoint was trained with {a}"
    loss_mask_path(a).write_bytes(bytes([1]) * 100)
    (line,) = changes(before, describe("3", a, "7", b, split="8,2"))
    assert line == f"--data-path {a}: loss mask changed after the checkpoint"


TEXTS = [f"text {number} " + "x" * (number * 37 % 400) for number in range(200)]


def describe_streamed(*words: object) -> dict[str, Any]:
    """Return the description as read from a checkpoint."""
    _, (shards, sources) = find_input(list(map(str, words)), "text")
    plan = StreamPlan(shards, 1, 7, 1, 10, 0, sources)
    kept: dict[str, Any] = json.loads(json.dumps({"tokenizer_sha256": None, "stream": plan.describe()}))
    return kept


@pytest.mark.parametrize("is_hub", [False, True])
def test_reordered_lines_of_streamed_texts_are_detected(tmp_path: Path, is_hub: bool) -> None:
    """Sizes are equal, and the other files are unchanged."""
    files = [write_lines(tmp_path / f"{name}.jsonl", TEXTS) for name in "abc"]
    words = [f"hf://{tmp_path}"] if is_hub else files
    before = describe_streamed(*words)
    assert changes(before, describe_streamed(*words)) == []
    write_lines(files[1], TEXTS[::-1])
    (line,) = changes(before, describe_streamed(*words))
    name = tmp_path.name if is_hub else "b.jsonl"
    assert line == f"--streaming {name}: text changed after the checkpoint"
    if not is_hub:
        swapped = changes(before, describe_streamed(files[0], files[2], files[1]))
        assert swapped[0] == "--streaming c.jsonl: the checkpoint was trained with b.jsonl" and len(swapped) == 2


def test_moved_streamed_files_are_not_a_change(tmp_path: Path) -> None:
    here, moved = tmp_path / "here", tmp_path / "elsewhere"
    (here / "set" / "more").mkdir(parents=True)
    for name in ("c", "set/a", "set/more/b"):
        write_lines(here / f"{name}.jsonl", [name, *TEXTS])
    before = describe_streamed(here / "c.jsonl", f"hf://{here}/set")
    shutil.copytree(here, moved)
    assert changes(before, describe_streamed(moved / "c.jsonl", f"hf://{moved}/set")) == []
    (moved / "set" / "README.md").write_text("no data")
    assert changes(before, describe_streamed(moved / "c.jsonl", f"hf://{moved}/set")) == []

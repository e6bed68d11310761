"""A resumed run continues with the same samples, or reports what changed."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from megatron_ladder.config.sections import DataConfig
from megatron_ladder.data.identity import data_changes
from megatron_ladder.data.indexed import IndexedDatasetWriter, loss_mask_path
from megatron_ladder.data.loader import OrderOptions, open_sources
from tests.helpers.tokens import MakeDataset

LENGTHS = [7, 30, 2, 60]


def describe(*words: Any, split: str = "1") -> dict[str, Any]:
    """Return the description as read from a checkpoint."""
    sources = open_sources(DataConfig(data_path=words, split=split), OrderOptions(4, 1), ["train"])
    described: dict[str, Any] = json.loads(json.dumps({"tokenizer_sha256": "ab", "train": sources.train.describe()}))
    return described


def rewrite(prefix: Path, tokens: np.ndarray, lengths: list[int]) -> None:
    with IndexedDatasetWriter(prefix, np.dtype("<i4")) as writer:
        writer.add_documents(tokens, np.array(lengths, np.int32))
        writer.publish()


def test_other_tokens_with_equal_counts_are_detected(make_dataset: MakeDataset) -> None:
    prefix = make_dataset(LENGTHS).prefix
    before = describe(prefix)
    rewrite(prefix, np.arange(99)[::-1].copy(), LENGTHS)
    (line,) = data_changes(before, describe(prefix))
    assert line.startswith(f"--data-path: sets {prefix} content bin_sample is 'xxh3_128:")
    rewrite(prefix, np.arange(99), LENGTHS[::-1])
    (line,) = data_changes(before, describe(prefix))
    assert line.startswith(f"--data-path: sets {prefix} content idx_checksum is 'xxh3_128:")
    rewrite(prefix, np.arange(100), [*LENGTHS, 1])
    assert len(data_changes(before, describe(prefix))) == 5


def test_changes_of_loss_mask_split_weights_and_data_sets(make_dataset: MakeDataset) -> None:
    a, b = make_dataset([10] * 10, "a").prefix, make_dataset([10] * 10, "b", vocab_size=100).prefix
    before = describe("0.3", a, "0.7", b, split="8,2")
    assert data_changes(before, describe("3", a, "7", b, split="8,2")) == []
    assert data_changes(before, describe("3", a, "6", b, split="8,2")) == [
        f"--data-path: sets {a} weight is 1, was 3",
        f"--data-path: sets {b} weight is 2, was 7",
    ]
    assert data_changes(before, describe("3", a, "7", b, split="9,1")) == [
        f"--data-path: sets {prefix} documents is [0, 9], was [0, 8]" for prefix in (a, b)
    ]
    (line,) = data_changes(before, describe(a, split="8,2"))
    assert line.startswith("--data-path: sets is [{'prefix': ")
    swapped = data_changes(before, describe("3", b, "7", a, split="8,2"))
    assert swapped[0] == f"--data-path: sets {b} content dtype is 'uint16', was 'int32'"
    loss_mask_path(a).write_bytes(bytes([1]) * 100)
    (line,) = data_changes(before, describe("3", a, "7", b, split="8,2"))
    assert line.startswith(f"--data-path: sets {a} content loss_mask_sample is 'xxh3") and line.endswith("was None")

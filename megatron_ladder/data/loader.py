"""From token files to what one data-parallel rank computes in one optimizer step.

Token ids of a micro-batch are [b, s]: b = micro_batch_size, s = seq_length.
"""

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron_ladder.data.indexed import IndexedDataset
from megatron_ladder.data.samples import SampleRows, Samples, SampleSource, parse_split, split_documents
from megatron_ladder.data.sidecar import check_sidecar
from megatron_ladder.data.tokenizers import Tokenizer
from megatron_ladder.errors import UserError

PARTS = ("train", "valid", "test")


class MicroBatch(NamedTuple):
    """What one forward pass reads."""

    tokens: Tensor
    """[b, s] int64"""
    labels: Tensor
    """[b, s] int64: the token after each one"""
    loss_mask: Tensor | None
    """[b, s] float32, or None where every label counts"""


class GlobalBatchLoader(Iterator[list[MicroBatch]]):
    """Endless; each item is one optimizer step's micro-batches of this data-parallel rank.

    Sample k of a global batch belongs to accumulation step a, rank r and row i where
    k = (a * data_parallel_size + r) * micro_batch_size + i, as in Megatron: the layout decides who reads a
    sample, never which samples a global batch holds.
    """

    def __init__(
        self,
        source: Samples,
        seq_length: int,
        global_batch_size: int,
        micro_batch_size: int,
        data_parallel_rank: int,
        data_parallel_size: int,
        consumed_samples: int,
        vocab_size: int,
    ) -> None:
        """
        Args:
            consumed_samples: samples that all ranks together have read before; 0 for a new run.
            vocab_size: ids of the model's vocabulary, without padding.
        """
        if global_batch_size % (micro_batch_size * data_parallel_size):
            raise UserError(
                f"--global-batch-size {global_batch_size} is not a multiple of --micro-batch-size "
                f"{micro_batch_size} x data-parallel size {data_parallel_size}"
            )
        if seq_length != source.seq_length:
            raise ValueError(f"the source cuts samples of {source.seq_length} tokens, not of {seq_length}")
        self.source = source
        self.global_batch_size = global_batch_size
        self.micro_batch_size = micro_batch_size
        self.vocab_size = vocab_size
        self.consumed_samples = consumed_samples
        samples = np.arange(global_batch_size).reshape(-1, data_parallel_size, micro_batch_size)
        self._own_samples = samples[:, data_parallel_rank].reshape(-1)

    def __next__(self) -> list[MicroBatch]:
        """
        Raises:
            UserError: when the data holds a token id that the vocabulary lacks.
        """
        rows = self.source.samples(self.consumed_samples + self._own_samples)
        smallest, largest = int(rows.tokens.min()), int(rows.tokens.max())
        if smallest < 0 or largest >= self.vocab_size:
            raise UserError(
                f"{self.source.name}: holds token id {smallest if smallest < 0 else largest}, the "
                f"vocabulary has ids 0 to {self.vocab_size - 1}: give the --tokenizer-model with which "
                "the data was preprocessed"
            )
        self.consumed_samples += self.global_batch_size
        return [self._micro_batch(rows, begin) for begin in range(0, len(rows.tokens), self.micro_batch_size)]

    def _micro_batch(self, rows: SampleRows, begin: int) -> MicroBatch:
        chosen = slice(begin, begin + self.micro_batch_size)
        tokens = torch.from_numpy(rows.tokens[chosen].astype(np.int64))
        loss_mask = None
        if rows.loss_mask is not None:
            loss_mask = torch.from_numpy(rows.loss_mask[chosen, 1:].astype(np.float32))
        return MicroBatch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), loss_mask)


class Sources(NamedTuple):
    """Samples of each part; None where there is none. Only training is shuffled."""

    train: SampleSource | None
    valid: SampleSource | None
    test: SampleSource | None


def open_sources(
    data_path: Sequence[str | Path],
    train_data_path: Sequence[str | Path],
    valid_data_path: Sequence[str | Path],
    test_data_path: Sequence[str | Path],
    split: str,
    seq_length: int,
    seed: int,
    parts: Collection[str] = PARTS,
) -> Sources:
    """Opens either one data set cut by `split`, or one data set for each part.

    Args:
        data_path: one prefix (path without .bin and .idx), or nothing; so are the three after it.
        parts: what the run reads; a part that is left out is None and need not be long enough.

    Raises:
        UserError: missing or damaged files, both kinds of paths or none, no documents for training, a part
            that is too short for one sample.
    """
    own_paths = dict(zip(PARTS, (train_data_path, valid_data_path, test_data_path), strict=True))
    given = {"--data-path": data_path} | {f"--{part}-data-path": paths for part, paths in own_paths.items()}
    mistakes = [
        f"{flag} {' '.join(map(str, paths))}: one data set expected, {len(paths)} found: preprocess the "
        "texts together"
        for flag, paths in given.items()
        if len(paths) > 1
    ]
    if data_path and any(own_paths.values()):
        mistakes.append(
            "--data-path (cut by --split) excludes --train-data-path, --valid-data-path, --test-data-path"
        )
    if not data_path and "train" in parts and not train_data_path:
        mistakes.append("--data-path is required: the path of a data set without .bin and .idx")
    if mistakes:
        raise UserError(*mistakes)
    opened: dict[str, SampleSource] = {}
    cut = _cut(Path(data_path[0]), split) if data_path else _whole(own_paths, parts)
    for part, (dataset, documents) in cut.items():
        if part in parts and len(documents):
            opened[part] = SampleSource(
                dataset, documents, seq_length, seed, shuffle=part == "train", part=part
            )
    if "train" in parts and "train" not in opened:
        raise UserError(
            f"--split {split} leaves no document of {data_path[0]} for training: enlarge its share"
        )
    return Sources(*(opened.get(part) for part in PARTS))


def _cut(prefix: Path, split: str) -> dict[str, tuple[IndexedDataset, range]]:
    shares = parse_split(split)
    dataset = IndexedDataset(prefix)
    ranges = split_documents(shares, len(dataset))
    return {part: (dataset, documents) for part, documents in zip(PARTS, ranges, strict=True)}


def _whole(
    paths: dict[str, Sequence[str | Path]], parts: Collection[str]
) -> dict[str, tuple[IndexedDataset, range]]:
    datasets = {
        part: IndexedDataset(Path(given[0])) for part, given in paths.items() if given and part in parts
    }
    return {part: (dataset, range(len(dataset))) for part, dataset in datasets.items()}


def check_tokenizer(sources: Sources, tokenizer: Tokenizer) -> None:
    """Raises UserError when a data set's sidecar says that another tokenizer made it."""
    datasets = {source.dataset.prefix: source.dataset for source in sources if source is not None}
    for dataset in datasets.values():
        check_sidecar(dataset, tokenizer)

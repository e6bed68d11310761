"""From token files to what one data-parallel rank computes in one optimizer step.

Token ids of a micro-batch are [b, s]: b = micro_batch_size, s = seq_length.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron_ladder.data.blending import Blend, BlendedSource, parse_blend
from megatron_ladder.data.indexed import IndexedDataset
from megatron_ladder.data.megatron_order import megatron_source, split_sequences
from megatron_ladder.data.paths import PARTS, DataWords
from megatron_ladder.data.samples import SampleRows, Samples, SampleSource, parse_split, split_documents
from megatron_ladder.data.sidecar import check_index, check_sidecar
from megatron_ladder.data.tokenizers import Tokenizer
from megatron_ladder.errors import UserError


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


Source = SampleSource | BlendedSource


class Sources(NamedTuple):
    """Samples of each part; None where there is none. Only training is shuffled."""

    train: Source | None
    valid: Source | None
    test: Source | None

    @property
    def datasets(self) -> list[IndexedDataset]:
        """All data sets that are read, each once."""
        members = [member for source in self if source is not None for member in source.sources]
        return list({member.dataset.prefix: member.dataset for member in members}.values())


class OrderOptions(NamedTuple):
    """How samples are put in order."""

    seq_length: int
    seed: int
    cache: Path | None = None
    """Folder in which orders are kept; None: each process builds its own."""
    megatron_samples: int | None = None
    """Samples of the whole run, if training is to read them in Megatron's order, which depends on it."""


def open_sources(words: DataWords, split: str, order: OrderOptions, parts: Collection[str] = PARTS) -> Sources:
    """Opens either one blend of data sets, each cut by `split`, or one blend for each part.

    Args:
        words: for each flag `P`, `P1 P2 ...` or `W1 P1 W2 P2 ...` (path without .bin and .idx, weight), or nothing.
        parts: what the run reads; a part that is left out is None and need not be long enough.

    Raises:
        UserError: missing or damaged files, both kinds of paths or none, wrong weights, no documents for
            training, a part that is too short for one sample.
    """
    data_path, *own = words
    own_paths = dict(zip(PARTS, own, strict=True))
    mistakes: list[str] = []
    if data_path and any(own_paths.values()):
        mistakes.append(
            "--data-path (cut by --split) excludes --train-data-path, --valid-data-path, --test-data-path"
        )
    if not data_path and "train" in parts and not words.train:
        mistakes.append("--data-path is required: the path of a data set without .bin and .idx")
    given = {f"--{part}-data-path": own_paths[part] for part in PARTS if part in parts}
    if data_path:
        given = {"--data-path": data_path}
    blends: dict[str, Blend] = {}
    for flag, given_words in given.items():
        try:
            blends[flag] = parse_blend(flag, given_words)
        except UserError as error:
            mistakes.extend(error.mistakes)
    datasets = _open_all((prefix for blend in blends.values() for prefix in blend.prefixes), mistakes)
    if mistakes:
        raise UserError(*mistakes)
    shares = parse_split(split) if data_path else None
    opened: dict[str, Source] = {}
    for part in PARTS:
        flag = "--data-path" if data_path else f"--{part}-data-path"
        if part in parts and flag in blends:
            members = [datasets[prefix] for prefix in blends[flag].prefixes]
            source = _open_part(part, members, blends[flag].weights, shares, order, mistakes)
            if source is not None:
                opened[part] = source
    if "train" in parts and "train" not in opened and not mistakes:
        mistakes.append(f"--split {split} leaves no document of {data_path[-1]} for training: enlarge its share")
    if mistakes:
        raise UserError(*mistakes)
    return Sources(*(opened.get(part) for part in PARTS))


def _open_all(prefixes: Iterable[Path], mistakes: list[str]) -> dict[Path, IndexedDataset]:
    """Each data set opened once; a line in `mistakes` for each that cannot be."""
    datasets: dict[Path, IndexedDataset] = {}
    for prefix in dict.fromkeys(prefixes):
        try:
            datasets[prefix] = IndexedDataset(prefix)
            check_index(datasets[prefix])
        except UserError as error:
            mistakes.extend(error.mistakes)
    return datasets


def _open_part(
    part: str,
    datasets: Sequence[IndexedDataset],
    weights: Sequence[Fraction] | None,
    shares: tuple[float, float, float] | None,
    order: OrderOptions,
    mistakes: list[str],
) -> Source | None:
    """A part's share of some data sets, None where none of them has a document for it.

    Args:
        shares: of train, valid and test; None: the part has the data sets to itself.
    """
    if part == "train" and order.megatron_samples is not None:
        try:
            return megatron_source(
                datasets, weights, shares, order.seq_length, order.seed, order.megatron_samples, order.cache
            )
        except UserError as error:
            mistakes.extend(error.mistakes)
            return None
    sources, own_weights = [], []
    for position, dataset in enumerate(datasets):
        documents = _documents_of(part, dataset, shares, order)
        if not documents:
            continue
        try:
            source = SampleSource(dataset, documents, order.seq_length, order.seed, part == "train", part, order.cache)
        except UserError as error:
            mistakes.extend(error.mistakes)
            continue
        sources.append(source)
        own_weights.append(Fraction(len(source)) if weights is None else weights[position])
    if not sources or mistakes:
        return None
    return sources[0] if len(sources) == 1 else BlendedSource(sources, own_weights)


def _documents_of(
    part: str, dataset: IndexedDataset, shares: tuple[float, float, float] | None, order: OrderOptions
) -> range:
    if shares is None:
        return range(len(dataset))
    position = PARTS.index(part)
    if order.megatron_samples is None:
        return split_documents(shares, len(dataset))[position]
    # Where training takes sequences for documents, its part must not reach into another one.
    sequences = split_sequences(shares, len(dataset.sequence_bounds) - 1)[position]
    tokens = dataset.sequence_bounds[[sequences.start, sequences.stop]]
    begin, end = np.searchsorted(dataset.document_bounds, tokens).tolist()
    return range(begin, max(begin, end if tokens[1] == dataset.document_bounds[end] else end - 1))


def check_tokenizer(sources: Sources, tokenizer: Tokenizer) -> None:
    """Raises UserError when a data set's sidecar says that another tokenizer made it."""
    mistakes: list[str] = []
    for dataset in sources.datasets:
        try:
            check_sidecar(dataset, tokenizer)
        except UserError as error:
            mistakes.extend(error.mistakes)
    if mistakes:
        raise UserError(*mistakes)

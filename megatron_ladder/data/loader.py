"""From the paths of token files to their samples, for training, validation and test."""

from collections.abc import Collection, Iterable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import numpy as np

from megatron_ladder.data.blending import Blend, BlendedSource, parse_blend
from megatron_ladder.data.indexed import IndexedDataset
from megatron_ladder.data.megatron_order import megatron_source, split_sequences
from megatron_ladder.data.packing import LossOn, PackedSource, choose_labels, open_source
from megatron_ladder.data.paths import PARTS, DataWords
from megatron_ladder.data.samples import SampleSource, parse_split, split_documents
from megatron_ladder.data.sidecar import check_index, check_sidecar, read_sidecar
from megatron_ladder.data.tokenizers import Tokenizer
from megatron_ladder.errors import UserError

Source = SampleSource | PackedSource | BlendedSource


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
    loss_on: LossOn | None = None
    """Which tokens count as labels; see `open_source`."""


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
            refuse_conversations(datasets)
            apply_loss_on(datasets, order.loss_on)
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
            source = open_source(
                dataset, documents, order.seq_length, order.seed, part == "train", part, order.loss_on, order.cache
            )
        except UserError as error:
            mistakes.extend(error.mistakes)
            continue
        sources.append(source)
        own_weights.append(Fraction(len(source)) if weights is None else weights[position])
    if len({isinstance(source, PackedSource) for source in sources}) > 1:
        texts = [source.name for source in sources if not isinstance(source, PackedSource)]
        mistakes.append(
            f"--{part}-data-path or --data-path: {' '.join(texts)} hold texts, and the others conversations, which are "
            "packed whole: blend one kind"
        )
    if not sources or mistakes:
        return None
    return sources[0] if len(sources) == 1 else BlendedSource(sources, own_weights)


def refuse_conversations(datasets: Iterable[IndexedDataset]) -> None:
    """Raises UserError for data sets of conversations, which have no place in Megatron's order."""
    sidecars = {dataset.prefix: read_sidecar(dataset.prefix) for dataset in datasets}
    packed = [str(prefix) for prefix, sidecar in sidecars.items() if sidecar is not None and sidecar.conversations]
    if packed:
        raise UserError(
            f"--megatron-order: {' '.join(packed)} holds conversations, which are packed whole: leave the flag out"
        )


def apply_loss_on(datasets: Iterable[IndexedDataset], loss_on: LossOn | None) -> None:
    """Drops the loss masks of texts where every token counts.

    Raises:
        UserError: data sets that lack the loss mask that is asked for.
    """
    mistakes: list[str] = []
    for dataset in datasets:
        try:
            if choose_labels(dataset, loss_on) == "all":
                dataset.loss_mask = None
        except UserError as error:
            mistakes.extend(error.mistakes)
    if mistakes:
        raise UserError(*mistakes)


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

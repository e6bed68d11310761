"""From the paths of token files to samples for training, validation and test."""

from collections.abc import Collection, Iterable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import numpy as np

from megatron_ladder.data.blending import Blend, BlendedSource, parse_blend
from megatron_ladder.data.indexed import IndexedDataset
from megatron_ladder.data.megatron_order import megatron_source, split_sequences
from megatron_ladder.data.packing import LossOn, PackedSource, choose_labels, open_source
from megatron_ladder.data.paths import PARTS, DataArguments
from megatron_ladder.data.samples import SampleSource, parse_split, split_documents
from megatron_ladder.data.sidecar import check_index, check_sidecar, read_sidecar
from megatron_ladder.data.tokenizers import Tokenizer
from megatron_ladder.errors import ErrorCollector, UserError

DataSource = SampleSource | PackedSource | BlendedSource


class Sources(NamedTuple):
    """Samples of each part, or None. Only training is shuffled."""

    train: DataSource | None
    valid: DataSource | None
    test: DataSource | None

    @property
    def datasets(self) -> list[IndexedDataset]:
        """All data sets, each once."""
        members = [member for source in self if source is not None for member in source.sources]
        return list({member.dataset.prefix: member.dataset for member in members}.values())


class OrderOptions(NamedTuple):
    """What determines the order of samples."""

    seq_length: int
    seed: int
    cache: Path | None = None
    """Directory for cached orders; None: each process builds its own."""
    megatron_samples: int | None = None
    """Number of samples of the whole run if training uses Megatron's order, which depends on it."""
    loss_on: LossOn | None = None
    """The tokens that count as labels; see `choose_labels`."""


def open_sources(arguments: DataArguments, split: str, order: OrderOptions, parts: Collection[str] = PARTS) -> Sources:
    """Open either one blend of data sets, each of which is divided by `split`, or one blend for each part.

    Args:
        parts: the parts that the run reads; others are None and may be too short.

    Raises:
        UserError: missing or damaged files, both kinds of paths or none, invalid weights, no documents for training,
            or a part that is too short for one sample.
    """
    data_path = arguments.data_path
    own_paths = {part: getattr(arguments, part) for part in PARTS}
    errors = ErrorCollector()
    if data_path and any(own_paths.values()):
        errors.add("--data-path (divided by --split) excludes --train-data-path, --valid-data-path, --test-data-path")
    if not data_path and "train" in parts and not arguments.train:
        errors.add("--data-path is required: the path of a data set without .bin and .idx")
    given = {f"--{part}-data-path": own_paths[part] for part in PARTS if part in parts}
    if data_path:
        given = {"--data-path": data_path}
    blends: dict[str, Blend] = {}
    for flag, words in given.items():
        with errors.collect():
            blends[flag] = parse_blend(flag, words)
    datasets: dict[Path, IndexedDataset] = {}
    for prefix in dict.fromkeys(prefix for blend in blends.values() for prefix in blend.prefixes):
        with errors.collect():
            datasets[prefix] = IndexedDataset(prefix)
            check_index(datasets[prefix])
    errors.raise_if_any()
    shares = parse_split(split) if data_path else None
    opened: dict[str, DataSource] = {}
    for part in PARTS:
        flag = "--data-path" if data_path else f"--{part}-data-path"
        if part in parts and flag in blends:
            members = [datasets[prefix] for prefix in blends[flag].prefixes]
            with errors.collect():
                source = _open_part(part, members, blends[flag].weights, shares, order)
                if source is not None:
                    opened[part] = source
    errors.raise_if_any()
    if "train" in parts and "train" not in opened:
        raise UserError(f"--split {split} leaves no document of {data_path[-1]} for training: enlarge its share")
    return Sources(*(opened.get(part) for part in PARTS))


def _open_part(
    part: str,
    datasets: Sequence[IndexedDataset],
    weights: Sequence[Fraction] | None,
    shares: tuple[float, float, float] | None,
    order: OrderOptions,
) -> DataSource | None:
    """Return a part's share of some data sets, or None if none of them has a document for it.

    Args:
        shares: shares of train, valid and test; None: the whole data sets belong to the part.
    """
    if part == "train" and order.megatron_samples is not None:
        _reject_conversations(datasets)
        _apply_loss_on(datasets, order.loss_on)
        return megatron_source(
            datasets, weights, shares, order.seq_length, order.seed, order.megatron_samples, order.cache
        )
    errors = ErrorCollector()
    sources, own_weights = [], []
    for position, dataset in enumerate(datasets):
        documents = _documents_of(part, dataset, shares, order)
        if not documents:
            continue
        with errors.collect():
            source = open_source(
                dataset, documents, order.seq_length, order.seed, part == "train", part, order.loss_on, order.cache
            )
            sources.append(source)
            own_weights.append(Fraction(len(source)) if weights is None else weights[position])
    if len({isinstance(source, PackedSource) for source in sources}) > 1:
        texts = [source.name for source in sources if not isinstance(source, PackedSource)]
        errors.add(
            f"--{part}-data-path or --data-path: {' '.join(texts)} contain texts, the others contain conversations, "
            "which are packed whole: blend only one kind"
        )
    errors.raise_if_any()
    if not sources:
        return None
    return sources[0] if len(sources) == 1 else BlendedSource(sources, own_weights)


def _reject_conversations(datasets: Iterable[IndexedDataset]) -> None:
    """Raise UserError for data sets of conversations, which Megatron's order does not support."""
    sidecars = {dataset.prefix: read_sidecar(dataset.prefix) for dataset in datasets}
    packed = [str(prefix) for prefix, sidecar in sidecars.items() if sidecar is not None and sidecar.conversations]
    if packed:
        raise UserError(
            f"--megatron-order: {' '.join(packed)} contains conversations, which are packed whole: leave the flag out"
        )


def _apply_loss_on(datasets: Iterable[IndexedDataset], loss_on: LossOn | None) -> None:
    """Drop the loss masks of data sets in which every token counts; raises UserError for missing masks."""
    errors = ErrorCollector()
    for dataset in datasets:
        with errors.collect():
            if choose_labels(dataset, loss_on) == "all":
                dataset.loss_mask = None
    errors.raise_if_any()


def _documents_of(
    part: str, dataset: IndexedDataset, shares: tuple[float, float, float] | None, order: OrderOptions
) -> range:
    if shares is None:
        return range(len(dataset))
    position = PARTS.index(part)
    if order.megatron_samples is None:
        return split_documents(shares, len(dataset))[position]
    # Training in Megatron's order splits sequences, so this part must not include a document of another part.
    sequences = split_sequences(shares, len(dataset.sequence_bounds) - 1)[position]
    tokens = dataset.sequence_bounds[[sequences.start, sequences.stop]]
    begin, end = np.searchsorted(dataset.document_bounds, tokens).tolist()
    return range(begin, max(begin, end if tokens[1] == dataset.document_bounds[end] else end - 1))


def check_tokenizer(sources: Sources, tokenizer: Tokenizer) -> None:
    """Raise UserError if the sidecar of a data set names another tokenizer."""
    errors = ErrorCollector()
    for dataset in sources.datasets:
        with errors.collect():
            check_sidecar(dataset, tokenizer)
    errors.raise_if_any()

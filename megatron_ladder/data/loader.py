"""From the paths of token files to their samples, for training, validation and test."""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

from megatron_ladder.data.indexed import IndexedDataset
from megatron_ladder.data.packing import LossOn, PackedSource, open_source
from megatron_ladder.data.samples import SampleSource, parse_split, split_documents
from megatron_ladder.data.sidecar import check_sidecar
from megatron_ladder.data.tokenizers import Tokenizer
from megatron_ladder.errors import UserError

PARTS = ("train", "valid", "test")


class Sources(NamedTuple):
    """Samples of each part; None where there is none. Only training is shuffled."""

    train: SampleSource | PackedSource | None
    valid: SampleSource | PackedSource | None
    test: SampleSource | PackedSource | None


def open_sources(
    data_path: Sequence[str | Path],
    train_data_path: Sequence[str | Path],
    valid_data_path: Sequence[str | Path],
    test_data_path: Sequence[str | Path],
    split: str,
    seq_length: int,
    seed: int,
    parts: Collection[str] = PARTS,
    loss_on: LossOn | None = None,
) -> Sources:
    """Opens either one data set cut by `split`, or one data set for each part.

    Args:
        data_path: one prefix (path without .bin and .idx), or nothing; so are the three after it.
        parts: what the run reads; a part that is left out is None and need not be long enough.
        loss_on: which tokens count; see `open_source`.

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
    opened: dict[str, SampleSource | PackedSource] = {}
    cut = _cut(Path(data_path[0]), split) if data_path else _whole(own_paths, parts)
    for part, (dataset, documents) in cut.items():
        if part in parts and len(documents):
            opened[part] = open_source(
                dataset, documents, seq_length, seed, shuffle=part == "train", part=part, loss_on=loss_on
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

"""From the data sets that a command line names to samples for training, validation and test."""

import itertools
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import numpy as np

from megatron_ladder.config.sections import DataConfig
from megatron_ladder.data.blending import Blend, BlendedSource, parse_blend
from megatron_ladder.data.indexed import IndexedDataset, Sidecar
from megatron_ladder.data.packing import LossOn, PackedSource
from megatron_ladder.data.samples import SampleSource
from megatron_ladder.errors import ErrorCollector, Problem, UserError, raise_user_errors
from megatron_ladder.tokenizers.kinds import Tokenizer, hashes_of, same_tokenizer

_PARTS = ("train", "valid")
_SET_NAME = re.compile(r"[A-Za-z][\w.-]*")


def _named_sets(field_name: str, words: Sequence[str]) -> dict[str, list[str]]:
    """`web=P1 code=W2 P2 W3 P3` -> the words of each set's blend; words without a name are the set ""."""
    sets: dict[str, list[str]] = {}
    for word in words:
        name, equals, rest = word.partition("=")
        if equals and _SET_NAME.fullmatch(name):
            if name in sets:
                reason = "{}: the name {name} is given twice"
                raise UserError(Problem({field_name: word}, reason, "give each set another name", name=name))
            sets[name] = [rest] if rest else []
        else:
            sets.setdefault(next(reversed(sets), ""), []).append(word)
    if "" in sets and len(sets) > 1:
        reason = "{}: this set has no name, others do"
        raise UserError(Problem({field_name: words[0]}, reason, "write NAME={word}", word=words[0]))
    raise_user_errors(
        Problem({field_name: f"{name}="}, "{}: names no data set") for name, words in sets.items() if not words
    )
    return sets


class Sources(NamedTuple):
    """Samples of each part, or None. Only training is shuffled."""

    train: BlendedSource | None
    valid: Mapping[str, BlendedSource]
    """By the names in --valid-data-path; "" without names."""

    @property
    def labeled(self) -> dict[str, BlendedSource]:
        """All sources, with labels for messages."""
        train = {} if self.train is None else {"train": self.train}
        return train | {f"valid {name}".rstrip(): source for name, source in self.valid.items()}

    @property
    def datasets(self) -> list[IndexedDataset]:
        """All data sets, each once."""
        members = [member for source in self.labeled.values() for member in source.sources]
        return list({member.dataset.prefix: member.dataset for member in members}.values())

    @property
    def sidecars(self) -> dict[Path, Sidecar]:
        """The descriptions of data sets that have one, by prefix."""
        return _sidecars_of(self.datasets)


class OrderOptions(NamedTuple):
    """What determines the order of samples."""

    seq_length: int
    seed: int
    loss_on: LossOn | None = None
    """The tokens that count as labels; see `_choose_labels`."""


def open_sources(data: DataConfig, order: OrderOptions, parts: Collection[str] = _PARTS) -> Sources:
    """Open either one blend of data sets, each of which is divided by --split, or one blend for each part.

    Only `parts` are read; others are None and may be too short. Raises UserError for missing or damaged files, both
    kinds of paths or none, invalid weights, no documents for training, or a part without a sample.
    """
    data_path = list(map(str, data.data_path))
    part_paths = {"train": list(map(str, data.train_data_path)), "valid": list(map(str, data.valid_data_path))}
    fields = {part: "data_path" if data_path else f"{part}_data_path" for part in _PARTS}
    errors = ErrorCollector()
    if data_path and any(part_paths.values()):
        errors.add(
            Problem({"data_path": None}, "{} (divided by {split}) excludes {train_data_path} and {valid_data_path}")
        )
    if not data_path and "train" in parts and not part_paths["train"]:
        errors.add(Problem({"data_path": None}, "{} is required", "the path of a data set without .bin and .idx"))
    # Paths and weights.
    blends: dict[tuple[str, str], Blend] = {}
    for part in (part for part in _PARTS if part in parts):
        with errors.collect():
            sets = {"": data_path or part_paths[part]}
            if part == "valid" and not data_path:
                sets = _named_sets(fields[part], part_paths[part])
            for name, words in sets.items():
                blends[part, name] = parse_blend(fields[part], words)
    # Files, each opened once.
    datasets: dict[Path, IndexedDataset] = {}
    field_of = {prefix: fields[part] for (part, _), blend in blends.items() for prefix in blend.prefixes}
    for prefix, field_name in field_of.items():
        with errors.collect(field_name):
            datasets[prefix] = IndexedDataset(prefix)
    errors.raise_if_any()
    # Samples.
    shares = _parse_split(data.split) if data_path else None
    opened: dict[tuple[str, str], BlendedSource] = {}
    for (part, name), (prefixes, weights) in blends.items():
        with errors.collect(fields[part]):
            source = _open_part(part, [datasets[prefix] for prefix in prefixes], weights, shares, order)
            if source is not None:
                opened[part, name] = source
    errors.raise_if_any()
    if "train" in parts and ("train", "") not in opened:
        reason = "{} leaves no document of {path} for training"
        raise UserError(Problem({"split": data.split}, reason, "enlarge its share", path=data_path[-1]))
    valid = {name: source for (part, name), source in opened.items() if part == "valid"}
    return Sources(opened.get(("train", "")), valid)


def _open_part(
    part: str,
    datasets: Sequence[IndexedDataset],
    weights: Sequence[Fraction] | None,
    shares: Sequence[float] | None,
    order: OrderOptions,
) -> BlendedSource | None:
    """Return a part's share of some data sets, all of them without `shares`; None if they have no document for it."""
    errors = ErrorCollector()
    sources = []
    source_weights = []
    for position, dataset in enumerate(datasets):
        everything = range(len(dataset))
        documents = everything if shares is None else _split_documents(shares, len(dataset))[_PARTS.index(part)]
        if documents:
            with errors.collect():
                source = open_source(part, dataset, documents, order)
                sources.append(source)
                source_weights.append(Fraction(len(source)) if weights is None else weights[position])
    texts = [source.name for source in sources if not isinstance(source, PackedSource)]
    if 0 < len(texts) < len(sources):
        reason = "{} or {data_path}: {texts} contain texts, the others contain conversations, which are packed whole"
        errors.add(Problem({f"{part}_data_path": None}, reason, "blend only one kind", texts=" ".join(texts)))
    errors.raise_if_any()
    return BlendedSource(sources, source_weights) if sources else None


def _choose_labels(dataset: IndexedDataset, loss_on: LossOn | None) -> LossOn:
    """Return `loss_on`, or if it is None, `assistant` for a data set with a loss mask and `all` for others."""
    if loss_on == "all" or dataset.loss_mask is not None:
        return loss_on or "assistant"
    if missing := dataset.missing_loss_mask:
        fix = "copy it as well, or give {loss_on} all to train on every token"
        raise UserError(Problem({}, "{missing}", fix, missing=missing))
    if loss_on == "assistant":
        reason = "{}: {prefix} has no loss mask"
        raise UserError(Problem({"loss_on": loss_on}, reason, "preprocess it with {chat}", prefix=dataset.prefix))
    return "all"


def open_source(
    part: str, dataset: IndexedDataset, documents: range, order: OrderOptions
) -> SampleSource | PackedSource:
    """Return samples of texts, or packed conversations if the sidecar says that the data set contains conversations."""
    sidecar = dataset.sidecar
    shuffle = part == "train"
    loss_on = _choose_labels(dataset, order.loss_on)
    if sidecar is not None and sidecar.conversations:
        return PackedSource(
            dataset, documents, order.seq_length, order.seed, shuffle, part, loss_on=loss_on, pad_id=sidecar.eod_id
        )
    if loss_on == "all":
        dataset.loss_mask = None
    return SampleSource(dataset, documents, order.seq_length, order.seed, shuffle, part)


def _parse_split(text: str) -> list[float]:
    """`969,30,1` -> shares of train, valid and test that add up to 1; missing shares are 0."""
    try:
        shares = [float(share) for share in text.replace("/", ",").split(",")]
    except ValueError:
        shares = []
    total = sum(shares)
    if not 1 <= len(shares) <= 3 or min(shares) < 0 or not 0 < total < float("inf"):
        raise UserError(Problem({"split": text}, "{}: expected shares of train, valid and test such as 969,30,1"))
    return [share / total for share in (*shares, 0.0, 0.0)[:3]]


def _split_documents(shares: Sequence[float], documents: int) -> list[range]:
    """Round each share as Megatron, and subtract the sum of the rounding errors from all three ends."""
    ends = np.cumsum([0, *(round(share * documents) for share in shares)])
    ends[1:] -= ends[-1] - documents
    # If the first share is empty, Megatron's correction can be negative.
    return [range(begin, end) for begin, end in itertools.pairwise(ends.clip(0).tolist())]


def _sidecars_of(datasets: Iterable[IndexedDataset]) -> dict[Path, Sidecar]:
    return {dataset.prefix: dataset.sidecar for dataset in datasets if dataset.sidecar is not None}


def check_tokenizer(datasets: Iterable[IndexedDataset], tokenizer: Tokenizer) -> None:
    """Raise UserError if the sidecar of a data set names another tokenizer."""
    raise_user_errors(
        Problem(
            tokenizer.selection,
            "{} ({ours}) is not the tokenizer of {prefix} ({theirs})",
            "give that one, or preprocess the data with this one",
            ours=f"{tokenizer.vocab_size} ids, sha256 {tokenizer.sha256[:12]}",
            prefix=prefix,
            theirs=f"{sidecar.tokenizer_type}, {sidecar.vocab_size} ids, "
            f"sha256 {hashes_of(sidecar.tokenizer_sha256)[0][:12]}",
        )
        for prefix, sidecar in _sidecars_of(datasets).items()
        if sidecar.vocab_size != tokenizer.vocab_size
        or not same_tokenizer(sidecar.tokenizer_sha256, tokenizer.identity)
    )


def find_chat_template(datasets: Sequence[IndexedDataset], report: Callable[[str], None]) -> str | None:
    """Return the template that made the first conversations among data sets.

    Report conversations that another one made, and those for which no token is recorded that ends answers.
    """
    prefix_of: dict[str, Path] = {}
    for prefix, sidecar in _sidecars_of(datasets).items():
        if sidecar.chat_template is not None:
            prefix_of.setdefault(sidecar.chat_template, prefix)
            if not sidecar.answer_ends:
                reason = "{prefix}: records no token that ends answers, so they may not end"
                fix = "preprocess it again, with a {chat_template} that ends answers with a special token"
                report(f"*** {Problem({}, reason, fix, prefix=prefix)} ***")
    for prefix in list(prefix_of.values())[1:]:
        first = next(iter(prefix_of.values()))
        report(f"*** {prefix}: has another chat template than {first}, which checkpoints record ***")
    return next(iter(prefix_of), None)

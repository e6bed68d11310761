"""The order in which GPTDataset and BlendedDataset of Megatron-LM core read samples, for comparisons with Megatron.

Unlike the order of samples.py, it depends on the length of the run, and shuffles validation samples as well. A run that
reads N samples of a part, over all evaluations for validation, reads E epochs, the smallest E
with E T >= N s + 1 tokens (T: tokens of an epoch, s: sequence length). One legacy generator, RandomState(seed),
shuffles in this order:

1. the documents of all E epochs together. But if less than 80% of the last epoch's samples are used, first the
   documents of the first E - 1 epochs, then those of the last epoch;
2. the samples: cuts of s + 1 tokens through the documents concatenated in that order, each of which begins with the
   last token of the previous cut. They are shuffled together, or as in step 1 in two groups.

Megatron calls a sequence of the index file a document here. In a blend with weights, data set i provides
1.005 x ceil(w_i N) samples, rounded up; without weights each sample is read at most once. Sample n is taken from the
data set with the largest w_i max(n, 1) - c_i, where c_i is the number of samples taken from it before; the first of
equal data sets wins.
"""

import itertools
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_ladder.data.blending import BlendedSource, places_among_equals
from megatron_ladder.data.indexed import IndexedDataset
from megatron_ladder.data.samples import Order, SampleSource, joined_starts
from megatron_ladder.errors import UserError

_LAST_EPOCH_SHARE = 0.80
_SURPLUS = 0.005


def _split_sequences(shares: Sequence[float], sequences: int) -> list[range]:
    """Split sequences 0 .. sequences - 1 at the rounded cumulative shares, as Megatron core does."""
    cuts = [round(end * float(sequences)) for end in itertools.accumulate(shares, initial=0.0)]
    return [range(begin, end) for begin, end in itertools.pairwise(cuts)]


class _MegatronSource(SampleSource):
    """The samples of one data set in Megatron's order, which is finite."""

    order = "megatron"

    def __init__(
        self,
        dataset: IndexedDataset,
        sequences: range,
        seq_length: int,
        seed: int,
        run_samples: int | None,
        part: str = "train",
    ) -> None:
        """`run_samples` is the number of samples that the run reads; None: those of one epoch."""
        super().__init__(dataset, sequences, seq_length, seed, True, part, dataset.sequence_bounds)
        self.run_samples, self.order_options = run_samples, {"run_samples": run_samples}
        self.epochs = 1 if run_samples is None else max(1, -(-(run_samples * seq_length + 1) // self.tokens))

    def __len__(self) -> int:
        """Number of samples, at least `run_samples`."""
        return (self.epochs * self.tokens - 1) // self.seq_length

    def _build_order(self, epoch: int) -> Order:
        if epoch > 0:
            raise IndexError(f"{self.name}: has {len(self)} samples in Megatron's order of {self.run_samples}")
        before_last = ((self.epochs - 1) * self.tokens - 1) // self.seq_length
        in_an_epoch = (self.tokens - 1) // self.seq_length
        wanted_of_last = (self.run_samples or 0) - before_last
        last_is_apart = self.epochs > 1 and wanted_of_last < int(_LAST_EPOCH_SHARE * in_an_epoch)
        generator = np.random.RandomState(self.seed)  # noqa: NPY002 - it defines the order
        own = np.arange(self.documents.start, self.documents.stop, dtype=np.int32)
        documents = np.tile(own, self.epochs)
        samples = np.arange(len(self), dtype=np.int64)
        for everything, first in ((documents, len(documents) - len(own)), (samples, before_last)):
            for group in (everything[:first], everything[first:]) if last_is_apart else (everything,):
                generator.shuffle(group)
        return Order(documents.astype(np.int64), joined_starts(self.bounds, documents), samples)


def _greedy_turns(weights: Sequence[float], size: int) -> NDArray[np.int32]:
    """Return the data set of each of `size` samples by the rule at the top of this file; the weights add up to 1."""
    taken = [0] * len(weights)
    turns = np.empty(size, np.int32)
    for sample in range(size):
        behind = [weight * max(sample, 1) - count for weight, count in zip(weights, taken, strict=True)]
        turns[sample] = turn = behind.index(max(behind))
        taken[turn] += 1
    return turns


class _MegatronBlend(BlendedSource):
    """The samples of several data sets in Megatron's order, which is finite."""

    def __init__(self, sources: Sequence[_MegatronSource], shares: Sequence[float], size: int) -> None:
        """Raises UserError if the rule takes more samples from a source than it has; `shares` have any sum."""
        weights = _normalized(shares)
        turns = _greedy_turns(weights, size)
        super().__init__(sources, weights, turns.astype(np.int64), places_among_equals(turns, len(weights)))
        for source, count in zip(sources, np.bincount(turns, minlength=len(sources)).tolist(), strict=True):
            if count > len(source):
                raise UserError(
                    f"--megatron-order: the blend takes {count} samples from {source.name}, for which Megatron "
                    f"prepares {len(source)}: Megatron rejects it too; give a larger weight"
                )

    def describe(self) -> dict[str, Any]:
        return super().describe() | {"run_samples": len(self.turns)}

    def _origins(self, numbers: NDArray[np.int64]) -> tuple[NDArray[Any], NDArray[np.int64]]:
        return self.turns[numbers], self.places[numbers]


def megatron_source(
    part: str,
    datasets: Sequence[IndexedDataset],
    weights: Sequence[Fraction] | None,
    split: tuple[Sequence[float], int] | None,
    seq_length: int,
    seed: int,
    run_samples: int,
) -> _MegatronSource | _MegatronBlend | None:
    """Return one part of some data sets in Megatron's order; None if it has no sequence of them.

    `part` is for messages. `split` has the shares of all parts and the position of this one, or is None for whole
    data sets. Raises UserError if the part is too short, or data sets without weights have fewer than `run_samples`.
    """

    def sequences_of(dataset: IndexedDataset) -> range:
        shares, position = split or ((1.0,), 0)
        return _split_sequences(shares, len(dataset.sequence_bounds) - 1)[position]

    def source(dataset: IndexedDataset, samples: int | None) -> _MegatronSource:
        return _MegatronSource(dataset, sequences_of(dataset), seq_length, seed, samples, part)

    held = [bool(sequences_of(dataset)) for dataset in datasets]
    if not any(held):
        return None
    # Megatron fails if a data set of the blend has no sequence for a part.
    datasets = list(itertools.compress(datasets, held))
    weights = None if weights is None else list(itertools.compress(weights, held))
    if len(datasets) == 1 and (weights is None or split is None):
        return source(datasets[0], run_samples)
    if weights is None:
        once = [source(dataset, None) for dataset in datasets]
        available = sum(map(len, once))
        if run_samples > available:
            raise UserError(
                f"--megatron-order: the run reads {run_samples} {part} samples, the data sets have {available}, and "
                "without weights Megatron reads each sample at most once: give weights, or fewer "
                f"{'--train-iters' if part == 'train' else '--eval-iters'}"
            )
        return _MegatronBlend(once, list(map(len, once)), run_samples)
    normalized = _normalized([float(weight) for weight in weights])
    wanted = [math.ceil(run_samples * weight) for weight in normalized]
    prepared = [math.ceil(count * (1 + _SURPLUS)) for count in wanted]
    return _MegatronBlend(list(map(source, datasets, prepared)), normalized, sum(wanted))


def _normalized(weights: Sequence[float]) -> list[float]:
    array = np.array(weights, np.float64)
    normalized: list[float] = (array / np.sum(array)).tolist()
    return normalized

"""The order in which Megatron-LM core's GPTDataset and BlendedDataset read samples, for those who compare with it.

Unlike the order of samples.py it follows from the length of the run. A run of N samples reads E epochs, the fewest
with E T >= N s + 1 tokens (T: tokens of an epoch, s: sequence length). One legacy generator, RandomState(seed), draws
everything in turn:

1. the documents of all E epochs, shuffled together; unless the last epoch is wanted for less than 80% of its samples:
   then those of the first E - 1 epochs, and those of the last, each shuffled by themselves;
2. the cuts of s + 1 tokens through the documents joined in that order, each beginning with the last token of the one
   before, shuffled likewise: all together, or those of the first E - 1 epochs and the others.

What Megatron calls a document here is a sequence of the index file. Of a blend with weights, data set i is asked for
1.005 x ceil(w_i N) samples, rounded up; without weights each is read once at most. Sample n is taken from the data set
with the largest w_i max(n, 1) - c_i, where c_i samples were taken from it before; the first one of equals.
"""

import math
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_ladder.data.blending import BlendedSource, places_among_equals
from megatron_ladder.data.indexed import IndexedDataset
from megatron_ladder.data.order_cache import load_or_build
from megatron_ladder.data.samples import Order, SampleSource, joined_starts
from megatron_ladder.errors import UserError

MEGATRON_ORDER = "megatron"
LAST_EPOCH_SHARE = 0.80
SURPLUS = 0.005


def split_sequences(shares: Sequence[float], sequences: int) -> list[range]:
    """Cuts sequences 0 .. sequences - 1 where the cumulated shares point, rounded, as Megatron core does."""
    ends = [0.0]
    for share in shares:
        ends.append(ends[-1] + share)
    cuts = [round(end * float(sequences)) for end in ends]
    return [range(begin, end) for begin, end in zip(cuts, cuts[1:], strict=False)]


class SequenceSource(SampleSource):
    """Samples over sequences of the index file, where Megatron core takes these for documents."""

    def _document_bounds(self) -> NDArray[np.int64]:
        return self.dataset.sequence_bounds


class MegatronSource(SequenceSource):
    """A run of samples of one data set in Megatron's order. It has an end."""

    def __init__(
        self,
        dataset: IndexedDataset,
        sequences: range,
        seq_length: int,
        seed: int,
        run_samples: int | None,
        cache: Path | None = None,
    ) -> None:
        """
        Args:
            sequences: which sequences belong to this source, contiguous.
            run_samples: how many samples the run reads; None: those of one epoch.

        Raises:
            UserError: when the sequences have fewer than seq_length + 1 tokens.
        """
        super().__init__(dataset, sequences, seq_length, seed, shuffle=True, cache=cache)
        self.run_samples = run_samples
        self.epochs = 1 if run_samples is None else max(1, -(-(run_samples * seq_length + 1) // self.tokens))

    def __len__(self) -> int:
        """Samples of the whole run, at least as many as it was made for."""
        return (self.epochs * self.tokens - 1) // self.seq_length

    def _order_of(self, epoch: int) -> Order:
        if epoch > 0:
            raise IndexError(f"{self.name}: has {len(self)} samples in Megatron's order, made for {self.run_samples}")
        return super()._order_of(0)

    def _describe_order(self, epoch: int) -> dict[str, Any]:
        return super()._describe_order(epoch) | {"order": MEGATRON_ORDER, "run_samples": self.run_samples}

    def describe(self) -> dict[str, Any]:
        return super().describe() | {"order": MEGATRON_ORDER, "run_samples": self.run_samples}

    def _build_order(self, epoch: int) -> Order:
        before_last = ((self.epochs - 1) * self.tokens - 1) // self.seq_length
        in_an_epoch = (self.tokens - 1) // self.seq_length
        wanted_of_last = (self.run_samples or 0) - before_last
        last_is_apart = self.epochs > 1 and wanted_of_last < int(LAST_EPOCH_SHARE * in_an_epoch)
        generator = np.random.RandomState(self.seed)  # noqa: NPY002 - it is the one that defines the order
        own = np.arange(self.documents.start, self.documents.stop, dtype=np.int32)
        documents = np.tile(own, self.epochs)
        samples = np.arange(len(self), dtype=np.int64)
        for everything, first in ((documents, len(documents) - len(own)), (samples, before_last)):
            for group in (everything[:first], everything[first:]) if last_is_apart else (everything,):
                generator.shuffle(group)
        return Order(documents.astype(np.int64), joined_starts(self.bounds, documents), samples)


def greedy_turns(weights: Sequence[float], size: int) -> NDArray[np.int32]:
    """Which data set each of `size` samples is taken from, by the rule at the head of this file, in float64.

    Args:
        weights: of each data set; they add up to 1.
    """
    taken = [0.0] * len(weights)
    turns = np.empty(size, np.int32)
    for sample in range(size):
        reach = float(max(sample, 1))
        behind = [weight * reach - count for weight, count in zip(weights, taken, strict=True)]
        turn = behind.index(max(behind))
        turns[sample] = turn
        taken[turn] += 1.0
    return turns


class MegatronBlend(BlendedSource):
    """A run of samples of several data sets in Megatron's order. It has an end."""

    def __init__(
        self, sources: Sequence[MegatronSource], weights: Sequence[float], size: int, cache: Path | None
    ) -> None:
        """
        Args:
            weights: of each source; they add up to 1.
            size: samples of the run.

        Raises:
            UserError: the rule takes more from a source than it has.
        """
        self.sources, self.weights, self.seq_length = tuple(sources), weights, sources[0].seq_length
        self.size = size
        description = {"order": f"{MEGATRON_ORDER} blend", "weights": list(weights), "size": size}

        def build() -> list[NDArray[np.int64]]:
            turns = greedy_turns(weights, size)
            return [turns.astype(np.int64), places_among_equals(turns, len(weights))]

        self._turns, self._places = build() if cache is None else load_or_build(cache, description, build)
        for source, count in zip(sources, np.bincount(self._turns, minlength=len(sources)).tolist(), strict=True):
            if count > len(source):
                raise UserError(
                    f"--megatron-order: the blend takes {count} samples from {source.name}, which Megatron makes ready "
                    f"for {len(source)}: Megatron refuses it too; give a weight that is not so small"
                )

    def describe(self) -> dict[str, Any]:
        return super().describe() | {"run_samples": self.size}

    def origins(self, numbers: NDArray[np.int64]) -> tuple[NDArray[Any], NDArray[np.int64]]:
        return self._turns[numbers], self._places[numbers]


def megatron_source(
    datasets: Sequence[IndexedDataset],
    weights: Sequence[Fraction] | None,
    shares: tuple[float, float, float] | None,
    seq_length: int,
    seed: int,
    run_samples: int,
    cache: Path | None,
) -> MegatronSource | MegatronBlend:
    """Training data in Megatron's order.

    Args:
        weights: of each data set, of any sum.
        shares: of train, valid and test; None: all is for training.
        run_samples: samples of the whole run.

    Raises:
        UserError: a part that is too short; data sets without weights that have fewer samples than the run.
    """

    def source(dataset: IndexedDataset, samples: int | None) -> MegatronSource:
        every = len(dataset.sequence_bounds) - 1
        sequences = range(every) if shares is None else split_sequences(shares, every)[0]
        return MegatronSource(dataset, sequences, seq_length, seed, samples, cache)

    if len(datasets) == 1 and (weights is None or shares is None):
        return source(datasets[0], run_samples)
    if weights is None:
        once = [source(dataset, None) for dataset in datasets]
        available = sum(map(len, once))
        if run_samples > available:
            raise UserError(
                f"--megatron-order: the run reads {run_samples} samples, the data sets have {available}, and without "
                "weights Megatron reads each once at most: give weights, or fewer --train-iters"
            )
        return MegatronBlend(once, _normalized(list(map(len, once))), run_samples, cache)
    normalized = _normalized([float(weight) for weight in weights])
    wanted = [math.ceil(run_samples * weight) for weight in normalized]
    sources = [
        source(dataset, math.ceil(count * (1 + SURPLUS))) for dataset, count in zip(datasets, wanted, strict=True)
    ]
    return MegatronBlend(sources, _normalized(normalized), sum(wanted), cache)


def _normalized(weights: Sequence[float]) -> list[float]:
    array = np.array(weights, np.float64)
    normalized: list[float] = (array / np.sum(array)).tolist()
    return normalized

"""What an indexed data set holds, and whether it is what was written."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from megatron_ladder.data.indexed import COPIED_TOKENS, IndexedDataset, bin_path, loss_mask_path
from megatron_ladder.data.sidecar import Sidecar, check_index, missing_loss_mask, read_sidecar, sidecar_path
from megatron_ladder.data.tokenizers import Tokenizer
from megatron_ladder.errors import UserError

SHOWN_IDS = 16
"""Token ids of a document that are printed, before its text."""
BAR = 40
"""Width of a histogram's longest bar, in characters."""


def summary(dataset: IndexedDataset) -> Iterator[str]:
    """Lines about a data set: files, counts, lengths."""
    tokens, documents = len(dataset.tokens), len(dataset)
    sequences = len(dataset.sequence_bounds) - 1
    several = "" if sequences == documents else f" in {sequences:,} sequences"
    yield f"{dataset.prefix}: {documents:,} documents{several}, {tokens:,} tokens of {dataset.tokens.dtype}"
    if dataset.loss_mask is not None:
        learnt = int(np.count_nonzero(dataset.loss_mask))
        yield f"  loss mask: {learnt:,} tokens count ({100 * learnt / tokens:.1f}%)"
    sidecar = read_sidecar(dataset.prefix)
    missing = missing_loss_mask(dataset, sidecar)
    if missing is not None:
        yield f"  {missing}: training asks for it"
    if sidecar is None:
        yield f"  no {sidecar_path(dataset.prefix).name}: which tokenizer made it is not known"
    else:
        yield (
            f"  tokenizer: {sidecar.tokenizer_type}, {sidecar.vocab_size:,} ids, sha256 "
            f"{sidecar.tokenizer_sha256[:12]}; end of document {sidecar.eod_id}"
            f"{' after each' if sidecar.append_eod else ', not appended'}; largest id {sidecar.largest_id:,}"
        )
    yield from histogram(np.diff(dataset.document_bounds))


def histogram(lengths: NDArray[np.int64]) -> Iterator[str]:
    """Lines about lengths [n]: quantiles, and how many lie between powers of 2."""
    quantiles = np.quantile(lengths, [0, 0.5, 0.9, 0.99, 1]).round().astype(int).tolist()
    yield "  tokens a document: least {:,}, median {:,}, 90% {:,}, 99% {:,}, most {:,}".format(*quantiles)
    # Bucket 0: no token; bucket k: 2^(k-1) to 2^k - 1.
    counts = np.bincount(np.frexp(lengths.astype(np.float64))[1])
    for bucket in np.flatnonzero(counts).tolist():
        ends = "0" if bucket == 0 else f"{1 << bucket - 1:,}-{(1 << bucket) - 1:,}"
        bar = "#" * max(1, round(BAR * counts[bucket] / counts.max()))
        yield f"  {ends:>25} {counts[bucket]:>13,} {bar}"


def parse_documents(words: Sequence[str], documents: int) -> list[int]:
    """`0 5-7` -> [0, 5, 6, 7].

    Raises:
        UserError: what is no number or range, or a document that is not there.
    """
    chosen: list[int] = []
    for word in words:
        first, dash, last = word.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise UserError(f"--documents {word}: expected a number such as 5, or a range such as 5-7")
        numbers = range(int(first), int(last or first) + 1)
        if not numbers or numbers[-1] >= documents:
            raise UserError(f"--documents {word}: expected numbers from 0 to {documents - 1}")
        chosen.extend(numbers)
    return chosen


def show_document(dataset: IndexedDataset, number: int, tokenizer: Tokenizer | None) -> Iterator[str]:
    """Lines about one document: its first ids, and its text if a tokenizer is given."""
    ids = dataset.document(number).tolist()
    shown = " ".join(map(str, ids[:SHOWN_IDS])) + (" ..." if len(ids) > SHOWN_IDS else "")
    yield f"document {number}: {len(ids):,} tokens: {shown}"
    if tokenizer is not None:
        outside = [i for i in ids if not 0 <= i < tokenizer.vocab_size]
        if outside:
            yield f"  holds id {outside[0]}, the tokenizer has ids 0 to {tokenizer.vocab_size - 1}"
        else:
            yield tokenizer.decode(ids)


def verify(prefix: Path) -> list[str]:
    """Reads everything, and says in lines what was checked.

    Raises:
        UserError: with a line for each contradiction: of the two files (see IndexedDataset), of a sidecar's counts and
            checksums with them, of token ids with the vocabulary, of a loss mask that is missing or not 0 and 1.
    """
    dataset = IndexedDataset(prefix)
    sidecar = check_index(dataset)
    hasher = xxhash.xxh3_128()
    smallest, largest = 0, -1
    for begin in range(0, len(dataset.tokens), COPIED_TOKENS):
        block = dataset.tokens[begin : begin + COPIED_TOKENS]
        hasher.update(block.data)
        smallest, largest = min(smallest, int(block.min())), max(largest, int(block.max()))
    checksum = f"xxh3_128:{hasher.hexdigest()}"
    mistakes = []
    if smallest < 0:
        mistakes.append(f"{bin_path(prefix)}: holds token id {smallest}, expected 0 or more")
    if sidecar is not None and sidecar.bin_checksum not in (None, checksum):
        mistakes.append(
            f"{bin_path(prefix)}: checksum {checksum} found, {sidecar.bin_checksum} expected by "
            f"{sidecar_path(prefix)}: the tokens are damaged: copy or preprocess the data again"
        )
    if sidecar is not None and largest != sidecar.largest_id:
        mistakes.append(
            f"{bin_path(prefix)}: largest token id is {largest}, {sidecar.largest_id} expected by "
            f"{sidecar_path(prefix)}"
        )
    mistakes.extend(_loss_mask_mistakes(dataset, sidecar))
    if mistakes:
        raise UserError(*mistakes)
    checked = ["sizes, lengths, offsets and documents of .idx and the size of .bin agree"]
    checked.append(f"token ids are 0 to {largest:,}")
    sums = {".idx": sidecar and sidecar.idx_checksum, ".bin": sidecar and sidecar.bin_checksum}
    if dataset.loss_mask is not None:
        sums["the loss mask"] = sidecar and sidecar.loss_mask_checksum
    for name, known in sums.items():
        what = "is that of the sidecar" if known else "is not known: a change that keeps the file well-formed may stay"
        checked.append(f"checksum of {name} {what}")
    return [f"verified: {line}" for line in checked]


def _loss_mask_mistakes(dataset: IndexedDataset, sidecar: Sidecar | None) -> list[str]:
    """A line for each thing that is wrong with the loss mask; reads all of it."""
    path, mask = loss_mask_path(dataset.prefix), dataset.loss_mask
    if mask is None:
        missing = missing_loss_mask(dataset, sidecar)
        return [] if missing is None else [f"{missing}: copy it as well, or preprocess the data again"]
    mistakes = []
    expected, found = sidecar and sidecar.loss_mask_checksum, f"xxh3_128:{xxhash.xxh3_128_hexdigest(mask.data)}"
    if expected not in (None, found):
        mistakes.append(
            f"{path}: checksum {found} found, {expected} expected by {sidecar_path(dataset.prefix)}: the loss mask is "
            "damaged: copy or preprocess the data again"
        )
    if int(mask.max()) > 1:
        mistakes.append(f"{path}: holds {int(mask.max())}, expected 0 and 1")
    return mistakes

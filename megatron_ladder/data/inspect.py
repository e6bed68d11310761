"""Shows the content of an indexed data set, and verifies its checksums."""

from collections.abc import Iterator, Sequence

import numpy as np
import xxhash

from megatron_ladder.data.indexed import IndexedDataset, bin_path, format_checksum, loss_mask_path, sidecar_path
from megatron_ladder.errors import Problem, UserError, counted, raise_user_errors
from megatron_ladder.tokenizers.kinds import Tokenizer, hashes_of

_SHOWN_IDS = 16
"""Token ids of a document that are printed before its text."""


def summary(dataset: IndexedDataset) -> Iterator[str]:
    """Yield lines about a data set: files, counts, lengths."""
    tokens = len(dataset.tokens)
    documents = len(dataset)
    sequences = len(dataset.sequence_bounds) - 1
    parts = "" if sequences == documents else f" in {counted(sequences, 'sequence')}"
    yield f"{dataset.prefix}: {counted(documents, 'document')}{parts}, {tokens:,} tokens of {dataset.tokens.dtype}"
    if dataset.loss_mask is not None:
        learnt = int(np.count_nonzero(dataset.loss_mask))
        yield f"  loss mask: {learnt:,} tokens count ({100 * learnt / tokens:.1f}%)"
    sidecar = dataset.sidecar
    if missing := dataset.missing_loss_mask:
        yield f"  {missing}: training requires it"
    if sidecar is None:
        yield f"  no {sidecar_path(dataset.prefix).name}: its tokenizer is unknown"
    else:
        yield (
            f"  tokenizer: {sidecar.tokenizer_type}, {sidecar.vocab_size:,} ids, sha256 "
            f"{hashes_of(sidecar.tokenizer_sha256)[0][:12]}; end of document {sidecar.eod_id}"
            f"{' after each' if sidecar.append_eod else ', not appended'}; largest id {sidecar.largest_id:,}"
        )
    quantiles = np.quantile(np.diff(dataset.document_bounds), [0, 0.5, 0.9, 0.99, 1]).round().astype(int).tolist()
    yield "  tokens per document: minimum {:,}, median {:,}, 90% {:,}, 99% {:,}, maximum {:,}".format(*quantiles)


def parse_documents(words: Sequence[str], documents: int) -> list[int]:
    """`0 5-7` -> [0, 5, 6, 7]; raises UserError for other words, or numbers that the data set does not have."""
    chosen: list[int] = []
    for word in words:
        first, dash, last = word.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise UserError(Problem({"documents": word}, "{}: expected a number such as 5, or a range such as 5-7"))
        numbers = range(int(first), int(last or first) + 1)
        if not numbers or numbers[-1] >= documents:
            raise UserError(Problem({"documents": word}, f"{{}}: expected numbers from 0 to {documents - 1}"))
        chosen.extend(numbers)
    return chosen


def show_document(dataset: IndexedDataset, number: int, tokenizer: Tokenizer | None) -> Iterator[str]:
    """Yield lines about a document: its first ids, and its text if a tokenizer is given."""
    ids = dataset.document(number).tolist()
    shown = " ".join(map(str, ids[:_SHOWN_IDS])) + (" ..." if len(ids) > _SHOWN_IDS else "")
    yield f"document {number}: {len(ids):,} tokens: {shown}"
    if tokenizer is not None:
        last = tokenizer.vocab_size - 1
        outside = next((i for i in ids if not 0 <= i <= last), None)
        yield tokenizer.decode(ids) if outside is None else f"  has id {outside}, the tokenizer has ids 0 to {last}"


def verify(dataset: IndexedDataset) -> list[str]:
    """Read all files and return one line per passed check; raises UserError with one line per contradiction.

    What opening a data set compares is not compared again: sizes, the index, and the counts in the sidecar.
    """
    sidecar = dataset.sidecar
    smallest, largest = int(dataset.tokens.min()), int(dataset.tokens.max())
    problems = []
    known: dict[str, str | None] = {".idx": None, ".bin": None}
    if sidecar is not None:
        known = {".idx": sidecar.idx_checksum, ".bin": sidecar.bin_checksum}
    arrays = {".bin": (bin_path(dataset.prefix), dataset.tokens)}
    if smallest < 0:
        problems.append(f"{bin_path(dataset.prefix)}: has token id {smallest}, expected 0 or more")
    if sidecar is not None and largest != sidecar.largest_id:
        problems.append(
            f"{bin_path(dataset.prefix)}: the largest token id is {largest}, {sidecar_path(dataset.prefix)} expects "
            f"{sidecar.largest_id}"
        )
    if missing := dataset.missing_loss_mask:
        problems.append(f"{missing}: copy it as well, or preprocess the data again")
    if (mask := dataset.loss_mask) is not None:
        arrays["the loss mask"] = loss_mask_path(dataset.prefix), mask
        known["the loss mask"] = None if sidecar is None else sidecar.loss_mask_checksum
        if int(mask.max()) > 1:
            problems.append(f"{loss_mask_path(dataset.prefix)}: has value {int(mask.max())}, expected 0 and 1")
    for name, (path, array) in arrays.items():
        checksum = format_checksum(xxhash.xxh3_128(array.data))
        if known[name] not in (None, checksum):
            problems.append(
                f"{path}: found checksum {checksum}, its sidecar expects {known[name]}: the file is damaged: copy or "
                "preprocess the data again"
            )
    raise_user_errors(problems)
    unknown = "is unknown: a change that keeps the file valid is not detected"
    return [
        "verified: the sizes, lengths, offsets and documents of .idx and the size of .bin agree",
        f"verified: token ids are 0 to {largest:,}",
        *(
            f"verified: the checksum of {name} {'equals that in the sidecar' if known[name] else unknown}"
            for name in known
        ),
    ]

"""`<prefix>.json` beside `<prefix>.bin` and `.idx`: how the tokens were made. Megatron ignores it.

A data set without one (Megatron's own) is read without these checks.
"""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ladder.data.files import write_atomically
from megatron_ladder.data.indexed import IndexedDataset, idx_path, loss_mask_path
from megatron_ladder.data.tokenizers import Tokenizer
from megatron_ladder.errors import UserError

FORMAT_VERSION = 1
OPTIONAL = ("bin_checksum", "idx_checksum", "loss_mask_checksum", "conversations", "skipped")
"""What data sets of earlier releases lack."""


@dataclass(frozen=True)
class Sidecar:
    """What is known of a data set besides its tokens."""

    tokenizer_type: str
    """The --tokenizer-type, by the first of its names."""
    tokenizer_sha256: str
    """Of the tokenizer's model file."""
    vocab_size: int
    """Ids of the tokenizer."""
    eod_id: int
    """The tokenizer's end-of-document token."""
    append_eod: bool
    """Whether every document ends with `eod_id`."""
    largest_id: int
    """Of all tokens."""
    documents: int
    """Documents in the files; empty ones were left out."""
    tokens: int
    """Tokens of all documents, end-of-document tokens included."""
    bin_checksum: str | None = None
    """Of the tokens' file: `xxh3_128:` and 32 hexadecimal digits."""
    idx_checksum: str | None = None
    """Of the index file, likewise."""
    loss_mask_checksum: str | None = None
    """Of the loss mask, likewise; None where there is none, or an earlier release wrote it."""
    conversations: bool = False
    """Whether each document is one conversation, which training packs whole."""
    skipped: int = 0
    """Lines that could not be read and were passed over."""

    @property
    def has_loss_mask(self) -> bool:
        """Whether a loss mask belongs to the data set: to conversations always, whichever release wrote them."""
        return self.conversations or self.loss_mask_checksum is not None


def sidecar_path(prefix: Path) -> Path:
    """`data/train_text_document` -> `data/train_text_document.json`."""
    return prefix.with_name(prefix.name + ".json")


def write_sidecar(prefix: Path, sidecar: Sidecar) -> None:
    """Writes the file whole."""
    values = {"format_version": FORMAT_VERSION} | sidecar_values(sidecar)
    write_atomically(sidecar_path(prefix), (json.dumps(values, indent=2) + "\n").encode())


def sidecar_values(sidecar: Sidecar) -> dict[str, Any]:
    """Its fields, JSON-able; `Sidecar(**values)` is the way back."""
    return dataclasses.asdict(sidecar)


def read_sidecar(prefix: Path) -> Sidecar | None:
    """The sidecar of a data set, None if there is none. Keys that we do not know are passed over.

    Raises:
        UserError: when the file is not one of ours.
    """
    path = sidecar_path(prefix)
    if not path.is_file():
        return None
    try:
        values = json.loads(path.read_bytes())
        if values["format_version"] > FORMAT_VERSION:
            raise UserError(
                f"{path}: format version {values['format_version']} found, {FORMAT_VERSION} expected"
            )
        names = [field.name for field in dataclasses.fields(Sidecar)]
        return Sidecar(**{name: values[name] for name in names if name in values or name not in OPTIONAL})
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path}: not the description of a data set ({error!r}): preprocess the data again"
        ) from None


def check_index(dataset: IndexedDataset) -> Sidecar | None:
    """The sidecar of a data set, if there is one.

    Raises:
        UserError: when it belongs to other files: its counts, or its checksum of the index, are not theirs.
    """
    sidecar = read_sidecar(dataset.prefix)
    if sidecar is None:
        return None
    path = sidecar_path(dataset.prefix)
    found = (len(dataset), len(dataset.tokens))
    if found != (sidecar.documents, sidecar.tokens):
        raise UserError(
            f"{path}: describes {sidecar.documents} documents and {sidecar.tokens} tokens, the data set has "
            f"{found[0]} and {found[1]}: preprocess the data again"
        )
    if sidecar.idx_checksum not in (None, dataset.idx_checksum):
        raise UserError(
            f"{idx_path(dataset.prefix)}: checksum {dataset.idx_checksum} found, {sidecar.idx_checksum} expected by "
            f"{path}: the index is damaged, or of other data: copy or preprocess the data again"
        )
    return sidecar


def missing_loss_mask(dataset: IndexedDataset, sidecar: Sidecar | None) -> str | None:
    """What is wrong, up to a colon, where the loss mask that belongs to a data set is not there; else None."""
    if dataset.loss_mask is not None or sidecar is None or not sidecar.has_loss_mask:
        return None
    return f"{loss_mask_path(dataset.prefix)}: no such file, and it belongs to {sidecar_path(dataset.prefix)}"


def check_sidecar(dataset: IndexedDataset, tokenizer: Tokenizer) -> None:
    """Raises UserError when the sidecar belongs to other files, or names another tokenizer."""
    sidecar = check_index(dataset)
    if sidecar is None:
        return
    if sidecar.vocab_size != tokenizer.vocab_size or sidecar.tokenizer_sha256 != tokenizer.sha256:
        raise UserError(
            f"--tokenizer-model {tokenizer.files[0] if tokenizer.files else tokenizer.kind} "
            f"({tokenizer.vocab_size} ids, sha256 {tokenizer.sha256[:12]}) is not the tokenizer of {dataset.prefix} "
            f"({sidecar.tokenizer_type}, {sidecar.vocab_size} ids, sha256 "
            f"{sidecar.tokenizer_sha256[:12]}): give that one, or preprocess the data with this one"
        )

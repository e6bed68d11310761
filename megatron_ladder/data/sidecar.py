"""`<prefix>.json` next to `<prefix>.bin` and `.idx` describes how the tokens were made. Megatron ignores this file.

A data set without a sidecar (such as Megatron's own) is read without the checks that need one.
"""

import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from megatron_ladder.data.indexed import IndexedDataset, idx_path, loss_mask_path, sampled_checksum, sidecar_path
from megatron_ladder.data.tokenizers import Tokenizer
from megatron_ladder.errors import UserError
from megatron_ladder.files import read_if_exists, write_atomically


@dataclass(frozen=True)
class Sidecar:
    """Metadata of a data set.

    The tokenizer's type is the first of its synonyms, and its hash is that of its model file. `append_eod` records
    whether every document ends with `eod_id`. Documents do not include empty ones, which were left out; tokens include
    end-of-document tokens. A checksum is `xxh3_128:` and 32 hexadecimal digits, or None if it is unknown or the file
    does not exist. Each document is one conversation, which training packs whole, if `conversations` is set, and
    `chat_template` is the template that rendered it. `skipped` counts unreadable lines.
    """

    tokenizer_type: str
    tokenizer_sha256: str
    vocab_size: int
    eod_id: int
    append_eod: bool
    largest_id: int
    documents: int
    tokens: int
    bin_checksum: str | None = None
    idx_checksum: str | None = None
    loss_mask_checksum: str | None = None
    conversations: bool = False
    skipped: int = 0
    chat_template: str | None = None
    format_version: Literal[1] = 1

    @property
    def has_loss_mask(self) -> bool:
        """Whether a loss mask belongs to the data set."""
        return self.conversations or self.loss_mask_checksum is not None


def write_sidecar(prefix: Path, sidecar: Sidecar) -> None:
    """Write the sidecar of a data set atomically."""
    values = dataclasses.asdict(sidecar)
    values = {"format_version": values.pop("format_version")} | values
    if sidecar.chat_template is None:
        del values["chat_template"]
    write_atomically(sidecar_path(prefix), json.dumps(values, indent=2) + "\n")


def read_sidecar(prefix: Path) -> Sidecar | None:
    """Return the sidecar of a data set, or None if there is none; raises UserError if the file has another format."""
    return _parse(sidecar_path(prefix), read_if_exists(sidecar_path(prefix)))


def sidecar_of(dataset: IndexedDataset) -> Sidecar | None:
    """Return the sidecar of an open data set as `read_sidecar`, but read the file only once."""
    return _parse(sidecar_path(dataset.prefix), dataset.sidecar)


def _parse(path: Path, content: bytes | None) -> Sidecar | None:
    if content is None:
        return None
    try:
        return msgspec.json.decode(content, type=Sidecar)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"{path}: not the sidecar of a data set ({error}): preprocess the data again") from None


def check_index(dataset: IndexedDataset) -> Sidecar | None:
    """Return the sidecar of a data set or None; raises UserError if its counts or its checksum of the index differ."""
    sidecar = sidecar_of(dataset)
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
            f"{idx_path(dataset.prefix)}: found checksum {dataset.idx_checksum}, {path} expects "
            f"{sidecar.idx_checksum}: the index is damaged or of other data: copy or preprocess the data again"
        )
    return sidecar


def checksum_errors(path: Path, found: str, sidecar: Sidecar | None, entry: str) -> list[str]:
    """Return a message if the checksum of a file differs from an entry of its sidecar; an unknown one never differs."""
    expected = None if sidecar is None else getattr(sidecar, entry)
    if expected in (None, found):
        return []
    return [
        f"{path}: found checksum {found}, its sidecar expects {expected}: the file is damaged: copy or preprocess the "
        "data again"
    ]


def missing_loss_mask(dataset: IndexedDataset, sidecar: Sidecar | None) -> str | None:
    """Return the beginning of a message if the loss mask of a data set is missing; else None."""
    if dataset.loss_mask is not None or sidecar is None or not sidecar.has_loss_mask:
        return None
    return f"{loss_mask_path(dataset.prefix)}: no such file, and it belongs to {sidecar_path(dataset.prefix)}"


def check_sidecar(dataset: IndexedDataset, tokenizer: Tokenizer) -> None:
    """Raise UserError if the sidecar belongs to other files or names another tokenizer."""
    sidecar = check_index(dataset)
    if sidecar is None:
        return
    if sidecar.vocab_size != tokenizer.vocab_size or sidecar.tokenizer_sha256 != tokenizer.sha256:
        raise UserError(
            f"{tokenizer.flag} ({tokenizer.vocab_size} ids, sha256 {tokenizer.sha256[:12]}) is not the tokenizer of "
            f"{dataset.prefix} ({sidecar.tokenizer_type}, {sidecar.vocab_size} ids, sha256 "
            f"{sidecar.tokenizer_sha256[:12]}): give that one, or preprocess the data with this one"
        )


def find_chat_template(datasets: Sequence[IndexedDataset], report: Callable[[str], None]) -> str | None:
    """Return the template that made the first conversations among data sets; report those that another one made."""
    found: dict[str, Path] = {}
    for dataset in datasets:
        sidecar = sidecar_of(dataset)
        if sidecar is not None and sidecar.chat_template is not None:
            found.setdefault(sidecar.chat_template, dataset.prefix)
    for prefix in list(found.values())[1:]:
        first = next(iter(found.values()))
        report(f"*** {prefix}: has another chat template than {first}, which checkpoints record ***")
    return next(iter(found), None)


def content_of(dataset: IndexedDataset) -> dict[str, Any]:
    """Return a short JSON-able description of the content of a data set, independent of its location.

    It includes blocks from all over the token file, because the sidecar may be missing or belong to another file.
    """
    sidecar = sidecar_of(dataset)
    return {
        "documents": len(dataset),
        "tokens": len(dataset.tokens),
        "dtype": dataset.tokens.dtype.name,
        "idx_checksum": dataset.idx_checksum,
        "bin_checksum": None if sidecar is None else sidecar.bin_checksum,
        "bin_sample": sampled_checksum(dataset.tokens),
        "loss_mask_sample": None if dataset.loss_mask is None else sampled_checksum(dataset.loss_mask),
    }

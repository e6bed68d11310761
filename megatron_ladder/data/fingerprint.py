"""What a data set holds, in a few numbers: for the cache of orders, and for checkpoints, so that a resumed run can
tell whether it reads the same samples on."""

from typing import Any

from megatron_ladder.data.indexed import IndexedDataset, sampled_checksum
from megatron_ladder.data.sidecar import read_sidecar

MEANINGS = {
    "documents": "number of documents",
    "tokens": "number of tokens",
    "dtype": "type of the tokens",
    "idx_checksum": "checksum of .idx",
    "bin_checksum": "checksum of .bin in the sidecar",
    "bin_sample": "checksum of blocks of .bin",
    "loss_mask_sample": "checksum of blocks of the loss mask",
}
"""Of what content_of says, for messages."""


def content_of(dataset: IndexedDataset) -> dict[str, Any]:
    """What the data set holds, wherever it lies; JSON-able.

    The sidecar's checksum covers every token, but only if the sidecar is there and belongs to the file. So blocks
    from all over the file are read as well.
    """
    sidecar = read_sidecar(dataset.prefix)
    return {
        "documents": len(dataset),
        "tokens": len(dataset.tokens),
        "dtype": dataset.tokens.dtype.name,
        "idx_checksum": dataset.idx_checksum,
        "bin_checksum": None if sidecar is None else sidecar.bin_checksum,
        "bin_sample": sampled_checksum(dataset.tokens),
        "loss_mask_sample": None if dataset.loss_mask is None else sampled_checksum(dataset.loss_mask),
    }


def differences(stored: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """What two contents differ in, in words. A checksum that one of them never had says nothing."""
    return [
        f"{MEANINGS[name]} is {found[name]}, was {stored[name]}"
        for name in MEANINGS
        if name in stored and stored[name] != found[name]
        if name != "bin_checksum" or None not in (stored[name], found[name])
    ]

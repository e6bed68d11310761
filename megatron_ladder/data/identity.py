"""Whether a resumed run reads the samples on that its checkpoint was trained on."""

from typing import Any

from megatron_ladder.data.fingerprint import differences
from megatron_ladder.data.loader import Source
from megatron_ladder.data.stream_contents import source_changes

EARLIER_NAMES = ("train_documents", "train_tokens", "tokenizer_sha256")
"""All that the oldest checkpoints tell of their data."""


def describe_training(source: Source, tokenizer_sha256: str | None) -> dict[str, Any]:
    """What a checkpoint keeps of the training data and of its order; JSON-able.

    Paths are kept for messages; that files moved is no change.
    """
    return {
        "train_documents": sum(len(member.documents) for member in source.sources),
        "train_tokens": sum(member.tokens for member in source.sources),
        "tokenizer_sha256": tokenizer_sha256,
        "train": source.describe(),
    }


def data_changes(stored: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """What the data or its order differ in, a line each that names the data set or the flag.

    Args:
        stored: what describe_training said when the checkpoint was written; the oldest have less.
        found: what it says now.
    """
    if "stream" in stored or "stream" in found:
        return _stream_changes(stored, found)
    lines = []
    if "train" in stored:
        lines = _order_changes(stored["train"], found["train"]) or _set_changes(stored["train"], found["train"])
    names = EARLIER_NAMES if "train" not in stored else ("tokenizer_sha256",)
    lines += [
        f"--data-path or --tokenizer-model: {name} is {found[name]}, was {stored[name]}"
        for name in names
        if name in stored and stored[name] != found[name]
    ]
    return lines


def _stream_changes(stored: dict[str, Any], found: dict[str, Any]) -> list[str]:
    if "stream" not in stored:
        return ["--streaming: texts are streamed, and were token files, those of --data-path,"]
    if "stream" not in found:
        return ["--data-path: token files are read, and texts were streamed, those of --streaming,"]
    was, now = stored["stream"], found["stream"]
    words = {
        "streams": "--streaming-shards: the number of streams",
        "window_documents": "--streaming-shuffle-buffer: documents that a stream puts in a new order",
        "eod_id": "--tokenizer-model: the token that ends a document",
        "shards": "--streaming: the number of shards that the input is cut into",
    }
    # What an earlier release did not write down says nothing.
    lines = source_changes(was["sources"], now["sources"]) if "sources" in was else []
    if lines:
        del words["shards"]
    elif was.get("shards_sha256") != now["shards_sha256"] and was.get("shards") == now["shards"]:
        lines.append("--streaming: names or sizes of files are others than they were")
    lines += [
        f"{said} is {now[name]}, was {was[name]}"
        for name, said in words.items()
        if was.get(name, now[name]) != now[name]
    ]
    if stored.get("tokenizer_sha256") != found["tokenizer_sha256"]:
        lines.append(
            f"--tokenizer-model: sha256 is {found['tokenizer_sha256']}, was {stored.get('tokenizer_sha256')}"
        )
    return lines


def _order_changes(stored: dict[str, Any], found: dict[str, Any]) -> list[str]:
    if stored["order"] != found["order"]:
        return [f"--megatron-order: the order of samples is {found['order']!r}, was {stored['order']!r}"]
    if stored.get("run_samples") != found.get("run_samples"):
        return [
            f"--train-iters, --global-batch-size: the run reads {found.get('run_samples')} samples, was "
            f"{stored.get('run_samples')}, and --megatron-order follows from it"
        ]
    if len(stored["sets"]) != len(found["sets"]):
        was = " ".join(entry["prefix"] for entry in stored["sets"])
        return [f"--data-path: {len(found['sets'])} data sets, was {len(stored['sets'])}: {was}"]
    return []


def _set_changes(stored: dict[str, Any], found: dict[str, Any]) -> list[str]:
    lines = []
    for old, new in zip(stored["sets"], found["sets"], strict=True):
        changed = differences(old["content"], new["content"])
        if old["documents"] != new["documents"] and not changed:
            changed.append(f"--split: training documents are {new['documents']}, was {old['documents']}")
        if old.get("weight") != new.get("weight"):
            changed.append(f"weight is {new.get('weight')}, was {old.get('weight')}")
        name = new["prefix"] if old["prefix"] == new["prefix"] else f"{new['prefix']} (was {old['prefix']})"
        lines += [f"{name}: {change}" for change in changed]
    return lines

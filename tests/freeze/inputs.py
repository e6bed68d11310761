"""Made-up texts in files of all kinds that the product reads, the same on every machine."""

import gzip
import json
import random
import tomllib
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

try:
    from compression import zstd
except ImportError:
    from backports import zstd

TABLES = tomllib.loads(Path(__file__).with_name("cases.toml").read_text())


def texts(seed: int, count: int, longest: int) -> list[str]:
    """Return texts of fewer than `longest` words; some are empty."""
    choose = random.Random(seed)
    syllables, spaces = TABLES["texts"]["syllables"].split(), [" "] * 30 + TABLES["texts"]["spaces"]
    words = TABLES["texts"]["words"].split() + ["".join(choose.choices(syllables, k=n % 7 + 2)) for n in range(400)]
    lengths = [choose.randrange(longest) for _ in range(count)]
    return ["".join(choose.choice(words) + choose.choice(spaces) for _ in range(length)) for length in lengths]


def make_inputs(folder: Path) -> None:
    """Write the inputs of all cases."""

    def write_lines(name: str, values: list[Any]) -> list[bytes]:
        lines = [json.dumps(value, ensure_ascii=n % 2 > 0).encode() for n, value in enumerate(values)]
        (folder / name).write_bytes(b"".join(line + b"\n" for line in lines))
        return lines

    documents = [{"text": text, "title": text[:30] or "none", "id": n} for n, text in enumerate(texts(1, 400, 90))]
    lines = write_lines("corpus.jsonl", documents)
    for ending, compress in (("gz", gzip.compress), ("zst", zstd.compress)):
        (folder / f"corpus.jsonl.{ending}").write_bytes(compress((folder / "corpus.jsonl").read_bytes()))
    table = pyarrow.Table.from_pylist(documents[::2])
    pyarrow.parquet.write_table(table, folder / "corpus.parquet", row_group_size=50)
    write_lines("large.jsonl", [{"text": text} for text in texts(2, 30_000, 60)])
    for number in range(3):
        part = [document for document in documents[number::3] if document["text"].strip()]
        write_lines(f"part{number}.jsonl", part)
        (folder / f"{number}.txt").write_text("\n".join(document["text"] for document in part[:40]))
    bad = [b"{", *lines[:10], b'{"title": "no text"}', *lines[10:20], b'{"text": "\xff"}', *lines[20:30]]
    (folder / "bad.jsonl").write_bytes(b"\n".join(bad) + b"\n")
    choose = random.Random(3)
    numbers = [[str(choose.randrange(70_000)) for _ in range(choose.randrange(1, 40))] for _ in range(50)]
    write_lines("numbers.jsonl", [{"text": " ".join(row)} for row in numbers])
    turns = [text for text in texts(4, 600, 25) if text.strip()]
    messages = [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(turns[:480])]
    write_lines("chat.jsonl", [{"messages": messages[4 * n : 4 * n + 2 + n % 2 * 2]} for n in range(120)])
    for name, template in TABLES["templates"].items():
        (folder / f"{name}.jinja").write_text(template)

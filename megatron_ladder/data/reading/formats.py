"""What a file's name and first bytes say of its format."""

from pathlib import Path

BYTE_ORDER_MARK = b"\xef\xbb\xbf"

JSON_SUFFIXES = (".jsonl", ".json", ".ndjson")

COMPRESSIONS = {".gz": "gzip", ".zst": "Zstandard"}


def is_json_lines(path: Path) -> bool:
    """Whether a file holds an object a line, by its suffix; a compressed one does not count."""
    return path.suffix.lower() in JSON_SUFFIXES

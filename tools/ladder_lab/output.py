"""Tables in Markdown, and results in JSON."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_ladder.files import write_atomically


def markdown_table(rows: Sequence[Mapping[str, str]]) -> str:
    """Return a table of rows that map heads to cells, the first column aligned left; empty without rows."""
    if not rows:
        return ""
    heads = list(rows[0])
    rule = ["---"] + ["---:"] * (len(heads) - 1)
    cells = [[cell.replace("|", "\\|") for cell in row] for row in (heads, rule, *(row.values() for row in rows))]
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


def write_json(path: Path | None, results: object) -> None:
    """Replace the file of --json, if there is one."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(results, indent=1) + "\n")

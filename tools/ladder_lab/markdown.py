"""Tables in Markdown."""

from collections.abc import Mapping, Sequence


def markdown_table(rows: Sequence[Mapping[str, str]]) -> str:
    """Return a table of rows that map heads to cells, the first column aligned left; empty without rows."""
    if not rows:
        return ""
    lines = [[*rows[0]], ["---", *["---:"] * (len(rows[0]) - 1)], *(row.values() for row in rows)]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)

"""Copies the first documents of a data set to JSON lines, for example as validation data of a streamed run.

python examples/paper/take_documents.py --input hf://NAME:CONFIG --documents 30000 --output held_out.jsonl
"""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import NoReturn

sys.path.append(str(Path(__file__).resolve().parents[2]))

from megatron_ladder.command_line import parse_command_line  # noqa: E402
from megatron_ladder.data.reading.find import find_sources  # noqa: E402
from megatron_ladder.data.reading.protocol import Reading, read_records  # noqa: E402
from megatron_ladder.errors import UserError, run_program  # noqa: E402
from megatron_ladder.files import write_atomically  # noqa: E402


@dataclass(frozen=True)
class TakeOptions:
    """Input and output."""

    input: tuple[str, ...]
    """Input, as for --input of preprocess_data.py."""
    output: Path
    """Output file with one JSON object per line; the key is text."""
    documents: int = 30000
    """Number of documents to copy."""
    json_keys: tuple[str, ...] = ("text",)
    """Key of a JSON object, or column of a table, that contains the text."""


def documents(inputs: Sequence[str], keys: tuple[str, ...]) -> Iterator[str]:
    """Yield the texts in order, without empty ones.

    Raises:
        UserError: an input is missing, or a record has no text.
    """
    return (text for text, *_ in read_records(find_sources(inputs, Reading(keys))) if text)


def main(argv: Sequence[str]) -> None:
    """Copy the documents."""
    options: TakeOptions
    (options,) = parse_command_line(
        [TakeOptions], argv, program="take_documents.py", description="Copy the first documents to JSON lines."
    )
    taken = list(islice(documents(options.input, options.json_keys), options.documents))
    if len(taken) < options.documents:
        found = f"--input contains only {len(taken)}"
        raise UserError(f"--documents {options.documents}: {found}: lower --documents, or add inputs")
    write_atomically(options.output, "".join(json.dumps({"text": text}) + "\n" for text in taken))
    print(f"{options.output}: {len(taken):,} documents")


def entry_point() -> NoReturn:
    """Console entry point."""
    run_program(main)


if __name__ == "__main__":
    entry_point()

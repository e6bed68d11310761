"""Copies the first documents of texts to JSON lines, which keeps them apart from a stream that has no such end.

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

from megatron_ladder.data.files import write_atomically  # noqa: E402
from megatron_ladder.data.reading.find import find_sources  # noqa: E402
from megatron_ladder.data.reading.protocol import Reading  # noqa: E402
from megatron_ladder.errors import UserError, run_program  # noqa: E402
from megatron_ladder.flags import parse_command_line  # noqa: E402


@dataclass(frozen=True)
class TakeOptions:
    """Input and output."""

    input: tuple[str, ...]
    """What to read, as preprocess_data.py's --input."""
    output: Path
    """File for an object a line, with the text under the key text."""
    documents: int = 30000
    """How many to take."""
    json_keys: tuple[str, ...] = ("text",)
    """Key of a JSON object, or column of a table, that holds the text."""


def documents(inputs: Sequence[str], keys: tuple[str, ...]) -> Iterator[str]:
    """The texts, in order, without empty ones.

    Raises:
        UserError: an input that is missing, or a record without a text.
    """
    reading = Reading(keys)
    for source in find_sources(inputs, reading):
        for block in source.blocks(reading):
            parsed = block.read(reading)
            if parsed.bad:
                raise UserError(f"--input {source.name}: {parsed.bad[0].reason}")
            yield from (text for text in parsed.columns[0] if text)


def main(argv: Sequence[str]) -> None:
    """Reads until there are enough."""
    options: TakeOptions
    (options,) = parse_command_line(
        [TakeOptions], argv, program="take_documents.py", description="Copies the first documents to JSON lines."
    )
    taken = list(islice(documents(options.input, options.json_keys), options.documents))
    if len(taken) < options.documents:
        raise UserError(f"--documents {options.documents}: --input holds {len(taken)}: ask for fewer, or give more")
    write_atomically(options.output, "".join(json.dumps({"text": text}) + "\n" for text in taken).encode())
    print(f"{options.output}: {len(taken):,} documents")


def entry_point() -> NoReturn:
    """Console entry point."""
    run_program(main)


if __name__ == "__main__":
    entry_point()

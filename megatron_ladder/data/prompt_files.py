"""Files of prompts: plain text, or JSON lines with the key prompt."""

from pathlib import Path

import msgspec

from megatron_ladder.data.reading.protocol import BYTE_ORDER_MARK, is_json_lines
from megatron_ladder.errors import UserError
from megatron_ladder.files import reject_pointer


class _Record(msgspec.Struct):
    prompt: str


def read_prompt_file(path: Path, by_line: bool = False) -> list[tuple[str, str]]:
    """Return the prompts of a file, each with its path and line.

    Plain text is one prompt, or one per line that is not blank (`by_line`). Raises UserError if the file cannot be
    read, is not valid, or contains no prompt.
    """
    source = str(path)
    try:
        encoded = path.read_bytes()
        reject_pointer(path, encoded)
        content = encoded.removeprefix(BYTE_ORDER_MARK).decode()
    except OSError as error:
        raise UserError(f"{source}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{source}: not UTF-8: {error.reason} at byte {error.start}") from None
    if not (by_line or is_json_lines(path)):
        return [(source, content.removesuffix("\n").removesuffix("\r"))]
    prompts = []
    for number, line in enumerate(content.split("\n"), start=1):
        text = line.removesuffix("\r")
        if not text.strip():
            continue
        if is_json_lines(path):
            try:
                text = msgspec.json.decode(line, type=_Record).prompt
            except (msgspec.MsgspecError, RecursionError):
                example = '{"prompt": "Once"}'
                raise UserError(
                    f"{source}:{number}: expected a JSON object with a text, for example {example}"
                ) from None
        prompts.append((f"{source}:{number}", text))
    if not prompts:
        raise UserError(f"{source}: the file contains no prompt")
    return prompts

"""What lies beside the tensors in a run's checkpoints: its tokenizer, and what the loaded model came with.

All of it is read when the run starts, and written with every save: files that are removed or replaced meanwhile
change nothing.
"""

import json
from pathlib import Path
from typing import Any

from megatron_ladder.checkpoint.format import CARRIED, CHAT_TEMPLATE, GENERATION_CONFIG, TOKENIZERS, Checkpoint
from megatron_ladder.data.tokenizers import Tokenizer, tokenizer_files
from megatron_ladder.files import write_atomically

IMPORTED = "hugging_face"
"""Key of a manifest: the type and the ids of special tokens of the directory that a model was imported from."""
TOKENIZER_CONFIG = "tokenizer_config.json"


class SmallFiles:
    """The files of one run; of use on the rank that publishes."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._files = {} if tokenizer is None else tokenizer_files(tokenizer)
        self._imported: Any = None

    def carry_on(self, checkpoint: Checkpoint) -> list[str]:
        """Takes over what a checkpoint that was loaded has of the directory that its model was imported from.

        The run's own tokenizer counts where both have a file. Nothing is taken over from a model with another
        tokenizer, whose ids and template mean something else.

        Returns:
            A line for what is not taken over, and why.
        """
        notes, found = [], dict[str, bytes]()
        stored = {record["name"] for record in checkpoint.manifest["files"]}
        for path in (checkpoint.directory / name for name in CARRIED if name in stored):
            try:
                found[path.name] = path.read_bytes()
            except OSError as error:
                notes.append(f"{path}: cannot be read: {error.strerror}: checkpoints of this run are without it")
        imported = checkpoint.manifest.get(IMPORTED)
        if self._has_another_tokenizer(checkpoint, found):
            lost = [name for name in (CHAT_TEMPLATE, GENERATION_CONFIG) if name in found]
            lost += ["the ids of special tokens"] if imported is not None else []
            if lost:
                notes.append(
                    f"{checkpoint.directory}: is of another tokenizer than this run: its {', '.join(lost)} are not "
                    "taken over"
                )
            return notes
        if "chat_template" in _json_object(self._files.get(TOKENIZER_CONFIG, b"")):
            # The file would count before the run's own template.
            found.pop(CHAT_TEMPLATE, None)
        self._files = found | self._files
        self._imported = imported
        return notes

    def header(self) -> dict[str, Any]:
        """What a manifest says of them."""
        known = self._tokenizer
        header: dict[str, Any] = {"tokenizer": None if known is None else {"type": known.kind, "sha256": known.sha256}}
        return header if self._imported is None else header | {IMPORTED: self._imported}

    def write(self, directory: Path) -> None:
        """Writes them into the directory of a save."""
        for name, content in self._files.items():
            write_atomically(directory / name, content)

    def _has_another_tokenizer(self, checkpoint: Checkpoint, found: dict[str, bytes]) -> bool:
        ours, theirs = self._tokenizer, checkpoint.manifest.get("tokenizer")
        if ours is None or (theirs is None and not any(name in found for name in TOKENIZERS)):
            return False
        same = theirs is not None and theirs["sha256"] == ours.sha256
        # A directory may hold one tokenizer in two forms, of which the import names only one.
        return not same and not (ours.contents and ours.contents[0] in found.values())


def _json_object(content: bytes) -> dict[str, Any]:
    try:
        values = json.loads(content)
    except ValueError:
        return {}
    return values if isinstance(values, dict) else {}

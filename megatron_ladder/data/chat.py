"""Conversations to tokens, and to a mask that says which of them the assistant says.

The tokenizer's template writes the whole conversation, its beginning-of-sequence token included; nothing is put in
front of that. A special token that somebody writes into a message becomes that token, as in transformers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tokenizers
from numpy.typing import NDArray

from megatron_ladder.data.chat_template import ChatTemplate, Message, NotRendered, load_chat_template
from megatron_ladder.data.tokenizers import Tokenizer
from megatron_ladder.errors import UserError


@dataclass(frozen=True)
class ChatKeys:
    """Under which keys a row has its conversation."""

    messages: str = "messages"
    """A list of objects with `role` and `content`."""
    instruction: str = "instruction"
    """Without such a list: what the user says,"""
    input: str = "input"
    """what may be added to that after an empty line,"""
    output: str = "output"
    """and what the assistant says."""

    def read(self, row: Mapping[str, Any]) -> list[Message]:
        """The messages of a row.

        Raises:
            NotRendered: the row has no conversation.
        """
        if row.get(self.messages) is not None:
            return _checked(self.messages, row[self.messages])
        if self.instruction not in row or self.output not in row:
            keys = ", ".join(map(repr, row)) or "none"
            raise NotRendered(
                f"no {self.messages!r}, and no {self.instruction!r} with {self.output!r} (keys found: {keys}): name "
                "them by --chat-keys"
            )
        asked, more, answered = (row.get(key) for key in (self.instruction, self.input, self.output))
        for key, text in ((self.instruction, asked), (self.input, more or ""), (self.output, answered)):
            if not isinstance(text, str):
                raise NotRendered(f"a text expected under {key!r}, a {type(text).__name__} found")
        question = f"{asked}\n\n{more}" if more else asked
        return [{"role": "user", "content": question}, {"role": "assistant", "content": answered}]


def _checked(key: str, messages: object) -> list[Message]:
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise NotRendered(f"a list of messages expected under {key!r}")
    for place, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise NotRendered(f"{key}[{place}]: an object with a 'role' expected")
        if not isinstance(message.get("content", ""), str | list | None):
            kind = type(message["content"]).__name__
            raise NotRendered(f"{key}[{place}]: a text expected under 'content', a {kind} found")
    # Columns of a table have every key in every row, with nothing in those that a message lacks.
    return [{name: value for name, value in message.items() if value is not None} for message in messages]


class Conversation(NamedTuple):
    """What training reads of one conversation."""

    token_ids: NDArray[np.int64]
    """[tokens]"""
    loss_mask: NDArray[np.uint8]
    """[tokens]: 1 where the assistant says the token, or ends what it says by it"""


class ConversationEncoder:
    """A template and a tokenizer, which give the tokens of conversations."""

    def __init__(self, tokenizer: Tokenizer, template: Path | None = None, keys: ChatKeys | None = None) -> None:
        """
        Args:
            template: file of a template to use instead of the tokenizer's own.

        Raises:
            UserError: the tokenizer is none of Hugging Face's, or there is no template.
        """
        path = tokenizer.files[0] if tokenizer.files else Path()
        if path.suffix != ".json":
            raise UserError(
                f"--chat: --tokenizer-type {tokenizer.kind} does not know special tokens in a text: use "
                "HuggingFaceTokenizer with a tokenizer.json"
            )
        self.keys = keys or ChatKeys()
        self.template: ChatTemplate = load_chat_template(path, template)
        self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        added = self._tokenizer.get_added_tokens_decoder().values()
        self._specials = tuple(token.content for token in added if token.special)

    def encode(self, rows: Sequence[Mapping[str, Any]]) -> list[Conversation]:
        """Conversations of some rows.

        Raises:
            NotRendered: a row has none, or the template does not take it; its second argument is the row's place.
        """
        rendered = []
        for place, row in enumerate(rows):
            try:
                rendered.append(self.template.render(self.keys.read(row), self._specials))
            except NotRendered as error:
                raise NotRendered(str(error), place) from None
        encodings = self._tokenizer.encode_batch([text for text, _ in rendered], add_special_tokens=False)
        return [
            Conversation(np.array(encoding.ids, np.int64), _mask(encoding.offsets, answers))
            for encoding, (_, answers) in zip(encodings, rendered, strict=True)
        ]


def _mask(offsets: Sequence[tuple[int, int]], answers: Sequence[tuple[int, int]]) -> NDArray[np.uint8]:
    """1 for each token that has a character of an answer; `offsets` are first character and end of each token."""
    places = np.array(offsets, np.int64).reshape(-1, 2)
    mask = np.zeros(len(places), np.uint8)
    for begin, end in answers:
        mask[(places[:, 0] < end) & (places[:, 1] > begin)] = 1
    return mask

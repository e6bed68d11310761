"""Conversations to tokens, and to a mask that says which of them the assistant says.

The tokenizer's template writes the whole conversation, its beginning-of-sequence token included; nothing is put in
front of that. A special token that somebody writes into a message becomes that token, as in transformers.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tokenizers
from numpy.typing import NDArray

from megatron_ladder.data.chat_template import ChatTemplate, Message, NotRendered, Rendered, load_chat_template
from megatron_ladder.data.encoding import KeyTokens
from megatron_ladder.data.indexed import token_dtype
from megatron_ladder.data.reading.protocol import BadRecord, Parsed, Reading
from megatron_ladder.data.tokenizers import Tokenizer, TokenizerSource, load_source, source_of
from megatron_ladder.errors import UserError

SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}
"""What conversations in ShareGPT's form call who speaks; other names are roles as they stand."""


def read_messages(keys: Sequence[str], values: Sequence[Any]) -> list[Message]:
    """The messages of a record.

    Args:
        keys: of a list of objects with `role` and `content`, or `from` and `value`; or of an instruction and an
            output; or of an instruction, of what is added to it after an empty line, and of an output.
        values: what the record has under them.

    Raises:
        NotRendered: that is no conversation.
    """
    if len(keys) == 1:
        return _checked(keys[0], values[0])
    for key, value in zip(keys, values, strict=True):
        if not isinstance(value, str) and (value is not None or len(keys) == 2 or key != keys[1]):
            raise NotRendered(f"a text expected under {key!r}, a {type(value).__name__} found")
    question = "\n\n".join(text for text in values[:-1] if text)
    return [{"role": "user", "content": question}, {"role": "assistant", "content": values[-1]}]


def _checked(key: str, messages: object) -> list[Message]:
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise NotRendered(f"a list of messages expected under {key!r}")
    messages = [_with_role(message) for message in messages]
    for place, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise NotRendered(f"{key}[{place}]: an object with a 'role' expected")
        if not isinstance(message.get("content", ""), str | list | None):
            kind = type(message["content"]).__name__
            raise NotRendered(f"{key}[{place}]: a text expected under 'content', a {kind} found")
    # Columns of a table have every key in every row, with nothing in those that a message lacks.
    return [{name: value for name, value in message.items() if value is not None} for message in messages]


def _with_role(message: Any) -> Any:
    """A message of ShareGPT's form, `from` and `value`, in the usual one; any other as it is."""
    if not (isinstance(message, dict) and isinstance(message.get("from"), str) and message.get("role") is None):
        return message
    speaker = message["from"]
    return {"role": SHAREGPT_ROLES.get(speaker, speaker), "content": message.get("value")}


class Conversation(NamedTuple):
    """What training reads of one conversation."""

    token_ids: NDArray[np.int64]
    """[tokens]"""
    loss_mask: NDArray[np.uint8]
    """[tokens]: 1 where the assistant says the token, or ends what it says by it"""


class ConversationEncoder:
    """A template and a tokenizer, which give the tokens of conversations."""

    def __init__(self, tokenizer: Tokenizer, template: Path | None = None) -> None:
        """
        Args:
            template: file of a template to use instead of the tokenizer's own.

        Raises:
            UserError: the tokenizer is none of Hugging Face's, or there is no template.
        """
        path = tokenizer.files[0] if tokenizer.files else Path()
        if path.suffix != ".json" or tokenizer.kind != "HuggingFaceTokenizer":
            raise UserError(
                f"--chat: --tokenizer-type {tokenizer.kind} does not know special tokens in a text: use "
                "HuggingFaceTokenizer with a tokenizer.json"
            )
        self.template: ChatTemplate = load_chat_template(path, template)
        self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        added = self._tokenizer.get_added_tokens_decoder().values()
        self._specials = tuple(token.content for token in added if token.special)

    def render(self, messages: Sequence[Message]) -> Rendered:
        """Raises NotRendered when the template does not take the messages."""
        rendered = self.template.render(messages, self._specials)
        try:
            rendered.text.encode()
        except UnicodeEncodeError:
            raise NotRendered("it holds half of a character") from None
        return rendered

    def encode(self, rendered: Sequence[Rendered]) -> list[Conversation]:
        """Tokens of rendered conversations."""
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


@dataclass(frozen=True)
class ChatTask:
    """Every record is a conversation; see `Task`."""

    source: TokenizerSource
    sha256: str
    vocab_size: int
    eod_id: int
    template: Path | None
    """Instead of the tokenizer's own."""
    template_text: str
    reading: Reading
    append_eod: bool
    conversations = has_loss_mask = True

    @property
    def outputs(self) -> tuple[str, ...]:
        """One, called by the first key."""
        return self.reading.keys[:1]

    @property
    def dtype(self) -> "np.dtype[Any]":
        """Megatron's choice for the vocabulary."""
        return token_dtype(self.vocab_size)

    def identity(self) -> dict[str, Any]:
        """Tokenizer, template and flags."""
        return {
            "tokenizer": self.sha256,
            "--chat-template": self.template_text,
            "--chat-keys": list(self.reading.keys),
            "--append-eod": self.append_eod,
            "--max-document-megabytes": self.reading.most_bytes >> 20,
        } | ({"end-of-document token": self.eod_id} if self.append_eod else {})

    def prepare(self, parsed: Parsed) -> Parsed:
        """One column of rendered conversations; what cannot be rendered is a bad record."""
        encoder = encoder_of(self.source, self.template, self.sha256)
        rendered, bad = list[Any](), list(parsed.bad)
        for place, values in enumerate(zip(*parsed.columns, strict=True)):
            try:
                rendered.append(encoder.render(read_messages(self.reading.keys, values)))
            except NotRendered as error:
                number = place if parsed.numbers is None else parsed.numbers[place]
                bad.append(BadRecord(number, f"{encoder.template.name} does not take it: {error}"))
        return Parsed((rendered,), parsed.records, tuple(sorted(bad)))

    def encode(self, columns: Sequence[list[Any]]) -> tuple[KeyTokens, ...]:
        """Tokens and loss mask of rendered conversations."""
        found = encoder_of(self.source, self.template, self.sha256).encode(columns[0])
        found = [conversation for conversation in found if len(conversation.token_ids)]
        if self.append_eod:
            found = [Conversation(np.append(ids, self.eod_id), np.append(mask, np.uint8(0))) for ids, mask in found]
        if not found:
            return (KeyTokens(np.empty(0, self.dtype), np.empty(0, np.int32), -1, np.empty(0, np.uint8)),)
        lengths = np.array([len(conversation.token_ids) for conversation in found], np.int32)
        ids = np.concatenate([conversation.token_ids for conversation in found])
        mask = np.concatenate([conversation.loss_mask for conversation in found])
        return (KeyTokens(ids.astype(self.dtype), lengths, int(ids.max()), mask),)


def chat_task(tokenizer: Tokenizer, template: Path | None, reading: Reading, append_eod: bool) -> ChatTask:
    """A task whose template was found.

    Raises:
        UserError: see ConversationEncoder.
    """
    text = ConversationEncoder(tokenizer, template).template.source
    return ChatTask(
        source_of(tokenizer), tokenizer.sha256, tokenizer.vocab_size, tokenizer.eod_id,
        template, text, reading, append_eod,
    )  # fmt: skip


@functools.cache
def encoder_of(source: TokenizerSource, template: Path | None, sha256: str) -> ConversationEncoder:
    """Loaded once a process. The checksum makes sure that all processes use the same tokenizer."""
    tokenizer = load_source(source)
    if tokenizer.sha256 != sha256:
        raise UserError(f"--tokenizer-model {source.tokenizer_model}: changed while it was used: start again")
    return ConversationEncoder(tokenizer, template)

"""Converts conversations to tokens and to a mask that marks the assistant's tokens.

The tokenizer's template renders the whole conversation, including the beginning-of-sequence token; nothing else is
prepended. As in transformers, a special token that is spelled out in a message becomes that token.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tokenizers
from numpy.typing import NDArray

from megatron_ladder.data.chat_template import (
    ChatTemplate,
    ChatTemplateError,
    Message,
    RenderedConversation,
    read_chat_template,
)
from megatron_ladder.data.encoding import KeyTokens, Task, load_unchanged
from megatron_ladder.data.reading.protocol import BadRecord, Parsed, Reading
from megatron_ladder.data.tokenizers import HuggingFaceTokenizer, Tokenizer, TokenizerSource
from megatron_ladder.errors import UserError

_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}
"""Speakers in ShareGPT's format -> roles; other names are used as roles unchanged."""


def read_messages(keys: Sequence[str], values: Sequence[Any]) -> list[Message]:
    """Return the messages of a record; raises ChatTemplateError if it is not a conversation.

    `keys` names one list of objects with `role` and `content`, or `from` and `value`; or an instruction and an output;
    or an instruction, an input that is appended to it after an empty line, and an output. `values` are the record's
    values.
    """
    if len(keys) > 1:
        for key, value in zip(keys, values, strict=True):
            if not isinstance(value, str) and (value is not None or len(keys) == 2 or key != keys[1]):
                raise ChatTemplateError(f"expected a text under {key!r}, found {type(value).__name__}")
        question = "\n\n".join(text for text in values[:-1] if text)
        return [{"role": "user", "content": question}, {"role": "assistant", "content": values[-1]}]
    key, messages = keys[0], values[0]
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise ChatTemplateError(f"expected a list of messages under {key!r}")
    found: list[Message] = []
    for place, message in enumerate(messages):
        if isinstance(message, dict) and isinstance(message.get("from"), str) and message.get("role") is None:
            role = _SHAREGPT_ROLES.get(message["from"], message["from"])
            message = {"role": role, "content": message.get("value")}
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ChatTemplateError(f"{key}[{place}]: expected an object with a 'role'")
        if not isinstance(message.get("content", ""), str | list | None):
            kind = type(message["content"]).__name__
            raise ChatTemplateError(f"{key}[{place}]: expected a text under 'content', found {kind}")
        # In a column of a table every row has every key; those that a message lacks are null.
        found.append({name: value for name, value in message.items() if value is not None})
    return found


class Conversation(NamedTuple):
    """The tokens of a conversation [tokens]; the mask [tokens] is 1 for answers, including the token that ends each."""

    token_ids: NDArray[np.int64]
    loss_mask: NDArray[np.uint8]


class ConversationEncoder:
    """Converts conversations to tokens with a template and a tokenizer."""

    def __init__(self, tokenizer: Tokenizer, template: Path | None = None) -> None:
        """`template` replaces the tokenizer's own; raises UserError without a template or a tokenizer.json."""
        path = tokenizer.files[0] if tokenizer.files else Path()
        if path.suffix != ".json" or tokenizer.kind != HuggingFaceTokenizer.kind:
            raise UserError(
                f"--chat: --tokenizer-type {tokenizer.kind} does not recognise special tokens in a text: use "
                "HuggingFaceTokenizer with a tokenizer.json"
            )
        self.template: ChatTemplate = ChatTemplate(
            *read_chat_template(path, template, fix="pass one with --chat-template FILE")
        )
        self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        added = self._tokenizer.get_added_tokens_decoder().values()
        self._specials = tuple(token.content for token in added if token.special)

    def render(self, messages: Sequence[Message]) -> RenderedConversation:
        """Return the text of a conversation; raises ChatTemplateError if the template rejects it."""
        rendered = self.template.render(messages, self._specials)
        try:
            rendered.text.encode()
        except UnicodeEncodeError:
            raise ChatTemplateError("it contains half of a surrogate pair") from None
        return rendered

    def encode(self, rendered: Sequence[RenderedConversation]) -> list[Conversation]:
        """Return the tokens of rendered conversations."""
        encodings = self._tokenizer.encode_batch([text for text, _ in rendered], add_special_tokens=False)
        conversations = []
        for encoding, (_, answers) in zip(encodings, rendered, strict=True):
            # First character and end of each token; a token that overlaps an answer counts.
            offsets = np.array(encoding.offsets, np.int64).reshape(-1, 2)
            mask = np.zeros(len(offsets), np.uint8)
            for begin, end in answers:
                mask[(offsets[:, 0] < end) & (offsets[:, 1] > begin)] = 1
            conversations.append(Conversation(np.array(encoding.ids, np.int64), mask))
        return conversations


@dataclass(frozen=True)
class _ChatTask(Task):
    """Makes each record, which is a conversation, a document. There is one output, named after the first key."""

    template: Path | None
    template_text: str
    conversations = True

    @property
    def outputs(self) -> tuple[str, ...]:
        return self.reading.keys[:1]

    def _flags(self) -> dict[str, Any]:
        return {"--chat-template": self.template_text, "--chat-keys": list(self.reading.keys)}

    def prepare(self, parsed: Parsed) -> Parsed:
        """Return one column of rendered conversations; conversations that cannot be rendered are bad records."""
        encoder = _load_conversation_encoder(self.source, self.template, self.sha256)
        rendered, bad = list[Any](), list(parsed.bad)
        for place, values in enumerate(zip(*parsed.columns, strict=True)):
            try:
                rendered.append(encoder.render(read_messages(self.reading.keys, values)))
            except ChatTemplateError as error:
                bad.append(BadRecord(parsed.numbers[place], f"{encoder.template.name} rejects it: {error}"))
        return Parsed((rendered,), (), tuple(sorted(bad)))

    def encode(self, columns: Sequence[list[Any]]) -> tuple[KeyTokens, ...]:
        found = _load_conversation_encoder(self.source, self.template, self.sha256).encode(columns[0])
        found = [conversation for conversation in found if len(conversation.token_ids)]
        if self.append_eod:
            found = [Conversation(np.append(ids, self.eod_id), np.append(mask, np.uint8(0))) for ids, mask in found]
        lengths = np.array([len(conversation.token_ids) for conversation in found], np.int32)
        ids = np.concatenate([np.empty(0, np.int64), *(conversation.token_ids for conversation in found)])
        mask = np.concatenate([np.empty(0, np.uint8), *(conversation.loss_mask for conversation in found)])
        return (KeyTokens(ids.astype(self.dtype), lengths, int(ids.max(initial=-1)), mask),)


def chat_task(tokenizer: Tokenizer, template: Path | None, reading: Reading, append_eod: bool) -> Task:
    """Return the task of --chat; raises UserError as ConversationEncoder."""
    text = ConversationEncoder(tokenizer, template).template.source
    return _ChatTask.of(tokenizer, reading, append_eod, template, text)


@functools.cache
def _load_conversation_encoder(source: TokenizerSource, template: Path | None, sha256: str) -> ConversationEncoder:
    return ConversationEncoder(load_unchanged(source, sha256), template)

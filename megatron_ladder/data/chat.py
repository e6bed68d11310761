"""Converts conversations to tokens and to a mask that marks the assistant's tokens.

The tokenizer's template renders the whole conversation, including the beginning-of-sequence token; nothing else is
prepended. A special token that a message spells is text, so that only the template writes special tokens. In
transformers and vLLM it becomes that token, as here with `parse_special_tokens`.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_ladder.data.chat_kinds import ConversationKinds
from megatron_ladder.data.chat_records import ConversationError, Message, Tools, read_record
from megatron_ladder.data.chat_template import ChatTemplate, ChatTemplateError, RenderedConversation, read_chat_template
from megatron_ladder.data.encoding import DocumentCounts, KeyTokens, Task, join_documents
from megatron_ladder.data.indexed import IndexedDataset
from megatron_ladder.data.reading.protocol import Record
from megatron_ladder.errors import Problem
from megatron_ladder.tokenizers.kinds import Tokenizer

_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
"""Roles of any template; another role must occur in the text of the template."""


class Conversation(NamedTuple):
    """The tokens of a conversation [tokens]; the mask [tokens] is 1 for answers, including the token that ends each."""

    token_ids: NDArray[np.int64]
    loss_mask: NDArray[np.uint8]


class ConversationEncoder:
    """Converts conversations to tokens with a template and a tokenizer."""

    def __init__(self, tokenizer: Tokenizer, template: Path | None = None, parse_special_tokens: bool = False) -> None:
        """`template` replaces the tokenizer's own; raises UserError without a template or a tokenizer.json.

        `parse_special_tokens` makes a special token that a message spells that token, instead of text.
        """
        source = read_chat_template(tokenizer, template, fix="pass one with {chat_template} FILE")
        self.template = ChatTemplate(*source)
        self._tokenizer = tokenizer
        self._parse_special_tokens = parse_special_tokens
        self._spelling = self.template.spelling(tokenizer)
        self._kinds = ConversationKinds(self.template)

    def render(self, messages: Sequence[Message], tools: Tools = None) -> RenderedConversation:
        """Return the text of a conversation.

        Raises ChatTemplateError if the template rejects it, and ConversationError if it leaves out a part of an answer.
        """
        for role in (message["role"] for message in messages):
            if role not in _ROLES and not re.search(rf"['\"]{re.escape(role)}['\"]", self.template.source):
                reason = f"the role {{role}} is none of {', '.join(_ROLES)}, and not in the template"
                fix = "rename it, or pass a {chat_template} that names it"
                raise ChatTemplateError(Problem({}, reason, fix, role=repr(role)))
        kind = self._kinds.find(messages, tools)
        messages = kind.spelling.apply(messages)
        rendered = self.template.render(
            messages,
            self._tokenizer.special_tokens,
            tools,
            lambda text: self._kinds.check_answers(text, messages, tools),
        )._replace(unused=kind.unused)
        try:
            rendered.text.encode()
        except UnicodeEncodeError:
            raise ChatTemplateError("it contains half of a surrogate pair") from None
        if self._parse_special_tokens:
            return rendered
        spelled = self.template.find_spelled(rendered.text, messages, tools, self._spelling)
        return rendered._replace(spelled=spelled)

    def encode(self, rendered: Sequence[RenderedConversation]) -> list[Conversation]:
        encodings = self._tokenizer.encode_with_offsets(
            [conversation.text for conversation in rendered], [conversation.spelled for conversation in rendered]
        )
        conversations = []
        for (ids, places), conversation in zip(encodings, rendered, strict=True):
            # A token that overlaps an answer counts.
            offsets = np.array(places, np.int64).reshape(-1, 2)
            mask = np.zeros(len(offsets), np.uint8)
            for begin, end in conversation.answers:
                mask[(offsets[:, 0] < end) & (offsets[:, 1] > begin)] = 1
            conversations.append(Conversation(np.array(ids, np.int64), mask))
        return conversations

    def count_spelled(self, rendered: Sequence[RenderedConversation]) -> Counter[str]:
        """Return how often messages spell each special token, and it was encoded as text."""
        counts = Counter[str]()
        if self._spelling is not None:
            for conversation in rendered:
                matches = (self._spelling.match(conversation.text, position) for position in conversation.spelled)
                counts.update(match[0] for match in matches if match is not None)
        return counts


@dataclass(frozen=True)
class ChatTask(Task):
    """Makes each record, which is a conversation, a document. There is one output, named after the first key."""

    encoder: ConversationEncoder = field(kw_only=True)

    @property
    def chat_template(self) -> str:
        return self.encoder.template.source

    @property
    def outputs(self) -> tuple[str, ...]:
        return self.reading.keys[:1]

    def answer_ends(self, dataset: IndexedDataset) -> set[int]:
        assert dataset.loss_mask is not None
        tokens = dataset.tokens
        counts = dataset.loss_mask.view(np.bool_)
        last = np.flatnonzero(counts & ~np.append(counts[1:], False))
        end_ids = set[int]()
        # A generation block of a template may include white space after the end token.
        while len(last):
            ids = np.unique(tokens[last]).tolist()
            end_ids.update(ids)
            blank = [number for number in ids if self.tokenizer.decode([number]).isspace()]
            last = last[np.isin(tokens[last], blank)] - 1
            last = last[(last >= 0) & counts[last]]
        # The end-of-document token may not be flagged as special.
        return end_ids & {*self.tokenizer.control_tokens, self.tokenizer.eod_id}

    def prepare(self, values: Record) -> RenderedConversation | str:
        try:
            messages, tools, unread = read_record(self.reading.keys, values)
            rendered = self.encoder.render(messages, tools)
        except ConversationError as error:
            return str(error)
        except ChatTemplateError as error:
            return f"{self.encoder.template.name} rejects it: {error}"
        return rendered._replace(unused=(*map(repr, unread), *rendered.unused))

    def encode(self, records: Sequence[RenderedConversation]) -> tuple[KeyTokens, ...]:
        conversations = self.encoder.encode(records)
        end = self.tokenizer.eod_id if self.append_eod else None
        ids, lengths = join_documents([conversation.token_ids.tolist() for conversation in conversations], end)
        masks = [conversation.loss_mask.tolist() for conversation in conversations]
        mask, _ = join_documents(masks, 0 if self.append_eod else None)
        unused = Counter(name for conversation in records for name in conversation.unused)
        counts = DocumentCounts(self.encoder.count_spelled(records), unused=unused)
        return (KeyTokens(ids.astype(self.dtype), lengths, counts, mask.astype(np.uint8)),)

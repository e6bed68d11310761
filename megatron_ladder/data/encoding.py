"""The work of a preprocessing worker after reading: converts the values of some records to tokens."""

import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_ladder.data.indexed import IndexedDataset, token_dtype
from megatron_ladder.data.reading.protocol import Reading
from megatron_ladder.errors import flag_name
from megatron_ladder.tokenizers.kinds import Tokenizer
from megatron_ladder.tokenizers.special_tokens import count_spelled, spelling_pattern


@dataclass
class DocumentCounts:
    """Counts of unusual tokens in some documents; JSON-able."""

    spelled: dict[str, int] = field(default_factory=dict)
    """Special tokens -> how often the texts spell them."""
    inner_ends: int = 0
    """End-of-document tokens that do not end a document; 0 for conversations, whose template may write them."""
    unused: dict[str, int] = field(default_factory=dict)
    """Keys without an effect -> how many conversations have them."""

    def add(self, other: "DocumentCounts") -> None:
        for counts, more in ((self.spelled, other.spelled), (self.unused, other.unused)):
            for name, number in more.items():
                counts[name] = counts.get(name, 0) + number
        self.inner_ends += other.inner_ends


class KeyTokens(NamedTuple):
    """Tokens [sum(lengths)] of some documents in the type of the file, without documents that have no token.

    The loss mask [sum(lengths)] is None if every token counts.
    """

    token_ids: NDArray[Any]
    lengths: NDArray[np.int32]
    counts: DocumentCounts
    loss_mask: NDArray[np.uint8] | None = None


@dataclass(frozen=True)
class Task:
    """Makes each text of a key a document. Each worker process receives it once."""

    tokenizer: Tokenizer
    reading: Reading = Reading()
    append_eod: bool = False
    parse_special_tokens: bool = False
    """Whether the spelling of a special token in a text becomes that token."""

    @property
    def chat_template(self) -> str | None:
        """The template with which every document was made, which is a conversation with a loss mask; else None."""
        return None

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the output data sets: `<prefix>_<name>_document`."""
        return self.reading.keys

    @property
    def dtype(self) -> "np.dtype[Any]":
        """Type of the token files: Megatron's choice for the vocabulary."""
        return token_dtype(self.tokenizer.vocab_size)

    def answer_ends(self, dataset: IndexedDataset) -> set[int]:
        """Return the special tokens that end the answers of a data set that the task made."""
        return set()

    def identity(self) -> dict[str, Any]:
        """Return everything except the input that determines the tokens; JSON-able."""
        fields = {
            "append_eod": self.append_eod,
            "chat_template": self.chat_template,
            "max_document_megabytes": self.reading.max_bytes >> 20,
            "parse_special_tokens": self.parse_special_tokens,
        }
        values: dict[str, Any] = {"tokenizer": self.tokenizer.sha256, "keys": list(self.reading.keys)}
        values |= {flag_name(name): value for name, value in fields.items()}
        return values | ({"end-of-document token": self.tokenizer.eod_id} if self.append_eod else {})

    def prepare(self, values: Any) -> Any:
        """Return what to encode of the values of a record, or the reason why it cannot be encoded as a text."""
        return values

    def encode(self, records: Sequence[Any]) -> tuple[KeyTokens, ...]:
        """Return the tokens of prepared records for each output."""
        return tuple(self._encode([values[column] for values in records]) for column in range(len(self.outputs)))

    def _encode(self, texts: Sequence[str]) -> KeyTokens:
        documents = self.tokenizer.encode_documents(texts, self.parse_special_tokens)
        ids, lengths = join_documents(documents, self.tokenizer.eod_id if self.append_eod else None)
        ends = int(np.count_nonzero(ids == self.tokenizer.eod_id)) - self.append_eod * len(lengths)
        spelled = count_spelled(texts, spelling_pattern(self.tokenizer.special_tokens))
        return KeyTokens(ids.astype(self.dtype), lengths, DocumentCounts(spelled, ends))


def join_documents(documents: Sequence[list[int]], end: int | None) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return the joined ids [tokens] and the length of each document that is not empty; `end` follows each."""
    joined = array.array("i")
    lengths = list[int]()
    for ids in documents:
        if ids:
            # Twice as fast as np.array, which inspects the type of every number.
            joined.fromlist(ids)
            if end is not None:
                joined.append(end)
            lengths.append(len(ids) if end is None else len(ids) + 1)
    return np.array(joined, np.int32), np.array(lengths, np.int32)

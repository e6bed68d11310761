"""Tokenizers behind one small protocol: what each reads, how one travels, and how they are trained."""

from megatron_ladder.data.tokenizers.hugging_face import GPT2BPETokenizer, HuggingFaceTokenizer
from megatron_ladder.data.tokenizers.loading import (
    DESCRIPTION_FILE,
    WITHOUT_FILES,
    TokenizerSource,
    TokenizerType,
    copy_tokenizer,
    load_source,
    load_tokenizer,
    load_tokenizer_from_directory,
    source_of,
    tokenizer_files,
)
from megatron_ladder.data.tokenizers.plain import ByteTokenizer, NullTokenizer
from megatron_ladder.data.tokenizers.protocol import Tokenizer
from megatron_ladder.data.tokenizers.sentencepiece_model import SentencePieceTokenizer
from megatron_ladder.data.tokenizers.training import train_bpe, train_sentencepiece

__all__ = [
    "DESCRIPTION_FILE",
    "ByteTokenizer",
    "GPT2BPETokenizer",
    "HuggingFaceTokenizer",
    "NullTokenizer",
    "SentencePieceTokenizer",
    "Tokenizer",
    "TokenizerSource",
    "TokenizerType",
    "WITHOUT_FILES",
    "copy_tokenizer",
    "load_source",
    "load_tokenizer",
    "load_tokenizer_from_directory",
    "source_of",
    "tokenizer_files",
    "train_bpe",
    "train_sentencepiece",
]

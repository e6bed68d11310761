"""What a run is trained on."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatron_ladder.flags import flag


@dataclass(frozen=True)
class DataConfig:
    """Data. Tokenised text and its tokenizer."""

    data_path: tuple[Path, ...] = ()
    """Prefix of an indexed data set (of its .bin and .idx), cut into training, validation and test by --split. Several
    are blended: PREFIX1 PREFIX2 by their sizes, WEIGHT1 PREFIX1 WEIGHT2 PREFIX2 by weights."""
    train_data_path: tuple[Path, ...] = ()
    """Prefix, or blend, of the training data, if it is a data set of its own."""
    valid_data_path: tuple[Path, ...] = ()
    """Prefix, or blend, of the validation data, if it is a data set of its own."""
    test_data_path: tuple[Path, ...] = ()
    """Prefix, or blend, of the test data, if it is a data set of its own."""
    data_args_path: Path | None = None
    """File with what would follow --data-path, separated by blanks or line ends, if that is long."""
    per_split_data_args_path: Path | None = None
    """JSON file with what would follow --train-data-path, --valid-data-path and --test-data-path, as lists or texts
    under the keys train, valid and test."""
    split: str = "969,30,1"
    """Shares of training, validation and test documents of --data-path."""
    data_cache_path: Path | None = None
    """Folder in which the order of samples is kept: the processes of a machine then build it once and share its
    memory. Worth it from about a million documents on."""
    megatron_order: bool = False
    """Read training samples in the order of Megatron-LM core, which depends on the length of the run."""
    allow_data_change: bool = False
    """Continue a checkpoint with other data, or another order of it, than it was trained on."""
    tokenizer_type: str | None = None
    """SentencePieceTokenizer, HuggingFaceTokenizer, GPT2BPETokenizer (merges.txt beside its vocab.json), ByteTokenizer
    or NullTokenizer; their names in Megatron are known."""
    tokenizer_model: Path | None = flag(None, aliases=("--vocab-file",))
    """The tokenizer's file or directory. It decides the vocabulary, and is kept with every checkpoint."""
    reset_position_ids: bool = False
    """Count rotary positions anew after each end-of-document token."""
    reset_attention_mask: bool = False
    """A token sees only its own document, which ends with the end-of-document token."""
    eod_mask_loss: bool = False
    """Do not count the loss of what follows an end-of-document token."""
    loss_on: Literal["all", "assistant"] | None = None
    """Which tokens of conversations count as labels: all, or those that the assistant says; the assistant's if not
    given, where the data tells them."""
    streaming: tuple[str, ...] = ()
    """Texts to train on without token files, instead of --data-path: files of JSON lines (also .gz and .zst), of
    Parquet or of plain text, patterns, or hf://NAME[:CONFIG][@SPLIT]. They are tokenised while training."""
    streaming_key: str = "text"
    """Key of a JSON object, or column of a table, that --streaming reads."""
    streaming_shuffle_buffer: int = 10000
    """Documents that --streaming puts in a new order at a time, those of all streams together."""
    streaming_shards: int | None = None
    """Streams that --streaming cuts its input into. They are dealt to the data-parallel processes, whose number may be
    any that divides this one; 64 if not given, or fewer if there is less input."""
    streaming_skip_bad_lines: int = 0
    """Lines of --streaming that may be passed over because they are malformed, not UTF-8, or too large; they are
    listed. One more of them ends the run."""

"""Flags of the data that a run reads, and of the checkpoints that it reads and writes."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatron_ladder.flags import flag

TokenizerType = Literal[
    "SentencePieceTokenizer",
    "Llama2Tokenizer",
    "GPTSentencePieceTokenizer",
    "HuggingFaceTokenizer",
    "HFTokenizer",
    "ByteTokenizer",
    "NullTokenizer",
]
"""Values of --tokenizer-type; the first three are synonyms, and so are the next two."""


@dataclass(frozen=True)
class DataConfig:
    """Data. Tokenized text and its tokenizer."""

    data_path: tuple[Path, ...] = flag((), on_resume="data")
    """Prefix of an indexed data set (its .bin and .idx files), which --split divides into training, validation and test
    data. Several data sets are blended: PREFIX1 PREFIX2 by their sizes, WEIGHT1 PREFIX1 WEIGHT2 PREFIX2 by weights."""
    train_data_path: tuple[Path, ...] = flag((), on_resume="data")
    """Prefix or blend of the training data, if it is a separate data set."""
    valid_data_path: tuple[Path, ...] = flag((), on_resume="data")
    """Prefix or blend of the validation data, if it is a separate data set. Several sets have names: NAME1=PREFIX1
    NAME2=WEIGHT2 PREFIX2 WEIGHT3 PREFIX3. Give a path that itself begins with a word and = as an absolute path."""
    split: str = flag("969,30,1", excludes=("--train-data-path", "--valid-data-path", "--streaming"))
    """Proportions of training, validation and test documents in --data-path. The run leaves test documents out."""
    allow_data_change: bool = flag(False, requires="--load", on_resume="ignore")
    """Resume a checkpoint with data, or an order of data, that differs from its earlier training."""
    tokenizer_type: TokenizerType | None = flag(None, on_resume="ignore")
    """Type of the tokenizer: SentencePiece (three names), Hugging Face (two names), bytes, or numbers that already are
    token ids."""
    tokenizer_model: Path | None = flag(None, on_resume="ignore")
    """File or directory of the tokenizer. It determines the vocabulary, and every checkpoint contains a copy."""
    eod_token: str | None = flag(None, requires="--tokenizer-model", on_resume="ignore")
    """End-of-document token of a tokenizer.json, if the files next to it name none or another."""
    reset_position_ids: bool = flag(False, on_resume="report")
    """Restart rotary positions at 0 after each end-of-document token."""
    reset_attention_mask: bool = flag(False, on_resume="report")
    """Restrict attention to the token's own document; documents end with the end-of-document token."""
    eod_mask_loss: bool = flag(False, on_resume="report")
    """Exclude the label after each end-of-document token from the loss."""
    loss_on: Literal["all", "assistant"] | None = flag(None, on_resume="report")
    """Tokens of conversations that are labels: all, or those of the assistant, which is the default if the data marks
    them."""
    streaming: tuple[str, ...] = flag(
        (),
        excludes=("--data-path", "--train-data-path", "--loss-on assistant"),
        on_resume="data",
    )
    """Text that is tokenized during training, instead of --data-path: JSON lines (also .gz and .zst), Parquet or plain
    text files, glob patterns, or hf://NAME[:CONFIG][@SPLIT]."""
    streaming_key: str = flag("text", requires="--streaming")
    """Key of JSON objects, or column of tables, that --streaming reads."""
    streaming_shuffle_buffer: int = flag(10000, minimum=1, requires="--streaming")
    """Documents in the shuffle buffers of all streams together."""
    streaming_shards: int | None = flag(None, minimum=1, requires="--streaming")
    """Streams into which --streaming divides its input, a multiple of the data-parallel size; by default 64, or fewer
    for small inputs."""
    streaming_skip_bad_lines: int = flag(0, minimum=0, requires="--streaming")
    """Malformed, non-UTF-8 or oversized lines of --streaming to skip and list; one more ends the run."""


@dataclass(frozen=True)
class CheckpointConfig:
    """Checkpoints. Where the state of the run is saved and loaded."""

    save: Path | None = flag(None, on_resume="ignore")
    """Directory for checkpoints."""
    load: Path | None = flag(None, on_resume="ignore")
    """Directory of checkpoints, or one checkpoint, to resume from. It determines sizes and wiring of the model. Without
    a checkpoint there, the run reports that and starts from scratch."""
    overwrite_checkpoints: bool = flag(False, requires="--save", on_resume="ignore")
    """Start a new run in a --save directory that holds checkpoints of another run, which is otherwise an error.
    `latest` names the new ones. The old ones stay, unless flags that remove checkpoints count them: those of iterations
    that the new run has passed."""
    save_interval: int | None = flag(None, minimum=1, requires="--save")
    """Steps between checkpoints; by default only the end of the run is saved."""
    async_save: bool = flag(False, requires="--save")
    """Copy the state to host memory, which must hold that of all ranks of a host, and write it while training
    continues."""
    keep_last_n_checkpoints: int | None = flag(None, minimum=1, requires="--save")
    """Keep only the newest N checkpoints. Without this flag and --save-retain-interval, all are kept."""
    save_retain_interval: int | None = flag(None, minimum=1, requires="--save")
    """Keep checkpoints whose iteration is a multiple of N and those of --keep-last-n-checkpoints, or else the newest
    one; remove all others."""
    exit_on_missing_checkpoint: bool = flag(False, requires="--load", on_resume="ignore")
    """Exit with an error if --load has no checkpoint, instead of starting from scratch."""
    finetune: bool = flag(False, requires="--load", on_resume="ignore")
    """Load only the weights: start at iteration 0 with a new optimizer, and with other data if given."""
    load_optim: bool = flag(True, requires="--load", on_resume="ignore")
    """Do not load the optimizer state: the optimizer starts from zero moments at the iteration of the checkpoint."""
    load_rng: bool = flag(True, requires="--load", on_resume="ignore")
    """Do not load the states of the random number generators."""
    override_opt_param_scheduler: bool = flag(
        False,
        aliases=("--override-opt_param-scheduler",),
        requires="--load",
        excludes="--use-checkpoint-opt-param-scheduler",
        on_resume="ignore",
    )
    """Use the given values of the learning rate, its schedule and the optimizer's hyperparameters where they differ
    from the checkpoint's, which is otherwise an error. The decay ends at --lr-decay-iters, or with the run."""
    use_checkpoint_opt_param_scheduler: bool = flag(
        False, aliases=("--use-checkpoint-opt_param-scheduler",), requires="--load", on_resume="ignore"
    )
    """Take the learning rate, its schedule and the optimizer's hyperparameters from the checkpoint, and ignore those of
    the command line."""

"""From --streaming and its flags to what streams read."""

from megatron_ladder.checkpoint.format import Checkpoint
from megatron_ladder.config.data import DataConfig
from megatron_ladder.config.run import RunConfig
from megatron_ladder.data.shards import find_input
from megatron_ladder.data.streaming import StreamPlan, choose_streams
from megatron_ladder.data.tokenizers import Tokenizer
from megatron_ladder.errors import UserError


def streaming_mistakes(data: DataConfig) -> list[str]:
    """A line for each flag that contradicts another."""
    if not data.streaming:
        return []
    mistakes = []
    if data.data_path or data.train_data_path or data.data_args_path:
        mistakes.append("--streaming and --data-path or --train-data-path exclude each other: give one of them")
    if data.megatron_order:
        mistakes.append("--streaming has an order of its own: leave --megatron-order out")
    if data.loss_on == "assistant":
        mistakes.append("--streaming reads texts, in which nobody is the assistant: leave --loss-on out")
    if data.tokenizer_type is None:
        mistakes.append("--streaming tokenises: give --tokenizer-type and --tokenizer-model")
    return mistakes


def open_stream(
    run: RunConfig, tokenizer: Tokenizer | None, checkpoint: Checkpoint | None, about_files: list[str]
) -> StreamPlan | None:
    """What is streamed; None, and lines in `about_files`, if it cannot be.

    A resumed run has as many streams as the checkpoint's, unless the command line says otherwise.
    """
    data = run.data
    stored = {} if checkpoint is None else checkpoint.manifest.get("data", {}).get("stream", {})
    try:
        shards, sources = find_input(data.streaming, data.streaming_key, data.streaming_skip_bad_lines)
        asked = stored.get("streams") if data.streaming_shards is None else data.streaming_shards
        streams = choose_streams(asked, len(shards), run.data_parallel_size)
    except UserError as error:
        about_files.extend(error.mistakes)
        return None
    assert tokenizer is not None
    window = max(1, data.streaming_shuffle_buffer // streams)
    training, most_bad = run.training, data.streaming_skip_bad_lines
    return StreamPlan(
        shards, streams, training.seq_length, training.seed, window, tokenizer.eod_id, sources, most_bad
    )  # fmt: skip

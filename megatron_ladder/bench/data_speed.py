"""Rows of the data benchmark about tokenising: CPU seconds of the whole way beside those of the bare library."""

from collections.abc import Sequence

from megatron_ladder.bench.data_table import DataBenchmark, DataResult, measure_cpu
from megatron_ladder.bench.data_text import write_json_lines
from megatron_ladder.data.preprocess import preprocess
from megatron_ladder.data.tokenizers import SentencePieceTokenizer, train_sentencepiece

VOCABULARY = 8000
TRAINING_TEXTS = 400


def tokenizer_shares(benchmark: DataBenchmark) -> Sequence[DataResult]:
    """Speed from a file of JSON lines to token files, over that of the library on texts in memory."""
    lines = benchmark.folder / "text.jsonl"
    texts = write_json_lines(lines, benchmark.megabytes)
    model = benchmark.folder / "speed.model"
    model.write_bytes(train_sentencepiece(texts[:TRAINING_TEXTS], VOCABULARY))
    tokenizer = SentencePieceTokenizer(model)
    times = measure_cpu(
        benchmark,
        {
            "bare": lambda: tokenizer.encode_batch(texts),
            "whole": lambda: preprocess([lines], benchmark.folder / "speed", tokenizer, report=lambda line: None),
        },
    )
    share = times.ratio("bare", "whole")
    return [DataResult("tokenizers", "sentencepiece", share.median, "of bare", 0.9, spread=share.spread)]

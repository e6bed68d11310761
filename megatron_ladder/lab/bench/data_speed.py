"""Rows of the data benchmark about tokenising: CPU seconds of the whole way beside those of the bare library."""

from collections.abc import Callable, Sequence

from megatron_ladder.data.encoders.choose import make_encoder
from megatron_ladder.data.encoders.protocol import Encoder, NotExpressible
from megatron_ladder.data.preprocess import PreprocessOptions, preprocess
from megatron_ladder.data.tokenizers import Tokenizer
from megatron_ladder.lab.bench.data_table import DataBenchmark, DataResult, cpu_seconds
from megatron_ladder.lab.bench.data_text import (
    take_texts,
    texts_of,
    trained_bpe,
    trained_sentencepiece,
    write_json_lines,
)
from megatron_ladder.lab.bench.paired import measure

CASES = (
    ("tokenizer.json", "tokenizers", 0.9, 0.1),
    ("tokenizer.json", "tiktoken", 0.9, 0.5),
    ("tokenizer.json", "gigatoken", 0.6, 2.0),
    ("SentencePiece", "sentencepiece", 0.9, 0.15),
    ("SentencePiece", "gigatoken", 0.6, 1.0),
)
"""Tokenizer, library, target, and how much of the text: a start costs the same for every library, and a real run is
long enough for none to notice."""


def tokenizer_shares(benchmark: DataBenchmark) -> Sequence[DataResult]:
    """Speed from a file of JSON lines to published token files, start included, over that of the bare library.

    Bare: texts in memory, one by one or in a batch, to what the library returns. Its words are not cached yet, nor is
    the UTF-8 form of the texts, which Python keeps once a library has asked for it.
    """
    texts = take_texts(max(share for *_, share in CASES) * benchmark.megabytes)
    tokenizers = {
        "tokenizer.json": trained_bpe(benchmark.folder, texts),
        "SentencePiece": trained_sentencepiece(benchmark.folder, texts),
    }
    results = []
    for name, library, target, share in CASES:
        part = texts_of(texts, share * benchmark.megabytes)
        try:
            results.append(_share(benchmark, name, tokenizers[name], library, target, part))
        except NotExpressible as error:
            results.append(DataResult("tokenizers", f"{name}, {library}", None, "", target, note=str(error)))
        benchmark.report(f"{name} on {library}")
    return results


class Fresh:
    """An encoder and texts that are made anew, outside of the time, before each use."""

    def __init__(self, tokenizer: Tokenizer, library: str, texts: Sequence[str]) -> None:
        self._make: Callable[[], Encoder] = lambda: make_encoder(tokenizer, library)
        self._encoder = self._make()
        self.texts = list(texts)

    def renew(self) -> None:
        """Forgets all words, and the texts' UTF-8 form."""
        self._encoder = self._make()
        self.texts = [text.encode().decode() for text in self.texts]

    def encode(self) -> object:
        """The library's work, all of it: ids come as they are asked for."""
        return list(self._encoder.encode(self.texts))


def _share(
    benchmark: DataBenchmark, name: str, tokenizer: Tokenizer, library: str, target: float, texts: Sequence[str]
) -> DataResult:
    lines = benchmark.folder / "text.jsonl"
    size = write_json_lines(lines, texts)
    fresh = Fresh(tokenizer, library, texts)
    options = PreprocessOptions(library=library, report=lambda line: None)
    bare: Callable[[], object] = (
        (lambda: tokenizer.encode_batch(fresh.texts)) if library in ("tokenizers", "sentencepiece")
        else fresh.encode
    )  # fmt: skip
    times = measure(
        {
            "bare": bare,
            "whole": lambda: preprocess([lines], benchmark.folder / "speed", tokenizer, True, options=options),
        },
        benchmark.rounds,
        before_each=fresh.renew,
        clock=cpu_seconds,
    )
    share = times.ratio("bare", "whole")
    speeds = [f"{size / 1e6 / times.median(way):.1f}" for way in ("bare", "whole")]
    note = f"{size / 1e6:.0f} MB; bare {speeds[0]}, whole {speeds[1]} MB/s of CPU time"
    case = f"{name}, {library}"
    return DataResult("tokenizers", case, share.median, "of bare", target, spread=share.spread, note=note)

import dataclasses
import json
from pathlib import Path
from typing import Any, cast

from megatron_ladder.data.loader import Sources
from megatron_ladder.data.streaming import StreamPlan, StreamPosition, find_input
from megatron_ladder.data.tokenizers import NullTokenizer
from megatron_ladder.train.inputs import RunInputs, describe_data
from megatron_ladder.train.reading import TextStreams


def streams_of(plan: StreamPlan, vocab_size: int = 100) -> tuple[TextStreams, RunInputs]:
    inputs = RunInputs(
        run=cast(Any, None),
        tokenizer=NullTokenizer(vocab_size),
        sources=Sources(None, {}),
        eod_id=vocab_size,
        stream=plan,
    )
    return TextStreams(cast(Any, None), inputs, plan), inputs


def test_positions_of_other_data_are_ignored(tmp_path: Path) -> None:
    """Such a checkpoint only gets here with --allow-data-change."""
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "1 2"}\n{"text": "3 4"}\n')
    shards, sources = find_input([str(path)], "text")
    plan = StreamPlan(shards, 1, 7, 1, 10, 100, sources)
    streams, inputs = streams_of(plan)
    state = {"plan": plan.cut(), "positions": {"0": [3, 0, 0, 3, 5]}, "skipped": [[0, 1, 2]]}
    manifest = {"data": describe_data(inputs.sources, inputs.tokenizer, plan), "data_streams": [state]}
    manifest = json.loads(json.dumps(manifest))
    streams.resume(manifest)
    assert streams._positions == {0: StreamPosition(3, 0, 0, 3, 5)} and streams._skipped == [[0, 1, 2]]

    path.write_text('{"text": "3 4"}\n{"text": "1 2"}\n')
    other, _ = streams_of(dataclasses.replace(plan, sources=find_input([str(path)], "text").sources))
    other.resume(manifest)
    another_tokenizer, _ = streams_of(plan, vocab_size=101)
    another_tokenizer.resume(manifest)
    assert other._positions == {} == another_tokenizer._positions

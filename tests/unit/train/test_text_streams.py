import dataclasses
import json
from pathlib import Path

from megatron_ladder.data.streaming import StreamPlan, find_input
from megatron_ladder.train.reading import _stored_streams


def test_positions_of_other_data_are_ignored(tmp_path: Path) -> None:
    """Such a checkpoint only gets here with --allow-data-change."""
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "1 2"}\n{"text": "3 4"}\n')
    _, (shards, sources) = find_input([str(path)], "text")
    plan = StreamPlan(shards, 1, 7, 1, 10, 100, sources)
    state = {"plan": plan.cut(), "positions": {"0": [3, 0, 0, 3, 5]}, "skipped": [[0, 1, 2]]}
    data = {"tokenizer_sha256": "ab", "stream": plan.describe()}
    manifest = json.loads(json.dumps({"data": data, "data_streams": [state]}))
    assert _stored_streams(plan, data, manifest) == [state]

    path.write_text('{"text": "3 4"}\n{"text": "1 2"}\n')
    other = dataclasses.replace(plan, sources=find_input([str(path)], "text")[1].sources)
    assert _stored_streams(other, data | {"stream": other.describe()}, manifest) == []
    assert _stored_streams(plan, data | {"tokenizer_sha256": "cd"}, manifest) == []
    assert _stored_streams(dataclasses.replace(plan, streams=2), data, manifest) == []
    assert _stored_streams(plan, data, {"data": {"train": {}}}) == [], "of a run that did not stream"

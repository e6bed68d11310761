"""Streamed texts in several layouts: all ranks of a model receive them, and another number of ranks resumes them."""

import json
from pathlib import Path
from typing import Any

from megatron_ladder.data.batches import MicroBatch
from megatron_ladder.data.loader import Sources
from megatron_ladder.data.streaming import StreamPlan, find_input
from megatron_ladder.tokenizers.kinds import NullTokenizer
from megatron_ladder.train.inputs import RunInputs
from megatron_ladder.train.reading import training_batches
from tests.helpers.pool import GlooPools
from tests.helpers.training import build_trainer_here

RECIPE = "--train-iters 9 --lr 1e-3 --micro-batch-size 1 --global-batch-size 4".split()


def rows_of(batches: list[MicroBatch]) -> list[list[int]]:
    return [row for batch in batches for row in batch.tokens.tolist()]


def read(argv: list[str], path: str, steps: int, consumed: int, states: list[Any]) -> tuple[list[Any], Any]:
    """Return the rows of every step and the final state as a checkpoint has it, on each rank."""
    trainer, tokenizer = build_trainer_here([*RECIPE, *argv]), NullTokenizer(100)
    shards, (names, _) = find_input([path], "text")
    plan = StreamPlan(names, 4, trainer.run.training.seq_length, 1, 20, tokenizer.eod_id)
    inputs = RunInputs(run=trainer.run, tokenizer=tokenizer, sources=Sources(None, {}), stream=plan, shards=shards)
    batches = training_batches(trainer, inputs, consumed, {"data_streams": states})
    rows = [rows_of(next(batches)) for _ in range(steps)]
    batches.close()
    state = batches.reader_state and {"plan": plan.cut()} | batches.reader_state
    return rows, json.loads(json.dumps(state))


def test_streaming_resumes_with_another_number_of_ranks(gloo_pools: GlooPools, tmp_path: Path) -> None:
    texts = [f"{number % 97} " * (1 + number % 5) for number in range(3000)]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    run, two = gloo_pools(2).run, ["--tensor-model-parallel-size", "2"]
    ((whole, _),) = gloo_pools(1).run(read, [], str(path), 9, 0, [])
    split = run(read, [], str(path), 4, 0, [])
    for step in range(4):
        assert sorted(split[0][0][step] + split[1][0][step]) == sorted(whole[step])
    states = [state for _, state in split]
    for layout in (two, ["--pipeline-model-parallel-size", "2"]):
        (first, state), (second, none) = run(read, layout, str(path), 5, 16, states)
        assert first == second and none == {}
        assert sorted(state["positions"]) == list("0123")
        assert [sorted(rows) for rows in first] == [sorted(rows) for rows in whole[4:]]

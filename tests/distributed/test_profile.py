"""Traces of real training steps on two ranks."""

import contextlib
from pathlib import Path

import torch

from ladder_lab.bench.exposed import ELSEWHERE, Event, communication, read_events
from megatron_ladder.train.profile import step_contexts
from megatron_ladder.train.step import train_step
from tests.helpers.pool import GlooPools
from tests.helpers.training import CPU, build_trainer_here, own_batches
from tools.exposed_communication import _collective_rows, _step_rows, _sub_block_rows

RECIPE = "--train-iters 5 --lr 1e-3 --micro-batch-size 2 --global-batch-size 4 --tensor-model-parallel-size 2".split()


def profiled_steps(argv: list[str], first_iteration: int = 1) -> list[float]:
    """Return the losses of the steps up to the fifth, run inside the contexts of --profile."""
    trainer = build_trainer_here([*RECIPE, *argv])

    def pause() -> contextlib.AbstractContextManager[None]:
        trainer.engine.optimizer.finish_step()
        return contextlib.nullcontext()

    around = step_contexts(trainer.run, trainer.mesh.world, CPU, first_iteration, pause)
    ids = torch.arange(26).view(2, 13)
    batch = (ids[:, :-1], ids[:, 1:], torch.ones(2, 12))
    losses = []
    for iteration in range(first_iteration, 6):
        with around(iteration):
            losses.append(train_step(trainer, own_batches(trainer, [batch, batch]), iteration).loss)
    return losses


def arguments(folder: Path, ranks: str) -> list[str]:
    words = f"--residual-mode ladder --profile --profile-step-start 2 --profile-step-end 4 --profile-ranks {ranks}"
    return [*words.split(), "--profile-dir", str(folder)]


def names_of(events: list[Event], iteration: int) -> list[str]:
    """Return the named spans of the main thread in a step, in the order of their starts."""
    (step,) = [event for event in events if event["name"] == f"iteration {iteration}"]
    inside = [
        event
        for event in events
        if event.get("cat") == "user_annotation"
        and event["tid"] == step["tid"]
        and step["ts"] < event["ts"] < step["ts"] + step["dur"]
    ]
    return [event["name"] for event in sorted(inside, key=lambda event: event["ts"])]


def check_collectives(events: list[Event], forward: int, backward: int) -> None:
    """Compare the collectives of each sub-block in two steps, and the seconds of these steps."""
    found = communication(events)
    assert found.device == "cpu" and set(found.step_seconds) == {3, 4}
    rows = {(row["name"], row["direction"]): row for row in _sub_block_rows(found).to_dict("records")}
    sub_blocks = [f"layers.{layer}.{kind}" for layer in range(3) for kind in ("attention", "mlp")]
    assert list(rows)[:-1] == [(name, direction) for name in sub_blocks for direction in ("forward", "backward")]
    for row in list(rows.values())[:-1]:
        assert row["collectives"] == (forward if row["direction"] == "forward" else backward), row
    assert list(rows)[-1] == (ELSEWHERE, "")
    for step in _step_rows(found).to_dict("records"):
        assert 0 < step["exposed_seconds"] < step["seconds"]
        assert step["exposed_seconds"] <= step["in_flight_seconds"]


def test_a_trace_names_sub_blocks_and_reduces_in_their_order(gloo_pools: GlooPools, tmp_path: Path) -> None:
    plain = gloo_pools(2).run(profiled_steps, ["--residual-mode", "ladder"])
    assert gloo_pools(2).run(profiled_steps, arguments(tmp_path, "0 1")) == plain
    paths = sorted(tmp_path.iterdir())
    assert [path.name for path in paths] == [f"rank{rank}-steps3-4.pt.trace.json.gz" for rank in (0, 1)]
    for path in paths:
        events = read_events(path)
        names = names_of(events, 4)
        start, wait = "all_reduce start", "all_reduce wait"
        forward = names[names.index("layers.0.attention forward") :]
        assert forward[:9] == [
            "layers.0.attention forward",
            start,
            "layers.0.mlp norm forward",
            "layers.0.mlp forward",
            start,
            wait,
            "layers.1.attention norm forward",
            "layers.1.attention forward",
            start,
        ]
        backward = names[names.index("layers.2.mlp backward") :]
        assert backward[:8] == [
            "layers.2.mlp backward",
            start,
            "layers.2.attention backward",
            start,
            wait,
            "layers.2.mlp norm backward",
            "layers.1.mlp backward",
            start,
        ]
        # In each micro-batch, every sub-block reduces its output, and the gradient of its input.
        check_collectives(events, 2, 2)


def test_each_collective_of_a_real_trace_has_its_sub_block(gloo_pools: GlooPools, tmp_path: Path) -> None:
    """Forward gathers its input and scatters its output, in each of two micro-batches.

    Backward also gathers its output's gradient, and gathers its input again, because it is not kept.
    """
    gloo_pools(2).run(profiled_steps, [*arguments(tmp_path, "0"), "--sequence-parallel"])
    (path,) = tmp_path.iterdir()
    check_collectives(read_events(path), 4, 6)


def test_a_trace_names_the_exchange_of_tokens(gloo_pools: GlooPools, tmp_path: Path) -> None:
    """Each of three layers exchanges counts, tokens and outputs in each of two micro-batches, and two gradients.

    With sequence parallelism, it also sums the loads of the experts.
    """
    words = "--sequence-parallel --num-experts 4 --expert-model-parallel-size 2"
    gloo_pools(2).run(profiled_steps, [*arguments(tmp_path, "0"), *words.split()])
    (path,) = tmp_path.iterdir()
    events = read_events(path)
    names = names_of(events, 4)
    for kind, count in (("all_to_all", 3 * 2 * (2 + 2)), ("counts all_to_all", 3 * 2)):
        starts, waits = ([name for name in names if name.startswith(f"{kind} {what} ")] for what in ("start", "wait"))
        assert len(starts) == count and {name.replace("start", "wait") for name in starts} == {*waits}
    found = communication(events)
    of_experts = {
        (row["name"], row["direction"]): row["collectives"]
        for row in _sub_block_rows(found).to_dict("records")
        if "routed_experts" in row["name"]
    }
    layers = [f"layers.{layer}.routed_experts" for layer in range(3)]
    assert of_experts == {(name, way): count for name in layers for way, count in (("forward", 8), ("backward", 4))}
    rows = {(row["collective"], row["direction"]): row for row in _collective_rows(found).to_dict("records")}
    expected = {("counts all_to_all", "forward"): 6} | {
        (collective, way): 6 for collective in ("dispatch", "combine") for way in ("forward", "backward")
    }
    assert {key: row["collectives"] for key, row in rows.items() if key in expected} == expected
    assert all(rows[key]["exposed_seconds"] > 0 for key in expected)

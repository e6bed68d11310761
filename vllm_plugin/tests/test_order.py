"""The order of computations, launches and waits of the all-reduces in a forward pass."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from vllm_plugin.tests.models import NEW_TOKENS

ORDER = {
    "standard": "A s0 w0 M s1 w1 A s2 w2 M s3 w3 A s4 w4 M s5 w5",
    "ladder": "A s0 M s1 w0 A s2 w1 M s3 w2 A s4 w3 M s5 w4 w5",
    "hybrid": "A s0 w0 M s1 A s2 w1 M s3 w2 A s4 w3 M s5 w4 w5",
    "staleness-2": "A s0 M s1 A s2 w0 M s3 w1 A s4 w2 M s5 w3 w4 w5",
    "ladder-parallel": "A M s0 A M s1 w0 A M s2 w1 w2",
    "ladder-attention": "A s0 w0 M s1 A s2 w1 w2 M s3 A s4 w3 w4 M s5 w5",
    "experts-ladder": "A s0 R M s1 w0 A s2 w1 M s3 w2 A s4 w3 R M s5 w4 w5",
    # Attention and shared expert are one launch, and so are attention and MLP of the dense layer.
    "experts-farskip": "A M s0 R s1 w0 A w1 M s2 w2 A M s3 R s4 w3 w4",
    # The first layer is standard: its shared and its routed experts are one launch.
    "experts-glm": "A s0 w0 M R s1 w1 A M s2 w2 A M s3 R s4 w3 w4",
    "experts-shortcut": "A s0 R s1 w0 M s2 w1 w2 A s3 w3 M s4 w4 A s5 R s6 w5 M s7 w6 w7",
    "experts-longcat": "A s0 w0 R s1 M s2 w2 A s3 w3 M s4 w1 w4 A s5 w5 M s6 w6 A s7 w7 M s8 w8 "
    "A s9 w9 R s10 M s11 w11 A s12 w12 M s13 w10 w13",
    "latent-farskip": "L M s0 R s1 w0 L w1 M s2 w2 L M s3 R s4 w3 w4",
    "delta-ladder": "D s0 M s1 w0 G s2 w1 M s3 w2 D s4 w3 M s5 w4 w5",
    "delta-farskip": "D E s0 R s1 w0 G w1 E s2 R s3 w2 D w3 E s4 R s5 w4 w5",
}
"""A is attention, G attention with a gate, L latent attention with one, D gated DeltaNet, M an MLP or shared expert,
E a shared expert with a gate, R the routed experts; `s` is a launch and `w` a wait, each with the number of its launch.
"""
OPERATIONS = {
    "A": "a m m",
    "G": "a m m m",
    "L": "a m m m m m",
    "D": "d m m m",
    "M": "m m",
    "E": "m m m",
    "R": "e m",
}
"""What each runs, in any order: attention and experts of vLLM (`a`, `e`) and products (`m`), as of the router."""


MODES = ("eager", "compiled", "pieces", "whole")


@pytest.mark.parametrize(
    ("model", "mode"),
    [
        pytest.param(model, mode, marks=pytest.mark.quick if mode == MODES[2 + index % 2] else ())
        for index, model in enumerate(ORDER)
        for mode in MODES
        if mode != "compiled" or model not in ("standard", "experts-glm")
    ],
)
def test_order(model: str, mode: str, models: Path, references: Any, ranks: Any) -> None:
    from vllm_plugin.tests import engines

    for tokens, passes in ranks(engines.recorded_passes, models / model, {"mode": mode}):
        assert tokens == references[model]
        assert len(passes) > NEW_TOKENS
        assert {by_interval(steps) for steps in passes} == {expected_order(model)}


def expected_order(model: str) -> str:
    """Return what each pass of a model runs, by the names of single operations."""
    return by_interval(re.sub("[A-Z]", lambda letter: OPERATIONS[letter[0]], ORDER[model]))


def by_interval(steps: str) -> str:
    """Sort what runs between two launches or waits: attention and shared expert have no order if both are in one."""
    parts = re.split(r"([sw]\d+)", steps)
    return " ".join(" ".join(sorted(part.split())) for part in parts)


@pytest.mark.parametrize("compiled", [False, True])
def test_sums_and_readings_are_not_copied(compiled: bool, one: Any) -> None:
    ((sums, addresses, launched, unchanged),) = one(three_sums, compiled)
    assert sums == [4.0, 12.0, 0.0]
    assert addresses == launched
    # A compiler could compute these partials twice, and overwrite the launched ones.
    assert unchanged == [True] * 3


def three_sums(compiled: bool) -> tuple[list[float], list[int], list[int], list[bool]]:
    """Return three sums of two ranks with equal numbers, and their addresses.

    Return also where the transport put them, and whether each launched partial is the same at its wait.
    """
    from megatron_ladder_vllm.in_flight import AllReduces, PendingOutputs

    group: Any = Mock(unique_name="doubling", device=torch.device("cpu"))
    all_reduces = AllReduces(group)
    launched: list[int] = []
    unchanged: list[bool] = []

    def double(partial: Tensor) -> tuple[Tensor, Any]:
        buffer = 2 * partial
        launched.append(buffer.data_ptr())
        return buffer, SimpleNamespace(wait=lambda: unchanged.append(torch.equal(2 * partial, buffer)))

    all_reduces.transport = double

    def forward(partial: Tensor) -> list[Tensor]:
        pending = PendingOutputs(all_reduces)
        pending.launch(partial + 1)
        first = pending.pop(0)
        pending.launch(1.5 * first)
        pending.hold(first)
        pending.launch(partial - 1)
        return [first, pending.pop(1), pending.pop(2)]

    sums = (torch.compile(forward, fullgraph=True) if compiled else forward)(torch.ones(2, 4))
    return [found.unique().item() for found in sums], [found.data_ptr() for found in sums], launched, unchanged


def test_a_launch_follows_the_launch_before_it_whatever_was_received(one: Any) -> None:
    ((launched, latest),) = one(launches_around_a_received_sum)
    assert latest == [None, launched[0]]


def launches_around_a_received_sum() -> tuple[list[int], list[int | None]]:
    """Launch, add a sum that a stage has received, and launch; return the addresses of buffers and of `latest`."""
    from megatron_ladder_vllm.in_flight import AllReduces, PendingOutputs

    group: Any = Mock(unique_name="received", device=torch.device("cpu"))
    all_reduces = AllReduces(group)
    all_reduces.transport = lambda partial: (partial.clone(), None)
    launched: list[int] = []
    latest: list[int | None] = []

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = function(*args, **kwargs or {})
            if function.name() == "ladder::start":
                latest.append(None if args[1] is None else args[1].data_ptr())
                launched.append(result.data_ptr())
            return result

    def norm(output: Tensor, stream: Tensor) -> tuple[Tensor, Tensor]:
        return output + stream, output + stream

    pending = PendingOutputs(all_reduces, {1: torch.ones(2, 4)})
    with Record():
        pending.launch(torch.ones(2, 4))
        _, stream = pending.add_and_norm(-1, norm, torch.ones(2, 4))
        pending.launch(stream + 1)
    return launched, latest


def test_reduces_have_a_high_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise they would wait for multiprocessors behind a product that fills the device."""
    from megatron_ladder_vllm.in_flight import on_side_stream

    priorities: list[int] = []
    monkeypatch.setattr(torch.cuda, "Stream", lambda device=None, priority=0: priorities.append(priority))
    monkeypatch.setattr(torch.cuda, "Event", object)
    group: Any = None
    on_side_stream(group)
    assert priorities == [-1]

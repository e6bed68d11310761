"""The order of launches and waits of the all-reduces in a forward pass."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

ORDER = {
    "standard": "s0 w0 s1 w1 s2 w2 s3 w3 s4 w4 s5 w5",
    "ladder": "s0 s1 w0 s2 w1 s3 w2 s4 w3 s5 w4 w5",
    "hybrid": "s0 w0 s1 s2 w1 s3 w2 s4 w3 s5 w4 w5",
    "staleness-2": "s0 s1 s2 w0 s3 w1 s4 w2 s5 w3 w4 w5",
    "ladder-parallel": "s0 s1 w0 s2 w1 w2",
    "ladder-attention": "s0 w0 s1 s2 w1 w2 s3 s4 w3 w4 s5 w5",
    "experts-ladder": "s0 s1 w0 s2 w1 s3 w2 s4 w3 s5 w4 w5",
    # Attention and shared expert are one launch, and so are attention and MLP of the dense layer.
    "experts-farskip": "s0 s1 w0 w1 s2 w2 s3 s4 w3 w4",
    # The first layer is standard: its shared and its routed experts are one launch.
    "experts-glm": "s0 w0 s1 w1 s2 w2 s3 s4 w3 w4",
    "experts-shortcut": "s0 s1 w0 s2 w1 w2 s3 w3 s4 w4 s5 s6 w5 s7 w6 w7",
    "experts-longcat": "s0 w0 s1 s2 w2 s3 w3 s4 w1 w4 s5 w5 s6 w6 s7 w7 s8 w8 s9 w9 s10 s11 w11 s12 w12 s13 w10 w13",
}
"""`s` is a launch and `w` a wait, each with the number of its launch."""
COMPILED = ("ladder", "staleness-2", "experts-ladder", "experts-farskip")


@pytest.mark.parametrize(
    ("model", "mode"), [*((model, "eager") for model in ORDER), *((model, "compiled") for model in COMPILED)]
)
def test_launches_and_waits(model: str, mode: str, models: Path, references: Any, ranks: Any) -> None:
    from vllm_plugin.tests import engines

    results = ranks.run(engines.communication, models / model, {"enforce_eager": mode == "eager"})
    # vLLM's own all-reduce of the embedding precedes all launches, and its gather of the logits follows all waits. A
    # graph that was compiled for a CPU contains the all-reduce itself, not the call that is recorded.
    expected = f"r {ORDER[model]} g" if mode == "eager" else f"{ORDER[model]} g"
    for tokens, passes in results:
        assert tokens == references[model]
        assert set(passes) == {expected}


class Doubling:
    """A transport of two ranks with equal numbers, which records where it puts the sums."""

    def __init__(self) -> None:
        self.addresses: list[int] = []

    def start(self, partial: Tensor) -> tuple[Tensor, Any]:
        buffer = 2 * partial
        self.addresses.append(buffer.data_ptr())
        return buffer, SimpleNamespace(wait=lambda: None)


@pytest.mark.parametrize("compiled", [False, True])
def test_sums_are_not_copied(compiled: bool) -> None:
    from megatron_ladder_vllm.in_flight import AllReduces, PendingOutputs

    group: Any = SimpleNamespace(unique_name=f"doubling {compiled}", device=torch.device("cpu"), device_group=None)
    all_reduces = AllReduces(group)
    all_reduces.transport = transport = Doubling()

    def forward(partial: Tensor) -> list[Tensor]:
        pending = PendingOutputs(all_reduces)
        pending.launch(partial + 1)
        first = pending.pop(0)
        pending.launch(first + partial)
        pending.launch(partial - 1)
        return [first, pending.pop(1), pending.pop(2)]

    function = torch.compile(forward, fullgraph=True) if compiled else forward
    sums = function(torch.ones(2, 4))
    assert [found.unique().item() for found in sums] == [4.0, 10.0, 0.0]
    assert [found.data_ptr() for found in sums] == transport.addresses


def test_reduces_have_a_high_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise they would wait for multiprocessors behind a product that fills the device."""
    from megatron_ladder_vllm.in_flight import SideStreamTransport

    priorities: list[int] = []
    monkeypatch.setattr(torch.cuda, "Stream", lambda device=None, priority=0: priorities.append(priority))
    group: Any = None
    SideStreamTransport(group)
    assert priorities == [-1]

"""Chains beside the computation: which stream waits for which, and what is held for them."""

import weakref

import pytest
import torch

from megatron_ladder.comm.aside import OnSideStream, TakingTurns, beside
from tests.unit.comm import fake_cuda


def test_a_chain_runs_behind_what_was_computed_and_beside_what_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    device = fake_cuda.install(monkeypatch)
    aside = beside(torch.device("cuda"))
    assert isinstance(aside, OnSideStream) and not aside.halfway
    device.compute.now = 5.0

    def chain() -> str:
        assert device.current is not device.compute
        assert device.current.now == 5.0, "what it reads may not be there yet"
        device.current.now += 3.0
        return "read"

    assert aside.run(chain, uses=()) == "read"
    assert device.current is device.compute and device.compute.now == 5.0, "the computation does not wait"
    device.compute.now += 1.0
    aside.join()
    assert device.compute.now == 8.0


def test_the_computation_that_takes_longer_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    device = fake_cuda.install(monkeypatch)
    aside = beside(torch.device("cuda"))
    aside.run(lambda: None, uses=())
    device.compute.now = 2.0
    aside.join()
    assert device.compute.now == 2.0


def test_what_a_chain_uses_is_held_until_both_streams_have_met(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cuda.install(monkeypatch)
    aside = beside(torch.device("cuda"))
    used = torch.ones(3)
    alive = weakref.ref(used)
    aside.run(lambda: None, uses=(used,))
    del used
    assert alive() is not None
    aside.join()
    assert alive() is None


def test_on_a_cpu_a_chain_takes_its_turn_halfway() -> None:
    aside = beside(torch.device("cpu"))
    assert isinstance(aside, TakingTurns) and aside.halfway
    assert aside.run(lambda: 3, uses=()) == 3

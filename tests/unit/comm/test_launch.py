"""A process's place among others."""

import pytest

from megatron_ladder.comm.launch import LAUNCHER_VARIABLES, Place, find_place, naming_lost_peers
from megatron_ladder.errors import LostPeerError, UserError


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LAUNCHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)


def test_a_process_started_by_hand_is_alone() -> None:
    assert find_place() == Place(0, 1, 0)
    assert not find_place().launched


def test_a_launcher_says_where(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in zip(LAUNCHER_VARIABLES, ("5", "8", "1", "host", "1234"), strict=True):
        monkeypatch.setenv(name, value)
    assert find_place() == Place(5, 8, 1) and find_place().launched


def test_half_a_launcher_is_a_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(UserError, match="has WORLD_SIZE but not RANK, LOCAL_RANK, MASTER_ADDR, MASTER_PORT"):
        find_place()


def test_lost_peers_are_told_from_other_faults() -> None:
    with pytest.raises(LostPeerError, match="Connection closed"), naming_lost_peers():
        raise RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer")
    with pytest.raises(RuntimeError, match="multiplied"), naming_lost_peers():
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

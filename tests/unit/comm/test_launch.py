"""The rank, device and network interface of a process."""

import itertools
import os
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import psutil
import pytest
import torch

from megatron_ladder.comm import agreement, launch
from megatron_ladder.comm.agreement import Host, Peers
from megatron_ladder.comm.launch import (
    LAUNCHER_VARIABLES,
    RankInfo,
    _address_towards,
    _choose_interface,
    _find_host,
    check_device,
    from_rank_0,
    read_rank_info,
)
from megatron_ladder.comm.ranks import run_ranks
from megatron_ladder.comm.watch import naming_lost_peers
from megatron_ladder.errors import LostPeerError, UserError, raise_user_errors
from tests.helpers.commands import REPOSITORY_ROOT, free_port, write_nvidia_smi

THREADS = """
import torch
from megatron_ladder.comm.launch import read_rank_info, start_process_group, stop_process_group
start_process_group(read_rank_info(), 1)
print(f"{torch.get_num_threads()}\\n", end="", flush=True)
stop_process_group()
"""


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LAUNCHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)


def test_the_rank_is_that_of_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_rank_info() == RankInfo(0, 1, 0) and not read_rank_info().launched
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(UserError, match="has WORLD_SIZE but not RANK, LOCAL_RANK, MASTER_ADDR, MASTER_PORT"):
        read_rank_info()
    for name, value in zip(LAUNCHER_VARIABLES, ("5", "8", "1", "host", "1234"), strict=True):
        monkeypatch.setenv(name, value)
    assert read_rank_info() == RankInfo(5, 8, 1) and read_rank_info().launched


@pytest.mark.parametrize(
    ("gpus", "visible", "is_error"),
    [(8, None, True), (8, "0,1", True), (8, "", False), (0, None, False), (None, None, False)],
)
def test_gpus_that_torch_cannot_use_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: int | None, visible: str | None, is_error: bool
) -> None:
    if gpus is not None:
        write_nvidia_smi(tmp_path, gpus, driver="550.54.15")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible or "")
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    too_old = "The NVIDIA driver is too old (found version 12040). Please update your driver"
    monkeypatch.setattr(torch, "__version__", "2.13.0+cu130")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", Mock(side_effect=RuntimeError(too_old)))
    if not is_error:
        assert RankInfo(0, 1, 0).device() == torch.device("cpu")
        return
    expected = (
        r"nvidia-smi lists 8 GPUs with driver 550.54.15, but torch 2.13.0\+cu130 cannot use them \(The NVIDIA driver "
        r"is too old \(found version 12040\)\): install .* torch==2.13.0`, or set CUDA_VISIBLE_DEVICES="
    )
    with pytest.raises(UserError, match=expected):
        check_device(RankInfo(0, 1, 0))
    monkeypatch.setattr(torch.cuda, "init", Mock(side_effect=AssertionError("Torch not compiled with CUDA enabled")))
    with pytest.raises(UserError, match=r"cannot use them \(Torch not compiled with CUDA enabled\)"):
        check_device(RankInfo(0, 1, 0))


def test_each_process_needs_a_separate_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 7)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    check_device(RankInfo(15, 16, 7))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    check_device(RankInfo(14, 16, 6))
    with pytest.raises(UserError, match="rank 15 is process 8 of its host, which has 7 GPUs"):
        check_device(RankInfo(15, 16, 7))


def test_rank_0_looks_for_all_ranks_before_there_is_a_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    # The ranks are threads here, which share the counters.
    monkeypatch.setattr(agreement, "_RUNS", defaultdict(lambda: itertools.repeat(0)))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    looked: list[int] = []

    def answers(error: str | None) -> list[Any]:
        monkeypatch.setenv("MASTER_PORT", str(free_port()))
        # Rank 0 serves the store as long as its peers exist.
        peers = [Peers() for _ in range(3)]
        with ThreadPoolExecutor(3) as threads:

            def ask(rank: int) -> Any:
                def look() -> dict[str, Any]:
                    looked.append(rank)
                    raise_user_errors([] if error is None else [error])
                    return {"checkpoint": "iter_0000007", "warnings": ["a"]}

                try:
                    return from_rank_0(RankInfo(rank, 3, rank), peers[rank], 1, look)
                except UserError as raised:
                    return raised.messages

            return list(threads.map(ask, (2, 1, 0)))

    assert answers(None) == [{"checkpoint": "iter_0000007", "warnings": ["a"]}] * 3
    assert answers("--load x: is a file") == [("--load x: is a file",)] * 3
    assert looked == [0, 0]
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    with pytest.raises(LostPeerError, match="rank 0 sent no findings"):
        from_rank_0(RankInfo(1, 2, 1), Peers(), 0.01, lambda: {})
    assert from_rank_0(RankInfo(0, 1, 0), Peers(), 1, lambda: 5) == 5


def test_lost_peers_are_distinguished_from_other_errors() -> None:
    with pytest.raises(LostPeerError, match="Connection closed"), naming_lost_peers():
        raise RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer")
    with pytest.raises(LostPeerError, match="another process is gone"), naming_lost_peers():
        raise RuntimeError("Application timeout caused pair closure")
    with pytest.raises(RuntimeError, match="multiplied"), naming_lost_peers():
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")


def test_the_address_on_the_route_to_the_first_host(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _address_towards("127.0.0.1") == "127.0.0.1" and _address_towards("localhost") in ("127.0.0.1", "::1")
    monkeypatch.setenv("MASTER_ADDR", "no-such-host.invalid")
    with pytest.raises(UserError, match="MASTER_ADDR no-such-host.invalid cannot be reached from .*--master_addr"):
        _find_host()


@pytest.mark.parametrize(
    ("here", "hosts", "chosen"),
    [
        ("10.0.0.1", ["10.0.0.1", "10.0.0.2"], "fabric"),
        ("127.0.1.1", ["127.0.1.1", "10.0.0.2"], "fabric"),
        ("127.0.0.1", ["127.0.0.1", "127.0.0.1"], "lo"),
        ("fe80::1", ["fe80::1", "fe80::2"], "fabric"),
    ],
)
def test_gloo_uses_the_interface_that_leads_to_the_others(
    monkeypatch: pytest.MonkeyPatch, here: str, hosts: list[str], chosen: str
) -> None:
    addresses = {
        "eth0": ["192.168.7.7", "fe80::7%eth0"],
        "lo": ["127.0.0.1", "127.0.1.1"],
        "fabric": ["10.0.0.1", "fe80::1%fabric"],
    }
    interfaces = {name: [SimpleNamespace(address=one) for one in own] for name, own in addresses.items()}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: interfaces)
    monkeypatch.setattr(launch, "_address_towards", {"10.0.0.2": "10.0.0.1"}.__getitem__)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    _choose_interface(Host("here", here), [Host("any", one) for one in hosts])
    assert os.environ["GLOO_SOCKET_IFNAME"] == chosen
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "mine")
    _choose_interface(Host("here", here), [Host("any", one) for one in hosts])
    assert os.environ["GLOO_SOCKET_IFNAME"] == "mine"


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("given", [None, pytest.param("2", marks=pytest.mark.slow)])
def test_ranks_on_cpus_share_the_cores(
    given: str | None, ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """One rank has one thread, since nothing says that the other cores are idle."""
    script = tmp_path / "rank.py"
    script.write_text(THREADS)
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY_ROOT))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if given is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    run_ranks(str(script), [], ranks)
    cores = len(os.sched_getaffinity(0))
    shared = 1 if ranks == 1 else max(1, cores // ranks)
    expected = str(shared if given is None else min(2, cores))
    assert capfd.readouterr().out.split() == [expected] * ranks

"""Exposed communication in hand-made traces."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from ladder_lab.bench.exposed import Communication, Event, communication, read_events
from megatron_ladder.errors import UserError
from tools.exposed_communication import main

MAIN, AUTOGRAD_THREAD, GLOO_THREAD = 1, 2, 9


def span(name: str, start: float, stop: float, thread: int = MAIN, category: str = "user_annotation") -> Event:
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": stop - start, "pid": 1, "tid": thread}


def kernel(name: str, start: float, stop: float, stream: int, correlation: int, category: str = "kernel") -> Event:
    args = {"stream": stream, "correlation": correlation}
    return span(name, start, stop, stream, category) | {"pid": 0, "args": args}


def launch(moment: float, correlation: int, thread: int = MAIN) -> Event:
    return span("cudaLaunchKernel", moment, moment + 1, thread, "cuda_runtime") | {"args": {"correlation": correlation}}


def found_of(found: Communication) -> dict[tuple[int, str, str], tuple[float, float]]:
    """Map (step, sub-block, direction) to the microseconds in flight and exposed."""
    sums: dict[tuple[int, str, str], tuple[float, float]] = {}
    for row in found.collectives.itertuples():
        key = (row.iteration, row.name, row.direction)
        in_flight, exposed = (round(1e6 * s, 6) for s in (row.in_flight_seconds, row.exposed_seconds))
        before = sums.get(key, (0.0, 0.0))
        sums[key] = (before[0] + in_flight, before[1] + exposed)
    return sums


def cpu_trace() -> list[Event]:
    """Build a trace of two ladder sub-blocks, `L0 B1 L1 W0 W1` forward and `L1 L0 W1 W0` backward; step 2 blocks."""
    return [
        span("iteration 7", 0, 1000),
        span("all_reduce", 10, 40),
        span("layers.0.attention forward", 100, 200),
        span("all_reduce start", 190, 195),
        span("gloo:all_reduce", 195, 260, GLOO_THREAD),
        span("layers.0.mlp forward", 200, 300),
        span("all_reduce start", 290, 295),
        span("all_reduce wait", 300, 310),
        span("all_reduce wait", 320, 390),
        span("layers.0.mlp backward", 510, 600),
        span("all_reduce start", 550, 555),
        span("layers.0.attention backward", 600, 700),
        span("all_reduce start", 650, 655),
        span("all_reduce wait", 700, 702),
        span("layers.0.mlp norm backward", 702, 710),
        span("all_reduce wait", 710, 760),
        span("iteration 8", 1000, 1500),
        span("layers.0.attention forward", 1000, 1100),
        span("layers.0.mlp forward", 1100, 1200),
        span("all_reduce", 1320, 1380),
        span("all_reduce", 1410, 1420),
        span("all_reduce", 1600, 1700),
    ]


def test_on_a_cpu_waits_are_exposed() -> None:
    found = communication(cpu_trace())
    assert found.device == "cpu"
    assert found.step_seconds == pytest.approx({7: 1e-3, 8: 0.5e-3})
    assert found_of(found) == {
        (7, "outside of sub-blocks", ""): (30, 30),
        (7, "layers.0.attention", "forward"): (310 - 190, 10),
        (7, "layers.0.mlp", "forward"): (390 - 290, 70),
        (7, "layers.0.mlp", "backward"): (702 - 550, 2),
        (7, "layers.0.attention", "backward"): (760 - 650, 50),
        (8, "outside of sub-blocks", ""): (70, 70),
    }


def test_all_to_alls_are_named_by_what_they_carry() -> None:
    """The second dispatch is one of a repeated forward, and awaited after the combine that starts later."""
    experts = "layers.0.routed_experts"
    events = [
        span("iteration 1", 0, 1000),
        span(f"{experts} norm forward", 100, 130),
        span("counts all_to_all start 1", 101, 102),
        span("counts all_to_all wait 1", 102, 104),
        span("all_to_all start 2", 110, 120),
        span("layers.0.shared_expert forward", 130, 180),
        span(f"{experts} forward", 180, 250),
        span("all_to_all wait 2", 181, 188),
        span("all_to_all start 3", 240, 245),
        span("all_to_all wait 3", 300, 301),
        span(f"{experts} gather", 400, 410),
        span("all_to_all start 4", 401, 409),
        span(f"{experts} output gradient", 410, 420),
        span("all_to_all start 5", 411, 419),
        span("all_to_all wait 5", 420, 440),
        span("all_to_all wait 4", 440, 480),
        span(f"{experts} backward", 480, 600),
        span("all_to_all start 6", 590, 595),
        span("all_to_all wait 6", 700, 780),
        span("all_to_all", 800, 801),
    ]
    found = communication(events).collectives
    exposed = [*zip(found.collective, found.direction, (1e6 * found.exposed_seconds).round().astype(int), strict=True)]
    assert exposed == [
        ("counts all_to_all", "forward", 2),
        ("dispatch", "forward", 7),
        ("combine", "forward", 1),
        ("combine", "backward", 20),
        ("dispatch", "backward", 40),
        ("dispatch", "backward", 80),
        ("all_to_all", "", 1),
    ]


def cuda_trace() -> list[Event]:
    """Compute on stream 7, communicate on 20 and 21, launched long before; a copy counts as computation.

    stream 7    [1000     1100]      [1150 1200]  [1210 1220 copy]        [1400 1500]
    stream 20             [1090   1140]              [1215          1300]
    stream 21                                                [1290 1320]
    """
    return [
        span("iteration 1", 0, 900),
        span("layers.0.attention forward", 100, 200),
        launch(110, 1),
        launch(190, 2),
        span("layers.0.mlp forward", 200, 300),
        launch(210, 3),
        launch(220, 4),
        span("all_reduce start", 288, 295),
        launch(290, 5),
        span("layers.0.mlp backward", 400, 500, AUTOGRAD_THREAD),
        launch(410, 6, AUTOGRAD_THREAD),
        launch(600, 7),
        span("layers.0.mlp backward", 1040, 1530, thread=20, category="gpu_user_annotation"),
        span("nccl:all_reduce", 1090, 1140, thread=20, category="gpu_user_annotation"),
        kernel("gemm", 1000, 1100, 7, 1),
        kernel("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", 1090, 1140, 20, 2),
        kernel("gemm", 1150, 1200, 7, 3),
        kernel("Memcpy DtoD", 1210, 1220, 7, 4, "gpu_memcpy"),
        kernel("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", 1215, 1300, 20, 5),
        kernel("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", 1290, 1320, 21, 6),
        kernel("gemm", 1400, 1500, 7, 7),
    ]


def test_on_cuda_communication_without_other_kernels_is_exposed() -> None:
    found = communication(cuda_trace())
    assert found.device == "cuda"
    assert found_of(found) == {
        (1, "layers.0.attention", "forward"): (50, 40),
        (1, "layers.0.mlp", "forward"): (85, 80),
        # The ten microseconds of overlap count for the first.
        (1, "layers.0.mlp", "backward"): (30, 20),
    }
    assert [*found.collectives.collective] == ["unnamed", "all_reduce", "unnamed"]


def write(path: Path, events: list[Event]) -> Path:
    content = json.dumps({"traceEvents": [*events, {"ph": "M", "name": "process_name"}]}).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_the_command_writes_tables_and_json(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = write(tmp_path / name, cpu_trace())
    main(["--trace", str(trace), "--json", str(tmp_path / "out.json")])
    printed = capsys.readouterr().out
    lines = [line.split() for line in printed.splitlines()]
    assert ["7", "0.001000", "5", "0.000512", "0.000162", "0.162000"] in lines
    # Mean of two steps.
    backward = lines.index(["layers.0.attention", "backward", "0.500000", "0.000055", "0.000025"])
    assert lines[backward - 1][:2] == ["layers.0.attention", "forward"]
    assert printed.index("layers.0.attention") < printed.index("layers.0.mlp") < printed.index("outside of")
    result: dict[str, Any] = json.loads((tmp_path / "out.json").read_text())
    assert (result["device"], result["steps"][1]["iteration"]) == ("cpu", 8)
    assert result["steps"][1]["exposed_seconds"] == pytest.approx(70e-6)
    total = sum(row["exposed_seconds"] for row in result["sub_blocks"])
    assert total == pytest.approx((162e-6 + 70e-6) / 2)


def test_invalid_traces_are_rejected(tmp_path: Path) -> None:
    for content in (b"", b"[1]", b"{}", b"\x1f\x8bnone", b'{"traceEvents": [3]}'):
        (tmp_path / "x.json").write_bytes(content)
        with pytest.raises(UserError, match="not a trace in JSON"):
            read_events(tmp_path / "x.json")
    with pytest.raises(UserError, match="none.json: No such file"):
        main(["--trace", str(tmp_path / "none.json")])

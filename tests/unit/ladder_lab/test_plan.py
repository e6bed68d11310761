"""tools/plan.py as a command: without torch, fast, and with all errors reported."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ladder_lab.cost.machines import PRESETS
from ladder_lab.plan.options import parse_options
from megatron_ladder.blueprint.wiring import SHARED_STREAM_MODES
from megatron_ladder.errors import UserError
from tests.helpers.patience import patient
from tools.plan import main

ROOT = Path(__file__).resolve().parents[3]


def test_a_thousand_gpus_without_torch(tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    script = (
        "import resource, sys; from plan import main; main(sys.argv[1:]);"
        "used = resource.getrusage(resource.RUSAGE_SELF);"
        "print(used.ru_utime + used.ru_stime, 'torch' in sys.modules, file=sys.stderr)"
    )
    arguments = "--model llama-70b --gpus 1024 --global-batch-size 1024 --json".split()
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments, str(out)],
        cwd=ROOT / "tools",
        capture_output=True,
        text=True,
        check=True,
    )
    seconds, torch_is_there = done.stderr.split()
    assert torch_is_there == "False"
    assert float(seconds) < patient(2), "of the processor, whatever else the machine does"
    report = json.loads(out.read_text())
    assert len(report["layouts"]) > 100
    first = report["layouts"][0]
    assert first["tensor"] * first["pipeline"] * first["data"] == 1024
    parts = ("weights", "gradients", "optimizer", "activations")
    assert sum(first["memory_bytes"][part] for part in parts) == pytest.approx(first["memory_bytes"]["total"])
    assert first["memory_bytes"]["total"] < 80e9
    parts = ("compute", "exposed_tensor", "bubble", "exposed_data")
    assert sum(first["step_seconds"][part] for part in parts) == pytest.approx(first["step_seconds"]["total"])
    assert first["relative_uncertainty"] == 0.15
    assert set(SHARED_STREAM_MODES) == set(report["interconnects"]["rows"][0]["seconds"])
    assert "| TP | PP | DP | ZeRO |" in done.stdout and "(this cluster)" in done.stdout


@pytest.mark.parametrize("link", PRESETS)
def test_inference_on_every_interconnect(link: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ranks, out = max(PRESETS[link].measured_ranks), tmp_path / "inference.json"
    main(["inference", "--model", "8b", "--tp", str(ranks), "--link", link, "--json", str(out)])
    printed, report = capsys.readouterr().out, json.loads(out.read_text())
    speed_ups = {one["wiring"]: one["speed_up"] for one in report["wirings"]}
    assert speed_ups["standard"] == 1.0 < speed_ups["hybrid-16"] < speed_ups["ladder"]
    assert speed_ups["no-comm"] == max(speed_ups.values()) or speed_ups["ladder-parallel"] > speed_ups["no-comm"]
    for one in report["wirings"]:
        assert one["speed_up_range"][0] <= one["speed_up"] <= one["speed_up_range"][1]
    assert "Recommendation: fastest" in printed and PRESETS[link].source in printed


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--tp 3", "--tp 3 does not divide --model llama-70b: --num-attention-heads 64 is not divisible"),
        ("--tp 16", "--link nvlink: nvlink: measured for 2 to 8 ranks, found 16: give --link-latency-us and"),
        ("--link-latency-us 3", "--link-latency-us 3.0 requires --link-bandwidth-gbs"),
    ],
)
def test_impossible_inference(words: str, expected: str) -> None:
    with pytest.raises(UserError, match=expected):
        main(["inference", *words.split()])


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ("layout", ["expected one of layouts, inference first"]),
        (
            "--cluster a100 --wirings no-comm --gpus 0 --contention 2",
            ["--cluster a100", "--wirings no-comm", "--gpus 0", "--contention 2"],
        ),
    ],
)
def test_every_error_names_its_flag(words: str, parts: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        parse_options(words.split())
    assert len(caught.value.messages) == len(parts)
    assert all(any(part in message for message in caught.value.messages) for part in parts)

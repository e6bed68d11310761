"""tools/plan.py as a command: without torch, fast, and with all errors reported."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from ladder_lab.bench.sizes import SIZES
from ladder_lab.cost.machines import PRESETS
from megatron_ladder.blueprint.wiring import SHARED_STREAM_MODES
from megatron_ladder.checkpoint.hf_config import hf_config
from tests.helpers.commands import REPOSITORY_ROOT as ROOT
from tests.helpers.commands import run_command
from tests.helpers.runs import errors_of
from tools.plan import main


@pytest.mark.parametrize("gpus", [pytest.param(1024, marks=pytest.mark.slow), 128])
def test_many_gpus_without_torch(gpus: int, tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    script = "import sys; from plan import main; main(sys.argv[1:]); print('torch' in sys.modules, file=sys.stderr)"
    arguments = f"--model llama-70b --gpus {gpus} --global-batch-size 1024 --json".split()
    done = run_command([sys.executable, "-c", script, *arguments, str(out)], 60, cwd=ROOT / "tools")
    assert done.stderr == "False\n"
    report = json.loads(out.read_text())
    assert len(report["layouts"]) > 100
    first = report["layouts"][0]
    assert first["tensor"] * first["pipeline"] * first["data"] == gpus
    parts = ("weights", "gradients", "optimizer", "activations")
    assert sum(first["memory_bytes"][part] for part in parts) == pytest.approx(first["memory_bytes"]["total"])
    assert first["memory_bytes"]["total"] < 80e9
    parts = ("compute", "exposed_tensor", "bubble", "exposed_data")
    assert sum(first["step_seconds"][part] for part in parts) == pytest.approx(first["step_seconds"]["total"])
    assert first["relative_uncertainty"] == 0.15
    assert set(SHARED_STREAM_MODES) == set(report["interconnects"]["rows"][0]["seconds"])
    assert "| TP | PP | DP | ZeRO |" in done.stdout and "(this machine)" in done.stdout


@pytest.mark.parametrize("link", PRESETS)
@pytest.mark.parametrize("model", ["8b", "llama-1b"])
def test_inference_on_every_interconnect(
    link: str, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks, out = min(8, max(PRESETS[link].known_ranks)), tmp_path / "inference.json"
    main(["inference", "--model", model, "--tp", str(ranks), "--link", link, "--json", str(out)])
    printed, report = capsys.readouterr().out, json.loads(out.read_text())
    speed_ups = {one["wiring"]: one["speed_up"] for one in report["wirings"]}
    hybrid = next(value for name, value in speed_ups.items() if name.startswith("hybrid"))
    assert speed_ups["standard"] == 1.0 < hybrid < speed_ups["ladder"]
    for end in (0, 1):
        ranges = {one["wiring"]: one["speed_up_range"][end] for one in report["wirings"]}
        assert ranges["no-comm"] == max(ranges.values())
    assert speed_ups["no-comm"] == max(speed_ups.values())
    for one in report["wirings"]:
        assert one["speed_up_range"][0] <= one["speed_up"] <= one["speed_up_range"][1]
    assert f"layers to ladder gives {hybrid:.2f}, all of them {speed_ups['ladder']:.2f}" in report["answer"]
    assert report["fits"] and report["answer"] in printed and PRESETS[link].source in printed
    assert "docs/studies.md" in printed


def test_both_baselines_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The second one is the report of its own link."""
    reports = {}
    for link in ("nvlink-3", "nvlink-3-one-shot"):
        out = tmp_path / "plan.json"
        main(["inference", "--model", "8b", "--gpu", "a100", "--link", link, "--json", str(out)])
        reports[link] = capsys.readouterr().out, json.loads(out.read_text())
    printed, report = reports["nvlink-3"]
    assert report["one_shot"] == reports["nvlink-3-one-shot"][1]["wirings"] != report["wirings"]
    speed_ups = {one["wiring"]: f"{one['speed_up']:.2f}" for one in report["one_shot"]}
    for line in printed.splitlines():
        if line.startswith("| ") and (name := line.split()[1]) in speed_ups:
            assert line.endswith(f"| {speed_ups[name]} |")
    # 32 KB: 25.96 us with NCCL, 6.91 with vLLM.
    assert (
        f"With the all-reduces of SGLang or vLLM (one-shot, 7 us instead of 26), ladder gives {speed_ups['ladder']}, "
        f"ladder-parallel {speed_ups['ladder-parallel']}; the bound is {speed_ups['no-comm']}." in report["answer"]
    )
    assert f"  nvlink-3-one-shot: {PRESETS['nvlink-3-one-shot'].source}" in printed


@pytest.mark.parametrize(
    "words",
    [
        "--link no-p2p",
        "--link nvlink-one-shot",
        "--link-latency-us 9",
        "--link-bandwidth-gbs 9",
        "--tp 1",
        "--tp 16",
        "--gpu gb10 --tp 2",
    ],
)
def test_one_baseline_where_others_were_not_measured(
    words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "plan.json"
    main(["inference", "--model", "8b", *words.split(), "--json", str(out)])
    assert json.loads(out.read_text())["one_shot"] == []
    assert "SGLang or vLLM" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--model 8b --tp 1", "Answer: no. A single GPU"),
        ("--model 70b --gpu rtx-4090 --tp 4", "Answer: no. The model does not fit the 22 usable GB of a GPU; --tp 8"),
        ("--model 13b --gpu rtx-4090 --tp 8 --batch 16", "Answer: one replica per box. TP 4 inside each box"),
        (
            "--model 13b --gpu rtx-4090 --memory-bandwidth-gbs 100 --tp 8 --network ib-400",
            "Answer: yes. Adapting 20 of 40",
        ),
    ],
)
def test_the_answer_of_inference_is_a_sentence(words: str, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(["inference", *words.split()])
    printed = capsys.readouterr().out
    assert expected in printed and printed.count("Answer:") == 1
    assert ("| ladder |" in printed) == ("fit" not in expected and "lower" not in expected)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--model 8b --batch 64", ["Answer: yes. ladder-parallel trains", "tokens/s, a billion tokens in"]),
        (
            "--model 8b --gpus 16 --gpus-per-node 2 --batch 64 --seq-length 16384",
            ["Answer: yes.", "with wiring ladder", "; one replica per box."],
        ),
        ("--model 13b --gpus 16 --network 10gbe --batch 64", ["pipeline 0.0 + ", "each replica spans up to 2 boxes"]),
        (
            "--model 1b --gpus 16 --batch 64 --wirings ladder",
            ["Answer: no. No compared wiring is", " with wiring standard trains", "; 8 replicas per box"],
        ),
        ("--model 70b --gpus 64 --gpus-per-node 2 --batch 64", ["each replica spans", " hours", " in boxes of 2 over"]),
    ],
)
def test_the_answer_of_layouts_is_a_sentence(
    words: str, expected: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    main(words.split())
    printed = capsys.readouterr().out
    assert all(part in printed for part in expected), printed
    assert any(f"\n  {name}: " in printed for name in ("ib-400", "10gbe")) == ("in boxes of" in printed)


TWO_BOXES = "--model llama-2-13b --gpu h100 --gpus 16 --network 10gbe --network-adapters 1 --global-batch-size 256"


def plan(words: str, folder: Path) -> dict[str, Any]:
    main([*words.split(), "--json", str(folder / "plan.json")])
    report: dict[str, Any] = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
    return report


def test_every_pipeline_over_two_boxes_is_slower_on_a_slow_network(tmp_path: Path) -> None:
    """Sixteen GPUs are two boxes, so some stage sends to the other box, however small its stages are."""
    usual, slow = (
        {
            (
                row["wiring"],
                *(row[key] for key in ("tensor", "pipeline", "chunks", "data", "micro_batch", "recompute", "zero")),
            ): row
            for row in plan(f"{TWO_BOXES} {more}", tmp_path)["layouts"]
        }
        for more in ("", "--network-bandwidth-gbs 0.001")
    )
    pipelines = [name for name, row in usual.items() if row["pipeline"] > 1]
    assert {usual[name]["pipeline"] for name in pipelines} == {2, 4, 8, 16}
    for name in pipelines:
        before, after = (rows[name]["step_seconds"]["bubble"] for rows in (usual, slow))
        assert after > 100 * before


@pytest.mark.parametrize(
    ("network", "note"),
    [
        ("10gbe", "unreduced, and here over the network: with ladder-attention, 3.0 times the bytes of standard.\n"),
        ("ib-400", None),
    ],
)
def test_late_wirings_that_a_slow_network_slows_have_a_reason(
    network: str, note: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    words = f"--model 8b --gpus 16 --gpus-per-node 4 --network {network} --network-adapters 1 --global-batch-size 256"
    main(words.split())
    printed = capsys.readouterr().out
    assert "unreduced" not in printed if note is None else note in printed


def test_a_no_comes_with_the_command_of_standard(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The fastest layout is another wiring's, by less than 3 %."""
    report = plan(TWO_BOXES, tmp_path)
    assert report["layouts"][0]["wiring"] == "parallel"
    assert report["answer"].startswith("Answer: no.")
    assert "--residual-mode" not in report["command"] and report["command"] in capsys.readouterr().out
    standard = next(row for row in report["layouts"] if row["wiring"] == "standard")
    assert f"--pipeline-model-parallel-size={standard['pipeline']} " in report["command"]
    assert report["tokens_per_second"] == pytest.approx(256 * 4096 / standard["step_seconds"]["total"])


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            "--gpus 16 --network 10gbe",
            "16 x h100 in boxes of 8 over nvlink and 10gbe (8 adapters a box) "
            "(assumed: --gpus-per-node=8 --link=nvlink --network-adapters=8), ",
        ),
        (
            "--gpus 2 --gpu gb10 --network-adapters 1",
            "2 x gb10 in boxes of 1 over dgx-spark (1 adapter a box) "
            "(assumed: --gpus-per-node=1 --network=dgx-spark), ",
        ),
        ("--gpus 8 --link nvlink", "8 x h100 in one box over nvlink (assumed: --gpus-per-node=8), "),
        ("--gpus 8 --link nvlink --gpus-per-node 8", "8 x h100 in one box over nvlink, "),
        ("--gpus 1", "1b, 1 x h100, 8 samples of 512"),
        (
            "--gpus 2 --gpu macbook --gpu-memory-gb 64 --memory-bandwidth-gbs 400 --peak-tflops 28",
            "  macbook: 64 GB, 400 GB/s, 28 TFLOP/s (command line)\n",
        ),
        ("--gpus 8 --gpu h100 --peak-tflops 500", "  h100: 80 GB, 3,350 GB/s, 500 TFLOP/s (command line; otherwise "),
        (
            "--gpus 8 --link-latency-us 21 --link-bandwidth-gbs 38",
            "  nvlink: 38 GB/s and 21 us by the command line; otherwise h100_sxm, nccl 2.29.2 (NVIDIA",
        ),
    ],
)
def test_the_machine_is_printed_with_what_is_assumed(
    words: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["--model", "1b", "--batch", "8", "--seq-length", "512", *words.split()])
    assert expected in capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("inference --tp 4", "qwen3-30b-a3b"),
        ("inference --tp 4", "deepseek-v2-lite"),
        ("layouts --gpus 8 --batch 8 --wirings standard", "llama-3b"),
    ],
)
def test_a_model_is_a_name_a_directory_or_flags(
    command: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Transformers reads and writes the configuration in between."""
    AutoConfig.for_model(**hf_config(SIZES[name], dtype="bfloat16")).save_pretrained(tmp_path)
    model_words = SIZES[name].to_words()
    reports = []
    for words in (
        ["--model", name],
        ["--model", str(tmp_path)],
        ["--model", str(tmp_path / "config.json")],
        model_words,
    ):
        main([*command.split(), *words])
        reports.append(capsys.readouterr().out.partition("\n\n")[2])
    by_name, *others = reports
    assert others == [by_name] * 3


def test_drafts_leave_less_of_the_gain(capsys: pytest.CaptureFixture[str]) -> None:
    words = "inference --model 8b --tp 4 --batch 32 --link no-p2p".split()
    main(words)
    plain = capsys.readouterr().out
    main([*words, "--draft-tokens", "3", "--accepted-length", "2.5"])
    drafting = capsys.readouterr().out

    def row(report: str, wiring: str) -> list[float]:
        (found,) = re.findall(rf"\| {wiring} \| (\S+) \| \S+ \| (\S+) \| (\S+) \|", report)
        return [*map(float, found)]

    sentence = re.search(
        r"standard generates (\S+) times as fast .* ladder gives (\S+) and the bound is (\S+)\. ", drafting
    )
    assert sentence is not None
    assert float(sentence[1]) == pytest.approx(row(drafting, "standard")[0] / row(plain, "standard")[0], abs=0.006)
    assert [float(sentence[2]), float(sentence[3])] == [row(plain, name)[2] for name in ("ladder", "no-comm")]
    assert row(drafting, "ladder")[2] < row(plain, "ladder")[2]


def test_a_plan_s_command_can_train_its_length(capsys: pytest.CaptureFixture[str]) -> None:
    main("--model 1b --gpus 8 --batch 8 --seq-length 16384".split())
    assert "--max-position-embeddings 16384" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--gpu H100", "--gpu H100: did you mean h100? Expected one of"),
        ("--gpu rtx4090", "--gpu rtx4090: did you mean rtx-4090? Expected one of"),
        ("inference --model Llama-3-8B", "--model Llama-3-8B: did you mean llama-8b? Expected one of"),
        ("--model lama-70b", "--model lama-70b: did you mean llama-70b? Expected one of"),
        ("--wirings laddr", "--wirings laddr: did you mean ladder? Expected one of"),
        ("--wirings ladder_parallel", "--wirings ladder_parallel: did you mean ladder-parallel? Expected one of"),
        ("--link nvlnk", "--link nvlnk: did you mean nvlink? Expected one of"),
        (
            "--model meta-llama/Llama-3.1-8B",
            "--model meta-llama/Llama-3.1-8B: cannot be read (No such file or directory)",
        ),
        ("--num-layers 4", "--vocab-size is required with --num-layers"),
        ("--model 8b --num-experts 4", "--model and --num-experts exclude each other: give one of them"),
        ("--residual-mode ladder", "--residual-mode: wirings are compared: give --wirings"),
        ("inference --lanes 4", "--lanes: wirings are compared: leave it out"),
        ("--vocab-size 99 --mtp-num-layers 1", "--mtp-num-layers: plans do not include a drafting head: leave it out"),
        ("inference --draft-tokens 1", "--draft-tokens 1 requires --accepted-length"),
        ("inference --accepted-length 2", "--accepted-length 2.0 requires --draft-tokens"),
        (
            "inference --draft-tokens 1 --accepted-length 2.1",
            "--accepted-length 2.1 is above --draft-tokens 1 + 1: use at most --draft-tokens + 1",
        ),
        ("inference --ladder-layers 99", "--ladder-layers 99: the upper 99 layers of 80 do not exist"),
        ("inference --ladder-layers none", "--ladder-layers none: the hybrid would be standard"),
        ("--num-layers 4 --hidden-size 100 --vocab-size 9", "--hidden-size 100 is not divisible by"),
    ],
)
def test_a_name_or_flag_that_is_not_known_comes_with_the_one_that_is(words: str, expected: str) -> None:
    (message,) = errors_of(main, words.split())
    assert message.startswith(expected)


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (
            "inference --tp 3",
            [
                "--tp 3 does not divide llama-70b: --num-attention-heads 64 is not divisible",
                "--ffn-hidden-size 28672",
                "--num-key-value-heads 8",
            ],
        ),
        (
            "inference --tp 16 --gpus-per-node 16",
            ["--link nvlink: known for 2 to 8 ranks, found 16: give --link-latency-us and --link-bandwidth-gbs"],
        ),
        ("inference --gpu gb10 --tp 4", ["--network dgx-spark: known for 2 ranks, found 4"]),
        ("layout", ["expected one of layouts, inference first"]),
        (
            "--gpu macbook --peak-tflops 28 --model 9b",
            [
                "gb10; to describe another GPU, give --gpu-memory-gb and --memory-bandwidth-gbs as well, and for its "
                "box --gpus-per-node, --link, --network and --network-adapters",
                "--model 9b: expected one of ",
            ],
        ),
        (
            "--model 405b --gpus 16",
            [
                "--gpus 16: in every layout of 405b a GPU needs 463 GB or more, but h100 has 80 GB: the nearest "
                "number of GPUs that is enough is 112"
            ],
        ),
        (
            "--model 8b --gpus 37 --gpus-per-node 1",
            [
                "--gpus 37: not a product of tensor-, pipeline- and data-parallel sizes that suit 8b, its wirings and "
                "--global-batch-size 512: the nearest number of GPUs that is enough is 36"
            ],
        ),
        ("--gpus 12", ["--gpus 12: boxes of 8 GPUs would not be full: give a multiple of 8"]),
        ("--wirings farskip", ["--wirings farskip: llama-8b can have standard, "]),
        (
            "--gpu v100 --wirings no-comm --gpus 0 --contention 2",
            ["--gpu v100", "--wirings no-comm", "--gpus 0", "--contention 2"],
        ),
    ],
)
def test_every_error_names_its_flag(words: str, parts: list[str]) -> None:
    messages = errors_of(main, words.split())
    assert len(messages) == len(parts) and all(any(part in message for message in messages) for part in parts)

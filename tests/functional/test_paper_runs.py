"""The paper's from-scratch runs: sizes, command lines, and a toy run from end to end."""

import json
import re
import shlex
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from examples.paper.check import (
    CheckOptions,
    check,
    dry_run,
    estimate,
    read_command,
)
from examples.paper.runs import SIZES, WIRINGS, tensor_parallel_problems, training_flags
from examples.paper.speed_report import FIXED_ALPHA, FIXED_SIZE, ONE_SHOT_ALPHA, read_published, report
from ladder_lab.bench.options import parse_benchmark
from ladder_lab.bench.results import BenchmarkRow
from ladder_lab.cost.machines import PRESETS, Machine
from megatron_ladder.blueprint.tensors import parameter_count
from megatron_ladder.comm.mesh import ProcessMesh
from megatron_ladder.errors import UserError
from megatron_ladder.model.language_model import LanguageModel
from tests.helpers.commands import REPOSITORY_ROOT, clean_environment, run_command

EXAMPLE = REPOSITORY_ROOT / "examples" / "paper"
SCRIPT = EXAMPLE / "train.sh"
VOCABULARY = 49152
PATHS = ["--streaming", "texts.jsonl", "--tokenizer-type", "ByteTokenizer", "--save", "run", "--load", "run"]
PUBLISHED = {
    # Layers, hidden size, MLP width; billions of parameters with tied and untied embeddings.
    "1.2b": (40, 1536, 4096, 1.208, 1.284),
    "1.5b": (52, 1536, 4096, 1.548, 1.623),
    "3.5b": (40, 2304, 9216, 3.511, 3.624),
    "4.5b": (52, 2304, 9216, 4.530, 4.643),
    "3.5b-tp8": (40, 2304, 9216, 3.511, 3.624),
    "4.5b-tp8": (52, 2304, 9216, 4.530, 4.643),
}


@pytest.mark.parametrize("size", PUBLISHED)
def test_sizes_are_the_published_ones(size: str) -> None:
    layers, hidden, mlp, tied, untied = PUBLISHED[size]
    matrix = VOCABULARY * hidden
    for wiring, norms in (("ladder", 2), ("parallel", 1)):
        # Per layer: four matrices of attention, three of the MLP, the norms. Then the embedding and the last norm.
        by_hand = layers * (4 * hidden**2 + 3 * hidden * mlp + norms * hidden) + matrix + hidden
        model = read_command([*training_flags(SIZES[size], wiring, 1), *PATHS], 64).model
        module = LanguageModel(model, ProcessMesh.single(), dtype=torch.bfloat16, device=torch.device("meta"))
        assert sum(parameter.numel() for parameter in module.parameters()) == by_hand
        assert model.tie_embeddings and parameter_count(model).total == by_hand
        assert parameter_count(replace(model, tie_embeddings=False)).total == by_hand + matrix
        assert (round(by_hand / 1e9, 3), round((by_hand + matrix) / 1e9, 3)) == (tied, untied)


@pytest.mark.parametrize(("size", "wiring"), zip([*SIZES, *SIZES], WIRINGS, strict=False))
def test_every_run_is_valid_and_fits(size: str, wiring: str) -> None:
    for tensor_parallel in (1, 2, 4, 8):
        if list(tensor_parallel_problems(size, wiring, tensor_parallel)):
            assert (tensor_parallel == 1 and "desync" in wiring) or (tensor_parallel == 8 and size in ("3.5b", "4.5b"))
            continue
        run = read_command([*training_flags(SIZES[size], wiring, tensor_parallel), *PATHS], 64)
        assert (run.data_parallel_size, run.global_batch_size, run.training.seq_length) == (
            64 // tensor_parallel,
            2048,
            2048,
        )
        assert estimate(run, Machine.usual("h100")).memory_bytes < 80e9
    assert run.training.train_iters * run.tokens_per_step == 25_000 * 4_194_304
    optimizer = run.optimizer
    assert (optimizer.lr, optimizer.lr_warmup_iters, optimizer.lr_decay_style) == (3e-4, 2000, "cosine")
    assert (optimizer.adam_beta1, optimizer.adam_beta2, optimizer.adam_eps) == (0.9, 0.95, 1e-10)
    head_dim = 72 if "tp8" in size else 64
    assert (optimizer.weight_decay, run.model.init_method_std, run.model.head_dim) == (0.1, 0.02, head_dim)
    layers = run.model.num_layers
    wired = run.model.wired_layers
    expected = {
        "standard": [0] * layers,
        "parallel": [0] * layers,
        "ladder": [1] * layers,
        "ladder-parallel": [1] * layers,
        "staleness-2": [2] * layers,
        "hybrid": [0] * (layers // 2) + [1] * (layers // 2),
        "desync-2x": [0] * layers,
        "desync-4x": [0] * layers,
    }
    width = 1 if "parallel" in wiring else 2
    assert [[len(sub_block.missing) for sub_block in layer] for layer in wired] == [
        [s] * width for s in expected[wiring]
    ]
    sums = sum(sub_block.leaves_shared for layer in wired for sub_block in layer)
    assert sums == width * layers // {"desync-2x": 2, "desync-4x": 4}.get(wiring, 1)


def test_the_script_launches_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", clean_environment()["PATH"])
    processes, words = dry_run("3.5b", "hybrid", ["--tp", "4", "--run", "/runs/a b", "--", "--seed", "7"])
    assert processes == 64
    flags = training_flags(SIZES["3.5b"], "hybrid", 4)
    assert words[: len(flags)] == flags
    run = read_command(words, processes)
    assert run.data.streaming == ("hf://HuggingFaceFW/fineweb-edu:sample-350BT",) and run.data.valid_data_path
    assert run.checkpoint.save == run.checkpoint.load == Path("/runs/a b") and run.training.seed == 7
    errors = list(check(CheckOptions(), ["--hosts", "a b", "--gpus-per-host", "3", "--micro", "2"]))
    assert errors == [
        f"{size} {wiring}: --micro: unknown flag: see --help; flags of pretrain_ladder.py go after --"
        for size in SIZES
        for wiring in WIRINGS
    ]


SPEED = EXAMPLE / "speed.sh"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--onegpu"], "--onegpu: unknown flag"),
        (["--rounds"], "--rounds: a value is missing"),
        (["--rounds", "3"], "--rounds 3: expected 4 or more"),
        (["--rounds", "x"], "--rounds x: expected 4 or more"),
        (["--node-rank", "1"], "--node-rank 1: give --hosts"),
    ],
)
def test_wrong_flags_of_a_speed_measurement_are_rejected(flags: list[str], message: str) -> None:
    done = run_command(["bash", SPEED, "results", "--dry-run", *flags], timeout=30)
    assert (done.returncode, done.stdout) == (2, "") and message in done.stderr


def test_every_published_speed_has_a_command() -> None:
    found, commands = set(), list[list[str]]()
    for flags in ([], ["--hosts", "a b"]):
        done = run_command(["bash", SPEED, "results", "--dry-run", *flags], timeout=30)
        assert done.returncode == 0, done.stderr
        commands += map(shlex.split, done.stdout.splitlines())
    for words in commands:
        begin = words.index("tools/benchmark.py") + 1
        case, options = parse_benchmark(words[begin:])
        peers = "off" if words[:2] == ["env", "NCCL_P2P_DISABLE=1"] else "on"
        assert options.sequence == {"prefill": 1024, "decode": 1280}[case]
        assert (options.cuda_graph, options.compile_sub_blocks) == (True, "true")
        assert options.device == "cuda" and options.tp == (16 if options.sizes == ("llama-405b",) else 8)
        if options.tp == 16:
            assert "deepspeed" in words and words[words.index("--master_addr") + 1] == "a"
        found |= {(options.sizes[0], peers, str(options.batch), wiring, case) for wiring in options.wirings}
    published = read_published()
    assert {(*key, case) for key in published for case in ("prefill", "decode")} <= found
    # 70B at four batch sizes, six sizes at batch 4, and two equal speeds for each of two models.
    assert sum(map(len, published.values())) == 2 * 4 * 2 + 2 * 6 + 4


def test_the_report_of_speeds(tmp_path: Path) -> None:
    def write(name: str, **seconds: float) -> None:
        rows = [
            BenchmarkRow("decode", "", wiring, "nccl", "own", 1e-5, value, 1.0, 0.0, ratio, None, "sound")
            for (wiring, value), ratio in zip(seconds.items(), (1.0, 1.25), strict=True)
        ]
        (tmp_path / f"{name}.json").write_text(json.dumps([asdict(row) for row in rows]))

    write("llama-70b-p2p-on-batch-4-prefill", standard=0.511, ladder=0.511)
    write("llama-70b-p2p-on-batch-4-decode", standard=0.005, ladder=0.003)
    text = report(tmp_path)
    # 4 x 512 tokens in 0.511 + 511 x 0.005 s, and the model's factor for both passes.
    assert "| llama-70b | on | 4 | standard | 668.0 | 258.6 | 1.000 |  | 1.00 |  |" in text
    assert "| llama-70b | on | 4 | ladder | 1,002.0 |  | 1.500 | 1.28 | 1.25 |  |" in text
    assert text.count("\n* ") == 16 + 12 + 4 - 2 and "* llama-405b, P2P on, batch 4, ladder" in text
    (tmp_path / "llama-8b-p2p-on-batch-4-decode.json").write_text("[{}]")
    with pytest.raises(UserError, match=r"llama-8b-p2p-on-batch-4-prefill.json: not written by tools/benchmark.py"):
        report(tmp_path)


def test_one_gpu_measures_the_setting_that_was_fixed_before() -> None:
    done = run_command(["bash", SPEED, "results", "--one-gpu", "--dry-run"], timeout=30)
    assert done.returncode == 0, done.stderr
    found = set()
    for words in map(shlex.split, done.stdout.splitlines()):
        case, options = parse_benchmark(words[words.index("tools/benchmark.py") + 1 :])
        assert options.emulate and (options.device, options.tp, options.compile_sub_blocks) == ("cuda", 8, "true")
        assert options.cuda_graph and options.sequence == {"prefill": 1024, "decode": 1280}[case]
        assert options.alpha[0] == FIXED_ALPHA and options.skew[0] in ("0", "0us")
        if (options.comm_sms, len(options.skew)) == ((16,), 1):
            found |= {
                (size, "on", str(options.batch), wiring, case) for size in options.sizes for wiring in options.wirings
            }
    fixed = [key for key in read_published() if key[0] == FIXED_SIZE and key[1] == "on"]
    assert len(fixed) == 8 and {(*key, case) for key in fixed for case in ("prefill", "decode")} <= found
    assert PRESETS[FIXED_ALPHA].seconds(2**14, 8) > 3 * PRESETS[ONE_SHOT_ALPHA].seconds(2**14, 8)


def test_one_gpu_measures_what_fits_it(tmp_path: Path) -> None:
    """A measurement that fails, for lack of memory for example, leaves the others and the report."""
    calls = tmp_path / "calls"
    program = f"() {{ echo $* >>{calls}; [[ $* != *prefill*--batch\\ 16* ]]; }}"
    done = run_command(["bash", SPEED, tmp_path, "--one-gpu"], timeout=30, env={"BASH_FUNC_python3%%": program})
    assert done.returncode == 1
    lines = calls.read_text().splitlines()
    assert len(lines) == 11 and lines[-1] == f"examples/paper/speed_report.py {tmp_path}"
    assert run_command(["bash", SPEED, tmp_path, "--one-gpu", "--hosts", "a b"], timeout=30).returncode == 2


@pytest.mark.parametrize("flags", [[], ["--one-gpu"]])
def test_speeds_without_a_gpu_are_one_error(tmp_path: Path, flags: list[str]) -> None:
    played = {"BASH_FUNC_python3%%": "() { return 1; }"}
    done = run_command(["bash", SPEED, tmp_path / "results", *flags], timeout=30, env=played)
    assert (done.returncode, done.stdout) == (2, "") and not (tmp_path / "results").exists()
    (line,) = done.stderr.splitlines()
    assert line == "error: python3 has no torch that finds a GPU: give --tiny for a rehearsal on a CPU"
    done = run_command(["bash", SPEED, tmp_path / "results", *flags, "--tiny"], timeout=30, env=played)
    assert done.returncode == 1 and (tmp_path / "results").exists()


@pytest.mark.parametrize(
    ("excess", "is_accepted"),
    [
        ({}, True),
        ({"1": 0.0, "4": 0.12}, True),
        ({"16": -0.001}, False),
        ({"64": 0.121}, False),
        ({"4": None}, False),
    ],
    ids=str,
)
def test_the_paper_is_compared_only_if_standard_is_as_fast_as_it_has_to_be(
    tmp_path: Path, excess: dict[str, float | None], is_accepted: bool
) -> None:
    """Rows of another time of an all-reduce, of other sizes and of other wirings do not count."""
    for (size, p2p, batch, wiring), published in read_published().items():
        above = excess.get(batch, 0.05)
        if (size, p2p, wiring) != (FIXED_SIZE, "on", "standard") or above is None:
            continue
        # A request of 512 tokens, in which a prefill takes as long as a step.
        step = int(batch) / (
            published["tokens_per_second"] * (1 + above + 1e-9 * (above == 0) - 1e-9 * (above == 0.12))
        )
        for case, alphas in (("decode", (FIXED_ALPHA, ONE_SHOT_ALPHA, "0")), ("prefill", (FIXED_ALPHA,))):
            rows = [
                BenchmarkRow(
                    case, name, one, "", alpha, 0, seconds * (1 if alpha == FIXED_ALPHA else 0.5), 1, 0, 1, None, ""
                )
                for name in (size, "llama-8b")
                for one, seconds in (("standard", step * (1 if name == size else 9)), ("ladder", step / 2))
                for alpha in alphas
            ]
            (tmp_path / f"one-gpu-batch-{batch}-{case}.json").write_text(json.dumps([asdict(row) for row in rows]))
    text = report(tmp_path)
    assert ("**Accepted.**" in text, "**Not accepted.**" in text) == (is_accepted, not is_accepted)
    for speed_up in ("1.31", "1.28", "1.19", "1.16", "1.46"):
        assert (f"| {speed_up} |" in text) == is_accepted
    assert "| llama-70b | on | 16 | ladder |" in text
    missing = [batch for batch, above in excess.items() if above is None]
    assert text.count("not measured") == len(missing)


@pytest.mark.slow
def test_all_speeds_of_toy_shapes(tmp_path: Path) -> None:
    command = ["bash", SPEED, tmp_path, "--tiny", "--rounds", "4", "--only", "llama-8b paper-1.5b"]
    done = run_command(command, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "| llama-8b | off | 4 | ladder |" in (tmp_path / "report.md").read_text()
    assert run_command(command, timeout=60).stdout.count("already measured") == 6


@pytest.mark.slow
def test_the_toy_run_resumes(tmp_path: Path) -> None:
    command = ["bash", SCRIPT, "--tiny", tmp_path, "--wiring", "staleness-2"]
    first = run_command([*command, "--", "--exit-interval", "6"], timeout=200)
    assert first.returncode == 0, first.stdout + first.stderr
    assert "--residual-staleness 2" in first.stdout and "iteration  6/12" in first.stdout
    second = run_command(command, timeout=200)
    assert second.returncode == 0, second.stdout + second.stderr
    assert "6 steps done" in second.stdout
    losses = [float(loss) for loss in re.findall(r"\d/12 \| lm loss ([\d.]+)", first.stdout + second.stdout)]
    (valid,) = map(float, re.findall(r"iteration 12 \| valid lm loss ([\d.]+)", second.stdout))
    assert len(losses) == 6 and losses[-1] < losses[0] - 0.1 and valid < losses[0]

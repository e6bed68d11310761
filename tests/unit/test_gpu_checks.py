"""The runner of `tests/gpu.sh`: what becomes of checks that fail or hang, and how results are judged."""

from pathlib import Path

import pytest
import torch

from tests.gpu.on_ranks import ATTENTION, waits_in
from tests.gpu.rank_checks import compare_decoded, largest_error
from tests.gpu.runner import Check, Machine, NotRun, Outcome, run_checks, summary
from tests.helpers.patience import patient


def passes(machine: Machine, ranks: int) -> str:
    return f"{ranks} ranks | 3 us"


def fails(machine: Machine, ranks: int) -> str:
    machine.command("bash", "-c", "echo what it printed; exit 3")
    return ""


def hangs(machine: Machine, ranks: int) -> str:
    machine.command("sleep", "60")
    return ""


def fails_on_a_rank(machine: Machine, ranks: int) -> str:
    raise AssertionError(
        "rank 1 of 2: Traceback (most recent call last):\n  File ...\nRuntimeError: on a rank\nmore of it\n"
    )


def lacks_something(machine: Machine, ranks: int) -> str:
    raise NotRun("torchtitan is not installed")


def run(folder: Path, *checks: Check, device: str = "cuda", seconds: float = 60) -> list[Outcome]:
    """Run checks on a machine with two GPUs, of which these checks use none."""
    machine = Machine("cuda" if device == "cuda" else "cpu", 2, folder)
    outcomes: list[Outcome] = []
    assert run_checks(checks, machine, seconds, outcomes.append) == outcomes
    return outcomes


def test_a_failed_or_hanging_check_does_not_stop_the_others(tmp_path: Path) -> None:
    outcomes = run(
        tmp_path,
        Check("fails", 1, 9, fails),
        Check("hangs", 1, 0.3, hangs),
        Check("rank", 2, 9, fails_on_a_rank),
        Check("lacks", 1, 9, lacks_something),
        Check("large", 8, 9, passes),
        Check("passes", 2, 9, passes),
    )
    assert [(one.check.title, one.result, one.figure) for one in outcomes] == [
        ("fails", "failed", "exit code 3: bash -c echo what it printed; exit 3"),
        ("hangs", "failed", f"still ran after {patient(0.3):g} s: sleep 60"),
        ("rank", "failed", "RuntimeError: on a rank"),
        ("lacks", "not run", "torchtitan is not installed"),
        ("large", "not run", "needs 8 GPUs, found 2"),
        ("passes", "passed", "2 ranks | 3 us"),
    ]
    assert outcomes[1].seconds < patient(9)
    table, failures = summary(outcomes)
    assert table.splitlines()[-1] == "| passes | 2 | passed | 2 ranks \\| 3 us | 0 |"
    assert len(table.splitlines()) == 8 and "what it printed" in failures and failures.count("Traceback") == 4
    assert summary(outcomes[3:])[1] == ""


def test_checks_that_do_not_fit_into_the_time_are_not_run(tmp_path: Path) -> None:
    first, second = run(tmp_path, Check("hangs", 1, 9, hangs), Check("passes", 1, 9, passes), seconds=0.3)
    assert (first.result, second.result) == ("failed", "not run") and "--minutes" in second.figure


def test_processes_stand_for_gpus_on_a_cpu(tmp_path: Path) -> None:
    outcomes = run(tmp_path, *(Check("passes", gpus, 9, passes) for gpus in (1, 2, 8)), device="cpu")
    assert [one.figure for one in outcomes] == ["1 ranks | 3 us", "2 ranks | 3 us", "4 ranks | 3 us"]


def test_calls_that_wait_for_the_device_are_counted_per_step() -> None:
    def event(name: str, at: float, kind: str = "cuda_runtime", seconds: float = 1.0) -> dict[str, object]:
        return {"name": name, "cat": kind, "ts": at, "dur": seconds}

    events = [
        event("iteration 3", 100, "user_annotation", 50),
        event("iteration 3", 100, "gpu_user_annotation", 90),
        event("iteration 4", 200, "user_annotation", 50),
        event("cudaLaunchKernel", 110),
        event("cudaMemcpy", 120),
        event("cudaMemcpyAsync", 121),
        event("cudaStreamSynchronize", 149),
        event("cudaDeviceSynchronize", 160),
        event("cuStreamSynchronize", 210, "cuda_driver"),
        event("cudaEventQuery", 211),
    ]
    assert waits_in(events) == {3: ["cudaMemcpy", "cudaStreamSynchronize"], 4: ["cuStreamSynchronize"]}


def test_backends_are_read_from_the_names_of_operators() -> None:
    names = {
        "aten::_scaled_dot_product_flash_attention": "flash",
        "aten::_scaled_dot_product_flash_attention_for_cpu": "flash",
        "aten::_scaled_dot_product_cudnn_attention": "cudnn",
        "aten::_scaled_dot_product_efficient_attention": "efficient",
        "aten::_scaled_dot_product_attention_math": "attention_math",
        "torch_attn::_varlen_attn": "varlen_attn",
    }
    for name, backend in names.items():
        match = ATTENTION.fullmatch(name)
        assert match is not None and (match[1] or match[2]) == backend
    for name in ("aten::_scaled_dot_product_flash_attention_backward", "aten::scaled_dot_product_attention"):
        assert ATTENTION.fullmatch(name) is None


def test_decoded_tokens_may_differ_only_where_two_are_equally_likely() -> None:
    wanted = [((1, 2, 3), (-1.0, -2.0, -3.0))]
    assert compare_decoded([((1, 2, 3), (-1.0, -2.0, -3.0005))], wanted, "fp32") == (3, pytest.approx(5e-4))
    assert compare_decoded([((1, 7, 9), (-1.0, -2.1, -9.0))], wanted, "bf16") == (1, pytest.approx(0.1))
    with pytest.raises(AssertionError, match="fp32: "):
        compare_decoded([((1, 7, 9), (-1.0, -2.0, -9.0))], wanted, "fp32")
    with pytest.raises(AssertionError, match="bf16: -3.5000, not -2.0000"):
        compare_decoded([((1, 2, 3), (-1.0, -3.5, -3.0))], wanted, "bf16")


def test_the_largest_error_is_that_of_a_tensor_that_is_no_number() -> None:
    wanted = {"a": torch.ones(4), "b": torch.ones(4), "c": torch.ones(4)}
    name, error = largest_error(wanted | {"a": 3 * torch.ones(4), "b": 1.5 * torch.ones(4)}, wanted)
    assert (name, error) == ("a", 2.0)
    name, error = largest_error(wanted | {"a": 3 * torch.ones(4), "b": torch.full((4,), torch.nan)}, wanted)
    assert name == "b" and not error <= 1

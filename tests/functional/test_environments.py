"""What a wheel and a container image contain, scripts that test the project in other environments, and GPU checks."""

import importlib
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from megatron_ladder.errors import UserError
from tests.gpu import runner
from tests.helpers.commands import REPOSITORY_ROOT, run_command, tracked_files, write_nvidia_smi
from tests.helpers.programs import load_program
from tests.helpers.tokens import write_tokens
from tests.unit.generate.tiny_model import write_checkpoint

GPU_MINUTES = 15
TRAINING = (
    "--num-layers 1 --hidden-size 16 --num-attention-heads 1 --seq-length 8 --train-iters 1 --lr 1 --split 1 "
    "--micro-batch-size 1 --vocab-size 101 --data-path {0}/tokens"
)


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("pretrain", TRAINING),
        ("generate", "--model {0}/model --tokens 1,2"),
        ("throughput", "--size 1x16x48x1x1x101 --sequence 8 --backend none"),
    ],
)
def test_programs_name_gpus_that_torch_cannot_use(
    program: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(tmp_path / "model")
    write_tokens(tmp_path / "tokens")
    write_nvidia_smi(tmp_path, gpus=8, driver="550.54.15")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(UserError) as raised:
        load_program(program).main(words.format(tmp_path).split())
    (error,) = raised.value.messages
    assert error.startswith("nvidia-smi lists 8 GPUs with driver 550.54.15, but torch ")


@pytest.mark.slow
@pytest.mark.parametrize(
    "script",
    ["tests/wheel.sh", "tests/oldest.sh", "tests/lm_eval.sh", "tests/modeling_common.sh", "vllm_plugin/test.sh"],
)
def test_a_script_passes_in_its_environment(script: str) -> None:
    # Installers read their settings, such as a mirror, from the variables of the user.
    done = run_command(["bash", script], timeout=3600, env=os.environ)
    if done.returncode == 77:
        pytest.skip(done.stdout.splitlines()[-1])
    assert done.returncode == 0, done.stdout + done.stderr


def test_gpu_checks_run_in_the_order_of_the_page_about_them() -> None:
    program, *_ = [
        importlib.import_module(f"tests.gpu.{name}") for name in ("__main__", "rank_checks", "program_checks")
    ]
    assert [program.GpuOptions(gpus=gpus).seconds for gpus in (2, 4, 8)] == [900, 2400, 2400]
    titles = [check.title for check in program.choose_checks(program.GpuOptions(device="cpu"))]
    page = (REPOSITORY_ROOT / "docs" / "gpu.md").read_text()
    places = [titles.index(row) for row in re.findall(r"^\| (.+?) \|", page, re.MULTILINE) if row in titles]
    assert len(places) >= 12 and places == sorted(places)
    assert [title.rpartition(", ")[2] for title in titles[-4::2]] == [
        "blocking launches",
        "without the caching allocator",
    ]


def test_a_gpu_check_has_its_own_time_even_if_little_is_left_for_all() -> None:
    check = runner.Check("", 1, 100, runner.Value.RIGHT, lambda machine, ranks: f"{machine.seconds_left:.0f}")
    (outcome,) = runner.run_checks([check], runner.Machine("cpu", 0, Path()), 5, print)
    assert (outcome.result, outcome.figure) == ("passed", "100")


@pytest.mark.slow
def test_every_gpu_check_passes_on_a_cpu(tmp_path: Path) -> None:
    output = tmp_path / "gpu.md"
    command = [sys.executable, "-m", "tests.gpu", "--device", "cpu", "--minutes", str(GPU_MINUTES), "--output", output]
    done = run_command(command, timeout=60 * GPU_MINUTES + 300)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in output.read_text().splitlines() if "|" in line]
    assert len(rows) > 20
    # torchtitan and vLLM are not among the packages of the tests, and a compiler is optional.
    others = [row for row in rows[2:] if row[2] != "passed"]
    absent = re.compile("torchtitan|vLLM|compiler")
    assert all(row[2] == "not run" and absent.search(row[3]) for row in others), others


def test_a_wheel_contains_the_packages_alone_and_a_source_distribution_all_programs(tmp_path: Path) -> None:
    tracked = tracked_files()
    for name in tracked:
        copy = tmp_path / "source" / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes((REPOSITORY_ROOT / name).read_bytes())
    # Without --wheel, the wheel is made from the source distribution, so both must be complete.
    subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", tmp_path],
        cwd=tmp_path / "source",
        capture_output=True,
        check=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        found = {name for name in archive.namelist() if ".dist-info/" not in name}
    packages = ("megatron_ladder/", "tools/ladder_lab/")
    assert found == {name.removeprefix("tools/") for name in tracked if name.startswith(packages)}
    (source,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        contained = {name.partition("/")[2] for name in archive.getnames()}
    # Files that only a clone needs, and measurements.
    left_out = re.compile(r"\.ci/|\.gitignore$|tests/|vllm_plugin/|docs/.*\.json$")
    assert [name for name in tracked if name not in contained and not left_out.match(name)] == []


def test_the_container_image_copies_what_the_package_needs() -> None:
    copied = set[str]()
    for line in (REPOSITORY_ROOT / "examples" / "Dockerfile").read_text().splitlines():
        if line.startswith("COPY "):
            copied.update(line.split()[1:-1])
    present = {name.partition("/")[0] for name in tracked_files()}
    assert copied <= present
    assert present - copied == {".ci", ".gitignore", "CITATION.cff", "docs", "tests", "vllm_plugin"}

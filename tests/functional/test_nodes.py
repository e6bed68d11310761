"""Runs on several hosts over a real network, with hosts that fail, hang, or have different settings."""

import os
import re
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from megatron_ladder.command_line import parse_command_line
from megatron_ladder.config.run import SECTIONS
from tests.helpers.commands import REPOSITORY_ROOT, clean_environment, free_port, kill_tree, tracked_files
from tests.helpers.patience import patient
from tests.helpers.tokens import write_tokens

VOCABULARY = 96
RECIPE = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --num-key-value-heads 2 --ffn-hidden-size 64 "
    "--seq-length 16 --micro-batch-size 2 --global-batch-size 4 --lr 1e-2 --lr-warmup-iters 2 "
    f"--vocab-size {VOCABULARY} --split 1 --log-interval 1 --eval-iters 0 --residual-mode ladder"
).split()
FOREVER = ["--train-iters", "1000000"]
START = 240
"""Time limit for launchers and processes to start, also on a busy machine."""


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    return write_tokens(tmp_path / "tokens", VOCABULARY)


class Command:
    """A running command, whose output goes to files so that it can be read at any time."""

    def __init__(self, argv: Sequence[str | Path], folder: Path, name: str, **variables: str) -> None:
        self.paths = [folder / f"{name}.out", folder / f"{name}.err"]
        environment = clean_environment() | {"TORCH_EXTENSIONS_DIR": str(folder / "extensions"), **variables}
        with self.paths[0].open("w") as out, self.paths[1].open("w") as err:
            self.process = subprocess.Popen(
                [str(word) for word in argv],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                text=True,
                env=environment,
                cwd=REPOSITORY_ROOT,
                start_new_session=True,
            )

    @property
    def stdout(self) -> str:
        return self.paths[0].read_text(errors="replace")

    @property
    def stderr(self) -> str:
        return self.paths[1].read_text(errors="replace")

    def wait(self, seconds: float) -> int:
        try:
            return self.process.wait(patient(seconds))
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still ran after {seconds} s\n{self.stdout}\n{self.stderr}") from None

    def wait_for(self, words: str, seconds: float) -> None:
        deadline = time.monotonic() + patient(seconds)
        while words not in self.stdout:
            assert self.process.poll() is None and time.monotonic() < deadline, self.stdout + self.stderr
            time.sleep(0.05)


@contextmanager
def running(*commands: Command) -> Iterator[None]:
    """End the commands and all their descendants when the block ends."""
    try:
        yield
    finally:
        for command in commands:
            kill_tree(command.process)


def start_ranks(flags_of_ranks: Sequence[Sequence[str | Path]], folder: Path) -> list[Command]:
    """Start one process per rank on this machine, without a launcher that ends all ranks when one ends."""
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(len(flags_of_ranks))}
    return [
        Command(
            ["python", "pretrain_ladder.py", *RECIPE, *flags],
            folder,
            f"rank{rank}",
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            **common,
        )
        for rank, flags in enumerate(flags_of_ranks)
    ]


def test_ranks_with_different_settings_do_not_start(tokens: Path, tmp_path: Path) -> None:
    common = ["--data-path", tokens, "--train-iters", "3"]
    others = ["--lr", "2e-2", "--seed", "7", "--tensor-model-parallel-size", "2"]
    commands = start_ranks([common, [*common, *others]], tmp_path)
    with running(*commands):
        assert [command.wait(START) for command in commands] == [2, 2]
    for command in commands:
        errors = [line for line in command.stderr.splitlines() if line.startswith("error: ")]
        flags = [line.split()[1] for line in errors]
        assert flags == ["--seed", "--lr", "--tensor-model-parallel-size"], command.stderr
        assert re.search(r"--lr differs: 0.01 for rank 0 on \S+ \(127.0.0.1\) but 0.02 for rank 1 on", errors[1])
    assert all("Traceback" not in command.stderr for command in commands)


class Stubs:
    """Programs in the first folder of PATH that record their arguments, and a copy of examples/."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "bin").mkdir()
        (folder / "repository" / "examples").mkdir(parents=True)
        for name in ("multi_node.sh", "multi_node.sbatch", "hosts.sh"):
            text = (REPOSITORY_ROOT / "examples" / name).read_text()
            (folder / "repository" / "examples" / name).write_text(text)
        # The hostfile is gone when the script ends, so its contents are written down too.
        self.add("python3", '[ "$*" = "tools/report_run.py --status $SAVE" ] && exit "${STATUS:-0}"')
        self.add("deepspeed", 'printf "%s\\n" "$@"; echo hostfile:; cat "$2"; echo "variable=${LADDER_TEST:-}"')

    def add(self, name: str, script: str) -> None:
        path = self.folder / "bin" / name
        path.write_text(f"#!/usr/bin/env bash\n{script}\n")
        path.chmod(0o755)

    def run(self, script: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        path = f"{self.folder / 'bin'}{os.pathsep}/usr/bin{os.pathsep}/bin"
        return subprocess.run(
            ["bash", f"examples/{script}", *arguments],
            capture_output=True,
            text=True,
            timeout=patient(20),
            cwd=self.folder / "repository",
            env={"PATH": path, "HOME": str(self.folder), "SAVE": "/shared/checkpoints", **variables},
        )


@pytest.fixture
def stubs(tmp_path: Path) -> Stubs:
    return Stubs(tmp_path)


def test_a_slurm_job_starts_every_node(stubs: Stubs) -> None:
    stubs.add("scontrol", '[ "$*" = "show hostnames n[3-4]" ] && printf "n3\\nn4\\n"')
    # As slurm does: one task on each node, that knows its own number.
    stubs.add("srun", 'echo "srun $1"; shift; for SLURM_NODEID in 0 1; do export SLURM_NODEID; "$@"; done')
    job = {
        "SLURM_SUBMIT_DIR": str(stubs.folder / "repository"),
        "SLURM_JOB_NODELIST": "n[3-4]",
        "SLURM_JOB_ID": "40017",
        "SLURM_GPUS_ON_NODE": "4",
    }
    done = stubs.run("multi_node.sbatch", "--train-iters", "7", **job)
    assert done.returncode == 0, done.stderr
    words = done.stdout.split("\n")
    assert words[0] == "srun --kill-on-bad-exit=1"
    starts = [place for place, word in enumerate(words) if word == "--master_addr"]
    for node, start in enumerate(starts):
        assert words[start : start + 7] == [
            "--master_addr",
            "n3",
            "--master_port",
            "20017",
            "--no_ssh",
            "--node_rank",
            str(node),
        ]
    assert len(starts) == 2 and words.count("n4 slots=4") == 2 and words.count("7") == 2
    stubs.add("sleep", "")
    for status, attempts in {3: 1, 1: 20}.items():
        failed = stubs.run("multi_node.sbatch", "--save", "x", **job, SAVE="x", STATUS=str(status))
        assert failed.returncode == status and failed.stdout.count("srun ") == attempts
    folder = stubs.folder / "repository" / "examples"
    for name in os.listdir(folder):
        subprocess.run(["bash", "-n", folder / name], check=True)


def test_a_kubernetes_job_starts_every_node(stubs: Stubs) -> None:
    text = (REPOSITORY_ROOT / "examples" / "kubernetes.yaml").read_text()
    service, job = yaml.safe_load_all(text)
    spec = job["spec"]
    pods = [f"{job['metadata']['name']}-{index}" for index in range(spec["completions"])]
    hosts = [f"{pod}.{service['metadata']['name']}" for pod in pods]
    assert spec["parallelism"] == len(hosts)
    assert spec["template"]["spec"]["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    (container,) = spec["template"]["spec"]["containers"]
    gpus = container["resources"]["limits"]["nvidia.com/gpu"]
    program, script, *arguments = container["command"]
    assert program == "bash"
    for index in range(spec["completions"]):
        words = [word.replace("$(JOB_COMPLETION_INDEX)", str(index)) for word in arguments]
        done = stubs.run(script.removeprefix("examples/"), *words)
        assert done.returncode == 0, done.stderr
        passed = done.stdout.split("\n")
        assert passed[passed.index("--master_addr") + 1] == hosts[0]
        assert passed[passed.index("--node_rank") + 1] == str(index)
        assert passed[passed.index("hostfile:") + 1 :][: len(hosts)] == [f"{host} slots={gpus}" for host in hosts]
        parse_command_line(SECTIONS, passed[passed.index("pretrain_ladder.py") + 1 : passed.index("hostfile:")], "", "")


def test_the_container_image_copies_what_the_package_needs() -> None:
    copied = set[str]()
    for line in (REPOSITORY_ROOT / "examples" / "Dockerfile").read_text().splitlines():
        if line.startswith("COPY "):
            copied.update(line.split()[1:-1])
    present = {name.partition("/")[0] for name in tracked_files()}
    assert copied <= present
    assert present - copied == {".ci", ".gitignore", "docs", "tests", "vllm_plugin"}

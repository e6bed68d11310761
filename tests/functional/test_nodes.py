"""Runs on several hosts over a real network, with hosts that fail, hang, or have different settings."""

import re
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from megatron_ladder.config.run import parse_run
from tests.helpers.commands import (
    REPOSITORY_ROOT,
    Command,
    clean_environment,
    free_port,
    run_command,
    running,
    write_program,
)
from tests.helpers.hosts import Host, two_hosts, why_no_hosts
from tests.helpers.tokens import write_tokens

VOCABULARY = 96
RECIPE = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --num-key-value-heads 2 --ffn-hidden-size 64 "
    "--seq-length 16 --micro-batch-size 2 --global-batch-size 4 --lr 1e-2 --lr-warmup-iters 2 "
    f"--vocab-size {VOCABULARY} --split 1 --log-interval 1 --eval-iters 0 --residual-mode ladder"
).split()
ACROSS = {"data": [], "pipeline": ["--pipeline-model-parallel-size", "2"]}
"""Groups that communicate between two hosts with two ranks each: flags by the name of the group."""
FOREVER = ["--train-iters", "1000000"]
START = 240
"""Time limit for launchers and processes to start, also on a busy machine."""

needs_hosts = pytest.mark.skipif(why_no_hosts() is not None, reason=why_no_hosts() or "")


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    return write_tokens(tmp_path / "tokens", VOCABULARY)


def start_on(hosts: Sequence[Host], flags: Sequence[str | Path], folder: Path) -> list[Command]:
    """`deepspeed --no_ssh` on each host, two ranks on each."""
    hostfile = folder / "hostfile"
    hostfile.write_text("".join(f"{host.name} slots=2\n" for host in hosts))
    launcher = f"deepspeed --no_ssh --master_addr {hosts[0].address} --master_port {free_port()} --node_rank"
    program = ["pretrain_ladder.py", *RECIPE, "--tensor-model-parallel-size", "2", *flags]
    return [
        Command(host.enter([*launcher.split(), str(number), "--hostfile", hostfile, *program]), folder / host.name)
        for number, host in enumerate(hosts)
    ]


def losses(output: str) -> list[float]:
    return [float(value) for value in re.findall(r"lm loss (\S+)", output)]


@needs_hosts
@pytest.mark.slow
@pytest.mark.parametrize("across", ACROSS)
def test_two_hosts_train_like_one_process(tokens: Path, tmp_path: Path, across: str) -> None:
    flags = ["--data-path", tokens, "--train-iters", "5"]
    alone = Command(["python", "pretrain_ladder.py", *RECIPE, *flags], tmp_path / "alone")
    with running(alone):
        assert alone.wait(START) == 0, alone.stderr
    with two_hosts() as hosts:
        commands = start_on(hosts, [*flags, *ACROSS[across]], tmp_path)
        with running(*commands):
            codes = [command.wait(START) for command in commands]
    first, second = commands
    assert codes == [0, 0], first.stdout + first.stderr + second.stdout + second.stderr
    assert f"{across} 2" in first.stdout and "tensor 2" in first.stdout
    # The log has four decimals.
    assert losses(first.stdout) == pytest.approx(losses(alone.stdout), abs=1.1e-4)
    assert len(losses(first.stdout)) == 5 and losses(second.stdout) == []


@needs_hosts
@pytest.mark.slow
@pytest.mark.parametrize("across", ACROSS)
def test_a_lost_host_is_named(tokens: Path, tmp_path: Path, across: str) -> None:
    """Its network is disconnected first, so that the other host receives no sign that its processes ended."""
    timeout = 6
    flags = ["--data-path", tokens, *FOREVER, "--distributed-timeout-seconds-after-first-step", str(timeout)]
    with two_hosts() as hosts:
        commands = start_on(hosts, [*flags, *ACROSS[across]], tmp_path)
        with running(*commands):
            commands[0].wait_for("iteration       3/", START)
            hosts[1].unplug()
            hosts[1].kill()
            began = time.monotonic()
            # The launcher looks once a second, and the ranks give each other 5 s to speak.
            assert commands[0].wait(timeout + 60) == 4, commands[0].stderr
            assert timeout - 1 < time.monotonic() - began
    report = [line for line in commands[0].stderr.splitlines() if "LostPeerError" in line]
    # Whatever collective it hangs in, nobody of the first host is suspected.
    named = r"error: rank [01]: LostPeerError: (one of )?ranks? [-23]+ on node-b \(10.77.0.2\) is gone"
    assert report and all(re.search(named, line) for line in report), commands[0].stderr
    waits = {"data": "in group 'data'", "pipeline": "exchanges a message with rank"}
    assert waits[across] in commands[0].stderr


class Stubs:
    """Programs in the first folder of PATH that record their arguments, and a copy of examples/."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "bin").mkdir()
        (folder / "repository" / "examples").mkdir(parents=True)
        for name in ("multi_node.sh", "multi_node.sbatch", "hosts.sh"):
            shutil.copy(REPOSITORY_ROOT / "examples" / name, folder / "repository" / "examples")
        # The hostfile is gone when the script ends, so its contents are written down too.
        self.add("python3", '[ "$*" = "tools/report_run.py --status $SAVE" ] && exit "${STATUS:-0}"')
        self.add("deepspeed", 'printf "%s\\n" "$@"; echo hostfile:; cat "$2"; echo "variable=${LADDER_TEST:-}"')

    def add(self, name: str, script: str) -> None:
        write_program(self.folder / "bin" / name, f"#!/usr/bin/env bash\n{script}\n")

    def run(self, script: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        usual = {"PATH": f"{self.folder}/bin:/usr/bin:/bin", "HOME": str(self.folder), "SAVE": "/shared/checkpoints"}
        words = ["bash", f"examples/{script}", *arguments]
        return run_command(words, timeout=20, env=usual | variables, cwd=self.folder / "repository")


@pytest.fixture
def stubs(tmp_path: Path) -> Stubs:
    return Stubs(tmp_path)


def test_the_multi_host_script_starts_all_hosts_over_ssh(stubs: Stubs) -> None:
    missing = stubs.run("multi_node.sh")
    assert missing.returncode == 2 and "no pdsh on the PATH" in missing.stderr
    stubs.add("pdsh", "exit 1")
    done = stubs.run("multi_node.sh", "--train-iters", "7")
    assert done.returncode == 0, done.stderr
    words = done.stdout.split("\n")
    assert words[0] == "--hostfile" and words[2:6] == ["--master_addr", "node-1", "--master_port", "29500"]
    assert "--no_ssh" not in words and words[6] == "pretrain_ladder.py"
    after = words[words.index("hostfile:") :]
    assert after[:3] == ["hostfile:", "node-1 slots=8", "node-2 slots=8"]
    assert words[words.index("hostfile:") - 2 :][:2] == ["--train-iters", "7"]


def test_the_multi_host_script_starts_one_host(stubs: Stubs) -> None:
    (stubs.folder / ".deepspeed_env").write_text("LADDER_TEST=two words\n")
    done = stubs.run("multi_node.sh", "--hosts", "a b c", "--gpus-per-host", "2", "--node-rank", "2")
    assert done.returncode == 0, done.stderr
    words = done.stdout.split("\n")
    assert words[2:9] == ["--master_addr", "a", "--master_port", "29500", "--no_ssh", "--node_rank", "2"]
    assert words[-6:] == ["hostfile:", "a slots=2", "b slots=2", "c slots=2", "variable=two words", ""]
    for rank in ("3", "b"):
        wrong = stubs.run("multi_node.sh", "--hosts", "a b c", "--node-rank", rank)
        assert wrong.returncode == 2 and f"--node-rank {rank}: expected 0 to 2" in wrong.stderr
    (stubs.folder / "repository" / ".deepspeed_env").write_text("A=1\n# why\n")
    stumbling = stubs.run("multi_node.sh", "--node-rank", "0")
    assert stumbling.returncode == 2 and ".deepspeed_env: found '# why', expected NAME=VALUE" in stumbling.stderr


@pytest.mark.slow
def test_variables_are_passed_over_ssh(stubs: Stubs) -> None:
    """The real launcher; a replacement of pdsh records the command that would run on the hosts."""
    deepspeed = shutil.which("deepspeed", path=clean_environment()["PATH"])
    stubs.add("deepspeed", f'exec "{deepspeed}" "$@"')
    stubs.add("ssh", 'echo "$@" >&2')
    stubs.add("pdsh", 'printf "%s\\n" "$@"')
    (stubs.folder / "repository" / ".deepspeed_env").write_text("LADDER_TEST=seven\n")
    done = stubs.run("multi_node.sh", "--hosts", "a b", "--train-iters", "7", DS_ACCELERATOR="cpu")
    assert done.returncode == 0, done.stderr
    words = done.stdout[done.stdout.index("\n-S\n") :].split()
    assert words[words.index("-w") + 1] == "a,b" and words[-2:] == ["--train-iters", "7"]
    assert "export LADDER_TEST=seven;" in done.stdout
    assert {"deepspeed.launcher.launch", "--node_rank=%n", "--master_addr=a", "pretrain_ladder.py"} <= {*words}


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
        expected = f"--master_addr n3 --master_port 20017 --no_ssh --node_rank {node}"
        assert words[start : start + 7] == expected.split()
    assert len(starts) == 2 and words.count("n4 slots=4") == 2 and words.count("7") == 2
    stubs.add("sleep", "")
    for status, attempts in {3: 1, 1: 20}.items():
        failed = stubs.run("multi_node.sbatch", "--save", "x", **job, SAVE="x", STATUS=str(status))
        assert failed.returncode == status and failed.stdout.count("srun ") == attempts


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
        parse_run(passed[passed.index("pretrain_ladder.py") + 1 : passed.index("hostfile:")])

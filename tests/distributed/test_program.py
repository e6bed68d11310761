"""The training program on ranks that are forks of the test process: errors, lost peers, and a teacher."""

import hashlib
import itertools
import os
import re
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from megatron_ladder import errors
from megatron_ladder.comm.group import CommGroup
from megatron_ladder.train.record import read_record
from tests.chaos.ranks import Job
from tests.helpers.patience import patient
from tests.helpers.pool import import_for_ranks
from tests.helpers.tokens import write_documents, write_tokens
from tests.unit.convert.saved_models import export
from tests.unit.generate.tiny_model import tiny_config, write_checkpoint

VOCABULARY = 67
MODEL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 64 --residual-mode ladder "
    f"--vocab-size {VOCABULARY}"
).split()
RECIPE = (
    "--seq-length 16 --micro-batch-size 2 --lr 1e-2 --lr-warmup-iters 2 --split 1 --log-interval 1 --eval-iters 0"
).split()
FOREVER = ["--train-iters", "1000000"]
SECONDS = 60
"""Time limit of a run, also on a busy machine."""


@pytest.fixture(autouse=True)
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """No launcher ends the ranks that give another one the time to explain a failure."""
    monkeypatch.setattr(errors, "GRACE_SECONDS", 0.1)


@pytest.fixture
def data(tmp_path: Path) -> list[str]:
    return ["--data-path", str(write_tokens(tmp_path / "tokens", VOCABULARY))]


@contextmanager
def started(folder: Path, *flags_of_ranks: Sequence[str]) -> Iterator[Job]:
    """Start one rank for each list of flags, and end those that are left when the block ends."""
    import_for_ranks()
    job = Job([[*RECIPE, *flags] for flags in flags_of_ranks], folder / "output")
    try:
        yield job
    finally:
        job.kill()


def run(folder: Path, flags: Sequence[str], ranks: int) -> str:
    """Return what the ranks of a run that succeeds print."""
    with started(folder, *[flags] * ranks) as job:
        codes = job.wait(SECONDS)
    assert set(codes.values()) == {0}, job.output
    return job.output


def refusals(folder: Path, *flags_of_ranks: Sequence[str]) -> list[list[str]]:
    """Return the errors that each rank of a run with invalid input prints."""
    with started(folder, *([*MODEL, *flags] for flags in flags_of_ranks)) as job:
        codes = job.wait(SECONDS)
    assert set(codes.values()) == {2} and "Traceback" not in job.output, job.output
    texts = map(job.text, range(len(flags_of_ranks)))
    return [[line for line in text.splitlines() if line.startswith("error: ")] for text in texts]


def test_ranks_with_different_settings_do_not_start(data: list[str], tmp_path: Path) -> None:
    common = [*data, "--train-iters", "3", "--global-batch-size", "4"]
    others = ["--lr", "2e-2", "--seed", "7", "--tensor-model-parallel-size", "2"]
    for found in refusals(tmp_path, common, [*common, *others]):
        differing = [re.findall(r"\S+(?= differs: )", line) for line in found]
        assert differing == [["--seed"], ["--lr"], ["--tensor-model-parallel-size"]], found
        assert re.search(r"rank 1 on \S+ \(127.0.0.1\): --lr differs: 0.02, and 0.01 on rank 0", found[1])


def test_an_error_on_one_host_ends_the_others_immediately(data: list[str], tmp_path: Path) -> None:
    """Here its data is missing. The first rank is on the other host."""
    steps = ["--train-iters", "3"]
    (first,), (second,) = refusals(tmp_path, [*data, *steps], ["--data-path", f"{tmp_path}/no", *steps])
    assert re.search(r"error: rank 1 on \S+ \(127.0.0.1\): --data-path \S+no", first), first
    assert re.search(r"error: --data-path \S+no", second) and "rank 1" not in second


def test_an_error_of_one_rank_ends_all_with_its_message(tmp_path: Path) -> None:
    """Only data-parallel rank 1 reads the sample with an id that the vocabulary lacks."""
    document = np.ones(16 * 64 + 1, dtype=np.int64)
    document[16 * 40 :] = VOCABULARY + 5
    flags = ["--data-path", str(write_documents(tmp_path / "tokens", document)), "--train-iters", "64"]
    flags += ["--micro-batch-size", "1"]
    with started(tmp_path, *[[*MODEL, *flags]] * 2) as job:
        assert job.wait(SECONDS) == {0: 4, 1: 2}, job.output
    assert "LostPeerError: rank 1 on" in job.text(0)
    assert f"holds token id {VOCABULARY + 5}" in job.text(1) and "--tokenizer-model" in job.text(1)


@contextmanager
def training(folder: Path, flags: Sequence[str]) -> Iterator[Job]:
    """Train on two ranks, and begin the block after some steps."""
    with started(folder, *[[*MODEL, *FOREVER, *flags]] * 2) as job:
        deadline = time.monotonic() + patient(SECONDS)
        while "iteration       3/" not in job.text(0):
            assert not job.codes and time.monotonic() < deadline, job.output
            time.sleep(0.01)
        yield job


def test_a_stopped_rank_is_reported_with_stacks(data: list[str], tmp_path: Path) -> None:
    flags = [*data, "--tensor-model-parallel-size", "2"]
    flags += ["--distributed-timeout-seconds-after-first-step", f"{patient(3):g}", "--save", f"{tmp_path}/save"]
    with training(tmp_path, flags) as job:
        job.signal(1, signal.SIGSTOP)
        began = time.monotonic()
        assert job.wait(SECONDS, ranks=[0])[0] == 4, job.output
        assert time.monotonic() - began > 2
    assert [event["event"] for event in read_record(tmp_path / "save")][-1] == "hang"
    report = job.text(0)
    assert re.search(r"\*\*\* rank 0 on \S+ \(127.0.0.1\): no progress for \d+ s", report)
    # Wherever in a step the other one was stopped.
    collective = r"(all_reduce|all_gather|broadcast) \d+ in group '\w+' of ranks 0-1, \w+\[.*\]; with rank 1 on"
    assert re.search(f"not finished: {collective}", report)
    # The thread that waits, from the program's first line to the handle.
    stacks = report[report.index("***") : report.index("*** end of the stacks of rank 0")]
    assert "in _train\n" in stacks and "in pretrain\n" in stacks and "hang watch" not in stacks
    assert re.search(r"error: rank 0: LostPeerError: rank 1 on \S+ \(127.0.0.1\) is gone or does not answer", report)


def test_a_stopped_rank_that_serves_the_store_is_named(data: list[str], tmp_path: Path) -> None:
    flags = [*data, "--distributed-timeout-seconds-after-first-step", f"{patient(3):g}"]
    with training(tmp_path, flags) as job:
        job.signal(0, signal.SIGSTOP)
        assert job.wait(SECONDS, ranks=[1])[1] == 4, job.output
    assert "error: rank 1: LostPeerError: rank 0 on " in job.text(1)


def test_a_killed_rank_is_named(data: list[str], tmp_path: Path) -> None:
    """The error comes long before the timeout, because its connections close."""
    with training(tmp_path, [*data, "--save", f"{tmp_path}/save"]) as job:
        job.signal(1, signal.SIGKILL)
        assert job.wait(SECONDS)[0] == 4, job.output
    assert [event["event"] for event in read_record(tmp_path / "save")][-1] == "lost"
    assert "error: rank 0: LostPeerError: rank 1 on " in job.text(0)
    # The step's gradients or its log line: which of them waits is up to the moment.
    assert re.search(r"in group '(data|world)' of ranks 0-1", job.text(0))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize("call", [0, 1, 2], ids=["counts", "dispatch", "combine"])
def test_a_rank_that_is_lost_in_an_all_to_all_is_named(
    data: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, call: int
) -> None:
    """Rank 1 gets a signal when it would start one of the all-to-alls of a layer, in the fourth step."""
    start = CommGroup.start_all_to_all
    exchanges = itertools.count()

    def interrupted(group: CommGroup, rows: Tensor, *splits: Sequence[int]) -> Any:
        # A layer exchanges numbers of rows, rows and outputs, and then the gradients of both.
        if group.rank == 1 and next(exchanges) == 3 * 2 * 5 + call:
            os.kill(os.getpid(), number)
        return start(group, rows, *splits)

    monkeypatch.setattr(CommGroup, "start_all_to_all", interrupted)
    flags = [*data, *"--num-experts 4 --expert-model-parallel-size 2 --residual-mode standard".split()]
    flags += ["--distributed-timeout-seconds-after-first-step", f"{patient(3):g}", *FOREVER]
    with started(tmp_path, *[[*MODEL, *flags]] * 2) as job:
        assert job.wait(SECONDS, ranks=[0])[0] == 4, job.output
    assert "iteration       3/" in job.text(0) and "iteration       4/" not in job.text(0)
    assert "error: rank 0: LostPeerError: rank 1 on " in job.text(0)
    assert re.search(r"all_?to_?all\w* \d+ in group 'experts' of ranks 0-1", job.text(0)), job.text(0)


EXCHANGED = "--num-experts 4 --expert-model-parallel-size 2 --train-iters 3"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--num-experts 5", "--num-experts 5 is not divisible by --expert-model-parallel-size 2"),
        ("--expert-model-parallel-size 4", "--expert-model-parallel-size 4 does not divide the --tensor-model-paralle"),
        ("--tensor-model-parallel-size 2", "--expert-model-parallel-size 2 with --tensor-model-parallel-size 2: each"),
        ("--residual-mode desync --desync-interval 2", "--num-experts 4 with --residual-mode desync: the ranks read"),
        ("--lanes 2", "--num-experts 4 with --lanes 2: the ranks read different streams"),
        ("--zero-stage 2", "--zero-stage 2 with --expert-model-parallel-size 2: DeepSpeed would sum"),
        ("--zero-stage 3", "--zero-stage 3 with --expert-model-parallel-size 2: DeepSpeed would sum"),
        ("--offload-optimizer cpu", "--expert-model-parallel-size 2 and --offload-optimizer exclude each other"),
        ("--moe-expert-capacity 0", "--moe-expert-capacity 0: expected 1 or more"),
        ("--expert-model-parallel-size 1 --moe-expert-capacity 8", "--moe-expert-capacity 8 requires --expert-model"),
        ("--cuda-graph", "--cuda-graph true with --expert-model-parallel-size 2: the host reads how many tokens"),
    ],
)
def test_experts_that_ranks_cannot_divide_are_one_error(
    data: list[str], tmp_path: Path, flags: str, message: str
) -> None:
    words = [*data, *EXCHANGED.split(), *flags.split()]
    for found in refusals(tmp_path, words, words):
        # One rank has nothing to desynchronise, either.
        assert len(found) == 1 + ("desync" in flags) and found[-1].startswith(f"error: {message}"), found


def test_a_step_that_needs_more_rows_is_repeated(data: list[str], tmp_path: Path) -> None:
    """A resumed run starts with the given number of rows again. Evaluation is not limited by it."""
    words = [*MODEL, *data, *f"{EXCHANGED} --split 90,10,0 --eval-iters 2".split()]
    run(tmp_path, [*words, *f"--save {tmp_path}/whole --save-interval 2".split()], 2)
    limited = [*words, *f"--moe-expert-capacity 2 --save {tmp_path}/limited".split()]
    run(tmp_path, [*limited, "--exit-interval", "2"], 2)
    printed = run(tmp_path, [*limited, "--load", f"{tmp_path}/limited"], 2)
    repeated = [event for event in read_record(tmp_path / "limited") if event["event"] == "capacity"]
    assert [event["iteration"] for event in repeated] == [1, 3]
    for event in repeated:
        cause = "an expert needed more rows than --moe-expert-capacity allowed, and no token was dropped"
        assert f"iteration {event['iteration']} was repeated with {event['rows']}: {cause}\n" in printed
    whole, found = (
        [(event["iteration"], event["loss"]) for event in read_record(tmp_path / name) if "loss" in event]
        for name in ("whole", "limited")
    )
    assert found == whole and len(whole) == 4


def test_a_checkpoint_has_other_experts(data: list[str], tmp_path: Path) -> None:
    run(tmp_path, [*MODEL, *data, *EXCHANGED.split(), "--save", f"{tmp_path}/saved"], 2)
    words = [*data, *f"--train-iters 9 --load {tmp_path}/saved --num-experts 8 --expert-model-parallel-size 2".split()]
    for found in refusals(tmp_path, words, words):
        assert len(found) == 1, found
        assert re.search(r"error: --num-experts 8: \S+ was trained with 4: leave the flag out", found[0])


def contents(folder: Path) -> dict[str, str]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def distillation_losses(save: Path) -> list[float]:
    return [event["distillation_loss"] for event in read_record(save) if event["event"] == "progress"]


def test_a_model_leaves_its_teacher_and_resumes_with_another(data: list[str], tmp_path: Path) -> None:
    """The student starts as the teacher itself."""
    teacher, (hf, _) = tmp_path / "teacher", export(tmp_path / "exported", tiny_config(num_layers=1))
    config = tiny_config(residual_mode="ladder", ladder_layers=(1, 2))
    write_checkpoint(teacher, config)
    before = contents(teacher) | contents(hf)
    argv = [*data, "--lr", "1e-3", *f"--save {tmp_path}/a --tensorboard-dir {tmp_path}/tb".split()]
    begun = f"--train-iters 3 --tensor-model-parallel-size 2 --load {teacher} --finetune --distill-weight 0.5".split()
    printed = run(tmp_path, [*argv, *begun, "--distill-from", str(teacher)], 2)
    first, *others = distillation_losses(tmp_path / "a")
    assert abs(first) < 1e-5 and len(others) == 2 and min(others) > 1e-4
    assert "teacher     --residual-mode ladder --num-layers 3 " in printed
    assert f"| distillation loss {others[-1]:.4g} |" in printed

    resumed = f"--train-iters 4 --load {tmp_path}/a --distill-from {hf} --bf16".split()
    printed = run(tmp_path, [*argv, *resumed], 1)
    assert "3 steps done" in printed and "teacher     --num-layers 1 " in printed
    assert distillation_losses(tmp_path / "a")[-1] > max(others)
    assert contents(teacher) | contents(hf) == before


def test_an_evaluation_equals_that_of_the_training(data: list[str], tmp_path: Path) -> None:
    """The loss equals that after the last step of the checkpoint, whose sizes and wiring need no flags."""
    more = [*data, *"--split 90,10,0 --eval-iters 1 --bf16".split()]
    run(tmp_path, [*MODEL, *more, "--train-iters", "3", "--save", f"{tmp_path}/saved"], 1)
    words = f"--train-iters 9 --load {tmp_path}/saved --skip-train --save {tmp_path}/evaluated"
    printed = run(tmp_path, [*more, *words.split()], 1)
    trained, evaluated = (read_record(tmp_path / name) for name in ("saved", "evaluated"))
    (before,) = [event for event in trained if event["event"] == "evaluation"]
    (after,) = [event for event in evaluated if event["event"] == "evaluation"]
    assert (after["iteration"], after["loss"]) == (before["iteration"], before["loss"]) == (3, before["loss"])
    assert printed.count("| lm loss") == 3 and f"iteration 3 | valid lm loss {after['loss']:.4f}" in printed
    ends = [event["reason"] for event in evaluated if event["event"] in ("start", "stop")]
    assert ends == ["evaluates", "evaluated"]
    assert not list((tmp_path / "evaluated").glob("iter_*"))

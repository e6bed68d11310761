"""A small run that is cut off again and again, and what must be left of it: the losses and weights of one that was not.
"""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from safetensors import safe_open

from megatron_ladder.checkpoint.publish import read_latest
from megatron_ladder.data.indexed import IndexedDatasetWriter
from megatron_ladder.train.record import read_record
from tests.chaos.ranks import Job

VOCABULARY, STEPS, SAVE_INTERVAL = 96, 24, 3
WORLD_SIZE = 2
RECIPE = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 64 --seq-length 16 "
    f"--micro-batch-size 2 --global-batch-size 4 --lr 1e-2 --lr-warmup-iters 2 --vocab-size {VOCABULARY} "
    f"--train-iters {STEPS} --save-interval {SAVE_INTERVAL} --log-interval 1 --eval-iters 0 --residual-mode ladder "
    "--distributed-timeout-seconds-after-first-step 20 "
    # So low that some steps are left out: which ones, a resumed run must know from the one before.
    "--loss-spike-factor 1.002 --loss-spike-window 8 --skip-loss-spikes"
).split()
LAYOUTS = {
    "tp": "--tensor-model-parallel-size 2".split(),
    "pp": "--pipeline-model-parallel-size 2 --bf16".split(),
    "dp": "--zero-stage 2".split(),
}
ATTEMPT_SECONDS = 60.0
"""An attempt of a second that takes so long hangs."""

Moment = Literal["start", "step", "save"]
MOMENTS: tuple[Moment, ...] = ("start", "step", "save")


def write_tokens(folder: Path) -> Path:
    """A data set of random tokens; its prefix."""
    random_ids = np.random.default_rng(0)
    writer = IndexedDatasetWriter(folder / "tokens", np.dtype(np.uint16))
    for _ in range(40):
        writer.add_document(random_ids.integers(0, VOCABULARY, 50))
    writer.publish()
    return folder / "tokens"


@dataclass
class Experiment:
    """Runs of one layout in a folder, each in a directory of its own."""

    layout: str
    folder: Path
    chance: random.Random
    start_seconds: float = 0.5
    """What a start takes, about."""
    attempts: int = 0
    moments: list[str] = field(default_factory=list)
    """When attempts were ended, in words."""

    def start(
        self, save: Path, *flags: str, prepare: Callable[[int], None] | None = None
    ) -> tuple[Job, list[dict[str, object]]]:
        """Begins an attempt, and gives the events that are in the record already."""
        self.attempts += 1
        argv = [*RECIPE, *LAYOUTS[self.layout], "--data-path", str(self.folder.parent / "tokens"), "--split", "1"]
        argv += ["--save", str(save), "--load", str(save), *flags]
        return Job(argv, WORLD_SIZE, self.folder / f"output.{self.attempts}", prepare), events(save)

    def finish(self, save: Path, *flags: str) -> Job:
        """Runs on to the last step; AssertionError if it does not get there."""
        job, _ = self.start(save, *flags)
        codes = job.wait(ATTEMPT_SECONDS)
        assert set(codes.values()) == {0}, f"ended with {codes}:\n{job.output.read_text()}"
        return job

    def reference(self) -> Path:
        """The uninterrupted run."""
        save, began = self.folder / "whole", time.monotonic()
        if not save.exists():
            self.finish(save)
            first = next(event["time"] for event in events(save) if event["event"] == "start")
            ended = events(save)[-1]["time"]
            self.start_seconds = time.monotonic() - began - (ended - first).total_seconds()
        return save

    def await_moment(self, job: Job, save: Path, moment: Moment, known: int) -> str:
        """Returns at a random moment of an attempt, if it does not end before; says which.

        `known`: how many events the record held before.
        """
        if moment == "start":
            delay = self.chance.uniform(0, self.start_seconds)
            time.sleep(delay)
            return f"{delay * 1e3:.0f} ms after its start"
        wanted = self.chance.randrange(1, 2 * SAVE_INTERVAL + 1)
        kind = "progress" if moment == "step" else "save begin"
        wanted = wanted if moment == "step" else (wanted + 2) // 3
        deadline = time.monotonic() + ATTEMPT_SECONDS
        while sum(event["event"] == kind for event in events(save)[known:]) < wanted and not job.is_over:
            assert time.monotonic() < deadline, job.output.read_text()
            time.sleep(0.001)
        delay = self.chance.uniform(0, 0.03)
        time.sleep(delay)
        return f"{delay * 1e3:.0f} ms after event '{kind}' {wanted} of its attempt"

    def check(self, save: Path) -> None:
        """Raises AssertionError if a run is not the uninterrupted one: each loss of each attempt, each tensor."""
        whole = self.reference()
        wanted, found = losses(whole), losses(save)
        assert wanted.keys() == found.keys(), f"steps {sorted(found)} in {save}, not {sorted(wanted)}"
        assert 0 < len(wanted) < STEPS and last_step(whole) == last_step(save) == STEPS
        for iteration, values in found.items():
            assert values == wanted[iteration], f"iteration {iteration}: {values}, not {wanted[iteration]} in {save}"
        ours, theirs = final_tensors(save), final_tensors(whole)
        assert ours.keys() == theirs.keys() and ours
        for name, tensor in ours.items():
            assert torch.equal(tensor, theirs[name]), f"{name} differs in {save}"


def events(save: Path) -> list[dict[str, object]]:
    """The record so far."""
    try:
        return read_record(save)
    except FileNotFoundError:
        return []


def losses(save: Path) -> dict[int, set[float]]:
    """All losses that a step of that number has ever had."""
    found: dict[int, set[float]] = {}
    for event in events(save):
        if event["event"] == "progress":
            found.setdefault(event["iteration"], set()).add(event["loss"])
    return found


def last_step(save: Path) -> int:
    """The last step that is recorded, left out or not."""
    return max((event["iteration"] for event in events(save) if event["event"] in ("progress", "skip")), default=0)


def final_tensors(save: Path) -> dict[str, torch.Tensor]:
    """Every tensor of the newest checkpoint's files, read by safetensors itself."""
    tensors = {}
    for path in sorted((save / (read_latest(save) or "")).glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            tensors |= {f"{path.name}/{key}": file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    return tensors


def newest_iteration(save: Path) -> int:
    """Of the checkpoint that `latest` names; 0 without one."""
    name = read_latest(save)
    return int(name.removeprefix("iter_").split(".")[0]) if name else 0


def last_event(save: Path, kind: str) -> dict[str, object]:
    """The newest event of a kind."""
    return [event for event in events(save) if event["event"] == kind][-1]

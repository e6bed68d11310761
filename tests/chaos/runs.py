"""A small run that is interrupted repeatedly, and must have the losses and weights of an uninterrupted run."""

import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from safetensors import safe_open

from megatron_ladder.checkpoint.publish import read_latest
from megatron_ladder.train.record import read_record
from tests.chaos.ranks import Job
from tests.helpers.patience import patient
from tests.helpers.tokens import write_tokens

VOCABULARY, STEPS, SAVE_INTERVAL = 96, 24, 3
WORLD_SIZE = 2
RECIPE = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 64 --seq-length 16 "
    f"--micro-batch-size 2 --global-batch-size 4 --lr 1e-2 --lr-warmup-iters 2 --vocab-size {VOCABULARY} "
    f"--train-iters {STEPS} --save-interval {SAVE_INTERVAL} --log-interval 1 --eval-iters 0 --residual-mode ladder "
    "--distributed-timeout-seconds-after-first-step 20 "
    # So low that some steps are skipped; a resumed run must skip the same ones.
    "--loss-spike-factor 1.002 --loss-spike-window 8 --skip-loss-spikes"
).split()
DELTA = (
    "--experimental-attention-variant gated_delta_net --linear-attention-freq 2 --linear-num-key-heads 2 "
    "--linear-num-value-heads 4 --linear-key-head-dim 8 --linear-value-head-dim 8"
)
LAYOUTS = {
    "tp": "--tensor-model-parallel-size 2".split(),
    "pp": "--pipeline-model-parallel-size 2 --bf16".split(),
    "dp": "--zero-stage 2".split(),
    "delta": f"--tensor-model-parallel-size 2 {DELTA}".split(),
    "ep": "--expert-model-parallel-size 2 --num-experts 4 --moe-router-enable-expert-bias".split(),
}
ATTEMPT_SECONDS = 60.0
"""An attempt that takes this long hangs; normally it takes a second."""

Moment = Literal["start", "step", "save"]
MOMENTS: tuple[Moment, ...] = ("start", "step", "save")


@dataclass
class Experiment:
    """Runs of one layout, each in a separate directory of a folder."""

    layout: str
    folder: Path
    chance: random.Random
    start_seconds: float = 0.5
    """Approximate duration of a start."""
    attempts: int = 0

    def __post_init__(self) -> None:
        write_tokens(self.folder / "tokens", VOCABULARY)

    def start(self, save: Path, *flags: str) -> tuple[Job, list[dict[str, object]]]:
        """Start an attempt; return it with the events already recorded."""
        self.attempts += 1
        argv = [*RECIPE, *LAYOUTS[self.layout], "--data-path", str(self.folder / "tokens"), "--split", "1"]
        argv += ["--save", str(save), "--load", str(save), *flags]
        return Job([argv] * WORLD_SIZE, self.folder / f"output.{self.attempts}"), events(save)

    def finish(self, save: Path, *flags: str) -> Job:
        """Run to the last step; raise AssertionError if that fails."""
        job, _ = self.start(save, *flags)
        codes = job.wait(ATTEMPT_SECONDS)
        assert set(codes.values()) == {0}, f"ended with {codes}:\n{job.output}"
        return job

    def reference(self) -> Path:
        """Return the directory of the uninterrupted run."""
        save, began = self.folder / "whole", time.monotonic()
        if not save.exists():
            self.finish(save)
            first = next(event["time"] for event in events(save) if event["event"] == "start")
            ended = events(save)[-1]["time"]
            self.start_seconds = time.monotonic() - began - (ended - first).total_seconds()
        return save

    def await_moment(self, job: Job, save: Path, moment: Moment, known: int) -> None:
        """Wait for a random moment of an attempt, or for its end.

        `known`: number of events recorded before the attempt.
        """
        if moment == "start":
            time.sleep(self.chance.uniform(0, self.start_seconds))
            return
        wanted = self.chance.randrange(1, 2 * SAVE_INTERVAL + 1)
        kind = "progress" if moment == "step" else "save begin"
        wanted = wanted if moment == "step" else (wanted + 2) // 3
        deadline = time.monotonic() + patient(ATTEMPT_SECONDS)
        while sum(event["event"] == kind for event in events(save)[known:]) < wanted and not job.is_over:
            assert time.monotonic() < deadline, job.output
            time.sleep(0.001)
        time.sleep(self.chance.uniform(0, 0.03))

    def check(self, save: Path) -> None:
        """Assert that every loss of every attempt and every tensor equals the uninterrupted run."""
        whole = self.reference()
        wanted, found = losses(whole), losses(save)
        assert wanted.keys() == found.keys(), f"steps {sorted(found)} in {save}, not {sorted(wanted)}"
        assert 0 < len(wanted) < STEPS and last_step(whole) == last_step(save) == STEPS
        for iteration, values in found.items():
            assert values == wanted[iteration], f"iteration {iteration}: {values}, not {wanted[iteration]} in {save}"
        ours, expected = final_tensors(save), final_tensors(whole)
        assert ours.keys() == expected.keys() and ours
        for name, tensor in ours.items():
            assert torch.equal(tensor, expected[name]), f"{name} differs in {save}"


def events(save: Path) -> list[dict[str, object]]:
    """Return the recorded events."""
    try:
        return read_record(save)
    except FileNotFoundError:
        return []


def losses(save: Path) -> dict[int, set[float]]:
    """Return all losses recorded for each step, over all attempts."""
    found: dict[int, set[float]] = {}
    for event in events(save):
        if event["event"] == "progress":
            found.setdefault(event["iteration"], set()).add(event["loss"])
    return found


def last_step(save: Path) -> int:
    """Return the last recorded step, skipped or not."""
    return max((event["iteration"] for event in events(save) if event["event"] in ("progress", "skip")), default=0)


def final_tensors(save: Path) -> dict[str, torch.Tensor]:
    """Read every tensor of the newest checkpoint with the safetensors library."""
    tensors = {}
    for path in sorted((save / (read_latest(save) or "")).glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            tensors |= {f"{path.name}/{key}": file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    return tensors


def newest_iteration(save: Path) -> int:
    """Return the iteration of the checkpoint that `latest` names; 0 without one."""
    name = read_latest(save)
    return int(name.removeprefix("iter_").split(".")[0]) if name else 0


def last_event(save: Path, kind: str) -> dict[str, object]:
    """Return the newest event of a kind."""
    return [event for event in events(save) if event["event"] == kind][-1]

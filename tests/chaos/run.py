"""Injects faults into small runs of two real processes, and checks that nothing is lost:

python tests/chaos/run.py --kills 30 --seed 1
"""

import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
# Libraries read these at import to start threads, which a fork would lose.
os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}

from megatron_ladder.command_line import parse_command_line  # noqa: E402
from megatron_ladder.flags import flag  # noqa: E402
from tests.chaos.ranks import import_everything  # noqa: E402
from tests.chaos.runs import (  # noqa: E402
    ATTEMPT_SECONDS,
    MOMENTS,
    STEPS,
    VOCABULARY,
    WORLD_SIZE,
    Experiment,
    Moment,
    last_event,
    last_step,
    newest_iteration,
)
from tests.helpers.patience import be_patient  # noqa: E402
from tests.helpers.tokens import write_tokens  # noqa: E402

FAULTS = ("kill", "term")


@dataclass(frozen=True)
class ChaosConfig:
    """Layouts and faults."""

    layouts: tuple[Literal["tp", "pp", "dp"], ...] = ("tp", "pp", "dp")
    """Layouts of two processes, one after another."""
    faults: tuple[str, ...] = flag(
        FAULTS,
        choices=[f"{layout}{name}" for layout in ("", "tp:", "pp:", "dp:") for name in FAULTS],
    )
    """kill: SIGKILL at random moments. term: SIGTERM or SIGINT during a start, a step and a save. tp:kill: a fault of
    one layout only."""
    kills: int = 3
    """Number of kills, and of terminations, per layout."""
    seed: int = 0
    """Seed of the random moments and ranks."""
    patience: float = 1.0
    """Factor of all time limits, for a machine that shares its cores."""
    verbose: bool = False
    """Print the moment of each kill."""


def kills(experiment: Experiment, count: int) -> str:
    """SIGKILL a random rank at random moments and resume, `count` times, in as many runs as needed."""
    experiment.reference()
    done, runs, survivor_checked = 0, 0, False
    hit = dict.fromkeys(MOMENTS, 0)
    while done < count or runs == 0:
        save = experiment.folder / f"killed.{runs}"
        flags = ["--async-save"] if runs % 2 == 0 else []
        while True:
            if done == count:
                experiment.finish(save, *flags)
                break
            moment = experiment.chance.choice(MOMENTS)
            job, before = experiment.start(save, *flags)
            when = experiment.await_moment(job, save, moment, len(before))
            rank = experiment.chance.randrange(WORLD_SIZE)
            job.signal(rank, signal.SIGKILL)
            if not survivor_checked and moment != "start":
                # The surviving rank exits on its own; other times it is killed, as a launcher does.
                job.wait(ATTEMPT_SECONDS)
                survivor_checked = True
            time.sleep(experiment.chance.uniform(0, 0.05))
            job.kill()
            if set(job.codes.values()) == {0}:
                break
            done += 1
            hit[moment] += 1
            experiment.moments.append(f"rank {rank} {when}")
        experiment.check(save)
        runs += 1
    where = ", ".join(f"{number} in a {moment}" for moment, number in hit.items())
    return f"{done} kills ({where}) over {runs} runs; losses and weights are bitwise those of the uninterrupted run"


def terminations(experiment: Experiment, count: int) -> str:
    """SIGTERM or SIGINT to one rank or all ranks, during a start, a step and a save."""
    experiment.reference()
    for number in range(count):
        moment: Moment = MOMENTS[number % len(MOMENTS)]
        save = experiment.folder / f"terminated.{number}"
        # A starting process without its handler would simply exit.
        job, before = experiment.start(save)
        if moment == "start":
            while not job.codes and not job.catches(signal.SIGTERM):
                time.sleep(0.005)
            time.sleep(experiment.chance.uniform(0, 0.5 * experiment.start_seconds))
        else:
            experiment.await_moment(job, save, moment, len(before))
        ranks = experiment.chance.choice([[0], [WORLD_SIZE - 1], range(WORLD_SIZE)])
        stop_signal = experiment.chance.choice([signal.SIGTERM, signal.SIGINT])
        for rank in ranks:
            job.signal(rank, stop_signal)
        codes = job.wait(ATTEMPT_SECONDS)
        output = job.output
        assert set(codes.values()) == {0}, f"{stop_signal.name} in a {moment} to ranks {list(ranks)}: {codes}\n{output}"
        reached = last_step(save)
        assert newest_iteration(save) == reached, f"iteration {newest_iteration(save)} is saved after {reached} steps"
        if reached < STEPS:
            assert last_event(save, "stop")["reason"] == stop_signal.name, output
            assert moment == "start" or reached > 0
            experiment.finish(save)
        experiment.check(save)
    return f"{count} exits with code 0 and a checkpoint of the last step; resumed bitwise"


def main(argv: Sequence[str]) -> None:
    """Print one line per fault and layout; raise AssertionError at the first unexpected outcome."""
    (config,) = parse_command_line([ChaosConfig], argv, "run.py", "Faults in runs of two processes.")
    be_patient(config.patience)
    import_everything()
    with tempfile.TemporaryDirectory(prefix="chaos_") as scratch:
        folder = Path(scratch)
        write_tokens(folder / "tokens", VOCABULARY)
        for layout in config.layouts:
            (folder / layout).mkdir()
            experiment = Experiment(layout, folder / layout, random.Random(f"{config.seed} {layout}"))
            known: dict[str, Callable[[], str]] = {
                "kill": lambda e=experiment: kills(e, config.kills),
                "term": lambda e=experiment: terminations(e, config.kills),
            }
            for name in (fault.removeprefix(f"{layout}:") for fault in config.faults):
                if name in known:
                    began = time.monotonic()
                    outcome = known[name]()
                    print(f"{layout} {name}: {outcome} ({time.monotonic() - began:.1f} s)", flush=True)
            if config.verbose:
                print("\n".join(experiment.moments), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])

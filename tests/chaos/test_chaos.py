"""Faults in small runs of two real processes, of which nothing may be lost."""

import random
import signal
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.chaos.runs import (
    ATTEMPT_SECONDS,
    LAYOUTS,
    MOMENTS,
    STEPS,
    WORLD_SIZE,
    Experiment,
    last_event,
    last_step,
    newest_iteration,
)

MANY = [pytest.param(layout, 30, marks=pytest.mark.slow) for layout in LAYOUTS]
"""Layouts and numbers of faults."""


@pytest.fixture(scope="module")
def experiment(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Experiment:
    chance = random.Random(f"7 {request.param}")
    return Experiment(request.param, tmp_path_factory.mktemp(f"chaos_{request.param}"), chance)


@pytest.mark.parametrize(
    ("experiment", "count"), [*((layout, 2) for layout in LAYOUTS), *MANY], indirect=["experiment"]
)
def test_a_run_of_which_ranks_are_killed_resumes_bitwise(experiment: Experiment, count: int, tmp_path: Path) -> None:
    """SIGKILL of a random rank at random moments, in as many runs as needed."""
    experiment.reference()
    hit, runs, survivor_checked = Counter[str](), 0, False
    while hit.total() < count:
        save = tmp_path / f"killed.{runs}"
        flags = ["--async-save"] if runs % 2 == 0 else []
        while hit.total() < count:
            moment = experiment.chance.choice(MOMENTS)
            job, before = experiment.start(save, *flags)
            experiment.await_moment(job, save, moment, len(before))
            job.signal(experiment.chance.randrange(WORLD_SIZE), signal.SIGKILL)
            if not survivor_checked and moment != "start":
                # The surviving rank exits on its own; other times it is killed, as a launcher does.
                job.wait(ATTEMPT_SECONDS)
                survivor_checked = True
            time.sleep(experiment.chance.uniform(0, 0.05))
            job.kill()
            if set(job.codes.values()) == {0}:
                break
            hit[moment] += 1
        else:
            experiment.finish(save, *flags)
        experiment.check(save)
        runs += 1
    print(f"{dict(hit)} over {runs} runs")


@pytest.mark.parametrize(("experiment", "count"), [("tp", 2), *MANY], indirect=["experiment"])
def test_a_terminated_run_saves_its_last_step(experiment: Experiment, count: int, tmp_path: Path) -> None:
    """SIGTERM or SIGINT to one rank or all ranks, during a start, a step and a save."""
    experiment.reference()
    stopped = 0
    for number in range(count):
        moment = MOMENTS[number % len(MOMENTS)]
        save = tmp_path / f"terminated.{number}"
        job, before = experiment.start(save)
        if moment == "start":
            # A starting process without its handler would simply exit.
            while not job.codes and not job.catches(signal.SIGTERM):
                time.sleep(0.005)
            time.sleep(experiment.chance.uniform(0, 0.5 * experiment.start_seconds))
        else:
            experiment.await_moment(job, save, moment, len(before))
        ranks = experiment.chance.choice([[0], [WORLD_SIZE - 1], range(WORLD_SIZE)])
        stop_signal = experiment.chance.choice([signal.SIGTERM, signal.SIGINT])
        for rank in ranks:
            job.signal(rank, stop_signal)
        codes, output = job.wait(ATTEMPT_SECONDS), job.output
        assert set(codes.values()) == {0}, f"{stop_signal.name} in a {moment} to ranks {list(ranks)}: {codes}\n{output}"
        reached = last_step(save)
        assert newest_iteration(save) == reached, f"iteration {newest_iteration(save)} is saved after {reached} steps"
        if reached < STEPS:
            assert last_event(save, "stop")["reason"] == stop_signal.name, output
            assert moment == "start" or reached > 0
            experiment.finish(save)
            stopped += 1
        experiment.check(save)
    assert stopped > 0

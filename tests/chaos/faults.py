"""Faults of a run and their expected outcomes. Each function returns a summary, or raises AssertionError."""

import signal
import time

from tests.chaos.runs import (
    ATTEMPT_SECONDS,
    MOMENTS,
    STEPS,
    WORLD_SIZE,
    Experiment,
    Moment,
    last_event,
    last_step,
    newest_iteration,
)


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

"""Faults of a run and their expected outcomes. Each function returns a summary, or raises AssertionError."""

import re
import signal
import socket
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
from tests.helpers.patience import patient

TIMEOUT_SECONDS = 4.0
"""Time after which a run here gives up on a stopped peer."""
LOST_PEER, BAD_NUMBERS = 4, 3
GRACE_SECONDS = 5.0
"""Time from the detection of a lost peer to the exit (`errors.GRACE_SECONDS`)."""


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
        output = job.output.read_text()
        assert set(codes.values()) == {0}, f"{stop_signal.name} in a {moment} to ranks {list(ranks)}: {codes}\n{output}"
        reached = last_step(save)
        assert newest_iteration(save) == reached, f"iteration {newest_iteration(save)} is saved after {reached} steps"
        if reached < STEPS:
            assert last_event(save, "stop")["reason"] == stop_signal.name, output
            assert moment == "start" or reached > 0
            experiment.finish(save)
        experiment.check(save)
    return f"{count} exits with code 0 and a checkpoint of the last step; resumed bitwise"


def stopped_rank(experiment: Experiment) -> str:
    """SIGSTOP a random rank: the other rank reports it with its host and exits in time."""
    save, rank = experiment.folder / "stopped", experiment.chance.randrange(WORLD_SIZE)
    # No saves: the timeout is longer while a checkpoint is written.
    timeout = patient(TIMEOUT_SECONDS)
    flags = f"--save-interval {STEPS} --distributed-timeout-seconds-after-first-step {timeout:g}"
    job, before = experiment.start(save, *flags.split())
    experiment.await_moment(job, save, "step", len(before))
    job.signal(rank, signal.SIGSTOP)
    began, other = time.monotonic(), WORLD_SIZE - 1 - rank
    codes = job.wait(ATTEMPT_SECONDS, ranks=[other])
    seconds, output = time.monotonic() - began, job.output.read_text()
    job.kill()
    assert codes[other] == LOST_PEER, output
    # Allow for a busy machine.
    assert seconds < 1.25 * timeout + GRACE_SECONDS + patient(10), seconds
    named = rf"error: rank {other}: LostPeerError: rank {rank} on {socket.gethostname()} \(127\.0\.0\.1\) is gone"
    assert re.search(named, output), output
    hang = last_event(save, "hang")
    assert hang["ranks"] == [rank] and socket.gethostname() in str(hang["where"]), hang
    experiment.finish(save)
    experiment.check(save)
    waited = f"{seconds - GRACE_SECONDS:.1f} s of a timeout of {timeout:g} s"
    return f"rank {rank} is reported with its host after {waited}"

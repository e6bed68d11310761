"""What is done to a run, and what must follow. Each function returns a sentence and raises AssertionError otherwise."""

import math
import re
import signal
import socket
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from tests.chaos.ranks import Job
from tests.chaos.runs import (
    ATTEMPT_SECONDS,
    MOMENTS,
    STEPS,
    WORLD_SIZE,
    Experiment,
    Moment,
    events,
    last_event,
    last_step,
    losses,
    newest_iteration,
)

TIMEOUT_SECONDS = 4.0
"""What a run waits for a stopped peer here."""
LOST_PEER, BAD_NUMBERS = 4, 3
GRACE_SECONDS = 5.0
"""From noticing a lost peer to the end (`errors.GRACE_SECONDS`)."""


def kills(experiment: Experiment, count: int) -> str:
    """SIGKILL of a random rank at random moments, resumed each time, until so many have hit; maybe in several runs."""
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
                # Who is left ends by itself; the other times it is ended as a launcher would.
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
    return f"{done} kills ({where}) over {runs} runs; losses and weights bitwise those of the uninterrupted run"


def terminations(experiment: Experiment, count: int) -> str:
    """SIGTERM or SIGINT to one rank or to all, in a start, a step and a save."""
    experiment.reference()
    for number in range(count):
        moment: Moment = MOMENTS[number % len(MOMENTS)]
        save = experiment.folder / f"terminated.{number}"
        # While it starts, a process whose handler is not there yet would just end.
        job, before = experiment.start(save)
        if moment == "start":
            time.sleep(0.1 + experiment.chance.uniform(0, 0.5 * experiment.start_seconds))
        else:
            experiment.await_moment(job, save, moment, len(before))
        ranks = experiment.chance.choice([[0], [WORLD_SIZE - 1], range(WORLD_SIZE)])
        asked = experiment.chance.choice([signal.SIGTERM, signal.SIGINT])
        for rank in ranks:
            job.signal(rank, asked)
        codes = job.wait(ATTEMPT_SECONDS)
        output = job.output.read_text()
        assert set(codes.values()) == {0}, f"{asked.name} in a {moment} to ranks {list(ranks)}: {codes}\n{output}"
        reached = last_step(save)
        assert newest_iteration(save) == reached, f"{newest_iteration(save)} is saved, {reached} steps are done"
        if reached < STEPS:
            assert last_event(save, "stop")["reason"] == asked.name, output
            assert moment == "start" or reached > 0
            experiment.finish(save)
        experiment.check(save)
    return f"{count} times exit 0 with the checkpoint of that step; resumed bitwise"


def asked_to_end(experiment: Experiment) -> str:
    """By a number of steps, a file and a time, one after another."""
    save, switch = experiment.folder / "asked", experiment.folder / "switch"
    switch.touch()
    for flags, reason, steps, trains in (
        ("--exit-interval 5", "--exit-interval 5", 5, True),
        (f"--kill-switch-file {switch}", f"--kill-switch-file {switch}", 5, False),
        # Over before the first step.
        ("--exit-duration-in-mins 1e-6", "--exit-duration-in-mins 1e-06", 5, False),
        ("--exit-interval 4 --async-save", "--exit-interval 4", 8, True),
    ):
        job = experiment.finish(save, *flags.split())
        assert last_event(save, "stop")["reason"] == reason, job.output.read_text()
        assert newest_iteration(save) == last_step(save) == steps, job.output.read_text()
        assert ("nothing was trained" in job.output.read_text()) == (not trains), job.output.read_text()
    experiment.finish(save)
    experiment.check(save)
    return "each ends with exit 0, saved or with nothing trained; resumed bitwise"


def second_signal(experiment: Experiment) -> str:
    """A second signal to a rank that waits for one that never comes."""
    save = experiment.folder / "impatient"
    job, before = experiment.start(save)
    experiment.await_moment(job, save, "step", len(before))
    job.signal(1, signal.SIGSTOP)
    job.signal(0, signal.SIGTERM)
    time.sleep(2.2)
    assert not job.codes
    job.signal(0, signal.SIGTERM)
    codes = job.wait(2.0, ranks=[0])
    assert codes[0] == 128 + signal.SIGTERM, codes
    job.kill()
    experiment.finish(save)
    experiment.check(save)
    return "ended at once; resumed bitwise"


def stopped_rank(experiment: Experiment) -> str:
    """SIGSTOP of a random rank: the others name it with its host and end in time."""
    save, rank = experiment.folder / "stopped", experiment.chance.randrange(WORLD_SIZE)
    # While a checkpoint is written, the timeout is the long one.
    flags = f"--save-interval {STEPS} --distributed-timeout-seconds-after-first-step {TIMEOUT_SECONDS:g}"
    job, before = experiment.start(save, *flags.split())
    experiment.await_moment(job, save, "step", len(before))
    job.signal(rank, signal.SIGSTOP)
    began, other = time.monotonic(), WORLD_SIZE - 1 - rank
    codes = job.wait(ATTEMPT_SECONDS, ranks=[other])
    seconds, output = time.monotonic() - began, job.output.read_text()
    job.kill()
    assert codes[other] == LOST_PEER, output
    # A busy machine is slow to notice, and to end.
    assert seconds < 1.25 * TIMEOUT_SECONDS + GRACE_SECONDS + 10, seconds
    named = rf"error: rank {other}: LostPeerError: rank {rank} on {socket.gethostname()} \(127\.0\.0\.1\) is gone"
    assert re.search(named, output), output
    hang = last_event(save, "hang")
    assert hang["ranks"] == [rank] and socket.gethostname() in str(hang["where"]), hang
    experiment.finish(save)
    experiment.check(save)
    waited = f"{seconds - GRACE_SECONDS:.1f} s of a timeout of {TIMEOUT_SECONDS:g} s"
    return f"rank {rank} named with its host after {waited}"


def spoiling(bad_steps: range) -> Callable[[int], None]:
    """Makes a rank's gradients of these steps NaN in one element of its last parameter, on the last rank."""

    def prepare(rank: int) -> None:
        from megatron_ladder.train import loop

        step = loop.train_step

        def spoiled_step(trainer, micro_batches, iteration, votes):
            take = trainer.engine.state.gradient_pieces

            def spoiled_pieces():
                pieces = take()
                pieces[-1].gradient.view(-1)[0] = math.nan
                return pieces

            if rank == WORLD_SIZE - 1 and iteration in bad_steps:
                trainer.engine.state.gradient_pieces = spoiled_pieces
            try:
                return step(trainer, micro_batches, iteration, votes)
            finally:
                trainer.engine.state.gradient_pieces = take

        loop.train_step = spoiled_step

    return prepare


def bad_numbers(experiment: Experiment) -> str:
    """NaN in one step: skipped and reported. NaN in three: the end with code 3."""
    bad = experiment.chance.randrange(2, STEPS)
    save = experiment.folder / "spoiled"
    no_spikes = "--loss-spike-factor", "100"
    job, _ = experiment.start(save, *no_spikes, prepare=spoiling(range(bad, bad + 1)))
    codes = job.wait(ATTEMPT_SECONDS)
    assert set(codes.values()) == {0}, job.output.read_text()
    skip = last_event(save, "skip")
    assert skip["iteration"] == bad and skip["rank"] == WORLD_SIZE - 1 and skip["parameter"], skip
    assert losses(save).keys() == set(range(1, STEPS + 1)) - {bad}
    assert f"first bad parameter {skip['parameter']}, on rank {skip['rank']}" in job.output.read_text()
    hopeless = experiment.folder / "hopeless"
    job, _ = experiment.start(hopeless, *no_spikes, prepare=spoiling(range(bad, STEPS + 1)))
    codes = job.wait(ATTEMPT_SECONDS)
    in_a_row = min(3, STEPS + 1 - bad)
    wanted = BAD_NUMBERS if in_a_row == 3 else 0
    assert set(codes.values()) == {wanted}, f"{codes}\n{job.output.read_text()}"
    assert sum(event["event"] == "skip" for event in events(hopeless)) == in_a_row
    assert last_event(hopeless, "stop")["code"] == wanted
    return f"step {bad} left out, with rank and {skip['parameter']} named; {in_a_row} in a row end with code {wanted}"


def second_run(experiment: Experiment) -> str:
    """Two runs on one directory: the second is refused; the first one's lock is free after SIGKILL."""
    save = experiment.folder / "shared"
    job, before = experiment.start(save)
    experiment.await_moment(job, save, "step", len(before))
    other, _ = experiment.start(save)
    # Stopped, the first run cannot end before the second has looked.
    for rank in range(WORLD_SIZE):
        job.signal(rank, signal.SIGSTOP)
    codes = other.wait(ATTEMPT_SECONDS)
    told = other.output.read_text()
    job.kill()
    assert set(codes.values()) == {2}, told
    pid = next(event["pid"] for event in events(save) if event["event"] == "start")
    assert f"another run writes there: pid {pid} on {socket.gethostname()}, started " in told, told
    experiment.finish(save)
    experiment.check(save)
    return "refused with the first one's pid, host and start; a killed run's lock is taken over"


def cost(experiment: Experiment, job_steps: int = 400) -> str:
    """Seconds of a step that go into stopping, guarding and recording, against those of the step."""
    save = experiment.folder / "cost"
    job: Job
    flags = f"--train-iters {job_steps} --log-interval 10 --loss-spike-factor 100 --loss-spike-window 64"
    job, _ = experiment.start(save, *flags.split(), prepare=timing(save))
    codes = job.wait(4 * ATTEMPT_SECONDS)
    assert set(codes.values()) == {0}, job.output.read_text()
    hooks, steps = ([float(line) for line in (save / name).read_text().split()] for name in ("hooks", "steps"))
    hook, step = statistics.median(hooks), statistics.median(steps)
    mean = sum(hooks) / sum(steps)
    return (
        f"{1e6 * hook:.0f} us (median; {1e6 * statistics.mean(hooks):.0f} us mean) of a step of {1e3 * step:.1f} ms: "
        f"{100 * hook / step:.2f} % (median), {100 * mean:.2f} % (of all time)"
    )


def timing(save: Path) -> Callable[[int], None]:
    """Writes down, on rank 0, what the hooks and the steps take."""

    def prepare(rank: int) -> None:
        from megatron_ladder.comm.watch import HangWatch
        from megatron_ladder.train import guards, loop, record, stop
        from megatron_ladder.train import step as step_module

        spent, hooks, steps = [0.0], [], []

        def timed(owner: object, name: str) -> None:
            function = getattr(owner, name)

            def call(*args: object, **kwargs: object) -> object:
                began = time.perf_counter()
                try:
                    return function(*args, **kwargs)
                finally:
                    spent[0] += time.perf_counter() - began

            setattr(owner, name, call)

        for owner, name in (
            (guards.Guard, "judge"), (guards.Guard, "stop_if_hopeless"), (stop.Stopper, "votes"),
            (stop.Stopper, "reason"), (record.RunRecord, "write"), (loop, "report_finding"), (HangWatch, "step_done"),
        ):  # fmt: skip
            timed(owner, name)
        norm = step_module.gradient_norm

        def norm_with_extra_sums(pieces, world, device, extra_sums):
            # What making the extra_sums takes, measured on a copy: the collective is there anyway.
            began = time.perf_counter()
            torch.cat([torch.zeros(1, dtype=torch.float64), torch.tensor(extra_sums.tolist(), dtype=torch.float64)])
            spent[0] += time.perf_counter() - began
            return norm(pieces, world, device, extra_sums)

        step_module.gradient_norm = norm_with_extra_sums
        take_step = loop.train_step

        def timed_step(trainer, micro_batches, iteration, votes):
            hooks.append(spent[0])
            steps.append(time.perf_counter())
            if rank == 0 and iteration == trainer.run.training.train_iters:
                for name, values in (("hooks", hooks), ("steps", steps)):
                    parts = [after - before for before, after in zip(values[1:], values[2:], strict=False)]
                    (save / name).write_text("\n".join(map(repr, parts)))
            return take_step(trainer, micro_batches, iteration, votes)

        loop.train_step = timed_step

    return prepare

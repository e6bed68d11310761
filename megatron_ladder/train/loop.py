"""The run, from a command line to its last checkpoint."""

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from datetime import timedelta
from typing import NamedTuple

import torch

from megatron_ladder.comm.agreement import Peers
from megatron_ladder.comm.launch import (
    check_device,
    naming_lost_peers,
    read_rank_info,
    reporting_errors,
    stop_process_group,
)
from megatron_ladder.comm.watch import HangWatch
from megatron_ladder.train.checkpoints import CheckpointSaver
from megatron_ladder.train.events import describe_start, note_finding, record_loss_of, recording_failures
from megatron_ladder.train.inputs import RunInputs, read_inputs
from megatron_ladder.train.lock import SaveLock
from megatron_ladder.train.log import RunLog, banner, say
from megatron_ladder.train.memory import ActivationMeter
from megatron_ladder.train.profile import step_contexts
from megatron_ladder.train.reading import TrainingData, packing_notes, sample_batches
from megatron_ladder.train.record import RunRecord
from megatron_ladder.train.setup import Trainer, build_trainer
from megatron_ladder.train.step import evaluate, train_step
from megatron_ladder.train.stop import Stopper, StopSignals


class Session(NamedTuple):
    """What a process has of a run besides its computation."""

    inputs: RunInputs
    reading: TrainingData
    checkpoints: CheckpointSaver
    stopper: Stopper
    record: RunRecord


def pretrain(argv: Sequence[str], signals: StopSignals | None = None) -> None:
    """Trains as the command line says, and saves.

    Args:
        signals: those that ask for the end, if somebody notes them.

    Raises:
        UserError: something in it is wrong; nothing was started.
        BadNumbersError: loss or gradient are not finite, in too many steps in a row.
        LostPeerError: another rank ended, or a collective timed out.
    """
    start, place, peers = time.monotonic(), read_rank_info(), Peers()
    with ExitStack() as until_the_end:
        with reporting_errors(place):
            inputs = read_inputs(argv, place)
            check_device(place)
            folder = inputs.run.checkpoint.save
            if folder is not None and place.rank == 0:
                until_the_end.enter_context(SaveLock(folder))
        stopper = Stopper(inputs.run.reliability, signals, place.rank, start)
        record = RunRecord(folder, place.rank)
        with recording_failures(record, peers), naming_lost_peers(peers):
            trainer = build_trainer(inputs, place, peers)
            say("\n".join([banner(trainer), *packing_notes(inputs.sources)]), place.rank)
            reading = TrainingData(trainer, inputs)
            with CheckpointSaver(trainer, inputs, record.write, reading.streams) as checkpoints:
                iteration, consumed_samples = checkpoints.resume()
                record.write_first("start", **describe_start(trainer, iteration))
                session = Session(inputs, reading, checkpoints, stopper, record)
                if inputs.run.logging.skip_train:
                    reason = evaluate_loaded(trainer, session, iteration)
                else:
                    reason = train(trainer, session, iteration, consumed_samples)
            record.write_first("stop", reason=reason, code=0)
            stop_process_group()


def evaluate_loaded(trainer: Trainer, session: Session, iteration: int) -> str:
    """Evaluates the model as it was loaded, after `iteration` steps; takes none and saves nothing.

    Returns:
        Why the run ended.
    """
    valid = session.inputs.sources.valid
    assert valid is not None
    with (
        RunLog(trainer, iteration + 1, session.record, trains=False) as log,
        closing(sample_batches(trainer, valid, consumed_samples=0)) as batches,
    ):
        log.validation(iteration, evaluate(trainer, batches, trainer.run.logging.eval_iters))
    return "evaluated"


def train(trainer: Trainer, session: Session, iteration: int, consumed_samples: int) -> str:
    """Steps until --train-iters or the wish of a rank, with log lines, evaluations and checkpoints between them.

    Returns:
        Why it ended.
    """
    run, rank, inputs = trainer.run, trainer.mesh.world.rank, session.inputs
    last, first = run.training.train_iters, iteration + 1
    if iteration >= last:
        say(f"nothing to do: {iteration} of {last} steps are done", rank)
        return "nothing to do"
    reason = agree_to_stop(trainer, session.stopper)
    if reason is not None:
        say(f"{reason}: ends before its first step; nothing was trained, so nothing is saved", rank)
        return reason
    losses: list[float] = []
    with (
        closing(session.reading.begin(consumed_samples)) as batches,
        RunLog(trainer, first, session.record) as log,
        meter_activations(trainer) as meter,
        hang_watch(trainer, session.record) as watch,
    ):

        @contextmanager
        def aside() -> Iterator[None]:
            """Around what is no training."""
            with log.without_time(), watch.patient():
                yield

        profiled = step_contexts(run, trainer.mesh.world, trainer.device, first, aside)
        while iteration < last and reason is None:
            iteration += 1
            with profiled(iteration):
                result = train_step(trainer, next(batches), iteration, session.stopper.votes)
            watch.step_done(iteration)
            session.checkpoints.poll()
            note_finding(session.record, rank, iteration, result)
            trainer.guard.stop_if_hopeless(result.finding)
            reason = session.stopper.reason(result.extra_sums, iteration)
            ends = reason is not None or iteration == last
            if not result.skipped:
                losses.append(result.loss)
            if iteration == first:
                log.activations(meter.largest(trainer.mesh.world))
            if losses and (ends or _is_due(iteration, run.logging.log_interval)):
                log.training(iteration, sum(losses) / len(losses), result.learning_rate, result.gradient_norm)
                losses.clear()
            # Saved first: what an evaluation may meet must not cost the steps before it.
            if ends or _is_due(iteration, run.checkpoint.save_interval):
                with aside():
                    reason = save_checkpoint(trainer, session, iteration, batches.consumed_samples, reason)
            evaluates = iteration == last or _is_due(iteration, run.logging.eval_interval)
            if evaluates and reason is None and inputs.sources.valid is not None:
                with aside(), closing(sample_batches(trainer, inputs.sources.valid, consumed_samples=0)) as valid:
                    log.validation(iteration, evaluate(trainer, valid, run.logging.eval_iters))
    if reason is not None:
        say(f"{reason}: ends after iteration {iteration} of {last}", rank)
    return reason or "all steps are done"


def save_checkpoint(
    trainer: Trainer, session: Session, iteration: int, consumed_samples: int, reason: str | None
) -> str | None:
    """Saves after a step, and says why the run ends with it, if it does; all ranks take part.

    Args:
        reason: why it ends, if that is known before.
    """
    final = reason is not None or iteration == trainer.run.training.train_iters
    session.checkpoints.save(iteration, consumed_samples, reason or "interval", final)
    if final:
        return reason
    # A save may take longer than a launcher waits after its signal, so there is no time for another step.
    reason = agree_to_stop(trainer, session.stopper)
    if reason is not None:
        # If it is in flight or has failed; an iteration that is saved is not saved again.
        session.checkpoints.save(iteration, consumed_samples, reason, final=True)
    return reason


def agree_to_stop(trainer: Trainer, stopper: Stopper) -> str | None:
    """Why the run ends before its first step, if it does; all ranks take part."""
    votes = torch.tensor(stopper.votes(), dtype=torch.float64, device=trainer.device)
    return stopper.reason(trainer.mesh.world.all_reduce(votes).tolist())


def meter_activations(trainer: Trainer) -> ActivationMeter:
    """Measures the first forward pass, of this rank's stage if there are several."""
    return ActivationMeter(trainer.engine.module, trainer.device)


def hang_watch(trainer: Trainer, record: RunRecord) -> HangWatch:
    """Short timeouts after the first step, and stacks before one is over."""
    parallel, peers = trainer.run.parallel, trainer.peers
    startup = timedelta(minutes=parallel.distributed_timeout_minutes)
    running = timedelta(seconds=parallel.distributed_timeout_seconds_after_first_step)
    return HangWatch(peers, startup, running, lambda error: record_loss_of(record, peers, error))


def _is_due(iteration: int, interval: int | None) -> bool:
    """Whether what happens every `interval` steps happens now."""
    return interval is not None and iteration % interval == 0


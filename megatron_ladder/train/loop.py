"""A run, from its command line to its last checkpoint."""

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from megatron_ladder.comm.agreement import Peers
from megatron_ladder.comm.launch import (
    check_device,
    from_rank_0,
    naming_lost_peers,
    read_rank_info,
    reporting_errors,
    stop_process_group,
)
from megatron_ladder.comm.watch import HangWatch
from megatron_ladder.config.file import CONFIG_NAME, config_file_text
from megatron_ladder.files import write_atomically
from megatron_ladder.train.checkpoints import CheckpointSaver
from megatron_ladder.train.evaluation import Evaluations
from megatron_ladder.train.inputs import RunInputs, read_inputs
from megatron_ladder.train.lock import SaveLock
from megatron_ladder.train.log import (
    RunLog,
    banner,
    describe_start,
    print_if_possible,
    print_rank_0,
    record_lost_peers,
    recording_failures,
    report_finding,
)
from megatron_ladder.train.profile import ActivationMeter, step_contexts
from megatron_ladder.train.reading import TextStreams, packing_notes, training_batches
from megatron_ladder.train.record import RunRecord
from megatron_ladder.train.setup import Trainer, build_trainer
from megatron_ladder.train.step import train_step
from megatron_ladder.train.stop import Stopper, StopReason, StopSignals


class _Session(NamedTuple):
    inputs: RunInputs
    streams: TextStreams | None
    evaluations: Evaluations
    checkpoints: CheckpointSaver
    stopper: Stopper
    record: RunRecord


def pretrain(argv: Sequence[str], signals: StopSignals | None = None) -> None:
    """Run the training that a command line describes; `signals` request a graceful shutdown, if they are handled.

    Raises UserError before anything starts; BadNumbersError after too many consecutive steps whose numbers were not
    finite; LostPeerError if another rank ended, or a collective timed out.
    """
    start, place, peers = time.monotonic(), read_rank_info(), Peers()
    with ExitStack() as whole_run:
        with reporting_errors(place):
            inputs = read_inputs(argv, place, partial(from_rank_0, place, whole_run))
            check_device(place)
            folder = inputs.run.checkpoint.save
            if folder is not None and place.rank == 0:
                whole_run.enter_context(SaveLock(folder))
        stopper = Stopper(inputs.run.reliability, signals, place.rank, start)
        record = RunRecord(folder, place.rank)
        record.write_first("launch")
        with recording_failures(record, peers), naming_lost_peers(peers):
            trainer = build_trainer(inputs, place, peers)
            print_rank_0("\n".join([banner(trainer), *packing_notes(inputs.sources)]), place.rank)
            streams = None if inputs.stream is None else TextStreams(trainer, inputs, inputs.stream)
            evaluations = Evaluations(trainer, inputs)
            with CheckpointSaver(trainer, inputs, record.write, streams) as checkpoints:
                iteration, consumed_samples = checkpoints.resume()
                record.write_first("start", **describe_start(trainer, iteration))
                if folder is not None and place.rank == 0 and not inputs.run.logging.skip_train:
                    _write_config(folder, inputs)
                session = _Session(inputs, streams, evaluations, checkpoints, stopper, record)
                if inputs.run.logging.skip_train:
                    reason = _evaluate_loaded(trainer, session, iteration)
                else:
                    reason = _train(trainer, session, iteration, consumed_samples)
            record.write_first("stop", reason=reason, code=0)
            stop_process_group()


def _write_config(folder: Path, inputs: RunInputs) -> None:
    note = f"All values of a run on {inputs.run.world_size} processes; --config of this file repeats the run."
    try:
        write_atomically(folder / CONFIG_NAME, config_file_text(inputs.values, note))
    except OSError as error:
        # A failing save is no reason to stop, either.
        print_if_possible(f"*** {folder / CONFIG_NAME}: could not be written: {error.strerror} ***")


def _evaluate_loaded(trainer: Trainer, session: _Session, iteration: int) -> str:
    """Evaluate the model of a checkpoint after `iteration` steps, and return why the run ends."""
    with RunLog(trainer, iteration + 1, session.record, trains=False) as log:
        session.evaluations.run(iteration, log, partial(_stops, trainer, session.stopper), everything=True)
    reason = _agreed_stop_reason(trainer, session.stopper)
    if reason is None:
        return "evaluated"
    print_rank_0(f"{reason.text}: ends the evaluation", trainer.mesh.world.rank)
    return reason.text


def _train(trainer: Trainer, session: _Session, iteration: int, consumed_samples: int) -> str:
    """Train until --train-iters or a stop request, and return why the run ends; `iteration` steps were done before."""
    run, rank, record = trainer.run, trainer.mesh.world.rank, session.record
    last, first = run.training.train_iters, iteration + 1
    if iteration >= last:
        print_rank_0(f"nothing to do: {iteration} of {last} steps are done", rank)
        return "nothing to do"
    reason = _agreed_stop_reason(trainer, session.stopper)
    if reason is not None:
        print_rank_0(f"{reason.text}: ends before its first step; nothing was trained, so nothing is saved", rank)
        return reason.text
    losses: list[float] = []
    startup = timedelta(minutes=run.parallel.distributed_timeout_minutes)
    running = timedelta(seconds=run.parallel.distributed_timeout_seconds_after_first_step)
    with (
        closing(training_batches(trainer, session.inputs, session.streams, consumed_samples)) as batches,
        RunLog(trainer, first, record) as log,
        ActivationMeter(trainer.engine.module, trainer.device) as meter,
        HangWatch(trainer.peers, startup, running, partial(record_lost_peers, record, trainer.peers)) as watch,
    ):

        @contextmanager
        def not_training() -> Iterator[None]:
            # A profiler must not start or stop while torch communicates, and no rank may leave.
            trainer.engine.finish_step()
            with log.paused(), watch.patient():
                yield

        profiled = step_contexts(run, trainer.mesh.world, trainer.device, first, not_training)
        while iteration < last and reason is None:
            iteration += 1
            with profiled(iteration):
                result = train_step(trainer, next(batches), iteration, session.stopper.votes)
            watch.step_done(iteration)
            session.checkpoints.poll()
            report_finding(record, rank, iteration, result)
            trainer.guard.stop_if_hopeless(result.finding)
            reason = session.stopper.reason(result.extra_sums, iteration)
            is_final = reason is not None or iteration == last
            if not result.skipped:
                losses.append(result.loss)
            if iteration == first:
                log.activations(meter.largest(trainer.mesh.world))
            if losses and (is_final or _is_due(iteration, run.logging.log_interval)):
                log.training(iteration, sum(losses) / len(losses), result)
                losses.clear()
            # The checkpoint comes before the evaluation, so that a failing evaluation does not cost the last steps.
            if is_final or _is_due(iteration, run.checkpoint.save_interval):
                with not_training():
                    reason = _save_checkpoint(trainer, session, iteration, batches.consumed_samples, reason)
            if session.evaluations.are_due(iteration) and not (reason and reason.urgent):
                with not_training():
                    session.evaluations.run(iteration, log, partial(_stops, trainer, session.stopper))
    if reason is not None:
        print_rank_0(f"{reason.text}: ends after iteration {iteration} of {last}", rank)
    return reason.text if reason else "all steps are done"


def _save_checkpoint(
    trainer: Trainer, session: _Session, iteration: int, consumed_samples: int, reason: StopReason | None
) -> StopReason | None:
    """Save after a step; return why the run ends now (`reason` if known before), or None. All ranks must call it."""
    final = reason is not None or iteration == trainer.run.training.train_iters
    session.checkpoints.save(iteration, consumed_samples, reason.text if reason else "interval", final)
    if reason is not None and reason.urgent:
        return reason
    # A save may take longer than a launcher waits after its signal, which then leaves no time for another step, or for
    # an evaluation.
    urgent = _agreed_stop_reason(trainer, session.stopper)
    if urgent is not None and not final:
        # Waits for the save in flight and repeats it only if it failed.
        session.checkpoints.save(iteration, consumed_samples, urgent.text, final=True)
    return urgent or reason


def _agreed_stop_reason(trainer: Trainer, stopper: Stopper) -> StopReason | None:
    """Return why all ranks stop now, without waiting for a step, or None; all ranks must call it."""
    votes = torch.tensor(stopper.votes(), dtype=torch.float64, device=trainer.device)
    return stopper.reason(trainer.mesh.world.all_reduce(votes).tolist())


def _stops(trainer: Trainer, stopper: Stopper) -> bool:
    return _agreed_stop_reason(trainer, stopper) is not None


def _is_due(iteration: int, interval: int | None) -> bool:
    return interval is not None and iteration % interval == 0

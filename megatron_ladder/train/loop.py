"""A run, from its command line to its last checkpoint; `api.py` opens runs with `open_run`, too."""

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch

from megatron_ladder.comm.agreement import Peers
from megatron_ladder.comm.launch import check_device, from_rank_0, read_rank_info, reporting_errors, stop_process_group
from megatron_ladder.comm.watch import Watch, naming_lost_peers
from megatron_ladder.command_line import Settings
from megatron_ladder.config.file import CONFIG_NAME, config_file_text
from megatron_ladder.config.run import check_run
from megatron_ladder.data.batches import GlobalBatchLoader
from megatron_ladder.errors import Problem
from megatron_ladder.files import write_atomically
from megatron_ladder.progress import print_if_possible, print_rank_0
from megatron_ladder.train.checkpoints import CheckpointSaver
from megatron_ladder.train.evaluation import evaluation_is_due, run_evaluations
from megatron_ladder.train.inputs import RunInputs, read_inputs
from megatron_ladder.train.log import (
    RunLog,
    banner,
    describe_start,
    record_lost_peers,
    recording_failures,
    report_finding,
)
from megatron_ladder.train.profile import step_contexts
from megatron_ladder.train.reading import training_batches
from megatron_ladder.train.record import RunRecord, save_lock
from megatron_ladder.train.setup import Trainer, build_trainer
from megatron_ladder.train.step import train_step
from megatron_ladder.train.stop import Stopper


@dataclass
class OpenRun:
    """A run between its steps."""

    trainer: Trainer
    inputs: RunInputs
    batches: GlobalBatchLoader
    """The training batches that follow those of earlier runs."""
    checkpoints: CheckpointSaver
    record: RunRecord
    iteration: int
    """Number of steps done when the run was opened."""
    end: str = "the caller has finished"
    """Why the run ends, for the record."""


@contextmanager
def open_run(settings: Settings, received: Sequence[int] = ()) -> Iterator[OpenRun]:
    """Open the run that a command line describes, resumed from its checkpoint, and close it at the end of the block.

    Raises UserError before anything starts; LostPeerError if another rank ended, or a collective timed out.
    """
    rank_info, peers = read_rank_info(), Peers(received=received)
    with ExitStack() as whole_run:
        for warning in settings.warnings:
            print_rank_0(f"*** {warning} ***", rank_info.rank)
        with reporting_errors(rank_info, peers):
            check_run(settings, rank_info.world_size)
            inputs = read_inputs(settings, rank_info, partial(from_rank_0, rank_info, peers))
            check_device(rank_info)
            folder = inputs.run.checkpoint.save
            if folder is not None and rank_info.rank == 0:
                whole_run.enter_context(save_lock(folder))
        record = RunRecord(folder, rank_info.rank)
        record.write_first("launch")
        with recording_failures(record, peers), naming_lost_peers(peers):
            trainer = build_trainer(inputs, rank_info, peers)
            print_rank_0(banner(trainer, inputs.sources), rank_info.rank)
            with closing(trainer.engine), CheckpointSaver(trainer, inputs, record) as checkpoints:
                iteration, consumed_samples, manifest = checkpoints.resume()
                record.write_first("start", **describe_start(trainer, iteration))
                if folder is not None and rank_info.rank == 0 and not inputs.run.logging.skip_train:
                    _write_config(folder, inputs)
                with closing(training_batches(trainer, inputs, consumed_samples, manifest)) as batches:
                    run = OpenRun(trainer, inputs, batches, checkpoints, record, iteration)
                    yield run
            record.write_first("stop", reason=run.end, code=0)
            stop_process_group()


def _write_config(folder: Path, inputs: RunInputs) -> None:
    processes = inputs.run.world_size
    note = Problem({}, f"All values of a run on {processes} processes; {{config}} of this file repeats the run.")
    try:
        write_atomically(folder / CONFIG_NAME, config_file_text(inputs.values, str(note)))
    except OSError as error:
        # A failing save is no reason to stop, either.
        print_if_possible(f"*** {folder / CONFIG_NAME}: could not be written: {error.strerror} ***")


def pretrain(settings: Settings, received: Sequence[int] = ()) -> None:
    """Run the training that a command line describes; `received` signals request a graceful shutdown.

    Raises UserError before anything starts; BadNumbersError after too many consecutive steps whose numbers were not
    finite; LostPeerError if another rank ended, or a collective timed out.
    """
    start = time.monotonic()
    with open_run(settings, received) as opened:
        config = opened.trainer.run
        stopper = Stopper(config.reliability, received, opened.trainer.mesh.world.rank, start)
        run = _evaluate_loaded if config.logging.skip_train else _train
        opened.end = run(opened, stopper)


def _evaluate_loaded(opened: OpenRun, stopper: Stopper) -> str:
    """Evaluate the model of a checkpoint, and return why the run ends."""
    trainer, iteration = opened.trainer, opened.iteration
    with RunLog(trainer, iteration + 1, opened.record, trains=False) as log:
        run_evaluations(trainer, opened.inputs, iteration, log, partial(_agreed_stop_reason, trainer, stopper))
    reason = _agreed_stop_reason(trainer, stopper)
    if reason is None:
        return "evaluated"
    print_rank_0(f"{reason}: ends the evaluation", trainer.mesh.world.rank)
    return reason


def _train(opened: OpenRun, stopper: Stopper) -> str:
    """Train until --train-iters or a stop request, and return why the run ends."""
    trainer, record, iteration = opened.trainer, opened.record, opened.iteration
    run, rank, batches = trainer.run, trainer.mesh.world.rank, opened.batches
    last, first = run.training.train_iters, iteration + 1
    if iteration >= last:
        print_rank_0(f"nothing to do: {iteration} of {last} steps are done", rank)
        return "nothing to do"
    reason = _agreed_stop_reason(trainer, stopper)
    if reason is not None:
        print_rank_0(f"{reason}: ends before its first step; nothing was trained, so nothing is saved", rank)
        return reason
    if run.checkpoint.save is None:
        note = Problem({}, "without {save}: the weights that this run learns are lost when it ends")
        print_rank_0(f"*** {note} ***", rank)
    losses: list[float] = []
    startup = timedelta(minutes=run.parallel.distributed_timeout_minutes)
    running = timedelta(seconds=run.parallel.distributed_timeout_seconds_after_first_step)
    on_loss = partial(record_lost_peers, record, trainer.peers)
    with RunLog(trainer, first, record) as log, Watch(trainer.peers, startup, running, on_loss) as watch:

        @contextmanager
        def not_training() -> Iterator[None]:
            # A profiler must not start or stop while torch communicates, and no rank may leave.
            trainer.engine.optimizer.finish_step()
            with log.paused(), watch.patient():
                yield

        def receive_ahead() -> None:
            if iteration < last:
                batches.receive_ahead()

        profiled = step_contexts(run, trainer.mesh.world, trainer.device, first, not_training)
        while iteration < last and reason is None:
            iteration += 1
            with profiled(iteration):
                result = train_step(trainer, next(batches), iteration, stopper.votes, receive_ahead)
            watch.step_done(iteration)
            opened.checkpoints.poll()
            report_finding(record, rank, iteration, result)
            trainer.guard.stop_if_hopeless(result.finding)
            reason = stopper.reason(result.extra_sums, iteration)
            is_final = reason is not None or iteration == last
            if not result.skipped:
                losses.append(result.loss)
            if losses and (is_final or _is_due(iteration, run.logging.log_interval)):
                log.training(iteration, sum(losses) / len(losses), result)
                losses.clear()
            # The checkpoint comes before the evaluation, so that a failing evaluation does not cost the last steps.
            if is_final or _is_due(iteration, run.checkpoint.save_interval):
                with not_training():
                    reason = _save_checkpoint(opened, stopper, iteration, reason)
            if evaluation_is_due(trainer, opened.inputs, iteration):
                with not_training():
                    stops = partial(_agreed_stop_reason, trainer, stopper)
                    run_evaluations(trainer, opened.inputs, iteration, log, stops)
    if reason is not None:
        print_rank_0(f"{reason}: ends after iteration {iteration} of {last}", rank)
    if run.checkpoint.save is None:
        note = Problem({}, f"nothing was saved after iteration {iteration}: {{save}} was not given")
        print_rank_0(str(note), rank)
    return reason or "all steps are done"


def _save_checkpoint(opened: OpenRun, stopper: Stopper, iteration: int, reason: str | None) -> str | None:
    """Save after a step; return why the run ends now (`reason` if known before), or None. All ranks must call it."""
    save = partial(opened.checkpoints.save, iteration, opened.batches)
    final = reason is not None or iteration == opened.trainer.run.training.train_iters
    save(reason or "interval", final)
    # A save may take longer than a launcher waits after its signal, which then leaves no time for another step, or for
    # an evaluation.
    urgent = _agreed_stop_reason(opened.trainer, stopper)
    if urgent is not None and not final:
        # Waits for the save in flight and repeats it only if it failed.
        save(urgent, final=True)
    return urgent or reason


def _agreed_stop_reason(trainer: Trainer, stopper: Stopper) -> str | None:
    """Return why all ranks stop now, without waiting for a step, or None; all ranks must call it."""
    votes = torch.tensor(stopper.votes(), dtype=torch.float64, device=trainer.device)
    return stopper.reason(trainer.mesh.world.all_reduce(votes).tolist())


def _is_due(iteration: int, interval: int | None) -> bool:
    return interval is not None and iteration % interval == 0

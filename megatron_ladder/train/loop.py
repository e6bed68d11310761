"""A run, from its command line to its last checkpoint."""

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import timedelta
from functools import partial

import torch

from megatron_ladder.comm.watch import HangWatch
from megatron_ladder.config.run import RunWords
from megatron_ladder.train.evaluation import Evaluations
from megatron_ladder.train.log import RunLog, print_rank_0, record_lost_peers, report_finding
from megatron_ladder.train.opening import OpenRun, open_run
from megatron_ladder.train.profile import step_contexts
from megatron_ladder.train.reading import training_batches
from megatron_ladder.train.setup import Trainer
from megatron_ladder.train.step import train_step
from megatron_ladder.train.stop import Stopper, StopSignals


def pretrain(words: RunWords, signals: StopSignals | None = None) -> None:
    """Run the training that a command line describes; `signals` request a graceful shutdown, if they are handled.

    Raises UserError before anything starts; BadNumbersError after too many consecutive steps whose numbers were not
    finite; LostPeerError if another rank ended, or a collective timed out.
    """
    start = time.monotonic()
    with open_run(words) as opened:
        config = opened.trainer.run
        stopper = Stopper(config.reliability, signals, opened.trainer.mesh.world.rank, start)
        evaluations = Evaluations(opened.trainer, opened.inputs)
        run = _evaluate_loaded if config.logging.skip_train else _train
        opened.end = run(opened, evaluations, stopper)


def _evaluate_loaded(opened: OpenRun, evaluations: Evaluations, stopper: Stopper) -> str:
    """Evaluate the model of a checkpoint, and return why the run ends."""
    trainer, iteration = opened.trainer, opened.iteration
    with RunLog(trainer, iteration + 1, opened.record, trains=False) as log:
        evaluations.run(iteration, log, partial(_agreed_stop_reason, trainer, stopper), everything=True)
    reason = _agreed_stop_reason(trainer, stopper)
    if reason is None:
        return "evaluated"
    print_rank_0(f"{reason}: ends the evaluation", trainer.mesh.world.rank)
    return reason


def _train(opened: OpenRun, evaluations: Evaluations, stopper: Stopper) -> str:
    """Train until --train-iters or a stop request, and return why the run ends."""
    trainer, record, iteration = opened.trainer, opened.record, opened.iteration
    run, rank = trainer.run, trainer.mesh.world.rank
    last, first = run.training.train_iters, iteration + 1
    if iteration >= last:
        print_rank_0(f"nothing to do: {iteration} of {last} steps are done", rank)
        return "nothing to do"
    reason = _agreed_stop_reason(trainer, stopper)
    if reason is not None:
        print_rank_0(f"{reason}: ends before its first step; nothing was trained, so nothing is saved", rank)
        return reason
    losses: list[float] = []
    startup = timedelta(minutes=run.parallel.distributed_timeout_minutes)
    running = timedelta(seconds=run.parallel.distributed_timeout_seconds_after_first_step)
    with (
        closing(training_batches(trainer, opened.inputs, opened.streams, opened.consumed_samples)) as batches,
        RunLog(trainer, first, record) as log,
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
                result = train_step(trainer, next(batches), iteration, stopper.votes)
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
                    reason = _save_checkpoint(opened, stopper, iteration, batches.consumed_samples, reason)
            if evaluations.are_due(iteration):
                with not_training():
                    evaluations.run(iteration, log, partial(_agreed_stop_reason, trainer, stopper))
    if reason is not None:
        print_rank_0(f"{reason}: ends after iteration {iteration} of {last}", rank)
    return reason or "all steps are done"


def _save_checkpoint(
    opened: OpenRun, stopper: Stopper, iteration: int, consumed_samples: int, reason: str | None
) -> str | None:
    """Save after a step; return why the run ends now (`reason` if known before), or None. All ranks must call it."""
    final = reason is not None or iteration == opened.trainer.run.training.train_iters
    opened.checkpoints.save(iteration, consumed_samples, reason or "interval", final)
    # A save may take longer than a launcher waits after its signal, which then leaves no time for another step, or for
    # an evaluation.
    urgent = _agreed_stop_reason(opened.trainer, stopper)
    if urgent is not None and not final:
        # Waits for the save in flight and repeats it only if it failed.
        opened.checkpoints.save(iteration, consumed_samples, urgent, final=True)
    return urgent or reason


def _agreed_stop_reason(trainer: Trainer, stopper: Stopper) -> str | None:
    """Return why all ranks stop now, without waiting for a step, or None; all ranks must call it."""
    votes = torch.tensor(stopper.votes(), dtype=torch.float64, device=trainer.device)
    return stopper.reason(trainer.mesh.world.all_reduce(votes).tolist())


def _is_due(iteration: int, interval: int | None) -> bool:
    return interval is not None and iteration % interval == 0

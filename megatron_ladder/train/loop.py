"""The run, from a command line to its last checkpoint."""

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from datetime import timedelta

import torch

from megatron_ladder.comm.agreement import Peers
from megatron_ladder.comm.launch import find_place, naming_lost_peers, stop_process_group, telling_mistakes
from megatron_ladder.comm.watch import HangWatch
from megatron_ladder.errors import BadNumbersError
from megatron_ladder.train.checkpoints import CheckpointSaver
from megatron_ladder.train.inputs import RunInputs, read_inputs
from megatron_ladder.train.log import RunLog, banner, say
from megatron_ladder.train.memory import ActivationMeter
from megatron_ladder.train.profile import step_contexts
from megatron_ladder.train.reading import packing_notes, sample_batches
from megatron_ladder.train.setup import Trainer, build_trainer
from megatron_ladder.train.step import StepResult, evaluate, train_step


def pretrain(argv: Sequence[str]) -> None:
    """Trains as the command line says, and saves.

    Raises:
        UserError: something in it is wrong; nothing was started.
        BadNumbersError: loss or gradient are not finite.
        LostPeerError: another rank ended, or a collective timed out.
    """
    place, peers = find_place(), Peers()
    with telling_mistakes(place):
        inputs = read_inputs(argv, place)
    with naming_lost_peers(peers):
        trainer = build_trainer(inputs, place, peers)
        say("\n".join([banner(trainer), *packing_notes(inputs.sources)]), place.rank)
        with CheckpointSaver(trainer, inputs) as checkpoints:
            iteration, consumed_samples = checkpoints.resume()
            train(trainer, inputs, checkpoints, iteration, consumed_samples)
        stop_process_group()


def train(
    trainer: Trainer, inputs: RunInputs, checkpoints: CheckpointSaver, iteration: int, consumed_samples: int
) -> None:
    """Steps until --train-iters, with log lines, evaluations and checkpoints between them."""
    run, rank = trainer.run, trainer.mesh.world.rank
    last = run.training.train_iters
    if iteration >= last:
        say(f"nothing to do: {iteration} of {last} steps are done", rank)
        return
    assert inputs.sources.train is not None
    batches = sample_batches(trainer, inputs.sources.train, consumed_samples)
    losses: list[torch.Tensor] = []
    first = iteration + 1
    with (
        RunLog(trainer, first) as log,
        meter_activations(trainer) as meter,
        hang_watch(trainer) as watch,
    ):

        @contextmanager
        def aside() -> Iterator[None]:
            """Around what is no training."""
            with log.without_time(), watch.patient():
                yield

        profiled = step_contexts(run, trainer.mesh.world, trainer.device, first, aside)
        while iteration < last:
            iteration += 1
            with profiled(iteration):
                result = train_step(trainer, next(batches), iteration)
            watch.step_done()
            checkpoints.poll()
            if result.skipped:
                scale = trainer.state.loss_scale
                say(f"iteration {iteration}: overflow in fp16, the step was left out; loss scale {scale:g}", rank)
            else:
                losses.append(result.loss_sum)
            if iteration == first:
                log.activations(meter.largest(trainer.mesh.world))
            if losses and (iteration % run.logging.log_interval == 0 or iteration == last):
                report(trainer, log, iteration, losses, result)
                losses.clear()
            # Saved first: what an evaluation may meet must not cost the steps before it.
            if _is_due(iteration, run.checkpoint.save_interval, last):
                with aside():
                    checkpoints.save(iteration, batches.consumed_samples, final=iteration == last)
            if inputs.sources.valid is not None and _is_due(iteration, run.logging.eval_interval, last):
                with aside(), closing(sample_batches(trainer, inputs.sources.valid, consumed_samples=0)) as valid:
                    log.validation(iteration, evaluate(trainer, valid, run.logging.eval_iters))


def meter_activations(trainer: Trainer) -> ActivationMeter:
    """Measures the first forward pass, of this rank's stage if there are several."""
    return ActivationMeter(trainer.engine.module, trainer.device)


def hang_watch(trainer: Trainer) -> HangWatch:
    """Short timeouts after the first step, and stacks before one is over."""
    parallel = trainer.run.parallel
    startup = timedelta(minutes=parallel.distributed_timeout_minutes)
    return HangWatch(trainer.peers, startup, timedelta(seconds=parallel.distributed_timeout_seconds_after_first_step))


def _is_due(iteration: int, interval: int | None, last: int) -> bool:
    """Whether what happens every `interval` steps, and after the last one, happens now."""
    return iteration == last or (interval is not None and iteration % interval == 0)


def report(
    trainer: Trainer, log: RunLog, iteration: int, losses: Sequence[torch.Tensor], result: StepResult
) -> None:
    """Logs the mean loss of the steps since the last line; all ranks take part."""
    total = trainer.mesh.data.all_reduce(torch.stack(list(losses)).sum())
    # Only the last stage knows a loss, and the first rank prints it.
    trainer.mesh.pipeline.all_reduce(total)
    loss = total.item() / len(losses)
    if loss != loss:
        raise BadNumbersError(f"iteration {iteration}: the loss is not a number")
    log.training(iteration, loss, result.learning_rate, result.gradient_norm)


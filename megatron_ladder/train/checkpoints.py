"""How a run's checkpoints are written and found again; all ranks take part in each.

With --async-save the state is copied to host memory, and a thread of each rank writes it while training goes on. At
most one save is in flight: the next one waits for it. A save that fails costs nothing but itself: earlier
checkpoints are as they were, the run says what happened and trains on; only when the save that ends a run fails does
the run end with an error.
"""

import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Protocol, Self

import torch

from megatron_ladder import __version__
from megatron_ladder.checkpoint.async_save import Background, FileHandover, HostMemory
from megatron_ladder.checkpoint.format import Checkpoint
from megatron_ladder.checkpoint.loading import load_newest
from megatron_ladder.checkpoint.publish import published_checkpoints
from megatron_ladder.checkpoint.retention import Retention
from megatron_ladder.checkpoint.saving import SaveError, SaveOptions, SaveOutcome, TrainingSave
from megatron_ladder.errors import UserError
from megatron_ladder.train.inputs import RunInputs, describe_data
from megatron_ladder.train.log import say
from megatron_ladder.train.resume import schedule_note
from megatron_ladder.train.setup import Trainer
from megatron_ladder.train.small_files import SmallFiles

ENDING_SECONDS = 30.0
"""How long a run that fails lets a save in flight finish."""


class OnEvent(Protocol):
    """Hears of what happens, on rank 0 alone, in the thread that trains.

    Kinds: "save begin" (iteration, reason, asynchronous), "save end" (iteration, reason, directory, bytes, seconds,
    blocked_seconds, removed), "save failed" (iteration, reason, error), "load" (directory, iteration, seconds, bytes),
    "fallback" (directory, faults). All values are JSON-able.
    """

    def __call__(self, kind: str, /, **fields: Any) -> None:
        """One event."""


class DataStreams(Protocol):
    """What only the data knows of its place; saved with every checkpoint under `data_streams` of the manifest."""

    def state_dict(self) -> Any:
        """This data-parallel rank's state, JSON-able and small; None on ranks that leave it to another one."""

    def resume(self, manifest: Mapping[str, Any]) -> None:
        """Takes the states of all data-parallel ranks that saved, in their order; there may have been more or fewer.

        Args:
            manifest: of the checkpoint; the earliest have no `data_streams`.
        """


class _Begun(NamedTuple):
    """A save between its two parts."""

    saving: TrainingSave
    reason: str
    began: float
    blocked_seconds: float


class _Flight(NamedTuple):
    """A save that a thread writes."""

    begun: _Begun
    work: Background[SaveOutcome | None]


class CheckpointSaver:
    """The checkpoints of one run: `resume` before the first step, `save` after steps, `poll` after every step.

    As a context manager it waits for a save in flight at the end. Every method but `poll` is called by all ranks
    alike.
    """

    def __init__(
        self,
        trainer: Trainer,
        inputs: RunInputs,
        on_event: OnEvent = lambda kind, /, **fields: None,
        streams: DataStreams | None = None,
    ) -> None:
        self._trainer = trainer
        self._inputs = inputs
        self._config = trainer.run.checkpoint
        self._world = trainer.mesh.world
        self._on_event = on_event
        self._streams = streams
        self._small_files = SmallFiles(inputs.tokenizer)
        self._host = HostMemory()
        self._loaded: Path | None = None
        self._saved: int | None = None
        self._flight: _Flight | None = None
        self._landed: SaveOutcome | None = None
        self._noted: set[str] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.wait()
        elif self._flight is not None:
            # Peers may be gone, and collectives with them; the files may still become a checkpoint.
            self._flight.work.wait(ENDING_SECONDS)
            self.poll()

    def resume(self) -> tuple[int, int]:
        """Loads the checkpoint, if there is one; returns steps done and samples seen.

        Raises:
            UserError: there are checkpoints, and none is whole.
        """
        load, save, rank = self._config.load, self._config.save, self._world.rank
        if load is None or self._inputs.checkpoint is None:
            if load is not None:
                say(f"*** --load {load} holds no checkpoint: the run starts anew ***", rank)
            elif save is not None and rank == 0 and (names := published_checkpoints(save)):
                say(f"*** --save {save} holds {names[-1]}, and --load is not given: the run starts anew ***", rank)
            return 0, 0
        began = time.perf_counter()
        checkpoint = self._load(load, self._inputs.checkpoint)
        self._loaded = checkpoint.directory
        stored_bytes = sum(record["size"] for record in checkpoint.manifest["files"])
        self._event(
            "load", directory=str(checkpoint.directory), iteration=checkpoint.iteration,
            seconds=round(time.perf_counter() - began, 3), bytes=stored_bytes,
        )  # fmt: skip
        if rank == 0 and self._config.save is not None:
            for line in self._small_files.carry_on(checkpoint):
                say(f"*** {line} ***", rank)
        if self._config.finetune:
            say(f"takes the weights of {checkpoint.directory}: starts at iteration 0", rank)
            return 0, 0
        if self._trainer.run.logging.skip_train:
            say(f"evaluates {checkpoint.directory}: {checkpoint.iteration} steps done", rank)
            return checkpoint.iteration, checkpoint.consumed_samples
        if self._streams is not None:
            self._streams.resume(checkpoint.manifest)
        self._trainer.guard.set_state(checkpoint.manifest.get("guard", {}))
        say(f"continues from {checkpoint.directory}: {checkpoint.iteration} steps done", rank)
        if note := schedule_note(self._trainer.run, checkpoint):
            say(note, rank)
        return checkpoint.iteration, checkpoint.consumed_samples

    def save(self, iteration: int, consumed_samples: int, reason: str = "interval", final: bool = False) -> None:
        """Publishes a checkpoint in --save, if that was given, or begins to; after a save in flight.

        An iteration that this run has saved already is not saved again.

        Args:
            reason: why, for the record.
            final: whether the run ends after it, so that it is written at once.

        Raises:
            UserError: a `final` save failed.
        """
        in_flight = None if self._flight is None else self._flight.begun.saving.iteration
        if self._config.save is None or (iteration == in_flight and not final):
            return
        self.wait()
        if iteration == self._saved:
            return
        asynchronous = self._config.async_save and not final
        self._event("save begin", iteration=iteration, reason=reason, asynchronous=asynchronous)
        try:
            begun = self._begin(iteration, consumed_samples, reason, self._host if asynchronous else None)
            if asynchronous:
                self._flight = self._take_off(begun)
                return
            outcome = self._world.broadcast_object(begun.saving.write(self._world.gather_objects))
            self._report(begun._replace(blocked_seconds=time.perf_counter() - begun.began), outcome)
        except SaveError as error:
            self._report_failure(iteration, reason, str(error))
        if final and self._saved != iteration:
            raise UserError(f"--save {self._config.save}: the last checkpoint could not be written")

    def poll(self) -> None:
        """Tells, on rank 0, that a save in flight has ended; for after every step. Not a collective."""
        if self._flight is not None and self._landed is None and self._flight.work.finished:
            self._landed = self._flight.work.result()
            if self._landed is not None:
                self._report(self._flight.begun, self._landed)

    def wait(self) -> None:
        """Returns when no save is in flight."""
        if self._flight is None:
            return
        self._flight.work.wait()
        self.poll()
        outcome = self._world.broadcast_object(self._landed)
        if outcome.error is None:
            self._saved = self._flight.begun.saving.iteration
        self._flight, self._landed = None, None

    def _begin(self, iteration: int, consumed_samples: int, reason: str, host: HostMemory | None) -> _Begun:
        config, began = self._config, time.perf_counter()
        assert config.save is not None
        retention = Retention(config.keep_last_n_checkpoints, config.save_retain_interval, self._loaded)
        saving = TrainingSave.begin(
            config.save, self._header(iteration, consumed_samples), self._trainer.engine.state, self._world,
            self._small_files.write, SaveOptions(config.checksum, retention, host),
        )  # fmt: skip
        return _Begun(saving, reason, began, time.perf_counter() - began)

    def _take_off(self, begun: _Begun) -> _Flight:
        seconds = 60 * self._trainer.run.parallel.distributed_timeout_minutes
        handover = FileHandover(begun.saving.directory, self._world.rank, self._world.size, seconds)
        return _Flight(begun, Background(lambda: begun.saving.write(handover.gather), "checkpoint writer"))

    def _header(self, iteration: int, consumed_samples: int) -> dict[str, Any]:
        run, tokenizer = self._trainer.run, self._inputs.tokenizer
        header = {
            "iteration": iteration,
            "consumed_samples": consumed_samples,
            "model": run.model.to_dict(),
            "run": run.to_dict(),
            "data": describe_data(self._inputs.sources, tokenizer, self._inputs.stream),
            **self._small_files.header(),
            "versions": {"megatron_ladder": __version__, "torch": torch.__version__},
            "guard": self._trainer.guard.state(),
        }
        if self._streams is not None:
            data = self._trainer.mesh.data
            gathered = self._world.gather_objects((data.rank, self._streams.state_dict()))
            states = {rank: state for rank, state in gathered if state is not None}
            header["data_streams"] = [states[rank] for rank in range(data.size)] if states else []
        return header

    def _report(self, begun: _Begun, outcome: SaveOutcome) -> None:
        saving, seconds = begun.saving, time.perf_counter() - begun.began
        # What could not be removed is met again by every save.
        for note in (note for note in outcome.notes if note not in self._noted):
            say(f"*** {note} ***", self._world.rank)
        self._noted.update(outcome.notes)
        if outcome.error is not None:
            self._report_failure(saving.iteration, begun.reason, outcome.error)
            return
        self._saved = saving.iteration
        rank = self._world.rank
        say(f"saved {outcome.directory}", rank)
        for name in outcome.removed:
            say(f"removed {name}", rank)
        self._event(
            "save end", iteration=saving.iteration, reason=begun.reason, directory=outcome.directory,
            bytes=saving.total_bytes, seconds=round(seconds, 3), blocked_seconds=round(begun.blocked_seconds, 3),
            removed=list(outcome.removed),
        )  # fmt: skip

    def _report_failure(self, iteration: int, reason: str, error: str) -> None:
        text = f"iteration {iteration} was not saved: {error}; earlier checkpoints are as they were"
        say(f"*** --save {self._config.save}: {text} ***", self._world.rank)
        self._event("save failed", iteration=iteration, reason=reason, error=error)

    def _event(self, kind: str, **fields: Any) -> None:
        if self._world.rank == 0:
            self._on_event(kind, **fields)

    def _load(self, load: Path, opened: Checkpoint) -> Checkpoint:
        config, rank = self._config, self._world.rank
        weights_alone = self._trainer.run.loads_only_weights
        model = opened.model()

        def refuse(checkpoint: Checkpoint) -> list[str]:
            # The command line was compared with the one that was opened at the start.
            other = checkpoint.model() != model
            return [f"{checkpoint.directory}: is of another model than {opened.directory}"] if other else []

        checkpoint, faults = load_newest(
            load, self._trainer.engine.state, self._world, refuse,
            optimizer=config.load_optim and not weights_alone,
            generators=config.load_rng and not weights_alone,
            progress=f"verifying {load}" if rank == 0 else None,
        )  # fmt: skip
        if faults:
            for fault in faults:
                say(f"*** {fault} ***", rank)
            say(f"*** {checkpoint.directory}: is used instead ***", rank)
            self._event("fallback", directory=str(checkpoint.directory), faults=faults)
        return checkpoint

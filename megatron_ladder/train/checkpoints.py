"""Saving and resuming of a run; all ranks take part in both.

With --async-save the state is copied to host memory, and a thread of each rank writes it while training continues. At
most one save is in flight; the next one waits for it. A failed save is reported, leaves earlier checkpoints as they
were, and training continues. Only if the final save of a run fails does the run end with an error.
"""

import contextlib
import json
import time
from collections.abc import Callable
from concurrent import futures
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch

from megatron_ladder import __version__
from megatron_ladder.blueprint.tensors import mtp_tensors
from megatron_ladder.checkpoint.format import (
    CARRIED,
    CHAT_TEMPLATE,
    GENERATION_CONFIG,
    IMPORTED,
    Checkpoint,
    checkpoints_nearby,
    is_card_or_licence,
)
from megatron_ladder.checkpoint.loading import load_newest
from megatron_ladder.checkpoint.publish import Retention, published_checkpoints
from megatron_ladder.checkpoint.saving import (
    HostMemory,
    SaveError,
    SaveOutcome,
    TrainingSave,
    gather_through_files,
    run_in_thread,
)
from megatron_ladder.data.batches import GlobalBatchLoader
from megatron_ladder.data.chat_template import own_chat_template
from megatron_ladder.data.loader import find_chat_template
from megatron_ladder.errors import BadNumbersError, Problem, UserError
from megatron_ladder.files import write_atomically
from megatron_ladder.progress import print_rank_0
from megatron_ladder.tokenizers.copies import tokenizer_files
from megatron_ladder.tokenizers.kinds import Tokenizer
from megatron_ladder.train.inputs import RunInputs
from megatron_ladder.train.record import RunRecord
from megatron_ladder.train.resume import has_another_tokenizer, learned_changes, schedule_note
from megatron_ladder.train.setup import Trainer

_FAILING_SECONDS = 30.0
"""Time that a failing run gives a save in flight to finish."""


class _SaveInFlight(NamedTuple):
    iteration: int
    work: futures.Future[SaveOutcome | None]
    report: Callable[[SaveOutcome], None]


class CheckpointSaver:
    """The checkpoints of a run. The end of its block waits for a save in flight. All ranks call all but `poll`."""

    def __init__(self, trainer: Trainer, inputs: RunInputs, record: RunRecord) -> None:
        self._trainer = trainer
        self._inputs = inputs
        self._config = trainer.run.checkpoint
        self._world = trainer.mesh.world
        self._print = partial(print_rank_0, rank=self._world.rank)
        self._event = record.write_first
        template = find_chat_template(inputs.sources.datasets, self._print)
        self._small_files = _SmallFiles(inputs.tokenizer, template)
        self._host = HostMemory()
        self._loaded: Path | None = None
        self._saved: int | None = None
        self._in_flight: _SaveInFlight | None = None
        self._outcome: SaveOutcome | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.wait()
            self._host.free()
        elif self._in_flight is not None:
            # Peers may be gone, so collectives are impossible, but the files may still become a checkpoint.
            futures.wait([self._in_flight.work], _FAILING_SECONDS)
            self.poll()

    def resume(self) -> tuple[int, int, dict[str, Any]]:
        """Load the checkpoint, if any; return the steps and samples done, and the manifest if the run continues it.

        Raises UserError if none is undamaged.
        """
        load, save = self._config.load, self._config.save
        if load is None or self._inputs.checkpoint is None:
            if load is not None:
                # A run that loads what it saves has none at its first start.
                hint = checkpoints_nearby(load) if load != save and self._world.rank == 0 else ""
                note = Problem({"load": load}, "{} holds no checkpoint: the run starts from scratch{hint}", hint=hint)
                self._print(f"*** {note} ***")
            elif save is not None and self._world.rank == 0 and (names := published_checkpoints(save)):
                note = Problem({"save": save}, f"{{}} holds {names[-1]}, which this run does not continue")
                self._print(f"*** {note} ***")
            return 0, 0, {}
        checkpoint = self._load(load, self._inputs.checkpoint)
        if self._world.rank == 0 and save is not None:
            for inherited in self._small_files.inherit(checkpoint):
                self._print(f"*** {inherited} ***")
        if self._config.finetune:
            self._print(f"takes the weights of {checkpoint.directory}: starts at iteration 0")
            return 0, 0, {}
        if self._trainer.run.logging.skip_train:
            self._print(f"evaluates {checkpoint.directory}: {checkpoint.iteration} steps done")
            return checkpoint.iteration, checkpoint.consumed_samples, {}
        self._trainer.guard.set_state(checkpoint.manifest.get("guard", {}))
        self._print(f"continues from {checkpoint.directory}: {checkpoint.iteration} steps done")
        for change in learned_changes(self._trainer.run, checkpoint):
            self._print(f"*** {change} ***")
        if schedule := schedule_note(self._trainer.run, checkpoint):
            self._print(str(schedule))
        return checkpoint.iteration, checkpoint.consumed_samples, checkpoint.manifest

    def _load(self, load: Path, opened: Checkpoint) -> Checkpoint:
        config = self._config
        only_weights = self._trainer.run.loads_only_weights
        start = time.perf_counter()
        model = opened.model()
        fresh = None if model.mtp_num_layers else mtp_tensors(self._trainer.run.model)
        if fresh is not None:
            self._print(f"*** {opened.directory}: has no drafting head: that of the run starts from scratch ***")

        def refuse(checkpoint: Checkpoint) -> list[str]:
            # The command line was only compared with the checkpoint that was opened at the start.
            other = checkpoint.model() != model
            return [f"{checkpoint.directory}: is of another model than {opened.directory}"] if other else []

        checkpoint, faults = load_newest(
            load,
            self._trainer.engine.optimizer,
            self._world,
            refuse,
            opened=opened,
            optimizer=config.load_optim and not only_weights,
            generators=config.load_rng and not only_weights,
            progress=f"verifying {load}" if self._world.rank == 0 else None,
            fresh=() if fresh is None else {tensor.name for tensor in fresh.tensors},
        )
        directory = str(checkpoint.directory)
        if faults:
            for fault in faults:
                self._print(f"*** {fault} ***")
            self._print(f"*** {directory}: is used instead ***")
            self._event("fallback", directory=directory, faults=faults)
        self._loaded = checkpoint.directory
        self._event(
            "load",
            directory=directory,
            iteration=checkpoint.iteration,
            seconds=round(time.perf_counter() - start, 3),
            bytes=sum(record["size"] for record in checkpoint.manifest["files"]),
        )
        return checkpoint

    def save(self, iteration: int, batches: GlobalBatchLoader, reason: str = "interval", final: bool = False) -> None:
        """Publish a checkpoint in --save, or start to; does nothing without --save, or if the run has saved it already.

        Waits for a save in flight first. The `final` save of a run is synchronous, and raises UserError if it fails.
        Raises BadNumbersError, like `wait`, if a saved state is not finite.
        """
        config, world = self._config, self._world
        in_flight = None if self._in_flight is None else self._in_flight.iteration
        if config.save is None or (iteration == in_flight and not final):
            return
        self.wait()
        if iteration == self._saved:
            return
        asynchronous = config.async_save and not final
        start = time.perf_counter()
        self._event("save begin", iteration=iteration, reason=reason, asynchronous=asynchronous)
        retention = Retention(config.keep_last_n_checkpoints, config.save_retain_interval, self._loaded)
        header = self._header(iteration, batches)
        host = self._host if asynchronous else None
        optimizer = self._trainer.engine.optimizer
        try:
            saving = TrainingSave(config.save, header, optimizer, world, self._small_files.write, retention, host)
            if asynchronous:
                seconds = 60 * self._trainer.run.parallel.distributed_timeout_minutes
                gather = partial(gather_through_files, saving.directory, world.rank, world.size, seconds)
                work = run_in_thread(lambda: saving.write(gather), "checkpoint writer")
            else:
                work = futures.Future()
                work.set_result(saving.write(world.gather_objects))
            report = partial(self._report, saving, reason, start, time.perf_counter() - start)
            self._in_flight = _SaveInFlight(iteration, work, report)
            if not asynchronous:
                self.wait()
        except SaveError as error:
            self._report_failure(iteration, reason, str(error))
        if final and self._saved != iteration:
            raise UserError(Problem({"save": config.save}, "{}: the last checkpoint could not be written"))

    def poll(self) -> None:
        """Report, on rank 0, a save in flight that has ended; to be called after every step. Not a collective."""
        if self._in_flight is not None and self._outcome is None and self._in_flight.work.done():
            self._outcome = self._in_flight.work.result()
            if self._outcome is not None:
                self._in_flight.report(self._outcome)

    def wait(self) -> None:
        """Wait until no save is in flight."""
        if self._in_flight is None:
            return
        futures.wait([self._in_flight.work])
        self.poll()
        outcome = self._world.broadcast_object(self._outcome)
        iteration = self._in_flight.iteration
        if outcome.error is None:
            self._saved = iteration
        self._in_flight, self._outcome = None, None
        if outcome.bad_numbers:
            raise BadNumbersError(
                f"iteration {iteration}: {outcome.error}, so it was not saved: load an earlier checkpoint, or convert "
                "the model again if the loaded weights were already bad"
            )

    def _header(self, iteration: int, batches: GlobalBatchLoader) -> dict[str, Any]:
        run, stream, data = self._trainer.run, self._inputs.stream, self._trainer.mesh.data
        header = {
            "iteration": iteration,
            "consumed_samples": batches.consumed_samples,
            "model": run.model.to_dict(),
            "run": run.to_dict(),
            "data": self._inputs.data,
            "end_ids": sorted(self._inputs.end_ids),
            "answers_end": self._inputs.answers_end,
            **self._small_files.header(),
            "versions": {"megatron_ladder": __version__, "torch": torch.__version__},
            "guard": self._trainer.guard.state(),
        }
        if stream is not None:
            # One process of each data-parallel rank reads.
            gathered = self._world.gather_objects((data.rank, batches.reader_state))
            states = {rank: state for rank, state in gathered if state}
            header["data_streams"] = [{"plan": stream.cut()} | states[rank] for rank in sorted(states)]
        return header

    def _report(
        self, saving: TrainingSave, reason: str, start: float, blocked_seconds: float, outcome: SaveOutcome
    ) -> None:
        if outcome.error is not None:
            self._report_failure(saving.iteration, reason, outcome.error)
            return
        self._print(f"saved {outcome.directory}")
        for name in outcome.removed:
            self._print(f"removed {name}")
        self._event(
            "save end",
            iteration=saving.iteration,
            reason=reason,
            directory=outcome.directory,
            bytes=saving.total_bytes,
            seconds=round(time.perf_counter() - start, 3),
            blocked_seconds=round(blocked_seconds, 3),
            removed=list(outcome.removed),
        )

    def _report_failure(self, iteration: int, reason: str, error: str) -> None:
        reason = f"{{}}: iteration {iteration} was not saved: {{error}}; earlier checkpoints are as they were"
        self._print(f"*** {Problem({'save': self._config.save}, reason, error=error)} ***")
        self._event("save failed", iteration=iteration, reason=reason, error=error)


class _SmallFiles:
    """Tokenizer and files of an imported model, read once and written with every save; only used on rank 0."""

    def __init__(self, tokenizer: Tokenizer | None, template: str | None) -> None:
        """`template` is that of the data, which replaces the tokenizer's."""
        self._tokenizer = tokenizer
        self._files = {} if tokenizer is None else tokenizer_files(tokenizer)
        if template is not None and template != own_chat_template(tokenizer):
            self._files[CHAT_TEMPLATE] = template.encode()
        self._imported: Any = None

    def inherit(self, checkpoint: Checkpoint) -> list[str]:
        """Take over the imported model's files of a checkpoint; return one line for each that is not taken over.

        The run's own tokenizer wins if both have a file. Only card and licences are taken over from a model with
        another tokenizer, whose ids and chat template have another meaning.
        """
        notes: list[str] = []
        of_tokenizer: dict[str, bytes] = {}
        for name in sorted(checkpoint.file_names):
            path = checkpoint.directory / name
            try:
                if is_card_or_licence(name):
                    self._files[name] = path.read_bytes()
                elif name in CARRIED:
                    of_tokenizer[name] = path.read_bytes()
            except OSError as error:
                notes.append(f"{path}: cannot be read: {error.strerror}: checkpoints of this run do not include it")
        imported = checkpoint.manifest.get(IMPORTED)
        if has_another_tokenizer(checkpoint, self._tokenizer):
            lost = [name for name in (CHAT_TEMPLATE, GENERATION_CONFIG) if name in of_tokenizer]
            lost += ["the ids of special tokens"] if imported is not None else []
            if lost:
                why = "has another tokenizer than this run, so these are not taken over"
                notes.append(f"{checkpoint.directory}: {why}: {', '.join(lost)}")
            return notes
        with contextlib.suppress(ValueError, RecursionError):
            settings = json.loads(self._files.get("tokenizer_config.json", b""))
            if isinstance(settings, dict) and "chat_template" in settings:
                # The inherited file would override the run's own template.
                of_tokenizer.pop(CHAT_TEMPLATE, None)
        self._files = of_tokenizer | self._files
        self._imported = imported
        return notes

    def header(self) -> dict[str, Any]:
        known = self._tokenizer
        header: dict[str, Any] = {"tokenizer": None if known is None else {"type": known.kind, "sha256": known.sha256}}
        return header if self._imported is None else header | {IMPORTED: self._imported}

    def write(self, directory: Path) -> None:
        for name, content in self._files.items():
            write_atomically(directory / name, content)

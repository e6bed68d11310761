"""Opens a run: from the words of its flags to its first step, for the training loop and for `api.py`."""

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from megatron_ladder.comm.agreement import Peers
from megatron_ladder.comm.launch import (
    check_device,
    from_rank_0,
    naming_lost_peers,
    read_rank_info,
    reporting_errors,
    stop_process_group,
)
from megatron_ladder.config.file import CONFIG_NAME, config_file_text
from megatron_ladder.config.run import RunWords
from megatron_ladder.files import write_atomically
from megatron_ladder.train.checkpoints import CheckpointSaver
from megatron_ladder.train.inputs import RunInputs, read_inputs
from megatron_ladder.train.lock import SaveLock
from megatron_ladder.train.log import banner, describe_start, print_if_possible, print_rank_0, recording_failures
from megatron_ladder.train.reading import TextStreams, data_notes
from megatron_ladder.train.record import RunRecord
from megatron_ladder.train.setup import Trainer, build_trainer


@dataclass
class OpenRun:
    """A run between its steps."""

    trainer: Trainer
    inputs: RunInputs
    streams: TextStreams | None
    checkpoints: CheckpointSaver
    record: RunRecord
    iteration: int
    """Number of steps done when the run was opened."""
    consumed_samples: int
    end: str = "the caller has finished"
    """Why the run ends, for the record."""


@contextmanager
def open_run(words: RunWords) -> Iterator[OpenRun]:
    """Open the run that a command line describes, resumed from its checkpoint, and close it at the end of the block.

    Raises UserError before anything starts; LostPeerError if another rank ended, or a collective timed out.
    """
    place, peers = read_rank_info(), Peers()
    with ExitStack() as whole_run:
        for warning in words.warnings:
            print_rank_0(f"*** {warning} ***", place.rank)
        with reporting_errors(place):
            inputs = read_inputs(words.to_flags(), place, partial(from_rank_0, place, whole_run))
            check_device(place)
            folder = inputs.run.checkpoint.save
            if folder is not None and place.rank == 0:
                whole_run.enter_context(SaveLock(folder))
        record = RunRecord(folder, place.rank)
        record.write_first("launch")
        with recording_failures(record, peers), naming_lost_peers(peers):
            trainer = build_trainer(inputs, place, peers)
            print_rank_0("\n".join([banner(trainer), *data_notes(trainer.run, inputs.sources)]), place.rank)
            streams = None if inputs.stream is None else TextStreams(trainer, inputs, inputs.stream)
            with closing(trainer.engine), CheckpointSaver(trainer, inputs, record, streams) as checkpoints:
                iteration, consumed_samples = checkpoints.resume()
                record.write_first("start", **describe_start(trainer, iteration))
                if folder is not None and place.rank == 0 and not inputs.run.logging.skip_train:
                    _write_config(folder, inputs)
                run = OpenRun(trainer, inputs, streams, checkpoints, record, iteration, consumed_samples)
                yield run
            record.write_first("stop", reason=run.end, code=0)
            stop_process_group()


def _write_config(folder: Path, inputs: RunInputs) -> None:
    note = f"All values of a run on {inputs.run.world_size} processes; --config of this file repeats the run."
    try:
        write_atomically(folder / CONFIG_NAME, config_file_text(inputs.values, note))
    except OSError as error:
        # A failing save is no reason to stop, either.
        print_if_possible(f"*** {folder / CONFIG_NAME}: could not be written: {error.strerror} ***")

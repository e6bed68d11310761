"""What goes into the record of a run, and who writes it."""

import hashlib
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from megatron_ladder import __version__
from megatron_ladder.comm.agreement import Peers
from megatron_ladder.errors import BadNumbersError, LostPeerError, exit_code_of
from megatron_ladder.train.log import say
from megatron_ladder.train.record import EVALUATES, RunRecord
from megatron_ladder.train.setup import Trainer
from megatron_ladder.train.step import StepResult


def describe_start(trainer: Trainer, iteration: int) -> dict[str, Any]:
    """What a start is recorded with; `iteration` is the number of steps done before it."""
    run = trainer.run
    told = json.dumps(run.to_dict(), sort_keys=True)
    return {
        "iteration": iteration,
        "reason": EVALUATES if run.logging.skip_train else "goes on" if iteration else "begins",
        "train_iters": run.training.train_iters,
        "layout": f"{trainer.mesh.describe()}, ZeRO {run.parallel.zero_stage}",
        "configuration": hashlib.sha256(told.encode()).hexdigest()[:16],
        "versions": {"megatron_ladder": __version__, "torch": torch.__version__},
        "host": socket.gethostname(),
        "pid": os.getpid(),
    }


def note_finding(record: RunRecord, rank: int, iteration: int, result: StepResult) -> None:
    """Tells and records what was wrong with a step, if anything was."""
    finding = result.finding
    if finding is None:
        return
    say(finding.text + (": the step was left out" if finding.skipped else ""), rank)
    record.write_first(
        "skip" if finding.skipped else "spike",
        iteration=iteration,
        reason=finding.kind,
        loss=result.loss,
        gradient_norm=result.gradient_norm,
        **finding.details,
    )


@contextmanager
def recording_failures(record: RunRecord, peers: Peers) -> Iterator[None]:
    """Writes down why a run ends that ends with an error."""
    try:
        yield
    except LostPeerError as error:
        record_loss_of(record, peers, error)
        raise
    except Exception as error:
        # Bad numbers are known to all ranks; what else goes wrong may be one rank's alone.
        if record.rank == 0 or not isinstance(error, BadNumbersError):
            reason, code = f"{type(error).__name__}: {error}", int(exit_code_of(error))
            record.write("stop", rank=record.rank, reason=reason, code=code)
        raise


def record_loss_of(record: RunRecord, peers: Peers, error: LostPeerError) -> None:
    """Writes down that ranks are lost, from the lowest rank that is not: all that are left notice it."""
    if record.rank == min({*range(len(peers.hosts))} - {*error.lost}, default=record.rank):
        told = str(error).splitlines()[0]
        record.write("hang", ranks=list(error.lost), where=peers.describe(error.lost), reason=told)

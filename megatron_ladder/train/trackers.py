"""Places that receive the metrics of a run: TensorBoard, Weights & Biases, MLflow.

A tracker is called in a thread, in order, so that a slow service delays no step. Its first failure is reported and ends
its curves, but not the run.
"""

import json
import queue
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from megatron_ladder.config.run import RunConfig
from megatron_ladder.errors import raise_user_errors
from megatron_ladder.flags import flag_name
from megatron_ladder.train.record import RunRecord

_CLOSE_SECONDS = 20.0
"""Time that the end of a run waits for its trackers; launchers kill processes 30 s after a signal."""
_LOGIN_SECONDS = 60
"""Time that wandb waits for an API key to be typed, if there is a terminal."""
_MOST_PARAMETERS, _MOST_CHARACTERS = 100, 500
"""MLflow's limits of a request and of a parameter's value."""


class Tracker(Protocol):
    """A place that receives metrics. A constructor imports packages; the other methods are called in a thread."""

    name: str
    """Its flag and value, as shown in messages and written to the record."""

    def open(self, previous: str | None) -> str | None:
        """Start, or continue the run `previous`, an earlier result; return what identifies the tracker's run."""

    def log_metrics(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Log values by name."""

    def log_samples(self, iteration: int, samples: Sequence[tuple[str, str]]) -> None:
        """Log prompts and their generated continuations."""

    def close(self, failed: bool) -> None:
        """Finish the tracker's run; `failed`: the training ended with an error."""


class _TensorBoard(Tracker):
    """Event files in a directory."""

    def __init__(self, folder: Path, run: RunConfig, iteration: int, hide_later: bool) -> None:
        """`iteration` steps were done before; `hide_later` hides points after them, which an interrupted run wrote."""
        from torch.utils.tensorboard import SummaryWriter

        self.name = f"--tensorboard-dir {folder}"
        self._configuration = f"```json\n{json.dumps(run.to_dict(), indent=2)}\n```"
        self._new_writer: Callable[[], Any] = partial(
            SummaryWriter, str(folder), purge_step=iteration + 1 if hide_later else None
        )

    def open(self, previous: str | None) -> None:
        self._writer = self._new_writer()
        self._writer.add_text("configuration", self._configuration, 0)

    def log_metrics(self, iteration: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, iteration)
        self._writer.flush()

    def log_samples(self, iteration: int, samples: Sequence[tuple[str, str]]) -> None:
        # Markdown shows indented text as it is.
        text = "\n\n---\n\n".join(re.sub("^", "    ", prompt + text, flags=re.MULTILINE) for prompt, text in samples)
        self._writer.add_text("samples", text, iteration)

    def close(self, failed: bool) -> None:
        self._writer.close()


class _WeightsAndBiases(Tracker):
    """A run of Weights & Biases; its own environment variables and settings apply."""

    def __init__(self, run: RunConfig) -> None:
        """Raises wandb's error if there is no API key; contacts no server."""
        import wandb

        self.name = f"--wandb-project {run.logging.wandb_project}"
        self._wandb: Any = wandb
        if wandb.setup().settings.mode in ("online", "shared"):
            wandb.login(verify=False, timeout=_LOGIN_SECONDS)
        self._config = run.to_dict()
        self._folder = run.logging.wandb_save_dir or run.checkpoint.save
        self._names = {"project": run.logging.wandb_project, "name": run.logging.wandb_exp_name}

    def open(self, previous: str | None) -> str:
        self._run = self._wandb.init(
            **self._names,
            dir=self._folder,
            config=self._config,
            id=previous,
            resume="allow",
        )
        # Its own steps must increase, but a resumed run repeats the iterations after its checkpoint.
        self._run.define_metric("iteration", hidden=True)
        self._run.define_metric("*", step_metric="iteration")
        return str(self._run.id)

    def log_metrics(self, iteration: int, metrics: Mapping[str, float]) -> None:
        self._run.log({"iteration": iteration, **metrics})

    def log_samples(self, iteration: int, samples: Sequence[tuple[str, str]]) -> None:
        table = self._wandb.Table(columns=["prompt", "text"], data=[list(sample) for sample in samples])
        self._run.log({"iteration": iteration, "samples": table})

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))
        # Waits until wandb's process has written its files.
        self._wandb.teardown()


class _Mlflow(Tracker):
    """A run of an MLflow experiment, at MLFLOW_TRACKING_URI."""

    def __init__(self, run: RunConfig) -> None:
        """Raises MLflow's errors for an address that it does not support; contacts no server."""
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        self._client: Any = MlflowClient()
        self._metric, self._parameter = Metric, Param
        self._experiment = str(run.logging.mlflow_experiment)
        # The address may contain a password.
        address = re.sub("//[^/]*@", "//", self._client.tracking_uri)
        self.name = f"--mlflow-experiment {self._experiment} at {address}"
        self._config = run.to_dict()

    def open(self, previous: str | None) -> str:
        if previous is not None:
            self._id = previous
            # Parameters of a run cannot change.
            self._client.update_run(self._id, status="RUNNING")
            return self._id
        found = self._client.get_experiment_by_name(self._experiment)
        experiment = self._client.create_experiment(self._experiment) if found is None else found.experiment_id
        self._id = str(self._client.create_run(experiment).info.run_id)
        named = [
            (f"{section}.{name}" if isinstance(values, dict) else section, value)
            for section, values in self._config.items()
            for name, value in (values.items() if isinstance(values, dict) else [("", values)])
        ]
        parameters = [self._parameter(name, str(value)[:_MOST_CHARACTERS]) for name, value in named]
        for first in range(0, len(parameters), _MOST_PARAMETERS):
            self._client.log_batch(self._id, params=parameters[first : first + _MOST_PARAMETERS])
        return self._id

    def log_metrics(self, iteration: int, metrics: Mapping[str, float]) -> None:
        now = round(1000 * time.time())
        # MLflow rejects names with other characters.
        names = {re.sub(r"[^\w\-. :/]", "_", name): value for name, value in metrics.items()}
        points = [self._metric(name, value, now, iteration) for name, value in names.items()]
        self._client.log_batch(self._id, metrics=points)

    def log_samples(self, iteration: int, samples: Sequence[tuple[str, str]]) -> None:
        text = "\n\n---\n\n".join(prompt + text for prompt, text in samples)
        self._client.log_text(self._id, text, f"samples/iteration_{iteration}.txt")

    def close(self, failed: bool) -> None:
        self._client.set_terminated(self._id, "FAILED" if failed else "FINISHED")


_SERVICES: dict[str, tuple[Callable[[RunConfig], Tracker], str]] = {
    "wandb_project": (_WeightsAndBiases, "run `wandb login`, or set WANDB_MODE=offline"),
    "mlflow_experiment": (_Mlflow, "set MLFLOW_TRACKING_URI to the address of a server"),
}
"""Field of the flag -> its tracker, and how to fix an error of its constructor."""


def _services(run: RunConfig) -> list[str]:
    return [field for field in _SERVICES if getattr(run.logging, field) is not None]


def check_trackers(run: RunConfig) -> None:
    """Raise UserError if the package of a service is missing, or the service has no address or key."""
    errors = []
    for field in _services(run):
        flag, (new_tracker, fix) = f"{flag_name(field)} {getattr(run.logging, field)}", _SERVICES[field]
        try:
            new_tracker(run)
        # A folder of the package's name in the current directory is imported as an empty module.
        except (ImportError, AttributeError) as error:
            errors.append(f"{flag}: {error}: pip install 'megatron-ladder[{field.partition('_')[0]}]'")
        except Exception as error:  # Their errors have no common base class.
            errors.append(f"{flag}: {str(error).rstrip('.')}: {fix}")
    raise_user_errors(errors)


def open_trackers(
    run: RunConfig, iteration: int, hide_later: bool, record: RunRecord, warn: Callable[[str], None]
) -> "list[TrackerThread]":
    """Open the trackers of a run after `iteration` steps, each in a thread; `hide_later` hides points of later steps.

    A tracker continues its run of earlier steps of the same record.
    """
    folder = run.logging.tensorboard_dir
    trackers: list[Tracker] = [] if folder is None else [_TensorBoard(folder, run, iteration, hide_later)]
    trackers += [_SERVICES[field][0](run) for field in _services(run)]
    threads = []
    for tracker in trackers:

        def open_and_record(tracker: Tracker = tracker) -> None:
            identity = tracker.open(record.tracked_run(tracker.name))
            if identity is not None:
                record.write("tracker", iteration=iteration, tracker=tracker.name, run=identity)

        threads.append(TrackerThread(tracker, warn))
        threads[-1].call(iteration, open_and_record)
    return threads


def close_trackers(threads: "Sequence[TrackerThread]", iteration: int, failed: bool) -> None:
    """Finish all trackers, and wait for them together; `failed`: the training ended with an error."""
    for thread in threads:
        thread.close(iteration, failed)
    deadline = time.monotonic() + _CLOSE_SECONDS
    for thread in threads:
        thread.wait(deadline)


class TrackerThread:
    """Calls a tracker in order, in a thread; `warn` receives the message of its first failure."""

    def __init__(self, tracker: Tracker, warn: Callable[[str], None]) -> None:
        self._tracker, self._warn = tracker, warn
        self._works, self._last = True, 0
        self._calls: queue.SimpleQueue[tuple[int, Callable[[], object]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=tracker.name, daemon=True)
        self._thread.start()

    def call(self, iteration: int, method: Callable[..., object], *arguments: Any) -> None:
        """Call a method of the tracker after the earlier calls, unless one of them failed."""
        self._last = iteration
        self._calls.put((iteration, partial(method, *arguments)))

    def log_metrics(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Log values by name."""
        self.call(iteration, self._tracker.log_metrics, iteration, metrics)

    def log_samples(self, iteration: int, samples: Sequence[tuple[str, str]]) -> None:
        """Log prompts and their generated continuations."""
        self.call(iteration, self._tracker.log_samples, iteration, samples)

    def close(self, iteration: int, failed: bool) -> None:
        """Finish the tracker's run; `failed`: the training ended with an error."""
        self.call(iteration, self._tracker.close, failed)

    def wait(self, deadline: float) -> None:
        """Return when the calls so far are done, at the latest at a time of `time.monotonic`; then end the thread."""
        self._calls.put(None)
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self._fail(self._last, f"did not finish within {_CLOSE_SECONDS:g} s")

    def _work(self) -> None:
        while (entry := self._calls.get()) is not None:
            iteration, call = entry
            if self._works:
                try:
                    call()
                except Exception as error:  # Services and file systems raise errors without a common base class.
                    self._fail(iteration, f"cannot be written ({error})")

    def _fail(self, iteration: int, problem: str) -> None:
        if self._works:
            self._works = False
            self._warn(f"*** {self._tracker.name}: {problem}: no more curves from iteration {iteration} on ***")

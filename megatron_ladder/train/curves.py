"""TensorBoard's event files, which Weights & Biases may follow. A failure ends the curves, but not the run."""

import json
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron_ladder.config.run import RunConfig
from megatron_ladder.config.sections import LoggingConfig
from megatron_ladder.errors import Problem, UserError
from megatron_ladder.progress import print_if_possible

_FLUSH_SECONDS, _MOST_QUEUED = 10, 1000
"""TensorBoard's thread writes to the disk, so that a slow one delays no step."""
_FINISH_SECONDS = 20.0
"""Time that the end of a run waits for wandb; launchers kill processes 30 s after a signal."""
_LOGIN_SECONDS = 60
"""Time that wandb waits for an API key to be typed, if there is a terminal."""


def check_wandb(config: LoggingConfig) -> None:
    """Raise UserError if --wandb-project is given and wandb is missing, or has no API key; contacts no server."""
    project = config.wandb_project
    if project is None:
        return
    try:
        import wandb

        if wandb.setup().settings.mode in ("online", "shared"):
            wandb.login(verify=False, timeout=_LOGIN_SECONDS)
    # A folder of the package's name in the current directory is imported as an empty module.
    except (ImportError, AttributeError) as error:
        raise UserError(Problem({"wandb_project": project}, "{}: {error}", "pip install wandb", error=error)) from None
    except Exception as error:  # wandb's errors have no common base class, and their texts may hold the key.
        reason = f"{{}}: no usable API key ({type(error).__name__})"
        fix = "run `wandb login`, or set WANDB_MODE=offline"
        raise UserError(Problem({"wandb_project": project}, reason, fix)) from None


class Curves:
    """Writes to --tensorboard-dir on rank 0, if it is given."""

    def __init__(self, run: RunConfig, iteration: int, hide_later: bool, rank: int = 0) -> None:
        """`iteration` steps were done before; `hide_later` hides points after them, which an interrupted run wrote."""
        self._folder = run.logging.tensorboard_dir if rank == 0 else None
        self._writer: Any = None
        self._wandb: Any = None
        if self._folder is not None:
            with self._reporting(iteration):
                self._open(run, self._folder, iteration + 1 if hide_later else None)

    def _open(self, run: RunConfig, folder: Path, purge_step: int | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # TensorBoard raises the error of its thread at the next call, too.
        hook = threading.excepthook
        threading.excepthook = lambda args: None if "tensorboard" in type(args.thread).__module__ else hook(args)
        logging = run.logging
        if logging.wandb_project is not None:
            import wandb

            if logging.wandb_save_dir is not None:
                logging.wandb_save_dir.mkdir(parents=True, exist_ok=True)
            self._wandb = wandb.init(
                project=logging.wandb_project,
                name=logging.wandb_exp_name,
                dir=logging.wandb_save_dir or run.checkpoint.save,
                config=run.to_dict(),
                sync_tensorboard=True,
            )
        self._writer = SummaryWriter(
            str(folder), purge_step=purge_step, max_queue=_MOST_QUEUED, flush_secs=_FLUSH_SECONDS
        )
        self._writer.add_text("configuration", f"```json\n{json.dumps(run.to_dict(), indent=2)}\n```", 0)

    def metrics(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Add a point to each curve."""
        if self._writer is not None:
            with self._reporting(iteration):
                for name, value in metrics.items():
                    self._writer.add_scalar(name, value, iteration)

    def samples(self, iteration: int, samples: Sequence[tuple[str, str]]) -> None:
        """Add prompts and their generated continuations."""
        if self._writer is not None:
            with self._reporting(iteration):
                # Markdown shows indented text as it is.
                texts = (re.sub("^", "    ", prompt + text, flags=re.MULTILINE) for prompt, text in samples)
                self._writer.add_text("samples", "\n\n---\n\n".join(texts), iteration)

    def close(self, iteration: int, failed: bool) -> None:
        """Finish the files; `failed`: the training ended with an error."""
        if self._writer is not None:
            with self._reporting(iteration):
                self._writer.close()
        if self._wandb is not None:
            finish = threading.Thread(target=self._finish_wandb, args=(failed,), daemon=True)
            finish.start()
            finish.join(_FINISH_SECONDS)
            if finish.is_alive():
                text = f"*** wandb did not finish within {_FINISH_SECONDS:g} s; `wandb sync` uploads the rest ***"
                print_if_possible(text)

    def _finish_wandb(self, failed: bool) -> None:
        import wandb

        self._wandb.finish(exit_code=int(failed))
        # Waits until wandb's process has written its files.
        wandb.teardown()

    @contextmanager
    def _reporting(self, iteration: int) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # wandb and file systems raise errors without a common base class.
            self._writer = None
            # The text of wandb's errors may hold a key.
            reason = getattr(error, "strerror", None) or type(error).__name__
            template = f"{{}}: cannot be written ({reason}): no more curves from iteration {iteration} on"
            # Stdout may be on the same full disk.
            print_if_possible(f"*** {Problem({'tensorboard_dir': self._folder}, template)} ***")

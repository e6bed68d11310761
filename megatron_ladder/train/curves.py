"""TensorBoard's files, which a run can do without: one that cannot be written costs the curves and not the run."""

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


class Curves:
    """Writes points until something cannot be written; says so once, and writes no more."""

    def __init__(self, folder: Path | None, iteration: int, configuration: str, goes_on: bool = True) -> None:
        """Opens a file of its own in the folder; without a folder, nothing is ever written.

        Args:
            iteration: steps done before.
            configuration: Markdown, shown beside the curves.
            goes_on: whether steps follow. Points of later steps that are there already are hidden then: they are of
                an attempt that was cut off.
        """
        self._folder = folder
        self._writer: Any = None
        if folder is not None:
            self._try(iteration, lambda: self._open(str(folder), iteration + 1 if goes_on else None, configuration))

    def scalars(self, iteration: int, values: Mapping[str, float]) -> None:
        """A point in each curve, on disk when this returns."""

        def write() -> None:
            for tag, value in values.items():
                self._writer.add_scalar(tag, value, iteration)
            self._writer.flush()

        if self._writer is not None:
            self._try(iteration, write)

    def close(self, iteration: int) -> None:
        """Ends the file; `iteration` is the last step."""
        if self._writer is not None:
            self._try(iteration, self._writer.close)

    def _open(self, folder: str, purge_step: int | None, configuration: str) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(folder, purge_step=purge_step)
        self._writer.add_text("configuration", configuration, 0)

    def _try(self, iteration: int, write: Callable[[], None]) -> None:
        try:
            write()
        except ImportError:
            raise
        except Exception as error:  # Of file systems of many kinds: they have no common ancestor.
            self._writer = None
            told = f"cannot be written ({error}): no more curves from iteration {iteration} on"
            # The disk that is full may have what is printed, too.
            with contextlib.suppress(OSError):
                print(f"*** --tensorboard-dir {self._folder}: {told} ***", flush=True)

"""Work that a thread does beside training, and how its end is heard of."""

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Background(Generic[T]):
    """One call in a thread of its own, which never keeps the process from ending."""

    def __init__(self, work: Callable[[], T], name: str) -> None:
        self._work = work
        self._answer: list[T] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def finished(self) -> bool:
        """Whether it has ended, well or not."""
        return not self._thread.is_alive()

    def wait(self, seconds: float | None = None) -> None:
        """Returns when it has ended, or after so many seconds."""
        self._thread.join(seconds)

    def result(self) -> T:
        """What the call has returned; it must have ended. What it raised is raised here."""
        if self._error is not None:
            raise self._error
        return self._answer[0]

    def _run(self) -> None:
        try:
            self._answer.append(self._work())
        except BaseException as error:
            self._error = error

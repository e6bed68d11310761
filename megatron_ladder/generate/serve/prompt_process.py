"""Encodes prompts in a child process, with limits.

A chat template is a program that comes with the model, and tokenizers hold the interpreter's lock. In a separate
process, neither can delay the server's threads, and the kernel ends the process when it exceeds its limits. The next
prompt starts another one.

The process receives a pickle of the `PromptSetup`, and then answers lists of texts, or of the messages of one
conversation, in MessagePack. It ends with the server; if the server is killed, after the current prompt.
"""

import contextlib
import itertools
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import Future
from functools import cached_property
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from queue import PriorityQueue
from threading import Thread
from typing import Any, NamedTuple

import msgspec

from megatron_ladder.data.chat_template import ChatTemplate, ChatTemplateError, TemplateSource
from megatron_ladder.data.tokenizers import Tokenizer
from megatron_ladder.errors import UserError
from megatron_ladder.generate.prompts import LongPromptError, PromptEncoder, encode_conversation

Ids = tuple[int, ...]


class PromptSetup(NamedTuple):
    """Everything that encoding needs."""

    tokenizer: Tokenizer
    prefix: Ids
    """Tokens before texts, but not before conversations."""
    template: TemplateSource | None
    """None if there is no chat template."""
    most_characters: int
    """Characters that the tokens of the context can have."""
    cpu_seconds: float = 10.0
    """Processor time for the prompts of one request."""
    memory_bytes: int = 1 << 30
    """Memory for prompts, in addition to that of the tokenizer."""


class PromptError(Exception):
    """A prompt cannot be encoded; `code` is OpenAI's. `is_fault`: it is not the client's fault."""

    def __init__(self, message: str, code: str | None = None, is_fault: bool = False) -> None:
        super().__init__(message)
        self.message, self.code, self.is_fault = message, code, is_fault


class _Answer(msgspec.Struct):
    ids: list[Ids] = []
    error: str | None = None
    code: str | None = None


class PromptProcess:
    """The child process, which encodes the shortest waiting prompts first."""

    def __init__(self, setup: PromptSetup) -> None:
        """The process starts with the first prompt."""
        self._setup = setup
        self._child: tuple[subprocess.Popen[bytes], Connection] | None = None
        self._thread: Thread | None = None
        self._numbers = itertools.count()
        self._jobs: PriorityQueue[tuple[int, int, bytes, Future[list[Ids]] | None]] = PriorityQueue()

    def check_template(self) -> None:
        """Start the process and compile the template; raises PromptError if that fails."""
        self.encode([]).result()

    def encode(self, prompts: Sequence[Any]) -> Future[list[Ids]]:
        """Return the ids of texts, or of the messages of one conversation.

        The future raises PromptError, and can be cancelled.
        """
        if self._thread is None:
            self._thread = Thread(target=self._work, name="prompts", daemon=True)
            self._thread.start()
        future: Future[list[Ids]] = Future()
        job = msgspec.msgpack.encode(prompts)
        self._jobs.put((len(job), next(self._numbers), job, future))
        return future

    def close(self) -> None:
        """End the process, without waiting for prompts."""
        if self._thread is not None:
            self._jobs.put((-1, next(self._numbers), b"", None))
            if (child := self._child) is not None:
                child[0].kill()

    def _work(self) -> None:
        while True:
            _, _, job, future = self._jobs.get()
            if future is None:
                self._end()
                return
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(self._exchange(job))
            except Exception as error:
                future.set_exception(error)

    def _exchange(self, job: bytes) -> list[Ids]:
        try:
            if self._child is None:
                self._child = _start()
                self._child[1].send(self._setup)
            self._child[1].send_bytes(job)
            answer = msgspec.msgpack.decode(self._child[1].recv_bytes(), type=_Answer)
        except (OSError, EOFError):
            raise _cause(self._end(), self._setup) from None
        if answer.error is not None:
            raise PromptError(answer.error, answer.code)
        return answer.ids

    def _end(self) -> int | None:
        """Close the pipe, wait for the process, and return its exit code; None if it could not be started."""
        child, self._child = self._child, None
        if child is None:
            return None
        child[1].close()
        return child[0].wait()


def _start() -> tuple["subprocess.Popen[bytes]", Connection]:
    own, other = Pipe()
    with other:
        process = subprocess.Popen(
            # -P: a file in the current directory must not replace a module.
            [sys.executable, "-P", "-c", f"from {__name__} import _run_child; _run_child({other.fileno()})"],
            pass_fds=[other.fileno()],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "TOKENIZERS_PARALLELISM": "false"},
            # The terminal's Ctrl-C is for the server, which may finish its requests.
            start_new_session=True,
        )
    return process, own


def _cause(exit_code: int | None, setup: PromptSetup) -> PromptError:
    """Return the error of a prompt during which the process ended."""
    if exit_code == -signal.SIGPROF:
        return PromptError(f"the prompt takes more than {setup.cpu_seconds:g} s of processor time to encode")
    if exit_code == -signal.SIGABRT:
        return PromptError(f"the prompt takes more than {setup.memory_bytes >> 20} MiB of memory to encode")
    return PromptError(f"the process that encodes prompts ended with code {exit_code}", is_fault=True)


def _run_child(descriptor: int) -> None:
    pipe = Connection(descriptor)
    setup: PromptSetup = pipe.recv()
    encoder = _Encoder(setup)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + setup.memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    with contextlib.suppress(EOFError):
        while True:
            job = msgspec.msgpack.decode(pipe.recv_bytes())
            # The signal ends the process, even within a function of a library.
            signal.setitimer(signal.ITIMER_PROF, setup.cpu_seconds)
            answer = encoder.answer(job)
            signal.setitimer(signal.ITIMER_PROF, 0)
            pipe.send_bytes(msgspec.msgpack.encode(answer))


class _Encoder:
    def __init__(self, setup: PromptSetup) -> None:
        self._setup = setup
        self._texts = PromptEncoder(setup.tokenizer, setup.prefix, chat=False, system=None)

    @cached_property
    def _template(self) -> ChatTemplate:
        assert self._setup.template is not None
        return ChatTemplate(*self._setup.template)

    def answer(self, prompts: list[Any]) -> _Answer:
        tokenizer, most = self._setup.tokenizer, self._setup.most_characters
        try:
            if not prompts:
                assert self._template is not None
                return _Answer()
            if isinstance(prompts[0], str):
                return _Answer([self._texts.encode(text) for text in prompts])
            return _Answer([encode_conversation(prompts, self._template, tokenizer, most)])
        except LongPromptError as error:
            return _Answer(error=str(error), code="context_length_exceeded")
        except ChatTemplateError as error:
            return _Answer(error=f"the chat template rejects these messages: {error}")
        except UserError as error:
            return _Answer(error=str(error))
        except MemoryError:
            return _Answer(error=str(_cause(-signal.SIGABRT, self._setup)))

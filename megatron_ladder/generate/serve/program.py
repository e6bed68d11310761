"""The server from its flags to its end, on every rank."""

import asyncio
import contextlib
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import uvicorn

from megatron_ladder.comm.launch import Place, telling_mistakes
from megatron_ladder.data.chat_template import ChatTemplate, load_chat_template
from megatron_ladder.data.tokenizers import Tokenizer
from megatron_ladder.errors import UserError
from megatron_ladder.generate.engine import GenerationEngine
from megatron_ladder.generate.loading import StoredModel
from megatron_ladder.generate.prompts import PromptWriter
from megatron_ladder.generate.serve.app import build_app
from megatron_ladder.generate.serve.connection import LimitedConnection
from megatron_ladder.generate.serve.options import ServeOptions
from megatron_ladder.generate.serve.plans import PLAN_TIMEOUT, PlanChannel
from megatron_ladder.generate.serve.questions import Rules
from megatron_ladder.generate.serve.scheduler import Event, Scheduler, Ticket
from megatron_ladder.generate.serve.service import Limits, Service
from megatron_ladder.generate.serve.worker import carry_out_plans

MOST_POSITIONS = 4096
"""Of a slot, unless --max-request-tokens says more: the memory for the longest texts of a model may not be there."""
FAREWELL_SECONDS = 2.0
"""Beyond the grace, for the last bytes of the answers."""


@dataclass(frozen=True)
class Preparation:
    """What is known before any process group exists."""

    options: ServeOptions
    """The flags."""
    model_name: str
    """What requests call the model."""
    positions: int
    """Of a slot."""
    tokenizer: Tokenizer
    """Of the model."""
    api_keys: tuple[bytes, ...]
    """Of which a request needs one; none are needed if there are none."""
    listener: socket.socket | None
    """Where clients come; on rank 0."""


def prepare(place: Place, options: ServeOptions, stored: StoredModel, directory: Path) -> Preparation:
    """Reads the keys, and takes the port on rank 0.

    Args:
        directory: as the user gave it.

    Raises:
        UserError: with a line for each thing that is wrong.
    """
    mistakes = []
    most = stored.config.max_position_embeddings
    positions = options.max_request_tokens or min(most, MOST_POSITIONS)
    if positions > most:
        mistakes.append(f"--max-request-tokens {positions}: the model has {most} positions: give at most so many")
    if stored.tokenizer is None:
        mistakes.append(
            "--serve needs a tokenizer, and the model's directory holds none: give --tokenizer-type and "
            "--tokenizer-model"
        )
    keys: tuple[bytes, ...] = ()
    if options.api_key_file is not None:
        try:
            keys = read_keys(options.api_key_file)
        except UserError as error:
            mistakes += error.mistakes
    if mistakes or stored.tokenizer is None:
        raise UserError(*mistakes)
    listener = None
    if place.rank == 0:
        with telling_mistakes(place):
            listener = listen(options.host, options.port)
    name = options.model_name or directory.resolve().name
    return Preparation(options, name, positions, stored.tokenizer, keys, listener)


def read_keys(path: Path) -> tuple[bytes, ...]:
    """The keys of a file, a line each; raises UserError if there is none, or one that no header can carry."""
    try:
        lines = [line.strip() for line in path.read_bytes().splitlines()]
    except OSError as error:
        raise UserError(f"--api-key-file {path}: cannot be read: {error.strerror}") from None
    keys = tuple(line for line in lines if line)
    if not keys:
        raise UserError(f"--api-key-file {path}: holds no key: write one a line")
    strange = [number for number, line in enumerate(lines, start=1) if any(not 33 <= byte <= 126 for byte in line)]
    if strange:
        raise UserError(f"--api-key-file {path}:{strange[0]}: a key is printable ASCII without blanks")
    return keys


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens there; raises UserError."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        return socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        raise UserError(
            f"--host {host} --port {port}: cannot listen there: {error.strerror}: give another"
        ) from None


def serve(engine: GenerationEngine, stored: StoredModel, prepared: Preparation) -> None:
    """Answers requests until a signal says stop; every rank must call it.

    Raises:
        BadNumbersError: the model's logits are not finite.
    """
    options = prepared.options
    batch = engine.new_batch(options.max_concurrent, prepared.positions)
    channel = PlanChannel(engine.group.over_gloo(PLAN_TIMEOUT))
    if prepared.listener is None:
        # Launchers send signals to all ranks. This one ends when rank 0 says so, or is gone.
        with handling_signals(signal.SIG_IGN):
            carry_out_plans(batch, channel)
        return
    server = ServerThread(prepared, stored, prepared.listener)

    def stop(number: int, frame: FrameType | None) -> None:
        server.stop()

    with handling_signals(stop):
        server.start()
        print(_greeting(prepared, server.service.rules), file=sys.stderr, flush=True)
        try:
            carry_out_plans(batch, channel, server.scheduler.next_plan, server.scheduler.tell)
        except BaseException:
            server.scheduler.end_all("the server has failed")
            server.stop()
            raise
        finally:
            server.join(FAREWELL_SECONDS)


class ServerThread(threading.Thread):
    """Where HTTP is spoken, beside the engine's thread."""

    def __init__(self, prepared: Preparation, stored: StoredModel, listener: socket.socket) -> None:
        super().__init__(name="server", daemon=True)
        options = prepared.options
        self.scheduler = Scheduler(options.max_concurrent, self._deliver, options.grace_seconds)
        limits = Limits(options.max_concurrent + options.max_queue, options.max_body_bytes)
        rules = _rules(prepared, stored, limits)
        self.service = Service(self.scheduler, rules, prepared.tokenizer, limits, prepared.api_keys)
        self._listener = listener
        self._loop = asyncio.new_event_loop()
        self._server = uvicorn.Server(
            uvicorn.Config(
                build_app(self.service), loop="asyncio", http=LimitedConnection, ws="none", lifespan="off",
                log_config=None, log_level="error", access_log=False, server_header=False, proxy_headers=False,
                timeout_keep_alive=30,
                timeout_graceful_shutdown=int(options.grace_seconds + FAREWELL_SECONDS),
            )
        )  # fmt: skip

    def run(self) -> None:
        """The whole life of the thread."""
        error: BaseException | None = None
        try:
            with contextlib.closing(self._loop):
                self._loop.run_until_complete(self._server.serve([self._listener]))
        except BaseException as raised:
            error = raised
        self.scheduler.close(error)

    def stop(self) -> None:
        """From any thread or signal handler: no more requests, and the end after those that there are."""
        self.service.refusing = True
        self._server.should_exit = True
        self.scheduler.stop()

    def _deliver(self, events: Sequence[tuple[Ticket, Event]]) -> None:
        # A loop that is closed has nobody left to tell.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(_distribute, events)


@contextlib.contextmanager
def handling_signals(handler: Callable[[int, FrameType | None], None] | signal.Handlers) -> Iterator[None]:
    """The signals that end a program, otherwise handled for a while.

    One that is ignored stays so: whoever started this process answers Ctrl-C for it, and sends SIGTERM instead.
    """
    heeded = [number for number in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, handler) for number in heeded}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


def _distribute(events: Sequence[tuple[Ticket, Event]]) -> None:
    for ticket, event in events:
        ticket.on_event(event)


def _rules(prepared: Preparation, stored: StoredModel, limits: Limits) -> Rules:
    tokenizer = prepared.tokenizer
    return Rules(
        model_name=prepared.model_name,
        encode=PromptWriter(tokenizer, stored.prefix, chat=False, system=None).ids,
        encode_chat=lambda text: tuple(tokenizer.encode(text)),
        template=_template(tokenizer),
        vocab_size=stored.config.vocab_size,
        positions=prepared.positions,
        most_samples=limits.outstanding,
        eos_ids=stored.eos_ids,
    )


def _template(tokenizer: Tokenizer) -> ChatTemplate | None:
    if not tokenizer.files:
        return None
    try:
        return load_chat_template(tokenizer.files[0], None)
    except UserError as error:
        print(f"warning: /v1/chat/completions is refused: {error}", file=sys.stderr)
        return None


def _greeting(prepared: Preparation, rules: Rules) -> str:
    options = prepared.options
    assert prepared.listener is not None
    host, port = prepared.listener.getsockname()[:2]
    place = f"[{host}]" if ":" in host else host
    lines = [
        f"serving {rules.model_name} at http://{place}:{port}/v1: {options.max_concurrent} samples side by side, "
        f"{rules.positions} tokens each"
    ]
    if not options.is_local and not prepared.api_keys:
        lines.append("warning: other machines can reach this server, and it asks for no key: give --api-key-file")
    return "\n".join(lines)

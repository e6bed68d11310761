"""The server's life on every rank: check the flags, listen, serve until a signal, shut down."""

import asyncio
import contextlib
import ipaddress
import resource
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType

import uvicorn

from megatron_ladder.comm.launch import RankInfo, reporting_errors
from megatron_ladder.data.chat_template import read_chat_template
from megatron_ladder.errors import ErrorCollector, UserError
from megatron_ladder.generate.engine import GenerationEngine
from megatron_ladder.generate.loading import StoredModel
from megatron_ladder.generate.options import ServeOptions
from megatron_ladder.generate.serve.app import ServerSetup, Service, build_app
from megatron_ladder.generate.serve.connection import LimitedConnection
from megatron_ladder.generate.serve.prompt_process import PromptError, PromptSetup
from megatron_ladder.generate.serve.protocol import ServedModel
from megatron_ladder.generate.serve.scheduler import PLAN_TIMEOUT, Event, Scheduler, Ticket, run_plans

_DEFAULT_POSITIONS = 4096
"""Largest default of --max-request-tokens, because every slot needs memory for so many tokens."""
_OTHER_FILES = 128
"""File descriptors for purposes other than connections."""
_FLUSH_SECONDS = 2.0
"""Time after the grace period to send the last bytes."""


def prepare_server(rank_info: RankInfo, options: ServeOptions, stored: StoredModel, directory: Path) -> ServerSetup:
    """Check the flags, read the keys, and listen on rank 0; raises UserError. The model is named after `directory`."""
    errors = ErrorCollector()
    available = stored.config.max_position_embeddings
    positions = options.max_request_tokens or min(available, _DEFAULT_POSITIONS)
    if positions > available:
        errors.add(f"--max-request-tokens {positions}: the model has only {available} positions; reduce the value")
    if stored.tokenizer is None:
        errors.add(
            "--serve needs a tokenizer, and the model's directory has none; use --tokenizer-type and --tokenizer-model"
        )
    keys: tuple[bytes, ...] = ()
    if options.api_key_file is not None:
        with errors.collect():
            keys = _read_keys(options.api_key_file)
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if options.max_connections + _OTHER_FILES > files:
        errors.add(
            f"--max-connections {options.max_connections}: this process can open only {files} files, of which "
            f"{_OTHER_FILES} are for other purposes; reduce the value or run: ulimit -n "
            f"{options.max_connections + _OTHER_FILES}"
        )
    errors.raise_if_any()
    tokenizer = stored.tokenizer
    assert tokenizer is not None
    listener = template = None
    most_characters = 0
    if rank_info.rank == 0:
        with reporting_errors(rank_info):
            listener = _listen(options.host, options.port)
        fix = "copy one to chat_template.jinja there"
        try:
            template = read_chat_template(tokenizer.files[0], None, "", fix) if tokenizer.files else None
        except UserError as error:
            _warn_about_chats(error)
        most_characters = positions * max(len(tokenizer.spelling(number)) for number in range(tokenizer.vocab_size))
    model = ServedModel(
        name=options.model_name or directory.resolve().name,
        tokenizer=tokenizer,
        has_template=template is not None,
        vocab_size=stored.config.vocab_size,
        positions=positions,
        most_characters=most_characters,
        max_samples=options.max_concurrent + options.max_queue,
        eos_ids=stored.eos_ids,
    )
    prompts = PromptSetup(tokenizer, stored.prefix, template, most_characters)
    return ServerSetup(options, model, prompts, keys, listener)


def _warn_about_chats(error: Exception) -> None:
    print(f"warning: /v1/chat/completions is not available: {error}", file=sys.stderr, flush=True)


def _read_keys(path: Path) -> tuple[bytes, ...]:
    try:
        lines = [line.strip() for line in path.read_bytes().splitlines()]
    except OSError as error:
        raise UserError(f"--api-key-file {path}: cannot be read: {error.strerror}") from None
    if not any(lines):
        raise UserError(f"--api-key-file {path}: the file contains no key; write one key per line")
    invalid = [number for number, line in enumerate(lines, start=1) if any(not 33 <= byte <= 126 for byte in line)]
    if invalid:
        raise UserError(f"--api-key-file {path}:{invalid[0]}: a key must be printable ASCII without spaces")
    return tuple(filter(None, lines))


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        return socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        raise UserError(f"--host {host} --port {port}: cannot listen: {error.strerror}; use another address") from None


def serve(engine: GenerationEngine, setup: ServerSetup) -> None:
    """Serve until a signal stops rank 0; every rank must call it. Raises BadNumbersError like `run_plans`."""
    options, listener = setup.options, setup.listener
    batch = engine.new_batch(options.max_concurrent, setup.model.positions)
    group = engine.group.over_gloo(PLAN_TIMEOUT)
    if listener is None:
        # Launchers send signals to all ranks. The other ranks stop at rank 0's last plan, or when rank 0 is gone.
        with _handled_signals(signal.SIG_IGN):
            run_plans(batch, group)
        return
    server = _ServerThread(setup, listener)
    host, port = listener.getsockname()[:2]
    address = f"[{host}]" if ":" in host else host
    with _handled_signals(lambda number, frame: server.stop()):
        server.start()
        if setup.model.has_template:
            try:
                server.service.prompts.check_template()
            except PromptError as error:
                _warn_about_chats(error)
        print(
            f"serving {setup.model.name} at http://{address}:{port}/v1: {options.max_concurrent} samples at a time, "
            f"{setup.model.positions} tokens each",
            file=sys.stderr,
            flush=True,
        )
        if not ipaddress.ip_address(host).is_loopback and not setup.api_keys:
            warning = "other machines can reach this server, and it requires no key; use --api-key-file"
            print(f"warning: {warning}", file=sys.stderr, flush=True)
        try:
            run_plans(batch, group, server.scheduler.next_plan, server.scheduler.deliver)
        except BaseException:
            server.scheduler.abort_all("the server has failed")
            server.stop()
            raise
        finally:
            server.join(_FLUSH_SECONDS)


class _ServerThread(threading.Thread):
    def __init__(self, setup: ServerSetup, listener: socket.socket) -> None:
        super().__init__(name="server", daemon=True)
        options = setup.options
        self.scheduler = Scheduler(options.max_concurrent, self._deliver, options.grace_seconds)
        self.service = Service(self.scheduler, setup)
        self._listener = listener
        self._loop = asyncio.new_event_loop()
        connection = type("_Connection", (LimitedConnection,), {"most_connections": options.max_connections})
        self._server = uvicorn.Server(
            uvicorn.Config(
                build_app(self.service),
                loop="asyncio",
                http=connection,
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="error",
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=30,
                timeout_graceful_shutdown=int(options.grace_seconds + _FLUSH_SECONDS),
            )
        )

    def run(self) -> None:
        """Serve until `stop`; then close the scheduler, with the error if there was one."""
        error: BaseException | None = None
        try:
            with contextlib.closing(self._loop):
                self._loop.run_until_complete(self._server.serve([self._listener]))
        except BaseException as raised:
            error = raised
        self.service.prompts.close()
        self.scheduler.close(error)

    def stop(self) -> None:
        """Reject new requests, and end after the current ones; from any thread or signal handler."""
        self.service.stopping = True
        self._server.should_exit = True
        self.scheduler.stop()

    def _deliver(self, events: Sequence[tuple[Ticket, Event]]) -> None:
        def dispatch() -> None:
            for ticket, event in events:
                ticket.on_event(event)

        # A closed loop has no clients left.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(dispatch)


@contextlib.contextmanager
def _handled_signals(handler: Callable[[int, FrameType | None], None] | signal.Handlers) -> Iterator[None]:
    """Handle SIGINT and SIGTERM inside the block, unless ignored: the parent then handles Ctrl-C and sends SIGTERM."""
    handled = [number for number in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, handler) for number in handled}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)

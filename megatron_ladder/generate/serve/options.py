"""The flags of the server. No torch here: a process that only starts the ranks needs none."""

import ipaddress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ServeOptions:
    """Server. Compatible with OpenAI's completions and chat completions; needs the extra [serve]."""

    serve: bool = False
    """Answer requests over HTTP until SIGTERM or Ctrl-C."""
    host: str = "127.0.0.1"
    """Address to listen on; from this machine alone if not given."""
    port: int = 8000
    """Port to listen on; 0 takes a free one. The address is told on stderr."""
    api_key_file: Path | None = None
    """A file with a key a line: a request must bring one of them as its bearer token."""
    model_name: str | None = None
    """What requests call the model; the name of its directory if not given."""
    max_concurrent: int = 8
    """Samples that are generated side by side: the slots of the key-value cache."""
    max_queue: int = 64
    """Samples that wait for a slot at most; a request beyond them is answered with 429."""
    max_request_tokens: int | None = None
    """Tokens of a prompt and its continuation together at most, for which every slot has memory. As many as the model
    has positions if not given, but no more than 4096."""
    max_body_bytes: int = 1 << 20
    """Size of a request's body at most."""
    grace_seconds: float = 10.0
    """How long requests may go on once a stop was asked for."""

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach the server."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"


def serve_mistakes(options: ServeOptions) -> list[str]:
    """One line for each value that cannot be."""
    mistakes = []
    if not options.serve:
        if options != ServeOptions():
            mistakes.append("flags of the server are given without --serve: give it, or leave them out")
        return mistakes
    if not 0 <= options.port <= 65535:
        mistakes.append(f"--port {options.port}: expected 0 to 65535")
    if options.max_concurrent < 1:
        mistakes.append(f"--max-concurrent {options.max_concurrent}: expected 1 or more")
    if options.max_queue < 0:
        mistakes.append(f"--max-queue {options.max_queue}: expected 0 or more")
    if options.max_request_tokens is not None and options.max_request_tokens < 2:
        mistakes.append(f"--max-request-tokens {options.max_request_tokens}: expected 2 or more")
    if options.max_body_bytes < 1:
        mistakes.append(f"--max-body-bytes {options.max_body_bytes}: expected 1 or more")
    if not 0 <= options.grace_seconds < float("inf"):
        mistakes.append(f"--grace-seconds {options.grace_seconds}: expected 0 or more")
    return mistakes

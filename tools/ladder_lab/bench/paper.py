"""The speeds of inference that the paper publishes (arXiv 2501.06589, abstract, tables and ICML 2025 poster).

They were measured on H100 GPUs, 8 of a host with NVLink, and for 405B on two hosts, with 1,024 prompt tokens and 512
new ones; without P2P, NCCL did not use NVLink. Figures that were not published are missing here.
"""

from dataclasses import dataclass
from typing import Literal

PROMPT, GENERATE = 1024, 512
RANKS, RANKS_OF_TWO_HOSTS = 8, 16
Peers = Literal["on", "off"]
"""Whether GPUs access each other's memory."""

_STANDARD_70B: dict[Peers, dict[int, float]] = {
    "on": {1: 77.39, 4: 258.56, 16: 843.15, 64: 1940.99},
    "off": {1: 51.66, 4: 173.62, 16: 546.68, 64: 1454.42},
}
"""Tokens per second of llama-70b, by batch size."""
_LADDER_70B: dict[Peers, dict[int, float]] = {
    "on": {1: 1.308, 4: 1.282, 16: 1.190, 64: 1.155},
    "off": {1: 1.599, 4: 1.566, 16: 1.351, 64: 1.282},
}
"""Speed-up of ladder for llama-70b, by batch size."""
_LADDER_AT_BATCH_4: dict[Peers, dict[str, float]] = {
    "on": {
        "paper-1.2b": 1.56,
        "paper-3.5b-tp8": 1.57,
        "llama-8b": 1.46,
        "llama-34b": 1.44,
        "bloom-176b": 1.35,
        "llama-405b": 1.31,
    },
    "off": {
        "paper-1.2b": 1.39,
        "paper-3.5b-tp8": 1.50,
        "llama-8b": 1.40,
        "llama-34b": 1.47,
        "bloom-176b": 1.54,
        "llama-405b": 1.57,
    },
}
"""Speed-up of ladder at batch 4, by size. The authors' logs name the shape of their 1B: it is that of paper-1.2b."""
_EQUAL_SPEED: dict[tuple[str, str], float] = {
    ("paper-1.2b", "standard"): 1008.29,
    ("paper-1.5b", "ladder"): 1277.66,
    ("paper-3.5b-tp8", "standard"): 949.6,
    ("paper-4.5b-tp8", "ladder"): 1217.71,
}
"""Tokens per second. The setting is not stated; the authors' log of the first has 973.81 at batch 4 with P2P."""


@dataclass(frozen=True)
class PublishedSpeed:
    """The paper's figures for one wiring; None where there is none."""

    tokens_per_second: float | None = None
    speed_up: float | None = None
    """Over standard."""


def published_speed(
    size: str, wiring: str, peers: Peers | None, ranks: int, batch: int, prompt: int, generate: int
) -> PublishedSpeed:
    """Return the paper's figures for a setting; `peers` is None for an interconnect that it does not have."""
    asked = (ranks, prompt, generate)
    if peers is None or asked != (RANKS_OF_TWO_HOSTS if size == "llama-405b" else RANKS, PROMPT, GENERATE):
        return PublishedSpeed()
    if size == "llama-70b":
        speed_up = _LADDER_70B[peers].get(batch) if wiring == "ladder" else None
        return PublishedSpeed(_STANDARD_70B[peers].get(batch) if wiring == "standard" else None, speed_up)
    at_batch_4 = batch == 4 and wiring == "ladder"
    equal_speed = _EQUAL_SPEED.get((size, wiring)) if batch == 4 and peers == "on" else None
    return PublishedSpeed(equal_speed, _LADDER_AT_BATCH_4[peers].get(size) if at_batch_4 else None)

"""Made-up results of a benchmark."""

from dataclasses import replace
from typing import Any

from ladder_lab.bench.results import RequestRow

_ROW = RequestRow(
    size="llama-70b",
    wiring="standard",
    interconnect="nccl",
    alpha="own",
    decode_reduce_seconds=1e-5,
    prefill_reduce_seconds=1e-3,
    ranks=8,
    batch=1,
    prompt=16,
    generate=8,
    tokens_per_second=100.0,
    first_token_seconds=0.02,
    decode_step_seconds=0.004,
    speed_up=1.0,
    spread=0.0,
    predicted=1.0,
    predicted_range=(1.0, 1.0),
    published_tokens_per_second=None,
    published_speed_up=None,
    verdict="sound",
)


def request_row(wiring: str, speed_up: float, **changes: Any) -> RequestRow:
    """Return a row with some values changed."""
    return replace(_ROW, wiring=wiring, speed_up=speed_up, **changes)

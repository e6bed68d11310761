"""The benchmark's table of requests."""

from ladder_lab.bench.results import requests_table
from tests.unit.ladder_lab.bench.made_up import request_row


def test_requests_next_to_the_paper() -> None:
    rows = [
        request_row("standard", 1.0, published_tokens_per_second=77.39),
        request_row("ladder", 1.25, spread=0.04, predicted_range=(1.2, 1.4), published_speed_up=1.308),
        request_row("no-comm", 1.5, verdict="too noisy to judge"),
    ]
    _, _, standard, ladder, no_comm = requests_table(rows).splitlines()
    assert standard == "| standard | 100.0 | 20.0 | 4.00 | 1.000 | 0.000 | 1.00 (1.00 to 1.00) | 77.4 tokens/s |  |"
    assert ladder == "| ladder | 100.0 | 20.0 | 4.00 | 1.250 | 0.040 | 1.00 (1.20 to 1.40) | 1.31 |  |"
    assert no_comm.endswith("|  | too noisy to judge |")

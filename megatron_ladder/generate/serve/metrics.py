"""Counts of the server in Prometheus's text format."""

from collections import Counter
from collections.abc import Mapping

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "megatron_ladder_"


class Metrics:
    """Kept by the server's thread alone."""

    def __init__(self) -> None:
        self.responses: Counter[tuple[str, int]] = Counter()
        """By path and status."""
        self.prompt_tokens = 0
        self.generated_tokens = 0
        self.cancelled_samples = 0
        self.first_token_seconds = 0.0
        """Sum over samples, from their arrival."""
        self.first_tokens = 0

    def text(self, gauges: Mapping[str, float]) -> str:
        """All of them, and the values of the moment by name."""
        lines = [f"# TYPE {PREFIX}responses_total counter"]
        for (path, status), count in sorted(self.responses.items()):
            lines.append(f'{PREFIX}responses_total{{path="{path}",status="{status}"}} {count}')
        counters = ("prompt_tokens", "generated_tokens", "cancelled_samples")
        for name in counters:
            lines += [f"# TYPE {PREFIX}{name}_total counter", f"{PREFIX}{name}_total {getattr(self, name)}"]
        summary = f"{PREFIX}time_to_first_token_seconds"
        lines += [
            f"# TYPE {summary} summary", f"{summary}_sum {self.first_token_seconds:.6f}",
            f"{summary}_count {self.first_tokens}",
        ]  # fmt: skip
        for name, value in gauges.items():
            lines += [f"# TYPE {PREFIX}{name} gauge", f"{PREFIX}{name} {value:g}"]
        return "\n".join(lines) + "\n"

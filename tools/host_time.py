"""Counts what the host does for each sub-block: kernels, views, collectives and time; on a CPU, for tiny tensors."""

import functools
import re
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

sys.path.append(str(Path(__file__).resolve().parents[1]))

from ladder_lab.bench.sizes import find_size  # noqa: E402
from ladder_lab.output import markdown_table  # noqa: E402
from ladder_lab.wirings import NAMED_WIRINGS  # noqa: E402
from megatron_ladder.command_line import parse_config  # noqa: E402
from megatron_ladder.errors import run_program  # noqa: E402
from megatron_ladder.flags import flag  # noqa: E402

if TYPE_CHECKING:
    from torch import Tensor

REST = "between sub-blocks"
LAYERS = (2, 6)
KINDS = ("kernels", "views", "collectives", "host")
SHAPE = find_size("2x64x128x8x8x1024")
"""Operators of tensors that are so small take the time of their launch."""


@dataclass(frozen=True)
class HostTimeOptions:
    """Steps of one of several tensor-parallel ranks, whose collectives do nothing."""

    case: Literal["decode", "train"] = "decode"
    """Decode a token, or run a micro-batch forward and backward."""
    wiring: str = flag("ladder", choices=tuple(NAMED_WIRINGS))
    """Wiring."""
    tp: int = flag(8, minimum=1)
    """Tensor-parallel ranks."""
    rounds: int = flag(50, minimum=1)
    """Timed steps, of which the fastest counts."""


class Spans:
    """Attributes what happens to the sub-block whose span is open; spans are not nested."""

    def __init__(self) -> None:
        self.current = REST
        self.nanoseconds: dict[str, int] = defaultdict(int)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """See `megatron_ladder.comm.spans.Span`; a norm belongs to its sub-block."""
        self.current = re.sub(r"^layers\.\d+\.| norm(?= )", "", name)
        began = time.thread_time_ns()
        yield
        self.nanoseconds[self.current] += time.thread_time_ns() - began
        self.current = REST


def step_of(options: HostTimeOptions, layers: int, spans: Spans) -> Callable[[], object]:
    """Return a function that takes a step."""
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from megatron_ladder.comm.mesh import ProcessMesh
    from megatron_ladder.generate.engine import GenerationEngine
    from megatron_ladder.generate.requests import GenerationRequest
    from megatron_ladder.generate.sampling import SamplingParameters
    from megatron_ladder.model.language_model import LanguageModel
    from megatron_ladder.model.operations import Operations, with_norm
    from megatron_ladder.model.stack import StackOptions

    class FusedNorm(torch.autograd.Function):
        """As many operators as torch's norm has on CUDA, with other numbers."""

        @staticmethod
        def forward(ctx: Any, x: "Tensor", weight: "Tensor") -> "Tensor":
            ctx.save_for_backward(x, weight)
            return x * weight

        @staticmethod
        def backward(ctx: Any, gradient: "Tensor") -> tuple["Tensor", "Tensor"]:
            x, weight = ctx.saved_tensors
            return gradient * weight, x.sum((0, 1))

    if not dist.is_initialized():
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=options.tp)
    mesh = ProcessMesh.build(options.tp) if options.tp > 1 else ProcessMesh.single()
    config = NAMED_WIRINGS[options.wiring].of(replace(SHAPE, num_layers=layers), options.tp)
    operations = Operations()
    if options.case == "train":
        operations = with_norm(lambda x, weight, epsilon: FusedNorm.apply(x, weight))
    model = LanguageModel(config, mesh, StackOptions(operations=operations, span=spans), seed=1)
    ids = torch.randint(0, config.vocab_size, (1, 9), generator=torch.Generator().manual_seed(0))
    if options.case == "train":
        parameters = [*model.parameters()]

        def train() -> None:
            for parameter in parameters:
                parameter.grad = None
            model(ids[:, :-1], ids[:, 1:]).backward()

        return train
    request = GenerationRequest(tuple(ids[0].tolist()), options.rounds + 20, SamplingParameters(top_k=40, top_p=0.9))
    decode = functools.partial(next, GenerationEngine(model, mesh, None).stream([request]))
    # The prompt gives the first token.
    decode()
    return decode


def measure(steps: Sequence[Callable[[], object]], spans: Spans, rounds: int) -> list[dict[str, Counter[str]]]:
    """Return for each step the counts of each span, and the fastest time of all rounds as `host`."""
    from torch.utils._python_dispatch import TorchDispatchMode

    counts: list[dict[str, Counter[str]]] = []

    class Operators(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kind = "views" if func.is_view else "kernels"
            if func.namespace == "c10d":
                kind = "collectives"
            counts[-1][spans.current][kind] += 1
            return func(*args, **(kwargs or {}))

    for step in steps:
        # Warm-up.
        step()
        step()
        counts.append(defaultdict(Counter))
        with Operators():
            step()
    for _ in range(rounds):
        for step, numbers in zip(steps, counts, strict=True):
            spans.nanoseconds.clear()
            # The time of this thread, in which other processes do not count.
            began = time.thread_time_ns()
            step()
            spans.nanoseconds[REST] = time.thread_time_ns() - began - sum(spans.nanoseconds.values())
            for name, taken in spans.nanoseconds.items():
                numbers[name]["host"] = min(taken, numbers[name]["host"] or taken)
    return counts


def main(argv: Sequence[str]) -> None:
    """Count, time, and print a table of one layer, and of what a step does once."""
    options = parse_options(argv)
    import torch

    torch.set_num_threads(1)
    spans = Spans()
    few, many = measure([step_of(options, layers, spans) for layers in LAYERS], spans, options.rounds)
    rows = {}
    for name, numbers in sorted(few.items()):
        rows[name] = {kind: (many[name][kind] - numbers[kind]) / (LAYERS[1] - LAYERS[0]) for kind in KINDS}
    once = {kind: few[REST][kind] - LAYERS[0] * rows[REST][kind] for kind in KINDS}
    rows["one layer"] = {kind: sum(row[kind] for row in rows.values()) for kind in KINDS}
    rows["once per step"] = once
    cells = []
    for name, row in rows.items():
        shown = {kind: f"{row[kind]:.0f}" for kind in KINDS[:-1]}
        cells.append({"": name, **shown, "host, us": f"{row['host'] / 1000:.0f}"})
    print(f"{options.case}, {options.wiring}, {options.tp} tensor-parallel ranks\n\n{markdown_table(cells)}")


parse_options = functools.partial(parse_config, HostTimeOptions, program="host_time.py", description=__doc__)

if __name__ == "__main__":
    run_program(main)

"""Draws the pictures of the README and of docs/ from the schedules of the step-time model.

    python docs/pictures/draw.py

writes the SVG files next to this program. All times are computed: each row is a pass of
`tools/ladder_lab/cost/links.py`, which walks the sub-blocks by the rule of `model/sub_block.py`, with a clock that
records events. A test compares the files with the output of this program, byte for byte.

Times are in units of c, the forward computation of a sub-block; attention and MLP are assumed to cost the same.
"""

import itertools
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path += [str(REPOSITORY), str(REPOSITORY / "tools")]

from ladder_lab.cost.divided_experts import Schedule, backward_events, forward_events, play  # noqa: E402
from ladder_lab.cost.links import (  # noqa: E402
    SimulatedClock,
    SimulatedCollective,
    SubBlockTime,
    WireModel,
    backward_seconds,
    forward_seconds,
)
from megatron_ladder.blueprint.expert_parallel import divide_experts  # noqa: E402
from megatron_ladder.blueprint.model import ModelConfig, resolve_model  # noqa: E402
from megatron_ladder.blueprint.model_flags import ModelFlags  # noqa: E402
from megatron_ladder.blueprint.wiring import SubBlockKind  # noqa: E402

INK, MUTED, GRID, PAPER = "#1f2933", "#6b7785", "#e3e7ec", "#ffffff"
FILLS = {
    "attention": "#4c78a8",
    "mlp": "#54a07b",
    "attention_mlp": "#4a8c93",
    "shared_expert": "#8fbf6a",
    "wgrad": "#b9cfc4",
    "reduce": "#e8963c",
    "wait": "url(#waiting)",
}
LABELS = {
    SubBlockKind.MIXER: "A",
    SubBlockKind.MLP: "M",
    SubBlockKind.MIXER_MLP: "A+M",
    SubBlockKind.EXPERTS: "S+R",
    SubBlockKind.SHARED_EXPERT: "S",
    SubBlockKind.ROUTED_EXPERTS: "R",
}
WIDTHS = {
    SubBlockKind.MIXER_MLP: 2.0,
    SubBlockKind.EXPERTS: 1.5,
    SubBlockKind.SHARED_EXPERT: 0.5,
}
"""Computation of a sub-block in c, if it is not 1."""
ALIKE = {"experts": "mlp", "routed_experts": "mlp"}
"""Kinds that are drawn as another."""
WIDTH = 960
LEFT, RIGHT = 250, 880
"""Ends of the time axis."""
LANE, GAP = 26, 5
FINE = 1e-9
"""Shorter times are rounding errors."""
UNIT = "c: the time that one sub-block computes"
OUTPUT = {SubBlockKind.MIXER: 0.25, SubBlockKind.SHARED_EXPERT: 0.25}
"""Time in c that the output projection of a sub-block takes; other sub-blocks may run just before it."""
DGRAD, WGRAD = 1.1, 0.9
"""Computation of the gradients of a sub-block's input and weights, over its forward computation."""


@dataclass(frozen=True)
class Bar:
    """An activity from `start` to `end`."""

    start: float
    end: float
    fill: str
    label: str = ""


class RecordingClock(SimulatedClock):
    """Records the (start, end) of computations, and of collectives on the wire."""

    def __init__(self, wire: WireModel) -> None:
        super().__init__(wire)
        self.computed: list[tuple[float, float]] = []
        self.carried: dict[SimulatedCollective, tuple[float, float]] = {}

    def compute(self, seconds: float) -> None:
        start = self.now
        super().compute(seconds)
        if seconds > 0:
            self.computed.append((start, self.now))

    def advance(self, moving: Sequence[SimulatedCollective], seconds: float) -> None:
        start = self.now
        super().advance(moving, seconds)
        for each in moving:
            self.carried[each] = (self.carried.get(each, (start, start))[0], self.now)


@dataclass(frozen=True)
class Row:
    """One pass of one wiring."""

    title: str
    note: str
    compute: list[Bar]
    wire: list[Bar]
    end: float
    lanes: int = field(init=False)
    """Most collectives on the wire at the same time."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "lanes", 1 + max((lane for lane, _ in stacked(self.wire)), default=0))


def model(residual_mode: str, layers: int, late: str | None = None, staleness: int = 1, **more: Any) -> ModelConfig:
    """Return a model of a wiring; its sizes do not matter."""
    given = {"residual_mode": residual_mode, "num_layers": layers, "ladder_layers": late} | more
    config = resolve_model(ModelFlags(residual_staleness=staleness, **given), 256, 256, 1)
    return config


def named_sub_blocks(config: ModelConfig) -> Iterator[tuple[str, str, float, tuple[int, ...]]]:
    """Yield the label, colour, computation in c and missing outputs of each sub-block."""
    for layer, sub_blocks in enumerate(config.wired_layers):
        for kind, missing, *_ in sub_blocks:
            yield f"{LABELS[kind]}{layer}", ALIKE.get(kind.value, kind.value), WIDTHS.get(kind, 1.0), missing


def sums(config: ModelConfig) -> Iterator[str]:
    """Yield the label of each sum of outputs."""
    together = ""
    for layer, sub_blocks in enumerate(config.wired_layers):
        for wired in sub_blocks:
            together += LABELS[wired.kind]
            if wired.joins_next:
                together += "+"
            else:
                yield f"{together}{layer}"
                together = ""


def forward_blocks(config: ModelConfig, reduce: float) -> list[SubBlockTime]:
    """Return the step-time model's input for a forward pass; `reduce` is the time of an all-reduce."""
    wired = [sub_block for sub_blocks in config.wired_layers for sub_block in sub_blocks]
    return [
        SubBlockTime(width, reduce, missing, joins_next=one.joins_next)
        for one, (_, _, width, missing) in zip(wired, named_sub_blocks(config), strict=True)
    ]


def forward_row(title: str, note: str, config: ModelConfig, reduce: float, serial: bool = True) -> Row:
    """Return the row of a forward pass."""
    names = list(named_sub_blocks(config))
    clock = RecordingClock(WireModel(serial=serial))
    end = forward_seconds(forward_blocks(config, reduce), clock.wire, clock=clock)
    bars = [Bar(*times, fill, label) for times, (label, fill, _, _) in zip(clock.computed, names, strict=True)]
    wire = [Bar(*times, "reduce", name) for times, name in zip(clock.carried.values(), sums(config), strict=True)]
    return Row(title, note, bars, wire, end)


def backward_row(title: str, note: str, config: ModelConfig, reduce: float, mirrored: bool) -> Row:
    """Return the row of a backward pass.

    `mirrored` is the order of `model/backward.py`; otherwise autograd, which waits for each reduce at its launch.
    """
    names = list(named_sub_blocks(config))
    clock = RecordingClock(WireModel())
    blocks = [
        SubBlockTime(width, reduce, missing, dgrad_seconds=DGRAD * width, wgrad_seconds=WGRAD * width)
        for _, _, width, missing in names
    ]
    end = backward_seconds(blocks, clock.wire, launch_before_wgrad=mirrored, wait_at_once=not mirrored, clock=clock)
    names.reverse()
    bars = []
    if mirrored:
        pairs = zip(clock.computed[::2], clock.computed[1::2], names, strict=True)
        for dgrad, wgrad, (label, fill, _, _) in pairs:
            bars += [Bar(*dgrad, fill, label), Bar(*wgrad, "wgrad", "w")]
    else:
        for (start, stop), (label, fill, width, _) in zip(clock.computed, names, strict=True):
            between = start + DGRAD * width
            bars += [Bar(start, between, fill, label), Bar(between, stop, "wgrad", "w")]
    wire = [Bar(*times, "reduce", name[0]) for times, name in zip(clock.carried.values(), names, strict=True)]
    return Row(title, note, bars, wire, end)


def exchange_row(title: str, note: str, config: ModelConfig, seconds: float, backward: bool) -> Row:
    """Return the row of a pass of a model with divided experts, whose all-to-alls take `seconds`."""
    wired = [*itertools.chain(*divide_experts(config.wired_layers, shared_expert=True))]
    layers = [layer for layer, of_layer in enumerate(config.wired_layers) for _ in range(len(of_layer) + 1)]
    dgrad = DGRAD if backward else 1.0
    blocks = []
    for one in wired:
        width, output = WIDTHS.get(one.kind, 1.0), OUTPUT.get(one.kind, 0.0)
        on_wire = seconds * one.moves_tokens
        blocks.append(
            SubBlockTime(
                width,
                on_wire,
                one.missing,
                DGRAD * width,
                WGRAD * (width - output),
                read_seconds=on_wire,
                moves_tokens=one.moves_tokens,
                output_seconds=dgrad * output,
                output_wgrad_seconds=WGRAD * output,
            )
        )
    events = forward_events(blocks, Schedule())
    if backward:
        events = backward_events(events, (), recompute=False)
    clock, prime = RecordingClock(WireModel()), "'" * backward
    bars = []
    for event, start, stop in play(events, blocks, clock, None, late_weight_gradients=True, backward=backward):
        if event is None:
            bars.append(Bar(start, stop, "wgrad", "w"))
        elif event.action == "compute":
            kind = wired[event.position].kind
            is_long = stop - start >= 0.5
            label = f"{LABELS[kind]}{layers[event.position]}{prime}" if is_long else LABELS[kind]
            bars.append(Bar(start, stop, ALIKE.get(kind.value, kind.value), label))
    names = [
        f"{'D' if what == 'input' else 'C'}{layers[position]}{prime}"
        for action, what, position in events
        if action == "launch" and wired[position].moves_tokens
    ]
    wire = [Bar(*times, "reduce", name) for times, name in zip(clock.carried.values(), names, strict=True)]
    return Row(title, note, [bar for bar in bars if bar.end > bar.start], wire, clock.now)


def stacked(bars: Sequence[Bar]) -> list[tuple[int, Bar]]:
    """Assign each bar to the first free lane."""
    free: list[float] = []
    placed = []
    for bar in bars:
        lane = next((lane for lane, end in enumerate(free) if end <= bar.start + FINE), len(free))
        free[lane : lane + 1] = [bar.end]
        placed.append((lane, bar))
    return placed


def waits(row: Row) -> Iterator[Bar]:
    """Yield the times in which the rank does not compute."""
    ends = [0.0, *(bar.end for bar in row.compute)]
    starts = [*(bar.start for bar in row.compute), row.end]
    for end, start in zip(ends, starts, strict=True):
        if start - end > FINE:
            yield Bar(end, start, "wait")


def number(value: float) -> str:
    return f"{round(value, 2):g}"


def text(
    x: float, y: float, words: str, size: int = 13, fill: str = INK, anchor: str = "start", bold: bool = False
) -> str:
    weight = ' font-weight="600"' if bold else ""
    words = words.replace("&", "&amp;").replace("<", "&lt;")
    return (
        f'<text x="{number(x)}" y="{number(y)}" font-size="{size}" fill="{fill}" text-anchor="{anchor}"{weight}>'
        f"{words}</text>"
    )


def box(x: float, y: float, width: float, height: float, fill: str, stroke: str = PAPER) -> str:
    return (
        f'<rect x="{number(x)}" y="{number(y)}" width="{number(width)}" height="{number(height)}" rx="3" '
        f'fill="{fill}" stroke="{stroke}"/>'
    )


def line(x1: float, y1: float, x2: float, y2: float, stroke: str = GRID, width: float = 1) -> str:
    ends = f'x1="{number(x1)}" y1="{number(y1)}" x2="{number(x2)}" y2="{number(y2)}"'
    return f'<line {ends} stroke="{stroke}" stroke-width="{number(width)}"/>'


def page(title: str, height: float, body: Iterable[str], width: int = WIDTH) -> str:
    """Return a whole file, with a white background for dark pages."""
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {number(height)}" width="{width}" '
        f'height="{number(height)}" font-family="Helvetica, Arial, sans-serif" role="img">',
        f"<title>{title}</title>",
        '<defs><pattern id="waiting" width="6" height="6" patternUnits="userSpaceOnUse" '
        'patternTransform="rotate(45)"><rect width="6" height="6" fill="#f4f5f7"/>'
        '<line x1="0" y1="0" x2="0" y2="6" stroke="#c3c9d1" stroke-width="2"/></pattern></defs>',
        f'<rect width="{width}" height="{number(height)}" rx="8" fill="{PAPER}"/>',
    ]
    return "\n".join([*head, *body, "</svg>"]) + "\n"


def legend(y: float, entries: Sequence[tuple[str, str]]) -> list[str]:
    drawn, x = [], 24.0
    for fill, words in entries:
        drawn += [box(x, y - 11, 18, 14, FILLS[fill], "#c3c9d1"), text(x + 24, y, words, 12, MUTED)]
        x += 44 + 6.4 * len(words)
    return drawn


def timelines(title: str, entries: Sequence[tuple[str, str]], rows: Sequence[Row], unit: str = UNIT) -> str:
    """Draw rows below each other on one axis, each with a lane of computation and the lanes of its wire.

    `unit` explains the unit of the axis.
    """
    scale = (RIGHT - LEFT) / max(row.end for row in rows)
    body = [text(24, 32, title, 16, bold=True), *legend(56, entries)]
    top = y = 78.0
    drawn = []
    for row in rows:
        wire_height = LANE * row.lanes
        drawn += [
            text(24, y + 18, row.title, 14, bold=True),
            text(24, y + 36, row.note, 12, MUTED),
            text(LEFT - 8, y + 17, "compute", 11, MUTED, "end"),
            text(LEFT - 8, y + LANE + GAP + 17, "wire", 11, MUTED, "end"),
        ]
        lanes = [(0, bar) for bar in [*waits(row), *row.compute]]
        lanes += [(1 + lane, bar) for lane, bar in stacked(row.wire)]
        for lane, bar in lanes:
            x, width = LEFT + scale * bar.start, scale * (bar.end - bar.start)
            above = y + lane * LANE + GAP * (lane > 0)
            drawn.append(box(x, above, width, LANE - 2, FILLS[bar.fill]))
            if bar.label:
                ink = INK if bar.fill in ("wgrad", "reduce") else PAPER
                drawn.append(text(x + width / 2, above + 16, bar.label, 12, ink, "middle"))
        drawn.append(text(LEFT + scale * row.end + 8, y + 22, f"{number(row.end)} c", 14, INK, bold=True))
        y += LANE + GAP + wire_height + 20
    for tick in range(0, int(max(row.end for row in rows)) + 1, 2):
        x = LEFT + scale * tick
        body += [line(x, top - 4, x, y - 10), text(x, y + 6, f"{tick} c" if tick else "0", 11, MUTED, "middle")]
    body.append(text((LEFT + RIGHT) / 2, y + 28, unit, 12, MUTED, "middle"))
    return page(title, y + 44, [*body, *drawn])


def who_reads_what(panels: Sequence[tuple[str, ModelConfig]]) -> str:
    """Draw a table per wiring: a row per sub-block, and a column per output that the stream can contain."""
    cell, left, top = 20, 24, 84
    title = "Which outputs a sub-block finds in the stream"
    body = [text(left, 32, title, 16, bold=True)]
    keys = (("attention", "in the stream"), ("reduce", "its all-reduce is still in flight"))
    body += legend(56, keys)
    for panel, (name, config) in enumerate(panels):
        blocks = list(named_sub_blocks(config))
        x0, y0 = left + 34 + panel * 226, top + 30
        body.append(text(x0, top + 2, name, 13, bold=True))
        for i, (label, *_, missing) in enumerate(blocks):
            y = y0 + i * cell
            body.append(text(x0 - 6, y + 14, label, 11, MUTED, "end"))
            body.append(text(x0 + (i + 0.5) * cell - 1, y0 - 6, label, 9, MUTED, "middle"))
            for output in range(len(blocks)):
                fill = "#f4f5f7" if output >= i else FILLS["reduce" if i - output in missing else "attention"]
                body.append(box(x0 + output * cell, y, cell - 2, cell - 2, fill))
    rows = 2 * panels[0][1].num_layers
    body.append(text(left, top + 54 + rows * cell, "Row: the sub-block that reads. Column: whose output.", 12, MUTED))
    return page(title, top + 70 + rows * cell, body)


def layer_seconds(mode: str, reduce: float, serial: bool, staleness: int) -> float:
    """Return the time of a layer in a deep stack, from two stacks that differ by 12 layers (schedules are periodic)."""
    late = "all" if mode.startswith("ladder") else None
    few, many = (
        forward_seconds(forward_blocks(model(mode, layers, late, staleness), reduce), WireModel(serial=serial))
        for layers in (6, 18)
    )
    return (many - few) / 12


CURVES = (
    ("ladder", "ladder", 1, "#4c78a8", ""),
    ("staleness 2", "ladder", 2, "#b04a5a", "6 4"),
    ("parallel", "parallel", 1, "#8a8f98", ""),
    ("ladder-parallel", "ladder-parallel", 1, "#e8963c", ""),
)
"""Name, mode, staleness, colour and dashes of each line in the chart."""


def gains() -> str:
    """Draw the speed-up of each wiring over the time of an all-reduce, on both kinds of wire."""
    title = "Speed-up over standard, forward: the time of a layer in standard over that in another wiring"
    height, top, bottom = 420, 86, 356
    steps = [step / 20 for step in range(81)]
    body = [text(24, 32, title, 16, bold=True)]
    for panel, (name, serial) in enumerate((("serial wire (one NCCL communicator)", True), ("pipelined wire", False))):
        x0 = 64 + panel * 466

        def x(reduce: float, x0: float = x0) -> float:
            return x0 + reduce * 80

        def y(ratio: float) -> float:
            return bottom - (ratio - 1) * (bottom - top) / 2.5

        body.append(text(x0, 64, name, 13, bold=True))
        for ratio in (1, 1.5, 2, 2.5, 3, 3.5):
            body += [line(x0, y(ratio), x(4), y(ratio)), text(x0 - 8, y(ratio) + 4, f"{ratio:g}", 11, MUTED, "end")]
        for reduce in range(5):
            body.append(text(x(reduce), bottom + 18, f"{reduce} c" if reduce else "0", 11, MUTED, "middle"))
        body.append(text(x(2), bottom + 40, f"time of an all-reduce ({UNIT})", 12, MUTED, "middle"))
        ends: dict[str, tuple[str, str]] = {}
        for curve, mode, staleness, colour, dashes in CURVES:
            points = []
            for reduce in steps:
                ratio = layer_seconds("standard", reduce, serial, 1) / layer_seconds(mode, reduce, serial, staleness)
                points.append(f"{number(x(reduce))},{number(y(ratio))}")
            dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
            joined = " ".join(points)
            body.append(f'<polyline points="{joined}" fill="none" stroke="{colour}" stroke-width="2.5"{dashed}/>')
            height_of_end = points[-1].split(",")[1]
            before = ends[height_of_end][0] + ", " if height_of_end in ends else ""
            ends[height_of_end] = (before + curve, colour)
        body += [text(x(4) + 4, float(end) + 4, words, 11, colour) for end, (words, colour) in ends.items()]
    return page(title, height, body, 1040)


def experts(ends: Sequence[tuple[str, str]]) -> str:
    """Draw the timelines of layers with experts; `ends` are the last entries of the legend."""
    kinds = [("attention", "attention (A)"), ("shared_expert", "shared expert (S)"), ("mlp", "routed experts (R, S+R)")]
    rows = [
        forward_row(name, note, model(name, 3, num_experts=8, moe_shared_expert_intermediate_size=256), 0.8)
        for name, note in (
            ("standard", "no sub-block is late"),
            ("ladder", "misses the newest output"),
            ("farskip", "A and S in one all-reduce"),
            ("shortcut", "R misses A; S misses R"),
        )
    ]
    title = "Experts, forward: three layers, an all-reduce takes 0.8 c"
    return timelines(title, [*kinds, *ends], rows, "c: the time that A computes; R takes c, S takes 0.5 c")


def exchanges(ends: Sequence[tuple[str, str]]) -> str:
    """Draw the timelines of layers whose experts are divided; `ends` are the last entries of the legend."""
    kinds = [("attention", "attention (A)"), ("shared_expert", "shared expert (S)"), ("mlp", "routed experts (R)")]
    more = {"num_experts": 8, "moe_shared_expert_intermediate_size": 256}
    standard, ladder = model("standard", 3, **more), model("ladder", 3, "all", **more)
    rows = [
        exchange_row("standard", "D and C under S", standard, 0.6, backward=False),
        exchange_row("ladder", "C under the next A", ladder, 0.6, backward=False),
        exchange_row("ladder, staleness 2", "D leaves a layer early", model("ladder", 3, "all", 2, **more), 0.6, False),
        exchange_row("shortcut", "D under A, C under S", model("shortcut", 3, "all", **more), 0.6, backward=False),
        exchange_row("standard, backward", "C' and D' under S' and w", standard, 0.6, backward=True),
        exchange_row("ladder, backward", "C' under A', D' under S'", ladder, 0.6, backward=True),
    ]
    title = "Experts on other ranks: three layers, a dispatch (D) or combine (C) takes 0.6 c"
    unit = "c: the time that A or R computes, S takes 0.5 c; the output projections of A and S begin after the cut"
    return timelines(title, [*kinds, ("wgrad", "weight gradients (w)"), *ends], rows, unit)


def pictures() -> dict[str, str]:
    """Map each file name to its content."""
    plain, late = model("standard", 3), model("ladder", 3)
    deep, wide, both = model("ladder", 3, "all", 2), model("parallel", 3), model("ladder-parallel", 3)
    kinds = [("attention", "attention (A)"), ("mlp", "MLP (M)"), ("attention_mlp", "both, after one norm (A+M)")]
    ends = [("reduce", "all-reduce"), ("wait", "the processor waits")]
    forward = kinds + ends
    backward = [*kinds, ("wgrad", "weight gradient (w)"), ("reduce", "all-reduce"), ends[1]]
    serial, shared = "serial wire", "pipelined wire"
    return {
        "ladder.svg": timelines(
            "Forward: three layers, an all-reduce takes 0.8 c",
            [*kinds[:2], *ends],
            [
                forward_row("standard", "waits for every output", plain, 0.8),
                forward_row("ladder", "reads one sub-block late", late, 0.8),
            ],
            "c: the time that one sub-block (attention or MLP) computes. Times are calculated, not measured",
        ),
        "reads.svg": who_reads_what(
            [
                ("standard", model("standard", 4)),
                ("ladder", model("ladder", 4)),
                ("hybrid: ladder in 2 and 3", model("ladder", 4, "2-3")),
                ("staleness 2", model("ladder", 4, "all", 2)),
            ]
        ),
        "forward.svg": timelines(
            "Forward: three layers, an all-reduce takes 0.8 c",
            forward,
            [
                forward_row("standard", "nothing hidden", plain, 0.8),
                forward_row("parallel", "one all-reduce a layer", wide, 0.8),
                forward_row("ladder", "one sub-block late", late, 0.8),
                forward_row("ladder-parallel", "one all-reduce a layer", both, 0.8),
                forward_row("ladder, staleness 2", "gains nothing here", deep, 0.8),
            ],
        ),
        "slow-wire.svg": timelines(
            "Forward on a slow wire: an all-reduce takes 2 c",
            forward,
            [
                forward_row("standard", serial, plain, 2.0),
                forward_row("ladder", serial, late, 2.0),
                forward_row("parallel", serial, wide, 2.0),
                forward_row("ladder-parallel", serial, both, 2.0),
                forward_row("ladder, staleness 2", serial, deep, 2.0),
                forward_row("ladder", shared, late, 2.0, serial=False),
                forward_row("ladder, staleness 2", shared, deep, 2.0, serial=False),
            ],
        ),
        "backward.svg": timelines(
            "Backward: three layers, an all-reduce takes 1.2 c",
            backward,
            [
                backward_row("standard", "waits at once", plain, 1.2, mirrored=False),
                backward_row("standard", "as in Megatron-LM", plain, 1.2, mirrored=True),
                backward_row("ladder by autograd", "waits at once", late, 1.2, mirrored=False),
                backward_row("ladder", "the mirrored rule", late, 1.2, mirrored=True),
                backward_row("ladder-parallel", "the mirrored rule", both, 1.2, mirrored=True),
            ],
            f"c: the time that one sub-block computes forward; its input gradient takes {DGRAD} c, w {WGRAD} c",
        ),
        "exchanges.svg": exchanges([("reduce", "all-to-all"), ends[1]]),
        "experts.svg": experts(ends),
        "gains.svg": gains(),
    }


def main() -> None:
    """Write the files next to this program."""
    for name, content in pictures().items():
        Path(__file__).with_name(name).write_text(content, encoding="utf-8")


if __name__ == "__main__":
    main()

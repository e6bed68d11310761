"""What each wiring gains where tokens travel to their experts."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ladder_lab.cost.divided_experts import PassTime, Schedule
from ladder_lab.cost.layout import Layout
from ladder_lab.cost.training import LayerTime
from ladder_lab.output import markdown_table
from ladder_lab.plan.layouts import SMALLEST_DIFFERENCE, LayoutPlan, PlanRequest, layer_time

BASELINE = "standard"
"""The exact baseline: its all-to-alls travel under the shared expert, and weight gradients wait for the next one."""
NOTHING_AHEAD = "standard, nothing ahead"
"""The same without either."""
RIVAL = "standard, two micro-batches"
"""Two micro-batches at once, of which one computes while the other one's tokens travel."""
_BOUND = "no communication"


@dataclass(frozen=True)
class ExpertGain:
    """One wiring in a layout with divided experts."""

    wiring: str
    forward: float
    """Speed of a forward pass relative to the baseline's."""
    passes: float
    """Speed of forward and backward, likewise."""
    hidden: tuple[float, float]
    """Shares of the communication of forward and backward that computation hides."""


def expert_gains(request: PlanRequest, layout: Layout) -> list[ExpertGain]:
    """Compare the wirings of the request in the passes of all layers, with the bound without communication."""
    standard = layer_time(request, layout, BASELINE)
    compared = {
        NOTHING_AHEAD: replace(standard, schedule=Schedule(reads_ahead=False, late_weight_gradients=False)),
        **{name: layer_time(request, layout, name) for name in dict.fromkeys((BASELINE, *request.wirings))},
        _BOUND: replace(standard, reduce_factor=0.0),
    }
    times = {name: _times(each) for name, each in compared.items()}
    times[RIVAL] = _two_micro_batches(times[NOTHING_AHEAD], times[_BOUND], standard.token_contention)
    forward, backward = times[BASELINE]
    return [
        ExpertGain(
            name,
            forward.seconds / times[name][0].seconds,
            (forward.seconds + backward.seconds) / sum(each.seconds for each in times[name]),
            (times[name][0].hidden, times[name][1].hidden),
        )
        for name in times
    ]


def _two_micro_batches(
    exposed: tuple[PassTime, PassTime], computing: tuple[PassTime, PassTime], contention: float
) -> tuple[PassTime, PassTime]:
    """Return the times of passes of which each computes while another one's tokens travel.

    A forward pass alone, as in prefill, hides nothing.
    """
    compute = sum(each.seconds for each in computing)
    wire = sum(each.wire for each in exposed)
    together = max(compute, wire) + contention * min(compute, wire)
    forward, backward = exposed
    hidden = min(compute, wire) / wire if wire else 1.0
    return forward._replace(hidden=hidden), backward._replace(seconds=together - forward.seconds, hidden=hidden)


def _times(times: LayerTime) -> tuple[PassTime, PassTime]:
    return times.pass_times(range(times.model.num_layers))


def experts_report(request: PlanRequest, plans: Sequence[LayoutPlan]) -> tuple[list[str], list[ExpertGain]]:
    """Return paragraphs about the layouts with divided experts, and the gains in the fastest of them."""
    divided = [plan for plan in plans if plan.layout.divides_experts]
    if not divided:
        return [], []
    fastest = divided[0]
    layout = fastest.layout
    gains = expert_gains(request, layout)
    sharded = next((plan for plan in plans if not plan.layout.divides_experts), None)
    within = "No layout fits in which each tensor-parallel rank has a part of every expert (--expert-sharding)."
    if sharded is not None:
        within = (
            "The fastest layout in which each tensor-parallel rank has a part of every expert (--expert-sharding) "
            f"takes {sharded.time.total / fastest.time.total:.2f} times as long."
        )
    milliseconds = 1e3 * layer_time(request, layout, BASELINE).all_to_all_seconds
    library = request.all_to_all
    rows = [
        {
            "wiring": gain.wiring,
            "forward": f"{gain.forward:.2f}",
            "forward + backward": f"{gain.passes:.2f}",
            "hidden in forward": f"{100 * gain.hidden[0]:.0f} %",
            "in backward": f"{100 * gain.hidden[1]:.0f} %",
        }
        for gain in gains
    ]
    return [
        f"Experts on {layout.experts} ranks: {within} An all-to-all of {library.name} takes {milliseconds:.2f} ms, "
        f"with {layout.imbalance:g} times the mean rows on the fullest rank. Speed of the passes relative to standard, "
        "whose all-to-alls travel under the shared expert and under weight gradients, in this layout:",
        markdown_table(rows),
        *_inside_a_box(request, divided),
        f"{RIVAL}: the rival that hides as much in an unchanged model (DualPipe; "
        "--overlap-moe-expert-parallel-comm in Megatron-LM; not in this package). It needs the activations of both, "
        "and does nothing for prefill.",
        f"Figures of {library.name}: {library.source}.",
    ], gains


def _inside_a_box(request: PlanRequest, divided: Sequence[LayoutPlan]) -> list[str]:
    """State the gain where all-to-alls stay in a box, which is small over a fast link."""
    inside = next((plan for plan in divided if plan.layout.experts <= request.machine.per_box), None)
    if inside is None:
        return []
    compared = [gain for gain in expert_gains(request, inside.layout) if gain.wiring in request.wirings]
    best = max(compared, key=lambda gain: gain.passes)
    where = f"Inside a box, over {request.machine.link.name} (EP {inside.layout.experts})"
    pays = "" if best.passes > 1 + SMALLEST_DIFFERENCE else "late reads do not pay: "
    return [f"{where}, {pays}the fastest wiring, {best.wiring}, gains {100 * (best.passes - 1):.1f} %."]

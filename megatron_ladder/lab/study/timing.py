"""What a step of each wiring takes: measured over an emulated wire, or seen in the trials themselves."""

import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_ladder.lab.bench.paired import RatioVerdict
from megatron_ladder.lab.study.commands import program
from megatron_ladder.lab.study.description import StepTimes, Study
from megatron_ladder.lab.study.options import RunOptions
from megatron_ladder.lab.study.trial import Result
from megatron_ladder.lab.study.wirings import STANDARD, find_wiring


def timing_command(options: RunOptions, study: Study, size: str, output: Path) -> tuple[str, ...]:
    """The benchmark that measures the timed wirings of a size and leaves its rows in a file."""
    names = [find_wiring(name, study.sizes[size]["num_layers"]).timed_as for name in study.timed_wirings]
    flags = {
        "--tp": options.timing_ranks,
        "--sizes": size,
        "--batch": options.micro_batch_size,
        "--sequence": options.seq_length,
        "--alpha": options.link,
        "--rounds": options.timing_rounds,
        "--json": output,
        "--wirings": ",".join(name for name in names if name is not None),
    }
    words = (str(word) for pair in flags.items() for word in pair)
    return (sys.executable, str(program("tools/benchmark.py", "benchmark")), "train", *words)


def read_step_times(output: Path, study: Study, size: str, command: tuple[str, ...]) -> tuple[StepTimes, list[str]]:
    """What the benchmark has measured, and a line for each of its figures that it doubts itself."""
    rows: Sequence[Mapping[str, Any]] = json.loads(output.read_text(encoding="utf-8"))
    by_name = {row["wiring"]: row for row in rows}
    measured = {}
    for name in study.timed_wirings:
        timed_as = find_wiring(name, study.sizes[size]["num_layers"]).timed_as
        if timed_as in by_name:
            measured[name] = by_name[timed_as]
    ranks = int(command[command.index("--tp") + 1])
    doubts = [
        f"{size}: {name}: {row['verdict']}"
        for name, row in measured.items()
        if row["verdict"] != RatioVerdict.SOUND.value
    ]
    row = measured[STANDARD]
    link = f"{row['interconnect']}, an all-reduce takes {1e3 * row['alpha_seconds']:.3f} ms ({row['alpha']})"
    if doubts:
        link += f"; the measurement is in doubt: {'; '.join(doubts)}"
    times = StepTimes(
        interconnect=link,
        ranks=ranks,
        seconds={name: float(row["median_seconds"]) for name, row in measured.items()},
        speedup={name: 1.0 if name == STANDARD else float(row["ratio_to_standard"]) for name, row in measured.items()},
        spread={name: 0.0 if name == STANDARD else float(row["spread"]) for name, row in measured.items()},
        command=command,
    )
    return times, doubts


def times_of_trials(results: Sequence[Result], study: Study, size: str, ranks: int) -> StepTimes | None:
    """Step times from the trials at equal tokens, paired by their seeds; None if standard has none.

    Args:
        ranks: tensor-parallel processes of each.
    """
    speeds: dict[str, dict[int, float]] = {}
    for result in results:
        trial = result.trial
        if (trial.kind, trial.size) == ("tokens", size) and result.tokens_per_second > 0:
            speeds.setdefault(trial.wiring, {})[trial.seed] = result.tokens_per_second
    if STANDARD not in speeds:
        return None
    seconds, speedup, spread = {}, {}, {}
    for name in study.timed_wirings:
        seeds = [seed for seed in speeds.get(name, {}) if seed in speeds[STANDARD]]
        if not seeds:
            continue
        ratios = [speeds[name][seed] / speeds[STANDARD][seed] for seed in seeds]
        seconds[name] = study.tokens_per_step / statistics.median(speeds[name][seed] for seed in seeds)
        speedup[name] = statistics.median(ratios)
        spread[name] = _quartile_distance(ratios)
    return StepTimes("the trials' own, as in their tokens a second", ranks, seconds, speedup, spread, ())


def _quartile_distance(values: Sequence[float]) -> float:
    if len(values) < 2:
        return 0.0
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return high - low

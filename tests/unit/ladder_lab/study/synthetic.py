"""Study folders with made-up results, for reports without training."""

import json
import random
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from ladder_lab.study.schema import (
    RESULT_NAME,
    STUDY_NAME,
    TRIALS_NAME,
    Kind,
    Result,
    StepTimes,
    Study,
    Trial,
)

SPEEDUPS = {"standard": 1.0, "parallel": 1.25, "ladder": 1.5}
SHAPE = {"num_layers": 8, "hidden_size": 64}
RATES = (1e-3, 2e-3, 4e-3)


def made_up_study(**changes: object) -> Study:
    """Return a study of four wirings (three of them timed), three seeds, one size, 100 iterations."""
    times = StepTimes(
        "an emulated wire",
        2,
        {name: 0.06 / ratio for name, ratio in SPEEDUPS.items()},
        SPEEDUPS,
        {"standard": 0.0, "parallel": 0.02, "ladder": 0.03},
        ("/usr/bin/python3", "/somewhere/tools/benchmark.py"),
    )
    wirings = (*SPEEDUPS, "hybrid")
    values = {
        "wirings": wirings,
        "timed_wirings": tuple(SPEEDUPS),
        "sizes": {"tiny": SHAPE},
        "seeds": (1, 2, 3),
        "tuning_seed": 9,
        "learning_rates": RATES,
        "iterations": 100,
        "tuning_iterations": 40,
        "tokens_per_step": 1000,
        "seq_length": 50,
        "link": "1.2c",
        "training_flags": ("--clip-grad", "1.0"),
        "data": "a made-up text",
        "machine": {"processor": "of no make", "torch": "2.13.0"},
        "command": ("python", "tools/study.py", "run"),
        "chosen": {f"tiny/{name}": 2e-3 for name in wirings},
        "step_times": {"tiny": times},
        "schedule": {"warm_up": 0.1, "last": 0.1},
    }
    return Study(**{**values, **changes})


def write_study(folder: Path, study: Study) -> None:
    (folder / TRIALS_NAME).mkdir(parents=True, exist_ok=True)
    (folder / STUDY_NAME).write_text(json.dumps(asdict(study)))


def write_run(
    folder: Path,
    kind: Kind,
    wiring: str,
    seed: int,
    final: float,
    *,
    iterations: int = 100,
    rate: float = 2e-3,
    size: str = "tiny",
    parameters: int = 5_000_000,
) -> None:
    """Write a run whose validation loss falls linearly from `final` + 1 to `final`, with ten points."""
    trial = Trial(kind, wiring, size, seed, rate, iterations)
    curve = tuple((iterations * step // 10, final + 1 - step / 10) for step in range(1, 11))
    result = Result(
        trial,
        parameters,
        1000,
        curve,
        curve,
        2000.0 + seed,
        36.0,
        1,
        ("python", "pretrain_ladder.py"),
        {"torch": "2.13.0", "megatron_ladder": "0.1.0"},
    )
    path = folder / TRIALS_NAME / trial.name / RESULT_NAME
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(asdict(result)))


def write_all(folder: Path, study: Study, better_by: Mapping[str, float], noise: float = 0.001) -> None:
    """Write all trials. A wiring is better than standard by `better_by` at equal time, and worse at equal tokens."""
    write_study(folder, study)
    drawn = random.Random(1)
    for size in study.sizes:
        for wiring in study.wirings:
            for rate in study.learning_rates:
                final = 4 + abs(rate - 2e-3)
                write_run(folder, "tuning", wiring, study.tuning_seed, final, iterations=40, rate=rate, size=size)
            for seed in study.seeds:
                base = 3 + 0.1 * seed
                effect = better_by.get(wiring, 0.0)
                write_run(folder, "tokens", wiring, seed, base + effect + drawn.gauss(0, noise), size=size)
                if wiring in study.timed_wirings and wiring != "standard":
                    final, length = base - effect + drawn.gauss(0, noise), round(100 * SPEEDUPS[wiring])
                    write_run(folder, "time", wiring, seed, final, iterations=length, size=size)

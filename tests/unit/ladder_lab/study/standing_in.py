"""Fake studies and training runs."""

import json
import sys
from pathlib import Path
from typing import Any

from ladder_lab.study.schema import StepTimes, Study

SIZE = "2x32x64x2x2x300"
TRAINER = """
import json, os, signal, sys, time
folder, last, loss, code, seconds = sys.argv[1], int(sys.argv[2]), *map(float, sys.argv[3:6])
os.makedirs(folder, exist_ok=True)
def write(event, **fields):
    with open(folder + "/run.jsonl", "a") as file:
        file.write(json.dumps({"time": "2026-01-01T00:00:00+00:00", "event": event, **fields}) + "\\n")
def stop(*_):
    write("stop", reason="SIGTERM", code=0)
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
write("start", iteration=0, versions={"torch": "0"})
print("trains", flush=True)
write("progress", iteration=last // 2, steps=last // 2, seconds=1.0, loss=loss + 1, tokens_per_second=10.0)
time.sleep(seconds)
if code:
    print("went wrong", flush=True)
    write("stop", reason="", code=int(code))
    sys.exit(int(code))
write("progress", iteration=last, steps=last - last // 2, seconds=1.0, loss=loss, tokens_per_second=20.0)
write("evaluation", iteration=last, loss=loss)
write("stop", reason="", code=0)
"""
"""Writes the record of a run. Arguments: folder, steps, last loss, exit code, seconds before the last steps."""


def trainer(folder: Path, iterations: int, loss: float, code: int = 0, seconds: float = 0.0) -> tuple[str, ...]:
    """Return the command of a fake training run."""
    return (sys.executable, "-I", "-S", "-c", TRAINER, *map(str, (folder, iterations, loss, code, seconds)))


def study_of(**changes: Any) -> Study:
    """Return a small study without results."""
    values: dict[str, Any] = {
        "wirings": ("standard", "parallel", "ladder", "hybrid", "desync-2x"),
        "timed_wirings": ("standard", "parallel", "ladder"),
        "sizes": {SIZE: {"num_layers": 2}},
        "seeds": (1, 2),
        "tuning_seed": 9,
        "learning_rates": (1e-3, 2e-3, 4e-3),
        "iterations": 100,
        "tuning_iterations": 25,
        "tokens_per_step": 64,
        "seq_length": 16,
        "link": "1.2c",
        "training_flags": ("--bf16",),
        "data": "words",
        "machine": {"cores": "2"},
        "command": ("python",),
        "schedule": {"warm_up": 0.1, "last": 0.1},
    }
    return Study(**{**values, **changes})


def step_times(**speedup: float) -> StepTimes:
    """Return step times with these speed-ups."""
    zero = dict.fromkeys(speedup, 0.0)
    return StepTimes("a wire", 2, zero, speedup, zero, ("python",))


def write_record(folder: Path, *events: dict[str, Any]) -> None:
    """Write a `run.jsonl` in a trial's folder."""
    save = folder / "checkpoints"
    save.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"time": "2026-01-01T00:00:00+00:00", **event}) + "\n" for event in events]
    (save / "run.jsonl").write_text("".join(lines))

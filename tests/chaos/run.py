"""Injects faults into small runs of two real processes, and checks that nothing is lost:

python tests/chaos/run.py --kills 30 --seed 1
"""

import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
# Libraries read these at import to start threads, which a fork would lose.
os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}

from megatron_ladder.command_line import parse_command_line  # noqa: E402
from megatron_ladder.flags import flag  # noqa: E402
from tests.chaos import faults  # noqa: E402
from tests.chaos.ranks import import_everything  # noqa: E402
from tests.chaos.runs import VOCABULARY, Experiment  # noqa: E402
from tests.helpers.patience import be_patient  # noqa: E402
from tests.helpers.tokens import write_tokens  # noqa: E402

FAULTS = ("kill", "term")


@dataclass(frozen=True)
class ChaosConfig:
    """Layouts and faults."""

    layouts: tuple[Literal["tp", "pp", "dp"], ...] = ("tp", "pp", "dp")
    """Layouts of two processes, one after another."""
    faults: tuple[str, ...] = flag(
        FAULTS,
        choices=[f"{layout}{name}" for layout in ("", "tp:", "pp:", "dp:") for name in FAULTS],
    )
    """kill: SIGKILL at random moments. term: SIGTERM or SIGINT during a start, a step and a save. tp:kill: a fault of
    one layout only."""
    kills: int = 3
    """Number of kills, and of terminations, per layout."""
    seed: int = 0
    """Seed of the random moments and ranks."""
    patience: float = 1.0
    """Factor of all time limits, for a machine that shares its cores."""
    verbose: bool = False
    """Print the moment of each kill."""


def main(argv: Sequence[str]) -> None:
    """Print one line per fault and layout; raise AssertionError at the first unexpected outcome."""
    (config,) = parse_command_line([ChaosConfig], argv, "run.py", "Faults in runs of two processes.")
    be_patient(config.patience)
    import_everything()
    with tempfile.TemporaryDirectory(prefix="chaos_") as scratch:
        folder = Path(scratch)
        write_tokens(folder / "tokens", VOCABULARY)
        for layout in config.layouts:
            (folder / layout).mkdir()
            experiment = Experiment(layout, folder / layout, random.Random(f"{config.seed} {layout}"))
            known: dict[str, Callable[[], str]] = {
                "kill": lambda e=experiment: faults.kills(e, config.kills),
                "term": lambda e=experiment: faults.terminations(e, config.kills),
            }
            for name in (fault.removeprefix(f"{layout}:") for fault in config.faults):
                if name in known:
                    began = time.monotonic()
                    outcome = known[name]()
                    print(f"{layout} {name}: {outcome} ({time.monotonic() - began:.1f} s)", flush=True)
            if config.verbose:
                print("\n".join(experiment.moments), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])

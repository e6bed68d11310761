"""Measures how long every program takes to answer --help and a wrong flag: `python -m tests.helpers.answer_times`."""

import statistics
import subprocess
import sys
import time

from tests.helpers.commands import REPOSITORY_ROOT
from tests.helpers.patience import patient
from tests.helpers.programs import PROGRAMS, load_program, script_of

ROUNDS = 10


def seconds(words: list[str]) -> float:
    """Return the median time of a whole process."""
    times = []
    for _ in range(ROUNDS):
        begun = time.perf_counter()
        done = subprocess.run([sys.executable, *words], cwd=REPOSITORY_ROOT, capture_output=True, timeout=patient(60))
        times.append(time.perf_counter() - begun)
        assert done.returncode in (0, 2), done.stderr
    return statistics.median(times)


def main() -> None:
    print(f"median of {ROUNDS} processes: seconds to answer --help, seconds to reject a wrong flag")
    for program in PROGRAMS:
        words = [command.words.split()[0].split("|") for command in load_program(program).COMMANDS if command.words]
        for subcommand in [[], *([name] for names in words for name in names)]:
            command = [script_of(program), *subcommand]
            print(f"{seconds([*command, '--help']):.3f} {seconds([*command, '--wrong']):.3f} {' '.join(command)}")


if __name__ == "__main__":
    main()

"""The program that `test_ranks` starts: each rank does what one word of the command line says."""

import os
import signal
import sys
import time
from pathlib import Path


def entry_point() -> None:
    folder, *words = sys.argv[1:]
    rank = int(os.environ["RANK"])
    (Path(folder) / f"pid.{rank}").write_text(str(os.getpid()))
    (Path(folder) / f"environment.{rank}").write_text("\n".join(f"{k}={v}" for k, v in os.environ.items()))
    word = words[rank]
    if word == "sleep":
        print(word + "\n", end="", flush=True)
        time.sleep(60)
    elif word == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    # The other ranks start first.
    while len(list(Path(folder).glob("pid.*"))) < len(words):
        time.sleep(0.01)
    sys.exit(int(word))

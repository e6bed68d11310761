"""What `test_ranks` starts: a light program whose ranks do as their command line says, a word for each."""

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
        time.sleep(60)
    elif word == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(60)
    elif word == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    # Let the others begin first.
    while len(list(Path(folder).glob("pid.*"))) < len(words):
        time.sleep(0.01)
    sys.exit(int(word))

"""Runs the product's scripts as forks of this process, which has already imported their slowest libraries."""

import contextlib
import hashlib
import os
import runpy
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed  # noqa: F401
import torch
import torch._dynamo  # noqa: F401
import torch.utils.tensorboard  # noqa: F401
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers.commands import REPOSITORY_ROOT, free_port
from tests.helpers.forks import fork


@dataclass(frozen=True)
class Place:
    """Where a case works: the checkout, the folder that has one folder for each case, and the folder of this case."""

    root: Path
    scratch: Path
    folder: Path

    def run(self, script: str, argv: Sequence[object], ranks: int = 1, spy: bool = False) -> str:
        """Return the standard output of a script of the checkout; raise RuntimeError if a rank fails.

        With `spy`, `rank_N.tokens` has a hash of the token ids of each call of rank N's embedding.
        """
        port, left = str(free_port()), {}
        for rank in range(ranks):
            launched = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(ranks), "RANK": str(rank)}
            environment = {**launched, "LOCAL_RANK": str(rank)} if ranks > 1 else {}
            output, errors, tokens = (self.folder / f"rank_{rank}.{kind}" for kind in ("out", "err", "tokens"))
            output.unlink(missing_ok=True)
            work = partial(self._run_script, script, list(map(str, argv)), tokens if spy else None)
            left[fork(work, environment | {"PYTHONPATH": str(self.root)}, output, errors)] = rank
        while left:
            child, status = os.wait()
            if child in left and status:
                for other in left.keys() - {child}:
                    os.kill(other, signal.SIGKILL)
                    os.waitpid(other, 0)
                error = (self.folder / f"rank_{left[child]}.err").read_text(errors="replace")[-2000:]
                code = os.waitstatus_to_exitcode(status)
                raise RuntimeError(f"{script} {' '.join(map(str, argv))}\nexit code {code}: {error}")
            left.pop(child, None)
        return (self.folder / "rank_0.out").read_text()

    def _run_script(self, script: str, argv: list[str], tokens: Path | None) -> None:
        os.chdir(self.root)
        sys.path[:] = [str(self.root), *(path for path in sys.path if Path(path).resolve() != REPOSITORY_ROOT)]
        sys.argv = [script, *argv]
        with _EmbeddingSpy(tokens) if tokens else contextlib.nullcontext():
            runpy.run_path(script, run_name="__main__")


class _EmbeddingSpy(TorchDispatchMode):
    """Writes each hash at once, since the program may end without returning."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._file = open(path, "w", buffering=1)  # noqa: SIM115

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.embedding.default:
            self._file.write(f"{hashlib.sha256(args[1].t().contiguous().numpy().tobytes()).hexdigest()}\n")
        return func(*args, **(kwargs or {}))

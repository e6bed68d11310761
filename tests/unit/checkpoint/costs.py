"""Measures the cost of checkpoints in one process; the figures in docs/checkpoints.md come from it.

    python -m tests.unit.checkpoint.costs DIRECTORY [MILLIONS OF PARAMETERS]

Variants alternate, and the minimum of the times is printed: other load on the machine can only add time.
"""

import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch

from megatron_ladder.checkpoint import checksum, tensor_file
from megatron_ladder.checkpoint.async_save import HostMemory
from megatron_ladder.checkpoint.format import Checkpoint
from megatron_ladder.checkpoint.loading import load_newest
from megatron_ladder.checkpoint.optimizer_state import MOMENTS
from megatron_ladder.checkpoint.saving import SaveOptions
from megatron_ladder.comm.group import CommGroup
from tests.unit.checkpoint import tiny_training
from tests.unit.checkpoint.tiny_training import TinyState, begin, save_at_once

REPETITIONS = 20


class NoDigest:
    """A checksum that costs nothing."""

    def update(self, data: object) -> None:
        pass

    def hexdigest(self) -> str:
        return "0"


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def alternate(prepare: Callable[[], object] | None = None, **works: Callable[[], object]) -> dict[str, float]:
    """Return the minimum seconds of each when warm; `prepare` is called before each."""

    def once(work: Callable[[], object]) -> float:
        if prepare is not None:
            prepare()
        return seconds(work)

    rounds = [{name: once(work) for name, work in works.items()} for _ in range(REPETITIONS + 1)][1:]
    return {name: round(min(row[name] for row in rounds), 4) for name in works}


def main(folder: Path, millions: int) -> None:
    world = CommGroup.alone()
    shapes = {f"layers.{n}.mlp.weight": (1000 * millions // 16, 1000) for n in range(16)}
    with mock.patch.object(tiny_training, "SHAPES", shapes):
        state = TinyState(1)
    state.whole.clear()
    spans = list(state.spans())
    sources = [value for s in spans for value in (s.master, *(state.moment(s, which) for which in MOMENTS), s.weight)]
    print(f"state {sum(t.nbytes for t in sources) / 2**20:.0f} MiB, {torch.get_num_threads()} thread(s)")

    buffers = [torch.zeros_like(tensor) for tensor in sources]
    host = HostMemory()

    def copy() -> None:
        for buffer, tensor in zip(buffers, sources, strict=True):
            buffer.copy_(tensor)

    def copy_to_host() -> None:
        host.copies(sources)

    def blocked() -> None:
        saving = begin(folder / "blocked", 1, state, world, SaveOptions(host=host))
        saving._give_up("")

    def save() -> None:
        save_at_once(folder / "save", 1, state, world)
        shutil.rmtree(folder / "save")

    def save_unchecked() -> None:
        with (
            mock.patch.dict(checksum.CHECKSUMS, {"xxh3_128": NoDigest}),
            mock.patch.object(tensor_file, "CHECKSUMS", {"xxh3_128": NoDigest}),
        ):
            save()

    print(alternate(None, copy=copy, copy_to_host=copy_to_host, blocked=blocked))
    print(alternate(None, save=save, save_unchecked=save_unchecked))
    save_at_once(folder / "kept", 1, state, world)
    checkpoint = Checkpoint.open(folder / "kept")

    def load() -> None:
        load_newest(folder / "kept", state, world, lambda checkpoint: [])

    def load_unchecked() -> None:
        with mock.patch.object(Checkpoint, "verify"):
            load()

    def drop() -> None:
        for path in checkpoint.directory.iterdir():
            with open(path, "rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    for cold in (False, True):
        print(
            "from the disk" if cold else "from the page cache",
            alternate(
                drop if cold else None,
                load=load,
                load_unchecked=load_unchecked,
            ),
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 32)

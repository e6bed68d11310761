"""The state of a tiny run, and worlds of ranks without torch.distributed."""

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_ladder.blueprint.boxes import Box
from megatron_ladder.blueprint.optimizers import MOMENTS
from megatron_ladder.blueprint.specs import Role, TensorSpec
from megatron_ladder.checkpoint.format import find_checkpoint
from megatron_ladder.checkpoint.manifest import merge_manifest
from megatron_ladder.checkpoint.optimizer_state import Piece, Span
from megatron_ladder.checkpoint.publish import create_temporary_directory, publish, write_manifest
from megatron_ladder.checkpoint.saving import (
    SaveOutcome,
    TrainingSave,
    _write_pieces,
    gather_through_files,
    run_in_thread,
)
from megatron_ladder.comm.group import CommGroup
from megatron_ladder.parallel.layout import Section

SHAPES = {"mlp.weight": (6, 5), "norm.weight": (8,)}


class TinyState:
    """Two parameters in bf16 with fp32 masters, each cut in equal runs over the ranks."""

    def __init__(self, seed: int, rank: int = 0, size: int = 1) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.whole = {
            (name, kind): torch.randn(shape, generator=generator)
            for name, shape in SHAPES.items()
            for kind in ("weight", *MOMENTS)
        }
        self._spans: list[Span] = []
        self._moments: dict[tuple[int, str], Tensor] = {}
        for name, shape in SHAPES.items():
            length = self.whole[name, "weight"].numel() // size
            start = rank * length
            parts = {
                kind: self.whole[name, kind].view(-1)[start : start + length].clone() for kind in ("weight", *MOMENTS)
            }
            section = Section(TensorSpec(name, shape, Role.MATRIX), 0, shape[0])
            weight = parts["weight"].bfloat16()
            self._spans.append(Span([section], shape, start, weight, parts["weight"], 0, owned=True))
            self._moments |= {(id(parts["weight"]), which): parts[which] for which in MOMENTS}
        self.steps = 7

    def spans(self) -> Iterator[Span]:
        return iter(self._spans)

    def states(self) -> Iterator[Span]:
        return iter(())

    def copy_masters_to_weights(self) -> None:
        for span in self._spans:
            span.weight.copy_(span.master)

    def moment(self, span: Span, which: str) -> Tensor:
        return self._moments[id(span.flat_master), which]

    def steps_taken(self) -> int:
        return self.steps

    def set_steps_taken(self, steps: int) -> None:
        self.steps = steps

    def train(self) -> None:
        """Change every value, as a step does."""
        for span in self._spans:
            span.flat_master.add_(1.0)
            for which in MOMENTS:
                self.moment(span, which).mul_(2.0)
        self.copy_masters_to_weights()


class ThreadWorld(CommGroup):
    """One of several ranks that are threads of this process."""

    def __init__(self, rank: int, size: int, board: list[Any], barrier: threading.Barrier) -> None:
        super().__init__(range(size), rank, None)
        self._board = board
        self._barrier = barrier

    def gather_objects(self, value: object) -> list[Any]:
        values = self._exchange(value)
        return values if self.rank == 0 else []

    def broadcast_object(self, value: object) -> Any:
        return self._exchange(value)[0]

    def _exchange(self, value: object) -> list[Any]:
        self._board[self.rank] = value
        self._barrier.wait(10)
        values = list(self._board)
        self._barrier.wait(10)
        return values


def on_ranks(size: int, work: Callable[[CommGroup], Any]) -> list[Any]:
    """Run `work` on every rank; return the results or exceptions."""
    board, barrier = [None] * size, threading.Barrier(size)

    def answer(rank: int) -> Any:
        try:
            return work(ThreadWorld(rank, size, board, barrier))
        except Exception as error:
            return error

    ranks = [run_in_thread(partial(answer, rank), f"rank {rank}") for rank in range(size)]
    return [rank.result() for rank in ranks]


def header_of(iteration: int) -> dict[str, Any]:
    return {"iteration": iteration, "consumed_samples": 8 * iteration, "model": {"num_layers": 2}}


def add_vocabulary(directory: Path) -> None:
    """Write a file that belongs to the model, such as a tokenizer."""
    (directory / "vocabulary.txt").write_text("a b c\n")


def begin(save: Path, iteration: int, state: TinyState, world: CommGroup, **options: Any) -> TrainingSave:
    return TrainingSave(save, header_of(iteration), state, world, add_vocabulary, **options)


def save_at_once(save: Path, iteration: int, state: TinyState, world: CommGroup, **options: Any) -> SaveOutcome:
    saving = begin(save, iteration, state, world, **options)
    return world.broadcast_object(saving.write(world.gather_objects))


def hand_over(saving: TrainingSave, world: CommGroup, timeout_seconds: float = 10) -> SaveOutcome | None:
    """Run the second part of a save as in the background."""
    return saving.write(partial(gather_through_files, saving.directory, world.rank, world.size, timeout_seconds))


def holds(save: Path, whole: dict[tuple[str, str], Tensor]) -> bool:
    """Return whether the current checkpoint, which must be undamaged, has all these values; it must not mix values."""
    found = find_checkpoint(save)
    assert found is not None and found.warnings == (), found
    found.verify()
    same = []
    for (name, kind), tensor in whole.items():
        out = torch.empty_like(tensor)
        found.read(name, kind, Box.whole(tensor.shape), out)
        same.append(torch.equal(out, tensor))
    assert all(same) or not any(same)
    return all(same)


def publish_pieces(save: Path, header: dict[str, Any], ranks: Sequence[list[Piece]]) -> Path:
    temporary = create_temporary_directory(save, header["iteration"], "token")
    indices = [_write_pieces(temporary, rank, pieces) for rank, pieces in enumerate(ranks)]
    write_manifest(temporary, merge_manifest(header, indices))
    return publish(temporary, save, header["iteration"])


def save_of_ranks(save: Path, iteration: int, seed: int) -> list[Any]:
    """Save a state of two ranks; return their outcomes or errors."""
    return on_ranks(2, lambda w: save_at_once(save, iteration, TinyState(seed, w.rank, w.size), w))


def names(save: Path) -> list[str]:
    return sorted(entry.name for entry in save.iterdir())


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) * 3 // 4] ^= 4
    path.write_bytes(bytes(data))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


DAMAGES = [flip, cut, Path.unlink]

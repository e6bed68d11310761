"""A small state, and functions that save it."""

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

from megatron_ladder.checkpoint.manifest import Index, merge_manifest
from megatron_ladder.checkpoint.publish import create_temporary_directory, publish, write_manifest
from megatron_ladder.checkpoint.saving import CheckpointWriter

State = dict[tuple[str, str], torch.Tensor]
"""(name, kind) -> canonical tensor"""


def header_of(iteration: int) -> dict[str, object]:
    return {"iteration": iteration, "consumed_samples": 8 * iteration, "model": {"num_layers": 2}}


def small_state(seed: int) -> State:
    generator = torch.Generator().manual_seed(seed)
    state: State = {
        ("mlp.weight", "weight"): torch.randn(6, 5, generator=generator).bfloat16(),
        ("norm.weight", "weight"): torch.randn(7, generator=generator).bfloat16(),
        ("rank_00000.cpu", "rng"): torch.randint(0, 256, (33,), generator=generator, dtype=torch.uint8),
    }
    for kind in ("exp_avg", "exp_avg_sq"):
        state["mlp.weight", kind] = torch.randn(6, 5, generator=generator)
        state["norm.weight", kind] = torch.randn(7, generator=generator)
    return state


def write_halves(directory: Path, state: Mapping[tuple[str, str], torch.Tensor]) -> list[Index]:
    """Rank 0 writes the first half of the rows of each tensor, rank 1 the second half."""
    writers = [CheckpointWriter(directory, rank) for rank in range(2)]
    for (name, kind), tensor in state.items():
        rows = tensor.shape[0] // 2
        writers[0].add(name, kind, tensor.shape, [0] * tensor.dim(), tensor[:rows])
        writers[1].add(name, kind, tensor.shape, [rows] + [0] * (tensor.dim() - 1), tensor[rows:])
    return [writer.finish() for writer in writers]


def save_state(save: Path, iteration: int, token: str, state: State) -> Path:
    temporary = create_temporary_directory(save, iteration, token)
    write_manifest(temporary, merge_manifest(header_of(iteration), write_halves(temporary, state)))
    return publish(temporary, save, iteration)


@pytest.fixture
def header() -> Callable[[int], dict[str, object]]:
    return header_of


@pytest.fixture
def state() -> Callable[[int], State]:
    return small_state


@pytest.fixture
def write() -> Callable[[Path, State], list[Index]]:
    return write_halves


@pytest.fixture
def save() -> Callable[[Path, int, str, State], Path]:
    return save_state

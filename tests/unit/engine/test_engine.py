"""What a pipeline stage computes for a micro-batch beyond its layers, on one rank without the others."""

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_ladder.comm.group import CommGroup, Work
from megatron_ladder.comm.mesh import ProcessMesh
from megatron_ladder.engine.engine import Engine
from megatron_ladder.model.language_model import LanguageModel, LossScales
from megatron_ladder.model.operations import ExpertOptions
from tests.helpers.sharded import small_model

LAYERS, STAGES = 24, 3
LOSSES = ExpertOptions(balancing=0.01, z_loss=0.01)


class Link(CommGroup):
    """The group of a stage whose neighbours send ones at once."""

    def start_send(self, tensor: Tensor, target: int) -> Work:
        return SimpleNamespace(wait=lambda: None)

    def start_receive(self, into: Tensor, source: int) -> Work:
        into.data.fill_(1.0)
        return SimpleNamespace(wait=lambda: None)


class Kernels(TorchDispatchMode):
    """Counts operators that are kernels on a device, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if not func.is_view and name not in ("detach", "_unsafe_view", "empty", "new_empty", "empty_like"):
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


def kernels_of_a_stage(
    wiring: str, rank: int, chunks: list[range], micro_batches: int, experts: dict[str, Any]
) -> Counter[str]:
    """Return the kernels of a stage's passes, without those of the link."""
    config = small_model(num_layers=LAYERS, residual_mode=wiring, **experts)
    mesh = replace(ProcessMesh.single(), pipeline=Link(range(STAGES), rank, None))
    model = LanguageModel(config, mesh, chunks=chunks, seed=1, experts=LOSSES)
    engine: Any = Engine(model, optimizer=None, mesh=mesh, device=torch.device("cpu"))  # type: ignore[arg-type]
    ids = torch.randint(0, 101, (2, 13))
    mask = torch.ones(2, 12)
    batches = [(ids[:, :-1], ids[:, 1:], mask, None, torch.tensor([12, 9]), None)] * micro_batches
    with Kernels() as kernels:
        engine.run_passes(batches, trains=True, scales=LossScales(*torch.ones(3, dtype=torch.float64)))
    kernels.counts.pop("fill_", None)
    return kernels.counts


@pytest.mark.parametrize("wiring", ["standard", "ladder"])
@pytest.mark.parametrize("experts", [{}, {"num_experts": 4, "moe_ffn_hidden_size": 8, "moe_layers": range(LAYERS)}])
def test_a_middle_chunk_runs_at_most_three_kernels_beyond_its_layers(wiring: str, experts: dict[str, Any]) -> None:
    """Forward and backward together, and one more for each loss of experts.

    A second chunk of two layers costs two layers more, and the chunk itself.
    """

    def total(*chunks: range) -> int:
        return kernels_of_a_stage(wiring, 1, [*chunks], 1, experts).total()

    one_layer = total(range(2, 6)) - total(range(2, 5))
    one_chunk = total(range(2, 4), range(8, 10)) - total(range(2, 4)) - 2 * one_layer
    losses = len(LOSSES.loss_names) if experts else 0
    assert one_layer > 50 and one_chunk <= 3 + losses


def test_ids_are_checked_where_they_are_read_and_angles_computed_once() -> None:
    first, middle, last = ([range(start, start + 2), range(start + 6, start + 8)] for start in (0, 2, 16))
    found = [kernels_of_a_stage("ladder", rank, chunks, 5, {}) for rank, chunks in enumerate((first, middle, last))]
    assert [kernels["_assert_async"] for kernels in found] == [5, 0, 5]
    assert [kernels["cos"] for kernels in found] == [1, 1, 1]


def test_a_step_after_an_evaluation_in_inference_mode() -> None:
    """Autograd cannot save what was made in inference mode."""
    model = LanguageModel(small_model(), ProcessMesh.single(), seed=1)
    engine: Any = Engine(model, None, ProcessMesh.single(), torch.device("cpu"))  # type: ignore[arg-type]
    ids = torch.randint(0, 101, (2, 13))
    batches: list[Any] = [(ids[:, :-1], ids[:, 1:], None, None, None, None)]
    with torch.inference_mode():
        (evaluated,), _ = engine.run_passes(batches, trains=False)
    (trained,), _ = engine.run_passes(batches, trains=True)
    assert torch.equal(evaluated, trained)

"""State of experts over data-parallel ranks: initial weights, updates and checkpoints, without passes.

Gradients are given, so that the result of every layout is known: sums of small whole numbers, which are exact in any
order. The state is then bitwise that of one process.
"""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron_ladder.checkpoint.format import Checkpoint
from megatron_ladder.engine.state import clip_gradients, gradient_norm, sum_partial_gradients
from megatron_ladder.parallel.layout import parameter_sections
from megatron_ladder.train.setup import Trainer
from tests.helpers.pairwise import usual_share
from tests.helpers.pool import GlooPools
from tests.helpers.steps import everything, launch_of
from tests.helpers.training import CPU, build_trainer_here, load_trainer, save_trainer

RECIPE = (
    "--train-iters 9 --lr 1e-2 --micro-batch-size 1 --global-batch-size 4 --residual-mode ladder --num-experts 8 "
    "--moe-ffn-hidden-size 16 --moe-layers 1-2 --moe-shared-expert-intermediate-size 16 --add-moe-bias "
    "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --tie-embeddings"
).split()


def whole_gradient(name: str, shape: tuple[int, ...], step: int, quarter: int) -> Tensor:
    """Return the gradient of a quarter of the batch: whole numbers, whose sums are exact."""
    seed = sum(map(ord, name)) * 1000 + step * 10 + quarter
    return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(seed)).float()


def own_gradients(trainer: Trainer, step: int) -> dict[torch.nn.Parameter, Tensor]:
    """Return this rank's part of the gradients, which are sums over the quarters of a batch.

    A rank adds every quarter that it shares with no other rank with the same elements.
    """
    mesh = trainer.mesh
    gradients = {}
    for parameter, sections in parameter_sections(trainer.model):
        gradient = gradients[parameter] = torch.zeros_like(parameter)
        if parameter is trainer.model.tied_weight and mesh.pipeline.rank > 0:
            # The other copy has the whole gradient.
            continue
        for section in sections:
            first, ranks = mesh.data.rank, mesh.data.size
            if section.tensor.expert_dim is not None and mesh.experts.size > 1:
                first, ranks = mesh.experts_data.rank, mesh.experts_data.size
            elif section.is_partial:
                replicas = section.tensor.replicas(mesh.tensor.size)
                first, ranks = first * replicas + mesh.tensor.rank % replicas, ranks * replicas
            for quarter in range(first, 4, ranks):
                values = whole_gradient(section.name, section.tensor.shape, step, quarter)
                section.view(gradient).add_(values[section.box.slices()])
    return gradients


def take_step(trainer: Trainer, step: int) -> float:
    """Update the weights with the given gradients, as `train_step` does, and return the norm."""
    optimizer = trainer.engine.optimizer
    gradients = own_gradients(trainer, step)
    optimizer.finish_step()
    with optimizer.reducing(1):
        torch.stack([(parameter * gradient).sum() for parameter, gradient in gradients.items()]).sum().backward()
    reduced = optimizer.gradients()
    sum_partial_gradients(reduced, trainer.mesh, CPU)
    norm, _ = gradient_norm(reduced, trainer.mesh.world, CPU, torch.zeros(0, dtype=torch.float64))
    # A power of two leaves every bit of the gradients in place.
    clip_gradients(reduced, 1024.0, 1.0)
    optimizer.step()
    return norm


def stay(argv: list[str], first: int, load: Path | None, saves: tuple[Path, Path]) -> list[float]:
    """On each rank: save the loaded or initial state, take two steps, and save again; return the norms."""
    trainer = build_trainer_here([*RECIPE, *argv, "--seed", "1" if load is None else "99"])
    if load is not None:
        load_trainer(trainer, load)
    save_trainer(trainer, saves[0], first)
    norms = [take_step(trainer, first + number) for number in range(2)]
    save_trainer(trainer, saves[1], first + 2)
    return norms


def assert_same(one: Path, other: Path) -> None:
    first, second = everything(one), everything(other)
    assert first.keys() == second.keys()
    assert [key for key in first if not torch.equal(first[key], second[key])] == []


EXPERTS = "--expert-model-parallel-size"
JOURNEYS = [
    ["1x1x2 --zero-stage 1 {} 2", "1x1x1", "2x1x1"],
    ["1x1x4 --zero-stage 1 {} 4", "1x1x1", "2x1x1 --sequence-parallel --expert-sharding experts"],
    ["1x1x4 --zero-stage 0 {} 2", "1x1x4 --zero-stage 1 {} 2", "1x1x2"],
    ["2x1x2 --zero-stage 1 --sequence-parallel {} 4", "4x1x1 --zero-stage 1 --sequence-parallel {} 2", "2x1x2"],
    ["2x1x2 --zero-stage 0 --sequence-parallel {} 2", "1x2x2 --zero-stage 0 {} 2", "1x1x4"],
    ["1x2x2 --zero-stage 1 {} 2", "2x2x1 --zero-stage 1 --sequence-parallel {} 2", "2x1x1"],
]
CASES = usual_share([(journey, optimizer) for optimizer in ("adamw", "muon") for journey in JOURNEYS], 4)


@pytest.mark.long
@pytest.mark.parametrize(("journey", "optimizer"), CASES)
def test_the_state_does_not_depend_on_who_holds_the_experts(
    gloo_pools: GlooPools, tmp_path: Path, journey: list[str], optimizer: str
) -> None:
    """Initial weights, and the states before and after the steps of every layout, are those of one process."""
    load: Path | None = None
    alone: Path | None = None
    for number, place in enumerate(journey):
        layout, _, flags = place.format(EXPERTS).partition(" ")
        first = 2 * number
        saves = tmp_path / f"{number}.begin", tmp_path / f"{number}.end"
        expected = tmp_path / f"{number}.begin.alone", tmp_path / f"{number}.end.alone"
        world, argv = launch_of(layout, f"--optimizer {optimizer}", flags)
        norms = gloo_pools(world).run(stay, argv, first, load, saves)
        (norms_alone,) = gloo_pools(1).run(stay, ["--optimizer", optimizer], first, alone, expected)
        assert norms == [pytest.approx(norms_alone, rel=1e-6)] * world
        for saved, same in zip(saves, expected, strict=True):
            assert_same(saved, same)
        load, alone = saves[1], expected[1]


def save_initial(argv: list[str], save: Path) -> None:
    save_trainer(build_trainer_here([*RECIPE, *argv]), save, 1)


@pytest.mark.parametrize("zero", [0, 1])
def test_one_of_the_ranks_that_hold_an_expert_writes_it(gloo_pools: GlooPools, tmp_path: Path, zero: int) -> None:
    """Ranks 0 and 2 hold the first four experts, 1 and 3 the others."""
    gloo_pools(4).run(save_initial, ["--zero-stage", str(zero), EXPERTS, "2"], tmp_path)
    stored = Checkpoint.open(tmp_path).stored("weight")
    matrices = [tensor for name, tensor in stored.items() if "experts." in name and "shared" not in name]
    assert len(matrices) == 12
    writers: tuple[set[int], set[int]] = set(), set()
    for tensor in matrices:
        for first, writer in zip(tensor.offsets[:, 0].tolist(), tensor.writers.tolist(), strict=True):
            writers[first // 4].add(writer)
    assert writers == (({0}, {1}) if zero == 0 else ({0, 2}, {1, 3}))

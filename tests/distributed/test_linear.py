"""The parallel layers alone, compared with torch's own linear layer on whole matrices."""

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_ladder.blueprint.tensors import Matrix, TensorSpec
from megatron_ladder.parallel.layout import parameter_sections
from megatron_ladder.parallel.linear import ColumnParallelLinear, RowParallelLinear
from tests.helpers.pool import GlooPools
from tests.helpers.sharded import mesh_of

CPU, DOUBLE = torch.device("cpu"), torch.float64


def whole_matrices() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"up.weight": (8, 6), "up.bias": (8,), "down.weight": (5, 8), "down.bias": (5,)}
    return {name: torch.randn(shape, generator=generator, dtype=DOUBLE) for name, shape in shapes.items()}


def run_layers() -> dict[str, Tensor]:
    """Return the output of a column-parallel and a row-parallel layer, and gradients."""
    mesh, whole = mesh_of(2), whole_matrices()
    up_matrix = Matrix(TensorSpec("up.weight", (8, 6), 0), TensorSpec("up.bias", (8,), 0))
    down_matrix = Matrix(TensorSpec("down.weight", (5, 8), 1), TensorSpec("down.bias", (5,)))
    up = ColumnParallelLinear(
        [up_matrix], group=mesh.tensor, kv_replica_group=mesh.kv_replica, dtype=DOUBLE, device=CPU
    )
    down = RowParallelLinear(down_matrix, group=mesh.tensor, dtype=DOUBLE, device=CPU)
    with torch.no_grad():
        for layer in (up, down):
            for parameter, sections in parameter_sections(layer):
                for section in sections:
                    box = section.box.slices()
                    section.view(parameter).copy_(whole[section.name][box])
    x = torch.linspace(-1, 1, 18, dtype=DOUBLE).view(3, 1, 6).requires_grad_()
    in_flight = down(up(x).tanh())
    assert in_flight.work is not None and in_flight.partial.shape == (3, 1, 5)
    output = in_flight.wait()
    output.square().sum().backward()
    assert x.grad is not None and down.bias is not None and down.bias.grad is not None
    return {"output": output.detach(), "x": x.grad, "bias": down.bias.grad}


def test_two_ranks_equal_one(gloo_pools: GlooPools) -> None:
    whole = {name: tensor.requires_grad_() for name, tensor in whole_matrices().items()}
    x = torch.linspace(-1, 1, 18, dtype=DOUBLE).view(3, 1, 6).requires_grad_()
    inner = F.linear(x, whole["up.weight"], whole["up.bias"]).tanh()
    output = F.linear(inner, whole["down.weight"], whole["down.bias"])
    output.square().sum().backward()
    for found in gloo_pools(2).run(run_layers):
        for name, expected in (("output", output.detach()), ("x", x.grad), ("bias", whole["down.bias"].grad)):
            torch.testing.assert_close(found[name], expected, rtol=1e-12, atol=1e-12)

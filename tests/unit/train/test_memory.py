"""The memory that a forward pass keeps, compared with the tensors that it leaves."""

import torch
from torch import nn
from torch._dynamo.utils import counters

from megatron_ladder.comm.group import CommGroup
from megatron_ladder.comm.mesh import ProcessMesh
from megatron_ladder.model.language_model import LanguageModel
from megatron_ladder.model.operations import Operations, compile_operations
from megatron_ladder.model.stack import StackOptions
from megatron_ladder.train.profile import ActivationMeter
from tests.unit.generate.tiny_model import tiny_config

CPU = torch.device("cpu")


class Chain(nn.Module):
    """Two products of a weight [8, 8], with squares between them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = x @ self.weight
        return ((hidden * 3.0).square() @ self.weight).sum()


def test_only_what_backward_needs_is_counted() -> None:
    model, x = Chain(), torch.randn(100, 8)
    with ActivationMeter(model, CPU) as meter:
        loss = model(x)
    # x existed before and hidden is freed; 3 hidden, its square, and the sum remain.
    assert meter.kept_bytes == 2 * 100 * 8 * 4 + 4
    assert meter.largest(CommGroup.alone()) == meter.kept_bytes
    loss.backward()


def test_only_the_first_training_pass_is_measured() -> None:
    model = Chain()
    with ActivationMeter(model, CPU) as meter:
        with torch.no_grad():
            model(torch.randn(10, 8))
        assert meter.kept_bytes is None
        first = model(torch.randn(20, 8))
        kept = meter.kept_bytes
        second = model(torch.randn(50, 8))
        assert kept == meter.kept_bytes == 2 * 20 * 8 * 4 + 4
    (first + second).backward()
    assert not model._forward_hooks and not model._forward_pre_hooks


def test_a_compiled_model_is_measured_eagerly_and_compiled_afterwards() -> None:
    torch.compiler.reset()
    counters.clear()
    config = tiny_config()
    tokens = torch.arange(24).view(2, 12)
    model = LanguageModel(config, ProcessMesh.single(), StackOptions(recompute_layers=1), seed=1)
    with ActivationMeter(model, torch.device("cpu")) as meter:
        model(tokens, tokens)
    plain = meter.kept_bytes
    options = StackOptions(recompute_layers=1, operations=compile_operations(Operations(), "aot_eager"))
    model = LanguageModel(config, ProcessMesh.single(), options, seed=1)
    with ActivationMeter(model, torch.device("cpu")) as meter:
        model(tokens, tokens).backward()
        assert not counters["stats"] and meter.largest(CommGroup.alone()) == plain
        model(tokens, tokens).backward()
    assert meter.kept_bytes == plain and counters["stats"]["unique_graphs"] > 2

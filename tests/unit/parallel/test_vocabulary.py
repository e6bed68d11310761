"""The chunked loss of one rank: values and gradients against torch's, and the memory that it takes."""

from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_ladder.blueprint.specs import Role, TensorSpec
from megatron_ladder.comm.mesh import ProcessMesh
from megatron_ladder.parallel.layout import Placement
from megatron_ladder.parallel.vocabulary import SoftTargets, Targets, VocabParallelHead
from tests.helpers.live_bytes import LiveBytes
from tests.helpers.pairwise import quick_share

VOCAB, WIDTH = 1000, 16


class Problem(NamedTuple):
    head: VocabParallelHead
    x: Tensor
    targets: Targets


def problem(tokens: int, dtype: torch.dtype, soft_cap: float | None = None) -> Problem:
    torch.manual_seed(3)
    place = Placement(ProcessMesh.single(), dtype, torch.device("cpu"))
    tensor = TensorSpec("head", (VOCAB, WIDTH), Role.EMBEDDING, sharded_dim=0, padded=True)
    head = VocabParallelHead(tensor, place, soft_cap)
    torch.nn.init.normal_(head.weight[:VOCAB])
    head.weight.data[VOCAB:] = 0
    labels = torch.randint(0, VOCAB, (tokens // 2, 2))
    labels[::7] = -100  # Ignored, in `cross_entropy` too.
    return Problem(head, torch.randn(tokens // 2, 2, WIDTH).to(dtype).requires_grad_(), Targets(labels, labels % 3 / 2))


def of_torch(x: Tensor, weight: Tensor, targets: Targets, soft_cap: float | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss and the gradients in fp64."""
    x, weight = (tensor.detach().double().requires_grad_() for tensor in (x, weight[:VOCAB]))
    logits = x @ weight.t()
    logits = logits if soft_cap is None else soft_cap * torch.tanh(logits / soft_cap)
    losses = F.cross_entropy(logits.flatten(0, 1), targets.labels.flatten(), reduction="none")
    assert targets.weights is not None
    loss = losses @ targets.weights.flatten().double()
    loss.backward()
    assert x.grad is not None and weight.grad is not None
    return loss.detach(), x.grad, F.pad(weight.grad, (0, 0, 0, -VOCAB % 128))


@pytest.mark.parametrize("soft_cap", [None, 3.0])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_loss_and_gradients_are_torchs(dtype: torch.dtype, tolerance: float, soft_cap: float | None) -> None:
    head, x, targets = problem(1000, dtype, soft_cap)
    (loss,) = head(x, targets)
    (0.25 * loss).backward()
    expected, *gradients = of_torch(x, head.weight, targets, soft_cap)
    # The logits of bf16 are rounded, those of the reference are not.
    assert loss.item() == pytest.approx(expected.item(), rel=tolerance)
    for found, gradient in zip((x.grad, head.weight.grad), gradients, strict=True):
        assert found is not None and found.dtype == dtype
        assert (found - 0.25 * gradient).norm() <= tolerance * (0.25 * gradient).norm()


def test_gradients_of_chunks_are_summed_in_float32() -> None:
    head, x, _ = problem(1024, torch.bfloat16)
    head.weight.data.zero_()
    # The first of 8 chunks adds 256, each of the others 0.5, of which a sum in bf16 would lose all.
    x.data.view(1024, WIDTH)[:128], x.data.view(1024, WIDTH)[128:] = 2.0, 1 / 256
    (loss,) = head(x, Targets(torch.zeros(512, 2, dtype=torch.int64), torch.ones(512, 2)))
    loss.backward()
    assert head.weight.grad is not None
    assert torch.equal(head.weight.grad[0], torch.full((WIDTH,), -259.5).bfloat16())


def test_a_second_backward_of_one_graph_is_an_error() -> None:
    head, x, targets = problem(64, torch.float32)
    (loss,) = head(x, targets)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize(("kind", "most"), [("loss", 2), ("predictions", 2), ("distillation", 4)])
@pytest.mark.parametrize("soft_cap", [None, 3.0])
@pytest.mark.parametrize("dtype", quick_share([torch.bfloat16, torch.float32], 2))
def test_memory_per_logit(dtype: torch.dtype, soft_cap: float | None, kind: str, most: int) -> None:
    """In bytes. The logits of both models of a distillation in fp32 would take eight."""
    tokens = 4096
    head, x, targets = problem(tokens, dtype, soft_cap)
    if kind == "distillation":
        teacher, hidden_states, _ = problem(tokens, dtype)
        targets = replace(targets, soft=SoftTargets(hidden_states.detach(), teacher, 0.5, 2.0))
    predicts = kind == "predictions"
    with LiveBytes() as memory:
        result = head(x, replace(targets, predicts=predicts))
        if not predicts:
            result[0].backward()
    logits = tokens * head.weight.shape[0]
    gradients = 0 if predicts else x.nbytes + head.weight.numel() * (4 if dtype == torch.float32 else 6)
    assert memory.peak - gradients <= most * logits
    # One chunk's logits and softmax were counted.
    assert memory.peak >= (4 + dtype.itemsize) / 8 * logits

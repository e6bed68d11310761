"""Products of tokens with the matrices of their experts, compared with a loop over tokens."""

import functools
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_ladder.parallel.products import (
    ExpertPass,
    ExpertWeights,
    GradientSink,
    SortedRows,
    reads_on_host,
    run_experts,
)

EXPERTS, TOKENS, CHOICES = 6, 40, 2


def by_loop(x: Tensor, experts: ExpertWeights, chosen: Tensor, weights: Tensor, local: range) -> Tensor:
    """Sum over each token's experts that this rank holds."""
    gate, up, down, gate_bias, up_bias, down_bias = experts
    assert gate_bias is not None and up_bias is not None
    found = []
    for token in range(len(x)):
        y = torch.zeros_like(x[token])
        for expert, weight in zip(chosen[token].tolist(), weights[token], strict=True):
            if expert in local:
                place = expert - local.start
                of_gate, of_up = gate[place] @ x[token] + gate_bias[place], up[place] @ x[token] + up_bias[place]
                y = y + weight * (down[place] @ (of_gate * of_up) + (0 if down_bias is None else down_bias[place]))
        found.append(y)
    return torch.stack(found)


def multiply_halves(gate_up: Tensor) -> Tensor:
    first, second = gate_up.chunk(2, dim=-1)
    return first * second


def by_groups(x: Tensor, experts: ExpertWeights, chosen: Tensor, weights: Tensor, local: range, kept: int) -> Tensor:
    rows = SortedRows.of(chosen, local.start, len(local), all_local=len(local) == EXPERTS)
    return run_experts(x, experts, weights, ExpertPass(rows, kept, multiply_halves, GradientSink()))


def largest_errors(
    dtype: torch.dtype, hidden: int, width: int, local: range, device: torch.device, kept: int = TOKENS * CHOICES
) -> tuple[float, ...]:
    """Return the errors of the output and of all gradients, relative to their largest values in fp64.

    No token chooses expert 3 or 5, whose gradients must be zero. Products of `kept` rows are kept for backward.
    """
    generator = torch.Generator().manual_seed(hidden)
    shapes = [(TOKENS, hidden), *[(len(local), width, hidden)] * 2, (len(local), hidden, width)]
    shapes += [(len(local), width)] * 2
    values = [torch.randn(shape, generator=generator, dtype=torch.float64) / shape[-1] ** 0.25 for shape in shapes]
    choices = torch.tensor([[0, 1], [1, 2], [4, 0], [2, 4]])
    chosen = choices[torch.randint(4, (TOKENS,), generator=generator)]
    values.append(torch.rand(TOKENS, CHOICES, generator=generator, dtype=torch.float64))
    rounded = [value.to(dtype) for value in values]
    seed = torch.randn(TOKENS, hidden, generator=generator, dtype=torch.float64).to(dtype)
    found = []
    cpu = torch.device("cpu")
    grouped = functools.partial(by_groups, kept=kept)
    for compute, inputs, place in ((grouped, rounded, device), (by_loop, [one.double() for one in rounded], cpu)):
        x, *matrices, weights = leaves = [value.to(place, copy=True).requires_grad_() for value in inputs]
        y = compute(x, ExpertWeights(*matrices), chosen.to(place), weights, local)
        # An expanded gradient would do as well.
        y.backward(seed.to(y))
        found.append([one.cpu() for one in (y.detach(), *(leaf.grad for leaf in leaves)) if one is not None])
    assert {one.dtype for one in found[0]} == {dtype}
    for empty in {3, 5} & set(local):
        assert not any(one[empty - local.start].any() for one in found[0][2:7])
    return tuple(
        float((ours.double() - loop).abs().max() / loop.abs().max()) for ours, loop in zip(*found, strict=True)
    )


@pytest.mark.parametrize("local", [range(6), range(2, 4), range(4, 6)], ids=["all", "two", "the-last-two"])
@pytest.mark.parametrize(("hidden", "width"), [(16, 8), (16, 6), (10, 24), (9, 5)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=["fp64", "fp32", "bf16"])
def test_products_and_gradients_are_those_of_a_loop(dtype: torch.dtype, hidden: int, width: int, local: range) -> None:
    """Widths whose rows are no multiples of 16 bytes, experts without tokens, and a rank with some of the experts."""
    errors = largest_errors(dtype, hidden, width, local, torch.device("cpu"))
    assert len(errors) == 8 and max(errors) <= {torch.float64: 1e-13, torch.float32: 1e-6, torch.bfloat16: 2e-2}[dtype]


@pytest.mark.parametrize("tokens", [TOKENS, 1, 0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=["fp64", "fp32", "bf16"])
def test_rows_that_end_in_their_weights(dtype: torch.dtype, tokens: int) -> None:
    """Each has one expert."""
    generator = torch.Generator().manual_seed(1)
    shapes = [(tokens, 17), (EXPERTS, 8, 16), (EXPERTS, 8, 16), (EXPERTS, 16, 8)]
    shapes += [(EXPERTS, 8), (EXPERTS, 8), (EXPERTS, 16)]
    values = [torch.randn(shape, generator=generator, dtype=torch.float64).div(2).to(dtype) for shape in shapes]
    chosen = torch.randint(EXPERTS, (tokens, 1), generator=generator)
    rows, *matrices = (value.clone().requires_grad_() for value in values)
    expert_pass = ExpertPass(SortedRows.of(chosen, 0, EXPERTS, all_local=True), tokens, multiply_halves, GradientSink())
    y = run_experts(rows, ExpertWeights(*matrices), None, expert_pass)
    y.sum().backward()
    ours = [y.detach(), *(leaf.grad for leaf in (rows, *matrices))]
    if not tokens:
        assert y.shape == (0, 16) and not any(one is None or one.any() for one in ours)
        return
    rows, *matrices = (value.double().requires_grad_() for value in values)
    y = by_loop(rows[:, :-1], ExpertWeights(*matrices), chosen, rows[:, -1:], range(EXPERTS))
    y.sum().backward()
    for one, loop in zip(ours, [y.detach(), *(leaf.grad for leaf in (rows, *matrices))], strict=True):
        assert one is not None and loop is not None
        limit = {torch.float64: 1e-13, torch.float32: 1e-6, torch.bfloat16: 2e-2}[dtype]
        assert (one.double() - loop).abs().max() <= limit * loop.abs().max()


@pytest.mark.parametrize("kept", [0, 1, 12, 79])
@pytest.mark.parametrize("local", [range(6), range(2, 4), range(4, 6)], ids=["all", "two", "the-last-two"])
def test_rows_that_are_not_kept_are_computed_again(local: range, kept: int) -> None:
    """Fewer rows than the rank's experts have, and more: a border within and between experts."""
    for dtype, limit in ((torch.float64, 1e-13), (torch.bfloat16, 2e-2)):
        assert max(largest_errors(dtype, 16, 8, local, torch.device("cpu"), kept)) <= limit


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_rank_with_all_experts_masks_no_products(dtype: torch.dtype) -> None:
    """The results are those of a rank that looks for rows of others, bit for bit."""
    generator = torch.Generator().manual_seed(1)
    shapes = [(TOKENS, 16), (EXPERTS, 8, 16), (EXPERTS, 8, 16), (EXPERTS, 16, 8), (TOKENS, CHOICES)]
    values = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]
    chosen = torch.randint(EXPERTS, (TOKENS, CHOICES), generator=generator)
    masks, results = Counter[bool](), list[list[Tensor]]()
    for all_local in (False, True):

        class Masks(TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                masks[all_local] += func.overloadpacket is torch.ops.aten.where  # noqa: B023
                return func(*args, **(kwargs or {}))

        x, gate, up, down, weights = leaves = [value.clone().requires_grad_() for value in values]
        with Masks():
            rows = SortedRows.of(chosen, 0, EXPERTS, all_local)
            matrices = ExpertWeights(gate, up, down)
            y = run_experts(x, matrices, weights, ExpertPass(rows, TOKENS * CHOICES, multiply_halves, GradientSink()))
            y.backward(torch.ones_like(y))
        results.append([y.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True)) and len(results[0]) == 6
    # Gate, up and down forward, and all three backward, and the sorting.
    assert masks == {False: 7, True: 0}


def test_gradients_that_blackwell_leaves_unwritten_are_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    multiply = torch.nn.functional.grouped_mm

    def leave_unwritten(left: Tensor, right: Tensor, offs: Tensor) -> Tensor:
        product = multiply(left, right, offs=offs)
        if right.dim() == 2:
            product[offs.diff(prepend=offs.new_zeros(1)) == 0] = torch.nan
        return product

    monkeypatch.setattr(torch.nn.functional, "grouped_mm", leave_unwritten)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    monkeypatch.setattr(Tensor, "is_cuda", True)
    assert max(largest_errors(torch.bfloat16, 16, 8, range(6), torch.device("cpu"))) <= 2e-2


@pytest.mark.parametrize(
    ("dtype", "shape", "capability", "waits"),
    [
        (torch.bfloat16, (2, 24, 16), (9, 0), False),
        (torch.bfloat16, (2, 24, 16), (10, 3), False),
        (torch.bfloat16, (2, 24, 16), (8, 9), True),
        (torch.bfloat16, (2, 24, 16), (12, 0), True),
        (torch.bfloat16, (2, 20, 16), (9, 0), True),
        (torch.bfloat16, (2, 24, 12), (9, 0), True),
        (torch.float32, (2, 24, 16), (9, 0), True),
    ],
)
def test_products_that_wait_for_the_host_are_not_captured(
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    capability: tuple[int, int],
    waits: bool,
) -> None:
    """torch's own fallback reads the offsets on the host."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert reads_on_host(torch.empty(shape, dtype=dtype)) is waits

"""Products of tokens with the matrices of their experts, compared with a loop over tokens."""

import pytest
import torch
from torch import Tensor

from megatron_ladder.parallel.grouped import SortedRows, expert_inputs, grouped_linear

EXPERTS, TOKENS, CHOICES = 6, 40, 2


def by_loop(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, chosen: Tensor, weights: Tensor, local: range) -> Tensor:
    """Sum over each token's experts that this rank holds."""
    found = []
    for token in range(len(x)):
        y = torch.zeros_like(x[token])
        for expert, weight in zip(chosen[token].tolist(), weights[token], strict=True):
            if expert in local:
                place = expert - local.start
                y = y + weight * (down[place] @ ((gate[place] @ x[token]) * (up[place] @ x[token])))
        found.append(y)
    return torch.stack(found)


def by_groups(
    x: Tensor, gate: Tensor, up: Tensor, down: Tensor, chosen: Tensor, weights: Tensor, local: range
) -> Tensor:
    rows = SortedRows.of(chosen, local.start, len(local))
    first, second = expert_inputs(x, gate, up, rows, None).chunk(2, dim=-1)
    return rows.sum_by_token(grouped_linear(first * second * rows.sort(weights).unsqueeze(-1), down, rows))


@pytest.mark.parametrize("local", [range(6), range(2, 4), range(4, 6)], ids=["all", "two", "the-last-two"])
@pytest.mark.parametrize(("hidden", "width"), [(16, 8), (16, 6), (10, 24), (9, 5)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=["fp64", "fp32", "bf16"])
def test_products_and_gradients_are_those_of_a_loop(dtype: torch.dtype, hidden: int, width: int, local: range) -> None:
    """Widths whose rows are no multiples of 16 bytes, experts without tokens, and a rank with some of the experts."""
    generator = torch.Generator().manual_seed(hidden)
    shapes = [(TOKENS, hidden), *[(len(local), width, hidden)] * 2, (len(local), hidden, width)]
    values = [torch.randn(shape, generator=generator, dtype=torch.float64) / shape[-1] ** 0.25 for shape in shapes]
    # No token chooses expert 3 or 5.
    choices = torch.tensor([[0, 1], [1, 2], [4, 0], [2, 4]])
    chosen = choices[torch.randint(4, (TOKENS,), generator=generator)]
    values.append(torch.rand(TOKENS, CHOICES, generator=generator, dtype=torch.float64))
    rounded = [value.to(dtype) for value in values]
    seed = torch.randn(TOKENS, hidden, generator=generator, dtype=torch.float64).to(dtype)
    found = []
    for compute, inputs in ((by_groups, rounded), (by_loop, [value.double() for value in rounded])):
        x, gate, up, down, weights = leaves = [value.clone().requires_grad_() for value in inputs]
        y = compute(x, gate, up, down, chosen, weights, local)
        # An expanded gradient would do as well.
        y.backward(seed.to(y.dtype))
        found.append([y.detach(), *(leaf.grad for leaf in leaves)])
    tolerance = {torch.float64: 1e-13, torch.float32: 1e-6, torch.bfloat16: 2e-2}[dtype]
    for ours, loop in zip(*found, strict=True):
        assert ours is not None and loop is not None
        assert ours.dtype == dtype
        assert (ours.double() - loop).abs().max() <= tolerance * loop.abs().max()
    _, _, of_gate, of_up, of_down, _ = found[0]
    for empty in {3, 5} & set(local):
        assert not any(one[empty - local.start].any() for one in (of_gate, of_up, of_down) if one is not None)

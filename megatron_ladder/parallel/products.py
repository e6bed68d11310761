"""Products of rows with a matrix, or with a matrix for each expert, and gradients that autograd would handle too late.

Rows x [n, in] and weight [out, in] give x @ weight^T. With the gradient g [n, out] of the result:

    g @ weight     of the rows. Each tensor-parallel rank has a partial sum of it, and autograd would wait for the sum
                   where it arises. A caller that walks sub-blocks backward itself (`model/backward.py`) passes an
                   `InputGradient` instead: the product starts the sum there and continues with the gradient of its
                   weight, and the caller waits when it needs the result, one sub-block later.
    g^T @ x        of the weight. Autograd would write it in the precision of the model, and a second kernel would add
                   it to the sum of an optimizer that sums in fp32. A `GradientSink` adds it at once. Nothing in the
                   walk depends on it, so the sink can also keep the product until a collective is in flight.

ZeRO-3 gathers a parameter before each use and releases it after; `linear` and `reached_by_backward` allow for that.

The rows of experts are sorted, and multiplied with stacked matrices, the rows of each expert with its matrix:

    rows sorted by expert   [ 0 0 0 | 1 | 2 2 2 2 | ... ]      weight [E, out, in]
    offsets                        3   4         8             the end of each expert's rows

A rank that holds only some of the experts sorts their rows first; what lies behind the last offset belongs to others,
and is zero in every result. The sizes of tensors do not depend on the choices, so that passes can be captured. Rows are
not sorted by hand on the host, which never reads how many an expert has, except where torch's grouped product cannot be
used.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import get_gradient_edge

from megatron_ladder.comm.inflight import InFlight, Launch
from megatron_ladder.torch_private import run_backward

_GROUPED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_ALIGNMENT = 16
"""Bytes of which a row of an operand of torch's grouped product must be a multiple."""
_HOPPER, _BLACKWELL = 9, 10
"""Major capabilities of the GPUs that torch's grouped product has a kernel for; elsewhere, as on workstation Blackwell
(12), the host reads the offsets."""


class InputGradient:
    """Serves one backward pass of one sub-block; owned by the code that walks it.

    Attributes:
        launch: starts to sum the parts of the ranks; may be replaced before backward.
        in_flight: the gradient, once backward has computed this rank's part of it for all uses of the input.
        needs_input_again: whether backward needs the input, and the caller has to gather it again.
        input_again: the input, once that gather has started.
    """

    def __init__(self, launch: Launch, keeps_input: bool = True) -> None:
        """Without `keeps_input` the caller sets `input_again` before backward."""
        self.launch = launch
        self.needs_input_again = False
        self.input_again: InFlight | None = None
        self.in_flight: InFlight | None = None
        self._keeps_input = keeps_input
        self._uses = 0
        self._part: Tensor | None = None

    def use(self, x: Tensor, trains: bool) -> tuple[Tensor, ...]:
        """Count one more use of the input, by weights that train or not; return what it keeps for backward."""
        self._uses += 1
        self.needs_input_again |= trains and not self._keeps_input
        return (x,) if trains and self._keeps_input else ()

    def add(self, part: Tensor) -> None:
        """Add this rank's gradient of one use; that of the last one starts the sum over the ranks."""
        self._part = part if self._part is None else self._part + part
        self._uses -= 1
        if self._uses == 0:
            self.in_flight = self.launch(self._part)
            self._part = None

    def wait(self) -> Tensor:
        """Return the gradient of the input: [s, b, in] summed, this rank's positions of it, or its part of the sum."""
        assert self.in_flight is not None, "the column-parallel layer's backward has not run"
        return self.in_flight.wait()


class GradientSink:
    """Takes gradients of the weights of a model's layers, which are built with it.

    Attributes:
        add: adds the gradient a @ b of a weight, as `add(weight, a, b)`; None leaves it to autograd.
    """

    add: Callable[[Tensor, Tensor, Tensor], None] | None = None
    _hides: Callable[[], bool] | None = None
    """Whether a product would hide something in flight; None where no product is kept."""
    _late: Sequence[Callable[[], None]] = ()
    """Products that are kept, from after the last `step`."""
    _earlier: Sequence[Callable[[], None]] = ()
    """Products that are kept, from before it."""

    @contextmanager
    def deferring(self, hides: Callable[[], bool]) -> Iterator[None]:
        """Keep the products that arise inside the block, with their operands, until `catch_up` or its end.

        `hides` returns whether a product would hide something in flight; then it is not kept.
        """
        self._hides = hides
        try:
            yield
            self.catch_up()
        finally:
            self._hides = None
            self._late = self._earlier = ()

    def catch_up(self) -> None:
        """Compute the products that have been kept."""
        self.step()
        self.step()

    def step(self) -> None:
        """Compute the products that were kept before the last step; so none is kept for more than two."""
        earlier, self._earlier, self._late = self._earlier, self._late, ()
        for compute in earlier:
            compute()

    def take(self, weight: Tensor, product: Callable[[], Tensor | None]) -> Tensor | None:
        """Return the gradient of a weight that `product` computes, or None if it has added the gradient, or is kept."""
        if self._hides is None or self._hides():
            return product()
        self._late = (*self._late, functools.partial(_accumulate, weight, product))
        return None


class _LateProduct(Function):
    """Computes the gradient of a weight in backward, so that autograd has the only reference, and takes it without a
    copy."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, product: Callable[[], Tensor | None]) -> Tensor:
        ctx.product = product
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, None]:
        return ctx.product(), None


def _accumulate(weight: Tensor, product: Callable[[], Tensor | None]) -> None:
    with torch.enable_grad():
        result: Tensor = _LateProduct.apply(weight, product)
    run_backward((get_gradient_edge(result),), (result.detach(),))


class LinearFunction(Protocol):
    """Multiplies with the matrices of layers."""

    def __call__(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, input_gradient: InputGradient | None = None, /
    ) -> Tensor:
        """x [..., in], weight [out, in], bias [out] or None -> [..., out]; see `linear`."""


class _Product(Function):
    """Saves the parameter for backward, before which ZeRO-3 gathers it again, and the input if the parameter trains."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        input_gradient: InputGradient | None,
        wide: bool,
        sink: GradientSink | None,
    ) -> Tensor:
        trains = weight.requires_grad
        saved_input: tuple[Tensor, ...] = (x,) if trains else ()
        if input_gradient is not None:
            saved_input = input_gradient.use(x, trains)
        ctx.save_for_backward(weight, *saved_input)
        ctx.input_gradient, ctx.dtype = input_gradient, x.dtype
        # Recomputation saves another tensor than the parameter.
        ctx.sink, ctx.parameter = sink, weight
        dtype = torch.promote_types(x.dtype, torch.float32) if wide else x.dtype
        return F.linear(x.to(dtype), weight.to(dtype), bias if bias is None else bias.to(dtype))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        weight, *saved_input = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        grad_x: Tensor | None = None
        grad_weight: Tensor | None = None
        if needs_x:
            rows = gradient.flatten(0, -2) @ weight.to(gradient.dtype)
            grad_x = rows.to(ctx.dtype).unflatten(0, gradient.shape[:-1])
        if needs_x and ctx.input_gradient is not None:
            ctx.input_gradient.add(grad_x)
            grad_x = None
        grad_bias = gradient.flatten(0, -2).sum(0) if needs_bias else None
        sink, parameter, input_gradient = ctx.sink, ctx.parameter, ctx.input_gradient

        def multiply() -> Tensor | None:
            x = saved_input[0] if saved_input else input_gradient.input_again.wait()
            a, b = gradient.flatten(0, -2).t(), x.flatten(0, -2).to(gradient.dtype)
            if sink is None or sink.add is None:
                return (a @ b).to(parameter.dtype)
            sink.add(parameter, a, b)
            return None

        if needs_weight:
            grad_weight = multiply() if sink is None else sink.take(parameter, multiply)
        return grad_x, grad_weight, grad_bias, None, None, None


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    input_gradient: InputGradient | None = None,
    /,
    *,
    wide: bool = False,
    sink: GradientSink | None = None,
) -> Tensor:
    """Return `x @ weight^T + bias`, for x [..., in] and weight [out, in].

    The gradient of x goes to `input_gradient`, and that of the weight to `sink`, if given. `wide` products are computed
    in fp32 at least.

    torch's own function saves a view of the weight for backward, and with it the memory of the whole weight, and leaves
    its gradient to autograd. A parameter that ZeRO-3 partitions (it has a `ds_id`), or whose gradients a sink takes,
    therefore goes through a function that saves the parameter.
    """
    takes = sink is not None and torch.is_grad_enabled()
    if input_gradient is None and not (wide or takes or hasattr(weight, "ds_id")):
        return F.linear(x, weight, bias)
    result: Tensor = _Product.apply(x, weight, bias, input_gradient, wide, sink)
    return result


class _Reached(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, leaf: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[None, None]:
        return None, None


def reached_by_backward(x: Tensor) -> Tensor:
    """Return x for a module whose input gradient does not go through autograd.

    ZeRO-3 releases a module's weight when backward arrives at its input, so the input must appear to need a gradient.
    As a leaf it would stay in memory until then.
    """
    return _Reached.apply(x, x.new_empty(0).requires_grad_())


def add_product(total: Tensor, a: Tensor, b: Tensor, replace: bool = False) -> None:
    """Add a @ b to the total, which may have a wider dtype, or replace it."""
    # The meta device, which compares no dtypes, has the second operator from torch 2.13 on.
    if total.dtype == a.dtype or total.is_meta:
        total.addmm_(a, b, beta=1 - replace)
    elif not total.is_cpu:
        torch.addmm(total, a, b, total.dtype, beta=1 - replace, out=total)
    elif replace:
        total.copy_(a @ b)
    else:
        total += a @ b


class SortedRows(NamedTuple):
    """The order of n k rows, one for each token and chosen expert, by expert."""

    order: Tensor
    """Index of each sorted row among the choices of all tokens, [n k]."""
    offsets: Tensor
    """The end of the rows of each local expert, [E] int32."""
    back: Tensor
    """Index of each choice among the sorted rows, [n k]."""
    shape: torch.Size
    """Shape of the choices: [..., k]."""
    all_local: bool
    """Whether this rank has all experts, so that no rows belong to others."""

    @staticmethod
    def of(chosen: Tensor, first: int, count: int, all_local: bool) -> "SortedRows":
        """Sort the choices [..., k] for a rank with `count` experts from `first` on, which may be all of them."""
        local = chosen.flatten()
        if not all_local:
            # Experts of other ranks are sorted behind the last one.
            local = local - first
            local = torch.where((local >= 0) & (local < count), local, count)
        counts = torch.zeros(count + 1, dtype=torch.int64, device=chosen.device)
        counts.scatter_add_(0, local, torch.ones_like(local))
        offsets = counts[:-1].cumsum(0).to(torch.int32)
        order = local.argsort(stable=True)
        back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        return SortedRows(order, offsets, back, chosen.shape, all_local)

    def padded(self, capacity: int) -> "SortedRows":
        """Return the order with `capacity` rows for each expert.

        Padding has the index of any choice. Choices beyond the capacity of their expert have its last row.
        """
        starts = self.offsets - self.counts
        places = starts.unsqueeze(1) + torch.arange(capacity, device=starts.device)
        order = self.order[places.clamp(max=len(self.order) - 1)]
        experts = self.experts
        place_of_expert = torch.arange(len(self.order), device=starts.device) - starts[experts]
        rows = experts * capacity + place_of_expert.clamp(max=capacity - 1)
        offsets = torch.arange(1, len(starts) + 1, dtype=torch.int32, device=starts.device) * capacity
        return self._replace(order=order.flatten(), offsets=offsets, back=rows[self.back])

    def after(self, count: int) -> "SortedRows":
        """Return the order without the first `count` sorted rows; only for products."""
        return self._replace(order=self.order[count:], offsets=(self.offsets - count).clamp(min=0))

    @property
    def counts(self) -> Tensor:
        """Number of rows of each local expert, [E] int32."""
        return self.offsets.diff(prepend=self.offsets.new_zeros(1))

    @property
    def tokens(self) -> Tensor:
        """Index of the token of each sorted row."""
        return self.order // self.shape[-1]

    @property
    def experts(self) -> Tensor:
        """Index of the local expert of each sorted row; that of any for rows of other ranks."""
        rows = torch.arange(len(self.order), dtype=torch.int32, device=self.order.device)
        return torch.searchsorted(self.offsets, rows, right=True).clamp(max=len(self.offsets) - 1)

    def sort(self, values: Tensor) -> Tensor:
        """Values of the choices [..., k] -> those of the sorted rows [n k]."""
        return values.flatten()[self.order]

    def sum_by_token(self, rows: Tensor) -> Tensor:
        """Sorted rows [n k, h] -> their sum for each token [..., h], in a fixed order."""
        return rows[self.back].unflatten(0, self.shape).sum(-2)


def _is_grouped(*operands: Tensor) -> bool:
    rows_fit = all(operand.shape[-1] * operand.element_size() % _ALIGNMENT == 0 for operand in operands)
    return operands[0].dtype in _GROUPED_DTYPES and rows_fit and not operands[0].is_meta


def reads_on_host(weight: Tensor) -> bool:
    """Whether torch's product on CUDA makes the host wait for the offsets: weight [E, out, in]."""
    return (
        weight.dtype != torch.bfloat16
        or not _is_grouped(weight, weight.transpose(1, 2))
        or torch.cuda.get_device_capability(weight.device)[0] not in (_HOPPER, _BLACKWELL)
    )


def _multiply(rows: Tensor, matrices: Tensor, sorted_rows: SortedRows) -> Tensor:
    """[n k, in] x [E, in, out] -> [n k, out]."""
    offsets = sorted_rows.offsets
    if rows.is_meta:
        return rows.new_empty(len(rows), matrices.shape[-1])
    if _is_grouped(rows, matrices, matrices.transpose(1, 2)):
        product = torch.nn.functional.grouped_mm(rows, matrices, offs=offsets)
        if sorted_rows.all_local:
            return product
        is_local = torch.arange(len(rows), device=rows.device) < offsets[-1]
        return torch.where(is_local.unsqueeze(-1), product, 0)
    product = rows.new_zeros(len(rows), matrices.shape[-1])
    start = 0
    for matrix, end in zip(matrices, offsets.tolist(), strict=True):
        product[start:end] = rows[start:end] @ matrix
        start = end
    return product


def _multiply_outer(left: Tensor, right: Tensor, sorted_rows: SortedRows) -> Tensor:
    """[n k, out], [n k, in] -> the sum over the rows of each expert of left^T right, [E, out, in]."""
    offsets = sorted_rows.offsets
    if left.is_meta:
        return left.new_empty(len(offsets), left.shape[-1], right.shape[-1])
    if _is_grouped(left, right):
        product = torch.nn.functional.grouped_mm(left.t(), right, offs=offsets)
        if left.is_cuda and torch.cuda.get_device_capability(left.device)[0] >= _BLACKWELL:
            # There it leaves the gradients of experts without rows unwritten (pytorch/pytorch#172439).
            product.masked_fill_((sorted_rows.counts == 0).view(-1, 1, 1), 0)
        return product
    product = left.new_zeros(len(offsets), left.shape[-1], right.shape[-1])
    start = 0
    for expert, end in enumerate(offsets.tolist()):
        product[expert] = left[start:end].t() @ right[start:end]
        start = end
    return product


def _sum_by_expert(rows: Tensor, sorted_rows: SortedRows) -> Tensor:
    """Sorted rows [n k, out] -> their sum for each expert [E, out], in a fixed order."""
    ones = rows.new_ones(len(rows), _ALIGNMENT // rows.element_size())
    return _multiply_outer(rows, ones, sorted_rows)[..., 0]


class ExpertWeights(NamedTuple):
    """The stacked matrices of this rank's experts, and the biases that they have."""

    gate: Tensor
    """[E, f, h]"""
    up: Tensor
    """[E, f, h]"""
    down: Tensor
    """[E, h, f]"""
    gate_bias: Tensor | None = None
    """[E, f]"""
    up_bias: Tensor | None = None
    """[E, f]"""
    down_bias: Tensor | None = None
    """[E, h]; None if the caller adds it."""


class ExpertPass(NamedTuple):
    """How the experts of a micro-batch are computed."""

    sorted_rows: SortedRows
    kept_rows: int
    """Number of sorted rows whose products with gate and up are kept for backward, which computes others again."""
    swiglu: Callable[[Tensor], Tensor]
    sink: GradientSink
    """Takes the gradients of the matrices."""
    input_gradient: InputGradient | None = None
    """Receives the gradient of the input."""


class _Experts(Function):
    """Keeps the tokens and the products of their rows with gate and up for backward, which computes the rest again.

    A rank with some of the experts sorts all rows, because the host does not know how many are its own. It keeps the
    products of a fixed number of rows (`kept_expert_rows`), and computes those of further rows of its experts again.
    There are none if the experts have about equally many rows. The kernel skips the rows of other ranks.
    """

    @staticmethod
    def forward(
        ctx: Any,
        received: Tensor,
        weights: Tensor | None,
        expert_pass: ExpertPass,
        *matrices: Any,
    ) -> Tensor:
        sorted_rows, kept_rows, swiglu, _, input_gradient = expert_pass
        experts = ExpertWeights(*matrices)
        x, last_column = received.tensor_split([experts.gate.shape[-1]], dim=-1)
        gate_up = _multiply_inputs(x.flatten(0, -2)[sorted_rows.tokens], experts, sorted_rows)
        saved_gate_up = gate_up if kept_rows >= len(gate_up) else gate_up[:kept_rows].clone()
        inputs = (received,) if input_gradient is None else input_gradient.use(received, trains=True)
        ctx.save_for_backward(*experts, weights, saved_gate_up, *inputs)
        ctx.expert_pass = expert_pass
        inner = swiglu(gate_up)
        del gate_up
        row_weights = sorted_rows.sort(last_column if weights is None else weights).unsqueeze(-1).to(inner.dtype)
        products = _multiply(inner * row_weights, experts.down.transpose(1, 2), sorted_rows)
        if experts.down_bias is not None:
            products.add_(experts.down_bias[sorted_rows.experts] * row_weights)
        return sorted_rows.sum_by_token(products)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        gate, up, down, gate_bias, up_bias, down_bias, weights, saved_gate_up, *inputs = ctx.saved_tensors
        experts = ExpertWeights(gate, up, down, gate_bias, up_bias, down_bias)
        sorted_rows, _, swiglu, sink, input_gradient = ctx.expert_pass
        needs_x, _, _, needs_gate, needs_up, needs_down, *need_biases, needs_down_bias = ctx.needs_input_grad

        @functools.cache
        def sorted_inputs() -> Tensor:
            received: Tensor = inputs[0] if inputs else input_gradient.input_again.wait()
            return received[..., : gate.shape[-1]].flatten(0, -2)[sorted_rows.tokens]

        def take(matrix: Tensor, left: Tensor, right: Callable[[], Tensor], is_needed: bool) -> Tensor | None:
            product = functools.partial(_multiply_outer, left, sorted_rows=sorted_rows)
            return sink.take(matrix, lambda: product(right())) if is_needed else None

        gate_up = saved_gate_up
        saved_rows = len(saved_gate_up)
        if saved_rows < len(sorted_rows.order):
            rest = _multiply_inputs(sorted_inputs()[saved_rows:], experts, sorted_rows.after(saved_rows))
            gate_up = torch.cat([saved_gate_up, rest])
        grad_rows = gradient.flatten(0, -2)[sorted_rows.tokens]
        weights_travel = weights is None
        if weights_travel:
            weights = inputs[0][..., gate.shape[-1] :]
        row_weights = sorted_rows.sort(weights).unsqueeze(-1)
        grad_gate_up, weighted, grad_row_weights = _differentiate(
            grad_rows, gate_up, down, row_weights, sorted_rows, swiglu
        )
        grad_down = take(down, grad_rows, lambda: weighted, needs_down)
        if down_bias is not None:
            grad_row_weights = grad_row_weights + (grad_rows * down_bias[sorted_rows.experts]).sum(-1)
        grad_down_bias = _sum_by_expert(grad_rows * row_weights, sorted_rows) if needs_down_bias else None
        grad_weights = grad_row_weights.to(weights.dtype)[sorted_rows.back].view(weights.shape)
        del grad_rows, gate_up
        grad_gate, grad_up = (part.contiguous() for part in grad_gate_up.chunk(2, dim=-1))
        del grad_gate_up
        grad_x: Tensor | None = None
        if needs_x:
            grad_x = sorted_rows.sum_by_token(
                _multiply(grad_gate, gate, sorted_rows) + _multiply(grad_up, up, sorted_rows)
            )
        if grad_x is not None and weights_travel:
            grad_x = torch.cat([grad_x, grad_weights], dim=-1)
        if needs_x and input_gradient is not None:
            input_gradient.add(grad_x)
            grad_x = None
        grad_inputs = [
            take(matrix, part, sorted_inputs, is_needed)
            for matrix, part, is_needed in ((gate, grad_gate, needs_gate), (up, grad_up, needs_up))
        ]
        grad_biases = [
            _sum_by_expert(part, sorted_rows) if is_needed else None
            for part, is_needed in zip((grad_gate, grad_up), need_biases, strict=True)
        ]
        grad_choices = None if weights_travel else grad_weights
        return (grad_x, grad_choices, None, *grad_inputs, grad_down, *grad_biases, grad_down_bias)


def _differentiate(
    grad_rows: Tensor,
    gate_up: Tensor,
    down: Tensor,
    row_weights: Tensor,
    sorted_rows: SortedRows,
    swiglu: Callable[[Tensor], Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradient of gate_up [n k, 2 f], the rows that down [E, h, f] multiplies, and the weights' gradient.

    `grad_rows` [n k, h] is that of the weighted products of down with swiglu(gate_up), and `row_weights` is [n k, 1].
    """
    with torch.enable_grad():
        leaf = gate_up.detach().requires_grad_()
        inner = swiglu(leaf)
    row_weights = row_weights.to(inner.dtype)
    grad_weighted = _multiply(grad_rows, down, sorted_rows)
    grad_row_weights = (grad_weighted * inner.detach()).sum(-1)
    weighted = inner.detach() * row_weights
    (grad_gate_up,) = torch.autograd.grad(inner, leaf, grad_weighted.mul_(row_weights))
    return grad_gate_up, weighted, grad_row_weights


def _multiply_inputs(rows: Tensor, experts: ExpertWeights, sorted_rows: SortedRows) -> Tensor:
    """Multiply sorted rows [n k, h] with gate and up; return the biased products side by side, [n k, 2 f]."""
    products = []
    for weight, bias in ((experts.gate, experts.gate_bias), (experts.up, experts.up_bias)):
        product = _multiply(rows, weight.transpose(1, 2), sorted_rows)
        products.append(product if bias is None else product.add_(bias[sorted_rows.experts]))
    return torch.cat(products, dim=-1)


def run_experts(x: Tensor, experts: ExpertWeights, weights: Tensor | None, expert_pass: ExpertPass) -> Tensor:
    """Return the sum of each token's experts [..., h], weighted with `weights` [..., k], for x [..., h].

    Without `weights`, each row has one expert, and its weight as the last element of x [..., h + 1]. An expert is
    down @ swiglu([gate @ x + gate_bias, up @ x + up_bias]) + down_bias.
    """
    result: Tensor = _Experts.apply(x, weights, expert_pass, *experts)
    return result

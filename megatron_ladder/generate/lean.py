"""What a decode step computes between its products, in as few operations as torch offers, for a CPU.

A decoded token of a small model is hundreds of operations on a few thousand numbers each, so what counts is how many
there are. The functions compute what `model/` computes, up to rounding, without a graph for backward: results are
overwritten where nobody reads them any more.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from megatron_ladder.model.attention import AttentionHeads, attend
from megatron_ladder.model.attention_mlp import AttentionMLP
from megatron_ladder.model.language_model import LanguageModel
from megatron_ladder.model.mlp import MLP
from megatron_ladder.model.norm import NormFunction, RMSNorm
from megatron_ladder.model.rotary import RotaryTable
from megatron_ladder.parallel.large_pages import empty_in_large_pages
from megatron_ladder.parallel.layout import ParallelModule
from megatron_ladder.parallel.panels import fits_panels, to_panels


def prepare_for_cpu(model: LanguageModel) -> None:
    """Lays out the matrices in panels, as far as they fit, and has all sub-blocks use the functions of this file.

    The model can only generate then: it has no backward, and its parameters are no longer those of their sections.
    """
    _use_lean_functions(model)
    for module in _multiplied_in_panels(model):
        _lay_out(module)


def load_for_cpu(model: LanguageModel, fill: Callable[[nn.Module], None]) -> None:
    """Reads the weights of a model that was made on the meta device, and prepares it as `prepare_for_cpu` does.

    A matrix is laid out as soon as it is read, and the next one is read to where it was: fresh memory costs more time
    than reading a file that the system has in its cache.

    Args:
        fill: reads the weights of a part of the model.
    """
    _use_lean_functions(model)
    in_panels = set(_multiplied_in_panels(model))
    largest = max((module.get_parameter("weight").numel() for module in in_panels), default=0)
    passing = empty_in_large_pages((largest,), model.compute_dtype)
    for module in model.modules():
        if not isinstance(module, ParallelModule):
            continue
        for name, described in list(module.named_parameters(recurse=False)):
            shape = described.shape
            if name == "weight" and module in in_panels:
                memory = passing[: described.numel()].view(shape)
            else:
                memory = empty_in_large_pages(shape, described.dtype)
            module.register_parameter(name, nn.Parameter(memory, requires_grad=False))
        fill(module)
        if module in in_panels:
            _lay_out(module)


def _use_lean_functions(model: LanguageModel) -> None:
    for module in model.modules():
        if isinstance(module, RMSNorm):
            module.function = rms_norm
            module.add_function = add_rms_norm
        elif isinstance(module, AttentionHeads):
            module.norm = rms_norm
            module.split_heads = split_heads
            module.attend = attend_few
        elif isinstance(module, MLP | AttentionMLP):
            module.swiglu = swiglu


def _multiplied_in_panels(model: LanguageModel) -> list[ParallelModule]:
    table_alone = None if model.lm_head is None else model.embedding
    return [
        module
        for module in model.modules()
        if isinstance(module, ParallelModule)
        and not isinstance(module, RMSNorm)
        and module is not table_alone
        and fits_panels(module.get_parameter("weight"))
    ]


def _lay_out(module: ParallelModule) -> None:
    panels = to_panels(module.get_parameter("weight"))
    module.register_parameter("weight", nn.Parameter(panels, requires_grad=False))


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """RMSNorm of x [..., n] by weight [n]; half precision is computed in fp32."""
    exact = x if x.dtype in (torch.float32, torch.float64) else x.float()
    rows = exact.reshape(-1, 1, x.shape[-1])
    mean_square = torch.bmm(rows, rows.view(-1, x.shape[-1], 1)).mul_(1 / x.shape[-1])
    normed = (rows * mean_square.add_(epsilon).rsqrt_()).mul_(weight)
    return normed.view(x.shape).to(x.dtype)


def add_rms_norm(stream: Tensor, output: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """The sum, which takes the place of `output`, and its norm."""
    total = output.add_(stream)
    return total, rms_norm(total, weight, epsilon)


def swiglu(gate_up: Tensor) -> Tensor:
    """Gate and up side by side [..., 2 n] -> silu(gate) * up [..., n]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return nn.functional.silu(gate, inplace=True).mul_(up)


def split_heads(
    projected: Tensor,
    widths: Sequence[int],
    head_dim: int,
    table: RotaryTable,
    norm: NormFunction,
    norm_weights: tuple[Tensor, Tensor] | None,
    epsilon: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `model.attention.split_heads`; queries and keys, which lie side by side, are turned together."""
    positions, samples, _ = projected.shape
    heads = projected.view(positions, samples, -1, head_dim)
    queries, keys, values = (width // head_dim for width in widths)
    turning, v = heads.narrow(2, 0, queries + keys), heads.narrow(2, queries + keys, values)
    if norm_weights is not None:
        q, k = turning.narrow(2, 0, queries), turning.narrow(2, queries, keys)
        turning = torch.cat((norm(q, norm_weights[0], epsilon), norm(k, norm_weights[1], epsilon)), dim=2)
    half = head_dim // 2
    turned, sin = turning * table.cos, table.sin.narrow(-1, 0, half)
    turned.narrow(-1, 0, half).addcmul_(turning.narrow(-1, half, half), sin, value=-1)
    turned.narrow(-1, half, half).addcmul_(turning.narrow(-1, 0, half), sin)
    turned = turned.to(projected.dtype).permute(1, 2, 0, 3)
    return turned.narrow(1, 0, queries), turned.narrow(1, queries, keys), v.permute(1, 2, 0, 3)


def attend_few(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """As `model.attention.attend`; for one query a sample, two products of which no head is copied."""
    samples, heads, length, head_dim = q.shape
    if length > 1:
        return attend(q, k, v, mask)
    kv_heads, positions = k.shape[1:3]
    grouped = q.reshape(samples * kv_heads, heads // kv_heads, head_dim)
    empty = q.new_empty(())
    scores = torch.baddbmm(empty, grouped, k.flatten(0, 1).transpose(1, 2), beta=0, alpha=head_dim**-0.5)
    if mask is not None:
        scores.view(samples, heads, 1, positions).masked_fill_(~mask, -torch.inf)
    attended = torch.bmm(scores.softmax(-1), v.flatten(0, 1))
    return attended.view(samples, heads, 1, head_dim)

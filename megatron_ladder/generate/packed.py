"""Weights for generation on a CPU, in the layout of oneDNN's matrix product.

Decoding a token takes about the time to read all weights. In the usual layout of a matrix [out, in], a product with few
rows reads the weight at half of the memory's rate, or less. oneDNN can reorder a weight once, into blocks of a few
output columns that its product reads from end to end. The product is as exact as the usual one, and also faster for
many rows. A packed weight is an opaque tensor, of which only the shape, the dtype and `to_dense` are known.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_ladder.model.language_model import LanguageModel
from megatron_ladder.model.norm import RMSNorm
from megatron_ladder.model.operations import Operations
from megatron_ladder.model.rotary import RotaryTable
from megatron_ladder.parallel.layout import ParallelModule

_ROWS = 32
"""Rows of the products that oneDNN chooses the layout for. This layout is the fastest one for fewer rows, too."""


def load_packed(model: LanguageModel, fill: Callable[[nn.Module], None]) -> None:
    """Load a model that was built on the meta device with `PACKED_OPERATIONS`; `fill` reads the weights of a part.

    The model can only generate afterwards: its parameters no longer correspond to their sections. Each matrix is packed
    as soon as it is read, and the next one is read into the same buffer, because fresh memory costs more time than
    reading a cached file. The embedding is looked up by rows, so it is not packed, even if it is also the head.
    """
    modules = [module for module in model.modules() if isinstance(module, ParallelModule)]
    packed = {
        module
        for module in modules
        if not isinstance(module, RMSNorm)
        and module is not model.embedding
        and _can_pack(module.get_parameter("weight").dtype)
    }
    largest = max((module.get_parameter("weight").numel() for module in packed), default=0)
    buffer = torch.empty(largest, dtype=model.compute_dtype)
    for module in modules:
        for name, described in list(module.named_parameters(recurse=False)):
            if name == "weight" and module in packed:
                memory = buffer[: described.numel()].view(described.shape)
            else:
                memory = torch.empty_like(described, device="cpu")
            module.register_parameter(name, nn.Parameter(memory, requires_grad=False))
        fill(module)
        if module in packed:
            weight = torch.ops.mkldnn._reorder_linear_weight(module.get_parameter("weight").detach(), _ROWS)
            module.register_parameter("weight", nn.Parameter(weight, requires_grad=False))


def _can_pack(dtype: torch.dtype) -> bool:
    """Return whether torch has oneDNN, and this processor its products of this dtype."""
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    if dtype == torch.float16:
        return torch.ops.mkldnn._is_mkldnn_fp16_supported()
    return dtype == torch.float32


def _split_heads_in_fp32(
    projected: Tensor,
    widths: Sequence[int],
    head_dim: int,
    table: RotaryTable,
    norm_weights: tuple[Tensor, Tensor] | None,
    epsilon: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `Operations.split_heads`; the result is in fp32, in which attention on CPUs is several times as fast."""
    wide = projected.to(torch.promote_types(projected.dtype, torch.float32))
    weights = None if norm_weights is None else (norm_weights[0].to(wide.dtype), norm_weights[1].to(wide.dtype))
    return Operations.split_heads(wide, widths, head_dim, table, weights, epsilon)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`x @ weight^T + bias` for x [..., in] and a weight [out, in], packed or not -> [..., out], in its dtype."""
    x = x.to(weight.dtype)
    if weight.is_mkldnn:
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return product
    return F.linear(x, weight, bias)


PACKED_OPERATIONS = Operations(split_heads=_split_heads_in_fp32, linear=_linear)
"""For models that generate on a CPU."""

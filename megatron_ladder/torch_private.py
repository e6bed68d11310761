"""The private parts of torch that the package uses, each with its reason. A test finds any elsewhere.

torch 2.11 to 2.13 have all of them, unless noted. What happens without a part is the second sentence of its docstring.
Underscored functions of tensors (`torch._foreach_norm` and others, `torch._assert_async`) are called where they are
needed: torch's own optimizers and exported programs consist of them.
"""

import json
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.distributed import distributed_c10d

_execution_engine = getattr(torch.autograd.Variable, "_execution_engine", None)
flash_attention_forward = torch.ops.aten._flash_attention_forward
"""The operator of `torch.nn.attention.varlen.varlen_attn`, which loads torch's compiler, and accepts grouped heads,
numbers of used keys and pages only from torch 2.13 on."""


def run_backward(edges: tuple[GradientEdge, ...], gradients: tuple[Tensor, ...]) -> None:
    """Accumulate gradients from edges, without the checks of torch.autograd.backward, which take as long as the run.

    Without the engine, the public function runs it.
    """
    if _execution_engine is None:
        torch.autograd.backward(edges, gradients)
    else:
        _execution_engine.run_backward(edges, gradients, False, False, (), allow_unreachable=True, accumulate_grad=True)


def process_groups() -> list[dist.ProcessGroup]:
    """Return all process groups of this rank, of which torch has no list. Without it, only the default is returned."""
    world = getattr(distributed_c10d, "_world", None)
    return list(filter(None, [dist.group.WORLD])) if world is None else list(world.pg_map)


def recorded_collectives(details: bool = True) -> dict[str, Any]:
    """Return the content of torch's flight recorder, of which torch has no public reader in the same process.

    Without it, the result is empty. `details` adds the collectives; otherwise, reading takes less than 0.1 ms.
    """
    on_gpu = dist.is_initialized() and dist.get_backend() == "nccl"
    name = "_dump_nccl_trace_json" if on_gpu else "_dump_fr_trace_json"
    dump = getattr(torch._C._distributed_c10d, name, None)
    return {} if dump is None else json.loads(dump(includeCollectives=details))


def has_nvlink(device: int, peer: int) -> bool:
    """Return whether NVLink joins two GPUs, directly or by switches, which torch has no other way to ask.

    Raises AttributeError or RuntimeError if this torch cannot detect it.
    """
    detect = torch._C._distributed_c10d._detect_dma_connectivity  # type: ignore[attr-defined]
    return bool(detect(torch._C._autograd.DeviceType.CUDA, "nvlink").matrix[device][peer])


def map_symmetric_memory(elements: int, dtype: torch.dtype, device: torch.device, group: Any) -> tuple[Tensor, bool]:
    """Return memory that all GPUs of a group map, and whether switches can sum it; a collective.

    Raises ImportError or RuntimeError if this build of torch has none. The module has no public name yet.
    """
    import torch.distributed._symmetric_memory as symmetric_memory

    memory = symmetric_memory.empty(elements, dtype=dtype, device=device)
    return memory, symmetric_memory.rendezvous(memory, group).multicast_ptr != 0


def can_pack(dtype: torch.dtype) -> bool:
    """Return whether torch has oneDNN's packed products of this dtype for this processor; False without operators.

    torch.compile uses them, and `Tensor.to_mkldnn`, which is public, has other and slower products.
    """
    operators = torch.ops.mkldnn
    names = ("_reorder_linear_weight", "_linear_pointwise", "_is_mkldnn_bf16_supported", "_is_mkldnn_fp16_supported")
    if not torch.backends.mkldnn.is_available() or not all(hasattr(operators, name) for name in names):
        return False
    if dtype == torch.bfloat16:
        return bool(operators._is_mkldnn_bf16_supported())
    if dtype == torch.float16:
        return bool(operators._is_mkldnn_fp16_supported())
    return dtype == torch.float32


def pack_weight(weight: Tensor, rows: int) -> Tensor:
    """Pack a matrix for products with inputs of about so many rows; see `can_pack`."""
    return torch.ops.mkldnn._reorder_linear_weight(weight, rows)


def packed_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return `x @ weight^T + bias` for the result of `pack_weight`."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")

"""The core of vLLM's gated DeltaNet in float32, token by token, since its kernels for CPUs take bfloat16 only.

It has the contract of vLLM's operators: which sequences a step has, where their states are, and which of these begin.
"""

from typing import Any

import torch
import torch.nn.functional as F
from megatron_ladder_vllm import deployment
from torch import Tensor
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention
from vllm.utils.torch_utils import LayerNameType, _resolve_layer_name

_kernels = gdn_attention.cpu_gdn_attention_core
"""Those of vLLM."""


def install() -> None:
    """Let the layers of this process compute in float32, also through the operator for GPUs."""
    gdn_attention.cpu_gdn_attention_core = _compute
    QwenGatedDeltaNetAttention._forward_core = compute
    deployment.GATED_DELTA_DTYPES_ON_CPU = (torch.float32, torch.bfloat16)


def _compute(mixed_qkv: Tensor, b: Tensor, a: Tensor, core_attn_out: Tensor, layer_name: LayerNameType) -> None:
    if mixed_qkv.dtype == torch.bfloat16:
        return _kernels(mixed_qkv, b, a, core_attn_out, layer_name)
    compute(get_forward_context().no_compile_layers[_resolve_layer_name(layer_name)], mixed_qkv, b, a, core_attn_out)
    return None


def compute(layer: Any, mixed_qkv: Tensor, b: Tensor, a: Tensor, core_attn_out: Tensor) -> None:
    """Write the outputs [tokens, value heads, width] of all sequences of a step, and their states.

    Args:
        mixed_qkv: [tokens, channels], of which `a` and `b` [tokens, value heads] are overwritten.
    """
    steps = get_forward_context().attn_metadata
    if steps is None:
        return
    step = steps[layer.prefix]
    count = step.num_decodes + step.num_prefills
    bounds = step.non_spec_query_start_loc[: count + 1].tolist()
    slots = step.non_spec_state_indices_tensor[:count].tolist()
    continues = [True] * count if step.has_initial_state is None else step.has_initial_state[:count].tolist()
    for slot, is_continued, start, stop in zip(slots, continues, bounds, bounds[1:], strict=False):
        states = [state[slot] for state in layer.kv_cache]
        if not is_continued:
            for state in states:
                state.zero_()
        tokens = slice(start, stop)
        _continue(layer, *states, mixed_qkv[tokens], b[tokens], a[tokens], core_attn_out[tokens])
    for consumed in (a, b):
        consumed.fill_(torch.nan)


def _continue(layer: Any, inputs: Tensor, memory: Tensor, qkv: Tensor, b: Tensor, a: Tensor, outputs: Tensor) -> None:
    """Write the outputs of a sequence, and its states: inputs [kernel - 1, channels], memory [heads, d_v, d_k]."""
    filters = layer.conv1d.weight.squeeze(1)
    seen = torch.cat([inputs, qkv])
    inputs.copy_(seen[len(qkv) :])
    windows = seen.unfold(0, filters.shape[1], 1)
    widths = [width // layer.tp_size for width in (layer.key_dim, layer.key_dim, layer.value_dim)]
    parts = F.silu((windows * filters).sum(-1)).split(widths, dim=-1)
    group = layer.num_v_heads // layer.num_k_heads
    q, k = (part.unflatten(-1, (-1, layer.head_k_dim)).repeat_interleave(group, 1) for part in parts[:2])
    q, k = (part * torch.rsqrt(part.square().sum(-1, keepdim=True) + 1e-6) for part in (q, k))
    v = parts[2].unflatten(-1, (-1, layer.head_v_dim))
    decays = torch.exp(-layer.A_log.exp() * F.softplus(a + layer.dt_bias))
    strengths = b.sigmoid()
    for token in range(len(qkv)):
        memory.mul_(decays[token, :, None, None])
        correction = strengths[token, :, None] * (v[token] - (memory * k[token].unsqueeze(1)).sum(-1))
        memory.add_(correction.unsqueeze(2) * k[token].unsqueeze(1))
        outputs[token] = (memory * q[token].unsqueeze(1)).sum(-1) * layer.head_k_dim**-0.5

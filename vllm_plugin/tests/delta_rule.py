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
    drafting = [] if step.spec_sequence_masks is None else step.spec_token_indx.tolist()
    others = [token for token in range(step.num_actual_tokens) if token not in set(drafting)]
    if drafting:
        found = torch.empty_like(core_attn_out[: len(drafting)])
        _verify(layer, step, mixed_qkv[drafting], b[drafting], a[drafting], found)
        core_attn_out[drafting] = found
    if others:
        found = torch.empty_like(core_attn_out[: len(others)])
        _extend(layer, step, mixed_qkv[others], b[others], a[others], found)
        core_attn_out[others] = found
    for consumed in (a, b):
        consumed.fill_(torch.nan)


def _extend(layer: Any, step: Any, qkv: Tensor, b: Tensor, a: Tensor, outputs: Tensor) -> None:
    """Write the outputs and states of sequences without drafts."""
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
        inputs, memory = states[0][: layer.conv1d.weight.shape[-1] - 1], states[1]
        seen = torch.cat([inputs, qkv[tokens]])
        memories = _continue(layer, seen, memory, b[tokens], a[tokens], outputs[tokens])
        inputs.copy_(seen[stop - start :])
        memory.copy_(memories[-1])


def _verify(layer: Any, step: Any, qkv: Tensor, b: Tensor, a: Tensor, outputs: Tensor) -> None:
    """Write the outputs of sequences with drafts, and a state after each token, of which the next step takes one.

    A memory has a slot for each token. The inputs of convolutions are all in the first slot, one token after another.
    """
    bounds = step.spec_query_start_loc.tolist()
    before = layer.conv1d.weight.shape[-1] - 1
    for row, (start, stop) in enumerate(zip(bounds, bounds[1:], strict=False)):
        if start == stop:
            continue
        slots = step.spec_state_indices_tensor[row].tolist()
        last = int(step.num_accepted_tokens[row]) - 1
        tokens = slice(start, stop)
        inputs = layer.kv_cache[0][slots[0]]
        seen = torch.cat([inputs[last : last + before], qkv[tokens]])
        memory = layer.kv_cache[1][slots[last]]
        memories = _continue(layer, seen, memory, b[tokens], a[tokens], outputs[tokens])
        inputs[: len(seen) - 1] = seen[1:]
        for slot, after in zip(slots, memories, strict=False):
            layer.kv_cache[1][slot] = after


def _continue(layer: Any, seen: Tensor, memory: Tensor, b: Tensor, a: Tensor, outputs: Tensor) -> list[Tensor]:
    """Write the outputs of a sequence, and return its memory [heads, d_v, d_k] after each token.

    `seen` [tokens, channels] begins with the inputs of the convolution that precede those of the tokens.
    """
    filters = layer.conv1d.weight.squeeze(1)
    windows = seen.unfold(0, filters.shape[1], 1)
    widths = [width // layer.tp_size for width in (layer.key_dim, layer.key_dim, layer.value_dim)]
    parts = F.silu((windows * filters).sum(-1)).split(widths, dim=-1)
    group = layer.num_v_heads // layer.num_k_heads
    q, k = (part.unflatten(-1, (-1, layer.head_k_dim)).repeat_interleave(group, 1) for part in parts[:2])
    q, k = (part * torch.rsqrt(part.square().sum(-1, keepdim=True) + 1e-6) for part in (q, k))
    v = parts[2].unflatten(-1, (-1, layer.head_v_dim))
    decays = torch.exp(-layer.A_log.exp() * F.softplus(a + layer.dt_bias))
    strengths = b.sigmoid()
    memories: list[Tensor] = []
    for token in range(len(b)):
        memory = memory * decays[token, :, None, None]
        correction = strengths[token, :, None] * (v[token] - (memory * k[token].unsqueeze(1)).sum(-1))
        memory = memory + correction.unsqueeze(2) * k[token].unsqueeze(1)
        memories.append(memory)
        outputs[token] = (memory * q[token].unsqueeze(1)).sum(-1) * layer.head_k_dim**-0.5
    return memories

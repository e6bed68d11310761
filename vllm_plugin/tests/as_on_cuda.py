"""Engines on a CPU that compile, and whose all-reduces arrive, as on GPUs.

On a CPU, vLLM replaces its own compilation by plain torch.compile, and calls experts without an operator. Here it does
neither: steps are compiled with vLLM's passes, in pieces that end at each attention or as one graph. What an operator
may overwrite is overwritten, and the sum of an all-reduce is taken as late as possible.
"""

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from megatron_ladder_vllm import in_flight
from torch import Tensor
from vllm.config import CompilationMode
from vllm.distributed.parallel_state import GroupCoordinator
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
from vllm.platforms.cpu import CpuPlatform

OPERATORS_OF_CUDA = (
    "dynamic_per_token_scaled_fp8_quant",
    "dynamic_scaled_fp8_quant",
    "fused_add_rms_norm",
    "fused_add_rms_norm_static_fp8_quant",
    "fused_qk_norm_rope",
    "rms_norm",
    "rms_norm_dynamic_per_token_quant",
    "rms_norm_static_fp8_quant",
    "rotary_embedding",
    "silu_and_mul",
    "silu_and_mul_quant",
    "static_scaled_fp8_quant",
)
"""What vLLM's passes search graphs for. The CPU build lacks some, and no graph of these models contains them."""


def late(group: GroupCoordinator) -> in_flight.Transport:
    """Return a transport as slow as possible: it sums what a partial is at its wait, and until then a buffer is NaN.

    A partial that changed in flight, and a buffer that was written, are errors.
    """

    def start(partial: Tensor) -> tuple[Tensor, Any]:
        buffer = torch.full_like(partial, torch.nan, memory_format=torch.contiguous_format)
        launched = partial.clone()

        def wait() -> None:
            # Warm-ups compute with undefined values.
            assert torch.equal(launched.nan_to_num(), partial.nan_to_num()), "a partial changed in flight"
            assert buffer.isnan().all(), "a buffer was written in flight"
            buffer.copy_(partial)
            dist.all_reduce(buffer, group=group.device_group)

        return buffer, SimpleNamespace(wait=wait)

    return start


@contextlib.contextmanager
def as_on_cuda(whole: bool) -> Iterator[None]:
    """Let engines built in this context compile as on GPUs, as one graph or in pieces, with late all-reduces."""
    check: Callable[..., None] = CpuPlatform.check_and_update_config.__func__

    def check_but_compile(platform: type[CpuPlatform], vllm_config: Any) -> None:
        compilation = vllm_config.compilation_config
        mode, compilation.mode = compilation.mode, CompilationMode.NONE
        check(platform, vllm_config)
        compilation.mode = mode
        # The plugin turns this pass off for CPUs only.
        compilation.inductor_compile_config.pop("reorder_for_peak_memory", None)
        # vLLM fills it in with the sizes of CUDA graphs.
        compilation.compile_sizes = []
        compilation.splitting_ops = [] if whole else None
        # It is the default for whole graphs, and its operators are absent from the CPU build.
        compilation.pass_config.fuse_rope_kvcache_cat_mla = False

    def select_operator(runner: MoERunner) -> Any:
        if runner.shared_experts is not None:
            return torch.ops.vllm.moe_forward_shared
        compute = runner._forward_impl

        def compute_and_overwrite(hidden_states: Tensor, *others: Any) -> Any:
            output = compute(hidden_states, *others)
            hidden_states.fill_(torch.nan)
            return output

        runner._forward_impl = compute_and_overwrite
        return torch.ops.vllm.moe_forward

    library = torch.library.Library("_C", "FRAGMENT")
    for name in OPERATORS_OF_CUDA:
        if not hasattr(torch.ops._C, name):
            library.define(f"{name}(Tensor x) -> ()")
    with (
        patch.object(CpuPlatform, "check_and_update_config", classmethod(check_but_compile)),
        patch.object(MoERunner, "_select_forward", select_operator),
        patch.object(QwenGatedDeltaNetAttention, "forward_cpu", QwenGatedDeltaNetAttention.forward_cuda),
        patch.object(in_flight, "asynchronous", late),
    ):
        yield

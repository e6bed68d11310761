"""torch.compile for what a sub-block does between its products.

Compiled are functions of tensors alone: the norm, the way from the input product to queries, keys and values, and
SwiGLU. Each becomes one kernel forward and one backward. The addition before a norm is part of its kernel, except where
`backward.py` keeps a graph of the norm alone. The products, which start reduces, and the walk, which waits for them,
stay outside, so the order of launches and waits is that of the uncompiled model. All layers share the compiled
functions, so each is compiled once for a shape.
"""

import os
import shutil

import torch
from torch import nn

from megatron_ladder.errors import UserError
from megatron_ladder.model.attention import AttentionHeads, split_heads
from megatron_ladder.model.attention_mlp import AttentionMLP
from megatron_ladder.model.mlp import MLP, swiglu
from megatron_ladder.model.norm import RMSNorm, add_rms_norm, torch_rms_norm


def compile_sub_blocks(model: nn.Module, backend: str = "inductor") -> None:
    """Has all sub-blocks and norms of a model use compiled functions, the norm that of torch.

    Args:
        backend: of torch.compile; "inductor" needs a C++ compiler on a CPU.
    """
    # Not `fullgraph`: torch compiles a function for so many kinds of arguments, and another kind would be an error.
    norm = torch.compile(torch_rms_norm, backend=backend)
    add_norm = torch.compile(add_rms_norm, backend=backend)
    compiled_split_heads = torch.compile(split_heads, backend=backend)
    compiled_swiglu = torch.compile(swiglu, backend=backend)
    for module in model.modules():
        if isinstance(module, RMSNorm):
            module.function = norm
            module.add_function = add_norm
        elif isinstance(module, AttentionHeads):
            module.norm = torch_rms_norm
            module.split_heads = compiled_split_heads
        elif isinstance(module, MLP | AttentionMLP):
            module.swiglu = compiled_swiglu


def require_compiler(flag: str) -> None:
    """Raises a UserError that names `flag` if there is no compiler, without which inductor fails at the first step."""
    named = [os.environ[name] for name in ("CXX", "CC") if name in os.environ]
    if not any(shutil.which(compiler) for compiler in (*named, "g++", "clang++", "gcc", "clang")):
        raise UserError(f"{flag}: no C++ compiler was found (g++, clang++ or $CXX): install one, or leave {flag} out")

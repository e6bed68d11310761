"""The operations between the collectives of a model, as one value that is passed to its modules.

Another implementation (NVIDIA apex, torch.compile, the packed product in `generate/loading.py`) is another
`Operations` value. Operations are functions of tensors alone: they start no collective and wait for none, so replacing
them leaves the order of launches and waits as it is.
"""

import importlib
import importlib.util
import os
import shutil
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron_ladder.blueprint.model import ModelConfig
from megatron_ladder.errors import Problem, UserError
from megatron_ladder.model.flash_linear_attention import find_delta_kernel
from megatron_ladder.parallel.layout import Placement
from megatron_ladder.parallel.products import GradientSink, LinearFunction

NormFunction = Callable[[Tensor, Tensor, float], Tensor]
"""(x [..., n], weight [n], epsilon) -> [..., n]."""

_LEAST_FLEX_HEAD = 16
"""Width of the smallest head that FlexAttention's kernels process on CUDA."""


def _rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, epsilon)


def _norm(x: Tensor, weight: Tensor, epsilon: float, offset: float = 0.0, norm: NormFunction = _rms_norm) -> Tensor:
    """Multiply by offset + weight, which needs fp32: near 1, neighbouring numbers of bfloat16 differ by 1/128."""
    if not offset:
        return norm(x, weight, epsilon)
    wide = torch.promote_types(x.dtype, torch.float32)
    return norm(x.to(wide), offset + weight.to(wide), epsilon).to(x.dtype)


def _add_norm(
    stream: Tensor,
    output: Tensor,
    weight: Tensor,
    epsilon: float,
    offset: float = 0.0,
    norm: NormFunction = _rms_norm,
) -> tuple[Tensor, Tensor]:
    total = stream + output
    return total, _norm(total, weight, epsilon, offset, norm)


_WITHOUT_PLANS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""cuDNN builds a plan for every shape, and the number of keys grows with each step."""


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Apply attention: q [b, heads/t, s, d], k [b, kv_heads/t, positions, d], v [b, kv_heads/t, positions, width of a
    value] -> [b, heads/t, s, width of a value].

    `mask` [b or 1, 1, s or 1, positions] is True where a query may attend. None means causal: each query sees the
    positions up to its own, and a single query, being the newest, sees all. Scores are multiplied by `scale`.
    """
    if q.is_cuda and (mask is not None or q.shape[2] == 1):
        with sdpa_kernel(_WITHOUT_PLANS):
            return _attend_once(q, k, v, mask, scale)
    return _attend_once(q, k, v, mask, scale)


def _attend_once(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    # torch aligns a causal mask with the first key, which would hide earlier keys from a single query.
    causal = mask is None and q.shape[2] > 1
    if mask is not None and q.shape[1] != k.shape[1]:
        # CUDA's fused kernels accept a mask or grouped queries, but not both. Therefore the queries of each head become
        # rows of the key-value head that it shares.
        grouped = q.reshape(*k.shape[:2], -1, q.shape[3])
        masks = mask if mask.shape[2] == 1 else mask.repeat(1, 1, q.shape[1] // k.shape[1], 1)
        attended = F.scaled_dot_product_attention(grouped, k, v, attn_mask=masks, scale=scale)
        return attended.reshape(*q.shape[:3], v.shape[3])
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )


_QUICK_GELU_SLOPE = 1.702


def _swiglu(gate_up: Tensor, quick_gelu: bool = False, limit: float | None = None, offset: float = 0.0) -> Tensor:
    """[..., 2 n] -> [..., n]; see `quick_geglu` and the flags after it in `ModelTraits`."""
    gate, up = gate_up.chunk(2, dim=-1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    if offset:
        up = up + offset
    return (gate * torch.sigmoid(_QUICK_GELU_SLOPE * gate) if quick_gelu else F.silu(gate)) * up


def _unchanged(operation: Callable[..., Any], projections: int) -> Callable[..., Any]:
    return operation


@dataclass(frozen=True)
class Operations:
    """The replaceable operations of a model; the defaults are torch's own."""

    norm: Callable[..., Tensor] = _norm
    """(x [..., n], weight [n], epsilon, offset of the weight) -> [..., n]."""
    add_norm: Callable[..., tuple[Tensor, Tensor]] = _add_norm
    """(stream, output, weight, epsilon, offset of the weight) -> their sum and its norm."""
    of_heads: Callable[[Callable[..., Any], int], Callable[..., Any]] = _unchanged
    """Wraps an elementwise operation of a mixer, of whose arguments so many, from the first on, are its projections."""
    attend: Callable[[Tensor, Tensor, Tensor, Tensor | None, float], Tensor] = _attend
    swiglu: Callable[..., Tensor] = _swiglu
    """gates and ups [..., 2 n] -> [..., n]; other arguments are those of the model, which `for_model` binds."""
    linear: LinearFunction | None = None
    """Replaces the product of layers with their matrices."""
    delta_kernel: Callable[..., Any] | None = None
    """Replaces torch in the rule of gated DeltaNet in training."""

    def for_model(self, config: ModelConfig) -> "Operations":
        """Return the operations with the activation of a model."""
        arguments = config.quick_geglu, config.activation_func_clamp_value, config.glu_linear_offset
        if arguments == (False, None, 0.0):
            return self
        quick_gelu, limit, offset = arguments
        return replace(self, swiglu=partial(self.swiglu, quick_gelu=quick_gelu, limit=limit, offset=offset))


BALANCING_LOSS, ROUTER_Z_LOSS = "load balancing loss", "router z loss"


@dataclass(frozen=True)
class ExpertOptions:
    """How experts are trained and divided over the ranks."""

    balancing: float = 0.0
    """Coefficient of the auxiliary loss of the Switch Transformer (arXiv 2101.03961), of each layer."""
    balancing_of: Literal["seq_aux_loss", "aux_loss"] = "seq_aux_loss"
    """What is balanced: each sequence, or each micro-batch."""
    z_loss: float = 0.0
    """Coefficient of the squared log of the normaliser of the router's softmax."""
    sharding: Literal["width", "experts"] = "width"
    """What a tensor-parallel rank holds: a part of the width of every expert, or whole experts."""
    capacity: int | None = None
    """How many rows an expert-parallel rank sends to each expert in training, used or not; None: as many as are
    used."""

    @property
    def loss_names(self) -> tuple[str, ...]:
        """The losses that experts return."""
        coefficients = {BALANCING_LOSS: self.balancing, ROUTER_Z_LOSS: self.z_loss}
        return tuple(name for name, coefficient in coefficients.items() if coefficient > 0)


@dataclass(frozen=True, kw_only=True)
class BuildContext(Placement):
    """What every module of one model is built with."""

    config: ModelConfig
    operations: Operations
    experts: ExpertOptions
    gradient_sink: GradientSink


def with_norm(norm: NormFunction) -> Operations:
    """Return torch's operations with another norm."""
    return Operations(partial(_norm, norm=norm), partial(_add_norm, norm=norm))


def compile_operations(operations: Operations, backend: str = "inductor") -> Operations:
    """Compile the norms, the splitting and joining of heads, and the gates with torch.compile.

    Each becomes one kernel forward and one backward, compiled once per shape for all layers. The addition before a norm
    is part of its kernel, except where `backward.py` keeps a separate graph of the norm. Matrix products stay as they
    are.
    """
    # Inductor would time variants of a reduction, and ranks with other variants round differently: their copies of
    # replicated weights would drift apart, and a resumed run would differ.
    options = {"deterministic": True} if backend == "inductor" else None
    # Without `fullgraph`, an unexpected kind of argument falls back to eager mode instead of raising an error.
    compiled: Any = partial(torch.compile, backend=backend, options=options)
    return replace(
        operations,
        norm=compiled(operations.norm),
        add_norm=compiled(operations.add_norm),
        # One compiled operation serves all layers.
        of_heads=cache(lambda operation, projections: compiled(operations.of_heads(operation, projections))),
        swiglu=compiled(operations.swiglu),
    )


def _compiler_problem(device: torch.device) -> str:
    """Return what torch.compile lacks on this machine to compile for `device`; empty if nothing."""
    if device.type == "cuda" and importlib.util.find_spec("triton") is None:
        return "the package triton is missing: install it"
    # Triton compiles its launcher in C, inductor the kernels of a CPU in C++.
    language, variable, names = ("C", "CC", ("gcc", "clang")) if device.type == "cuda" else ("C++", "CXX", ("g++",))
    if not any(map(shutil.which, [os.environ[variable]] if variable in os.environ else names)):
        return f"no {language} compiler was found ({', '.join(names)} or ${variable}): install one"
    header = Path(sysconfig.get_path("include", "posix_prefix")) / "Python.h"
    return "" if header.is_file() else f"{header} is missing: install the headers of Python, such as python3-dev"


def require_compiler(field_name: str, device: torch.device) -> None:
    """Raise a UserError about a field if torch.compile lacks something, which it reports only at the first step."""
    if problem := _compiler_problem(device):
        raise UserError(Problem({field_name: None}, "{}: {problem}, or leave {} out", problem=problem))


def uses_compiled_sinks(config: ModelConfig, device: torch.device) -> bool:
    """Return whether whole sequences with sinks are computed by FlexAttention, whose kernels torch compiles."""
    return config.softmax_type == "learnable" and device.type == "cuda" and config.head_dim >= _LEAST_FLEX_HEAD


def sink_problems(config: ModelConfig, device: torch.device, field_name: str, value: object) -> Iterator[Problem]:
    """Yield why a model that a field gives cannot be computed on this machine, if its sinks need a missing compiler."""
    if uses_compiled_sinks(config, device) and (problem := _compiler_problem(device)):
        reason = "{}: attention with sinks is compiled on GPUs: {problem}"
        yield Problem({field_name: value}, reason, problem=problem)


def find_in_apex(module: str, attribute: str, extension: str, device: torch.device) -> tuple[Any | None, str]:
    """Return `attribute` of a module of apex and "", or None and the reason why it cannot be used.

    PyPI has an unrelated package of that name, so a successful import proves nothing: NVIDIA's apex, which provides
    optional fused kernels, is recognised by the attribute.
    `extension` is the compiled module that it calls. An apex installed without kernels lacks it, but would report that
    only at the first use.
    """
    if device.type != "cuda":
        return None, "apex's kernels need a CUDA device"
    try:
        imported = importlib.import_module(module)
    except ImportError:
        return None, "NVIDIA's apex is not installed (the package apex of the Python index is an unrelated project)"
    operation = getattr(imported, attribute, None)
    if operation is None:
        return None, f"the installed apex has no {module}.{attribute}: it is not NVIDIA's, or too old"
    try:
        importlib.import_module(extension)
    except ImportError as error:
        return None, f"the installed apex cannot load its kernels ({error}): it has to be built with --cuda_ext"
    return operation, ""


def select_operations(
    norm_implementation: Literal["auto", "torch", "apex"],
    compiled: Literal["auto", "true", "false"],
    device: torch.device,
    linear_attention_implementation: Literal["torch", "fla"] = "torch",
) -> tuple[Operations, str]:
    """Return the operations for training, and a description of their norm for the log.

    Raise a UserError if apex or fla was requested, but is missing, or there is no CUDA device.
    """
    operations, description = _select_norm(norm_implementation, compiled, device)
    if linear_attention_implementation == "torch":
        return operations, description
    kernel, reason = find_delta_kernel(device)
    if kernel is None:
        problem = {"linear_attention_implementation": "fla"}
        raise UserError(Problem(problem, "{}: {reason}", "leave it out", reason=reason))
    return replace(operations, delta_kernel=kernel), description


def _select_norm(
    norm_implementation: Literal["auto", "torch", "apex"],
    compiled: Literal["auto", "true", "false"],
    device: torch.device,
) -> tuple[Operations, str]:
    problem = ""
    if compiled == "auto" and device.type == "cuda" and norm_implementation != "apex":
        problem = _compiler_problem(device)
        compiled = "false" if problem else "true"
    if compiled == "true":
        return compile_operations(Operations()), "torch, compiled"
    operations, description = _select_uncompiled(norm_implementation, device)
    return operations, f"{description} (not compiled: {problem})" if problem else description


def _select_uncompiled(
    norm_implementation: Literal["auto", "torch", "apex"], device: torch.device
) -> tuple[Operations, str]:
    if norm_implementation == "torch" or (norm_implementation == "auto" and device.type != "cuda"):
        return Operations(), "torch"
    fused, reason = find_in_apex(
        "apex.normalization.fused_layer_norm", "fused_rms_norm_affine", "fused_layer_norm_cuda", device
    )
    if fused is None:
        if norm_implementation == "apex":
            text = "{}: {reason}; use {} torch"
            raise UserError(Problem({"norm_implementation": "apex"}, text, reason=reason))
        return Operations(), f"torch ({reason})"

    def apex_rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        return fused(x, weight, weight.shape, epsilon)

    return with_norm(apex_rms_norm), "apex FusedRMSNorm"

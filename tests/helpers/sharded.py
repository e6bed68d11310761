"""Shared helpers: a rank's model from full weights, and gradients by canonical name."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from megatron_ladder.blueprint.model import ModelConfig, head_replicas
from megatron_ladder.checkpoint.optimizer_state import Span
from megatron_ladder.comm.mesh import ProcessMesh
from megatron_ladder.engine.state import sum_partial_gradients
from megatron_ladder.generate.loading import PACKED_OPERATIONS, _load_packed
from megatron_ladder.model.language_model import LanguageModel, LossScales
from megatron_ladder.model.stack import StackOptions
from megatron_ladder.model.stats import PassStats
from megatron_ladder.parallel.layout import parameter_sections, state_sections

Pieces = list[tuple[str, tuple[int, ...], Tensor]]
"""Canonical name, offset and values of each slice that one rank holds."""

PADDING = 1e3
"""Value of the rows beyond the vocabulary, which must not affect any result."""


@functools.cache
def mesh_of(
    tensor_parallel: int,
    replicas: tuple[int, ...] = (),
    pipeline_parallel: int = 1,
    tp_comm_max_ctas: int = 0,
    expert_parallel: int = 1,
) -> ProcessMesh:
    """Return one mesh per shape and process, because creating groups is slow."""
    options = {"tp_comm_max_ctas": tp_comm_max_ctas, "expert_parallel": expert_parallel}
    return ProcessMesh.build(tensor_parallel, pipeline_parallel, replicas, **options)


LATENT_WIDTHS: dict[str, Any] = {
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 7,
    "num_key_value_heads": 1,
    "head_dim": 10,
}
"""Latent attention, for `small_model`."""


def small_model(**changes: Any) -> ModelConfig:
    """Return a model of few layers with grouped queries and a vocabulary size that needs padding."""
    sizes: dict[str, Any] = {
        "num_layers": 4,
        "hidden_size": 32,
        "ffn_hidden_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 101,
        "max_position_embeddings": 64,
    }
    return ModelConfig(**(sizes | changes))


def build(
    config: ModelConfig,
    weights: Mapping[str, Tensor],
    tensor_parallel: int,
    options: StackOptions,
    sequence_parallel: bool = False,
    packed: bool = False,
) -> LanguageModel:
    """Build this rank's slices of the full `weights`; with `packed`, for generation on a CPU."""
    mesh = mesh_of(tensor_parallel, head_replicas(config, tensor_parallel))
    mesh = replace(mesh, sequence_parallel=sequence_parallel)
    return build_on(mesh, config, weights, options, packed, weights["embedding.weight"].dtype)


def build_on(
    mesh: ProcessMesh,
    config: ModelConfig,
    weights: Mapping[str, Tensor],
    options: StackOptions,
    packed: bool,
    dtype: torch.dtype,
) -> LanguageModel:
    """`build` on a mesh; with `packed`, as `load_model` does on a CPU."""
    if packed:
        options = replace(options, operations=PACKED_OPERATIONS)
        model = LanguageModel(config, mesh, options, dtype=dtype, device=torch.device("meta"))
        _load_packed(model, functools.partial(fill_slices, weights=weights))
    else:
        model = LanguageModel(config, mesh, options, dtype=dtype)
        fill_slices(model, weights)
    return model


@torch.no_grad()
def fill_slices(module: nn.Module, weights: Mapping[str, Tensor], recurse: bool = True) -> None:
    """Copy this rank's slices of the full `weights` into a module, by default with its children."""
    for parameter, sections in (*parameter_sections(module, recurse), *state_sections(module, recurse)):
        parameter.fill_(PADDING)
        for section in sections:
            box = section.box.slices()
            section.view(parameter).copy_(weights[section.name][box])


def weight_pieces_of(module: nn.Module) -> Pieces:
    """Return every weight and state that this rank holds, including replicated ones."""
    return [
        (section.name, section.box.offset, section.view(parameter.detach()).clone())
        for parameter, sections in (*parameter_sections(module), *state_sections(module))
        for section in sections
    ]


def run_chain(
    parts: Sequence[LanguageModel],
    tokens: Tensor,
    labels: Tensor,
    mask: Tensor | None = None,
    targets: float = 1.0,
    lengths: Tensor | None = None,
    all_tokens: float = 1.0,
    drafting_targets: Sequence[float] = (),
) -> tuple[Tensor, PassStats]:
    """Run ranges of layers forward and backward as pipeline stages do; return the loss, divided by `targets`, and what
    the passes count.

    The losses of bodies are divided by `all_tokens`, those of a drafting head's depths by `drafting_targets`.
    """
    counts = targets, all_tokens, drafting_targets
    scales = LossScales(*(torch.tensor(count, dtype=torch.float64).reciprocal() for count in counts))
    entered: list[Tensor | None] = [None]
    left: list[Tensor] = []
    sums = PassStats()
    for part in parts:
        leaving, stats = part.stage(tokens, labels, mask, lengths=lengths, entering=entered[-1], scales=scales)
        assert part.is_last or leaving.shape == part.allocate_state(tokens, 0, leaves=True).shape
        left.append(leaving)
        sums = sums.plus(stats)
        # A state that crosses between processes is a new leaf there, and its gradient is sent back.
        entered.append(left[-1].detach().clone().requires_grad_())
    loss = left.pop()
    loss.backward()
    for leaving, entering in zip(reversed(left), reversed(entered[1:-1]), strict=True):
        assert entering is not None
        leaving.backward(entering.grad)
    return loss, sums


def gradient_pieces(model: LanguageModel) -> Pieces:
    """Return the gradients of weights that train, including replicated ones, with parts summed over the ranks."""
    gradients: list[tuple[Span, Tensor]] = []
    for parameter, sections in parameter_sections(model):
        if not parameter.requires_grad:
            continue
        assert parameter.grad is not None, sections
        span = Span(sections, parameter.shape, 0, parameter.detach().flatten(), parameter, 0, owned=True)
        gradients.append((span, parameter.grad.clone(memory_format=torch.contiguous_format)))
    sum_partial_gradients(gradients, model.stack.mesh, torch.device("cpu"))
    return [
        (section.name, section.box.offset, section.view(gradient))
        for span, gradient in gradients
        for section in span.sections
    ]


def assert_pieces(ranks: list[Pieces], expected: Mapping[str, Tensor], tolerance: float) -> None:
    """Assert that the pieces equal the reference (max|a-b| / max|b| per tensor) and together cover it."""
    covered = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    for rank, pieces in enumerate(ranks):
        for name, offset, values in pieces:
            box = tuple(slice(o, o + e) for o, e in zip(offset, values.shape, strict=True))
            error, size = (values - expected[name][box]).abs().max(), expected[name].abs().max()
            assert error <= tolerance * size, f"rank {rank}: {name}: {error:.1e} above {tolerance:.0e} x {size:.1e}"
            covered[name][box] = 1
    for name, mask in covered.items():
        assert mask.all(), f"{name}: some elements are on no rank"

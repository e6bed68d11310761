"""Gated DeltaNet, compared with transformers and token by token."""

import itertools
import math
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_next.configuration_qwen3_next import Qwen3NextConfig
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from megatron_ladder.blueprint.model import ModelConfig
from megatron_ladder.comm.mesh import ProcessMesh
from megatron_ladder.errors import UserError
from megatron_ladder.model.language_model import LanguageModel
from megatron_ladder.model.mixers.gated_delta import (
    DeltaOperands,
    _delta_chunks,
    _delta_step,
    _gated_norm,
    _split_heads,
)
from megatron_ladder.model.mixers.mixer import States
from megatron_ladder.model.operations import select_operations
from megatron_ladder.model.stack import StackOptions
from megatron_ladder.model.sub_block import SequenceContext
from tests.helpers.sharded import build_on, gradient_pieces, small_model
from tests.reference import ReferenceConfig, make_weights

KEY_HEADS, SHARED, KEY, VALUE, ROWS = 2, 3, 8, 6, 2
LENGTHS = (1, 2, 3, 63, 64, 65, 128, 130, 200)
CPU = torch.device("cpu")
PREFIX = "layers.0.attention."


def delta_model(**changes: Any) -> ModelConfig:
    sizes = {
        "num_layers": 1,
        "experimental_attention_variant": "gated_delta_net",
        "linear_attention_layers": (0,),
        "linear_key_head_dim": KEY,
        "linear_value_head_dim": VALUE,
        "linear_num_key_heads": KEY_HEADS,
        "linear_num_value_heads": KEY_HEADS * SHARED,
        "max_position_embeddings": 256,
    }
    return small_model(**sizes | changes)


def operands_of(length: int, decay: float) -> list[Tensor]:
    generator = torch.Generator().manual_seed(length)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(ROWS, *shape, generator=generator, dtype=torch.float64)

    q, k = (torch.nn.functional.normalize(drawn(KEY_HEADS, length, KEY), dim=-1) for _ in range(2))
    v, g, beta = drawn(KEY_HEADS * SHARED, length, VALUE), drawn(KEY_HEADS * SHARED, length), drawn(6, length)
    return [x.requires_grad_() for x in (q, k, v, -decay * g.abs(), beta.sigmoid())]


def token_by_token(operands: Sequence[Tensor], memory: Tensor, age: Tensor | None) -> tuple[Tensor, Tensor]:
    outputs = []
    for token in range(operands[0].shape[2]):
        if age is not None:
            memory = memory * (age[:, token] > 0)[:, None, None, None]
        output, memory = _delta_step(DeltaOperands(*(x[:, :, token : token + 1] for x in operands)), memory)
        outputs.append(output)
    return torch.cat(outputs, dim=2), memory


def ages_of(length: int, document: int) -> Tensor:
    """Return the ages in rows of documents of this length, the second row shifted."""
    places = torch.arange(length)
    return torch.stack((places % document, (places + document // 2) % document))


@pytest.mark.parametrize("decay", [0.05, 0.5, 16.0])
@pytest.mark.parametrize("document", [None, 1, 5, 63, 64, 65, 100])
def test_chunks_equal_the_rule_token_by_token(document: int | None, decay: float) -> None:
    for length in LENGTHS:
        check_chunks(length, document, decay)


@pytest.mark.slow
@pytest.mark.parametrize("decay", [0.05, 16.0])
def test_chunks_of_every_length_equal_the_rule_token_by_token(decay: float) -> None:
    """Every length of documents as well."""
    for length in range(1, 201):
        check_chunks(length, 1 + 77 * length % 200, decay)


def check_chunks(length: int, document: int | None, decay: float) -> None:
    operands = operands_of(length, decay)
    age = None if document is None else ages_of(length, document)
    generator = torch.Generator().manual_seed(1)
    memory = torch.randn(ROWS, KEY_HEADS * SHARED, KEY, VALUE, generator=generator, dtype=torch.float64)
    memory.requires_grad_()
    results = []
    for found in (token_by_token(operands, memory, age), _delta_chunks(DeltaOperands(*operands), memory, age)):
        factors = [torch.randn(x.shape, generator=torch.Generator().manual_seed(2)).double() for x in found]
        total = sum((x * factor).sum() for x, factor in zip(found, factors, strict=True))
        assert isinstance(total, Tensor)
        results.append((*found, *torch.autograd.grad(total, [*operands, memory])))
    for expected, value in zip(*results, strict=True):
        assert (value - expected).abs().max() <= 1e-11 * expected.abs().max().clamp(min=1)


def transformers_layer(config: ModelConfig) -> Qwen3NextGatedDeltaNet:
    other = Qwen3NextConfig(
        hidden_size=config.hidden_size,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
        linear_conv_kernel_dim=config.linear_conv_kernel_dim,
        linear_key_head_dim=config.linear_key_head_dim,
        linear_value_head_dim=config.linear_value_head_dim,
        linear_num_key_heads=config.linear_num_key_heads,
        linear_num_value_heads=config.linear_num_value_heads,
        rms_norm_eps=config.norm_epsilon,
    )
    return Qwen3NextGatedDeltaNet(other, 0)


def as_transformers(config: ModelConfig, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the layer's tensors as Qwen3-Next has them: projections are grouped by key head."""
    own = {name.removeprefix(PREFIX): value for name, value in tensors.items() if name.startswith(PREFIX)}

    def grouped(*names: str) -> Tensor:
        parts = [own[f"{name}_proj.weight"].unflatten(0, (config.linear_num_key_heads, -1)) for name in names]
        return torch.cat(parts, dim=1).flatten(0, 1)

    return {
        "in_proj_qkvz.weight": grouped("q", "k", "v", "gate"),
        "in_proj_ba.weight": grouped("b", "a"),
        "conv1d.weight": torch.cat([own[f"{name}_conv.weight"] for name in "qkv"]).unsqueeze(1),
        "A_log": own["A_log"],
        "dt_bias": own["dt_bias"],
        "norm.weight": own["norm.weight"],
        "out_proj.weight": own["o_proj.weight"],
    }


def built(config: ModelConfig, dtype: torch.dtype = torch.float32) -> tuple[LanguageModel, dict[str, Tensor]]:
    weights = make_weights(ReferenceConfig.like(config), seed=5, dtype=torch.float64)
    # Slow decay, where a wrong state lasts.
    weights[f"{PREFIX}A_log"] += math.log(0.1)
    weights = {name: weight.to(dtype) for name, weight in weights.items()}
    return build_on(ProcessMesh.single(), config, weights, StackOptions(), False, dtype), weights


def mix(model: LanguageModel, normed: Tensor, bounds: Sequence[int] | None = None) -> Tensor:
    """Apply the mixer of the only layer to rows [b, s, h]."""
    documents = None if bounds is None else torch.tensor(bounds, dtype=torch.int32)
    context = model.training_context(normed[..., 0], document_bounds=documents)
    body: Any = model.stack.sub_blocks()[0].body
    partial: Tensor = body(normed.transpose(0, 1), context).partial
    return partial.transpose(0, 1)


def drawn_rows(length: int, config: ModelConfig, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(length)
    return torch.randn(ROWS, length, config.hidden_size, generator=generator, dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("length", [1, 63, 64, 65, 130])
def test_values_and_gradients_are_those_of_transformers(length: int) -> None:
    config = delta_model(norm_epsilon=1e-3)
    model, weights = built(config)
    layer = transformers_layer(config)
    layer.load_state_dict(as_transformers(config, weights))
    ours, theirs = (drawn_rows(length, config).requires_grad_() for _ in range(2))
    found, expected = mix(model, ours), layer(theirs)
    assert (found - expected).abs().max() <= 2e-5 * expected.abs().max()
    factors = torch.randn(expected.shape, generator=torch.Generator().manual_seed(4))
    (found * factors).sum().backward()
    (expected * factors).sum().backward()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    gradients = as_transformers(config, {name: gradient for name, _, gradient in gradient_pieces(model)})
    pairs = {name: (gradients[name], parameter.grad) for name, parameter in layer.named_parameters()}
    for name, (found, expected) in (pairs | {"input": (ours.grad, theirs.grad)}).items():
        assert (found - expected).abs().max() <= 5e-5 * expected.abs().max(), name


@pytest.mark.parametrize("cut", [1, 2, 63, 64, 65, 100])
def test_documents_of_a_row_do_not_mix(cut: int) -> None:
    config = delta_model()
    model, _ = built(config, torch.float64)
    rows = drawn_rows(130, config, torch.float64)
    found = mix(model, rows, (0, cut, 130, 130 + cut, 260))
    apart = torch.cat((mix(model, rows[:, :cut]), mix(model, rows[:, cut:])), dim=1)
    assert (found - apart).abs().max() < 1e-12
    other = torch.cat((drawn_rows(cut, config, torch.float64) + 1, rows[:, cut:]), dim=1)
    assert torch.equal(mix(model, other, (0, cut, 130, 130 + cut, 260))[:, cut:], found[:, cut:])


@pytest.mark.parametrize("cut", [1, 2, 63, 64, 65, 100])
def test_two_documents_in_a_row_are_two_rows(cut: int) -> None:
    """Compare the logits of a whole model in fp32, in which slow decays would show what leaks between documents."""
    config = delta_model(num_layers=4, linear_attention_layers=(0, 1, 3))
    weights = make_weights(ReferenceConfig.like(config), seed=5)
    for layer in config.linear_attention_layers:
        weights[f"layers.{layer}.attention.A_log"] = torch.full((KEY_HEADS * SHARED,), math.log(0.05))
    model = build_on(ProcessMesh.single(), config, weights, StackOptions(), False, torch.float32)
    tokens = torch.randint(0, config.vocab_size, (1, 130), generator=torch.Generator().manual_seed(1))
    positions = torch.cat((torch.arange(cut), torch.arange(130 - cut))).unsqueeze(0)
    bounds = torch.tensor([0, cut, 130], dtype=torch.int32)

    def logits(row: Tensor, *context: Any) -> Tensor:
        with torch.no_grad():
            return model.logits_shard(model.hidden_states(row, model.training_context(row, *context)))

    joined = logits(tokens, positions, None, bounds)
    apart = torch.cat((logits(tokens[:, :cut]), logits(tokens[:, cut:])))
    assert (joined - apart).abs().max() <= 1e-6 * apart.abs().max()
    leaking = logits(tokens, positions)
    assert (leaking - apart)[cut:].abs().max() > 0.1 * apart.abs().max()
    other = torch.cat(((tokens[:, :cut] + 1) % config.vocab_size, tokens[:, cut:]), dim=1)
    assert torch.equal(logits(other, positions, None, bounds)[cut:], joined[cut:])


@pytest.mark.parametrize("prompt_chunk", [1, 2, 7, 64, 130])
def test_states_continue_prompts_and_slots_start_afresh(prompt_chunk: int) -> None:
    config = delta_model()
    model, _ = built(config, torch.float64)
    rows, lengths = drawn_rows(130, config, torch.float64), torch.tensor([120, 67])
    expected = mix(model, rows)
    states = States.allocate(config, 1, 3, 256, torch.float64, CPU)
    for state in states.tensors[0].values():
        state.fill_(0.7)
    body: Any = model.stack.sub_blocks()[0].body
    for before, after in itertools.pairwise([*range(0, 125, prompt_chunk), 125]):
        positions = torch.arange(before, after).unsqueeze(1)
        part = rows[:, before:after].clone()
        # Padding could be anything.
        part[positions.t() >= lengths.unsqueeze(1)] = 100.0
        context = SequenceContext(positions, states._replace(before=before, lengths=lengths))
        found = body(part.transpose(0, 1), model.stack.prepare(context)).partial.transpose(0, 1)
        for row, length in enumerate(lengths.tolist()):
            inside = slice(before, max(before, min(after, length)))
            size = inside.stop - inside.start
            assert torch.allclose(found[row, :size], expected[row, inside], rtol=0, atol=1e-11)
    for step in range(5):
        places = lengths + step
        newest = rows[torch.arange(ROWS), places].unsqueeze(0)
        context = SequenceContext(places.unsqueeze(0), states._replace(extent=200))
        found = body(newest, model.stack.prepare(context)).partial[0]
        assert torch.allclose(found, expected[torch.arange(ROWS), places], rtol=0, atol=1e-11)
    assert all((state[2] == 0.7).all() for state in states.tensors[0].values())


def test_bf16_models_compute_decays_and_states_in_fp32() -> None:
    config = delta_model()
    model, weights = built(config, torch.bfloat16)
    exact, _ = built(config, torch.float64)
    exact.load_state_dict({name: value.double() for name, value in model.state_dict().items()})
    rows = drawn_rows(200, config, torch.bfloat16)
    expected = mix(exact, rows.double())
    error = (mix(model, rows).double() - expected).square().mean().sqrt() / expected.square().mean().sqrt()
    assert error < 0.006
    generator = torch.Generator().manual_seed(2)
    shapes = (9, 2, 2 * KEY_HEADS * KEY + 6 * VALUE), (9, 2, 6), (9, 2, 6), (6,), (6,)
    drawn = [torch.randn(shape, generator=generator).bfloat16() for shape in shapes]
    channels = KEY_HEADS * KEY, KEY_HEADS * KEY, 6 * VALUE
    found, exact_parts = (
        _split_heads(x.to(torch.promote_types(x.dtype, torch.float32)), b, a, channels, KEY, scale, offset, None)
        for x, b, a, scale, offset in (drawn, [part.double() for part in drawn])
    )
    for part, exact_part in zip(found[3:], exact_parts[3:], strict=True):
        assert (part - exact_part).abs().max() <= 1e-6 * exact_part.abs().max()
    outputs, gate, weight = (torch.randn(shape, generator=generator) for shape in ((2, 6, 9, 8), (9, 2, 48), (8,)))
    operands = outputs, gate.bfloat16(), weight.bfloat16()
    normed, exact_normed = _gated_norm(*operands, 1e-3), _gated_norm(*(part.double() for part in operands), 1e-3)
    # Rounded once.
    assert normed.dtype == torch.bfloat16 and ((normed - exact_normed).abs() <= 2**-8 * exact_normed.abs()).all()
    states = States.allocate(config, 1, 1, 8, torch.bfloat16, CPU).tensors[0]
    assert {name: state.dtype for name, state in states.items()} == {
        "convolution": torch.bfloat16,
        "memory": torch.float32,
    }
    assert weights[f"{PREFIX}A_log"].dtype == torch.bfloat16


def test_initial_decays() -> None:
    config = delta_model(linear_num_key_heads=8, linear_num_value_heads=512)
    model = LanguageModel(config, ProcessMesh.single(), seed=3)
    of_layer = {name.rsplit("heads.")[1]: value for name, value in model.state_dict().items() if "heads." in name}
    scales = of_layer["log_scale"].exp()
    assert 0.01 <= scales.min() < 0.3 and 15.7 < scales.max() <= 16 and abs(scales.mean() - 8) < 0.7
    assert (of_layer["offset"] == 1).all() and (of_layer["norm"] == 1).all()
    assert abs(of_layer["filters"].std() - 12**-0.5) < 0.01


def fla_kernel(
    q: Tensor, k: Tensor, v: Tensor, *, g: Tensor, beta: Tensor, scale: float, cu_seqlens: Tensor | None
) -> tuple[Tensor, None]:
    """Stand in for fla's kernel: q and k [rows, tokens, heads, d], and several sequences only in one row."""
    assert q.shape[2] == k.shape[2] == v.shape[2], "old versions have no value heads that share a key head"
    operands = [x.transpose(1, 2) for x in (q * scale, k, v, g, beta)]
    if cu_seqlens is None:
        ends = [0, q.shape[1]]
    else:
        assert len(q) == 1 and cu_seqlens.dtype == torch.int64
        ends = cu_seqlens.tolist()
    memory = v.new_zeros(len(v), v.shape[2], q.shape[3], v.shape[3])
    parts = [
        token_by_token([x[:, :, begin:end] for x in operands], memory, None)[0]
        for begin, end in itertools.pairwise(ends)
    ]
    return torch.cat(parts, dim=2).transpose(1, 2), None


@pytest.mark.parametrize("documents", [None, [0, 5, 20, 21, 40]])
def test_flash_linear_attention_gets_what_our_chunks_compute_with(
    documents: list[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "fla.ops.gated_delta_rule", SimpleNamespace(chunk_gated_delta_rule=fla_kernel))
    operations, _ = select_operations("torch", "false", torch.device("cuda"), "fla")
    bounds = None if documents is None else torch.tensor(documents, dtype=torch.int32)
    tokens = torch.randint(100, (2, 20), generator=torch.Generator().manual_seed(0))
    found = []
    for options in (StackOptions(), StackOptions(operations=operations)):
        model = LanguageModel(delta_model(), ProcessMesh.single(), options, dtype=torch.float64, device=CPU, seed=1)
        model(tokens, labels=tokens, document_bounds=bounds).backward()
        found.append([parameter.grad for parameter in model.parameters()])
    assert all((other - own).norm() <= 1e-11 * own.norm() for own, other in zip(*found, strict=True))


def test_flash_linear_attention_is_missing() -> None:
    with pytest.raises(UserError, match="--linear-attention-implementation fla: .* CUDA device: leave it out"):
        select_operations("torch", "false", CPU, "fla")
    with pytest.raises(UserError, match=r"fla: .* cannot be imported .*megatron-ladder\[fla\]"):
        select_operations("torch", "false", torch.device("cuda"), "fla")

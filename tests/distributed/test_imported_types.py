"""Logits, loss and gradients of imported models in many layouts, compared with transformers' on one process."""

import itertools
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from megatron_ladder.blueprint.model import head_replicas
from megatron_ladder.blueprint.tensors import model_tensors
from megatron_ladder.checkpoint.hf_directory import open_hf_directory
from megatron_ladder.checkpoint.loading import load_weights
from megatron_ladder.model.language_model import LanguageModel
from tests.helpers.hugging_face import hf_name
from tests.helpers.pairwise import usual_share
from tests.helpers.pool import GlooPools
from tests.helpers.sharded import Pieces, assert_pieces, gradient_pieces, mesh_of, run_chain
from tests.reference import ReferenceConfig, reference_gradients, reference_logits
from tests.unit.convert import test_gpt_oss, test_hybrid_types, test_latent_types, test_routed_types, test_window_types
from tests.unit.convert.saved_models import save_model

GPT_OSS = {name: ("gpt_oss", test_gpt_oss.CASES[name]) for name in ("alternating windows", "tied")}
CASES = test_latent_types.CASES | test_routed_types.CASES | test_window_types.CASES | GPT_OSS | test_hybrid_types.CASES
TOLERANCE, OF_HYBRIDS, EXACT = 1e-5, 5e-5, 1e-10
"""In fp32, transformers' own forms of the delta rule are 2e-5 apart."""
WITH_STAGES: tuple[str, ...] = (
    "hy_v3",
    "dots1",
    "solar_open",
    "youtu",
    "gpt_oss",
    "mistral",
    "qwen2",
    "qwen3",
    "qwen2_moe",
)
WITH_STAGES += ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")
"""Types that are also computed in stages and with sequence parallelism."""
FOUR_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 64}
"""For models of three heads on two and four ranks."""


class Layout(NamedTuple):
    """Tensor-parallel ranks, whether they share out the stream, and the first layers of further pipeline stages."""

    ranks: int
    is_sharded: bool = False
    cuts: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"tp{self.ranks}{'-sp' if self.is_sharded else ''}{f'-pp{len(self.cuts) + 1}' if self.cuts else ''}"


def on_ranks(
    hf: str, layout: Layout, tokens: Tensor, labels: Tensor, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, float, Pieces]:
    """Return this rank's columns of the logits [s, b, V/t], the mean loss, and this rank's gradients of it."""
    directory = open_hf_directory(Path(hf))
    model = directory.model
    mesh = replace(mesh_of(layout.ranks, head_replicas(model, layout.ranks)), sequence_parallel=layout.is_sharded)
    bounds = itertools.pairwise((0, *layout.cuts, model.num_layers))
    parts = ((0, model.num_layers), *bounds)
    whole, *stages = [LanguageModel(model, mesh, chunks=[range(*bound)], dtype=dtype) for bound in parts]
    for part in (whole, *stages):
        load_weights(part, directory)
    with torch.no_grad():
        logits = whole.logits_shard(whole.hidden_states(tokens, whole.training_context(tokens)))
    loss, _ = run_chain(stages, tokens, labels, targets=labels.numel())
    return logits, loss.item(), [piece for stage in stages for piece in gradient_pieces(stage)]


def mixer_gradient(layer: Any, config: Any, name: str) -> Tensor:
    """Return the gradient of a tensor of a mixer in a layer of Qwen3.5 or Qwen3-Next, by its name in the mixer."""
    which, _, _ = name.partition("_")
    if hasattr(layer, "self_attn"):
        if which in ("q", "gate") and "proj" in name:
            heads = layer.self_attn.q_proj.weight.grad.unflatten(0, (config.num_attention_heads, 2, -1))
            return heads[:, ("q", "gate").index(which)].flatten(0, 1)
        return layer.self_attn.get_parameter(name).grad
    mixer = layer.linear_attn
    key_heads, key = config.linear_num_key_heads, config.linear_key_head_dim
    value = config.linear_num_value_heads // key_heads * config.linear_value_head_dim
    widths = [key_heads * key] * 2 + [key_heads * value]
    if "conv" in name:
        return mixer.conv1d.weight.grad.squeeze(1).split(widths)["qkv".index(which)]
    if name in ("A_log", "dt_bias", "norm.weight", "o_proj.weight"):
        return mixer.get_parameter(name.replace("o_proj", "out_proj")).grad
    if hasattr(mixer, "in_proj_ba"):
        if which in "ba":
            return mixer.in_proj_ba.weight.grad.unflatten(0, (key_heads, 2, -1))[:, "ba".index(which)].flatten(0, 1)
        groups = mixer.in_proj_qkvz.weight.grad.unflatten(0, (key_heads, -1)).split([key, key, value, value], dim=1)
        return groups[("q", "k", "v", "gate").index(which)].flatten(0, 1)
    if which in ("q", "k", "v"):
        return mixer.in_proj_qkv.weight.grad.split(widths)["qkv".index(which)]
    return mixer.get_parameter(f"in_proj_{which.replace('gate', 'z')}.weight").grad


def gradient(module: Any, name: str) -> Tensor:
    """Return the gradient of a canonical weight in a model of transformers, which stacks gates on ups of experts.

    In gpt-oss, stacks are transposed, and gates and ups alternate.
    """
    is_gpt_oss = module.config.model_type == "gpt_oss"
    if hasattr(module.config, "linear_num_key_heads") and ".attention." in name:
        _, layer, _, of_mixer = name.split(".", 3)
        return mixer_gradient(module.model.layers[int(layer)], module.config, of_mixer)
    stack, _, part = hf_name(name).partition(".mlp.experts.")
    if not part:
        if hasattr(module.config, "shared_expert_intermediate_size"):
            stack = stack.replace(".shared_experts.", ".shared_expert.")
        return module.get_parameter(stack.replace(".mlp.gate.", ".mlp.router.") if is_gpt_oss else stack).grad
    kind, _, suffix = part.partition("_proj.")
    bias = "_bias" if suffix == "bias" else ""
    of_stack = module.get_parameter(f"{stack}.mlp.experts.{'down' if kind == 'down' else 'gate_up'}_proj{bias}").grad
    if kind == "down":
        of_kind = of_stack
    elif is_gpt_oss:
        of_kind = of_stack[..., 1::2] if kind == "up" else of_stack[..., 0::2]
    else:
        of_kind = of_stack.chunk(2, dim=1)[kind == "up"]
    return of_kind.mT if is_gpt_oss and not bias else of_kind


def cases() -> list[Any]:
    """Return each model in its layouts, all but one of which are slow: 3 ranks for models of three heads."""
    found = []
    for index, (name, (kind, changes)) in enumerate(CASES.items()):
        has_three = changes.get("num_attention_heads") == 3
        layouts = [Layout(ranks) for ranks in ((1, 2, 3, 4) if has_three else (1, 2, 4))]
        quick = 2 if has_three else 1 + index % 2
        if kind in WITH_STAGES:
            layouts.append(Layout(layouts[quick].ranks, is_sharded=True))
            # Stages would share a tied matrix.
            if not changes.get("tie_word_embeddings"):
                layouts += [Layout(1, cuts=(1, 3)), Layout(2, is_sharded=True, cuts=(1, 2))]
        for number, layout in enumerate(layouts):
            marks = () if number == quick else pytest.mark.slow
            found.append(pytest.param(name, layout, marks=marks, id=f"{name}, {layout}"))
    return found


def save_scaled(path: Path, kind: str, decay: float = 0.15, **changes: Any) -> Any:
    """Save a random model, whose states of linear attention keep about e^-`decay` of themselves at each token."""
    model = save_model(path, kind, **changes)
    with torch.no_grad():
        # Scores near zero would leave the gradients of queries to rounding; so would large biases.
        factors = {1: 0.5, 2: 1.5} if kind == "gpt_oss" else {2: 3.0}
        for part, weight in model.named_parameters():
            weight *= factors.get(weight.dim(), 1.0) if ".self_attn." in part else 1.0
            # The mean is 1.
            weight += math.log(decay) - 1 if part.endswith("A_log") else 0.0
    model.save_pretrained(path)
    return model


def passes(model: Any, tokens: Tensor, labels: Tensor) -> tuple[Tensor, float]:
    """Return the logits and the mean loss of a model of transformers, which then has the gradients."""
    model.zero_grad()
    logits = model(tokens).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    loss.backward()
    return logits.detach(), loss.item()


def joined(outcomes: list[tuple[Tensor, float, Pieces]]) -> Tensor:
    """Return the logits [b, s, V] of all ranks."""
    return torch.cat([logits for logits, *_ in outcomes], dim=-1)[..., :301].transpose(0, 1)


def plain(hf: Path, tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return logits, mean loss and gradients by the plain model in fp64, token by token."""
    directory = open_hf_directory(hf)
    config = ReferenceConfig.like(directory.model)
    weights = {spec.name: directory.tensors[spec.name].whole().double() for spec in model_tensors(directory.model)}
    count = labels.numel()
    with torch.no_grad():
        logits = reference_logits(weights, config, tokens)
    return logits, *reference_gradients(weights, config, tokens, labels, torch.ones(labels.shape), count, count)


@pytest.mark.parametrize(("name", "layout"), cases())
def test_logits_and_gradients_are_those_of_transformers(
    gloo_pools: GlooPools, tmp_path: Path, name: str, layout: Layout
) -> None:
    kind, changes = CASES[name]
    ranks = layout.ranks
    if changes.get("num_attention_heads") == 3 and ranks in (2, 4):
        changes = changes | FOUR_HEADS
    theirs = save_scaled(tmp_path / "hf", kind, **changes)
    # Longer than the original positions of YaRN.
    tokens, labels = torch.randint(0, 301, (2, 2, 48), generator=torch.Generator().manual_seed(3))
    expected, expected_loss = passes(theirs, tokens, labels)
    outcomes = gloo_pools(ranks).run(on_ranks, str(tmp_path / "hf"), layout, tokens, labels)
    found = joined(outcomes)
    tolerance = OF_HYBRIDS if name in test_hybrid_types.CASES else TOLERANCE
    assert (found - expected).abs().max() <= tolerance * expected.abs().max()
    for _, loss, _ in outcomes:
        assert loss == pytest.approx(expected_loss, rel=tolerance)
    model = open_hf_directory(tmp_path / "hf").model
    names = [spec.name for spec in model_tensors(model) if not spec.name.endswith("expert_bias")]
    assert_pieces([pieces for *_, pieces in outcomes], {name: gradient(theirs, name) for name in names}, tolerance)


HYBRIDS = [*itertools.product(test_hybrid_types.CASES, (0.05, 16.0))]
"""With slow and fast decays."""


@pytest.mark.parametrize(
    ("name", "decay", "ranks"), usual_share([(*case, ranks) for case in HYBRIDS for ranks in (1, 2, 4)], 5)
)
def test_hybrids_in_fp64_are_the_plain_model(
    gloo_pools: GlooPools, tmp_path: Path, name: str, decay: float, ranks: int
) -> None:
    kind, changes = CASES[name]
    save_scaled(tmp_path, kind, decay, **changes)
    tokens, labels = torch.randint(0, 301, (2, 2, 70), generator=torch.Generator().manual_seed(3))
    logits, expected_loss, expected = plain(tmp_path, tokens, labels)
    outcomes = gloo_pools(ranks).run(on_ranks, str(tmp_path), Layout(ranks), tokens, labels, torch.float64)
    assert (joined(outcomes) - logits).abs().max() <= EXACT * logits.abs().max()
    for _, loss, _ in outcomes:
        assert loss == pytest.approx(expected_loss.item(), rel=EXACT)
    assert_pieces([pieces for *_, pieces in outcomes], expected, EXACT)


@pytest.mark.parametrize(("name", "decay"), usual_share(HYBRIDS, 3))
def test_hybrids_round_no_more_than_a_recurrence(
    gloo_pools: GlooPools, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, decay: float
) -> None:
    """transformers' own chunks lose another digit with fast decays."""
    kind, changes = CASES[name]
    theirs = save_scaled(tmp_path, kind, decay, **changes)
    module = sys.modules[type(theirs).__module__]
    monkeypatch.setattr(module, "torch_chunk_gated_delta_rule", module.torch_recurrent_gated_delta_rule)
    tokens, labels = torch.randint(0, 301, (2, 2, 70), generator=torch.Generator().manual_seed(3))
    logits, _, exact = plain(tmp_path, tokens, labels)
    other_logits, _ = passes(theirs, tokens, labels)
    outcomes = gloo_pools(1).run(on_ranks, str(tmp_path), Layout(1), tokens, labels)
    gradients = {part: values for part, _, values in outcomes[0][2]}
    others = {part: gradient(theirs, part) for part in exact}
    for part, values in others.items():
        assert (gradients[part] - values).abs().max() <= OF_HYBRIDS * values.abs().max(), part

    def error(logits_found: Tensor, of_weights: dict[str, Tensor]) -> float:
        pairs = [(logits_found, logits), *((of_weights[part], exact[part]) for part in exact)]
        return sum(float((found - wanted).norm() / wanted.norm()) for found, wanted in pairs)

    assert error(joined(outcomes), gradients) <= 1.3 * error(other_logits, others)

"""Logits, loss and gradients of imported models in many layouts, compared with transformers' on one process."""

import itertools
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
from tests.helpers.pool import GlooPools
from tests.helpers.sharded import Pieces, assert_pieces, gradient_pieces, mesh_of, run_chain
from tests.unit.convert import test_gpt_oss, test_latent_types, test_routed_types, test_window_types
from tests.unit.convert.saved_models import save_model

GPT_OSS = {name: ("gpt_oss", test_gpt_oss.CASES[name]) for name in ("alternating windows", "tied")}
CASES = test_latent_types.CASES | test_routed_types.CASES | test_window_types.CASES | GPT_OSS
TOLERANCE = 1e-5
FOUR_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 64}
"""For models of three heads on two and four ranks."""


class Layout(NamedTuple):
    """Tensor-parallel ranks, whether they share out the stream, and the first layers of further pipeline stages."""

    ranks: int
    is_sharded: bool = False
    cuts: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"tp{self.ranks}{'-sp' if self.is_sharded else ''}{f'-pp{len(self.cuts) + 1}' if self.cuts else ''}"


def on_ranks(hf: str, layout: Layout, tokens: Tensor, labels: Tensor) -> tuple[Tensor, float, Pieces]:
    """Return this rank's columns of the logits [s, b, V/t], the mean loss, and this rank's gradients of it."""
    directory = open_hf_directory(Path(hf))
    model = directory.model
    mesh = replace(mesh_of(layout.ranks, head_replicas(model, layout.ranks)), sequence_parallel=layout.is_sharded)
    bounds = itertools.pairwise((0, *layout.cuts, model.num_layers))
    whole, *stages = [LanguageModel(model, mesh, chunks=[range(*bound)]) for bound in ((0, model.num_layers), *bounds)]
    for part in (whole, *stages):
        load_weights(part, directory)
    with torch.no_grad():
        logits = whole.logits_shard(whole.hidden_states(tokens, whole.training_context(tokens)))
    loss, _ = run_chain(stages, tokens, labels, targets=labels.numel())
    return logits, loss.item(), [piece for stage in stages for piece in gradient_pieces(stage)]


def gradient(module: Any, name: str) -> Tensor:
    """Return the gradient of a canonical weight in a model of transformers, which stacks gates on ups of experts.

    In gpt-oss, stacks are transposed, and gates and ups alternate.
    """
    is_gpt_oss = module.config.model_type == "gpt_oss"
    stack, _, part = hf_name(name).partition(".mlp.experts.")
    if not part:
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
        if kind in ("hy_v3", "dots1", "solar_open", "youtu", "gpt_oss", "mistral", "qwen2", "qwen3"):
            layouts.append(Layout(layouts[quick].ranks, is_sharded=True))
            # Stages would share a tied matrix.
            if not changes.get("tie_word_embeddings"):
                layouts += [Layout(1, cuts=(1, 3)), Layout(2, is_sharded=True, cuts=(1, 2))]
        for number, layout in enumerate(layouts):
            marks = () if number == quick else pytest.mark.slow
            found.append(pytest.param(name, layout, marks=marks, id=f"{name}, {layout}"))
    return found


@pytest.mark.parametrize(("name", "layout"), cases())
def test_logits_and_gradients_are_those_of_transformers(
    gloo_pools: GlooPools, tmp_path: Path, name: str, layout: Layout
) -> None:
    kind, changes = CASES[name]
    ranks = layout.ranks
    if changes.get("num_attention_heads") == 3 and ranks in (2, 4):
        changes = changes | FOUR_HEADS
    theirs = save_model(tmp_path / "hf", kind, **changes)
    with torch.no_grad():
        # Scores near zero would leave the gradients of queries to rounding; so would large biases.
        factors = {1: 0.5, 2: 1.5} if kind == "gpt_oss" else {2: 3.0}
        for part, weight in theirs.named_parameters():
            weight *= factors.get(weight.dim(), 1.0) if ".self_attn." in part else 1.0
    theirs.save_pretrained(tmp_path / "hf")
    # Longer than the original positions of YaRN.
    tokens, labels = torch.randint(0, 301, (2, 2, 48), generator=torch.Generator().manual_seed(3))
    expected = theirs(tokens).logits
    expected_loss = torch.nn.functional.cross_entropy(expected.flatten(0, 1), labels.flatten())
    expected_loss.backward()
    outcomes = gloo_pools(ranks).run(on_ranks, str(tmp_path / "hf"), layout, tokens, labels)
    found = torch.cat([logits for logits, *_ in outcomes], dim=-1)[..., :301].transpose(0, 1)
    assert (found - expected).abs().max() <= TOLERANCE * expected.abs().max()
    for _, loss, _ in outcomes:
        assert loss == pytest.approx(expected_loss.item(), rel=TOLERANCE)
    model = open_hf_directory(tmp_path / "hf").model
    names = [spec.name for spec in model_tensors(model) if not spec.name.endswith("expert_bias")]
    assert_pieces([pieces for *_, pieces in outcomes], {name: gradient(theirs, name) for name in names}, TOLERANCE)

"""Converted checkpoints on several ranks: logits match transformers, and training continues bitwise."""

import itertools
from collections import Counter
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from megatron_ladder.blueprint.boxes import Box
from megatron_ladder.checkpoint.format import Checkpoint
from megatron_ladder.checkpoint.hf_directory import HFDirectory, hf_name, open_hf_directory
from megatron_ladder.checkpoint.loading import load_weights
from megatron_ladder.model.language_model import LanguageModel
from megatron_ladder.model.operations import ExpertOptions
from megatron_ladder.parallel.layout import parameter_sections, state_sections
from tests.helpers.pool import GlooPools
from tests.helpers.sharded import mesh_of
from tests.helpers.steps import everything, pass_on
from tests.unit.convert.hf_models import split_experts
from tests.unit.convert.saved_models import assert_equal_bits, convert, save_model, tensors_of


def logits_here(directory: str, tokens: Tensor) -> Tensor:
    """On each rank: map tokens [b, s] to logits [b, s, V] with the checkpoint's model, sharded over all ranks."""
    checkpoint = Checkpoint.open(Path(directory))
    mesh = mesh_of(torch.distributed.get_world_size())
    model = LanguageModel(checkpoint.model(), mesh)
    load_weights(model, checkpoint)
    with torch.no_grad():
        hidden_states = model.hidden_states(tokens, model.training_context(tokens))
        logits = mesh.tensor.all_gather(model.logits_shard(hidden_states), dim=-1)
    return logits[..., : model.config.vocab_size].transpose(0, 1)


def test_one_process_of_transformers_computes_all_lanes(gloo_pools: GlooPools, tmp_path: Path) -> None:
    save_model(tmp_path / "hf")
    lanes = ("--lanes", 2, "--residual-staleness", 2, "--ladder-layers", "1-3")
    convert("import", "--hf", tmp_path / "hf", "--save", tmp_path / "ours", *lanes)
    convert("export", "--load", tmp_path / "ours", "--hf", tmp_path / "exported")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "exported", trust_remote_code=True)
    tokens = torch.randint(0, 301, (2, 40))
    with torch.no_grad():
        expected = theirs(tokens).logits
    for found in gloo_pools(2).run(logits_here, str(tmp_path / "ours"), tokens):
        assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


def slices_here(hf: str, load: str, sharding: Literal["width", "experts"]) -> list[tuple[str, Box, Tensor]]:
    """On each rank: read its slices from both directories; return them."""
    found = list[tuple[str, Box, Tensor]]()
    for source in (open_hf_directory(Path(hf)), Checkpoint.open(Path(load))):
        config = source.model if isinstance(source, HFDirectory) else source.model()
        model = LanguageModel(config, mesh_of(2), experts=ExpertOptions(sharding=sharding), dtype=torch.bfloat16)
        load_weights(model, source)
        for tensor, sections in (*parameter_sections(model), *state_sections(model)):
            found += [(one.name, one.box, one.view(tensor).detach().clone()) for one in sections]
    return found


@pytest.mark.parametrize("sharding", ["width", "experts"])
def test_every_rank_reads_its_slices_of_the_experts(gloo_pools: GlooPools, tmp_path: Path, sharding: str) -> None:
    save_model(tmp_path / "hf", "glm4_moe", torch.bfloat16)
    convert("import", "--hf", tmp_path / "hf", "--save", tmp_path / "ours")
    stored, whole = tensors_of(tmp_path / "hf"), dict[str, Tensor]()
    read = gloo_pools(2).run(slices_here, str(tmp_path / "hf"), str(tmp_path / "ours"), sharding)
    elements = Counter[str]()
    for name, box, values in itertools.chain(*read):
        stack = [hf_name(name, expert) for expert in range(6)] if ".experts." in name else []
        whole[name] = torch.stack([stored[one] for one in stack]) if stack else stored[hf_name(name)]
        assert values.dtype == whole[name].dtype and values.equal(whole[name][box.slices()]), name
        elements[name] += box.numel
    assert split_experts(whole).keys() == stored.keys()
    # Each of both sources is read once, by all ranks together.
    assert all(
        elements[name] == 2 * weight.numel() for name, weight in whole.items() if "expert" in name and "proj" in name
    )


EXPERTS = "--num-experts 4 --moe-ffn-hidden-size 24 --moe-layers 1,2 --moe-router-enable-expert-bias"


@pytest.mark.parametrize(
    ("written", "continued"),
    [
        ("--zero-stage 1 --tensor-model-parallel-size 2", "--zero-stage 2"),
        ("--zero-stage 3", "--zero-stage 0"),
        (f"--zero-stage 1 --tensor-model-parallel-size 2 {EXPERTS} --expert-sharding experts", EXPERTS),
    ],
)
def test_training_continues_from_a_reshaped_checkpoint(
    gloo_pools: GlooPools, tmp_path: Path, written: str, continued: str
) -> None:
    """Two steps from the reshaped checkpoint are bitwise equal to two steps from the original."""
    argv = "--global-batch-size 4 --lr 1e-3 --train-iters 8 --residual-mode ladder --ladder-layers 1,2".split()
    run, other = str(tmp_path / "run"), str(tmp_path / "other")
    gloo_pools(2).run(pass_on, [*argv, *written.split()], None, run, 2)
    convert("reshape", "--load", run, "--save", other, "--verify")
    ends = {}
    for source in (run, other):
        end = f"{source}-end"
        gloo_pools(2).run(pass_on, [*argv, *continued.split()], source, end, 2)
        ends[source] = everything(Path(end))
    assert ends[run].keys() == ends[other].keys()
    for key, tensor in ends[run].items():
        assert torch.equal(tensor, ends[other][key]), key
    convert("export", "--load", other, "--hf", tmp_path / "hf")
    weights = everything(Path(other))
    names = {name for name, kind in weights if kind == "weight"}
    exported = tensors_of(tmp_path / "hf")
    assert_equal_bits(exported, split_experts({name: weights[name, "weight"] for name in names}))

"""Converted checkpoints on several ranks."""

import itertools
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import Tensor

from megatron_ladder.blueprint.boxes import Box
from megatron_ladder.blueprint.model import head_replicas
from megatron_ladder.blueprint.tensors import model_tensors
from megatron_ladder.checkpoint.format import Checkpoint
from megatron_ladder.checkpoint.hf_directory import HFDirectory, hf_name, open_hf_directory
from megatron_ladder.checkpoint.loading import load_weights
from megatron_ladder.model.language_model import LanguageModel
from megatron_ladder.model.operations import ExpertOptions
from megatron_ladder.parallel.layout import parameter_sections, state_sections
from tests.helpers.pool import GlooPools
from tests.helpers.sharded import mesh_of
from tests.unit.convert.hf_models import split_experts
from tests.unit.convert.saved_models import convert, save_model, tensors_of
from tests.unit.convert.test_fp8 import save_fp8


def slices_here(hf: str, load: str, sharding: Literal["width", "experts"]) -> list[tuple[str, Box, Tensor]]:
    """On each rank: read its slices from both directories; return them."""
    found = list[tuple[str, Box, Tensor]]()
    for source in (open_hf_directory(Path(hf)), Checkpoint.open(Path(load))):
        config = source.model if isinstance(source, HFDirectory) else source.model()
        mesh = mesh_of(2, head_replicas(config, 2))
        model = LanguageModel(config, mesh, experts=ExpertOptions(sharding=sharding), dtype=torch.bfloat16)
        load_weights(model, source)
        for tensor, sections in (*parameter_sections(model), *state_sections(model)):
            found += [(one.name, one.box, one.view(tensor).detach().clone()) for one in sections]
    return found


def weight_of(name: str, stored: Mapping[str, Tensor]) -> Tensor:
    """Return a canonical weight from tensors by their names in a directory."""
    if ".experts." not in name:
        return stored[hf_name(name)]
    experts = itertools.takewhile(stored.__contains__, (hf_name(name, expert) for expert in itertools.count()))
    return torch.stack([stored[one] for one in experts])


@pytest.mark.parametrize("sharding", ["width", "experts"])
def test_every_rank_reads_its_slices_of_the_experts(gloo_pools: GlooPools, tmp_path: Path, sharding: str) -> None:
    save_model(tmp_path / "hf", "glm4_moe", torch.bfloat16)
    convert("import", "--hf", tmp_path / "hf", "--save", tmp_path / "ours")
    stored, whole = tensors_of(tmp_path / "hf"), dict[str, Tensor]()
    read = gloo_pools(2).run(slices_here, str(tmp_path / "hf"), str(tmp_path / "ours"), sharding)
    elements = Counter[str]()
    for name, box, values in itertools.chain(*read):
        whole[name] = weight_of(name, stored)
        assert values.dtype == whole[name].dtype and values.equal(whole[name][box.slices()]), name
        elements[name] += box.numel
    assert split_experts(whole).keys() == stored.keys()
    # Each of both sources is read once, by all ranks together.
    assert all(
        elements[name] == 2 * weight.numel() for name, weight in whole.items() if "expert" in name and "proj" in name
    )


@pytest.mark.parametrize("sharding", ["width", "experts"])
@pytest.mark.parametrize("name", ["deepseek_v3, incomplete blocks", "qwen3_moe", "qwen3"])
def test_every_rank_dequantises_its_slices(gloo_pools: GlooPools, tmp_path: Path, name: str, sharding: str) -> None:
    _, weights = save_fp8(tmp_path / "hf", name)
    convert("import", "--hf", tmp_path / "hf", "--save", tmp_path / "ours")
    read = gloo_pools(2).run(slices_here, str(tmp_path / "hf"), str(tmp_path / "ours"), sharding)
    names, partial = set[str](), 0
    for canonical, box, values in itertools.chain(*read):
        whole = weight_of(canonical, weights)
        assert values.equal(whole.to(values.dtype)[box.slices()]), canonical
        partial += any(begin % 128 for begin in box.offset[-2:])
        names.add(canonical)
    assert names == {spec.name for spec in model_tensors(open_hf_directory(tmp_path / "hf").model)}
    # Slices that begin inside a block.
    assert partial

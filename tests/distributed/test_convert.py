"""Converted checkpoints on several ranks."""

import itertools
from collections import Counter
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import Tensor

from megatron_ladder.blueprint.boxes import Box
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

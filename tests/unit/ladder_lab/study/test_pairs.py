"""Trials with the same seed start from the same weights, whatever the wiring."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from ladder_lab.study.commands import resolve_trial
from ladder_lab.study.options import Request, RunOptions
from ladder_lab.study.schema import Trial
from ladder_lab.wirings import NAMED_WIRINGS
from megatron_ladder.comm.mesh import ProcessMesh
from megatron_ladder.model.language_model import LanguageModel
from megatron_ladder.parallel.layout import parameter_sections

SIZE = "2x24x40x2x1x50"


def matrices(wiring: str, seed: int = 3) -> dict[str, Tensor]:
    """Map canonical names to initial weights, except norms, whose number depends on the wiring."""
    request = Request(RunOptions(Path("out"), sizes=(SIZE,)), ())
    run = resolve_trial(request, Trial("tokens", wiring, SIZE, seed, 1e-3, 10), [])
    model = LanguageModel(run.model, ProcessMesh.single(), seed=run.training.seed)
    return {
        section.name: section.view(parameter).detach()
        for parameter, sections in parameter_sections(model)
        for section in sections
        if parameter.dim() == 2
    }


@pytest.mark.parametrize("wiring", [name for name, wiring in NAMED_WIRINGS.items() if wiring.shares_stream])
def test_every_wiring_starts_from_the_weights_of_standard(wiring: str) -> None:
    standard, other = matrices("standard"), matrices(wiring)
    # Embedding, head, and in each layer q, k, v and o, gate, up and down.
    assert set(other) == set(standard) and len(standard) == 2 + 2 * 7
    assert all(torch.equal(other[name], weight) for name, weight in standard.items())
    assert not torch.equal(
        matrices(wiring, seed=4)["layers.0.attention.q_proj.weight"], standard["layers.0.attention.q_proj.weight"]
    )

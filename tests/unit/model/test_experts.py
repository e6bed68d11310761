"""Experts under recomputation."""

import pytest
import torch

from megatron_ladder.comm.mesh import ProcessMesh
from megatron_ladder.model import experts
from megatron_ladder.model.language_model import LanguageModel
from megatron_ladder.model.stack import StackOptions
from tests.helpers.sharded import small_model


@pytest.mark.parametrize("mirrored", [False, True])
def test_recomputation_does_not_route_again(monkeypatch: pytest.MonkeyPatch, mirrored: bool) -> None:
    config = small_model(num_layers=2, num_experts=4, moe_router_topk=2, moe_ffn_hidden_size=8, moe_layers=(0, 1))
    options = StackOptions(recompute_layers=2, mirrored_backward=mirrored)
    model = LanguageModel(config, ProcessMesh.single(), options, seed=1)
    routed, choose = [], experts._choose
    monkeypatch.setattr(experts, "_choose", lambda *given: routed.append(given) or choose(*given))
    ids = torch.randint(0, 100, (2, 13))
    model(ids[:, :-1], ids[:, 1:]).backward()
    assert len(routed) == 2

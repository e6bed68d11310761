"""Experts under recomputation, and their state."""

import pytest
import torch

from megatron_ladder.comm.mesh import ProcessMesh
from megatron_ladder.model import experts
from megatron_ladder.model.language_model import LanguageModel
from megatron_ladder.model.stack import StackOptions
from megatron_ladder.parallel.layout import ParallelModule, initialize
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


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_biases_of_routers_belong_to_the_state_of_a_model(device: str) -> None:
    config = small_model(num_experts=4, moe_ffn_hidden_size=8, moe_layers=(1, 3), moe_router_enable_expert_bias=True)
    trained = LanguageModel(config, ProcessMesh.single(), seed=1)
    for router in trained.routers:
        assert router.expert_bias is not None
        router.expert_bias.normal_()
    fresh = LanguageModel(config, ProcessMesh.single(), device=torch.device(device))
    for module in fresh.modules():
        if device == "meta" and isinstance(module, ParallelModule):
            module.allocate(torch.device("cpu"))
    initialize(fresh, seed=2)
    assert fresh.load_state_dict(trained.state_dict()).missing_keys == []
    ids = torch.randint(0, 100, (2, 13))
    assert torch.equal(fresh(ids[:, :-1], ids[:, 1:]), trained(ids[:, :-1], ids[:, 1:]))
    incomplete = {name: value for name, value in trained.state_dict().items() if not name.endswith("expert_bias")}
    with pytest.raises(RuntimeError, match="Missing key.*expert_bias"):
        fresh.load_state_dict(incomplete)

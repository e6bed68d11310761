"""Experts compared with transformers', under recomputation, and their state."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DeepseekV2Config, DeepseekV3Config, Glm4MoeConfig, GptOssConfig
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Moe
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeMoE
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter

from megatron_ladder.blueprint.model import ModelConfig
from megatron_ladder.checkpoint.hf_config import hf_config
from megatron_ladder.comm.mesh import ProcessMesh
from megatron_ladder.convert.hf_module.configuration_megatron_ladder import MegatronLadderConfig
from megatron_ladder.convert.hf_module.modeling_megatron_ladder import MegatronLadderRouter
from megatron_ladder.model import experts
from megatron_ladder.model.language_model import LanguageModel
from megatron_ladder.model.stack import StackOptions
from megatron_ladder.model.sub_block import BodyOutput, SequenceContext
from megatron_ladder.parallel.layout import ParallelModule, initialize
from tests.helpers.hugging_face import module_tensors
from tests.helpers.sharded import fill_slices, small_model
from tests.reference import ReferenceConfig, make_weights
from tests.reference.experts import routed_experts

SIGMOID = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
GROUPS = {"moe_router_num_groups": 4, "moe_router_group_topk": 2}
ROUTERS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "deepseek_v2, greedy": (DeepseekV2Config, DeepseekV2Moe, {"moe_router_unnormalized": True}),
    "deepseek_v2": (DeepseekV2Config, DeepseekV2Moe, {"moe_router_unnormalized": True, **GROUPS}),
    "deepseek_v3": (DeepseekV3Config, DeepseekV3MoE, SIGMOID | GROUPS),
    "deepseek_v3, unnormalized": (DeepseekV3Config, DeepseekV3MoE, SIGMOID | {"moe_router_unnormalized": True}),
    "glm4_moe": (Glm4MoeConfig, Glm4MoeMoE, SIGMOID | GROUPS),
}


def model_and_weights(changes: dict[str, Any]) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Return a model of one layer of experts, and its random weights."""
    config = small_model(
        num_layers=1,
        num_experts=16,
        moe_router_topk=4,
        moe_layers=(0,),
        moe_ffn_hidden_size=8,
        moe_shared_expert_intermediate_size=16,
        moe_router_topk_scaling_factor=2.5,
        **changes,
    )
    return config, make_weights(ReferenceConfig.like(config), seed=1)


def of_transformers(name: str, config: ModelConfig, weights: dict[str, Tensor]) -> Any:
    """Return transformers' router, experts and shared experts of one layer."""
    config_class, module_class, _ = ROUTERS[name]
    theirs = config_class(
        hidden_size=config.hidden_size,
        moe_intermediate_size=config.moe_ffn_hidden_size,
        n_routed_experts=config.num_experts,
        num_experts_per_tok=config.moe_router_topk,
        n_shared_experts=2,
        n_group=config.moe_router_num_groups,
        topk_group=config.moe_router_group_topk,
        topk_method="group_limited_greedy" if config.moe_router_num_groups > 1 else "greedy",
        norm_topk_prob=not config.moe_router_unnormalized,
        routed_scaling_factor=config.moe_router_topk_scaling_factor,
    )
    module, prefix = module_class(theirs), "model.layers.0.mlp."
    tensors = module_tensors(weights).items()
    module.load_state_dict({name.removeprefix(prefix): one for name, one in tensors if name.startswith(prefix)})
    return module


def run_body(config: ModelConfig, weights: dict[str, Tensor], x: Tensor) -> BodyOutput:
    model = LanguageModel(config, ProcessMesh.single(), dtype=x.dtype)
    fill_slices(model, weights)
    (body,) = (module for module in model.modules() if isinstance(module, experts.Experts))
    output = body(x, SequenceContext(torch.zeros(1, 1)))
    assert isinstance(output, BodyOutput)
    return output


def assert_close(found: Tensor, expected: Tensor) -> None:
    assert (found - expected).abs().max() <= 2e-6 * expected.abs().max()


@pytest.mark.parametrize("name", ROUTERS)
def test_experts_are_those_of_transformers(name: str) -> None:
    """In training, in an exported directory, and in the reference."""
    config, weights = model_and_weights(ROUTERS[name][2])
    module = of_transformers(name, config, weights)
    x = torch.randn(150, 2, config.hidden_size, generator=torch.Generator().manual_seed(2))
    expected = module(x)
    _, of_chosen, chosen = module.gate(x.flatten(0, 1))

    output = run_body(config, weights, x)
    assert output.kept[0].flatten(0, 1).sort(-1).values.equal(chosen.sort(-1).values)
    assert_close(output.partial, expected)
    routed = routed_experts(weights, "layers.0", ReferenceConfig.like(config), x, None)
    assert_close(routed, expected - module.shared_experts(x))
    exported = MegatronLadderConfig(**hf_config(config, dtype="float32", model_type="megatron_ladder"))
    router = MegatronLadderRouter(exported)
    router.load_state_dict(module.gate.state_dict())
    found, our_weights = router(x.flatten(0, 1))
    dense = torch.zeros(len(chosen), config.num_experts)
    assert_close(dense.scatter(1, found, our_weights), dense.scatter(1, chosen, of_chosen))


@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_normalised_scores_are_the_softmax_over_the_chosen_experts(scale: float) -> None:
    """Those of gpt-oss's router, with their gradients, in training and in an exported directory."""
    config = small_model(num_experts=16, moe_router_topk=4, moe_ffn_hidden_size=8, moe_layers=(0,), add_moe_bias=True)
    theirs = GptOssTopKRouter(GptOssConfig(hidden_size=32, num_local_experts=16, num_experts_per_tok=4))
    generator = torch.Generator().manual_seed(1)
    for parameter in theirs.parameters():
        parameter.data.normal_(generator=generator)
    model = LanguageModel(config, ProcessMesh.single(), seed=1)
    (routed,) = (module for module in model.modules() if isinstance(module, experts._RoutedExperts))
    exported = MegatronLadderRouter(
        MegatronLadderConfig(**hf_config(config, dtype="float32", model_type="megatron_ladder"))
    )
    for router in (routed.router, exported):
        router.load_state_dict(theirs.state_dict())
    x, gradient = (torch.randn(150, width, generator=generator) for width in (32, 16))

    def dense(chosen: Tensor, weights: Tensor) -> Tensor:
        return torch.zeros(150, 16).scatter(-1, chosen, weights)

    _, weights, chosen = theirs(scale * x)
    scores = routed.router(scale * x).softmax(-1)
    our_choice = experts._choose(config, scores.detach(), None)
    found = {
        routed.router: dense(our_choice, routed._weights(scores, our_choice)),
        exported: dense(*exported(scale * x)),
        theirs: dense(chosen, weights),
    }
    for of_experts in found.values():
        of_experts.backward(gradient)
        assert_close(of_experts, found[theirs])
    for router in (routed.router, exported):
        for parameter, expected in zip(router.parameters(), theirs.parameters(), strict=True):
            assert parameter.grad is not None and expected.grad is not None
            assert (parameter.grad - expected.grad).abs().max() <= 1e-5 * expected.grad.abs().max()


def test_scores_can_all_be_zero() -> None:
    config, weights = model_and_weights(SIGMOID | GROUPS)
    weights["layers.0.router.weight"][:, 0] = -1
    x = torch.zeros(1, 1, config.hidden_size)
    x[..., 0] = 500
    assert_close(run_body(config, weights, x).partial, of_transformers("deepseek_v3", config, weights)(x))


@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe"])
def test_the_bias_of_the_choice_is_not_rounded_to_bfloat16(name: str) -> None:
    config, weights = model_and_weights(ROUTERS[name][2])
    # Biases that are equal in bfloat16 decide between scores that hardly differ.
    weights["layers.0.router.weight"] *= 1e-2
    bias = 3 + 4e-3 * torch.randn(config.num_experts, generator=torch.Generator().manual_seed(3))
    weights["layers.0.router.expert_bias"] = bias
    assert len(bias.bfloat16().unique()) == 1
    module = of_transformers(name, config, weights).bfloat16()
    module.gate.e_score_correction_bias = bias
    x = torch.randn(150, 2, config.hidden_size, generator=torch.Generator().manual_seed(2)).bfloat16()
    _, _, chosen = module.gate(x.flatten(0, 1))
    output = run_body(config, weights, x)
    assert output.kept[0].flatten(0, 1).sort(-1).values.equal(chosen.sort(-1).values)


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

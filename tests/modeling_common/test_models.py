"""transformers' own tests of every model, on the exported code. `tests/modeling_common.sh` downloads them first."""

import unittest
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.models.auto import modeling_auto as auto

from megatron_ladder.blueprint.wiring import WIRINGS as TABLE
from megatron_ladder.convert.hf_module import modeling_megatron_ladder as modeling
from megatron_ladder.convert.hf_module.configuration_megatron_ladder import MegatronLadderConfig

pytest.importorskip("transformers_tests")

from transformers_tests.generation.test_utils import GenerationTesterMixin
from transformers_tests.test_modeling_common import ModelTesterMixin, ids_tensor

# The tests choose labels by these tables, into which no auto_map is read.
auto.MODEL_MAPPING_NAMES["megatron_ladder"] = "MegatronLadderModel"
auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES["megatron_ladder"] = "MegatronLadderForCausalLM"
auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES["megatron_ladder"] = "MegatronLadderForSequenceClassification"
SIZES = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {
    "num_experts": 4,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "expert_layers": [0],
    "use_expert_bias": True,
}
WIRINGS: dict[str, dict[str, Any]] = {
    mode: {
        "residual_mode": mode,
        "ladder_layers": 2 if row.late else None,
        **(EXPERTS if row.needs_experts else {}),
        **({"desync_interval": 2, "desync_tp": 2} if row.stream == "per rank" else {}),
    }
    for mode, row in TABLE.items()
    # These tests expect as many hidden states as attentions.
    if mode != "longcat"
}
WIRINGS["hybrid"] = {"ladder_layers": [0], "final_logit_softcapping": 5.0, "qk_norm": True, "attention_bias": True}
WIRINGS["staleness 2"] = {"ladder_layers": 2, "residual_staleness": 2}
WIRINGS["gated"] = {"ladder_layers": [0], "gated_attention": True, "qk_norm": True, "zero_centered_gamma": True}
WIRINGS["latent"] = WIRINGS["farskip"] | {
    **{"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6},
    **{"num_key_value_heads": 4, "gated_attention": True},
}
WIRINGS["lanes"] = {"ladder_layers": 2, "lanes": 2}
WIRINGS["delta"] = WIRINGS["gated"] | {
    **{"layer_types": ["linear_attention", "full_attention"], "rope_parameters": {"partial_rotary_factor": 0.5}},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 6, "linear_value_head_dim": 8},
}

AutoConfig.register("megatron_ladder", MegatronLadderConfig)
AutoModel.register(MegatronLadderConfig, modeling.MegatronLadderModel)
AutoModelForCausalLM.register(MegatronLadderConfig, modeling.MegatronLadderForCausalLM)
AutoModelForSequenceClassification.register(MegatronLadderConfig, modeling.MegatronLadderForSequenceClassification)


class Tester:
    """The sizes and inputs of the tests."""

    is_training = True
    batch_size, seq_length = 3, 7
    hidden_size, num_hidden_layers, num_attention_heads = 32, 2, 4

    def __init__(self, wiring: dict[str, Any]) -> None:
        self._wiring = wiring

    def get_config(self) -> MegatronLadderConfig:
        return MegatronLadderConfig(**(SIZES | self._wiring))

    def prepare_config_and_inputs_for_common(self) -> tuple[MegatronLadderConfig, dict[str, torch.Tensor]]:
        ids = ids_tensor([self.batch_size, self.seq_length], SIZES["vocab_size"]).clamp(min=3)
        return self.get_config(), {"input_ids": ids, "attention_mask": torch.ones_like(ids).tril()}


def of_wiring(wiring: dict[str, Any]) -> type[unittest.TestCase]:
    class Tests(ModelTesterMixin, GenerationTesterMixin, unittest.TestCase):  # type: ignore[misc]
        # These tests expect as many attentions as layers.
        has_attentions = "layer_types" not in wiring
        all_model_classes = (
            modeling.MegatronLadderModel,
            modeling.MegatronLadderForCausalLM,
            modeling.MegatronLadderForSequenceClassification,
        )

        def setUp(self) -> None:
            self.model_tester = Tester(wiring)

    return Tests


for name, wiring in WIRINGS.items():
    globals()[f"Test {name}"] = of_wiring(wiring)

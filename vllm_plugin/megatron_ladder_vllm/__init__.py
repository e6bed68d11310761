"""Serves models of type `megatron_ladder` in vLLM.

vLLM calls `register` in each of its processes, through the entry point of this distribution.
"""

import logging

SUPPORTED_VLLM = "0.32"
"""The minor version of vLLM with which the plugin was tried: 0.32.0. README.md lists the parts of vLLM that it uses."""

_ARCHITECTURE = "MegatronLadderForCausalLM"
_log = logging.getLogger("vllm.plugins.megatron_ladder")


def register() -> None:
    """Register the configuration with transformers and the models with vLLM; repeated calls have no effect.

    With another version of vLLM nothing is registered, so vLLM serves other models as usual and rejects a
    `megatron_ladder` directory.
    """
    import vllm

    if not vllm.__version__.startswith(f"{SUPPORTED_VLLM}."):
        _log.error(
            "megatron-ladder-vllm supports vLLM %s, but this is vLLM %s: models of type megatron_ladder are not "
            "available; run: pip install 'vllm==%s.*'",
            SUPPORTED_VLLM,
            vllm.__version__,
            SUPPORTED_VLLM,
        )
        return
    from transformers import AutoConfig
    from vllm import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP
    from vllm.transformers_utils.model_arch_config_convertor import MODEL_ARCH_CONFIG_CONVERTORS

    from megatron_ladder_vllm.configuration_megatron_ladder import MegatronLadderConfig
    from megatron_ladder_vllm.deployment import (
        DRAFTING_HEAD,
        DRAFTING_HEAD_TYPE,
        HYBRID,
        DeploymentRules,
        ModelSizes,
        enable_drafting_heads,
    )

    # transformers prefers a registered class to the code in the model's directory, so that code is never run.
    AutoConfig.register(MegatronLadderConfig.model_type, MegatronLadderConfig, exist_ok=True)
    for architecture in (_ARCHITECTURE, HYBRID):
        # By name: importing the module would initialise CUDA before vLLM forks.
        ModelRegistry.register_model(architecture, f"megatron_ladder_vllm.model:{architecture}")
        MODELS_CONFIG_MAP[architecture] = DeploymentRules
    ModelRegistry.register_model(DRAFTING_HEAD, f"megatron_ladder_vllm.drafting:{DRAFTING_HEAD}")
    for model_type in (MegatronLadderConfig.model_type, DRAFTING_HEAD_TYPE):
        MODEL_ARCH_CONFIG_CONVERTORS[model_type] = ModelSizes
    enable_drafting_heads()

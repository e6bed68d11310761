"""How vLLM may run a model whose all-reduces run on a side stream: the ranks, the features, and the CUDA graphs.

Nothing may end a step between the launch of an all-reduce and its wait, and no other collective of the same ranks may
run at that time. A piecewise graph ends at each attention, and CUDA rejects a capture that leaves a stream unjoined. So
vLLM captures whole steps or none.
"""

from collections.abc import Iterator
from typing import Any

import torch
from transformers import PreTrainedConfig
from vllm import envs
from vllm.config import CUDAGraphMode, SpeculativeConfig, VllmConfig
from vllm.config.vllm import OptimizationLevel
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.model_executor.models.config import VerifyAndUpdateConfig
from vllm.platforms import current_platform
from vllm.transformers_utils.model_arch_config_convertor import ModelArchConfigConvertorBase
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from megatron_ladder_vllm.configuration_megatron_ladder import MegatronLadderConfig

_WITHOUT_DRAFT_MODEL = ("ngram", "ngram_gpu", "suffix", "mtp")
"""Methods of speculative decoding without a model, or with one whose all-reduces run as the model's."""
_GPT_OSS_ACTIVATION = (True, 7.0, 1.0)
_READ_INNER_STATES = ("eagle3", "dflash", "dspark", "extract_hidden_states")
"""Methods of speculative decoding that read the residual stream between layers, where outputs are missing."""
GATED_DELTA_DTYPES_ON_CPU = (torch.bfloat16,)
"""Types for which vLLM has kernels of gated DeltaNet on a CPU."""
HYBRID = "MegatronLadderHybridForCausalLM"
"""The class of models with gated DeltaNet; vLLM asks a class, not a model, whether it has states."""
DRAFTING_HEAD = "MegatronLadderMTPModel"
"""The class of drafting heads."""
DRAFTING_HEAD_TYPE = "mtp"
"""The `model_type` of a drafting head's configuration. vLLM infers the method mtp from it, and no model has it."""
_override_config = SpeculativeConfig.hf_config_override
_complete = SpeculativeConfig.__post_init__
"""vLLM's own functions, which `enable_drafting_heads` replaces."""


def enable_drafting_heads() -> None:
    """Let vLLM's method mtp find the drafting heads of our models, although vLLM's list of types lacks them."""
    SpeculativeConfig.hf_config_override = staticmethod(_configure_drafting_head)
    SpeculativeConfig.__post_init__ = _complete_with_head


def _configure_drafting_head(config: PreTrainedConfig) -> PreTrainedConfig:
    """Turn the configuration of a model into that of its drafting head; leave other models to vLLM.

    A head has one standard layer: with experts if any layer of the model has them, and with a window if all have it.
    """
    if config.model_type != MegatronLadderConfig.model_type or not _has_drafting_head(config):
        return _override_config(config)
    kinds = {*(getattr(config, "layer_types", None) or ())}
    wiring = {"residual_mode": "standard", "residual_staleness": 1, "ladder_layers": [], "lanes": 0}
    config.update(
        {
            "model_type": DRAFTING_HEAD_TYPE,
            "architectures": [DRAFTING_HEAD],
            "n_predict": 1,
            "num_hidden_layers": 1,
            "layer_types": ["sliding_attention" if kinds == {"sliding_attention"} else "full_attention"],
            "expert_layers": [0] if config.expert_layers else [],
            **wiring,
        }
    )
    return config


def _complete_with_head(speculative: SpeculativeConfig) -> None:
    """Complete the configuration as vLLM does.

    Raises:
        ValueError: the model has no drafting head; vLLM itself would only report an unknown method.
    """
    target = speculative.target_model_config
    is_ours = target is not None and target.hf_config.model_type == MegatronLadderConfig.model_type
    needs_head = (speculative.method or "").endswith("mtp") and speculative.model is None
    if is_ours and needs_head and not _has_drafting_head(target.hf_config):
        raise ValueError(
            "--speculative-config method mtp: the model has no drafting head (mtp_num_hidden_layers in config.json); "
            "export it without --drop-mtp, or use ngram, suffix, eagle or draft_model"
        )
    _complete(speculative)


def _has_drafting_head(config: PreTrainedConfig) -> bool:
    return bool(getattr(config, "mtp_num_hidden_layers", 0))


class ModelSizes(ModelArchConfigConvertorBase):
    """The class and sizes of a model for vLLM, whose own rules know latent attention by a list of types."""

    def get_architectures(self) -> list[str]:
        """Return the name of the model's class, which vLLM also reads from the configuration when it loads weights."""
        if self.hf_config.has_linear_attention:
            self.hf_config.architectures = [HYBRID]
        return super().get_architectures()

    def is_deepseek_mla(self) -> bool:
        """Return whether the cache holds latents. vLLM's kernels for CPUs take only those of DeepSeek."""
        return bool(self.hf_config.kv_lora_rank) and not current_platform.is_cpu()

    def get_head_size(self) -> int:
        """Return the width of cached keys and values, padded to one that all backends support."""
        config = self.hf_config
        if not config.kv_lora_rank or (self.is_deepseek_mla() and not envs.VLLM_MLA_DISABLE):
            return super().get_head_size()
        return -(-max(config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim) // 32) * 32


class DeploymentRules(VerifyAndUpdateConfig):
    """Rejects what the model cannot run with, and selects CUDA graphs, before vLLM applies its defaults."""

    @staticmethod
    def verify_and_update_config(vllm_config: VllmConfig) -> None:
        """Set the mode of CUDA graphs, unless the user did, and compile a step as one graph.

        Raises:
            ValueError: the ranks or features that the model cannot run with, one line each.
        """
        rules = (_conflicts_of_ranks, _conflicts_of_features, _conflicts_of_drafts)
        conflicts = [conflict for conflicts_of in rules for conflict in conflicts_of(vllm_config)]
        if conflicts:
            raise ValueError("\n".join(conflicts))
        config, cache = vllm_config.model_config.hf_config, vllm_config.cache_config
        if config.has_linear_attention and cache.mamba_ssm_cache_dtype == "auto":
            cache.mamba_ssm_cache_dtype = config.mamba_ssm_dtype
        compilation = vllm_config.compilation_config
        # If attention divided the graph, vLLM would fall back to piecewise graphs.
        compilation.splitting_ops = []
        if current_platform.is_cpu():
            # With torch 2.13 on CPUs, a fused reader may lose its dependency on the operation that writes its input
            # (github.com/pytorch/pytorch/pull/185873); this pass would then choose experts before the router's product.
            compilation.inductor_compile_config.setdefault("reorder_for_peak_memory", False)
        if compilation.cudagraph_mode is None and vllm_config.optimization_level != OptimizationLevel.O0:
            captures_prompts = _attends_with_flash_attention_3(vllm_config)
            compilation.cudagraph_mode = CUDAGraphMode.FULL if captures_prompts else CUDAGraphMode.FULL_DECODE_ONLY
        if vllm_config.speculative_config is not None:
            # Otherwise, vLLM would run drafts as parts of a piecewise graph, although there is none.
            vllm_config.speculative_config.enforce_eager = True


def check_attention(vllm_config: VllmConfig, attention: Any) -> None:
    """Check that the backend of a layer of vLLM's attention, which it has just selected, can be captured.

    Raises:
        ValueError: it cannot, but the mode of CUDA graphs requires it.
    """
    backend = attention.attn_backend
    cache = attention.get_kv_cache_spec(vllm_config)
    support = backend.get_builder_cls().get_cudagraph_support(vllm_config, cache)
    if support == AttentionCGSupport.NEVER and vllm_config.compilation_config.cudagraph_mode.has_full_cudagraphs():
        raise ValueError(
            f"attention backend {backend.get_name()}: it has no full CUDA graphs, and piecewise ones cannot contain "
            "all-reduces that run during attention; choose another --attention-backend, or pass --compilation-config "
            '\'{"cudagraph_mode": "NONE"}\''
        )


def _conflicts_of_ranks(vllm_config: VllmConfig) -> Iterator[str]:
    config = vllm_config.model_config.hf_config
    parallel = vllm_config.parallel_config
    if config.num_experts and parallel.data_parallel_size > 1:
        yield (
            f"--data-parallel-size {parallel.data_parallel_size}: vLLM would exchange tokens between replicas of the "
            f"{config.num_experts} experts; use 1, and one server for each replica"
        )
    if config.lanes and parallel.tensor_parallel_size != config.lanes:
        yield (
            f"--tensor-parallel-size {parallel.tensor_parallel_size}: the model has {config.lanes} lanes with own "
            f"partials, one for each rank: use {config.lanes}"
        )
    if config.lanes and parallel.pipeline_parallel_size > 1:
        yield (
            f"--pipeline-parallel-size {parallel.pipeline_parallel_size}: vLLM cannot pass the parts of each of the "
            f"{config.lanes} lanes on to the next stage: use 1"
        )
    if config.lane_count and not config.lanes:
        yield f"residual_mode {config.residual_mode!r}: the plugin cannot serve this wiring; use tools/generate.py"
    if config.has_linear_attention and config.linear_num_key_heads % parallel.tensor_parallel_size:
        yield (
            f"--tensor-parallel-size {parallel.tensor_parallel_size}: vLLM divides the {config.linear_num_key_heads} "
            "key heads of gated DeltaNet among the ranks: use a divisor of that number"
        )
    for option, ranks in (
        ("--decode-context-parallel-size", parallel.decode_context_parallel_size),
        ("--prefill-context-parallel-size", parallel.prefill_context_parallel_size),
    ):
        if ranks > 1:
            yield f"{option} {ranks}: its collectives would run at the same time as all-reduces of these ranks; use 1"
    if parallel.use_ubatching:
        yield "--enable-dbo or --ubatch-size: two halves of a batch would launch all-reduces at the same time; omit it"


def _conflicts_of_features(vllm_config: VllmConfig) -> Iterator[str]:
    config = vllm_config.model_config.hf_config
    lora = vllm_config.lora_config
    transfer = vllm_config.kv_transfer_config
    compilation = vllm_config.compilation_config
    overlap = getattr(config, "overlap_all_reduces", True)
    if not isinstance(overlap, bool):
        yield f"--hf-overrides overlap_all_reduces {overlap!r}: expected true or false"
    if vllm_config.model_config.runner_type == "pooling":
        yield "--runner pooling: the plugin only serves models that generate; use --runner generate"
    if lora is not None and lora.fully_sharded_loras:
        yield "--fully-sharded-loras: its collectives would run at the same time as all-reduces of the ranks; omit it"
    if lora is not None and config.kv_lora_rank:
        yield "--enable-lora: vLLM's latent attention would ignore adapters of kv_b_proj; merge them and omit it"
    dtype = vllm_config.model_config.dtype
    if config.has_linear_attention and current_platform.is_cpu() and dtype not in GATED_DELTA_DTYPES_ON_CPU:
        yield f"--dtype {dtype}: on a CPU, vLLM computes gated DeltaNet in bfloat16 only; use --dtype bfloat16"
    activation = (config.quick_geglu, config.swiglu_limit, config.glu_linear_offset)
    if config.num_experts and not config.has_swiglu and activation != _GPT_OSS_ACTIVATION:
        yield (
            "quick_geglu {}, swiglu_limit {}, glu_linear_offset {}: vLLM's experts have SwiGLU or the activation of "
            "gpt-oss (True, 7.0 and 1.0); use tools/generate.py".format(*activation)
        )
    rope = config.rope_parameters or {}
    length = vllm_config.model_config.max_model_len
    positions = int(rope.get("factor", 1) * rope.get("original_max_position_embeddings", 0))
    if rope.get("rope_type") == "yarn" and length > positions:
        yield f"--max-model-len {length}: vLLM's table for YaRN has {positions} positions; use at most as many"
    if config.num_experts and envs.VLLM_FLOAT32_MATMUL_PRECISION != "highest":
        yield (
            f"VLLM_FLOAT32_MATMUL_PRECISION={envs.VLLM_FLOAT32_MATMUL_PRECISION}: the router would choose other "
            "experts than in training; unset it"
        )
    if compilation.splitting_ops:
        yield "--compilation-config splitting_ops: all-reduces run during these operations; omit it"
    graphs = compilation.cudagraph_mode
    if graphs is not None and graphs.requires_piecewise_compilation():
        yield (
            f"cudagraph_mode {graphs.name}: piecewise CUDA graphs cannot contain all-reduces that run during "
            "attention; omit it, or use FULL or FULL_DECODE_ONLY"
        )
    if transfer is not None and transfer.is_kv_transfer_instance and not vllm_config.model_config.enforce_eager:
        connector = KVConnectorFactory.get_connector_class(transfer)
        if connector.requires_piecewise_for_cudagraph(transfer.kv_connector_extra_config):
            yield (
                f"--kv-transfer-config {transfer.kv_connector}: it moves the cache layer by layer, which requires "
                "piecewise CUDA graphs; choose whole steps, such as use_layerwise false, or pass --enforce-eager"
            )


def _conflicts_of_drafts(vllm_config: VllmConfig) -> Iterator[str]:
    config, speculative = vllm_config.model_config.hf_config, vllm_config.speculative_config
    if speculative is None:
        return
    if speculative.method in _READ_INNER_STATES:
        yield (
            f"--speculative-config method {speculative.method}: it reads the states between layers, which lack outputs "
            "in flight; use mtp, ngram, suffix, eagle or draft_model"
        )
    model = vllm_config.model_config
    if speculative.method == "mtp" and speculative.model not in (model.model, model.model_weights):
        yield (
            f"--speculative-config model {speculative.model}: a drafting head drafts for its own model only; omit "
            "model, or export a draft model with --drop-mtp"
        )
    stages = vllm_config.parallel_config.pipeline_parallel_size
    if speculative.method == "mtp" and stages > 1:
        yield f"--pipeline-parallel-size {stages}: drafting heads share the embedding of the first stage; use 1"
    caches_prefixes = vllm_config.cache_config.enable_prefix_caching
    if config.has_linear_attention and current_platform.is_cpu() and caches_prefixes:
        yield (
            "--speculative-config with --enable-prefix-caching: on a CPU, vLLM has no kernel that copies the states of "
            "gated DeltaNet for both; use --no-enable-prefix-caching"
        )
    if speculative.method not in _WITHOUT_DRAFT_MODEL and envs.VLLM_ALLREDUCE_USE_FLASHINFER_PCIE_IPC:
        yield "VLLM_ALLREDUCE_USE_FLASHINFER_PCIE_IPC=1: it serves one stream, and a draft model has another; unset it"


def _attends_with_flash_attention_3(vllm_config: VllmConfig) -> bool:
    """Return whether vLLM will select FlashAttention 3.

    With FULL graphs, the graphs of steps with prompts replay decode steps, too. Other backends that have them would
    then use their kernel for prompts, which reads a long cache with one block of threads for each head.
    """
    attention = vllm_config.attention_config
    if vllm_config.model_config.use_mla or vllm_config.model_config.hf_config.has_linear_attention:
        return False
    if not current_platform.is_cuda() or attention.backend not in (None, AttentionBackendEnum.FLASH_ATTN):
        return False
    from vllm.v1.attention.backends.fa_utils import get_flash_attn_version

    version = attention.flash_attn_version or get_flash_attn_version(head_size=vllm_config.model_config.get_head_size())
    return version == 3 and vllm_config.model_config.dtype.itemsize == 2

"""Small models built and saved by transformers, and the command line under test."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2ForCausalLM,
    DeepseekV3ForCausalLM,
    Dots1ForCausalLM,
    Glm4MoeForCausalLM,
    Glm4MoeLiteForCausalLM,
    GptOssForCausalLM,
    HYV3ForCausalLM,
    LlamaForCausalLM,
    MistralForCausalLM,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen2ForCausalLM,
    Qwen2MoeForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3ForCausalLM,
    Qwen3MoeForCausalLM,
    Qwen3NextForCausalLM,
    SolarOpenForCausalLM,
    YoutuForCausalLM,
)

from megatron_ladder.blueprint.boxes import Box
from megatron_ladder.blueprint.model import ModelConfig
from megatron_ladder.checkpoint.format import Checkpoint
from megatron_ladder.checkpoint.hf_config import model_config_from_hf
from megatron_ladder.checkpoint.loading import load_weights
from megatron_ladder.checkpoint.optimizer_state import Piece
from megatron_ladder.cli.convert_checkpoint import main
from megatron_ladder.comm.mesh import ProcessMesh
from megatron_ladder.model.language_model import LanguageModel
from tests.helpers.instella import InstellaMoEForCausalLM
from tests.helpers.sharded import small_model
from tests.reference import ReferenceConfig, make_weights
from tests.unit.checkpoint.tiny_training import publish_pieces
from tests.unit.generate.tiny_model import write_checkpoint

SIZES = {
    "vocab_size": 301,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
"""No layout divides the vocabulary; at T = 4 there are fewer key-value heads than ranks."""
EXPERTS = {"head_dim": 20, "moe_intermediate_size": 10, "num_experts_per_tok": 2, "norm_topk_prob": True}
GLM = {
    "n_routed_experts": 6,
    "n_shared_experts": 2,
    "n_group": 3,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
    "attention_bias": True,
}
QWEN2_MOE = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "shared_expert_intermediate_size": 36,
    "norm_topk_prob": False,
}
HYBRID = {
    "head_dim": 24,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 10,
    "linear_value_head_dim": 6,
    "linear_conv_kernel_dim": 3,
    "rms_norm_eps": 0.01,
}
"""With a smaller epsilon, norms of small outputs would amplify the rounding of transformers' delta rule."""
QWEN3_MOE = QWEN2_MOE | {"norm_topk_prob": True}
HY = {"num_experts": 6, "num_experts_per_tok": 2, "num_shared_experts": 2, "moe_intermediate_size": 12, "head_dim": 20}
DENSE_LATENT = {
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "q_lora_rank": None,
    "kv_lora_rank": 14,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 9,
    "rms_norm_eps": 0.01,
}
LATENT = DENSE_LATENT | {
    "n_routed_experts": 6,
    "n_shared_experts": 2,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "first_k_dense_replace": 1,
}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "rope_theta": 100.0,
    "beta_fast": 4.0,
}
MSCALES = {"mscale": 1.0, "mscale_all_dim": 1.0}
GPT_OSS = {
    "head_dim": 12,
    "intermediate_size": 20,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "sliding_window": 9,
    "swiglu_limit": 1.25,
    "rope_parameters": YARN | {"truncate": False, "beta_fast": 8.0},
}
INSTELLA = {"farskip": True, "gated_attention": True, "qk_layernorm": True, "rope_parameters": YARN | MSCALES}
MODELS: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "llama": (LlamaForCausalLM, {}),
    "mistral": (MistralForCausalLM, {"sliding_window": None}),
    "qwen2": (Qwen2ForCausalLM, {}),
    "qwen3": (Qwen3ForCausalLM, {"head_dim": 24}),
    "mixtral": (MixtralForCausalLM, {"num_local_experts": 5}),
    "qwen3_moe": (Qwen3MoeForCausalLM, EXPERTS | {"num_experts": 5, "mlp_only_layers": [0]}),
    "qwen2_moe": (Qwen2MoeForCausalLM, QWEN2_MOE),
    "qwen3_5_text": (Qwen3_5ForCausalLM, HYBRID),
    "qwen3_5_moe_text": (Qwen3_5MoeForCausalLM, HYBRID | QWEN3_MOE),
    "qwen3_next": (Qwen3NextForCausalLM, HYBRID | QWEN3_MOE),
    "glm4_moe": (Glm4MoeForCausalLM, EXPERTS | GLM | {"use_qk_norm": True}),
    "hy_v3": (HYV3ForCausalLM, HY),
    "dots1": (Dots1ForCausalLM, EXPERTS | GLM | {"first_k_dense_replace": 1}),
    "solar_open": (SolarOpenForCausalLM, EXPERTS | GLM),
    "deepseek_v2": (DeepseekV2ForCausalLM, LATENT),
    "deepseek_v3": (DeepseekV3ForCausalLM, LATENT),
    "glm4_moe_lite": (Glm4MoeLiteForCausalLM, LATENT | {"q_lora_rank": 22}),
    "youtu": (YoutuForCausalLM, DENSE_LATENT | {"bos_token_id": 1, "eos_token_id": 2}),
    "gpt_oss": (GptOssForCausalLM, GPT_OSS),
    "instella_moe": (InstellaMoEForCausalLM, LATENT | INSTELLA),
}
"""Rows of experts are no multiple of 16 bytes."""


def save_model(path: Path, kind: str = "llama", dtype: torch.dtype = torch.float32, **changes: Any) -> PreTrainedModel:
    """Save a random model, including random norms and biases."""
    model, own = MODELS[kind]
    saving = {"max_shard_size": "50GB"}
    saving |= {key: changes.pop(key) for key in ("max_shard_size", "save_original_format") if key in changes}
    torch.manual_seed(0)
    built: PreTrainedModel = model(model.config_class(**{**SIZES, **own, **changes}))
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.1 + (parameter.dim() == 1))
    built = built.to(dtype).eval()
    for module in built.modules():
        if hasattr(module, "e_score_correction_bias"):
            module.e_score_correction_bias = torch.randn(len(module.e_score_correction_bias)) * 0.1
    # The grouped products of transformers need rows of a multiple of 16 bytes.
    built.config._experts_implementation = "eager"
    built.save_pretrained(path, **saving)
    return built


def config_of(folder: Path) -> dict[str, Any]:
    """Return the content of config.json."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    """Read all tensors of a directory with the safetensors library."""
    found: dict[str, torch.Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        found |= load_file(file)
    return found


def assert_equal_bits(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    """Assert equal names, element types, shapes and bits."""
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype and tensor.shape == other[name].shape, name
        assert torch.equal(tensor.view(torch.uint8), other[name].view(torch.uint8)), name


def convert(*words: object) -> None:
    """Run the tool in this process."""
    main([str(word) for word in words])


def small_config(**changes: Any) -> ModelConfig:
    return small_model(**({"num_layers": 3, "head_dim": 12, "vocab_size": 301} | changes))


def write_cut_checkpoint(
    save: Path,
    config: ModelConfig,
    run: dict[str, Any],
    optimizer: str | None = None,
    iteration: int = 30,
    seed: int = 5,
) -> dict[str, torch.Tensor]:
    """Write a checkpoint as ZeRO does: each of 3 ranks has an interval of every flattened tensor and its moments."""
    ranks = 3
    weights = make_weights(ReferenceConfig.like(config), seed=seed)
    pieces: list[list[Piece]] = [[] for _ in range(ranks)]
    for name, weight in weights.items():
        flat = weight.reshape(-1)
        cuts = [flat.numel() * rank // ranks for rank in range(ranks + 1)]
        for rank, own in enumerate(pieces):
            piece = flat[cuts[rank] : cuts[rank + 1]]
            parts = {"weight": piece, "exp_avg": piece * 0.1, "exp_avg_sq": piece.square()}
            if optimizer == "muon" and name.endswith(("_proj.weight", "router.weight")):
                del parts["exp_avg_sq"]
            if name.endswith("expert_bias"):
                parts = {"weight": piece}
            for kind, values in parts.items():
                for box, begin in Box.whole(weight.shape).cut(cuts[rank], values.numel()):
                    elements = values[begin : begin + box.numel].view(box.extent)
                    own.append(Piece(name, kind, weight.shape, box, elements))
    pieces[1].append(Piece("rng.rank_00001.cpu", "rng", (9,), Box.whole((9,)), torch.arange(9, dtype=torch.uint8)))
    flags = {"training": run} if optimizer is None else {"training": run, "optimizer": {"optimizer": optimizer}}
    header = {
        "iteration": iteration,
        "consumed_samples": 8 * iteration,
        "model": config.to_dict(),
        "run": flags,
        "optimizer": {"steps_taken": iteration},
        "tokenizer": None,
    }
    (publish_pieces(save, header, pieces) / "merges.txt").write_text("{}")
    return weights


def export(
    folder: Path, config: ModelConfig, *words: object, imported_type: str = ""
) -> tuple[Path, dict[str, torch.Tensor]]:
    """Export a model of random weights to `folder / "hf"`; return that directory and the weights.

    `imported_type` is the type from which its checkpoint was imported.
    """
    weights = make_weights(ReferenceConfig.like(config), seed=5)
    source = {"hugging_face": {"model_type": imported_type}} if imported_type else {}
    write_checkpoint(folder / "run", config, weights, **source)
    convert("export", "--load", folder / "run", "--hf", folder / "hf", *words)
    return folder / "hf", weights


@torch.no_grad()
def our_logits(directory: Path, tokens: torch.Tensor) -> torch.Tensor:
    """Map tokens [b, s] to logits [b, s, V] with our model on one rank."""
    checkpoint = Checkpoint.open(directory)
    model = LanguageModel(checkpoint.model(), ProcessMesh.single())
    load_weights(model, checkpoint)
    hidden_states = model.hidden_states(tokens, model.training_context(tokens))
    return model.logits_shard(hidden_states)[..., : model.config.vocab_size].transpose(0, 1)


def check_round_trip(
    folder: Path, kind: str, dtype: torch.dtype, written_type: str, tolerance: float = 1e-5, **changes: Any
) -> None:
    """Save, import and export a model; assert equal bits, the written type, and transformers' logits.

    The directories are `hf`, `ours` and `back` in `folder`.
    """
    hf, ours, back = folder / "hf", folder / "ours", folder / "back"
    family = type(save_model(hf, kind, dtype, max_shard_size="60KB", **changes))
    assert len(list(hf.glob("*.safetensors"))) > 1
    convert("import", "--hf", hf, "--save", ours, "--verify")
    words = ("--max-shard-size", "100KB", "--dtype", "bf16" if dtype == torch.bfloat16 else "fp32")
    convert("export", "--load", ours, "--hf", back, *words, "--verify")
    assert_equal_bits(tensors_of(hf), tensors_of(back))
    written, model = config_of(back), model_config_from_hf(config_of(hf))
    assert written["model_type"] == written_type
    assert model_config_from_hf(written) == Checkpoint.open(ours).model() == model
    # Longer than the original positions of YaRN.
    tokens = torch.randint(0, 301, (2, 48), generator=torch.Generator().manual_seed(3))
    exact: dict[str, Any] = {"dtype": torch.float32, "experts_implementation": "eager"}
    with torch.no_grad():
        expected = family.from_pretrained(hf, **exact)(tokens).logits
        theirs = AutoModelForCausalLM.from_pretrained(back, trust_remote_code=True, **exact)(tokens).logits
        found = theirs, our_logits(ours, tokens)
    assert all((one - expected).abs().max() <= tolerance * expected.abs().max() for one in found)


def add_predicting_layer(hf: Path, *others: str) -> int:
    """Add a layer that predicts further tokens to a model of four, with `others` besides; return its tensors."""
    weights = tensors_of(hf)
    more = {name.replace(".3.", ".4.", 1): weight.clone() for name, weight in weights.items() if ".layers.3." in name}
    more |= {f"model.layers.4.{name}.weight": torch.zeros(2) for name in others}
    save_file(weights | more, hf / "model.safetensors")
    return len(more)

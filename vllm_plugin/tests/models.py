"""Tiny models in Hugging Face's format, and the tokens with which `tools/generate.py` continues prompts.

`python -m vllm_plugin.tests.models FOLDER` writes them. It runs in the environment of the trainer; the tests, which run
in vLLM's, read the folder.
"""

import contextlib
import io
import json
import random
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

NEW_TOKENS = 24
WIRINGS: dict[str, dict[str, Any]] = {
    "standard": {},
    "ladder": {"residual_mode": "ladder", "ladder_layers": (0, 1, 2)},
    "hybrid": {"residual_mode": "ladder", "ladder_layers": (1, 2)},
    "staleness-2": {"residual_mode": "ladder", "ladder_layers": (0, 1, 2), "residual_staleness": 2},
    "parallel": {"residual_mode": "parallel"},
    "ladder-parallel": {"residual_mode": "ladder-parallel", "ladder_layers": (0, 1, 2)},
    "ladder-attention": {"residual_mode": "ladder-attention", "ladder_layers": (0, 1, 2)},
}
_SINKS = {"softmax_type": "learnable"}
LANES: dict[str, dict[str, Any]] = {
    "lanes": {"residual_mode": "ladder", "ladder_layers": (0, 1, 2), "residual_staleness": 2, "lanes": 2},
    "lanes-hybrid": {"residual_mode": "ladder", "ladder_layers": (1, 2), "lanes": 2, "add_qkv_bias": True},
    "lanes-sinks": {"residual_mode": "ladder", "ladder_layers": (1, 2), "lanes": 2} | _SINKS,
}
"""They run on two ranks only."""
_YARN: dict[str, Any] = {
    "rope_scaling": "yarn",
    "rope_scaling_factor": 4.0,
    "rope_original_max_position_embeddings": 32,
    "rope_mscale": 0.7,
    "rope_mscale_all_dim": 1.0,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "biases": {"add_qkv_bias": True, "add_attention_output_bias": True, "add_mlp_bias": True},
    "qk-norm": {"qk_layernorm": True},
    "zero-centered": {"qk_layernorm": True, "apply_layernorm_1p": True},
    "tied-head": {"tie_embeddings": True},
    "one-key-head": {"num_key_value_heads": 1},
    "odd-vocabulary": {"vocab_size": 61},
    "soft-cap": {"logit_soft_cap": 0.5},
    "gate": {"attention_output_gate": True},
    "yarn": _YARN,
}
"""Changes of the hybrid."""
_EXPERTS: dict[str, Any] = {
    "num_experts": 6,
    "moe_ffn_hidden_size": 64,
    "moe_shared_expert_intermediate_size": 64,
    "moe_layers": (0, 2),
}
_WINDOWS: dict[str, Any] = {"window_size": 8, "window_layers": (0, 2)}
_ALL_LATE: dict[str, Any] = {"ladder_layers": (0, 1, 2)}
EXPERTS: dict[str, dict[str, Any]] = {
    **{f"experts-{name}": changes | _EXPERTS for name, changes in WIRINGS.items()},
    "experts-farskip": {"residual_mode": "farskip"} | _ALL_LATE | _EXPERTS,
    "experts-shortcut": {"residual_mode": "shortcut"} | _ALL_LATE | _EXPERTS,
    "experts-longcat": {"residual_mode": "longcat"} | _ALL_LATE | _EXPERTS | {"moe_shared_expert_intermediate_size": 0},
}
"""Every wiring with a dense layer between two of experts."""
_HY3: dict[str, Any] = {
    "moe_router_score_function": "sigmoid",
    "moe_router_topk_scaling_factor": 2.826,
    "moe_router_enable_expert_bias": True,
    "qk_layernorm": True,
}
EXPERT_VARIANTS: dict[str, dict[str, Any]] = {
    "experts-glm": EXPERTS["experts-farskip"]
    | {
        "ladder_layers": (1, 2),
        "moe_router_score_function": "sigmoid",
        "moe_router_topk_scaling_factor": 1.5,
        "moe_router_enable_expert_bias": True,
        "moe_router_num_groups": 3,
        "moe_router_group_topk": 2,
        "rotary_percent": 0.5,
        "qk_layernorm": True,
    },
    "experts-groups": EXPERTS["experts-farskip"]
    | {"moe_shared_expert_intermediate_size": 0, "moe_router_num_groups": 3, "moe_router_group_topk": 1},
    "experts-sigmoid": EXPERTS["experts-shortcut"] | {"moe_router_score_function": "sigmoid", "ladder_layers": (0,)},
    "experts-unnormalized": EXPERTS["experts-ladder"]
    | {"moe_router_unnormalized": True, "moe_router_topk_scaling_factor": 2.5},
    "experts-gated": EXPERTS["experts-farskip"] | {"moe_shared_expert_gate": True},
    "late-hy3": EXPERTS["experts-farskip"] | _HY3,
    "experts-gpt-oss": EXPERTS["experts-ladder"]
    | {
        "add_mlp_bias": True,
        "add_moe_bias": True,
        "quick_geglu": True,
        "activation_func_clamp_value": 7.0,
        "glu_linear_offset": 1.0,
    },
}
"""Routers of all kinds, and late and other layers of experts in one model."""
_GPT_OSS: dict[str, Any] = {
    **_WINDOWS,
    **_SINKS,
    **{"num_experts": 6, "moe_ffn_hidden_size": 64, "moe_layers": (0, 1, 2), "moe_router_topk": 4},
    **{"add_qkv_bias": True, "add_attention_output_bias": True, "add_moe_bias": True, "quick_geglu": True},
    **{"activation_func_clamp_value": 7.0, "glu_linear_offset": 1.0},
    **{"rope_scaling": "yarn", "rope_scaling_factor": 4.0, "rope_original_max_position_embeddings": 32},
    "yarn_correction_range_round_to_int": False,
}
_DELTA: dict[str, Any] = {
    "experimental_attention_variant": "gated_delta_net",
    "linear_attention_layers": (0, 2),
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "qk_layernorm": True,
    "apply_layernorm_1p": True,
    "attention_output_gate": True,
    "rotary_percent": 0.25,
}
_ON_CPU: dict[str, Any] = {"linear_key_head_dim": 64, "linear_value_head_dim": 64}
"""Widths for which vLLM has kernels of gated DeltaNet for CPUs."""
_DELTA_EXPERTS: dict[str, Any] = _DELTA | _EXPERTS | {"moe_layers": (0, 1, 2), "moe_shared_expert_gate": True}
DELTA: dict[str, dict[str, Any]] = {
    "delta-ladder": WIRINGS["ladder"] | _DELTA,
    "delta-some-late": WIRINGS["hybrid"] | _DELTA | {"linear_attention_layers": (0, 1)},
    "delta-parallel": WIRINGS["ladder-parallel"] | _DELTA,
    "delta-attention": WIRINGS["ladder-attention"] | _DELTA,
    "delta-farskip": EXPERTS["experts-farskip"] | _DELTA_EXPERTS,
    "delta-longcat": EXPERTS["experts-longcat"] | _DELTA,
    "delta-four": WIRINGS["ladder"] | _DELTA | {"num_layers": 4, "ladder_layers": (0, 1, 2, 3)},
}
"""Gated DeltaNet in some layers, and the attention of Qwen3.5 in others. Two stages of one have both."""
DELTA_ON_CPU: dict[str, dict[str, Any]] = {
    "delta-cpu": WIRINGS["ladder"] | _DELTA | _ON_CPU,
    "qwen3-5-cpu": _DELTA | _ON_CPU,
}
PLAIN: dict[str, dict[str, Any]] = {
    "qwen3-5": _DELTA,
    "qwen3-5-moe": _DELTA_EXPERTS,
    "qwen3-moe": {"qk_layernorm": True} | _EXPERTS | {"moe_shared_expert_intermediate_size": 0},
    "hy3": _EXPERTS | _HY3 | {"moe_layers": (1, 2)},
    "gpt-oss": _GPT_OSS,
}
"""Models that vLLM has."""
_LATENT: dict[str, Any] = {
    "kv_lora_rank": 40,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "num_key_value_heads": 1,
    "head_dim": 24,
    "attention_output_gate": True,
    "norm_epsilon": 1e-2,
}
LATENT: dict[str, dict[str, Any]] = {
    "latent-farskip": EXPERTS["experts-farskip"]
    | {
        "moe_router_score_function": "sigmoid",
        "moe_router_topk_scaling_factor": 1.5,
        "moe_router_enable_expert_bias": True,
    }
    | _LATENT
    | _YARN,
    "latent-standard": _LATENT,
    "latent-ladder": WIRINGS["ladder"] | _LATENT | {"q_lora_rank": 24, "v_head_dim": 40},
    "latent-longcat": EXPERTS["experts-longcat"] | _LATENT | {"q_lora_rank": 24, "attention_output_gate": False},
}
"""Latent attention, with the gate of Instella-MoE in all but one. The values of one are wider than its keys. Norms have
another epsilon than latents."""
CACHED_LATENTS = LATENT["latent-farskip"] | {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "head_dim": 80}
"""The sizes for which vLLM has a kernel for CPUs."""
WINDOWS: dict[str, dict[str, Any]] = {
    "windows-ladder": WIRINGS["ladder"] | _WINDOWS | {"qk_layernorm": True},
    "windows-everywhere": WIRINGS["hybrid"] | _WINDOWS | {"window_layers": (0, 1, 2), "attention_output_gate": True},
    "sinks-hybrid": WIRINGS["hybrid"] | _WINDOWS | _SINKS | {"add_qkv_bias": True, "add_attention_output_bias": True},
    "late-gpt-oss": WIRINGS["hybrid"] | _GPT_OSS,
    "sinks-farskip": EXPERTS["experts-farskip"] | _WINDOWS | _SINKS | _YARN,
    "sinks-longcat": EXPERTS["experts-longcat"] | _WINDOWS | _SINKS,
}
"""Sliding windows, which prompts and answers exceed several times, and sinks."""
HEADS = ("standard", "ladder", "soft-cap", "tied-head", "zero-centered", "experts-standard", "experts-farskip")
HEADS += ("latent-farskip", "windows-everywhere", "sinks-hybrid", "experts-longcat", "lanes", "delta-ladder")
HEADS += ("delta-farskip",)
"""Models that are also written with a drafting head, as `head-MODEL`."""
HEADS_OF_VLLM: dict[str, dict[str, Any]] = {
    "qwen3-5": WIRINGS["ladder"] | _DELTA,
    "qwen3-5-moe": WIRINGS["ladder"] | _DELTA_EXPERTS,
    "qwen3-5-cpu": DELTA_ON_CPU["delta-cpu"],
}
"""Models of vLLM with a drafting head, and the changes that make them late. Each is written as `head-MODEL`, and with
our type as `head-MODEL-ours`: exported as a late model, whose config.json is then set to the standard wiring."""
SERVED = ("ladder", "experts-farskip")
MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
MATRICES += ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")
ADAPTED = ("hybrid", "delta-ladder")
ADAPTER_RANK = 4


def make_prompts() -> list[list[int]]:
    """Return prompts of unequal lengths; the last two share 36 tokens with the second."""
    tokens = random.Random(0)
    prompts = [[tokens.randrange(61) for _ in range(length)] for length in (3, 40, 17, 1)]
    return prompts + [prompts[1][:36] + [tokens.randrange(61) for _ in range(length)] for length in (2, 9)]


def write_everything(folder: Path) -> None:
    """Write a directory for each model, an adapter, and the reference tokens of each model in `references.json`."""
    from ladder_lab.bench.sizes import find_size

    shape = replace(find_size("3x64x128x4x2x96"), head_dim=32, max_position_embeddings=128)
    variants = {name: WIRINGS["hybrid"] | changes for name, changes in VARIANTS.items()}
    changes = WIRINGS | LANES | variants | EXPERTS | EXPERT_VARIANTS | PLAIN | LATENT | WINDOWS | DELTA | DELTA_ON_CPU
    changes |= {"cached-latents": CACHED_LATENTS}
    models = {name: replace(shape, **changes[name]) for name in changes}
    for name, config in models.items():
        # A model with the wrong wiring gives wrong tokens.
        export_to(folder / name, config, "hy_v3" if name == "hy3" else "")
    # Without ladder layers the export is a plain Llama.
    (folder / "standard").rename(folder / "llama")
    shutil.copytree(folder / "ladder", folder / "standard")
    change_config(folder / "standard", residual_mode="standard", ladder_layers=[])
    for name in ADAPTED:
        write_adapter(folder, name)
    names = (*changes, "llama", *(f"merged-{name}" for name in ADAPTED))
    references = {name: reference(folder / name) for name in names}
    (folder / "references.json").write_text(json.dumps(references))
    shutil.copytree(folder / "ladder", folder / "desync")
    change_config(folder / "desync", residual_mode="desync", ladder_layers=[], desync_interval=2, desync_tp=2)
    for name in ("standard", "llama"):
        quantise(folder / name, folder / f"{name}-int8")
    for name in SERVED:
        write_tokenizer(folder / name)
    write_heads(folder, models, references)


def write_heads(folder: Path, models: dict[str, Any], references: dict[str, list[list[int]]]) -> None:
    """Write models with drafting heads, and in `drafts.json` the drafts after each token of the reference sequences.

    The heads have learned a part of these sequences, so that some drafts are right.
    """
    drafts = {}
    for name in (*HEADS, *HEADS_OF_VLLM):
        config = replace(models[name], mtp_num_layers=1, mtp_before_final_norm=name == "soft-cap")
        weights = export_to(folder / f"head-{name}", config)
        projection, drafts[name] = train_head(config, weights, references[name])
        write_projection(folder / f"head-{name}", projection)
        if name in HEADS_OF_VLLM:
            ours = folder / f"head-{name}-ours"
            export_to(ours, replace(config, **HEADS_OF_VLLM[name]))
            change_config(ours, residual_mode="standard", ladder_layers=[])
            write_projection(ours, projection)
    (folder / "drafts.json").write_text(json.dumps(drafts))


def export_to(folder: Path, config: Any, source: str = "") -> dict[str, Tensor]:
    """Write a model of random weights, the same for all wirings, and return these under the names of the trainer."""
    from tests.unit.convert.saved_models import export

    with contextlib.redirect_stdout(io.StringIO()), tempfile.TemporaryDirectory() as scratch:
        exported, weights = export(Path(scratch), config, imported_type=source)
        shutil.move(exported, folder)
    return weights


def write_projection(folder: Path, projection: Tensor) -> None:
    """Replace the projection of a drafting head."""
    file = folder / "model.safetensors"
    save_file(load_file(file) | {"mtp.fc.weight": projection}, file, metadata={"format": "pt"})


def train_head(
    config: Any, weights: dict[str, Tensor], continuations: list[list[int]]
) -> tuple[Tensor, list[list[int]]]:
    """Return a projection for a head that has learned the prompts and continuations, and the drafts after their tokens.

    The draft after a token is two positions after it. The last token of a sequence has none.
    """
    from tests.reference import ReferenceConfig
    from tests.reference.mtp import drafting_logits

    like = ReferenceConfig.like(config)
    sequences = [prompt + tokens for prompt, tokens in zip(make_prompts(), continuations, strict=True)]
    width = max(map(len, sequences))
    tokens = torch.tensor([sequence + [0] * (width - len(sequence)) for sequence in sequences])
    targets = torch.tensor([sequence[2:] + [-100] * (width + 1 - len(sequence)) for sequence in sequences])
    projection = weights[f"layers.{config.num_layers}.eh_proj.weight"].requires_grad_()
    optimizer = torch.optim.Adam([projection], lr=0.03)
    for _ in range(10):
        (logits,) = drafting_logits(weights, like, tokens)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(logits.transpose(1, 2), targets).backward()
        optimizer.step()
    with torch.no_grad():
        (logits,) = drafting_logits(weights, like, tokens)
    return projection.detach(), [
        row[: len(sequence) - 1].tolist() for row, sequence in zip(logits.argmax(-1), sequences, strict=True)
    ]


def change_config(folder: Path, **changes: Any) -> None:
    """Replace keys of a `config.json`."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def reference(folder: Path) -> list[list[int]]:
    """Return the greedy continuation of each prompt by `tools/generate.py`."""
    from megatron_ladder.cli.generate import main

    continuations = []
    for prompt in make_prompts():
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            flags = f"--max-new-tokens {NEW_TOKENS} --temperature 0 --ignore-eos --json".split()
            main(["--model", str(folder), "--tokens", *map(str, prompt), *flags])
        continuations.append(json.loads(output.getvalue())["ids"])
    return continuations


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer whose words are `w0`, `w1`, ...; `vllm serve` requires one."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    tokenizer = Tokenizer(WordLevel({f"w{token}": token for token in range(96)}, unk_token="w0"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))


def copy_changed(source: Path, folder: Path, change: Callable[[str, Tensor], dict[str, Tensor]]) -> None:
    """Copy a model; `change` maps the name, without `.weight`, and value of each layer's matrices to new tensors."""
    shutil.copytree(source, folder)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name, weight in list(tensors.items()):
        module, _, kind = name.rpartition(".")
        if module.endswith(MATRICES) and kind == "weight":
            tensors |= change(module, weight)
    save_file(tensors, path, metadata={"format": "pt"})


def write_adapter(folder: Path, model: str) -> None:
    """Write a LoRA of a model in PEFT's format to `adapter-MODEL`, and the sum of both to `merged-MODEL`."""
    generator = torch.Generator().manual_seed(1)
    adapter: dict[str, Tensor] = {}

    def add(module: str, weight: Tensor) -> dict[str, Tensor]:
        down = torch.randn(ADAPTER_RANK, weight.shape[1], generator=generator) * 0.2
        up = torch.randn(weight.shape[0], ADAPTER_RANK, generator=generator) * 0.2
        adapter[f"base_model.model.{module}.lora_A.weight"] = down
        adapter[f"base_model.model.{module}.lora_B.weight"] = up
        return {f"{module}.weight": weight + 2 * up @ down}

    copy_changed(folder / model, folder / f"merged-{model}", add)
    path = folder / f"adapter-{model}"
    path.mkdir()
    save_file(adapter, path / "adapter_model.safetensors")
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": ADAPTER_RANK,
        "lora_alpha": 2 * ADAPTER_RANK,
        "target_modules": MATRICES,
        "bias": "none",
        "base_model_name_or_path": model,
    }
    (path / "adapter_config.json").write_text(json.dumps(settings))


def quantise(source: Path, folder: Path) -> None:
    """Write a copy of a model with one 8-bit scale per output, for activations that vLLM quantises per token."""

    def to_eight_bits(module: str, weight: Tensor) -> dict[str, Tensor]:
        scale = weight.abs().amax(dim=1, keepdim=True) / 127
        return {f"{module}.weight": (weight / scale).round().to(torch.int8), f"{module}.weight_scale": scale}

    copy_changed(source, folder, to_eight_bits)
    eight_bits = {"num_bits": 8, "type": "int", "symmetric": True}
    scheme = {
        "targets": ["Linear"],
        "weights": eight_bits | {"strategy": "channel", "dynamic": False},
        "input_activations": eight_bits | {"strategy": "token", "dynamic": True},
    }
    change_config(
        folder,
        quantization_config={
            "quant_method": "compressed-tensors",
            "format": "int-quantized",
            "quantization_status": "compressed",
            "ignore": ["lm_head"],
            "config_groups": {"group_0": scheme},
        },
    )


if __name__ == "__main__":
    write_everything(Path(sys.argv[1]))

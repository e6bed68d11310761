"""Logits on random tokens, before and after a conversion: the one check that knows what the numbers mean.

It holds whole models in memory, and needs torch and transformers; without them, or without the memory, it says so.
"""

import importlib.util
import math
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from megatron_ladder.blueprint.model import ModelConfig
from megatron_ladder.checkpoint.format import Checkpoint
from megatron_ladder.convert.measures import size_text
from megatron_ladder.convert.names import tensor_shapes
from megatron_ladder.convert.remote_code import CLASSES, OWN_TYPE

if TYPE_CHECKING:
    import torch

LIBRARIES = ("torch", "transformers")
MOST_DIFFERENCE = 1e-4
"""Between two programs that compute in fp32, as a share of the largest logit."""
_TOKENS = 64
_FP32_BYTES = 4


def compare_logits(hf: Path, model: ModelConfig, checkpoint: Path, model_type: str, dtype: str, own_code: bool) -> str:
    """Compares transformers' model of a Hugging Face directory with ours of a training checkpoint, both in fp32.

    Args:
        hf: a directory that agrees with its config.json.
        model: as the directory has it; the checkpoint's weights are computed with in its wiring.
        checkpoint: a directory with a manifest.
        model_type: of the directory.
        dtype: to which the weights of the checkpoint are rounded before, as those of the directory were.
        own_code: whether the code in the directory was written by this process, and may be run.

    Returns:
        A line that says how near they are, or why they were not compared.

    Raises:
        RuntimeError: they differ.
    """
    plain = model_type in CLASSES and model_type != OWN_TYPE
    if not plain and not own_code:
        return f"logits were not compared: the code of a {model_type} directory is not run"
    reason = _lacking(model)
    if reason is not None:
        return f"logits were not compared: {reason}"
    import torch

    tokens = torch.randint(0, model.vocab_size, (1, min(_TOKENS, model.max_position_embeddings)))
    theirs = _logits_of_transformers(hf, tokens, own_code=not plain)
    ours = _logits_of_ours(model, Checkpoint.open(checkpoint), getattr(torch, dtype), tokens)
    # Of a model of zeros the largest logit is zero as well.
    largest = theirs.abs().max().clamp(min=torch.finfo(theirs.dtype).tiny)
    difference = float((ours - theirs).abs().max() / largest)
    if not difference <= MOST_DIFFERENCE:
        raise RuntimeError(f"{hf}: logits of transformers and ours differ by {difference:.1e} of the largest")
    return f"verified: logits on {tokens.numel()} random tokens agree to {difference:.1e} of the largest"


def _lacking(model: ModelConfig) -> str | None:
    """What the comparison needs and is not there."""
    missing = [name for name in LIBRARIES if importlib.util.find_spec(name) is None]
    if missing:
        return f"{' and '.join(missing)} are not installed"
    needed = 2 * _FP32_BYTES * sum(math.prod(shape) for shape in tensor_shapes(model).values())
    available = psutil.virtual_memory().available
    if needed > available:
        return f"two models in fp32 take {size_text(needed)}, and {size_text(available)} of memory are free"
    return None


def _logits_of_transformers(hf: Path, tokens: "torch.Tensor", own_code: bool) -> "torch.Tensor":
    """[1, s] -> [s, V] in fp32."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        hf, dtype=torch.float32, trust_remote_code=own_code, local_files_only=True
    ).eval()
    with torch.no_grad():
        logits: torch.Tensor = model(tokens).logits[0]
    return logits


def _logits_of_ours(
    config: ModelConfig, checkpoint: Checkpoint, dtype: "torch.dtype", tokens: "torch.Tensor"
) -> "torch.Tensor":
    """[1, s] -> [s, V] in fp32, with weights that were rounded to `dtype`."""
    import torch

    from megatron_ladder.checkpoint.weights import load_weights
    from megatron_ladder.comm.mesh import ProcessMesh
    from megatron_ladder.model.language_model import LanguageModel

    model = LanguageModel(config, ProcessMesh.single()).requires_grad_(False)
    load_weights(model, checkpoint)
    for parameter in model.parameters():
        parameter.copy_(parameter.to(dtype))
    with torch.no_grad():
        hidden_states = model.hidden_states(tokens, model.training_context(tokens))
        return model.logits_shard(hidden_states)[:, 0, : config.vocab_size]

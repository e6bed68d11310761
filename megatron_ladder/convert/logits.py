"""Comparison of logits before and after a conversion: the one check that knows the meaning of the numbers.

It holds whole models in memory and needs transformers; otherwise it reports why it was skipped.
"""

import importlib.util
from pathlib import Path

import psutil
import torch
from torch import Tensor

from megatron_ladder.blueprint.model import ModelConfig, tensor_parallel_errors
from megatron_ladder.blueprint.tensors import model_tensors
from megatron_ladder.checkpoint.format import Checkpoint
from megatron_ladder.checkpoint.hf_config import CLASSES, OWN_TYPE
from megatron_ladder.checkpoint.loading import load_weights
from megatron_ladder.comm.mesh import ProcessMesh
from megatron_ladder.convert.outputs import size_text
from megatron_ladder.model.language_model import LanguageModel

_MAX_DIFFERENCE = 1e-4
"""Allowed difference of two programs that compute in fp32, relative to the largest logit."""
_TOKENS = 64
_FP32_BYTES = 4


def compare_logits(
    hf: Path, model: ModelConfig, checkpoint: Path, model_type: str, dtype: str | None, own_code: bool
) -> str:
    """Compare transformers' model of a Hugging Face directory with ours of a training checkpoint, both in fp32.

    Args:
        model: sizes and wiring of the directory; the weights of the checkpoint are used in that wiring.
        model_type: model type of the directory.
        dtype: element type to which the weights of the directory were rounded, and those of the checkpoint are for the
            comparison; None if the directory has the exact weights.
        own_code: whether this process wrote the code in the directory, so that it may run.

    Returns:
        A line with the difference, or the reason why logits were not compared.

    Raises:
        RuntimeError: the logits differ.
    """
    plain = model_type in CLASSES and model_type != OWN_TYPE
    needed = 2 * _FP32_BYTES * sum(tensor.numel for tensor in model_tensors(model))
    available = psutil.virtual_memory().available
    if not plain and not own_code:
        return f"logits were not compared: the code of a {model_type} directory is not trusted"
    if importlib.util.find_spec("transformers") is None:
        return "logits were not compared: transformers is not installed"
    if tensor_parallel_errors(model, 1):
        return "logits were not compared: one process of the trainer cannot compute this model"
    if needed > available:
        free = f"{size_text(available)} of memory are free"
        return f"logits were not compared: two models in fp32 need {size_text(needed)}, and {free}"
    # Imported here because it takes seconds.
    from transformers import AutoModelForCausalLM

    tokens = torch.randint(0, model.vocab_size, (1, min(_TOKENS, model.max_position_embeddings)))
    # The grouped products of transformers fail where a row is not a multiple of 16 bytes.
    exact = {"dtype": torch.float32, "experts_implementation": "eager"}
    theirs = AutoModelForCausalLM.from_pretrained(
        hf, **exact, trust_remote_code=not plain, local_files_only=True
    ).eval()
    with torch.no_grad():
        expected: Tensor = theirs(tokens).logits[0]
    del theirs
    built = LanguageModel(model, ProcessMesh.single()).requires_grad_(False)
    load_weights(built, Checkpoint.open(checkpoint))
    with torch.no_grad():
        if dtype is not None:
            for parameter in built.parameters():
                parameter.copy_(parameter.to(getattr(torch, dtype)))
        hidden_states = built.hidden_states(tokens, built.training_context(tokens))
        ours = built.logits_shard(hidden_states)[:, 0, : model.vocab_size]
    # The largest logit of a model of zeros is zero.
    largest = expected.abs().max().clamp(min=torch.finfo(expected.dtype).tiny)
    difference = float((ours - expected).abs().max() / largest)
    if not difference <= _MAX_DIFFERENCE:
        raise RuntimeError(f"{hf}: logits of transformers and ours differ by {difference:.1e} of the largest")
    return f"verified: logits on {tokens.numel()} random tokens agree to {difference:.1e} of the largest"

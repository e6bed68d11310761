"""Directories of weights in FP8, as they are published, and plain arithmetic that dequantises them."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

PUBLISHED: dict[str, Any] = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}
"""The `quantization_config` of DeepSeek-V3."""


def dequantised(values: Tensor, factors: Tensor) -> Tensor:
    """Return the weights of a matrix in blocks of 128 x 128."""
    rows, columns = values.shape
    wide = factors.float().repeat_interleave(128, 0).repeat_interleave(128, 1)
    return (values.float() * wide[:rows, :columns]).bfloat16()


def quantise(
    folder: Path, factor_dtype: torch.dtype = torch.float32, **changes: Any
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Store the projections of a directory in FP8; return the stored tensors, and the weights that they mean.

    The factors are random, so that those of neighbours differ.
    """
    generator = torch.Generator().manual_seed(7)
    stored, weights = dict[str, Tensor](), dict[str, Tensor]()
    for file in sorted(folder.glob("*.safetensors")):
        held = load_file(file)
        for name, tensor in sorted(held.items()):
            weights[name] = tensor
            if "_proj" in name and name.endswith(".weight"):
                blocks = [-(-size // 128) for size in tensor.shape]
                factors = (torch.rand(blocks, generator=generator) * 0.01 + 0.001).to(factor_dtype)
                values = (tensor.float() * 100).to(torch.float8_e4m3fn)
                held |= {name: values, f"{name}_scale_inv": factors}
                weights[name] = dequantised(values, factors)
        save_file(held, file)
        stored |= held
    index = folder / "model.safetensors.index.json"
    assert not index.exists()
    config = json.loads((folder / "config.json").read_text())
    config |= {"dtype": "bfloat16", "quantization_config": PUBLISHED | changes}
    (folder / "config.json").write_text(json.dumps(config))
    return stored, weights

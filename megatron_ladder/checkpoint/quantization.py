"""The `quantization_config` of a `config.json`: what is read, and how other models can be imported."""

from collections.abc import Iterable, Mapping
from typing import Any

from megatron_ladder.errors import UserError

QUANTIZATION = "quantization_config"
BLOCK = 128
"""Rows and columns of a block."""
_UNCONVERTED = ("modules_to_not_convert", "ignored_layers")
"""Keys that list modules in another element type."""
_READ: Mapping[str, tuple[object, ...]] = {
    "fmt": ("e4m3",),
    "weight_block_size": ([BLOCK, BLOCK],),
    "activation_scheme": ("dynamic",),
    "scale_fmt": ("float", "ue8m0"),
    "expert_dtype": ("fp8",),
}
"""Key of `quantization_config` -> the values that are read. The factors of DeepSeek-V3.1 are powers of two (ue8m0)."""
_LOADED_WITH = {"compressed-tensors": "CompressedTensorsConfig", "fp8": "FineGrainedFP8Config"}
"""`quant_method` -> the class of transformers that dequantises such a model as it is loaded."""


def check_quantization(config: Mapping[str, Any], source: str) -> None:
    """Raise UserError if a `config.json` describes another quantisation than FP8 in blocks of 128 x 128."""
    quantization = config.get(QUANTIZATION)
    if quantization is None:
        return
    if not isinstance(quantization, dict):
        raise UserError(f"{source}: {QUANTIZATION}: found {quantization!r:.100}, expected an object or null")
    if quantization.get("quant_method") != "fp8":
        raise _refusal(source, quantization, "quant_method", ("fp8",))
    for key, values in _READ.items():
        if quantization.get(key, values[0]) not in values:
            raise _refusal(source, quantization, key, values)
    for key in _UNCONVERTED:
        names = quantization.get(key) or []
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise UserError(f"{source}: {QUANTIZATION}.{key}: found {names!r:.100}, expected a list of modules' names")


def _refusal(source: str, quantization: Mapping[str, Any], key: str, values: Iterable[object]) -> UserError:
    """Return the error about a key that has none of the values that are read, and how to import such a model."""
    method = str(quantization.get("quant_method"))
    way = "import the model from before its quantisation, or dequantise it with the library that quantised it"
    # transformers derives the size of blocks from the number of factors, which fails if the last one is smaller.
    if method in _LOADED_WITH and (method != "fp8" or quantization.get("weight_block_size") is None):
        # Without save_original_format=False, the weights would be quantised again.
        loaded = f"from_pretrained(DIR, quantization_config={_LOADED_WITH[method]}(dequantize=True))"
        way = f"dequantise it with transformers, {loaded}.save_pretrained(NEW, save_original_format=False)"
    return UserError(
        f"{source}: {QUANTIZATION}.{key}: found {quantization.get(key)!r:.100}, expected "
        f"{' or '.join(map(repr, values))}: only FP8 in blocks of {BLOCK} x {BLOCK} is read; {way}, and import the "
        "result"
    )


def unconverted_modules(config: Mapping[str, Any]) -> set[str]:
    """Return the modules that a `config.json` lists as not quantised."""
    return {name for key in _UNCONVERTED for name in config[QUANTIZATION].get(key) or ()}

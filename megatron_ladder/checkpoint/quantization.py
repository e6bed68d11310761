"""The `quantization_config` of a `config.json`: what is read, and how other models can be imported."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from megatron_ladder.errors import UserError

QUANTIZATION = "quantization_config"
BLOCK = 128
"""Rows and columns of a block of FP8."""
GROUP = 32
"""Neighbouring weights with one scale in MXFP4."""
_UNCONVERTED = ("modules_to_not_convert", "ignored_layers")
"""Keys that list modules in another element type."""
_LOADED_WITH = {"compressed-tensors": "CompressedTensorsConfig", "fp8": "FineGrainedFP8Config"}
"""`quant_method` -> the class of transformers that dequantises such a model as it is loaded."""


@dataclass(frozen=True)
class _Method:
    """A quantisation that is read."""

    description: str
    keys: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    """Key of `quantization_config` -> the values that are read."""


_METHODS = {
    "fp8": _Method(
        f"FP8 in blocks of {BLOCK} x {BLOCK}",
        {
            "fmt": ("e4m3",),
            "weight_block_size": ([BLOCK, BLOCK],),
            "activation_scheme": ("dynamic",),
            # The factors of DeepSeek-V3.1 are powers of two (ue8m0).
            "scale_fmt": ("float", "ue8m0"),
            "expert_dtype": ("fp8",),
        },
    ),
    "mxfp4": _Method(f"MXFP4 in blocks of {GROUP}"),
}
"""`quant_method` -> the quantisation."""


def check_quantization(config: Mapping[str, Any], source: str, method: str) -> None:
    """Raise UserError if a `config.json` describes another quantisation than a `quant_method`, or one not read."""
    quantization = config.get(QUANTIZATION)
    if quantization is None:
        return
    if not isinstance(quantization, dict):
        raise UserError(f"{source}: {QUANTIZATION}: found {quantization!r:.100}, expected an object or null")
    if quantization.get("quant_method") != method:
        raise _refusal(source, quantization, method, "quant_method", (method,))
    for key, values in _METHODS[method].keys.items():
        if quantization.get(key, values[0]) not in values:
            raise _refusal(source, quantization, method, key, values)
    for key in _UNCONVERTED:
        names = quantization.get(key) or []
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise UserError(f"{source}: {QUANTIZATION}.{key}: found {names!r:.100}, expected a list of modules' names")


def _refusal(
    source: str, quantization: Mapping[str, Any], method: str, key: str, values: Iterable[object]
) -> UserError:
    """Return the error about a key that has none of the values that are read, and how to import such a model."""
    found = str(quantization.get("quant_method"))
    way = "import the model from before its quantisation, or dequantise it with the library that quantised it"
    # transformers derives the size of blocks from the number of factors, which fails if the last one is smaller.
    if found in _LOADED_WITH and (found != "fp8" or quantization.get("weight_block_size") is None):
        # Without save_original_format=False, the weights would be quantised again.
        loaded = f"from_pretrained(DIR, quantization_config={_LOADED_WITH[found]}(dequantize=True))"
        way = f"dequantise it with transformers, {loaded}.save_pretrained(NEW, save_original_format=False)"
    return UserError(
        f"{source}: {QUANTIZATION}.{key}: found {quantization.get(key)!r:.100}, expected "
        f"{' or '.join(map(repr, values))}: only {_METHODS[method].description} is read; {way}, and import the result"
    )


def is_quantised_with(config: Mapping[str, Any], method: str) -> bool:
    """Return whether a checked `config.json` describes that `quant_method`."""
    quantization = config.get(QUANTIZATION)
    return quantization is not None and quantization["quant_method"] == method


def unconverted_module(config: Mapping[str, Any], name: str) -> str | None:
    """Return the first module that contains a tensor and is listed as not quantised; * in its name is a wildcard."""
    parts = name.split(".")
    modules = [".".join(parts[:count]) for count in range(1, len(parts) + 1)]
    listed = sorted(listed for key in _UNCONVERTED for listed in config[QUANTIZATION].get(key) or ())
    return next((pattern for pattern in listed if any(fnmatchcase(module, pattern) for module in modules)), None)

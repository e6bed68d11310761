"""Time that the program of arXiv 2501.06589 takes to prefill a prompt and to decode, on H100s.

It serves a batch of equal prompts of `PROMPT` tokens and samples `NEW_TOKENS` for each, bf16, in CUDA graphs. These
properties, read from the authors' source, determine its times:

* Keys and values have `PROMPT + NEW_TOKENS` places from the start. Attention always covers all of them, expanded to all
  query heads, and writes the scores to memory (no flash kernel).
* Embedding and output head are whole on every rank, and prefill computes the logits of every position.
* With pipeline parallelism a token passes the stages one after another, so it takes as long as on one stage of all
  layers.

A layer takes the sum over its sub-blocks, with c the seconds of a sub-block, t those of an all-reduce, and s the share
of an overlap that a GPU gives back because the collective takes multiprocessors:

    reads late        max(c, t) + s min(c, t)      the all-reduce of its predecessor overlaps with it
    others            c + t
    no-comm           c

Parameters are in microseconds and GB/s; other values are in bytes, FLOPs and seconds. Measurements are few and uneven,
so every parameter starts from a prior value with a spread. A parameter that no measurement depends on keeps its value.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ladder_lab.cost.links import GIGABYTE_PER_SECOND, KILOBYTE, MEGABYTE, MICROSECOND, wire_bytes
from megatron_ladder.blueprint.model import ModelConfig
from megatron_ladder.blueprint.tensors import Branch, layer_tensors
from megatron_ladder.blueprint.wiring import SHARED_STREAM_MODES, WIRINGS, Wiring
from megatron_ladder.errors import UserError

PROMPT = 1024
NEW_TOKENS = 512
DECODED = NEW_TOKENS - 1
"""Tokens whose decoding is timed; prefill gives the first one."""
BYTES = 2
"""Size of a bf16 number."""
PEAK_FLOPS = 989e12
MEMORY_BYTES_PER_SECOND = 3.35e12
"""H100 SXM, NVIDIA's data sheet: dense bf16 FLOP/s, and HBM3."""
GPUS_PER_NODE = 8
NO_COMM = "no-comm"
"""Standard without all-reduces: wrong results, and the least time."""
SERVED_WIRINGS = (*SHARED_STREAM_MODES, NO_COMM)
SPREADS = {"prefill": (0.04, 0.03), "decode": (0.02, 0.012)}
"""Expected relative error that all wirings of a setting share, and that of one wiring alone."""
OUTLIER = 2.0
"""Residuals beyond so many spreads count with their magnitude instead of their square (Huber): the same setting,
measured twice, sometimes differs a lot."""


@dataclass(frozen=True)
class Parameter:
    """The prior of one parameter; the meaning states its unit.

    The spread is the standard deviation: of the logarithm for a positive parameter, which is varied by factors and
    keeps its sign, otherwise in the parameter's unit.
    """

    name: str
    value: float
    spread: float
    meaning: str
    positive: bool = True

    def at(self, position: float) -> float:
        """Return the value at this many spreads from the prior."""
        if self.positive:
            return self.value * math.exp(self.spread * position)
        return self.value + self.spread * position


def _glue(name: str, where: str, value: float, spread: float, unit: str) -> Parameter:
    return Parameter(name, value, spread, f"{where}, compared with no-comm, {unit} per layer", positive=False)


PARAMETERS = (
    Parameter("single_rate", 0.93, 0.05, "share of the memory's rate that weights are read at, batch 1"),
    Parameter("batch_rate", 0.89, 0.05, "the same, larger batches"),
    Parameter("cache_share", 0.83, 0.5, "expanded keys and values that a token reads, share of all at the full rate"),
    Parameter("single_floor", 34, 0.3, "kernels of a layer whatever its size, us, batch 1"),
    Parameter("batch_floor", 49, 0.3, "the same, batch 4"),
    Parameter("floor_growth", 2, 2, "growth of that for each doubling of the batch, us", positive=False),
    Parameter("attention_floor", 0.62, 0.02, "share of the floor that is the attention's"),
    Parameter("token", 110, 0.4, "per token, in addition to layers and head, us"),
    Parameter("sample", 5, 0.7, "growth of that per sample of the batch, us"),
    Parameter("nvlink_base", 4.1, 0.5, "all-reduce over NVLink: latency, us"),
    Parameter("nvlink_rank", 2.12, 0.5, "latency for each GPU, us"),
    Parameter("nvlink_root", 14, 0.5, "for the square root of its MB, us"),
    Parameter("nvlink_pair", 250, 0.3, "bandwidth of 2 GPUs, GB/s"),
    Parameter("nvlink_switch", 450, 0.25, "bandwidth of more, through the switch, GB/s"),
    Parameter("switch_base", 4.1, 0.5, "no P2P, more than 2 GPUs: taken off the latency, us"),
    Parameter("switch_rank", 6.05, 0.3, "latency for each GPU, us"),
    Parameter("switch_step", 1.16, 0.3, "for each further GPU and doubling of its size beyond 8 KB, us"),
    Parameter("switch_rate", 330, 0.25, "bandwidth, GB/s"),
    Parameter("host_base", 8, 0.4, "no P2P, 2 GPUs, through the host: latency, us"),
    Parameter("host_root", 89, 0.5, "for the square root of its MB, us"),
    Parameter("host_rate", 15.5, 0.3, "bandwidth, GB/s"),
    Parameter("network_base", 36.7, 0.2, "two nodes: latency, us"),
    Parameter("network_root", 41.5, 0.3, "for the square root of its MB, us"),
    Parameter("network_rate", 310, 0.3, "bandwidth, GB/s"),
    Parameter("network_slowdown", 2.25, 0.15, "all of that without P2P, times"),
    Parameter("contention", 0.57, 0.2, "share of an overlap given back to a large collective"),
    Parameter("contention_size", 0.33, 0.5, "size for which it is half of that, MB"),
    Parameter("host_contention", 0.25, 0.4, "the share where the host stages"),
    Parameter("flops_share", 0.58, 0.2, "share of peak FLOP/s that prefill's products reach"),
    Parameter("score_passes", 20, 0.3, "times that prefill moves the score matrix through memory"),
    Parameter("stream_passes", 8, 0.7, "times that a sub-block of prefill moves the stream through memory"),
    Parameter("prefill_floor", 170, 0.5, "kernels of a layer in prefill, us"),
    _glue("single_standard", "decode, batch 1: adds and norms of standard", 1, 2, "us"),
    _glue("single_ladder", "decode, batch 1: ladder", 3.5, 2, "us"),
    _glue("single_parallel", "decode, batch 1: parallel", -5, 2, "us"),
    _glue("batch_standard", "decode, larger batches: standard", 5.5, 3, "us"),
    _glue("batch_ladder", "decode, larger batches: ladder", 7, 3, "us"),
    _glue("batch_parallel", "decode, larger batches: parallel", -3, 3, "us"),
    Parameter("fused", 0.01, 0.015, "more time of parallel's wider products, batches above 1, share", positive=False),
    _glue("prefill_standard", "prefill: standard", 1, 2, "passes over the stream"),
    _glue("prefill_ladder", "prefill: ladder", 5, 4, "passes over the stream"),
    _glue("prefill_parallel", "prefill: parallel", 0, 2, "passes over the stream"),
)
"""Priors of the fit. The form and most values come from a fit to 170 published runs."""


@dataclass(frozen=True)
class Setting:
    """The configuration of one run."""

    model: ModelConfig
    p2p: bool
    tensor_parallel: int
    batch: int
    wiring: str


@dataclass(frozen=True)
class ServingTimes:
    """Seconds of a run, which decodes `DECODED` tokens."""

    prefill: float
    decode: float

    def tokens_per_second(self, batch: int) -> float:
        """Return the new tokens per second of the whole batch."""
        return batch * NEW_TOKENS / (self.prefill + self.decode)


def predict(setting: Setting, values: Mapping[str, float]) -> ServingTimes:
    """Predict a run from the values of all `PARAMETERS`, by name."""
    return ServingTimes(_prefill_seconds(setting, values), _decode_seconds(setting, values))


def fit_serving(runs: Mapping[str, Iterable[tuple[Setting, ServingTimes]]]) -> dict[str, float]:
    """Fit all parameters to measured runs; raise UserError if scipy is not installed.

    The runs of a group differ only in the wiring and were measured together. The prediction's error in what a group
    shares is expected to be larger than its error in the differences.
    """
    groups = [list(group) for group in runs.values()]

    def residuals(values: Mapping[str, float]) -> list[float]:
        found: list[float] = []
        for group in groups:
            pairs = [(predict(setting, values), measured) for setting, measured in group]
            for name, (together, apart) in SPREADS.items():
                errors = [math.log(getattr(p, name) / getattr(m, name)) for p, m in pairs]
                mean = sum(errors) / len(errors)
                found += [mean / together, *((error - mean) / apart for error in errors)]
        return found

    return _fit_parameters(PARAMETERS, residuals)


def _fit_parameters(
    parameters: Sequence[Parameter], residuals: Callable[[Mapping[str, float]], Sequence[float]]
) -> dict[str, float]:
    """Return the most likely values; residuals are differences to measurements, divided by their expected spreads."""
    try:
        # Imported here because scipy is part of the extra [lab].
        from scipy.optimize import least_squares
    except ImportError:
        raise UserError("scipy is not installed, which a fit needs: pip install scipy") from None

    def values(position: NDArray[np.float64]) -> dict[str, float]:
        return {p.name: p.at(x) for p, x in zip(parameters, position.tolist(), strict=True)}

    def errors(position: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.concatenate([np.array(residuals(values(position)), dtype=np.float64), position])

    found = least_squares(errors, np.zeros(len(parameters)), loss="huber", f_scale=OUTLIER)
    return values(found.x)


def _decode_seconds(setting: Setting, values: Mapping[str, float]) -> float:
    model, batch = setting.model, setting.batch
    kind = "single" if batch == 1 else "batch"
    rate = values[f"{kind}_rate"] * MEMORY_BYTES_PER_SECOND
    floor = values[f"{kind}_floor"] + (values["floor_growth"] * math.log2(batch / 4) if batch > 1 else 0.0)
    floor *= MICROSECOND
    weights = [BYTES * branch.weights_per_token / setting.tensor_parallel / rate for branch in _branches(model)]
    width = model.num_attention_heads * model.head_dim
    cache = 2 * BYTES * (PROMPT + NEW_TOKENS) * width * batch / setting.tensor_parallel / MEMORY_BYTES_PER_SECOND
    attention = weights[0] + values["cache_share"] * cache + values["attention_floor"] * floor
    mlp = weights[1] + (1 - values["attention_floor"]) * floor
    wiring = WIRINGS.get(setting.wiring)
    glue = 0.0 if wiring is None else values[f"{kind}_{_glue_of(wiring)}"] * MICROSECOND
    if batch > 1 and wiring is not None and wiring.one_norm:
        glue += values["fused"] * sum(weights)
    layer = _layer_seconds(setting, attention, mlp, BYTES * batch * model.hidden_size, values) + glue
    rest = BYTES * model.hidden_size * model.vocab_size / rate
    rest += (values["token"] + values["sample"] * batch) * MICROSECOND
    return DECODED * (model.num_layers * layer + rest)


def _prefill_seconds(setting: Setting, values: Mapping[str, float]) -> float:
    model, tokens, ranks = setting.model, PROMPT * setting.batch, setting.tensor_parallel
    flops = values["flops_share"] * PEAK_FLOPS
    floor = values["prefill_floor"] * MICROSECOND
    a_pass = BYTES * tokens * model.hidden_size / MEMORY_BYTES_PER_SECOND
    heads, places = model.num_attention_heads / ranks, PROMPT + NEW_TOKENS
    attention, mlp = (tokens * branch.product_flops / ranks / flops for branch in _branches(model))
    attention += 4 * tokens * places * heads * model.head_dim / flops
    attention += values["score_passes"] * BYTES * tokens * heads * places / MEMORY_BYTES_PER_SECOND
    attention += values["attention_floor"] * floor + values["stream_passes"] * a_pass
    mlp += (1 - values["attention_floor"]) * floor + values["stream_passes"] * a_pass
    wiring = WIRINGS.get(setting.wiring)
    glue = 0.0 if wiring is None else values[f"prefill_{_glue_of(wiring)}"] * a_pass
    layer = _layer_seconds(setting, attention, mlp, BYTES * tokens * model.hidden_size, values) + glue
    return model.num_layers * layer + 2 * tokens * model.hidden_size * model.vocab_size / flops


def _branches(model: ModelConfig) -> list[Branch]:
    return [branch for sub_block in layer_tensors(model)[0] for branch in sub_block.branches]


def _glue_of(wiring: Wiring) -> str:
    if wiring.one_norm:
        return "parallel"
    return "ladder" if wiring.late else "standard"


def _layer_seconds(
    setting: Setting, attention: float, mlp: float, num_bytes: int, values: Mapping[str, float]
) -> float:
    """Return the seconds of a layer by the table at the top of this file."""
    t = _all_reduce_seconds(num_bytes, setting.tensor_parallel, setting.p2p, values)
    if setting.wiring == NO_COMM or t == 0:
        return attention + mlp
    staged = not setting.p2p and setting.tensor_parallel == 2
    share = values["host_contention" if staged else "contention"]
    share *= num_bytes / (num_bytes + values["contention_size"] * MEGABYTE)
    wiring = WIRINGS[setting.wiring]
    computing = (attention + mlp,) if wiring.one_norm else (attention, mlp)
    return sum(
        max(c, t) + share * min(c, t) if kind in wiring.late else c + t
        for c, kind in zip(computing, wiring.sub_blocks, strict=True)
    )


def _all_reduce_seconds(num_bytes: int, ranks: int, p2p: bool, values: Mapping[str, float]) -> float:
    """Return the time of an all-reduce of `num_bytes` on each of `ranks` GPUs, 8 per node.

    latency + sqrt(root^2 + wire^2), with root = r sqrt(S / MB) and wire the ring's bytes at the bandwidth; without P2P
    and above 2 GPUs latency + steps + wire, with steps = a (n - 1) log2(1 + S / 8 KB).
    """
    if ranks == 1:
        return 0.0

    def on_wire(rate: str) -> float:
        return wire_bytes(num_bytes, ranks) / (values[rate] * GIGABYTE_PER_SECOND)

    def root(name: str) -> float:
        return values[name] * MICROSECOND * math.sqrt(num_bytes / MEGABYTE)

    if ranks > GPUS_PER_NODE:
        seconds = values["network_base"] * MICROSECOND + math.hypot(root("network_root"), on_wire("network_rate"))
        return seconds if p2p else values["network_slowdown"] * seconds
    if p2p:
        latency = (values["nvlink_base"] + values["nvlink_rank"] * ranks) * MICROSECOND
        return latency + math.hypot(root("nvlink_root"), on_wire("nvlink_pair" if ranks == 2 else "nvlink_switch"))
    if ranks == 2:
        return values["host_base"] * MICROSECOND + math.hypot(root("host_root"), on_wire("host_rate"))
    latency = (values["switch_rank"] * ranks - values["switch_base"]) * MICROSECOND
    steps = values["switch_step"] * MICROSECOND * (ranks - 1) * math.log2(1 + num_bytes / (8 * KILOBYTE))
    return latency + steps + on_wire("switch_rate")

"""`tools/plan.py inference`: what each wiring would gain for a model on a machine."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from ladder_lab.bench.sizes import find_size
from ladder_lab.cost.inference import InferenceRequest, InferenceTimes, inference_memory, predict_inference
from ladder_lab.cost.machines import GPUS, LINK_ERROR, PRESETS, LinkPreset
from ladder_lab.markdown import markdown_table
from ladder_lab.plan.layouts import SMALLEST_DIFFERENCE, verdict
from ladder_lab.plan.options import InferenceOptions, write_output
from ladder_lab.wirings import NAMED_WIRINGS
from megatron_ladder.blueprint.model import ModelConfig, tensor_parallel_errors
from megatron_ladder.errors import UserError, raise_user_errors

USABLE_MEMORY = 0.9
"""Share of a GPU's memory for weights and cache; the rest is for activations, CUDA and NCCL."""


@dataclass(frozen=True)
class _Prediction:
    """One wiring."""

    wiring: str
    times: InferenceTimes
    tokens_per_second: float
    decode_step_seconds: float
    speed_up: float
    """Over standard, in tokens per second of the whole request."""
    speed_up_range: tuple[float, float]


def print_inference(options: InferenceOptions) -> None:
    """Print the predictions and write the file that the options name; raise UserError for an impossible layout."""
    if options.measurements is not None:
        _print_errors(options.measurements)
        return
    request = _request_of(options)
    models = _wirings(request.model, options)
    predictions = _predict_wirings(request, models)
    memory, link = inference_memory(request), request.reduce_seconds(request.batch)
    gigabytes = f"{memory.total / 1e9:.1f} = {memory.weights / 1e9:.1f} weights + {memory.cache / 1e9:.1f} cache"
    usable = USABLE_MEMORY * request.gpu.memory_bytes
    fits = "" if memory.total <= usable else f"; DOES NOT FIT {usable / 1e9:.0f} usable GB: raise --tp or lower --batch"
    print(
        f"{options.model} on {request.ranks} x {request.gpu.name} over {request.link.name}, batch {request.batch}, "
        f"{request.prompt} prompt tokens, {request.new_tokens} new tokens\n"
        f"GB per GPU: {gigabytes}{fits}\n"
        f"one all-reduce: {1e6 * link:.0f} us in a decode step, "
        f"{1e6 * request.reduce_seconds(request.batch * request.prompt):.0f} us in prefill\n"
    )
    rows = [
        {
            "wiring": one.wiring,
            "tokens/s": f"{one.tokens_per_second:.1f}",
            "first token ms": f"{1e3 * one.times.prefill:.1f}",
            "decode step ms": f"{1e3 * one.decode_step_seconds:.2f}",
            "speed-up": f"{one.speed_up:.2f}",
            "range": "{:.2f} to {:.2f}".format(*one.speed_up_range),
        }
        for one in predictions.values()
    ]
    print(markdown_table(rows))
    print(f"\n{_recommend(predictions)}\n")
    print(
        f"The range of a speed-up is for all-reduces {LINK_ERROR:g} times faster to slower. no-comm leaves them out: "
        "wrong results, and the bound. docs/plan.md states the error of tokens/s on public measurements.\n"
        f"  {request.gpu.name}: {request.gpu.source}\n"
        f"  {request.link.name}: {request.link.source}"
    )
    if options.json is not None:
        report = {"memory": asdict(memory), "wirings": [asdict(one) for one in predictions.values()]}
        write_output(options.json, json.dumps(report, indent=1) + "\n")


def _predict_wirings(request: InferenceRequest, models: Mapping[str, ModelConfig]) -> dict[str, _Prediction]:
    """Predict the model in several wirings, among them `standard`; `no-comm` is added."""

    def times_of(link_factor: float) -> dict[str, InferenceTimes]:
        own = {
            name: predict_inference(replace(request, model=model, reduce_factor=link_factor))
            for name, model in models.items()
        }
        return own | {"no-comm": predict_inference(replace(request, model=models["standard"], reduce_factor=0.0))}

    here, fast, slow = (times_of(factor) for factor in (1.0, 1 / LINK_ERROR, LINK_ERROR))
    found = {}
    for name, times in here.items():
        ratios = [link["standard"].total / link[name].total for link in (fast, here, slow)]
        found[name] = _Prediction(
            name,
            times,
            request.batch * request.new_tokens / times.total,
            times.decode / max(request.new_tokens - 1, 1),
            ratios[1],
            (min(ratios), max(ratios)),
        )
    return found


def _recommend(predictions: Mapping[str, _Prediction]) -> str:
    """Say in one sentence which wiring to train or adapt to."""
    times = [(name, 1 / one.speed_up) for name, one in predictions.items() if name != "no-comm"]
    best = max(one.speed_up for name, one in predictions.items() if name != "no-comm")
    bound = predictions["no-comm"].speed_up
    if min(best, bound) <= 1 + SMALLEST_DIFFERENCE:
        return f"Recommendation: no gain; without any all-reduce the speed-up would be {bound:.2f}."
    ladder = predictions["ladder"]
    adapt = f"adapting a checkpoint to ladder gives {ladder.speed_up:.2f}"
    if ladder.speed_up <= 1 + SMALLEST_DIFFERENCE:
        adapt = "adapting a checkpoint to ladder gives no gain"
    return f"Recommendation: fastest {verdict(times)}, {best:.2f}; {adapt}."


def _print_errors(path: Path) -> None:
    """Print measured and predicted tokens per second of decoding, one row for each of a CSV file.

    Raises:
        UserError: the file cannot be read, or a row is not a measurement.
    """
    # Imported here because pandas is part of the extra [lab] and slow to import.
    import pandas as pd

    try:
        table = pd.read_csv(path, dtype=str, keep_default_na=False)
        predicted = pd.Series([_measured_request(row) for row in table.to_dict("records")], table.index)
        measured = table.tokens_per_second.astype(float)
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise UserError(f"--measurements {path}: not a table of measurements: {error!r}") from None
    errors = 100 * (predicted / measured - 1)
    table = table.assign(
        GPUs=table.tp + " x " + table.gpu,
        bits=table.weight_bits,
        **{
            "measured tokens/s": measured.map("{:.1f}".format),
            "predicted": predicted.map("{:.1f}".format),
            "error": errors.map("{:+.0f} %".format),
        },
    )
    shown = ["model", "GPUs", "link", "batch", "bits", "measured tokens/s", "predicted", "error"]
    others = table.columns.difference([*shown, "gpu", "tp", "prompt", "generate", "weight_bits", "tokens_per_second"])
    print(markdown_table(table[[*shown, *others]].to_dict("records")))
    sizes = errors.abs()
    print(
        f"\nmedian error {sizes.median():.0f} %, 90th percentile {sizes.quantile(0.9, 'higher'):.0f} %, median of "
        f"signed errors {errors.median():+.0f} %, of {len(errors)}"
    )


def _measured_request(row: Mapping[str, str]) -> float:
    """Return the predicted tokens per second of decoding for a row of measurements."""
    ranks, batch, prompt, new_tokens = (int(row[name]) for name in ("tp", "batch", "prompt", "generate"))
    model, gpu, link = find_size(row["model"]), GPUS[row["gpu"]], PRESETS[row["link"]]
    request = InferenceRequest(model, gpu, link, ranks, batch, prompt, new_tokens, float(row["weight_bits"]))
    return request.batch * (request.new_tokens - 1) / predict_inference(request).decode


def _request_of(options: InferenceOptions) -> InferenceRequest:
    model, link = find_size(options.model), _link_of(options)
    errors = tensor_parallel_errors(model, options.tp)
    raise_user_errors(f"--tp {options.tp} does not divide --model {options.model}: {error}" for error in errors)
    try:
        link.seconds(1, options.tp)
    except ValueError as error:
        raise UserError(f"--link {options.link}: {error}: give --link-latency-us and --link-bandwidth-gbs") from None
    return InferenceRequest(
        model, GPUS[options.gpu], link, options.tp, options.batch, options.prompt, options.generate, options.weight_bits
    )


def _link_of(options: InferenceOptions) -> LinkPreset:
    """Return the preset, or the link that the command line describes."""
    latency, rate = options.link_latency_us, options.link_bandwidth_gbs
    if latency is None or rate is None:
        return PRESETS[options.link]
    return LinkPreset(
        "command line", range(2, options.tp + 1), lambda num_bytes, ranks: (latency, 0.0, rate), "command line"
    )


def _wirings(model: ModelConfig, options: InferenceOptions) -> dict[str, ModelConfig]:
    """Return the model in every wiring, by name; the hybrid's last layers are ladder layers."""
    layers = model.num_layers
    late = layers // 2 if options.ladder_layers is None else options.ladder_layers
    if late > layers:
        raise UserError(f"--ladder-layers {late}: the model has {layers} layers")
    found = {
        name: wiring.of(model, options.tp)
        for name, wiring in NAMED_WIRINGS.items()
        if wiring.fewest_ranks <= options.tp and wiring.is_planned
    }
    found[f"hybrid-{late}"] = replace(found["ladder"], ladder_layers=tuple(range(layers - late, layers)))
    return found

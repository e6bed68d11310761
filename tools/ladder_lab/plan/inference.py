"""`tools/plan.py inference`: what each wiring would gain for a model on a machine."""

import csv
import json
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from ladder_lab.bench.sizes import find_size
from ladder_lab.cost.inference import InferenceRequest, inference_memory, predict_inference
from ladder_lab.cost.machines import GPUS, LINK_ERROR, PRESETS, LinkPreset
from ladder_lab.cost.serving import ServingTimes
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
    times: ServingTimes
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

    def times_of(link_factor: float) -> dict[str, ServingTimes]:
        own = {
            name: predict_inference(replace(request, model=model, reduce_factor=link_factor))
            for name, model in models.items()
        }
        return own | {"no-comm": predict_inference(replace(request, model=models["standard"], reduce_factor=0.0))}

    def total(times: ServingTimes) -> float:
        return times.prefill + times.decode

    here, fast, slow = (times_of(factor) for factor in (1.0, 1 / LINK_ERROR, LINK_ERROR))
    found = {}
    for name, times in here.items():
        ratios = [total(link["standard"]) / total(link[name]) for link in (fast, here, slow)]
        found[name] = _Prediction(
            name,
            times,
            request.batch * request.new_tokens / total(times),
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


COLUMNS = ("model", "gpu", "tp", "link", "batch", "prompt", "generate", "weight_bits", "tokens_per_second")


def _print_errors(path: Path) -> None:
    """Print measured and predicted tokens per second of decoding, one row for each of a CSV file.

    Raises:
        UserError: the file cannot be read, or a row is not a measurement.
    """
    rows, errors = [], []
    for number, row in enumerate(_read_measurements(path), start=1):
        try:
            request = _measured_request(row)
            measured = float(row["tokens_per_second"])
            predicted = request.batch * (request.new_tokens - 1) / predict_inference(request).decode
            errors.append(predicted / measured - 1)
        except (ValueError, ZeroDivisionError) as error:
            raise UserError(f"--measurements {path}, row {number}: {error}") from None
        setting = [row["model"], f"{row['tp']} x {row['gpu']}", row["link"], row["batch"], row["weight_bits"]]
        cells = [*setting, f"{measured:.1f}", f"{predicted:.1f}", f"{100 * errors[-1]:+.0f} %"]
        others = [text for name, text in row.items() if name not in COLUMNS]
        rows.append(dict(zip([*HEAD, *(name for name in row if name not in COLUMNS)], [*cells, *others], strict=True)))
    print(markdown_table(rows))
    sizes = sorted(map(abs, errors))
    median, high = 100 * statistics.median(sizes), 100 * sizes[min(len(sizes) * 9 // 10, len(sizes) - 1)]
    print(
        f"\nmedian error {median:.0f} %, 90th percentile {high:.0f} %, median of signed errors "
        f"{100 * statistics.median(errors):+.0f} %, of {len(errors)}"
    )


HEAD = ("model", "GPUs", "link", "batch", "bits", "measured tokens/s", "predicted", "error")


def _measured_request(row: Mapping[str, str]) -> InferenceRequest:
    for column, known in (("gpu", GPUS), ("link", PRESETS)):
        if row[column] not in known:
            raise ValueError(f"{column} {row[column]!r} is not one of {', '.join(known)}")
    return InferenceRequest(
        find_size(row["model"]),
        GPUS[row["gpu"]],
        PRESETS[row["link"]],
        int(row["tp"]),
        int(row["batch"]),
        int(row["prompt"]),
        int(row["generate"]),
        float(row["weight_bits"]),
    )


def _read_measurements(path: Path) -> list[dict[str, str]]:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, restval="")
            rows = list(reader)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"--measurements {path}: cannot be read: {error}") from None
    missing = [name for name in COLUMNS if name not in (reader.fieldnames or ())]
    if missing or not rows:
        problem = f"no column {', '.join(missing)}" if missing else "no rows below the first line"
        raise UserError(f"--measurements {path}: {problem}; expected the columns {', '.join(COLUMNS)}")
    raise_user_errors(
        f"--measurements {path}, row {number}: more cells than the first line has columns: remove them"
        for number, row in enumerate(rows, 1)
        if None in row
    )
    return rows


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

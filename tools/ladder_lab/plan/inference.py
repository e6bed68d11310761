"""`tools/plan.py inference`: what each wiring would gain for a model on a machine."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from ladder_lab.cost.inference import InferenceRequest, InferenceTimes, inference_memory, predict_inference
from ladder_lab.cost.machines import LINK_ERROR
from ladder_lab.output import markdown_table, write_json
from ladder_lab.plan.layouts import SMALLEST_DIFFERENCE, verdict
from ladder_lab.plan.options import QUALITY, InferenceOptions, MachineOptions
from ladder_lab.wirings import NAMED_WIRINGS
from megatron_ladder.blueprint.model import ModelConfig, tensor_parallel_errors
from megatron_ladder.blueprint.model_flags import parse_layers
from megatron_ladder.errors import UserError, counted, raise_user_errors, size_text

USABLE_MEMORY = 0.9
"""Share of a GPU's memory for weights and states; the rest is for activations, CUDA and NCCL."""


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


def print_inference(
    name: str,
    model: ModelConfig,
    machine_options: MachineOptions,
    options: InferenceOptions,
    ladder_layers: str | None = None,
) -> None:
    """Print the predictions and write the file that the options name; raise UserError for an impossible layout.

    `ladder_layers` are those of the hybrid, in the notation of the flag; by default the upper half.
    """
    tp = options.tp
    errors = tensor_parallel_errors(model, tp)
    raise_user_errors(f"--tp {tp} does not divide {name}: {error}" for error in errors)
    if options.draft_tokens:
        model = replace(model, mtp_num_layers=1)
    request = InferenceRequest(
        model,
        machine_options.machine(tp),
        tp,
        options.batch,
        options.prompt,
        options.generate,
        options.weight_bits,
        attention=options.attention,
        draft_tokens=options.draft_tokens or 0,
        accepted_length=options.accepted_length or 1.0,
    )
    # Predictions, also with the all-reduces of servers, which use NCCL between boxes.
    late = _hybrid_layers(model, ladder_layers)
    models = _wirings(model, tp, late)
    predictions = _predict_wirings(request, models)
    machine = request.machine
    servers = machine.with_one_shot() if 1 < tp <= machine.per_box else None
    fast = None if servers is None else replace(request, machine=servers)
    with_one_shot = {} if fast is None else _predict_wirings(fast, models)
    # The report.
    memory = inference_memory(request)
    print(
        f"{name} on {machine_options.place(request.ranks)}, batch {request.batch}, "
        f"{request.prompt} prompt tokens, "
        f"{request.new_tokens} new tokens\n"
        f"GB per GPU: {memory.total / 1e9:.1f} = {memory.weights / 1e9:.1f} weights + {memory.cache / 1e9:.1f} cache, "
        f"{size_text(int(memory.cache / request.batch))} for each sequence\n"
    )
    sentence = _answer(request, predictions, late)
    if fast is not None and _fits(request):
        sentence += f" {_one_shot_answer(request, fast, with_one_shot)}"
    if request.draft_tokens and _fits(request):
        sentence += f" {_drafting_answer(request, predictions, models)}"
    if _fits(request):
        rows = [
            {
                "wiring": prediction.wiring,
                "tokens/s": f"{prediction.tokens_per_second:.1f}",
                "first token ms": f"{1e3 * prediction.times.prefill:.1f}",
                "decode step ms": f"{1e3 * prediction.decode_step_seconds:.2f}",
                "speed-up": f"{prediction.speed_up:.2f}",
                "range": "{:.2f} to {:.2f}".format(*prediction.speed_up_range),
            }
            for prediction in predictions.values()
        ]
        if with_one_shot:
            for row in rows:
                row["one-shot"] = f"{with_one_shot[row['wiring']].speed_up:.2f}"
        print(
            f"one all-reduce: {1e6 * request.reduce_seconds(request.batch):.0f} us in a decode step, "
            f"{1e6 * request.reduce_seconds(request.batch * request.prompt):.0f} us in prefill\n\n"
            f"{markdown_table(rows)}\n\n{sentence} {QUALITY}\n\n"
            f"The range of a speed-up is for all-reduces {LINK_ERROR:g} times faster to slower. no-comm is the "
            "fastest wiring without all-reduces: wrong results, and the bound. docs/plan.md states the error of "
            f"tokens/s on public measurements.\n{machine.describe(request.ranks)}"
            + (f"\n  {fast.machine.link.name}: {fast.machine.link.source}" if fast is not None else "")
        )
    else:
        print(sentence)
    report = {"memory": asdict(memory), "fits": _fits(request), "answer": sentence}
    report |= {"wirings": [asdict(prediction) for prediction in predictions.values()]}
    report |= {"one_shot": [asdict(prediction) for prediction in with_one_shot.values()]}
    write_json(options.json, report)


def _fits(request: InferenceRequest) -> bool:
    return inference_memory(request).total <= USABLE_MEMORY * request.machine.gpu.memory_bytes


def _predict_wirings(request: InferenceRequest, models: Mapping[str, ModelConfig]) -> dict[str, _Prediction]:
    """Predict the model in several wirings, among them `standard`; `no-comm`, their common bound, is added."""

    def times_of(link_factor: float) -> dict[str, InferenceTimes]:
        return {
            name: predict_inference(replace(request, model=model, reduce_factor=link_factor))
            for name, model in models.items()
        }

    bound = {"no-comm": min(times_of(0.0).values(), key=lambda times: times.total)}
    here, fast, slow = (times_of(factor) | bound for factor in (1.0, 1 / LINK_ERROR, LINK_ERROR))
    predictions = {}
    for name, times in here.items():
        ratios = [link["standard"].total / link[name].total for link in (fast, here, slow)]
        predictions[name] = _Prediction(
            name,
            times,
            request.batch * request.new_tokens / times.total,
            times.decode / max(request.new_tokens - 1, 1),
            ratios[1],
            (min(ratios), max(ratios)),
        )
    return predictions


def _answer(request: InferenceRequest, predictions: Mapping[str, _Prediction], late: Sequence[int]) -> str:
    """Say in one sentence whether to train or adapt to a wiring."""
    usable = USABLE_MEMORY * request.machine.gpu.memory_bytes / 1e9
    if not _fits(request):
        more = (ranks for ranks in range(request.ranks, 65) if not tensor_parallel_errors(request.model, ranks))
        enough = next((ranks for ranks in more if _fits(replace(request, ranks=ranks))), None)
        fix = "lower --batch, --prompt or --weight-bits" if enough is None else f"--tp {enough} is enough"
        return f"Answer: no. The model does not fit the {usable:.0f} usable GB of a GPU; {fix}."
    if request.ranks == 1:
        return "Answer: no. A single GPU has no all-reduce to hide."
    others = {name: prediction for name, prediction in predictions.items() if name != "no-comm"}
    fastest = max(others.values(), key=lambda prediction: prediction.tokens_per_second)
    replica = _fastest_replicas(request, late)
    if replica is not None and replica.tokens_per_second >= fastest.tokens_per_second:
        return (
            f"Answer: one replica per box. TP {request.machine.per_box} inside each box generates "
            f"{replica.tokens_per_second:.1f} tokens/s in {replica.wiring}, {replica.speed_up:.2f} times standard; TP "
            f"{request.ranks} across boxes generates {fastest.tokens_per_second:.1f}."
        )
    bound = predictions["no-comm"].speed_up
    if min(fastest.speed_up, bound) <= 1 + SMALLEST_DIFFERENCE:
        return f"Answer: no. No wiring gains; without any all-reduce the speed-up would be {bound:.2f}."
    hybrid = next(prediction for name, prediction in predictions.items() if name.startswith("hybrid"))
    layers = hybrid.wiring.removeprefix("hybrid-")
    leader = verdict([(name, 1 / prediction.speed_up) for name, prediction in others.items()])
    return (
        f"Answer: yes. Adapting {layers} of {request.model.num_layers} layers to ladder gives {hybrid.speed_up:.2f}, "
        f"all of them {predictions['ladder'].speed_up:.2f}; trained from scratch, the fastest wiring ({leader}) "
        f"gives {fastest.speed_up:.2f} = {fastest.tokens_per_second:.1f} tokens/s; the bound is {bound:.2f}."
    )


def _one_shot_answer(
    request: InferenceRequest, fast: InferenceRequest, with_one_shot: Mapping[str, _Prediction]
) -> str:
    """Say in one sentence what is left to gain on a server whose all-reduces are not NCCL's."""
    before, after = (1e6 * server.reduce_seconds(server.batch) for server in (request, fast))
    names = "ladder", "ladder-parallel", "no-comm"
    ladder, parallel, bound = (f"{with_one_shot[name].speed_up:.2f}" for name in names)
    return (
        f"With the all-reduces of SGLang or vLLM (one-shot, {after:.0f} us instead of {before:.0f}), ladder gives "
        f"{ladder}, ladder-parallel {parallel}; the bound is {bound}."
    )


def _drafting_answer(
    request: InferenceRequest, predictions: Mapping[str, _Prediction], models: Mapping[str, ModelConfig]
) -> str:
    """Say in one sentence what drafts give, and what ladder would gain without them."""
    without = _predict_wirings(replace(request, draft_tokens=0, accepted_length=1.0), models)
    drafting, plain = predictions["standard"].tokens_per_second, without["standard"].tokens_per_second
    ladder, bound = (f"{without[name].speed_up:.2f}" for name in ("ladder", "no-comm"))
    return (
        f"With {counted(request.draft_tokens, 'draft')} and {request.accepted_length:g} tokens a step, standard "
        f"generates {drafting / plain:.2f} times as fast as without drafts, where ladder gives {ladder} and the bound "
        f"is {bound}."
    )


def _fastest_replicas(request: InferenceRequest, late: Sequence[int]) -> _Prediction | None:
    """Return the fastest wiring of one replica in each box, with the tokens per second of all; None if none fits."""
    per_box = request.machine.per_box
    boxes = request.ranks // per_box
    if boxes < 2 or tensor_parallel_errors(request.model, per_box):
        return None
    inside = replace(request, ranks=per_box, batch=math.ceil(request.batch / boxes))
    if not _fits(inside):
        return None
    predictions = _predict_wirings(inside, _wirings(request.model, per_box, late))
    predictions.pop("no-comm")
    best = max(predictions.values(), key=lambda prediction: prediction.tokens_per_second)
    return replace(best, tokens_per_second=best.tokens_per_second * request.batch / inside.batch)


def _hybrid_layers(model: ModelConfig, ladder_layers: str | None) -> tuple[int, ...]:
    """Return the ladder layers of the hybrid; raise UserError for a text that names none."""
    try:
        layers = parse_layers(str(model.num_layers // 2) if ladder_layers is None else ladder_layers, model.num_layers)
    except ValueError as error:
        raise UserError(f"--ladder-layers {ladder_layers}: {error}") from None
    if not layers and ladder_layers is not None:
        raise UserError(f"--ladder-layers {ladder_layers}: the hybrid would be standard: give one layer or more")
    return layers


def _wirings(model: ModelConfig, ranks: int, late: Sequence[int]) -> dict[str, ModelConfig]:
    """Return the model in every wiring, by name; the hybrid has the `late` layers as ladder layers."""
    models = {
        name: wiring.of(model, ranks)
        for name, wiring in NAMED_WIRINGS.items()
        if wiring.is_planned and wiring.fits(model, ranks)
    }
    models[f"hybrid-{len(late)}"] = replace(models["ladder"], ladder_layers=tuple(late))
    return models

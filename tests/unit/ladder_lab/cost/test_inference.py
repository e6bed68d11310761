"""The model of generation compared with arithmetic written out."""

import csv
import functools
import math
import statistics
from dataclasses import replace
from typing import Literal

import pytest
import torch

from examples.paper.speed_report import GENERATE, read_published
from ladder_lab.bench.sizes import SIZES
from ladder_lab.cost import inference
from ladder_lab.cost.inference import EXPERTS_FLOOR, InferenceRequest, inference_memory, predict_inference
from ladder_lab.cost.machines import PRESETS, Machine
from ladder_lab.wirings import NAMED_WIRINGS
from megatron_ladder.blueprint.specs import padded_vocab_size
from megatron_ladder.model.mixers.mixer import States
from tests.helpers.commands import REPOSITORY_ROOT

LLAMA = SIZES["llama-8b"]
H100 = Machine.usual("h100")
REQUEST = InferenceRequest(LLAMA, H100, 1, batch=1, prompt=1000, new_tokens=201)


def step(request: InferenceRequest) -> float:
    return predict_inference(request).decode / (request.new_tokens - 1)


def test_wirings_differ_by_their_reduces_and_their_adds() -> None:
    request = replace(REQUEST, machine=replace(H100, link=PRESETS["no-p2p"]), ranks=8)
    t = request.reduce_seconds(1)
    assert t == pytest.approx((-4.1 + 6.05 * 8 + 1.16 * 7) * 1e-6)
    without = step(replace(request, reduce_factor=0.0))
    # Two for each layer, one for the embedding, one for the gather of the logits.
    assert step(request) - without == pytest.approx((2 * 32 + 2) * t)
    desync = replace(request, model=NAMED_WIRINGS["desync-4x"].of(LLAMA, 8))
    assert step(desync) - without == pytest.approx((16 + 2) * t, rel=0.01)
    # Every sub-block but the last hides less than t, so the wire determines the time.
    ladder = replace(request, model=NAMED_WIRINGS["ladder"].of(LLAMA, 1))
    assert 64 * t < step(ladder) < 0.75 * step(request)
    hybrid = replace(ladder, model=replace(ladder.model, ladder_layers=tuple(range(16, 32))))
    assert step(hybrid) == pytest.approx((step(ladder) + step(request)) / 2, rel=0.03)


def test_a_step_with_drafts_reads_the_model_once_and_the_head_for_each() -> None:
    drafting = replace(REQUEST, model=replace(LLAMA, mtp_num_layers=1), draft_tokens=2, accepted_length=2.5)
    rate = 0.923 * 3.35e12
    outside = 2 * 4096 * 128256 / rate + (inference.TOKEN + inference.SAMPLE) * 1e-6
    # Three tokens compute for less time than the matrices take from memory.
    layer = (step(REQUEST) - outside) / 32
    draft = 2 * 2 * 4096 * 4096 / rate + layer + outside
    assert 2.5 * step(drafting) == pytest.approx(step(REQUEST) + 2 * draft, rel=1e-3)
    # Those of many short sequences compute longer.
    many = replace(drafting, batch=512, prompt=16, new_tokens=17)
    assert 2.5 * step(many) > 2.5 * step(replace(many, draft_tokens=0, accepted_length=1.0))


@pytest.mark.parametrize("size", ["llama-8b", "qwen3.6-35b-a3b", "gpt-oss-20b"])
def test_memory_of_drafts_is_what_generation_allocates(size: str) -> None:
    model = replace(SIZES[size], mtp_num_layers=1)
    for drafts in (1, 3):
        request = replace(REQUEST, model=model, ranks=2, draft_tokens=drafts, accepted_length=1.5)
        allocate = functools.partial(States.allocate, model, 2, 1, 1201, torch.bfloat16, torch.device("meta"), drafts)
        assert inference_memory(request).cache == allocate().slot_bytes + allocate(of_head=True).slot_bytes


def test_memory_of_a_rank() -> None:
    request = replace(REQUEST, ranks=16, batch=3)
    memory = inference_memory(request)
    # Eight key-value heads: two ranks hold each.
    matrices = 4096 * (4096 + 4096) / 16 + 4096 * 2 * 128 + 3 * 4096 * 14336 / 16
    whole = 65 * 4096
    assert memory.weights == 2 * (32 * matrices + 2 * 4096 * 129024 / 16 + whole)
    assert memory.cache == 2 * 2 * 128 * 32 * 3 * 1201
    assert inference_memory(replace(request, weight_bits=4)).weights < 0.4 * memory.weights
    # Norms are not quantised, also where every rank has a row of them.
    desync = replace(request, model=NAMED_WIRINGS["desync-4x"].of(LLAMA, 16))
    assert inference_memory(replace(desync, weight_bits=4)).weights == memory.weights - 2 * 32 * matrices * 12 / 16
    widths = {"kv_lora_rank": 512, "qk_nope_head_dim": 96, "qk_rope_head_dim": 32, "num_key_value_heads": 1}
    windows = replace(LLAMA, window_size=256, window_layers=tuple(range(24)))
    windowed = inference_memory(replace(request, model=windows))
    assert windowed.cache == 2 * 2 * 128 * 3 * (8 * 1201 + 24 * 256)
    latent = replace(request, model=replace(LLAMA, **widths))
    assert inference_memory(latent).cache == 2 * (512 + 32) * 32 * 3 * 1201


@pytest.mark.parametrize("batch", [1, 8])
def test_a_step_reads_the_weights_of_every_layer(batch: int) -> None:
    """The first of 46 layers is dense; the others read their shared expert, and the expected number of the 128."""
    glm = replace(REQUEST, model=SIZES["glm-4.5-air"], batch=batch)
    fast = replace(glm, machine=replace(H100, gpu=replace(H100.gpu, memory_bytes_per_second=6.7e12)))
    attention, mlp, expert, router = 2 * 4096 * 128 * (96 + 8), 3 * 4096 * 10944, 3 * 4096 * 1408, 128 * 4096
    routed = 128 * (1 - (1 - 8 / 128) ** batch) + 1
    head = padded_vocab_size(151552, 1) * 4096
    weights = 46 * attention + mlp + 45 * (routed * expert + router) + head
    cache = batch * 1100.5 * 2 * 8 * 128 * 46
    expected = 2 * (weights / (0.923 if batch == 1 else 0.876) + cache) / 6.7e12
    assert step(glm) - step(fast) == pytest.approx(expected)


@pytest.mark.parametrize(("ranks", "batch"), [(1, 1), (8, 4), (16, 1)])
def test_a_step_reads_whole_latents_and_the_matrices_that_make_them(ranks: int, batch: int) -> None:
    """DeepSeek-V3 on memory so slow that only reading counts. Latents, their matrices and routers are whole."""
    rate = 1e9
    deepseek = replace(REQUEST, model=SIZES["deepseek-v3"], ranks=ranks, batch=batch, reduce_factor=0.0)
    machines = [replace(H100, gpu=replace(H100.gpu, memory_bytes_per_second=one)) for one in (rate, 2 * rate)]
    whole = 7168 * (1536 + 512 + 64)
    of_heads = 128 * (1536 * 192 + 512 * (128 + 128) + 128 * 7168)
    expert = 3 * 7168 * 2048
    routed = 256 * (1 - (1 - 8 / 256) ** batch) + 1
    mlps = (3 * 3 * 7168 * 18432 + 58 * routed * expert) / ranks + 58 * 256 * 7168
    head = padded_vocab_size(129280, ranks) * 7168 / ranks
    weights = 61 * (whole + of_heads / ranks) + mlps + head
    cache = batch * 1100.5 * 576 * 61
    expected = 2 * (weights / (0.923 if batch == 1 else 0.876) + cache) / rate
    slow, fast = (step(replace(deepseek, machine=machine)) for machine in machines)
    assert slow - fast == pytest.approx(expected / 2)


@pytest.mark.parametrize(("ranks", "key_heads"), [(1, 16), (4, 4), (32, 1)])
def test_a_step_reads_and_writes_states_of_fixed_size(ranks: int, key_heads: int) -> None:
    """Qwen3.6-35B-A3B: 10 layers have keys and values, and 30 the inputs of convolutions, and matrices in fp32."""
    hybrid = replace(REQUEST, model=SIZES["qwen3.6-35b-a3b"], ranks=ranks, batch=3)
    value_heads = 32 // ranks
    inputs, matrices = 3 * (2 * key_heads + value_heads) * 128, value_heads * 128 * 128
    fixed = 30 * (2 * inputs + 4 * matrices)
    for prompt in (799, 99_799):
        request = replace(hybrid, prompt=prompt)
        keys_and_values = 10 * 2 * max(1, 2 // ranks) * 256 * 2
        assert inference_memory(request).cache == 3 * (fixed + (prompt + 201) * keys_and_values)
    for gpu in (H100.gpu, replace(H100.gpu, memory_bytes_per_second=6.7e12)):
        narrow = replace(hybrid, reduce_factor=0.0, machine=replace(H100, gpu=gpu))
        wide = replace(narrow, model=replace(narrow.model, linear_conv_kernel_dim=1004))
        more = 30 * 2 * 1000 * (2 * key_heads + value_heads) * 128
        read_once = 3 * more / gpu.memory_bytes_per_second
        assert step(wide) - step(narrow) == pytest.approx(2 * read_once)
        # Read, written after each of three tokens, and copied from one of them.
        of_drafts = {"draft_tokens": 2, "accepted_length": 1.0}
        narrow, wide = (replace(one, model=replace(one.model, mtp_num_layers=1), **of_drafts) for one in (narrow, wide))
        assert step(wide) - step(narrow) == pytest.approx(6 * read_once)


@pytest.mark.parametrize("ranks", [1, 8])
def test_scores_of_whole_latents_are_computed_where_that_takes_longer(ranks: int) -> None:
    """All heads of a rank multiply their queries with 512 + 64 elements of every position, and weights with 512."""
    deepseek = replace(REQUEST, model=SIZES["deepseek-v3"], ranks=ranks, reduce_factor=0.0)
    later = replace(deepseek, prompt=deepseek.prompt + 1000)
    flops = 2 * 1000 * 128 / ranks * (512 + 64 + 512)
    seconds = max(flops / (0.62 * 989e12), 2 * 1000 * 576 / 3.35e12)
    assert (seconds == flops / (0.62 * 989e12)) == (ranks == 1)
    assert step(later) - step(deepseek) == pytest.approx(61 * seconds)


@pytest.mark.parametrize("ranks", [1, 4])
def test_expanded_attention_reads_every_query_head_and_moves_scores(ranks: int) -> None:
    """Each of 8 key-value heads serves 4 query heads."""
    fused = replace(REQUEST, ranks=ranks, batch=3, reduce_factor=0.0)
    expanded = replace(fused, attention="expanded")
    cache = 2 * 2 * 32 * 3 * 1100.5 * 8 * 128 / ranks
    assert step(expanded) - step(fused) == pytest.approx(3 * cache / 3.35e12)
    scores = 2 * 32 * 3 * 32 / ranks * 1000**2
    longer = predict_inference(expanded).prefill - predict_inference(fused).prefill
    assert longer == pytest.approx(44 * scores / 3.35e12)
    assert inference_memory(expanded) == inference_memory(fused)


def test_prefill_expands_latents() -> None:
    """Rank 0 of 8 computes whole latents, and everything else for its 16 heads."""
    deepseek = replace(REQUEST, model=SIZES["deepseek-v3"], ranks=8, reduce_factor=0.0, new_tokens=1)
    fast = replace(deepseek, machine=replace(H100, gpu=replace(H100.gpu, peak_flops=2 * 989e12)))
    whole = 7168 * (1536 + 512 + 64)
    of_heads = 16 * (1536 * 192 + 512 * (128 + 128) + 128 * 7168 + 1000 * (192 + 128) / 2)
    mlps = 3 * 3 * 7168 * 18432 / 8 + 58 * (9 * 3 * 7168 * 2048 / 8 + 256 * 7168)
    flops = 2 * 1000 * (61 * (whole + of_heads) + mlps)
    saved = predict_inference(deepseek).prefill - predict_inference(fast).prefill
    assert saved == pytest.approx(flops / (0.62 * 989e12) / 2)


@pytest.mark.parametrize("batch", [1, 4, 16, 64])
@pytest.mark.parametrize(
    ("link", "peers", "too_fast", "tolerance"),
    [("nvlink", "on", (0.04, 0.11), 0.05), ("no-p2p", "off", (-0.03, 0.09), 0.12)],
)
def test_published_cells(
    link: str, peers: Literal["on", "off"], too_fast: tuple[float, float], tolerance: float, batch: int
) -> None:
    """Today's NCCL is faster than the authors'."""
    model = replace(SIZES["llama-70b"], vocab_size=32000)
    machine = replace(H100, link=PRESETS[link])
    request = InferenceRequest(model, machine, 8, batch, 1024, GENERATE, attention="expanded")
    paper = {w: read_published()["llama-70b", peers, str(batch), w] for w in ("standard", "ladder")}
    standard = predict_inference(request).total
    found = predict_inference(replace(request, model=NAMED_WIRINGS["ladder"].of(model, 1))).total
    error = batch * GENERATE / standard / paper["standard"]["tokens_per_second"] - 1
    assert too_fast[0] < error < too_fast[1]
    assert standard / found == pytest.approx(paper["ladder"]["speed_up"], rel=tolerance)


def seconds_of(row: dict[str, str]) -> tuple[float, float]:
    """Return the predicted and the measured time of a step."""
    ranks, batch, prompt, new_tokens = (int(row[name]) for name in ("tp", "batch", "prompt", "generate"))
    machine = replace(Machine.usual(row["gpu"]), per_box=ranks, link=PRESETS[row["link"]])
    model, bits = SIZES[row["model"]], float(row["weight_bits"])
    request = InferenceRequest(model, machine, ranks, batch, prompt, new_tokens, bits)
    return step(request), batch / float(row["tokens_per_second"])


def median_and_ninth(rows: list[dict[str, str]]) -> tuple[float, float]:
    """Return the median and the 90th percentile of the errors."""
    errors = sorted(abs(measured / predicted - 1) for predicted, measured in map(seconds_of, rows))
    return statistics.median(errors), errors[math.ceil(0.9 * (len(errors) - 1))]


def test_public_measurements_are_predicted_as_well_as_the_page_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """The floor of experts is fitted to the measurements of one source; nothing is fitted to the others.

    Links are those that an engine used: servers have their own kernels over NVLink.
    """
    with open(REPOSITORY_ROOT / "docs" / "plan_measurements.csv", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    errors = [f"{measured / predicted - 1:+.0%}" for predicted, measured in map(seconds_of, rows)]
    assert errors == [row["error"] for row in rows]
    dense = [row for row in rows if SIZES[row["model"]].num_experts == 0]
    fitted = [row for row in rows if row["source"].startswith("sgl-project/sgl-cookbook")]
    others = [row for row in rows if row not in dense and row not in fitted]
    assert (len(dense), len(fitted), len(others)) == (34, 8, 19)
    median, ninth = median_and_ninth(dense)
    assert median < 0.16 and ninth < 0.405
    median, ninth = median_and_ninth([row for row in dense if not row["link"].endswith("one-shot")])
    assert median < 0.12 and ninth < 0.23
    median, ninth = median_and_ninth(others)
    assert median < 0.125 and ninth < 0.325

    def misfit(floor: float) -> float:
        monkeypatch.setattr(inference, "EXPERTS_FLOOR", floor)
        return sum(abs(math.log(measured / predicted)) for predicted, measured in map(seconds_of, fitted))

    assert min(range(0, 101, 5), key=misfit) == EXPERTS_FLOOR

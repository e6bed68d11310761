"""Checks that compare what ranks compute, or measure them."""

import functools
import itertools
import json
import shutil
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from megatron_ladder.blueprint.tensors import loss_chunk_tokens
from megatron_ladder.blueprint.wiring import SHARED_STREAM_MODES
from tests.distributed.test_captured import batches_of_steps, check_captured, histories
from tests.distributed.test_documents import ALL as MASKS
from tests.distributed.test_documents import RECIPE as DOCUMENTS
from tests.distributed.test_documents import expected_batches
from tests.distributed.test_documents import train as train_on_documents
from tests.distributed.test_steps import GLM, QWEN
from tests.gpu import on_ranks
from tests.gpu.runner import Machine, NotRun, Value, check
from tests.helpers.steps import LATENT, RECIPE, check_outcome, everything, launch_of, pass_on, plain_steps, train
from tests.unit.generate.tiny_model import SOMETIMES, drafting_reference, tiny_config, write_checkpoint

COLLECTIVE_LIMITS = {"fp32": 1e-6, "bf16": 2e-2, "moved": 0.0}
GRADIENT_LIMITS = {"fp32": 1e-4, "bf16": 5e-2}
"""Largest error of a gradient, relative to its norm: other sums of the same numbers, rounded to this precision."""
LOGPROB_LIMITS = {"fp32": 1e-3, "bf16": 0.15}
WIRINGS = {
    **{mode: f"--residual-mode {mode}" for mode in SHARED_STREAM_MODES},
    "hybrid": "--residual-mode ladder --ladder-layers 1",
    "staleness 2": "--residual-mode ladder --residual-staleness 2",
    "experts": f"{QWEN} --residual-mode ladder",
}
EXPERT_WIRINGS = (
    *(f"{GLM} --residual-mode {mode}" for mode in ("standard", "farskip", "shortcut")),
    *(f"{QWEN} --residual-mode {mode}" for mode in ("ladder", "longcat")),
)
DEEPSPEED_WAITS = {"ZeRO-3": 3}
"""Waits of DeepSpeed in a step: for the last reduces of each of two micro-batches, and after the step for the gather of
small parameters."""
EXPOSED = (("ladder", "ladder", 0), ("standard", "standard", 0), ("ladder without 16 multiprocessors", "ladder", 16))
"""Names, wirings, and numbers of multiprocessors that products leave to collectives, which take at most 16. The ranks
keep that setting until the check ends, so it comes last."""
TRACED_STEPS = (4, 14)
LOSS_TOKENS = loss_chunk_tokens(8192)
WIRE_SECONDS = 8e-3
"""Time of a collective on the emulated wire, long compared with a sub-block even on a busy machine."""
NOT_COMPILED, COMPILED = "--compile-sub-blocks false", "--compile-sub-blocks true"
"""Where many models are built, compiling all of them would take minutes."""
VARIANTS: dict[str, dict[str, str]] = {
    "": {},
    ", blocking launches": {"CUDA_LAUNCH_BLOCKING": "1"},
    ", without the caching allocator": {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
}
"""Environments that reveal missing synchronisation: results must not depend on them."""


def layouts_of(ranks: int) -> dict[str, str]:
    """Return the flags of the layouts to compare with one GPU, by name."""
    if ranks == 2:
        return {
            "TP2": "--tensor-model-parallel-size 2",
            "TP2+SP": "--tensor-model-parallel-size 2 --sequence-parallel",
            "PP2": "--pipeline-model-parallel-size 2",
            **{f"ZeRO-{stage}": f"--zero-stage {stage}" for stage in range(4)},
            "offload": "--zero-stage 2 --offload-optimizer cpu",
        }
    half = ranks // 2
    return {
        f"TP{ranks}+SP": f"--tensor-model-parallel-size {ranks} --sequence-parallel",
        f"TP{half} x DP2, ZeRO-1": f"--tensor-model-parallel-size {half} --zero-stage 1",
        f"TP2 x PP2 x DP{ranks // 4}": "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2",
        f"TP2+SP x DP{half}, ZeRO-3": "--tensor-model-parallel-size 2 --sequence-parallel --zero-stage 3",
    }


@check("collectives of every group, compared with fp64", gpus=(2, 8), seconds=90)
def collectives(machine: Machine, ranks: int) -> str:
    layouts = [(ranks, 1, 1), (1, 1, 1), (1, 1, 2)]
    if ranks > 2:
        layouts = [(ranks, 2, 1), (2, 2, 2), (1, 1, ranks)]
    found = machine.call(ranks, on_ranks.collective_errors, layouts)
    worst = {name: max(errors[name] for errors in found) for name in COLLECTIVE_LIMITS}
    figure = ", ".join(f"{name} {error:.1e}" for name, error in worst.items())
    assert all(worst[name] <= limit for name, limit in COLLECTIVE_LIMITS.items()), f"{figure}: above the limits"
    return figure


EXCHANGES = 20


@check("messages between stages, in both directions at once", gpus=(2, 8), seconds=60)
def messages(machine: Machine, ranks: int) -> str:
    right = sum(machine.call(ranks, on_ranks.exchange_both_ways, ranks, EXCHANGES))
    expected = 2 * (ranks - 1) * EXCHANGES * len(on_ranks.ROWS)
    assert right == expected, f"{right} of {expected} messages arrived as they were sent"
    return f"{right} messages"


@check("five steps, compared with plain arithmetic", gpus=(1, 2), seconds=120)
def plain_arithmetic(machine: Machine, ranks: int) -> str:
    dense = [f"--residual-mode desync --desync-interval {interval}" for interval in (2, 4)]
    cases = [*(dense if ranks == 2 else WIRINGS.values()), *EXPERT_WIRINGS]
    for words in cases:
        argv = [*RECIPE, *words.split(), "--global-batch-size", "8", "--tensor-model-parallel-size", str(ranks)]
        argv += NOT_COMPILED.split()
        weights, batches, expected, final = machine.call(ranks, plain_steps, argv, ranks)[0]
        check_outcome(machine.call(ranks, train, argv, weights, batches), expected, final, slack=10)
    return f"{len(cases)} wirings: losses, norms and weights agree"


@check("interleaved stages, latents and masks of documents, compared with plain arithmetic", gpus=(2, 8), seconds=120)
def further_arithmetic(machine: Machine, ranks: int) -> str:
    stages, cut = ("1x2x1", "2x1x1") if ranks == 2 else (f"2x2x{ranks // 4}", f"2x2x{ranks // 4}")
    interleaved = "--num-layers 4 --num-layers-per-virtual-pipeline-stage 1"
    latents = f"--sequence-parallel {LATENT} --q-lora-rank 12"
    recipe = [*RECIPE, *f"--residual-mode ladder --global-batch-size 8 {NOT_COMPILED}".split()]
    for layout, words in ((stages, interleaved), (cut, latents)):
        argv = [*recipe, *launch_of(layout, words)[1]]
        weights, batches, expected, final = machine.call(1, plain_steps, argv, ranks)[0]
        check_outcome(machine.call(ranks, train, argv, weights, batches), expected, final, slack=10)
    argv = [*DOCUMENTS, *launch_of(cut, "--sequence-parallel", MASKS, NOT_COMPILED)[1]]
    plain = functools.partial(plain_steps, batches=expected_batches(MASKS))
    weights, _, expected, final = machine.call(1, plain, argv, ranks)[0]
    results = machine.call(ranks, train_on_documents, argv, weights)
    check_outcome([(history, pieces) for history, pieces, *_ in results], expected, final, slack=10)
    return "losses, norms and weights agree"


@check("Muon on several GPUs, compared with one", gpus=(2, 8), seconds=90)
def muon(machine: Machine, ranks: int) -> str:
    recipe = [*RECIPE, *f"--residual-mode ladder --optimizer muon --global-batch-size 16 {NOT_COMPILED}".split()]
    _, layout = launch_of("1x1x2" if ranks == 2 else f"2x1x{ranks // 2}")
    batches = batches_of_steps(8)
    ((expected, _),) = machine.call(1, train, recipe, None, batches)
    worst = 0.0
    for history, _ in machine.call(ranks, train, [*recipe, *layout], None, batches):
        found, wanted = (torch.tensor(numbers, dtype=torch.float64) for numbers in (history, expected))
        worst = max(worst, float((found / wanted - 1).abs().max()))
    assert worst <= GRADIENT_LIMITS["fp32"], f"losses and norms differ by {worst:.1e}, above {GRADIENT_LIMITS['fp32']}"
    return f"losses and norms of {len(batches)} steps within {worst:.1e}"


def gradients(machine: Machine, ranks: int, variables: Mapping[str, str]) -> str:
    # The variables change nothing on a CPU.
    wirings = WIRINGS if machine.on_gpu or not variables else ["ladder"]
    cases = [
        (wiring, precision, layout, words)
        for wiring, precision in itertools.product(wirings, GRADIENT_LIMITS)
        for layout, words in layouts_of(ranks).items()
        if precision == "fp32" or (wiring in ("standard", "ladder") and layout != "ZeRO-0")
    ]
    return compare_gradients(machine, ranks, cases, NOT_COMPILED, variables)


def compare_gradients(
    machine: Machine, ranks: int, cases: Sequence[tuple[str, str, str, str]], flags: str, variables: Mapping[str, str]
) -> str:
    """Compare the first moments after one step, which are proportional to the gradients, with those of one GPU.

    Cases are wirings, precisions, and the names and flags of layouts.
    """
    # On a GPU, kernels must take long enough for a missing dependency to show.
    width, tokens = (256, 512) if machine.on_gpu else (64, 12)
    recipe = (
        f"--hidden-size {width} --ffn-hidden-size {3 * width} --num-attention-heads 8 --seq-length {tokens} "
        "--micro-batch-size 2 --global-batch-size 8 --train-iters 5 --lr 1e-4 --clip-grad 0 "
        # Scores of attention stay small, so that the precision of bf16 changes little.
        "--init-method-std 0.05"
    ).split()
    save = machine.folder / "gradients"

    def moments(world: int, words: str) -> dict[str, Tensor]:
        machine.call(world, pass_on, [*recipe, *words.split()], None, str(save), 1, variables=variables)
        values = everything(save)
        shutil.rmtree(save)
        return {name: value for (name, kind), value in values.items() if kind == "exp_avg"}

    worst = dict.fromkeys((precision for _, precision, *_ in cases), 0.0)
    for (wiring, precision), group in itertools.groupby(cases, key=lambda case: case[:2]):
        model = WIRINGS[wiring] + (" --bf16" if precision == "bf16" else "")
        wanted = moments(1, f"{model} {NOT_COMPILED} --zero-stage 1")
        for _, _, layout, words in group:
            name, error = largest_error(moments(ranks, f"{model} {flags} {words}"), wanted)
            worst[precision] = max(worst[precision], error)
            limit = GRADIENT_LIMITS[precision]
            assert error <= limit, f"{wiring}, {layout}, {precision}: {name} differs by {error:.1e}, above {limit:g}"
    errors = ", ".join(f"{error:.1e} in {name}" for name, error in worst.items())
    return f"{len(cases)} case{'s' * (len(cases) > 1)}; largest error {errors}"


def largest_error(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> tuple[str, float]:
    """Return the tensor with the largest error relative to its norm, and that error."""
    assert found.keys() == wanted.keys()
    errors = {name: float((found[name] - value).norm() / value.norm()) for name, value in wanted.items()}
    # NaN compares as neither larger nor smaller.
    return max(errors.items(), key=lambda item: (item[1] != item[1], item[1]))


for _name, _variables in VARIANTS.items():
    check(
        f"gradients of every wiring and layout, compared with one GPU{_name}",
        gpus=(2, 8),
        seconds=240,
        value=Value.STRESS if _variables else Value.RIGHT,
    )(functools.partial(gradients, variables=_variables))


@check("gradients of compiled sub-blocks, compared with one GPU", gpus=2, seconds=180)
def compiled_gradients(machine: Machine, ranks: int) -> str:
    (problem,) = machine.call(1, on_ranks.compiler_problem)
    if problem:
        raise NotRun(problem)
    # A C++ compiler needs a minute for each precision and layout.
    chosen = itertools.product(GRADIENT_LIMITS, ("TP2", "TP2+SP", "ZeRO-1")) if machine.on_gpu else [("fp32", "TP2")]
    cases = [("ladder", precision, layout, layouts_of(ranks)[layout]) for precision, layout in chosen]
    return compare_gradients(machine, ranks, cases, COMPILED, {})


@check("synchronisations of the host with the device, per step", gpus=2, seconds=120, value=Value.FAST)
def synchronisations(machine: Machine, ranks: int) -> str:
    cases = {
        "TP2": "--tensor-model-parallel-size 2 --residual-mode ladder --bf16 --zero-stage 1",
        "TP2+SP": "--tensor-model-parallel-size 2 --sequence-parallel --residual-mode ladder",
        "ZeRO-2": "--zero-stage 2 --bf16 --residual-mode ladder",
        "ZeRO-3": "--zero-stage 3 --bf16 --residual-mode ladder",
        "PP2": "--pipeline-model-parallel-size 2 --bf16 --zero-stage 1",
    }
    counts = {}
    for name, words in cases.items():
        traces = machine.folder / f"synchronisations {name}"
        traces.mkdir()
        argv = [*RECIPE, *words.split(), *NOT_COMPILED.split(), "--global-batch-size", "8"]
        steps = machine.call(ranks, on_ranks.host_waits, argv, traces)[0]
        assert len(steps) == 3, f"{name}: {len(steps)} steps were counted"
        most = sorted(steps, key=len)[-1]
        counts[name] = len(most)
        assert 0 < counts[name] <= 1 + DEEPSPEED_WAITS.get(name, 0), "\n".join(
            [f"{name}: {len(most)} per step:", *most]
        )
    return ", ".join(f"{name} {count}" for name, count in counts.items())


@check("exposed communication in a trace, ladder and standard", gpus=(2, 8), seconds=240, value=Value.FAST)
def exposed(machine: Machine, ranks: int) -> str:
    sizes = "--num-layers 4 --hidden-size 128 --ffn-hidden-size 384 --num-attention-heads 8 --seq-length 64"
    if machine.on_gpu:
        sizes = "--num-layers 8 --hidden-size 4096 --ffn-hidden-size 11008 --num-attention-heads 32 --seq-length 2048"
    quartiles, figures = {}, []
    for name, wiring, spared in EXPOSED:
        if spared and not hasattr(torch._C, "_set_sm_carveout_experimental"):
            continue
        traces = machine.folder / f"exposed {name} {ranks}"
        traces.mkdir()
        argv = [
            *f"{sizes} --train-iters {TRACED_STEPS[1]} --lr 1e-4 --micro-batch-size 2 --global-batch-size 2".split(),
            *WIRINGS[wiring].split(),
            "--tensor-model-parallel-size",
            str(ranks),
            *on_ranks.profile_flags(traces, *TRACED_STEPS),
            *(["--bf16"] if machine.on_gpu else []),
        ]
        machine.call(ranks, on_ranks.traced_steps, argv, TRACED_STEPS[1], WIRE_SECONDS, spared)
        result, (trace,) = traces / "exposed.json", traces.glob("rank0-*")
        machine.command(sys.executable, "tools/exposed_communication.py", "--trace", trace, "--json", result)
        steps = json.loads(result.read_text())["steps"]
        assert all(step["collectives"] > 0 for step in steps)
        quartiles[name] = statistics.quantiles((1e3 * step["exposed_seconds"] for step in steps), n=4)
        seconds = statistics.median(step["seconds"] for step in steps)
        low, median, high = quartiles[name]
        figures.append(f"{name} {median:.2f} ms ({low:.2f} to {high:.2f}) of {1e3 * seconds:.2f} ms")
    assert quartiles["ladder"][2] < quartiles["standard"][0], f"the quartiles overlap: {'; '.join(figures)}"
    return "; ".join(figures)


@check("weight gradients added in the product, compared with two kernels", gpus=1, seconds=60)
def products(machine: Machine, ranks: int) -> str:
    sizes = (4096, 4096, 4096) if machine.on_gpu else (64, 96, 32)
    fused, rounded, of_fused, of_rounded = machine.call(ranks, on_ranks.product_errors, *sizes)[0]
    figure = f"error {fused:.1e}, {1e6 * of_fused:.0f} us; rounded {rounded:.1e}, {1e6 * of_rounded:.0f} us"
    assert fused <= (rounded / 10 if machine.on_gpu else rounded), figure
    return figure


@check("passes of the loss over logits, compared with compiled ones", gpus=1, seconds=120, value=Value.FAST)
def loss_passes(machine: Machine, ranks: int) -> str:
    figures = []
    # The vocabulary of a Llama 3, and an eighth of it.
    for words in (128256, 16032) if machine.on_gpu else (512, 64):
        without, compiled, difference = machine.call(ranks, on_ranks.time_loss_passes, LOSS_TOKENS, words)[0]
        figures.append(f"{words} words {1e6 * without:.0f} us, compiled {1e6 * compiled:.0f} us")
        assert difference < 1e-2, f"gradients differ by {difference:.1e} of their norm"
    return f"{LOSS_TOKENS} tokens, " + "; ".join(figures)


@check("gated DeltaNet by flash-linear-attention, compared with torch", gpus=1, seconds=120)
def linear_attention(machine: Machine, ranks: int) -> str:
    reason, difference = machine.call(ranks, on_ranks.delta_kernel_difference)[0]
    if reason:
        raise NotRun(reason)
    assert difference <= GRADIENT_LIMITS["bf16"], f"gradients differ by {difference:.1e} of their norm"
    return f"gradients within {difference:.1e}"


@check("products with the matrices of experts, compared with a loop", gpus=1, seconds=60)
def expert_products(machine: Machine, ranks: int) -> str:
    limits = {"fp32": 1e-5, "bf16": 2e-2}
    worst = dict.fromkeys(limits, 0.0)
    # Aligned rows, rows that a grouped product rejects, and a rank with some of the experts; two have no tokens.
    cases = ((64, 32, range(6)), (64, 32, range(2, 4)), (9, 5, range(6)))
    for (hidden, width, local), kept in itertools.product(cases, (0, 10, 80)):
        for name in limits:
            (errors,) = machine.call(ranks, on_ranks.product_of_experts_errors, name, hidden, width, local, kept)
            worst[name] = max(worst[name], *errors)
    figure = ", ".join(f"{name} {error:.1e}" for name, error in worst.items())
    assert all(worst[name] <= limit for name, limit in limits.items()), f"{figure}: above the limits"
    return figure


@check("captured training steps, compared with steps without graphs", gpus=(1, 2, 8), seconds=240)
def captured_training(machine: Machine, ranks: int) -> str:
    tensor_parallel = f"--tensor-model-parallel-size {ranks}"
    layouts = [(tensor_parallel, 4), (f"{tensor_parallel} --recompute-granularity full", 1)]
    if ranks > 1:
        layouts = [(tensor_parallel, 4), (f"{tensor_parallel} --sequence-parallel --z-loss-coeff 1e-3", 2), ("", ranks)]
    # A CPU's stand-in for graphs takes long.
    wirings = [WIRINGS[name] for name in ("standard", "ladder", "ladder-parallel", "staleness 2")]
    wirings = [*wirings, *EXPERT_WIRINGS] if machine.on_gpu else ["--residual-mode ladder"]
    for wiring, (words, micro_batches) in itertools.product(wirings, layouts):
        argv = [*RECIPE, *wiring.split(), *words.split(), "--bf16", *NOT_COMPILED.split()]
        argv += ["--global-batch-size", str(2 * micro_batches)]
        check_captured(machine.call(ranks, histories, argv, batches_of_steps(micro_batches)))
    figure = f"{len(wirings) * len(layouts)} cases bitwise equal"
    if machine.on_gpu:
        without, captured = machine.call(ranks, on_ranks.time_captured)[0]
        figure += f"; 16 layers of an 8B, 2,048 tokens: {1e3 * without:.1f} ms, with graphs {1e3 * captured:.1f} ms"
    return figure


@check("captured pipelines, compared with pipelines without graphs", gpus=(2, 8), seconds=240)
def captured_pipelines(machine: Machine, ranks: int) -> str:
    chunks = "--num-layers-per-virtual-pipeline-stage 1"
    layouts = {
        f"1x2x{ranks // 2}": ("", f"{chunks} --recompute-granularity full", "--tie-embeddings"),
        **({"2x2x2": (f"{chunks} --sequence-parallel",), "1x4x2": ("", chunks)} if ranks == 8 else {}),
    }
    wirings = [WIRINGS["standard"], WIRINGS["ladder"], *EXPERT_WIRINGS[-2:]] if machine.on_gpu else [WIRINGS["ladder"]]
    for wiring, (layout, flags) in itertools.product(wirings, layouts.items()):
        data_parallel = int(layout.rpartition("x")[2])
        micro_batches = 7 * data_parallel
        for words in flags:
            sizes = f"--num-layers 8 --global-batch-size {2 * micro_batches} --bf16 {NOT_COMPILED}"
            _, argv = launch_of(layout, wiring, words, sizes)
            check_captured(machine.call(ranks, histories, [*RECIPE, *argv], batches_of_steps(micro_batches)))
    return f"{len(wirings) * sum(map(len, layouts.values()))} cases bitwise equal"


AFTER_FAILURE = 20
"""Steps after a failed capture, the ninth step."""


@check("a capture that fails, compared with steps without graphs", gpus=(1, 2), seconds=90)
def failed_capture(machine: Machine, ranks: int) -> str:
    words = f"--residual-mode ladder --tensor-model-parallel-size {ranks} --bf16 {NOT_COMPILED} --global-batch-size 4"
    argv, steps = [*RECIPE, *words.split()], 9 + AFTER_FAILURE
    wanted, found = (
        machine.call(ranks, on_ranks.steps_around_a_failed_capture, [*argv, "--cuda-graph", graphs], steps)[0]
        for graphs in ("false", "auto" if machine.on_gpu else "true")
    )
    history, printed, memory = found
    assert "no graphs, because a step cannot be captured on rank 0: " in printed, printed
    assert history == wanted[0], f"{history} instead of {wanted[0]}"
    last = memory[-AFTER_FAILURE:]
    assert len({*last}) <= 1, f"torch holds {last} bytes after the steps that follow the failure"
    return f"{AFTER_FAILURE} more steps bitwise equal" + (f", torch holds {last[0] / 1e6:.0f} MB" if last else "")


@check("attention backends", gpus=1, seconds=120, value=Value.FAST)
def attention(machine: Machine, ranks: int) -> str:
    dtype = "bf16" if machine.on_gpu else "fp32"
    argv = "--num-layers 2 --hidden-size 256 --num-attention-heads 4 --seq-length 256 --lr 1 --train-iters 5".split()
    argv += ["--micro-batch-size", "1", *NOT_COMPILED.split(), *(["--bf16"] if machine.on_gpu else [])]
    (found,) = machine.call(ranks, on_ranks.attention_backends, argv, decoding_model(machine), dtype)
    figure = "; ".join(f"{work}: {', '.join(names) or 'none'}" for work, names in found.items())
    assert machine.on_gpu or [sum(names.values()) for names in found.values()] == [2, 3, 3, 3], f"layers: {found}"
    slow = [work for work, names in found.items() if any("math" in name for name in names)]
    plans = [work for work, names in found.items() if "decoding" in work and "cudnn" in names]
    if machine.on_gpu:
        assert not slow and not plans and all(found.values()), figure
    return figure


DECODED = {
    "ladder": {"residual_mode": "ladder"},
    "farskip": {
        "residual_mode": "farskip",
        "num_experts": 6,
        "moe_ffn_hidden_size": 64,
        "moe_shared_expert_intermediate_size": 64,
        "moe_layers": (1, 2),
    },
    "latent": {
        "residual_mode": "ladder",
        "num_key_value_heads": 1,
        "head_dim": 192,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
    },
}


def decoding_model(machine: Machine, wiring: str = "ladder") -> Path:
    """Return the directory of a small model that eight ranks can share."""
    folder = machine.folder / wiring
    if not folder.exists():
        sizes = {"num_attention_heads": 8, "head_dim": 128, "max_position_embeddings": 2048}
        config = tiny_config(ladder_layers=(1, 2), mtp_num_layers=1, **(sizes | DECODED[wiring]))
        weights, _ = drafting_reference(config, *SOMETIMES)
        write_checkpoint(folder, config, weights)
    return folder


Decoded = Sequence[tuple[Sequence[int], Sequence[float]]]
"""Ids and log-probabilities of each continuation."""


def compare_decoded(found: Decoded, wanted: Decoded, dtype: str) -> tuple[int, float]:
    """Return the number of equal tokens and the largest difference of log-probabilities up to the first other token.

    Raise AssertionError if that is too large; in fp32, also if any token differs.
    """
    equal, worst = 0, 0.0
    assert len(found) == len(wanted)
    for (ids, logprobs), (wanted_ids, wanted_logprobs) in zip(found, wanted, strict=True):
        for one, other, logprob, wanted_logprob in zip(ids, wanted_ids, logprobs, wanted_logprobs, strict=True):
            worst = max(worst, abs(logprob - wanted_logprob))
            assert worst <= LOGPROB_LIMITS[dtype], f"{dtype}: {logprob:.4f}, not {wanted_logprob:.4f}"
            if one != other:
                # Two tokens are nearly equally likely; what follows cannot be compared.
                assert dtype != "fp32", f"{dtype}: {ids}, not {wanted_ids}"
                break
            equal += 1
    return equal, worst


@check("captured decoding, with and without drafts, compared with eager decoding", gpus=(1, 2, 8), seconds=180)
def captured_decoding(machine: Machine, ranks: int) -> str:
    figures = []
    for wiring, dtype in itertools.product(DECODED, LOGPROB_LIMITS):
        if machine.on_gpu and (wiring, dtype) == ("farskip", "fp32"):
            # The host waits for the choice of experts in fp32.
            continue
        found = [
            machine.call(ranks, on_ranks.decode, decoding_model(machine, wiring), dtype, captured, draft_tokens)
            for captured, draft_tokens in ((False, 0), (True, 0), (True, 2))
        ]
        assert all(result == of_ranks[0] for of_ranks in found for result in of_ranks), (
            f"{wiring} {dtype}: ranks differ"
        )
        eager, *others = (of_ranks[0] for of_ranks in found)
        tokens = sum(len(ids) for ids, _ in eager)
        for name, other in zip(("captured", "drafting"), others, strict=True):
            equal, worst = compare_decoded(other, eager, dtype)
            figures.append(f"{wiring} {dtype} {name}: {equal} of {tokens} tokens, logprobs within {worst:.1e}")
    return "; ".join(figures)


@check("symmetric memory, compared with NCCL", gpus=(2, 8), seconds=60, value=Value.FAST)
def symmetric_memory(machine: Machine, ranks: int) -> str:
    choice, usual = ("symmetric", "NCCL") if machine.on_gpu else ("auto", "gloo")
    figures = []
    for dtype, equal_sums in itertools.product(("fp32", "bf16"), (False, True)):
        found = machine.call(ranks, on_ranks.sums_in_two_ways, choice, dtype, equal_sums)
        name, worst, of_group, of_chosen, _ = found[0]
        if not of_group:
            raise NotRun(name)
        is_equal = len({numbers for *_, numbers in found}) == 1
        times = f"{name} {1e6 * of_chosen:.0f} us, {usual} {1e6 * of_group:.0f} us"
        kind = f"{dtype}, for experts" if equal_sums else dtype
        equal = "equal on all ranks" if is_equal else "not equal on all ranks"
        figures.append(f"{kind}: {times}, error {worst:.1e}, {equal}")
        assert worst <= COLLECTIVE_LIMITS[dtype] and (is_equal or not equal_sums), "; ".join(figures)
    return f"{on_ranks.SUM_BYTES // 1024} KB: {'; '.join(figures)}"

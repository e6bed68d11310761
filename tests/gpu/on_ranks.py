"""The parts of the checks that run on ranks: functions for `Machine.call`, on the GPU of the rank or on the CPU."""

import contextlib
import importlib
import io
import itertools
import os
import re
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from ladder_lab.bench.exposed import Event, read_events
from ladder_lab.link.link import EmulatedLink
from megatron_ladder.blueprint.model import head_replicas
from megatron_ladder.comm.group import CommGroup
from megatron_ladder.comm.mesh import ProcessMesh
from megatron_ladder.comm.symmetric import AllReduceChoice, select_all_reduce
from megatron_ladder.engine.graph import CapturedPasses
from megatron_ladder.errors import UserError
from megatron_ladder.generate.engine import GenerationEngine
from megatron_ladder.generate.graph import CudaStepGraph, StepGraph
from megatron_ladder.generate.loading import DTYPES, load_model, open_model
from megatron_ladder.generate.requests import GenerationRequest
from megatron_ladder.generate.sampling import SamplingParameters
from megatron_ladder.model.flash_linear_attention import find_delta_kernel
from megatron_ladder.model.language_model import LanguageModel
from megatron_ladder.model.operations import Operations, require_compiler
from megatron_ladder.model.stack import StackOptions
from megatron_ladder.parallel.products import add_product
from megatron_ladder.parallel.vocabulary import _gradient_of_words, _softmax_of_words
from megatron_ladder.train.profile import step_contexts
from megatron_ladder.train.reading import sample_batches
from megatron_ladder.train.step import train_step
from tests.distributed.test_captured import FailingGraph, played_graphs
from tests.helpers.sharded import mesh_of
from tests.helpers.steps import steps_of_batches
from tests.helpers.training import build_trainer_here, own_batches, rank_device
from tests.helpers.waits import MaskedNumbers, waits_of_steps
from tests.unit.model.test_gated_delta import delta_model
from tests.unit.parallel.test_grouped import largest_errors

PROMPTS = ((5, 9, 3), (17,), (1, 2, 3, 4, 5, 6, 7, 8, 40), (60, 60, 2, 11, 9))
LONG_PROMPTS = (tuple(number * number % 67 for number in range(700)), PROMPTS[0])
"""Their keys fill several blocks of a kernel's, and a captured step has 2,048 columns for them."""
NEW_TOKENS = 16
ROWS = (1, 1_000, 50_000)
"""Rows per rank of the tensors that collectives carry."""
SUM_BYTES = 16 * 2**10
"""Size of the timed sums: the output of a sub-block for one token of a large model."""
TIMED_SUMS = 50
TIMED_PASSES = 20
SYNCHRONISATIONS = re.compile(r"((cuda|cu)(Stream|Device|Event|Ctx)Synchronize|cudaMemcpy)(_pt[ds][sz])?")
"""Calls in which the host waits for the device."""
ATTENTION = re.compile(
    r"(?!.*backward)aten::_(?:scaled_dot_product_(\w+?)(?:_attention)?(?:_for_cpu)?|(flash_attention)_forward)"
)
"""Attention operators, whose names contain the backend; the last one is also a part of the others with `flash`."""


def describe_device() -> str:
    """Return the name of this machine's device."""
    device = rank_device()
    if device.type == "cpu":
        return f"CPU with {os.cpu_count()} cores"
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return f"{torch.cuda.get_device_name(device)} x {torch.cuda.device_count()}, CUDA {torch.version.cuda}, NCCL {nccl}"


def compiler_problem() -> str:
    """Return what torch.compile lacks, if anything."""
    try:
        require_compiler("--compile-sub-blocks", rank_device())
    except UserError as error:
        return str(error)
    return ""


def synchronise() -> None:
    """Wait for the device, so that a clock may be read."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def collective_errors(layouts: list[tuple[int, int, int]]) -> dict[str, float]:
    """Return the largest error of the collectives of every group of these meshes, compared with fp64.

    Layouts are (tensor-parallel size, replicas of key-value heads, pipeline stages). Errors are relative to the largest
    value: of "fp32" and "bf16" sums, and of what is only "moved".
    """
    worst = {"fp32": 0.0, "bf16": 0.0, "moved": 0.0}
    for tensor_parallel, replicas, stages in layouts:
        mesh = mesh_of(tensor_parallel, (replicas,) if replicas > 1 else (), stages, tp_comm_max_ctas=16)
        groups = (
            mesh.world,
            mesh.tensor,
            mesh.data,
            mesh.pipeline,
            mesh.model,
            *mesh.head_replicas.values(),
            mesh.ends,
        )
        for group in {group.ranks: group for group in groups if group.size > 1}.values():
            for name in ("fp32", "bf16"):
                for rows in ROWS:
                    for kind, error in _errors_of(group, rows, DTYPES[name]):
                        key = name if kind == "sum" else kind
                        worst[key] = max(worst[key], error)
        assert mesh.world.over_gloo(timedelta(minutes=1)).gather_objects(mesh.world.rank) in (
            [],
            list(range(mesh.world.size)),
        )
    return worst


def _errors_of(group: CommGroup, rows: int, dtype: torch.dtype) -> Iterator[tuple[str, float]]:
    """Yield the kind and error of each collective, two of each kind being in flight at the same time."""
    device, size, mine = rank_device(), group.size, group.rank
    generator = torch.Generator().manual_seed(rows)
    inputs = torch.randn(size, size * rows, 3, generator=generator).to(dtype)
    total, own = inputs.double().sum(0), inputs[mine].to(device)

    def error(found: Tensor, expected: Tensor) -> float:
        return float((found.cpu().double() - expected.double()).abs().max() / expected.double().abs().max())

    summed, more = own.clone(), -own
    works = [group.start_all_reduce(tensor) for tensor in (summed, more)]
    part, part_work = group.start_reduce_scatter(own)
    whole, whole_work = group.start_all_gather(own)
    for work in (*works, part_work, whole_work):
        assert work is not None
        work.wait()
    yield "sum", max(error(summed, total), error(more, -total))
    yield "sum", error(part, total[mine * rows : (mine + 1) * rows])
    yield "sum", error(group.all_reduce(own.clone()), total)
    yield "moved", error(whole, inputs.flatten(0, 1))
    yield "moved", error(group.all_reduce(own.clone(), dist.ReduceOp.MAX), inputs.max(0).values)
    yield "moved", error(group.all_gather(own, dim=1), torch.cat(list(inputs), 1))
    yield "moved", error(group.broadcast(own.clone(), size - 1), inputs[-1])
    pieces = group.all_to_all([row.flatten() for row in own.chunk(size)], [3 * rows] * size)
    yield "moved", max(error(piece, inputs[i].chunk(size)[mine].flatten()) for i, piece in enumerate(pieces))


def exchange_both_ways(stages: int, rounds: int) -> int:
    """Send to and receive from each neighbouring stage at the same time; return how many messages arrived right."""
    pipeline, device = mesh_of(1, (), stages).pipeline, rank_device()
    neighbours = [stage for stage in (pipeline.rank - 1, pipeline.rank + 1) if 0 <= stage < pipeline.size]

    def message(source: int, target: int, number: int, rows: int) -> Tensor:
        return torch.arange(3 * rows, device=device).add_(1000 * number + 10 * source + target)

    right = 0
    for number, rows in itertools.product(range(rounds), ROWS):
        sent = {stage: message(pipeline.rank, stage, number, rows) for stage in neighbours}
        received = {stage: torch.empty(3 * rows, dtype=torch.int64, device=device) for stage in neighbours}
        works = [pipeline.start_receive(buffer, stage) for stage, buffer in received.items()]
        works += [pipeline.start_send(tensor, stage) for stage, tensor in sent.items()]
        for work in works:
            work.wait()
        right += sum(
            torch.equal(buffer, message(stage, pipeline.rank, number, rows)) for stage, buffer in received.items()
        )
    return right


def sums_in_two_ways(
    choice: AllReduceChoice, dtype_name: str, equal_sums: bool
) -> tuple[str, float, float, float, bytes]:
    """Compare a group's own sums with the chosen implementation.

    Return the name of the latter's class, the largest error of either compared with fp64, the seconds of a small sum in
    both, and the bytes of a sum. An error of the choice is the name, and the figures are 0.
    """
    device, dtype = rank_device(), DTYPES[dtype_name]
    own_group = mesh_of(dist.get_world_size(), (), 1, tp_comm_max_ctas=16).tensor
    try:
        chosen = select_all_reduce(choice, own_group, device, dtype, equal_sums)
    except UserError as error:
        return str(error), 0.0, 0.0, 0.0, b""
    worst = 0.0
    for group in (own_group, chosen):
        for rows in (1, 16, 4_096):
            worst = max(worst, *(error for kind, error in _errors_of(group, rows, dtype) if kind == "sum"))
    tensor = torch.zeros(SUM_BYTES // dtype.itemsize, dtype=dtype, device=device)

    def seconds(group: CommGroup) -> float:
        times = []
        for _ in range(5):
            synchronise()
            began = time.perf_counter()
            for _ in range(TIMED_SUMS):
                group.all_reduce(tensor)
            synchronise()
            times.append((time.perf_counter() - began) / TIMED_SUMS)
        return statistics.median(times)

    generator = torch.Generator().manual_seed(own_group.rank)
    summed = chosen.all_reduce(torch.randn(tensor.shape, generator=generator).to(device, dtype))
    numbers = summed.cpu().view(torch.uint8).numpy().tobytes()
    return type(chosen).__name__, worst, seconds(own_group), seconds(chosen), numbers


def product_errors(out: int, tokens: int, width: int) -> tuple[float, float, float, float]:
    """Sum bf16 products of these sizes in fp32, in one operation and rounded to bf16 before they are added.

    Return the error of each, relative to the norm in fp64, and the seconds of a product in each.
    """
    generator = torch.Generator().manual_seed(0)
    pairs = [(torch.randn(tokens, out, generator=generator), torch.randn(tokens, width, generator=generator))] * 2
    operands = [(rows.bfloat16().to(rank_device()).t(), x.bfloat16().to(rank_device())) for rows, x in pairs]
    exact = torch.stack([a.double() @ b.double() for a, b in operands]).sum(0)

    def add_rounded(total: Tensor, a: Tensor, b: Tensor, replace: bool = False) -> None:
        total.copy_(a @ b) if replace else total.add_(a @ b)

    errors, times = [], []
    for add in (add_product, add_rounded):
        total = torch.full((out, width), torch.nan, device=rank_device())
        for number, (a, b) in enumerate(operands):
            add(total, a, b, replace=number == 0)
        errors.append(float((total.double() - exact).norm() / exact.norm()))
        synchronise()
        began = time.perf_counter()
        for _ in range(TIMED_SUMS):
            add(total, *operands[0])
        synchronise()
        times.append((time.perf_counter() - began) / TIMED_SUMS)
    return errors[0], errors[1], times[0], times[1]


def time_loss_passes(tokens: int, words: int) -> tuple[float, float, float]:
    """Run the passes of the loss over the logits of a chunk by torch's kernels, and compiled.

    Return the seconds of each, and the difference of the gradients, relative to their norm.
    """
    device = rank_device()
    dtype, backend = (torch.bfloat16, "inductor") if device.type == "cuda" else (torch.float32, "aot_eager")
    if backend == "inductor":
        require_compiler("the compiled loss", device)
    generator = torch.Generator(device).manual_seed(0)
    logits = torch.randn(tokens, words, generator=generator, device=device).to(dtype)
    target = torch.randint(words, (tokens, 1), generator=generator, device=device)
    ones = torch.ones(tokens, device=device)

    def passes() -> Tensor:
        softmax, _, total, _ = _softmax_of_words(logits, target)
        return _gradient_of_words(softmax, total / total, ones, target, -ones).to(dtype)

    gradients, times = [], []
    for run in (passes, torch.compile(passes, backend=backend, dynamic=False)):
        gradients.append(run().double())
        synchronise()
        began = time.perf_counter()
        for _ in range(TIMED_SUMS):
            run()
        synchronise()
        times.append((time.perf_counter() - began) / TIMED_SUMS)
    return times[0], times[1], float((gradients[1] - gradients[0]).norm() / gradients[0].norm())


def delta_kernel_difference() -> tuple[str, float]:
    """Compute gradients of a bf16 model with gated DeltaNet by the kernels of flash-linear-attention and by torch.

    Return why the kernels cannot be used, or "", and the largest difference of a gradient, relative to its norm.
    """
    device = rank_device()
    kernel, reason = find_delta_kernel(device)
    if kernel is None:
        return reason, 0.0
    config = delta_model(linear_key_head_dim=64, linear_value_head_dim=64)
    tokens = torch.randint(config.vocab_size, (2, 200), generator=torch.Generator().manual_seed(0)).to(device)
    bounds = torch.tensor([0, 70, 200, 201, 400], dtype=torch.int32)
    gradients = []
    for operations in (Operations(), Operations(delta_kernel=kernel)):
        options = StackOptions(operations=operations)
        model = LanguageModel(config, ProcessMesh.single(), options, dtype=torch.bfloat16, device=device, seed=1)
        model(tokens, labels=tokens, document_bounds=bounds).backward()
        gradients.append([parameter.grad.double() for parameter in model.parameters() if parameter.grad is not None])
    errors = [float((other - own).norm() / own.norm()) for own, other in zip(*gradients, strict=True)]
    return "", max(errors)


def product_of_experts_errors(dtype_name: str, hidden: int, width: int, local: range, kept: int) -> tuple[float, ...]:
    """See `largest_errors`."""
    return largest_errors(DTYPES[dtype_name], hidden, width, local, rank_device(), kept)


def time_captured() -> tuple[float, float]:
    """Return the seconds of a training step without and with graphs.

    Each rank has the part of 16 layers of an 8B model that it would have among eight.
    """
    ranks, medians = dist.get_world_size(), []
    argv = (
        f"--num-layers 16 --hidden-size 4096 --ffn-hidden-size {14336 * ranks // 8} --head-dim 128 --bf16 "
        f"--num-attention-heads {4 * ranks} --num-key-value-heads {ranks} --tensor-model-parallel-size {ranks} "
        f"--residual-mode ladder --train-iters {TIMED_PASSES} --lr 1e-4 --micro-batch-size 1 --seq-length 2048"
    )
    batch = steps_of_batches(1, 1, samples=1, tokens=2048)[0]
    for graphs in ("false", "true"):
        trainer, times = build_trainer_here([*argv.split(), "--global-batch-size", "1", "--cuda-graph", graphs]), []
        for iteration in range(1, TIMED_PASSES + 1):
            began = time.perf_counter()
            # Its end is a read of the loss.
            train_step(trainer, own_batches(trainer, batch), iteration)
            times.append(time.perf_counter() - began)
        # The first ones compile and capture.
        medians.append(statistics.median(times[TIMED_PASSES // 2 :]))
        trainer.engine.close()
    return medians[0], medians[1]


def steps_around_a_failed_capture(argv: list[str], steps: int) -> tuple[list[tuple[float, float]], str, list[int]]:
    """Take steps before and after a capture that fails, because the host reads a number in it.

    Return losses and norms of all steps, what was printed, and the bytes of memory that torch holds after each.
    """
    trainer, history, memory = build_trainer_here(argv), [], []
    batch = steps_of_batches(1, 2)[0]
    with contextlib.ExitStack() as stand_ins, contextlib.redirect_stdout(io.StringIO()) as printed:
        if rank_device().type == "cpu" and trainer.run.training.cuda_graph != "false":
            stand_ins.enter_context(played_graphs())
            stand_ins.enter_context(mock.patch.object(torch.cuda, "CUDAGraph", lambda: FailingGraph(dist.get_rank())))
            sharded = trainer.engine.optimizer
            trainer.engine.passes = CapturedPasses(trainer.model, sharded, trainer.mesh.world, measures=True)
        trainer.model.final_norm.register_forward_hook(_read_in_captures)
        for iteration in range(1, steps + 1):
            result = train_step(trainer, own_batches(trainer, batch), iteration)
            history.append((result.loss, result.gradient_norm))
            if torch.cuda.is_initialized():
                # Fails as long as the allocator believes in a capture.
                torch.cuda.empty_cache()
                memory.append(torch.cuda.memory_reserved())
    trainer.engine.close()
    return history, printed.getvalue(), memory


def _read_in_captures(module: torch.nn.Module, inputs: object, output: Any) -> None:
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        output.sum().item()


def host_waits(argv: list[str], traces: Path) -> list[list[str]]:
    """Return the places where the host waits for the device in each of three steps.

    On a CPU, `tests/helpers/waits.py` counts them. On a GPU, they are calls of CUDA in a trace.
    """
    if rank_device().type == "cpu":
        return waits_of_steps(argv)
    rank = dist.get_rank()
    trainer = build_trainer_here([*argv, *profile_flags(traces, first=3, last=5)])
    batches: Any = sample_batches(trainer, MaskedNumbers(), 0)  # type: ignore[arg-type]
    around = step_contexts(trainer.run, trainer.mesh.world, trainer.device, 1, contextlib.nullcontext)
    for iteration in range(1, 6):
        with around(iteration):
            train_step(trainer, next(batches), iteration, lambda: (1.0, 2.0))
    batches.close()
    if rank > 0:
        return []
    return list(waits_in(read_events(next(traces.glob("rank0-*")))).values())


def waits_in(events: list[Event]) -> dict[int, list[str]]:
    """Return the names of the calls in which the host waits for the device, for each step of a trace."""
    found: dict[int, list[str]] = {}
    for step in events:
        if (name := re.fullmatch(r"iteration (\d+)", step["name"])) and step.get("cat") == "user_annotation":
            inside = (event for event in events if step["ts"] <= event["ts"] < step["ts"] + step["dur"])
            calls = (event["name"] for event in inside if event.get("cat") in ("cuda_runtime", "cuda_driver"))
            found[int(name[1])] = [call for call in calls if SYNCHRONISATIONS.fullmatch(call)]
    return found


def profile_flags(folder: Path, first: int, last: int) -> list[str]:
    """Return the flags that make rank 0 trace these steps."""
    words = f"--profile --profile-step-start {first - 1} --profile-step-end {last} --profile-ranks 0 --profile-dir"
    return [*words.split(), str(folder)]


def traced_steps(argv: list[str], steps: int, alpha_seconds: float, spared: int = 0) -> float:
    """Take steps with the flags of --profile, and return the last loss.

    On a CPU, the tensor-parallel collectives use an emulated wire that takes this time for each. Products leave
    `spared` multiprocessors free, until the process ends.
    """
    if spared:
        torch._C._set_sm_carveout_experimental(spared)
        if rank_device().type == "cuda":
            # The other library ignores it.
            torch.backends.cuda.preferred_blas_library("cublaslt")
    links: list[EmulatedLink] = []

    def over_wire(group: CommGroup) -> CommGroup:
        if rank_device().type == "cpu":
            links.append(EmulatedLink(group, alpha_seconds))
        return links[0] if links else group

    trainer = build_trainer_here(argv, wrap_tensor=over_wire)
    training = trainer.run.training
    batch = steps_of_batches(1, 1, training.micro_batch_size, training.seq_length)[0]
    around = step_contexts(trainer.run, trainer.mesh.world, trainer.device, 1, contextlib.nullcontext)
    loss = 0.0
    for iteration in range(1, steps + 1):
        with around(iteration):
            loss = train_step(trainer, own_batches(trainer, batch), iteration).loss
    for link in links:
        link.close()
    return loss


class RepeatedStep:
    """A `StepGraph` for a CPU: a replay runs the captured function again."""

    def capture(self, step: Callable[[], Tensor]) -> Tensor:
        self._step = step
        self._result = step().clone().fill_(torch.nan)
        return self._result

    def replay(self) -> None:
        self._result.copy_(self._step())

    def close(self) -> None:
        pass


def decode(
    checkpoint: Path, dtype: str, captured: bool, draft_tokens: int
) -> list[tuple[tuple[int, ...], tuple[float, ...]]]:
    """Return ids and log-probabilities of greedy continuations by all ranks together."""
    new_graph = CudaStepGraph if rank_device().type == "cuda" else RepeatedStep
    engine = _engine(checkpoint, dtype, new_graph if captured else None, draft_tokens)
    sampling = SamplingParameters(temperature=0.0, logprobs=True)
    generations = [
        generation
        for prompts in (LONG_PROMPTS, PROMPTS)
        for generation in engine.generate([GenerationRequest(prompt, NEW_TOKENS, sampling) for prompt in prompts])
    ]
    engine.close()
    return [(generation.ids, generation.logprobs or ()) for generation in generations]


def _engine(
    checkpoint: Path, dtype: str, new_graph: Callable[[], StepGraph] | None, draft_tokens: int = 0
) -> GenerationEngine:
    stored = open_model(checkpoint, None, None, draft="mtp" if draft_tokens else None)
    device, ranks = rank_device(), dist.get_world_size()
    mesh = mesh_of(ranks, head_replicas(stored.config, ranks))
    has_experts = stored.config.num_experts > 0
    mesh = replace(mesh, tensor=select_all_reduce("auto", mesh.tensor, device, DTYPES[dtype], has_experts))
    model = load_model(stored, mesh, DTYPES[dtype], device, overlap=True)
    return GenerationEngine(model, mesh, None, new_graph, draft_tokens=draft_tokens)


def attention_backends(argv: list[str], checkpoint: Path, dtype: str) -> Mapping[str, Mapping[str, int]]:
    """Return how often a training step, a prefill, and an eager and a captured decode step call each attention."""
    trainer = build_trainer_here(argv)
    training = trainer.run.training
    batch = steps_of_batches(1, 1, training.micro_batch_size, training.seq_length)[0]
    request, graph = GenerationRequest(PROMPTS[0], 4), ProfiledStep()
    stream = _engine(checkpoint, dtype, None).stream([request])
    found = {
        "training": _attention_of(lambda: train_step(trainer, own_batches(trainer, batch), 1)),
        "prefill": _attention_of(lambda: next(stream)),
        "decoding": _attention_of(lambda: next(stream)),
    }
    _engine(checkpoint, dtype, lambda: graph).generate([request])
    return found | {"captured decoding": graph.attention}


class ProfiledStep(RepeatedStep):
    """Counts the attention operators that a capture would record."""

    def capture(self, step: Callable[[], Tensor]) -> Tensor:
        self.attention = _attention_of(step)
        return super().capture(step)


def _attention_of(work: Callable[[], object]) -> Mapping[str, int]:
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        work()
    matches = ((ATTENTION.fullmatch(event.key), event.count) for event in profiler.key_averages())
    return {match[1] or match[2]: count for match, count in matches if match is not None}


def time_torchtitan(flavor: str, sequence: int) -> tuple[float, str]:
    """Return the seconds of forward and backward of one sample in torchtitan's Llama 3, compiled as its trainer does.

    If the installed version has another interface, return 0 and what is different. On a CPU, where its attention has no
    backward, only the forward pass is timed, and nothing is compiled.
    """
    device = rank_device()
    try:
        llama3 = importlib.import_module("torchtitan.models.llama3")
        with device:
            model = llama3.model_registry(flavor, attn_backend="flex").model.build()
            model.init_states(buffer_device=device)
            ids = torch.randint(0, 2000, (1, sequence + 1))
            positions = torch.arange(sequence).view(1, -1)
            masks = model.get_attention_masks(positions=positions)
        blocks = model.layers.values()
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        return 0.0, f"{type(error).__name__}: {error}"
    if device.type == "cuda":
        # Not `model.to`, which would make its complex table of angles real.
        for parameter in model.parameters():
            parameter.data = parameter.data.bfloat16()
        for block in blocks:
            block.compile(fullgraph=True)
    model.requires_grad_(device.type == "cuda")
    times = []
    for _ in range(TIMED_PASSES):
        model.zero_grad()
        synchronise()
        began = time.perf_counter()
        logits = model(ids[:, :-1], positions=positions, attention_masks=masks)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
        if device.type == "cuda":
            loss.backward()
        synchronise()
        times.append(time.perf_counter() - began)
    # The first ones compile.
    return statistics.median(times[TIMED_PASSES // 2 :]), ""

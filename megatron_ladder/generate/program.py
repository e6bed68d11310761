"""One rank of tools/generate.py, from its options to its texts. Rank 0 speaks; the others compute with it."""

import importlib.util
import os
import sys
import time
from collections.abc import Sequence

import torch

from megatron_ladder.blueprint.model import ModelConfig, key_value_replicas
from megatron_ladder.comm.launch import (
    Place,
    find_place,
    naming_lost_peers,
    start_process_group,
    stop_process_group,
)
from megatron_ladder.comm.mesh import ProcessMesh
from megatron_ladder.errors import UserError
from megatron_ladder.generate.benchmark import report, run_benchmark
from megatron_ladder.generate.conversation import converse
from megatron_ladder.generate.engine import GenerationEngine
from megatron_ladder.generate.graph import CudaStepGraph
from megatron_ladder.generate.loading import DTYPES, StoredModel, check_tensor_parallel, load_model, open_model
from megatron_ladder.generate.options import GenerateOptions, ModelOptions
from megatron_ladder.generate.output import TextOutput, json_line, score_line, summary, write_stdout
from megatron_ladder.generate.prompts import Prompt, PromptWriter, prompt_mistakes, read_prompts
from megatron_ladder.generate.requests import GenerationRequest
from megatron_ladder.generate.sampling import SamplingParameters, request_seed
from megatron_ladder.model.operations import require_compiler

TIMEOUT_MINUTES = 60.0
"""How long ranks wait for one another: rank 0 may be held up by a reader of its output."""


def generate(options: GenerateOptions) -> None:
    """Does the work of one rank, or all of it when it is alone.

    Raises:
        UserError: before any process group is built, unless it is about standard input, which rank 0 alone reads, or
            a weight file proves damaged while it is read.
    """
    place = find_place()
    stored = open_model(options.model.model, options.model.tokenizer_type, options.model.tokenizer_model)
    _check_place(place, options.model, stored.config)
    writer = _make_writer(options, stored)
    from_input = _reads_standard_input(options)
    prompts: list[Prompt] = []
    if not (from_input or options.prompts.interactive or options.bench.bench or options.serve.serve):
        prompts = _checked_prompts(options, stored, writer, None)
    if options.bench.bench:
        _check_bench(options, stored.config)
    if options.serve.serve:
        _serve(place, options, stored)
        return
    with naming_lost_peers():
        engine = _build_engine(place, options, stored)
        if from_input:
            prompts = _prompts_of_rank_0(engine, options, stored, writer)
        if options.bench.bench:
            _bench(engine, options)
        elif options.prompts.interactive:
            assert writer is not None
            converse(engine, writer, lambda prompt: _request(options, stored, prompt), options.sampling.max_new_tokens)
        elif options.output.score:
            _score(engine, prompts, options)
        else:
            _run(engine, prompts, options, stored)
        stop_process_group()


def _serve(place: Place, options: GenerateOptions, stored: StoredModel) -> None:
    missing = [name for name in ("starlette", "uvicorn") if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"--serve: {' and '.join(missing)} not installed: pip install {' '.join(missing)}")
    from megatron_ladder.generate.serve.program import prepare, serve

    prepared = prepare(place, options.serve, stored, options.model.model)
    with naming_lost_peers():
        serve(_build_engine(place, options, stored), stored, prepared)
        stop_process_group()


def _make_writer(options: GenerateOptions, stored: StoredModel) -> PromptWriter | None:
    if stored.tokenizer is None:
        needing = {
            "--interactive": options.prompts.interactive, "--chat": options.prompts.chat,
            "--stop": bool(options.sampling.stop),
        }  # fmt: skip
        mistakes = [
            f"{name} needs a tokenizer, and the model's directory holds none: give --tokenizer-type and "
            "--tokenizer-model"
            for name, given in needing.items()
            if given
        ]
        if mistakes:
            raise UserError(*mistakes)
        return None
    return PromptWriter(stored.tokenizer, stored.prefix, options.prompts.chat, options.prompts.system)


def _reads_standard_input(options: GenerateOptions) -> bool:
    prompts = options.prompts
    given = prompts.prompt or prompts.prompt_file or prompts.tokens
    return not (given or prompts.interactive or options.bench.bench or options.serve.serve)


def _checked_prompts(
    options: GenerateOptions, stored: StoredModel, writer: PromptWriter | None, standard_input: str | None
) -> list[Prompt]:
    prompts = read_prompts(options.prompts, writer, standard_input)
    new_tokens = 0 if options.output.score else options.sampling.max_new_tokens
    mistakes = prompt_mistakes(prompts, stored.config, new_tokens)
    if options.output.score:
        mistakes += [
            f"{prompt.source}: a single token has no score, since nothing comes before it"
            for prompt in prompts
            if len(prompt.ids) == 1
        ]
    if mistakes:
        raise UserError(*mistakes)
    return prompts


def _prompts_of_rank_0(
    engine: GenerationEngine, options: GenerateOptions, stored: StoredModel, writer: PromptWriter | None
) -> list[Prompt]:
    """Standard input as a prompt; several processes share it, so that one of them reads it for all."""
    found: tuple[list[Prompt], tuple[str, ...]] = [], ()
    if engine.group.rank == 0:
        try:
            found = _checked_prompts(options, stored, writer, sys.stdin.read()), ()
        except UserError as error:
            found = [], error.mistakes
        except UnicodeDecodeError as error:
            found = [], (f"standard input: not UTF-8: {error.reason} at byte {error.start}",)
    prompts, mistakes = engine.group.broadcast_object(found)
    if mistakes:
        raise UserError(*mistakes)
    return list(prompts)


def _check_place(place: Place, options: ModelOptions, config: ModelConfig) -> None:
    tensor_parallel = options.tp
    if tensor_parallel is not None and tensor_parallel != place.world_size:
        raise UserError(
            f"--tp {tensor_parallel}: {place.world_size} processes were launched, and all share the model: "
            f"leave --tp out, or launch {tensor_parallel}"
        )
    check_tensor_parallel(config, place.world_size)
    if torch.cuda.is_available() and place.local_rank >= torch.cuda.device_count():
        raise UserError(
            f"--tp {place.world_size}: this machine has {torch.cuda.device_count()} GPUs, and every process needs "
            "one: lower --tp, or set CUDA_VISIBLE_DEVICES= to run on the CPU"
        )
    if options.cuda_graph and not torch.cuda.is_available():
        raise UserError("--cuda-graph: there is no GPU here: leave it out")
    if options.compile_sub_blocks:
        require_compiler("--compile-sub-blocks")


def _check_bench(options: GenerateOptions, config: ModelConfig) -> None:
    needed = options.bench.bench_prompt + options.sampling.max_new_tokens
    if needed > config.max_position_embeddings:
        raise UserError(
            f"--bench-prompt {options.bench.bench_prompt} and --max-new-tokens {options.sampling.max_new_tokens} are "
            f"{needed} tokens, and the model has {config.max_position_embeddings} positions: lower one of them"
        )


def _build_engine(place: Place, options: GenerateOptions, stored: StoredModel) -> GenerationEngine:
    begun = time.monotonic()
    mesh, device = _start(place, stored.config)
    dtype_name = options.model.dtype or ("bf16" if device.type == "cuda" else "fp32")
    compiled = options.model.compile_sub_blocks
    model = load_model(stored, mesh, DTYPES[dtype_name], device, options.model.overlap, compiled)
    if place.rank == 0:
        config, warnings = stored.config, stored.warnings
        for warning in warnings:
            print(f"warning: {warning}", file=sys.stderr)
        print(
            f"{stored.directory}: {config.residual_mode}, {config.num_layers} layers, {dtype_name} on "
            f"{device.type}, tensor parallel {place.world_size}, loaded in {time.monotonic() - begun:.1f} s",
            file=sys.stderr,
            flush=True,
        )
    return GenerationEngine(model, mesh, stored.tokenizer, CudaStepGraph if options.model.cuda_graph else None)


def _start(place: Place, config: ModelConfig) -> tuple[ProcessMesh, torch.device]:
    """Groups and device of this rank; a process that is alone needs no group."""
    if not place.launched:
        return ProcessMesh.single(), place.device()
    if not torch.cuda.is_available() and "OMP_NUM_THREADS" not in os.environ:
        # Each rank would take all cores, and they would starve one another.
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // place.world_size))
    device = start_process_group(place, TIMEOUT_MINUTES)
    return ProcessMesh.build(place.world_size, kv_replicas=key_value_replicas(config, place.world_size)), device


def _run(
    engine: GenerationEngine, prompts: Sequence[Prompt], options: GenerateOptions, stored: StoredModel
) -> None:
    repeated = [prompt for prompt in prompts for _ in range(options.sampling.num_samples)]
    samples = [sample for _ in prompts for sample in range(options.sampling.num_samples)]
    requests = [_request(options, stored, *pair) for pair in zip(repeated, samples, strict=True)]
    if engine.group.rank != 0:
        engine.generate(requests)
        return
    if options.output.json:
        generations = engine.generate(requests)
        write_stdout("".join(json_line(*pair) for pair in zip(repeated, generations, strict=True)))
    else:
        pieces: list[str] = []
        write = write_stdout if options.output.stream else pieces.append
        shown = TextOutput(repeated, engine.tokenizer, write, repeat=not options.prompts.chat)
        generations = engine.generate(requests, shown.add)
        write_stdout("".join(pieces))
    print(summary(generations), file=sys.stderr, flush=True)


def _request(options: GenerateOptions, stored: StoredModel, prompt: Prompt, sample: int = 0) -> GenerationRequest:
    sampling = options.sampling
    parameters = SamplingParameters(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        seed=request_seed(sampling.seed, prompt.ids, sample),
        logprobs=options.output.logprobs,
        top_logprobs=options.output.top_logprobs,
    )
    eos_ids = frozenset[int]() if sampling.ignore_eos else stored.eos_ids
    stop = tuple(text.replace("\\n", "\n").replace("\\t", "\t") for text in sampling.stop)
    return GenerationRequest(prompt.ids, sampling.max_new_tokens, parameters, eos_ids, stop)


def _score(engine: GenerationEngine, prompts: Sequence[Prompt], options: GenerateOptions) -> None:
    for prompt in prompts:
        logprobs = engine.score(prompt.ids)
        if engine.group.rank == 0:
            write_stdout(score_line(prompt, logprobs, options.output.json, options.output.logprobs))


def _bench(engine: GenerationEngine, options: GenerateOptions) -> None:
    new_tokens = options.sampling.max_new_tokens
    rounds = run_benchmark(engine, options.bench, new_tokens)
    if engine.group.rank == 0:
        write_stdout(report(rounds, options.bench, new_tokens, options.output.json))

"""One rank of tools/generate.py, from its options to its texts. Rank 0 speaks; the others compute with it."""

import os
import sys
import time
from collections.abc import Sequence

import torch

from megatron_ladder.comm.launch import (
    Place,
    find_place,
    naming_lost_peers,
    start_process_group,
    stop_process_group,
)
from megatron_ladder.comm.mesh import ProcessMesh
from megatron_ladder.config.model import ModelConfig, key_value_replicas
from megatron_ladder.errors import UserError
from megatron_ladder.generate.engine import GenerationEngine, GenerationRequest
from megatron_ladder.generate.graph import CudaStepGraph
from megatron_ladder.generate.loading import DTYPES, StoredModel, check_tensor_parallel, load_model, open_model
from megatron_ladder.generate.options import GenerateOptions, ModelOptions, SamplingOptions
from megatron_ladder.generate.output import TextOutput, json_line, summary, write_stdout
from megatron_ladder.generate.prompts import Prompt, prompt_mistakes, read_prompts
from megatron_ladder.generate.sampling import SamplingParameters, request_seed
from megatron_ladder.model.compiled import compile_sub_blocks, require_compiler

TIMEOUT_MINUTES = 60.0
"""How long ranks wait for one another: rank 0 may be held up by a reader of its output."""


def generate(options: GenerateOptions) -> None:
    """Does the work of one rank, or all of it when it is alone.

    Raises:
        UserError: before any process group is built, unless a weight file proves damaged while it is read.
    """
    place = find_place()
    stored = open_model(options.model.model, options.model.tokenizer_type, options.model.tokenizer_model)
    _check_place(place, options.model, stored.config)
    prompts = read_prompts(options.prompts, stored.tokenizer)
    mistakes = prompt_mistakes(prompts, stored.config, options.sampling.max_new_tokens)
    if mistakes:
        raise UserError(*mistakes)
    with naming_lost_peers():
        engine = _build_engine(place, options, stored)
        _run(engine, prompts, options)
        stop_process_group()


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


def _build_engine(place: Place, options: GenerateOptions, stored: StoredModel) -> GenerationEngine:
    begun = time.monotonic()
    mesh, device = _start(place, stored.config)
    dtype_name = options.model.dtype or ("bf16" if device.type == "cuda" else "fp32")
    model = load_model(stored, mesh, DTYPES[dtype_name], device, options.model.overlap)
    if options.model.compile_sub_blocks:
        compile_sub_blocks(model)
    if place.rank == 0:
        config, warnings = stored.config, stored.checkpoint.warnings
        for warning in warnings:
            print(f"warning: {warning}", file=sys.stderr)
        print(
            f"{stored.checkpoint.directory}: {config.residual_mode}, {config.num_layers} layers, {dtype_name} on "
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


def _run(engine: GenerationEngine, prompts: Sequence[Prompt], options: GenerateOptions) -> None:
    eos_ids = set() if engine.tokenizer is None or options.sampling.ignore_eos else {engine.tokenizer.eod_id}
    requests = [
        GenerationRequest(
            prompt.ids,
            options.sampling.max_new_tokens,
            _sampling_parameters(options.sampling, prompt),
            frozenset(eos_ids),
        )
        for prompt in prompts
    ]
    if engine.group.rank != 0:
        engine.generate(requests)
        return
    if options.output.json:
        generations = engine.generate(requests)
        write_stdout("".join(json_line(*pair) for pair in zip(prompts, generations, strict=True)))
    elif options.output.stream:
        generations = engine.generate(requests, TextOutput(prompts, engine.tokenizer, write_stdout).add)
    else:
        pieces: list[str] = []
        generations = engine.generate(requests, TextOutput(prompts, engine.tokenizer, pieces.append).add)
        write_stdout("".join(pieces))
    print(summary(generations), file=sys.stderr, flush=True)


def _sampling_parameters(options: SamplingOptions, prompt: Prompt) -> SamplingParameters:
    seed = request_seed(options.seed, prompt.ids)
    return SamplingParameters(options.temperature, options.top_k, options.top_p, seed)

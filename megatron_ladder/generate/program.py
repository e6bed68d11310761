"""One rank of `tools/generate.py`.

Every run takes the same steps: open the model, check the input, build the engine, continue or score the prompts. Only
standard input is checked after process groups exist. Rank 0 reads input and writes output; the others only compute.
"""

import io
import json
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from datetime import timedelta
from functools import partial

import torch

from megatron_ladder.blueprint.model import ModelConfig, head_replicas
from megatron_ladder.comm.agreement import Peers
from megatron_ladder.comm.launch import (
    RankInfo,
    read_rank_info,
    start_process_group,
    stop_process_group,
)
from megatron_ladder.comm.mesh import ProcessMesh
from megatron_ladder.comm.symmetric import check_peers, select_all_reduce
from megatron_ladder.comm.watch import Watch, naming_lost_peers
from megatron_ladder.data.chat_records import Message
from megatron_ladder.errors import ErrorCollector, Problem, UserError, counted, raise_user_errors, size_text
from megatron_ladder.generate.engine import GenerationEngine
from megatron_ladder.generate.graph import CudaStepGraph
from megatron_ladder.generate.loading import DTYPES, StoredModel, check_tensor_parallel, load_model, open_model
from megatron_ladder.generate.options import (
    GenerateOptions,
    ModelOptions,
    OutputOptions,
    SamplingOptions,
)
from megatron_ladder.generate.prompts import (
    OPEN_ANSWERS,
    Prompt,
    PromptEncoder,
    check_characters,
    prompt_errors,
    read_prompts,
)
from megatron_ladder.generate.requests import Generation, GenerationRequest, NewToken
from megatron_ladder.generate.sampling import SamplingParameters, request_seed
from megatron_ladder.model.experts import waits_for_choices
from megatron_ladder.model.operations import require_compiler, sink_problems
from megatron_ladder.tokenizers.kinds import Tokenizer

_TIMEOUT_MINUTES = 60.0
"""Timeout of collectives; long, because a slow reader of the output can hold up rank 0."""
_INPUT_TIMEOUT = timedelta(days=30)
"""Time that a user can take to enter a line. The end of a process is noticed immediately in any case."""


def generate(options: GenerateOptions) -> None:
    """Run one rank, or everything if there is only one process.

    Raises UserError before any process group exists, except for standard input (read by rank 0) and damaged weights.
    """
    rank_info = read_rank_info()
    stored = open_model_of(options.model)
    check_hardware(rank_info, options.model, stored.config)
    encoder = _prompt_encoder(options, stored)
    if encoder is not None:
        stored = replace(stored, eos_ids=stored.eos_ids | encoder.turn_ends)
        if encoder.is_chat and not (stored.answers_end or encoder.turn_ends or options.sampling.stop):
            warning = str(Problem({}, f"{OPEN_ANSWERS} ({{stop}})"))
            stored = replace(stored, warnings=(*stored.warnings, warning))
    prompts = _read_checked_prompts(options, stored, encoder, None) if options.prompts.given else None
    with naming_lost_peers():
        with closing(load_engine(rank_info, options.model, stored)) as engine:
            if encoder is not None and options.prompts.interactive:
                _converse(engine, encoder, options, stored)
            else:
                if prompts is None:
                    prompts = _read_standard_input(engine, partial(_read_checked_prompts, options, stored, encoder))
                (_score if options.output.score else _continue)(engine, prompts, options, stored)
        stop_process_group()


def open_model_of(options: ModelOptions) -> StoredModel:
    """Open the model that the flags name; see `open_model`."""
    return open_model(options.model, options.tokenizer_type, options.tokenizer_model, draft=options.draft)


def check_hardware(rank_info: RankInfo, options: ModelOptions, config: ModelConfig) -> None:
    """Raise a UserError if the processes, their GPUs or this machine are not those that the flags need."""
    if options.tp is not None and options.tp != rank_info.world_size:
        reason = f"{{tp}}: the launcher started {rank_info.world_size} processes; remove {{tp}}, or start as many"
        raise UserError(Problem({"tp": options.tp}, reason))
    check_tensor_parallel(config, rank_info.world_size)
    device = rank_info.device()
    if device.type == "cuda" and rank_info.local_rank >= torch.cuda.device_count():
        reason = f"{{tp}}: each process needs a GPU, and this machine has {torch.cuda.device_count()}"
        fix = "reduce {tp}, or set CUDA_VISIBLE_DEVICES= to run on the CPU"
        raise UserError(Problem({"tp": rank_info.world_size}, f"{reason}; {fix}"))
    if options.tp_all_reduce == "symmetric":
        check_peers(rank_info.world_size, device, DTYPES[_dtype_name(options, device)])
    if options.compile_sub_blocks:
        require_compiler("compile_sub_blocks", device)
    raise_user_errors(sink_problems(config, device, "model", options.model))


def _prompt_encoder(options: GenerateOptions, stored: StoredModel) -> PromptEncoder | None:
    prompts = options.prompts
    if stored.tokenizer is not None:
        return PromptEncoder(stored.tokenizer, stored.prefix, prompts.chat, prompts.system)
    needing = {"interactive": prompts.interactive, "chat": prompts.chat, "stop": bool(options.sampling.stop)}
    reason = "{} needs a tokenizer, and the model's directory has none; use {tokenizer_type} and {tokenizer_model}"
    raise_user_errors(Problem({name: None}, reason) for name, given in needing.items() if given)
    return None


def _dtype_name(options: ModelOptions, device: torch.device) -> str:
    return options.dtype or ("bf16" if device.type == "cuda" else "fp32")


def load_engine(
    rank_info: RankInfo, options: ModelOptions, stored: StoredModel, rewired: ModelConfig | None = None
) -> GenerationEngine:
    """Load this rank's part of the model, after joining the other ranks if there are any.

    `rewired` is the model in another wiring, with the same tensors, which the engine computes instead.
    """
    begun = time.monotonic()
    config = rewired or stored.config
    ranks = rank_info.world_size
    peers = Peers()
    if rank_info.launched:
        device = start_process_group(rank_info, _TIMEOUT_MINUTES, peers=peers)
        mesh = ProcessMesh.build(ranks, head_replicas=head_replicas(config, ranks))
    else:
        device, mesh = rank_info.device(), ProcessMesh.single()
    dtype_name = _dtype_name(options, device)
    dtype = DTYPES[dtype_name]
    has_experts = config.num_experts > 0
    mesh = replace(mesh, tensor=select_all_reduce(options.tp_all_reduce, mesh.tensor, device, dtype, has_experts))
    model = load_model(
        replace(stored, config=config), mesh, dtype, device, options.overlap, options.compile_sub_blocks, options.verify
    )
    if rank_info.rank == 0:
        for warning in stored.warnings:
            print(f"warning: {warning}", file=sys.stderr)
        kind = f"{stored.config.residual_mode}, {config.num_layers} layers, {dtype_name} on {device.type}"
        loaded = f"tensor parallel {ranks}, loaded in {time.monotonic() - begun:.1f} s"
        print(f"{stored.directory}: {kind}, {loaded}", file=sys.stderr, flush=True)
    new_graph = None
    if options.cuda_graph and device.type == "cuda" and not waits_for_choices(model):
        new_graph = partial(CudaStepGraph, Watch(peers) if rank_info.launched else None)
    draft_tokens = 0 if options.draft is None else options.draft_tokens
    return GenerationEngine(model, mesh, stored.tokenizer, new_graph, options.prefill_chunk_size, draft_tokens)


def _read_checked_prompts(
    options: GenerateOptions, stored: StoredModel, encoder: PromptEncoder | None, standard_input: str | None
) -> list[Prompt]:
    prompts = read_prompts(options.prompts, encoder, standard_input)
    errors = prompt_errors(prompts, stored.config, 0 if options.output.score else options.sampling.max_new_tokens)
    if options.output.score:
        errors += [
            prompt.problem("a single token has no score, because there is no token before it")
            for prompt in prompts
            if len(prompt.ids) == 1
        ]
    raise_user_errors(errors)
    return prompts


def _read_standard_input(engine: GenerationEngine, read: Callable[[str], list[Prompt]]) -> list[Prompt]:
    """Read prompts on rank 0, because the ranks share standard input; return them, or raise UserError, on all ranks."""
    prompts: list[Prompt] = []
    errors = ErrorCollector()
    if engine.group.rank == 0:
        with errors.collect():
            try:
                prompts = read(sys.stdin.read())
            except UnicodeDecodeError as error:
                errors.add(f"standard input: not UTF-8: {error.reason} at byte {error.start}")
    prompts, problems = engine.group.broadcast_object((prompts, errors.problems))
    raise_user_errors(problems)
    return prompts


def _score(engine: GenerationEngine, prompts: Sequence[Prompt], options: GenerateOptions, stored: StoredModel) -> None:
    for prompt in prompts:
        logprobs = engine.score(prompt.ids)
        if engine.group.rank == 0:
            _write_stdout(_score_line(prompt, logprobs, options.output.json, options.output.logprobs))


def _continue(
    engine: GenerationEngine, prompts: Sequence[Prompt], options: GenerateOptions, stored: StoredModel
) -> None:
    samples = range(options.sampling.num_samples)
    repeated = [prompt for prompt in prompts for _ in samples]
    sampling, output = options.sampling, options.output
    requests = [new_request(sampling, output, stored, prompt, sample) for prompt in prompts for sample in samples]
    if engine.group.rank != 0:
        engine.generate(requests)
        return
    if options.output.json:
        generations = engine.generate(requests)
        drafts = options.model.draft is not None
        lines = (_generation_line(*pair, drafts) for pair in zip(repeated, generations, strict=True))
        _write_stdout("".join(lines))
    else:
        pieces: list[str] = []
        write = _write_stdout if options.output.stream else pieces.append
        writer = _TextOutput(repeated, engine.tokenizer, write, repeat=not options.prompts.chat)
        generations = engine.generate(requests, writer.add)
        _write_stdout("".join(pieces))
    print(_summary(generations), file=sys.stderr, flush=True)


def new_request(
    sampling: SamplingOptions, output: OutputOptions, stored: StoredModel, prompt: Prompt, sample: int = 0
) -> GenerationRequest:
    """Return the request for one of the continuations of a prompt."""
    seed = request_seed(sampling.seed, prompt.ids, sample)
    parameters = SamplingParameters.like(sampling, seed=seed, logprobs=output.logprobs)
    eos_ids = frozenset[int]() if sampling.ignore_eos else stored.eos_ids
    stop = tuple(text.replace("\\n", "\n").replace("\\t", "\t") for text in sampling.stop)
    return GenerationRequest(prompt.ids, sampling.max_new_tokens, parameters, eos_ids, stop)


def _converse(engine: GenerationEngine, encoder: PromptEncoder, options: GenerateOptions, stored: StoredModel) -> None:
    """Continue each line of standard input, with a chat template as one conversation; report invalid ones on stderr."""
    history: list[Message] = []
    group = engine.group.over_gloo(_INPUT_TIMEOUT)
    if isinstance(sys.stdin, io.TextIOWrapper):
        # `check_characters` reports bytes that are not UTF-8, instead of an exception while reading.
        sys.stdin.reconfigure(errors="surrogateescape")
    while True:
        prompt = None
        if engine.group.rank == 0:
            prompt = _next_line(encoder, history, stored.config, options.sampling.max_new_tokens)
        prompt = group.broadcast_object(prompt)
        if prompt is None:
            return
        request = new_request(options.sampling, options.output, stored, prompt)
        if engine.group.rank != 0:
            engine.generate([request])
            continue
        if not encoder.is_chat:
            _write_stdout(prompt.text or "")
        (generation,) = engine.generate([request], lambda token: _write_stdout(token.text))
        _write_stdout("\n")
        if encoder.is_chat:
            history.append({"role": "user", "content": prompt.text})
            history.append({"role": "assistant", "content": generation.text})


def _next_line(
    encoder: PromptEncoder, history: Sequence[Message], config: ModelConfig, max_new_tokens: int
) -> Prompt | None:
    """Return the next line of standard input that can be continued; None at the end."""
    while True:
        if sys.stdin.isatty():
            print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            return None
        text = line.rstrip("\r\n")
        if not text:
            continue
        try:
            prompt = Prompt("this line", text)
            check_characters(prompt)
            prompt = prompt._replace(ids=encoder.encode(text, history))
            errors = prompt_errors([prompt], config, max_new_tokens)
        except UserError as error:
            errors = list(error.problems)
        if not errors:
            return prompt
        print(*errors, sep="\n", file=sys.stderr, flush=True)


def _write_stdout(text: str) -> None:
    """Write and flush. If the pipe is closed, discard this and all later output: the other ranks wait for this one."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)


class _TextOutput:
    """Writes prompts and continuations one after another, although they are generated together.

    Tokens of the first unfinished prompt are written as they come; tokens of later prompts are buffered. If there are
    several prompts, each has a heading. Without a tokenizer the generated ids are written instead of text.
    """

    def __init__(
        self, prompts: Sequence[Prompt], tokenizer: Tokenizer | None, write: Callable[[str], None], repeat: bool = True
    ) -> None:
        """`repeat`: write each prompt before its continuation."""
        self._tokenizer, self._write = tokenizer, write
        self._buffered = [""] * len(prompts)
        for index, prompt in enumerate(prompts):
            if len(prompts) > 1:
                self._buffered[index] = f"--- {index + 1} of {len(prompts)} ---\n"
            if repeat and prompt.text is not None:
                self._buffered[index] += prompt.text
            elif repeat and tokenizer is not None:
                self._buffered[index] += tokenizer.decode(prompt.ids)
        self._finished = [False] * len(prompts)
        self._current = 0
        self._flush()

    def add(self, token: NewToken) -> None:
        self._buffered[token.sample] += f"{token.id} " if self._tokenizer is None else token.text
        if token.finish_reason is not None:
            self._buffered[token.sample] += "\n"
            self._finished[token.sample] = True
        self._flush()

    def _flush(self) -> None:
        while self._current < len(self._buffered):
            self._write(self._buffered[self._current])
            self._buffered[self._current] = ""
            if not self._finished[self._current]:
                return
            self._current += 1


def _generation_line(prompt: Prompt, generation: Generation, drafts: bool) -> str:
    values = {
        "prompt": prompt.text,
        "prompt_ids": generation.prompt_ids,
        "ids": generation.ids,
        "text": generation.text,
        "finish_reason": generation.finish_reason,
        "prompt_tokens": len(generation.prompt_ids),
        "generated_tokens": len(generation.ids),
        **generation.timings._asdict(),
        "state_bytes": generation.state_bytes,
    }
    if generation.logprobs is not None:
        values["logprobs"] = generation.logprobs
    if not drafts:
        del values["accepted_length"]
    return json.dumps(values) + "\n"


def _summary(generations: Sequence[Generation]) -> str:
    prompt_tokens = sum(len(generation.prompt_ids) for generation in generations)
    new_tokens = sum(len(generation.ids) for generation in generations)
    timings = generations[0].timings
    decode = "" if timings.decode_tokens_per_second is None else f", decode {timings.decode_tokens_per_second:.1f}"
    if timings.accepted_length is not None:
        decode += f"; accepted length {timings.accepted_length:.2f}"
    return (
        f"{counted(len(generations), 'prompt')}: {counted(prompt_tokens, 'token')} in, {new_tokens} out; "
        f"first token after {timings.time_to_first_token * 1000:.0f} ms; "
        f"tokens/s: prefill {timings.prefill_tokens_per_second:.1f}{decode}; "
        f"states of a sequence: {size_text(generations[0].state_bytes)}"
    )


def _score_line(prompt: Prompt, logprobs: Sequence[float], as_json: bool, per_token: bool) -> str:
    """Return the log-likelihood and perplexity of a text, with `per_token` also each token's log-probability."""
    total = sum(logprobs)
    # exp() of a larger exponent exceeds the range of a float.
    perplexity = math.exp(min(-total / len(logprobs), 700.0))
    if as_json:
        values = {
            "prompt": prompt.text,
            "prompt_ids": prompt.ids,
            "scored_tokens": len(logprobs),
            "log_likelihood": total,
            "perplexity": perplexity,
        }
        return json.dumps(values | ({"logprobs": list(logprobs)} if per_token else {})) + "\n"
    line = f"{len(logprobs)} tokens scored, log-likelihood {total:.4f}, perplexity {perplexity:.4f}\n"
    return line + (" ".join(f"{logprob:.4f}" for logprob in logprobs) + "\n" if per_token else "")

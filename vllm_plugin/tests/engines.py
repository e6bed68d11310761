"""Calls of vLLM that tests make in other processes.

Each builds one engine. Results are plain values, so that nothing keeps an engine alive that the next one replaces.
"""

import contextlib
import gc
import itertools
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import torch
import torch.distributed as dist
from megatron_ladder_vllm.deployment import ModelSizes
from megatron_ladder_vllm.in_flight import AllReduces, PendingOutputs, on_side_stream
from megatron_ladder_vllm.model import LadderDecoderLayer, MegatronLadderHybridForCausalLM
from torch.profiler import ProfilerActivity, profile, record_function
from vllm import LLM, SamplingParams, envs
from vllm.compilation.counter import compilation_counter
from vllm.distributed import get_tp_group
from vllm.distributed.parallel_state import _group_name_counter, destroy_model_parallel
from vllm.lora.request import LoRARequest

from vllm_plugin.tests import delta_rule
from vllm_plugin.tests.as_on_cuda import as_on_cuda
from vllm_plugin.tests.models import NEW_TOKENS, make_prompts
from vllm_plugin.tests.streams import PlayedStreams

delta_rule.install()
# vLLM's Qwen3.5 imports what resizes images, with torchvision, which this environment lacks.
sys.modules["transformers.models.qwen2_vl.image_processing_qwen2_vl"] = Mock()

ON_CUDA = ("pieces", "whole")
GROUPS = ("tp", "pp", "ep")
CHUNK = 16
"""Tokens of a step: less than the longest prompts have, so vLLM computes them in chunks."""


def call(port: int, function: Any, *arguments: Any) -> Any:
    """Call a function on a rank, with a port for all ranks of the engine that it builds.

    If all engines used one port, a rank could connect to the store of the other rank's previous engine.
    """
    os.environ["MASTER_PORT"] = str(port)
    # vLLM names shared memory by these counters, so two test runs on one machine would share it. Cached graphs contain
    # the names, so they are the same for all engines of a run, as they are for all starts of a server.
    for group in GROUPS:
        _group_name_counter[group] = os.getppid()
    return function(*arguments)


def remove_shared_memory() -> None:
    """Remove the names of what ranks of this process share, so that another engine can take them."""
    for group in GROUPS:
        for path in Path("/dev/shm").glob(f"-{group}:{os.getpid()}-*"):
            path.unlink()


def build(folder: Path, mode: str = "eager", **options: Any) -> LLM:
    """Return an engine with a small cache, of as many ranks as the process was started with.

    `mode` is `eager`, `compiled` (vLLM's compilation for CPUs), or as on GPUs: compiled in `pieces` or as a `whole`.
    """
    gc.collect()
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    settings = {
        "dtype": "float32",
        "seed": 0,
        "skip_tokenizer_init": True,
        "max_model_len": 128,
        "max_num_seqs": 8,
        "max_num_batched_tokens": CHUNK,
        "block_size": 32,
        "kv_cache_memory_bytes": 1 << 24,
        "enforce_eager": mode == "eager",
        "enable_prefix_caching": True,
        "tensor_parallel_size": ranks,
        "distributed_executor_backend": "external_launcher" if ranks > 1 else None,
    }
    with as_on_cuda(whole=mode == "whole") if mode in ON_CUDA else contextlib.nullcontext():
        return LLM(model=str(folder), **settings | options)


def continued(llm: LLM, prompts: list[list[int]], adapter: LoRARequest | None = None) -> tuple[list[list[int]], int]:
    """Return the greedy continuations, and how many tokens of the prompts came from the prefix cache."""
    sampling = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False)
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False, lora_request=adapter
    )
    cached = sum(output.num_cached_tokens for output in outputs)
    return [list(output.outputs[0].token_ids) for output in outputs], cached


def tokens(folder: Path, options: dict[str, Any]) -> tuple[list[list[int]], int]:
    """Continue all prompts, those that share a prefix after the others; return `continued`'s results."""
    llm = build(folder, **options)
    prompts = make_prompts()
    first, _ = continued(llm, prompts[:-2])
    second, cached = continued(llm, prompts[-2:])
    return first + second, cached


def drafted(folder: Path, count: int, options: dict[str, Any]) -> tuple[list[list[int]], list[list[int]]]:
    """Continue each prompt alone with drafts of `count` tokens; return the tokens, and the drafts of each prompt."""
    speculation = {"method": "mtp", "num_speculative_tokens": count}
    llm = build(folder, **options, speculative_config=speculation)
    drafts: list[list[int]] = []

    def record(worker: Any) -> None:
        drafter = worker.model_runner.drafter
        propose = drafter.propose

        def proposed(*arguments: Any, **keywords: Any) -> torch.Tensor:
            found: torch.Tensor = propose(*arguments, **keywords)
            drafts[-1].extend(found.flatten().tolist())
            return found

        drafter.propose = proposed

    llm.collective_rpc(record)
    tokens = []
    for prompt in make_prompts():
        drafts.append([])
        tokens += continued(llm, [prompt])[0]
    return tokens, drafts


def tokens_from_latents(folder: Path, options: dict[str, Any]) -> tuple[list[list[int]], int]:
    """Continue all prompts with a cache of latents, as on GPUs; return `continued`'s results."""
    with patch.object(ModelSizes, "is_deepseek_mla", lambda sizes: True):
        return tokens(folder, options)


def staged_tokens(folder: Path, partition: str, mode: str) -> list[list[int]]:
    """Continue all prompts with two pipeline stages, of as many layers as `partition` names."""
    destroy_model_parallel()
    envs.disable_envs_cache()
    os.environ["VLLM_PP_LAYER_PARTITION"] = partition
    try:
        # vLLM allocates the tensors that a stage receives in the warm-up, which it leaves out in eager mode.
        ranks = int(os.environ["WORLD_SIZE"])
        options = {"tensor_parallel_size": ranks // 2, "pipeline_parallel_size": 2, "mode": mode}
        return tokens(folder, options)[0]
    finally:
        destroy_model_parallel()
        envs.disable_envs_cache()
        del os.environ["VLLM_PP_LAYER_PARTITION"]


def cached_tokens(folder: Path, mode: str, cache: Path) -> tuple[list[list[int]], int, int]:
    """Continue all prompts with graphs in `cache`; return the tokens, and how many graphs were compiled and loaded."""
    before = compilation_counter.clone()
    with fresh_cache(cache):
        found, _ = tokens(folder, {"mode": mode})
    compiled = compilation_counter.num_aot_compiles - before.num_aot_compiles
    return found, compiled, compilation_counter.num_aot_artifacts_loaded - before.num_aot_artifacts_loaded


@contextlib.contextmanager
def fresh_cache(folder: Path) -> Iterator[None]:
    """Let vLLM keep compiled graphs in this folder."""
    # An earlier engine has frozen the variables that vLLM reads.
    envs.disable_envs_cache()
    with patch.dict(os.environ, VLLM_CACHE_ROOT=str(folder)):
        yield
    envs.disable_envs_cache()


FAULTS: dict[str, Callable[[], Any]] = {
    "a sum is used after its norm": lambda: patch.object(
        PendingOutputs, "add_and_norm", lambda pending, number, norm, stream: norm(pending.pop(number), stream)
    ),
    "experts run before a shared expert": lambda: patch.object(
        LadderDecoderLayer, "branches", lambda layer, sub_block: sub_block.kind.branches
    ),
    "a sub-block reads what experts have read": lambda: patch.object(
        LadderDecoderLayer, "shares_input", lambda layer, index: layer.sub_blocks[index].shares_input
    ),
    "no wait": lambda: patch.object(AllReduces, "wait", lambda *_: None),
    "no hold": lambda: patch.object(PendingOutputs, "hold", lambda *_: None),
}


def with_fault(fault: str, cache: Path, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call another of these functions with a planted fault, which no graph of other engines has."""
    with FAULTS[fault](), fresh_cache(cache):
        return function(*arguments)


def adapted_tokens(folder: Path, adapter: Path) -> tuple[list[list[int]], list[list[int]]]:
    """Continue all prompts with the model alone, and with the adapter."""
    llm = build(folder, enable_lora=True, max_lora_rank=8)
    return continued(llm, make_prompts())[0], continued(llm, make_prompts(), LoRARequest("adapter", 1, str(adapter)))[0]


def states(folder: Path, options: dict[str, Any]) -> tuple[list[Any], Any]:
    """Return shapes and types of the states of a sequence: of each layer, and those for which vLLM plans its cache."""
    llm = build(folder, **options)

    def states_of_layers(model: torch.nn.Module) -> list[Any]:
        layers = [layer.linear_attn for layer in model.model.layers if hasattr(layer, "linear_attn")]
        return [
            ([tuple(state.shape[1:]) for state in layer.kv_cache], [state.dtype for state in layer.kv_cache])
            for layer in layers
        ]

    (found,) = llm.apply_model(states_of_layers)
    config = llm.llm_engine.vllm_config
    planned = MegatronLadderHybridForCausalLM.get_mamba_state_shape_from_config(config)
    dtypes = MegatronLadderHybridForCausalLM.get_mamba_state_dtype_from_config(config)
    return found, (list(planned), list(dtypes))


def quantised_tokens(folder: Path) -> tuple[list[list[int]], set[str]]:
    """Continue all prompts in bfloat16; return the tokens and the names of the methods of the layers' linears."""
    llm = build(folder, dtype="bfloat16")

    def methods(model: torch.nn.Module) -> set[str]:
        layers = model.model.layers.modules()
        return {type(module.quant_method).__name__ for module in layers if hasattr(module, "input_size")}

    (found,) = llm.apply_model(methods)
    return continued(llm, make_prompts())[0], found


OPERATIONS = {
    "_C::onednn_mm": "m",
    "_C::cpu_fused_moe": "e",
    "vllm::unified_attention_with_output": "a",
    "vllm::cpu_gdn_attention_core": "d",
    "vllm::qwen_gdn_attention_core": "d",
}
"""Name in the profiler -> letter: products, routed experts, attention, gated DeltaNet."""


def recorded_passes(folder: Path, options: dict[str, Any]) -> tuple[list[list[int]], list[str]]:
    """Continue all prompts; return the tokens, and what each forward pass of the layers ran in order.

    Operations are recorded by their letters, launches as `s` and waits as `w`, each with the number of its launch. The
    launch of the embedding is recorded as `r`.
    """
    llm = build(folder, **options)

    def record_all(model: torch.nn.Module) -> None:
        reduces = model.model.all_reduces
        launch, launches = reduces.transport, []

        def start(partial: torch.Tensor) -> tuple[torch.Tensor, Any]:
            number = len(launches) - 1
            with record_function(f"s{number}" if launches else "r"):
                buffer, work = launch(partial)
            launches.append(number)

            def wait() -> None:
                with record_function(f"w{number}" if number >= 0 else "embedded"):
                    work.wait()

            return buffer, SimpleNamespace(wait=wait)

        reduces.transport = start
        model.register_forward_pre_hook(lambda *_: launches.clear())

    llm.apply_model(record_all)
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        found, _ = continued(llm, make_prompts())
    events = sorted(recorded.events(), key=lambda event: event.time_range.start)
    names = (OPERATIONS.get(event.name, event.name) for event in events)
    steps = " ".join(name for name in names if re.fullmatch(r"[rmead]|[sw]\d+", name))
    # The last product is the head's.
    return found, [part.rsplit("m", 1)[0] for part in steps.split("r")[1:]]


def played_streams(folder: Path, fault: str = "") -> tuple[list[list[int]], list[str], int]:
    """Continue all prompts with the side stream of GPUs; return the tokens, the hazards and the number of operators."""
    llm = build(folder)
    streams = PlayedStreams()
    shared = torch.empty(CHUNK + 2, 64)
    starts = itertools.cycle(range(2))

    class Group:
        """The all-reduce of GPUs, of which torch does the sum."""

        def _all_reduce_out_place(self, partial: torch.Tensor) -> torch.Tensor:
            reused = shared[next(starts) :][: len(partial)]
            total = reused if fault == "reused buffer" else torch.empty_like(partial)
            total.copy_(partial)
            dist.all_reduce(total, group=get_tp_group().device_group)
            return total

    def play(model: torch.nn.Module) -> None:
        group: Any = Group()
        model.model.all_reduces.transport = on_side_stream(group)
        forward = model.model.forward

        def played(*arguments: Any, **options: Any) -> Any:
            with streams:
                output = forward(*arguments, **options)
            streams.check_joined()
            return output

        model.model.forward = played

    with streams.as_cuda(fault):
        llm.apply_model(play)
        found, _ = continued(llm, make_prompts())
    return found, streams.hazards, streams.operators


def logits(folder: Path, prompt: list[int]) -> tuple[list[int], torch.Tensor]:
    """Continue one prompt; return the new tokens and the logits [new tokens, vocabulary] that chose them."""
    llm = build(folder, logprobs_mode="raw_logits", max_logprobs=-1)
    sampling = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False, logprobs=-1)
    ((output,),) = (found.outputs for found in llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False))
    rows = [[row[token].logprob for token in range(len(row))] for row in output.logprobs or ()]
    return list(output.token_ids), torch.tensor(rows)

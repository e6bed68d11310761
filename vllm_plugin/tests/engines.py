"""Calls of vLLM that tests make in their own process or on the ranks of a `Workers`.

Each builds one engine. Results are plain values, so that nothing keeps an engine alive that the next one replaces.
"""

import gc
import os
from pathlib import Path
from typing import Any

import torch
from vllm import LLM, SamplingParams, envs
from vllm.distributed import get_tp_group
from vllm.distributed.parallel_state import destroy_model_parallel
from vllm.lora.request import LoRARequest

from vllm_plugin.tests.models import NEW_TOKENS, make_prompts

CHUNK = 16
"""Tokens of a step: less than the longest prompts have, so vLLM computes them in chunks."""


def build(folder: Path, **options: Any) -> LLM:
    """Return an engine with a small cache, of as many ranks as the process was started with."""
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
        "enforce_eager": True,
        "enable_prefix_caching": True,
        "tensor_parallel_size": ranks,
        "distributed_executor_backend": "external_launcher" if ranks > 1 else None,
    }
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


def staged_tokens(folder: Path, partition: str) -> list[list[int]]:
    """Continue all prompts with one pipeline stage per rank, of as many layers as `partition` names."""
    destroy_model_parallel()
    envs.disable_envs_cache()
    os.environ["VLLM_PP_LAYER_PARTITION"] = partition
    try:
        # vLLM allocates the tensors that a stage receives in the warm-up, which it leaves out in eager mode.
        options = {"tensor_parallel_size": 1, "pipeline_parallel_size": 2, "enforce_eager": False}
        return tokens(folder, options)[0]
    finally:
        destroy_model_parallel()
        envs.disable_envs_cache()
        del os.environ["VLLM_PP_LAYER_PARTITION"]


def adapted_tokens(folder: Path, adapter: Path) -> tuple[list[list[int]], list[list[int]]]:
    """Continue all prompts with the model alone, and with the adapter."""
    llm = build(folder, enable_lora=True, max_lora_rank=8)
    return continued(llm, make_prompts())[0], continued(llm, make_prompts(), LoRARequest("adapter", 1, str(adapter)))[0]


def quantised_tokens(folder: Path) -> tuple[list[list[int]], set[str]]:
    """Continue all prompts in bfloat16; return the tokens and the names of the methods of the layers' linears."""
    llm = build(folder, dtype="bfloat16")

    def methods(model: torch.nn.Module) -> set[str]:
        layers = model.model.layers.modules()
        return {type(module.quant_method).__name__ for module in layers if hasattr(module, "input_size")}

    (found,) = llm.apply_model(methods)
    return continued(llm, make_prompts())[0], found


class RecordingTransport:
    """Records launches as `s` and waits as `w`, each with its number in the forward pass."""

    def __init__(self, inner: Any, log: list[str]) -> None:
        self._inner = inner
        self._log = log
        self._launched = 0

    def restart(self) -> None:
        self._launched = 0

    def start(self, partial: torch.Tensor) -> tuple[torch.Tensor, Any]:
        buffer, work = self._inner.start(partial)
        number = self._launched
        self._launched += 1
        self._log.append(f"s{number}")
        return buffer, _RecordingWork(work, self._log, number)


class _RecordingWork:
    def __init__(self, inner: Any, log: list[str], number: int) -> None:
        self._inner = inner
        self._log = log
        self._number = number

    def wait(self) -> None:
        self._log.append(f"w{self._number}")
        self._inner.wait()


def communication(folder: Path, options: dict[str, Any]) -> tuple[list[list[int]], list[str]]:
    """Continue all prompts; return the tokens and the communication of each forward pass in order.

    vLLM's own all-reduces are recorded as `r`, and its gathers as `g`.
    """
    llm = build(folder, **options)
    log: list[str] = []
    group = get_tp_group()

    def recorded(name: str, letter: str) -> Any:
        call = getattr(group, name)

        def record(*args: Any, **kwargs: Any) -> Any:
            log.append(letter)
            return call(*args, **kwargs)

        return record

    def record_all(model: torch.nn.Module) -> None:
        transport = RecordingTransport(model.model.all_reduces.transport, log)
        model.model.all_reduces.transport = transport

        def begin(*_: Any) -> None:
            transport.restart()
            log.append("|")

        model.register_forward_pre_hook(begin)

    llm.apply_model(record_all)
    replaced = {"_all_reduce_out_place": "r", "all_gather": "g", "gather": "g"}
    for name, letter in replaced.items():
        setattr(group, name, recorded(name, letter))
    try:
        found, _ = continued(llm, make_prompts())
    finally:
        for name in replaced:
            delattr(group, name)
    return found, [steps.strip() for steps in " ".join(log).split("|")[1:]]


def logits(folder: Path, prompt: list[int]) -> tuple[list[int], torch.Tensor]:
    """Continue one prompt; return the new tokens and the logits [new tokens, vocabulary] that chose them."""
    llm = build(folder)
    rows: list[torch.Tensor] = []

    def record_logits(model: torch.nn.Module) -> None:
        compute_logits = model.compute_logits

        def record(hidden_states: torch.Tensor) -> torch.Tensor:
            found = compute_logits(hidden_states)
            rows.append(found[-1:].clone())
            return found

        model.compute_logits = record

    llm.apply_model(record_logits)
    ((found,), _) = continued(llm, [prompt])
    return found, torch.cat(rows)[-NEW_TOKENS:]

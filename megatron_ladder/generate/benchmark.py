"""How fast a loaded model prefills and decodes on this machine: `--bench`."""

import json
import statistics
from collections.abc import Sequence

import torch

from megatron_ladder.generate.engine import GenerationEngine
from megatron_ladder.generate.options import BenchOptions
from megatron_ladder.generate.requests import GenerationRequest, Timings
from megatron_ladder.generate.sampling import GREEDY


def run_benchmark(engine: GenerationEngine, options: BenchOptions, new_tokens: int) -> list[Timings]:
    """Rounds after one to warm up; every rank must call it.

    Args:
        new_tokens: decoded behind each prompt.
    """
    generator = torch.Generator().manual_seed(0)
    size = (options.bench_batch, options.bench_prompt)
    ids = torch.randint(0, engine.model.config.vocab_size, size, generator=generator)
    requests = [GenerationRequest(tuple(row), new_tokens, GREEDY) for row in ids.tolist()]
    rounds = [engine.generate(requests)[0].timings for _ in range(options.bench_rounds + 1)]
    return rounds[1:]


def report(rounds: Sequence[Timings], options: BenchOptions, new_tokens: int, as_json: bool) -> str:
    """What was measured: medians, and the extremes between which the rounds lie."""
    rates = {"prefill": [round.prefill_tokens_per_second for round in rounds]}
    decode = [round.decode_tokens_per_second for round in rounds if round.decode_tokens_per_second is not None]
    if decode:
        rates["decode"] = decode
    if as_json:
        values: dict[str, object] = {
            "batch": options.bench_batch, "prompt_tokens": options.bench_prompt, "new_tokens": new_tokens,
            "rounds": len(rounds),
        }  # fmt: skip
        for name, found in rates.items():
            values[f"{name}_tokens_per_second"] = statistics.median(found)
            values[f"{name}_tokens_per_second_range"] = [min(found), max(found)]
        return json.dumps(values) + "\n"
    lines = [
        f"{name:8} {statistics.median(found):10.1f} tokens/s  ({min(found):.1f} to {max(found):.1f} in {len(found)} "
        f"rounds; batch {options.bench_batch}, {options.bench_prompt} + {new_tokens} tokens)"
        for name, found in rates.items()
    ]
    return "\n".join(lines) + "\n"

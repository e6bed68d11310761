"""Compares overlapped all-reduces with the same in order: results must be equal. Flags are those of benchmark.py."""

import os
import sys
import tempfile
import time
from argparse import Namespace

from vllm import LLM, SamplingParams

from benchmark import model_config, parse_arguments

MODEL = "--device cuda --layers 16 --hidden 4096 --intermediate 14336 --heads 32 --kv-heads 8 --steps 256"
CASES = {
    "defaults": {},
    "eager": {"enforce_eager": True},
    "without FlashInfer": {},
    "without custom all-reduce": {"disable_custom_all_reduce": True},
}
"""Settings of vLLM by name; those that begin with "without" also turn off FlashInfer's all-reduce."""


def measure(options: Namespace, case: str, overlap: bool) -> list[tuple[str, float]]:
    """Return the tokens with logprobs after prompts of 8, 300 and 1500 tokens, and the seconds of each."""
    os.environ["VLLM_ALLREDUCE_USE_FLASHINFER"] = str(int(not case.startswith("without")))
    settings = CASES[case] | {"hf_overrides": {"overlap_all_reduces": overlap}, "kv_cache_memory_bytes": 1 << 28}
    with tempfile.TemporaryDirectory() as folder:
        model_config(options, options.wirings[0]).save_pretrained(folder)
        llm = LLM(folder, load_format="dummy", skip_tokenizer_init=True, tensor_parallel_size=options.tp, **settings)
    parameters = SamplingParams(temperature=0, max_tokens=options.steps, ignore_eos=True, detokenize=False, logprobs=1)
    measured = []
    # The first request warms up.
    for length in (7, 8, 300, 1500):
        began = time.perf_counter()
        (request,) = llm.generate([{"prompt_token_ids": [length % 9] * length}], parameters, use_tqdm=False)
        measured.append((repr(request.outputs[0].logprobs), time.perf_counter() - began))
    return measured[1:]


if __name__ == "__main__":
    flags = parse_arguments([*MODEL.split(), *sys.argv[1:]])
    equal = []
    for case in CASES if flags.device == "cuda" else ["defaults", "eager"]:
        pairs = list(zip(*(measure(flags, case, overlap) for overlap in (True, False)), strict=True))
        equal.append(all(overlapped == in_order for (overlapped, _), (in_order, _) in pairs))
        gains = " ".join(f"{slow / fast:.2f}" for (_, fast), (_, slow) in pairs)
        print(f"{case}: {'bitwise equal' if equal[-1] else 'DIFFERENT'}; in order / overlapped: {gains}", flush=True)
    sys.exit(not all(equal))

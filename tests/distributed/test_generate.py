"""Generation over several ranks: the same tokens as one rank and as the reference, and the command itself."""

import itertools
import json
import random
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM

from megatron_ladder.blueprint.model import ModelConfig, head_replicas
from megatron_ladder.cli.convert_checkpoint import main as convert
from megatron_ladder.cli.generate import main
from megatron_ladder.generate.engine import GenerationEngine
from megatron_ladder.generate.loading import load_model, open_model
from megatron_ladder.generate.requests import GenerationRequest
from megatron_ladder.generate.sampling import SamplingParameters
from megatron_ladder.model.stack import StackOptions
from megatron_ladder.parallel import vocabulary
from megatron_ladder.parallel.scoring import Score
from tests.helpers.commands import REPOSITORY_ROOT, run_command
from tests.helpers.patience import patient
from tests.helpers.pool import GlooPools
from tests.helpers.recording import recorded_model
from tests.helpers.sharded import build, mesh_of
from tests.reference import greedy_continuation
from tests.unit.convert.saved_models import MODELS as KINDS
from tests.unit.convert.saved_models import save_model
from tests.unit.generate.tiny_model import (
    DELTA,
    LATENT,
    MODELS,
    PROMPTS,
    greedy_by_transformers,
    reference_of,
    tiny_config,
    tiny_engine,
    write_checkpoint,
    write_checkpoint_with_tokenizer,
)

Tokens = list[tuple[int, ...]]
Prompts = Sequence[tuple[int, ...]]
LONG_PROMPTS = [prompt for prompt in PROMPTS if len(prompt) > 1]

NEW_TOKENS = 8
GREEDY = SamplingParameters(temperature=0.0)
PROGRAM = REPOSITORY_ROOT / "tools" / "generate.py"


def sampled_requests(seed: int) -> list[GenerationRequest]:
    """Return a request with different sampling parameters for each prompt."""
    parameters = [
        SamplingParameters(seed=seed),
        SamplingParameters(seed=seed + 1, top_k=10),
        SamplingParameters(seed=seed + 2, top_p=0.7),
        SamplingParameters(seed=seed, temperature=1.5, top_k=30, top_p=0.9, repetition_penalty=1.3),
        SamplingParameters(seed=seed + 3, temperature=2.0, min_p=0.2),
    ]
    prompts = (*PROMPTS, PROMPTS[0])
    return [GenerationRequest(prompt, NEW_TOKENS, one) for prompt, one in zip(prompts, parameters, strict=True)]


def greedy_and_sampled(engine: GenerationEngine) -> tuple[Tokens, Tokens]:
    """Return greedy and sampled tokens."""
    greedy = engine.generate([GenerationRequest(prompt, NEW_TOKENS, GREEDY) for prompt in PROMPTS])
    sampled = engine.generate(sampled_requests(seed=1))
    return [generation.ids for generation in greedy], [generation.ids for generation in sampled]


def generate_here(
    config: ModelConfig, weights: Mapping[str, Tensor], tensor_parallel: int, overlap: bool
) -> tuple[Tokens, Tokens]:
    """Run on each rank."""
    mesh = mesh_of(tensor_parallel, head_replicas(config, tensor_parallel))
    model = build(config, weights, tensor_parallel, StackOptions(tp_overlap=overlap), packed=True)
    return greedy_and_sampled(GenerationEngine(model, mesh))


@pytest.mark.parametrize(
    ("name", "tensor_parallel"), [("ladder", 2), *((name, 2 + number % 2 * 2) for number, name in enumerate(MODELS))]
)
def test_every_size_gives_the_same_tokens(name: str, tensor_parallel: int, gloo_pools: GlooPools) -> None:
    """Greedy tokens equal those of the reference, and sampled tokens those of one process."""
    config = tiny_config(**MODELS[name])
    weights, reference = reference_of(config)
    expected_greedy = [tuple(greedy_continuation(weights, reference, prompt, NEW_TOKENS)) for prompt in PROMPTS]
    alone_greedy, alone_sampled = greedy_and_sampled(tiny_engine(config, weights))
    assert alone_greedy == expected_greedy
    assert alone_sampled != alone_greedy
    overlap = (name, tensor_parallel) != ("ladder", 2)
    results = gloo_pools(tensor_parallel).run(generate_here, config, weights, tensor_parallel, overlap)
    assert results == [(expected_greedy, alone_sampled)] * tensor_parallel


def recorded_reduces(config: ModelConfig) -> list[str]:
    """Return the reduces of the second decode step."""
    model, group = recorded_model(config, StackOptions())
    engine = GenerationEngine(model, replace(mesh_of(2), tensor=group))
    stream = engine.stream([GenerationRequest((1, 2), 3, GREEDY)])
    next(stream), next(stream)
    group.events.clear()
    group.started = 0
    next(stream)
    return group.events


def test_reduces_stay_in_flight_while_decoding(gloo_pools: GlooPools) -> None:
    """L is a launch and W a wait; 0 is the embedding. Each sub-block launches before the wait for its predecessor."""
    config = tiny_config(residual_mode="ladder", ladder_layers=(0, 1, 2))
    events = gloo_pools(2).run(recorded_reduces, config)[0]
    assert " ".join(events) == "L0 W0 L1 L2 W1 L3 W2 L4 W3 L5 W4 L6 W5 W6"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint_with_tokenizer(tmp_path_factory.mktemp("model"))[0]


SAMPLING = ["--max-new-tokens", "12", "--seed", "5", "--top-k", "50"]
FLAGS = ["--prompt", "def größe", "class", *SAMPLING]


def test_two_ranks_continue_standard_input(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--model", str(model), "--prompt", "def größe", *SAMPLING, "--json"])
    expected = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    words = [sys.executable, str(PROGRAM), "--model", str(model), "--tp", "2", *SAMPLING, "--json"]
    done = subprocess.run(words, input="def größe\n", capture_output=True, text=True, timeout=patient(120), check=False)
    assert done.returncode == 0, done.stderr
    printed = [json.loads(line) for line in done.stdout.splitlines()]
    for one, other in zip(printed, expected, strict=True):
        for key in ("prompt", "prompt_ids", "ids", "text", "finish_reason", "prompt_tokens", "generated_tokens"):
            assert one[key] == other[key]
        # Each of two ranks has one of two key-value heads.
        assert 2 * one["state_bytes"] == other["state_bytes"]
        assert one["time_to_first_token"] > 0 and one["decode_tokens_per_second"] > 0
    statistics = done.stderr.splitlines()
    assert len(statistics) == 2, done.stderr
    assert "ladder, 3 layers, fp32 on cpu, tensor parallel 2" in statistics[0]
    assert statistics[1].startswith("1 prompt")


def test_a_user_error_ends_all_ranks(model: Path) -> None:
    done = run_command([sys.executable, PROGRAM, "--model", model, "--tp", "2"], timeout=120)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[1:] == [
        "error: standard input: the prompt is empty; at least one token is required"
    ]


def from_hugging_face(
    folder: Path, prompts: Prompts = PROMPTS, new_tokens: int = NEW_TOKENS, prefill_chunk_size: int | None = None
) -> tuple[Tokens, list[Score]]:
    """Run on each rank: continue the prompts, and score those of `PROMPTS` in several parts."""
    stored = open_model(folder, None, None)
    size = dist.get_world_size()
    mesh = mesh_of(size, head_replicas(stored.config, size))
    model = load_model(stored, mesh, torch.float32, torch.device("cpu"), overlap=True)
    engine = GenerationEngine(model, mesh, prefill_chunk_size=prefill_chunk_size)
    found = engine.generate([GenerationRequest(prompt, new_tokens, GREEDY) for prompt in prompts])
    greedy = [(prompt, generation.ids) for prompt, generation in zip(prompts, found, strict=True)]
    with patch.object(vocabulary, "loss_chunk_tokens", lambda tokens: 5):
        scores = engine.score_batch([*((prompt[:1], prompt[1:]) for prompt in LONG_PROMPTS), *greedy])
    return [generation.ids for generation in found], scores


def test_a_hugging_face_directory_on_four_ranks(tmp_path: Path, gloo_pools: GlooPools) -> None:
    """With two key-value heads and an odd vocabulary size."""
    module = save_model(tmp_path, "qwen2")
    expected = greedy_by_transformers(module, PROMPTS, NEW_TOKENS)
    results = gloo_pools(4).run(from_hugging_face, tmp_path)
    assert [tokens for tokens, _ in results] == [expected] * 4
    assert [scores for _, scores in results] == [results[0][1]] * 4
    assert [score.is_greedy for score in results[0][1]] == [False] * len(LONG_PROMPTS) + [True] * len(PROMPTS)
    for prompt, score in zip(LONG_PROMPTS, results[0][1], strict=False):
        logprobs = module(torch.tensor([prompt])).logits[0].log_softmax(-1)
        at_prompt = [logprobs[place, token].item() for place, token in enumerate(prompt[1:])]
        assert score.logprobs == pytest.approx(at_prompt, abs=1e-5)


ROUTED = {"num_experts": 6, "moe_ffn_hidden_size": 12, "moe_layers": (1, 2)}
SHARED = ROUTED | {"moe_shared_expert_intermediate_size": 8}
QWEN3_5 = DELTA | {
    "qk_layernorm": True,
    "attention_output_gate": True,
    "apply_layernorm_1p": True,
    "rotary_percent": 0.5,
    "norm_epsilon": 0.01,
}
SHORT = {"rope_original_max_position_embeddings": 8, "rope_beta_fast": 2.0}
LONG: dict[str, dict[str, Any]] = {
    "qwen3_moe": {},
    "mixtral": {},
    "glm4_moe": {},
    "deepseek_v2": {},
    "deepseek_v3": {},
    "glm4_moe_lite": {},
    "hy_v3": {},
    "dots1": {},
    "solar_open": {},
    "gpt_oss": {},
    "instella_moe": {},
    "ladder": ROUTED | {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True},
    "farskip": SHARED,
    "shortcut": SHARED | {"rope_scaling": "yarn", "rope_scaling_factor": 8.0, "rope_mscale_all_dim": 0.5} | SHORT,
    "longcat": ROUTED | {"rotary_percent": 0.5},
    "late hybrid": QWEN3_5 | {"residual_mode": "ladder"},
    "late hybrid with experts": QWEN3_5 | SHARED | {"residual_mode": "farskip", "moe_shared_expert_gate": True},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LONG)
def test_500_tokens_are_those_of_transformers(name: str, tmp_path: Path, gloo_pools: GlooPools) -> None:
    """Models of known types run in transformers' own classes, the others in the exported module."""
    if name in KINDS:
        module = save_model(tmp_path / "hf", name)
        # Larger matrices make other tokens after other prompts.
        for parameter in module.parameters():
            parameter.data.mul_(1 if parameter.dim() == 1 else 4)
        module.save_pretrained(tmp_path / "hf")
    else:
        config = tiny_config(**{"residual_mode": name} | LONG[name], ladder_layers=(0, 1, 2))
        write_checkpoint(tmp_path / "run", config)
        convert(["export", "--load", str(tmp_path / "run"), "--hf", str(tmp_path / "hf")])
        module = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", trust_remote_code=True, dtype=torch.float32)
    # Without 0, which `generate` takes for padding. Long continuations repeat themselves.
    dice = random.Random(1)
    prompts = [tuple(dice.choices(range(1, 67), k=1 + number % 11)) for number in range(25)]
    expected = greedy_by_transformers(module, prompts, 20)
    assert sum(map(len, expected)) == 500 and len({token for tokens in expected for token in tokens}) > 30
    for ranks in (1, 2):
        for tokens, _ in gloo_pools(ranks).run(from_hugging_face, tmp_path / "hf", prompts, 20):
            assert tokens == expected


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"])
def test_500_tokens_of_hybrids_are_those_of_transformers(name: str, tmp_path: Path, gloo_pools: GlooPools) -> None:
    """Prompts of 1 to 73 tokens in parts of several sizes."""
    module = save_model(tmp_path, name)
    with torch.no_grad():
        for part, weight in module.named_parameters():
            weight *= 1 if weight.dim() == 1 else 4
            # Slow decays, where a wrong state lasts.
            weight -= 4.0 if part.endswith("A_log") else 0.0
    module.save_pretrained(tmp_path)
    dice = random.Random(1)
    prompts = [tuple(dice.choices(range(1, 301), k=1 + 3 * number)) for number in range(25)]
    expected = greedy_by_transformers(module, prompts, 20)
    assert sum(map(len, expected)) == 500 and len({token for tokens in expected for token in tokens}) > 30
    for ranks, chunk_size in itertools.product((1, 2), (None, 1, 7, 64)):
        for tokens, _ in gloo_pools(ranks).run(from_hugging_face, tmp_path, prompts, 20, chunk_size):
            assert tokens == expected


@pytest.mark.parametrize(
    "changes",
    [
        {"residual_mode": "ladder", "ladder_layers": (0, 1, 2), "residual_staleness": 2, "lanes": 2},
        {"residual_mode": "desync", "desync_interval": 4, "desync_tp": 2},
    ],
    ids=["lanes", "desync"],
)
def test_ranks_with_separate_streams_have_separate_latents(changes: dict[str, Any], gloo_pools: GlooPools) -> None:
    config = tiny_config(**LATENT, **changes)
    weights, reference = reference_of(config)
    expected = [tuple(greedy_continuation(weights, reference, prompt, NEW_TOKENS)) for prompt in PROMPTS]
    assert [tokens for tokens, _ in gloo_pools(2).run(generate_here, config, weights, 2, True)] == [expected] * 2


WITHOUT_OPTIONAL_PACKAGES = """
import runpy, sys
# Importing torch's compiler takes longer than the rest of the start.
for module in ("deepspeed", "transformers", "datasets", "tensorboard", "apex", "matplotlib", "torch._dynamo"):
    sys.modules[module] = None
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_one_process_streams_text_without_optional_packages(model: Path) -> None:
    program = [sys.executable, "-c", WITHOUT_OPTIONAL_PACKAGES, str(PROGRAM)]
    done = run_command([*program, "--model", str(model), *FLAGS, "--stream", "--temperature", "0"], timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("--- 1 of 2 ---\ndef größe")
    assert "\n--- 2 of 2 ---\nclass" in done.stdout
    assert len(done.stderr.splitlines()) == 2, done.stderr

"""The compiled decode step of one sample: by torch's tracer with eager kernels, and by inductor."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from megatron_ladder.blueprint.model import ModelConfig
from megatron_ladder.cli.generate import main
from megatron_ladder.comm.mesh import ProcessMesh
from megatron_ladder.generate import program
from megatron_ladder.generate.engine import GenerationEngine
from megatron_ladder.generate.graph import compiled_decode
from megatron_ladder.generate.requests import GenerationRequest
from megatron_ladder.generate.sampling import SamplingParameters
from megatron_ladder.model.language_model import LanguageModel
from megatron_ladder.model.operations import _compiler_problem
from tests.unit.generate.tiny_model import MODELS, PROMPTS, reference_of, tiny_config, tiny_model, write_checkpoint

TRACED = "aot_eager"
NO_COMPILER = _compiler_problem(torch.device("cpu"))
Continuation = tuple[tuple[int, ...], tuple[float, ...]]


def small_config(name: str) -> ModelConfig:
    """Return one of `MODELS` with two layers, or with one of four lanes, because tracing takes a second for each."""
    layers = 1 if name == "lanes" else 2
    late = tuple(layer for layer in MODELS[name].get("ladder_layers", ()) if layer < layers)
    return tiny_config(**MODELS[name] | {"num_layers": layers} | ({"ladder_layers": late} if late else {}))


def continuations(model: LanguageModel, backend: Any = None) -> list[Continuation]:
    """Return ids and log-probabilities of prompts of several lengths, alone and in a batch; compiled by a backend."""
    decode_one = None if backend is None else compiled_decode(model, backend)
    engine = GenerationEngine(model, ProcessMesh.single(), decode_one=decode_one)
    sampling = SamplingParameters(temperature=0.0, logprobs=True)
    batches = [[prompt] for prompt in PROMPTS] + [list(PROMPTS[:2])]
    found = []
    for prompts in batches:
        # The second sample of the batch ends long before the first one, which then goes on alone.
        requests = [GenerationRequest(prompt, 16 // (row + 1), sampling) for row, prompt in enumerate(prompts)]
        found += [(one.ids, one.logprobs or ()) for one in engine.generate(requests)]
    return found


def check_equal(found: list[Continuation], expected: list[Continuation], tolerance: float) -> None:
    assert [ids for ids, _ in found] == [ids for ids, _ in expected]
    for (_, ours), (_, theirs) in zip(found, expected, strict=True):
        torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=0, atol=tolerance)


@pytest.mark.parametrize("name", MODELS)
def test_the_traced_step_continues_like_the_eager_one(name: str) -> None:
    config = small_config(name)
    model = tiny_model(config, reference_of(config)[0], packed=True)
    check_equal(continuations(model, TRACED), continuations(model), 1e-5)


@pytest.mark.skipif(bool(NO_COMPILER), reason=NO_COMPILER)
def test_inductor_continues_like_the_eager_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    config = small_config("hybrid")
    model = tiny_model(config, reference_of(config)[0], packed=True)
    check_equal(continuations(model, "inductor"), continuations(model), 1e-5)


def test_half_precision_is_traced_with_an_fp32_cache() -> None:
    config = small_config("hybrid")
    model = tiny_model(config, reference_of(config)[0], packed=True, dtype=torch.bfloat16)
    check_equal(continuations(model, TRACED), continuations(model), 0.02)


def test_lengths_and_batches_share_what_was_compiled() -> None:
    """Apart from the size of the cache: a batch of one slot, and of two."""
    config, counter = small_config("standard"), CompileCounterWithBackend(TRACED)
    continuations(tiny_model(config, reference_of(config)[0], packed=True), counter)
    assert counter.frame_count == 2


def test_models_of_equal_sizes_keep_their_own_steps() -> None:
    configs = [tiny_config(num_layers=1), tiny_config(num_layers=1, residual_mode="ladder", ladder_layers=(0,))]
    models = [tiny_model(config, reference_of(configs[0])[0], packed=True) for config in configs]
    found, expected = ([continuations(model, backend) for model in models] for backend in (TRACED, None))
    assert expected[0] != expected[1]
    for ours, theirs in zip(found, expected, strict=True):
        check_equal(ours, theirs, 1e-5)


@pytest.mark.parametrize("flags", [[], ["--compile-sub-blocks"]])
def test_the_flag_compiles_the_step_of_one_process(
    flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[LanguageModel] = []

    def compiled(model: LanguageModel) -> Any:
        calls.append(model)
        return compiled_decode(model, "eager")

    config = tiny_config(num_layers=1)
    write_checkpoint(tmp_path, config, reference_of(config)[0])
    monkeypatch.setattr(program, "compiled_decode", compiled)
    monkeypatch.setattr(program, "require_compiler", lambda *_: None)
    main(["--model", str(tmp_path), "--tokens", "1 2", "--max-new-tokens", "4", *flags])
    assert len(calls) == len(flags) and capsys.readouterr().out

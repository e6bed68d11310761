"""Combinations that the engine does not support; precision and offloading in DeepSpeed's JSON."""

import json
from pathlib import Path

import pytest

from megatron_ladder.config.run import RunConfig, parse_run, resolve_run
from megatron_ladder.engine.deepspeed_json import deepspeed_json

BASE = "--train-iters 100 --lr 1e-3 --seq-length 128 --hidden-size 64 --num-attention-heads 4"


def read(words: str) -> tuple[RunConfig, list[str]]:
    errors: list[str] = []
    run = resolve_run(parse_run(f"{BASE} {words}".split(), errors), 1000, 4, errors)
    return run, errors


@pytest.mark.parametrize("stage", "0123")
@pytest.mark.parametrize("precision", ["", "--bf16", "--fp16"])
@pytest.mark.parametrize("offload", ["", "--offload-optimizer cpu"])
def test_every_supported_stage_is_accepted(stage: str, precision: str, offload: str) -> None:
    found = read(f"--zero-stage {stage} {precision} {offload}")[1]
    about_stage_0 = stage == "0" and bool(precision)
    does_not_recover = precision == "--fp16" and bool(offload) and stage != "3"
    assert len(found) == about_stage_0 + (stage == "0" and bool(offload)) + does_not_recover, found


@pytest.mark.parametrize(
    ("words", "messages"),
    [
        ("--bf16 --zero-stage 0", ["--bf16 needs --zero-stage 1, 2 or 3"]),
        ("--bf16 --fp16", ["--fp16 and --bf16 exclude each other"]),
        ("--offload-optimizer cpu --zero-stage 0", ["--offload-optimizer cpu needs --zero-stage 1, 2 or 3"]),
        ("--fp16 --offload-optimizer cpu", ["--fp16 with --offload-optimizer cpu does not recover"]),
        ("--optimizer-implementation apex --zero-stage 3", ["--optimizer-implementation apex miscounts steps"]),
        ("--optimizer-implementation apex --offload-optimizer cpu", ["--optimizer-implementation apex needs a GPU"]),
        ("--fp16 --initial-loss-scale 1000", ["--initial-loss-scale 1000: expected a power of two"]),
        ("--fp16 --initial-loss-scale 0", ["--initial-loss-scale 0: expected a power of two"]),
        ("--fp16 --min-loss-scale 0.5", ["--min-loss-scale 0.5: expected a whole number"]),
        ("--fp16 --initial-loss-scale 4 --min-loss-scale 8", ["--min-loss-scale 8 is above --initial-loss-scale 4"]),
        ("--fp16 --loss-scale 0", ["--loss-scale 0.0: expected above 0"]),
        ("--fp16 --hysteresis 0 --loss-scale-window 0", ["--loss-scale-window 0: ", "--hysteresis 0: "]),
    ],
)
def test_unsupported_combinations_are_rejected(words: str, messages: list[str]) -> None:
    found = read(words)[1]
    assert [line.startswith(start) for line, start in zip(found, messages, strict=True)] == [True] * len(found), found


@pytest.mark.parametrize(
    ("words", "messages"),
    [
        ("--zero-stage 2", ["--zero-stage 2 with --pipeline-model-parallel-size 2: a stage needs"]),
        ("--zero-stage 3", ["--zero-stage 3 with --pipeline-model-parallel-size 2: a stage needs"]),
        ("--zero-stage 1 --bf16", []),
        ("--zero-stage 1 --fp16", ["--fp16 with --pipeline-model-parallel-size is not supported"]),
        ("--offload-optimizer cpu", ["--offload-optimizer cpu with --pipeline-model-parallel-size is not supported"]),
    ],
)
def test_pipeline_restrictions(words: str, messages: list[str]) -> None:
    found = read(f"--pipeline-model-parallel-size 2 {words}")[1]
    assert [line.startswith(start) for line, start in zip(found, messages, strict=True)] == [True] * len(found), found


def merged(tmp_path: Path, words: str, given: object) -> tuple[dict[str, object], list[str]]:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(given))
    errors: list[str] = []
    return deepspeed_json(read(f"{words} --deepspeed_config {path}")[0], errors), errors


def test_loss_scaling_flags_map_to_deepspeed_keys() -> None:
    """The keys: https://www.deepspeed.ai/docs/config-json/#fp16-training-options."""
    words = "--fp16 --initial-loss-scale 4096 --min-loss-scale 2.0 --loss-scale-window 7 --hysteresis 3"
    assert deepspeed_json(read(words)[0], [])["fp16"] == {
        "enabled": True,
        "loss_scale": 0,
        "initial_scale_power": 12,
        "loss_scale_window": 7,
        "min_loss_scale": 2,
        "hysteresis": 3,
    }
    assert deepspeed_json(read("--fp16 --loss-scale 128")[0], [])["fp16"]["loss_scale"] == 128
    assert deepspeed_json(read("--bf16")[0], [])["fp16"] == {"enabled": False}


@pytest.mark.parametrize("precision", ["", "--bf16", "--fp16"])
def test_gradients_accumulate_and_are_reduced_in_fp32(precision: str) -> None:
    config = deepspeed_json(read(precision)[0], [])
    assert config["data_types"]["grad_accum_dtype"] == config["communication_data_type"] == "fp32"


def test_optimizer_offloading_is_a_flag(tmp_path: Path) -> None:
    config, errors = merged(
        tmp_path,
        "--offload-optimizer cpu --zero-stage 2",
        {"zero_optimization": {"offload_optimizer": {"device": "auto", "pin_memory": False}}},
    )
    assert errors == []
    zero = config["zero_optimization"]
    assert (zero["stage"], zero["offload_optimizer"]) == (2, {"device": "cpu", "pin_memory": False})
    # The engine's own AdamW for the host would have to be compiled.
    assert config["zero_force_ds_cpu_optimizer"] is False
    assert "offload_optimizer" not in deepspeed_json(read("--zero-stage 2")[0], [])["zero_optimization"]


def test_values_of_a_disabled_section_are_ignored(tmp_path: Path) -> None:
    """Many configurations contain sections for both precisions."""
    given = {"fp16": {"enabled": False, "loss_scale": 0, "loss_scale_window": 1000, "hysteresis": "auto"}}
    config, errors = merged(tmp_path, "--bf16", given)
    assert errors == [] and config["fp16"] == {"enabled": False, "loss_scale": 0, "loss_scale_window": 1000}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, "says none (--offload-optimizer)"),
        ({"zero_optimization": {"offload_optimizer": {"nvme_path": "/x"}}}, "can only be offloaded to host memory"),
        ({"zero_optimization": {"offload_param": {"device": "cpu"}}}, "offload_param: only the optimizer can"),
        ({"zero_optimization": {"memory_efficient_linear": True}}, "memory_efficient_linear: it replaces torch"),
        ({"bf16": {"bf16_master_weights_and_grads": True}}, "master weights and gradients are fp32; remove it"),
        ({"fp16": {"enabled": True}}, "fp16.enabled is True, and the command line says False (--fp16)"),
        ({"communication_data_type": "bf16"}, "communication_data_type: gradients are reduced in fp32; remove it"),
        ({"fp16": {"auto_cast": True}}, "fp16.auto_cast: the model casts its inputs itself"),
    ],
)
def test_a_contradicting_json_is_rejected(tmp_path: Path, given: object, message: str) -> None:
    found = merged(tmp_path, "--zero-stage 3", given)[1]
    assert len(found) == 1 and message in found[0], found

"""DeepSpeed's configuration: what the flags determine, and what a user's file may set."""

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_ladder.config.run import RunConfig, parse_run, resolve_run
from megatron_ladder.engine.deepspeed_json import bucket_numbers, deepspeed_json
from tests.helpers.runs import errors_of

BASE = "--train-iters 100 --lr 1e-3 --seq-length 128 --hidden-size 64 --num-attention-heads 4"
PARAMETERS = 12 * (4 * 64 * 64 + 3 * 64 * 256 + 2 * 64) + 64 + 2 * 1024 * 64
"""Twelve layers, final norm, and embedding and head of 1,000 words padded to 1,024."""


def derived(words: str) -> dict[str, Any]:
    """Return the configuration of a run on four ranks."""
    return deepspeed_json(run_of(words))


def run_of(words: str) -> RunConfig:
    return resolve_run(parse_run(f"{BASE} {words}".split()), 1000, 4)


def test_the_flags_determine_batches_precision_and_stage() -> None:
    config = derived("--micro-batch-size 2 --global-batch-size 16 --bf16 --zero-stage 2 --clip-grad 0.7")
    assert config["train_batch_size"] == 16 and config["gradient_accumulation_steps"] == 2
    assert config["zero_optimization"]["stage"] == 2 and config["bf16"]["enabled"] is True
    assert config["data_types"]["grad_accum_dtype"] == config["communication_data_type"] == "fp32"
    assert config["zero_optimization"]["reduce_bucket_size"] == PARAMETERS
    # Clipping is this package's own.
    assert config["gradient_clipping"] == 0.0
    assert "offload_optimizer" not in config["zero_optimization"]


def test_buckets_without_deepspeed_are_small(tmp_path: Path) -> None:
    words = "--micro-batch-size 1 --global-batch-size 4 --bf16"
    # A sixteenth of the model, so that the first gradients are reduced under backward.
    assert bucket_numbers(run_of(words)) == -(-PARAMETERS // 16)
    large = "--hidden-size 8192 --num-attention-heads 64 --ffn-hidden-size 28672 --micro-batch-size 1 --bf16"
    assert bucket_numbers(run_of(large)) == 40_000_000
    config = tmp_path / "config.json"
    config.write_text('{"zero_optimization": {"reduce_bucket_size": 5e3}}')
    assert bucket_numbers(run_of(f"{words} --deepspeed_config {config}")) == 5000


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        *(("--zero-stage 2", False), ("--zero-stage 3", True), ("--bf16", False)),
        ("--zero-stage 1 --offload-optimizer cpu", True),
    ],
)
def test_deepspeed_is_needed_where_it_shards_or_offloads(words: str, expected: bool) -> None:
    run = resolve_run(parse_run(f"{BASE} --tensor-model-parallel-size 4 {words}".split()), 1000, 4)
    assert run.needs_deepspeed is expected


def merged(tmp_path: Path, given: object, words: str = "") -> dict[str, Any]:
    path = tmp_path / "ds.json"
    path.write_text(given if isinstance(given, str) else json.dumps(given))
    return derived(f"--deepspeed_config {path} --clip-grad 0.7 {words}")


AUTO = "auto"
TRANSFORMERS = {
    "fp16": {"enabled": AUTO, "loss_scale": 0, "initial_scale_power": 16},
    "bf16": {"enabled": AUTO},
    "amp": {"enabled": AUTO, "opt_level": AUTO},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "none", "pin_memory": True},
        "offload_param": {"device": "none", "pin_memory": True},
        "overlap_comm": True,
        "reduce_bucket_size": AUTO,
        "stage3_max_live_parameters": 1e9,
    },
    "gradient_accumulation_steps": AUTO,
    "gradient_clipping": 0.7,
    "steps_per_print": 2000,
    "train_batch_size": AUTO,
    "train_micro_batch_size_per_gpu": AUTO,
    "wall_clock_breakdown": False,
}
"""The form of transformers' examples for ZeRO-3, without their optimizer and scheduler."""


@pytest.mark.parametrize("precision", ["--bf16", ""])
def test_a_json_of_transformers_is_accepted(tmp_path: Path, precision: str) -> None:
    config = merged(tmp_path, TRANSFORMERS, f"--zero-stage 3 {precision}")
    assert config["zero_optimization"] == derived("--zero-stage 3")["zero_optimization"] | {
        "overlap_comm": True,
        "stage3_max_live_parameters": 1e9,
    }
    assert config["steps_per_print"] == 2000
    assert not config.keys() & {"fp16", "amp"} and AUTO not in json.dumps(config)


def test_the_optimizer_is_offloaded_by_a_flag(tmp_path: Path) -> None:
    given = {"zero_optimization": {"offload_optimizer": {"device": AUTO, "pin_memory": False}}}
    config = merged(tmp_path, given, "--offload-optimizer cpu --zero-stage 2")
    assert config["zero_force_ds_cpu_optimizer"] is False
    assert config["zero_optimization"]["offload_optimizer"] == {"device": "cpu", "pin_memory": False}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"train_batch_size": 5}, "train_batch_size is 5, and the command line says 4 (--global-batch-size)"),
        ({"optimizer": {"type": "AdamW", "params": {"lr": AUTO}}}, "optimizer: is not read here: give --optimizer"),
        ({"scheduler": {"type": "WarmupLR"}}, "scheduler: is not read here: give --lr-decay-style"),
        ({"zero_optimization": {"offload_param": {"device": "cpu"}}}, "zero_optimization.offload_param: is not"),
        ({"autotuning": {"enabled": True}}, "autotuning.enabled is not used by this trainer: remove it"),
        ({"gradient_cliping": 0.1}, "gradient_cliping is not used by this trainer: did you mean gradient_clipping?"),
        ({"zero_optimization": {"overlap_comm": 1}}, "overlap_comm is 1, expected true or false"),
        ({"bf16": None}, "bf16 is null, expected an object"),
        ("{", "not JSON"),
    ],
)
def test_other_keys_and_contradictions_are_rejected(tmp_path: Path, given: object, message: str) -> None:
    (found,) = errors_of(merged, tmp_path, given)
    assert found.startswith(f"--deepspeed-config {tmp_path}/ds.json: ") and message in found

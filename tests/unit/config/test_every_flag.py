"""No flag is accepted and ignored: each has an effect, is rejected, or requests what the trainer does anyway."""

import dataclasses
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from megatron_ladder.blueprint.tensors import model_tensors, padded_vocab_size
from megatron_ladder.config.megatron_flags import ACCEPTED
from megatron_ladder.config.run import SECTIONS, RunConfig
from megatron_ladder.engine.deepspeed_json import deepspeed_json
from megatron_ladder.flags import section_flags
from tests.helpers.runs import run_or_errors

PACKAGE = Path(__file__).resolve().parents[3] / "megatron_ladder"
BASE = "--train-iters 100 --lr 1e-3"

NEEDS = {
    "--save s": (
        "--save-interval 10",
        "--async-save",
        "--keep-last-n-checkpoints 2",
        "--save-retain-interval 5",
        "--overwrite-checkpoints",
    ),
    "--load l": (
        "--exit-on-missing-checkpoint",
        "--finetune",
        "--no-load-optim",
        "--no-load-rng",
        "--allow-data-change",
        "--override-opt-param-scheduler",
        "--use-checkpoint-opt-param-scheduler",
        "--use-checkpoint-args",
    ),
    "--lr-decay-style WSD": ("--lr-wsd-decay-iters 5", "--lr-wsd-decay-style linear"),
    "--distill-from d": ("--distill-weight 0.5", "--distill-temperature 2"),
    "--optimizer muon": (
        "--muon-momentum 0.9",
        "--no-muon-nesterov",
        "--muon-ns-steps 3",
        "--muon-scale-mode original",
    ),
    "--recompute-granularity full": ("--recompute-num-layers 2",),
    "--pipeline-model-parallel-size 2": ("--pipeline-partition parameters",),
    "--profile --profile-dir p": ("--profile-step-start 3", "--profile-step-end 15", "--profile-ranks 1"),
    "--loss-spike-factor 2": ("--loss-spike-window 5", "--skip-loss-spikes"),
    "--streaming x": (
        "--streaming-key k",
        "--streaming-shuffle-buffer 5",
        "--streaming-shards 2",
        "--streaming-skip-bad-lines 1",
    ),
    "--residual-mode ladder": ("--ladder-layers 2", "--residual-staleness 2", "--lanes 2"),
    "--residual-mode desync --tensor-model-parallel-size 2": ("--desync-interval 4",),
    "--rope-scaling llama3 --rope-scaling-factor 8": (
        "--rope-low-freq-factor 2",
        "--rope-high-freq-factor 8",
        "--rope-original-max-position-embeddings 64",
    ),
    "--num-query-groups 4": ("--group-query-attention",),
}
"""Flags -> flags that have no effect without them."""
CONFLICTS = (
    ("--split 90,10,0", "--train-data-path a"),
    ("--split 90,10,0", "--streaming a"),
    ("--min-lr 1e-5", "--lr-decay-style constant"),
    ("--lr-decay-iters 50", "--lr-decay-style constant"),
    ("--untie-embeddings-and-output-weights", "--tie-embeddings"),
    ("--disable-bias-linear", "--add-mlp-bias"),
    ("--disable-bias-linear", "--add-attention-output-bias"),
    ("--no-pipeline-parallel", "--pipeline-model-parallel-size 2"),
)
IGNORED = {"deepspeed", "local_rank"}
"""Flags that launchers add, and that are documented as ignored."""
READ_BY_PART = {"train_data_path", "valid_data_path"}
"""Fields that the loader reads by the name of a part."""


def read(words: str) -> tuple[RunConfig, list[str]]:
    return run_or_errors(f"{BASE} {words}".split(), 1000, 4)


@pytest.mark.parametrize(("needed", "words"), [(needed, words) for needed, all in NEEDS.items() for words in all])
def test_a_flag_without_effect_is_rejected(needed: str, words: str) -> None:
    found = read(words)[1]
    assert len(found) == 1 and found[0].startswith(words.split()[0]) and needed.split()[0] in found[0], found
    assert read(f"{needed} {words}")[1] == []


@pytest.mark.parametrize(("words", "other"), CONFLICTS)
def test_a_flag_that_another_one_overrides_is_rejected(words: str, other: str) -> None:
    found = read(f"{words} {other}")[1]
    assert len(found) == 1 and words.split()[0] in found[0] and "exclude each other" in found[0], found
    assert read(other)[1] == []


def test_every_flag_of_the_trainer_is_read() -> None:
    """A field that no code outside its own section reads has no effect."""
    folders = ("blueprint", "comm", "data", "engine", "model", "train")
    sources = [PACKAGE / "config" / "run.py"]
    sources += [path for folder in folders for path in (PACKAGE / folder).rglob("*.py")]
    read_names = {name for path in sources for name in re.findall(r"\.(\w+)", path.read_text())}
    names = {field.name for section in SECTIONS for field in dataclasses.fields(section)}
    assert names - read_names - READ_BY_PART <= IGNORED


def source(path: str) -> str:
    return (PACKAGE / path).read_text()


def tensors(run: RunConfig) -> str:
    return " ".join(tensor.name for tensor in model_tensors(run.model))


LLAMA = [f"{name}_proj.weight" for name in ("q", "k", "v", "o", "gate", "up", "down")]
BY_DEFAULT: Mapping[str, Callable[[RunConfig, dict[str, Any]], bool]] = {
    "--swiglu --disable-bias-linear": lambda run, _: (
        all(name in tensors(run) for name in LLAMA) and "bias" not in tensors(run)
    ),
    "--normalization": lambda run, _: "layers.0.mlp_norm.weight" in tensors(run) or "norm.weight" in tensors(run),
    "--use-rotary-position-embeddings --position-embedding-type --rotary-percent": lambda run, _: (
        "position" not in tensors(run) and run.model.rope_scaling == "none"
    ),
    "--untie-embeddings-and-output-weights": lambda run, _: not run.model.tie_embeddings,
    "--group-query-attention": lambda run, _: read("--num-query-groups 4")[0].model.num_key_value_heads == 4,
    "--use-flash-attn --use-flash-attn-v2 --attention-backend --attention-softmax-in-fp32 --no-masked-softmax-fusion "
    "--no-query-key-layer-scaling": lambda *_: "scaled_dot_product_attention" in source("model/operations.py"),
    "--attention-dropout --hidden-dropout --no-bias-dropout-fusion": lambda *_: (
        not any("dropout" in path.read_text().lower() for path in (PACKAGE / "model").glob("*.py"))
    ),
    "--no-bias-gelu-fusion --no-bias-swiglu-fusion --no-rope-fusion --no-persist-layer-norm --use-mcore-models "
    "--transformer-impl": lambda run, _: run.training.compile_sub_blocks == "auto",
    "--no-gradient-accumulation-fusion --accumulate-allreduce-grads-in-fp32": lambda _, json: (
        json["data_types"] == {"grad_accum_dtype": "fp32"} and json["communication_data_type"] == "fp32"
    ),
    "--make-vocab-size-divisible-by": lambda *_: padded_vocab_size(1, 1) == 128,
    "--data-impl": lambda *_: "mmap.mmap(" in source("data/indexed.py"),
    "--dataloader-type": lambda *_: "consumed_samples" in source("data/batches.py"),
    "--timing-log-level": lambda run, _: not run.profile.profile,
    "--use-pytorch-profiler": lambda *_: "torch.profiler" in source("train/profile.py"),
    "--log-throughput": lambda *_: "speed/model TFLOP per second" in source("train/log.py"),
    "--log-memory-to-tensorboard": lambda *_: "memory/peak GB" in source("train/log.py"),
    "--log-validation-ppl-to-tensorboard": lambda *_: "perplexity" in source("train/log.py"),
    "--exit-signal-handler": lambda *_: "SIGTERM" in source("train/stop.py"),
    "--check-for-nan-in-loss-and-grad": lambda run, _: run.reliability.max_consecutive_bad_steps == 3,
    "--no-pipeline-parallel": lambda _, json: "pipeline" not in json,
    "--ds-sequence-parallel-size --context-parallel-size": lambda run, _: (
        run.data_parallel_size * run.parallel.tensor_model_parallel_size == run.world_size
    ),
    "--expert-model-parallel-size --no-create-moe-param-group": lambda run, _: "expert" not in tensors(run),
    "--use-checkpoint-args": lambda *_: "complete_flags(" in source("train/inputs.py"),
}
"""Accepted flags of Megatron -> a check that the trainer does the same without them."""


def test_every_accepted_flag_of_megatron_requests_the_default() -> None:
    run, errors = read("")
    json = deepspeed_json(run)
    assert errors == []
    assert {flag for flags in BY_DEFAULT for flag in flags.split()} == ACCEPTED.keys()
    assert [flags for flags, holds in BY_DEFAULT.items() if not holds(run, json)] == []


def test_a_number_below_its_bound_is_one_error() -> None:
    cases = 0
    for one in (one for section in SECTIONS for one in section_flags(section)):
        limits = one.limits
        if limits.above is None and limits.minimum is None:
            continue
        value = f"{limits.above:g}" if limits.above is not None else f"{limits.minimum - 1:g}"
        found = [line for line in read(f"{one.name}={value}")[1] if line.startswith(f"{one.name} ")]
        assert len(found) == 1 and ": expected " in found[0], (one.name, value, found)
        cases += 1
    assert cases > 60

"""The configuration file: values of flags in YAML, next to those of the command line."""

import os
import threading
from pathlib import Path

import pytest

from megatron_ladder.command_line import Settings
from megatron_ladder.config.file import config_file_text
from megatron_ladder.config.run import check_run, describe_run, parse_run, read_run, resolve_run
from tests.helpers.runs import errors_of

BASE = "train_iters: 10\nlr: 1e-4\n"


def read(tmp_path: Path, text: str | bytes, words: str = "") -> Settings:
    path = tmp_path / "run.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    flags = parse_run(["--config", str(path), *words.split()])
    resolve_run(flags, 1000, 1)
    return flags


def mistakes(tmp_path: Path, text: str | bytes, words: str = "") -> list[str]:
    return [error.replace(f"{tmp_path}/", "") for error in errors_of(read, tmp_path, text, words)]


FLAGS = (
    "--train-iters 10 --lr 1e-4 --micro-batch-size 4 --bf16 --no-tp-overlap --data-path 0.3 a 0.7 b --split 99,1 "
    "--num-layers 24 --residual-mode ladder --ladder-layers 16-23 --rope-scaling none --profile-ranks 0 "
    "--adam-eps 1E-9 --tokenizer-model yes --num-query-groups 4"
)

YAML = """
# The same flags.
train_iters: 10
lr: 1e-4                       # YAML 1.1 reads this as a text
micro-batch-size: 4
bf16: on
tp_overlap: no
data_path: [0.3, a, 0.7, b]
split: 99,1
num_layers: 0024               # an octal number in YAML 1.1
residual_mode: ladder
ladder_layers: 16-23
rope_scaling: none
profile_ranks: 0
adam_eps: 1E-9
tokenizer_model: yes           # a switch in YAML 1.1
save_interval:
num_query_groups: 4
"""


def test_a_file_means_the_same_as_flags(tmp_path: Path) -> None:
    expected = parse_run(FLAGS.split())
    flags = read(tmp_path, YAML)
    del flags.given["config"]
    assert flags.values == expected.values and flags.given == expected.given and flags.given["bf16"] is True


MODELS = (
    "",
    "--residual-mode ladder --ladder-layers 3,7 --residual-staleness 2 --tie-embeddings --ffn-hidden-size 100",
    "--residual-mode ladder-parallel --ladder-layers none --num-key-value-heads 4 --vocab-size 77 --qk-layernorm",
    "--residual-mode desync --desync-interval 4 --max-position-embeddings 4096 --rope-scaling linear "
    "--rope-scaling-factor 3",
)
RUNS = (
    "--global-batch-size 24 --bf16 --zero-stage 3 --offload-optimizer cpu --no-tp-overlap",
    "--lr-decay-style constant --loss-spike-factor 1.1 --skip-loss-spikes --clip-grad 0 --adam-eps 1e-9",
    "--lr-decay-style WSD --min-lr 1e-5 --lr-wsd-decay-style linear --save no --tokenizer-type NullTokenizer",
    "--train-data-path 0.3 a 0.7 b --valid-data-path 1e3 --kill-switch-file null --tensorboard-dir ~/1_0",
    "--recompute-granularity full --profile --profile-ranks 1 0 --profile-dir 0x10 --eval-iters 0 --bf16",
)


@pytest.mark.parametrize("words", [f"{model} {run}" for model in MODELS for run in (RUNS[0], RUNS[1])] + [*RUNS[2:]])
def test_the_written_configuration_repeats_the_run(tmp_path: Path, words: str) -> None:
    flags = parse_run(f"--train-iters 30 --lr 1e-5 --tensor-model-parallel-size 2 {words}".split())
    run = resolve_run(flags, 1000, 4)
    path = tmp_path / "config.yaml"
    path.write_text(config_file_text(describe_run(flags, run), "A note."))
    again = parse_run(["--config", str(path)])
    repeated = resolve_run(again, 1000, 4)
    assert again.values["vocab_size"] == flags.values["vocab_size"]
    assert (
        run.model == repeated.model and config_file_text(describe_run(again, repeated), "A note.") == path.read_text()
    )
    for section in ("data", "checkpoint", "logging", "profile", "reliability", "parallel"):
        assert getattr(run, section) == getattr(repeated, section)
    assert run.optimizer.completed(30) == repeated.optimizer and run.accumulation_steps == repeated.accumulation_steps


def test_flags_of_megatron_that_request_defaults_are_accepted(tmp_path: Path) -> None:
    assert mistakes(tmp_path, f"{BASE}swiglu: true\nnormalization: RMSNorm\nhidden_dropout: 0.0\n") == []


def test_the_command_line_wins(tmp_path: Path) -> None:
    text = f"{BASE}bf16: true\ntp_overlap: false\ndata_path: [a, b]\nsave: x\nmicro_batch_size: many\nseed: 5\n"
    words = "--lr 2 --no-bf16 --tp-overlap --data-path c --micro-batch-size 2"
    flags = read(tmp_path, text, words)
    expected = {"lr": 2.0, "bf16": False, "tp_overlap": True, "data_path": (Path("c"),), "save": Path("x")}
    assert flags.values.items() >= (expected | {"micro_batch_size": 2}).items()
    assert mistakes(tmp_path, text, f"{words} --seed x1") == ["--seed: 'x1' is not a whole number"]


def test_a_file_that_can_be_read_once_is_read_once(tmp_path: Path) -> None:
    """Such as that of `--config <(...)`."""
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=(tmp_path / "pipe").write_text, args=(f"{BASE}bf16: true\n",))
    writer.start()
    settings = read_run(["--config", str(tmp_path / "pipe")])
    writer.join()
    check_run(settings)
    assert settings.values["bf16"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "micro_batch_sise: 4",
            "--config run.yaml:3: micro_batch_sise is not a flag of this program: did you mean micro_batch_size?",
        ),
        ("swiglu: {a: 1}", "--swiglu a section: expected no value, or true in a file (run.yaml:3)"),
        ("no_bf16: 1", "--config run.yaml:3: no_bf16 is not a flag of this program: "),
        ("lr: 2", "--config run.yaml:3: lr is set twice, first in line 2"),
        ("adam_eps: {a: 1}", "--adam-eps: expected a number, found a section: keys are not nested (run.yaml:3)"),
        ("micro_batch_size:", "--micro-batch-size: expected a whole number, found no value (run.yaml:3)"),
        ("micro_batch_size: 0", "--micro-batch-size 0: expected 1 or more (run.yaml:3)"),
        ('bf16: "yes"', "--bf16: expected true or false, found 'yes' (run.yaml:3)"),
        ("rope_scaling: no", "--rope-scaling: 'no' is not one of none, linear, llama3, yarn (run.yaml:3)"),
        ("data_path: [[a]]", "--data-path: expected a path, found a list (run.yaml:3)"),
        ("save: ''", "--save: the path is empty (run.yaml:3)"),
        ("learning_rate: 1", "--learning-rate is not supported: use --lr (run.yaml:3)"),
        ("num_query_groups: x", "--num-query-groups: 'x' is not a whole number (run.yaml:3)"),
        ("kv_channels: 0", "--kv-channels 0: expected 1 or more (run.yaml:3)"),
        ("num_query_groups: 5", "--num-attention-heads 12 is not divisible by --num-query-groups 5"),
        ("swiglu: false", "--swiglu false: expected no value, or true in a file (run.yaml:3)"),
        ("normalization: LayerNorm", "--normalization LayerNorm: only rmsnorm is supported: leave it out (run.yaml:3)"),
        ("disable_bias_linear: on\nadd_mlp_bias: on", "--disable-bias-linear and --add-mlp-bias exclude each other"),
    ],
)
def test_an_invalid_key_or_value_is_one_error(tmp_path: Path, line: str, message: str) -> None:
    found = mistakes(tmp_path, BASE + line + "\n")
    assert len(found) == 1 and found[0].startswith(message), found


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"lr: [1", "--config run.yaml:1: not YAML: expected ',' or ']'"),
        (b"tp: 1\nnum_layers 2\nlr: 1", "--config run.yaml:2: not YAML: could not find expected ':'"),
        (b"lr: 1\n---\nlr: 2", "--config run.yaml:2: not YAML: but found another document"),
        (b"lr: \xff", "--config run.yaml: not YAML: it has bytes that are not UTF-8"),
        (b"[" * 500, "--config run.yaml: not YAML: it is nested too deeply"),
        (b"lr 1e-4", "--config run.yaml: expected a line `flag_name: value` for each flag, found 'lr 1e-4'"),
    ],
)
def test_an_unreadable_file_is_reported_with_the_other_errors(tmp_path: Path, text: bytes, message: str) -> None:
    found = mistakes(tmp_path, text, "--lr 1 --train-iters x")
    assert len(found) == 2 and found[0].startswith(message), found
    assert found[1] == "--train-iters: 'x' is not a whole number"

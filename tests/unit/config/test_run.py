"""The arithmetic of a run, and its flags.

No flag is accepted and ignored: each has an effect, is rejected, or requests what the trainer does anyway.
"""

import math
import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from megatron_ladder.blueprint.model_flags import FLAG_CHECKS, LEARNING_CHECKS, MODEL_CHECKS, TENSOR_PARALLEL_CHECKS
from megatron_ladder.command_line import Settings
from megatron_ladder.config.megatron_flags import _REQUIRED, _known_flags, read_megatron_flag
from megatron_ladder.config.run import SECTIONS, RunConfig
from megatron_ladder.flags import Flag, flag_name, section_checks, section_flags
from tests.helpers.runs import run_or_errors

BASE = "--train-iters 100 --lr 1e-3 --seq-length 128 --hidden-size 64 --num-attention-heads 4"
EXPERT_PARALLEL = "--num-experts 4 --expert-model-parallel-size"


def read(words: str, world_size: int = 4) -> tuple[RunConfig, list[str]]:
    return run_or_errors((BASE + " " + words).split(), 1000, world_size)


def test_batches_follow_from_the_layout() -> None:
    run, errors = read("--micro-batch-size 2 --global-batch-size 16 --tensor-model-parallel-size 2")
    assert not errors
    assert (run.data_parallel_size, run.accumulation_steps, run.tokens_per_step) == (2, 4, 2048)
    assert read("--micro-batch-size 3")[0].global_batch_size == 12
    staged, errors = read("--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --global-batch-size 8", 8)
    assert not errors and (staged.data_parallel_size, staged.accumulation_steps) == (2, 4)


@pytest.mark.parametrize(
    "words",
    [
        "--tensor-model-parallel-size 2 --expert-tensor-parallel-size 2",
        "--tensor-model-parallel-size 2 --expert-tensor-parallel-size 1 --expert-sharding experts",
        "--tensor-model-parallel-size 2 --expert-tensor-parallel-size 1 --expert-model-parallel-size 4 "
        "--sequence-parallel",
    ],
)
def test_only_sharding_by_width_divides_an_expert(words: str) -> None:
    assert not read(f"--num-experts 4 {words}")[1]


@pytest.mark.parametrize("stages", range(2, 6))
def test_every_layer_count_can_be_interleaved_as_the_error_says(stages: int) -> None:
    """A value is accepted if each stage gets several ranges with a layer each; the others name those values."""
    flag = "--num-layers-per-virtual-pipeline-stage"
    for layers in range(stages, 4 * stages + 2):
        ranges = {most: -(-layers // (stages * most)) for most in range(1, layers + 2)}
        possible = [most for most, count in ranges.items() if count > 1 and stages * count <= layers]
        fix = "leave it out"
        if possible:
            fix = f"use {possible[0]}" if len(possible) == 1 else f"use {possible[0]} to {possible[-1]}"
        for most in ranges:
            words = f"--num-layers {layers} --pipeline-model-parallel-size {stages} {flag} {most}"
            run, errors = read(words, stages)
            if most in possible:
                assert not errors and run.chunks == ranges[most]
            else:
                too_many = f"{stages} stages x {ranges[most]} ranges are more than --num-layers {layers}"
                if ranges[most] == 1:
                    largest = math.ceil(layers / stages)
                    layers_text = "1 layer" if largest == 1 else f"{largest} layers"
                    too_many = f"each of {stages} stages has at most {layers_text}, so only one range"
                assert errors == [f"{flag} {most}: {too_many}: {fix}"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--micro-batch-size 3 --global-batch-size 16", "--global-batch-size 16 is not a multiple of --micro-batch"),
        ("--tensor-model-parallel-size 3", "--tensor-model-parallel-size 3 does not divide the 4 launched processes"),
        ("--tp 2 --dp 4", "--dp 4: 4 launched processes with this layout have 2"),
        ("--max-position-embeddings 64", "--seq-length 128 is longer than --max-position-embeddings 64"),
        ("--min-lr 1", "--min-lr 1.0 is above --lr"),
        ("--lr-warmup-iters 100", "--lr-warmup-iters 100 leaves no step"),
        (
            "--pipeline-model-parallel-size 3",
            "--tensor-model-parallel-size 1 x --pipeline-model-parallel-size 3 does not divide the 4 launched",
        ),
        ("--pipeline-model-parallel-size 4 --num-layers 3", "--pipeline-model-parallel-size 4 is above --num-layers 3"),
        (
            "--sequence-parallel --residual-mode desync --desync-interval 2 --tensor-model-parallel-size 2",
            "--sequence-parallel shards one stream that all ranks read, but with --residual-mode desync each rank",
        ),
        (
            "--sequence-parallel --residual-mode ladder --lanes 2 --tensor-model-parallel-size 2",
            "--sequence-parallel shards one stream that all ranks read, but with --lanes 2 each rank reads another one",
        ),
        (
            "--residual-mode ladder --lanes 2 --tensor-model-parallel-size 4",
            "--lanes 2 is not a multiple of --tensor-model-parallel-size 4",
        ),
        (
            "--sequence-parallel --tensor-model-parallel-size 4 --seq-length 126",
            "--seq-length 126 cannot be cut by --sequence-parallel into 4 equal parts",
        ),
        ("--bf16 --zero-stage 0", "--bf16 and --zero-stage 0 exclude each other"),
        ("--offload-optimizer cpu --zero-stage 0", "--offload-optimizer cpu and --zero-stage 0 exclude each other"),
        ("--optimizer-implementation apex --zero-stage 3", "--optimizer-implementation apex miscounts steps"),
        ("--optimizer-implementation apex --offload-optimizer cpu", "--optimizer-implementation apex needs a GPU"),
        ("--pipeline-model-parallel-size 2 --zero-stage 2", "--zero-stage 2 with --pipeline-model-parallel-size 2: a"),
        (
            "--pipeline-model-parallel-size 2 --offload-optimizer cpu",
            "--offload-optimizer cpu and --pipeline-model-parallel-size exclude each other",
        ),
        (
            "--pipeline-model-parallel-size 2 --distill-from d",
            "--distill-from d and --pipeline-model-parallel-size exclude each other",
        ),
        ("--expert-model-parallel-size 2", "--expert-model-parallel-size 2 requires --num-experts"),
        (f"{EXPERT_PARALLEL} 4 --num-experts 6", "--num-experts 6 is not divisible by --expert-model-parallel-size 4"),
        (f"{EXPERT_PARALLEL} 8 --num-experts 8", "--expert-model-parallel-size 8 does not divide the --tensor-model-"),
        (
            f"{EXPERT_PARALLEL} 2 --num-experts 6 --tensor-model-parallel-size 4 --num-attention-heads 4",
            "--expert-model-parallel-size 2 with --tensor-model-parallel-size 4: each rank sends its own tokens",
        ),
        (
            f"{EXPERT_PARALLEL} 3 --num-experts 6 --tensor-model-parallel-size 4 --sequence-parallel",
            "--expert-model-parallel-size 3 and --tensor-model-parallel-size 4: one must divide the other",
        ),
        (
            f"{EXPERT_PARALLEL} 2 --pipeline-model-parallel-size 4",
            "--expert-model-parallel-size 2 does not divide the --tensor-model-parallel-size 1 x 1 data-parallel ranks",
        ),
        (f"{EXPERT_PARALLEL} 2 --zero-stage 2", "--zero-stage 2 with --expert-model-parallel-size 2: DeepSpeed would"),
        (f"{EXPERT_PARALLEL} 2 --zero-stage 3", "--zero-stage 3 with --expert-model-parallel-size 2: DeepSpeed would"),
        (f"{EXPERT_PARALLEL} 2 --offload-optimizer cpu", "--expert-model-parallel-size 2 and --offload-optimizer"),
        (f"{EXPERT_PARALLEL} 2 --expert-sharding experts", "--expert-model-parallel-size 2 and --expert-sharding"),
        (f"{EXPERT_PARALLEL} 2 --cuda-graph", "--cuda-graph true with --expert-model-parallel-size 2: the host reads"),
        (f"{EXPERT_PARALLEL} 2 --moe-expert-capacity 0", "--moe-expert-capacity 0: expected 1 or more"),
        (
            "--num-experts 4 --moe-expert-capacity 8",
            "--moe-expert-capacity 8 requires --expert-model-parallel-size",
        ),
        (
            f"{EXPERT_PARALLEL} 2 --residual-mode ladder --lanes 2 --num-query-groups 4",
            "--num-experts 4 with --lanes 2: the ranks read different streams",
        ),
        (
            f"{EXPERT_PARALLEL} 2 --expert-tensor-parallel-size 2",
            "--expert-tensor-parallel-size 2 with --expert-model-parallel-size 2, --expert-sharding width and --tens",
        ),
        (
            "--num-experts 4 --tensor-model-parallel-size 2 --expert-tensor-parallel-size 1",
            "--expert-tensor-parallel-size 1 with --expert-model-parallel-size 1, --expert-sharding width and --tens",
        ),
        (
            "--num-experts 4 --tensor-model-parallel-size 2 --expert-sharding experts --expert-tensor-parallel-size 2",
            "--expert-tensor-parallel-size 2 with --expert-model-parallel-size 1, --expert-sharding experts and --tens",
        ),
        ("--num-experts 4 --moe-router-topk 1", "--moe-router-topk 1 without --moe-router-unnormalized: the weight"),
        (
            "--num-experts 4 --moe-router-topk 1 --moe-router-score-function sigmoid",
            "--moe-router-topk 1 without --moe-router-unnormalized: the weight",
        ),
        ("--rope-low-freq-factor 2 --rope-scaling linear", "--rope-low-freq-factor 2.0 requires --rope-scaling"),
        ("--recompute-granularity full --recompute-num-layers 13", "--recompute-num-layers 13 is above --num-layers"),
        ("--mtp-num-layers 1 --mtp-depths 128", "--mtp-depths 128 is not below --seq-length 128: no row has a target"),
        ("--mtp-num-layers 1 --seq-length 1", "--mtp-depths 1 is not below --seq-length 1: no row has a target"),
        ("--compile-sub-blocks --norm-implementation apex", "--compile-sub-blocks compiles torch's norm"),
        (
            "--experimental-attention-variant gated_delta_net --linear-attention-freq 2 "
            "--linear-attention-implementation fla",
            "--linear-attention-implementation fla without --bf16",
        ),
        ("--cuda-graph --zero-stage 2", "--cuda-graph true and --zero-stage 2 exclude each other"),
        ("--cuda-graph --reset-attention-mask", "--cuda-graph true and --reset-attention-mask exclude each other"),
        ("--profile --profile-step-end 9 --profile-dir p", "--profile-step-start 10 and --profile-step-end 9"),
        ("--profile", "--profile needs a directory for its traces"),
        (
            "--optimizer muon --zero-stage 3",
            "--optimizer muon needs whole gradients on the device, not --zero-stage 3:",
        ),
        (
            "--lr-decay-style WSD --lr-warmup-iters 5 --lr-wsd-decay-iters 96",
            "--lr-wsd-decay-iters 96 is more than --train-iters 100",
        ),
        ("--train-iters 1_0", "--train-iters: '1_0' is not a whole number"),
        ("--lr 1_0", "--lr: '1_0' is not a number"),
        # Another value or flag is wrong in consequence.
        ("--recompute-num-layers -1", "--recompute-num-layers -1: expected 0 or more"),
        ("--train-iters 1e3 --lr-warmup-iters 99 --profile --profile-dir p", "--train-iters: '1e3' is not a whole"),
        ("--optimizr muon --muon-momentum 0.9", "--optimizr is not a flag of this program: did you mean"),
        ("--optimizer mun --muon-momentum 0.9", "--optimizer: 'mun' is not one of"),
    ],
)
def test_an_invalid_value_or_combination_is_one_error(words: str, message: str) -> None:
    found = read(words)[1]
    assert len(found) == 1 and found[0].startswith(message), found


def test_a_model_whose_router_cannot_learn_is_evaluated() -> None:
    assert read("--num-experts 4 --moe-router-topk 1 --load checkpoints --skip-train")[1] == []
    assert read("--num-experts 4 --moe-router-topk 1 --moe-layers none")[1] == []


def test_all_errors_are_reported_together() -> None:
    """Values first, then how they fit together."""
    found = read("--colour 3 --topk 4 --seed x --lr 0 --finetune")[1]
    assert [line.split(" ")[0].rstrip(":") for line in found] == ["--colour", "--topk", "--seed", "--lr", "--finetune"]
    found = read("--hidden-size 65 --global-batch-size 6 --min-lr 5")[1]
    assert [line.split(" ")[0] for line in found] == ["--hidden-size", "--min-lr", "--global-batch-size"]


def test_megatron_spellings_are_accepted() -> None:
    """Flags that users bring from Megatron-DeepSpeed."""
    words = (
        "--num-query-groups 2 --kv-channels 16 --ffn-hidden-size 128 --max-position-embeddings 256 "
        "--deepspeed --local_rank=3 --recompute-granularity full --recompute-num-layers 2 "
        "--swiglu --normalization rmsnorm --use-rotary-position-embeddings --disable-bias-linear "
        "--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0.0 --use-flash-attn "
        "--lr-decay-style cosine --clip-grad 1.0 --adam-beta1 0.9 --adam-beta2 0.95 --adam-eps 1e-8 "
        "--init-method-std 0.02 --split 969,30,1 --save s --save-interval 10 --eval-interval 10 --eval-iters 0 "
        "--log-interval 1 --tensorboard-dir tb --profile --use-pytorch-profiler --profile-ranks 0 1 "
        "--pipeline-model-parallel-size 1 --deterministic-mode --optimizer adam"
    )
    run, errors = read(words)
    assert errors == []
    assert (run.model.num_key_value_heads, run.model.head_dim, run.recompute_layers) == (2, 16, 2)


PACKAGE = Path(__file__).resolve().parents[3] / "megatron_ladder"
IGNORED = {"deepspeed", "local_rank"}
"""Flags that launchers add, and that are documented as ignored."""
READ_BY_PART = {"train_data_path", "valid_data_path"}
"""Fields that the loader reads by the name of a part."""

CONTRADICTED = {
    "--swiglu": "--quick-geglu",
    "--untie-embeddings-and-output-weights": "--tie-embeddings",
    "--disable-bias-linear": "--add-mlp-bias",
    "--no-pipeline-parallel": "--pipeline-model-parallel-size 2",
    "--use-distributed-optimizer": "--zero-stage 0",
    "--overlap-grad-reduce": "--zero-stage 2",
    "--overlap-param-gather": "--offload-optimizer cpu",
    "--recompute-activations": "--recompute-granularity full",
}
"""Accepted flags of Megatron, and flags that ask for the opposite."""


def all_flags() -> Sequence[Flag]:
    return section_flags(*SECTIONS)


def words_of(one: Flag) -> str:
    """Return the flag with a value that is valid and not its default."""
    kind = one.value_type
    if kind.placeholder == "":
        return one.name
    texts = [*kind.choices, "1", "2", "0.5", "x"]
    for text in texts:
        try:
            value = kind.read([text] if kind.many else text)
        except ValueError:
            continue
        each = value if isinstance(value, tuple) else (value,)
        if value != one.default and all(one.allows(number) for number in each if isinstance(number, int | float)):
            return f"{one.name} {text}"
    raise AssertionError(f"no value for {one.name}")


def test_a_flag_without_effect_is_rejected() -> None:
    cases = [(one, other) for one in all_flags() for other in one.requires]
    assert len(cases) > 30
    for one, other in cases:
        found = [line for line in read(words_of(one))[1] if line.startswith(f"{one.name} ")]
        assert any(f"requires {flag_name(other)}" in line for line in found), (one.name, found)


def test_every_flag_of_the_trainer_is_read() -> None:
    """A field that no code outside its own section reads has no effect."""
    folders = ("blueprint", "comm", "data", "engine", "model", "train")
    sources = [PACKAGE / "config" / "run.py"]
    sources += [path for folder in folders for path in (PACKAGE / folder).rglob("*.py")]
    read_names = {name for path in sources for name in re.findall(r"[.\"](\w+)", path.read_text())}
    read_names |= {name for check in section_checks(*SECTIONS) for name in check.reads}
    assert {one.field_name for one in all_flags()} - read_names - READ_BY_PART <= IGNORED


FLAGS_OF_MEGATRON = [
    word
    for line in Path(__file__).with_name("megatron_flags.txt").read_text().splitlines()
    for word in line.split()
    if not line.startswith("#")
]


def own_spellings() -> set[str]:
    switches = {one.opposite for one in all_flags() if one.switches_to is not None}
    return switches | {word.replace("_", "-") for one in all_flags() for word in one.spellings}


def test_megatrons_flags_are_accepted_only_for_what_the_trainer_does() -> None:
    known, patterns = _known_flags()
    assert not own_spellings() & known.keys()
    needed = {"--group-query-attention": "--num-query-groups 4", "--use-checkpoint-args": "--load l"}
    exchanges = [flag for flag, required in _REQUIRED.items() if required == ("expert_model_parallel_size",)]
    needed |= dict.fromkeys(exchanges, "--expert-model-parallel-size 2 --num-experts 4")
    for flag, (_, values) in known.items():
        if values is None:
            (found,) = read(flag)[1]
            assert found.startswith(f"{flag} is not supported: "), flag
            continue
        assert read(f"{flag} {' '.join(values[:1])} {needed.get(flag, '')}")[1] == [], flag
        wrong = read(f"{flag} nonsense")[1]
        assert len(wrong) == 1 and wrong[0].startswith(f"{flag} "), flag
    for flag, other in CONTRADICTED.items():
        shown = other.removesuffix(" 2") if other.endswith("size 2") else other
        assert read(f"{flag} {other}")[1] == [f"{flag} and {shown} exclude each other: give one of them"]
    for flag, other in needed.items():
        (found,) = read(flag)[1]
        assert found.startswith(f"{flag} requires {other.split()[0]}")
    # A misspelt flag of the trainer gets the right name.
    typos = [word[:at] + word[at + 1 :] for word in own_spellings() for at in range(3, len(word))]
    assert not [(word, pattern) for word in typos for pattern in patterns if fnmatchcase(word, pattern)]


def test_every_flag_of_megatron_is_answered() -> None:
    """It is a flag of the trainer, requests a default, or is rejected with a replacement or a reason."""
    unknown, own = [], own_spellings()
    for flag in FLAGS_OF_MEGATRON:
        found = Settings(())
        if flag not in own and not read_megatron_flag(flag, [], found):
            unknown.append(flag)
    assert unknown == []
    known, patterns = _known_flags()
    # Every pattern is needed.
    others = [flag for flag in FLAGS_OF_MEGATRON if flag not in known]
    assert [pattern for pattern in patterns if not any(fnmatchcase(flag, pattern) for flag in others)] == ["--rdzv-*"]
    accepted = sum(flag in known and known[flag][1] is not None for flag in FLAGS_OF_MEGATRON)
    page = " ".join((PACKAGE.parent / "docs" / "training.md").read_text().split())
    supported = len(own & {*FLAGS_OF_MEGATRON})
    numbers = f"all {len(FLAGS_OF_MEGATRON):,} flags", f"{supported} are flags here, {accepted} are accepted"
    assert all(text in page for text in numbers), numbers


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--no-save-optim", "--no-save-optim is not supported: checkpoints are complete: leave state out on loading"),
        ("--num_workers 2", "--num_workers is not supported: data is memory-mapped"),
        (
            "--context-parallel-size 2",
            "--context-parallel-size 2: only 1 is supported: use --tensor-model-parallel-size",
        ),
        ("--attention-backend fused", "--attention-backend fused: only auto or flash is supported: leave it out"),
        ("--fp8-recipe delayed", "--fp8-recipe is not supported: use --bf16"),
        ("--nproc_per_node 8", "--nproc_per_node is not supported: it is a flag of the launcher"),
    ],
)
def test_the_answer_to_a_flag_of_megatron(words: str, message: str) -> None:
    (found,) = read(words)[1]
    assert found.startswith(message)


@pytest.mark.parametrize(
    ("flag", "phrases"),
    [
        # Softmax before the choice gives weights that do not sum to 1; sigmoid scores are divided by their sum anyway.
        (
            "--moe-router-pre-softmax",
            ["--moe-router-unnormalized with softmax scores", "leave both out with", "sigmoid"],
        ),
        ("--topk 1", ["--moe-router-topk;", "--moe-router-unnormalized"]),
        ("--num-experts-switch 8", ["--moe-router-topk 1", "--moe-router-unnormalized"]),
        ("--moe-layer-freq 2", ["0, N, 2N"]),
        ("--expert-interval 2", ["N-1, 2N-1"]),
        ("--moe-loss-coeff 0.1", ["--moe-router-load-balancing-type aux_loss"]),
        ("--moe-token-dispatcher-type flex", ["only alltoall", "all-to-all of NCCL or gloo"]),
        ("--overlap-moe-expert-parallel-comm", ["one micro-batch at a time", "another model"]),
        ("--moe-apply-probs-on-input", ["another model is not supported"]),
        ("--moe-expert-parallel-size 8", ["use --expert-model-parallel-size"]),
        ("--moe-extended-tp", ["without --expert-model-parallel-size"]),
        ("--tp-comm-overlap", ["leave it out", "another model"]),
        ("--use-rope-scaling", ["--rope-scaling llama3", "--rope-scaling-factor, which is 8"]),
        ("--rope-type yarn", ["--rope-scaling yarn", "--rope-original-max-position-embeddings, which is 4096"]),
        ("--position-embedding-type yarn", ["--rope-scaling yarn"]),
        ("--no-rope-freq 4", ["not supported"]),
        ("--rotary-interleaved", ["leave it out"]),
        ("--multi-latent-attention", ["32 by default"]),
        ("--cache-mla-latents", ["leave it out"]),
        ("--dataloader-inter-document-masking", ["use --reset-attention-mask"]),
        ("--use-mup", ["not scaled by widths"]),
        ("--recompute-method uniform", ["recomputes all layers: leave it out", "--recompute-num-layers, too"]),
        ("--recompute-modules moe", ["a third more"]),
        ("--fine-grained-activation-offloading", ["leave it out", "a third more"]),
        ("--distribute-saved-activations", ["--sequence-parallel"]),
        ("--context-parallel-size 2", ["--sequence-parallel", "a third more"]),
        ("--num-virtual-stages-per-pipeline-rank 2", ["--num-layers divided by --pipeline-model-parallel-size"]),
        ("--decoder-first-pipeline-num-layers 3", ["cannot be given", "--pipeline-partition parameters"]),
        ("--data-parallel-sharding-strategy optim", ["1 for optim,"]),
        ("--ddp-bucket-size 1", ["reduce_bucket_size"]),
        ("--remote-device cpu", ["weights stay on the device"]),
        ("--lr-warmup-fraction 0.1", ["part of --lr-decay-iters"]),
        ("--train-samples 1000", ["--global-batch-size samples"]),
        ("--decoupled-lr 1e-3", ["trains them otherwise"]),
        ("--rampup-batch-size 16 8 300", ["one --global-batch-size"]),
        ("--gradient-accumulation-steps 8", ["x --micro-batch-size x data-parallel"]),
        ("--muon-extra-scale-factor 0.2", ["match_rms_adamw for spectral with a factor of 0.2"]),
        ("--muon-coefficient-type quintic", ["only simple"]),
        ("--iterations-to-skip 5", ["cannot be listed"]),
        ("--check-for-spiky-loss", ["--loss-spike-factor 10"]),
        ("--freeze-all-layers", ["requires_grad"]),
        ("--test-mode", ["leave it out"]),
        ("--sft", ["preprocess_data.py --chat"]),
        ("--override-ckpt-iteration 5", ["iter_0000100"]),
        ("--pretrained-checkpoint d", ["--finetune for the first start"]),
        ("--save-wgrads-interval 5", ["leave it out"]),
        ("--kd-beta-ce 1", ["b / (1 + b)"]),
    ],
)
def test_an_answer_names_what_the_flag_means_in_megatron(flag: str, phrases: list[str]) -> None:
    (found,) = read(flag)[1]
    assert [phrase for phrase in phrases if phrase not in found] == [], found


NAMED_BY_ANSWERS = {"--deepspeed_config", "--chat", "--chat-template", "--kd-beta-ce"}
"""Flags with underscores, of preprocess_data.py, and of Megatron."""


def test_answers_name_flags_that_exist() -> None:
    for rules in _known_flags():
        for reason in {value if isinstance(value, str) else value[0] for value in rules.values()}:
            assert {*re.findall(r"--[\w-]+", reason)} <= own_spellings() | NAMED_BY_ANSWERS, reason


@pytest.mark.parametrize("flag", ["--recompute-granularity selective", "--recompute-activations"])
def test_megatrons_selective_recomputation_is_the_default(flag: str) -> None:
    run, errors = read(flag)
    assert errors == [] and run.recompute_layers == 0


def test_errors_name_flags_as_the_user_wrote_them() -> None:
    assert read("--num-query-groups x")[1] == ["--num-query-groups: 'x' is not a whole number"]
    assert read("--kv-channels 0")[1] == ["--kv-channels 0: expected 1 or more"]
    found = read("--num-query-groups 3 --tp 3 --num-key-value-heads 3")[1]
    assert [line.split()[0] for line in found] == ["--num-attention-heads", "--tp"]
    assert "not divisible by --num-key-value-heads 3" in found[0]


def test_checks_read_fields_that_exist() -> None:
    """A check of a field that no section has would always be skipped."""
    derived = {"world_size", "data_parallel_ranks", "samples_at_once", "chosen_from", "desync_tp"}
    known = derived | {one.field_name for one in all_flags()}
    checks = [*section_checks(*SECTIONS), *FLAG_CHECKS, *MODEL_CHECKS, *LEARNING_CHECKS, *TENSOR_PARALLEL_CHECKS]
    assert len(checks) > 60 and {name for check in checks for name in check.reads} <= known


def test_invalid_flags_hide_no_other_error() -> None:
    words = "--lr x --lr-warmup-iters 7 --hidden-size 65 --num-attention-heads 4 --tp 3 --colour 1".split()
    found = run_or_errors(words, 1000, 4)[1]
    assert [line.split(" ")[0].rstrip(":") for line in found] == [
        *("--lr", "--colour", "--train-iters", "--hidden-size", "--tp")
    ]
    # A checkpoint may provide what is not given, and so only given values are compared.
    words = "--load c --lr x --seq-length 5 --max-position-embeddings 4 --num-attention-heads 5".split()
    found = run_or_errors(words, 1000, 4)[1]
    assert [line.split(" ")[0].rstrip(":") for line in found] == ["--lr", "--seq-length"]


def test_missing_flags_hide_no_other_error() -> None:
    words = "--hidden-size 65 --num-attention-heads 4 --min-lr 5 --tp 3 --lr-warmup-iters 7".split()
    found = run_or_errors(words, 1000, 4)[1]
    assert [line.split(" ")[0] for line in found] == ["--train-iters", "--lr", "--hidden-size", "--tp"]
    assert found[0] == "--train-iters is required" and found[1] == "--lr is required"
    found = run_or_errors(["--lr", "1", "--swiglu", "--disable-bias-linear", "--add-mlp-bias", *words[:4]], 1000, 4)[1]
    assert [line.split(" ")[0] for line in found] == ["--train-iters", "--disable-bias-linear", "--hidden-size"]

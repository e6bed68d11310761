"""Changes of the schedule that a resumed run may make, and their effect."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_ladder.checkpoint.format import Checkpoint
from megatron_ladder.config.run import RunConfig, parse_run, resolve_run
from megatron_ladder.engine.optimizer import learning_rate
from megatron_ladder.train.resume import resume_problems, schedule_note, with_checkpoint

BASE = "--seq-length 16 --hidden-size 32 --num-attention-heads 4 --load c"
TRAINED = "--train-iters 100 --lr 1e-3 --min-lr 1e-4 --lr-warmup-iters 10"
DELTA = "--experimental-attention-variant gated_delta_net"
OVERRIDE, KEEP = "--override-opt-param-scheduler", "--use-checkpoint-opt-param-scheduler"


def run_of(words: str) -> RunConfig:
    return resolve_run(parse_run(f"{BASE} {words}".split()), 100, 1)


def checkpoint_of(run: RunConfig, kinds: tuple[str, ...] = ("weight", "exp_avg")) -> Any:
    manifest = {"run": run.to_dict()}
    checkpoint: Any = Checkpoint(Path("c/iter_0000050"), manifest, {}, "")
    checkpoint.stored = lambda kind: {"w": 1} if kind in kinds else {}
    checkpoint.model = lambda: run.model
    return checkpoint


def resume_from(checkpoint: Any, words: str) -> tuple[RunConfig, list[str]]:
    settings = with_checkpoint(parse_run(f"{BASE} {words}".split()), checkpoint)
    run = resolve_run(settings, 100, 1)
    return run, [str(problem).split(":")[0] for problem in resume_problems(settings.given, run, checkpoint)]


def resume(words: str, trained: str = TRAINED) -> tuple[RunConfig, list[str]]:
    return resume_from(checkpoint_of(run_of(trained)), words)


def rates(run: RunConfig) -> list[float]:
    return [learning_rate(run.optimizer, run.training.train_iters, iteration) for iteration in range(1, 301)]


@pytest.mark.parametrize(
    ("change", "flags"),
    [
        ("--lr 2e-3", ["--lr 0.002"]),
        ("--lr-warmup-iters 5", ["--lr-warmup-iters 5"]),
        ("--lr-decay-style WSD", ["--lr-decay-style WSD"]),
        ("--clip-grad 2 --adam-beta2 0.999", ["--clip-grad 2.0", "--adam-beta2 0.999"]),
    ],
)
def test_another_schedule_is_rejected_unless_a_flag_allows_it(change: str, flags: list[str]) -> None:
    words = f"{TRAINED} {change}"
    assert resume(words)[1] == flags
    changed, errors = resume(f"{words} {OVERRIDE}")
    assert not errors and changed.optimizer == run_of(words).optimizer
    kept, errors = resume(f"{words} {KEEP}")
    assert not errors and rates(kept) == rates(run_of(TRAINED))
    for name in ("weight_decay", "clip_grad", "adam_beta1", "adam_beta2", "adam_eps"):
        assert getattr(kept.optimizer, name) == getattr(run_of(TRAINED).optimizer, name)


def test_a_longer_run_keeps_its_decay() -> None:
    """A third run in a chain still knows where the decay ends, unless a flag changes it."""
    longer = TRAINED.replace("100", "300")
    run, errors = resume(longer)
    assert not errors and rates(run) == rates(run_of(TRAINED)) and run.training.train_iters == 300
    note = schedule_note(run, checkpoint_of(run_of(TRAINED)))
    assert note is not None and "ends at iteration 100;" in str(note)
    third, errors = resume_from(checkpoint_of(run), longer.replace("300", "400"))
    assert not errors and rates(third) == rates(run_of(TRAINED))
    stretched, errors = resume(f"{longer} {OVERRIDE}")
    assert not errors and rates(stretched) == rates(run_of(longer)) != rates(run_of(TRAINED))
    assert schedule_note(stretched, checkpoint_of(run_of(TRAINED))) is None
    moved, errors = resume(f"{longer} --lr-decay-iters 300 {OVERRIDE}")
    assert not errors and schedule_note(moved, checkpoint_of(run_of(TRAINED))) is None
    shorter, errors = resume(TRAINED.replace("100", "60"))
    assert not errors and rates(shorter) == rates(run_of(TRAINED))


def test_values_without_effect_may_change() -> None:
    constant = "--train-iters 100 --lr 1e-3 --lr-warmup-iters 10 --lr-decay-style constant"
    stored = checkpoint_of(run_of(constant))
    # Values that the style does not use.
    stored.manifest["run"]["optimizer"] |= {"min_lr": 1e-4, "lr_decay_iters": 50, "lr_wsd_decay_iters": 7}
    for keep in ("", KEEP):
        run, errors = resume_from(stored, f"{constant} {keep}")
        assert not errors and rates(run) == rates(run_of(constant)) and schedule_note(run, stored) is None
        assert run.optimizer == run_of(constant).optimizer
    assert resume(TRAINED, constant)[1] == ["--min-lr 0.0001"]
    stable = f"{TRAINED} --lr-decay-style WSD"
    assert resume(f"{stable} --lr-wsd-decay-iters 7", stable)[1] == ["--lr-wsd-decay-iters 7"]
    assert resume(f"{stable} --lr-wsd-decay-iters 10", stable)[1] == []


def test_a_run_cannot_be_resumed_from_weights_alone() -> None:
    weights = checkpoint_of(run_of(TRAINED), ("weight",))
    assert resume_from(weights, TRAINED)[1] == ["--load c/iter_0000050"]
    for free in ("--finetune", "--no-load-optim", "--skip-train"):
        assert resume_from(weights, f"{TRAINED} {free}")[1] == []


def test_a_resumed_run_keeps_its_optimizer() -> None:
    muon = f"{TRAINED} --optimizer muon"
    assert resume(muon, muon)[1] == [] and resume(f"{TRAINED} --optimizer adam")[1] == []
    assert resume(f"{muon} --muon-momentum 0.9 --no-muon-nesterov", muon)[1] == [
        "--muon-momentum 0.9",
        "--muon-nesterov False",
    ]
    for words, trained, flag in (
        (muon, TRAINED, "--optimizer muon"),
        (f"{TRAINED} --optimizer adamw", muon, "--optimizer adamw"),
    ):
        for schedule in ("", OVERRIDE, KEEP):
            assert resume(f"{words} {schedule}", trained)[1] == [flag]
        for free in ("--no-load-optim", "--finetune", "--skip-train"):
            assert resume(f"{words} {free}", trained)[1] == []


def test_a_resumed_run_keeps_values_that_need_the_model_of_the_checkpoint() -> None:
    experts = (
        f"{TRAINED} --num-experts 8 --moe-router-enable-expert-bias --moe-router-bias-update-rate 0.5 "
        "--moe-aux-loss-coeff 0.25 --moe-router-load-balancing-type aux_loss --moe-z-loss-coeff 0.125"
    )
    trained = replace(run_of(experts).training, global_batch_size=1)
    assert resume("", experts)[0].training == trained
    changed = resume("--moe-aux-loss-coeff 0", experts)[0].training
    assert changed == replace(trained, moe_aux_loss_coeff=0.0, moe_router_load_balancing_type="seq_aux_loss")


def test_a_resumed_run_may_repeat_its_flags_of_windows() -> None:
    windows = f"{TRAINED} --num-layers 4 --window-size 3,0 --window-attn-skip-freq 2"
    for words in ("", windows, "--window-attn-skip-freq 2", "--window-layers 0,2", "--window-size 4"):
        run, errors = resume(words, windows)
        assert not errors and (run.model.window_size, run.model.window_layers) == (4, (0, 2)), words
    assert resume("--window-attn-skip-freq 3", windows)[1] == ["--window-layers [0, 1, 3]"]


def test_a_resumed_run_may_repeat_its_flags_of_linear_attention() -> None:
    hybrid = f"{TRAINED} --num-layers 4 {DELTA} --linear-attention-freq 2"
    repeated = ("", hybrid, "--linear-attention-freq 2", "--linear-attention-layers 0,2", DELTA)
    for words in repeated:
        run, errors = resume(words, hybrid)
        assert not errors and run.model.linear_attention_layers == (0, 2), words
    assert resume("--linear-attention-freq 3", hybrid)[1] == ["--linear-attention-layers [0, 1, 3]"]
    assert resume(DELTA, f"{TRAINED} --num-layers 4")[1] == [DELTA]


@pytest.mark.parametrize("lists", ["--window-size 3", "--num-experts 2 --moe-router-topk 2", DELTA])
def test_lists_of_layers_are_not_compared_between_models_of_different_depths(lists: str) -> None:
    assert resume("--num-layers 6", f"{TRAINED} --num-layers 4 {lists}")[1] == ["--num-layers 6"]


def test_a_window_that_the_checkpoint_lacks_is_one_error() -> None:
    assert resume("--window-size 3", TRAINED)[1] == ["--window-size 3"]

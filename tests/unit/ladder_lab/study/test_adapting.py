"""The runs of an adaptation, and its command line."""

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

from ladder_lab.study import adapting
from ladder_lab.study.adaptation import write_adaptation
from ladder_lab.study.adapting import _AdaptRun
from ladder_lab.study.command_line import parse_options
from ladder_lab.study.commands import folder_of
from ladder_lab.study.options import ReportOptions, Request
from ladder_lab.study.report import report_study
from ladder_lab.study.schema import RESULT_NAME, Result, Trial, write_json, write_study
from megatron_ladder.config.run import RunConfig, parse_run, resolve_run
from megatron_ladder.errors import UserError
from tests.unit.ladder_lab.study.standing_in import SIZE, study_of

WORDS = f"adapt --sizes {SIZE} --iterations 200 --learning-rates 1e-2 --seeds 1 2 --healing-percent 10"
STUDY = study_of(
    wirings=("standard",), timed_wirings=(), iterations=200, learning_rates=(1e-2,), sizes={SIZE: {"num_layers": 2}}
)
STANDARD = {seed: Trial("tokens", "standard", SIZE, seed, 1e-2, 200) for seed in (1, 2)}


class Pretended(_AdaptRun):
    """Treats its trials as done, and records their configurations."""

    def __init__(self, request: Request) -> None:
        super().__init__(request, STUDY, [])
        self.configurations: dict[Trial, RunConfig] = {}

    def _train(self, trials: Sequence[Trial]) -> None:
        for trial in trials:
            if not self._collect(trial):
                command = self._command(trial)
                self.configurations[trial] = run_of(command)
                loss = 3.0 if self._cases.get(trial, (0, 0)) == (0, 0) else 5.0
                result = Result(trial, 9, 64, (), ((trial.iterations, loss),), 0.0, 0.0, 1, command, {})
                folder_of(self.options, trial).mkdir(parents=True)
                write_json(folder_of(self.options, trial) / RESULT_NAME, result)
                assert self._collect(trial)


def request_of(folder: Path, words: str = WORDS) -> Request:
    request = parse_options([*words.split(), "--output-dir", str(folder), "--", "--bf16"])
    assert isinstance(request, Request)
    return replace(request, options=adapting._with_wirings(request.options))


def run_of(command: Sequence[str]) -> RunConfig:
    """Parse the command as the trainer does, without errors."""
    errors: list[str] = []
    words = command[[word.endswith("pretrain_ladder.py") for word in command].index(True) + 1 :]
    run = resolve_run(parse_run(words, errors), 300, 1, errors)
    assert not errors
    return run


class Done(NamedTuple):
    """A finished adaptation."""

    folder: Path
    run: Pretended
    rewired: list[tuple[str | None, Path, Path]]
    """Conversions: layers, source and destination."""


def pretend(folder: Path) -> Done:
    rewired: list[tuple[str | None, Path, Path]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adapting, "plan_reshape", lambda options: (options.ladder_layers, options.load, options.save))
        patch.setattr(adapting, "carry_out", lambda conversion, *others: rewired.append(conversion))
        run = Pretended(request_of(folder))
        run.run()
    return Done(folder, run, rewired)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Done:
    return pretend(tmp_path_factory.mktemp("adaptation"))


def test_an_adaptation_evaluates_and_heals_every_model(done: Done) -> None:
    """Two layers: the control, the upper one and both, each evaluated and healed for 20 steps, for two seeds."""
    run = done.run
    cases = {
        key: [trial for trial in run.configurations if (trial.kind, trial.iterations) == key]
        for key in (("tokens", 200), ("adapt", 0), ("adapt", 20))
    }
    assert [len(trials) for trials in cases.values()] == [2, 6, 6] and not run.failures
    assert len(run.progress.done) == len(run.progress.expected) == 14
    for trial, config in run.configurations.items():
        upper = int(trial.detail[5]) if trial.detail else 0
        assert config.model.ladder_layers == {0: (), 1: (1,), 2: (0, 1)}[upper] and config.training.bf16
        assert config.model.residual_mode == ("ladder" if upper else "standard")
        assert config.logging.skip_train == (trial.iterations == 0)
        assert config.checkpoint.finetune == (trial.kind == "adapt")
    for trial in cases["tokens", 200]:
        assert run.configurations[trial].training.seed == trial.seed
    # The seed also draws the validation samples, so compared losses share it.
    assert all(run.configurations[trial].training.seed == trial.seed + 1000 for trial in cases["adapt", 0])
    for trial in cases["adapt", 20]:
        config = run.configurations[trial]
        assert (config.optimizer.lr, config.optimizer.lr_warmup_iters, config.training.train_iters) == (1e-3, 2, 20)
        # The same data in another order, and an evaluation only after the last step.
        assert config.training.seed == trial.seed + 1000 and config.logging.eval_interval == 20


def test_every_model_starts_from_the_right_checkpoint(done: Done) -> None:
    made = {save: (layers, load) for layers, load, save in done.rewired}
    for trial, config in done.run.configurations.items():
        if trial.kind == "adapt":
            upper, load = trial.detail[5], config.checkpoint.load
            assert load is not None
            assert config.checkpoint.save == folder_of(done.run.options, trial) / "checkpoints"
            standard = folder_of(done.run.options, STANDARD[trial.seed]) / "checkpoints"
            assert load == standard if upper == "0" else made[load] == (upper, standard)


def test_finished_runs_are_not_repeated_and_are_reported(done: Done, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(done.folder, folder)
    for trial in STANDARD.values():
        (folder / "trials" / trial.name / "checkpoints" / "iter_0000200").mkdir(parents=True)
    last = next(trial for trial in done.run.configurations if "upper2-10pct" in trial.detail)
    shutil.rmtree(folder / "trials" / last.name)
    again = pretend(folder)
    assert list(again.run.configurations) == [last] and [layers for layers, _, _ in again.rewired] == ["2"]
    assert write_adaptation(folder, tmp_path) is None, "there is no study.json"
    write_study(folder, STUDY)
    report_study(ReportOptions(folder, tmp_path / "report"))
    # A single wiring has nothing to compare.
    assert {path.name for path in (tmp_path / "report").iterdir()} == {"adaptation.md", "adaptation.png"}
    assert "| 2 | 3.0000 ± 0.0000 | 5.0000 ± 0.0000 |" in (tmp_path / "report" / "adaptation.md").read_text()
    assert f"python tools/study.py {WORDS}" in (tmp_path / "report" / "adaptation.md").read_text()
    assert (tmp_path / "report" / "adaptation.png").is_file()


def test_lost_standard_models_are_reported(done: Done, tmp_path: Path) -> None:
    shutil.copytree(done.folder, tmp_path / "copy")
    assert pretend(tmp_path / "copy").run.configurations == {}, "no run needs them"
    shutil.rmtree(next((tmp_path / "copy" / "trials").glob("adapt-*-seed2-*upper2-0pct*")))
    with pytest.raises(UserError, match="its checkpoints are gone") as raised:
        pretend(tmp_path / "copy")
    folder, mend = raised.value.messages
    assert "seed2-" in folder and "--keep-checkpoints" in mend


def test_the_wirings_are_those_of_the_folder(tmp_path: Path) -> None:
    options = request_of(tmp_path).options
    assert (options.wirings, options.timed_wirings, options.keep_checkpoints) == (("standard",), ("none",), True)
    write_study(tmp_path, study_of())
    options = request_of(tmp_path).options
    assert (options.wirings, options.timed_wirings) == (study_of().wirings, study_of().timed_wirings)


def test_all_errors_are_reported_together(tmp_path: Path) -> None:
    with pytest.raises(UserError) as raised:
        request_of(tmp_path, f"{WORDS} --adapt-layers 1 3 --healing-rate-share 0 --wirings standard --jobs 0")
    starts = [line.split(":")[0] for line in raised.value.messages]
    assert sorted(starts) == ["--adapt-layers 3", "--healing-rate-share 0.0", "--jobs 0", "--wirings"]
    # Three heads cannot be split between two ranks, which matters only if desync-2x is compared.
    assert request_of(tmp_path, "adapt --sizes 2x48x64x3x3x300").options.sizes == ("2x48x64x3x3x300",)
    with pytest.raises(UserError, match="--adapt-layers is not a flag"):
        parse_options(["run", "--output-dir", str(tmp_path), "--adapt-layers", "1"])

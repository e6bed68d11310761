"""Runs an adaptation: trains the standard models that are not there, rewires them, and evaluates and heals each."""

import functools
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from megatron_ladder.checkpoint.publish import published_checkpoints
from megatron_ladder.convert.carry_out import carry_out
from megatron_ladder.convert.measures import Measures
from megatron_ladder.convert.options import ReshapeOptions
from megatron_ladder.convert.reshaping import plan_reshape
from megatron_ladder.errors import UserError
from megatron_ladder.lab.bench.sizes import find_size
from megatron_ladder.lab.study.adapt_report import write_adaptation
from megatron_ladder.lab.study.adaptation import CONTROL, SEED_OFFSET, Adaptation, default_upper
from megatron_ladder.lab.study.command_line import NONE
from megatron_ladder.lab.study.commands import folder_of, training_command
from megatron_ladder.lab.study.description import Study, read_study
from megatron_ladder.lab.study.grid import choose_learning_rates, key_of, tuning_trials
from megatron_ladder.lab.study.material import Material
from megatron_ladder.lab.study.options import AdaptOptions, Request, RunOptions
from megatron_ladder.lab.study.outcome import CHECKPOINTS, remove_checkpoints
from megatron_ladder.lab.study.program import StudyRun, run_study
from megatron_ladder.lab.study.scheduling import Job
from megatron_ladder.lab.study.trial import Trial, read_result
from megatron_ladder.lab.study.wirings import STANDARD

REWIRED_NAME = "rewired"
"""Folder of a study for models between their rewiring and the end of the adaptation."""


def adapt_study(request: Request, argv: Sequence[str]) -> None:
    """Does what is left of an adaptation, and reports on it.

    Args:
        argv: as it was given, to be noted.

    Raises:
        UserError: the folder holds another study, or one whose standard models are gone.
        SystemExit: trials have failed; they were told.
    """
    start = functools.partial(AdaptRun, argv)
    run_study(replace(request, options=with_wirings(request.options)), argv, start, write_adaptation)


def with_wirings(options: RunOptions) -> RunOptions:
    """With the wirings of the folder's study, if it has one; standard is what is adapted."""
    found = read_study(options.output_dir)
    kept = replace(options, keep_checkpoints=True)
    return kept if found is None else replace(kept, wirings=found.wirings, timed_wirings=found.timed_wirings or (NONE,))


class AdaptRun(StudyRun):
    """One start of an adaptation."""

    def __init__(
        self, argv: Sequence[str], request: Request, material: Material, study: Study, received: Sequence[int]
    ) -> None:
        super().__init__(request, material, study, received)
        assert request.adapt is not None
        self._argv = argv
        self._adapt: AdaptOptions = request.adapt
        self._plan: Adaptation | None = None
        self._cases: dict[Trial, tuple[int, int]] = {}
        """Adapted models: upper layers, and percent of healing."""

    def run(self) -> None:
        """All that is left, in order.

        Raises:
            Stopped: a signal has come.
            UserError: a standard model is trained, and its checkpoint is gone.
        """
        size = next(iter(self.study.sizes))
        tuning = [trial for trial in tuning_trials(self.study) if (trial.wiring, trial.size) == (STANDARD, size)]
        rates = sorted(self.study.learning_rates)
        self._expect(tuning, self._plan_with(size, rates[len(rates) // 2]))
        self._tune(tuning)
        if self.failures:
            return
        chosen = {**choose_learning_rates(self.study, self._losses()), **self.study.chosen}
        rate = chosen.get(key_of(size, STANDARD))
        if rate is None:
            self.failures.append(f"{key_of(size, STANDARD)}: no learning rate could be chosen")
            return
        plan = self._plan = self._plan_with(size, rate)
        self._expect(tuning, plan)
        standard = [plan.standard(seed) for seed in plan.seeds]
        self._cases = {trial: (upper, percent) for upper, percent, trial in plan.trials()}
        self._refuse_lost_models(plan)
        self._train(standard)
        plan.write(self.options.output_dir)
        # A seed whose standard model failed has nothing to adapt.
        able = [trial for trial in self._cases if plan.standard(trial.seed).name in self.results]
        for trial in able:
            self._rewire(plan, trial)
        self._train(able)
        if not self.failures:
            shutil.rmtree(self.options.output_dir / REWIRED_NAME, ignore_errors=True)

    def _plan_with(self, size: str, rate: float) -> Adaptation:
        layers = find_size(size).num_layers
        upper = self._adapt.adapt_layers or default_upper(layers)
        return Adaptation(
            size=size,
            num_layers=layers,
            upper=tuple(sorted({CONTROL, *upper})),
            percents=tuple(sorted(self._adapt.healing_percent)),
            seeds=self.study.seeds,
            standard_learning_rate=rate,
            standard_iterations=self.study.iterations,
            learning_rate=float(f"{self._adapt.healing_rate_share * rate:.3g}"),
            command=("python", "tools/study.py", *self._argv),
        )

    def _expect(self, tuning: Sequence[Trial], plan: Adaptation) -> None:
        standard = [plan.standard(seed) for seed in plan.seeds]
        self.progress.expected = [*tuning, *standard, *(trial for _, _, trial in plan.trials())]

    def _refuse_lost_models(self, plan: Adaptation) -> None:
        needed = {plan.standard(trial.seed): None for trial in self._cases if not self._is_done(trial)}
        lost = [
            folder_of(self.options, trial)
            for trial in needed
            if self._is_done(trial) and not published_checkpoints(folder_of(self.options, trial) / CHECKPOINTS)
        ]
        if lost:
            raise UserError(
                *(f"{folder}: is trained, and its checkpoints are gone" for folder in lost),
                "study.py run --keep-checkpoints keeps them: remove these folders to train them again, or give another "
                "--output-dir",
            )

    def _is_done(self, trial: Trial) -> bool:
        return read_result(folder_of(self.options, trial)) is not None

    def _source(self, plan: Adaptation, trial: Trial) -> Path:
        """Checkpoints that an adapted model begins with."""
        upper, _ = self._cases[trial]
        standard = plan.standard(trial.seed)
        if upper == CONTROL:
            return folder_of(self.options, standard) / CHECKPOINTS
        return self.options.output_dir / REWIRED_NAME / f"{standard.name}-upper{upper}"

    def _rewire(self, plan: Adaptation, trial: Trial) -> None:
        """Writes the model that a trial begins with, if it is needed and not there."""
        upper, _ = self._cases[trial]
        save = self._source(plan, trial)
        if upper == CONTROL or self._is_done(trial) or published_checkpoints(save):
            return
        load = folder_of(self.options, plan.standard(trial.seed)) / CHECKPOINTS
        options = ReshapeOptions(load=load, save=save, ladder_layers=str(upper))
        carry_out(plan_reshape(options), options, lambda line: None, Measures())
        self.progress.say(f"rewired the upper {upper} layers of {plan.standard(trial.seed).name}")

    def _job(self, trial: Trial) -> Job:
        if trial in self._cases:
            # A healing is short: one that was cut off begins anew.
            remove_checkpoints(folder_of(self.options, trial))
        return super()._job(trial)

    def _command(self, trial: Trial) -> tuple[str, ...]:
        if self._plan is None or trial not in self._cases:
            return super()._command(trial)
        upper, percent = self._cases[trial]
        source = self._source(self._plan, trial)
        # A learning rate has no meaning for no step, but numbers must be such that a run can have them.
        trained = replace(trial, iterations=max(1, trial.iterations))
        command = training_command(self.request, self.material.flags, trained, self._ranks(trial))
        save = folder_of(self.options, trial) / CHECKPOINTS
        return (*command, *case_flags(upper, percent, trial, source, save))

    def _collect(self, trial: Trial) -> bool:
        done = super()._collect(trial)
        if done and trial in self._cases:
            remove_checkpoints(folder_of(self.options, trial))
        return done


def case_flags(upper: int, percent: int, trial: Trial, source: Path, save: Path) -> list[str]:
    """What an adapted model's run is told behind the flags of a trial, and otherwise than in them."""
    layers = ["--ladder-layers", str(upper)] if upper != CONTROL else []
    begin = ["--load", str(source), "--save", str(save), "--finetune", "--seed", str(trial.seed + SEED_OFFSET)]
    if percent == 0:
        return [*layers, *begin, "--skip-train"]
    once = str(trial.iterations)
    return [*layers, *begin, "--eval-interval", once, "--save-interval", once]

"""Runs an adaptation: trains missing standard models, rewires them, and evaluates and heals each."""

import functools
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from megatron_ladder.checkpoint.publish import published_checkpoints
from megatron_ladder.convert.carry_out import carry_out
from megatron_ladder.convert.conversions import plan_reshape
from megatron_ladder.convert.measures import Measures
from megatron_ladder.convert.options import ReshapeOptions
from megatron_ladder.errors import UserError
from megatron_ladder.lab.bench.sizes import find_size
from megatron_ladder.lab.study.adapt_report import write_adaptation
from megatron_ladder.lab.study.adaptation import CONTROL, SEED_OFFSET, Adaptation, default_upper
from megatron_ladder.lab.study.command_line import NONE
from megatron_ladder.lab.study.commands import folder_of, training_command
from megatron_ladder.lab.study.data import StudyData
from megatron_ladder.lab.study.description import Study, read_study
from megatron_ladder.lab.study.grid import choose_learning_rates, rate_key, tuning_trials
from megatron_ladder.lab.study.options import AdaptOptions, Request, RunOptions
from megatron_ladder.lab.study.outcome import CHECKPOINTS, remove_checkpoints
from megatron_ladder.lab.study.program import StudyRun, run_study
from megatron_ladder.lab.study.scheduling import Job
from megatron_ladder.lab.study.trial import Trial, read_result
from megatron_ladder.lab.study.wirings import STANDARD

REWIRED_NAME = "rewired"
"""Folder of a study for rewired models, until the adaptation is finished."""


def adapt_study(request: Request, argv: Sequence[str]) -> None:
    """Run the missing trials of an adaptation, and write its report.

    Args:
        argv: the command line, for the record.

    Raises:
        UserError: the folder has another study, or one whose standard models are gone.
        SystemExit: trials have failed, and were reported.
    """
    start = functools.partial(_AdaptRun, argv)
    run_study(replace(request, options=_with_wirings(request.options)), argv, start, write_adaptation)


def _with_wirings(options: RunOptions) -> RunOptions:
    """Replace the wirings by those of the folder's study, if it has one; only standard is adapted."""
    found = read_study(options.output_dir)
    kept = replace(options, keep_checkpoints=True)
    return kept if found is None else replace(kept, wirings=found.wirings, timed_wirings=found.timed_wirings or (NONE,))


class _AdaptRun(StudyRun):
    """One start of an adaptation."""

    def __init__(
        self, argv: Sequence[str], request: Request, data: StudyData, study: Study, received: Sequence[int]
    ) -> None:
        super().__init__(request, data, study, received)
        assert request.adapt is not None
        self._argv = argv
        self._adapt: AdaptOptions = request.adapt
        self._plan: Adaptation | None = None
        self._cases: dict[Trial, tuple[int, int]] = {}
        """Trials of adapted models -> upper layers, and percent of healing."""

    def run(self) -> None:
        """Run all missing trials, in order.

        Raises:
            _StudyStopped: a signal arrived.
            UserError: a standard model is trained, but its checkpoint is gone.
        """
        size = next(iter(self.study.sizes))
        tuning = [trial for trial in tuning_trials(self.study) if (trial.wiring, trial.size) == (STANDARD, size)]
        rates = sorted(self.study.learning_rates)
        self._expect(tuning, self._plan_with(size, rates[len(rates) // 2]))
        self._tune(tuning)
        if self.failures:
            return
        chosen = {**choose_learning_rates(self.study, self._losses()), **self.study.chosen}
        rate = chosen.get(rate_key(size, STANDARD))
        if rate is None:
            self.failures.append(f"{rate_key(size, STANDARD)}: no learning rate could be chosen")
            return
        plan = self._plan = self._plan_with(size, rate)
        self._expect(tuning, plan)
        standard = [plan.standard(seed) for seed in plan.seeds]
        self._cases = {trial: (upper, percent) for upper, percent, trial in plan.trials()}
        self._reject_lost_models(plan)
        self._train(standard)
        plan.write(self.options.output_dir)
        # A seed whose standard model failed is left out.
        possible = [trial for trial in self._cases if plan.standard(trial.seed).name in self.results]
        for trial in possible:
            self._rewire(plan, trial)
        self._train(possible)
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

    def _reject_lost_models(self, plan: Adaptation) -> None:
        needed = {plan.standard(trial.seed): None for trial in self._cases if not self._is_done(trial)}
        lost = [
            folder_of(self.options, trial)
            for trial in needed
            if self._is_done(trial) and not published_checkpoints(folder_of(self.options, trial) / CHECKPOINTS)
        ]
        if lost:
            raise UserError(
                *(f"{folder}: the model is trained, but its checkpoints are gone" for folder in lost),
                "remove these folders to train the models again, or give another --output-dir (study.py run keeps "
                "checkpoints only with --keep-checkpoints)",
            )

    def _is_done(self, trial: Trial) -> bool:
        return read_result(folder_of(self.options, trial)) is not None

    def _source(self, plan: Adaptation, trial: Trial) -> Path:
        """Return the folder of the checkpoint that an adapted model starts from."""
        upper, _ = self._cases[trial]
        standard = plan.standard(trial.seed)
        if upper == CONTROL:
            return folder_of(self.options, standard) / CHECKPOINTS
        return self.options.output_dir / REWIRED_NAME / f"{standard.name}-upper{upper}"

    def _rewire(self, plan: Adaptation, trial: Trial) -> None:
        """Write the model that a trial starts from, if it is needed and missing."""
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
            # Healing is short, so an interrupted run starts from scratch.
            remove_checkpoints(folder_of(self.options, trial))
        return super()._job(trial)

    def _command(self, trial: Trial) -> tuple[str, ...]:
        if self._plan is None or trial not in self._cases:
            return super()._command(trial)
        upper, percent = self._cases[trial]
        source = self._source(self._plan, trial)
        # The flags must be valid even for a run without steps.
        trained = replace(trial, iterations=max(1, trial.iterations))
        command = training_command(self.request, self.data.flags, trained, self._ranks(trial))
        save = folder_of(self.options, trial) / CHECKPOINTS
        return (*command, *_case_flags(upper, percent, trial, source, save))

    def _collect(self, trial: Trial) -> bool:
        done = super()._collect(trial)
        if done and trial in self._cases:
            remove_checkpoints(folder_of(self.options, trial))
        return done


def _case_flags(upper: int, percent: int, trial: Trial, source: Path, save: Path) -> list[str]:
    """Return the flags of an adapted model's run that override those of its trial."""
    layers = ["--ladder-layers", str(upper)] if upper != CONTROL else []
    begin = ["--load", str(source), "--save", str(save), "--finetune", "--seed", str(trial.seed + SEED_OFFSET)]
    if percent == 0:
        return [*layers, *begin, "--skip-train"]
    once = str(trial.iterations)
    return [*layers, *begin, "--eval-interval", once, "--save-interval", once]

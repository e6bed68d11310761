"""Runs an adaptation: trains missing standard models, rewires them, and evaluates and heals each."""

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ladder_lab.bench.sizes import find_size
from ladder_lab.study.adaptation import (
    ADAPTATION_NAME,
    CONTROL,
    SEED_OFFSET,
    Adaptation,
    default_upper,
    write_adaptation,
)
from ladder_lab.study.commands import flag_words, folder_of, training_command
from ladder_lab.study.grid import choose_learning_rates, tuning_trials
from ladder_lab.study.options import NONE, Request, RunOptions
from ladder_lab.study.outcome import remove_checkpoints
from ladder_lab.study.program import StudyRun, run_study
from ladder_lab.study.scheduling import Job
from ladder_lab.study.schema import CHECKPOINTS, Trial, rate_key, read_result, read_study, write_json
from ladder_lab.study.wirings import STANDARD
from megatron_ladder.checkpoint.publish import published_checkpoints
from megatron_ladder.convert.conversions import plan_reshape
from megatron_ladder.convert.copying import carry_out
from megatron_ladder.convert.options import ReshapeOptions
from megatron_ladder.errors import UserError

REWIRED_NAME = "rewired"
"""Folder of a study for rewired models, until the adaptation is finished."""


def adapt_study(request: Request) -> None:
    """Run the missing trials of an adaptation, and write its report; errors are those of `run_study`."""
    run_study(replace(request, options=_with_wirings(request.options)), _AdaptRun)


def _with_wirings(options: RunOptions) -> RunOptions:
    # A study in the folder keeps its wirings; only standard is adapted.
    found = read_study(options.output_dir)
    kept = replace(options, keep_checkpoints=True)
    return kept if found is None else replace(kept, wirings=found.wirings, timed_wirings=found.timed_wirings or (NONE,))


class _AdaptRun(StudyRun):
    """One start of an adaptation."""

    _plan: Adaptation
    _cases: dict[Trial, tuple[int, int]] = {}
    """Trials of adapted models -> upper layers, and percent of healing; empty until they can run."""

    def run(self) -> None:
        """Run all missing trials, in order. Raises UserError if the checkpoint of a trained standard model is gone."""
        size = next(iter(self.study.sizes))
        tuning = [trial for trial in tuning_trials(self.study) if (trial.wiring, trial.size) == (STANDARD, size)]
        rates = sorted(self.study.learning_rates)
        self._make_plan(size, self.study.rate(size, STANDARD) or rates[len(rates) // 2], tuning)
        self._tune(tuning)
        if self.failures:
            return
        chosen = {**choose_learning_rates(self.study, self._losses()), **self.study.chosen}
        rate = chosen.get(rate_key(size, STANDARD))
        if rate is None:
            self.failures.append(f"{rate_key(size, STANDARD)}: no learning rate could be chosen")
            return
        plan = self._make_plan(size, rate, tuning)
        self._cases = {trial: (upper, percent) for upper, percent, trial in plan.trials()}
        self._reject_lost_models()
        self._train([plan.standard(seed) for seed in plan.seeds])
        write_json(self.options.output_dir / ADAPTATION_NAME, plan)
        # A seed whose standard model failed is left out.
        possible = [trial for trial in self._cases if plan.standard(trial.seed).name in self.results]
        for trial in possible:
            self._rewire(trial)
        self._train(possible)
        if not self.failures:
            shutil.rmtree(self.options.output_dir / REWIRED_NAME, ignore_errors=True)

    def report(self, output: Path) -> Path | None:
        """Write the report into a folder."""
        return write_adaptation(self.options.output_dir, output)

    def _make_plan(self, size: str, rate: float, tuning: Sequence[Trial]) -> Adaptation:
        adapt = self.request.adapt
        assert adapt is not None
        layers = find_size(size).num_layers
        plan = self._plan = Adaptation(
            size=size,
            num_layers=layers,
            upper=tuple(sorted({CONTROL, *(adapt.adapt_layers or default_upper(layers))})),
            percents=tuple(sorted(adapt.healing_percent)),
            seeds=self.study.seeds,
            standard_learning_rate=rate,
            standard_iterations=self.study.iterations,
            learning_rate=float(f"{adapt.healing_rate_share * rate:.3g}"),
            command=self.request.command,
        )
        standard = [plan.standard(seed) for seed in plan.seeds]
        self.progress.expected = [*tuning, *self._further, *standard, *(trial for _, _, trial in plan.trials())]
        return plan

    def _reject_lost_models(self) -> None:
        needed = {self._plan.standard(trial.seed): None for trial in self._cases if not self._is_done(trial)}
        folders = [folder_of(self.options, trial) for trial in needed if self._is_done(trial)]
        lost = [folder for folder in folders if not published_checkpoints(folder / CHECKPOINTS)]
        if lost:
            raise UserError(
                *(f"{folder}: the model is trained, but its checkpoints are gone" for folder in lost),
                "remove these folders to train the models again, or give another --output-dir (study.py run keeps "
                "checkpoints only with --keep-checkpoints)",
            )

    def _is_done(self, trial: Trial) -> bool:
        return read_result(folder_of(self.options, trial)) is not None

    def _source(self, trial: Trial) -> Path:
        upper, _ = self._cases[trial]
        standard = self._plan.standard(trial.seed)
        if upper == CONTROL:
            return folder_of(self.options, standard) / CHECKPOINTS
        return self.options.output_dir / REWIRED_NAME / f"{standard.name}-upper{upper}"

    def _rewire(self, trial: Trial) -> None:
        (upper, _), save = self._cases[trial], self._source(trial)
        if upper != CONTROL and not self._is_done(trial) and not published_checkpoints(save):
            standard = self._plan.standard(trial.seed)
            load = folder_of(self.options, standard) / CHECKPOINTS
            options = ReshapeOptions(load=load, save=save, ladder_layers=str(upper))
            carry_out(plan_reshape(options), options, lambda line: None)
            self.progress.say(f"rewired the upper {upper} layers of {standard.name}")

    def _job(self, trial: Trial) -> Job:
        if trial in self._cases:
            # Healing is short, so an interrupted run starts from scratch.
            remove_checkpoints(folder_of(self.options, trial))
        return super()._job(trial)

    def _command(self, trial: Trial) -> tuple[str, ...]:
        if trial not in self._cases:
            return super()._command(trial)
        upper, percent = self._cases[trial]
        # The flags must be valid even for a run without steps.
        trained, ranks = replace(trial, iterations=max(1, trial.iterations)), self._configuration(trial).world_size
        overrides = {
            **({"ladder_layers": upper} if upper != CONTROL else {}),
            "load": self._source(trial),
            "save": folder_of(self.options, trial) / CHECKPOINTS,
            "seed": trial.seed + SEED_OFFSET,
            **({"eval_interval": trial.iterations, "save_interval": trial.iterations} if percent else {}),
        }
        command = training_command(self.request, trained, ranks)
        return (*command, *flag_words(overrides), "--finetune", *([] if percent else ["--skip-train"]))

    def _collect(self, trial: Trial) -> bool:
        done = super()._collect(trial)
        if done and trial in self._cases:
            remove_checkpoints(folder_of(self.options, trial))
        return done

"""Study: what heals a trained standard model fastest after some of its layers became ladder layers?

    python docs/study/conversion.py --output-dir DIR --results FILE                           an hour on two cores
    python docs/study/conversion.py --output-dir DIR --results FILE --sizes small --seeds 1   a quarter of an hour
    python docs/study/conversion.py --output-dir DIR --results FILE --times                   step times, a minute

Trains standard models of two sizes on Python's standard library, at 20 tokens per parameter, with the learning rate
tuned over the whole run at the smaller size. Measures the sensitivity of their layers, and turns the upper half, the
cheapest half, or all of them into ladder layers. Each of these models is healed for 1, 3 and 10 % of the training (all
layers: 10 %) by plain training, or distillation from the standard model, and compared with
the standard model that is trained for as long. The method `own` converts to ladder layers with own partials in two
lanes, exchanges heads and neurons such that those which affect each other share a lane, and then trains plainly.

The share of the learning rate that healing begins with is tuned for each method and each length of healing: on the
first model of the smaller size, with the upper half converted, by the validation loss that is reported as well.

DIR receives checkpoints and logs, and FILE the result of each trial. A trial with a result is skipped, so the same
command continues after an interruption. At the end, the tables are printed, and FILE gets a picture next to it.
"""

import argparse
import contextlib
import functools
import itertools
import json
import math
import os
import random
import shutil
import statistics
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from results import Result, Results, Search, interval, search

from ladder_lab.study.statistics import Paired, first_reaching
from megatron_ladder.processes import start_child

REPOSITORY = Path(__file__).resolve().parents[2]
LAYERS, HALF, HEADS, VOCABULARY, LENGTH, BATCH = 12, 6, 2, 512, 128, 32
SIZES = {"small": (32, 96), "large": (48, 128)}
"""Hidden size and width of the MLP."""
TOKENS_PER_PARAMETER = 20
MEASURED_TOKENS = 65_536
"""Tokens of each measurement of the sensitivity."""
RATES = (8e-3, 1.6e-2, 3.2e-2)
"""Learning rates at the small size; the large one has the best of them times the ratio of the hidden sizes."""
SHARES = (0.1, 0.3, 0.9)
"""Learning rates of healing, as shares of that of the training."""
SEEDS = (1, 2, 3)
CONTROL, UPPER, CHEAPEST, ALL = "control", "upper", "cheapest", "all"
PLAIN, OWN = "plain", "own"
SELECTIONS, METHODS, PERCENTS = (UPPER, CHEAPEST, ALL), (PLAIN, "distill", OWN), (1, 3, 10)
TIMED_METHODS = tuple(method for method in METHODS if method != OWN)
"""One process computes the lanes of several ranks one after another, which takes longer than on as many ranks."""
LANES = 2
HEALING_SEED = 1000
"""Added to the seed of a healing run, which sees the data in another order. It also draws the validation samples."""
TIMED_STEPS, TIMED_ROUNDS = 30, 5


@dataclass(frozen=True)
class Model:
    """A standard model."""

    size: str
    seed: int
    rate: float

    @property
    def name(self) -> str:
        return f"{self.size}-{self.seed}-{self.rate:g}"

    @property
    def steps(self) -> int:
        hidden, inner = SIZES[self.size]
        layer = 4 * hidden * hidden + 3 * hidden * inner + 2 * hidden
        parameters = LAYERS * layer + 2 * VOCABULARY * hidden + hidden
        return round(TOKENS_PER_PARAMETER * parameters / (BATCH * LENGTH))


@dataclass(frozen=True)
class Healing:
    """A healing run of a model after its conversion, or of the unchanged model as the control; 0 % only evaluates."""

    model: Model
    selection: str
    method: str
    percent: int
    share: float

    @property
    def name(self) -> str:
        return f"{self.model.name}-{self.selection}-{self.method}-{self.percent}-{self.share:g}"

    @property
    def steps(self) -> int:
        return round(self.model.steps * self.percent / 100)


class Study:
    """The trials, their commands and their results."""

    def __init__(self, folder: Path, results: Results, jobs: int) -> None:
        self._folder, self.results, self._jobs = folder, results, jobs

    def prepare_data(self) -> None:
        """Write the token files: one file of the library in twenty is held out for validation."""
        tokenizer = self._data / "tokenizer.model"
        if not tokenizer.exists():
            self._run("tokenizer", "examples/prepare_corpus.py", "--output-dir", self._data, "--vocab-size", VOCABULARY)
        files = library_files()
        random.Random(0).shuffle(files)
        for name, part in {"held_out": files[::20], "training": [f for i, f in enumerate(files) if i % 20]}.items():
            if not (self._data / f"{name}_text_document.json").exists():
                self._run(
                    f"data-{name}",
                    "tools/preprocess_data.py",
                    "--output-prefix",
                    self._data / name,
                    "--tokenizer-type",
                    "SentencePieceTokenizer",
                    "--tokenizer-model",
                    tokenizer,
                    "--append-eod",
                    "--input",
                    *part,
                )

    def train(self, models: Sequence[Model]) -> None:
        """Train the models without a result."""
        self._all(self._train, [model for model in models if self.results.of(model.name) is None])

    def heal(self, runs: Sequence[Healing]) -> None:
        """Run what has no result, after converting the models."""
        missing = [run for run in runs if self.results.of(run.name) is None]
        self._all(self._convert, list(dict.fromkeys(run.model for run in missing)))
        self._all(self._heal, missing)

    def time(self, model: Model) -> None:
        """Time the steps of every method in turn, one process at a time."""
        self._convert(model)
        rounds = {method: list[float]() for method in TIMED_METHODS}
        for number, method in itertools.product(range(TIMED_ROUNDS), TIMED_METHODS):
            run = Healing(model, UPPER, method, 100, 0.1)
            rounds[method].append(self._healed(f"timed-{number}-{method}", run, TIMED_STEPS)["step_seconds"])
        self.results.add(times_name(model), rounds)

    def _all(self, work: Callable[..., None], items: Sequence[object]) -> None:
        with ThreadPoolExecutor(self._jobs) as threads:
            list(threads.map(work, items))

    @property
    def _data(self) -> Path:
        return self._folder / "data"

    def _path(self, model: Model, part: str) -> Path:
        return self._folder / model.name / part

    def _run(self, name: str, *words: object) -> None:
        """Run a program of this repository on one thread."""
        log = self._folder / f"{name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
        print(f"{name}: see {log}", flush=True)
        with open(log, "w") as output:
            command = [sys.executable, *map(str, words)]
            # It ends with this program: a restart removes the folder that it writes to.
            child = start_child(command, cwd=REPOSITORY, env=environment, stdout=output, stderr=output)
            if code := child.wait():
                raise subprocess.CalledProcessError(code, command)

    def _trained(self, name: str, save: Path, size: str, steps: int, rate: float, seed: int, *words: object) -> Result:
        """Run the trainer; return the validation loss of the finished model, and the median seconds of a step."""
        shutil.rmtree(save, ignore_errors=True)
        hidden, inner = SIZES[size]
        shape = ("--num-layers", LAYERS, "--hidden-size", hidden, "--ffn-hidden-size", inner)
        length = max(steps, 1)
        self._run(
            name,
            "pretrain_ladder.py",
            *shape,
            "--num-attention-heads",
            HEADS,
            "--seq-length",
            LENGTH,
            "--micro-batch-size",
            BATCH,
            "--global-batch-size",
            BATCH,
            "--zero-stage",
            0,
            "--train-data-path",
            self._data / "training_text_document",
            "--valid-data-path",
            self._data / "held_out_text_document",
            "--tokenizer-type",
            "SentencePieceTokenizer",
            "--tokenizer-model",
            self._data / "tokenizer.model",
            "--train-iters",
            length,
            "--lr",
            f"{rate:g}",
            "--min-lr",
            f"{0.1 * rate:g}",
            "--lr-warmup-iters",
            length // 20,
            "--weight-decay",
            0.1,
            "--adam-beta2",
            0.95,
            "--seed",
            seed,
            "--eval-interval",
            length,
            "--eval-iters",
            40,
            "--save-interval",
            length,
            "--log-interval",
            max(length // 20, 1),
            "--save",
            save,
            *words,
        )
        events = [json.loads(line) for line in (save / "run.jsonl").read_text().splitlines()]
        losses = [event["loss"] for event in events if event["event"] == "evaluation"]
        seconds = [event["seconds"] / event["steps"] for event in events if event["event"] == "progress"]
        return {"loss": losses[-1], "step_seconds": statistics.median(seconds) if seconds else 0.0}

    def _train(self, model: Model) -> None:
        save = self._path(model, "standard")
        result = self._trained(model.name, save, model.size, model.steps, model.rate, model.seed)
        self.results.add(model.name, {"loss": result["loss"]})

    def _convert(self, model: Model) -> None:
        """Measure the sensitivity of a standard model, and convert it."""
        standard, price = self._path(model, "standard"), self._path(model, "price.json")
        latest = standard / "latest"
        # A run that was stopped has saved an earlier step.
        if not latest.exists() or latest.read_text().strip() != f"iter_{model.steps:07d}":
            self._train(model)
        tool = "tools/convert_checkpoint.py"
        measuring = (
            "--data",
            self._data / "training_text_document",
            "--batch-size",
            BATCH,
            "--seq-length",
            LENGTH,
            "--tokens",
            MEASURED_TOKENS,
        )
        if not price.exists():
            self._run(
                f"{model.name}-sensitivity", tool, "sensitivity", "--load", standard, "--output", price, *measuring
            )
            self.results.add(f"{model.name}-sensitivity", json.loads(price.read_text()))
        layers = {UPPER: str(HALF), CHEAPEST: f"best:{HALF}@{price}", ALL: str(LAYERS)}
        ways = {PLAIN: ("reshape",), OWN: ("arrange", "--lanes", LANES, *measuring)}
        for (selection, chosen), (method, way) in itertools.product(layers.items(), ways.items()):
            target = self._converted(model, selection, method)
            if not (target / "latest").exists():
                save = ("--save", target, "--ladder-layers", chosen)
                self._run(f"{model.name}-{target.name}", tool, *way, "--load", standard, *save)

    def _converted(self, model: Model, selection: str, method: str) -> Path:
        return self._path(model, f"{selection}-{OWN}" if method == OWN else selection)

    def _heal(self, run: Healing) -> None:
        self.results.add(run.name, {"loss": self._healed(run.name, run, run.steps)["loss"]})

    def _healed(self, name: str, run: Healing, steps: int) -> Result:
        model, standard = run.model, self._path(run.model, "standard")
        source, words = standard, list[object]()
        if run.selection != CONTROL:
            source = self._converted(model, run.selection, run.method)
            order = json.loads(self._path(model, "price.json").read_text())["order"]
            chosen = {UPPER: range(LAYERS - HALF, LAYERS), CHEAPEST: order[:HALF], ALL: range(LAYERS)}[run.selection]
            words += ["--residual-mode", "ladder", "--ladder-layers", ",".join(map(str, sorted(chosen)))]
            words += ["--lanes", LANES] if run.method == OWN else []
        words += ["--load", source, "--finetune"]
        if run.percent == 0:
            words.append("--skip-train")
        elif run.method == "distill":
            words += ["--distill-from", standard]
        save, rate = self._folder / name, run.share * model.rate
        result = self._trained(name, save, model.size, steps, rate, model.seed + HEALING_SEED, *words)
        shutil.rmtree(save)
        return result


def library_files() -> list[Path]:
    """Return the files of Python's standard library that are UTF-8."""
    found = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
        with contextlib.suppress(UnicodeDecodeError):
            if "site-packages" not in path.parts and path.read_bytes().decode():
                found.append(path)
    return found


def times_name(model: Model) -> str:
    """Return the name of the step times in the results."""
    return f"{model.name}-times"


def best_rate(results: Results) -> Search:
    """Return the state of the search for the learning rate of the small size."""
    return search(results, RATES, lambda rate: Model("small", SEEDS[0], rate).name)


def models(results: Results, sizes: Sequence[str], seeds: Sequence[int]) -> Iterator[Model]:
    """Iterate over the standard models with their learning rates; none before the rate is known."""
    rate = best_rate(results).best
    for size in sizes if rate is not None else ():
        scaled = float(f"{rate * SIZES['small'][0] / SIZES[size][0]:.4g}")
        yield from (Model(size, seed, scaled) for seed in seeds)


def tuned_runs(results: Results) -> dict[tuple[str, int], Callable[[float], Healing]]:
    """Map method and percent to the healing run with a share of the rate, on the first small model, if it exists."""
    methods = {method: (UPPER, method) for method in METHODS} | {CONTROL: (CONTROL, PLAIN)}
    return {
        (name, percent): functools.partial(Healing, model, *how, percent)
        for model in models(results, ["small"], SEEDS[:1])
        for name, how in methods.items()
        for percent in PERCENTS
    }


def shares(results: Results) -> dict[tuple[str, int], Search]:
    """Return the state of the search for the share of each method and percent."""

    def state(run: Callable[[float], Healing]) -> Search:
        return search(results, SHARES, lambda share: run(share).name)

    return {key: state(run) for key, run in tuned_runs(results).items()}


def tuning_runs(results: Results) -> list[Healing]:
    """Return the healing runs that the search for the shares needs next."""
    runs = tuned_runs(results)
    return [runs[key](share) for key, state in shares(results).items() for share in state.missing]


def healings(results: Results, model: Model) -> Iterator[Healing]:
    """Iterate over the runs of a model, with the best share of each method and percent; none before it is known."""
    best = {key: state.best for key, state in shares(results).items()}
    for (name, percent), share in best.items():
        if share is None:
            continue
        if name == CONTROL:
            yield Healing(model, CONTROL, PLAIN, percent, share)
            continue
        yield from (Healing(model, selection, name, percent, share) for selection in (UPPER, CHEAPEST))
        if percent == PERCENTS[-1]:
            yield Healing(model, ALL, name, percent, share)
    yield Healing(model, CONTROL, PLAIN, 0, 1.0)
    yield from (Healing(model, *how, 0, 1.0) for how in itertools.product(SELECTIONS, (PLAIN, OWN)))


def differences(
    results: Results, some: Sequence[Model], selection: str, method: str, percent: int
) -> dict[Model, float]:
    """Return the losses of the models that have ended, less those of their controls."""
    found = {}
    for model in some:
        ended = {(run.selection, run.method, run.percent): results.of(run.name) for run in healings(results, model)}
        healed, control = ended.get((selection, method, percent)), ended.get((CONTROL, PLAIN, percent))
        if healed is not None and control is not None:
            found[model] = healed["loss"] - control["loss"]
    return found


def table(heads: Sequence[str], rows: Iterator[Sequence[str]]) -> None:
    """Print a table, unless it is empty."""
    lines = [f"| {' | '.join(row)} |" for row in rows]
    if lines:
        print("", f"| {' | '.join(heads)} |", "|---" * len(heads) + "|", *lines, sep="\n")


def report(results: Results, some: Sequence[Model], picture: Path) -> None:
    """Print the tables of everything that has been measured, and draw them."""
    table(["model", "rate", "steps", "loss"], model_rows(results, some))
    table(["method", "percent", "loss at each share of the rate", "best share"], share_rows(results))
    heads = ["method", *(f"{percent} % of the tokens" if percent else "not healed" for percent in (0, *PERCENTS))]
    for size, selection in itertools.product(dict.fromkeys(model.size for model in some), SELECTIONS):
        own = [model for model in some if model.size == size]
        print(f"\n{size} model, {selection} layers: loss less the control's, mean and 95 % interval over the seeds")
        table(heads, difference_rows(results, own, selection))
    table(["model", "method", "tokens, of plain healing of 10 %", "time, of the same"], saving_rows(results, some))
    draw(results, some, picture)


def model_rows(results: Results, some: Sequence[Model]) -> Iterator[Sequence[str]]:
    """Iterate over the standard models, and the losses of the search for their rate."""
    tuned = [Model("small", SEEDS[0], rate) for rate in best_rate(results).losses]
    for model in dict.fromkeys([*tuned, *some]):
        if (result := results.of(model.name)) is not None:
            yield f"{model.size}, seed {model.seed}", f"{model.rate:g}", str(model.steps), f"{result['loss']:.4f}"


def share_rows(results: Results) -> Iterator[Sequence[str]]:
    """Iterate over the searches for the share of each method."""
    for (name, percent), state in shares(results).items():
        losses = ", ".join(f"{value:g}: {state.losses[value]:.4f}" for value in sorted(state.losses))
        best = "not known yet" if state.best is None else f"{state.best:g}" + ", at the edge" * state.at_edge
        yield name, str(percent), losses, best


def difference_rows(results: Results, own: Sequence[Model], selection: str) -> Iterator[Sequence[str]]:
    """Iterate over the methods."""
    for method in METHODS:
        found = [differences(results, own, selection, method, percent) for percent in PERCENTS]
        if any(found):
            zero = differences(results, own, selection, OWN if method == OWN else PLAIN, 0)
            yield method, *(interval([*each.values()]) if each else "–" for each in (zero, *found))


def saving_rows(results: Results, some: Sequence[Model]) -> Iterator[Sequence[str]]:
    """Iterate over the tokens that a method needs to be as close to the control as plain healing of the upper half."""
    for size in dict.fromkeys(model.size for model in some):
        own = [model for model in some if model.size == size]
        aim = differences(results, own, UPPER, PLAIN, PERCENTS[-1])
        for selection, method in itertools.product((UPPER, CHEAPEST), METHODS):
            curve = [(percent, differences(results, own, selection, method, percent)) for percent in PERCENTS]
            curve = [(percent, each) for percent, each in curve if each.keys() == aim.keys()]
            if not aim or len(curve) < 2:
                continue
            means = [(math.log(percent), statistics.fmean(each.values())) for percent, each in curve]
            named, wanted = f"{method}, {selection} layers", statistics.fmean(aim.values())
            reached = first_reaching(means, wanted)
            if reached is None:
                yield size, named, "not reached", "–"
                continue
            share = math.exp(reached) / PERCENTS[-1]
            if means[0][1] <= wanted:
                yield size, named, f"at most {share:.2f}", "–"
                continue
            times = results.of(times_name(next(models(results, ["small"], SEEDS[:1]))))
            timed = times is not None and method in times
            ratios = [one / plain for one, plain in zip(times[method], times[PLAIN], strict=True)] if timed else []
            cost = f"{share * statistics.median(ratios):.2f}" if ratios else "–"
            yield size, named, f"{share:.2f}", cost


def draw(results: Results, some: Sequence[Model], picture: Path) -> None:
    """Draw the difference from the control over the tokens of healing."""
    from matplotlib.figure import Figure

    sizes = list(dict.fromkeys(model.size for model in some))
    if not sizes:
        return
    figure = Figure(figsize=(5.0 * len(SELECTIONS), 3.6 * len(sizes)), layout="constrained")
    grid = figure.subplots(len(sizes), len(SELECTIONS), squeeze=False, sharey="row")
    for (row, size), (column, selection) in itertools.product(enumerate(sizes), enumerate(SELECTIONS)):
        axes, own, is_empty = grid[row][column], [model for model in some if model.size == size], True
        for number, method in enumerate(METHODS):
            points = [(percent, differences(results, own, selection, method, percent)) for percent in PERCENTS]
            drawn = [(percent, Paired([*found.values()])) for percent, found in points if found]
            is_empty = is_empty and not drawn
            # Slightly apart, so that the intervals do not cover each other.
            x = [percent * 1.04 ** (number - (len(METHODS) - 1) / 2) for percent, _ in drawn]
            errors = [pairs.half_width if pairs.pairs > 1 else 0.0 for _, pairs in drawn]
            axes.errorbar(x, [pairs.mean for _, pairs in drawn], yerr=errors, marker="o", capsize=3, label=method)
        axes.set_visible(not is_empty)
        axes.axhline(0.0, color="black", linewidth=0.8)
        axes.set_title(f"{size} model, {selection} layers" if selection != ALL else f"{size} model, all layers")
        axes.set_xscale("log", subs=[])
        axes.set_xlim(PERCENTS[0] / 1.3, PERCENTS[-1] * 1.3)
        axes.set_xticks(PERCENTS, [f"{percent} %" for percent in PERCENTS])
        axes.set_xlabel("tokens of healing, of those of the training")
        axes.set_ylabel("loss less the control's, nats per token" if column == 0 else "")
    figure.legend(*grid[0][0].get_legend_handles_labels(), loc="outside upper center", ncols=len(METHODS))
    figure.savefig(picture, dpi=120)


def main() -> None:
    """Run what is missing, and report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output-dir", type=Path, required=True, help="folder for checkpoints and logs")
    parser.add_argument("--results", type=Path, required=True, help="JSON file of results, which is continued")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=[*SIZES])
    parser.add_argument("--seeds", nargs="+", type=int, choices=SEEDS, default=SEEDS)
    parser.add_argument("--percents", nargs="+", type=int, choices=PERCENTS, default=PERCENTS, help="lengths to run")
    parser.add_argument("--selections", nargs="+", choices=SELECTIONS, default=SELECTIONS, help="layers to convert")
    parser.add_argument("--jobs", type=int, default=2, help="training runs at a time, with one thread each")
    parser.add_argument("--times", action="store_true", help="only measure step times, with nothing else running")
    parser.add_argument("--report", action="store_true", help="only report")
    options = parser.parse_args()
    results = Results(options.results)
    if not options.report:
        study = Study(options.output_dir.resolve(), results, options.jobs)
        study.prepare_data()
        while missing := best_rate(results).missing:
            study.train([Model("small", SEEDS[0], rate) for rate in missing])
        if options.times:
            study.time(next(models(results, ["small"], SEEDS[:1])))
            return
        while runs := tuning_runs(results):
            study.heal(runs)
        for size in options.sizes:
            study.train(list(models(results, [size], options.seeds)))
            runs = (run for model in models(results, [size], options.seeds) for run in healings(results, model))
            study.heal(
                [
                    run
                    for run in runs
                    if run.percent in (0, *options.percents) and run.selection in (CONTROL, *options.selections)
                ]
            )
    report(results, list(models(results, options.sizes, options.seeds)), options.results.with_suffix(".png"))


if __name__ == "__main__":
    main()

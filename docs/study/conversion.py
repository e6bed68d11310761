"""Study: what heals a trained standard model fastest after half of its layers became ladder layers?

    python docs/study/conversion.py --output-dir DIR --results FILE                           three hours on two cores
    python docs/study/conversion.py --output-dir DIR --results FILE --sizes small --seeds 1   forty minutes

Trains standard models of two sizes on Python's standard library, at 20 tokens per parameter, with the learning rate
tuned over the whole run at the smaller size. Measures the sensitivity of their layers, and turns the upper or the
cheapest half into ladder layers. Each of these models is healed for 3 and 10 % of the training by plain training,
distillation from the standard model, annealed staleness, or both, and compared with the standard model that is trained
for as long. The share of the learning rate that healing begins with is tuned for each method.

DIR receives checkpoints and logs, and FILE the result of each trial. A trial with a result is skipped, so the same
command continues after an interruption. At the end, the tables are printed, and FILE gets a picture next to it.
"""

import argparse
import functools
import itertools
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from results import Result, Results

REPOSITORY = Path(__file__).resolve().parents[2]
LAYERS, HALF, HEADS, VOCABULARY, LENGTH, BATCH = 12, 6, 4, 512, 128, 32
SIZES = {"small": (32, 96), "large": (48, 128)}
"""Hidden size and width of the MLP."""
TOKENS_PER_PARAMETER = 20
MEASURED_TOKENS = 16_384
"""Tokens of each measurement of the sensitivity."""
RATES = (8e-3, 1.6e-2, 3.2e-2)
"""Learning rates at the small size; the large one has the best of them times the ratio of the hidden sizes."""
SHARES = (0.1, 0.3, 1.0)
"""Learning rates of healing, as shares of that of the training."""
SEEDS = (1, 2, 3)
SELECTIONS, METHODS, PERCENTS = ("upper", "cheapest"), ("plain", "distill", "anneal", "both"), (3, 10)
CONTROL = "control"
HEALING_SEED = 1000
"""Added to the seed of a healing run, which sees the data in another order. It also draws the validation samples."""


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
        """Write the token files."""
        self._run("data", "tools/prepare_corpus.py", "--output-dir", self._data, "--vocab-size", VOCABULARY)

    def train(self, models: Sequence[Model]) -> None:
        """Train the models without a result, and those without a checkpoint that a healing run needs."""
        self._all(self._train, [model for model in models if self.results.of(model.name) is None])

    def heal(self, runs: Sequence[Healing]) -> None:
        """Run what has no result, after converting the models."""
        missing = [run for run in runs if self.results.of(run.name) is None]
        self._all(self._convert, list(dict.fromkeys(run.model for run in missing)))
        self._all(self._heal, missing)

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
            subprocess.run(command, check=True, cwd=REPOSITORY, env=environment, stdout=output, stderr=output)

    def _trained(self, name: str, save: Path, size: str, steps: int, rate: float, seed: int, *words: object) -> Result:
        """Run the trainer from scratch, and return the validation loss of the finished model."""
        shutil.rmtree(save, ignore_errors=True)
        hidden, inner = SIZES[size]
        corpus = self._data / "train_text_document"
        shape = ("--num-layers", LAYERS, "--hidden-size", hidden, "--ffn-hidden-size", inner)
        self._run(
            name, "pretrain_ladder.py", *shape, "--num-attention-heads", HEADS, "--seq-length", LENGTH,
            "--micro-batch-size", BATCH, "--global-batch-size", BATCH, "--zero-stage", 0, "--data-path", corpus,
            "--split", "96,4,0", "--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model",
            self._data / "tokenizer.model", "--train-iters", max(steps, 1), "--lr", f"{rate:g}", "--min-lr",
            f"{0.1 * rate:g}", "--lr-warmup-iters", max(steps, 1) // 20, "--weight-decay", 0.1, "--adam-beta2", 0.95,
            "--seed", seed, "--eval-interval", max(steps, 1), "--eval-iters", 40, "--save-interval", max(steps, 1),
            "--log-interval", max(steps // 20, 1), "--save", save, *words,
        )  # fmt: skip
        events = [json.loads(line) for line in (save / "run.jsonl").read_text().splitlines()]
        losses = [event["loss"] for event in events if event["event"] == "evaluation"]
        progress = [event for event in events if event["event"] == "progress"]
        done = sum(event["steps"] for event in progress)
        return {"loss": losses[-1], "step_seconds": sum(event["seconds"] for event in progress) / done if done else 0.0}

    def _train(self, model: Model) -> None:
        save = self._path(model, "standard")
        self.results.add(model.name, self._trained(model.name, save, model.size, model.steps, model.rate, model.seed))

    def _convert(self, model: Model) -> None:
        """Measure the sensitivity of a standard model, and convert its halves."""
        standard, price = self._path(model, "standard"), self._path(model, "price.json")
        if not (standard / "latest").exists():
            self._train(model)
        tool, layers = "tools/convert_checkpoint.py", {"upper": str(HALF), "cheapest": f"best:{HALF}@{price}"}
        if not price.exists():
            self._run(
                f"{model.name}-sensitivity", tool, "sensitivity", "--load", standard, "--data",
                self._data / "train_text_document", "--output", price, "--batch-size", BATCH, "--seq-length", LENGTH,
                "--tokens", MEASURED_TOKENS,
            )  # fmt: skip
            self.results.add(f"{model.name}-sensitivity", json.loads(price.read_text()))
        for selection in SELECTIONS:
            if not (self._path(model, selection) / "latest").exists():
                save = ("--save", self._path(model, selection), "--ladder-layers", layers[selection])
                self._run(f"{model.name}-{selection}", tool, "reshape", "--load", standard, *save)

    def _heal(self, run: Healing) -> None:
        model, standard = run.model, self._path(run.model, "standard")
        source, words = standard, list[object]()
        if run.selection != CONTROL:
            source = self._path(model, run.selection)
            order = json.loads(self._path(model, "price.json").read_text())["order"]
            chosen = order[:HALF] if run.selection == "cheapest" else range(LAYERS - HALF, LAYERS)
            words += ["--residual-mode", "ladder", "--ladder-layers", ",".join(map(str, sorted(chosen)))]
        words += ["--load", source, "--finetune"]
        if run.percent == 0:
            words.append("--skip-train")
        elif run.method in ("distill", "both"):
            words += ["--distill-from", standard]
        if run.percent > 0 and run.method in ("anneal", "both"):
            words += ["--anneal-staleness", math.ceil(run.steps / 2)]
        save, rate = self._folder / run.name, run.share * model.rate
        result = self._trained(run.name, save, model.size, run.steps, rate, model.seed + HEALING_SEED, *words)
        shutil.rmtree(save)
        self.results.add(run.name, result)


def best(results: Results, names: Sequence[str]) -> int:
    """Return the index of the trial with the lowest loss, among those that have ended."""
    found = [results.of(name) for name in names]
    return min(range(len(names)), key=lambda index: math.inf if (one := found[index]) is None else one["loss"])


def models(results: Results, sizes: Sequence[str], seeds: Sequence[int]) -> Iterator[Model]:
    """Iterate over the standard models with their learning rates."""
    rate = RATES[best(results, [Model("small", SEEDS[0], rate).name for rate in RATES])]
    scale = {size: SIZES["small"][0] / SIZES[size][0] for size in SIZES}
    yield from (Model(size, seed, float(f"{rate * scale[size]:.4g}")) for size in sizes for seed in seeds)


def tuning(results: Results) -> dict[str, list[Healing]]:
    """Return the healing runs that choose the share of each method: all shares, on the first small model."""
    (first,) = models(results, ["small"], SEEDS[:1])
    methods = {method: ("upper", method) for method in METHODS} | {CONTROL: (CONTROL, "plain")}
    return {name: [Healing(first, *how, PERCENTS[-1], share) for share in SHARES] for name, how in methods.items()}


def healings(results: Results, model: Model) -> Iterator[Healing]:
    """Iterate over the runs of a model, with the best share of each method."""
    tuned = tuning(results)
    share = {name: SHARES[best(results, [run.name for run in runs])] for name, runs in tuned.items()}
    for percent in PERCENTS:
        yield Healing(model, CONTROL, "plain", percent, share[CONTROL])
        for selection, method in itertools.product(SELECTIONS, METHODS):
            yield Healing(model, selection, method, percent, share[method])
    for selection in (CONTROL, *SELECTIONS):
        yield Healing(model, selection, "plain", 0, 1.0)


def summary(values: Sequence[float]) -> str:
    """Return mean and standard deviation."""
    spread = f" ± {statistics.stdev(values):.4f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):+.4f}{spread}"


def differences(results: Results, some: Sequence[Model], selection: str, method: str, percent: int) -> list[float]:
    """Return the losses of the models that have ended, less those of their controls."""
    found = []
    for model in some:
        ended = {(run.selection, run.method, run.percent): results.of(run.name) for run in healings(results, model)}
        healed, control = ended[selection, method, percent], ended[CONTROL, "plain", percent]
        if healed is not None and control is not None:
            found.append(healed["loss"] - control["loss"])
    return found


def report(results: Results, some: Sequence[Model], picture: Path) -> None:
    """Print the tables of everything that has been measured, and draw them."""
    print("\n| model | rate | steps | loss |\n|---|---|---|---|")
    for model in dict.fromkeys([*(Model("small", SEEDS[0], rate) for rate in RATES), *some]):
        if (result := results.of(model.name)) is not None:
            print(f"| {model.size}, seed {model.seed} | {model.rate:g} | {model.steps} | {result['loss']:.4f} |")
    heads = ["method", *(f"share {share:g}" for share in SHARES)]
    print(f"\n| {' | '.join(heads)} |\n{'|---' * len(heads)}|")
    for name, runs in tuning(results).items():
        ended = [results.of(run.name) for run in runs]
        print(f"| {name} | " + " | ".join("–" if one is None else f"{one['loss']:.4f}" for one in ended) + " |")
    print("\n| size | layers | method | length | models | less the control | step, relative to plain |")
    print("|---|---|---|---|---|---|---|")
    for size in dict.fromkeys(model.size for model in some):
        own = [model for model in some if model.size == size]
        cases = [(0, selection, "plain") for selection in SELECTIONS]
        cases += list(itertools.product(PERCENTS, SELECTIONS, METHODS))
        for percent, selection, method in cases:
            if found := differences(results, own, selection, method, percent):
                length = f"{percent} %" if percent else "not healed"
                times = step_ratios(results, own, selection, method, percent)
                ratio = f"{statistics.median(times):.2f}" if times else "–"
                named = method if percent else "–"
                print(f"| {size} | {selection} | {named} | {length} | {len(found)} | {summary(found)} | {ratio} |")
    draw(results, some, picture)


def step_ratios(results: Results, some: Sequence[Model], selection: str, method: str, percent: int) -> list[float]:
    """Return the time of a step of a method relative to that of plain training, for each model that has ended."""
    ratios = []
    for model in some if percent else ():
        runs = {(run.selection, run.method, run.percent): run for run in healings(results, model)}
        one, plain = (results.of(runs[selection, each, percent].name) for each in (method, "plain"))
        if one is not None and plain is not None:
            ratios.append(one["step_seconds"] / plain["step_seconds"])
    return ratios


def draw(results: Results, some: Sequence[Model], picture: Path) -> None:
    """Draw the difference from the control over the tokens of healing."""
    from matplotlib.figure import Figure

    sizes = list(dict.fromkeys(model.size for model in some))
    figure = Figure(figsize=(5.5 * len(sizes), 4.2), layout="constrained")
    for axes, size in zip(figure.subplots(1, len(sizes), squeeze=False)[0], sizes, strict=True):
        own = [model for model in some if model.size == size]
        for selection, (colour, method) in itertools.product(SELECTIONS, enumerate(METHODS)):
            points = [(percent, differences(results, own, selection, method, percent)) for percent in PERCENTS]
            drawn = [(percent, found) for percent, found in points if found]
            if drawn:
                axes.errorbar(
                    [percent for percent, _ in drawn], [statistics.fmean(found) for _, found in drawn],
                    yerr=[statistics.stdev(found) if len(found) > 1 else 0.0 for _, found in drawn], marker="o",
                    capsize=3, color=f"C{colour}", linestyle="-" if selection == "upper" else "--",
                    label=f"{method}, {selection} layers",
                )  # fmt: skip
        axes.axhline(0.0, color="black", linewidth=0.8)
        axes.set_title(f"{size} model")
        axes.set_xlabel("healing, % of the training tokens")
        axes.set_ylabel("loss less the control's, nats per token")
        axes.legend(fontsize="small")
    figure.savefig(picture, dpi=120)


def main() -> None:
    """Run what is missing, and report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output-dir", type=Path, required=True, help="folder for checkpoints and logs")
    parser.add_argument("--results", type=Path, required=True, help="JSON file of results, which is continued")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=[*SIZES])
    parser.add_argument("--seeds", nargs="+", type=int, choices=SEEDS, default=SEEDS)
    parser.add_argument("--jobs", type=int, default=2, help="training runs at a time, with one thread each")
    parser.add_argument("--report", action="store_true", help="only report")
    options = parser.parse_args()
    results = Results(options.results)
    chosen = functools.partial(models, results, options.sizes, options.seeds)
    if not options.report:
        study = Study(options.output_dir.resolve(), results, options.jobs)
        study.prepare_data()
        study.train([Model("small", SEEDS[0], rate) for rate in RATES])
        study.heal([run for runs in tuning(results).values() for run in runs])
        study.train(list(chosen()))
        study.heal([run for model in chosen() for run in healings(results, model)])
    report(results, list(chosen()), options.results.with_suffix(".png"))


if __name__ == "__main__":
    main()

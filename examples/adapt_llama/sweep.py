"""Writes the table and the plot of sweep.sh: perplexity and predicted speed-up for several numbers of ladder layers.

    python examples/adapt_llama/sweep.py --runs FOLDER --layers 8 16 32 --link no-p2p

reads FOLDER/N/evaluation/table.json and FOLDER/N/healed/config.json, and writes FOLDER/sweep.md and FOLDER/sweep.png.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path += [str(REPOSITORY), str(REPOSITORY / "tools")]

from ladder_lab.cost.machines import GPUS, PRESETS  # noqa: E402
from ladder_lab.output import markdown_table  # noqa: E402
from megatron_ladder.command_line import parse_command_line  # noqa: E402
from megatron_ladder.errors import UserError, run_program  # noqa: E402
from megatron_ladder.files import write_atomically  # noqa: E402
from megatron_ladder.flags import flag  # noqa: E402

SHAPE_KEYS = (
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
)
"""Values of a Hugging Face configuration in the order of `tools/plan.py inference --model` in numbers."""


@dataclass(frozen=True)
class SweepOptions:
    """Sweep. Runs of adapt.sh, and the machine that will serve the model."""

    runs: Path
    """Folder with a run of adapt.sh for each number of ladder layers, named after the number."""
    layers: tuple[int, ...] = flag(minimum=1)
    """Numbers of ladder layers."""
    gpu: str = flag("h100", choices=GPUS)
    """GPU of the predicted speed-up."""
    link: str = flag("nvlink", choices=PRESETS)
    """Interconnect of the predicted speed-up."""
    tp: int = flag(8, minimum=2)
    """Tensor-parallel GPUs of the predicted speed-up."""
    batch: int = flag(4, minimum=1)
    """Prompts at once, of 1024 tokens, each with 512 new tokens."""


@dataclass(frozen=True)
class AdaptedModel:
    """The results of one number of ladder layers."""

    layers: int
    results: Mapping[str, Mapping[str, float]]
    """Perplexity and the metrics of lm-eval of the models `source`, `unhealed` and `healed`."""
    speed_up: float
    speed_up_range: tuple[float, float]
    """Predicted, over the source."""


def read_json(path: Path) -> Any:
    """Read a file of adapt.sh; raise UserError if it is missing."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read: {error}: run sweep.sh to its end") from None


def adapted_model(options: SweepOptions, layers: int) -> AdaptedModel:
    """Return the results of a run, and the planner's prediction for its shape."""
    run = options.runs / str(layers)
    results = read_json(run / "evaluation" / "table.json")
    config = read_json(run / "healed" / "config.json")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "prediction.json"
        command = [
            sys.executable,
            str(REPOSITORY / "tools" / "plan.py"),
            "inference",
            "--model",
            "x".join(str(config[key]) for key in SHAPE_KEYS),
            "--ladder-layers",
            str(layers),
            "--gpu",
            options.gpu,
            "--link",
            options.link,
            "--tp",
            str(options.tp),
            "--batch",
            str(options.batch),
            "--json",
            str(path),
        ]
        done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        if done.returncode:
            raise UserError(f"tools/plan.py inference: {done.stderr.strip()}")
        report = read_json(path)
    if not report["fits"]:
        raise UserError(f"tools/plan.py inference: {report['answer']}")
    wirings = {one["wiring"]: one for one in report["wirings"]}
    hybrid = wirings[f"hybrid-{layers}"]
    low, high = hybrid["speed_up_range"]
    return AdaptedModel(layers, results, hybrid["speed_up"], (low, high))


def sweep_table(models: Sequence[AdaptedModel]) -> str:
    """Return a row for the source and one for each number of ladder layers, with all results of evaluate.py."""
    metrics = list(dict.fromkeys(name for one in models for name in one.results["healed"]))

    def row(layers: int, results: Mapping[str, float], not_healed: str, speed_up: str, likely: str) -> dict[str, str]:
        values = {name: f"{results[name]:.3f}" if name in results else "" for name in metrics}
        return {"ladder layers": str(layers), "not healed": not_healed, **values, "speed-up": speed_up, "range": likely}

    rows = [row(0, models[0].results["source"], "", "1.00", "")]
    for one in models:
        not_healed = f"{one.results['unhealed']['perplexity']:.3f}"
        likely = "{:.2f} to {:.2f}".format(*one.speed_up_range)
        rows.append(row(one.layers, one.results["healed"], not_healed, f"{one.speed_up:.2f}", likely))
    return markdown_table(rows)


def plot(models: Sequence[AdaptedModel], path: Path) -> None:
    """Draw perplexity over predicted speed-up, with the number of ladder layers at each point, as a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 5), layout="constrained")
    axes = figure.subplots()
    axes.axhline(models[0].results["source"]["perplexity"], color="black", linewidth=0.8, label="source")
    for name, color in (("unhealed", "C1"), ("healed", "C0")):
        values = [one.results[name]["perplexity"] for one in models]
        axes.plot([one.speed_up for one in models], values, marker="o", color=color, label=name)
    for one in models:
        place = (one.speed_up, one.results["healed"]["perplexity"])
        axes.annotate(str(one.layers), place, xytext=(0, 6), textcoords="offset points")
    axes.set_xlabel("predicted speed-up")
    axes.set_ylabel("perplexity of the assistant's messages")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, format="png", dpi=120)


def main(argv: Sequence[str]) -> None:
    """Print and write the table, and draw the plot."""
    options: SweepOptions
    description = "Compares adaptations with several numbers of ladder layers."
    (options,) = parse_command_line([SweepOptions], argv, program="sweep.py", description=description)
    models = [adapted_model(options, layers) for layers in sorted(options.layers)]
    setting = f"{options.tp} x {options.gpu} over {options.link}, batch {options.batch}"
    text = f"Speed-ups are predicted for {setting}, 1,024 prompt tokens and 512 new ones.\n\n{sweep_table(models)}\n"
    write_atomically(options.runs / "sweep.md", text)
    plot(models, options.runs / "sweep.png")
    print(text, end="")


def entry_point() -> NoReturn:
    """Run as a program."""
    run_program(main)


if __name__ == "__main__":
    entry_point()

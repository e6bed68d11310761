"""Runs everything that one GPU can show, in calls of a few minutes, and keeps the results in one file per part.

The steps of a part are commands that write into a folder of the part. Its results are

    PART.json   device and versions; each step's command, exit code, seconds and last lines; the files of the folder

This file is replaced while a step runs, whenever the folder changes, and is all that a later call needs: the call
restores the folder and runs what has not finished, steps with fewer attempts first. The programs behind long steps
continue with the files they find. A step that was stopped twice and added nothing to its files has failed.
"""

import contextlib
import importlib.util
import json
import os
import platform
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ladder_lab.output import write_json
from megatron_ladder.command_line import parse_config
from megatron_ladder.errors import ExitCode, UserError, run_program
from megatron_ladder.files import read_if_exists
from megatron_ladder.flags import flag
from megatron_ladder.processes import end_children, received_signals, start_child
from tests.helpers.commands import REPOSITORY_ROOT

Device = Literal["cuda", "cpu"]
PARTS = ("checks", "paper", "training", "study")
OPEN = 75
"""Exit code if steps are left for another call: a temporary failure, as in sysexits.h."""
MEASURED = (ExitCode.DONE, ExitCode.BAD_NUMBERS)
"""Exit codes of a finished step: a program that finds a ratio too noisy to judge has written it."""
PACKAGES = ("torch", "triton", "transformers", "deepspeed", "numpy")
LAST_LINES = 40
POLL_SECONDS, GRACE_SECONDS = 0.5, 10.0
MOST_STOPS = 2
"""Stops of a step that adds nothing to its files, after which it has failed."""


@dataclass(frozen=True)
class DayOptions:
    """Parts, files and time. The script itself takes --wheels WHEELS: see its head."""

    output: Path | None = flag(None, output="directory")
    """Folder of the results; required without --dry-run."""
    results: Path | None = None
    """Folder with the results of earlier calls, if it is not --output."""
    device: Device = "cuda"
    """cuda measures; cpu rehearses the same programs with toy sizes."""
    minutes: float = flag(9.0, above=0)
    """Time after which this call ends what is running."""
    only: tuple[str, ...] = flag(PARTS, choices=PARTS)
    """Parts to run; their order is fixed."""
    dry_run: bool = False
    """Print the commands."""


class Step(NamedTuple):
    """A command of a part, with the placeholders of `settings`."""

    part: str
    name: str
    command: str
    seconds: float = 60
    """Least time in which a GPU gets it done, or far enough that another call continues."""
    makes: str = ""
    """A file that is too large for the results, so that each call makes it again."""


STEPS = (
    Step("checks", "checks", "{python} -m tests.gpu {checks} --json {folder}/checks.json", 90),
    Step("paper", "paper", "bash examples/paper/speed.sh {folder} --one-gpu {paper}"),
    Step("training", "step-short", "{train} --sequence {short} --json {folder}/step-short.json"),
    Step(
        "training",
        "step-long",
        "{train} --sequence {long} --wirings standard ladder --json {folder}/step-long.json",
        90,
    ),
    Step("training", "step-eager", "{train} --sequence {short} {eager} --json {folder}/step-eager.json"),
    Step("training", "throughput", "{throughput} --json {folder}/throughput.json", 90),
    Step("training", "host-train", "{python} tools/host_time.py --case train", 20),
    Step("training", "host-decode", "{python} tools/host_time.py --case decode", 20),
    Step("training", "decode-default", "{decode} --json {folder}/decode-default.json"),
    Step("training", "decode-compiled", "{decode} {compiled} --json {folder}/decode-compiled.json"),
    Step(
        "study",
        "tokenizer",
        "{python} examples/prepare_corpus.py --output-dir {folder}/data --vocab-size 512 --max-megabytes 2",
        150,
        makes="data/valid_text_document.json",
    ),
    Step(
        "study",
        "corpus",
        "env -C {folder} {python} {root}/tools/preprocess_data.py --input {texts} --output-prefix data/packages "
        "--append-eod {tokenizer} --workers {workers} --skip-bad-lines 1000",
        150,
        makes="data/packages_text_document.json",
    ),
    Step(
        "study",
        "study",
        # A study accepts only the paths that it was begun with, and the folder has another name in each call.
        "env -C {folder} {python} {root}/tools/study.py run --output-dir study --timed-wirings none {study} "
        " --data-path data/packages_text_document --split 96,4,0 {tokenizer}",
        90,
    ),
)
KEPT = {"study": ("study/study.json", "study/report.md", "study/trials/*/result.json")}
"""Patterns of the files that belong to the results of a part."""
EMULATED = "{{python}} tools/benchmark.py {} --emulate --device {} --tp 8"
SETTINGS: dict[Device, dict[str, str]] = {
    "cuda": {
        "checks": "--gpus {gpus}",
        "paper": "--rounds 5",
        # Half of the layers of an 8B.
        "train": f"{EMULATED.format('train', 'cuda')} --sizes 16x4096x14336x32x8x128256 --alpha nvlink",
        "short": "2048",
        "long": "8192",
        "eager": "--no-cuda-graph",
        # As many layers as fit a GPU with 80 GB twice, with gradients, and with the logits of transformers.
        "throughput": "{python} tools/throughput.py --size 6x4096x14336x32x8x128256 --wirings standard --sequence 8192",
        "decode": f"{EMULATED.format('decode', 'cuda')} --sizes llama-8b --sequence 1280 --alpha nvlink-one-shot",
        "compiled": "--compile-sub-blocks true",
        "workers": "12",
        # From 1.8 to 26 times as many parameters as the largest size of the study on CPUs.
        "study": "--wirings standard parallel ladder ladder-parallel --seq-length 256 --micro-batch-size 128 "
        "--global-batch-size 128 --tokens-per-parameter 20 --learning-rates 0.004 0.008 0.016 --transfer-rates "
        "--sizes 12x64x192x2x2x512 12x128x352x4x4x512 12x192x512x4x4x512 12x256x704x4x4x512 --jobs 4 "
        "-- --bf16 --compile-sub-blocks false",
    },
    "cpu": {
        "checks": "--device cpu --only 'products with|weight gradients'",
        "paper": "--rounds 4 --tiny",
        "train": f"{EMULATED.format('train', 'cpu')} --sizes 2x64x128x8x8x512 --alpha 10us --rounds 4",
        "short": "16",
        "long": "32",
        "eager": "",
        "throughput": "{python} tools/throughput.py --size 1x64x128x8x8x512 --wirings standard --sequence 32 "
        "--backend none --matrix 64 --rounds 4",
        "decode": f"{EMULATED.format('decode', 'cpu')} --sizes 2x64x128x8x8x512 --sequence 8 --alpha 10us --rounds 4",
        "compiled": "",
        "workers": "1",
        "study": "--wirings standard ladder --sizes 1x16x48x1x1x512 1x24x48x1x1x512 1x32x48x1x1x512 --seq-length 32 "
        "--micro-batch-size 2 --global-batch-size 2 --tokens-per-parameter 0.005 --transfer-rates "
        "--learning-rates 0.01 --seeds 1 --evaluations 1 --eval-iters 1 --",
    },
}


def settings(device: Device, folder: Path, gpus: int) -> dict[str, str]:
    """Return the values of the placeholders in commands; texts are the sources of two packages, or a few files.

    The checks use all `gpus` of the machine.
    """
    paths = {"python": sys.executable, "folder": folder, "root": REPOSITORY_ROOT}
    common = {name: shlex.quote(str(path)) for name, path in paths.items()}
    common["gpus"] = str(max(1, gpus))
    common["tokenizer"] = "--tokenizer-type SentencePieceTokenizer --tokenizer-model data/tokenizer.model"
    texts = [Path(str(json.__file__)).parents[1] / "*.py"]
    if device == "cuda":
        specs = [importlib.util.find_spec(name) for name in ("torch", "transformers")]
        texts = [Path(str(spec.origin)).parent / "**" / "*.py" for spec in specs if spec is not None]
    common["texts"] = " ".join(shlex.quote(str(text)) for text in texts)
    return {name: text.format(**common) for name, text in SETTINGS[device].items()} | common


def commands(device: Device, parts: Sequence[str], folder: Path) -> list[tuple[Step, list[str]]]:
    """Return the steps of some parts with the words of their commands; each part has its folder in `folder`."""
    gpus = len(_gpus()) if device == "cuda" else 0
    return [
        (step, shlex.split(step.command.format(**settings(device, folder / step.part, gpus))))
        for step in STEPS
        if step.part in parts
    ]


class Results:
    """The results of a part: their file, and the folder in which its steps write."""

    def __init__(self, part: str, output: Path, earlier_output: Path, folder: Path, device: str) -> None:
        """Read the results of earlier calls, and restore their files."""
        self.folder, self._part, self._path = folder, part, output / f"{part}.json"
        earlier = earlier_output / f"{part}.json"
        content = read_if_exists(earlier)
        here = {"device": device, "versions": versions()}
        self._content: dict[str, Any] = here | {"steps": {}, "files": {}} | json.loads(content or b"{}")
        if different := [
            f"{self._content[name]}, now {value}" for name, value in here.items() if self._content[name] != value
        ]:
            raise UserError(f"{earlier}: was measured with {different[0]}: give another --output, without --results")
        for name, value in self._content["files"].items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(value if path.suffix == ".md" else json.dumps(value), encoding="utf-8")
        self._written = ""
        self.save()

    def step(self, step: Step) -> Mapping[str, Any]:
        """Return the record of a step; empty before it was started."""
        return self._content["steps"].get(step.name, {})

    def is_done(self, step: Step) -> bool:
        """Return whether the step need not run."""
        if step.makes:
            others = [one for one in STEPS if one.part == step.part and not one.makes]
            return (self.folder / step.makes).is_file() or all(map(self.is_done, others))
        return self.step(step).get("exit_code") in MEASURED

    def attempts(self, step: Step) -> int:
        """Return how often the step was started; one that only makes a file runs before those that need it."""
        others = [step]
        if step.makes:
            others = [one for one in STEPS if one.part == step.part and not one.makes]
        return min((self.step(one).get("attempts", 0) for one in others), default=0)

    @property
    def values(self) -> int:
        """Number of values in the files."""
        return _count_values(self._content["files"])

    def record(self, step: Step, **values: Any) -> None:
        """Replace the record of a step."""
        self._content["steps"][step.name] = values
        self.save()

    def save(self) -> None:
        """Take the files of the folder and replace the results, if something has changed."""
        for pattern in KEPT.get(self._part, ("*.json", "*.md")):
            for path in sorted(self.folder.glob(pattern)):
                name = path.relative_to(self.folder).as_posix()
                try:
                    text = path.read_text(encoding="utf-8")
                    self._content["files"][name] = text if path.suffix == ".md" else json.loads(text)
                except (OSError, ValueError):
                    # It is being written.
                    continue
        text = json.dumps(self._content)
        if text != self._written:
            write_json(self._path, self._content)
            self._written = text


def _count_values(content: Any) -> int:
    if isinstance(content, dict | list):
        return sum(map(_count_values, content.values() if isinstance(content, dict) else content))
    return 1


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages on which the results depend."""
    installed = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            installed[name] = version(name)
        except PackageNotFoundError:
            installed[name] = "not installed"
    return installed


def _gpus() -> list[str]:
    """Return the name of each GPU with its driver."""
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        return []


def describe_device(device: Device) -> str:
    """Return the name of the GPU with its driver, or of the processor; raise UserError without a GPU."""
    if device == "cpu":
        return f"CPU, {platform.processor() or platform.machine()}"
    gpus = _gpus()
    if not gpus:
        raise UserError("--device cuda: nvidia-smi lists no GPU: use --device cpu for a rehearsal")
    return gpus[0]


def environment() -> dict[str, str]:
    """Return the variables of the steps: this Python comes first, and no step looks for files in a network."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    return os.environ | {"PATH": path, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def run_step(step: Step, words: Sequence[str], results: Results, ends: float, is_stopped: Callable[[], bool]) -> str:
    """Run a step until it is done, `ends` has come, or a signal; return how it ended."""
    began = time.monotonic()
    log = results.folder / f"{step.name}.log"
    results.folder.mkdir(parents=True, exist_ok=True)
    earlier = results.step(step)
    most_values = max(earlier.get("values", 0), results.values)
    started = {"command": shlex.join(words), "attempts": earlier.get("attempts", 0) + 1, "values": most_values}
    # A call that is killed counts as an attempt.
    results.record(step, **{"exit_code": None, **earlier, **started})
    with open(log, "wb") as output:
        child = start_child(words, stdout=output, stderr=subprocess.STDOUT, start_new_session=True, env=environment())
        while child.poll() is None and time.monotonic() < ends and not is_stopped():
            time.sleep(POLL_SECONDS)
            results.save()
        code = child.poll()
        is_ended = code is None
        if is_ended:
            # The shell of a script would wait for its program before it ends.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGTERM)
            end_children([child], GRACE_SECONDS, kill_groups=True)
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-LAST_LINES:]
    seconds = earlier.get("seconds", 0.0) + time.monotonic() - began
    results.save()
    has_grown = results.values > most_values
    stops = 0 if has_grown else earlier.get("stops", 0) + is_ended
    if is_ended and stops >= MOST_STOPS:
        code = ExitCode.INTERNAL
    ending = {"exit_code": code, "stops": stops, "values": max(results.values, most_values)}
    results.record(step, **started | ending, seconds=round(seconds, 1), output=lines)
    if is_ended:
        return "stopped" if code is None else f"failed: stopped {stops} times without a new result"
    return "done" if code in MEASURED else f"failed with exit code {code}"


def main(argv: Sequence[str]) -> None:
    """Run what is not done; exit with OPEN if another call has to continue, and with 1 if only failed steps remain."""
    options = parse_config(DayOptions, argv, "gpu_day.sh", __doc__)
    ends = time.monotonic() + 60 * options.minutes
    if options.results is not None and not options.results.is_dir():
        raise UserError(
            f"--results {options.results}: no such folder: give the --output of earlier calls, or no --results"
        )
    if options.dry_run:
        for _, words in commands(options.device, options.only, Path("FOLDER")):
            print(shlex.join(words))
        return
    if options.output is None:
        raise UserError("--output is required, except for --dry-run: give a folder for the results")
    output, earlier = options.output, options.results or options.output
    device = describe_device(options.device)
    print(device, flush=True)
    with tempfile.TemporaryDirectory(prefix="gpu_day_") as scratch, received_signals() as received:
        folder = Path(scratch)
        parts = [part for part in PARTS if part in options.only]
        results = {part: Results(part, output, earlier, folder / part, device) for part in parts}

        def code(step: Step) -> int | None:
            return results[step.part].step(step).get("exit_code")

        def turn(one: tuple[Step, list[str]]) -> tuple[bool, int]:
            """Order steps that failed after all others, and steps with fewer attempts first."""
            step, _ = one
            return code(step) not in (None, *MEASURED), results[step.part].attempts(step)

        planned = commands(options.device, options.only, folder)
        for step, words in sorted(planned, key=turn):
            least = step.seconds if options.device == "cuda" else 0
            if results[step.part].is_done(step) or ends - time.monotonic() < least or received:
                continue
            print(f"{step.part}, {step.name} ...", flush=True)
            outcome = run_step(step, words, results[step.part], ends, lambda: bool(received))
            print(f"{step.part}, {step.name}: {outcome}", flush=True)
        left = [step for step, _ in planned if not results[step.part].is_done(step)]
    for step in left:
        print(f"left: {step.part}, {step.name}" + ("" if code(step) is None else f", exit code {code(step)}"))
    if left:
        sys.exit(OPEN if None in map(code, left) else ExitCode.INTERNAL)


if __name__ == "__main__":
    run_program(main)

"""Records what the product computes, or compares it with the record."""

import argparse
import contextlib
import fnmatch
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.helpers.commands import REPOSITORY_ROOT, clean_environment

EXPECTED = Path(__file__).with_name("expected.json")
CASE_SECONDS = 600


def this_machine() -> dict[str, str]:
    """Return what the last bits of floats depend on."""
    import torch

    models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    capability = torch.backends.cpu.get_cpu_capability()
    return {"processor": models[0].partition(": ")[2], "capability": capability, "torch": torch.__version__}


def differences(expected: Any, found: Any, place: str = "") -> list[str]:
    """Return the places in which two JSON values differ; item 0 of a case is exact, item 1 floats."""
    if isinstance(expected, dict) and isinstance(found, dict):
        parts = {name: f"{place}/{name}" for name in {**expected, **found}}
        return [text for n, part in parts.items() for text in differences(expected.get(n), found.get(n), part)]
    if isinstance(expected, list) and isinstance(found, list) and len(expected) == len(found):
        pairs = enumerate(zip(expected, found, strict=True))
        return [text for n, (old, new) in pairs for text in differences(old, new, f"{place}[{n}]")]
    return [] if expected == found else [f"{place}: {json.dumps(expected):.60} -> {json.dumps(found):.60}"]


def run_all(cases: Mapping[str, str], chosen: frozenset[str], root: Path, scratch: Path, jobs: int) -> Iterator[Any]:
    """Run cases and those that they need, `jobs` at a time; yield name, seconds and results, or a message."""
    from tests.freeze.cases import needs
    from tests.freeze.processes import Place

    while missing := {need for name in chosen for need in needs(cases[name])} - chosen:
        chosen |= missing
    waiting, done = [name for name in cases if name in chosen], set[str]()
    running: dict[int, tuple[str, float]] = {}
    try:
        while waiting or running:
            ready = [name for name in waiting if needs(cases[name]) <= done]
            for name in ready[: jobs - len(running)]:
                waiting.remove(name)
                place = Place(root, scratch, scratch / name)
                place.folder.mkdir(parents=True)
                if (child := os.fork()) == 0:
                    _run_here(name, cases[name], place)
                running[child] = (name, time.monotonic())
            child, status = os.wait()
            name, start = running.pop(child)
            _kill_group(child)
            done.add(name)
            seconds, ending = time.monotonic() - start, f"ended with {os.waitstatus_to_exitcode(status)}"
            yield name, seconds, ending if status else json.loads((scratch / name / "results.json").read_text())
    finally:
        for child in running:
            _kill_group(child)


def _kill_group(process: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process, signal.SIGKILL)


def _run_here(name: str, words: str, place: Any) -> None:
    from tests.freeze.cases import run_case

    try:
        os.setpgid(0, 0)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.alarm(CASE_SECONDS)
        os.environ["TORCH_EXTENSIONS_DIR"] = str(place.folder / "extensions")
        results: Any = run_case(name, words, place)
    except Exception as error:
        results = f"failed: {error!r}"
    (place.folder / "results.json").write_text(json.dumps(results))
    os._exit(0)


def main() -> int:
    """Run the cases that the command line names, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.freeze", description=__doc__)
    parser.add_argument("action", choices=("record", "check"))
    parser.add_argument("names", nargs="*", default=["*"], help="groups, or patterns of GROUP/NAME; default: all")
    parser.add_argument("--root", type=Path, default=REPOSITORY_ROOT, help="checkout to run; default: this one")
    parser.add_argument("--expected", type=Path, default=EXPECTED, help="the record")
    parser.add_argument("--jobs", type=int, default=2, help="cases at the same time")
    parser.add_argument("--scratch", type=Path, help="empty directory to work in, which is kept")
    options = parser.parse_args()
    from tests.freeze.cases import all_cases

    cases = all_cases()
    groups = [pattern if "/" in pattern or pattern == "*" else f"{pattern}/*" for pattern in options.names]
    chosen = frozenset(name for pattern in groups for name in fnmatch.filter(cases, pattern))
    record = json.loads(options.expected.read_text()) if options.expected.exists() else {"cases": {}}
    recording, machine, failed = options.action == "record", this_machine(), []
    if unknown := [pattern for pattern in groups if not fnmatch.filter(cases, pattern)]:
        parser.error(f"no case is called {unknown[0]}")
    if recording and len(chosen) < len(cases) and record.get("machine", machine) != machine:
        parser.error(f"the record is of {record['machine']}, this is {machine}: record all cases")
    compared = 2 if recording or record["machine"] == machine else 1
    if compared == 1:
        print(f"floats are not compared: the record is of {record['machine']}, this is {machine}")
    with contextlib.nullcontext(options.scratch) if options.scratch else tempfile.TemporaryDirectory() as scratch:
        for name, seconds, found in run_all(
            cases, chosen, options.root.resolve(), Path(scratch).resolve(), options.jobs
        ):
            if isinstance(found, str):
                lines = [found]
            elif recording:
                lines = []
                record["cases"] |= {name: found} if name in chosen else {}
            else:
                lines = differences(record["cases"].get(name, [])[:compared], found[:compared])
            failed += [name] if lines else []
            verdict = "differs" if lines else "recorded" if recording else "same"
            print(f"{name:30} {seconds:6.1f} s  {verdict}", *lines[:4], sep="\n    ", flush=True)
    if recording:
        rows = ",\n".join(f"  {json.dumps(name)}: {json.dumps(case)}" for name, case in sorted(record["cases"].items()))
        options.expected.write_text(f'{{\n "machine": {json.dumps(machine)},\n "cases": {{\n{rows}\n }}\n}}\n')
    print(f"{len(failed)} of {len(chosen)} cases differ: {' '.join(failed) or 'none'}")
    return int(bool(failed))


if __name__ == "__main__":
    # Read when torch is imported, and so the reason for imports inside functions.
    kept = clean_environment()
    os.environ.clear()
    offline = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    os.environ.update(kept, DS_ACCELERATOR="cpu", GLOO_SOCKET_IFNAME="lo", **offline)
    # So that `run_all` ends its cases.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main())

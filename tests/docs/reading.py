"""Commands of the pages, read by the programs' own parsers without being carried out."""

import argparse
import contextlib
import importlib
import io
import re
from collections.abc import Sequence
from pathlib import Path

from megatron_ladder.cli.programs import PROGRAMS, load_program, script_of
from megatron_ladder.config.run import parse_run, resolve_run
from megatron_ladder.engine.deepspeed_json import deepspeed_json
from megatron_ladder.errors import UserError
from tests.docs.pages import ROOT
from tests.docs.shell import OPEN_END

PROGRAM_OF = {script_of(program): program for program in PROGRAMS}
"""Script -> the name of its program."""
VOCABULARY = 32000
"""Ids of a tokenizer that is not there."""
LEFT_OUT = (" is required", ": expected one directory")
"""Ends of what programs say of words that a page leaves out."""
NOT_HERE = "is not an executable program"
"""End of what programs say of another one that this machine has not got."""


def read_command(words: Sequence[str]) -> list[str] | None:
    """Mistakes of a command, or None if it calls nothing of ours."""
    program, *rest = words
    if re.fullmatch(r"(\S*/)?python3?", program):
        return _read_python(rest, 1)
    if Path(program).name in ("deepspeed", "torchrun"):
        return _read_launch(Path(program).name, rest)
    if program in ("bash", "sbatch", "source") and rest and (rest[0].startswith(("examples/", "tests/"))):
        return _read_script(rest)
    if program.startswith("megatron-ladder-"):
        return _read_ours(_script_of(program.removeprefix("megatron-ladder-")), rest, 1)
    return None


def _read_python(words: Sequence[str], processes: int | None) -> list[str] | None:
    if not words or words[0].startswith("-"):
        return None
    if words[0] in PROGRAM_OF:
        return _read_ours(words[0], words[1:], processes)
    return _read_script(words)


def _script_of(name: str) -> str:
    return script_of(name.replace("-", "_"))


def _read_launch(launcher: str, words: Sequence[str]) -> list[str] | None:
    if not any(word.endswith(".py") for word in words):
        return None
    captured = io.StringIO()
    try:
        with contextlib.redirect_stderr(captured):
            script, rest, processes = _launch_parts(launcher, [word for word in words if word != OPEN_END])
    except SystemExit:
        return [f"{launcher}: {captured.getvalue().strip().splitlines()[-1]}"]
    open_end = [OPEN_END] if OPEN_END in words else []
    return _read_python([script, *rest, *open_end], processes)


def _launch_parts(launcher: str, words: Sequence[str]) -> tuple[str, list[str], int | None]:
    """The script, its words, and the number of processes, if it is known."""
    if launcher == "deepspeed":
        runner = importlib.import_module("deepspeed.launcher.runner")
        parsed: argparse.Namespace = runner.parse_args(list(words))
        processes = parsed.num_gpus * max(parsed.num_nodes, 1) if parsed.num_gpus > 0 else None
        return parsed.user_script, parsed.user_args, processes
    from torch.distributed.run import get_args_parser

    parsed = get_args_parser().parse_args(list(words))
    hosts = int(str(parsed.nnodes).split(":")[-1])
    return parsed.training_script, parsed.training_script_args, hosts * int(parsed.nproc_per_node)


def _read_script(words: Sequence[str]) -> list[str]:
    """A script whose parser cannot be called: it is there, and it speaks of the flag."""
    path = ROOT / words[0]
    if not path.is_file():
        return [f"{words[0]}: there is no such script"]
    if words[0] == "tests/run.sh":
        return [f"{word}: there is no such path" for word in words[1:] if "/" in word and not (ROOT / word).exists()]
    source = path.read_text(encoding="utf-8")
    flags = [word.partition("=")[0] for word in words[1:] if word.startswith("--") and len(word) > 2]
    return [f"{words[0]} knows no {flag}" for flag in flags if not _speaks_of(source, flag)]


def _speaks_of(source: str, flag: str) -> bool:
    name = flag.removeprefix("--").replace("-", "_")
    spelled = re.search(rf"(?<![\w-]){re.escape(flag)}(?![\w-])", source)
    return bool(spelled or re.search(rf"^    {re.escape(name)}: ", source, re.MULTILINE))


def _read_ours(script: str, words: Sequence[str], processes: int | None) -> list[str]:
    if script not in PROGRAM_OF:
        return [f"{script}: there is no such program"]
    given = ["1" if re.fullmatch("[A-Z]", word) else word for word in words if word != OPEN_END]
    mistakes: list[str] = []
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            if script == "pretrain_ladder.py":
                _read_training(given, processes, OPEN_END in words, mistakes)
            else:
                mistakes += _read_tool(script, given)
    except UserError as error:
        mistakes += error.messages
    except SystemExit as end:
        assert end.code == 0, words
    if OPEN_END in words:
        mistakes = [mistake for mistake in mistakes if not mistake.endswith(LEFT_OUT)]
    return [f"{script}: {mistake}" for mistake in mistakes if not mistake.endswith(NOT_HERE)]


def _read_tool(script: str, words: Sequence[str]) -> list[str]:
    parsed = load_program(PROGRAM_OF[script]).parse_options(words)
    if script == "tools/run_resilient.py":
        return read_command(parsed[1]) or []
    return []


def _read_training(words: Sequence[str], processes: int | None, open_end: bool, mistakes: list[str]) -> None:
    flags = parse_run(words, mistakes)
    if open_end:
        return
    if processes is None:
        processes = flags.parallel.tensor_model_parallel_size * flags.parallel.pipeline_model_parallel_size
    run = resolve_run(flags, flags.model.vocab_size or VOCABULARY, processes, mistakes)
    if run.parallel.deepspeed_config is None:
        deepspeed_json(run, mistakes)

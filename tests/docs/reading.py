"""Parses commands of the pages with the parsers of their programs, without running them."""

import argparse
import contextlib
import importlib
import io
import re
from collections.abc import Sequence
from pathlib import Path

from megatron_ladder.config.run import parse_run, resolve_run
from megatron_ladder.engine.deepspeed_json import deepspeed_json
from megatron_ladder.errors import UserError
from tests.docs.pages import ROOT
from tests.docs.shell import OPEN_END
from tests.helpers.programs import PROGRAMS, load_program, script_of

PROGRAM_OF = {script_of(program): program for program in PROGRAMS}
"""Script -> the name of its program."""
VOCABULARY = 32000
"""Vocabulary size that replaces that of a missing tokenizer."""
LEFT_OUT = (" is required", ": expected one directory")
"""Ends of error messages about arguments that a page omits."""
NOT_HERE = "is not an executable program"
"""End of the error message about a program that is not installed."""


def read_command(words: Sequence[str]) -> list[str] | None:
    """Return the errors of a command, or None if it calls none of this project's programs."""
    program, *rest = words
    if re.fullmatch(r"(\S*/)?python3?", program):
        return _read_python(rest, 1)
    if Path(program).name in ("deepspeed", "torchrun"):
        return _read_launch(Path(program).name, rest)
    if program in ("bash", "sbatch", "source") and rest and (rest[0].startswith(("examples/", "tests/"))):
        return _read_script(rest)
    if program.startswith("megatron-ladder-"):
        return _read_program(script_of(program.removeprefix("megatron-ladder-").replace("-", "_")), rest, 1)
    return None


def _read_python(words: Sequence[str], processes: int | None) -> list[str] | None:
    if not words or words[0].startswith("-"):
        return None
    if words[0] in PROGRAM_OF:
        return _read_program(words[0], words[1:], processes)
    return _read_script(words)


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
    """Return the script, its arguments, and the number of processes, if it is known."""
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
    """Check a script whose parser cannot be called: it must exist and its source must contain the flags."""
    path = ROOT / words[0]
    if not path.is_file():
        return [f"{words[0]}: no such script"]
    if words[0] == "tests/run.sh":
        return [f"{word}: no such path" for word in words[1:] if "/" in word and not (ROOT / word).exists()]
    source = path.read_text(encoding="utf-8")
    # A script passes on what follows --.
    own = words[1 : words.index("--")] if "--" in words else words[1:]
    flags = [word.partition("=")[0] for word in own if word.startswith("--")]
    return [f"{words[0]} has no flag {flag}" for flag in flags if not _mentions(source, flag)]


def _mentions(source: str, flag: str) -> bool:
    name = flag.removeprefix("--").replace("-", "_")
    spelled = re.search(rf"(?<![\w-]){re.escape(flag)}(?![\w-])", source)
    return bool(spelled or re.search(rf"^    {re.escape(name)}: ", source, re.MULTILINE))


def _read_program(script: str, words: Sequence[str], processes: int | None) -> list[str]:
    if script not in PROGRAM_OF:
        return [f"{script}: no such program"]
    given = ["1" if re.fullmatch("[A-Z]", word) else word for word in words if word != OPEN_END]
    errors: list[str] = []
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            if script == "pretrain_ladder.py":
                _read_training(given, processes, OPEN_END in words)
            else:
                _read_tool(script, given)
    except UserError as error:
        errors += error.messages
    except SystemExit as end:
        assert end.code == 0, words
    if OPEN_END in words:
        errors = [line for line in errors if not line.endswith(LEFT_OUT)]
    return [f"{script}: {line}" for line in errors if not line.endswith(NOT_HERE)]


def _read_tool(script: str, words: Sequence[str]) -> None:
    parsed = load_program(PROGRAM_OF[script]).parse_options(words)
    if script == "tools/dry_run.py":
        options, _, run = parsed
        _read_training(run, options.ranks, False)


def _read_training(words: Sequence[str], processes: int | None, open_end: bool) -> None:
    if "--config" in words:
        # The file may be written when the command runs, and may have the required flags.
        position = list(words).index("--config")
        words, open_end = [*words[:position], *words[position + 2 :], "--train-iters", "1", "--lr", "1"], True
    settings = parse_run(words, world_size=processes or 1)
    if open_end:
        return
    if processes is None:
        processes = settings.values["tensor_model_parallel_size"] * settings.values["pipeline_model_parallel_size"]
    run = resolve_run(settings, settings.values["vocab_size"] or VOCABULARY, processes)
    if run.parallel.deepspeed_config is None:
        deepspeed_json(run)

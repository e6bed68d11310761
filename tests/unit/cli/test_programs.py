"""What all programs have in common: answers before anything heavy is imported, versions, and a missing environment."""

import importlib.util
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_ladder import __version__
from megatron_ladder.cli import generate, programs
from tests.helpers.commands import REPOSITORY_ROOT as ROOT
from tests.helpers.programs import PROGRAMS, SUBCOMMANDS, load_program, script_of
from tests.helpers.runs import errors_of

BARE = [sys.executable, "-E", "-s", "-S"]
"""A Python that has only the standard library: without site-packages, and so without torch and all other packages."""
ANSWERS = """
import contextlib, io, json, os, sys
sys.path += [os.getcwd(), os.path.join(os.getcwd(), "tools")]
from megatron_ladder.cli import generate
from megatron_ladder.errors import UserError
from tests.helpers.programs import load_program
for program, words in json.loads(sys.argv[1]):
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            load_program(program).parse_options(words)
        end = "nothing"
    except BaseException as error:
        end = f"{type(error).__name__}: {error}"
    print(json.dumps([printed.getvalue(), end]))
"""


def test_help_version_and_wrong_flags_need_only_the_standard_library() -> None:
    subcommands = [(program, [name]) for program, names in SUBCOMMANDS.items() for name in names]
    lines = [*((program, list[str]()) for program in PROGRAMS), *subcommands]
    flags = ("--help", "-h", "--version", "--wrong")
    asked = [(program, [*words, flag]) for program, words in lines for flag in flags]
    command = [*BARE, "-c", ANSWERS, json.dumps(asked)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    found = (tuple(json.loads(line)) for line in done.stdout.splitlines())
    for program, words in lines:
        (help_text, help_end), short_help, version, (_, error) = (next(found) for _ in flags)
        assert help_text.startswith("usage: ") and help_end == "SystemExit: 0", (program, words, help_end)
        assert short_help == (help_text, help_end), (program, words)
        assert version == (f"megatron_ladder {__version__}\n", "SystemExit: 0"), (program, words)
        assert "--wrong is not a flag" in error or "expected one of" in error, (program, words, error)


@pytest.mark.parametrize(
    ("program", "words", "expected"),
    [
        ("study", ["runn"], "runn: expected one of run, report first; did you mean run?"),
        ("convert_checkpoint", ["inspect"], "inspect: expected one directory"),
        ("convert_checkpoint", ["export", "--load", "a", "--save", "b"], "--save is .*: did you mean --hf?"),
        ("preprocess_data", ["--vocab-file", "a"], "--vocab-file is .*: did you mean --tokenizer-model?"),
        ("preprocess_data", ["--append-bos"], "--append-bos is not supported: documents get no BOS"),
        ("preprocess_data", ["--split-sentences"], "--split-sentences is not supported: a document is one text"),
        ("preprocess_data", ["--partitions", "4"], "--partitions 4: only 1 is supported: use --workers"),
        ("preprocess_data", ["--dataset-impl", "lazy"], "--dataset-impl lazy: only mmap is supported"),
        ("pretrain", ["--cp", "2"], "--cp 2: only 1 is supported: use --tensor-model-parallel-size"),
        ("plan", ["--model", "llama-13b"], "--model llama-13b: did you mean llama-2-13b? Expected one of small, "),
        ("generate", ["--load", "a", "--prompt", "b"], "--load is not a flag of this program: did you mean --model?"),
    ],
)
def test_a_mistake_lists_what_was_expected(program: str, words: list[str], expected: str) -> None:
    with pytest.raises(Exception, match="(?m)^" + expected.replace("?", r"\?")):
        load_program(program).parse_options(words)


@pytest.mark.parametrize(
    ("program", "flag"),
    [
        ("preprocess_data", "--output-prefix"),
        ("train_tokenizer", "--model-prefix"),
        ("report_run", "--output"),
        ("throughput", "--json"),
        ("exposed_communication", "--json"),
    ],
)
def test_programs_check_what_they_write_before_the_work(program: str, flag: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    output = tmp_path / "file" / "x.png"
    problem = f"cannot be written: {output.parent} is not a directory: give another path"
    assert f"{flag} {output}: {problem}" in errors_of(load_program(program).parse_options, [flag, str(output)])


def test_preprocessing_accepts_what_it_does_anyway() -> None:
    words = "--input a --output-prefix b --tokenizer-type ByteTokenizer --dataset-impl mmap --partitions 1"
    parse = load_program("preprocess_data").parse_options
    assert parse([*words.split(), "--keep-sequential-samples"]) == parse(words.split()[:6])


def test_training_names_everything_that_it_needs() -> None:
    found = [message.split(" is required")[0] for message in errors_of(load_program("pretrain").main, [])]
    assert found == ["--data-path", "--tokenizer-type", "--train-iters", "--lr"]


def test_the_package_lists_and_runs_its_programs() -> None:
    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*BARE, "-m", "megatron_ladder", *words], cwd=ROOT, capture_output=True, text=True)

    listed, alike = run(), run("--help")
    assert listed.returncode == 0 and listed.stdout == alike.stdout
    lines = [line.split(maxsplit=1) for line in listed.stdout.splitlines()[2:]]
    assert [name.replace("-", "_") for name, _ in lines] == [*programs.PROGRAMS]
    for (_, description), program in zip(lines, programs.PROGRAMS, strict=True):
        assert (load_program(program).__doc__ or "").startswith(description)
    assert run("convert-checkpoint", "--help").stdout.startswith("usage: convert_checkpoint.py")
    wrong = run("convert")
    assert wrong.returncode == 2 and wrong.stderr.startswith("error: convert: expected one of pretrain, convert-ch")


@pytest.mark.parametrize(
    ("program", "words", "required", "others"),
    [
        ("pretrain", "--hidden-size 65 --pp 2 --zero-stage 2", 4, ["--hidden-size", "--zero-stage", "--tensor-model-"]),
        ("dry_run", "--ranks 4 --tp 3 --seq-length 5 --max-position-embeddings 4", 2, ["--seq-length", "--tp"]),
        ("preprocess_data", "--chat --json-keys a --chat-keys b b", 3, ["--json-keys", "--chat-keys"]),
        ("report_run", "--output report.txt", 1, ["--output"]),
    ],
)
def test_missing_flags_hide_no_other_error(program: str, words: str, required: int, others: list[str]) -> None:
    found = errors_of(load_program(program).main, words.split())
    assert all("is required" in message for message in found[:required])
    assert len(found) == required + len(others)
    assert all(message.startswith(flag) for message, flag in zip(found[required:], others, strict=True)), found


def test_without_the_environment_one_line_names_it(tmp_path: Path) -> None:
    needed = {
        "pretrain": "--train-iters 1 --lr 1 --data-path a --vocab-size 9",
        "train_tokenizer": f"--input {tmp_path} --vocab-size 300 --model-prefix {tmp_path}/m",
        "inspect_data": f"{tmp_path}/none",
    }
    for program, words in needed.items():
        command = [*BARE, ROOT / script_of(program), *words.split()]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env={"PATH": os.defpath})
        assert done.returncode == 2, done.stderr
        (line,) = done.stderr.splitlines()
        assert line.startswith("error: the Python package ") and "source .venv/bin/activate" in line


def test_ctrl_c_ends_a_conversation_without_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(generate, "run_ranks", interrupted)
    monkeypatch.setattr("megatron_ladder.generate.program.generate", interrupted)
    for ranks in "1", "2":
        generate.main(["--model", "m", "--tp", ranks, "--interactive"])
        with pytest.raises(KeyboardInterrupt):
            generate.main(["--model", "m", "--tp", ranks, "--prompt", "x"])


def test_evaluation_without_lm_eval_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "lm_eval" else find_spec(name))
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(ROOT / "megatron_ladder" / "lm_eval.py"), run_name="__main__")
    assert end.value.code == 2
    expected = f'error: lm-eval is not installed for {sys.executable}: pip install -e ".[eval]"\n'
    assert capsys.readouterr().err == expected

"""Exit codes and messages for every way in which a program can end."""

import json
import pickle
import signal
import subprocess
import sys

import pytest

from megatron_ladder.errors import ErrorCollector, Problem, UserError, Vocabulary, counted
from tests.helpers.commands import run_command

PROGRAM = """
from megatron_ladder import errors
errors.GRACE_SECONDS = 0.01
def main(argv):
    {body}
errors.run_program(main, [])
"""


def run(body: str, rank: int | None = None) -> subprocess.CompletedProcess[str]:
    environment = {"PYTHONIOENCODING": "utf-8:strict"} | ({} if rank is None else {"RANK": str(rank)})
    return run_command([sys.executable, "-c", PROGRAM.format(body=body)], 30, environment)


@pytest.mark.parametrize(
    ("body", "code", "message"),
    [
        ("print('fine')", 0, ""),
        ("raise errors.UserError('--a is wrong', '--b too')", 2, "error: --a is wrong\nerror: --b too\n"),
        ("raise errors.BadNumbersError('nan')", 3, "error: BadNumbersError: nan\n"),
        ("raise errors.LostPeerError('gone')", 4, "error: LostPeerError: gone\n"),
        ("raise errors.UserError('https://me:secret@host/x fails')", 2, "error: https://host/x fails\n"),
        (
            "raise OSError(28, 'Full', 'a.png')",
            2,
            "error: a.png: Full: free some space, or write to another disk, and run the same command again\n",
        ),
        ("print('fine: \\udcff')", 0, ""),
        ("import os; assert os.environ['OMP_WAIT_POLICY'] == 'passive'", 0, ""),
    ],
)
def test_exit_codes(body: str, code: int, message: str) -> None:
    done = run(body)
    assert (done.returncode, done.stderr) == (code, message)


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ("return 1 // 0", "ZeroDivisionError: "),
        ("raise ValueError('https://me:secret@host')", "ValueError: https://host"),
        ("import megatron_ladder.nothing", "ModuleNotFoundError: "),
        ("import json.nothing", "ModuleNotFoundError: "),
    ],
)
def test_a_bug_shows_its_traceback(body: str, error: str) -> None:
    done = run(body, rank=3)
    assert done.returncode == 1 and "secret" not in done.stderr
    assert "Traceback" in done.stderr and 'File "<string>", line 5, in main' in done.stderr
    assert done.stderr.splitlines()[-1].startswith(f"error: rank 3: {error}")


@pytest.mark.parametrize(
    ("rank", "error", "waits"),
    [(0, "UserError", False), (3, "UserError", True), (0, "LostPeerError", True), (3, "BadNumbersError", False)],
)
def test_a_rank_waits_for_one_that_explains_a_failure_better(rank: int, error: str, waits: bool) -> None:
    done = run(f"errors.time.sleep = lambda seconds: print('waits', seconds); raise errors.{error}('x')", rank)
    assert done.stdout == ("waits 0.01\n" if waits else "") and done.stderr.startswith("error: ")


def test_a_process_that_the_system_ends_shows_its_stack() -> None:
    done = run("import os, signal; os.kill(os.getpid(), signal.SIGBUS)")
    assert done.returncode == -signal.SIGBUS
    assert done.stderr.startswith("Fatal Python error: Bus error") and ", line 5 in main" in done.stderr


def test_a_missing_package_is_one_line() -> None:
    done = run("import a_package_that_nobody_has.part")
    assert done.returncode == 2 and done.stderr.startswith("error: the Python package a_package_that_nobody_has is not")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("redirected", "body", "code"),
    [
        ("| head -n 1", "[print('line', flush=True) for _ in range(100000)]", "1"),
        (">&-", "print('nowhere')", "0"),
        ("2>&-", "print('somewhere')", "0"),
    ],
)
def test_a_reader_that_has_read_enough_and_a_closed_output_are_no_errors(redirected: str, body: str, code: str) -> None:
    script = f'"$0" -c "$1" {redirected}; echo ${{PIPESTATUS[0]}}'
    done = run_command(["bash", "-c", script, sys.executable, PROGRAM.format(body=body)], timeout=30)
    assert (done.stdout.splitlines()[-1], done.stderr) == (code, "")


def test_nouns_follow_their_number() -> None:
    texts = [
        counted(number, noun) for number, noun in ((1, "file"), (0, "file"), (1234, "tensor"), (1, "box"), (2, "box"))
    ]
    assert texts == ["1 file", "0 files", "1,234 tensors", "1 box", "2 boxes"]


SIZES = Problem(
    {"hidden_size": 250, "num_attention_heads": 7},
    "{hidden_size} is not divisible by {num_attention_heads}",
    "change {hidden_size}, or give {head_dim}",
)


@pytest.mark.parametrize(
    ("vocabulary", "message"),
    [
        (
            Vocabulary(spellings={"head_dim": "--kv-channels"}),
            "--hidden-size 250 is not divisible by --num-attention-heads 7: change --hidden-size, or give "
            "--kv-channels",
        ),
        (
            Vocabulary(places={"hidden_size": "run.yaml:3", "head_dim": "run.yaml:4"}),
            "--hidden-size 250 is not divisible by --num-attention-heads 7: change --hidden-size, or give --head-dim "
            "(run.yaml:3)",
        ),
        (
            Vocabulary(str),
            "hidden_size 250 is not divisible by num_attention_heads 7: change hidden_size, or give head_dim",
        ),
        (
            Vocabulary(str, {"hidden_size": "n_embd", "num_attention_heads": "n_head"}),
            "n_embd 250 is not divisible by n_head 7: change n_embd, or give head_dim",
        ),
    ],
    ids=["flags", "YAML", "Python", "config.json"],
)
def test_one_problem_in_the_words_of_each_user(vocabulary: Vocabulary, message: str) -> None:
    with pytest.raises(UserError) as raised, vocabulary.in_messages():
        raise UserError(SIZES, "a/{hidden_size}: is missing")
    assert raised.value.messages == (message, "a/{hidden_size}: is missing")


def test_a_problem_of_the_source_names_its_fields_as_the_source_does() -> None:
    problem = Problem({"num_key_value_heads": 4, "lanes": 3}, "{} is not divisible by {lanes}", "give {head_dim}")
    assert str(problem.among({"lanes"})) == "num_key_value_heads 4 is not divisible by --lanes 3"
    assert problem.among({"lanes"}).render(Vocabulary(str, {"lanes": "own_partials"})) == (
        "num_key_value_heads 4 is not divisible by own_partials 3"
    )


def test_switches_have_no_value_and_texts_may_hold_braces() -> None:
    problem = Problem({"tp_overlap": True, "load": "{lr}"}, "{} with {load}: {why}, {no_verify}", why="{save} --lr {}")
    assert str(problem) == "--tp-overlap with --load {lr}: {save} --lr {}, --no-verify"
    assert problem.render(Vocabulary(str)) == "tp_overlap with load {lr}: {save} --lr {}, no_verify"


def test_collected_texts_get_a_field_and_problems_keep_theirs() -> None:
    errors = ErrorCollector()
    with errors.collect("load"):
        raise UserError("{x}/y: no checkpoint found", SIZES, Problem({}, "{path}: give it to {hf}", path="x"))
    assert [problem.render(Vocabulary(str)) for problem in errors.problems] == [
        "load {x}/y: no checkpoint found",
        SIZES.render(Vocabulary(str)),
        "load x: give it to hf",
    ]


def test_problems_travel_between_ranks() -> None:
    noted = SIZES.noted("rank 1: ", " (on rank 1)")
    for received in (pickle.loads(pickle.dumps(noted)), Problem.read(json.loads(json.dumps(vars(noted))))):
        assert received == noted and received.render(Vocabulary(str)).startswith("rank 1: hidden_size 250 is")
    assert UserError(noted, "x", noted).messages == (str(noted), "x")

"""Runs the sessions of the pages. Those in QUICK take seconds; the others run with --slow."""

from pathlib import Path

import pytest

from tests.docs.pages import Fence, page_paths, read_page
from tests.docs.sessions import missing_line, run_session, sessions

FOUND = {(page, name): steps for page in page_paths() for name, steps in sessions(page, read_page(page)).items()}
QUICK = ("plan",)


def _cases() -> list[object]:
    return [
        pytest.param(*case, marks=() if case[1] in QUICK else pytest.mark.slow, id=f"{case[0]}-{case[1]}")
        for case in FOUND
    ]


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shelf")


@pytest.mark.parametrize(("page", "name"), _cases())
def test_a_session_prints_what_its_page_shows(page: str, name: str, shelf: Path, tmp_path: Path) -> None:
    run_session(name, FOUND[page, name], shelf, tmp_path / "session")


def _fence(text: str, mark: str = "run", about: str = "a") -> Fence:
    return Fence("a.md", 7, "bash", text, mark, about)


def test_a_failing_command_is_reported(shelf: Path, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="a.md:7: exit code 2 of\nls nothing\ntrue"):
        run_session("a", [_fence("ls nothing\ntrue")], shelf, tmp_path / "b")


def test_exported_variables_reach_the_next_fence(shelf: Path, tmp_path: Path) -> None:
    steps = [_fence('export A="b  c"; mkdir d; cd d'), _fence('test "$A" = "b  c"; test -d "$PWD/d"')]
    run_session("a", steps, shelf, tmp_path / "b")


def test_shown_output_is_compared_with_the_printed_output(shelf: Path, tmp_path: Path) -> None:
    echo = _fence('echo "4 documents"; echo "took 3.2 s"')
    run_session("a", [echo, _fence("4 documents\ntook ... s", "prints", "")], shelf, tmp_path / "b")
    with pytest.raises(AssertionError, match="'5 documents' is not in what was printed:\n4 documents"):
        run_session("a", [echo, _fence("5 documents", "prints", "")], shelf, tmp_path / "c")


def test_shown_lines_must_be_printed_in_order() -> None:
    assert missing_line("a  1\n...\nc", "a 1\nb\nc\n") is None
    assert missing_line("c\na 1", "a 1\nb\nc\n") == "a 1"
    assert missing_line("a ...", "ab\n") == "a ..."


def test_a_background_command_runs_until_the_session_ends(shelf: Path, tmp_path: Path) -> None:
    server = _fence(
        "trap 'rm there; exit 0' INT; touch there; echo ready; while true; do sleep 0.1; done",
        "run",
        'a, until "ready"',
    )
    run_session("a", [server, _fence("test -e there")], shelf, tmp_path / "b")
    assert not (tmp_path / "b" / "there").exists()
    with pytest.raises(AssertionError, match="a.md:7: exit code 3 of"):
        run_session("a", [_fence("exit 3", "run", 'a, until "ready"')], shelf, tmp_path / "c")

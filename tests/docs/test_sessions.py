"""Runs the sessions of the pages. Those in QUICK take seconds; the others run with --slow."""

from pathlib import Path

import pytest

from tests.docs.pages import page_paths, read_page
from tests.docs.sessions import run_session, sessions

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

"""The flags page and the pictures of docs/ are what their programs write now."""

import runpy

from tests.helpers.commands import REPOSITORY_ROOT

DOCS = REPOSITORY_ROOT / "docs"


def test_the_flags_page_is_up_to_date() -> None:
    written = runpy.run_path(str(DOCS / "write_flags.py"))
    assert written["PAGE"].read_text(encoding="utf-8") == written["page"](), "run python docs/write_flags.py"


def test_the_pictures_are_up_to_date() -> None:
    drawn = runpy.run_path(str(DOCS / "pictures" / "draw.py"))["pictures"]()
    assert {path.name for path in (DOCS / "pictures").glob("*.svg")} == set(drawn)
    for name, content in drawn.items():
        assert (DOCS / "pictures" / name).read_text(encoding="utf-8") == content, f"run docs/pictures/draw.py ({name})"

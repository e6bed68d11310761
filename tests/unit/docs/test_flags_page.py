"""docs/flags.md is what its program writes now."""

import runpy

from tests.helpers.commands import REPOSITORY_ROOT


def test_the_committed_page_is_up_to_date() -> None:
    written = runpy.run_path(str(REPOSITORY_ROOT / "docs" / "write_flags.py"))
    assert written["PAGE"].read_text(encoding="utf-8") == written["page"](), "run python docs/write_flags.py"

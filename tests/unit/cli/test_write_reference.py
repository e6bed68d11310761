"""The table of programs, and the reference pages that are written from it."""

import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from megatron_ladder.cli.programs import PROGRAMS, Command, console_scripts, load_program, script_of
from megatron_ladder.cli.write_reference import _reference_pages, _sections, main
from megatron_ladder.errors import UserError
from megatron_ladder.flags import flag

ROOT = Path(__file__).resolve().parents[3]


@dataclass(frozen=True)
class Oven:
    """Oven. What it does."""

    heat: int = flag(minimum=0, maximum=300)
    """Degrees,
    at once."""
    mode: Literal["grill", "bake"] = flag("bake", aliases=("--kind",))
    """How."""
    trays: tuple[Path, ...] = ()
    """Which."""
    light: bool = True
    """Leave it off."""


def test_the_committed_pages_are_up_to_date() -> None:
    folder = ROOT / "docs" / "reference"
    committed = {path.name: path.read_text(encoding="utf-8") for path in folder.glob("*.md")}
    written = _reference_pages()
    stale = sorted(name for name in written.keys() | committed.keys() if written.get(name) != committed.get(name))
    assert stale == [], "docs/reference is outdated: run tools/write_reference.py, and remove pages of deleted programs"


def test_every_script_has_a_page() -> None:
    scripts = {"pretrain_ladder.py", *(f"tools/{path.name}" for path in (ROOT / "tools").glob("*.py"))}
    assert scripts == {script_of(program) for program in PROGRAMS}
    for program in PROGRAMS:
        source = (ROOT / script_of(program)).read_text(encoding="utf-8")
        assert f'start("{program}")' in source


def test_the_table_is_read_without_dependencies() -> None:
    path = "megatron_ladder/cli/programs.py"
    code = f"import runpy, sys; runpy.run_path('{path}')['console_scripts'](); print('megatron_ladder' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
    assert "megatron-ladder-plot-loss = megatron_ladder.cli.plot_loss:entry_point" in console_scripts()


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_page_has_the_flags_of_help(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    module = load_program(program)
    shown: set[str] = set()
    for command in module.COMMANDS:
        if not command.sections:
            continue
        words = [command.words.split("|")[0], "--help"] if command.words else ["--help"]
        with pytest.raises(SystemExit):
            module.parse_options(words)
        lines = re.findall(r"^  (-.*)$", capsys.readouterr().out, re.MULTILINE)
        shown |= {name for line in lines for name in re.findall(r"(?<![\w-])--[\w-]+", line.partition("   ")[0])}
    page = _reference_pages()[f"{Path(script_of(program)).stem}.md"]
    rows = re.findall(r"^\| (`--.*?) \| ", page, re.MULTILINE)
    assert {name for row in rows for name in re.findall(r"--[\w-]+", row)} == shown - {"--help", "--version"}


def test_a_table_of_a_dataclass() -> None:
    assert _sections(Command((Oven,)), "##") == [
        "What it does.",
        "| flag | default | values | description |\n"
        "| --- | --- | --- | --- |\n"
        "| `--heat N` | required | 0 to 300 | Degrees, at once. |\n"
        "| `--mode {grill,bake}` (also `--kind`) | `bake` |  | How. |\n"
        "| `--trays PATH ...` |  |  | Which. |\n"
        "| `--no-light` |  |  | Leave it off. |",
    ]


def test_pages_are_written_and_an_unusable_directory_is_an_error(tmp_path: Path) -> None:
    main(["--output-dir", str(tmp_path / "new")])
    assert (tmp_path / "new" / "README.md").read_text(encoding="utf-8") == _reference_pages()["README.md"]
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="--output-dir .*file: cannot be written"):
        main(["--output-dir", str(tmp_path / "file")])

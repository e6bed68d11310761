"""The reference pages: those that are committed, and how a page comes from a dataclass."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from megatron_ladder.cli.programs import PROGRAMS, Command
from megatron_ladder.cli.write_reference import COMMAND, _sections, main, reference_pages
from megatron_ladder.config.run import parse_run
from megatron_ladder.errors import UserError
from megatron_ladder.flags import flag

ROOT = Path(__file__).resolve().parents[3]


@dataclass(frozen=True)
class Oven:
    """Oven. What it does."""

    heat: int
    """Degrees,
    at once."""
    mode: Literal["grill", "bake"] = flag("bake", aliases=("--kind",))
    """How."""
    trays: tuple[Path, ...] = ()
    """Which."""
    light: bool = True
    """Leave it off."""


def test_the_committed_pages_are_what_the_sources_say() -> None:
    folder = ROOT / "docs" / "reference"
    committed = {path.name: path.read_text(encoding="utf-8") for path in folder.glob("*.md")}
    written = reference_pages()
    stale = sorted(name for name in written.keys() | committed.keys() if written.get(name) != committed.get(name))
    assert stale == [], f"docs/reference is out of date: run `{COMMAND}`, and remove pages of programs that are gone"


def test_every_script_has_a_page() -> None:
    scripts = {"pretrain_ladder.py", *(f"tools/{path.name}" for path in (ROOT / "tools").glob("*.py"))}
    assert scripts == PROGRAMS.keys()
    assert {path: program.module.__name__.rpartition(".")[2] for path, program in PROGRAMS.items()} == {
        path: "pretrain" if path == "pretrain_ladder.py" else Path(path).stem for path in PROGRAMS
    }


@pytest.mark.parametrize("path", PROGRAMS)
def test_a_page_has_the_flags_of_help(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    program = PROGRAMS[path]
    told: set[str] = set()
    for command in program.commands:
        if not command.sections:
            continue
        words = [command.words.split("|")[0], "--help"] if command.words else ["--help"]
        with pytest.raises(SystemExit):
            if path == "pretrain_ladder.py":
                parse_run(words, [])
            else:
                program.module.parse_options(words)
        lines = re.findall(r"^  (-.*)$", capsys.readouterr().out, re.MULTILINE)
        told |= {name for line in lines for name in re.findall(r"(?<![\w-])--[\w-]+", line.partition("   ")[0])}
    page = reference_pages()[f"{Path(path).stem}.md"]
    rows = re.findall(r"^\| (`--.*?) \| ", page, re.MULTILINE)
    assert {name for row in rows for name in re.findall(r"--[\w-]+", row)} == told - {"--help"}


def test_a_table_of_a_dataclass() -> None:
    assert _sections(Command("", "", (Oven,)), "##") == [
        "What it does.",
        "| flag | default | what it says |\n"
        "| --- | --- | --- |\n"
        "| `--heat N` | required | Degrees, at once. |\n"
        "| `--mode {grill,bake}` (also `--kind`) | `bake` | How. |\n"
        "| `--trays PATH ...` |  | Which. |\n"
        "| `--no-light` |  | Leave it off. |",
    ]


def test_pages_are_written_and_a_place_that_cannot_be_is_told(tmp_path: Path) -> None:
    main(["--output-dir", str(tmp_path / "new")])
    assert (tmp_path / "new" / "README.md").read_text(encoding="utf-8") == reference_pages()["README.md"]
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="--output-dir .*file: cannot be written"):
        main(["--output-dir", str(tmp_path / "file")])

"""The project's Markdown pages: their fences, what is marked above them, and the code among their words."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

MARK = re.compile(r"^<!-- (not run|run|prints)(?:: (.+?))? -->$")
FENCE = re.compile(r"^( *)```(\w*)$")
SESSION = re.compile(r'^([\w.-]+)(?:, until "(.+)")?$')


@dataclass(frozen=True)
class Fence:
    """A fenced block of a page."""

    page: str
    """Path from the root of the repository."""
    line: int
    """Of the opening fence, from 1."""
    language: str
    text: str
    mark: str = ""
    """`not run`, `run`, `prints`, or empty."""
    about: str = ""
    """What the mark says after its colon."""

    @property
    def place(self) -> str:
        """For messages."""
        return f"{self.page}:{self.line}"

    @property
    def session(self) -> str:
        """Name of the session that it is run in; empty if it is in none."""
        found = SESSION.match(self.about) if self.mark == "run" else None
        return found[1] if found else ""

    @property
    def until(self) -> str | None:
        """What the command has printed once the next fence may begin, if it goes on beside it."""
        found = SESSION.match(self.about) if self.mark == "run" else None
        return found[2] if found else None


def page_paths() -> list[str]:
    """All pages that people write."""
    found = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    found += (ROOT / "examples").rglob("*.md")
    written = ROOT / "docs" / "reference"
    return sorted(str(path.relative_to(ROOT)) for path in found if written not in path.parents)


def read_page(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def fences(page: str, text: str) -> list[Fence]:
    """The fences of a page in their order."""
    found: list[Fence] = []
    opened: tuple[int, str, str] | None = None
    body: list[str] = []
    above = ""
    for number, line in enumerate(text.split("\n"), start=1):
        if opened is None:
            match = FENCE.match(line)
            if match:
                opened, body = (number, match[1], match[2]), []
            elif line.strip():
                above = line.strip()
        elif line.strip() == "```":
            mark = MARK.match(above)
            first, indent, language = opened
            inside = "\n".join(one.removeprefix(indent) for one in body)
            found.append(Fence(page, first, language, inside, mark[1] if mark else "", (mark and mark[2]) or ""))
            opened, above = None, ""
        else:
            body.append(line)
    return found


def mark_mistakes(page: str, text: str) -> list[str]:
    """Marks that nothing follows, that say too little, or that are misspelt, and fences that are not closed."""
    mistakes = []
    found = fences(page, text)
    for fence in found:
        if fence.mark == "not run" and not fence.about:
            mistakes.append(f"{fence.place}: say why it is not run: <!-- not run: reason -->")
        if fence.mark == "run" and not fence.session:
            mistakes.append(f'{fence.place}: expected <!-- run: session --> or <!-- run: session, until "text" -->')
        if fence.mark in ("run", "not run") and fence.language not in ("bash", "python"):
            mistakes.append(f"{fence.place}: what is run is bash or python, found '{fence.language}'")
    comments = re.findall(r"^ *<!-- *(.*?) *-->$", text, re.MULTILINE)
    marks = [comment for comment in comments if re.match(r"(not.?run|run|prints)\b", comment)]
    if len(marks) != sum(bool(fence.mark) for fence in found):
        mistakes.append(f"{page}: a mark stands directly above its fence; found {marks}")
    if len(re.findall(r"^ *```", text, re.MULTILINE)) != 2 * len(found):
        mistakes.append(f"{page}: a fence is not closed, or has more than a language behind it")
    return mistakes


def code_spans(text: str) -> Iterator[str]:
    """What stands between single backticks, outside of fences."""
    outside = re.sub(r"^ *```.*?^ *```$", "", text, flags=re.MULTILINE | re.DOTALL)
    for paragraph in re.split(r"\n\s*\n", outside):
        for span in re.findall(r"(?<!`)`([^`]+)`(?!`)", paragraph):
            yield " ".join(span.split())


def indented_lines(text: str) -> Iterator[tuple[int, str]]:
    """Number and text of lines that are code by their indentation, but for those inside of fences."""
    inside = False
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip().startswith("```"):
            inside = not inside
        elif not inside and line.startswith("    "):
            yield number, line.strip()

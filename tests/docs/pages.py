"""Parses the project's Markdown pages: fences, the marks above them, and inline code."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
Row = list[str]

FENCE = re.compile(
    r"(?:^ *<!-- (?P<mark>not run|run|prints)(?:: (?P<about>[^\n]+?))? -->\n(?: *\n)*)?"
    r"^(?P<indent> *)```(?P<language>\w*)\n(?P<text>.*?)^ *```$",
    re.MULTILINE | re.DOTALL,
)
"""With the mark above it."""


@dataclass(frozen=True)
class Fence:
    """A fenced block of a page."""

    page: str
    """Path from the root of the repository."""
    line: int
    """Line of the opening fence, from 1."""
    language: str
    text: str
    mark: str = ""
    """`not run`, `run`, `prints`, or empty."""
    about: str = ""
    """Text of the mark after its colon."""

    @property
    def place(self) -> str:
        """Page and line, for messages."""
        return f"{self.page}:{self.line}"

    @property
    def session(self) -> str:
        """Name of the session that runs the fence; empty if there is none."""
        return self.about if self.mark == "run" and re.fullmatch(r"[\w.-]+", self.about) else ""


def page_paths() -> list[str]:
    found = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    found += (ROOT / "examples").rglob("*.md")
    return sorted(str(path.relative_to(ROOT)) for path in found)


def read_page(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def fences(page: str, text: str) -> list[Fence]:
    """Return the fences of a page in order."""
    found = []
    for match in FENCE.finditer(text):
        mark, about, indent, language, body = match.groups(default="")
        line = text.count("\n", 0, match.start("indent")) + 1
        inside = "\n".join(one.removeprefix(indent) for one in body.removesuffix("\n").split("\n"))
        found.append(Fence(page, line, language, inside, mark, about))
    return found


def mark_errors(page: str, text: str) -> list[str]:
    """Return one line per mark that is incomplete, misspelt or not followed by a fence, and per unclosed fence."""
    errors = []
    found = fences(page, text)
    for fence in found:
        if fence.mark == "not run" and not fence.about:
            errors.append(f"{fence.place}: a reason is missing: <!-- not run: reason -->")
        if fence.mark == "run" and not fence.session:
            errors.append(f"{fence.place}: expected <!-- run: session -->")
        if fence.mark in ("run", "not run") and fence.language not in ("bash", "python"):
            errors.append(f"{fence.place}: expected bash or python, found '{fence.language}'")
    comments = re.findall(r"^ *<!-- *(.*?) *-->$", text, re.MULTILINE)
    marks = [comment for comment in comments if re.match(r"(not.?run|run|prints)\b", comment)]
    if len(marks) != sum(bool(fence.mark) for fence in found):
        errors.append(f"{page}: a mark must be directly above its fence; found {marks}")
    if len(re.findall(r"^ *```", text, re.MULTILINE)) != 2 * len(found):
        errors.append(f"{page}: a fence is not closed, or has more than a language after it")
    return errors


def prose(text: str) -> str:
    """Return the text outside of fences."""
    return re.sub(r"^ *```.*?^ *```$", "", text, flags=re.MULTILINE | re.DOTALL)


def code_spans(text: str) -> Iterator[str]:
    """Iterate over the text between single backticks, outside of fences."""
    for paragraph in re.split(r"\n\s*\n", prose(text)):
        for span in re.findall(r"(?<!`)`([^`]+)`(?!`)", paragraph):
            yield " ".join(span.split())


def table(page: str, heading: str) -> list[Row]:
    """Return the cells of the first table below a text, without its header."""
    text = read_page(page)
    lines = text[text.index(heading) :].splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("|---"))
    rows = []
    for line in lines[start + 1 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.removeprefix("|").removesuffix("|").split("|")])
    return rows

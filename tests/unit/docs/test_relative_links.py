"""Every relative link of the Markdown pages leads to a file, and to a heading where it names one."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.commands import REPOSITORY_ROOT as ROOT

PAGES = sorted(
    [*ROOT.glob("*.md"), *(path for folder in ("docs", "examples") for path in (ROOT / folder).rglob("*.md"))]
)
LINK = re.compile(r"\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^()\s]+)\)|<img[^>]* src=\"([^\"]+)\"")
FENCE = re.compile(r"^ {0,3}(```|~~~)")
INLINE_CODE = re.compile(r"(`+)(?!`)(?:(?!\n\n).)*?(?<!`)\1(?!`)", re.DOTALL)


def prose(text: str) -> Iterator[str]:
    """Lines outside of fenced and indented code."""
    fenced, code, blank = False, False, True
    for line in text.splitlines():
        if FENCE.match(line):
            fenced = not fenced
            continue
        # An indented block of code begins behind an empty line, and may have more of them.
        blank_before, blank = blank, not line.strip()
        code = (code or blank_before) and line.startswith("    ") or code and blank
        if not fenced and not code:
            yield line


def anchors(text: str) -> set[str]:
    """Names of the headings, as GitHub makes them: lower case, no punctuation, hyphens for blanks, numbered."""
    found: dict[str, int] = {}
    names = set()
    for line in prose(text):
        heading = re.match(r"#{1,6} +(.*?)(?: +#+)? *$", line)
        if heading is None:
            continue
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading[1]).lower()
        name = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        again = found.get(name, 0)
        found[name] = again + 1
        names.add(f"{name}-{again}" if again else name)
    return names


def links(text: str) -> Iterator[str]:
    """Targets of links and pictures; what stands in code is none."""
    for match in LINK.finditer(INLINE_CODE.sub("code", "\n".join(prose(text)))):
        yield match[1] or match[2]
        # A picture may be the text of a link.
        yield from links(match[0][1 : match[0].rfind("](")])


def broken(page: Path, text: str) -> list[str]:
    """Links of a page that lead nowhere."""
    found = []
    for target in links(text):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve()
        if path and not (file.exists() and file.is_relative_to(ROOT)):
            found.append(f"{target}: no such file")
        elif anchor and anchor not in anchors(file.read_text(encoding="utf-8") if path else text):
            found.append(f"{target}: no such heading")
    return found


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_links_lead_somewhere(page: Path) -> None:
    assert broken(page, page.read_text(encoding="utf-8")) == []


def test_every_page_is_reached_from_the_contents() -> None:
    start = ROOT / "docs" / "README.md"
    reached, ahead = {start}, [start]
    while ahead:
        page = ahead.pop()
        for target in links(page.read_text(encoding="utf-8")):
            file = (page.parent / target.partition("#")[0]).resolve()
            if file.suffix == ".md" and file.is_relative_to(ROOT / "docs") and file not in reached:
                reached.add(file)
                ahead.append(file)
    assert {page for page in PAGES if page.is_relative_to(ROOT / "docs")} <= reached

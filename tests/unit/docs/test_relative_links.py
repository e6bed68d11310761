"""Every relative link of the Markdown pages leads to a file, and to a heading where it names one."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, page_paths, prose

PAGES = [ROOT / page for page in (*page_paths(), "CHANGELOG.md")]
LINK = re.compile(r"\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^()\s]+)\)|<img[^>]* src=\"([^\"]+)\"")
INLINE_CODE = re.compile(r"(`+)(?!`)(?:(?!\n\n).)*?(?<!`)\1(?!`)", re.DOTALL)


def anchors(text: str) -> set[str]:
    """Names of the headings, as GitHub makes them: lower case, no punctuation, hyphens for blanks, numbered."""
    names: list[str] = []
    for heading in re.findall(r"^#{1,6} +(.*?)(?: +#+)? *$", prose(text), re.MULTILINE):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        names.append(re.sub(r"[^\w\- ]", "", words).replace(" ", "-"))
    before = [names[:place].count(name) for place, name in enumerate(names)]
    return {f"{name}-{again}" if again else name for name, again in zip(names, before, strict=True)}


def links(text: str) -> Iterator[str]:
    """Targets of links and pictures; what stands in code is none."""
    for match in LINK.finditer(INLINE_CODE.sub("code", prose(text))):
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
    reached = [ROOT / "docs" / "README.md"]
    for page in reached:
        for target in links(page.read_text(encoding="utf-8")):
            file = (page.parent / target.partition("#")[0]).resolve()
            if file.suffix == ".md" and file.is_relative_to(ROOT / "docs") and file not in reached:
                reached.append(file)
    assert {page for page in PAGES if page.is_relative_to(ROOT / "docs")} <= {*reached}

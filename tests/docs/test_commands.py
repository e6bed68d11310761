"""The parsers accept every command of the pages, and every flag in their text exists."""

import functools
import re

import pytest

from megatron_ladder.flags import flag_name
from tests.docs.pages import ROOT, code_spans, fences, mark_errors, page_paths, prose, read_page
from tests.docs.reading import read_command
from tests.docs.shell import OPEN_END, commands
from tests.helpers.commands import tracked_files

OTHERS = (
    "--flag --node_rank --local-dir --shm-size --enable-expert-parallel --enforce-eager --quantization --batch_size "
    "--trust-remote-code"
).split()
"""Flags of other programs that the pages mention, and a placeholder for any flag."""
CALL = re.compile(r"^(python|deepspeed|torchrun|bash|sbatch|pip|tools/\w+\.py|pretrain_ladder\.py)\s")


@functools.cache
def known_flags() -> set[str]:
    """Return the flags in the text of our programs, and those derived from fields of dataclasses."""
    ours = [name for name in tracked_files() if not name.startswith(("tests/unit", "tests/docs"))]
    sources = [ROOT / name for name in ours if name.endswith((".py", ".sh", ".sbatch"))]
    text = "\n".join(path.read_text(encoding="utf-8") for path in sources)
    fields = re.findall(r"^    ([a-z]\w*): ", text, re.MULTILINE)
    # The opposite of a switch overrides a configuration file.
    derived = {flag_name(name) for field in fields for name in (field, f"no_{field}")}
    return {*re.findall(r"(?<![\w-])--[a-z][\w-]*", text), *derived, *OTHERS}


def page_errors(page: str, text: str) -> list[str]:
    """Return one line per error in the commands of a page."""
    errors = mark_errors(page, text)
    for fence in fences(page, text):
        for words in commands(fence.text) if fence.language == "bash" else ():
            found = read_command(words)
            if found is None and not fence.mark:
                errors.append(
                    f"{fence.place}: {words[0]} is not our program: mark the fence <!-- run: session --> or "
                    "<!-- not run: reason -->"
                )
            errors += [f"{fence.place}: {error}" for error in found or ()]
    for line in re.findall("^ {4} *(.+)", prose(text), re.MULTILINE):
        if CALL.match(line):
            errors.append(f"{page}: commands must be in a bash fence, found indented text: {line}")
    return errors + span_errors(page, text)


def span_errors(page: str, text: str) -> list[str]:
    """Return one line per error in inline commands, which may be incomplete, and inline flags."""
    errors, known = [], known_flags()
    for span in code_spans(text):
        if CALL.match(span):
            whole = span if span.startswith(("python", "deepspeed", "torchrun", "bash", "pip")) else f"python {span}"
            for words in commands(whole):
                errors += [f"{page}: `{span}`: {error}" for error in read_command([*words, OPEN_END]) or ()]
        for flag in re.findall(r"(?<![\w-])--[a-z][\w-]*", span):
            if flag not in known:
                errors.append(f"{page}: `{span}`: {flag} is not a flag of any program")
    return errors


@pytest.mark.parametrize("page", page_paths())
def test_the_programs_accept_the_commands_of_a_page(page: str) -> None:
    assert page_errors(page, read_page(page)) == []

"""Writes the reference as HTML pages: the Python interface, and the flags of its programs, from their docstrings.

python docs/write_reference.py --output-dir reference
"""

import argparse
import types
from collections.abc import Sequence
from pathlib import Path

import pdoc.doc
import pdoc.render

from megatron_ladder.config.run import SECTIONS as TRAINING_SECTIONS
from megatron_ladder.convert.options import VERBS
from megatron_ladder.flags import Flag, section_flags
from megatron_ladder.generate.options import SECTIONS as GENERATION_SECTIONS

PROGRAMS: dict[str, Sequence[type]] = {
    "pretrain_ladder": TRAINING_SECTIONS,
    "generate": GENERATION_SECTIONS,
    "convert_checkpoint": [section for section, _ in VERBS.values()],
}
"""The sections of the flags of each program."""


def table_row(declared: Flag) -> str:
    """Return the line of a flag in the table of its section."""
    first, *others = declared.spellings
    placeholder = declared.value_type.placeholder
    value = f" {placeholder}{' ...' if declared.value_type.many else ''}" if placeholder else ""
    also = "".join(f", `{other}`" for other in others)
    default = f"`{declared.shown_default}`" if declared.shown_default else ""
    if declared.is_required:
        default = "required"
    cells = (f"`{first}{value}`{also}", default, declared.limits, declared.documentation)
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"


def flags_page(program: str, sections: Sequence[type]) -> types.ModuleType:
    """Return the flags of a program as the Markdown docstring of a module."""
    parts = [f"The same text as `{program}.py --help`."]
    for section in sections:
        title, _, explanation = " ".join((section.__doc__ or "").split()).partition(". ")
        parts += [f"## {title.rstrip('.')}", *([explanation] if explanation else [])]
        head = ["| flag | default | values | description |", "|---|---|---|---|"]
        parts.append("\n".join([*head, *map(table_row, section_flags(section))]))
    return types.ModuleType(f"{program}_flags", "\n\n".join(parts))


def write_reference(folder: Path) -> None:
    """Write one page for the interface and for each program, an index, and the data of the search."""
    interface = pdoc.doc.Module.from_name("megatron_ladder.api")
    flags = [pdoc.doc.Module(flags_page(program, sections)) for program, sections in PROGRAMS.items()]
    modules = {module.fullname: module for module in (interface, *flags)}
    pdoc.render.configure(show_source=False, docformat="markdown")
    pages = {"index.html": pdoc.render.html_index(modules), "search.js": pdoc.render.search_index(modules)}
    for name, module in modules.items():
        # Where the pages of pdoc look for each other.
        pages[f"{name.replace('.', '/')}.html"] = pdoc.render.html_module(module, modules)
    for name, content in pages.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", type=Path, required=True, help="folder for the pages; open its index.html")
    write_reference(parser.parse_args().output_dir)

"""Writes docs/flags.md, the flags of pretrain_ladder.py, from the dataclasses that define them."""

from pathlib import Path

from megatron_ladder.config.run import SECTIONS
from megatron_ladder.flags import Flag, section_flags

PAGE = Path(__file__).with_name("flags.md")
HEAD = """# Flags of `pretrain_ladder.py`

<!-- Written by docs/write_flags.py: change the docstrings in megatron_ladder/config, not this page. -->

The same text as `python pretrain_ladder.py --help`. Where Megatron-DeepSpeed has an equivalent, the flag has its name;
[training.md](training.md#the-command-line) describes the answers to Megatron's other flags.
"""


def row(one: Flag) -> str:
    """Return the line of one flag in the table of its section."""
    first, *others = one.spellings
    value = (
        f" {one.value_type.placeholder}{' ...' if one.value_type.many else ''}" if one.value_type.placeholder else ""
    )
    also = "".join(f", `{other}`" for other in others)
    default = "required" if one.is_required else f"`{one.shown_default}`" if one.shown_default else ""
    cells = (f"`{first}{value}`{also}", default, one.limits, one.documentation)
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"


def page() -> str:
    """Return the content of the page."""
    parts = [HEAD]
    for section in SECTIONS:
        title, _, explanation = " ".join((section.__doc__ or "").split()).partition(". ")
        parts += [f"## {title.rstrip('.')}\n", *([f"{explanation}\n"] if explanation else [])]
        rows = [row(one) for one in section_flags(section)]
        parts.append("\n".join(["| flag | default | values | description |", "|---|---|---|---|", *rows]) + "\n")
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")

"""Writes the reference pages in `docs/reference/` from the dataclasses of all command lines."""

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from megatron_ladder.cli.programs import PROGRAMS, Command, load_program, script_of
from megatron_ladder.command_line import parse_config
from megatron_ladder.config.megatron_flags import ACCEPTED, REFUSED
from megatron_ladder.engine.deepspeed_json import FLAGS, REFUSED_KEYS
from megatron_ladder.errors import run_program
from megatron_ladder.flags import Flag, flag, section_flags

NOTE = "<!-- Written by tools/write_reference.py from the sources: change the docstrings there, not this page. -->"


@dataclass(frozen=True)
class WriteReferenceConfig:
    """Output."""

    output_dir: Path = flag(Path("docs/reference"), output="directory")
    """Directory for the pages."""


COMMANDS = (Command((WriteReferenceConfig,)),)
parse_options = functools.partial(parse_config, WriteReferenceConfig, program="write_reference.py", description=__doc__)


def _reference_pages() -> dict[str, str]:
    modules = {script_of(program): load_program(program) for program in PROGRAMS}
    pages = {f"{Path(path).stem}.md": _program_page(path, module) for path, module in modules.items()}
    pages["deepspeed_json.md"] = _deepspeed_page()
    pages["megatron_flags.md"] = _megatron_page()
    rows = [(f"[`{path}`]({Path(path).stem}.md)", _summary(module)) for path, module in sorted(modules.items())]
    pages["README.md"] = _joined(
        [
            "# Command-line reference",
            NOTE,
            "One page per program, with the same content as `--help`.",
            _table(("program", "purpose"), rows),
            "See also [how DeepSpeed's JSON is derived](deepspeed_json.md) and "
            "[how Megatron's other flags are handled](megatron_flags.md).",
        ]
    )
    return pages


def _program_page(path: str, module: ModuleType) -> str:
    lines = [f"# `{path}`", NOTE, _summary(module)]
    commands: Sequence[Command] = module.COMMANDS
    for command in commands:
        if len(commands) > 1:
            lines += [f"## `{Path(path).name} {command.words}`", command.description]
        lines += _sections(command, "##" if len(commands) == 1 else "###")
    if path == "pretrain_ladder.py":
        lines.append(
            "The DeepSpeed configuration is derived from these flags: [deepspeed_json.md](deepspeed_json.md). "
            "Megatron flags that are not listed here: [megatron_flags.md](megatron_flags.md)."
        )
    return _joined(lines)


def _sections(command: Command, mark: str) -> list[str]:
    lines = []
    for section in command.sections:
        title, _, explanation = " ".join((section.__doc__ or "").split()).partition(". ")
        if len(command.sections) > 1:
            lines.append(f"{mark} {title.rstrip('.')}")
        if explanation:
            lines.append(explanation)
        flags = section_flags(section)
        columns = {"flag": 0, "default": 1, "values": 2, "description": 3}
        if not any(one.limits for one in flags):
            del columns["values"]
        rows = [_flag_row(one) for one in flags]
        lines.append(_table(list(columns), [[row[column] for column in columns.values()] for row in rows]))
    return lines


def _flag_row(one: Flag) -> tuple[str, ...]:
    value = f" {one.placeholder}{' ...' if one.many else ''}" if one.placeholder else ""
    first, *others = one.spellings
    also = f" (also {', '.join(f'`{other}`' for other in others)})" if others else ""
    default = "required" if one.required else f"`{one.default}`" if one.default is not None else ""
    return f"`{first}{value}`{also}", default, one.limits, one.documentation


def _deepspeed_page() -> str:
    derived = [(f"`{key}`", re.sub(r"(?<!\S)(--[^\s,]*)", r"`\1`", flag)) for key, flag in FLAGS.items()]
    rejected = [(f"`{key}`", reason) for key, reason in REFUSED_KEYS.items()]
    return _joined(
        [
            "# DeepSpeed's JSON",
            NOTE,
            "The DeepSpeed configuration is derived from the flags of "
            "[`pretrain_ladder.py`](pretrain_ladder.md). A file given with `--deepspeed_config` is merged into it: "
            '`"auto"` takes the value of the command line, and a value that contradicts the command line is an error.',
            "## Keys that the command line determines",
            _table(("key", "source"), derived),
            "## Rejected keys",
            _table(("key", "reason, or replacement"), rejected),
        ]
    )


def _megatron_page() -> str:
    accepted = [(f"`{flag}`", " ".join(f"`{value}`" for value in values)) for flag, values in ACCEPTED.items()]
    rejected = [(f"`{flag}`", reason) for flag, reason in REFUSED.items()]
    return _joined(
        [
            "# Megatron's flags",
            NOTE,
            "The flags of [`pretrain_ladder.py`](pretrain_ladder.md) have the names of Megatron-DeepSpeed where it has "
            "an equivalent. None of Megatron's other flags is silently ignored.",
            "## Accepted flags, which request the default behaviour",
            _table(("flag", "accepted values"), accepted),
            "## Rejected flags",
            _table(("flag", "reason, or replacement"), rejected),
        ]
    )


def _summary(module: ModuleType) -> str:
    return " ".join((module.__doc__ or "").split("\n\n")[0].split())


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cells = [heads, ["---"] * len(heads), *([cell.replace("|", r"\|") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


def _joined(paragraphs: Sequence[str]) -> str:
    return "\n\n".join(paragraph for paragraph in paragraphs if paragraph) + "\n"


def main(argv: Sequence[str]) -> None:
    """Read the command line and write the pages."""
    config = parse_options(argv)
    pages = _reference_pages()
    config.output_dir.mkdir(parents=True, exist_ok=True)
    for name, text in pages.items():
        (config.output_dir / name).write_text(text, encoding="utf-8")
    print(f"{config.output_dir}: {len(pages)} pages")


entry_point = functools.partial(run_program, main)

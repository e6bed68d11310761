"""The reference pages of `docs/reference/`, from the dataclasses that `--help` is made of."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from megatron_ladder.config.megatron_flags import ACCEPTED, REFUSED
from megatron_ladder.engine.deepspeed_json import FLAGS, REFUSED_KEYS, REFUSED_SECTIONS
from megatron_ladder.errors import UserError, run_program
from megatron_ladder.flags import Flag, parse_command_line, section_flags

if TYPE_CHECKING:
    from megatron_ladder.cli.programs import Command, Program

NOTE = "<!-- Written by tools/write_reference.py from the sources: change the docstrings there, not this page. -->"
COMMAND = "python tools/write_reference.py"
"""What brings the pages up to date."""


@dataclass(frozen=True)
class WriteReferenceConfig:
    """Output."""

    output_dir: Path = Path("docs/reference")
    """Directory that gets the pages."""


def reference_pages() -> dict[str, str]:
    """File name -> text, of all pages."""
    # Imports every program; a mistake in this one's command line is told of before.
    from megatron_ladder.cli.programs import PROGRAMS

    pages = {f"{Path(path).stem}.md": _program_page(path, program) for path, program in PROGRAMS.items()}
    pages["deepspeed_json.md"] = _deepspeed_page()
    pages["megatron_flags.md"] = _megatron_page()
    pages["README.md"] = _index(PROGRAMS)
    return pages


def _program_page(path: str, program: "Program") -> str:
    lines = [f"# `{path}`", NOTE, _summary(program)]
    for command in program.commands:
        if len(program.commands) > 1:
            lines += [f"## `{Path(path).name} {command.words}`", command.description]
        lines += _sections(command, "##" if len(program.commands) == 1 else "###")
    if Path(path).stem == "pretrain_ladder":
        lines.append(
            "DeepSpeed's configuration is derived from these flags: [deepspeed_json.md](deepspeed_json.md). "
            "Flags of Megatron's that are not among them: [megatron_flags.md](megatron_flags.md)."
        )
    return _joined(lines)


def _sections(command: "Command", mark: str) -> list[str]:
    lines = []
    for section in command.sections:
        title, _, explanation = _one_line(section.__doc__ or "").partition(". ")
        if len(command.sections) > 1:
            lines.append(f"{mark} {title.rstrip('.')}")
        if explanation:
            lines.append(explanation)
        rows = [(_spelled(one), _default(one), _documentation(one)) for one in section_flags(section)]
        lines.append(_table(("flag", "default", "what it says"), rows))
    return lines


def _documentation(one: Flag) -> str:
    return one.documentation + (f" ({one.limits})" if one.limits else "")


def _spelled(one: Flag) -> str:
    value = f" {one.placeholder}{' ...' if one.many else ''}" if one.placeholder else ""
    first, *others = one.spellings
    also = f" (also {', '.join(f'`{other}`' for other in others)})" if others else ""
    return f"`{first}{value}`{also}"


def _default(one: Flag) -> str:
    if one.required:
        return "required"
    return "" if one.default is None else f"`{one.default}`"


def _deepspeed_page() -> str:
    decided = [(f"`{key}`", _flags_as_code(flag)) for key, flag in FLAGS.items()]
    refused = [(f"`{key}`", reason) for key, reason in {**REFUSED_SECTIONS, **REFUSED_KEYS}.items()]
    return _joined([
        "# DeepSpeed's JSON",
        NOTE,
        "What the engine is built from is derived from the flags of "
        "[`pretrain_ladder.py`](pretrain_ladder.md). A file given with `--deepspeed_config` is merged with it: "
        '`"auto"` in it means "from the command line", and a value that contradicts the command line is an error.',
        "## Keys that the command line decides",
        _table(("key", "comes from"), decided),
        "## Keys that are refused",
        _table(("key", "why, or what to use instead"), refused),
    ])  # fmt: skip


def _megatron_page() -> str:
    accepted = [(f"`{flag}`", " ".join(f"`{value}`" for value in values)) for flag, values in ACCEPTED.items()]
    refused = [(f"`{flag}`", reason) for flag, reason in REFUSED.items()]
    return _joined([
        "# Megatron's flags",
        NOTE,
        "Flags of [`pretrain_ladder.py`](pretrain_ladder.md) are Megatron-DeepSpeed's where it has a name for the "
        "thing. Of its others none is ignored.",
        "## Accepted, for they ask for what is done anyway",
        _table(("flag", "with the value"), accepted),
        "## Refused",
        _table(("flag", "why, or what to use instead"), refused),
    ])  # fmt: skip


def _index(programs: Mapping[str, "Program"]) -> str:
    rows = [(f"[`{path}`]({Path(path).stem}.md)", _summary(program)) for path, program in programs.items()]
    return _joined([
        "# Every command's arguments",
        NOTE,
        "The same as `--help` says, a page for each program.",
        _table(("program", "what it does"), rows),
        "Beside them: [how DeepSpeed's JSON is derived](deepspeed_json.md), and "
        "[what becomes of Megatron's other flags](megatron_flags.md).",
    ])  # fmt: skip


def _summary(program: "Program") -> str:
    """The first sentence of the program's module."""
    return _one_line((program.module.__doc__ or "").split("\n\n")[0])


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _flags_as_code(text: str) -> str:
    """Flags among words, marked as code."""
    words = [word.partition(",") for word in text.split()]
    return " ".join(f"`{word}`{comma}" if word.startswith("--") else word + comma for word, comma, _ in words)


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cells = [heads, ["---"] * len(heads), *([cell.replace("|", r"\|") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


def _joined(paragraphs: Sequence[str]) -> str:
    return "\n\n".join(paragraph for paragraph in paragraphs if paragraph) + "\n"


def parse_options(argv: Sequence[str]) -> WriteReferenceConfig:
    """Reads the command line.

    Raises:
        UserError: a line for each mistake.
    """
    config: WriteReferenceConfig
    (config,) = parse_command_line(
        [WriteReferenceConfig], argv, "write_reference.py", "Writes the reference pages of all commands."
    )
    return config


def main(argv: Sequence[str]) -> None:
    """Reads the command line and writes the pages."""
    config = parse_options(argv)
    pages = reference_pages()
    try:
        config.output_dir.mkdir(parents=True, exist_ok=True)
        for name, text in pages.items():
            (config.output_dir / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"--output-dir {config.output_dir}: cannot be written: {error.strerror}") from error
    print(f"{config.output_dir}: {len(pages)} pages")


def entry_point() -> NoReturn:
    """Console entry point."""
    run_program(main)

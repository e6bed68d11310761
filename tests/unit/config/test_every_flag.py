"""No flag is accepted and ignored: each has an effect, is rejected, or requests what the trainer does anyway."""

import re
from collections.abc import Sequence
from pathlib import Path

from megatron_ladder.config.megatron_flags import ACCEPTED, REFUSED
from megatron_ladder.config.run import SECTIONS
from megatron_ladder.flags import Flag, section_flags
from tests.helpers.runs import run_or_errors

PACKAGE = Path(__file__).resolve().parents[3] / "megatron_ladder"
IGNORED = {"deepspeed", "local_rank"}
"""Flags that launchers add, and that are documented as ignored."""
READ_BY_PART = {"train_data_path", "valid_data_path"}
"""Fields that the loader reads by the name of a part."""

CONTRADICTED = {
    "--untie-embeddings-and-output-weights": "--tie-embeddings",
    "--disable-bias-linear": "--add-mlp-bias",
    "--no-pipeline-parallel": "--pipeline-model-parallel-size 2",
}
"""Accepted flags of Megatron, and flags that ask for the opposite."""


def errors_of(words: str) -> list[str]:
    return run_or_errors(f"--train-iters 100 --lr 1e-3 {words}".split(), 1000, 4)[1]


def all_flags() -> Sequence[Flag]:
    return section_flags(*SECTIONS)


def words_of(one: Flag) -> str:
    """Return the flag with a value that is valid and not its default."""
    kind = one.value_type
    if kind.placeholder == "":
        return one.name
    texts = [*kind.choices, "1", "2", "0.5", "x"]
    for text in texts:
        try:
            value = kind.read([text] if kind.many else text)
        except ValueError:
            continue
        each = value if isinstance(value, tuple) else (value,)
        if value != one.default and all(one.allows(number) for number in each if isinstance(number, int | float)):
            return f"{one.name} {text}"
    raise AssertionError(f"no value for {one.name}")


def test_a_flag_without_effect_is_rejected() -> None:
    cases = [(one, other) for one in all_flags() for other in one.requires]
    assert len(cases) > 30
    for one, other in cases:
        found = [line for line in errors_of(words_of(one)) if line.startswith(f"{one.name} ")]
        assert any(f"requires {other}" in line for line in found), (one.name, found)


def test_a_number_below_its_bound_is_one_error() -> None:
    cases = 0
    for one in all_flags():
        if one.above is None and one.minimum is None:
            continue
        value = f"{one.above:g}" if one.above is not None else f"{one.minimum - 1:g}"
        found = [line for line in errors_of(f"{one.name}={value}") if line.startswith(f"{one.name} ")]
        assert len(found) == 1 and ": expected " in found[0], (one.name, value, found)
        cases += 1
    assert cases > 60


def test_every_flag_of_the_trainer_is_read() -> None:
    """A field that no code outside its own section reads has no effect."""
    folders = ("blueprint", "comm", "data", "engine", "model", "train")
    sources = [PACKAGE / "config" / "run.py"]
    sources += [path for folder in folders for path in (PACKAGE / folder).rglob("*.py")]
    read_names = {name for path in sources for name in re.findall(r"\.(\w+)", path.read_text())}
    assert {one.field_name for one in all_flags()} - read_names - READ_BY_PART <= IGNORED


def test_megatrons_flags_are_accepted_only_for_what_the_trainer_does() -> None:
    known = {word for one in all_flags() for word in (*one.spellings, one.opposite)}
    assert not known & (ACCEPTED.keys() | REFUSED.keys()) and not ACCEPTED.keys() & REFUSED.keys()
    needed = {"--group-query-attention": "--num-query-groups 4", "--use-checkpoint-args": "--load l"}
    for flag, values in ACCEPTED.items():
        assert errors_of(f"{flag} {' '.join(values[:1])} {needed.get(flag, '')}") == [], flag
        wrong = errors_of(f"{flag} nonsense")
        assert len(wrong) == 1 and wrong[0].startswith(f"{flag} "), flag
    for flag in REFUSED:
        (found,) = errors_of(flag)
        assert found.startswith(f"{flag} is not supported: "), flag
    for flag, other in CONTRADICTED.items():
        assert errors_of(f"{flag} {other}") == [f"{flag} and {other} exclude each other: give one of them"]
    for flag, other in needed.items():
        (found,) = errors_of(flag)
        assert found.startswith(f"{flag} requires {other.split()[0]}")

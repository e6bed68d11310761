"""What pages, scripts and messages state about versions, extras and the release is in the metadata of the packages."""

import re
import tomllib

import yaml

import megatron_ladder
from tests.helpers.commands import REPOSITORY_ROOT as ROOT
from tests.helpers.commands import package_metadata, tracked_files

PAGE = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")


def table(heading: str) -> dict[str, list[str]]:
    """Return the cells of each row of the table below a heading, by the first of them."""
    section = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in section.splitlines() if line.startswith("|")]
    return {first: others for first, *others in rows[2:]}


def ranges(requirements: list[str]) -> dict[str, str]:
    """Return the range of versions that each requirement allows."""
    return dict(re.findall(r"^([\w.-]+)(?:\[.+\])?([^;\n]*)", "\n".join(requirements), re.MULTILINE))


def test_the_table_of_extras_is_that_of_the_metadata() -> None:
    extras = package_metadata()["extras_require"]
    rows = table("Extras")
    assert {f"`{extra}`" for extra in extras} == {*rows}
    for extra, requirements in extras.items():
        packages, _ = rows[f"`{extra}`"]
        assert extra == "test" or set(re.findall("`(.+?)`", packages)) == {*ranges(requirements)}


def test_every_extra_that_is_named_exists() -> None:
    extras = {*package_metadata()["extras_require"]}
    named = (
        r"(?:megatron-ladder|\.|\.whl|REPOSITORY\})\[([a-z]+(?:,[a-z]+)*)\]|^ *(?:.* && )?prepare_environment ([a-z,]+)"
    )
    found = set()
    for name in tracked_files():
        if name.endswith((".md", ".py", ".sh", "Dockerfile")):
            for pair in re.findall(named, (ROOT / name).read_text(encoding="utf-8"), re.MULTILINE):
                words = {word for group in pair for word in group.split(",") if word}
                found |= words
                assert words <= extras, f"{name}: {words - extras}"
    assert found >= {"data", "eval", "hf", "lab", "plot", "test"}


def test_the_release_has_one_version_and_one_date() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    version, date = re.findall(r"^## (\S+) \((.+)\)$", changes, re.MULTILINE)[0]
    plugin = tomllib.loads((ROOT / "vllm_plugin" / "pyproject.toml").read_text(encoding="utf-8"))
    assert {version, megatron_ladder.__version__, plugin["project"]["version"]} == {citation["version"]}
    assert date == str(citation["date-released"])

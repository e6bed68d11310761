"""The generated reference is complete, and the pictures of docs/ are up to date."""

import ast
import html
import re
import runpy
import sys
import warnings
from pathlib import Path

import pytest

from megatron_ladder import api
from megatron_ladder.config.run import SECTIONS
from megatron_ladder.flags import section_flags
from tests.helpers.commands import REPOSITORY_ROOT

DOCS = REPOSITORY_ROOT / "docs"


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the reference, written without a warning by the command in its docstring."""
    folder = tmp_path_factory.mktemp("reference")
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        patch.setattr(sys, "argv", ["write_reference.py", "--output-dir", str(folder / "pages")])
        runpy.run_path(str(DOCS / "write_reference.py"), run_name="__main__")
    return folder / "pages"


def test_the_reference_describes_all_that_the_interface_defines_and_the_docs_call(reference: Path) -> None:
    page = (reference / "megatron_ladder" / "api.html").read_text(encoding="utf-8")
    names = set(re.findall(r'<(?:div|section) id="([\w.]+)"', page))
    source = Path(api.__file__).read_text(encoding="utf-8")
    definitions = (ast.FunctionDef, ast.ClassDef)
    public = {node.name for node in ast.parse(source).body if isinstance(node, definitions) and node.name[0] != "_"}
    assert public <= {*api.__all__} <= names
    text = (DOCS / "api.md").read_text(encoding="utf-8")
    classes = {"run": "TrainingRun", "generator": "TextGenerator", "model": "LanguageModel", "result": "StepResult"}
    for variable, member in re.findall(r"\b(run|generator|model|result)\.(?!py\b)([a-z]\w+)", text):
        assert f"{classes[variable]}.{member}" in names


def test_the_reference_has_all_flags_of_the_trainer(reference: Path) -> None:
    page = html.unescape((reference / "pretrain_ladder_flags.html").read_text(encoding="utf-8"))
    assert {declared.name for declared in section_flags(*SECTIONS)} <= set(re.findall(r"<td><code>(--[\w-]+)", page))
    assert {path.name for path in reference.glob("*.html")} > {"index.html", "generate_flags.html"}


def test_the_pictures_are_up_to_date() -> None:
    drawn = runpy.run_path(str(DOCS / "pictures" / "draw.py"))["pictures"]()
    assert {path.name for path in (DOCS / "pictures").glob("*.svg")} == set(drawn)
    for name, content in drawn.items():
        assert (DOCS / "pictures" / name).read_text(encoding="utf-8") == content, f"run docs/pictures/draw.py ({name})"

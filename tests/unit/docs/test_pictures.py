"""The pictures of docs/concepts.md are what their program draws now, and it draws schedules that add up."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).resolve().parents[3] / "docs" / "pictures"


@pytest.fixture(scope="module")
def draw() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_pictures_draw", FOLDER / "draw.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up by its name.
    sys.modules[spec.name] = module
    path = list(sys.path)
    spec.loader.exec_module(module)
    sys.path[:] = path
    return module


def test_files_are_what_the_program_draws(draw: ModuleType) -> None:
    drawn = draw.pictures()
    assert {path.name for path in FOLDER.glob("*.svg")} == set(drawn)
    for name, content in drawn.items():
        assert (FOLDER / name).read_text(encoding="utf-8") == content, f"run: python docs/pictures/draw.py ({name})"

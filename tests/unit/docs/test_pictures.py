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


def spans(bars: list) -> list[tuple[float, float]]:
    """Rounded: the clock adds and subtracts."""
    return [(round(bar.start, 9), round(bar.end, 9)) for bar in bars]


def test_a_forward_pass_drawn_by_hand(draw: ModuleType) -> None:
    """Two ladder layers, reduces of 1.5: A1 waits for A0's until 2.5, M1 for M0's until 4, the end for the last two."""
    row = draw.forward_row("", "", draw.model("ladder", 2), 1.5)
    assert [bar.label for bar in row.compute] == [bar.label for bar in row.wire] == ["A0", "M0", "A1", "M1"]
    assert spans(row.compute) == [(0, 1), (1, 2), (2.5, 3.5), (4, 5)]
    assert spans(row.wire) == [(1, 2.5), (2.5, 4), (4, 5.5), (5.5, 7)]
    assert spans(list(draw.waits(row))) == [(2, 2.5), (3.5, 4), (5, 7)]
    assert row.end == 7 and row.lanes == 1


def test_a_backward_pass_drawn_by_hand(draw: ModuleType) -> None:
    """One layer. Mirrored, the reduce starts before w (0.6), and A0 needs none of it; autograd waits after each w."""
    late = draw.model("ladder", 1)
    row = draw.backward_row("", "", late, 1.0, mirrored=True)
    assert [bar.label for bar in row.compute] == ["M0", "w", "A0", "w"]
    assert spans(row.compute) == [(0, 1.4), (1.4, 2), (2, 3.4), (3.4, 4)]
    assert spans(row.wire) == [(1.4, 2.4), (3.4, 4.4)]
    row = draw.backward_row("", "", late, 1.0, mirrored=False)
    assert spans(row.compute) == [(0, 1.4), (1.4, 2), (3, 4.4), (4.4, 5)]
    assert spans(row.wire) == [(2, 3), (5, 6)]


def test_collectives_that_share_the_wire_have_lanes_of_their_own(draw: ModuleType) -> None:
    row = draw.forward_row("", "", draw.model("ladder", 2, "all", 2), 2.0, serial=False)
    assert row.lanes == 2
    assert [lane for lane, _ in draw.stacked(row.wire)] == [0, 1, 0, 1]

"""How late each layer is in each step, and which orders of layers are accepted."""

import json
import math
from pathlib import Path

import pytest

from megatron_ladder.config.run import RunConfig, parse_run, resolve_run

BASE = "--train-iters 100 --lr 1e-3 --num-layers 6 --residual-mode ladder"


def read(words: str) -> tuple[RunConfig, list[str]]:
    errors: list[str] = []
    run = resolve_run(parse_run(f"{BASE} {words}".split(), errors), 1000, 4, errors)
    return run, errors


def test_all_layers_together() -> None:
    linear, errors = read("--anneal-staleness 8 --ladder-layers 1,4")
    assert errors == []
    for iteration in range(1, 12):
        share = min((iteration - 1) / 8, 1)
        assert linear.lateness(iteration) == {1: share, 4: share}
    cosine = read("--anneal-staleness 8 --ladder-layers 1,4 --anneal-schedule cosine")[0]
    for iteration in range(1, 12):
        share = math.sin(math.pi / 2 * min((iteration - 1) / 8, 1)) ** 2
        assert cosine.lateness(iteration) == {1: pytest.approx(share), 4: pytest.approx(share)}
    assert cosine.lateness(1)[1] == 0 and cosine.lateness(9)[1] == 1


@pytest.mark.parametrize("iters", [1, 2, 7, 30])
def test_layers_one_after_another(iters: int) -> None:
    run, errors = read(f"--anneal-staleness {iters} --ladder-layers 0,3,5 --convert-schedule 5,1,0,3")
    assert errors == []
    for iteration in range(1, iters + 3):
        done = 3 * (iteration - 1) / iters
        expected = {layer: min(max(done - place, 0), 1) for place, layer in enumerate((5, 0, 3))}
        assert run.lateness(iteration) == pytest.approx(expected)
    assert set(run.lateness(1).values()) == {0} and set(run.lateness(iters + 1).values()) == {1}


def test_without_the_flag_nothing_is_annealed() -> None:
    assert read("")[0].lateness(1) == {}


def test_the_order_of_a_file_becomes_part_of_the_run(tmp_path: Path) -> None:
    """So a resumed run does not need the file, and ranks with different files differ in a setting."""
    path = tmp_path / "sensitivity.json"
    path.write_text(json.dumps({"order": [4, 2, 0, 5, 1, 3], "losses": [1.5]}))
    run, errors = read(f"--anneal-staleness 10 --ladder-layers 0,2,5 --convert-schedule @{path}")
    assert errors == []
    assert run.to_dict()["training"]["convert_schedule"] == "2,0,5"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--anneal-staleness 0", "--anneal-staleness 0: expected 1 or more"),
        ("--anneal-staleness 101", "--anneal-staleness 101 is above --train-iters 100, so that the model would end"),
        ("--anneal-staleness 9 --residual-mode standard", "with --residual-mode standard, where no layer reads"),
        ("--anneal-staleness 9 --residual-mode parallel", "with --residual-mode parallel, where no layer reads"),
        (
            "--anneal-staleness 9 --residual-mode desync --tensor-model-parallel-size 2",
            "--residual-mode desync, where no layer reads the stream late: give --residual-mode ladder or",
        ),
        ("--anneal-staleness 9 --ladder-layers none", "ladder and --ladder-layers none, where no layer"),
        ("--anneal-staleness 9 --ladder-layers 7", "--ladder-layers 7: the upper 7 layers of 6 do not exist"),
        (
            "--anneal-staleness 9 --pipeline-model-parallel-size 2",
            "--anneal-staleness 9 and --pipeline-model-parallel-size exclude each other",
        ),
        ("--anneal-staleness 9 --lanes 2", "--anneal-staleness 9 with --lanes 2 is not supported"),
        ("--anneal-schedule cosine", "--anneal-schedule cosine requires --anneal-staleness"),
        ("--convert-schedule 1,2", "--convert-schedule 1,2 requires --anneal-staleness"),
        (
            "--anneal-staleness 9 --convert-schedule late",
            "--convert-schedule late: expected together, layers such as 11,3,7, or @FILE",
        ),
        ("--anneal-staleness 9 --ladder-layers 2 --convert-schedule 4", "does not contain the late layers [5]: give"),
        ("--anneal-staleness 9 --ladder-layers 1 --convert-schedule 5,3,3", "contains layers [3] more than once"),
        ("--anneal-staleness 9 --ladder-layers 1 --convert-schedule 5,6", "layers [6], expected layers of 0-5"),
        ("--anneal-staleness 9 --convert-schedule @absent.json", "absent.json cannot be read: No such file"),
    ],
)
def test_an_invalid_annealing_is_one_error(words: str, message: str) -> None:
    found = read(words)[1]
    assert len(found) == 1 and message in found[0], found


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1, 2", "is not JSON: Expecting ',' delimiter"),
        ("[0, 1, 2, 3, 4, 5]", 'has no list of layers, expected {"order": [11, 3, 7]}'),
        ('{"layers": [0]}', "has no list of layers"),
        ('{"order": 5}', "has no list of layers"),
        ('{"order": [0, 1, 2, 3, 4, "5"]}', "has no list of layers"),
        ('{"order": [0, 1, 2, 3, 4, true]}', "has no list of layers"),
        ('{"order": [0, -1, 1, 2, 3, 4, 5]}', "contains layers [-1], expected layers of 0-5"),
        ("\udcff", "is not JSON"),
    ],
)
def test_an_invalid_file_is_one_error(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "order.json"
    path.write_bytes(text.encode(errors="surrogateescape"))
    found = read(f"--anneal-staleness 9 --convert-schedule @{path}")[1]
    assert len(found) == 1 and found[0].startswith(f"--convert-schedule @{path}: ") and message in found[0], found

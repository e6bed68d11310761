"""`convert_checkpoint.py sensitivity`, compared with a loop over the plain model."""

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from megatron_ladder.checkpoint.format import Checkpoint
from megatron_ladder.convert.options import SensitivityOptions
from megatron_ladder.convert.sensitivity import read_batches
from megatron_ladder.data.indexed import Sidecar, loss_mask_path, write_sidecar
from megatron_ladder.errors import UserError
from megatron_ladder.generate.loading import open_model
from tests.helpers.pairwise import quick_share
from tests.helpers.runs import errors_of
from tests.helpers.tokens import write_documents
from tests.reference import make_weights, reference_logits
from tests.unit.convert.hf_models import GLM
from tests.unit.convert.saved_models import convert
from tests.unit.generate.tiny_model import DELTA, WINDOWS, reference_of, tiny_config, write_checkpoint

LENGTH, ROWS, LAYERS = 8, 5, 4
CASES: dict[str, tuple[dict[str, Any], list[object], dict[str, Any]]] = {
    "ladder": ({}, [], {"residual_mode": "ladder", "residual_staleness": 1}),
    "a late model": (
        {"residual_mode": "ladder-attention", "ladder_layers": (1, 2), "residual_staleness": 2},
        [],
        {"residual_mode": "ladder-attention", "residual_staleness": 2},
    ),
    "farskip": (
        {**GLM, "moe_layers": (0, 2, 3)},
        ["--residual-mode", "farskip"],
        {"residual_mode": "farskip", "residual_staleness": 1},
    ),
    "one norm": ({"residual_mode": "parallel"}, [], {"residual_mode": "ladder-parallel", "residual_staleness": 1}),
}
"""Changes of the model, flags, and the wiring that is measured."""


def write_tokens(prefix: Path, count: int, vocab_size: int = 67) -> list[int]:
    tokens = np.random.default_rng(5).integers(0, vocab_size, count)
    write_documents(prefix, tokens[: count // 2], tokens[count // 2 :])
    return list(tokens.tolist())


def measure(folder: Path, changes: dict[str, Any], *words: object) -> tuple[dict[str, Any], list[int]]:
    """Run the command on a model with these changes; return the content of its file, and the tokens of the data."""
    config = tiny_config(num_layers=LAYERS, **changes)
    write_checkpoint(folder / "run", config)
    tokens = write_tokens(folder / "data", 100)
    output = folder / "out.json"
    sizes = ("--tokens", LENGTH * ROWS + 3, "--seq-length", LENGTH, "--batch-size", 2)
    convert("sensitivity", "--load", folder / "run", "--data", folder / "data", "--output", output, *sizes, *words)
    return json.loads(output.read_text()), tokens


def losses_of(changes: dict[str, Any], wiring: dict[str, Any], tokens: Sequence[int]) -> list[float]:
    """Return the loss of each row, from the plain model in fp64; rows begin at 0, 16, 40, 64, 88."""
    reference = reference_of(tiny_config(num_layers=LAYERS, **changes))[1]
    changed = replace(reference, **wiring)
    weights = make_weights(reference, 3, torch.float64)
    rows = [torch.tensor(tokens[begin : begin + LENGTH + 1]) for begin in (0, 16, 40, 64, 88)]
    return [F.cross_entropy(reference_logits(weights, changed, row[None, :-1])[0], row[1:]).item() for row in rows]


def price(losses: Sequence[float], base: Sequence[float]) -> list[float]:
    differences = [loss - before for loss, before in zip(losses, base, strict=True)]
    return [statistics.fmean(differences), statistics.stdev(differences) / len(differences) ** 0.5]


def check(found: dict[str, Any], changes: dict[str, Any], wiring: dict[str, Any], tokens: Sequence[int]) -> None:
    def losses(late: Iterable[int]) -> list[float]:
        return losses_of(changes, {**wiring, "ladder_layers": tuple(sorted(late))}, tokens)

    base, order = losses(()), list[int]()
    while len(order) < LAYERS:
        others = [layer for layer in range(LAYERS) if layer not in order]
        order.append(min(others, key=lambda layer: statistics.fmean(losses([*order, layer]))))
    assert found["loss"] == pytest.approx(statistics.fmean(base), abs=1e-5)
    assert found["tokens"] == LENGTH * ROWS and found["order"] == order
    assert {name: found[name] for name in wiring} == wiring
    expected = {
        "layers": [price(losses([layer]), base) for layer in range(LAYERS)],
        "cheapest": [price(losses(order[:count]), base) for count in range(1, LAYERS + 1)],
        "upper": [price(losses(range(LAYERS - count, LAYERS)), base) for count in range(1, LAYERS + 1)],
    }
    for name, prices in expected.items():
        np.testing.assert_allclose(found[name], prices, atol=1e-5)
    # Otherwise the order would say nothing.
    assert len({round(increase, 4) for increase, _ in expected["layers"]}) == LAYERS


@pytest.mark.parametrize("name", quick_share(CASES, 4))
def test_prices_and_order_are_those_of_a_plain_loop(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes, words, wiring = CASES[name]
    found, tokens = measure(tmp_path, changes, *words)
    check(found, changes, wiring, tokens)
    report, loaded = capsys.readouterr()
    assert f"{tmp_path}/run/iter_0000010: {changes.get('residual_mode', 'standard')}, {LAYERS} layers, " in loaded
    late_by = f", {wiring['residual_staleness']} sub-blocks late" if wiring["residual_staleness"] > 1 else ""
    assert f"read late (wiring: {wiring['residual_mode']}{late_by}), " in report
    alone, cheapest, upper = (found["layers"][found["order"][1]], found["cheapest"][1], found["upper"][1])
    cells = " | ".join(f"{increase:+.4f} ± {error:.4f}" for increase, error in (alone, cheapest, upper))
    assert f"\n| 2 | {found['order'][1]} | {cells} |\n" in report


@pytest.mark.parametrize(
    ("changes", "words", "places", "kinds"),
    [
        (DELTA, (), 2, {"attention": (0, 1, 3), "gated DeltaNet": (0, 2), "mlp": (1, 0, 1, 2, 3)}),
        (
            WINDOWS,
            ("--residual-staleness", 2),
            2,
            {"attention": (0, 1, 3), "attention to 4 positions": (0, 2), "mlp": (1, 0, 1, 2, 3)},
        ),
        (DELTA, ("--residual-mode", "ladder-attention"), 2, {"attention": (0, 1, 3), "gated DeltaNet": (0, 2)}),
        (
            DELTA | {"residual_mode": "parallel"},
            (),
            1,
            {"attention": (0, 1, 3), "gated DeltaNet": (0, 2)},
        ),
    ],
)
def test_sub_blocks_of_hybrids_are_priced_by_kind(
    changes: dict[str, Any],
    words: tuple[object, ...],
    places: int,
    kinds: dict[str, tuple[int, ...]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Each kind has a place in its layers. Whatever is between two late sub-blocks has seen everything."""
    found, tokens = measure(tmp_path, changes, *words)

    def losses(late: Sequence[int], place: int) -> list[float]:
        missing = [(1,) if number in {places * layer + place for layer in late} else () for number in range(places * 4)]
        return losses_of(changes, {"missing": tuple(missing)}, tokens)

    base = losses((), 0)
    assert [one["kind"] for one in found["sub_blocks"]] == list(kinds)
    for one in found["sub_blocks"]:
        place, *layers = kinds[one["kind"]]
        assert one["layers"] == layers
        expected = [price(losses([layer], place), base) for layer in layers]
        np.testing.assert_allclose(one["alone"], expected, atol=1e-5)
        np.testing.assert_allclose(one["together"], price(losses(layers, place), base), atol=1e-5)
        assert len({round(increase, 4) for increase, _ in expected}) == len(layers)
    printed = capsys.readouterr().out
    mean = [[value / len(one["layers"]) for value in one["together"]] for one in found["sub_blocks"]]
    cells = " | ".join(f"{increase:+.4f} ± {error:.4f}" for increase, error in mean)
    assert f"| layer | {' | '.join(kinds)} |\n" in printed
    assert f"\n| all, per layer | {cells} |" in printed


@pytest.mark.long
def test_two_ranks_equal_a_plain_loop(tmp_path: Path) -> None:
    found, tokens = measure(tmp_path, {}, "--tp", 2)
    check(found, *CASES["ladder"][::2], tokens)


def test_a_desync_model_cannot_be_measured(tmp_path: Path) -> None:
    (error,) = errors_of(measure, tmp_path, {"residual_mode": "desync", "desync_interval": 2, "desync_tp": 2})
    assert error.startswith(f"--load {tmp_path}/run: a desync model, whose norms differ from rank to rank")


def test_a_model_is_rewired_with_its_cheapest_layers(tmp_path: Path) -> None:
    """A file that does not belong to the request is an error."""
    found, _ = measure(tmp_path, {}, "--residual-staleness", 2)
    words = ("reshape", "--load", tmp_path / "run", "--save", tmp_path / "hybrid", "--ladder-layers")
    (tmp_path / "other").write_text('{"order": [1, 0]}')
    (tmp_path / "text").write_text(json.dumps(found | {"residual_staleness": "2"}))
    for file, more, message in (
        ("out.json", ("--residual-staleness", 1), "--residual-staleness 2, not 1"),
        ("absent", (), "No such file"),
        ("other", (), "not a file of `convert_checkpoint.py sensitivity`"),
        ("text", (), "residual_staleness"),
    ):
        (error,) = errors_of(convert, *words, f"best:2@{tmp_path / file}", *more)
        assert message in error
    convert(*words, f"best:3@{tmp_path / 'out.json'}")
    model = Checkpoint.open(tmp_path / "hybrid").model()
    assert (model.residual_mode, model.residual_staleness) == ("ladder", 2)
    assert model.ladder_layers == tuple(sorted(found["order"][:3]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seq_length": 97}, "only 96 positions"),
        ({"seq_length": 60}, "two are the least"),
        ({"data": Path("large")}, "contains id 6"),
        ({"eod_mask_loss": True}, "has no tokenizer"),
        ({"data": Path("masked")}, "no token of these rows is a label"),
    ],
)
def test_data_that_cannot_be_measured_is_an_error(
    changes: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_tokens(tmp_path / "data", 100)
    write_tokens(tmp_path / "large", 100, 70)
    write_tokens(tmp_path / "masked", 100)
    loss_mask_path(tmp_path / "masked").write_bytes(bytes(99) + b"\1")
    given = {"load": tmp_path, "data": Path("data"), "output": tmp_path / "out", "seq_length": LENGTH} | changes
    write_checkpoint(tmp_path / "run")
    with pytest.raises(UserError, match=message):
        read_batches(SensitivityOptions(**given), open_model(tmp_path / "run", None, None))


def test_conversations_are_measured_as_training_reads_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Compare with each conversation run alone; only the labels that the mask marks count."""
    config = tiny_config(num_layers=LAYERS)
    weights, reference = reference_of(config)
    write_checkpoint(tmp_path / "run", config, weights)
    generator = np.random.default_rng(1)
    lengths = [5, 11, 3, 9, 8, 12, 4, 7]
    conversations = [generator.integers(0, 67, length) for length in lengths]
    marks = [generator.integers(0, 2, length) for length in lengths]
    write_documents(tmp_path / "chat", *conversations)
    loss_mask_path(tmp_path / "chat").write_bytes(bytes(np.concatenate(marks).astype(np.uint8)))
    total = sum(lengths)
    write_sidecar(
        tmp_path / "chat", Sidecar("NullTokenizer", "ab", 67, 1, False, 66, len(lengths), total, conversations=True)
    )
    words = ("--seq-length", 12, "--output", tmp_path / "out.json")
    command = ("sensitivity", "--load", tmp_path / "run", "--data", tmp_path / "chat", *words)
    convert(*command)
    resets = "--reset-position-ids --reset-attention-mask"
    assert f"if they did not in training, give {resets} ***" in capsys.readouterr().out
    convert(*command, "--no-reset-attention-mask")
    assert resets not in capsys.readouterr().out
    convert(*command, *resets.split())
    given = (tmp_path / "out.json").read_text()
    assert "in training" not in capsys.readouterr().out
    # A run records its flags.
    data = {"reset_position_ids": True, "reset_attention_mask": True, "eod_mask_loss": False, "loss_on": None}
    write_checkpoint(tmp_path / "run", config, weights, run={"data": data})
    convert(*command)
    printed = capsys.readouterr().out
    assert f"as the checkpoint's run did: {resets}\n" in printed
    assert "layers were chosen by less than one standard error" in printed
    assert (tmp_path / "out.json").read_text() == given
    found = json.loads((tmp_path / "out.json").read_text())

    def loss(late: Iterable[int]) -> float:
        changed = replace(reference, residual_mode="ladder", ladder_layers=tuple(late))
        losses = []
        for tokens, marked in zip(map(torch.from_numpy, conversations), marks, strict=True):
            each = F.cross_entropy(
                reference_logits(weights, changed, tokens[None, :-1])[0], tokens[1:], reduction="none"
            )
            losses += each[torch.from_numpy(marked[1:]) == 1].tolist()
        assert found["tokens"] == len(losses)
        return statistics.fmean(losses)

    assert found["loss"] == pytest.approx(loss(()), abs=1e-5)
    for layer, (increase, _) in enumerate(found["layers"]):
        assert increase == pytest.approx(loss([layer]) - loss(()), abs=1e-5)
    # The sidecar names the token if the run had no tokenizer.
    write_checkpoint(tmp_path / "run", config, weights, run={"data": {"eod_mask_loss": True}})
    convert(*command)
    assert "as the checkpoint's run did: --eod-mask-loss\n" in capsys.readouterr().out

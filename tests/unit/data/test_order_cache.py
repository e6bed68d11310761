"""The cache of sample orders that processes share on disk."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megatron_ladder.data.indexed import IndexedDataset, IndexedDatasetWriter
from megatron_ladder.data.order_cache import load_or_build
from megatron_ladder.data.samples import SampleSource
from tests.helpers.operations import Operations
from tests.helpers.patience import patient

MakeDataset = Callable[..., IndexedDataset]
NUMBERS = np.arange(60)

BUILDER = """
import sys, time
from pathlib import Path
import numpy as np
from megatron_ladder.data.order_cache import load_or_build

def build():
    print("builds", flush=True)
    time.sleep(float(sys.argv[2]))
    return [np.arange(5), np.arange(0)]

found = load_or_build(Path(sys.argv[1]), {"a": 1}, build)
print([array.tolist() for array in found], flush=True)
"""


def start_builder(folder: Path, seconds: float) -> "subprocess.Popen[str]":
    return subprocess.Popen([sys.executable, "-c", BUILDER, folder, str(seconds)], stdout=subprocess.PIPE, text=True)


def read(dataset: IndexedDataset, cache: Path | None) -> list[list[int]]:
    source = SampleSource(dataset, range(4), 4, 3, shuffle=True, cache=cache)
    tokens: list[list[int]] = source.samples(NUMBERS).tokens.tolist()
    return tokens


def orders(folder: Path) -> list[Path]:
    return sorted(folder.glob("order_*.bin"))


def test_a_cached_order_equals_a_new_one(
    make_dataset: MakeDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = make_dataset([7, 30, 2, 60])
    folder = tmp_path / "cache"
    folder.mkdir()
    expected = read(dataset, None)
    assert read(dataset, folder) == expected
    assert len(orders(folder)) == 3, "24 samples an epoch: epochs 0, 1 and 2"
    monkeypatch.setattr(SampleSource, "_build_order", None)
    operations = Operations(tmp_path, monkeypatch)
    assert read(dataset, folder) == expected
    assert sorted(operations.of_thread["MainThread"]) == [f"open cache/{path.name}" for path in orders(folder)]
    order = SampleSource(dataset, range(4), 4, 3, shuffle=True, cache=folder)._order_of(0)
    assert not order.samples.flags.writeable and order.samples.base is not None


def test_every_property_of_an_order_determines_its_file(make_dataset: MakeDataset, tmp_path: Path) -> None:
    dataset = make_dataset([7, 30, 2, 60])
    seen = []

    def files_after(dataset: IndexedDataset, documents: range, seq_length: int, seed: int) -> int:
        SampleSource(dataset, documents, seq_length, seed, True, cache=tmp_path).samples(np.array([0]))
        return len(orders(tmp_path))

    seen.append(files_after(dataset, range(4), 4, 3))
    seen.append(files_after(dataset, range(4), 4, 3))
    seen.append(files_after(dataset, range(4), 4, 4))
    seen.append(files_after(dataset, range(3), 4, 3))
    seen.append(files_after(dataset, range(4), 5, 3))
    with IndexedDatasetWriter(dataset.prefix, dataset.tokens.dtype) as writer:
        writer.add_documents(np.arange(99)[::-1], np.array([7, 30, 2, 60], np.int32))
        writer.publish()
    seen.append(files_after(IndexedDataset(dataset.prefix), range(4), 4, 3))
    assert seen == [1, 1, 2, 3, 4, 5]


def test_every_damage_of_a_file_is_detected(tmp_path: Path) -> None:
    built = []

    def load() -> list[list[int]]:
        def build() -> list[np.ndarray]:
            built.append(1)
            return [np.arange(3), np.arange(2)]

        return [array.tolist() for array in load_or_build(tmp_path, {"a": 1}, build)]

    expected = load()
    (path,) = orders(tmp_path)
    whole = path.read_bytes()
    damages = [whole[:at] + bytes([whole[at] ^ 0x41]) + whole[at + 1 :] for at in range(len(whole))]
    damages += [whole[:size] for size in range(0, len(whole), 7)] + [whole + b"\0" * 8]
    for number, damage in enumerate(damages, 2):
        path.write_bytes(damage)
        assert load() == expected and len(built) == number
        assert path.read_bytes() == whole


def test_a_killed_builder_does_not_block_others(tmp_path: Path) -> None:
    first = start_builder(tmp_path, 600)
    assert first.stdout is not None and first.stdout.readline() == "builds\n"
    second = start_builder(tmp_path, 0)
    time.sleep(0.2)
    assert second.poll() is None and orders(tmp_path) == []
    first.send_signal(signal.SIGKILL)
    first.wait()
    assert second.communicate(timeout=patient(60))[0].splitlines()[-1] == "[[0, 1, 2, 3, 4], []]"
    first.stdout.close()

"""An untrusted checkpoint: nothing in it runs, and nothing outside its directory is read."""

import ast
import os
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megatron_ladder.blueprint.boxes import Box
from megatron_ladder.checkpoint.loading import load_newest
from megatron_ladder.checkpoint.manifest import FileRecord, merge_manifest
from megatron_ladder.checkpoint.optimizer_state import Piece
from megatron_ladder.checkpoint.publish import write_manifest
from megatron_ladder.checkpoint.saving import _write_pieces
from megatron_ladder.checkpoint.tensor_file import file_checksum
from megatron_ladder.comm.group import CommGroup
from megatron_ladder.errors import UserError
from tests.unit.checkpoint.tiny_training import TinyState, header_of

PACKAGE = Path(__file__).resolve().parents[3] / "megatron_ladder"
RUNS_CODE = {"pickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
"""Modules whose readers run code from a file."""

CALLS = {"load": "torch.load", "save": "torch.save", "eval": "eval", "exec": "exec"}
"""What may run code, by its last word."""


class Payload:
    """Creates a directory when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> object:
        return os.mkdir, (str(self._marker),)


@pytest.mark.parametrize("files", ["weights", "optimizer"])
def test_a_pickle_with_a_forged_manifest_is_rejected(tmp_path: Path, files: str) -> None:
    """Size and checksum agree; only the content of the file is wrong."""
    directory, marker = tmp_path / "iter_0000010", tmp_path / "owned"
    directory.mkdir()
    tensors = TinyState(1).whole | {("rng.rank_00000.cpu", "rng"): torch.zeros(38)}
    pieces = [Piece(*key, tensor.shape, Box.whole(tensor.shape), tensor) for key, tensor in tensors.items()]
    index = _write_pieces(directory, 0, pieces)
    (record,) = [record for record in index.files if record.name.startswith(files)]
    file = directory / record.name
    # torch.load and pickle.load would both read it.
    file.write_bytes(pickle.dumps(Payload(marker)))
    index.files[index.files.index(record)] = FileRecord(record.name, file.stat().st_size, file_checksum(file))
    for other in ("mp_rank_00_model_states.pt", "pytorch_model.bin"):
        (directory / other).write_bytes(file.read_bytes())
    write_manifest(directory, merge_manifest(header_of(10), [index]))
    with pytest.raises(UserError, match="not a complete safetensors file"):
        load_newest(directory, TinyState(2), CommGroup.alone(), lambda checkpoint: [])
    assert not marker.exists()
    pickle.loads(file.read_bytes())
    assert marker.exists()


def code_readers(source: str) -> Iterator[str]:
    """Yield what may run code from a file in a source."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] in RUNS_CODE)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in RUNS_CODE:
            yield from (str(node.module) for alias in node.names if not alias.name.endswith("Error"))
        elif (name := getattr(node, "attr", getattr(node, "id", ""))) in CALLS and ast.unparse(node) == CALLS[name]:
            yield CALLS[name]
        elif isinstance(node, ast.keyword) and node.arg == "allow_pickle" and ast.unparse(node.value) != "False":
            yield "allow_pickle"


def test_nothing_in_the_package_unpickles() -> None:
    found = {str(path): list(code_readers(path.read_text())) for path in PACKAGE.rglob("*.py")}
    assert len(found) > 100 and {path: what for path, what in found.items() if what} == {}

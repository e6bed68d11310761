"""A checkpoint of a 70B model under ZeRO-3 on 1,024 ranks, without its 850 GB: size of the manifest, time to open it.

`pytest -s` prints the figures of docs/checkpoints.md.
"""

import math
import os
import resource
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from ladder_lab.bench.sizes import SIZES
from megatron_ladder.blueprint.boxes import Box
from megatron_ladder.blueprint.specs import TensorSpec
from megatron_ladder.blueprint.tensors import model_tensors
from megatron_ladder.checkpoint.loading import load_newest
from megatron_ladder.checkpoint.manifest import (
    BoxRecord,
    FileRecord,
    Index,
    Tiling,
    decode_manifest,
    encode_manifest,
    file_name,
    make_index,
    merge_manifest,
)
from megatron_ladder.comm.group import CommGroup
from tests.helpers.patience import patient
from tests.unit.checkpoint import tiny_training
from tests.unit.checkpoint.tiny_training import TinyState, on_ranks, save_at_once

RANKS, MODEL = 1024, SIZES["llama-70b"]
KINDS = ("weight", "exp_avg", "exp_avg_sq")


def index_of(tensors: list[TensorSpec], rank: int) -> Index:
    """Return what a rank sends to rank 0: ZeRO-3 cuts each parameter evenly."""
    written = {("rng", f"rng.rank_{rank:05d}.cpu"): ("uint8", Tiling((5056,), (BoxRecord((0,), (5056,), rank),)))}
    tilings = {}
    for shape in {tensor.shape for tensor in tensors}:
        length = -(-math.prod(shape) // RANKS)
        held = min(length, math.prod(shape) - rank * length)
        boxes = [box for box, _ in Box.whole(shape).cut(rank * length, held)] if held > 0 else []
        tilings[shape] = Tiling(shape, tuple(BoxRecord(box.offset, box.extent, rank) for box in boxes))
    for tensor in tensors:
        if tilings[tensor.shape].boxes:
            written |= {(kind, tensor.name): ("float32", tilings[tensor.shape]) for kind in KINDS}
    groups = ("weight", "exp_avg", "rng")
    return make_index([FileRecord(file_name(kind, rank), 10**9, f"xxh3_128:{rank:032x}") for kind in groups], written)


@pytest.mark.long
def test_the_manifest_of_a_thousand_ranks_is_small_and_opens_fast() -> None:
    planned = list(model_tensors(MODEL))
    parts = [index_of(planned, rank) for rank in range(RANKS)]
    start = time.process_time()
    data = encode_manifest(merge_manifest({"iteration": 1, "consumed_samples": 1, "model": MODEL.to_dict()}, parts))
    merged = time.process_time()
    manifest, table = decode_manifest(data)
    opened = time.process_time()
    rank = 517
    tensors = [stored for named in table.values() for stored in named.values()]
    own = [(stored, int(index)) for stored in tensors for index in np.flatnonzero(stored.writers == rank)]
    found = [stored.overlapping(stored.box(index)) for stored, index in own]
    resumed = time.process_time()
    assert len(own) == sum(len(parts[rank].tilings[record.tiling].boxes) for record in parts[rank].tensors) > 2000
    assert found == [[index] for _, index in own]
    assert len(table["weight"]) == len(table["exp_avg_sq"]) == 723 and len(table["rng"]) == RANKS
    sent = len(msgspec.json.encode(parts[rank]))
    assert len(data) < 2e6 and sent < 2e5
    assert resumed - merged < patient(2) and merged - start < patient(20)
    boxes, memory = sum(len(one.writers) for one in tensors), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(
        f"\n{boxes:,} boxes; bytes: manifest {len(data):,}, index of a rank {sent:,}; CPU "
        f"seconds: merge and encode {merged - start:.2f}, open {opened - merged:.2f}, find the boxes of a rank "
        f"{resumed - opened:.2f}; peak memory of rank 0 with all indices {memory / 2**10:.0f} MiB"
    )


def test_one_rank_reads_more_files_than_it_may_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny_training, "SHAPES", {"mlp.weight": (48, 2), "norm.weight": (48,)})
    ranks, (soft, hard) = 48, resource.getrlimit(resource.RLIMIT_NOFILE)
    saves = on_ranks(ranks, lambda world: save_at_once(tmp_path, 100, TinyState(1, world.rank, ranks), world))
    assert {save.error for save in saves} == {None}
    state, expected = TinyState(3), [span.master for span in TinyState(1).spans()]
    used = set(map(int, os.listdir("/proc/self/fd")))
    # The limit is one of the numbers of files: 32 are free.
    resource.setrlimit(resource.RLIMIT_NOFILE, ([number for number in range(soft) if number not in used][32], hard))
    try:
        load_newest(tmp_path, state, CommGroup.alone(), lambda checkpoint: [])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert all(map(torch.equal, (span.master for span in state.spans()), expected))

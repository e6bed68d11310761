"""The planner's bytes of a step, by kind and inside or across boxes, compared with what all ranks of dry runs send."""

from collections import Counter, defaultdict
from typing import NamedTuple

import pytest

from ladder_lab.cost.layout import Layout
from ladder_lab.cost.memory import Precision
from ladder_lab.cost.traffic import Sent, rank_traffic
from ladder_lab.dry_run import program as dry_run
from ladder_lab.dry_run.program import _all_programs, _run_ranks, _shortened
from ladder_lab.dry_run.replay import RankProgram
from megatron_ladder.config.run import parse_run
from megatron_ladder.train.inputs import read_dry_run
from tests.helpers.pool import GlooPools

SIZES = (
    "--train-iters 2 --lr 1e-3 --hidden-size 1024 --ffn-hidden-size 2048 --num-attention-heads 8 --seq-length 512 "
    "--vocab-size 4096 --global-batch-size 6"
).split()
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 512"
LATENTS = "--kv-lora-rank 96 --q-lora-rank 64 --qk-nope-head-dim 48 --qk-rope-head-dim 16 --v-head-dim 32"
DELTA = (
    "--experimental-attention-variant gated_delta_net --linear-attention-freq 4 --linear-num-key-heads 2 "
    "--linear-num-value-heads 8"
)
TOLERANCE = 0.005
"""Collectives of a few numbers that the planner leaves out."""
KINDS = {
    "tensor": "tensor",
    "head replicas": "tensor",
    "data": "data",
    "experts": "experts",
    "experts, data": "data",
    "pipeline pair": "pipeline",
    "pipeline, descending pair": "pipeline",
    "ends": "ends",
    "pipeline": "ends",
}
"""The planner's kind of what a group sends. With two stages, the ends are the pipeline."""


class Cluster(NamedTuple):
    ranks: int
    per_box: int
    flags: str
    is_slow: bool = False
    is_uneven: bool = False
    """Data-parallel ranks own unequal numbers of partial gradients, of which the planner has the mean."""


CLUSTERS = {
    "TP x DP smaller than a box": Cluster(
        16,
        8,
        "--bf16 --residual-mode ladder --num-layers 6 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 4",
        is_slow=True,
    ),
    "TP x DP is a box": Cluster(
        16,
        4,
        "--bf16 --num-layers 4 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 4",
        is_slow=True,
    ),
    "TP larger than a box": Cluster(
        16,
        2,
        "--bf16 --num-layers 3 --tensor-model-parallel-size 4 --pipeline-model-parallel-size 2 --sequence-parallel",
        is_slow=True,
    ),
    "boxes that TP straddles": Cluster(
        12,
        6,
        "--bf16 --residual-mode ladder-parallel --num-layers 2 --tensor-model-parallel-size 4 --sequence-parallel "
        "--recompute-granularity full",
        is_slow=True,
    ),
    "tied ends of uneven stages": Cluster(
        12,
        4,
        "--bf16 --residual-mode ladder --num-layers 4 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 3 "
        "--tie-embeddings",
    ),
    "chunks of stages, whose ends are in other boxes": Cluster(
        12,
        4,
        "--bf16 --residual-mode ladder --num-layers 7 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 3 "
        "--num-layers-per-virtual-pipeline-stage 2",
    ),
    "tied ends of two stages, ZeRO 0": Cluster(
        8,
        2,
        "--residual-mode parallel --num-layers 3 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 "
        "--tie-embeddings --zero-stage 0",
    ),
    "experts in every second layer": Cluster(
        8,
        8,
        f"--bf16 --residual-mode farskip --num-layers 5 {EXPERTS} --moe-shared-expert-intermediate-size 512 "
        "--moe-layers 1,3 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel",
        is_slow=True,
    ),
    "experts, boxes of three": Cluster(
        8,
        3,
        f"--bf16 --residual-mode shortcut --num-layers 3 {EXPERTS} --moe-shared-expert-intermediate-size 512 "
        "--moe-layers 0-2 --tensor-model-parallel-size 4 --pipeline-model-parallel-size 2",
        is_slow=True,
    ),
    "experts over tensor- and data-parallel ranks": Cluster(
        8,
        2,
        f"--bf16 --residual-mode farskip --num-layers 2 {EXPERTS} --moe-shared-expert-intermediate-size 512 "
        "--tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 4 --micro-batch-size 1 "
        "--global-batch-size 8",
    ),
    "experts over ranks of two stages, recomputed": Cluster(
        8,
        8,
        f"--bf16 --residual-mode ladder --num-layers 4 {EXPERTS} --moe-layers 1-3 --pipeline-model-parallel-size 2 "
        "--expert-model-parallel-size 2 --recompute-granularity full --micro-batch-size 1 --global-batch-size 16",
        is_slow=True,
    ),
    "latents, gates and experts": Cluster(
        8,
        2,
        f"--bf16 --residual-mode farskip --num-layers 3 {EXPERTS} --moe-shared-expert-intermediate-size 512 "
        f"--moe-layers 1,2 {LATENTS} --attention-output-gate --tensor-model-parallel-size 4 "
        "--pipeline-model-parallel-size 2",
    ),
    "latents, recomputed, ZeRO 2": Cluster(
        8,
        4,
        f"--residual-mode ladder-parallel --num-layers 2 {LATENTS} --tensor-model-parallel-size 2 --zero-stage 2 "
        "--recompute-granularity full --global-batch-size 8",
        is_uneven=True,
        is_slow=True,
    ),
    "key heads on several ranks, boxes of five": Cluster(
        8,
        5,
        "--bf16 --residual-mode ladder --num-layers 2 --num-query-groups 2 --add-qkv-bias "
        "--tensor-model-parallel-size 8",
    ),
    "key heads of gated DeltaNet on several ranks": Cluster(
        8,
        4,
        f"--bf16 --residual-mode farskip --num-layers 4 {DELTA} {EXPERTS} --moe-shared-expert-intermediate-size 512 "
        "--moe-shared-expert-gate --attention-output-gate --num-query-groups 2 --tensor-model-parallel-size 4 "
        "--pipeline-model-parallel-size 2",
        is_slow=True,
    ),
    "no tensor parallelism": Cluster(
        16,
        4,
        "--bf16 --residual-mode ladder-attention --num-layers 2 --pipeline-model-parallel-size 2 "
        "--global-batch-size 16",
    ),
    "no pipeline, ZeRO 0": Cluster(
        12, 6, "--num-layers 2 --tensor-model-parallel-size 2 --zero-stage 0 --global-batch-size 12"
    ),
    "no pipeline, ZeRO 2": Cluster(
        8, 4, "--bf16 --num-layers 2 --tensor-model-parallel-size 2 --zero-stage 2 --global-batch-size 8"
    ),
    "desynchronised streams": Cluster(
        8,
        6,
        "--bf16 --residual-mode desync --desync-interval 4 --num-layers 4 --tensor-model-parallel-size 2 "
        "--pipeline-model-parallel-size 2",
    ),
}


@pytest.fixture(autouse=True)
def preloaded(gloo_pools: GlooPools, monkeypatch: pytest.MonkeyPatch) -> None:
    """Share the imports of the other tests; the dry run sets the variable."""
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")


def recorded_traffic(program: RankProgram, per_box: int) -> dict[str, Sent]:
    """Return the bytes that a rank sends, with the planner's rings."""
    inside: Counter[str] = Counter()
    across: Counter[str] = Counter()
    for one in program.collectives:
        name, ranks = program.communicators[one.slot]
        others = len(ranks) - 1
        sent = {
            "all_reduce": 2 * others / len(ranks) * one.size,
            "reduce_scatter": others * one.size,
            "all_gather": others * one.size,
            "all_to_all": others / len(ranks) * one.size,
            "send": one.size,
            "recv": 0,
        }[one.kind]
        boxes = {rank // per_box for rank in ranks}
        (inside if len(boxes) == 1 else across)[KINDS.get(name.split(" #")[0], "others")] += sent
    return {kind: Sent(inside[kind], across[kind]) for kind in (*KINDS.values(), "others")}


@pytest.mark.parametrize(
    "cluster",
    [
        pytest.param(cluster, id=name, marks=pytest.mark.slow if cluster.is_slow else ())
        for name, cluster in CLUSTERS.items()
    ],
)
def test_planned_bytes_are_those_of_a_dry_run(monkeypatch: pytest.MonkeyPatch, cluster: Cluster) -> None:
    ranks, per_box, flags, *_ = cluster
    if cluster.is_uneven:
        monkeypatch.setattr(dry_run, "_distinct_ranks", lambda run: range(run.world_size))
    run = _shortened(read_dry_run(parse_run([*SIZES, *flags.split()]), ranks))
    steps = {
        rank: RankProgram(record.program.communicators, record.program.collectives[record.last_step :])
        for rank, record in _run_ranks(run).items()
    }
    precision: Precision = "bf16" if run.training.bf16 else "fp32"
    totals: defaultdict[int, list[tuple[float, float]]] = defaultdict(list)
    for rank, program in _all_programs(run, steps).items():
        sizes = run.training.seq_length, run.accumulation_steps, per_box, rank
        planned = rank_traffic(run.model, Layout.of(run), *sizes, precision)
        recorded = recorded_traffic(program, per_box)
        others = recorded.pop("others")
        assert sum(others) < TOLERANCE * sum(map(sum, recorded.values()))
        assert planned.keys() == recorded.keys()
        if cluster.is_uneven:
            tensor_rank = rank % run.parallel.tensor_model_parallel_size
            totals[tensor_rank].append((planned.pop("tensor").inside, recorded["tensor"].inside))
        for kind, sent in planned.items():
            assert sent == pytest.approx(recorded[kind], rel=TOLERANCE), (rank, kind)
    for of_replicas in totals.values():
        of_planner, of_ranks = map(sum, zip(*of_replicas, strict=True))
        assert of_planner == pytest.approx(of_ranks, rel=1e-3) and len(of_replicas) == 4

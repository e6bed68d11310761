"""The process mesh: the tensor-parallel, data-parallel, expert-parallel and pipeline-parallel groups of a rank.

Ranks are numbered as `arange(world).view(pipeline, data, tensor)`: neighbouring ranks, which a launcher puts on one
machine, are tensor-parallel, the dimension that communicates most. Expert-parallel ranks are neighbours on the data x
tensor grid of their stage, whatever its shape. The mesh is built once and passed on.

Every group has a separate communicator. Collectives of several communicators must be issued in the same order on all
ranks that share them; otherwise two ranks may each wait in a collective that the other has not started. The order is
the same because the one thread that runs the model at that time (autograd's during backward) issues all of them in
program order, and all ranks of a stage run the same program.

NCCL runs the messages between two ranks one after the other, in the order in which both start them, and each waits for
both ends. So messages to higher and to lower ranks have a group each: a rank that has started to receive can still send
in the other direction. NCCL creates the communicator of two ranks with their first message, for which the host of one
waits for that of the other, so `ProcessMesh.build` exchanges it, instead of the middle of the first step.

No process group is bound to a device (`device_id` of torch's functions): then one communicator, and one stream, would
carry all messages of a rank, and each would wait for those with other ranks before it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from megatron_ladder.comm.group import CommGroup
from megatron_ladder.comm.stream import ShardedStream, StreamLayout


@dataclass(frozen=True)
class ProcessMesh:
    """All groups that this rank belongs to."""

    world: CommGroup
    """Every rank."""
    tensor: CommGroup
    """Ranks that hold different slices of the same layers."""
    data: CommGroup
    """Ranks that hold the same slices, and process different samples."""
    pipeline: CommGroup
    """Ranks that hold the same slices of successive ranges of layers; messages in both directions are independent."""
    model: CommGroup
    """Ranks that together hold one model: tensor x pipeline."""
    ends: CommGroup
    """Ranks that hold the same slices of the first and of the last stage, which share tied embeddings."""
    experts: CommGroup
    """Ranks of a stage that hold different routed experts, and exchange tokens; this rank alone if tensor-parallel
    ranks divide the experts."""
    experts_data: CommGroup
    """Ranks that hold the same routed experts, or slices of them, and process different tokens."""
    head_replicas: Mapping[int, CommGroup] = field(default_factory=dict, hash=False)
    """By their number, neighbouring tensor-parallel ranks that hold the same key heads of some mixer."""
    sequence_parallel: bool = False
    """Whether a tensor-parallel rank holds only a part of the positions of the residual stream."""

    @property
    def stream(self) -> StreamLayout:
        """How the tensor-parallel ranks share the residual stream."""
        if self.sequence_parallel and self.tensor.size > 1:
            return ShardedStream(self.tensor)
        return StreamLayout(self.tensor)

    @staticmethod
    def single() -> "ProcessMesh":
        """Return the mesh of one process, which needs no torch.distributed."""
        alone = CommGroup.alone()
        return ProcessMesh(alone, alone, alone, alone, alone, alone, alone, alone)

    @staticmethod
    def build(
        tensor_parallel: int,
        pipeline_parallel: int = 1,
        head_replicas: Sequence[int] = (),
        timeout: timedelta | None = None,
        sequence_parallel: bool = False,
        tp_comm_max_ctas: int = 0,
        chunks: int = 1,
        device: torch.device | None = None,
        expert_parallel: int = 1,
    ) -> "ProcessMesh":
        """Create the groups; every rank of the default process group must make the same call.

        Args:
            head_replicas: numbers of tensor-parallel ranks that hold the same key heads of some mixer.
            timeout: of every collective; the default is torch's.
            tp_comm_max_ctas: maximum of multiprocessors per collective or message of the tensor-parallel,
                data-parallel, expert-parallel and pipeline groups on a GPU; 0 leaves it to NCCL.
            chunks: number of ranges of layers of a pipeline stage; with several, the last stage sends to the first.
            device: that of this rank's messages; the CPU by default.
            expert_parallel: number of ranks of a stage that divide the routed experts among them; a divisor or a
                multiple of `tensor_parallel`. With 1, the tensor-parallel ranks divide them.
        """
        world_size, rank = dist.get_world_size(), dist.get_rank()
        grid = torch.arange(world_size).view(pipeline_parallel, -1, tensor_parallel)
        # DeepSpeed needs a process group even for a group of one rank; only that rank has to create it.
        process_group = dist.group.WORLD
        if world_size > 1:
            process_group = dist.new_group([rank], timeout, use_local_synchronization=True)
        alone = CommGroup([rank], 0, process_group)

        def new_group(row: list[int], name: str, overlaps: bool) -> dist.ProcessGroup:
            options = _overlapped_group_options(tp_comm_max_ctas, timeout) if overlaps else None
            return dist.new_group(row, timeout, pg_options=options, group_desc=name)

        def group_of(rows: torch.Tensor, name: str, overlaps: bool = False, both_directions: bool = False) -> CommGroup:
            """Create a process group from each row of `rows`, and return the one that contains this rank."""
            mine = alone
            for row in rows.tolist() if rows.shape[1] > 1 else ():
                process_group = new_group(row, name, overlaps)
                descending = new_group(row, f"{name}, descending", overlaps) if both_directions else None
                if rank in row:
                    mine = CommGroup(row, row.index(rank), process_group, descending)
            return mine

        pipelines = grid.permute(1, 2, 0).reshape(-1, pipeline_parallel)
        pipeline = group_of(pipelines, "pipeline", overlaps=True, both_directions=True)
        tensor = group_of(grid.reshape(-1, tensor_parallel), "tensor", overlaps=True)
        data = group_of(grid.transpose(1, 2).reshape(-1, grid.shape[1]), "data", overlaps=True)
        experts, experts_data = alone, data
        if expert_parallel > 1:
            experts_grid = grid.reshape(pipeline_parallel, -1, expert_parallel)
            experts = group_of(experts_grid.flatten(0, 1), "experts", overlaps=True)
            if expert_parallel != tensor_parallel:
                with_same_experts = experts_grid.transpose(1, 2).flatten(0, 1)
                experts_data = group_of(with_same_experts, "experts, data", overlaps=True)
        mesh = ProcessMesh(
            world=CommGroup(range(world_size), rank, dist.group.WORLD),
            ends=group_of(pipelines[:, [0, -1]], "ends") if pipeline_parallel > 2 else pipeline,
            tensor=tensor,
            data=data,
            pipeline=pipeline,
            experts=experts,
            experts_data=experts_data,
            model=group_of(grid.transpose(0, 1).reshape(grid.shape[1], -1), "model"),
            head_replicas={count: group_of(grid.reshape(-1, count), "head replicas") for count in head_replicas},
            sequence_parallel=sequence_parallel,
        )
        _exchange_first_messages(pipeline, chunks, device)
        return mesh

    def describe(self) -> str:
        """Return a description of the grid for the log."""
        sizes = f"tensor {self.tensor.size} x pipeline {self.pipeline.size} x data {self.data.size}"
        cut = ", the sequence cut over the tensor ranks" if self.stream.shards > 1 else ""
        experts = ""
        if self.experts.size > 1:
            whole = " (expert-tensor-parallel size 1)" if self.tensor.size > 1 else ""
            experts = f", whole experts divided over {self.experts.size} ranks{whole}"
        return f"{self.world.size} process{'es' if self.world.size > 1 else ''}: {sizes}{cut}{experts}"


def _exchange_first_messages(pipeline: CommGroup, chunks: int, device: torch.device | None) -> None:
    """Exchange a message in each direction between the ranks that a step exchanges messages with.

    All ranks follow one order of the pairs, so they cannot wait in a circle. Pairs whose lower rank is even come first:
    they share no rank, so all of them connect at the same time, and then the others do.
    """
    pairs = [*pairwise(range(pipeline.size))]
    if chunks > 1 and pipeline.size > 2:
        pairs.append((0, pipeline.size - 1))
    message = torch.zeros(1, device=device)
    for lower, higher in sorted(pairs, key=lambda pair: pair[0] % 2):
        for source, target in ((lower, higher), (higher, lower)):
            if pipeline.rank == source:
                pipeline.start_send(message, target).wait()
            elif pipeline.rank == target:
                pipeline.start_receive(message, source).wait()


def _overlapped_group_options(max_ctas: int, timeout: timedelta | None) -> Any:
    """Return `pg_options` for a group whose collectives overlap with computation; None without NCCL.

    On a high-priority stream, a reduce gets the next multiprocessors that become free, before the waiting blocks of a
    product that was launched earlier. `max_ctas` bounds the multiprocessors of a collective, which the product that
    hides it cannot use; 0 leaves it to NCCL. Each group needs a new object, because torch writes to it, and expects the
    timeout here as well.
    """
    if dist.get_backend() != "nccl":
        return None
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    if max_ctas:
        options.config.max_ctas = max_ctas
    if timeout is not None:
        options._timeout = timeout
    return options

"""Builds one rank of a run on the meta device and runs two steps, in a process that does nothing else."""

import io
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

# Importing this module registers the backend "fake", whose groups of any size exist in one process.
from torch.testing._internal.distributed.fake_pg import FakeStore

from ladder_lab.cost.layout import Layout
from ladder_lab.dry_run.recorder import ExpertRows, Recorder
from ladder_lab.dry_run.replay import RankProgram
from megatron_ladder.comm.launch import RankInfo
from megatron_ladder.config.run import RunConfig
from megatron_ladder.data.batches import MicroBatch
from megatron_ladder.engine.build import build_engine, build_mesh, build_rank_model, start_deepspeed
from megatron_ladder.engine.state import ZeroOptimizer
from megatron_ladder.model.operations import with_norm
from megatron_ladder.train.setup import Trainer
from megatron_ladder.train.step import train_step

META = torch.device("meta")
STEPS = 2
"""The first step allocates what later ones keep; the last one is reported."""


class RankRecord(NamedTuple):
    """What a rank did."""

    program: RankProgram
    last_step: int
    """Number of collectives before the last step."""
    memory: dict[str, int]
    """Bytes by kind when the last step has most allocated."""
    waits: list[str]
    """Where the host waited for the device in the last step."""


class _FusedNorm(Function):
    """The allocations of a fused norm: it keeps its input, and one number per row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


def _norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return _FusedNorm.apply(x, weight)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    if v.shape[-1] > q.shape[-1]:
        # Flash attention has no kernel for wider values.
        return torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, True, scale=scale)[0]
    return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True, scale=scale)[0]


OPERATIONS = replace(with_norm(_norm), attend=_attend)
"""The operations that run on CUDA, where they differ from those on the meta device."""


def run_rank(run: RunConfig, rank: int) -> RankRecord:
    """Build a rank, run two steps, and return what it did. The process cannot run anything else afterwards."""
    # DeepSpeed prints its memory, of this host.
    sys.stdout = io.StringIO()
    recorder = Recorder(rank, _expert_rows(run))
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=run.world_size)
    # Only a GPU's driver can lock memory.
    torch.Tensor.pin_memory = lambda tensor: tensor  # type: ignore[method-assign, assignment, misc]
    if run.needs_deepspeed:
        start_deepspeed(RankInfo(rank, run.world_size, 0), META)
        from ladder_lab.dry_run.meta_device import use_meta_device

        use_meta_device(recorder.host_waits)
    memory = recorder.memory
    with recorder, memory.ignoring_temporaries_of(torch.optim.AdamW):
        # The run, as on its devices.
        mesh = build_mesh(run, META)
        model = build_rank_model(run, mesh, META, recorder.span, OPERATIONS)
        engine, _ = build_engine(run, model, mesh, META)
        trainer = Trainer(run, mesh, META, model, engine)
        if run.needs_deepspeed:
            from megatron_ladder.engine.deepspeed import DeepSpeedEngine

            assert isinstance(engine, DeepSpeedEngine)
            # Described on the meta device in a real run as well.
            memory.leave_out(chain(*getattr(engine.wrapped.optimizer, "round_robin_bit16_meta", ())))
        memory.mark("weights", [*model.parameters(), *(span.weight for span in engine.optimizer.spans())])

        def mark_gradients() -> tuple[float, ...]:
            memory.mark("gradients", [parameter.grad for parameter in model.parameters()])
            memory.mark("gradients", [gradient for _, gradient in engine.optimizer.gradients()])
            return ()

        # Its steps.
        start = 0
        last_step = 0
        for iteration in range(1, STEPS + 1):
            recorder.waits.clear()
            start = memory.position()
            last_step = len(recorder.program.collectives)
            train_step(trainer, _micro_batches(run), iteration, mark_gradients)
            if iteration == 1:
                memory.mark("optimizer", _optimizer_tensors(engine.optimizer))
                memory.mark_others("buffers")
    return RankRecord(recorder.program, last_step, memory.peak(start, "activations"), recorder.waits)


def _expert_rows(run: RunConfig) -> ExpertRows:
    layout = Layout.of(run)
    tokens = run.training.seq_length * run.training.micro_batch_size // layout.tensor
    return ExpertRows(layout.experts, tokens * run.model.moe_router_topk, layout.imbalance)


def _optimizer_tensors(optimizer: ZeroOptimizer) -> Iterator[Tensor]:
    yield from (span.flat_master for span in optimizer.spans())
    for values in optimizer.base.state.values():
        yield from (value for value in values.values() if isinstance(value, Tensor))


def _micro_batches(run: RunConfig) -> list[MicroBatch]:
    tokens = torch.zeros(run.training.micro_batch_size, run.training.seq_length, dtype=torch.int64)
    return [MicroBatch(tokens, tokens)] * run.accumulation_steps

"""Trainers for the process pools, built from a command line like those of the program, in an existing process group."""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from megatron_ladder.blueprint.boxes import Box
from megatron_ladder.blueprint.model import ModelConfig, head_replicas
from megatron_ladder.checkpoint.loading import load_newest
from megatron_ladder.checkpoint.saving import TrainingSave
from megatron_ladder.comm.group import CommGroup
from megatron_ladder.comm.launch import RankInfo
from megatron_ladder.config.run import RunConfig, parse_run, resolve_run
from megatron_ladder.data.batches import MicroBatch
from megatron_ladder.data.samples import SampleRows, Samples
from megatron_ladder.engine.build import build_engine, build_rank_model, start_deepspeed
from megatron_ladder.train.distillation import StoredTeacher, build_distillation
from megatron_ladder.train.guards import Guard
from megatron_ladder.train.profile import named_for_profiler
from megatron_ladder.train.reading import sample_batches
from megatron_ladder.train.setup import Trainer
from tests.helpers.sharded import Pieces, fill_slices, mesh_of, weight_pieces_of

CPU = torch.device("cpu")


@dataclass(frozen=True)
class TeacherInMemory:
    """A teacher with unsharded weights, which it provides as a directory would."""

    config: ModelConfig
    weights: Mapping[str, Tensor]

    def read_weight(self, name: str, box: Box, out: Tensor) -> None:
        out.copy_(self.weights[name][box.slices()])


SIZES = (
    "--num-layers 3 --hidden-size 32 --ffn-hidden-size 48 --num-attention-heads 4 --num-key-value-heads 2 "
    "--seq-length 12 --vocab-size 101 --init-method-std 0.3 --lr-warmup-iters 2 --min-lr 1e-4"
).split()


def rank_device() -> torch.device:
    """Return the GPU of a rank whose default process group uses NCCL, and the CPU for gloo."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.distributed.get_backend() == "nccl" else CPU


@functools.cache
def deepspeed_is_started() -> bool:
    """Start DeepSpeed once per process."""
    rank = torch.distributed.get_rank()
    start_deepspeed(RankInfo(rank, torch.distributed.get_world_size(), rank), rank_device())
    return True


def run_of(argv: Sequence[str], world_size: int) -> RunConfig:
    """Return the run of a valid command line."""
    settings = parse_run([*SIZES, *argv])
    return resolve_run(settings, settings.values["vocab_size"], world_size)


def build_trainer_here(
    argv: Sequence[str],
    weights: Mapping[str, Tensor] | None = None,
    wrap_data: Callable[[CommGroup], CommGroup] = lambda group: group,
    wrap_tensor: Callable[[CommGroup], CommGroup] = lambda group: group,
    teacher: TeacherInMemory | None = None,
) -> Trainer:
    """On each rank: return a trainer, with these unsharded weights if they are given, and its data-parallel groups and
    its tensor-parallel one replaced by what `wrap_data` and `wrap_tensor` return for them."""
    run, device = run_of(argv, torch.distributed.get_world_size()), rank_device()
    if run.needs_deepspeed:
        deepspeed_is_started()
    parallel = run.parallel
    tensor_parallel, stages = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    replicas = head_replicas(run.model, tensor_parallel)
    mesh = mesh_of(tensor_parallel, replicas, stages, parallel.tp_comm_max_ctas, parallel.expert_model_parallel_size)
    data = wrap_data(mesh.data)
    experts_data = data if mesh.experts_data is mesh.data else wrap_data(mesh.experts_data)
    mesh = replace(mesh, tensor=wrap_tensor(mesh.tensor), data=data, experts_data=experts_data)
    mesh = replace(mesh, sequence_parallel=run.parallel.sequence_parallel)
    mesh, span = named_for_profiler(run.profile, mesh)
    distillation = None
    if teacher is not None:
        distillation = build_distillation(run, StoredTeacher(Path(), teacher.config, teacher), mesh, device)
    model = build_rank_model(run, mesh, device, span, distillation=distillation)
    if weights is not None:
        with gathered(model.parameters(), written=True):
            fill_slices(model, weights)
    engine, adamw = build_engine(run, model, mesh, device)
    return Trainer(run, mesh, device, model, engine, adamw, guard=Guard(run.reliability))


def own_batches(trainer: Trainer, micro_batches: Sequence[tuple[Tensor, Tensor, Tensor]]) -> list[MicroBatch]:
    """Return this rank's micro-batches of a global batch, as the product reads them from rows with these ids and masks.

    All ranks call it alike.
    """
    assert len(micro_batches) == trainer.run.accumulation_steps * trainer.mesh.data.size, "not the global batch's size"
    with closing(sample_batches(trainer, _Rows(micro_batches), consumed_samples=0)) as batches:
        return next(batches)


class _Rows(Samples):
    """The rows of one global batch, again and again."""

    name = "rows of a test"
    has_loss_mask = True

    def __init__(self, micro_batches: Sequence[tuple[Tensor, Tensor, Tensor]]) -> None:
        tokens, labels, mask = (torch.cat(parts).numpy() for parts in zip(*micro_batches, strict=True))
        self.seq_length, self.token_dtype = tokens.shape[1], tokens.dtype
        # A sample's first token is no label.
        self._tokens = np.concatenate([tokens, labels[:, -1:]], axis=1)
        self._mask = np.concatenate([np.zeros_like(mask[:, :1]), mask], axis=1).astype(np.uint8)
        assert (self._tokens[:, 1:] == labels).all() and (self._mask[:, 1:] == mask).all()

    def fill(self, numbers: NDArray[np.int64], rows: NDArray[np.int64], out: SampleRows) -> None:
        assert out.loss_mask is not None
        chosen = numbers % len(self._tokens)
        out.tokens[rows], out.loss_mask[rows] = self._tokens[chosen], self._mask[chosen]


def weight_pieces(trainer: Trainer) -> Pieces:
    """Return every weight of this rank's part of the model, gathered if ZeRO-3 partitions it."""
    trainer.engine.optimizer.finish_step()
    with gathered(trainer.model.parameters()):
        return weight_pieces_of(trainer.model)


def gathered(parameters: Iterable[nn.Parameter], written: bool = False) -> AbstractContextManager[None]:
    """Gather parameters that ZeRO-3 partitions inside the block; `written`: keep changes made inside it."""
    import deepspeed

    partitioned = [parameter for parameter in parameters if hasattr(parameter, "ds_id")]
    context: AbstractContextManager[None] = deepspeed.zero.GatheredParameters(
        partitioned, modifier_rank=0 if written else None, enabled=bool(partitioned)
    )
    return context


def save_trainer(trainer: Trainer, save: Path, iteration: int) -> None:
    """On each rank: publish a checkpoint of the trainer's state."""
    header = {"iteration": iteration, "consumed_samples": 0, "model": trainer.run.model.to_dict()}
    world = trainer.mesh.world
    saving = TrainingSave(save, header, trainer.engine.optimizer, world, lambda directory: None)
    outcome = world.broadcast_object(saving.write(world.gather_objects))
    assert outcome.error is None, outcome.error


def load_trainer(trainer: Trainer, load: Path) -> None:
    """On each rank: load the newest checkpoint, which must be undamaged."""
    _, errors = load_newest(load, trainer.engine.optimizer, trainer.mesh.world, lambda checkpoint: [])
    assert errors == []

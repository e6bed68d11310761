"""Builds what a run computes with: process mesh, model, optimizer, DeepSpeed engine."""

import os
import socket
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn

from megatron_ladder.blueprint.model import key_value_replicas
from megatron_ladder.blueprint.partition import balanced_partition, uniform_partition
from megatron_ladder.blueprint.tensors import parameter_count
from megatron_ladder.comm.agreement import Peers
from megatron_ladder.comm.group import CommGroup
from megatron_ladder.comm.launch import Place, start_deepspeed, start_process_group
from megatron_ladder.comm.mesh import ProcessMesh
from megatron_ladder.config.run import RunConfig
from megatron_ladder.engine.adamw import build_adamw
from megatron_ladder.engine.learning_rate import LearningRateSchedule
from megatron_ladder.engine.mpu import DeepSpeedMpu
from megatron_ladder.engine.param_groups import parameter_groups
from megatron_ladder.engine.state import EngineState, engine_state
from megatron_ladder.errors import UserError
from megatron_ladder.model.language_model import LanguageModel
from megatron_ladder.model.operations import select_operations
from megatron_ladder.model.stack import StackOptions
from megatron_ladder.parallel.layout import ParallelModule, initialize
from megatron_ladder.train.guards import Guard
from megatron_ladder.train.inputs import RunInputs
from megatron_ladder.train.profile import named_for_profiler
from megatron_ladder.train.settings import shared_settings


@dataclass(frozen=True)
class Trainer:
    """Everything that a step needs."""

    run: RunConfig
    mesh: ProcessMesh
    device: torch.device
    model: LanguageModel
    engine: Any
    """DeepSpeed's engine around `model`; its pipeline engine if there are several stages."""
    state: EngineState
    schedule: LearningRateSchedule
    implementations: dict[str, str]
    """Which code computes the norm and the optimizer, and why."""
    peers: Peers = field(default_factory=Peers)
    """The hosts of all ranks."""
    eod_id: int | None = None
    """The data's end-of-document token, if it is known."""
    guard: Guard = field(default_factory=Guard)
    """What it knows of the steps before."""


def build_trainer(inputs: RunInputs, place: Place, peers: Peers) -> Trainer:
    """Joins the other processes and builds this rank's part; every rank must call it alike.

    The hosts of all ranks are noted in `peers` as soon as they are known.

    Raises:
        UserError: ranks were not started alike, or another one has found a mistake; --save is not the same for all;
            DeepSpeed does not take its configuration.
    """
    run = inputs.run
    if run.training.deterministic_mode:
        # cuBLAS reads it when its first handle is made.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    timeout_minutes = run.parallel.distributed_timeout_minutes
    device = start_process_group(place, timeout_minutes, shared_settings(inputs, place), peers)
    start_deepspeed(place, device)
    mesh = build_mesh(run)
    if run.checkpoint.save is not None:
        check_shared(run.checkpoint.save, mesh.world)
    model, norm = build_model(run, mesh, device)
    optimizer, adamw = build_optimizer(run, model, device)
    with naming_config(run.parallel.deepspeed_config):
        engine = build_engine(model, optimizer, inputs.deepspeed, mesh)
    return Trainer(
        run=run,
        mesh=mesh,
        device=device,
        model=model,
        engine=engine,
        state=engine_state(engine),
        schedule=build_schedule(run),
        implementations={"norm": norm, "optimizer": adamw},
        peers=peers,
        eod_id=inputs.eod_id,
        guard=Guard(run.reliability),
    )


def check_shared(save: Path, world: CommGroup) -> None:
    """Finds out whether all ranks see one another's files in the directory of checkpoints; all must call it.

    Raises:
        UserError: on every rank, with those that do not.
    """
    mark = save / f".{uuid.uuid4().hex}.tmp"
    if world.rank == 0:
        mark.touch()
    name = world.broadcast_object(mark.name)
    seen = world.gather_objects((socket.gethostname(), (save / name).exists()))
    if world.rank == 0:
        mark.unlink()
    apart = world.broadcast_object(list(dict.fromkeys(host for host, sees in seen if not sees)))
    if apart:
        raise UserError(
            f"--save {save}: {', '.join(apart)} and the host of rank 0 do not see the same directory: give one on a "
            "file system that all hosts share"
        )


@contextmanager
def naming_config(path: Path | None) -> Iterator[None]:
    """Turns what DeepSpeed refuses in its configuration into a UserError that names the file it came from."""
    # Not above: DeepSpeed is imported once it has its process group; pydantic comes with it.
    import pydantic
    from deepspeed.runtime.config import DeepSpeedConfigError

    try:
        yield
    except pydantic.ValidationError as error:
        if path is None:
            raise
        found = [f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors()]
        raise UserError(f"--deepspeed_config {path}: {error.title}: {'; '.join(found)}") from error
    except DeepSpeedConfigError as error:
        if path is None:
            raise
        raise UserError(f"--deepspeed_config {path}: {error}") from error


def build_mesh(run: RunConfig) -> ProcessMesh:
    """The process mesh of a run, in the default process group."""
    tensor_parallel = run.parallel.tensor_model_parallel_size
    return ProcessMesh.build(
        tensor_parallel,
        run.parallel.pipeline_model_parallel_size,
        kv_replicas=key_value_replicas(run.model, tensor_parallel),
        timeout=timedelta(minutes=run.parallel.distributed_timeout_minutes),
        sequence_parallel=run.parallel.sequence_parallel,
        tp_comm_max_ctas=run.parallel.tp_comm_max_ctas,
    )


def build_model(run: RunConfig, mesh: ProcessMesh, device: torch.device) -> tuple[LanguageModel, str]:
    """This rank's slices with their initial weights, and which norm they use.

    The weights are in fp32, or with ZeRO-3 partitioned already and in the precision of the run.
    """
    training = run.training
    operations, description = select_operations(training.norm_implementation, training.compile_sub_blocks, device)
    mesh, span = named_for_profiler(run, mesh)
    layers = partition(run)[mesh.pipeline.rank]
    recompute_layers = min(max(run.recompute_layers - layers.start, 0), len(layers))
    options = StackOptions(run.parallel.tp_overlap, recompute_layers, operations, span=span)
    if run.parallel.zero_stage == "3":
        model = LanguageModel(run.model, mesh, options, layers=layers, device=torch.device("meta"))
        initialize_partitioned(model, run, mesh, device)
    else:
        model = LanguageModel(run.model, mesh, options, layers=layers, device=device, seed=run.training.seed)
    return model, description


def partition(run: RunConfig) -> list[range]:
    """The layers of each pipeline stage."""
    model, stages = run.model, run.parallel.pipeline_model_parallel_size
    if run.parallel.pipeline_partition == "uniform":
        return uniform_partition(model.num_layers, stages)
    count = parameter_count(model)
    # With a tied head the last stage holds the embedding's matrix as well.
    head = count.final_norm + (count.embedding if model.tie_embeddings else count.lm_head)
    return balanced_partition(count.layers, count.embedding, head, stages)


def initialize_partitioned(model: nn.Module, run: RunConfig, mesh: ProcessMesh, device: torch.device) -> None:
    """Makes and partitions the weights of a model on the meta device, one module after another.

    So no rank ever holds more of the model than its part and one module, as is the use of ZeRO-3.
    """
    import deepspeed

    dtype = torch.bfloat16 if run.training.bf16 else torch.float16 if run.training.fp16 else torch.float32
    for module in model.modules():
        if isinstance(module, ParallelModule):
            module.allocate(device)
            initialize(module, run.training.seed)
            module.to(dtype)
            deepspeed.zero.Init(
                module=module,
                data_parallel_group=mesh.data.process_group,
                mem_efficient_linear=False,
                dtype=dtype,
            )


def build_optimizer(
    run: RunConfig, model: LanguageModel, device: torch.device
) -> tuple[torch.optim.Optimizer, str]:
    """AdamW over the model's parameters, and a sentence that says which implementation it is and why."""
    return build_adamw(
        parameter_groups(model, run.optimizer.weight_decay),
        run.optimizer,
        device,
        offload=run.parallel.offload_optimizer == "cpu",
        apex_counts_steps=run.parallel.zero_stage != "3",
    )


def build_engine(
    model: LanguageModel, optimizer: torch.optim.Optimizer, config: dict[str, Any], mesh: ProcessMesh
) -> Any:
    """DeepSpeed's engine around the model, in the process group that exists."""
    import deepspeed

    if mesh.pipeline.size > 1:
        from megatron_ladder.engine.stages import build_pipeline_engine

        return build_pipeline_engine(model, optimizer, config, mesh)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=config, mpu=DeepSpeedMpu(mesh), dist_init_required=False
    )
    return engine


def build_schedule(run: RunConfig) -> LearningRateSchedule:
    """The learning rate of every step."""
    optimizer = run.optimizer
    decay_iters = run.training.train_iters if optimizer.lr_decay_iters is None else optimizer.lr_decay_iters
    return LearningRateSchedule(
        lr=optimizer.lr,
        min_lr=optimizer.min_lr,
        decay_style=optimizer.lr_decay_style,
        decay_iters=decay_iters,
        warmup_iters=optimizer.lr_warmup_iters,
        wsd_decay_iters=optimizer.lr_wsd_decay_iters or max(1, decay_iters // 10),
        wsd_decay_style=optimizer.lr_wsd_decay_style,
    )

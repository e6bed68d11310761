"""Builds what a run computes with: process mesh, model, optimizer, DeepSpeed engine."""

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import nn

from megatron_ladder.checkpoint.engine_state import EngineState, engine_state
from megatron_ladder.comm.launch import Place, start_deepspeed, start_process_group
from megatron_ladder.comm.mesh import ProcessMesh
from megatron_ladder.comm.mpu import DeepSpeedMpu
from megatron_ladder.config.model import key_value_replicas
from megatron_ladder.config.run import RunConfig
from megatron_ladder.model.language_model import LanguageModel
from megatron_ladder.model.norm import select_norm
from megatron_ladder.model.stack import StackOptions
from megatron_ladder.optim.adamw import build_adamw
from megatron_ladder.optim.param_groups import parameter_groups
from megatron_ladder.optim.schedule import LearningRateSchedule
from megatron_ladder.parallel.layout import ParallelModule, initialize
from megatron_ladder.train.inputs import RunInputs


@dataclass(frozen=True)
class Trainer:
    """Everything that a step needs."""

    run: RunConfig
    mesh: ProcessMesh
    device: torch.device
    model: LanguageModel
    engine: Any
    """DeepSpeed's engine around `model`."""
    state: EngineState
    schedule: LearningRateSchedule
    implementations: dict[str, str]
    """Which code computes the norm and the optimizer, and why."""


def build_trainer(inputs: RunInputs, place: Place) -> Trainer:
    """Joins the other processes and builds this rank's part; every rank must call it alike."""
    run = inputs.run
    if run.training.deterministic_mode:
        # cuBLAS reads it when its first handle is made.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    device = start_process_group(place, run.parallel.distributed_timeout_minutes)
    start_deepspeed(place, device)
    mesh = build_mesh(run)
    model, norm = build_model(run, mesh, device)
    optimizer, adamw = build_optimizer(run, model, device)
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
    )


def build_mesh(run: RunConfig) -> ProcessMesh:
    """The process mesh of a run, in the default process group."""
    tensor_parallel = run.parallel.tensor_model_parallel_size
    return ProcessMesh.build(
        tensor_parallel,
        run.parallel.pipeline_model_parallel_size,
        kv_replicas=key_value_replicas(run.model, tensor_parallel),
        timeout=timedelta(minutes=run.parallel.distributed_timeout_minutes),
    )


def build_model(run: RunConfig, mesh: ProcessMesh, device: torch.device) -> tuple[LanguageModel, str]:
    """This rank's slices with their initial weights, and which norm they use.

    The weights are in fp32, or with ZeRO-3 partitioned already and in the precision of the run.
    """
    norm, description = select_norm(run.training.norm_implementation, device)
    options = StackOptions(tp_overlap=run.parallel.tp_overlap, recompute_layers=run.recompute_layers, norm=norm)
    if run.parallel.zero_stage == "3":
        described = LanguageModel(run.model, mesh, options, device=torch.device("meta"))
        initialize_partitioned(described, run, mesh, device)
        return described, description
    return LanguageModel(run.model, mesh, options, device=device, seed=run.training.seed), description


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

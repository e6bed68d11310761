"""Builds what a run computes with: process mesh, model, optimizer and DeepSpeed engine."""

import importlib
import os
import sys
import warnings
from datetime import timedelta
from functools import partial
from types import ModuleType
from typing import Any

import torch

from megatron_ladder.blueprint.model import key_value_replicas
from megatron_ladder.blueprint.tensors import balanced_partition, parameter_count, uniform_partition
from megatron_ladder.comm.launch import RankInfo
from megatron_ladder.comm.mesh import ProcessMesh
from megatron_ladder.comm.spans import Span, no_span
from megatron_ladder.config.run import RunConfig
from megatron_ladder.engine.engine import Engine
from megatron_ladder.engine.graph import CapturedPasses
from megatron_ladder.engine.muon import MuonWithAdamW
from megatron_ladder.engine.optimizer import build_optimizer, parameter_groups
from megatron_ladder.engine.sharded import ShardedOptimizer
from megatron_ladder.errors import UserError
from megatron_ladder.model.experts import waits_for_choices
from megatron_ladder.model.language_model import Distillation, LanguageModel
from megatron_ladder.model.operations import ExpertOptions, Operations, select_operations
from megatron_ladder.model.stack import StackOptions
from megatron_ladder.parallel.layout import ParallelModule, initialize


def import_deepspeed() -> ModuleType:
    """Import DeepSpeed without MLflow, for its autotuner, and torch's compiler, for its Muon: both take seconds."""
    is_hidden = "mlflow" not in sys.modules
    if is_hidden:
        sys.modules["mlflow"] = None  # type: ignore[assignment]
    try:
        deepspeed = importlib.import_module("deepspeed")
    finally:
        if is_hidden:
            del sys.modules["mlflow"]
    compiler = importlib.import_module("deepspeed.runtime.compiler")
    compiler.compile = lambda: compiler.dummy_decorator  # type: ignore[attr-defined]
    return deepspeed


def start_deepspeed(place: RankInfo, device: torch.device) -> None:
    """Make DeepSpeed use the existing process group; nothing may have imported DeepSpeed before.

    On a CPU, DeepSpeed would compile an operator for shared-memory collectives here. A build that is killed leaves a
    lock that blocks all later runs, and nothing in this package uses the operator, so it is never built.
    """
    # DeepSpeed reads these variables; without the first it would search for a device.
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    os.environ.setdefault("LOCAL_RANK", str(place.local_rank))
    deepspeed = import_deepspeed()
    # Imported by its full name, because the attribute `deepspeed.comm.torch` is torch itself.
    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None  # type: ignore[attr-defined]
    deepspeed.init_distributed(dist_init_required=False, verbose=False)
    # ZeRO-3 calls these functions by deprecated names; users cannot change that.
    for name in ("all_gather_into_tensor", "reduce_scatter_tensor"):
        warnings.filterwarnings("ignore", f".torch.distributed.{name}. is deprecated", FutureWarning)


def build_mesh(run: RunConfig) -> ProcessMesh:
    """Return the process mesh of a run, in the default process group."""
    tensor_parallel = run.parallel.tensor_model_parallel_size
    return ProcessMesh.build(
        tensor_parallel,
        run.parallel.pipeline_model_parallel_size,
        kv_replicas=key_value_replicas(run.model, tensor_parallel),
        timeout=timedelta(minutes=run.parallel.distributed_timeout_minutes),
        sequence_parallel=run.parallel.sequence_parallel,
        tp_comm_max_ctas=run.parallel.tp_comm_max_ctas,
    )


def partition(run: RunConfig) -> list[range]:
    """Return the layers of each pipeline stage."""
    model, stages = run.model, run.parallel.pipeline_model_parallel_size
    if run.parallel.pipeline_partition == "uniform":
        return uniform_partition(model.num_layers, stages)
    count = parameter_count(model)
    # If the embedding is tied to the head, the last stage has a copy of its matrix.
    head = count.final_norm + (count.embedding if model.tie_embeddings else count.lm_head)
    return balanced_partition(count.layers, count.embedding, head, stages)


def compute_dtype(run: RunConfig) -> torch.dtype:
    """Return the precision in which a run computes."""
    return torch.bfloat16 if run.training.bf16 else torch.float32


def build_model(
    run: RunConfig,
    mesh: ProcessMesh,
    device: torch.device,
    span: Span = no_span,
    operations: Operations | None = None,
    distillation: Distillation | None = None,
) -> tuple[LanguageModel, str]:
    """Return this rank's initial model, fp32 (ZeRO-3: partitioned, in the run's precision), and its kind of norm.

    `operations` replace those of the flags. On the meta device, weights are not initialised.
    """
    training, description = run.training, "given"
    if operations is None:
        operations, description = select_operations(training.norm_implementation, training.compile_sub_blocks, device)
    layers = partition(run)[mesh.pipeline.rank]
    recompute_layers = min(max(run.recompute_layers - layers.start, 0), len(layers))
    options = StackOptions(run.parallel.tp_overlap, recompute_layers, operations, span=span)
    build = partial(
        LanguageModel,
        run.model,
        mesh,
        options,
        layers=layers,
        z_loss_coeff=training.z_loss_coeff,
        experts=ExpertOptions(
            training.moe_aux_loss_coeff,
            training.moe_router_load_balancing_type,
            training.moe_z_loss_coeff,
            run.parallel.expert_sharding,
        ),
        distillation=distillation,
    )
    if run.parallel.zero_stage != "3":
        seed = None if device.type == "meta" else training.seed
        return build(device=device, seed=seed), description

    import deepspeed

    model, dtype = build(device=torch.device("meta")), compute_dtype(run)
    # One module after another, so that no rank ever holds more than its partition and one module.
    for module in model.modules():
        if isinstance(module, ParallelModule):
            module.allocate(device)
            if device.type != "meta":
                initialize(module, training.seed)
            module.to(dtype)
            group = mesh.data.process_group
            deepspeed.zero.Init(module=module, data_parallel_group=group, mem_efficient_linear=False, dtype=dtype)
    return model, description


def build_engine(
    run: RunConfig, model: LanguageModel, config: dict[str, Any], mesh: ProcessMesh, device: torch.device
) -> tuple[Engine, str]:
    """Return the engine and a description of its optimizer; raises UserError for missing apex."""
    kind: type[Engine] = Engine
    if mesh.pipeline.size > 1:
        # Imported late, because DeepSpeed must not be imported before the process group exists.
        from megatron_ladder.engine.pipeline import PipelinedEngine

        kind = PipelinedEngine
    parallel, groups = run.parallel, parameter_groups(model, run.optimizer)
    offload, apex_counts_steps = parallel.offload_optimizer == "cpu", parallel.zero_stage != "3"
    sharded = None
    if run.shards_optimizer:
        sharded = ShardedOptimizer(
            model, groups, mesh, compute_dtype(run), config["zero_optimization"]["reduce_bucket_size"]
        )
        groups = sharded.groups
    optimizer, description = build_optimizer(
        groups, run.optimizer, device, offload, apex_counts_steps, compute_dtype(run)
    )
    if sharded is not None:
        sharded.optimizer = optimizer
    engine = kind(model, sharded or optimizer, config, mesh, device)
    graphs = run.training.cuda_graph
    if graphs == "auto" and (mesh.pipeline.size > 1 or run.data.reset_attention_mask or run.profile.profile):
        graphs = "false"
    # Under ZeRO-3, there would be no whole matrices of experts to look at.
    if sharded is not None and device.type == "cuda" and graphs != "false":
        if not waits_for_choices(model):
            engine.passes = CapturedPasses(model, sharded, mesh.world, measures=graphs == "auto")
        elif graphs == "true":
            raise UserError(
                "--cuda-graph: the host would wait for the choice of experts: leave it out, or use --bf16, widths of "
                "experts and of the model that are multiples of 8 on a rank, and a GPU of capability 9.x or 10.x"
            )
    if isinstance(optimizer, MuonWithAdamW):
        optimizer.distribute(engine.state.spans(), mesh.world)
    return engine, description

"""Builds what a run computes with: process mesh, model, optimizer and engine."""

import os
from datetime import timedelta

import torch

from megatron_ladder.blueprint.model import head_replicas
from megatron_ladder.blueprint.tensors import balanced_partition, parameter_count, uniform_partition
from megatron_ladder.comm.launch import RankInfo
from megatron_ladder.comm.mesh import ProcessMesh
from megatron_ladder.comm.spans import Span, no_span
from megatron_ladder.config.run import RunConfig
from megatron_ladder.engine.deepspeed_json import bucket_numbers, deepspeed_json
from megatron_ladder.engine.engine import Engine
from megatron_ladder.engine.graph import CapturedPasses
from megatron_ladder.engine.optimizer import Updates, build_optimizer, distribute_matrices, parameter_groups
from megatron_ladder.engine.sharded import ShardedOptimizer
from megatron_ladder.errors import Problem, UserError
from megatron_ladder.model.experts import waits_for_choices
from megatron_ladder.model.language_model import Distillation, LanguageModel
from megatron_ladder.model.mtp import MTPOptions
from megatron_ladder.model.operations import ExpertOptions, Operations, select_operations
from megatron_ladder.model.stack import StackOptions
from megatron_ladder.parallel.layout import ParallelModule, initialize


def start_deepspeed(rank_info: RankInfo, device: torch.device) -> None:
    """Make DeepSpeed use the existing process group; nothing may have imported DeepSpeed before."""
    # DeepSpeed reads these variables; without the first it would search for a device.
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    os.environ.setdefault("LOCAL_RANK", str(rank_info.local_rank))
    from megatron_ladder.engine.deepspeed import adopt_process_group

    adopt_process_group()


def build_mesh(run: RunConfig, device: torch.device) -> ProcessMesh:
    """Return the process mesh of a run on this rank's device, in the default process group."""
    tensor_parallel = run.parallel.tensor_model_parallel_size
    return ProcessMesh.build(
        tensor_parallel,
        run.parallel.pipeline_model_parallel_size,
        head_replicas=head_replicas(run.model, tensor_parallel),
        timeout=timedelta(minutes=run.parallel.distributed_timeout_minutes),
        sequence_parallel=run.parallel.sequence_parallel,
        tp_comm_max_ctas=run.parallel.tp_comm_max_ctas,
        chunks=run.chunks,
        device=device,
        expert_parallel=run.parallel.expert_model_parallel_size,
    )


def partition(run: RunConfig) -> list[range]:
    """Return the layers of each chunk of the pipeline, the first ones on the first stage; by default one per stage."""
    model = run.model
    stages = run.parallel.pipeline_model_parallel_size * run.chunks
    if run.parallel.pipeline_partition == "uniform":
        return uniform_partition(model.num_layers, stages)
    count = parameter_count(model)
    # If a head reads the embedding, the last stage has a copy of its matrix.
    copied = count.embedding if model.tie_embeddings or model.mtp_num_layers else 0
    heads = count.final_norm + count.lm_head + copied + count.mtp
    return balanced_partition(count.layers, count.embedding, heads, stages)


def compute_dtype(run: RunConfig) -> torch.dtype:
    """Return the precision in which a run computes."""
    return torch.bfloat16 if run.training.bf16 else torch.float32


def build_rank_model(
    run: RunConfig,
    mesh: ProcessMesh,
    device: torch.device,
    span: Span = no_span,
    operations: Operations | None = None,
    distillation: Distillation | None = None,
) -> LanguageModel:
    """Return this rank's initial model, fp32 (ZeRO-3: partitioned, in the run's precision).

    `operations` replace those of the flags. On the meta device, weights are not initialised.
    """
    training = run.training
    if operations is None:
        operations, _ = select_operations(
            training.norm_implementation, training.compile_sub_blocks, device, training.linear_attention_implementation
        )
    chunks = partition(run)[mesh.pipeline.rank :: mesh.pipeline.size]
    recompute_layers = sum(layer < run.recompute_layers for layers in chunks for layer in layers)
    options = StackOptions(
        run.parallel.tp_overlap,
        recompute_layers,
        operations,
        span=span,
        # DeepSpeed takes every gradient where its weight's backward ends.
        late_weight_gradients=not run.needs_deepspeed,
    )
    is_partitioned = run.parallel.zero_stage == "3"
    model = LanguageModel(
        run.model,
        mesh,
        options,
        chunks=chunks,
        device=torch.device("meta") if is_partitioned else device,
        seed=None if is_partitioned or device.type == "meta" else training.seed,
        z_loss_coeff=training.z_loss_coeff,
        experts=ExpertOptions(
            training.moe_aux_loss_coeff,
            training.moe_router_load_balancing_type,
            training.moe_z_loss_coeff,
            run.parallel.expert_sharding,
            run.parallel.moe_expert_capacity,
        ),
        distillation=distillation,
        mtp=MTPOptions(training.mtp_loss_scaling_factor, training.mtp_detach_heads, training.mtp_depths),
    )
    if not is_partitioned:
        return model

    from megatron_ladder.engine.deepspeed import partition_parameters

    dtype = compute_dtype(run)
    # One module after another, so that no rank ever holds more than its partition and one module; those inside others
    # first, because DeepSpeed takes a module with all that is inside, and leaves out what it has partitioned.
    for module in reversed([*model.modules()]):
        if isinstance(module, ParallelModule):
            module.allocate(device)
            if device.type != "meta":
                initialize(module, training.seed, recurse=False)
            module.to(dtype)
            partition_parameters(module, mesh.data, dtype)
    return model


def build_engine(run: RunConfig, model: LanguageModel, mesh: ProcessMesh, device: torch.device) -> tuple[Engine, str]:
    """Return the engine and a description of its optimizer; raises UserError for missing apex."""
    groups = parameter_groups(model, run.optimizer)
    dtype = compute_dtype(run)
    engine: Engine
    if run.needs_deepspeed:
        from megatron_ladder.engine.deepspeed import DeepSpeedEngine

        offloads = run.parallel.offload_optimizer == "cpu"
        updates = Updates(device, dtype, offloads, in_parts=run.parallel.zero_stage == "3")
        optimizer, description = build_optimizer(groups, run.optimizer, updates)
        engine = DeepSpeedEngine(model, optimizer, deepspeed_json(run), mesh, device)
    else:
        shards = run.parallel.zero_stage != "0"
        sharded = ShardedOptimizer(model, groups, mesh, dtype, bucket_numbers(run), shards)
        optimizer, description = build_optimizer(sharded.groups, run.optimizer, Updates(device, dtype))
        sharded.base = optimizer
        engine = Engine(model, sharded, mesh, device)
        if _captures(run, model, device):
            engine.passes = CapturedPasses(model, sharded, mesh.world, measures=run.training.cuda_graph == "auto")
    distribute_matrices(engine.optimizer, mesh.world)
    return engine, description


def _captures(run: RunConfig, model: LanguageModel, device: torch.device) -> bool:
    """Return whether to capture the passes of a step; raises UserError if --cuda-graph true cannot."""
    choice = run.training.cuda_graph
    if choice == "false" or device.type != "cuda":
        return False
    if choice == "auto" and not run.captures_by_default:
        return False
    teacher = [] if model.distillation is None else [model.distillation.teacher]
    if not any(map(waits_for_choices, (model, *teacher))):
        return True
    if choice == "auto":
        return False
    fix = (
        "leave it out, or use {bf16}, widths of experts and of the model that are multiples of 8 on a rank, and a GPU "
        "of capability 9.x or 10.x"
    )
    raise UserError(Problem({"cuda_graph": None}, "{}: the host would wait for the choice of experts", fix))

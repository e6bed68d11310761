"""Starts a run: joins the other processes, compares settings with theirs, and builds what a step needs."""

import hashlib
import json
import os
import platform
import socket
import uuid
from dataclasses import dataclass, field
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from megatron_ladder import __version__
from megatron_ladder.comm.agreement import Peers
from megatron_ladder.comm.group import CommGroup
from megatron_ladder.comm.launch import RankInfo, start_process_group
from megatron_ladder.comm.mesh import ProcessMesh
from megatron_ladder.config.run import RunConfig
from megatron_ladder.config.sections import ParallelConfig
from megatron_ladder.engine.build import build_engine, build_mesh, build_rank_model, start_deepspeed
from megatron_ladder.engine.deepspeed_json import read_deepspeed_config
from megatron_ladder.engine.engine import Engine
from megatron_ladder.errors import Problem, UserError
from megatron_ladder.model.language_model import LanguageModel
from megatron_ladder.model.operations import select_operations
from megatron_ladder.progress import print_rank_0
from megatron_ladder.train.distillation import build_distillation
from megatron_ladder.train.guards import Guard
from megatron_ladder.train.inputs import RunInputs
from megatron_ladder.train.profile import named_for_profiler


@dataclass(frozen=True)
class Trainer:
    """Everything that a training step needs."""

    run: RunConfig
    mesh: ProcessMesh
    device: torch.device
    model: LanguageModel
    engine: Engine
    optimizer_description: str = ""
    """Which implementation updates the weights."""
    norm_description: str = ""
    """Which implementation computes norms."""
    peers: Peers = field(default_factory=Peers)
    eod_id: int | None = None
    guard: Guard = field(default_factory=Guard)
    _host_groups: dict[tuple[int, ...], CommGroup] = field(default_factory=dict)

    def on_host(self, group: CommGroup) -> CommGroup:
        """Return a group of the same ranks in whose collectives the device takes no part; all of them must call it."""
        if self.device.type == "cpu":
            return group
        if group.ranks not in self._host_groups:
            timeout = timedelta(minutes=self.run.parallel.distributed_timeout_minutes)
            self._host_groups[group.ranks] = group.over_gloo(timeout)
        return self._host_groups[group.ranks]


def build_trainer(inputs: RunInputs, rank_info: RankInfo, peers: Peers) -> Trainer:
    """Join the other processes and build this rank's part; every rank must call it. `peers` receives all ranks' hosts.

    Raises UserError if another rank has an error, other settings or another --save, or the teacher cannot be read.
    """
    run = inputs.run
    if run.training.deterministic_mode:
        # cuBLAS reads this variable when its first handle is created.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        # NVLink switches add in any order. NCCL reads this with its first group; torch would leave out only NVLS.
        os.environ.setdefault("NCCL_ALGO", "^NVLS,NVLSTree")
        torch.use_deterministic_algorithms(True)
    device = rank_info.device()
    training = run.training
    operations, norm = select_operations(
        training.norm_implementation, training.compile_sub_blocks, device, training.linear_attention_implementation
    )
    settings = _shared_settings(inputs, device, norm)
    device = start_process_group(rank_info, run.parallel.distributed_timeout_minutes, settings, peers)
    if run.needs_deepspeed:
        start_deepspeed(rank_info, device)
    _warn_about_one_queue(run.parallel, rank_info, device)
    mesh, span = named_for_profiler(run.profile, build_mesh(run, device))
    if run.checkpoint.save is not None:
        _check_shared(run.checkpoint.save, mesh.world)
    teacher = inputs.teacher
    distillation = None if teacher is None else build_distillation(run, teacher, mesh, device)
    model = build_rank_model(run, mesh, device, span, operations, distillation)
    engine, optimizer = build_engine(run, model, mesh, device)
    peers.pipeline = mesh.pipeline
    guard = Guard(run.reliability)
    return Trainer(run, mesh, device, model, engine, optimizer, norm, peers, inputs.eod_id, guard)


def _warn_about_one_queue(parallel: ParallelConfig, rank_info: RankInfo, device: torch.device) -> None:
    """Print a warning if the GPU has one queue, in which a wait of one stream holds up the work of all others.

    Megatron requires it for its order of launches; here, only the waits of these two flags are put before other work.
    """
    if device.type != "cuda" or os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") != "1":
        return
    stages = parallel.pipeline_model_parallel_size
    uses: dict[str, object] = {"sequence_parallel": None} if parallel.sequence_parallel else {}
    if stages > 1:
        uses["pipeline_model_parallel_size"] = stages
    if uses:
        cause = " and ".join(f"{{{name}}}" for name in uses)
        reason = f"CUDA_DEVICE_MAX_CONNECTIONS=1: with {cause}, computation waits for communication that it could hide"
        print_rank_0(f"*** {Problem(uses, reason, 'unset the variable')} ***", rank_info.rank)


def _check_shared(save: Path, world: CommGroup) -> None:
    """Raise UserError on every rank unless all ranks see the same directory; all ranks must call it."""
    mark = save / f".{uuid.uuid4().hex}.tmp"
    if world.rank == 0:
        mark.touch()
    name = world.broadcast_object(mark.name)
    seen = world.gather_objects((socket.gethostname(), (save / name).exists()))
    if world.rank == 0:
        mark.unlink()
    apart = world.broadcast_object(list(dict.fromkeys(host for host, sees in seen if not sees)))
    if apart:
        reason = "{}: {hosts} and the host of rank 0 do not see the same directory"
        fix = "use a directory on a file system that all hosts share"
        raise UserError(Problem({"save": save}, reason, fix, hosts=", ".join(apart)))


def _shared_settings(inputs: RunInputs, device: torch.device, norm: str) -> dict[str, Any]:
    """Return all settings that must be equal on every process, JSON-able, by the templates of their names."""
    run = inputs.run
    settings = {f"{{{name}}}": value for name, value in inputs.values.items()}
    if run.parallel.deepspeed_config is not None:
        config = read_deepspeed_config(run.parallel.deepspeed_config)
        settings |= {f"file for DeepSpeed: {key}": value for key, value in config.items()}
    data = dict(inputs.data)
    if inputs.stream is not None:
        # There may be many sources, so only their checksum is exchanged.
        sources = json.dumps(inputs.stream.sources, sort_keys=True).encode()
        data["stream"] = inputs.stream.cut() | {"sources_sha256": hashlib.sha256(sources).hexdigest()}
    settings |= {f"data: {name}": value for name, value in data.items()}
    if inputs.teacher is not None:
        settings |= {f"teacher: {key}": value for key, value in inputs.teacher.config.to_dict().items()}
    if run.needs_deepspeed:
        settings["version of deepspeed"] = version("deepspeed")
    return settings | {
        # Ranks with other kernels round differently, so their copies of replicated weights would drift apart.
        "implementation of the norm": norm.partition(" (")[0],
        "newest checkpoint": None if inputs.checkpoint is None else inputs.checkpoint.directory.name,
        "device": device.type,
        "version of Python": ".".join(platform.python_version_tuple()[:2]),
        "version of torch": torch.__version__,
        "version of megatron_ladder": __version__,
    }

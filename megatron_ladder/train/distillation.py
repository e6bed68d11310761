"""The teacher of --distill-from: found and checked before a process group exists, then built on every rank."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from megatron_ladder.blueprint.model import ModelConfig, head_replicas, tensor_parallel_errors
from megatron_ladder.checkpoint.format import Checkpoint, is_hf_directory, reporting_os_errors
from megatron_ladder.checkpoint.hf_directory import open_hf_directory
from megatron_ladder.checkpoint.loading import WeightSource, load_weights
from megatron_ladder.comm.agreement import raising_on_all_ranks
from megatron_ladder.comm.group import CommGroup
from megatron_ladder.comm.mesh import ProcessMesh
from megatron_ladder.config.run import RunConfig
from megatron_ladder.engine.build import compute_dtype
from megatron_ladder.errors import Problem
from megatron_ladder.files import check_directory
from megatron_ladder.model.language_model import Distillation, LanguageModel
from megatron_ladder.model.operations import select_operations
from megatron_ladder.model.stack import StackOptions
from megatron_ladder.progress import print_if_possible
from megatron_ladder.tokenizers.copies import find_tokenizer
from megatron_ladder.tokenizers.kinds import Tokenizer, same_tokenizer


@dataclass(frozen=True)
class StoredTeacher:
    """A model on disk whose weights have not been read."""

    directory: Path
    config: ModelConfig
    weights: WeightSource
    tokenizer: Tokenizer | None = None
    """The tokenizer in its directory, if there is one."""


def find_teacher(path: Path | None, weight: float) -> Path | None:
    """Return the directory of the model of --distill-from, if it has a weight; raises UserError if there is none."""
    if path is None or weight == 0:
        return None
    with reporting_os_errors(path):
        check_directory(path)
        if is_hf_directory(path):
            return path
        checkpoint = Checkpoint.open(path)
        for warning in checkpoint.warnings:
            print_if_possible(f"*** {Problem.of(warning).about('distill_from')} ***")
        return checkpoint.directory


def open_teacher(directory: Path) -> StoredTeacher:
    """Open the model that rank 0 found; raise UserError if it cannot be read."""
    tokenizer = find_tokenizer(directory)
    if is_hf_directory(directory):
        opened = open_hf_directory(directory)
        return StoredTeacher(directory, opened.model, opened, tokenizer)
    checkpoint = Checkpoint.open_unchecked(directory)
    return StoredTeacher(directory, checkpoint.model(), checkpoint, tokenizer)


def teacher_errors(run: RunConfig, teacher: StoredTeacher, tokenizer: Tokenizer | None) -> Iterator[Problem]:
    """Yield each reason why a model cannot teach that of a run."""
    config = teacher.config
    named: dict[str, object] = {"distill_from": teacher.directory}
    if config.vocab_size != run.model.vocab_size:
        sizes = f"a vocabulary of {config.vocab_size} ids, and the model one of {run.model.vocab_size}"
        fix = f"both must use one tokenizer; if they do, give {{vocab_size}} {config.vocab_size}"
        yield Problem(named, f"{{}}: the teacher has {sizes}", fix)
    elif (
        tokenizer is not None
        and teacher.tokenizer is not None
        and not same_tokenizer(tokenizer.identity, teacher.tokenizer.identity)
    ):
        # Other files may still give equal ids.
        for token in range(min(tokenizer.vocab_size, teacher.tokenizer.vocab_size)):
            taught, learned = teacher.tokenizer.decode([token]), tokenizer.decode([token])
            if taught != learned:
                reason = (
                    f"{{}}: the teacher has another tokenizer, whose id {token} is {{taught}} instead of {{learned}}"
                )
                fix = "train both models with one tokenizer"
                yield Problem(named, reason, fix, taught=repr(taught), learned=repr(learned))
                break
    parallel = run.parallel
    ranks = parallel.tensor_model_parallel_size, parallel.expert_model_parallel_size
    for error in tensor_parallel_errors(config, *ranks):
        yield Problem(named, "{}: the teacher cannot be sharded like the model: {error}", error=error)
    if run.training.seq_length > config.max_position_embeddings:
        most = config.max_position_embeddings
        fix = f"use a {{seq_length}} of at most {most}, not {run.training.seq_length}"
        yield Problem(named, f"{{}}: the teacher has {most} positions", fix)
    save = run.checkpoint.save
    if save is not None and save.resolve() in (teacher.directory.resolve(), teacher.directory.resolve().parent):
        reason = "{distill_from}: is in {save}, where this run adds and removes checkpoints"
        yield Problem({**named, "save": save}, reason, "give another {save}, or a copy of the teacher")


def _replica_group(tensor: CommGroup, count: int) -> CommGroup:
    """Return the ranks with the same heads. Only gradients are summed over them, so they have no communicator."""
    first = tensor.rank // count * count
    return CommGroup(tensor.ranks[first : first + count], tensor.rank - first, None)


def build_distillation(run: RunConfig, teacher: StoredTeacher, mesh: ProcessMesh, device: torch.device) -> Distillation:
    """Build this rank's part of the teacher, and read and verify its weights; all ranks must call this.

    Raises UserError on every rank if any rank cannot read its weights, or finds a damaged file.
    """
    training, config = run.training, teacher.config.without_mtp
    operations, _ = select_operations(
        training.norm_implementation, training.compile_sub_blocks, device, training.linear_attention_implementation
    )
    frozen_mesh = replace(
        mesh,
        head_replicas={count: _replica_group(mesh.tensor, count) for count in head_replicas(config, mesh.tensor.size)},
        sequence_parallel=mesh.sequence_parallel and config.shares_stream,
    )
    options = StackOptions(run.parallel.tp_overlap, operations=operations)
    model = LanguageModel(config, frozen_mesh, options, dtype=compute_dtype(run), device=device).requires_grad_(False)
    with raising_on_all_ranks(mesh.world, "distill_from"):
        load_weights(model, teacher.weights)
        # The files of Hugging Face have no checksums.
        if isinstance(teacher.weights, Checkpoint):
            teacher.weights.verify(None, mesh.world.rank, mesh.world.size, only_weights=True)
    return Distillation(model, training.distill_weight, training.distill_temperature)

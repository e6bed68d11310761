"""Decides which ranks read batches, and which ranks receive them by broadcast."""

from collections.abc import Mapping
from typing import Any

from megatron_ladder.data.batches import BatchShape, DocumentRules, GlobalBatchLoader, SampleReader
from megatron_ladder.data.identity import data_changes
from megatron_ladder.data.samples import Samples
from megatron_ladder.data.streaming import StreamPlan, StreamReader
from megatron_ladder.progress import print_if_possible
from megatron_ladder.train.inputs import RunInputs
from megatron_ladder.train.setup import Trainer


def _shape_and_rules(trainer: Trainer) -> tuple[BatchShape, DocumentRules]:
    run, training, data = trainer.run, trainer.run.training, trainer.run.data
    shape = BatchShape(run.global_batch_size, training.micro_batch_size, run.data_parallel_size)
    return shape, DocumentRules(trainer.eod_id, data.reset_position_ids, data.reset_attention_mask, data.eod_mask_loss)


def sample_batches(trainer: Trainer, source: Samples | None, consumed_samples: int) -> GlobalBatchLoader:
    """Return this rank's batches of numbered samples, if there is a source, starting after `consumed_samples`.

    On every pipeline stage, the first tensor-parallel rank reads and broadcasts to the others: a stage that embeds
    nothing and has no targets still needs document bounds, padding and the number of targets.
    """
    mesh = trainer.mesh
    shape, rules = _shape_and_rules(trainer)
    reader = None
    if source is not None and mesh.tensor.rank == 0:
        reader = SampleReader(source, shape, mesh.data.rank, consumed_samples, trainer.run.model.vocab_size)
    return GlobalBatchLoader(reader, shape, rules, consumed_samples, trainer.on_host(mesh.tensor))


def training_batches(
    trainer: Trainer, inputs: RunInputs, consumed_samples: int, manifest: Mapping[str, Any]
) -> GlobalBatchLoader:
    """Return this rank's training batches after `consumed_samples`; `manifest` is that of the resumed checkpoint.

    The first rank of each model tokenizes streamed text and broadcasts to the model's other ranks.
    """
    mesh, tokenizer, plan = trainer.mesh, inputs.tokenizer, inputs.stream
    if plan is None:
        return sample_batches(trainer, inputs.sources.train, consumed_samples)
    assert tokenizer is not None
    shape, rules = _shape_and_rules(trainer)
    states = _stored_streams(plan, inputs.data, manifest)
    # Rank 0 has looked at files and asked a hub for all ranks.
    shards = mesh.world.broadcast_object(inputs.shards)
    reader = None
    if mesh.model.rank == 0:

        def warn(text: str) -> None:
            # On every rank, because each one reads different streams.
            print_if_possible(f"rank {mesh.world.rank}: {text}")

        reader = StreamReader(
            plan,
            shards,
            tokenizer.encode_documents,
            shape,
            mesh.data.rank,
            consumed_samples,
            states,
            trainer.run.model.vocab_size,
            warn,
        )
    return GlobalBatchLoader(reader, shape, rules, consumed_samples, trainer.on_host(mesh.model))


def _stored_streams(plan: StreamPlan, data: dict[str, Any], manifest: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the positions of any number of ranks in a checkpoint, unless its data or their division differs."""
    states: list[dict[str, Any]] = manifest.get("data_streams", [])
    is_same = not data_changes(manifest.get("data", {}), data) and all(state["plan"] == plan.cut() for state in states)
    return states if is_same else []

"""Decides which ranks read batches, and which ranks receive them by broadcast."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from megatron_ladder.config.run import RunConfig
from megatron_ladder.data.batches import BatchShape, DocumentRules, GlobalBatchLoader, SampleReader, UnreadBatches
from megatron_ladder.data.blending import BlendedSource
from megatron_ladder.data.identity import data_changes
from megatron_ladder.data.loader import Sources
from megatron_ladder.data.packing import PackedSource
from megatron_ladder.data.samples import Samples
from megatron_ladder.data.streaming import (
    SkippedRecords,
    StreamPlan,
    StreamPosition,
    StreamReader,
    positions_of,
    skipped_of,
)
from megatron_ladder.train.inputs import RunInputs, describe_data
from megatron_ladder.train.log import print_if_possible
from megatron_ladder.train.setup import Trainer


def _shape_and_rules(trainer: Trainer) -> tuple[BatchShape, DocumentRules]:
    run, training, data = trainer.run, trainer.run.training, trainer.run.data
    shape = BatchShape(training.seq_length, run.global_batch_size, training.micro_batch_size, run.data_parallel_size)
    return shape, DocumentRules(trainer.eod_id, data.reset_position_ids, data.reset_attention_mask, data.eod_mask_loss)


def sample_batches(trainer: Trainer, source: Samples, consumed_samples: int) -> GlobalBatchLoader | UnreadBatches:
    """Return this rank's batches of numbered samples, starting after `consumed_samples`.

    On the first and last pipeline stage, the first tensor-parallel rank reads and broadcasts to the others of its
    stage. Stages between them read only if they need document bounds; otherwise they receive nothing.
    """
    mesh, (shape, rules) = trainer.mesh, _shape_and_rules(trainer)
    embeds_or_has_targets = mesh.pipeline.rank in (0, mesh.pipeline.size - 1)
    if not (embeds_or_has_targets or rules.cuts_rows):
        return UnreadBatches(shape, consumed_samples)
    reader = None
    if mesh.tensor.rank == 0:
        reader = SampleReader(source, shape, mesh.data.rank, consumed_samples, trainer.run.model.vocab_size)
    return GlobalBatchLoader(reader, shape, rules, consumed_samples, trainer.on_host(mesh.tensor))


class TextStreams:
    """Batches of streamed text. The first rank of each model tokenizes and broadcasts to the model's other ranks."""

    def __init__(self, trainer: Trainer, inputs: RunInputs, plan: StreamPlan) -> None:
        self._trainer, self._inputs, self._plan = trainer, inputs, plan
        self._positions: dict[int, StreamPosition] = {}
        self._skipped: list[Sequence[int]] = []
        self._batches: GlobalBatchLoader | None = None

    def state_dict(self) -> dict[str, Any] | None:
        """Return the position after the last returned batch, on the rank that reads for this data-parallel rank."""
        if self._batches is None or self._trainer.mesh.model.rank > 0:
            return None
        return {"plan": self._plan.cut()} | self._batches.reader_state

    def resume(self, manifest: Mapping[str, Any]) -> None:
        """Restore the positions of any number of ranks in a checkpoint, unless its data or their division differs."""
        found, states = (
            describe_data(self._inputs.sources, self._inputs.tokenizer, self._plan),
            manifest["data_streams"],
        )
        cuts = (state["plan"] for state in states)
        if not data_changes(manifest["data"], found) and all(cut == self._plan.cut() for cut in cuts):
            self._positions, self._skipped = positions_of(states), skipped_of(states)

    def batches(self, consumed_samples: int) -> GlobalBatchLoader:
        """Return this rank's batches, starting at the restored position."""
        trainer, mesh, tokenizer, reader = self._trainer, self._trainer.mesh, self._inputs.tokenizer, None
        shape, rules = _shape_and_rules(trainer)
        assert tokenizer is not None
        # Rank 0 has looked at files and asked a hub for all ranks.
        self._plan = replace(self._plan, shards=mesh.world.broadcast_object(self._plan.shards))
        if mesh.model.rank == 0:

            def warn(text: str) -> None:
                # On every rank, because each one reads different streams.
                print_if_possible(f"rank {mesh.world.rank}: {text}")

            skipped = SkippedRecords(self._plan.max_bad, warn, self._skipped)
            reader = StreamReader(
                self._plan,
                tokenizer.encode_batch,
                shape,
                mesh.data.rank,
                consumed_samples,
                self._positions,
                trainer.run.model.vocab_size,
                skipped,
            )
        self._batches = GlobalBatchLoader(reader, shape, rules, consumed_samples, trainer.on_host(mesh.model))
        return self._batches


def data_notes(run: RunConfig, sources: Sources) -> list[str]:
    """Return one line per data set: its tokens, how often the run reads them, and how conversations are packed."""
    notes = []
    for part, source in sources.labeled.items():
        weights = source.weights if isinstance(source, BlendedSource) else [1]
        for one, weight in zip(source.sources, weights, strict=True):
            note = f"{part}: {one.name}: {one.tokens:,} tokens in {len(one.documents):,} documents"
            if part == "train":
                samples = run.training.train_iters * run.global_batch_size * weight / sum(weights)
                note += f", {samples * run.training.seq_length / one.tokens:.3g} epochs"
            if isinstance(one, PackedSource):
                note += f"; {one.conversations:,} conversations in {len(one):,} rows, {one.filled:.1%} full; "
                note += f"{one.cut:,} are longer than a row and cut; in {one.without_targets:,} no token counts"
            notes.append(note)
    return notes


def training_batches(
    trainer: Trainer, inputs: RunInputs, streams: TextStreams | None, consumed_samples: int
) -> GlobalBatchLoader | UnreadBatches:
    """Return this rank's training batches, of numbered samples or of streamed text, after `consumed_samples`."""
    if streams is not None:
        return streams.batches(consumed_samples)
    assert inputs.sources.train is not None
    return sample_batches(trainer, inputs.sources.train, consumed_samples)

"""Which rank reads what, and what the others get from it."""

from megatron_ladder.comm.mesh import ProcessMesh
from megatron_ladder.config.run import RunConfig
from megatron_ladder.data.batches import (
    BatchShape,
    DocumentRules,
    GlobalBatchLoader,
    SampleReader,
    UnreadBatches,
)
from megatron_ladder.data.loader import Sources
from megatron_ladder.data.packing import PackedSource
from megatron_ladder.data.samples import Samples
from megatron_ladder.train.setup import Trainer

Batches = GlobalBatchLoader | UnreadBatches


def batch_shape(run: RunConfig) -> BatchShape:
    """The sizes of the run's batches."""
    training = run.training
    return BatchShape(training.seq_length, run.global_batch_size, training.micro_batch_size, run.data_parallel_size)


def document_rules(run: RunConfig, eod_id: int | None) -> DocumentRules:
    """What the run says of the ends of documents."""
    data = run.data
    return DocumentRules(eod_id, data.reset_position_ids, data.reset_attention_mask, data.eod_mask_loss)


def sample_batches(trainer: Trainer, source: Samples, consumed_samples: int) -> Batches:
    """This rank's batches of numbered samples, from one of them on.

    The first tensor-parallel rank of a pipeline's first and last stage reads, and broadcasts to the others of its
    stage. So does that of the stages between if they must know where documents begin; else they are given nothing.
    """
    mesh, rules, shape = trainer.mesh, document_rules(trainer.run, trainer.eod_id), batch_shape(trainer.run)
    if not (needs_batches(mesh) or rules.cuts_rows):
        return UnreadBatches(shape, consumed_samples)
    reader = None
    if mesh.tensor.rank == 0:
        reader = SampleReader(source, shape, mesh.data.rank, consumed_samples, trainer.run.model.vocab_size)
    return GlobalBatchLoader(reader, shape, rules, consumed_samples, mesh.tensor, trainer.device)


def needs_batches(mesh: ProcessMesh) -> bool:
    """Whether this rank's stage is the first of its pipeline, which embeds tokens, or the last, which has targets."""
    return mesh.pipeline.rank in (0, mesh.pipeline.size - 1)


def packing_notes(sources: Sources) -> list[str]:
    """A line for each part that holds conversations: how they lie in rows."""
    return [
        f"{part}: {source.conversations:,} conversations in {len(source):,} rows, "
        f"{source.filled:.1%} full; {source.cut:,} are longer than a row and cut"
        for part, source in sources._asdict().items()
        if isinstance(source, PackedSource)
    ]

"""Which rank reads what, and what the others get from it."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from megatron_ladder.comm.mesh import ProcessMesh
from megatron_ladder.config.run import RunConfig
from megatron_ladder.data.batches import (
    BatchShape,
    DocumentRules,
    GlobalBatchLoader,
    SampleReader,
    UnreadBatches,
)
from megatron_ladder.data.encoders import choose_encoder
from megatron_ladder.data.identity import data_changes
from megatron_ladder.data.loader import Sources
from megatron_ladder.data.packing import PackedSource
from megatron_ladder.data.samples import Samples
from megatron_ladder.data.streaming import (
    ShardBlock,
    SkippedRecords,
    StreamPlan,
    StreamPosition,
    StreamReader,
    positions_of,
    skipped_of,
)
from megatron_ladder.train.inputs import RunInputs, describe_data
from megatron_ladder.train.log import say
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


class TrainingData:
    """Where the batches of training come from: numbered samples, or streams of texts.

    Attributes:
        streams: what checkpoints keep of streams; None where the number of consumed samples says all.
    """

    def __init__(self, trainer: Trainer, inputs: RunInputs) -> None:
        self._trainer, self._inputs = trainer, inputs
        self.streams = None if inputs.stream is None else TextStreams(trainer, inputs, inputs.stream)

    def begin(self, consumed_samples: int) -> Batches:
        """This rank's batches from a sample on, or from where the streams were that a checkpoint told of."""
        if self.streams is not None:
            return self.streams.begin(consumed_samples)
        assert self._inputs.sources.train is not None
        return sample_batches(self._trainer, self._inputs.sources.train, consumed_samples)


class TextStreams:
    """Batches of streamed texts, which the first rank of each model tokenises and broadcasts to the others of it."""

    def __init__(self, trainer: Trainer, inputs: RunInputs, plan: StreamPlan) -> None:
        self._trainer, self._inputs, self._plan = trainer, inputs, plan
        self._positions: dict[int, StreamPosition] = {}
        self._skipped: list[Sequence[int]] = []
        self._batches: GlobalBatchLoader | None = None

    def state_dict(self) -> dict[str, Any] | None:
        """Where this data-parallel rank's streams are, behind the last batch that was given out; on its reader."""
        if self._batches is None or self._trainer.mesh.model.rank > 0:
            return None
        return {"plan": self._plan.cut()} | self._batches.reader_state

    def load_state_dict(self, states: list[Any]) -> None:
        """Takes the states of any number of ranks; those of an input that is cut otherwise are passed over."""
        plan = self._plan.cut()
        # Plans of an earlier release say less.
        if all(plan | state["plan"] == plan for state in states):
            self._positions, self._skipped = positions_of(states), skipped_of(states)

    def resume(self, manifest: Mapping[str, Any]) -> None:
        """Takes the states of a checkpoint. Of other data, which was allowed then, positions mean nothing."""
        found = describe_data(self._inputs.sources, self._inputs.tokenizer, self._plan)
        if "data_streams" in manifest and not data_changes(manifest.get("data", {}), found):
            self.load_state_dict(manifest["data_streams"])

    def begin(self, consumed_samples: int) -> GlobalBatchLoader:
        """This rank's batches."""
        trainer, tokenizer, reader = self._trainer, self._inputs.tokenizer, None
        mesh, run, shape = trainer.mesh, trainer.run, batch_shape(trainer.run)
        assert tokenizer is not None
        if mesh.model.rank == 0:
            texts = next(self._plan.shards[0].blocks(0), ShardBlock([])).texts
            choice = choose_encoder(tokenizer, "auto", texts)
            say(f"--streaming: {choice.sentence}", mesh.world.rank)
            skipped = SkippedRecords(self._plan.max_bad, partial(_tell_of, mesh.world.rank), self._skipped)
            reader = StreamReader(
                self._plan, choice.encoder.encode, shape, mesh.data.rank, consumed_samples, self._positions,
                run.model.vocab_size, skipped,
            )  # fmt: skip
        rules = document_rules(run, trainer.eod_id)
        self._batches = GlobalBatchLoader(reader, shape, rules, consumed_samples, mesh.model, trainer.device)
        return self._batches


def _tell_of(rank: int, text: str) -> None:
    """Prints on any rank: each reads streams of its own."""
    print(f"rank {rank}: {text}", flush=True)


def packing_notes(sources: Sources) -> list[str]:
    """A line for each part that holds conversations: how they lie in rows."""
    return [
        f"{part}: {source.conversations:,} conversations in {len(source):,} rows, "
        f"{source.filled:.1%} full; {source.cut:,} are longer than a row and cut"
        for part, source in sources._asdict().items()
        if isinstance(source, PackedSource)
    ]

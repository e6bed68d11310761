"""How a model and its batch are distributed over GPUs."""

from dataclasses import dataclass
from functools import cache, cached_property

from megatron_ladder.blueprint.model import ModelConfig
from megatron_ladder.blueprint.specs import TensorSpec
from megatron_ladder.blueprint.tensors import uniform_partition
from megatron_ladder.config.run import RunConfig, layout_captures

EXPERT_IMBALANCE = 1.25
"""Assumed rows of the fullest expert-parallel rank relative to the mean, as in `kept_expert_rows`."""


@dataclass(frozen=True)
class Layout:
    """How a model and its batch are distributed.

    `micro_batch` is in samples. With `recompute`, backward keeps only the inputs of sub-blocks. `optimizer`: its name.
    `whole_experts`: tensor-parallel ranks hold whole experts instead of a part of the width of each. `chunks`: ranges
    of layers of a stage, which run alternately. `captures`: whether passes run as CUDA graphs where ZeRO permits it.
    `experts`: expert-parallel ranks, to which tokens travel; 1: the tensor-parallel ranks share each expert.
    `imbalance`: the rows that the fullest of them receives, relative to the mean.
    """

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    zero: int = 1
    micro_batch: int = 1
    recompute: bool = False
    sequence_parallel: bool = False
    optimizer: str = "adamw"
    whole_experts: bool = False
    chunks: int = 1
    captures: bool = True
    experts: int = 1
    imbalance: float = EXPERT_IMBALANCE

    @classmethod
    def of(cls, run: RunConfig) -> "Layout":
        """Return the layout of a run, which recomputes all layers or none."""
        parallel = run.parallel
        return cls(
            tensor=parallel.tensor_model_parallel_size,
            pipeline=parallel.pipeline_model_parallel_size,
            data=run.data_parallel_size,
            zero=int(parallel.zero_stage),
            micro_batch=run.training.micro_batch_size,
            recompute=run.recompute_layers > 0,
            sequence_parallel=parallel.sequence_parallel,
            optimizer=run.optimizer.optimizer,
            whole_experts=parallel.expert_sharding == "experts",
            chunks=run.chunks,
            experts=parallel.expert_model_parallel_size,
        )

    @property
    def gpus(self) -> int:
        """Number of GPUs."""
        return self.tensor * self.pipeline * self.data

    @property
    def is_captured(self) -> bool:
        """Whether training captures its passes, in which the host then launches no kernels."""
        return self.captures and layout_captures(str(self.zero), self.data)

    @property
    def divides_experts(self) -> bool:
        """Whether tokens travel to the ranks of their experts."""
        return self.experts > 1

    @cached_property
    def of_ranks(self) -> "Layout":
        """The layout with only what the numbers of a layer depend on."""
        return Layout(
            tensor=self.tensor,
            optimizer=self.optimizer,
            whole_experts=self.whole_experts,
            experts=self.experts,
            imbalance=self.imbalance,
        )

    @property
    def expert_data(self) -> int:
        """Number of ranks of a stage that hold the same parts of routed experts."""
        return self.tensor * self.data // self.experts if self.divides_experts else self.data

    def numel(self, tensor: TensorSpec) -> int:
        """Return how many numbers of a tensor of the layers a rank holds."""
        if self.divides_experts and tensor.expert_dim is not None:
            return tensor.numel // self.experts
        return tensor.local_numel(self.tensor)

    @property
    def row_share(self) -> float:
        """The rows of experts that a rank receives of each choice of a micro-batch's tokens, if tokens travel."""
        return self.imbalance / self.tensor


@cache
def pipeline_ranges(layers: int, ranges: int) -> list[range]:
    """Return the layers of each chunk of a pipeline; the first ones have one more if layers do not divide evenly."""
    return uniform_partition(layers, ranges)


def stage_chunks(model: ModelConfig, layout: Layout, stage: int) -> list[range]:
    """Return the ranges of layers of a pipeline stage."""
    return pipeline_ranges(model.num_layers, layout.pipeline * layout.chunks)[stage :: layout.pipeline]


def first_group(layout: Layout, micro_batches: int) -> int:
    """Return how many micro-batches run through a chunk before the next one, at first; see `make_schedule`."""
    if micro_batches < layout.pipeline:
        return micro_batches
    return layout.pipeline + micro_batches % layout.pipeline

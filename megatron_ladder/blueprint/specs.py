"""Descriptions of tensors, of the matrices and branches that they form, and how these begin."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING

from megatron_ladder.blueprint.wiring import BranchKind

if TYPE_CHECKING:
    from megatron_ladder.blueprint.mixers.mixer import Mixer
    from megatron_ladder.blueprint.model import ModelConfig

ROWS_PER_BLOCK = 64
"""Rows (or columns) of a matrix without heads that are initialised from one generator."""
VOCABULARY_MULTIPLE = 128
"""Rows of the vocabulary per rank are a multiple of this, for matrix units."""


def padded_vocab_size(vocab_size: int, tensor_parallel: int) -> int:
    """Return the vocabulary size rounded up to a multiple of 128 x tensor-parallel size."""
    multiple = VOCABULARY_MULTIPLE * tensor_parallel
    return -(-vocab_size // multiple) * multiple


class Role(Enum):
    """What a tensor is to optimizers, the planner and conversion."""

    MATRIX = "matrix"
    """A matrix of a layer, or a stack of them: weight decay, and Muon where it is chosen."""
    EMBEDDING = "embedding"
    """One row per word: weight decay, never Muon."""
    CONVOLUTION = "convolution"
    """Filters over the sequence, one per channel: no weight decay, never Muon."""
    VECTOR = "vector"
    """The weight of a norm, also with one row per rank, or a bias: no weight decay, never Muon."""
    STATE = "state"
    """No gradient trains it, so optimizers have no moments of it; conversion never rounds it."""

    @property
    def decays(self) -> bool:
        """Whether it has weight decay."""
        return self in (Role.MATRIX, Role.EMBEDDING)


@dataclass(frozen=True)
class TensorSpec:
    """One canonical tensor."""

    name: str
    """`layers.7.attention.q_proj.weight`."""
    shape: tuple[int, ...]
    """Shape of the whole tensor, without padding."""
    role: Role
    sharded_dim: int | None = None
    """The dimension that is cut over the tensor-parallel ranks; None if every rank holds the whole tensor."""
    block: int = 1
    """Elements along the sharded dimension that are initialised together: a head, or `ROWS_PER_BLOCK`."""
    heads: int | None = None
    """Heads along the sharded dimension, which stay whole; with fewer heads than ranks, several ranks hold the same."""
    expert_dim: int | None = None
    """The dimension of the blocks in a stack of experts' matrices [E, out, in] or biases [E, out], whichever dimension
    is sharded. Each expert is initialised separately."""
    padded: bool = False
    """Whether the sharded dimension is padded to a multiple of `VOCABULARY_MULTIPLE` x ranks."""
    mean: float = 0.0
    """Initial mean."""
    std: float = 0.0
    """Initial standard deviation; 0 means constant."""
    offset: float = 0.0
    """What a norm adds to its weight before it multiplies."""
    log_of: tuple[float, float] | None = None
    """Bounds of uniform numbers, whose logarithms are the initial values instead."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def replicas(self, ranks: int) -> int:
        """Return how many neighbouring ranks hold the same slice."""
        if self.sharded_dim is None:
            return ranks
        return max(1, ranks // self.heads) if self.heads else 1

    def width(self, ranks: int) -> int:
        """Return the elements of a rank's parameter along the sharded dimension, padding included."""
        if self.sharded_dim is None:
            return self.shape[0]
        size = self.shape[self.sharded_dim]
        whole = padded_vocab_size(size, ranks) if self.padded else size
        return whole * self.replicas(ranks) // ranks

    def slice_of(self, rank: int, ranks: int) -> tuple[int, int]:
        """Return where a rank's slice starts along the sharded dimension, and its length without padding."""
        if self.sharded_dim is None:
            return 0, self.shape[0]
        width = self.width(ranks)
        start = rank // self.replicas(ranks) * width
        return start, max(0, min(width, self.shape[self.sharded_dim] - start))

    def local_numel(self, ranks: int) -> int:
        """Return the number of elements of a rank's parameter, padding included."""
        if self.sharded_dim is None:
            return self.numel
        return self.numel // self.shape[self.sharded_dim] * self.width(ranks)


@dataclass(frozen=True)
class Matrix:
    """A matrix, with its bias if it has one."""

    weight: TensorSpec
    bias: TensorSpec | None

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        return (self.weight,) if self.bias is None else (self.weight, self.bias)


@dataclass(frozen=True)
class Branch:
    """The mixer, the MLP or the experts of one layer."""

    kind: BranchKind
    inputs: Mapping[str, Matrix]
    """Column-parallel, in this order. Those of a mixer: see `blueprint/mixers/`. MLP: `gate`, `up`, in experts those of
    all of them."""
    output: Matrix
    """Row-parallel: that of the mixer; or down, of all experts."""
    mixer: "Mixer | None" = None
    """The mixer that it belongs to."""
    inner: Mapping[str, TensorSpec] = field(default_factory=dict)
    """What a mixer computes with between its inputs and its output, such as norms of heads or latents. For a shared
    expert: the `gate` of its output."""
    expansions: Mapping[str, Matrix] = field(default_factory=dict)
    """Column-parallel matrices of normed latents."""
    router: Mapping[str, TensorSpec] = field(default_factory=dict)
    """The router's `weight` [E, h], and those that it has of its `bias` [E] and the `expert_bias` of its choice [E]."""
    experts: int = 1
    """How many of each matrix there are."""
    experts_per_token: int = 1

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        """All tensors, in the order in which the model computes with them."""
        inputs = (tensor for matrix in self.inputs.values() for tensor in matrix.tensors)
        expansions = (tensor for matrix in self.expansions.values() for tensor in matrix.tensors)
        return (*self.router.values(), *inputs, *self.inner.values(), *expansions, *self.output.tensors)

    @property
    def matrices(self) -> tuple[TensorSpec, ...]:
        """All matrices, also the router's."""
        return tuple(tensor for tensor in self.tensors if tensor.role is Role.MATRIX)

    def share_in_use(self, tokens: float) -> float:
        """Return the expected share of the experts that so many tokens choose, if each is equally likely."""
        return 1 - (1 - self.experts_per_token / self.experts) ** tokens

    def weights_per_token(self, ranks: int = 1) -> int:
        """Return the numbers that one token multiplies with, on each of so many tensor-parallel ranks."""
        of_experts = sum(matrix.local_numel(ranks) for matrix in self.matrices if matrix.expert_dim is not None)
        others = sum(matrix.local_numel(ranks) for matrix in self.matrices if matrix.expert_dim is None)
        return of_experts // self.experts * self.experts_per_token + others


def column(
    name: str, rows: int, config: "ModelConfig", bias: bool, heads: int | None = None, columns: int | None = None
) -> Matrix:
    block = ROWS_PER_BLOCK if heads is None else rows // heads
    shape = (rows, columns or config.hidden_size)
    weight = TensorSpec(f"{name}.weight", shape, Role.MATRIX, 0, block=block, heads=heads, std=config.init_method_std)
    return Matrix(
        weight, TensorSpec(f"{name}.bias", (rows,), Role.VECTOR, 0, block=block, heads=heads) if bias else None
    )


def row(name: str, columns: int, config: "ModelConfig", bias: bool, block: int = ROWS_PER_BLOCK) -> Matrix:
    # Projections that write to the residual stream start smaller.
    std = config.init_method_std / math.sqrt(2 * config.num_layers)
    weight = TensorSpec(f"{name}.weight", (config.hidden_size, columns), Role.MATRIX, 1, block=block, std=std)
    return Matrix(weight, whole(f"{name}.bias", config.hidden_size) if bias else None)


def whole(name: str, size: int, mean: float = 0.0) -> TensorSpec:
    return TensorSpec(name, (size,), Role.VECTOR, block=size, mean=mean)


def norm_weight(name: str, size: int, config: "ModelConfig", ranks: int | None = None) -> TensorSpec:
    """Return the weight of a norm that multiplies by 1 in the beginning, with a row for each of so many ranks."""
    offset = 1.0 if config.apply_layernorm_1p else 0.0
    spec = whole(name, size, mean=1.0 - offset)
    if ranks is not None:
        spec = replace(spec, shape=(ranks, size), sharded_dim=0, block=1)
    return replace(spec, offset=offset)

"""Every tensor of a model, described once.

`model_tensors` lists the tensors with canonical names, which do not depend on the layout. The modules of `model/`,
conversion, all counts and the planner derive from these descriptions.

A layer is a list of sub-blocks. A sub-block is a norm and some branches (attention, MLP, experts); a branch is

    inputs (column-parallel matrices of the normed stream)  ->  elementwise or attention  ->  output (row-parallel)

In latent attention, some inputs make latents, whole on every rank like a key head that all ranks share; a norm and a
column-parallel matrix follow each.

Matrices are [out, in]; those of the experts of a layer are stacked, [E, out, in]. h hidden size, f MLP width, d head
width, Hq and Hkv query and key-value heads, V vocabulary size, s sequence length, t tensor-parallel ranks.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import lru_cache
from typing import Any, NamedTuple

from megatron_ladder.blueprint.model import ModelConfig
from megatron_ladder.blueprint.wiring import BRANCH_KINDS, BranchKind, WiredSubBlock

ROWS_PER_BLOCK = 64
"""Rows (or columns) of a matrix without heads that are initialised from one generator."""
VOCABULARY_MULTIPLE = 128
"""Rows of the vocabulary per rank are a multiple of this, for matrix units."""


def padded_vocab_size(vocab_size: int, tensor_parallel: int) -> int:
    """Return the vocabulary size rounded up to a multiple of 128 x tensor-parallel size."""
    multiple = VOCABULARY_MULTIPLE * tensor_parallel
    return -(-vocab_size // multiple) * multiple


def loss_chunk_tokens(tokens: int) -> int:
    """Return how many tokens of a micro-batch have logits at once: an eighth, but at least 64 and at most 2048.

    Smaller chunks would make inefficient products.
    """
    return min(max(-(-tokens // 8), 64), 2048)


def kept_expert_rows(ranks: int) -> float:
    """Return the fraction of all rows of experts that a rank keeps for backward if `ranks` ranks share the experts.

    It is a quarter more than a rank's average share of the rows, so that uneven choices cost little.
    """
    return min(1.0, 1.25 / ranks)


class Role(Enum):
    """What a tensor is to optimizers, the planner and conversion."""

    MATRIX = "matrix"
    """A matrix of a layer, or a stack of them: weight decay, and Muon where it is chosen."""
    EMBEDDING = "embedding"
    """One row per word: weight decay, never Muon."""
    CONVOLUTION = "convolution"
    """Filters over the sequence, one per channel: weight decay, never Muon."""
    VECTOR = "vector"
    """The weight of a norm, also with one row per rank, or a bias: no weight decay, never Muon."""
    STATE = "state"
    """No gradient trains it, so optimizers have no moments of it; conversion never rounds it."""


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
    """The attention, the MLP or the experts of one layer."""

    kind: BranchKind
    inputs: Mapping[str, Matrix]
    """Column-parallel, in this order. Attention: `q`, `k`, `v`; latent attention: `q` or its latent `q_a`, and `kv_a`,
    the latent of keys and values; both: then `gate`, if there is an output gate. MLP: `gate`, `up`, in experts those of
    all of them."""
    output: Matrix
    """Row-parallel: o; or down, of all experts."""
    norms: Mapping[str, TensorSpec] = field(default_factory=dict)
    """Norms of the heads of `q` and `k`, or of the latents: `kv_a` and, if queries have one, `q_a`."""
    expansions: Mapping[str, Matrix] = field(default_factory=dict)
    """Column-parallel matrices of the normed latents: `kv_b` and, if queries have a latent, `q_b`."""
    score_width: int = 0
    """Hq (d + width of a value), the widths of attention's products of scores and of values together."""
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
        return (*self.router.values(), *inputs, *self.norms.values(), *expansions, *self.output.tensors)

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


@dataclass(frozen=True)
class SubBlockTensors:
    """The tensors of one sub-block."""

    layer: int
    wired: WiredSubBlock
    norm: TensorSpec
    branches: tuple[Branch, ...]
    shares_norm: bool = False
    """Whether the norm is that of an earlier sub-block of the layer, among whose tensors it counts."""

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        """All tensors, in the order in which the model computes with them."""
        norm = () if self.shares_norm else (self.norm,)
        return (*norm, *(tensor for branch in self.branches for tensor in branch.tensors))

    def parameters(self, ranks: int | None = None) -> int:
        """Return the number of parameters of the whole sub-block, or of one of so many tensor-parallel ranks."""
        return sum(tensor.numel if ranks is None else tensor.local_numel(ranks) for tensor in self.tensors)


def _column(
    name: str, rows: int, config: ModelConfig, bias: bool, heads: int | None = None, columns: int | None = None
) -> Matrix:
    block = ROWS_PER_BLOCK if heads is None else rows // heads
    shape = (rows, columns or config.hidden_size)
    weight = TensorSpec(f"{name}.weight", shape, Role.MATRIX, 0, block=block, heads=heads, std=config.init_method_std)
    return Matrix(
        weight, TensorSpec(f"{name}.bias", (rows,), Role.VECTOR, 0, block=block, heads=heads) if bias else None
    )


def _row(name: str, columns: int, config: ModelConfig, bias: bool, block: int = ROWS_PER_BLOCK) -> Matrix:
    # Projections that write to the residual stream start smaller.
    std = config.init_method_std / math.sqrt(2 * config.num_layers)
    weight = TensorSpec(f"{name}.weight", (config.hidden_size, columns), Role.MATRIX, 1, block=block, std=std)
    return Matrix(weight, _whole(f"{name}.bias", config.hidden_size) if bias else None)


def _whole(name: str, size: int, mean: float = 0.0) -> TensorSpec:
    return TensorSpec(name, (size,), Role.VECTOR, block=size, mean=mean)


def _attention(config: ModelConfig, name: str) -> Branch:
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    inputs = {
        which: _column(f"{name}.{which}_proj", count * config.head_dim, config, config.add_qkv_bias, count)
        for which, count in (("q", heads), ("k", kv_heads), ("v", kv_heads))
    }
    normed = ("q", "k") if config.qk_layernorm else ()
    norms = {which: _whole(f"{name}.{which}_norm.weight", config.head_dim, mean=1.0) for which in normed}
    return _attention_branch(config, name, inputs, norms=norms)


def _attention_branch(config: ModelConfig, name: str, inputs: dict[str, Matrix], **others: Any) -> Branch:
    """Add what both kinds of attention have to the input matrices and the `others`, which are fields of `Branch`."""
    heads = config.num_attention_heads
    width = heads * config.value_dim
    if config.attention_output_gate:
        inputs["gate"] = _column(f"{name}.gate_proj", width, config, False, heads)
    output = _row(f"{name}.o_proj", width, config, config.add_attention_output_bias, block=config.value_dim)
    score_width = heads * (config.head_dim + config.value_dim)
    return Branch(BranchKind.ATTENTION, inputs, output, score_width=score_width, **others)


def _latent_attention(config: ModelConfig, name: str) -> Branch:
    """DeepSeek-V2 (arXiv 2405.04434), section 2.1; published models have no biases where these have none."""
    heads = config.num_attention_heads
    inputs: dict[str, Matrix] = {}
    norms: dict[str, TensorSpec] = {}
    expansions: dict[str, Matrix] = {}

    def add_latent(which: str, rank: int, rotated: int, head_width: int) -> None:
        # A latent is one head, which all ranks hold.
        latent, expansion = f"{which}_a", f"{which}_b"
        inputs[latent] = _column(f"{name}.{latent}_proj", rank + rotated, config, config.add_qkv_bias, 1)
        norms[latent] = _whole(f"{name}.{latent}_norm.weight", rank, mean=1.0)
        expansions[expansion] = _column(f"{name}.{expansion}_proj", heads * head_width, config, False, heads, rank)

    if config.q_lora_rank:
        add_latent("q", config.q_lora_rank, 0, config.head_dim)
    else:
        inputs["q"] = _column(f"{name}.q_proj", heads * config.head_dim, config, False, heads)
    add_latent("kv", config.kv_lora_rank, config.qk_rope_head_dim, config.qk_nope_head_dim + config.v_head_dim)
    return _attention_branch(config, name, inputs, norms=norms, expansions=expansions)


def _mlp(config: ModelConfig, name: str, width: int) -> Branch:
    bias = config.add_mlp_bias
    inputs = {which: _column(f"{name}.{which}_proj", width, config, bias) for which in ("gate", "up")}
    return Branch(BranchKind.MLP, inputs, _row(f"{name}.down_proj", width, config, bias))


def _experts(config: ModelConfig, name: str) -> Branch:
    count, hidden, width = config.num_experts, config.hidden_size, config.moe_ffn_hidden_size
    expert = _mlp(replace(config, add_mlp_bias=config.add_moe_bias), name, width)

    def stack(tensor: TensorSpec) -> TensorSpec:
        dim = None if tensor.sharded_dim is None else 1 + tensor.sharded_dim
        return replace(tensor, shape=(count, *tensor.shape), sharded_dim=dim, expert_dim=dim or 1)

    def stacked(matrix: Matrix) -> Matrix:
        return Matrix(stack(matrix.weight), matrix.bias and stack(matrix.bias))

    prefix = name.removesuffix("experts") + "router"
    std = config.init_method_std
    router = {"weight": TensorSpec(f"{prefix}.weight", (count, hidden), Role.MATRIX, block=count, std=std)}
    if config.add_moe_bias:
        router["bias"] = _whole(f"{prefix}.bias", count)
    if config.moe_router_enable_expert_bias:
        router["expert_bias"] = TensorSpec(f"{prefix}.expert_bias", (count,), Role.STATE, block=count)
    return Branch(
        BranchKind.EXPERTS,
        {which: stacked(matrix) for which, matrix in expert.inputs.items()},
        stacked(expert.output),
        router=router,
        experts=count,
        experts_per_token=config.moe_router_topk,
    )


def _branch(config: ModelConfig, layer: int, which: str) -> Branch:
    name = f"layers.{layer}.{which}"
    match BRANCH_KINDS[which]:
        case BranchKind.EXPERTS:
            return _experts(config, name)
        case BranchKind.MLP:
            is_shared = which == "shared_expert"
            return _mlp(
                config, name, config.moe_shared_expert_intermediate_size if is_shared else config.ffn_hidden_size
            )
        case BranchKind.ATTENTION:
            return _latent_attention(config, name) if config.is_latent else _attention(config, name)


def _norm(config: ModelConfig, layer: int, wired: WiredSubBlock) -> TensorSpec:
    """A norm that reads per-rank streams has one row per rank."""
    name = f"layers.{layer}.{wired.kind.norm}.weight"
    hidden = config.hidden_size
    if wired.reads_shared:
        return _whole(name, hidden, mean=1.0)
    assert config.desync_tp is not None
    return TensorSpec(name, (config.desync_tp, hidden), Role.VECTOR, 0, mean=1.0)


@lru_cache(maxsize=16)
def layer_tensors(config: ModelConfig) -> tuple[tuple[SubBlockTensors, ...], ...]:
    """Return the sub-blocks of every layer."""
    has_shared_expert = config.moe_shared_expert_intermediate_size > 0
    layers: list[tuple[SubBlockTensors, ...]] = []
    for layer, sub_blocks in enumerate(config.wired_layers):
        norms: set[str] = set()
        tensors: list[SubBlockTensors] = []
        for wired in sub_blocks:
            names = [name for name in wired.kind.branches if name != "shared_expert" or has_shared_expert]
            branches = tuple(_branch(config, layer, name) for name in names)
            shares_norm = wired.kind.norm in norms
            tensors.append(SubBlockTensors(layer, wired, _norm(config, layer, wired), branches, shares_norm))
            norms.add(wired.kind.norm)
        layers.append(tuple(tensors))
    return tuple(layers)


def embedding_tensor(config: ModelConfig, name: str = "embedding") -> TensorSpec:
    """Return the embedding's matrix, or that of the output head."""
    return TensorSpec(
        f"{name}.weight",
        (config.vocab_size, config.hidden_size),
        Role.EMBEDDING,
        0,
        block=ROWS_PER_BLOCK,
        padded=True,
        std=config.init_method_std,
    )


def head_tensor(config: ModelConfig) -> TensorSpec:
    """Return the output head's matrix; a tied model has none."""
    return embedding_tensor(config, "lm_head")


def final_norm_tensor(config: ModelConfig) -> TensorSpec:
    """Return the weight of the norm before the head."""
    return _whole("final_norm.weight", config.hidden_size, mean=1.0)


def model_tensors(config: ModelConfig) -> Iterator[TensorSpec]:
    """Yield all tensors of a model, in the order in which it computes with them."""
    yield embedding_tensor(config)
    for sub_blocks in layer_tensors(config):
        for sub_block in sub_blocks:
            yield from sub_block.tensors
    yield final_norm_tensor(config)
    if not config.tie_embeddings:
        yield head_tensor(config)


class ParameterCount(NamedTuple):
    """Numbers of parameters, without the vocabulary's padding.

    Where a desync stream is per rank, the norms of all ranks count. `lm_head` is 0 if the embedding matrix is the head.
    """

    embedding: int
    layers: tuple[int, ...]
    final_norm: int
    lm_head: int

    @property
    def total(self) -> int:
        """All parameters; a tied matrix counts once."""
        return self.embedding + sum(self.layers) + self.final_norm + self.lm_head


def parameter_count(model: ModelConfig) -> ParameterCount:
    """Count a model's parameters exactly."""
    matrix = embedding_tensor(model).numel
    layers = tuple(sum(sub_block.parameters() for sub_block in sub_blocks) for sub_blocks in layer_tensors(model))
    return ParameterCount(matrix, layers, final_norm_tensor(model).numel, 0 if model.tie_embeddings else matrix)


def active_parameters(model: ModelConfig) -> int:
    """Return how many parameters a token uses: all but those of the experts that it does not choose."""
    unused = 0
    for layer in layer_tensors(model):
        for branch in itertools.chain.from_iterable(sub_block.branches for sub_block in layer):
            of_experts = sum(tensor.numel for tensor in branch.tensors if tensor.expert_dim is not None)
            unused += of_experts // branch.experts * (branch.experts - branch.experts_per_token)
    return parameter_count(model).total - unused


def uniform_partition(layers: int, stages: int) -> list[range]:
    """Return equal ranges; if the layers do not divide evenly, the first stages have one more.

    The last stages have fewer layers, since the last one also has the head.
    """
    least, more = divmod(layers, stages)
    sizes = [least + 1] * more + [least] * (stages - more)
    bounds = itertools.accumulate(sizes, initial=0)
    return [range(start, stop) for start, stop in itertools.pairwise(bounds)]


def balanced_partition(layers: Sequence[int], before: int, after: int, stages: int) -> list[range]:
    """Return contiguous, non-empty ranges that minimise the weight of the heaviest stage.

    `layers` are weights, at least one per stage; `before` and `after` add to the first and the last stage.
    """
    sums = list(itertools.accumulate(layers, initial=0))

    def weight(start: int, stop: int) -> int:
        weight_before = before if start == 0 else 0
        weight_after = after if stop == len(layers) else 0
        return weight_before + sums[stop] - sums[start] + weight_after

    # For the first `stop` layers in the stages so far: the weight of the heaviest stage, and each stage's start. Ties
    # give earlier stages fewer layers, because these hold more micro-batches in flight.
    best: dict[int, tuple[int, tuple[int, ...]]] = {stop: (weight(0, stop), (0,)) for stop in range(1, len(layers) + 1)}
    for stage in range(1, stages):
        best = {
            stop: min(
                (max(best[start][0], weight(start, stop)), (*best[start][1], start)) for start in range(stage, stop)
            )
            for stop in range(stage + 1, len(layers) + 1)
        }
    starts = best[len(layers)][1]
    return [range(start, stop) for start, stop in itertools.pairwise((*starts, len(layers)))]

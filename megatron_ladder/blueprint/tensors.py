"""Every tensor of a model, described once.

`model_tensors` lists the tensors with canonical names, which do not depend on the layout. The modules of `model/`,
conversion, all counts and the planner derive from these descriptions.

A layer is a list of sub-blocks. A sub-block is a norm and some branches (token mixer, MLP, experts); a branch is

    inputs (column-parallel matrices of the normed stream)  ->  elementwise or mixer  ->  output (row-parallel)

In latent attention, some inputs make latents, whole on every rank like a key head that all ranks share; a norm and a
column-parallel matrix follow each.

Matrices are [out, in]; those of the experts of a layer are stacked, [E, out, in]. h hidden size, f MLP width, d head
width, Hq and Hkv query and key-value heads, V vocabulary size, s sequence length, t tensor-parallel ranks.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from megatron_ladder.blueprint.expert_parallel import divide_experts
from megatron_ladder.blueprint.model import ModelConfig
from megatron_ladder.blueprint.specs import (
    ROWS_PER_BLOCK,
    Branch,
    Matrix,
    Role,
    TensorSpec,
    column,
    norm_weight,
    row,
    whole,
)
from megatron_ladder.blueprint.wiring import BRANCH_KINDS, BranchKind, WiredSubBlock


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


def _mlp(config: ModelConfig, name: str, width: int) -> Branch:
    bias = config.add_mlp_bias
    inputs = {which: column(f"{name}.{which}_proj", width, config, bias) for which in ("gate", "up")}
    return Branch(BranchKind.MLP, inputs, row(f"{name}.down_proj", width, config, bias))


def _shared_expert(config: ModelConfig, name: str) -> Branch:
    mlp = _mlp(config, name, config.moe_shared_expert_intermediate_size)
    if not config.moe_shared_expert_gate:
        return mlp
    # Like a key head that all ranks share.
    gate = column(f"{name}_gate", 1, config, False, heads=1)
    return replace(mlp, inner={"gate": gate.weight})


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
        router["bias"] = whole(f"{prefix}.bias", count)
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
            return (
                _shared_expert(config, name) if which == "shared_expert" else _mlp(config, name, config.ffn_hidden_size)
            )
        case BranchKind.MIXER:
            return config.mixer_of(layer).branch(name)


def _norm(config: ModelConfig, layer: int, wired: WiredSubBlock) -> TensorSpec:
    """A norm that reads per-rank streams has one row per rank."""
    name = f"layers.{layer}.{wired.kind.norm}.weight"
    return norm_weight(name, config.hidden_size, config, None if wired.reads_shared else config.desync_tp)


@lru_cache(maxsize=16)
def layer_tensors(config: ModelConfig, divides_experts: bool = False) -> tuple[tuple[SubBlockTensors, ...], ...]:
    """Return the sub-blocks of every layer, or those of a model whose experts are divided over other ranks."""
    has_shared_expert = config.moe_shared_expert_intermediate_size > 0
    wired_layers = config.wired_layers
    if divides_experts:
        wired_layers = divide_experts(wired_layers, has_shared_expert)
    layers: list[tuple[SubBlockTensors, ...]] = []
    for layer, sub_blocks in enumerate(wired_layers):
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
    return norm_weight("final_norm.weight", config.hidden_size, config)


class MTPTensors(NamedTuple):
    """The tensors of the drafting head, named as those of a layer after the last one."""

    enorm: TensorSpec
    """The norm of the next token's embedding."""
    hnorm: TensorSpec
    """The norm of the stream."""
    eh_proj: TensorSpec
    """[h, 2 h], of both normed vectors, the embedding first; whole on every rank."""
    sub_blocks: tuple[SubBlockTensors, ...]
    head_norm: TensorSpec
    """The norm before the output head."""

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        """All tensors, in the order in which the head computes with them."""
        of_layer = (tensor for sub_block in self.sub_blocks for tensor in sub_block.tensors)
        return (self.enorm, self.hnorm, self.eh_proj, *of_layer, self.head_norm)

    @property
    def numel(self) -> int:
        """Number of parameters."""
        return sum(tensor.numel for tensor in self.tensors)


def mtp_tensors(config: ModelConfig) -> MTPTensors | None:
    """Return the tensors of the drafting head; None without one."""
    if not config.mtp_num_layers:
        return None
    hidden, prefix = config.hidden_size, f"layers.{config.num_layers}"
    enorm, hnorm, head_norm = (
        norm_weight(f"{prefix}.{name}.weight", hidden, config) for name in ("enorm", "hnorm", "head_norm")
    )
    eh_proj = TensorSpec(
        f"{prefix}.eh_proj.weight", (hidden, 2 * hidden), Role.MATRIX, block=hidden, std=config.init_method_std
    )
    return MTPTensors(enorm, hnorm, eh_proj, layer_tensors(config.mtp_config)[-1], head_norm)


def model_tensors(config: ModelConfig) -> Iterator[TensorSpec]:
    """Yield all tensors of a model, in the order in which it computes with them."""
    yield embedding_tensor(config)
    for sub_blocks in layer_tensors(config):
        for sub_block in sub_blocks:
            yield from sub_block.tensors
    yield final_norm_tensor(config)
    if not config.tie_embeddings:
        yield head_tensor(config)
    mtp = mtp_tensors(config)
    if mtp is not None:
        yield from mtp.tensors


class ParameterCount(NamedTuple):
    """Numbers of parameters, without the vocabulary's padding.

    Where a desync stream is per rank, the norms of all ranks count. `lm_head` is 0 if the embedding matrix is the head.
    """

    embedding: int
    layers: tuple[int, ...]
    final_norm: int
    lm_head: int
    mtp: int

    @property
    def total(self) -> int:
        """All parameters; a tied matrix counts once."""
        return self.embedding + sum(self.layers) + self.final_norm + self.lm_head + self.mtp


def parameter_count(model: ModelConfig) -> ParameterCount:
    """Count a model's parameters exactly."""
    matrix = embedding_tensor(model).numel
    layers = tuple(sum(sub_block.parameters() for sub_block in sub_blocks) for sub_blocks in layer_tensors(model))
    lm_head = 0 if model.tie_embeddings else matrix
    mtp = mtp_tensors(model)
    return ParameterCount(matrix, layers, final_norm_tensor(model).numel, lm_head, 0 if mtp is None else mtp.numel)


def active_parameters(model: ModelConfig) -> int:
    """Return how many parameters a token uses: all but those of the experts that it does not choose."""
    unused = 0
    for layer in layer_tensors(model.mtp_config):
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

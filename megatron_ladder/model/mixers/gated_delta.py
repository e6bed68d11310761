"""Gated DeltaNet: convolutions, the gated delta rule on each value head, a norm and an output gate.

    q, k, v  ->  convolution, SiLU  ->  q and k of length 1  ->  delta rule with g and beta  ->  norm * SiLU(gate)

with g = -e^A_log softplus(a + dt_bias) and beta = sigmoid(b). Everything between the two projections is computed in
fp32 at least. Queries also have the factor 1 / sqrt(d_k).

The rule (arXiv 2412.06464) has a matrix S [d_k, d_v] for each value head. A token decays it, corrects it where its key
reads, and reads it with its query:

    S = e^g S          d = beta (v - S^T k)          S = S + k d^T          o = S^T q

A chunk computes its tokens together. G_ti is the sum of the g after token i up to t, and S the matrix before the chunk:

    d_t + beta_t sum over i < t of e^G_ti (k_t k_i) d_i  =  beta_t v_t - beta_t e^G_t S^T k_t
    o_t  =  e^G_t S^T q_t + sum over i <= t of e^G_ti (q_t k_i) d_i

So the inverse of a triangular matrix gives D = U - W S of all chunks at once, and only products with S run from chunk
to chunk. Where a document begins, e^G across its beginning is 0:

    documents a a a b b      e^G_ti   1 . . . .      before b: no S
                                      x 1 . . .      the S after the chunk has no part of a
                                      x x 1 . .
                                      0 0 0 1 .
                                      0 0 0 x 1

Layouts: projections [s, b, sum of widths]; channels [s, b, channels], those of q, k and v. In the rule: queries and
keys [b, key heads, s, d_k], values [b, value heads, s, d_v], g and beta [b, value heads, s], S [b, value heads, d_k,
d_v], where value heads in a row share a key head. In chunks of c tokens, with r value heads of a key head:
[b, key heads, r, chunks, c, ...].
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron_ladder.blueprint.mixers.gated_delta import CHUNK
from megatron_ladder.blueprint.specs import Branch
from megatron_ladder.model.documents import DocumentBounds
from megatron_ladder.model.flash_linear_attention import apply_delta_kernel
from megatron_ladder.model.mixers.mixer import Heads, States
from megatron_ladder.model.operations import BuildContext
from megatron_ladder.model.sub_block import SequenceContext

_LENGTH_EPSILON = 1e-6
"""Added to the squared length of queries and keys."""


class DeltaInputs(NamedTuple):
    """What all layers with the mixer share."""

    age: Tensor | None = None
    """[b, s], in training: how many tokens of its document are before each one; None: a row is one document."""
    bounds: Tensor | None = None
    """Those of `DocumentBounds`, int64, if there is an age."""
    is_token: Tensor | None = None
    """[s, b, 1] bool, in prompts: False for padding."""
    newest: Tensor | None = None
    """[kernel - 1, b, 1], in prompts: where the newest tokens are among the stored inputs and those of the pass."""


class DeltaOperands(NamedTuple):
    """What tokens do to the matrices of their heads."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor
    """g."""
    beta: Tensor


class GatedDeltaHeads(Heads):
    """See `blueprint/mixers/gated_delta.py`."""

    filters: nn.Parameter
    """[channels, kernel]."""
    log_scale: nn.Parameter
    """A_log, [value heads]."""
    offset: nn.Parameter
    """dt_bias, [value heads]."""
    norm: nn.Parameter
    """[d_v]."""

    def __init__(self, build: BuildContext, number: int, branch: Branch) -> None:
        super().__init__(build, number, branch)
        config = build.config
        self.convolve: Callable[..., Tensor] = build.operations.of_heads(_convolve, 1)
        self.split_heads: Callable[..., DeltaOperands] = build.operations.of_heads(_split_heads, 3)
        self.gated_norm: Callable[..., Tensor] = build.operations.of_heads(_gated_norm, 2)
        self.delta_kernel = build.operations.delta_kernel
        self.channels = self.widths[:3]
        self.widths = (sum(self.channels), *self.widths[3:])
        self.key_dim = config.linear_key_head_dim
        self.stored_inputs = config.linear_conv_kernel_dim - 1
        self.epsilon = config.norm_epsilon
        self.add_parameter("filters", [branch.inner[f"{name}_conv"] for name in ("q", "k", "v")], build)
        self.add_parameter("log_scale", [branch.inner["A_log"]], build)
        self.add_parameter("offset", [branch.inner["dt_bias"]], build)
        # Each rank norms its own heads.
        self.add_parameter("norm", [branch.inner["norm"]], build, is_partial=True)

    def prepare(self, context: SequenceContext) -> DeltaInputs:
        """See `Heads.prepare`."""
        length = len(context.positions)
        if context.documents is not None:
            return DeltaInputs(_ages(context.documents, length), context.documents.bounds.long())
        if context.states is None or context.states.lengths is None:
            return DeltaInputs()
        before, lengths = context.states.before, context.states.lengths
        places = torch.arange(before, before + length, device=lengths.device)
        tokens = (lengths - before).clamp(0, length)
        newest = torch.arange(self.stored_inputs, device=lengths.device).unsqueeze(1) + tokens
        return DeltaInputs(is_token=(places.unsqueeze(1) < lengths).unsqueeze(2), newest=newest.unsqueeze(2))

    def forward(self, projected: Tensor, context: SequenceContext) -> Tensor:
        """See `Heads.forward`."""
        inputs: DeltaInputs = context.prepared[self.mixer.name]
        if context.states is not None:
            return self._continue(projected, context.states, inputs)
        # Backward computes all of it again, because it would keep about ten times as many numbers as the projections.
        mixed: Tensor = checkpoint(self._mix, projected, inputs, use_reentrant=False, preserve_rng_state=False)
        return mixed

    def _mix(self, projected: Tensor, inputs: DeltaInputs) -> Tensor:
        channels, gate, strength, decay = projected.split(self.widths, dim=-1)
        seen = F.pad(channels, (0, 0, 0, 0, self.stored_inputs, 0))
        operands = self._operands(seen, strength, decay, inputs)
        if self.delta_kernel is None:
            outputs, _ = _delta_chunks(operands, age=inputs.age)
        else:
            outputs = apply_delta_kernel(self.delta_kernel, *operands, projected.dtype, inputs.bounds)
        return self.gated_norm(outputs, gate, self.norm, self.epsilon)

    def _continue(self, projected: Tensor, states: States, inputs: DeltaInputs) -> Tensor:
        channels, gate, strength, decay = projected.split(self.widths, dim=-1)
        stored = {name: state[: projected.shape[1]] for name, state in states.tensors[self.number].items()}
        if states.begins:
            for state in stored.values():
                state.zero_()
        seen = torch.cat((stored["convolution"].squeeze(1).transpose(0, 1).to(channels.dtype), channels))
        operands = self._operands(seen, strength, decay, inputs)
        if states.lengths is None:
            outputs = self._continue_by_tokens(operands, seen, stored["memory"], states)
        else:
            outputs, memory = _delta_chunks(operands, stored["memory"])
            assert inputs.newest is not None
            _store(stored, seen.gather(0, inputs.newest.expand(-1, -1, seen.shape[2])), memory)
        return self.gated_norm(outputs, gate, self.norm, self.epsilon)

    def _continue_by_tokens(self, operands: DeltaOperands, seen: Tensor, memory: Tensor, states: States) -> Tensor:
        outputs = []
        for token in range(operands.v.shape[2]):
            of_token = DeltaOperands(*(part.narrow(2, token, 1) for part in operands))
            output, memory = _delta_step(of_token, memory)
            outputs.append(output)
            stored = {name: state[: len(memory)] for name, state in states.fixed_after(self.number, token).items()}
            _store(stored, seen[token + 1 :][: self.stored_inputs], memory)
        return torch.cat(outputs, dim=2)

    def _operands(self, seen: Tensor, strength: Tensor, decay: Tensor, inputs: DeltaInputs) -> DeltaOperands:
        mixed = self.convolve(seen, self.filters, inputs.age)
        vectors = self.log_scale, self.offset
        return self.split_heads(mixed, strength, decay, self.channels, self.key_dim, *vectors, inputs.is_token)


def _ages(documents: DocumentBounds, length: int) -> Tensor:
    """Return how many tokens of its document are before each token, [b, length]."""
    bounds = documents.bounds
    places = torch.arange(sum(documents.lengths), device=bounds.device)
    numbers = torch.bucketize(places, bounds[1:], right=True)
    return (places - bounds[numbers]).view(-1, length)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _convolve(seen: Tensor, filters: Tensor, age: Tensor | None) -> Tensor:
    """Mix each channel of the newest tokens: [kernel - 1 + s, b, channels] -> [s, b, channels].

    The last of the filters [channels, kernel] is that of the token itself.
    """
    wide, weights = _wide(seen), _wide(filters)
    kernel = filters.shape[1]
    length = len(seen) - kernel + 1
    mixed = wide[kernel - 1 :] * weights[:, -1]
    for back in range(1, kernel):
        earlier = wide[kernel - 1 - back :][:length] * weights[:, -1 - back]
        if age is not None:
            earlier = earlier.masked_fill((age < back).t().unsqueeze(2), 0.0)
        mixed = mixed + earlier
    return mixed


def _split_heads(
    mixed: Tensor,
    strength: Tensor,
    decay: Tensor,
    channels: Sequence[int],
    key_dim: int,
    log_scale: Tensor,
    offset: Tensor,
    is_token: Tensor | None,
) -> DeltaOperands:
    """Return the operands of the delta rule, of channels [s, b, channels], and b and a [s, b, value heads]."""
    q, k, v = F.silu(mixed).split(channels, dim=-1)
    q, k = (x.unflatten(-1, (-1, key_dim)).permute(1, 2, 0, 3) for x in (q, k))
    q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _LENGTH_EPSILON) for x in (q, k))
    v = v.unflatten(-1, (decay.shape[-1], -1)).permute(1, 2, 0, 3)
    log_decay = -_wide(log_scale).exp() * F.softplus(_wide(decay) + _wide(offset))
    beta = torch.sigmoid(_wide(strength))
    if is_token is not None:
        log_decay, beta = (x.masked_fill(~is_token, 0.0) for x in (log_decay, beta))
    return DeltaOperands(q * key_dim**-0.5, k, v, log_decay.permute(1, 2, 0), beta.permute(1, 2, 0))


def _gated_norm(outputs: Tensor, gate: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Norm the outputs of each head [b, value heads, s, d_v], then gate them: [s, b, value heads * d_v]."""
    normed = F.rms_norm(outputs, weight.shape, weight.to(outputs.dtype), epsilon)
    return (normed.permute(2, 0, 1, 3).flatten(2) * F.silu(_wide(gate))).to(gate.dtype)


def _store(stored: Mapping[str, Tensor], newest: Tensor, memory: Tensor) -> None:
    """Keep the newest inputs of the convolution, [kernel - 1, b, channels], and S."""
    stored["convolution"].squeeze(1).copy_(newest.transpose(0, 1))
    stored["memory"].copy_(memory)


def _delta_step(operands: DeltaOperands, memory: Tensor) -> tuple[Tensor, Tensor]:
    """Return the outputs [b, value heads, 1, d_v] of one token, and the matrices after it."""
    q, k, v, log_decay, beta = (part.squeeze(2) for part in operands)
    shared = v.shape[1] // k.shape[1]
    q, k = (x.repeat_interleave(shared, dim=1).unsqueeze(3) for x in (q, k))
    memory = memory * log_decay.exp()[..., None, None]
    change = beta.unsqueeze(2) * (v - (memory * k).sum(2))
    memory = memory + k * change.unsqueeze(2)
    return (memory * q).sum(2).unsqueeze(2), memory


def _delta_chunks(
    operands: DeltaOperands, memory: Tensor | None = None, age: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the outputs [b, value heads, s, d_v] of all tokens, and the matrices after the last one.

    `memory` is that before the first token, by default 0. `age` [b, s] counts the tokens of a document before each one;
    by default a row is one document, which has begun before it if there is a memory.
    """
    batch, key_heads, length, key_dim = operands.k.shape
    chunks = math.ceil(length / CHUNK)
    # Tokens without decay and update change nothing.
    padding = chunks * CHUNK - length
    q, k = (F.pad(x, (0, 0, 0, padding)).view(batch, key_heads, 1, chunks, CHUNK, key_dim) for x in operands[:2])
    v = F.pad(operands.v, (0, 0, 0, padding)).view(batch, key_heads, -1, chunks, CHUNK, operands.v.shape[3])
    log_decay, beta = (F.pad(x, (0, padding)).view(*v.shape[:3], chunks, CHUNK) for x in operands[3:])
    mixed, entering, leaving = _decays(log_decay, None if age is None else _visible(age, padding))
    triangle = (beta.unsqueeze(-1) * mixed * (k @ k.mT)).tril(-1)
    identity = torch.eye(CHUNK, dtype=v.dtype, device=v.device)
    inverse = torch.linalg.solve_triangular(triangle, identity, upper=False, unitriangular=True) * beta.unsqueeze(-2)
    # What each token adds, as a function of the matrices before the chunk.
    added, read = inverse @ v, (inverse * entering.mT) @ k
    scores = mixed * (q @ k.mT)
    queries, keys = entering * q, (leaving * k).mT
    if memory is None:
        memory = v.new_zeros(*operands.v.shape[:2], key_dim, v.shape[-1])
    matrix = memory.view(batch, key_heads, -1, key_dim, v.shape[-1])
    outputs = []
    # Slices one by one would each have a gradient as large as the whole.
    parts = (x.unbind(3) for x in (added, read, scores, queries, keys, entering[..., -1:, :]))
    for of_added, of_read, of_scores, of_queries, of_keys, decay in zip(*parts, strict=True):
        change = of_added - of_read @ matrix
        outputs.append(of_queries @ matrix + of_scores @ change)
        matrix = decay * matrix + of_keys @ change
    joined = torch.stack(outputs, dim=3).flatten(3, 4).flatten(1, 2)
    return joined[:, :, :length], matrix.flatten(1, 2)


def _visible(age: Tensor, padding: int) -> Tensor:
    """Return [b, 1, 1, chunks, c, 1 + c]: whether a token is of the document before the chunk, and of those inside."""
    # Padding continues the last document.
    last = age[:, -1:] + torch.arange(1, padding + 1, device=age.device)
    ages = torch.cat((age, last), dim=1).view(len(age), 1, 1, -1, CHUNK, 1)
    places = torch.arange(CHUNK, device=age.device)
    others = torch.cat((places.new_tensor([-1]), places))
    return ages >= places.unsqueeze(1) - others


def _decays(log_decay: Tensor, visible: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return e^G of g [..., c]: of every token and earlier ones [..., c, c], and on the matrices, [..., c, 1] each: of
    those before the chunk up to every token, and from every token to the end of the chunk.

    Sums of g are not differences of larger sums, which would be less exact.
    """
    size = log_decay.shape[-1]
    # Row t has g_t in the columns of the matrices before the chunk and of all earlier tokens.
    rows = log_decay.unsqueeze(-1).expand(*log_decay.shape, 1 + size)
    sums = rows.tril().cumsum(-2)
    shown = torch.ones(size, 1 + size, dtype=torch.bool, device=log_decay.device).tril(1)
    if visible is not None:
        shown = shown & visible
    decays = sums.masked_fill(~shown, -torch.inf).exp()
    mixed = decays[..., 1:]
    return mixed, decays[..., :1], mixed[..., -1, :].unsqueeze(-1)

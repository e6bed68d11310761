"""The vocabulary sharded over the tensor-parallel ranks: embedding, output head, and the cross entropy of its logits.

With V words and t ranks, each rank holds `padded / t` rows, where `padded` is V rounded up to a multiple of 128 x t.
Rows beyond V are zero, no token looks them up, and the loss ignores them.

With logits z and target y, `loss = log(sum exp(z - m)) - (z_y - m)`, where m is the maximum over all ranks. The z-loss
of PaLM (arXiv 2204.02311) keeps `log sum exp z` near 0, which the cross entropy does not determine.

The loss processes a chunk of tokens at a time, so the logits of a micro-batch never exist at once. For each chunk it
multiplies with the head, gathers three numbers per token and rank, and adds to the gradients of input and weight.
Backward only multiplies these with the gradient of the loss, a scalar. The gather of a chunk overlaps with the gradient
products of the previous one. Recomputing the logits in backward would cost a third more products.

Distillation (Hinton et al., arXiv 1503.02531) computes each chunk's logits u of a teacher as well. With the softmaxes
p of u / T and q of z / T, temperature T and weight W, the loss of a token becomes

    (1 - W) loss + W T^2 KL(p || q),    KL(p || q) = sum p (u - z) / T - log sum exp(u / T) + log sum exp(z / T)

whose second part has the gradient W T (q - p) for z. The sums over the words need four more numbers in the gather.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from megatron_ladder.blueprint.specs import TensorSpec
from megatron_ladder.blueprint.tensors import loss_chunk_tokens
from megatron_ladder.comm.inflight import InFlight
from megatron_ladder.parallel.layout import ParallelModule, Placement
from megatron_ladder.parallel.products import add_product
from megatron_ladder.parallel.scoring import gather_scores, read_scores

IGNORED = -100
"""Label of a token without a loss, as in `torch.nn.functional.cross_entropy`."""


@dataclass(frozen=True)
class SoftTargets:
    """A teacher's distributions of the target tokens.

    Attributes:
        hidden_states: the teacher's stream after its final norm, [s, b, h], or this rank's positions.
        head: the teacher's output head, with as many words as the student's.
        weight: weight W of the distillation loss; that of the cross entropy is 1 - W.
        temperature: divides the logits of teacher and student.
    """

    hidden_states: Tensor
    head: "VocabParallelMatrix"
    weight: float
    temperature: float


@dataclass(frozen=True)
class Targets:
    """The labels of a micro-batch, ids of the whole vocabulary, and what their losses are summed with.

    Attributes:
        labels: [s, b] int64, equal on every rank; `IGNORED` has no loss.
        weights: [s, b] float, weight of each loss; None counts all.
        z_loss_coeff: coefficient of the squared log normaliser.
        predicts: ask for the losses of all tokens and the predicted words instead of a sum.
        soft: the teacher's distributions in a distillation.
        trains_words: whether the matrix gets a gradient, if it trains.
        most_likely: [s, b] int64, receives the word with the largest logit after each token.
    """

    labels: Tensor
    weights: Tensor | None = None
    z_loss_coeff: float = 0.0
    predicts: bool = False
    soft: SoftTargets | None = None
    trains_words: bool = True
    most_likely: Tensor | None = None


class VocabParallelMatrix(ParallelModule):
    """This rank's rows of a `[V, h]` matrix.

    Attributes:
        start: the first word that this rank holds.
        valid: how many of its rows are words; the rest is padding.
        soft_cap: bound of the logits, cap x tanh(logits / cap); None for no bound.
    """

    weight: nn.Parameter

    def __init__(self, tensor: TensorSpec, place: Placement, soft_cap: float | None = None) -> None:
        super().__init__(place)
        self.layout = place.mesh.stream
        self.linear = place.linear
        self.soft_cap = soft_cap
        self.start, self.valid = tensor.slice_of(self.group.rank, self.group.size)
        self.add_parameter("weight", [tensor], place)

    def logits(self, hidden_states: Tensor) -> Tensor:
        """Map the stream to `x @ weight_shard^T`, [s, b, padded V / t]; columns from `valid` on are padding."""
        logits = self.linear(self.layout.enter(hidden_states), self.weight, None)
        return logits if self.soft_cap is None else torch.tanh(logits / self.soft_cap) * self.soft_cap

    @torch.no_grad()
    def _predictions(self, x: Tensor, labels: Tensor) -> Tensor:
        """Return the losses of labels [n] after tokens [n, h], and the most likely words: [2, n] fp64."""
        predictions = x.new_empty(2, x.shape[0], dtype=torch.float64)
        for rows in _chunks(x.shape[0]):
            logits = self._masked(self.linear(x[rows], self.weight, None))
            wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
            predictions[:, rows] = read_scores(gather_scores(wide, labels[rows], self.start, self.group))
        predictions[0].neg_()
        return predictions

    def masked_logits(self, x: Tensor, weight: Tensor) -> Tensor:
        """[n, h] -> [n, padded V / t], outside autograd; padding columns are the lowest number."""
        return self._masked(x @ weight.t())

    def _masked(self, logits: Tensor) -> Tensor:
        if self.soft_cap is not None:
            logits.div_(self.soft_cap).tanh_().mul_(self.soft_cap)
        logits[:, self.valid :].fill_(torch.finfo(logits.dtype).min)
        return logits

    def loss(self, hidden_states: Tensor, targets: Targets) -> Tensor:
        """Return the cross entropy of the stream and the extra losses of the targets: [1 + n], equal on every rank.

        The extra losses are the z-loss, if it has a coefficient, and the distillation loss T^2 KL(p || q), if there is
        a teacher. All are weighted sums over the tokens, in fp32 (fp64 for fp64 logits). The cross entropy has the
        gradient of the whole loss, so that runs with and without extra losses are comparable. If `targets.predicts`,
        return instead [2, s, b] fp64, without gradients: the loss of each label, and the word with the largest logit.
        """
        x, labels = self.layout.enter(hidden_states), targets.labels
        if targets.predicts:
            return self._predictions(x.flatten(0, 1), labels.flatten()).view(2, *labels.shape)
        trains_words = self.weight.requires_grad and targets.trains_words
        wanted = (x.requires_grad, trains_words) if torch.is_grad_enabled() else (False, False)
        return _ChunkedLoss.apply(x, self.weight, targets, self, wanted)


class VocabParallelEmbedding(VocabParallelMatrix):
    """Looks up tokens; a rank contributes zero for words that other ranks hold, and the ranks' rows are summed."""

    def forward(self, tokens: Tensor) -> Tensor:
        """Token ids [b, s] -> the stream: [s, b, h], or this rank's positions of it."""
        local = tokens.t() - self.start
        elsewhere = (local < 0) | (local >= self.valid)
        rows = F.embedding(local.masked_fill(elsewhere, 0), self.weight)
        return self.layout.start_write(rows.masked_fill(elsewhere.unsqueeze(-1), 0.0)).wait()


class VocabParallelHead(VocabParallelMatrix):
    """The output head."""

    def forward(self, hidden_states: Tensor, targets: Targets | None = None) -> Tensor:
        """See `logits`, and `loss` if there are targets. ZeRO-3 gathers the weight for a call of the module."""
        return self.logits(hidden_states) if targets is None else self.loss(hidden_states, targets)


def _softmax_of_words(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the softmax over this rank's words in fp32 at least, and of each token, the maximum, the sum, and a logit.

    The sum is that of exp(logit - maximum). `logits` are [n, padded V / t], and `target` [n, 1] is a word of the rank.
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    softmax = wide.softmax(-1)
    # The largest probability is exp(0) / sum.
    return softmax, wide.amax(-1), softmax.amax(-1).reciprocal_(), wide.gather(-1, target).squeeze(-1)


def _gradient_of_words(
    softmax: Tensor, share: Tensor, grad_softmax: Tensor, target: Tensor, grad_target: Tensor
) -> Tensor:
    """Return the gradient of the logits of this rank's words, which have a share [n] of the probability of all words.

    The gradients of the logarithm of the softmax's sum and of the target's logit are [n]. Overwrites the softmax.
    """
    result = softmax.mul_(share.unsqueeze(-1)).mul_(grad_softmax.unsqueeze(-1))
    return result.scatter_add_(-1, target, grad_target.unsqueeze(-1))


class _Chunk:
    """The softmax of some tokens over this rank's words, and the gather of all ranks' maximum, sum and target logit."""

    def __init__(
        self,
        logits: Tensor,
        labels: Tensor,
        words: VocabParallelMatrix,
        teacher_logits: Tensor | None = None,
        temperature: float = 1.0,
        predicts: bool = False,
    ) -> None:
        """`teacher_logits`, of the same words, are compared with the others at a temperature, and overwritten. The most
        likely words are found only if it `predicts`."""
        local = labels - words.start
        elsewhere = (local < 0) | (local >= words.valid)
        self._target, self._elsewhere = local.masked_fill_(elsewhere, 0).unsqueeze(-1), elsewhere
        self._softmax, self._maximum, self._sum, target = _softmax_of_words(logits, self._target)
        target.masked_fill_(elsewhere, 0.0)
        self.distance: _Distance | None = None
        if teacher_logits is not None:
            dtype = self._softmax.dtype
            self.distance = _Distance(logits.to(dtype), teacher_logits.to(dtype), temperature, words.group.rank)
        more = [] if self.distance is None else [*self.distance.numbers]
        self._predicts = predicts
        if predicts:
            # fp32 represents all ids exactly.
            more.append((logits.argmax(-1) + words.start).to(target.dtype))
        own = torch.stack((self._maximum, self._sum, target, *more)).unsqueeze(0)
        self._gathered = InFlight(*words.group.start_all_gather(own))
        self._slope: Tensor | None = None
        if words.soft_cap is not None:
            # Clamped for the padding.
            self._slope = logits.div_(words.soft_cap).clamp_(-1.0, 1.0).square_().neg_().add_(1.0)

    def finish(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the loss and the log normaliser, log sum exp, of each token, and the most likely word if requested."""
        maxima, sums, targets, *more = self._gathered.wait().unbind(1)
        word = None
        if self._predicts:
            word = more.pop().gather(0, maxima.argmax(0, keepdim=True)).squeeze(0)
        if self.distance is not None:
            self.distance.finish(maxima, *more)
        maximum = maxima.amax(0)
        total = (sums * (maxima - maximum).exp_()).sum(0)
        self._share = self._sum * (self._maximum - maximum).exp_() / total
        log_total = total.log_()
        return log_total - (targets.sum(0) - maximum), log_total + maximum, word

    def gradient(
        self, weights: Tensor, grad_softmax: Tensor, grad_distance: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        """Return the logits' gradient for a gradient of each loss, of loss and log normaliser together, and of KL."""
        grad_target = weights.masked_fill(self._elsewhere, 0.0).neg_()
        result = _gradient_of_words(self._softmax, self._share, grad_softmax, self._target, grad_target)
        if self.distance is not None and grad_distance is not None:
            result.add_(self.distance.gradient(grad_distance))
        return (result if self._slope is None else result.mul_(self._slope)).to(dtype)


class _Distance:
    """The softmaxes q of a student and p of a teacher over this rank's words, and KL(p || q), over some tokens."""

    def __init__(self, logits: Tensor, teacher_logits: Tensor, temperature: float, rank: int) -> None:
        """Compare logits [n, padded V / t] of this rank; overwrites those of the teacher."""
        self._temperature, self._rank = temperature, rank
        self._student, _, student_sum = self._softmax(logits)
        self._teacher, teacher_maximum, teacher_sum = self._softmax(teacher_logits)
        difference = teacher_logits.sub_(logits).mul_(self._teacher).sum(-1).div_(temperature)
        self.numbers = (student_sum, teacher_maximum, teacher_sum, difference)
        """This rank's part of the arguments of `finish`, except for the first."""
        self.divergence = difference
        """KL(p || q) of each token, [n], once `finish` was called."""

    def _softmax(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the softmax over this rank's words, the maximal logit, and the sum of exp((logit - maximum) / T)."""
        maximum = logits.amax(-1)
        # Subtracted first: padding divided by a temperature below 1 would be infinite.
        softmax = (logits - maximum.unsqueeze(-1)).div_(self._temperature).softmax(-1)
        return softmax, maximum, softmax.amax(-1).reciprocal_()

    def finish(
        self, maxima: Tensor, sums: Tensor, teacher_maxima: Tensor, teacher_sums: Tensor, differences: Tensor
    ) -> None:
        """Receive the numbers of all ranks, [t, n] each; the softmaxes are then over all words."""
        shares, normalizer = self._shares(maxima, sums)
        teacher_shares, teacher_normalizer = self._shares(teacher_maxima, teacher_sums)
        self._student.mul_(shares[self._rank].unsqueeze(-1))
        self._teacher.mul_(teacher_shares[self._rank].unsqueeze(-1))
        self.divergence = (teacher_shares * differences).sum(0) - teacher_normalizer + normalizer

    def _shares(self, maxima: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
        """Return the probability of each rank's words, [t, n], and the log normaliser, [n]."""
        maximum = maxima.amax(0)
        masses = sums * ((maxima - maximum) / self._temperature).exp()
        total = masses.sum(0)
        return masses / total, total.log() + maximum / self._temperature

    def gradient(self, weights: Tensor) -> Tensor:
        """Return the gradient of the student's logits for a gradient of each divergence; call it once."""
        return self._student.sub_(self._teacher).mul_((weights / self._temperature).unsqueeze(-1))


def _chunks(tokens: int) -> list[slice]:
    size = loss_chunk_tokens(tokens)
    return [slice(start, min(start + size, tokens)) for start in range(0, tokens, size)]


class _ChunkedLoss(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, targets: Targets, words: VocabParallelMatrix, wanted: tuple[bool, bool]
    ) -> Tensor:
        inputs, labels, shape = x.flatten(0, 1), targets.labels.flatten(), targets.labels.shape
        wide = torch.promote_types(x.dtype, torch.float32)
        losses, normalizers = torch.empty(2, *shape, dtype=wide, device=x.device)
        weights = torch.ones_like(losses) if targets.weights is None else targets.weights.to(wide).contiguous()
        weights = weights.masked_fill(targets.labels == IGNORED, 0.0)
        grad_input = torch.empty_like(inputs) if wanted[0] else None
        grad_weight = torch.zeros_like(weight, dtype=wide) if wanted[1] else None
        soft = targets.soft
        divergences = None if soft is None else torch.empty_like(losses)
        teacher_inputs = None if soft is None else soft.head.layout.enter(soft.hidden_states).flatten(0, 1)

        def teacher_logits(rows: slice) -> Tensor | None:
            if soft is None or teacher_inputs is None:
                return None
            return soft.head.masked_logits(teacher_inputs[rows], soft.head.weight)

        def multiply(gradient: Tensor, rows: slice) -> None:
            if grad_input is not None:
                torch.mm(gradient, weight, out=grad_input[rows])
            if grad_weight is not None:
                add_product(grad_weight, gradient.t(), inputs[rows])

        temperature = 1.0 if soft is None else soft.temperature
        ready: tuple[Tensor, slice] | None = None
        for rows in _chunks(inputs.shape[0]):
            chunk = _Chunk(
                words.masked_logits(inputs[rows], weight),
                labels[rows],
                words,
                teacher_logits(rows),
                temperature,
                predicts=targets.most_likely is not None,
            )
            if ready is not None:
                multiply(*ready)
            loss, normalizer, word = chunk.finish()
            losses.view(-1)[rows], normalizers.view(-1)[rows] = loss, normalizer
            if targets.most_likely is not None and word is not None:
                targets.most_likely.view(-1)[rows] = word.long()
            if divergences is not None and chunk.distance is not None:
                divergences.view(-1)[rows] = chunk.distance.divergence
            if any(wanted):
                ready = chunk.gradient(*_slopes(targets, weights.view(-1)[rows], normalizer), x.dtype), rows
            del chunk
        if ready is not None:
            multiply(*ready)
        ctx.shape, ctx.dtype = x.shape, weight.dtype
        ctx.save_for_backward(grad_input, grad_weight)
        found = [(losses * weights).sum()]
        if targets.z_loss_coeff:
            found.append(targets.z_loss_coeff * (normalizers.square() * weights).sum())
        if divergences is not None:
            found.append(temperature**2 * (divergences * weights).sum())
        return torch.stack(found)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        grad_input, grad_weight = ctx.saved_tensors
        # In place, so a second backward of one graph is an error of autograd.
        if grad_input is not None:
            grad_input = grad_input.mul_(gradient[0]).view(ctx.shape)
        if grad_weight is not None:
            grad_weight = grad_weight.mul_(gradient[0]).to(ctx.dtype)
        return grad_input, grad_weight, None, None, None


def _slopes(targets: Targets, weights: Tensor, normalizers: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the arguments of `_Chunk.gradient` for tokens with these weights and log normalisers, [n] each."""
    soft, share = targets.soft, 1.0
    grad_loss, grad_distance = weights, None
    if soft is not None:
        share = 1 - soft.weight
        grad_loss, grad_distance = share * weights, soft.weight * soft.temperature**2 * weights
    grad_softmax = weights * (share + 2 * targets.z_loss_coeff * normalizers) if targets.z_loss_coeff else grad_loss
    return grad_loss, grad_softmax, grad_distance

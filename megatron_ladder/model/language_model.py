"""The whole decoder: embedding, stack, final norm, output head and loss, or the part of these on a pipeline stage.

Layouts: token ids and labels [b, s]; hidden_states [s, b, h]; state [1 + pending, s, b, h], see `sub_block.py`;
logits_shard_v [s, b, padded V / t].
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Function

from megatron_ladder.blueprint.model import ModelConfig
from megatron_ladder.blueprint.tensors import embedding_tensor, final_norm_tensor, head_tensor, mtp_tensors
from megatron_ladder.comm.group import to_device
from megatron_ladder.comm.mesh import ProcessMesh
from megatron_ladder.model.documents import DocumentBounds
from megatron_ladder.model.experts import DividedExperts, Router
from megatron_ladder.model.mtp import DraftingHead, MTPOptions, names_of_depth, shift_targets, shift_tokens
from megatron_ladder.model.norm import RMSNorm
from megatron_ladder.model.operations import BuildContext, ExpertOptions
from megatron_ladder.model.stack import StackOptions, TransformerStack
from megatron_ladder.model.stats import PassStats, StepStats
from megatron_ladder.model.sub_block import SequenceContext
from megatron_ladder.parallel.layout import initialize
from megatron_ladder.parallel.products import GradientSink, linear
from megatron_ladder.parallel.vocabulary import (
    IGNORED,
    SoftTargets,
    Targets,
    VocabParallelEmbedding,
    VocabParallelHead,
    VocabParallelMatrix,
)

_DEFAULT_OPTIONS = StackOptions()
_NO_LOSSES = ExpertOptions()
_DEFAULT_MTP = MTPOptions()


class LossScales(NamedTuple):
    """Factors that turn sums over a global batch into means: scalars in fp64, on the device."""

    targets: Tensor
    """1 / number of target tokens, for the losses of the head."""
    tokens: Tensor
    """1 / number of tokens without padding, for the losses of bodies."""
    mtp_targets: Tensor
    """1 / number of target tokens of the drafting head at each depth, [depths]."""


class StageInputs(NamedTuple):
    """A micro-batch as all chunks of a rank read it."""

    tensors: Sequence[Any]
    """The arguments of `LanguageModel.stage` that have a position."""
    context: SequenceContext


class LanguageModel(nn.Module):
    """This rank's slices of a Llama-family decoder of any wiring.

    One or more ranges of its layers are a pipeline stage: the first stage also holds the embedding, the last one the
    final norm and the heads. With a tied or a drafting head the last stage has a copy of the embedding's matrix
    (`copies_embedding`); the copy is not counted in norms and is not saved.
    """

    embedding: VocabParallelEmbedding
    """On the first stage, and where a head reads the matrix."""
    final_norm: RMSNorm
    """On the last stage."""

    def __init__(
        self,
        config: ModelConfig,
        mesh: ProcessMesh,
        options: StackOptions = _DEFAULT_OPTIONS,
        *,
        chunks: Sequence[range] | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
        seed: int | None = None,
        z_loss_coeff: float = 0.0,
        distillation: "Distillation | None" = None,
        experts: ExpertOptions = _NO_LOSSES,
        mtp: MTPOptions = _DEFAULT_MTP,
    ) -> None:
        """Build all layers, or the chunks of a pipeline stage. Without a seed, weights stay uninitialised.

        The initial weights of a seed do not depend on the layout. A teacher never becomes a part of this module.
        """
        super().__init__()
        device = device or torch.device("cpu")
        chunks = [range(config.num_layers)] if chunks is None else chunks
        ops = options.operations.for_model(config)
        self.gradient_sink = GradientSink()
        product = ops.linear or partial(linear, sink=self.gradient_sink)
        build = BuildContext(
            mesh,
            dtype,
            device,
            product,
            config=config,
            operations=ops,
            experts=experts,
            gradient_sink=self.gradient_sink,
        )
        self.config = config
        self.group = mesh.tensor
        self.distillation = distillation
        self._z_loss_coeff = z_loss_coeff
        self.compute_dtype = dtype
        self.is_first, self.is_last = chunks[0].start == 0, chunks[-1].stop == config.num_layers
        self.chunks = len(chunks)
        self.copies_embedding = self._reads_embedding_twice and self.is_last and not self.is_first
        if self.is_first or self.copies_embedding:
            self.embedding = VocabParallelEmbedding(embedding_tensor(config), build, config.logit_soft_cap)
        if self.copies_embedding:
            sections = self.embedding.sections
            sections["weight"] = tuple(replace(section, counted=False) for section in sections["weight"])
        self.stack = TransformerStack(build, chunks, options)
        head_losses = {"z loss": z_loss_coeff != 0, "distillation loss": distillation is not None}
        self._head_losses = tuple(name for name, is_used in head_losses.items() if is_used)
        stage_layers = [layer for layers in chunks for layer in layers]
        self._mtp_options = mtp
        self.mtp: DraftingHead | None = None
        """On the last stage of a model that has one."""
        tensors = mtp_tensors(config)
        if self.is_last and tensors is not None:
            recomputed = int(options.recompute_layers >= len(stage_layers))
            self.mtp = DraftingHead(build, tensors, replace(options, recompute_layers=recomputed), mtp.depths)
            stage_layers.append(config.num_layers)
        self.routers = [module for module in self.modules() if isinstance(module, Router)]
        self.expert_capacity = experts.capacity
        self._router_rows = [row for row, layer in enumerate(config.mtp_config.moe_layers) if layer in stage_layers]
        self.mtp_depths = 0 if tensors is None else mtp.depths
        """How often training and evaluation apply the drafting head, on any stage."""
        self.mtp_losses = tuple(name for depth in range(self.mtp_depths) for name in names_of_depth(depth))
        self.extra_losses = (*self._head_losses, *self.mtp_losses, *self.stack.loss_names)
        """Names of the losses that are in the gradient of the model's loss but not in its value, and of the drafting
        head's confirmed shares, which have no gradient."""
        self._from_0: SequenceContext | None = None
        """The context of the latest micro-batch whose rows are single documents with positions from 0."""
        if self.is_last:
            self.final_norm = RMSNorm(build, final_norm_tensor(config))
        self.lm_head: VocabParallelHead | None = None
        if self.is_last and not config.tie_embeddings:
            self.lm_head = VocabParallelHead(head_tensor(config), build, config.logit_soft_cap)
        if seed is not None:
            initialize(self, seed)

    @property
    def device(self) -> torch.device:
        """The device of the layers."""
        return next(self.stack.parameters()).device

    @property
    def head(self) -> VocabParallelMatrix:
        """The matrix of the output head: the embedding's if it is tied."""
        return self.embedding if self.lm_head is None else self.lm_head

    @property
    def _reads_embedding_twice(self) -> bool:
        return self.config.tie_embeddings or self.config.mtp_num_layers > 0

    @property
    def tied_weight(self) -> nn.Parameter | None:
        """The embedding's matrix if this is one of two pipeline stages with a copy, whose gradients are summed."""
        return self.embedding.weight if self._reads_embedding_twice and self.is_first != self.is_last else None

    def hidden_states(self, tokens: Tensor, context: SequenceContext) -> Tensor:
        """Token ids [b, s] -> the complete stream after the last layer, [s, b, h], or this rank's positions of it."""
        state, _ = self.stack(self.embedding(tokens).unsqueeze(0), context)
        hidden_states: Tensor = state[0]
        return hidden_states

    def logits_shard(self, hidden_states: Tensor) -> Tensor:
        """The stream -> this rank's logits [s, b, padded V / t]; columns from `head.valid` on are padding."""
        normed = self.final_norm(hidden_states)
        return self.embedding.logits(normed) if self.lm_head is None else self.lm_head(normed)

    def read_by_mtp(self, hidden_states: Tensor) -> Tensor:
        """The stream after the last layer -> what the drafting head reads of it."""
        return hidden_states if self.config.mtp_before_final_norm else self.final_norm(hidden_states)

    def forward(self, *inputs: Any, with_stats: bool = False, **options: Any) -> Tensor | tuple[Tensor, PassStats]:
        """Return what `stage` returns, by default without what the pass counts; training calls it for users' hooks."""
        result, stats = self.stage(*inputs, **options)
        return (result, stats) if with_stats else result

    def stage(
        self,
        tokens: Tensor,
        labels: Tensor,
        loss_mask: Tensor | None = None,
        positions: Tensor | None = None,
        lengths: Tensor | None = None,
        document_bounds: Tensor | None = None,
        *,
        context: SequenceContext | None = None,
        entering: Tensor | None = None,
        chunk: int = 0,
        scales: LossScales | None = None,
        predicts: bool = False,
    ) -> tuple[Tensor, PassStats]:
        """Run a chunk of layers; return the state that leaves it, and what the pass counts in training.

        The last chunk of the model returns instead of a state the loss summed over the target tokens that count, or the
        `predictions` if `predicts` is set. Backward from the state or loss also runs that of the extra losses, which
        are among the `PassStats`.

        Args:
            tokens: [b, s] int64; only the model's first chunk and a drafting head read them.
            labels: [b, s] int64, the token that follows each; -100 has no loss. Only the model's last chunk reads them.
            loss_mask: [b, s] float, weight of each target token; None counts all.
            positions, lengths, document_bounds: see `training_context`.
            context: what `training_context` has returned for the micro-batch, for several chunks that share it.
            entering: the state that leaves the previous chunk; None for the first chunk of the model.
            chunk: number of the rank's chunk to run.
            scales: factors of the losses, whose sums over tokens have the factor 1 without them.

        The loss is a scalar in fp32 (fp64 for an fp64 model), equal on every tensor-parallel rank. Other ids than those
        of the vocabulary raise RuntimeError; on a GPU, a later call raises it.
        """
        trains = torch.is_grad_enabled()
        soft = None
        if self.distillation is not None and trains:
            # First, while the student keeps nothing for backward yet.
            soft = self.distillation.soft_targets(tokens, positions, document_bounds)
        if context is None:
            context = self.training_context(tokens, positions, lengths, document_bounds)
        if entering is None:
            self._check_ids(self._is_word(tokens))
            entering = self.embedding(tokens).unsqueeze(0)
        context = context._replace(counts=trains)
        leaving, stats = self.stack(entering, context, chunk)
        if stats.losses:
            leaving = _Carrying.apply(leaving, 1.0 if scales is None else scales.tokens, *stats.losses.values())
            stats = stats.detached()
        if not self.ends_in(chunk):
            return leaving, stats
        self._check_ids(self._is_word(labels) | (labels == IGNORED))
        if predicts:
            return self.predictions(leaving[0], labels), stats
        # The loss has the gradients of the extra losses, not their values, so that it can be compared with others.
        weights = None if loss_mask is None else loss_mask.t()
        z_loss_coeff = self._z_loss_coeff if trains else 0.0
        most_likely = None if self.mtp is None else labels.new_empty(labels.t().shape)
        targets = Targets(labels.t(), weights, z_loss_coeff, soft=soft, most_likely=most_likely)
        normed = self.final_norm(leaving[0])
        losses = self._loss(normed, targets)
        if trains:
            stats = stats.plus(PassStats(dict(zip(self._head_losses, losses[1:], strict=True))).detached())
        loss = losses[0] if scales is None else losses[0] * scales.targets.to(losses.dtype)
        if most_likely is not None:
            hidden_states = leaving[0] if self.config.mtp_before_final_norm else normed
            mtp_losses, mtp_stats = self._mtp_losses(
                hidden_states, most_likely.t(), tokens, labels, loss_mask, context, scales
            )
            of_head = mtp_losses.sum() if scales is None else mtp_losses @ scales.mtp_targets.to(mtp_losses.dtype)
            loss = _Carrying.apply(loss, self._mtp_options.loss_scale / self.mtp_depths, of_head)
            stats = stats.plus(mtp_stats)
        return loss, stats

    def _mtp_losses(
        self,
        hidden_states: Tensor,
        most_likely: Tensor,
        tokens: Tensor,
        labels: Tensor,
        loss_mask: Tensor | None,
        context: SequenceContext,
        scales: LossScales | None,
    ) -> tuple[Tensor, PassStats]:
        """Return the loss of each depth of the drafting head, summed over its target tokens, [depths], and what its
        passes count, including these losses and the confirmed predictions.

        Backward also runs that of the layer's extra losses, which are averaged over the depths, as in Megatron-LM.

        Args:
            most_likely: the most likely token of the model after each token, [b, s].
        """
        assert self.mtp is not None
        options = self._mtp_options
        bounds = None if context.documents is None else context.documents.bounds
        if options.detaches:
            hidden_states = hidden_states.detach()
        losses: list[Tensor] = []
        all_stats = PassStats()
        for depth in range(self.mtp_depths):
            tokens = shift_tokens(tokens)
            labels, loss_mask = shift_targets(labels, loss_mask, bounds)
            next_embeddings = self.embedding(tokens)
            if options.detaches:
                next_embeddings = next_embeddings.detach()
            hidden_states, stats = self.mtp(next_embeddings, hidden_states, context)
            stats = stats._replace(losses={name: loss / self.mtp_depths for name, loss in stats.losses.items()})
            if stats.losses:
                scale = 1.0 if scales is None else scales.tokens
                hidden_states = _Carrying.apply(hidden_states, scale, *stats.losses.values())
            drafts = labels.new_empty(labels.t().shape)
            weights = None if loss_mask is None else loss_mask.t()
            targets = Targets(labels.t(), weights, trains_words=not options.detaches, most_likely=drafts)
            losses.append(self._loss(hidden_states, targets)[0])
            # The model predicts the same token one position later than at the depth before.
            most_likely = shift_tokens(most_likely)
            counted = (labels != IGNORED).double() if loss_mask is None else loss_mask.double()
            confirmed = ((drafts.t() == most_likely) * counted).sum()
            of_depth = dict(zip(names_of_depth(depth), (losses[-1], confirmed), strict=True))
            all_stats = all_stats.plus(stats).plus(PassStats(of_depth)).detached()
        return torch.stack(losses), all_stats

    def _is_word(self, ids: Tensor) -> Tensor:
        return (ids >= 0) & (ids < self.config.vocab_size)

    def _check_ids(self, are_known: Tensor) -> None:
        text = f"tokens and labels: expected 0 to {self.config.vocab_size - 1}; labels may be {IGNORED}"
        torch._assert_async(are_known.all(), text)

    def begins_in(self, chunk: int) -> bool:
        """Return whether a chunk is the model's first one, which reads tokens."""
        return self.is_first and chunk == 0

    def ends_in(self, chunk: int) -> bool:
        """Return whether a chunk is the model's last one, which returns losses."""
        return self.is_last and chunk == self.chunks - 1

    def trains_in(self, chunk: int) -> bool:
        """Return whether a chunk has weights that train."""
        ends: list[nn.Module] = [self.embedding] if self.begins_in(chunk) else []
        if self.ends_in(chunk):
            ends += [self.final_norm, self.head, *([] if self.mtp is None else [self.mtp])]
        weights = (parameter for module in ends for parameter in module.parameters())
        return any(step.trains for step in self.stack.sub_blocks(chunk)) or any(one.requires_grad for one in weights)

    def allocate_state(self, tokens: Tensor, chunk: int, leaves: bool = False) -> Tensor:
        """Return a buffer for the state that enters, or leaves, a chunk with these token ids [b, s]."""
        rows, length = tokens.shape
        slots = self.stack.slots_out(chunk) if leaves else self.stack.slots_in(chunk)
        shape = sum(slots), length // self.stack.layout.shards, rows, self.config.hidden_size
        return next(self.stack.parameters()).new_empty(shape)

    def messages_of(self, state: Tensor, chunk: int, leaves: bool = False) -> Sequence[Tensor]:
        """Return the messages of the state that enters, or leaves, a chunk, or of its gradient."""
        return state.split(self.stack.slots_out(chunk) if leaves else self.stack.slots_in(chunk))

    def predictions(self, hidden_states: Tensor, labels: Tensor) -> Tensor:
        """The stream after the last layer [s, b, h] -> the loss of each label, and the token with the largest logit.

        Return [2, s, b] fp64, equal on every tensor-parallel rank.
        """
        return self._loss(self.final_norm(hidden_states), Targets(labels.t(), predicts=True))

    def _loss(self, normed: Tensor, targets: Targets) -> Tensor:
        losses: Tensor = self.embedding.loss(normed, targets) if self.lm_head is None else self.lm_head(normed, targets)
        return losses

    def new_step_stats(self) -> StepStats:
        """Return zeros that the passes of a step add to."""
        wide = torch.promote_types(self.compute_dtype, torch.float32)
        routed = self.config.mtp_config.moe_layers
        return StepStats(self.extra_losses, routed, self.config.num_experts, wide, self.device)

    def mean_losses(self, sums: Tensor, scales: LossScales) -> Tensor:
        """Return each of the `extra_losses` of a global batch from its sum over tokens: [n] fp64."""
        of_head = scales.targets.expand(len(self._head_losses))
        of_mtp = scales.mtp_targets.repeat_interleave(2)
        of_bodies = scales.tokens.expand(len(self.stack.loss_names))
        return sums * torch.cat([of_head, of_mtp, of_bodies])

    def set_expert_capacity(self, rows: int) -> None:
        """Let each rank send so many rows to each expert from the next pass on."""
        self.expert_capacity = rows
        for module in self.modules():
            if isinstance(module, DividedExperts):
                module.capacity = rows

    @torch.no_grad()
    def follow_loads(self, loads: Tensor, rate: float) -> None:
        """Move the bias of each expert by `rate`, for the loads of a global batch: down if its load exceeds the mean,
        up if it is below."""
        biases = [router.expert_bias for router in self.routers if router.expert_bias is not None]
        if not biases:
            return
        # Loads are whole numbers, so that every device finds the same sign.
        above = torch.sign(loads * loads.shape[-1] - loads.sum(-1, keepdim=True)).float()
        above = to_device(above[self._router_rows], biases[0].device)
        torch._foreach_sub_(biases, above.unbind(), alpha=rate)

    def stage_inputs(
        self,
        tokens: Tensor,
        labels: Tensor,
        loss_mask: Tensor | None = None,
        positions: Tensor | None = None,
        lengths: Tensor | None = None,
        document_bounds: Tensor | None = None,
    ) -> StageInputs:
        """Copy what this stage reads of a micro-batch to the device, and make the context that its chunks share."""
        device = self.device

        def moved(tensor: Tensor | None, is_read: bool = True) -> Any:
            return to_device(tensor, device) if tensor is not None and is_read else tensor

        tokens = moved(tokens, self.is_first or self.mtp is not None)
        labels = moved(labels, self.is_last)
        loss_mask = moved(loss_mask, self.is_last)
        positions = moved(positions)
        lengths = moved(lengths)
        context = self.training_context(tokens, positions, lengths, document_bounds, self._from_0)
        # Autograd cannot save what was made in inference mode.
        if positions is None and document_bounds is None and not torch.is_inference_mode_enabled():
            self._from_0 = context
        return StageInputs((tokens, labels, loss_mask, positions, lengths, document_bounds), context)

    def training_context(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        lengths: Tensor | None = None,
        document_bounds: Tensor | None = None,
        earlier: SequenceContext | None = None,
    ) -> SequenceContext:
        """Return the context of whole rows, on the device of the layers.

        Args:
            tokens: [b, s], of which only the shape counts.
            positions: [b, s] int64, rotary position of each token; None counts from 0 in every row.
            lengths: [b] int64, number of tokens before the padding of each row; None: no padding.
            document_bounds: [documents + 1] int32 on the CPU: the start of each document among the b * s tokens, row
                after row, and b * s. Every row begins a document, and tokens attend only within their document. None:
                every token attends to all earlier ones of its row.
            earlier: the context of another micro-batch whose positions count from 0, to be used again if it is as long.
        """
        length = tokens.shape[1]
        device = self.device
        documents = None if document_bounds is None else DocumentBounds.of(document_bounds, device)
        token_mask = None if lengths is None else torch.arange(length, device=device).unsqueeze(1) < lengths
        is_from_0 = positions is None and documents is None
        if is_from_0 and earlier is not None and len(earlier.positions) == length:
            return earlier._replace(token_mask=token_mask)
        places = torch.arange(length, device=device).unsqueeze(1) if positions is None else positions.t()
        context = self.stack.prepare(SequenceContext(places, documents=documents, token_mask=token_mask))
        if self.mtp is None:
            return context
        return context._replace(prepared={**self.mtp.stack.prepare(context).prepared, **context.prepared})


class _Carrying(Function):
    """Returns `x`. In backward, each of the `losses` has the gradient `scale`, whatever the gradient of the result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor | float, *losses: Tensor) -> Tensor:
        ctx.scale, ctx.dtype = scale, losses[0].dtype
        ctx.losses = len(losses)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        scale = torch.as_tensor(ctx.scale, dtype=ctx.dtype, device=gradient.device)
        return gradient, None, *(scale for _ in range(ctx.losses))


@dataclass(frozen=True)
class Distillation:
    """A frozen teacher, from whose distributions a model learns.

    Attributes:
        teacher: a whole model with as many words as the student, on the same tensor-parallel ranks.
        weight: weight of the distillation loss, 0 to 1; that of the cross entropy is 1 - weight.
        temperature: divides the logits of teacher and student.
    """

    teacher: LanguageModel
    weight: float
    temperature: float

    @torch.no_grad()
    def soft_targets(
        self, tokens: Tensor, positions: Tensor | None = None, document_bounds: Tensor | None = None
    ) -> SoftTargets:
        """Run the teacher over a micro-batch, with the arguments of `LanguageModel.stage`."""
        context = self.teacher.training_context(tokens, positions, document_bounds=document_bounds)
        normed = self.teacher.final_norm(self.teacher.hidden_states(tokens, context))
        return SoftTargets(normed, self.teacher.head, self.weight, self.temperature)

"""The whole decoder: embedding, stack, final norm, output head and loss; or of these what a pipeline stage holds.

Layouts: token ids and labels [b, s]; hidden_states [s, b, h]; state [1 + pending, s, b, h], see `stack.py`;
logits_shard_v [s, b, padded V / t].
"""

from dataclasses import replace

import torch
from torch import Tensor, nn

from megatron_ladder.blueprint.model import ModelConfig
from megatron_ladder.blueprint.tensors import embedding_tensor, final_norm_tensor, head_tensor
from megatron_ladder.comm.mesh import ProcessMesh
from megatron_ladder.model.attention import SequenceContext
from megatron_ladder.model.documents import Documents
from megatron_ladder.model.norm import RMSNorm, positions_over
from megatron_ladder.model.rotary import rotary_table
from megatron_ladder.model.stack import StackOptions, TransformerStack
from megatron_ladder.parallel.cross_entropy import vocab_parallel_cross_entropy
from megatron_ladder.parallel.embedding import VocabParallelEmbedding, VocabParallelHead, vocab_parallel_logits
from megatron_ladder.parallel.layout import initialize

DEFAULT_OPTIONS = StackOptions()


class LanguageModel(nn.Module):
    """A Llama-family decoder of any wiring, this rank's slices of it.

    A range of its layers is a pipeline stage: the first holds the embedding as well, the last the final norm and the
    head. With a tied head the last stage has a copy of the embedding's matrix, which `copies_embedding` tells; the
    copy counts in no norm and is not saved.
    """

    embedding: VocabParallelEmbedding
    """On the first stage, and where the matrix is the head."""
    final_norm: RMSNorm
    """On the last stage."""

    def __init__(
        self,
        config: ModelConfig,
        mesh: ProcessMesh,
        options: StackOptions = DEFAULT_OPTIONS,
        *,
        layers: range | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
        seed: int | None = None,
    ) -> None:
        """
        Args:
            layers: of a pipeline stage; all layers if not given.
            seed: initial weights are drawn from it, alike for every layout; None leaves them uninitialised, for
                weights that are loaded.
        """
        super().__init__()
        device = device or torch.device("cpu")
        layers = range(config.num_layers) if layers is None else layers
        self.config = config
        self.group = mesh.tensor
        self.compute_dtype = dtype
        self.is_first, self.is_last = layers.start == 0, layers.stop == config.num_layers
        self.copies_embedding = config.tie_embeddings and self.is_last and not self.is_first
        if self.is_first or self.copies_embedding:
            self.embedding = VocabParallelEmbedding(embedding_tensor(config), mesh.tensor, mesh.stream, dtype, device)
        if self.copies_embedding:
            sections = self.embedding.sections
            sections["weight"] = tuple(replace(section, counted=False) for section in sections["weight"])
        self.stack = TransformerStack(config, layers, mesh, options, dtype, device)
        if self.is_last:
            self.final_norm = RMSNorm(
                final_norm_tensor(config), config.norm_epsilon, options.norm,
                group=mesh.tensor, dtype=dtype, device=device, partial_over=positions_over(mesh),
            )  # fmt: skip
        self.lm_head: VocabParallelHead | None = None
        if self.is_last and not config.tie_embeddings:
            self.lm_head = VocabParallelHead(head_tensor(config), mesh.tensor, mesh.stream, dtype, device)
        if seed is not None:
            initialize(self, seed)

    def hidden_states(self, tokens: Tensor, context: SequenceContext) -> Tensor:
        """Token ids [b, s] -> the stream after the last layer, everything drained: [s, b, h], or this rank's
        positions of it."""
        state = self.embedding(tokens).unsqueeze(0)
        stream: Tensor = self.stack(state, context)[0]
        return stream

    def logits_shard(self, hidden_states: Tensor) -> Tensor:
        """The stream -> this rank's part of the logits, [s, b, padded V / t]; see `VocabParallelHead.valid`."""
        normed = self.final_norm(hidden_states)
        if self.lm_head is None:
            return vocab_parallel_logits(normed, self.embedding.weight, self.embedding.layout)
        logits: Tensor = self.lm_head(normed)
        return logits

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor,
        loss_mask: Tensor | None = None,
        positions: Tensor | None = None,
        document_bounds: Tensor | None = None,
    ) -> Tensor:
        """The loss summed over the target tokens that count.

        Args:
            tokens: [b, s] int64.
            labels: [b, s] int64, the token that follows each.
            loss_mask: [b, s] float, weight of each target token; None counts all.
            positions: [b, s] int64, rotary position of each token; None counts from 0 in every row.
            document_bounds: as of `stage`.

        Returns:
            A scalar in fp32 (fp64 for an fp64 model), equal on every tensor-parallel rank. The caller divides by
            the number of tokens of the whole global batch.
        """
        context = self.training_context(tokens, positions, document_bounds)
        return self.loss(self.hidden_states(tokens, context), labels, loss_mask)

    def stage(
        self, entering: Tensor, positions: Tensor | None = None, document_bounds: Tensor | None = None
    ) -> Tensor:
        """What a pipeline stage passes on: token ids [b, s] on the first, a state elsewhere -> a state.

        Args:
            positions: [b, s] int64, rotary position of each token; None counts from 0 in every row.
            document_bounds: [documents + 1] int32 on the CPU: where among the b * s tokens, row after row, those
                begin that see only one another, and b * s; every row begins one. None: every token sees all before
                it in its row.
        """
        state = self.embedding(entering).unsqueeze(0) if self.is_first else entering
        length = state.shape[1] * self.stack.layout.shards
        leaving: Tensor = self.stack(state, self._context(length, state.device, positions, document_bounds))
        return leaving

    def loss(self, hidden_states: Tensor, labels: Tensor, loss_mask: Tensor | None = None) -> Tensor:
        """The stream after the last layer, [s, b, h] -> the loss that `forward` tells of."""
        logits = self.logits_shard(hidden_states)
        head = self.embedding if self.lm_head is None else self.lm_head
        losses = vocab_parallel_cross_entropy(logits, labels.t(), head.start, head.valid, self.group)
        return losses.sum() if loss_mask is None else (losses * loss_mask.t()).sum()

    def training_context(
        self, tokens: Tensor, positions: Tensor | None = None, document_bounds: Tensor | None = None
    ) -> SequenceContext:
        """Causal attention over whole rows at positions 0 .. s-1, where nothing else is said (see `stage`)."""
        return self._context(tokens.shape[1], tokens.device, positions, document_bounds)

    def _context(
        self, length: int, device: torch.device, positions: Tensor | None, document_bounds: Tensor | None
    ) -> SequenceContext:
        of_rows = torch.arange(length, device=device).unsqueeze(1) if positions is None else positions.t()
        table = rotary_table(self.config, of_rows, self.compute_dtype)
        documents = None if document_bounds is None else Documents.of(document_bounds, device)
        return SequenceContext(table, documents=documents)

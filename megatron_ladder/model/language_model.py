"""The whole decoder: embedding, stack, final norm, output head and loss.

Layouts: token ids and labels [b, s]; hidden_states [s, b, h]; logits_shard_v [s, b, padded V / t].
"""

import torch
from torch import Tensor, nn

from megatron_ladder.comm.mesh import ProcessMesh
from megatron_ladder.config.model import ModelConfig
from megatron_ladder.model.attention import SequenceContext
from megatron_ladder.model.norm import RMSNorm
from megatron_ladder.model.rotary import rotary_table
from megatron_ladder.model.stack import StackOptions, TransformerStack
from megatron_ladder.parallel.cross_entropy import vocab_parallel_cross_entropy
from megatron_ladder.parallel.embedding import VocabParallelEmbedding, VocabParallelHead, vocab_parallel_logits
from megatron_ladder.parallel.layout import initialize

DEFAULT_OPTIONS = StackOptions()


class LanguageModel(nn.Module):
    """A Llama-family decoder of any wiring, this rank's slices of it."""

    def __init__(
        self,
        config: ModelConfig,
        mesh: ProcessMesh,
        options: StackOptions = DEFAULT_OPTIONS,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
        seed: int | None = None,
    ) -> None:
        """
        Args:
            seed: initial weights are drawn from it, alike for every layout; None leaves them uninitialised, for
                weights that are loaded.
        """
        super().__init__()
        device = device or torch.device("cpu")
        self.config = config
        self.group = mesh.tensor
        self.compute_dtype = dtype
        std = config.init_method_std
        self.embedding = VocabParallelEmbedding(
            "embedding", config.vocab_size, config.hidden_size, std=std, group=mesh.tensor, dtype=dtype, device=device
        )
        self.stack = TransformerStack(config, range(config.num_layers), mesh, options, dtype, device)
        self.final_norm = RMSNorm(
            "final_norm", config.hidden_size, config.norm_epsilon, options.norm,
            rank=mesh.tensor.rank, dtype=dtype, device=device,
        )  # fmt: skip
        self.lm_head: VocabParallelHead | None = None
        if not config.tie_embeddings:
            self.lm_head = VocabParallelHead(
                "lm_head", config.vocab_size, config.hidden_size, std=std, group=mesh.tensor, dtype=dtype, device=device
            )
        if seed is not None:
            initialize(self, seed)

    def hidden_states(self, tokens: Tensor, context: SequenceContext) -> Tensor:
        """Token ids [b, s] -> the stream after the last layer, [s, b, h], everything drained."""
        state = self.embedding(tokens).unsqueeze(0)
        stream: Tensor = self.stack(state, context)[0]
        return stream

    def logits_shard(self, hidden_states: Tensor) -> Tensor:
        """[s, b, h] -> this rank's part of the logits, [s, b, padded V / t]; see `VocabParallelHead.valid`."""
        normed = self.final_norm(hidden_states)
        if self.lm_head is None:
            return vocab_parallel_logits(normed, self.embedding.weight, self.group)
        logits: Tensor = self.lm_head(normed)
        return logits

    def forward(self, tokens: Tensor, labels: Tensor, loss_mask: Tensor | None = None) -> Tensor:
        """The loss summed over the target tokens that count.

        Args:
            tokens: [b, s] int64.
            labels: [b, s] int64, the token that follows each.
            loss_mask: [b, s] float, weight of each target token; None counts all.

        Returns:
            A scalar in fp32 (fp64 for an fp64 model), equal on every tensor-parallel rank. The caller divides by
            the number of tokens of the whole global batch.
        """
        hidden_states = self.hidden_states(tokens, self.training_context(tokens))
        logits = self.logits_shard(hidden_states)
        vocabulary = self.embedding
        losses = vocab_parallel_cross_entropy(logits, labels.t(), vocabulary.start, vocabulary.valid, self.group)
        return losses.sum() if loss_mask is None else (losses * loss_mask.t()).sum()

    def training_context(self, tokens: Tensor) -> SequenceContext:
        """Positions 0 .. s-1 for every sample, causal attention."""
        positions = torch.arange(tokens.shape[1], device=tokens.device).unsqueeze(1)
        return SequenceContext(rotary_table(self.config, positions, self.compute_dtype))

"""Parameters and floating-point operations of a model, counted matrix by matrix.

A multiply-add is two operations. Only matrix products count; norms, rotary embedding, softmax and activations
are left out, as everywhere in the field. *Model* FLOPs are what the mathematics needs, whatever the program
does: forward once, backward twice as much (a product's gradient is two products), attention over the full
[s, s] score matrix, as in PaLM (arXiv 2204.02311, appendix B) and Megatron-LM (arXiv 2104.04473, appendix),
although half of it is masked. *Hardware* FLOPs add the forward passes that recompute repeats. Utilisation by
the first is MFU, by the second HFU.

h hidden size, f MLP width, d head width, Hq and Hkv query and key-value heads, V vocabulary size, s sequence
length.
"""

from dataclasses import dataclass

from megatron_ladder.blueprint.model import ONE_NORM_MODES, ModelConfig, synchronised_after


@dataclass(frozen=True)
class ParameterCount:
    """Numbers of parameters, without the vocabulary's padding."""

    embedding: int
    """V h"""
    layers: tuple[int, ...]
    """Of each layer."""
    final_norm: int
    """h"""
    lm_head: int
    """V h, or 0 if the embedding matrix is the head."""

    @property
    def total(self) -> int:
        """All of them; a tied matrix counts once."""
        return self.with_one_embedding + self.lm_head

    @property
    def with_one_embedding(self) -> int:
        """All but the head: how the sizes of models are often published, tied or not."""
        return self.embedding + sum(self.layers) + self.final_norm


def parameter_count(model: ModelConfig) -> ParameterCount:
    """Counts a model's parameters exactly; where a desync stream differs, each rank's norm counts."""
    matrix = model.vocab_size * model.hidden_size
    layers = tuple(_layer_parameters(model) + _more_norms(model, layer) for layer in range(model.num_layers))
    return ParameterCount(matrix, layers, model.hidden_size, 0 if model.tie_embeddings else matrix)


def _more_norms(model: ModelConfig, layer: int) -> int:
    """Beyond one for each norm: a desync model has one a rank where the stream that is read is each rank's own."""
    own = sum(not synchronised_after(model, read) for read in (2 * layer - 1, 2 * layer))
    return own * ((model.desync_tp or 1) - 1) * model.hidden_size


def _layer_parameters(model: ModelConfig) -> int:
    hidden, ffn = model.hidden_size, model.ffn_hidden_size
    query = model.num_attention_heads * model.head_dim
    key_value = model.num_key_value_heads * model.head_dim
    count = hidden * (query + 2 * key_value) + query * hidden + 3 * hidden * ffn
    count += hidden if model.residual_mode in ONE_NORM_MODES else 2 * hidden
    if model.add_qkv_bias:
        count += query + 2 * key_value
    if model.add_attention_output_bias:
        count += hidden
    if model.add_mlp_bias:
        count += 2 * ffn + hidden
    if model.qk_layernorm:
        count += 2 * model.head_dim
    return count


@dataclass(frozen=True)
class ModelFlops:
    """Operations for one sequence, of all its tokens together and of all tensor-parallel ranks together.

    The wiring changes none of these: ladder, parallel and standard layers multiply the same matrices.
    """

    model: ModelConfig
    sequence_length: int

    @property
    def attention_projections(self) -> int:
        """Forward, of one layer: 2 s h d (Hq + 2 Hkv) for q, k, v and 2 s h d Hq for the output."""
        heads = 2 * self.model.num_attention_heads + 2 * self.model.num_key_value_heads
        return 2 * self.sequence_length * self.model.hidden_size * self.model.head_dim * heads

    @property
    def attention_scores(self) -> int:
        """Forward, of one layer: 2 s s d Hq for query times key, and as much for scores times values.

        A kernel that skips the masked half does (s + 1) / (2 s) of it.
        """
        return 4 * self.sequence_length**2 * self.model.num_attention_heads * self.model.head_dim

    @property
    def attention(self) -> int:
        """Forward, of one layer's attention."""
        return self.attention_projections + self.attention_scores

    @property
    def mlp(self) -> int:
        """Forward, of one layer's MLP: 6 s h f for gate, up and down."""
        return 6 * self.sequence_length * self.model.hidden_size * self.model.ffn_hidden_size

    @property
    def head(self) -> int:
        """Forward, of the output head at every position: 2 s h V."""
        return 2 * self.sequence_length * self.model.hidden_size * self.model.vocab_size

    @property
    def forward(self) -> int:
        """Model FLOPs of a forward pass."""
        return self.model.num_layers * (self.attention + self.mlp) + self.head

    @property
    def training(self) -> int:
        """Model FLOPs of a training step's share of one sequence: forward and backward."""
        return 3 * self.forward

    def training_on_hardware(self, recomputed_layers: int) -> int:
        """Hardware FLOPs of the same: a layer whose sub-blocks are recomputed runs its forward pass again.

        Its products then count four times, once more than in `training`. That a kernel skips masked scores,
        or recomputes them inside its own backward, is not counted.
        """
        return self.training + recomputed_layers * (self.attention + self.mlp)

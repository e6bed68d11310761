"""A Llama-family decoder of any wiring in vLLM's layers.

The one rule:

    r = embedding(tokens); pending = {}                     outputs whose all-reduce is in flight
    for each sub-block h_i:
        for each y_j in pending that h_i does not miss:  r = r + wait(pending.pop(y_j))
        pending[y_i] = start_all_reduce(h_i(norm_i(r)))     runs while the sub-blocks that miss y_i compute
    for each y_j in pending:                             r = r + wait(pending.pop(y_j))

With own partials, every rank is a lane, and h_i(norm_i(r + this rank's parts of the pending outputs)) is launched.

Tensors are [tokens, width]; weights, heads and key-value caches are shards of the tensor-parallel ranks.
"""

from collections.abc import Iterable
from itertools import islice

from torch import Tensor, nn
from vllm.compilation.decorators import support_torch_compile
from vllm.config import VllmConfig
from vllm.distributed import get_pp_group, get_tensor_model_parallel_world_size, get_tp_group
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.quantization import QuantizationConfig
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.models.interfaces import SupportsLoRA, SupportsPP
from vllm.model_executor.models.utils import (
    AutoWeightsLoader,
    PPMissingLayer,
    WeightsMapper,
    make_empty_intermediate_tensors_factory,
    make_layers,
    maybe_prefix,
)
from vllm.sequence import IntermediateTensors

from megatron_ladder_vllm.configuration_megatron_ladder import MegatronLadderConfig
from megatron_ladder_vllm.in_flight import AllReduces, PendingOutputs


def unreduced_linear(
    input_size: int, output_size: int, bias: bool, quant_config: QuantizationConfig | None, prefix: str
) -> RowParallelLinear:
    """Return a row-parallel linear layer whose outputs are partial sums; the first rank adds the bias."""
    linear = RowParallelLinear(input_size, output_size, bias=bias, quant_config=quant_config, prefix=prefix)
    # The constructor rejects a bias without a reduce, although only the first rank adds it.
    linear.reduce_results = False
    return linear


class LadderAttention(nn.Module):
    """Attention of this rank's heads."""

    def __init__(self, config: MegatronLadderConfig, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        quant_config = vllm_config.quant_config
        ranks = get_tensor_model_parallel_world_size()
        self.head_dim = config.head_dim
        num_heads = config.num_attention_heads // ranks
        num_kv_heads = max(1, config.num_key_value_heads // ranks)
        self.widths = [num_heads * self.head_dim, num_kv_heads * self.head_dim, num_kv_heads * self.head_dim]
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size,
            self.head_dim,
            config.num_attention_heads,
            config.num_key_value_heads,
            bias=config.attention_bias,
            quant_config=quant_config,
            prefix=f"{prefix}.qkv_proj",
        )
        self.o_proj = unreduced_linear(
            config.num_attention_heads * self.head_dim,
            config.hidden_size,
            config.attention_output_bias,
            quant_config,
            f"{prefix}.o_proj",
        )
        self.qk_norm = config.qk_norm
        if self.qk_norm:
            self.q_norm = RMSNorm(self.head_dim, eps=config.rms_norm_eps)
            self.k_norm = RMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.rotary_emb = get_rope(
            self.head_dim, max_position=config.max_position_embeddings, rope_parameters=config.rope_parameters
        )
        self.attn = Attention(
            num_heads,
            self.head_dim,
            self.head_dim**-0.5,
            num_kv_heads=num_kv_heads,
            cache_config=vllm_config.cache_config,
            quant_config=quant_config,
            prefix=f"{prefix}.attn",
        )

    def forward(self, positions: Tensor, hidden_states: Tensor) -> Tensor:
        """[tokens, hidden_size] -> this rank's part of the sum [tokens, hidden_size]."""
        qkv, _ = self.qkv_proj(hidden_states)
        q, k, v = qkv.split(self.widths, dim=-1)
        if self.qk_norm:
            q = self.q_norm(q.reshape(*q.shape[:-1], -1, self.head_dim)).view(q.shape)
            k = self.k_norm(k.reshape(*k.shape[:-1], -1, self.head_dim)).view(k.shape)
        q, k = self.rotary_emb(positions, q, k)
        output, _ = self.o_proj(self.attn(q, k, v))
        return output


class LadderMLP(nn.Module):
    """This rank's part of a SwiGLU MLP."""

    def __init__(self, config: MegatronLadderConfig, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        quant_config = vllm_config.quant_config
        self.gate_up_proj = MergedColumnParallelLinear(
            config.hidden_size,
            [config.intermediate_size] * 2,
            bias=config.mlp_bias,
            quant_config=quant_config,
            prefix=f"{prefix}.gate_up_proj",
        )
        self.down_proj = unreduced_linear(
            config.intermediate_size, config.hidden_size, config.mlp_bias, quant_config, f"{prefix}.down_proj"
        )
        self.act_fn = SiluAndMul()

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[tokens, hidden_size] -> this rank's part of the sum [tokens, hidden_size]."""
        gate_up, _ = self.gate_up_proj(hidden_states)
        output, _ = self.down_proj(self.act_fn(gate_up))
        return output


def read_stream(
    norm: RMSNorm, stream: Tensor, pending: PendingOutputs, missing: tuple[int, ...], reads_own_parts: bool
) -> tuple[Tensor, Tensor]:
    """Return the normed stream, from which the `missing` outputs are missing, and that stream.

    With `reads_own_parts`, this rank's parts of the missing outputs are normed with it.
    """
    arriving = pending.arriving(missing)
    if reads_own_parts and missing:
        for number in arriving:
            stream = stream + pending.pop(number)
        return norm(pending.add_own_parts(stream)), stream
    for number in arriving[:-1]:
        stream = stream + pending.pop(number)
    if not arriving:
        return norm(stream), stream
    # One kernel adds and norms. It overwrites both tensors, which nothing else reads.
    return norm(pending.pop(arriving[-1]), stream)


class LadderDecoderLayer(nn.Module):
    """One layer."""

    def __init__(self, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        config = vllm_config.model_config.hf_config
        self.sub_blocks = config.sub_blocks(int(prefix.rsplit(".", 1)[1]))
        self.reads_own_parts = config.lanes > 0
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = LadderAttention(config, vllm_config, f"{prefix}.self_attn")
        self.mlp = LadderMLP(config, vllm_config, f"{prefix}.mlp")
        if len(self.sub_blocks) > 1:
            self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, positions: Tensor, stream: Tensor, pending: PendingOutputs) -> Tensor:
        """Compute the sub-blocks, which change `pending`; return the stream [tokens, hidden_size]."""
        for kind, missing in self.sub_blocks:
            norm = self.post_attention_layernorm if kind == "mlp" else self.input_layernorm
            normed, stream = read_stream(norm, stream, pending, missing, self.reads_own_parts)
            if kind == "mlp":
                partial = self.mlp(normed)
            else:
                partial = self.self_attn(positions, normed)
                if kind == "attention_mlp":
                    partial = partial + self.mlp(normed)
            pending.launch(partial)
        return stream


@support_torch_compile(
    dynamic_arg_dims={
        "input_ids": {0: "tokens"},
        "positions": {0: "tokens"},
        "intermediate_tensors": {0: "tokens"},
        "inputs_embeds": {0: "tokens"},
    }
)
class MegatronLadderModel(nn.Module):
    """The layers of a pipeline stage, with the embedding on the first and the final norm on the last."""

    hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_stacked={
            ".q_proj": (".qkv_proj", "q"),
            ".k_proj": (".qkv_proj", "k"),
            ".v_proj": (".qkv_proj", "v"),
            ".gate_proj": (".gate_up_proj", 0),
            ".up_proj": (".gate_up_proj", 1),
        }
    )

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config = vllm_config.model_config.hf_config
        stages = get_pp_group()
        self.all_reduces = AllReduces(get_tp_group()) if get_tensor_model_parallel_world_size() > 1 else None
        if stages.is_first_rank or (config.tie_word_embeddings and stages.is_last_rank):
            self.embed_tokens = VocabParallelEmbedding(
                config.vocab_size, config.hidden_size, quant_config=vllm_config.quant_config
            )
        else:
            self.embed_tokens = PPMissingLayer()
        self.start_layer, self.end_layer, self.layers = make_layers(
            config.num_hidden_layers,
            lambda prefix: LadderDecoderLayer(vllm_config, prefix),
            prefix=f"{prefix}.layers",
        )
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps) if stages.is_last_rank else PPMissingLayer()
        # Pending outputs cross between stages as sums: vLLM sends one slice of each tensor from each tensor-parallel
        # rank and joins the slices in the next stage.
        self.received, self.sent = (
            {back: f"pending_{back}" for back in reversed(config.missing_before(layer))}
            for layer in (self.start_layer, self.end_layer)
        )
        self.make_empty_intermediate_tensors = make_empty_intermediate_tensors_factory(
            ["stream", *self.received.values()], config.hidden_size
        )

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        """Ids [tokens] -> embeddings [tokens, hidden_size]."""
        return self.embed_tokens(input_ids)

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: IntermediateTensors | None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor | IntermediateTensors:
        """Ids [tokens] or the previous stage's tensors -> normed states [tokens, hidden_size] or this stage's."""
        if intermediate_tensors is None:
            stream = self.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds
            pending = PendingOutputs(self.all_reduces)
        else:
            stream = intermediate_tensors["stream"]
            summed = {back: intermediate_tensors[name] for back, name in self.received.items()}
            pending = PendingOutputs(self.all_reduces, summed)
        for layer in islice(self.layers, self.start_layer, self.end_layer):
            stream = layer(positions, stream, pending)
        if get_pp_group().is_last_rank:
            normed, _ = read_stream(self.norm, stream, pending, (), reads_own_parts=False)
            return normed
        for number in pending.arriving(self.sent):
            stream = stream + pending.pop(number)
        sent = zip(self.sent.values(), pending.arriving(()), strict=True)
        return IntermediateTensors({"stream": stream, **{name: pending.pop(number) for name, number in sent}})

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load tensors with the names of a Hugging Face directory; return the parameters that were loaded."""
        return AutoWeightsLoader(self).load_weights(weights, mapper=self.hf_to_vllm_mapper)


class MegatronLadderForCausalLM(nn.Module, SupportsLoRA, SupportsPP):
    """The decoder with its head."""

    hf_to_vllm_mapper = MegatronLadderModel.hf_to_vllm_mapper
    packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
    embedding_modules = {"embed_tokens": "input_embeddings", "lm_head": "output_embeddings"}

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        # vLLM's LoRA manager reads this attribute.
        self.config = config = vllm_config.model_config.hf_config
        self.model = MegatronLadderModel(vllm_config=vllm_config, prefix=maybe_prefix(prefix, "model"))
        self.make_empty_intermediate_tensors = self.model.make_empty_intermediate_tensors
        if not get_pp_group().is_last_rank:
            self.lm_head = PPMissingLayer()
            return
        self.lm_head = ParallelLMHead(
            config.vocab_size,
            config.hidden_size,
            quant_config=vllm_config.quant_config,
            prefix=maybe_prefix(prefix, "lm_head"),
        )
        if config.tie_word_embeddings:
            self.lm_head = self.lm_head.tie_weights(self.model.embed_tokens)
        self.logits_processor = LogitsProcessor(config.vocab_size, soft_cap=config.final_logit_softcapping)

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        """Ids [tokens] -> embeddings [tokens, hidden_size]."""
        return self.model.embed_input_ids(input_ids)

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor | IntermediateTensors:
        """Compute this stage's layers, see `MegatronLadderModel.forward`."""
        return self.model(input_ids, positions, intermediate_tensors, inputs_embeds)

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        """[tokens, hidden_size] -> logits [tokens, vocab_size] on the ranks that sample."""
        return self.logits_processor(self.lm_head, hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load tensors with the names of a Hugging Face directory; return the parameters that were loaded."""
        return AutoWeightsLoader(self).load_weights(weights)

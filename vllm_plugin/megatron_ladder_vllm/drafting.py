"""The drafting head of a model: predicts the token after the next from the model's last states.

    token i + 1 -> embedding -> pre_fc_norm_embedding --+
                                                        +-> [2 h] -> fc -> [h] -> a layer -> norm -> output head: i + 2
    state of token i         -> pre_fc_norm_hidden -----+

Embedding and output head are those of the model, which vLLM sets after loading. The layer is a standard one, whose
all-reduces run as the model's. To draft several tokens, vLLM applies the head again to the state after its norm.

Tensors are [tokens, width].
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from vllm.compilation.decorators import support_torch_compile
from vllm.config import VllmConfig
from vllm.distributed import get_tp_group
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.models.interfaces import LocalArgmaxMixin
from vllm.model_executor.models.utils import maybe_prefix

from megatron_ladder_vllm.in_flight import PendingOutputs, all_reduces_of
from megatron_ladder_vllm.mixers import new_norm
from megatron_ladder_vllm.model import (
    MTP_PREFIX,
    LadderDecoderLayer,
    MegatronLadderForCausalLM,
    load_layers,
    read_stream,
)


@support_torch_compile(
    dynamic_arg_dims={
        "input_ids": {0: "tokens"},
        "positions": {0: "tokens"},
        "hidden_states": {0: "tokens"},
        "inputs_embeds": {0: "tokens"},
    }
)
class DraftingHead(nn.Module):
    """The head without the output head."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        self.config = config = vllm_config.speculative_config.draft_model_config.hf_config
        hidden, quantisation = config.hidden_size, vllm_config.quant_config
        self.all_reduces = all_reduces_of(get_tp_group())
        self.pre_fc_norm_embedding = new_norm(config, hidden)
        self.pre_fc_norm_hidden = new_norm(config, hidden)
        self.fc = ReplicatedLinear(2 * hidden, hidden, bias=False, quant_config=quantisation, prefix=f"{prefix}.fc")
        (sub_blocks,) = config.wired_layers()
        self.layers = nn.ModuleList([LadderDecoderLayer(config, vllm_config, sub_blocks, f"{prefix}.layers.0")])
        self.norm = new_norm(config, hidden)

    def forward(
        self, input_ids: Tensor | None, positions: Tensor, hidden_states: Tensor, inputs_embeds: Tensor | None = None
    ) -> Tensor:
        """Return normed states [tokens, hidden_size].

        Args:
            input_ids: the token after each position, [tokens].
            hidden_states: the states of the model or, for a further draft, of the head, [tokens, hidden_size].
        """
        embeddings = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        both = torch.cat((self.pre_fc_norm_embedding(embeddings), self.pre_fc_norm_hidden(hidden_states)), dim=-1)
        stream, _ = self.fc(both)
        pending = PendingOutputs(self.all_reduces)
        stream = self.layers[0](positions, stream, pending)
        return read_stream(self.norm, stream, pending, ())[0]


class MegatronLadderMTPModel(LocalArgmaxMixin, nn.Module):
    """The head as a draft model of vLLM."""

    hf_to_vllm_mapper = MegatronLadderForCausalLM.hf_to_vllm_mapper
    packed_modules_mapping = MegatronLadderForCausalLM.packed_modules_mapping

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        self.directory = vllm_config.speculative_config.model
        self.model = DraftingHead(vllm_config=vllm_config, prefix=maybe_prefix(prefix, "mtp"))
        config = self.model.config
        self.logits_processor = LogitsProcessor(config.vocab_size, soft_cap=config.final_logit_softcapping)

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        """Ids [tokens] -> embeddings [tokens, hidden_size]."""
        return self.model.embed_tokens(input_ids)

    def forward(
        self, input_ids: Tensor | None, positions: Tensor, hidden_states: Tensor, inputs_embeds: Tensor | None = None
    ) -> Tensor:
        """See `DraftingHead.forward`."""
        return self.model(input_ids, positions, hidden_states, inputs_embeds)

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        """Return the logits [tokens, vocabulary] of normed states, on the ranks that sample."""
        return self.logits_processor(self.lm_head, hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load the tensors of the head.

        Raises:
            ValueError: the files have none.
        """
        head_weights = {
            name.removeprefix(MTP_PREFIX): weight for name, weight in weights if name.startswith(MTP_PREFIX)
        }
        if "fc.weight" not in head_weights:
            raise ValueError(
                f"{self.directory}: config.json announces a drafting head (mtp_num_hidden_layers), but the files lack "
                "its tensors (mtp.*); export the model with its head, or omit --speculative-config"
            )
        return {f"model.{name}" for name in load_layers(self.model, self.model.config, head_weights.items())}

"""The configuration of a Llama-family decoder whose sub-blocks may read the residual stream late."""

from typing import Any

from transformers import PreTrainedConfig
from transformers.models.glm4_moe.configuration_glm4_moe import Glm4MoeConfig
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config

# The wirings in which each tensor-parallel rank of the training has its own residual stream; and for each wiring, the
# sub-blocks of a dense layer and those of one with experts, each with the kinds of the outputs that it misses in ladder
# layers (None: nothing; no kinds: the newest outputs).
from megatron_ladder.blueprint.wiring import PER_RANK_MODES, SUB_BLOCK_TABLE


class MegatronLadderConfig(PreTrainedConfig):
    """Llama's keys, and the keys of biases, norms, experts and the wiring.

    `attention_bias` applies only to queries, keys and values, unlike in Llama. Other keys of experts are as in GLM-4.5.
    `num_hidden_layers` counts a layer with two attentions twice, as in LongCat-Flash.

    Attributes:
        attention_output_bias: whether the attention's output projection has a bias.
        qk_norm: whether each head's queries and keys are normed before the rotary embedding.
        final_logit_softcapping: bound of the logits, as in Gemma 2; None for no bound.
        num_experts: routed experts of a layer; 0: all layers are dense.
        expert_layers: indices of the layers with experts.
        shared_expert_intermediate_size: width of the expert of all tokens; 0 for none.
        scoring_func: what makes scores of the router's logits: `softmax` over the experts, or `sigmoid`.
        use_expert_bias: whether a bias is added to the scores for the choice of experts.
        residual_mode: `standard`, `ladder` (Ladder Residual, arXiv 2501.06589), `parallel` (attention and MLP side by
            side), or another key of `SUB_BLOCK_TABLE`.
        ladder_layers: layers that read the residual stream late: their indices, an integer N for the upper N, or None
            for none; sorted indices in an instance.
        residual_staleness: how many sub-blocks late they read it.
        lanes: number of groups of heads and neurons that read their own partial sums of the outputs that are missing
            from a late stream; 0 for none.
        desync_interval: sub-blocks between two sums of the ranks' streams (desync).
        desync_tp: number of ranks with separate streams (desync).
    """

    model_type = "megatron_ladder"
    keys_to_ignore_at_inference = ["past_key_values"]
    base_model_tp_plan = LlamaConfig.base_model_tp_plan
    # A pipeline stage would have to pass on several tensors.
    base_model_pp_plan = None
    attribute_map = {"use_qk_norm": "qk_norm"}

    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    # An int; None in a file stands for a value that depends on others.
    num_key_value_heads: Any = None
    head_dim: Any = None
    hidden_act: str = "silu"
    max_position_embeddings: int = 2048
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-5
    rope_parameters: dict[str, Any] | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    attention_output_bias: bool = False
    attention_dropout: float = 0.0
    mlp_bias: bool = False
    qk_norm: bool = False
    final_logit_softcapping: float | None = None
    num_experts: int = 0
    num_experts_per_tok: int = 2
    moe_intermediate_size: int = 0
    shared_expert_intermediate_size: int = 0
    expert_layers: Any = None
    scoring_func: str = "softmax"
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    use_expert_bias: bool = False
    n_group: int = 1
    topk_group: int = 1
    residual_mode: str = "ladder"
    ladder_layers: Any = None
    residual_staleness: int = 1
    lanes: int = 0
    desync_interval: int = 0
    desync_tp: int | None = None
    use_cache: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    def __init__(self, **kwargs: Any) -> None:
        """Raises ValueError for a wiring that one process cannot compute, or that does not match the sizes."""
        for name in MegatronLadderConfig.__annotations__:
            setattr(self, name, kwargs.pop(name, getattr(MegatronLadderConfig, name)))
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        self.expert_layers = list(self.expert_layers or ())
        self.ladder_layers = self._late_layers()
        self._check_lanes()
        if self.qk_norm:
            # The same matrices plus the norms of queries and keys.
            self.base_model_tp_plan = Qwen3Config.base_model_tp_plan
        if self.num_experts:
            experts = {key: how for key, how in Glm4MoeConfig.base_model_tp_plan.items() if "expert" in key}
            self.base_model_tp_plan = {**self.base_model_tp_plan, **experts}
        if self.lane_count:
            # A plan would shard the heads of one lane.
            self.base_model_tp_plan = None
        super().__init__(**kwargs)

    def _late_layers(self) -> list[int]:
        """Return `ladder_layers` as sorted indices."""
        mode, given = self.residual_mode, self.ladder_layers
        if mode not in SUB_BLOCK_TABLE:
            raise ValueError(f"residual_mode {mode!r}: transformers can run {', '.join(SUB_BLOCK_TABLE)}")
        if self.residual_staleness < 1:
            raise ValueError(f"residual_staleness {self.residual_staleness} must be at least 1")
        layers = self.layer_count
        late = list(range(layers - given, layers)) if isinstance(given, int) else sorted(given or ())
        for key, value in (("ladder_layers", late), ("lanes", self.lanes)):
            if value and all(missed is None for _, missed in SUB_BLOCK_TABLE[mode][1]):
                raise ValueError(f"{key} {value} has no meaning with residual_mode {mode!r}")
        if len(set(late)) < len(late) or any(not 0 <= layer < layers for layer in late):
            raise ValueError(f"ladder_layers {given}: expected different layers of 0-{layers - 1}")
        return late

    def _check_lanes(self) -> None:
        """Raise ValueError if heads and neurons cannot be divided into the lanes, or the wiring has other ranks."""
        mode, per_rank = self.residual_mode, self.residual_mode in PER_RANK_MODES
        desync = f"desync_interval {self.desync_interval} and desync_tp {self.desync_tp}"
        if per_rank and (self.desync_interval < 1 or self.desync_tp is None or self.desync_tp < 2):
            raise ValueError(f"residual_mode {mode!r} with {desync}: needs an interval of at least 1 and 2 ranks")
        if not per_rank and (self.desync_interval or self.desync_tp is not None):
            raise ValueError(f"{desync} have no meaning with residual_mode {mode!r}")
        if self.lanes < 0 or self.lanes == 1:
            raise ValueError(f"lanes {self.lanes} must be 0 or at least 2")
        name = f"desync_tp {self.desync_tp}" if per_rank else f"lanes {self.lanes}"
        shared = ": with a shared head, each lane would compute different keys and values from it, for which the cache "
        shared += "has no space"
        for key, why in (("num_attention_heads", ""), ("intermediate_size", ""), ("num_key_value_heads", shared)):
            if self.lane_count and getattr(self, key) % self.lane_count:
                raise ValueError(f"{key} {getattr(self, key)} is not divisible by {name}{why}")

    @property
    def lane_count(self) -> int:
        """The number of lanes, or of ranks of desync, that read different streams; 0 if there are none."""
        return self.lanes or self.desync_tp or 0

    @property
    def attentions_per_layer(self) -> int:
        """The number of attentions of a layer."""
        return sum(kind.startswith("attention") for kind, _ in SUB_BLOCK_TABLE[self.residual_mode][0])

    @property
    def layer_count(self) -> int:
        """The number of layers."""
        return self.num_hidden_layers // self.attentions_per_layer

    def _row(self, layer: int) -> list[tuple[str, tuple[str, ...] | None]]:
        """Return the sub-blocks of a layer, each with the kinds of the outputs that it misses, as in the table.

        In layers that do not read late, two sub-blocks of experts read the same stream.
        """
        together = {"routed_experts": ("shared_expert",), "shared_expert": ("routed_experts",)}
        row = SUB_BLOCK_TABLE[self.residual_mode][layer in self.expert_layers]
        return [
            (kind, missed if layer in self.ladder_layers else together.get(kind))
            for kind, missed in row
            if kind != "shared_expert" or self.shared_expert_intermediate_size
        ]

    def sub_blocks(self, layer: int) -> list[tuple[str, tuple[int, ...]]]:
        """Return the sub-blocks of a layer, each with the outputs that it misses, counted back from the newest.

        An output that a sub-block has seen stays in the residual stream, and what enters the first of several ladder
        layers is complete. In desync, the outputs since the last sum of the streams are missing: a rank has only its
        partial sums of them.
        """
        missing, found, were_late = tuple[int, ...](), list[tuple[str, tuple[int, ...]]](), list[bool]()
        for number in range(layer + 1):
            row, is_late = self._row(number), number in self.ladder_layers
            for kind, missed in row:
                index = len(found)
                most = index if missed else self.residual_staleness if missed is not None else 0
                if self.residual_mode in PER_RANK_MODES:
                    most = index % self.desync_interval
                missing = tuple(
                    back
                    for back in range(1, most + 1)
                    if back <= index
                    and (back == 1 or back - 1 in missing)
                    and (not missed or (found[-back][0] in missed and were_late[-back] is is_late))
                )
                found.append((kind, missing))
                were_late.append(is_late)
        return found[-len(row) :]

    def averaged(self, layer: int) -> list[bool]:
        """Return for each sub-block whether the mean of its partial sums enters the stream instead of their sum.

        In desync, this holds for the outputs that precede no sum of the ranks' streams.
        """
        width = len(self._row(layer))
        if self.residual_mode not in PER_RANK_MODES:
            return [False] * width
        following = range(width * layer + 1, width * (layer + 1) + 1)
        return [index % self.desync_interval != 0 and index < width * self.num_hidden_layers for index in following]

    def norm_shape(self, missing: tuple[int, ...]) -> int | tuple[int, int]:
        """Return the shape of the norm of a sub-block: in desync, one row per rank if the streams differ."""
        per_rank = self.residual_mode in PER_RANK_MODES and missing
        return (self.lane_count, self.hidden_size) if per_rank else self.hidden_size

    def missing_before(self, layer: int) -> tuple[int, ...]:
        """Return what the first sub-block of a layer misses; nothing is missing after the last layer."""
        return () if layer == self.layer_count else self.sub_blocks(layer)[0][1]


__all__ = ["MegatronLadderConfig"]

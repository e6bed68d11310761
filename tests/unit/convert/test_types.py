"""The types of models that are read or refused, compared with transformers' classes, defaults and sources."""

import inspect
import json
import re
from pathlib import Path

import pytest
from transformers import AutoConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from megatron_ladder.checkpoint.hf_config import model_config_from_hf
from megatron_ladder.checkpoint.hf_types import TEXT_TYPES, TYPES, UNREADABLE, plain_architecture
from megatron_ladder.convert.options import ImportOptions
from megatron_ladder.flags import section_flags
from tests.helpers.commands import REPOSITORY_ROOT
from tests.helpers.runs import errors_of
from tests.unit.convert.saved_models import MODELS, SIZES

FEATURES = {
    "LayerNorm": r"LayerNorm",
    "an MLP without gates": r"\A(?!.*(gate_proj|gate_up))",
    "multipliers of embeddings, residuals and logits": r"embedding_multiplier|scale_emb",
    "GeGLU": r"gelu_pytorch_tanh",
    "scaled embeddings": r"hidden_size\s*\*\*\s*0\.5",
    "norms after sub-blocks": r"post_feedforward_layernorm|post_mlp_layernorm",
    "sliding windows": r"sliding_window",
    "soft-capped attention": r"attn_logit_softcapping",
    "one norm over all query heads": r"q_norm = \w+Norm\((config\.hidden_size|config\.num_attention_heads \*)",
    "rotary embeddings of neighbouring pairs": r"x\[\.\.\., 0::2\]",
    "gates and ups in one tensor": r"self\.gate_up_proj = nn\.Linear",
    "queries, keys and values in one tensor": r"self\.qkv_proj = nn\.Linear",
    "layers without rotary embeddings": r"no_rope_layers",
    "Mamba layers": r"(?i)mamba",
    "linear attention": r"linear_attn|LightningAttention|DeltaAttention|DeltaNet",
    "sparse attention with an indexer": r"Indexer",
    "attention sinks": r"sinks",
    "images": r"(?i)vision",
    "chunked attention": r"attention_chunk_size",
    "learned positions": r"self\.wpe|LearnedPositionalEmbedding",
    "squared ReLU": r"relu2",
    "xIELU": r"xielu",
    "ALiBi": r"alibi",
    "norms inside sub-blocks": r"attn_sub_norm",
    "norms without weights": r"class NanoChatRMSNorm(?!.*nn\.Parameter.*class NanoChatRotary)",
    "norms of heads after rotary embeddings": r"apply_rotary_pos_emb\(query_states.*query_layernorm\(query_states\)",
    "queries scaled by their position": r"get_llama_4_attn_scale",
    "short convolutions": r"ShortConv",
    "scaled logits": r"logit_scale",
    "clipped queries, keys and values": r"clip_qkv",
    "a sparse mixer of experts": r"sparsemixer",
    "experts whose inputs are weighted instead of their outputs": r"routed_in = routed_in \* router_scores",
    "experts that compute nothing": r"zero_expert",
}


@pytest.mark.parametrize("model_type", UNREADABLE)
def test_types_that_are_refused_have_the_features_in_transformers(model_type: str) -> None:
    assert model_type not in TYPES
    module = inspect.getfile(CONFIG_MAPPING[model_type])
    sources = "".join(path.read_text() for path in sorted(Path(module).parent.glob("[cm]o[nd]*.py")))
    for feature in UNREADABLE[model_type]:
        assert re.search(FEATURES[feature], sources, re.DOTALL), feature


def test_a_refusal_names_the_features_that_are_missing() -> None:
    config = {"model_type": "gemma3_text", "num_hidden_layers": 2}
    assert errors_of(model_config_from_hf, config, "x/config.json") == [
        "x/config.json: model_type gemma3_text needs GeGLU, scaled embeddings, norms after sub-blocks and sliding "
        "windows, which are not supported"
    ]
    known = ", ".join((*TYPES, *TEXT_TYPES))
    for found, words in (("odd", "'odd'"), (["llama"], "['llama']"), (None, "nothing")):
        (error,) = errors_of(model_config_from_hf, {"model_type": found})
        assert error == f"config.json: model_type: found {words}, expected one of {known}"


def test_the_help_and_the_documentation_list_all_types() -> None:
    (hf,) = (known for known in section_flags(ImportOptions) if known.name == "--hf")
    assert hf.documentation.endswith(f"model_type must be one of {', '.join((*TYPES, *TEXT_TYPES))}.")
    page = (REPOSITORY_ROOT / "docs" / "convert.md").read_text()
    sources = re.search(r"^\* Sources: .*?^\* ", page, re.DOTALL | re.MULTILINE)
    assert sources and {*re.findall(r"`(\w+)`", sources[0])} >= {*TYPES, *TEXT_TYPES}


@pytest.mark.parametrize("kind", [kind for kind in MODELS if plain_architecture(kind)])
def test_missing_keys_have_transformers_defaults(tmp_path: Path, kind: str) -> None:
    """Each key is removed alone; a model that is still read is the one that transformers completes."""
    family, changes = MODELS[kind]
    whole = family.config_class(**{**SIZES, **changes}, architectures=[family.__name__]).to_dict()
    assert model_config_from_hf(whole).num_layers == SIZES["num_hidden_layers"]
    read = set()
    for removed in whole.keys() - {"model_type"}:
        rest = {key: value for key, value in whole.items() if key != removed}
        if errors_of(model_config_from_hf, rest):
            continue
        read.add(removed)
        (tmp_path / "config.json").write_text(json.dumps(rest))
        completed = AutoConfig.from_pretrained(tmp_path).to_dict()
        assert model_config_from_hf(rest) == model_config_from_hf(completed), removed
    assert {"rope_parameters", "tie_word_embeddings", "hidden_act"} <= read and "hidden_size" not in read

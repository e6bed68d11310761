"""The exported module in transformers, compared with the training model, explicit formulas, and itself."""

import json
import subprocess
import sys
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    PreTrainedTokenizerFast,
    StaticCache,
    pipeline,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from megatron_ladder.convert.hf_module.configuration_megatron_ladder import MegatronLadderConfig
from megatron_ladder.convert.hf_module.modeling_megatron_ladder import MegatronLadderForCausalLM, MegatronLadderModel
from megatron_ladder.convert.remote_code import hf_config, hf_type, module_files
from megatron_ladder.model.language_model import LanguageModel
from tests.helpers.commands import REPOSITORY_ROOT
from tests.unit.convert.hf_models import VOCAB, hf_tensors, our_logits, random_model, tiny_config, write_hf

HYBRID = {"residual_mode": "ladder", "ladder_layers": (1, 2, 4)}
MASKS = [mask for length in range(7) for mask in combinations(range(6), length)]


def random_tokens(*shape: int, seed: int = 1) -> Tensor:
    return torch.randint(0, VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def module_of(model: LanguageModel, attention: str = "sdpa") -> MegatronLadderForCausalLM:
    """Return the exported module with the weights of a model."""
    config = MegatronLadderConfig(**hf_config(model.config, dtype="float32"), attn_implementation=attention)
    module = MegatronLadderForCausalLM(config).eval()
    module.load_state_dict(hf_tensors(model))
    return module


def opened(folder: Path, **options: Any) -> nn.Module:
    """Open a directory as a user does; every weight must be in it."""
    module, report = AutoModelForCausalLM.from_pretrained(
        folder, trust_remote_code=True, output_loading_info=True, **options
    )
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return module.eval()


def greedy(model: LanguageModel, prompt: Tensor, new_tokens: int) -> Tensor:
    """Return the training model's greedy continuation of a prompt [1, s], computed from scratch for each token."""
    tokens = prompt
    for _ in range(new_tokens):
        tokens = torch.cat([tokens, our_logits(model, tokens)[:, -1:].argmax(-1)], dim=1)
    return tokens[:, prompt.shape[1] :]


def assert_close(found: Tensor, expected: Tensor) -> None:
    assert found.shape == expected.shape
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.long
def test_logits_match_the_training_model_for_every_ladder_mask() -> None:
    tokens = random_tokens(2, 12)
    seen: list[Tensor] = []
    for mask in MASKS:
        model = random_model(tiny_config(residual_mode="ladder", ladder_layers=mask))
        expected = our_logits(model, tokens)
        with torch.no_grad():
            assert_close(module_of(model)(tokens).logits, expected)
        assert all((expected - other).abs().max() > 1e-3 for other in seen), mask
        seen.append(expected)
    assert len(seen) == 64


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("llama", {}),
        ("llama", {"residual_mode": "ladder"}),
        ("llama", {"add_qkv_bias": True, "add_attention_output_bias": True, "add_mlp_bias": True}),
        ("llama", {"rope_scaling": "linear", "rope_scaling_factor": 2.0, "rotary_base": 5e5, "head_dim": 12}),
        ("mistral", {"hidden_size": 34}),
        ("qwen2", {"add_qkv_bias": True, "tie_embeddings": True, "norm_epsilon": 1e-6}),
        ("qwen3", {"qk_layernorm": True, "head_dim": 12}),
        ("qwen3", {"qk_layernorm": True, "add_qkv_bias": True, "add_attention_output_bias": True}),
        ("megatron_ladder", {"add_attention_output_bias": True}),
        ("megatron_ladder", HYBRID | {"logit_soft_cap": 0.5, "tie_embeddings": True}),
        ("megatron_ladder", {"logit_soft_cap": 0.5}),
        ("megatron_ladder", {"qk_layernorm": True, "add_qkv_bias": True}),
        ("megatron_ladder", {"add_qkv_bias": True, "head_dim": 12}),
        ("megatron_ladder", HYBRID | {"residual_staleness": 2}),
        ("megatron_ladder", {"residual_mode": "ladder", "ladder_layers": tuple(range(6)), "residual_staleness": 5}),
        ("megatron_ladder", {"residual_mode": "parallel"}),
        ("megatron_ladder", HYBRID | {"residual_mode": "ladder-parallel"}),
        ("megatron_ladder", HYBRID | {"residual_mode": "ladder-parallel", "residual_staleness": 3}),
        ("megatron_ladder", HYBRID | {"residual_mode": "ladder-attention"}),
        ("megatron_ladder", HYBRID | {"add_qkv_bias": True, "tie_embeddings": True}),
        ("megatron_ladder", HYBRID | {"qk_layernorm": True, "head_dim": 12, "hidden_size": 34}),
        (
            "megatron_ladder",
            HYBRID
            | {
                "add_qkv_bias": True,
                "add_attention_output_bias": True,
                "add_mlp_bias": True,
                "rope_scaling": "llama3",
                "rope_scaling_factor": 8.0,
                "rotary_base": 5e5,
                "rope_original_max_position_embeddings": 16,
            },
        ),
    ],
)
def test_exported_directories_match_the_training_model(
    model_type: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    model = random_model(tiny_config(**changes))
    module = opened(write_hf(model, tmp_path / "model"))
    assert module.config.model_type == hf_type(model.config) == model_type
    tokens = random_tokens(2, 40)
    with torch.no_grad():
        assert_close(module(tokens).logits, our_logits(model, tokens))


def test_both_boundaries_follow_the_recurrence() -> None:
    """Layers standard, ladder, ladder, standard, written out: x_i = x_{i-1} + h_i(x_{i-2}) in ladder layers."""
    model = random_model(tiny_config(num_layers=4, residual_mode="ladder", ladder_layers=(1, 2)))
    module = module_of(model)
    tokens = random_tokens(2, 12)
    rotary = module.model.rotary_emb(torch.zeros(1), torch.arange(12).unsqueeze(0))

    def attention(layer: int, x: Tensor) -> Tensor:
        block = module.model.layers[layer]
        return block.self_attn(block.input_layernorm(x), position_embeddings=rotary, attention_mask=None)[0]

    def mlp(layer: int, x: Tensor) -> Tensor:
        block = module.model.layers[layer]
        return block.mlp(block.post_attention_layernorm(x))

    with torch.no_grad():
        x0 = module.model.embed_tokens(tokens)
        x1 = x0 + attention(0, x0)
        x2 = x1 + mlp(0, x1)
        x3 = x2 + attention(1, x1)
        x4 = x3 + mlp(1, x2)
        x5 = x4 + attention(2, x3)
        x6 = x5 + mlp(2, x4)
        x7 = x6 + attention(3, x6)
        x8 = x7 + mlp(3, x7)
        found = module(tokens, output_hidden_states=True)
    assert torch.equal(found.logits, module.lm_head(module.model.norm(x8)))
    for hidden_states, expected in zip(found.hidden_states, (x0, x2, x4, x6, module.model.norm(x8)), strict=True):
        assert torch.equal(hidden_states, expected)


def test_the_first_layer_reads_the_embedding_twice() -> None:
    module = module_of(random_model(tiny_config(num_layers=1, residual_mode="ladder", ladder_layers=(0,))))
    block, tokens = module.model.layers[0], random_tokens(2, 12)
    rotary = module.model.rotary_emb(torch.zeros(1), torch.arange(12).unsqueeze(0))
    with torch.no_grad():
        x0 = module.model.embed_tokens(tokens)
        attended = block.self_attn(block.input_layernorm(x0), position_embeddings=rotary, attention_mask=None)[0]
        x2 = x0 + attended + block.mlp(block.post_attention_layernorm(x0))
        assert torch.equal(module(tokens).logits, module.lm_head(module.model.norm(x2)))


@pytest.mark.parametrize(
    "changes",
    [
        HYBRID,
        HYBRID | {"residual_staleness": 2, "qk_layernorm": True},
        HYBRID | {"residual_mode": "ladder-parallel"},
        HYBRID | {"residual_mode": "ladder-attention"},
    ],
    ids=["hybrid", "staleness-2", "ladder-parallel", "ladder-attention"],
)
def test_greedy_tokens_are_the_same_with_every_cache_and_padding(changes: dict[str, Any], tmp_path: Path) -> None:
    model = random_model(tiny_config(**changes))
    module = opened(write_hf(model, tmp_path / "model", pad_token_id=0))
    prompts = [random_tokens(1, length, seed=length) % (VOCAB - 1) + 1 for length in (3, 9, 6)]
    expected = [greedy(model, prompt, 8) for prompt in prompts]
    width = max(prompt.shape[1] for prompt in prompts)
    padded = torch.cat([nn.functional.pad(prompt, (width - prompt.shape[1], 0)) for prompt in prompts])
    for options in ({"cache_implementation": "dynamic"}, {"cache_implementation": "static"}, {"use_cache": False}):
        options |= {"max_new_tokens": 8, "do_sample": False}
        alone = [module.generate(prompt, **options)[:, prompt.shape[1] :] for prompt in prompts]
        together = module.generate(padded, attention_mask=(padded != 0).long(), **options)[:, width:]
        assert torch.equal(torch.cat(alone), torch.cat(expected)), options
        assert torch.equal(together, torch.cat(expected)), options


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("changes", [HYBRID | {"residual_staleness": 3}, HYBRID | {"residual_mode": "ladder-parallel"}])
def test_recomputation_matches_the_gradients_of_the_training_model(changes: dict[str, Any], reentrant: bool) -> None:
    model = random_model(tiny_config(**changes))
    module = module_of(model).train()
    module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    tokens = random_tokens(2, 12)
    loss = module(tokens, labels=tokens).loss
    loss.backward()
    ours = model(tokens[:, :-1], tokens[:, 1:]) / tokens[:, 1:].numel()
    ours.backward()
    assert_close(loss, ours)
    with torch.no_grad():
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.copy_(parameter.grad)
    expected = hf_tensors(model)
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None, name
        assert_close(parameter.grad, expected[name])


@pytest.mark.long
@pytest.mark.parametrize(
    "changes",
    [{"residual_mode": "ladder", "ladder_layers": (1,)}, {"residual_mode": "ladder-parallel", "ladder_layers": (0, 1)}],
)
def test_it_compiles_into_one_graph(changes: dict[str, Any]) -> None:
    """Prefill and a step with a cache; dynamo's graph runs uncompiled, because code generation needs a compiler."""
    torch.compiler.reset()
    module = module_of(random_model(tiny_config(num_layers=2, **changes)))
    tokens = random_tokens(2, 9)
    compiled = torch.compile(module, fullgraph=True, backend="eager")
    with torch.no_grad():
        assert_close(compiled(tokens).logits, module(tokens).logits)
        cache = StaticCache(module.config, max_cache_len=16)
        module(tokens[:, :8], past_key_values=cache)
        step = compiled(tokens[:, 8:], past_key_values=cache, position_ids=torch.full((2, 1), 8))
        assert_close(step.logits[:, -1], module(tokens).logits[:, -1])


def test_attention_implementations_agree_and_return_attentions(tmp_path: Path) -> None:
    folder = write_hf(random_model(tiny_config(**HYBRID)), tmp_path / "model")
    tokens = random_tokens(2, 9)
    with torch.no_grad():
        found = opened(folder, attn_implementation="eager")(tokens, output_attentions=True)
        assert_close(opened(folder, attn_implementation="sdpa")(tokens).logits, found.logits)
    assert [tuple(weights.shape) for weights in found.attentions] == [(2, 4, 9, 9)] * 6


def test_saving_and_loading_changes_nothing(tmp_path: Path) -> None:
    changes = HYBRID | {"tie_embeddings": True, "rope_scaling": "linear", "rope_scaling_factor": 2.0}
    model = random_model(tiny_config(**changes))
    first = opened(write_hf(model, tmp_path / "first", dtype="bfloat16"), dtype="auto")
    assert first.dtype == torch.bfloat16
    assert first.lm_head.weight is first.model.embed_tokens.weight
    first.save_pretrained(tmp_path / "second")
    second = opened(tmp_path / "second", dtype="auto")
    tokens = random_tokens(2, 9)
    with torch.no_grad():
        assert torch.equal(second(tokens).logits, first(tokens).logits)
    body = AutoModel.from_pretrained(tmp_path / "second", trust_remote_code=True, dtype="auto")
    assert type(body).__name__ == MegatronLadderModel.__name__
    with torch.no_grad():
        assert torch.equal(body.eval()(tokens).last_hidden_state, first.model(tokens).last_hidden_state)


@pytest.mark.parametrize("tied", [False, True])
def test_a_larger_vocabulary_keeps_the_bound_of_the_logits(tied: bool, tmp_path: Path) -> None:
    model, tokens = random_model(tiny_config(logit_soft_cap=0.5, tie_embeddings=tied)), random_tokens(1, 8)
    module = opened(write_hf(model, tmp_path / "model"))
    with torch.no_grad():
        before = module(tokens).logits
        module.resize_token_embeddings(VOCAB + 3)
        after = module(tokens).logits
    assert_close(after[..., :VOCAB], before)
    assert after.shape[-1] == VOCAB + 3 and after.abs().max() < 0.5


def test_text_generation_pipeline(tmp_path: Path) -> None:
    model = random_model(tiny_config(**HYBRID))
    folder = write_hf(model, tmp_path / "model", pad_token_id=0)
    words = Tokenizer(WordLevel({f"w{number}": number for number in range(VOCAB)}, unk_token="w0"))
    words.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", padding_side="left").save_pretrained(folder)
    generate = pipeline("text-generation", model=str(folder), trust_remote_code=True)
    options = {"max_new_tokens": 4, "do_sample": False, "return_full_text": False}
    together = generate(["w5 w6 w7", "w8"], batch_size=2, **options)
    for prompt, (found,) in zip(([5, 6, 7], [8]), together, strict=True):
        assert found["generated_text"] == " ".join(f"w{token}" for token in greedy(model, torch.tensor([prompt]), 4)[0])


def test_servers_can_replace_the_attention(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As vLLM and SGLang do: build the body from its configuration, and replace attention by name and layer."""
    model = random_model(tiny_config(**HYBRID, qk_layernorm=True))
    folder = write_hf(model, tmp_path / "model")
    served = list(range(6))

    def attend(module: nn.Module, *args: Any, attention_instances: list[int], **kwargs: Any) -> Any:
        assert attention_instances[module.layer_idx] == len(calls) % 6
        calls.append(module.layer_idx)
        return sdpa_attention_forward(module, *args, **kwargs)

    calls: list[int] = []
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "served", attend)
    config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    body = AutoModel.from_config(config, trust_remote_code=True).eval()
    weights = {name.removeprefix("model."): tensor for name, tensor in hf_tensors(model).items()}
    body.load_state_dict({name: tensor for name, tensor in weights.items() if name != "lm_head.weight"})
    body.config._attn_implementation = "served"
    tokens = random_tokens(1, 9)
    with torch.no_grad():
        found = body(
            input_ids=tokens,
            position_ids=torch.arange(9).unsqueeze(0),
            use_cache=False,
            return_dict=False,
            attention_instances=served,
        )
        expected = module_of(model).model(tokens).last_hidden_state
    assert calls == served
    assert_close(found[0], expected)


def test_pipelines_that_pass_one_tensor_are_rejected_only_inside_the_ladder() -> None:
    """Layers standard, standard, ladder, ladder: only the first boundary needs a single tensor."""
    module = module_of(random_model(tiny_config(num_layers=4, residual_mode="ladder", ladder_layers=(2, 3)))).model
    tokens = random_tokens(1, 9)
    rotary = module.rotary_emb(torch.zeros(1), torch.arange(9).unsqueeze(0))
    options = {"position_embeddings": rotary, "attention_mask": None}
    with torch.no_grad():
        first = module.layers[0](module.embed_tokens(tokens), **options)
        assert isinstance(first, Tensor)
        state = module.layers[1](first, **options)
        with pytest.raises(ValueError, match="layer 2 needs the last 2 residual streams and was given 1"):
            module.layers[2](state[0], **options)
        state = module.layers[2](state, **options)
        with pytest.raises(ValueError, match="layer 3 needs"):
            module.layers[3](state[0], **options)
        assert isinstance(module.layers[3](state, **options), Tensor)


@pytest.mark.parametrize(("ladder_layers", "expected"), [(2, [4, 5]), (0, []), (None, []), ([3, 1], [1, 3])], ids=str)
def test_ladder_layers_in_the_notation_of_the_authors(ladder_layers: Any, expected: list[int], tmp_path: Path) -> None:
    folder = write_hf(random_model(tiny_config(**HYBRID)), tmp_path / "model")
    written = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(written | {"ladder_layers": ladder_layers}))
    assert AutoConfig.from_pretrained(folder, trust_remote_code=True).ladder_layers == expected


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"residual_mode": "other"}, "residual_mode 'other'"),
        ({"residual_staleness": 0}, "residual_staleness 0"),
        ({"ladder_layers": [6]}, "ladder_layers [6]"),
        ({"ladder_layers": [1, 1]}, "ladder_layers [1, 1]"),
        ({"ladder_layers": 7}, "ladder_layers 7"),
        ({"ladder_layers": 1, "residual_mode": "parallel"}, "no meaning with residual_mode 'parallel'"),
    ],
)
def test_unsupported_wirings_are_rejected(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError) as refusal:
        MegatronLadderConfig(num_hidden_layers=6, **changes)
    assert words in str(refusal.value)


def test_the_tensor_parallel_plan_has_every_matrix_and_query_norm() -> None:
    module = module_of(random_model(tiny_config(**HYBRID, qk_layernorm=True)))
    layer = "model.layers.*"
    assert {name: how for name, how in module.tp_plan.items() if name.startswith(layer)} == {
        **{f"{layer}.self_attn.{which}_proj": "colwise" for which in "qkv"},
        f"{layer}.self_attn.o_proj": "rowwise",
        f"{layer}.mlp.gate_proj": "colwise",
        f"{layer}.mlp.up_proj": "colwise",
        f"{layer}.mlp.down_proj": "rowwise",
        **{f"{layer}.self_attn.{which}_norm": "replicated_with_grad_allreduce" for which in "qk"},
    }
    assert module.model._pp_plan == {}


def test_the_plugin_for_vllm_contains_the_configuration_of_exported_directories(tmp_path: Path) -> None:
    command = [sys.executable, "setup.py", "--quiet", "build", "--build-base", str(tmp_path)]
    subprocess.run(command, cwd=REPOSITORY_ROOT / "vllm_plugin", check=True)
    name = "configuration_megatron_ladder.py"
    built = tmp_path / "lib" / "megatron_ladder_vllm" / name
    assert built.read_bytes() == module_files(tiny_config(**HYBRID))[name]

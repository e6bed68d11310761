"""The decode loop in one process, compared with recomputation of the whole text for every token."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from ladder_lab.cost.inference import InferenceRequest, inference_memory
from ladder_lab.cost.machines import Machine
from megatron_ladder.comm.group import CommGroup
from megatron_ladder.comm.launch import RankInfo
from megatron_ladder.comm.mesh import ProcessMesh
from megatron_ladder.errors import BadNumbersError
from megatron_ladder.generate import program
from megatron_ladder.generate import slots as slots_module
from megatron_ladder.generate.engine import GenerationEngine
from megatron_ladder.generate.loading import open_model
from megatron_ladder.generate.options import ModelOptions
from megatron_ladder.generate.requests import GenerationRequest, NewToken
from megatron_ladder.generate.sampling import Chosen, SamplingParameters, SamplingPlan
from megatron_ladder.model.mixers.mixer import States
from megatron_ladder.tokenizers.kinds import ByteTokenizer, load_tokenizer
from tests.helpers.pairwise import quick_share
from tests.helpers.tokenizer_copies import train_byte_level
from tests.reference import greedy_continuation, make_weights, reference_logits
from tests.unit.generate.tiny_model import (
    MODELS,
    PROMPTS,
    reference_of,
    tiny_config,
    tiny_engine,
    tiny_model,
    train_tokenizer,
    write_checkpoint,
)

GREEDY = SamplingParameters(temperature=0.0)
NEW_TOKENS = 7


def requests_of(prompts: Sequence[tuple[int, ...]], sampling: SamplingParameters) -> list[GenerationRequest]:
    return [GenerationRequest(prompt, NEW_TOKENS, sampling) for prompt in prompts]


def force(rows: Sequence[list[int]], monkeypatch: pytest.MonkeyPatch) -> mock.Mock:
    """Let every model choose these tokens, a row at each step; return the sampler that does."""
    following, sampler = iter(rows), mock.Mock(plan=SamplingPlan.of([]))
    sampler.choose.side_effect = lambda logits, uniform: logits
    sampler.draw.side_effect = lambda count, numbers=1: [[0.0] * numbers] * count
    sampler.read.side_effect = lambda chosen: Chosen([[token] for token in next(following)], None)
    monkeypatch.setattr(slots_module, "Sampler", lambda *_: sampler)
    return sampler


PLAIN, PACKED = (False, torch.float64, 1e-11, None), (True, torch.float32, 1e-5, None)
HALF = (True, torch.bfloat16, 2e-2, None)
CHUNKED = ("standard", "lanes", "windows", "sinks", "delta", "latent-ladder")
"""Models that also read prompts of up to six tokens in parts."""


@pytest.mark.parametrize(
    ("name", "packed", "dtype", "tolerance", "prefill_chunk_size"),
    quick_share(
        [
            *((name, *PLAIN[:3], chunk) for name in CHUNKED for chunk in (1, 2, 5)),
            *((name, *PLAIN) for name in MODELS),
            *((name, *PACKED) for name in ("standard", "lanes", "delta", "latent-ladder", "instella")),
            *((name, *HALF) for name in ("ladder", "delta", "latent-ladder", "instella")),
        ],
        4,
    ),
)
def test_logits_with_the_cache_equal_recomputation(
    name: str,
    packed: bool,
    dtype: torch.dtype,
    tolerance: float,
    prefill_chunk_size: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = tiny_config(**MODELS[name])
    reference = reference_of(config)[1]
    weights = make_weights(reference, seed=11, dtype=torch.float64)
    weights = {part: weight.to(dtype).double() for part, weight in weights.items()}
    model = tiny_model(config, weights, packed, dtype)
    packs = packed and (dtype != torch.bfloat16 or torch.ops.mkldnn._is_mkldnn_bf16_supported())
    for part, weight in model.named_parameters():
        is_matrix = weight.dim() == 2 and ("proj.weight" in part or part == "lm_head.weight")
        # Decoding multiplies with the rows of each head.
        assert weight.is_mkldnn == (packs and is_matrix and "kv_b_proj" not in part), part
    forced = torch.randint(0, config.vocab_size, (NEW_TOKENS, len(PROMPTS)), generator=torch.Generator().manual_seed(1))
    sampler = force(forced.tolist(), monkeypatch)

    engine = GenerationEngine(model, ProcessMesh.single(), prefill_chunk_size=prefill_chunk_size)
    generations = engine.generate(requests_of(PROMPTS, GREEDY))

    assert [generation.ids for generation in generations] == [tuple(row) for row in forced.t().tolist()]
    for row, prompt in enumerate(PROMPTS):
        for step, (logits, _) in enumerate(call.args for call in sampler.choose.call_args_list):
            tokens = torch.tensor([[*prompt, *forced[:step, row].tolist()]])
            expected = reference_logits(weights, reference, tokens)[0, -1]
            assert (logits[row, : config.vocab_size] - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.long
@pytest.mark.parametrize("name", ["windows", "sinks"])
def test_500_tokens_in_windows_are_those_of_recomputation(name: str) -> None:
    config = tiny_config(**MODELS[name])
    weights, reference = reference_of(config, seed=21)
    prompts = [tuple(range(number, 2 * number + 1)) for number in range(1, 11)]
    requests = [GenerationRequest(prompt, 50, GREEDY) for prompt in prompts]
    found = [generation.ids for generation in tiny_engine(config, weights).generate(requests)]
    assert found == [tuple(greedy_continuation(weights, reference, prompt, 50)) for prompt in prompts]
    assert len({token for ids in found for token in ids}) > 20


def test_a_sample_ends_at_any_of_its_eos_ids_and_the_others_continue() -> None:
    config = tiny_config(**MODELS["standard"])
    weights, reference = reference_of(config)
    engine = tiny_engine(config, weights)
    expected = [greedy_continuation(weights, reference, prompt, NEW_TOKENS) for prompt in PROMPTS]
    third = expected[2][3]
    never = sorted(set(range(config.vocab_size)) - {token for tokens in expected for token in tokens})
    assert never[0] < third and expected[0][0] < never[-1]
    ends = [frozenset({expected[0][0], never[-1]}), frozenset[int](), frozenset({never[0], third}), frozenset(never)]
    requests = [
        GenerationRequest(prompt, NEW_TOKENS, GREEDY, eos_ids) for prompt, eos_ids in zip(PROMPTS, ends, strict=True)
    ]
    generations = engine.generate(requests)
    lengths = [1, NEW_TOKENS, expected[2].index(third) + 1, NEW_TOKENS]
    assert [list(generation.ids) for generation in generations] == [
        tokens[:length] for tokens, length in zip(expected, lengths, strict=True)
    ]
    assert [generation.finish_reason for generation in generations] == ["eos", "length", "eos", "length"]


def test_pieces_join_to_the_text_of_the_ids() -> None:
    """The model generates random bytes, many of which begin a character that is never completed."""
    config = tiny_config(vocab_size=256)
    engine = tiny_engine(config)
    engine.tokenizer = ByteTokenizer()
    requests = [GenerationRequest((65, 66), 3, SamplingParameters(seed=seed)) for seed in range(30)]
    tokens: list[NewToken] = []
    generations = engine.generate(requests, tokens.append)
    texts = [ByteTokenizer().decode(generation.ids) for generation in generations]
    assert [generation.text for generation in generations] == texts
    assert ["".join(token.text for token in tokens if token.sample == sample) for sample in range(30)] == texts
    assert any(0xC2 <= generation.ids[-1] <= 0xF4 for generation in generations)


@pytest.mark.parametrize("kind", ["SentencePieceTokenizer", "HuggingFaceTokenizer"])
def test_the_spelling_of_a_control_token_ends_a_text(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also as a part of a stop string, and after an incomplete character; it is no part of the text."""
    if kind == "SentencePieceTokenizer":
        train_tokenizer(tmp_path, ["def add(a, b):\n    return a + b\n"] * 20)
        tokenizer = load_tokenizer(kind, tmp_path / "tokenizer.model")
    else:
        train_byte_level([], 258, ["<s>", "</s>"]).save(str(tmp_path / "tokenizer.json"))
        tokenizer = load_tokenizer(kind, tmp_path)
    begin, end = (next(id for id, text in tokenizer.control_tokens.items() if text == name) for name in ("<s>", "</s>"))
    letter, *bytes_of_face = tokenizer.encode("b\U0001f642")
    engine = tiny_engine(tiny_config(vocab_size=tokenizer.vocab_size))
    engine.tokenizer = tokenizer
    text = tokenizer.decode([letter])
    for ids, stop, shown in (
        ([letter, begin], "<s>", text),
        ([letter, letter, begin], "b<s>", text),
        ([letter, end, begin, letter], "<s>b", text),
        ([letter, bytes_of_face[0], begin], "<s>", f"{text}\ufffd"),
    ):
        force([[id] for id in ids], monkeypatch)
        request = GenerationRequest((letter,), 9, GREEDY, stop=(stop,))
        (generation,) = engine.generate([request])
        assert (list(generation.ids), generation.finish_reason) == (ids, "stop")
        assert generation.text == shown
    force([[letter], [begin]], monkeypatch)
    (generation,) = engine.generate([GenerationRequest((letter,), 9, GREEDY, frozenset({begin}), ("<s>",))])
    assert (generation.text, generation.finish_reason) == (text, "eos")


def test_non_finite_logits_are_an_error() -> None:
    config = tiny_config()
    weights, _ = reference_of(config)
    weights["final_norm.weight"][3] = torch.nan
    with pytest.raises(BadNumbersError, match="the logits of prompt 0 "):
        tiny_engine(config, weights).generate(requests_of(PROMPTS, GREEDY))
    weights, _ = reference_of(config)
    weights["embedding.weight"][PROMPTS[1][0]] = torch.nan
    engine = tiny_engine(config, weights)
    with pytest.raises(BadNumbersError, match="the logits of prompt 1 "):
        engine.generate(requests_of(PROMPTS, GREEDY))
    with pytest.raises(BadNumbersError, match="the logits of the text"):
        engine.score((1, 17, 2))


def test_a_stop_string_can_span_tokens() -> None:
    """The stop string is bytes 3 and 4 of the text without a stop string."""
    config = tiny_config(vocab_size=128)
    engine = tiny_engine(config)
    engine.tokenizer = ByteTokenizer()
    free = GenerationRequest((65, 66), 12, SamplingParameters(seed=3))
    (whole,) = engine.generate([free])
    assert whole.text is not None
    stop = whole.text[3:5]
    assert stop not in whole.text[:4]
    tokens: list[NewToken] = []
    (cut,) = engine.generate([replace(free, stop=("never", stop))], tokens.append)
    assert (cut.text, cut.finish_reason, cut.ids) == (whole.text[:3], "stop", whole.ids[:5])
    assert "".join(token.text for token in tokens) == cut.text
    (past,) = engine.generate([replace(free, stop=("never",))])
    assert (past.text, past.finish_reason) == (whole.text, "length")


@pytest.mark.parametrize("experts", [0, 4])
def test_ranks_of_a_model_with_experts_need_equal_sums(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, experts: int
) -> None:
    """A router would choose other experts after another rounding."""
    sizes = {"num_experts": experts, "moe_ffn_hidden_size": 16, "moe_layers": (1,)} if experts else {}
    checkpoint = write_checkpoint(tmp_path, tiny_config(**sizes))
    needed = list[bool]()

    def select(choice: str, group: CommGroup, device: torch.device, dtype: torch.dtype, equal_sums: bool) -> CommGroup:
        needed.append(equal_sums)
        return group

    monkeypatch.setattr(program, "select_all_reduce", select)
    stored = open_model(checkpoint, None, None)
    program.load_engine(RankInfo(0, 1, 0), ModelOptions(checkpoint), stored).close()
    assert needed == [experts > 0]


def test_states_of_gated_delta_are_as_large_for_8000_tokens_as_for_1000(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two layers of the model have it, and the one between them attention."""
    config = tiny_config(**MODELS["delta"], max_position_embeddings=8000)
    model = tiny_model(config, reference_of(config)[0])
    engine = GenerationEngine(model, ProcessMesh.single(), prefill_chunk_size=512)
    allocated: list[States] = []
    allocate = States.allocate

    def recorded(*arguments: Any) -> States:
        allocated.append(allocate(*arguments))
        return allocated[-1]

    monkeypatch.setattr(States, "allocate", recorded)
    found = []
    for length in (1000, 8000):
        prompt = tuple(token % config.vocab_size for token in range(length - 2))
        (generation,) = engine.generate([GenerationRequest(prompt, 2, GREEDY)])
        found.append([sum(state.nbytes for state in of_mixer.values()) for of_mixer in allocated.pop().tensors])
        assert generation.state_bytes == sum(found[-1])
        kept = inference_memory(InferenceRequest(config, Machine.usual("h100"), 1, 1, length - 2, 2)).cache
        # The planner counts bf16 in everything but the matrices, which are fp32 there as well.
        matrices = 2 * 4 * 6 * 5 * 4
        assert 2 * (kept - matrices) == sum(found[-1]) - matrices
    heads = config.num_key_value_heads * config.head_dim
    fixed = 4 * (3 * (2 * 2 * 6 + 4 * 5) + 4 * 6 * 5)
    assert found == [[fixed, 4 * 2 * heads * length, fixed] for length in (1000, 8000)]

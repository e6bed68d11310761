"""Hugging Face directories: the same tokens as transformers, tokenizers, chat templates, and damaged files."""

import hashlib
import io
import json
import shutil
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoModelForCausalLM

from megatron_ladder.checkpoint.hf_config import hf_config
from megatron_ladder.cli.convert_checkpoint import main as convert
from megatron_ladder.cli.generate import main
from megatron_ladder.comm.mesh import ProcessMesh
from megatron_ladder.errors import UserError
from megatron_ladder.generate.engine import GenerationEngine
from megatron_ladder.generate.evaluation import Evaluator
from megatron_ladder.generate.loading import StoredModel, load_model, open_model
from megatron_ladder.generate.prompts import PromptEncoder
from megatron_ladder.generate.requests import GenerationRequest
from megatron_ladder.generate.sampling import GREEDY
from megatron_ladder.tokenizers.kinds import load_tokenizer
from tests.helpers.pairwise import quick_share
from tests.helpers.tokenizer_copies import train_byte_level
from tests.reference import ReferenceConfig, greedy_continuation
from tests.unit.convert.saved_models import MODELS as KINDS
from tests.unit.convert.saved_models import export, save_model
from tests.unit.generate.tiny_model import (
    MODELS,
    PROMPTS,
    greedy_by_transformers,
    tiny_config,
    train_tokenizer,
    write_checkpoint_with_tokenizer,
)

NEW_TOKENS = 10


def greedy_here(
    stored: StoredModel, prompts: Sequence[tuple[int, ...]] = PROMPTS, new_tokens: int = NEW_TOKENS
) -> list[tuple[int, ...]]:
    mesh = ProcessMesh.single()
    engine = GenerationEngine(load_model(stored, mesh, torch.float32, torch.device("cpu"), overlap=True), mesh)
    requests = [GenerationRequest(prompt, new_tokens, GREEDY) for prompt in prompts]
    return [generation.ids for generation in engine.generate(requests)]


EXPORTED = {
    "hybrid": MODELS["hybrid"],
    "ladder-parallel": {"residual_mode": "ladder-parallel", "ladder_layers": (1, 2), "add_qkv_bias": True},
}


@pytest.mark.parametrize("name", quick_share([*KINDS, *EXPORTED], 5))
def test_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """Exported models run in their module."""
    if name in KINDS:
        folder, module = tmp_path, save_model(tmp_path, name, tie_word_embeddings=name == "qwen3")
    else:
        folder, _ = export(tmp_path, tiny_config(**EXPORTED[name]))
        module = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32)
    assert greedy_here(open_model(folder, None, None)) == greedy_by_transformers(module)


@pytest.mark.long
def test_500_tokens_in_windows_are_those_of_mistral(tmp_path: Path) -> None:
    module = save_model(tmp_path, "mistral", sliding_window=None)
    stored = open_model(tmp_path, None, None)
    layers = tuple(range(stored.config.num_layers))
    stored = replace(stored, config=replace(stored.config, window_size=5, window_layers=layers))
    prompts = [tuple(range(number, 2 * number + 1)) for number in range(1, 11)]
    without_windows = greedy_by_transformers(module, prompts, 50)
    module.config.sliding_window = 5
    windowed = type(module)(module.config)
    windowed.load_state_dict(module.state_dict())
    expected = greedy_by_transformers(windowed.eval(), prompts, 50)
    assert greedy_here(stored, prompts, 50) == expected != without_windows


def test_weights_are_converted_to_the_requested_dtype(tmp_path: Path) -> None:
    """From several bf16 files."""
    save_model(tmp_path, dtype=torch.bfloat16, max_shard_size="50KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    module = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert greedy_here(open_model(tmp_path, None, None)) == greedy_by_transformers(module)


def test_the_paper_authors_format(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A Llama configuration with `ladder_layers`, the number of last layers that are ladder layers."""
    config = tiny_config(residual_mode="ladder", ladder_layers=(1, 2))
    folder, weights = export(tmp_path, config)
    reference = ReferenceConfig.like(config)
    found = hf_config(tiny_config(), dtype="float32") | {"model_type": "llamaLadder", "ladder_layers": 2}
    (folder / "config.json").write_text(json.dumps(found))
    argv = ["--model", str(folder), "--max-new-tokens", str(NEW_TOKENS), "--temperature", "0", "--json"]
    main([*argv, "--tokens", *map(str, PROMPTS[2])])
    ids = json.loads(capsys.readouterr().out.splitlines()[-1])["ids"]
    assert ids == greedy_continuation(weights, reference, PROMPTS[2], NEW_TOKENS)
    assert ids != greedy_continuation(weights, replace(reference, ladder_layers=()), PROMPTS[2], NEW_TOKENS)


TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}> {{ m.content }} {% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model whose tokenizer puts <s> before a text and has a chat template."""
    folder = tmp_path_factory.mktemp("chat")
    save_model(folder, "llama")
    words = ["<unk>", "<s>", "</s>", "<user>", "<system>", "<assistant>", "<a>", "hello", "you", "be", "kind"]
    words += [f"w{number}" for number in range(len(words), 301)]
    tokenizer = Tokenizer(models.WordLevel({word: place for place, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(words[:7])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "chat_template": TEMPLATE}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 77]}))
    return folder


def ids_of(argv: list[str], capsys: pytest.CaptureFixture[str]) -> list[int]:
    main([*argv, "--max-new-tokens", "2", "--json"])
    ids: list[int] = json.loads(capsys.readouterr().out)["prompt_ids"]
    return ids


def test_prompts_get_special_tokens_or_the_chat_template(chat_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--model", str(chat_model), "--prompt", "hello you"]
    assert ids_of(argv, capsys) == [1, 7, 8]
    assert ids_of([*argv, "--chat"], capsys) == [3, 7, 8, 6]
    assert ids_of([*argv, "--chat", "--system", "be kind"], capsys) == [4, 9, 10, 3, 7, 8, 6]
    main([*argv, "--chat", "--max-new-tokens", "3", "--temperature", "0"])
    assert "hello" not in capsys.readouterr().out
    assert open_model(chat_model, None, None).eos_ids == {2, 77}


def test_a_conversation_includes_its_history(
    chat_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--model", str(chat_model), "--max-new-tokens", "3", "--temperature", "0"]
    prompts: list[tuple[int, ...]] = []
    generate = GenerationEngine.generate

    def recording(self: GenerationEngine, requests: list[GenerationRequest], *more: object) -> object:
        prompts.extend(request.prompt_ids for request in requests)
        return generate(self, requests, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(GenerationEngine, "generate", recording)
    lines = b"hello\n\ncaf\xe9\n" + b"you " * 200 + b"\nyou"
    for flags in (["--chat"], []):
        prompts.clear()
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(lines), encoding="utf-8"))
        main([*argv, "--interactive", *flags])
        captured = capsys.readouterr()
        foreign, long = captured.err.splitlines()[-2:]
        assert foreign.startswith("this line: '\\udce9' at character 4") and long.startswith("this line: ")
        assert len(prompts) == 2
        if flags:
            assert prompts[0] == (3, 7, 6)
            assert prompts[1][:3] == (3, 7, 5) and prompts[1][-3:] == (3, 8, 6)
        else:
            assert prompts == [(1, 7), (1, 8)]
            assert captured.out.startswith("hello")


def test_a_tokenizer_may_have_more_ids_than_the_model(
    chat_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Many models that were fine-tuned with transformers have a padding token without an embedding."""
    folder = shutil.copytree(chat_model, tmp_path / "padded")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(["[PAD]"])
    tokenizer.save(str(folder / "tokenizer.json"))
    convert(["import", "--hf", str(folder), "--save", str(tmp_path / "imported")])
    assert "the tokenizer has 302 ids, the model 301" in capsys.readouterr().out
    for model in (folder, tmp_path / "imported"):
        main(["--model", str(model), "--prompt", "hello", "--max-new-tokens", "2"])
        assert "warning: the tokenizer has 302 ids, the model 301" in capsys.readouterr().err
        with pytest.raises(UserError, match="the id 301 is outside the model's vocabulary of 301; use the tokenizer"):
            main(["--model", str(model), "--prompt", "[PAD]"])
    with closing(Evaluator(1, model=folder)) as evaluator:
        with pytest.raises(UserError, match="id 301 is outside of the vocabulary, 0 to 300; .*--tokenizer-model"):
            evaluator.score([((1,), (301,))])
        with pytest.raises(UserError, match="a text has the id 301, and the model's vocabulary 301"):
            evaluator.generate([GenerationRequest((301,), 1)])


def test_another_tokenizer_than_the_models_is_reported(
    chat_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A copy of the model's own is not, in either of two formats."""
    save, _, own = write_checkpoint_with_tokenizer(tmp_path)
    train_byte_level([], 259, ["<|endoftext|>"]).save(str(tmp_path / "tokenizer.json"))
    convert(["export", "--load", str(save), "--hf", str(tmp_path / "hf")])
    pieces, words = ("SentencePieceTokenizer", own.files[0]), ("HuggingFaceTokenizer", tmp_path / "tokenizer.json")
    for model, (kind, file), is_own in (
        (save, pieces, True),
        (save, words, False),
        (tmp_path / "hf", pieces, True),
        (tmp_path / "hf", ("HuggingFaceTokenizer", tmp_path / "hf"), True),
        (tmp_path / "hf", words, False),
        (chat_model, words, False),
    ):
        found = open_model(model, kind, file)
        expected = f"--tokenizer-model {file} ({found.tokenizer.vocab_size} ids, sha256 {found.tokenizer.sha256[:12]})"
        warned = [
            warning.startswith(f"{expected} is not the tokenizer in {found.directory}") for warning in found.warnings
        ]
        assert warned == [] if is_own else warned == [True]
    flags = ["--tokenizer-type", words[0], "--tokenizer-model", str(words[1])]
    main(["--model", str(save), "--prompt", "a", "--max-new-tokens", "1", *flags])
    line = f"(257 ids, sha256 {hashlib.sha256(words[1].read_bytes()).hexdigest()[:12]}) is not the tokenizer in {save}"
    assert line in capsys.readouterr().err


def test_sentencepiece_cannot_encode_conversations(tmp_path: Path) -> None:
    """SentencePiece would encode the control tokens of a template as text."""
    with pytest.raises(UserError, match="--chat: SentencePieceTokenizer does not recognise special tokens in a text"):
        PromptEncoder(train_tokenizer(tmp_path, ["def size(x):\n    return x  # mega\n"] * 20), (), True, None)


def test_a_control_token_that_a_message_spells_out_is_text(tmp_path: Path) -> None:
    """Also one that ends turns and is not flagged as special. Other tokens stay tokens, such as `<tool_call>`."""
    tokenizer = train_byte_level(["hello"], 270, ["<|endoftext|>"])
    tokenizer.add_tokens(["<|end|>", "<tool_call>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    template = "{% for m in messages %}{{ m.content }}<|end|>{% endfor %}"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    encoder = PromptEncoder(load_tokenizer("HuggingFaceTokenizer", tmp_path), (), True, None)
    end, call = (tokenizer.token_to_id(name) for name in ("<|end|>", "<tool_call>"))
    ids = encoder.encode("a <|end|> <tool_call> b")
    assert ids.count(end) == 1 and ids[-1] == end and ids.count(call) == 1
    assert tokenizer.decode(ids, skip_special_tokens=False) == "a <|end|> <tool_call> b<|end|>"


def test_a_template_may_shorten_earlier_answers(tmp_path: Path) -> None:
    """Templates of reasoning models do so at a token that is not special."""
    tokenizer = train_byte_level(["hello"], 270, ["<|endoftext|>"])
    tokenizer.add_tokens(["</think>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    template = "{% for m in messages %}{{ m.content.split('</think>')[-1] }}<|endoftext|>{% endfor %}"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    encoder = PromptEncoder(load_tokenizer("HuggingFaceTokenizer", tmp_path), (), True, None)
    ids = encoder.encode("b", [{"role": "user", "content": "a"}, {"role": "assistant", "content": "x</think>y"}])
    assert tokenizer.decode(ids, skip_special_tokens=False) == "a<|endoftext|>y<|endoftext|>b<|endoftext|>"

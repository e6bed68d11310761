"""Files next to the weights, as read by the libraries that use them."""

import json
from pathlib import Path

import pytest
import sentencepiece
import tokenizers
from tokenizers import processors
from tokenizers.models import BPE
from tokenizers.normalizers import Lowercase
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

from megatron_ladder.checkpoint.format import Checkpoint
from megatron_ladder.data.chat_template import read_chat_template
from megatron_ladder.errors import UserError
from megatron_ladder.generate.loading import open_model
from megatron_ladder.tokenizers.copies import load_tokenizer_from_directory
from megatron_ladder.tokenizers.kinds import ByteTokenizer, Tokenizer, load_tokenizer
from tests.helpers.tokenizer_copies import copy_tokenizer, train_byte_level, write_words
from tests.unit.convert.hand_made import write_directory
from tests.unit.convert.saved_models import convert
from tests.unit.generate.tiny_model import tiny_config, write_checkpoint, write_checkpoint_with_tokenizer

TEXTS = ["def add(a, b):\n    return a + b\n", "  two  blanks\t", "\u6f22 12", " class"]


@pytest.fixture
def questions(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Collect questions on the terminal; nobody answers them."""
    asked: list[str] = []

    def ask(question: str = "") -> str:
        asked.append(question)
        raise EOFError

    monkeypatch.setattr("builtins.input", ask)
    return asked


def assert_transformers_loads(directory: Path, ours: Tokenizer, texts: list[str], questions: list[str]) -> None:
    """Load an exported tokenizer in both documented ways, neither of which asks, and compare its ids with ours."""
    trusted = AutoTokenizer.from_pretrained(directory, trust_remote_code=True)
    without_code = PreTrainedTokenizerFast.from_pretrained(directory)
    assert not questions
    for loaded in (trusted, without_code):
        for text in texts:
            assert loaded.encode(text) == ours.encode(text)
            assert loaded.decode(ours.encode(text)) == text
        assert loaded.eos_token_id == ours.eod_id == GenerationConfig.from_pretrained(directory).eos_token_id


def test_transformers_encodes_as_the_sentencepiece_tokenizer(tmp_path: Path, questions: list[str]) -> None:
    run, _, ours = write_checkpoint_with_tokenizer(tmp_path)
    convert("export", "--load", run, "--hf", tmp_path / "hf")
    assert_transformers_loads(tmp_path / "hf", ours, TEXTS, questions)
    # Transformers asks for code that a tokenizer does not need, and goes on without it.
    assert AutoTokenizer.from_pretrained(tmp_path / "hf").encode(TEXTS[0]) == ours.encode(TEXTS[0])
    assert len(questions) == 1 and "custom code" in questions[0]


WRITTEN = (
    "the cat sat\non a mat, then\n<b>bold</b> hello Caf\u00e9 \ufb01 \u2163 e\u0301\nkK nN uU sS/x 0123456789 ABCDEF\n"
)


@pytest.mark.parametrize(
    "options",
    [
        "--model_type=unigram",
        "--model_type=unigram --byte_fallback --normalization_rule_name=identity --remove_extra_whitespaces=false",
        "--model_type=unigram --add_dummy_prefix=false --user_defined_symbols=<sep>,hello",
        "--model_type=bpe --byte_fallback --user_defined_symbols=<sep>,hello --control_symbols=<ctl>",
        "--model_type=bpe --normalization_rule_name=nmt_nfkc_cf",
        "--model_type=bpe --treat_whitespace_as_suffix",
    ],
)
def test_transformers_encodes_as_any_sentencepiece_model_or_it_is_not_exported(
    tmp_path: Path, options: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _, _ = write_checkpoint_with_tokenizer(tmp_path)
    checkpoint = Checkpoint.open(run).directory
    monkeypatch.chdir(tmp_path)
    Path("text").write_text(WRITTEN * 9)
    sizes = "--vocab_size=320 --hard_vocab_limit=false --character_coverage=1 --minloglevel=2"
    sentencepiece.SentencePieceTrainer.train(f"--input=text --model_prefix=m {sizes} {options}")
    ours = load_tokenizer("SentencePieceTokenizer", Path("m.model"))
    copy_tokenizer(ours, checkpoint)
    if "suffix" in options:
        with pytest.raises(UserError, match="m.model: cannot be exported: transformers would encode"):
            convert("export", "--load", run, "--hf", "hf")
        return
    convert("export", "--load", run, "--hf", "hf")
    theirs = AutoTokenizer.from_pretrained("hf", trust_remote_code=True)
    texts = [*WRITTEN.split("\n"), "<s> </s> <unk> <0x0A>x", " <sep>a<sep> hello\t", "  \u65e5\u672c zz\U0001f389"]
    assert [theirs(text)["input_ids"] for text in texts] == [ours.encode(text) for text in texts]
    convert("import", "--hf", "hf", "--save", "again")
    again = Checkpoint.open(Path("again"))
    assert again.manifest["tokenizer"]["sha256"] == ours.sha256 == load_tokenizer_from_directory(again.directory).sha256


def test_bytes_are_exported_without_a_tokenizer(tmp_path: Path) -> None:
    run, _, _ = write_checkpoint_with_tokenizer(tmp_path)
    checkpoint = Checkpoint.open(run).directory
    for path in checkpoint.glob("*tokenizer*"):
        path.unlink()
    copy_tokenizer(ByteTokenizer(), checkpoint)
    convert("export", "--load", run, "--hf", tmp_path / "bytes")
    assert not list((tmp_path / "bytes").glob("*tokenizer*"))


@pytest.mark.parametrize(
    "config",
    [
        # For example after training with only --tokenizer-model FILE.
        None,
        # Code that is not exported.
        {"eos_token": "<eos>", "tokenizer_class": "OddTokenizer", "auto_map": {"AutoTokenizer": ["odd.Odd", None]}},
    ],
)
def test_transformers_opens_a_tokenizer_without_code(
    tmp_path: Path, config: dict[str, object] | None, questions: list[str]
) -> None:
    directory = write_directory(tmp_path / "hf")
    write_words(directory / "tokenizer.json", "<eos>", "a", "b", "[UNK]")
    if config is not None:
        (directory / "tokenizer_config.json").write_text(json.dumps(config))
    convert("import", "--hf", directory, "--save", tmp_path / "ours", "--ladder-layers", "1")
    convert("export", "--load", tmp_path / "ours", "--hf", tmp_path / "back")
    ours = load_tokenizer("HuggingFaceTokenizer", directory / "tokenizer.json")
    assert ours.encode("a b") == [1, 2] and ours.eod_id == 0
    assert_transformers_loads(tmp_path / "back", ours, ["a b"], questions)


def test_transformers_reads_all_of_a_tokenizer_file(tmp_path: Path) -> None:
    """Its `LlamaTokenizer`, which many directories name, and which is the default, has no normalizer."""
    directory = write_directory(tmp_path / "hf")
    tokenizer = tokenizers.Tokenizer(BPE({"<eos>": 0, "a": 1, "b": 2, "\u2581": 3}, []))
    tokenizer.normalizer = Lowercase()
    tokenizer.save(str(directory / "tokenizer.json"))
    for number, named in enumerate(({}, {"tokenizer_class": "LlamaTokenizer", "model_max_length": 77})):
        (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>", **named}))
        convert("import", "--hf", directory, "--save", tmp_path / f"ours{number}")
        convert("export", "--load", tmp_path / f"ours{number}", "--hf", tmp_path / f"back{number}")
        loaded = AutoTokenizer.from_pretrained(tmp_path / f"back{number}")
        assert loaded("AB")["input_ids"] == [1, 2] and loaded.eos_token_id == 0
    assert loaded.model_max_length == 77
    loaded.chat_template = {"default": "{{ messages }}", "tool_use": "{{ tools }}"}
    loaded.save_pretrained(directory)
    convert("import", "--hf", directory, "--save", tmp_path / "named")
    convert("export", "--load", tmp_path / "named", "--hf", tmp_path / "with_templates")
    assert AutoTokenizer.from_pretrained(tmp_path / "with_templates").chat_template == loaded.chat_template
    found = open_model(tmp_path / "named", None, None).tokenizer
    assert found is not None and read_chat_template(found).source == "{{ messages }}"


@pytest.mark.parametrize("processor", ["template", "sequence", "roberta"])
@pytest.mark.parametrize("imported", [False, True])
@pytest.mark.parametrize("trained", [False, True])
def test_transformers_adds_no_token_that_training_never_saw(
    tmp_path: Path, processor: str, imported: bool, trained: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """An imported model keeps its file; if it was trained here, without the token before texts, the export says so."""
    library = train_byte_level([], 259, ["<s>", "</s>"])
    around = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    library.post_processor = {
        "template": around,
        "sequence": processors.Sequence([processors.ByteLevel(trim_offsets=False), around]),
        "roberta": processors.RobertaProcessing(("</s>", 1), ("<s>", 0)),
    }[processor]
    (tmp_path / "tokenizer").mkdir()
    library.save(str(tmp_path / "tokenizer" / "tokenizer.json"))
    names = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (tmp_path / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(names))
    ours, more = load_tokenizer("HuggingFaceTokenizer", tmp_path / "tokenizer"), dict[str, object]()
    more |= {"hugging_face": {"model_type": "llama", "eos_token_id": 1}} if imported else {}
    more |= {"run": {}} if trained else {}
    copy_tokenizer(ours, write_checkpoint(tmp_path / "run", tiny_config(vocab_size=ours.vocab_size), **more))
    convert("export", "--load", tmp_path / "run", "--hf", tmp_path / "hf")
    printed = capsys.readouterr().out
    ids, around_text = ours.encode("a b\u00e9"), ([0], [1] if processor == "roberta" else [])
    loaded = AutoTokenizer.from_pretrained(tmp_path / "hf")
    kept = (tmp_path / "hf" / "tokenizer.json").read_bytes() == ours.contents[0]
    if imported:
        assert kept and loaded.encode("a b\u00e9") == [*around_text[0], *ids, *around_text[1]]
        assert ("as for the imported model; training here did not" in printed) == trained
    else:
        assert not kept and loaded.encode("a b\u00e9") == ids
        assert "*** training did not add <s>" in printed
    assert open_model(tmp_path / "run", None, None).export_prefix == ((0,) if imported else ())
    assert open_model(tmp_path / "hf", None, None).export_prefix == ((0,) if imported else ())


def test_an_export_names_all_tokens_that_ended_texts(tmp_path: Path) -> None:
    """The end tokens of the imported model come first, and other settings are kept."""
    settings = {"eos_token_id": 5, "temperature": 0.5}
    checkpoint = write_checkpoint(
        tmp_path / "run", hugging_face={"model_type": "llama", "eos_token_id": 5}, end_ids=[2, 5, 7]
    )
    write_words(checkpoint / "tokenizer.json", "<eos>", "[UNK]")
    (checkpoint / "generation_config.json").write_text(json.dumps(settings))
    assert open_model(tmp_path / "run", None, None).eos_ids == {0, 2, 5, 7}
    convert("export", "--load", tmp_path / "run", "--hf", tmp_path / "hf")
    exported = json.loads((tmp_path / "hf" / "generation_config.json").read_text())
    assert exported == settings | {"eos_token_id": [5, 2, 7]}
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["eos_token_id"] == [5, 2, 7]

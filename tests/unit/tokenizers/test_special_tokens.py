"""Texts that spell special tokens, against `tokenizers` and transformers, in whole commands."""

import json
import string
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import tokenizers
import transformers
from tokenizers import AddedToken, models, normalizers, pre_tokenizers

from megatron_ladder.cli import preprocess_data
from megatron_ladder.data.batches import BatchShape
from megatron_ladder.data.identity import data_changes
from megatron_ladder.data.indexed import IndexedDataset
from megatron_ladder.data.preprocess import Partial
from megatron_ladder.data.streaming import StreamPlan, StreamReader, find_input
from megatron_ladder.errors import UserError
from megatron_ladder.tokenizers.hugging_face import HuggingFaceTokenizer
from tests.helpers.tokenizer_copies import train_byte_level
from tests.helpers.tokens import write_lines

SPECIAL = ("<unk>", "<s>", "</s>")
BYTES = {text: number for number, text in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
LETTERS = "▁" + string.printable


def word_model() -> tokenizers.Tokenizer:
    vocabulary = {word: number for number, word in enumerate([*SPECIAL, "a", "b"])}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocabulary, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


def word_piece_model() -> tokenizers.Tokenizer:
    vocabulary = {word: number for number, word in enumerate([*SPECIAL, "a", "##b", "b"])}
    tokenizer = tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


def unigram_model() -> tokenizers.Tokenizer:
    scores = [(piece, 0.0) for piece in SPECIAL] + [(piece, -1.0 - n) for n, piece in enumerate(LETTERS)]
    tokenizer = tokenizers.Tokenizer(models.Unigram(scores, 0, False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    return tokenizer


def byte_model(**options: Any) -> tokenizers.Tokenizer:
    vocabulary = BYTES | {text: len(BYTES) + number for number, text in enumerate([*SPECIAL, "</", "s>"])}
    merges = [("<", "/"), ("s", ">"), ("</", "s>")]
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, merges, **options))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return tokenizer


def added_later_model() -> tokenizers.Tokenizer:
    """The special tokens are not in the model's vocabulary, as in Llama 3."""
    tokenizer = tokenizers.Tokenizer(models.BPE(BYTES, []))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return tokenizer


MODELS = {
    "words": word_model,
    "word pieces": word_piece_model,
    "unigrams": unigram_model,
    "merged bytes": byte_model,
    "whole words of bytes": lambda: byte_model(ignore_merges=True),
    "added later": added_later_model,
}


@pytest.fixture(params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The end-of-document token is not flagged as special, and one token has other whitespace around it."""
    tokenizer = MODELS[request.param]()
    tokenizer.add_special_tokens([AddedToken("<unk>"), AddedToken("<s>", lstrip=True)])
    tokenizer.add_tokens([AddedToken("</s>", normalized=False), AddedToken("  ", normalized=True)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    return tmp_path


def preprocess(folder: Path, *words: object, prefix: str = "out") -> list[list[int]]:
    """Preprocess `a.jsonl` with the tokenizer of a folder, and return the documents."""
    files = ["--input", folder / "a.jsonl", "--output-prefix", folder / prefix]
    tokenizer = ["--tokenizer-type", "HFTokenizer", "--tokenizer-model", folder]
    preprocess_data.main([str(word) for word in (*files, *tokenizer, *words)])
    (index,) = folder.glob(f"{prefix}_*_document.idx")
    dataset = IndexedDataset(index.with_suffix(""))
    return [dataset.document(number).tolist() for number in range(len(dataset))]


def test_only_real_ends_are_end_of_document_tokens(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = ["a <s>b</s> a", "</s>", "b  a", "a </s></s> b", "ab b"]
    write_lines(folder / "a.jsonl", texts)
    library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = {text: library.token_to_id(text) for text in SPECIAL}
    end = ids["</s>"]
    documents = preprocess(folder, "--append-eod")
    said = capsys.readouterr().out
    assert [document.count(end) for document in documents] == [1] * 5 and {one[-1] for one in documents} == {end}
    assert not any(ids["<s>"] in document for document in documents)
    # Other texts give the library's ids.
    theirs = [library.encode(text, add_special_tokens=False).ids for text in texts]
    assert [document[:-1] for document in documents[2::2]] == theirs[2::2]
    assert "in the input stay text (--parse-special-tokens makes them these tokens): </s> 4, <s> 1\n" in said
    assert "***" not in said

    assert preprocess(folder, "--append-eod", "--parse-special-tokens") == [[*one, end] for one in theirs]
    said = capsys.readouterr().out
    assert "in the input are these tokens now: </s> 4, <s> 1\n" in said
    assert "*** 4 end-of-document tokens inside documents: --reset-attention-mask, " in said


def test_text_is_what_the_library_makes_of_split_special_tokens(tmp_path: Path) -> None:
    """The library has an option for models that do not find these tokens themselves."""
    training = Path(tokenizers.__file__).read_text()
    library = train_byte_level([training], 400, ["<|endoftext|>", "<|pad|>"])
    library.add_tokens(["<think>"])
    library.save(str(tmp_path / "tokenizer.json"))
    texts = ["the end <|endoftext|>.", "<|pad|>x<|endoftext|><|pad|>\n", "<think> <|endoftext|", training]
    write_lines(tmp_path / "a.jsonl", texts)
    library.encode_special_tokens = True
    assert preprocess(tmp_path) == [library.encode(text).ids for text in texts]
    assert 400 in preprocess(tmp_path)[2], "tokens that are not special stay tokens"


@pytest.mark.parametrize("folder", ["unigrams"], indirect=True)
def test_counts_include_those_of_an_interrupted_run(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_lines(folder / "a.jsonl", ["a </s> b"] * 50_000)
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Partial, "join", mock.Mock(side_effect=KeyboardInterrupt))
        preprocess(folder, "--workers", 2)
    assert "them these tokens)" not in capsys.readouterr().out
    preprocess(folder)
    said = capsys.readouterr().out
    assert "an earlier run has finished 1 of 1 shards" in said and "them these tokens): </s> 50,000\n" in said


def test_a_stream_has_the_tokens_of_the_file(folder: Path) -> None:
    texts = ["a <s>b</s> a", "b  a", "a </s></s> b"]
    path = write_lines(folder / "a.jsonl", texts)
    tokenizer, described = HuggingFaceTokenizer(folder), []
    for parse in (False, True):
        written = preprocess(folder, "--append-eod", *["--parse-special-tokens"] * parse)
        length = sum(map(len, written))
        shards, (labels, sources) = find_input([str(path)], "text")
        plan = StreamPlan(labels, 1, length - 1, 1, 10, tokenizer.eod_id, sources, parse_special_tokens=parse)
        shape = BatchShape(1, 1, 1)
        reader = StreamReader(plan, shards, tokenizer.encode_documents, shape, 0, 0, [], tokenizer.vocab_size)
        (row,) = reader.read().tokens.tolist()
        assert sorted(row) == sorted(token for document in written for token in document)
        described.append({"stream": plan.describe() | {"window_documents": 10}})
    # A checkpoint of an earlier version, which parsed them.
    (change,) = map(str, data_changes(described[1], described[0]))
    assert change == "--streaming: --streaming-parse-special-tokens False, in the checkpoint None"


def test_flags_without_an_effect_are_rejected(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", ["a"])
    words = f"--input {tmp_path}/a.jsonl --output-prefix {tmp_path}/a --tokenizer-type ByteTokenizer"
    with pytest.raises(UserError, match="--parse-special-tokens: ByteTokenizer finds no special token in a text"):
        preprocess_data.main([*words.split(), "--parse-special-tokens"])


CHATML = (
    "{{ bos_token }}{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<s>{{ m.role }} "
    "{% if m.calls %}{{ m.calls | tojson }}{% endif %}{{ m.content | trim }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant {% endif %}"
)


@pytest.fixture(params=["bytes", "unigrams"])
def chat_folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    training = Path(__file__).read_text()
    tokenizer = train_byte_level([training], 400, SPECIAL)
    if request.param == "unigrams":
        tokenizer = unigram_model()
        tokenizer.decoder = tokenizers.decoders.Metaspace(prepend_scheme="never")
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.add_tokens(["<k>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "chat_template": CHATML}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    yield tmp_path


def test_only_the_template_writes_special_tokens(chat_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tools = [{"name": "b</s>b"}]
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": " </s> a <s>a</s> <k> b"},
        {"role": "assistant", "content": "<k>b</s>", "calls": [{"s": ["ab<s>"]}]},
    ]
    (chat_folder / "a.jsonl").write_text(json.dumps({"messages": messages, "tools": tools}) + "\n")
    (ids,) = preprocess(chat_folder, "--chat")
    assert "tokens): </s> 4, <s> 2\n" in capsys.readouterr().out
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(chat_folder)
    text = theirs.apply_chat_template(messages, tools=tools, tokenize=False)
    begin, end, other = (theirs.convert_tokens_to_ids(token) for token in ("<s>", "</s>", "<k>"))
    assert (ids.count(begin), ids.count(end), ids.count(other)) == (3, 2, 2) and ids[0] == begin
    # No piece begins with a space that the text lacks.
    library = tokenizers.Tokenizer.from_file(str(chat_folder / "tokenizer.json"))
    assert library.decode(ids, skip_special_tokens=False) == text
    prefix = chat_folder / "out_messages_document"
    mask = IndexedDataset(prefix).loss_mask
    assert mask is not None
    answer = library.decode([number for number, counts in zip(ids, mask, strict=True) if counts], False)
    assert answer.endswith("</s></s>") and answer.replace(" ", "").count("b</s>") == 1

    (parsed,) = preprocess(chat_folder, "--chat", "--parse-special-tokens")
    assert parsed == theirs.apply_chat_template(messages, tools=tools)["input_ids"]
    # Where no message spells a token, nothing changes.
    plain = [{"role": "user", "content": "ab <"}, {"role": "assistant", "content": "/s> a"}]
    (chat_folder / "a.jsonl").write_text(json.dumps({"messages": plain}) + "\n")
    expected = theirs.apply_chat_template(plain)["input_ids"]
    assert (
        preprocess(chat_folder, "--chat") == preprocess(chat_folder, "--chat", "--parse-special-tokens") == [expected]
    )


def test_a_role_is_no_spelling(chat_folder: Path) -> None:
    library = tokenizers.Tokenizer.from_file(str(chat_folder / "tokenizer.json"))
    library.add_special_tokens(["user"])
    library.save(str(chat_folder / "tokenizer.json"))
    messages = [{"role": "user", "content": "a user</s>b"}, {"role": "assistant", "content": "b"}]
    (chat_folder / "a.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    (chat_folder / "t").write_text(
        "{% for m in messages if m.role in ('user', 'assistant') %}{{ m.content }}{% endfor %}"
    )
    (ids,) = preprocess(chat_folder, "--chat", "--chat-template", chat_folder / "t")
    assert library.decode(ids).replace(" ", "") == "auser</s>bb" and library.token_to_id("user") not in ids


def test_a_template_that_depends_on_a_spelling_rejects_the_conversation(chat_folder: Path) -> None:
    messages = [{"role": "user", "content": "a</s>b"}, {"role": "assistant", "content": "b"}]
    (chat_folder / "a.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    (chat_folder / "t").write_text("{% for m in messages %}{{ m.content.split('</s>')[-1] }}{% endfor %}")
    with pytest.raises(UserError, match=r"a\.jsonl:1: .*it changes a message that spells a special token"):
        preprocess(chat_folder, "--chat", "--chat-template", chat_folder / "t")


class Positions(Sequence[int]):
    """Counts how often its items are read."""

    reads = 0

    def __init__(self, places: list[int]) -> None:
        self.places = places

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: Any) -> Any:
        self.reads += 1
        return self.places[index]


@pytest.mark.parametrize("folder", ["merged bytes"], indirect=True)
def test_many_spellings_in_a_text_take_no_quadratic_time(folder: Path) -> None:
    number = 1000
    places = Positions([1 + 5 * i for i in range(number)])
    ((ids, _),) = HuggingFaceTokenizer(folder).encode_with_offsets(["a</s>" * number + "</s>"], [places])
    assert ids.count(258) == 1 and ids[-1] == 258 and places.reads < 30 * number


def prepending_model() -> tokenizers.Tokenizer:
    """Return a tokenizer whose normalizer puts a space before a text, as in Llama 2."""
    vocabulary = {text: number for number, text in enumerate([*SPECIAL, *dict.fromkeys(LETTERS)])}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return tokenizer


@pytest.mark.parametrize("make", [unigram_model, prepending_model])
def test_a_spelling_changes_no_other_message(tmp_path: Path, make: Callable[[], tokenizers.Tokenizer]) -> None:
    """Not where the model lacks a character, and not where white space belongs to a normalized token."""
    tokenizer = make()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace() if make is unigram_model else None
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.add_tokens([AddedToken("<k>", normalized=True), AddedToken("  ", normalized=True)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    (tmp_path / "t").write_text("{% for m in messages %}<s>{{ m.content }}</s>{% endfor %}")
    answer = {"role": "assistant", "content": "aéb a <k>b   é a"}
    conversations = [[{"role": "user", "content": text}, answer] for text in ("b", "</s>")]
    lines = [json.dumps({"messages": messages}) for messages in conversations]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    plain, spelled = preprocess(tmp_path, "--chat", "--chat-template", tmp_path / "t")
    length = len(plain) - plain.index(2)
    assert length > 12 and spelled.count(2) == 2 and spelled[-length:] == plain[-length:]

"""Conversations against transformers' own templates and masks."""

import datetime
import itertools
import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import tokenizers
import transformers

from megatron_ladder.cli import preprocess_data
from megatron_ladder.data.chat import Conversation, ConversationEncoder
from megatron_ladder.data.chat_records import ConversationError, Message, read_record
from megatron_ladder.data.chat_template import ChatTemplate, ChatTemplateError, read_chat_template
from megatron_ladder.data.indexed import IndexedDataset, read_sidecar
from megatron_ladder.data.inspect import verify
from megatron_ladder.data.reading.protocol import Record
from megatron_ladder.errors import UserError
from megatron_ladder.tokenizers.hugging_face import HuggingFaceTokenizer
from tests.helpers.conversations import TEMPLATES
from tests.helpers.tokenizer_copies import train_byte_level

CHATML = (
    "{% for message in messages %}\n"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "   {% endfor %}\n"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{{ bos_token }}{%- for message in messages %}{% if message.role == 'assistant' %}[A]{% generation %}"
    "{{ message.content }}<|im_end|>{% endgeneration %}{% else %}[{{ message.role | upper }}]"
    "{{ message.content | trim }}{% endif %}{% endfor %}{{ {'<ü>': messages | length} | tojson }}"
)


THINKING = (
    "{% for m in messages %}{% if m.role == 'assistant' and not loop.last %}{{ m.content.split('</think>')[-1] }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>{% endfor %}"
)
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief.\n"},
    {"role": "user", "content": "  Wie heißt du? 🎉"},
    {"role": "assistant", "content": "Ich heiße  Leiter.\n\nUnd du?"},
    {"role": "user", "content": "<b>&amp;</b>"},
    {"role": "assistant", "content": "é"},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level tokenizer that adds a <bos> to a text, which must not be added to the output of a template."""
    folder = tmp_path_factory.mktemp("chat")
    special = ["<bos>", "<|im_start|>", "<|im_end|>", "<|endoftext|>"]
    tokenizer = train_byte_level([Path(__file__).read_text()], 400, special)
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing("<bos> $A", special_tokens=[("<bos>", 0)])
    tokenizer.save(str(folder / "tokenizer.json"))
    configure(folder)
    return folder


def configure(folder: Path, **values: Any) -> None:
    config = {"bos_token": "<bos>", "eos_token": {"content": "<|endoftext|>", "__type": "AddedToken"}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config | values))


def encoder_of(folder: Path, template: str, tmp_path: Path) -> ConversationEncoder:
    (tmp_path / "template.jinja").write_text(template)
    return ConversationEncoder(HuggingFaceTokenizer(folder), tmp_path / "template.jinja")


def preprocess(folder: Path, tmp_path: Path, *words: object) -> None:
    """Preprocess conversations with the tokenizer of a folder to `tmp_path / "out"`."""
    command = ["--output-prefix", tmp_path / "out", "--chat", "--tokenizer-type", "HFTokenizer"]
    preprocess_data.main([str(word) for word in (*command, "--tokenizer-model", folder, *words)])


def messages_of(values: dict[str, Any], keys: tuple[str, ...] = ("messages",)) -> list[Message]:
    return read_record(keys, Record(values, (), False)).messages


def tokens_of(encoder: ConversationEncoder, messages: list[dict[str, Any]]) -> Conversation:
    (found,) = encoder.encode([encoder.render(messages)])
    return found


def test_answers_without_generation_blocks_include_their_end_tokens(folder: Path, tmp_path: Path) -> None:
    found = tokens_of(encoder_of(folder, CHATML, tmp_path), MESSAGES)
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    counted = np.split(found.token_ids, np.flatnonzero(np.diff(found.loss_mask)) + 1)[1::2]
    texts = [tokenizer.decode(ids.tolist(), skip_special_tokens=False) for ids in counted]
    assert texts == ["Ich heiße  Leiter.\n\nUnd du?<|im_end|>", "é<|im_end|>"]


def test_a_template_that_rewrites_earlier_messages_is_rejected() -> None:
    template = ChatTemplate(THINKING, {}, "here")
    messages = [*MESSAGES[:2], {"role": "assistant", "content": "<think>x</think>y"}, *MESSAGES[3:]]
    with pytest.raises(ChatTemplateError, match=r"put {% generation %} and {% endgeneration %} around"):
        template.render(messages)


def test_a_prompt_that_does_not_begin_the_answer_is_another_reason() -> None:
    template = ChatTemplate(each("m.content") + "{% if add_generation_prompt %}<think>{% endif %}", {}, "here")
    with pytest.raises(
        ChatTemplateError, match=r"it begins an answer otherwise than its prompt .*put {% generation %}"
    ):
        template.render(MESSAGES[:3])


def test_a_template_cannot_ask_for_the_time_in_training_data() -> None:
    dated = "{% if strftime_now is defined %}{{ strftime_now('%Y') }}{% endif %}{{ messages[0].content }}"
    template = ChatTemplate(dated, {}, "here")
    with pytest.raises(ChatTemplateError, match="asks for the current time.*write a fixed date in a copy"):
        template.render(MESSAGES)
    assert template.prompt(MESSAGES) == f"{datetime.datetime.now():%Y}Be brief.\n"
    unasked = ChatTemplate(
        "\n  {% if false %}{{ strftime_now('%Y') }}{% endif %}\n\n  {{ bos }}x", {"bos": "<s>"}, "here"
    )
    assert unasked.render(MESSAGES).text == unasked.prompt(MESSAGES) == "\n\n  <s>x"


def test_transformers_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers.utils.chat_template_utils", None)
    with pytest.raises(UserError, match=r"--chat: needs transformers, .*pip install -e \"\.\[hf\]\""):
        ChatTemplate("", {}, "here")


def test_locations_of_templates(folder: Path, tmp_path: Path) -> None:
    def source(given: Path | None = None) -> str:
        return ConversationEncoder(HuggingFaceTokenizer(folder), given).template.source

    with pytest.raises(UserError, match="--chat: .* has no chat template .* pass one with --chat-template FILE"):
        source()
    with pytest.raises(UserError, match=r"use a --tokenizer-model with a chat_template\.jinja next to it"):
        read_chat_template(HuggingFaceTokenizer(folder))
    configure(folder, chat_template="in the configuration")
    assert source() == "in the configuration"
    configure(folder, chat_template=[{"name": "tool_use", "template": "a"}, {"name": "default", "template": "b"}])
    assert source() == "b"
    (folder / "chat_template.jinja").write_text("beside")
    assert source() == "beside"
    (tmp_path / "given").write_text("given")
    assert source(tmp_path / "given") == "given"
    (tmp_path / "given").write_text("{% if %}")
    with pytest.raises(UserError, match=r"given: not a chat template: Expected an expression"):
        source(tmp_path / "given")
    (folder / "chat_template.jinja").unlink()
    configure(folder)


def test_records_with_an_instruction() -> None:
    expected = [{"role": "user", "content": "Add.\n\n1 2"}, {"role": "assistant", "content": "3"}]
    keys = ("prompt", "context", "answer")
    assert messages_of({"prompt": "Add.", "context": "1 2", "answer": "3"}, keys) == expected
    for nothing in ("", None):
        assert messages_of({"prompt": "Add.", "context": nothing, "answer": "3"}, keys)[0]["content"] == "Add."
    assert messages_of({"prompt": "Add.\n\n1 2", "answer": "3"}, keys[::2]) == expected
    with_system = messages_of({"prompt": "Add.\n\n1 2", "answer": "3", "system": "Be brief."}, keys[::2])
    assert with_system == [{"role": "system", "content": "Be brief."}, *expected]
    both = {"role": "user", "from": "human", "content": "Hi"}
    assert messages_of({"messages": [both, ANSWER | {"weight": None}]}) == [both, ANSWER]


@pytest.mark.parametrize(
    ("record", "error"),
    [
        ({"a": 1, "b": "x"}, "expected a text under 'a', found int"),
        ({"messages": []}, "the list of messages under 'messages' is empty"),
        ({"messages": "hi"}, "expected a list of messages under 'messages': name their key with --chat-keys"),
        ({"messages": ["a"]}, r"messages\[0\]: expected an object with a 'role'"),
        ({"messages": [MESSAGES[1] | {"weight": 0.5}]}, r"messages\[0\]: weight 0.5: expected 0 or 1"),
    ],
)
def test_records_without_a_conversation(record: dict[str, Any], error: str) -> None:
    with pytest.raises(ConversationError, match=error):
        messages_of(record, tuple(record))


TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}" + CHATML


@pytest.mark.parametrize("written", ["a.jsonl", "a.parquet", "hf/train.jsonl"])
def test_tools_and_a_separate_system_text_reach_the_template(folder: Path, tmp_path: Path, written: str) -> None:
    tools = [{"name": "f", "parameters": {"x": "int"}}]
    records: list[dict[str, Any]] = [
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yo"}], "system": "Be brief."},
        {"conversations": MESSAGES[1:3], "tools": json.dumps(tools)},
    ]
    (tmp_path / "t.jinja").write_text(TOOLS)
    if written.endswith(".parquet"):
        struct = pyarrow.struct([(name, pyarrow.string()) for name in ("from", "value", "role", "content")])
        columns = {"conversations": pyarrow.list_(struct), "system": pyarrow.string(), "tools": pyarrow.string()}
        table = pyarrow.Table.from_pylist(records, pyarrow.schema(columns))
        pyarrow.parquet.write_table(table, tmp_path / written)
    else:
        (tmp_path / written).parent.mkdir(exist_ok=True)
        (tmp_path / written).write_text("".join(json.dumps(record) + "\n" for record in records))
    given = f"hf://{tmp_path}/hf" if written.startswith("hf/") else tmp_path / written
    flags = ["--chat-keys", "conversations", "--chat-template", tmp_path / "t.jinja", "--input", given]
    preprocess(folder, tmp_path, *flags)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    usual = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}]
    expected = [
        theirs.apply_chat_template([{"role": "system", "content": "Be brief."}, *usual], chat_template=TOOLS),
        theirs.apply_chat_template(MESSAGES[1:3], chat_template=TOOLS, tools=tools),
    ]
    prefix = tmp_path / "out_conversations_document"
    assert [ids for ids, _ in documents_of(prefix)] == [one["input_ids"] for one in expected]
    sidecar = read_sidecar(prefix)
    assert sidecar is not None and sidecar.chat_template == TOOLS


CUT = (
    "{% for m in messages %}{% generation %}{% if loop.last %}{{ m.content }}{% else %}"
    "{{ m.content.split('</think>')[-1] }}{% endif %}{% endgeneration %}{% endfor %}"
)
ANSWER = {"role": "assistant", "content": "yes"}
CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
THOUGHT = {"role": "assistant", "content": "<think>because</think>yes"}


def each(expression: str) -> str:
    return f"{{% for m in messages %}}{{{{ {expression} }}}}{{% endfor %}}"


@pytest.mark.parametrize(
    ("template", "messages", "reason"),
    [
        (CUT, [THOUGHT, THOUGHT], "leaves out 'because' in 'content' of answer 1 of 2,.* or give the answers before"),
        (each("m.content[:99]"), [ANSWER | {"content": "go " * 33 + "end"}], "leaves out 'go go"),
        # The question quotes the answer word for word.
        (
            each("m.content if m.role == 'user' else m.content.split('</think>')[-1]"),
            [THOUGHT | {"role": "user"}, THOUGHT],
            "leaves out 'because' in 'content' of answer 1 of 1",
        ),
        (each("m.tool_calls"), [CALL], "writes tool calls as Python"),
        (each("'text: ' + m.content | string"), [MESSAGES[1] | {"content": None}], None),
        (CUT, [THOUGHT | {"weight": 0}, THOUGHT], None),
        # vLLM returns reasoning under two names.
        (each("m.reasoning + m.content"), [THOUGHT | {"reasoning": "so", "reasoning_content": "so"}], None),
    ],
)
def test_a_record_that_would_lose_a_part_of_an_answer_is_rejected(
    folder: Path, tmp_path: Path, template: str, messages: list[Message], reason: str | None
) -> None:
    encoder = encoder_of(folder, template, tmp_path)
    if reason is None:
        assert "None" not in encoder.render(messages).text
        return
    with pytest.raises(ConversationError, match=rf"template\.jinja {reason}"):
        encoder.render(messages)


@pytest.mark.parametrize("parts", [[], [""], [{"type": "text", "text": " "}]])
@pytest.mark.parametrize("template", ["chatml", "parts"])
def test_parts_without_a_text_are_written_as_their_text(
    folder: Path, tmp_path: Path, template: str, parts: list[Any]
) -> None:
    encoder = encoder_of(folder, TEMPLATES[template], tmp_path)
    (message,) = messages_of({"messages": [ANSWER | {"content": parts}]})
    texts = [part if isinstance(part, str) else part["text"] for part in parts]
    assert encoder.render([message]) == encoder.render([ANSWER | {"content": "".join(texts)}])


@pytest.mark.parametrize("template", ["llama", "mistral"])
def test_an_empty_list_of_tool_calls_is_none(folder: Path, tmp_path: Path, template: str) -> None:
    """These templates expect a call wherever there is the key; records of other programs have it in every answer."""
    encoder = encoder_of(folder, TEMPLATES[template], tmp_path)
    question = {"role": "user", "content": "hi"}
    records = [{"messages": [question, ANSWER | more]} for more in ({"tool_calls": []}, {})]
    with_key, without_key = (encoder.render(messages_of(record)) for record in records)
    assert with_key == without_key and "yes" in with_key.text


@pytest.mark.parametrize("template", [CHATML, MARKED], ids=["chatml", "marked"])
def test_an_answer_of_weight_0_does_not_count(folder: Path, tmp_path: Path, template: str) -> None:
    encoder = encoder_of(folder, template, tmp_path)
    whole = tokens_of(encoder, MESSAGES)
    some = tokens_of(encoder, [*MESSAGES[:2], MESSAGES[2] | {"weight": 0}, *MESSAGES[3:]])
    assert some.token_ids.tolist() == whole.token_ids.tolist()
    last = len(whole.loss_mask) - 1 - whole.loss_mask[::-1].argmax()
    kept = whole.loss_mask.copy()
    kept[: last - 3] = 0
    assert whole.loss_mask.sum() > kept.sum() > 0 and some.loss_mask.tolist() == kept.tolist()
    with pytest.raises(ChatTemplateError, match="no generation block per answer"):
        once = encoder_of(folder, "{% generation %}{{ messages[0].content }}{% endgeneration %}", tmp_path)
        once.render([message | {"weight": 0} for message in MESSAGES])


def test_a_role_that_nothing_knows_is_rejected(folder: Path, tmp_path: Path) -> None:
    messages = [MESSAGES[1], {"role": "Assistant", "content": "Hello"}]
    with pytest.raises(ChatTemplateError, match="the role 'Assistant' is none of system, .*not in the template"):
        encoder_of(folder, CHATML, tmp_path).render(messages)
    assert encoder_of(folder, "{% set named = 'Assistant' %}" + CHATML, tmp_path).render(messages).answers == ()


def documents_of(prefix: Path) -> list[tuple[list[int], list[int]]]:
    dataset = IndexedDataset(prefix)
    assert dataset.loss_mask is not None
    bounds = dataset.document_bounds.tolist()
    return [
        (dataset.tokens[begin:end].tolist(), dataset.loss_mask[begin:end].tolist())
        for begin, end in itertools.pairwise(bounds)
    ]


def test_preprocessing_conversations(folder: Path, tmp_path: Path) -> None:
    pyarrow_table = pyarrow.Table.from_pylist([{"messages": MESSAGES}, {"messages": MESSAGES[:3]}])
    pyarrow.parquet.write_table(pyarrow_table, tmp_path / "b.parquet")
    lines = [json.dumps({"id": 1, "messages": messages}) for messages in (MESSAGES[1:3], MESSAGES)]
    (tmp_path / "a.jsonl").write_text("\n\n".join(lines))
    (tmp_path / "template.jinja").write_text(MARKED)
    words = ["--input", tmp_path / "a.jsonl", tmp_path / "b.parquet", "--chat-template", tmp_path / "template.jinja"]
    preprocess(folder, tmp_path, *words)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    expected = []
    for messages in (MESSAGES[1:3], MESSAGES, MESSAGES, MESSAGES[:3]):
        made = theirs.apply_chat_template(
            messages, chat_template=MARKED, return_assistant_tokens_mask=True, return_dict=True
        )
        expected.append((made["input_ids"], made["assistant_masks"]))
    prefix = tmp_path / "out_messages_document"
    assert documents_of(prefix) == expected
    sidecar = read_sidecar(prefix)
    assert sidecar is not None and sidecar.conversations and sidecar.documents == 4
    assert verify(IndexedDataset(prefix))[-1] == "verified: the checksum of the loss mask equals that in the sidecar"
    preprocess(folder, tmp_path, *words, "--append-eod")
    assert documents_of(prefix) == [([*ids, 3], [*mask, 0]) for ids, mask in expected]


NAMED = "{% for m in messages %}{% if m.role != 'assistant' %}{{ m.content }}{% else %}{% generation %}{{ m.content }}"
ENDS = {
    CHATML: [2],
    # White space in the block of an answer, and another end of some turns.
    NAMED + "{{ '<|endoftext|>' if loop.last else '<|im_end|>' }} \n\n{% endgeneration %}{% endif %}{% endfor %}": [
        2,
        3,
    ],
    # The end is no part of an answer.
    NAMED + "{% endgeneration %}<|im_end|>{% endif %}{% endfor %}": [],
    NAMED + " \n{% endgeneration %}{% endif %}{% endfor %}": [],
}


@pytest.mark.parametrize("template", ENDS)
def test_the_tokens_that_end_answers_are_recorded(folder: Path, tmp_path: Path, template: str) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": MESSAGES}) + "\n")
    (tmp_path / "t").write_text(template)
    preprocess(folder, tmp_path, "--input", tmp_path / "a.jsonl", "--chat-template", tmp_path / "t")
    sidecar = read_sidecar(tmp_path / "out_messages_document")
    assert sidecar is not None and list(sidecar.answer_ends) == ENDS[template]


def test_an_end_of_document_token_that_is_not_special_ends_answers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = train_byte_level([Path(__file__).read_text()], 400, ["<|im_start|>"])
    tokenizer.add_tokens(["<|im_end|>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    configure(tmp_path, eos_token="<|im_end|>", chat_template=CHATML)
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": MESSAGES}) + "\n")
    preprocess(tmp_path, tmp_path, "--input", tmp_path / "a.jsonl")
    assert "answers end with <|im_end|>\n" in capsys.readouterr().out
    sidecar = read_sidecar(tmp_path / "out_messages_document")
    assert sidecar is not None and sidecar.answer_ends == (400,)


def test_conversations_without_answers_are_counted(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answered, asked = (json.dumps({"messages": messages}) + "\n" for messages in (MESSAGES, MESSAGES[:2]))
    words = ["--input", tmp_path / "a.jsonl", "--chat-template", tmp_path / "t"]
    (tmp_path / "t").write_text(MARKED)
    (tmp_path / "a.jsonl").write_text(asked * 3)
    with pytest.raises(UserError, match=r"a\.jsonl: no conversation with a text of the assistant: nothing is written"):
        preprocess(folder, tmp_path, *words)
    assert not list(tmp_path.glob("out*"))
    (tmp_path / "a.jsonl").write_text(asked * 3 + answered + asked)
    preprocess(folder, tmp_path, *words)
    assert "4 of 5 conversations have no text of the assistant" in capsys.readouterr().out


def test_a_rejected_conversation_is_located(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = [{"instruction": f"say {n}", "output": "n" * n} for n in range(4)]
    lines = [json.dumps(record) for record in records]
    (tmp_path / "a.jsonl").write_text("\n".join([*lines[:2], "", *lines[2:]]))
    (tmp_path / "template").write_text(
        "{% for m in messages %}{% if m.content == 'nn' %}{{ raise_exception('no nn') }}{% endif %}{{ m.content }}"
        "<|im_end|>{% endfor %}"
    )
    words = ["--input", tmp_path / "a.jsonl", "--chat-template", tmp_path / "template", "--chat-keys"]
    with pytest.raises(UserError, match="name the key with --chat-keys"):
        preprocess(folder, tmp_path, *words, "turns")
    with pytest.raises(UserError, match=r"a\.jsonl:4: .*rejects it: no nn"):
        preprocess(folder, tmp_path, *words, "instruction", "output")
    assert not list(tmp_path.glob("out*"))
    (tmp_path / "b.jsonl").write_text(
        "\n".join([lines[0], lines[2], '{"instruction": 1, "output": ""}', lines[2], lines[2]])
    )
    with pytest.raises(UserError) as caught:
        preprocess(folder, tmp_path, "--input", tmp_path / "b.jsonl", *words[2:], "instruction", "output")
    assert [re.search(r"b\.jsonl:(\d)", line)[1] for line in caught.value.messages] == ["2", "3", "4"]
    preprocess(folder, tmp_path, *words, "instruction", "output", "--skip-bad-lines", 1)
    assert "3 documents" in capsys.readouterr().out
    assert len(documents_of(tmp_path / "out_instruction_document")) == 3

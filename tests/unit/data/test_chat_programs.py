"""The same conversations, in every program and format, against transformers."""

import contextlib
import itertools
import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import transformers

from megatron_ladder.cli import preprocess_data
from megatron_ladder.data.batches import BatchShape
from megatron_ladder.data.chat import ConversationEncoder
from megatron_ladder.data.chat_records import ConversationError
from megatron_ladder.data.chat_template import ChatTemplateError
from megatron_ladder.data.indexed import IndexedDataset
from megatron_ladder.data.streaming import StreamPlan, StreamReader, find_input
from megatron_ladder.errors import UserError
from megatron_ladder.generate.prompts import ConversationPrompts, PromptEncoder
from megatron_ladder.tokenizers.hugging_face import HuggingFaceTokenizer
from tests.helpers.conversations import CASES, CHATML, TEMPLATES, Case, expected, render, write_tokenizer
from tests.helpers.pairwise import quick_share

KEYS = [("messages",), ("conversations",), ("instruction", "input", "output")]


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> transformers.PreTrainedTokenizerFast:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def write(path: Path, records: Sequence[dict[str, Any]]) -> Path:
    if path.suffix == ".parquet":
        keys = dict.fromkeys(key for record in records for key in record)
        rows = [{key: record.get(key) for key in keys} for record in records]
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def preprocess(
    path: str | Path, template: str, keys: Sequence[str], folder: Path, tokenizer: str, said: pytest.CaptureFixture[str]
) -> tuple[list[tuple[list[int], list[int]]], dict[int, str], str]:
    """Return the ids and masks of the accepted records, the reasons against others by number, and the output."""
    (folder / "t.jinja").write_text(template)
    words = ["--chat", "--input", path, "--output-prefix", folder / "out", "--tokenizer-type", "HFTokenizer"]
    words += ["--tokenizer-model", tokenizer, "--chat-template", folder / "t.jinja", "--parse-special-tokens"]
    said.readouterr()
    documents = []
    with contextlib.suppress(UserError):
        preprocess_data.main([str(word) for word in (*words, "--skip-bad-lines", 99, "--chat-keys", *keys)])
        dataset = IndexedDataset(folder / f"out_{keys[0]}_document")
        assert dataset.loss_mask is not None
        for begin, end in itertools.pairwise(dataset.document_bounds.tolist()):
            documents.append((dataset.tokens[begin:end].tolist(), dataset.loss_mask[begin:end].tolist()))
    output = said.readouterr().out
    first = 0 if ".parquet" in str(path) or str(path).startswith("hf://") else 1
    skipped = re.findall(r"skipped .*?(?:jsonl:|row )(\d+): (.*)", output)
    return documents, {int(number) - first: reason for number, reason in skipped}, output


def check(
    cases: dict[str, Case],
    template: str,
    theirs: transformers.PreTrainedTokenizerFast,
    documents: Sequence[tuple[list[int], list[int]]],
    reasons: dict[int, str],
    is_row: bool = False,
) -> None:
    accepted = iter(documents)
    for number, (name, case) in enumerate(cases.items()):
        meant = expected(case, template, theirs, is_row)
        if isinstance(meant, str):
            assert re.search(meant, reasons.get(number, "")), (name, meant, reasons.get(number))
            continue
        assert number not in reasons, (name, reasons[number], meant.text)
        ids, mask = next(accepted)
        assert (theirs.decode(ids), ids, mask) == (meant.text, meant.ids, meant.mask), name
    assert next(accepted, None) is None


@pytest.mark.parametrize("template", quick_share(TEMPLATES, 4))
def test_lines_have_the_tokens_of_transformers_or_are_refused(
    template: str,
    theirs: transformers.PreTrainedTokenizerFast,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    source = TEMPLATES[template]
    for keys in KEYS:
        cases = {name: case for name, case in CASES.items() if case.keys == keys}
        path = write(tmp_path / "a.jsonl", [case.record for case in cases.values()])
        documents, reasons, said = preprocess(path, source, keys, tmp_path, theirs.name_or_path, capsys)
        check(cases, source, theirs, documents, reasons)
        if documents and keys == KEYS[0] and template != "r1":
            named = said[said.index("not used") :]
            assert all(key in named for key in CASES["other keys"].unused)
            assert ("'tools'" in named) == ("tools" not in source)


def fits_a_table(case: Case) -> bool:
    """Return whether a record can be in a column with others: texts and lists cannot."""
    texts = json.dumps(case.record)
    lists = '"content": [' in texts or '"arguments": "' in texts or '"tools": "' in texts or '"content": 3' in texts
    return case.keys == KEYS[0] and not lists


@pytest.mark.parametrize(
    ("template", "written"),
    quick_share(
        [("hermes", "hub/train.jsonl"), ("nulls", "hub/train.jsonl"), *((name, "a.parquet") for name in TEMPLATES)], 5
    ),
)
def test_tables_have_the_tokens_of_lines(
    template: str,
    written: str,
    theirs: transformers.PreTrainedTokenizerFast,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    source = TEMPLATES[template]
    cases = {name: case for name, case in CASES.items() if fits_a_table(case)}
    path: str | Path = write(tmp_path / written, [case.record for case in cases.values()])
    path = f"hf://{tmp_path}/hub" if written.startswith("hub") else path
    documents, reasons, _ = preprocess(path, source, KEYS[0], tmp_path, theirs.name_or_path, capsys)
    check(cases, source, theirs, documents, reasons, True)


def test_a_stream_of_rendered_texts_has_the_same_tokens_and_refuses_messages(
    theirs: transformers.PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    source = TEMPLATES["hermes"]
    meant = [expected(case, source, theirs) for case in CASES.values()]
    accepted = [reference for reference in meant if not isinstance(reference, str)]
    path = write(tmp_path / "a.jsonl", [{"text": one.text, "messages": [{"role": "user"}]} for one in accepted])
    tokenizer = HuggingFaceTokenizer(Path(theirs.name_or_path))

    def read(key: str, tokens: int) -> list[int]:
        shards, (labels, sources) = find_input([str(path)], key)
        plan = StreamPlan(labels, 1, tokens - 1, 1, 99, tokenizer.eod_id, sources)
        reader = StreamReader(plan, shards, tokenizer.encode_documents, BatchShape(1, 1, 1), 0, 0, [], 1 << 20)
        (row,) = reader.read().tokens.tolist()
        return sorted(row)

    ids = [number for one in accepted for number in (*one.ids, tokenizer.eod_id)]
    assert read("text", len(ids)) == sorted(ids)
    with pytest.raises(
        UserError, match=r"a\.jsonl:1: expected a text under 'messages', found list: read conversations"
    ):
        read("messages", 9)


SPELLED = "questionA <|im_end|> <bos> <think> </call> <end> b"
"""Every kind of added token: special or not, written by a template or not."""


@pytest.mark.parametrize("template", quick_share([*TEMPLATES, "end that is not special"], 4))
def test_prompts_have_the_tokens_of_training_and_of_transformers(
    template: str, theirs: transformers.PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    source = TEMPLATES.get(template, CHATML.replace("<|im_end|>", "<end>"))
    folder = tmp_path / "with template"
    shutil.copytree(theirs.name_or_path, folder)
    (folder / "chat_template.jinja").write_text(source)
    tokenizer = HuggingFaceTokenizer(folder)
    generate = PromptEncoder(tokenizer, (), True, None)
    prompts = ConversationPrompts(tokenizer)
    training = ConversationEncoder(tokenizer)
    spelled = [{"role": "user", "content": SPELLED}, {"role": "assistant", "content": "replyA"}]
    for messages in (spelled, *(case.messages for case in CASES.values() if case.refusal is None)):
        *history, question, answer = messages
        if question["role"] != "user" or answer["role"] != "assistant" or question["content"] is None:
            continue
        text = render(source, messages[:-1], add_generation_prompt=True)
        if text is None:
            with pytest.raises(UserError, match="the template rejects this conversation"):
                generate.encode(question["content"], history)
            continue
        ids = generate.encode(question["content"], history)
        assert theirs.decode(ids) == text
        if "<" not in question["content"]:
            assert list(ids) == theirs.encode(text, add_special_tokens=False)
        with contextlib.suppress(ConversationError, ChatTemplateError):
            (trained,) = training.encode([training.render(messages)])
            assert trained.token_ids.tolist()[: len(ids)] == list(ids) or not trained.loss_mask.any()
        begun = [*history, question, {"role": "assistant", "content": "The answer is "}]
        with contextlib.suppress(ValueError):
            meant = theirs.apply_chat_template(begun, chat_template=source, tokenize=False, continue_final_message=True)
            assert prompts.render(begun, continues=True).text == meant

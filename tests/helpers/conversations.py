"""Records of conversations, and templates in the styles of published models, which all programs must read alike.

Every word of a record is different, so that a text of an answer that a template drops is not found elsewhere.
"""

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import transformers
from tokenizers import AddedToken
from transformers.utils.chat_template_utils import render_jinja_template

from tests.helpers.tokenizer_copies import train_byte_level

_SPECIAL = ("<bos>", "<eos>", "<|im_start|>", "<|im_end|>", "<|header|>", "<|eot|>", "[INST]", "[/INST]", "[CALLS]")
_ADDED = ("<think>", "</think>", "<call>", "</call>", "<end>")
"""Tokens that are added, but not special, as in Qwen3."""

_PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
CHATML = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}" + _PROMPT
LLAMA = (
    "{{- bos_token }}{% if tools is defined and tools %}<|header|>tools {{ tools | tojson }}<|eot|>{% endif %}"
    "{% for m in messages %}{% if 'tool_calls' in m %}{% if not m.tool_calls | length == 1 %}"
    "{{ raise_exception('This model only supports single tool-calls at once!') }}{% endif %}"
    "{% set call = m.tool_calls[0].function %}<|header|>assistant\n"
    '{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}<|eot|>'
    "{% else %}<|header|>{{ m.role }}\n{{ m.content | trim }}<|eot|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|header|>assistant\n{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{% set system = messages[0].content %}"
    "{% set turns = messages[1:] %}{% else %}{% set system = '' %}{% set turns = messages %}{% endif %}"
    "{% for m in turns %}{% if m.role == 'user' %}{% if loop.previtem is defined and loop.previtem.role == 'user' %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "[INST]{% if loop.last and system %}{{ system }}\n\n{% endif %}{{ m.content }}[/INST]"
    "{% elif m.tool_calls is defined and m.tool_calls is not none %}[CALLS]"
    "{% for c in m.tool_calls %}{% if c.id is not defined or c.id | length != 9 %}"
    "{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}{% endfor %}{{ eos_token }}'
    "{% elif m.role == 'assistant' %} {{ m.content | trim }}{{ eos_token }}"
    "{% elif m.role == 'tool' %}[INST]{{ m.content }}[/INST]"
    "{% else %}{{ raise_exception('only user, assistant and tool roles are supported') }}{% endif %}{% endfor %}"
)
QWEN = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}{% set content = m.content if m.content is string else '' %}"
    "{% if m.role == 'assistant' %}{% set thought = '' %}"
    "{% if m.reasoning_content is string %}{% set thought = m.reasoning_content %}{% elif '</think>' in content %}"
    "{% set thought = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}<|im_start|>assistant\n"
    "{% if loop.index0 > ns.last %}{% if loop.last or thought %}<think>\n{{ thought.strip('\n') }}\n</think>\n\n"
    "{% endif %}{% endif %}{{ content }}{% for c in m.tool_calls or [] %}"
    '<call>\n{"name": "{{ c.function.name }}", "arguments": '
    "{% if c.function.arguments is string %}{{ c.function.arguments }}{% else %}"
    "{{ c.function.arguments | tojson }}{% endif %}}\n</call>{% endfor %}<|im_end|>\n"
    "{% else %}<|im_start|>{{ m.role }}\n{{ content }}<|im_end|>\n{% endif %}{% endfor %}" + _PROMPT
)
R1 = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'system' %}{{ m['content'] }}"
    "{% elif m['role'] == 'assistant' and m['content'] is none %}<|header|>assistant"
    "{% for c in m['tool_calls'] %}<call>{{ c['function']['name'] + '\n' + c['function']['arguments'] }}</call>"
    "{% endfor %}{{ eos_token }}{% elif m['role'] == 'assistant' %}{% set content = m['content'] %}"
    "{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}"
    "<|header|>assistant{{ content + eos_token }}{% else %}<|header|>{{ m['role'] }}{{ m['content'] }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|header|>assistant{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}"
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% set role = 'model' if m['role'] == 'assistant' else m['role'] %}"
    "{{ '<|im_start|>' + role + '\n' + m['content'] | trim + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>model\n{% endif %}"
)
HERMES = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content %}{{ m.content }}{% endif %}"
    "{% for c in m.tool_calls %}<call>{{ c | tojson }}</call>{% endfor %}<|im_end|>\n{% endfor %}" + _PROMPT
)
MARKED = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls %}{{ c.function | tojson }}{% endfor %}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}" + _PROMPT
)
NULLS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is none %}{% if m.tool_calls is not defined %}"
    "{{ raise_exception('null without calls') }}{% endif %}{% for c in m.tool_calls %}"
    "<call>{{ c.function | tojson }}</call>{% endfor %}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
) + _PROMPT
DATED = "{{ strftime_now('%Y') }}\n" + CHATML
PARTS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'text' %}{{ p.text | trim }}{% else %}<image>{% endif %}{% endfor %}"
    "{% endif %}<|im_end|>\n{% endfor %}" + _PROMPT
)
CHANNELS = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|header|>assistant"
    "{% if m.thinking is defined and m.thinking %}(think){{ m.thinking }}<|eot|><|header|>assistant{% endif %}"
    "(final){{ m.content }}<eos>{% elif m.role in ['developer', 'system', 'user', 'tool', 'critic'] %}"
    "<|header|>{{ m.role }}{% if m.name %}({{ m.name }}){% endif %}(text){{ m.content }}<|eot|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|header|>assistant{% endif %}"
)
TEMPLATES = {
    "chatml": CHATML,
    "llama": LLAMA,
    "mistral": MISTRAL,
    "qwen": QWEN,
    "r1": R1,
    "gemma": GEMMA,
    "hermes": HERMES,
    "marked": MARKED,
    "nulls": NULLS,
    "dated": DATED,
    "parts": PARTS,
    "channels": CHANNELS,
}


class Case(NamedTuple):
    """A record, the conversation that it means, as transformers documents one, and why it is refused otherwise."""

    record: dict[str, Any]
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    keys: tuple[str, ...] = ("messages",)
    refusal: str | None = None
    unused: tuple[str, ...] = ()


def _user(content: Any = "questionA", **more: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **more}


def _answer(content: Any = "replyA", **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def _call(name: str, arguments: Any, **more: Any) -> dict[str, Any]:
    call = {"type": "function", "id": "abcdefgh1", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "tool_calls": [call], **more}


def _case(*messages: dict[str, Any], meant: Sequence[dict[str, Any]] | None = None, **more: Any) -> Case:
    """Return a case of messages, and of keys next to them."""
    fields = {key: more.pop(key) for key in ("refusal", "unused") if key in more}
    tools = more.get("tools")
    read_tools = json.loads(tools) if isinstance(tools, str) and "refusal" not in fields else tools
    return Case({"messages": list(messages), **more}, list(meant or messages), read_tools, **fields)


def _refused(refusal: str, *messages: dict[str, Any], **more: Any) -> Case:
    return _case(*messages, refusal=refusal, **more)


_TOOLS = [
    {"type": "function", "function": {"name": "toolA", "parameters": {"properties": {"day": {"type": "string"}}}}}
]
_OTHER = [
    {"type": "function", "function": {"name": "toolB", "parameters": {"properties": {"city": {"type": "string"}}}}}
]
_SHAREGPT = [{"from": "human", "value": "questionA"}, {"from": "gpt", "value": "replyA"}]
_RESULT = {"role": "tool", "content": "resultA", "tool_call_id": "abcdefgh1"}
_TURNS = (_user(), _answer(), _user("questionB"), _answer("replyB"))
_ALPACA = ("instruction", "input", "output")
_WORDS = {"instruction": "questionA", "input": "", "output": "replyA"}
_SYSTEM = {"role": "system", "content": "systemA"}
CASES = {
    "one turn": _case(_user(), _answer()),
    "turns": _case(*_TURNS),
    "blanks": _case(_user("  questionA\n"), _answer("replyA\n\nreplyB ")),
    "message of the system": _case(_SYSTEM, *_TURNS),
    "system": _case(*_TURNS, system="systemA", meant=[_SYSTEM, *_TURNS]),
    "empty system": _case(*_TURNS, system=""),
    "two systems": _refused("'system' next to the messages", _SYSTEM, *_TURNS, system="systemB"),
    "other roles": _case({"role": "developer", "content": "systemA"}, _user(), _answer()),
    "unknown role": _case({"role": "critic", "content": "systemA"}, _user(), _answer()),
    "ShareGPT": Case({"conversations": _SHAREGPT}, [_user(), _answer()], keys=("conversations",)),
    "instruction": Case(_WORDS, [_user(), _answer()], keys=_ALPACA),
    "null input": Case(_WORDS | {"input": None}, [_user(), _answer()], keys=_ALPACA),
    "instruction and system": Case(_WORDS | {"system": "systemA"}, [_SYSTEM, _user(), _answer()], keys=_ALPACA),
    "instruction and tools": Case(_WORDS | {"tools": _TOOLS}, [_user(), _answer()], _TOOLS, _ALPACA),
    "instruction and history": Case(
        _WORDS | {"history": [["a", "b"]]}, [], keys=_ALPACA, refusal="'history' has turns"
    ),
    "part": _case(
        _user([{"type": "text", "text": "questionA"}]),
        _answer([{"type": "text", "text": "replyA"}]),
        meant=[_user(), _answer()],
    ),
    "parts": _case(
        _user([{"type": "text", "text": "questionA"}, "questionB"]),
        _answer(),
        meant=[_user("questionA\nquestionB"), _answer()],
    ),
    "image": _refused(r"content\[0\]: is 'image'", _user([{"type": "image", "url": "x"}]), _answer()),
    "no question": _refused(
        r"messages\[0\]: no text under 'content'", {"role": "user", "text": "questionA"}, _answer()
    ),
    "no answer": _refused(r"\[1\]: no text under 'content'", _user(), {"role": "assistant", "value": "replyA"}),
    "number": _refused(r"messages\[1\]: content: found 3, expected a .*text", _user(), _answer(3)),
    "null question": _case(_user(None), _answer()),
    "empty answer": _case(_user(), _answer("")),
    "call": _case(_user(), _call("callA", {"city": "valueA"}), _RESULT, _answer(), tools=_TOOLS),
    "other call": _case(_user(), _call("callA", {"day": "valueA", "n": [1, None]}), _RESULT, _answer(), tools=_OTHER),
    "null and call": _case(_user(), _call("callA", {"city": "valueA"}, content=None), _RESULT, _answer()),
    "empty and call": _case(_user(), _call("callA", {"city": "valueA"}, content=""), _RESULT, _answer()),
    "text and call": _case(_user(), _call("callA", {"city": "valueA"}, content="replyB"), _RESULT, _answer()),
    "JSON call": _case(
        _user(),
        _call("callA", '{"city":"valueA"}', content=None),
        meant=[_user(), _call("callA", {"city": "valueA"}, content=None)],
    ),
    "call without arguments": _case(
        _user(), _call("callA", "", content=None), meant=[_user(), _call("callA", {}, content=None)]
    ),
    "torn call": _refused(r"tool_calls\[0\].function.arguments: not JSON", _user(), _call("callA", '{"city":')),
    "list call": _refused(r"arguments: found \[1\], expected an object", _user(), _call("callA", "[1]")),
    "tools in JSON": _case(_user(), _answer(), tools=json.dumps(_TOOLS)),
    "torn tools": _refused("tools: not JSON", _user(), _answer(), tools="[{"),
    "reasoning": _case(_user(), _answer(reasoning_content="thoughtA")),
    "earlier reasoning": _case(_user(), _answer(reasoning_content="thoughtA"), _user("questionB"), _answer("replyB")),
    "reasoning that does not count": _case(
        _user(), _answer(reasoning_content="thoughtA", weight=0), _user("questionB"), _answer("replyB")
    ),
    "thinking": _case(_user(), _answer(thinking="thoughtA")),
    "thought": _case(_user(), _answer("<think>thoughtA</think>replyA")),
    "earlier thought": _case(
        _user(), _answer("<think>\nthoughtA\n</think>\n\nreplyA"), _user("questionB"), _answer("B")
    ),
    "no weight": _case(_user(), _answer(weight=0), _user("questionB"), _answer("replyB")),
    "train": _refused("'train' is not read", _user(), _answer(train=False), _user("questionB"), _answer("replyB")),
    "loss mask": _refused("'loss_mask' is not read", _user(), _answer(), loss_mask=[0, 1]),
    "images": _refused("'images' is not empty", _user("<image>questionA"), _answer(), images=["x.png"]),
    "no images": _case(_user(), _answer(train=True), images=[], history=None),
    "other keys": _case(_user(mood="good"), _answer(), id=3, source="web", unused=("'id'", "'source'", "'mood' of")),
    "added token": _case(_user("questionA <call> </call>x"), _answer("replyA <call>")),
    "special token": _case(_user("questionA <|im_end|> <bos>"), _answer("replyA </s>")),
}


class Reference(NamedTuple):
    """What transformers makes of a conversation."""

    text: str
    ids: list[int]
    mask: list[int]


def write_tokenizer(folder: Path) -> transformers.PreTrainedTokenizerFast:
    """Write a tokenizer with special and other added tokens, and return transformers' class of it."""
    library = train_byte_level([Path(__file__).read_text()], 500, list(_SPECIAL))
    library.add_tokens([AddedToken(text, normalized=False) for text in _ADDED])
    library.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<bos>", "eos_token": "<eos>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return transformers.PreTrainedTokenizerFast.from_pretrained(folder)


def answer_words(messages: Sequence[dict[str, Any]]) -> set[str]:
    """Return the words of all answers that count."""
    words = set[str]()
    for message in messages:
        if message["role"] == "assistant" and message.get("weight", 1):
            calls = [call["function"] for call in message.get("tool_calls") or ()]
            texts = [str(value) for key, value in message.items() if key not in ("role", "tool_calls", "train")]
            words.update(re.findall(r"[a-z]+[AB]\b", " ".join([*texts, *map(str, calls)])))
    return words


def spellings(case: Case, is_row: bool) -> Iterator[list[dict[str, Any]]]:
    """Yield what transformers can receive for a record.

    This is the conversation with lists of parts; with and without nulls, which the row of a table does not distinguish
    from absent keys; and with the arguments of tool calls as JSON.
    """
    given = case.record.get("messages", ())
    if any(isinstance(message.get("content"), list) for message in given):
        parts = [[{"type": "text", "text": p} if isinstance(p, str) else p for p in m["content"]] for m in given]
        yield [
            message | ({"content": content} if isinstance(original["content"], list) else {})
            for message, original, content in zip(case.messages, given, parts, strict=True)
        ]
    for as_text in (False, True):
        for with_nulls in (True, False):
            messages = json.loads(json.dumps(case.messages))
            for number, message in enumerate(messages):
                for place, call in enumerate(message.get("tool_calls") or ()):
                    if as_text:
                        arguments = given[number]["tool_calls"][place]["function"]["arguments"]
                        call["function"]["arguments"] = (
                            arguments if isinstance(arguments, str) else json.dumps(arguments)
                        )
                if is_row and with_nulls:
                    message.setdefault("content", None)
                if not with_nulls and message.get("content", "") is None:
                    del message["content"]
            yield messages


def render(template: str, messages: Sequence[dict[str, Any]], **settings: Any) -> str | None:
    """Return transformers' text; None if the template rejects the messages."""
    try:
        ((text,), _) = render_jinja_template(
            [list(messages)], chat_template=template, bos_token="<bos>", eos_token="<eos>", **settings
        )
    except Exception:
        return None
    return str(text)


def expected(
    case: Case, template: str, theirs: transformers.PreTrainedTokenizerFast, is_row: bool = False
) -> Reference | str:
    """Return what every program must make of a record, or a pattern of the reason against it."""
    roles = {message["role"] for message in case.messages}
    if case.refusal is not None:
        return case.refusal
    if "critic" in roles and "'critic'" not in template:
        return "the role 'critic' is none of"
    reason = "rejects it: "
    for messages in spellings(case, is_row):
        text = render(template, messages, tools=case.tools)
        if text is None:
            continue
        if template == DATED:
            return "asks for the current time|leaves out"
        if not all(word in text for word in answer_words(case.messages)):
            reason = "leaves out"
        elif not re.search(r"None|'text'|\{'|\\\"", text):
            spans = _locate(text, template, messages, case.tools)
            return (
                "rejects it: it renders earlier messages differently" if spans is None else _encode(text, spans, theirs)
            )
    return reason


def _locate(text: str, template: str, messages: list[dict[str, Any]], tools: Any) -> list[tuple[int, int]] | None:
    """Return the first character and the end of each answer that counts."""
    spans = []
    for number, message in enumerate(messages):
        if message["role"] != "assistant" or not message.get("weight", 1):
            continue
        before = render(template, messages[:number], tools=tools, add_generation_prompt=True)
        after = render(template, messages[: number + 1], tools=tools)
        if template == MARKED:
            assert before is not None and after is not None
            spans.append((len(before), len(after.rstrip())))
        elif before is None or after is None or not (text.startswith(after) and after.startswith(before)):
            return None
        else:
            stripped = after.rstrip()
            spans.append((len(before), len(stripped) if stripped.endswith(_SPECIAL) else len(after)))
    return spans


def _encode(text: str, spans: Sequence[tuple[int, int]], theirs: transformers.PreTrainedTokenizerFast) -> Reference:
    encoded = theirs(text, add_special_tokens=False, return_offsets_mapping=True)
    offsets = encoded["offset_mapping"]
    mask = [int(any(first < end and last > begin for begin, end in spans)) for first, last in offsets]
    return Reference(text, encoded["input_ids"], mask)

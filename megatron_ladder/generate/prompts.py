"""Read prompts, encode them, and check that the model can continue them."""

from collections.abc import Sequence
from typing import NamedTuple

from megatron_ladder.blueprint.model import ModelConfig
from megatron_ladder.data.chat_records import Message
from megatron_ladder.data.chat_template import ChatTemplate, ChatTemplateError, RenderedConversation, read_chat_template
from megatron_ladder.data.prompt_files import read_prompt_file
from megatron_ladder.errors import ErrorCollector, Problem, UserError
from megatron_ladder.generate.options import PromptOptions, token_ids
from megatron_ladder.tokenizers.kinds import Tokenizer

_SHOWN_CHARACTERS = 40
OPEN_ANSWERS = (
    "no token ended answers in training, and the chat template writes none after them, so answers will not end before "
    "the limit of new tokens: train on conversations of a chat template that writes one, or stop at a text"
)
"""Warning about a model of conversations without a token that ends answers."""


class Prompt(NamedTuple):
    """A prompt to continue."""

    source: str | None
    """Value of the field that holds the prompt, its file and line, or another place; for error messages."""
    text: str | None
    """None if the prompt was given as ids."""
    ids: tuple[int, ...] = ()
    field_name: str = ""

    def problem(self, reason: str, /, **texts: object) -> Problem:
        """Return a problem of the prompt; see `Problem` for its arguments."""
        if self.field_name:
            return Problem({self.field_name: self.source}, "{}: " + reason, "", **texts)
        return Problem({}, "{source}: " + reason, "", source=self.source, **texts)


class PromptEncoder:
    """Encodes texts, with the chat template if requested."""

    def __init__(self, tokenizer: Tokenizer, prefix: Sequence[int], chat: bool, system: str | None) -> None:
        """`prefix` precedes texts, but not conversations, whose template writes its own; `system` starts those.

        Raises UserError if `chat` is set, and the tokenizer has no chat template, or it cannot be read.
        """
        self._tokenizer, self._prefix = tokenizer, tuple(prefix)
        self._conversations = ConversationPrompts(tokenizer) if chat else None
        self._system: list[Message] = [] if system is None else [{"role": "system", "content": system}]

    @property
    def turn_ends(self) -> frozenset[int]:
        """The token that ends an answer in a conversation, if there is one."""
        return frozenset() if self._conversations is None else self._conversations.turn_ends

    @property
    def is_chat(self) -> bool:
        """Whether texts are messages of a user."""
        return self._conversations is not None

    def encode(self, text: str, history: Sequence[Message] = ()) -> tuple[int, ...]:
        """Return the ids of a text, or of the conversation it continues, unless the template rejects it (UserError)."""
        if self._conversations is None:
            encoded = self._tokenizer.encode(text)
            return (*self._prefix, *encoded) if encoded else ()
        return self._conversations.encode([*self._system, *history, {"role": "user", "content": text}])


class ConversationPrompts:
    """Conversations up to the assistant's answer, or up to the end of its beginning.

    A special token that a message spells is text, as in training.
    """

    def __init__(self, tokenizer: Tokenizer, *messages: str) -> None:
        """`messages` are those of `read_chat_template`; raises UserError if the tokenizer has no chat template."""
        self.template = ChatTemplate(*read_chat_template(tokenizer, None, *messages))
        self._tokenizer = tokenizer
        self._spelling = self.template.spelling(tokenizer)
        ids = {text: number for number, text in tokenizer.control_tokens.items()}
        end = self.template.turn_end(ids)
        self.turn_ends: frozenset[int] = frozenset() if end is None else frozenset({ids[end]})

    def render(self, messages: Sequence[Message], continues: bool = False) -> RenderedConversation:
        """Return the text up to an answer, or up to the end of the last message if it `continues`.

        Raises ChatTemplateError if the template rejects the messages.
        """
        template = self.template
        text = template.beginning(messages) if continues else template.prompt(messages)
        settings = {"continue_final_message" if continues else "add_generation_prompt": True}
        return RenderedConversation(text, (), template.find_spelled(text, messages, None, self._spelling, **settings))

    def encode(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Return the ids up to an answer; raises UserError if the template rejects the messages."""
        try:
            text, _, spelled, _ = self.render(messages)
        except ChatTemplateError as error:
            raise UserError(f"{self.template.name}: the template rejects this conversation: {error}") from None
        ((ids, _),) = self._tokenizer.encode_with_offsets([text], [spelled])
        return tuple(ids)


def check_characters(prompt: Prompt) -> None:
    """Raise UserError if a text contains surrogates, to which Python decodes bytes that are not UTF-8."""
    text = prompt.text or ""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        reason = f"{ascii(text[error.start])} at character {error.start + 1} is not a valid character; use UTF-8"
        raise UserError(prompt.problem("{reason}", reason=reason)) from None


def read_prompts(options: PromptOptions, encoder: PromptEncoder | None, standard_input: str | None) -> list[Prompt]:
    """Return the prompts of --prompt, --prompt-file, --tokens, and `standard_input`, if it is one, in this order.

    Raises UserError if a file cannot be read, a text is not valid, or there are texts but no tokenizer (`encoder`).
    """
    unread = []
    for text in options.prompt:
        shown = text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "..."
        unread.append(Prompt(repr(shown), text, field_name="prompt"))
    for path in options.prompt_file:
        errors = ErrorCollector()
        with errors.collect("prompt_file"):
            unread += [Prompt(place, text, field_name="prompt_file") for place, text in read_prompt_file(path)]
        errors.raise_if_any()
    if standard_input is not None:
        unread.append(Prompt("standard input", _without_last_line_end(standard_input)))
    prompts = []
    for prompt in unread:
        if encoder is None:
            fix = "use {tokenizer_type} and {tokenizer_model}, or {tokens}"
            raise UserError(prompt.problem(f"the model's directory has no tokenizer; {fix}"))
        check_characters(prompt)
        prompts.append(prompt._replace(ids=encoder.encode(prompt.text or "")))
    if options.tokens:
        prompts.append(Prompt(None, None, token_ids(options.tokens), "tokens"))
    return prompts


def prompt_errors(prompts: Sequence[Prompt], config: ModelConfig, max_new_tokens: int) -> list[Problem]:
    """Return one problem for each prompt that the model cannot continue by `max_new_tokens`, or score if that is 0."""
    errors, positions = [], config.max_position_embeddings
    for prompt in prompts:
        unknown = [number for number in prompt.ids if number >= config.vocab_size]
        needed = len(prompt.ids) + max_new_tokens
        if not prompt.ids:
            errors.append(prompt.problem("the prompt is empty; at least one token is required"))
        elif unknown:
            reason = f"the id {unknown[0]} is outside the model's vocabulary of {config.vocab_size}"
            fix = "; use the tokenizer that belongs to the model" if prompt.text is not None else ""
            errors.append(prompt.problem(reason + fix))
        elif needed > positions:
            added = f" and {{max_new_tokens}} {max_new_tokens} are {needed}" if max_new_tokens else ""
            fix = "reduce one of them" if max_new_tokens else "shorten the text"
            reason = f"{len(prompt.ids)} tokens{added}, but the model has only {positions} positions; {fix}"
            errors.append(prompt.problem(reason))
    return errors


def _without_last_line_end(text: str) -> str:
    return text.removesuffix("\n").removesuffix("\r")

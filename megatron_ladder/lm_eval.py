"""The model `megatron_ladder` of lm-eval: a stored model on the generation engine, at any tensor-parallel size.

`python -m megatron_ladder.lm_eval` is lm-eval's command line with this model. Its `--model_args` are the flags of
generate.py that concern the model, as in `model=checkpoints,tp=2`.
"""

import atexit
import functools
import importlib.util
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

# Before the imports that need it.
if __name__ == "__main__" and importlib.util.find_spec("lm_eval") is None:
    print(f'error: lm-eval is not installed for {sys.executable}: pip install -e ".[eval]"', file=sys.stderr)
    sys.exit(2)

from lm_eval.__main__ import cli_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from megatron_ladder.command_line import flag_words, parse_command_line
from megatron_ladder.data.chat_records import Message
from megatron_ladder.data.chat_template import ChatTemplateError
from megatron_ladder.errors import ErrorCollector, ExitCode, UserError, Vocabulary, raise_user_errors
from megatron_ladder.generate.evaluation import Evaluator
from megatron_ladder.generate.options import SamplingOptions
from megatron_ladder.generate.prompts import ConversationPrompts
from megatron_ladder.generate.requests import Generation, GenerationRequest
from megatron_ladder.generate.sampling import SamplingParameters, request_seed

_MAX_GEN_TOKS = 256
"""Longest answer if neither the task nor --gen_kwargs limits it, as for lm-eval's other models; at most half of the
model's positions."""


@register_model("megatron_ladder")
class LadderLM(TemplateLM):
    """A training checkpoint or a Hugging Face directory.

    The tokens are those of lm-eval's model `hf` on the export: special tokens that it puts before a text are put here,
    and a text without a context follows the beginning-of-text token, or the end-of-text token if there is none.
    """

    def __init__(
        self, batch_size: int | str = 1, max_batch_size: int | None = None, device: str | None = None, **flags: Any
    ) -> None:
        """`flags` are the --model_args; the other arguments are flags of lm-eval. Raises UserError.

        `device` has no effect, because lm-eval passes cuda:0 by default: the model is on GPUs if there are any.
        """
        super().__init__()
        if not str(batch_size).isdecimal() or int(batch_size) < 1 or max_batch_size is not None:
            raise UserError(
                f"--batch_size {batch_size}: this model has no automatic batch size; use a number of 1 or more, "
                "without --max_batch_size"
            )
        try:
            self._evaluator = Evaluator(int(batch_size), **flags)
        except UserError as error:
            messages = (problem.render(Vocabulary(str)) for problem in error.problems)
            raise UserError(*(f"--model_args: {message}" for message in messages)) from None
        atexit.register(self._evaluator.close)
        self._device = self._evaluator.device
        self._prefix = list(self._evaluator.stored.export_prefix)
        # Rendered conversations in which messages spell special tokens -> the first character of each.
        self._spelled = dict[str, tuple[int, ...]]()

    @property
    def eot_token_id(self) -> int:
        """The end-of-text token."""
        return self._evaluator.tokenizer.eod_id

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without a context."""
        tokenizer = self._evaluator.tokenizer
        return tokenizer.eod_id if tokenizer.bos_id is None else tokenizer.bos_id

    @property
    def tokenizer_name(self) -> str:
        """The name of the model in lm-eval's cache of requests."""
        return str(self._evaluator.stored.directory.resolve()).replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Return the ids of a text; by default, with the tokenizer's special tokens, unless the text begins with them.

        Chat templates write a beginning-of-text token themselves. A special token that a message spells is text, as in
        training.
        """
        tokenizer = self._evaluator.tokenizer
        conversation = max(filter(string.startswith, self._spelled), key=len, default=None)
        if conversation is None:
            ids = tokenizer.encode(string)
        else:
            ids = tokenizer.encode_with_offsets([string], [self._spelled[conversation]])[0][0]
        has_prefix = ids[: len(self._prefix)] == self._prefix
        return ids if add_special_tokens is False or has_prefix else [*self._prefix, *ids]

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[tuple[str, str], list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        scores = self._evaluator.score([(context, continuation) for _, context, continuation in requests])
        return [(score.logprob, score.is_greedy) for score in scores]

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of each text; a long one is scored in windows of the model's positions."""
        windows = list[tuple[list[int], list[int]]]()
        text_numbers = list[int]()
        for number, request in enumerate(requests):
            ids = self.tok_encode(request.args[0])
            for pair in get_rolling_token_windows(ids, self.prefix_token_id, self._evaluator.max_length, 1):
                windows.append(make_disjoint_window(pair))
                text_numbers.append(number)
        totals = [0.0] * len(requests)
        for number, score in zip(text_numbers, self._evaluator.score(windows), strict=True):
            totals[number] += score.logprob
        return totals

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """Continue each context, and cut the answer before the first of its stop texts."""
        repeated = Counter[str]()
        prepared = []
        for request in requests:
            context, settings = request.args
            prepared.append(self._request(context, settings, repeated[context]))
            repeated[context] += 1
        return [self._answer(generation) for generation in self._evaluator.generate(prepared)]

    def _answer(self, generation: Generation) -> str:
        """Return the text as the model `hf` does: without the first blank if the tokenizer drops that of a text."""
        text = generation.text or ""
        tokenizer = self._evaluator.tokenizer
        alone = tokenizer.decode([number for number in generation.ids if number < tokenizer.vocab_size])
        return text[1:] if text.startswith(" ") and not alone.startswith(" ") else text

    def _request(self, context: str, settings: Mapping[str, Any], sample: int) -> GenerationRequest:
        max_length = self._evaluator.max_length
        gen_kwargs = dict(normalize_gen_kwargs(dict(settings), min(_MAX_GEN_TOKS, max_length // 2)))
        # The model `hf` ends at the text of the end-of-text token, too.
        end = self._evaluator.tokenizer.named_tokens().get("eos_token", "")
        stop = tuple(dict.fromkeys(text for text in (*gen_kwargs.pop("until"), end) if text))
        new_tokens = int(gen_kwargs.pop("max_gen_toks"))
        if not 0 < new_tokens < max_length:
            raise UserError(
                f"max_gen_toks={new_tokens}: expected 1 to {max_length - 1}, because the model has {max_length} "
                "positions; set it in --gen_kwargs"
            )
        if not gen_kwargs.pop("do_sample"):
            gen_kwargs["temperature"] = 0.0
        unknown = sorted(gen_kwargs.keys() - {entry.name for entry in fields(SamplingParameters)})
        errors = ErrorCollector()
        errors.add(*(f"{name} is not supported; remove it" for name in unknown))
        known = {name: value for name, value in gen_kwargs.items() if name not in unknown}
        with errors.collect():
            (sampling,) = parse_command_line([SamplingOptions], flag_words(known), "generation", "")
        raise_user_errors(f"generation_kwargs of the task, or --gen_kwargs: {error}" for error in errors.problems)
        ids = tuple(self.tok_encode(context)[new_tokens - max_length :]) or (self.prefix_token_id,)
        seed = request_seed(sampling.seed, ids, sample)
        parameters = SamplingParameters.like(sampling, seed=seed, logprobs=False)
        return GenerationRequest(ids, new_tokens, parameters, self._evaluator.stored.eos_ids, stop)

    def chat_template(self, chat_template: bool | str = False) -> str:
        """Return the source of the tokenizer's chat template; an empty text unless it is requested."""
        if not chat_template:
            return ""
        if isinstance(chat_template, str):
            raise UserError(f"--apply_chat_template {chat_template}: expected no name, for the default template")
        return self._conversations.template.source

    def apply_chat_template(self, chat_history: Sequence[Message], add_generation_prompt: bool = True) -> str:
        """Return a conversation as text: up to the assistant's answer, or up to the end of the last message.

        As in the model `hf`, a template that rejects a message of the system renders the conversation without it.
        """
        conversations = self._conversations
        without_system = [message for message in chat_history if message["role"] != "system"]
        try:
            try:
                rendered = conversations.render(chat_history, not add_generation_prompt)
            except ChatTemplateError:
                rendered = conversations.render(without_system, not add_generation_prompt)
        except ChatTemplateError as error:
            raise UserError(f"{conversations.template.name}: the template rejects this conversation: {error}") from None
        if rendered.spelled:
            self._spelled[rendered.text] = rendered.spelled
        return rendered.text

    @functools.cached_property
    def _conversations(self) -> ConversationPrompts:
        fix = "use a tokenizer_model with a chat_template.jinja next to it, or leave out the flag"
        return ConversationPrompts(self._evaluator.tokenizer, "--apply_chat_template: ", fix)


def _main() -> None:
    try:
        cli_evaluate()
    except UserError as error:
        for message in error.messages:
            print(f"error: {message}", file=sys.stderr)
        sys.exit(ExitCode.USER_ERROR)


if __name__ == "__main__":
    _main()

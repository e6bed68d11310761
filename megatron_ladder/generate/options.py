"""The flags of tools/generate.py. No torch here: a process that only starts the ranks needs none."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatron_ladder.errors import UserError
from megatron_ladder.flags import flag, flag_name, parse_command_line
from megatron_ladder.generate.serve.options import ServeOptions, serve_mistakes

PROGRAM = "generate.py"
DESCRIPTION = "Continues prompts with a trained model, tensor-parallel. Text goes to stdout, statistics to stderr."
LARGEST_PENALTY = 2.0
"""Of presence and frequency, up or down, as in OpenAI's API."""
SMALLEST_REPETITION_PENALTY, LARGEST_REPETITION_PENALTY = 0.01, 100.0
"""Logits are divided by it or multiplied in fp32, and must stay finite."""
MOST_ALTERNATIVES = 20
"""Likeliest tokens that are told at one place."""


@dataclass(frozen=True)
class ModelOptions:
    """Model. Sizes and wiring come from the checkpoint."""

    model: Path
    """A Hugging Face directory; or a training checkpoint, or a directory of them: the one that its file `latest`
    names."""
    tp: int | None = flag(None, aliases=("--tensor-model-parallel-size",))
    """Processes that share the model. Under a launcher, all that it started; otherwise 1, and more are started here,
    on this machine."""
    dtype: Literal["fp32", "bf16", "fp16"] | None = None
    """What the weights are turned into; fp32 on a CPU and bf16 on a GPU if not given."""
    overlap: bool = True
    """Wait for every all-reduce at once instead of leaving it in flight under the next sub-block; for comparison."""
    compile_sub_blocks: bool = False
    """torch.compile for norms, SwiGLU and rotary embedding; needs a C++ compiler at run time."""
    cuda_graph: bool = False
    """Capture the decode step in a CUDA graph and replay it for every token; needs a GPU."""
    tokenizer_type: str | None = None
    """SentencePieceTokenizer or HuggingFaceTokenizer; together with --tokenizer-model, instead of the tokenizer that
    the model's directory holds."""
    tokenizer_model: Path | None = None
    """The tokenizer's file or directory."""
    local_rank: int | None = flag(None, aliases=("--local_rank",))
    """Given by launchers; the environment's LOCAL_RANK is what counts."""


@dataclass(frozen=True)
class PromptOptions:
    """Prompts. All that are given are continued side by side, in this order; without any, standard input is one."""

    prompt: tuple[str, ...] = ()
    """A text to continue. One that begins with a dash is given as --prompt=TEXT."""
    prompt_file: tuple[Path, ...] = ()
    """A file of prompts: .jsonl, .json and .ndjson hold a JSON object a line, with the text under "prompt"; any other
    file is one prompt, without its last line end."""
    tokens: tuple[str, ...] = ()
    """One prompt as token ids, separated by blanks or commas; needs no tokenizer."""
    chat: bool = False
    """A prompt is what a user says: the tokenizer's chat template is put around it, and the model answers."""
    system: str | None = None
    """With --chat, the system's message."""
    interactive: bool = False
    """Continue one line of standard input after another until it ends; with --chat, a conversation."""


@dataclass(frozen=True)
class SamplingOptions:
    """Sampling. How tokens are chosen, and when to stop."""

    max_new_tokens: int = 64
    """Tokens to generate for each prompt at most."""
    temperature: float = 1.0
    """Divides the logits: below 1 is safer, above 1 more varied. 0 takes the most likely token each time."""
    top_k: int = 0
    """Draw from the N most likely tokens alone; 0 means from all."""
    top_p: float = 1.0
    """Draw from the fewest most likely tokens that have this probability together, counted after --top-k."""
    min_p: float = 0.0
    """Draw from tokens alone that have this share of the likeliest one's probability, counted after --top-p."""
    repetition_penalty: float = 1.0
    """Above 1, makes tokens of the prompt and of the text so far less likely: divides positive logits, multiplies
    negative ones. From 0.01 to 100."""
    presence_penalty: float = 0.0
    """Taken from the logits of tokens that were generated before."""
    frequency_penalty: float = 0.0
    """Taken from the logits of a token as often as it was generated before."""
    num_samples: int = 1
    """Continuations of each prompt, each drawn by a seed of its own."""
    seed: int = 1234
    """Equal seeds give equal texts, at any --tp and in any batch."""
    stop: tuple[str, ...] = ()
    """A text that ends the continuation and is not shown, wherever its tokens end. \\n and \\t stand for a line end
    and a tab."""
    ignore_eos: bool = False
    """Go on to --max-new-tokens behind the tokens that end a text."""


@dataclass(frozen=True)
class OutputOptions:
    """Output. Plain text repeats each prompt before its continuation."""

    json: bool = False
    """Print a JSON object a line for each prompt instead of text."""
    stream: bool = False
    """Show text as it comes; with several prompts, the first one that is not finished."""
    logprobs: bool = False
    """With --json, the log-probability of each generated token by the model alone."""
    top_logprobs: int = 0
    """With --json and --logprobs, so many likeliest tokens at each place as well: pairs of id and log-probability."""
    score: bool = False
    """Instead of continuing the prompts, tell the log-likelihood and perplexity of each. With --logprobs, of each
    token."""


@dataclass(frozen=True)
class BenchOptions:
    """Benchmark. Of this model on this machine, with prompts of random ids."""

    bench: bool = False
    """Measure prefill and greedy decoding instead of continuing prompts: medians of --bench-rounds, after one round
    to warm up. With --no-overlap, the same without reduces in flight."""
    bench_rounds: int = 5
    """Rounds that are measured."""
    bench_prompt: int = 128
    """Tokens of each prompt; --max-new-tokens are decoded behind it."""
    bench_batch: int = 1
    """Prompts side by side."""


@dataclass(frozen=True)
class GenerateOptions:
    """The whole command line."""

    model: ModelOptions
    prompts: PromptOptions
    sampling: SamplingOptions
    output: OutputOptions
    bench: BenchOptions
    serve: ServeOptions


SECTIONS = (ModelOptions, PromptOptions, SamplingOptions, OutputOptions, BenchOptions, ServeOptions)


def parse_options(argv: Sequence[str]) -> GenerateOptions:
    """Reads the command line.

    Raises:
        UserError: with a line for everything that is wrong before any file is opened.
    """
    mistakes: list[str] = []
    options = GenerateOptions(*parse_command_line(SECTIONS, argv, PROGRAM, DESCRIPTION, found=mistakes))
    mistakes += option_mistakes(options)
    if mistakes:
        raise UserError(*mistakes)
    return options


def option_mistakes(options: GenerateOptions) -> list[str]:
    """One line for each value, or combination of values, that cannot be."""
    return [
        *_model_mistakes(options.model),
        *_prompt_mistakes(options),
        *_sampling_mistakes(options.sampling),
        *_output_mistakes(options),
        *serve_mistakes(options.serve),
        *_beside_serve_mistakes(options),
    ]


def _model_mistakes(model: ModelOptions) -> list[str]:
    mistakes = []
    if model.tp is not None and model.tp < 1:
        mistakes.append(f"--tp {model.tp}: expected 1 or more")
    if (model.tokenizer_type is None) != (model.tokenizer_model is None):
        mistakes.append("--tokenizer-type and --tokenizer-model belong together: give both, or neither")
    return mistakes


def _prompt_mistakes(options: GenerateOptions) -> list[str]:
    prompts, mistakes = options.prompts, []
    given = bool(prompts.prompt or prompts.prompt_file or prompts.tokens)
    makes_own = prompts.interactive or options.bench.bench or options.serve.serve
    if not given and not makes_own and sys.stdin.isatty():
        mistakes.append("nothing to continue: give --prompt, --prompt-file, --tokens or --interactive, or pipe a text")
    try:
        if prompts.tokens and not token_ids(prompts.tokens):
            mistakes.append("--tokens: an empty prompt cannot be continued: give at least one id")
    except ValueError as error:
        mistakes.append(f"--tokens: {error}")
    if given and (prompts.interactive or options.bench.bench):
        other = "--interactive reads" if prompts.interactive else "--bench makes"
        mistakes.append(f"{other} prompts of its own: leave --prompt, --prompt-file and --tokens out, or it")
    if prompts.tokens and prompts.chat:
        mistakes.append("--chat puts a template around texts, and --tokens are ids: give one of them")
    if prompts.system is not None and not prompts.chat:
        mistakes.append("--system is the first message of a conversation: give --chat, or leave it out")
    return mistakes


def _sampling_mistakes(sampling: SamplingOptions) -> list[str]:
    mistakes = []
    if sampling.max_new_tokens < 1:
        mistakes.append(f"--max-new-tokens {sampling.max_new_tokens}: expected 1 or more")
    if not 0 <= sampling.temperature < float("inf"):
        mistakes.append(f"--temperature {sampling.temperature}: expected 0 (the most likely token) or more")
    if sampling.top_k < 0:
        mistakes.append(f"--top-k {sampling.top_k}: expected 1 or more, or 0 for all tokens")
    if not 0 < sampling.top_p <= 1:
        mistakes.append(f"--top-p {sampling.top_p}: expected a share above 0 and up to 1")
    if not 0 <= sampling.min_p <= 1:
        mistakes.append(f"--min-p {sampling.min_p}: expected a share from 0 to 1")
    if not SMALLEST_REPETITION_PENALTY <= sampling.repetition_penalty <= LARGEST_REPETITION_PENALTY:
        mistakes.append(
            f"--repetition-penalty {sampling.repetition_penalty}: expected {SMALLEST_REPETITION_PENALTY} to "
            f"{LARGEST_REPETITION_PENALTY}; 1 is none"
        )
    for name in ("presence_penalty", "frequency_penalty"):
        if not -LARGEST_PENALTY <= (found := getattr(sampling, name)) <= LARGEST_PENALTY:
            mistakes.append(f"{flag_name(name)} {found}: expected {-LARGEST_PENALTY} to {LARGEST_PENALTY}; 0 is none")
    if sampling.num_samples < 1:
        mistakes.append(f"--num-samples {sampling.num_samples}: expected 1 or more")
    if not 0 <= sampling.seed < 1 << 63:
        mistakes.append(f"--seed {sampling.seed}: expected 0 to 2^63 - 1")
    if "" in sampling.stop:
        mistakes.append("--stop: an empty text would end everything at once: give at least one character")
    return mistakes


def _output_mistakes(options: GenerateOptions) -> list[str]:
    output, bench, mistakes = options.output, options.bench, []
    if output.json and output.stream:
        mistakes.append("--stream shows text as it comes, and --json an object when all is there: give one of them")
    if output.logprobs and not (output.json or output.score):
        mistakes.append("--logprobs are a part of what --json and --score print: give one of these, or leave it out")
    if not 0 <= output.top_logprobs <= MOST_ALTERNATIVES:
        mistakes.append(f"--top-logprobs {output.top_logprobs}: expected 0 to {MOST_ALTERNATIVES}")
    if output.top_logprobs and not (output.json and output.logprobs) or output.top_logprobs and output.score:
        mistakes.append("--top-logprobs are a part of --logprobs with --json: give both, without --score")
    if output.score and (options.prompts.interactive or bench.bench):
        mistakes.append("--score tells of given texts: leave --interactive and --bench out")
    for name in ("bench_rounds", "bench_prompt", "bench_batch"):
        if getattr(bench, name) < 1:
            mistakes.append(f"{flag_name(name)} {getattr(bench, name)}: expected 1 or more")
    return mistakes


def _beside_serve_mistakes(options: GenerateOptions) -> list[str]:
    if not options.serve.serve:
        return []
    others = {
        "prompts": (options.prompts, PromptOptions()), "sampling": (options.sampling, SamplingOptions()),
        "output": (options.output, OutputOptions()), "benchmark": (options.bench, BenchOptions()),
    }  # fmt: skip
    return [
        f"--serve takes from each request what flags of {name} say: leave them out"
        for name, (given, without) in others.items()
        if given != without
    ]


def token_ids(words: Sequence[str]) -> tuple[int, ...]:
    """The ids of --tokens; raises ValueError that names a word which is none."""
    parts = [part for word in words for part in word.replace(",", " ").split()]
    strange = [part for part in parts if not (part.isascii() and part.isdigit())]
    if strange:
        raise ValueError(f"{strange[0]!r} is no token id")
    return tuple(int(part) for part in parts)

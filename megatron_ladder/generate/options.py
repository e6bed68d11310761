"""Flags of `tools/generate.py`, without torch, because the process that starts the ranks does not need it."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatron_ladder.command_line import parse_command_line
from megatron_ladder.errors import Problem, raise_user_errors
from megatron_ladder.flags import flag
from megatron_ladder.tokenizers.kinds import TokenizerType

_DESCRIPTION = "Generates text with a trained model. Output goes to stdout, statistics to stderr."


@dataclass(frozen=True)
class ModelOptions:
    """Model. The checkpoint determines the sizes and the wiring."""

    model: Path
    """A Hugging Face directory, a training checkpoint, or a directory of training checkpoints, of which the one named
    in its file `latest` is used."""
    tp: int | None = flag(None, aliases=("--tensor-model-parallel-size",), minimum=1)
    """Number of processes that share the model. Under a launcher it must be the number of processes that the launcher
    started. Otherwise the default is 1, and generate.py starts the processes on this machine."""
    dtype: Literal["fp32", "bf16", "fp16"] | None = None
    """Data type to which the weights are converted. The default is fp32 on a CPU and bf16 on a GPU."""
    verify: bool = True
    """Compare the files of a training checkpoint with their recorded checksums while loading. Hugging Face
    directories have no checksums."""
    overlap: bool = True
    """Leave all-reduces in flight under the next sub-block. Without this overlap, each is waited for at once; for
    comparison."""
    compile_sub_blocks: bool = False
    """Compile norms, SwiGLU and rotary embedding with torch.compile. Needs a C++ compiler at run time."""
    cuda_graph: bool = True
    """Replay captured decode steps on GPUs. Without them, the host launches every kernel."""
    prefill_chunk_size: int | None = flag(None, minimum=1)
    """Positions of every prompt that one pass processes; by default all of them at once. Activations of long prompts
    need less memory in parts. --score has no parts."""
    draft: Literal["mtp"] | None = None
    """Draft tokens with the model's drafting head; each step verifies all drafts at once. Greedy text stays the same,
    except where two tokens are almost equally likely; drawn text has the same distribution, but other tokens for a
    seed."""
    draft_tokens: int = flag(1, minimum=1, maximum=32, requires="draft")
    """Tokens to draft in each step; after the first, the head reads its own output."""
    tp_all_reduce: Literal["auto", "nccl", "symmetric"] = "auto"
    """Implementation of small all-reduces between GPUs: NCCL, or a one-shot kernel over symmetric memory, which needs
    GPUs of one machine that are joined by NVLink; auto uses the latter where it is possible."""
    tokenizer_type: TokenizerType | None = None
    """Type of a tokenizer that replaces the one in the model's directory."""
    tokenizer_model: Path | None = flag(None, requires="tokenizer_type")
    """File or directory of the tokenizer; ByteTokenizer has none."""
    local_rank: int | None = flag(None, aliases=("--local_rank",))
    """Accepted because some launchers pass it; the environment variable LOCAL_RANK is used instead."""


@dataclass(frozen=True)
class PromptOptions:
    """Prompts. All prompts are continued in one batch, in this order. Without any, standard input is one prompt."""

    prompt: tuple[str, ...] = flag((), repeats=True)
    """Texts to continue. Write a text that begins with a dash as --prompt=TEXT."""
    prompt_file: tuple[Path, ...] = flag((), repeats=True)
    """Files of prompts. Each line of a .jsonl, .json, .ndjson, .jsonlines or .jl file is a JSON object with the text
    under "prompt". Any other file is one prompt, without its last line end."""
    tokens: tuple[str, ...] = flag((), excludes="chat", repeats=True)
    """One prompt as token ids, separated by spaces or commas; needs no tokenizer."""
    chat: bool = False
    """Treat each prompt as a message of a user: apply the tokenizer's chat template, and let the model answer."""
    system: str | None = flag(None, requires="chat")
    """System message of the conversation."""
    interactive: bool = flag(False, excludes=("prompt", "prompt_file", "tokens", "json", "num_samples"))
    """Continue each line of standard input until it ends; with --chat, as one conversation."""

    @property
    def given(self) -> bool:
        """Whether the flags contain prompts."""
        return bool(self.prompt or self.prompt_file or self.tokens)


@dataclass(frozen=True)
class SamplingOptions:
    """Sampling. How tokens are chosen, and where a continuation ends."""

    max_new_tokens: int = flag(64, minimum=1)
    """Largest number of tokens to generate per prompt."""
    temperature: float = flag(1.0, minimum=0)
    """Divides the logits. Lower values make the text more predictable; 0 always takes the most likely token."""
    top_k: int = flag(0, minimum=0)
    """Draw only from the N most likely tokens; 0 means all."""
    top_p: float = flag(1.0, above=0, maximum=1)
    """Draw only from the fewest most likely tokens that have this probability together; applied after --top-k."""
    min_p: float = flag(0.0, minimum=0, maximum=1)
    """Draw only from tokens with at least this share of the highest probability; applied after --top-p."""
    # These limits keep logits finite in fp32.
    repetition_penalty: float = flag(1.0, minimum=0.01, maximum=100.0)
    """For tokens of the prompt and of the text so far, divides positive logits and multiplies negative ones. Values
    above 1 make these tokens less likely."""
    num_samples: int = flag(1, minimum=1)
    """Number of continuations per prompt, each with a separate seed."""
    seed: int = flag(1234, minimum=0)
    """Random seed. Equal seeds give equal texts, with any --tp and in any batch."""
    stop: tuple[str, ...] = flag((), repeats=True)
    """Texts that end the continuation and are cut from it, even within a token. Write a line end as \\n and a tab as
    \\t."""
    ignore_eos: bool = False
    """Continue to --max-new-tokens after an end-of-text token."""


@dataclass(frozen=True)
class OutputOptions:
    """Output. Plain text repeats each prompt before its continuation."""

    json: bool = flag(False, excludes="stream")
    """Print one line of JSON per continuation instead of text."""
    stream: bool = False
    """Print text as it is generated; with several prompts, that of the first unfinished one."""
    logprobs: bool = False
    """With --json or --score, print the log-probability of each token, without penalty and temperature."""
    score: bool = flag(False, excludes=("interactive", "draft"))
    """Print the log-likelihood and the perplexity of each prompt instead of continuing it."""


@dataclass(frozen=True)
class GenerateOptions:
    """The whole command line."""

    model: ModelOptions
    prompts: PromptOptions
    sampling: SamplingOptions
    output: OutputOptions


SECTIONS = (ModelOptions, PromptOptions, SamplingOptions, OutputOptions)


def parse_generation(argv: Sequence[str]) -> GenerateOptions:
    """Parse the command line; raises UserError with one line for each error that needs no file to be found."""
    errors: list[Problem] = []
    options = GenerateOptions(*parse_command_line(SECTIONS, argv, "generate.py", _DESCRIPTION))
    prompts, sampling, output = options.prompts, options.sampling, options.output
    if not (prompts.given or prompts.interactive) and sys.stdin.isatty():
        reason = "there is no prompt; use {prompt}, {prompt_file}, {tokens} or {interactive}, or pipe a text"
        errors.append(Problem({}, reason))
    try:
        if prompts.tokens and not token_ids(prompts.tokens):
            errors.append(Problem({"tokens": None}, "{}: the prompt is empty; at least one id is required"))
    except ValueError as error:
        errors.append(Problem({"tokens": None}, "{}: {error}", error=error))
    if "" in sampling.stop:
        reason = "{}: an empty text would end every continuation at once; use at least one character"
        errors.append(Problem({"stop": None}, reason))
    if output.logprobs and not (output.json or output.score):
        errors.append(Problem({"logprobs": None}, "{} requires {json} or {score}"))
    raise_user_errors(errors)
    return options


def token_ids(words: Sequence[str]) -> tuple[int, ...]:
    """Return the ids of --tokens; raises ValueError that names an invalid one."""
    parts = [part for word in words for part in word.replace(",", " ").split()]
    invalid = [part for part in parts if not (part.isascii() and part.isdigit())]
    if invalid:
        raise ValueError(f"{invalid[0]!r} is not a token id")
    return tuple(int(part) for part in parts)

"""Compares models on held-out conversations and prints a table.

The table has the perplexity of the assistant's messages, computed by tools/generate.py --score. If lm-eval is
installed, it also has the share of conversations in which the model prefers the last answer to three answers from other
conversations (a local task that this script creates), and the tasks of --lm-eval-tasks.
"""

import importlib.util
import json
import math
import random
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

sys.path.append(str(Path(__file__).resolve().parents[2]))

from examples.lm_eval_runs import lm_eval_command, metric_of  # noqa: E402
from megatron_ladder.command_line import parse_command_line  # noqa: E402
from megatron_ladder.data.chat import Conversation, ConversationEncoder  # noqa: E402
from megatron_ladder.data.chat_records import ConversationError, Message, read_record  # noqa: E402
from megatron_ladder.data.chat_template import ChatTemplateError  # noqa: E402
from megatron_ladder.data.reading.protocol import Record  # noqa: E402
from megatron_ladder.errors import UserError, raise_user_errors, run_program  # noqa: E402
from megatron_ladder.tokenizers.hugging_face import HuggingFaceTokenizer  # noqa: E402

GENERATE = Path(__file__).resolve().parents[2] / "tools" / "generate.py"
TASK = "which_answer"
CHOICES = 4
TASK_FILE = """\
task: {task}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {path}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{context}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
target_delimiter: ""
metric_list: [{{metric: acc}}]
"""


@dataclass(frozen=True)
class EvaluateOptions:
    """Models and conversations."""

    models: tuple[str, ...]
    """NAME=DIR for each model: a Hugging Face directory or a directory of training checkpoints."""
    tokenizer: Path
    """Directory with the tokenizer.json and the chat template of all models."""
    held_out: Path
    """Conversations as JSON lines."""
    output: Path
    """Folder for table.md and table.json, and for the input and output of the other programs."""
    chat_keys: tuple[str, ...] = ("messages",)
    """Keys of a conversation, as for preprocess_data.py."""
    conversations: int = 200
    """Number of conversations to read from the beginning of the file."""
    seq_length: int = 4096
    """Skip longer conversations."""
    tp: int = 1
    """Number of tensor-parallel processes."""
    lm_eval_tasks: tuple[str, ...] = ()
    """More tasks of lm-eval, which downloads them, each with a metric (arc_challenge:acc_norm), and a filter of its
    answers if there are several (gsm8k:exact_match:strict-match); default: acc."""
    no_lm_eval: bool = False
    """Do not use lm-eval even if it is installed."""


class HeldOut(NamedTuple):
    """A held-out conversation."""

    messages: Sequence[Message]
    text: str
    tokens: Conversation


def read_held_out(options: EvaluateOptions, encoder: ConversationEncoder) -> list[HeldOut]:
    """Return the first conversations of the file that are short enough.

    Raises:
        UserError: the file cannot be read, a line is not a conversation, or no conversation is short enough.
    """
    found: list[HeldOut] = []
    try:
        # A text can contain other line separators than the one of JSON lines.
        lines = options.held_out.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--held-out {options.held_out}: cannot be read: {error}") from None
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    for number, line in numbered[: options.conversations]:
        try:
            values = dict.fromkeys(options.chat_keys) | json.loads(line)
            messages, tools, _ = read_record(options.chat_keys, Record(values, (), False))
            rendered = encoder.render(messages, tools)
        except (TypeError, json.JSONDecodeError, ConversationError, ChatTemplateError) as error:
            raise UserError(f"--held-out {options.held_out}, line {number}: not a conversation: {error}") from None
        (tokens,) = encoder.encode([rendered])
        if tokens.loss_mask[1:].any() and len(tokens.token_ids) <= options.seq_length:
            found.append(HeldOut(messages, rendered.text, tokens))
    if not found:
        raise UserError(
            f"--held-out {options.held_out}: no conversation has an answer and at most --seq-length "
            f"{options.seq_length} tokens; use a longer --seq-length or other conversations"
        )
    return found


def perplexity(held_out: Sequence[HeldOut], scores: Sequence[Mapping[str, Any]]) -> float:
    """Return the perplexity of the assistant's tokens over all conversations.

    Args:
        scores: output of tools/generate.py --score --logprobs --json for each text.

    Raises:
        RuntimeError: the scored tokens are not those that training reads.
    """
    total, count = 0.0, 0
    for conversation, score in zip(held_out, scores, strict=True):
        if score["prompt_ids"] != conversation.tokens.token_ids.tolist():
            raise RuntimeError(f"{GENERATE.name} scored tokens that training does not read: {score['prompt_ids'][:20]}")
        counted = conversation.tokens.loss_mask[1:].astype(bool).tolist()
        chosen = [logprob for logprob, counts in zip(score["logprobs"], counted, strict=True) if counts]
        total, count = total + sum(chosen), count + len(chosen)
    return math.exp(-total / count)


def score(model: Path, texts: Path, options: EvaluateOptions) -> list[dict[str, Any]]:
    """Score texts with tools/generate.py, whose messages go to stderr."""
    command = [
        sys.executable,
        str(GENERATE),
        "--model",
        str(model),
        "--tp",
        str(options.tp),
        "--prompt-file",
        str(texts),
        "--tokenizer-type",
        "HuggingFaceTokenizer",
        "--tokenizer-model",
        str(options.tokenizer),
        "--score",
        "--logprobs",
        "--json",
    ]
    lines = run(command, subprocess.PIPE).splitlines()
    return [json.loads(line) for line in lines]


def run(command: Sequence[str], stdout: int | None) -> str:
    """Run a command and return its output.

    Raises:
        UserError: the command failed; its message is on stderr.
    """
    done = subprocess.run(command, stdout=stdout, text=True)
    if done.returncode:
        raise UserError(f"{' '.join(command[1:4])}: exited with code {done.returncode}; see above")
    return done.stdout or ""


def write_task(held_out: Sequence[HeldOut], encoder: ConversationEncoder, folder: Path) -> None:
    """Write an lm-eval task: find the right answer among three from other conversations."""
    numbers = random.Random(0)
    last = [conversation.messages[-1] for conversation in held_out]
    answers = sorted({message["content"] for message in last if is_text_answer(message)})
    if len(answers) < CHOICES:
        raise UserError(f"--held-out: {len(answers)} different last answers, expected {CHOICES}; add conversations")
    lines = []
    for conversation, message in zip(held_out, last, strict=True):
        if not is_text_answer(message):
            continue
        right = message["content"]
        others = [answer for answer in numbers.sample(answers, CHOICES) if answer != right][: CHOICES - 1]
        index = numbers.randrange(CHOICES)
        choices = [*others[:index], right, *others[index:]]
        context = encoder.template.prompt(conversation.messages[:-1])
        lines.append(json.dumps({"context": context, "choices": choices, "answer": index}) + "\n")
    (folder / f"{TASK}.jsonl").write_text("".join(lines), encoding="utf-8")
    text = TASK_FILE.format(task=TASK, path=json.dumps(str(folder / f"{TASK}.jsonl")))
    (folder / f"{TASK}.yaml").write_text(text, encoding="utf-8")


def is_text_answer(message: Message) -> bool:
    """Return whether this is a message of the assistant with a single text."""
    return message["role"] == "assistant" and isinstance(message.get("content"), str)


def run_lm_eval(name: str, model: Path, options: EvaluateOptions) -> dict[str, float]:
    """Run lm-eval; return the result by task and metric."""
    # Imports torch, which takes seconds.
    from megatron_ladder.comm.launch import read_rank_info

    results = options.output / f"lm_eval_{name}"
    named = [word.partition(":") for word in options.lm_eval_tasks]
    metrics = {TASK: "acc"} | {task: metric.replace(":", ",") or "acc" for task, _, metric in named}
    device = str(read_rank_info().device())
    command = [
        *lm_eval_command(model, batch_size="8"),
        "--tasks",
        ",".join(metrics),
        "--include_path",
        str(options.output),
        "--device",
        device,
        "--output_path",
        str(results),
    ]
    run(command, subprocess.DEVNULL)
    newest = max(results.rglob("results*.json"), key=lambda path: path.stat().st_mtime)
    return named_metrics(json.loads(newest.read_text())["results"], metrics)


def named_metrics(results: Mapping[str, Mapping[str, Any]], metrics: Mapping[str, str]) -> dict[str, float]:
    """Return the metric of each task (task -> metric) as "task metric".

    Raises:
        UserError: lm-eval did not compute a metric, or with several filters.
    """
    found, errors = {}, []
    for task, metric in metrics.items():
        try:
            found[f"{task} {metric}"] = metric_of(results, task, metric)
        except ValueError as error:
            errors.append(f"--lm-eval-tasks {task}:{metric.replace(',', ':')}: {error}")
    raise_user_errors(errors)
    return found


def table(rows: Mapping[str, Mapping[str, float]]) -> str:
    """Return a Markdown table with a column for each result that any model has; missing results are dashes."""
    columns = list(dict.fromkeys(column for row in rows.values() for column in row))
    lines = [["model", *columns], ["---"] * (len(columns) + 1)]
    lines += [[name, *(f"{row[c]:.3f}" if c in row else "-" for c in columns)] for name, row in rows.items()]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def named_models(words: Sequence[str]) -> dict[str, Path]:
    """Parse NAME=DIR words.

    Raises:
        UserError: a word has another form, or the directory does not exist.
    """
    errors, found = [], {}
    for word in words:
        name, equals, path = word.partition("=")
        if not (name and equals and Path(path).is_dir()):
            errors.append(f"--models {word}: expected NAME=DIR with an existing directory")
        found[name] = Path(path)
    raise_user_errors(errors)
    return found


def main(argv: Sequence[str]) -> None:
    """Evaluate every model; print and write the table."""
    options: EvaluateOptions
    (options,) = parse_command_line(
        [EvaluateOptions], argv, program="evaluate.py", description="Compares models on held-out conversations."
    )
    models = named_models(options.models)
    encoder = ConversationEncoder(HuggingFaceTokenizer(options.tokenizer))
    held_out = read_held_out(options, encoder)
    options.output.mkdir(parents=True, exist_ok=True)
    texts = options.output / "texts.jsonl"
    texts.write_text("".join(json.dumps({"prompt": one.text}) + "\n" for one in held_out), encoding="utf-8")
    with_lm_eval = importlib.util.find_spec("lm_eval") is not None and not options.no_lm_eval
    if with_lm_eval:
        write_task(held_out, encoder, options.output)
    rows: dict[str, dict[str, float]] = {}
    for name, model in models.items():
        rows[name] = {"perplexity": perplexity(held_out, score(model, texts, options))}
        if with_lm_eval and (model / "config.json").is_file():
            rows[name] |= run_lm_eval(name, model, options)
    count = sum(int(one.tokens.loss_mask[1:].sum()) for one in held_out)
    text = f"{len(held_out)} held-out conversations, {count:,} tokens of the assistant\n\n{table(rows)}"
    (options.output / "table.md").write_text(text, encoding="utf-8")
    (options.output / "table.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    print(text, end="")
    if not with_lm_eval:
        print('\nFor more columns, install lm-eval with pip install "lm-eval[hf]" and run the same command again.')


def entry_point() -> NoReturn:
    """Run as a program."""
    run_program(main)


if __name__ == "__main__":
    entry_point()

"""Creates the model and the data for the small version of the example, without a download.

DIR/source is a tiny Llama trained with transformers and plain PyTorch for --steps on small exercises (cyclic lists of
words, cyclic counting), so that an adaptation has something to lose. It includes a tokenizer and a chat template in the
style of Llama 3. DIR/train.jsonl and DIR/held_out.jsonl hold disjoint sets of conversations with these exercises.
"""

import json
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import tokenizers
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

sys.path.append(str(Path(__file__).resolve().parents[2]))

from megatron_ladder.command_line import parse_command_line  # noqa: E402
from megatron_ladder.data.chat import Conversation, ConversationEncoder  # noqa: E402
from megatron_ladder.errors import run_program  # noqa: E402
from megatron_ladder.progress import ProgressBar  # noqa: E402
from megatron_ladder.tokenizers.hugging_face import HuggingFaceTokenizer  # noqa: E402

WORDS = "red blue green black white brown grey pink gold silver".split()
LARGEST = 60
"""Exclusive upper limit of the numbers in exercises."""
SPECIALS = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|start_header_id|>{{ message['role'] }}<|end_header_id|>\n\n"
    "{{ message['content'] | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
}
VOCABULARY = 512
PADDED_TO = 96
"""Tokens; the longest conversation has fewer."""
BATCH = 16
LEARNING_RATE = 3e-3


@dataclass(frozen=True)
class TinyOptions:
    """Output."""

    output: Path
    """Folder for source/, train.jsonl and held_out.jsonl."""
    conversations: int = 4000
    """Lines of train.jsonl."""
    held_out: int = 100
    """Lines of held_out.jsonl."""
    steps: int = 500
    """Training steps of the model, after which it has nothing left to learn: healing can only restore it."""


def exercise(numbers: random.Random) -> tuple[str, str]:
    """Return a random question and its answer."""
    if numbers.random() < 0.5:
        index = numbers.randrange(len(WORDS))
        step, asked = numbers.choice([(1, "after"), (-1, "before")])
        return f"What comes {asked} {WORDS[index]}?", f"{WORDS[(index + step) % len(WORDS)]} comes {asked} it."
    first = numbers.randrange(LARGEST)
    return f"Count on from {first}", " ".join(str((first + more) % LARGEST) for more in range(1, 5))


def conversations(count: int, seed: int) -> list[list[dict[str, str]]]:
    """Return `count` different conversations of two or three exercises each."""
    numbers = random.Random(seed)
    found: dict[str, list[dict[str, str]]] = {}
    while len(found) < count:
        messages = []
        for _ in range(numbers.randint(2, 3)):
            question, answer = exercise(numbers)
            messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        found[json.dumps(messages)] = messages
    return list(found.values())


def make_tokenizer(texts: Sequence[str], folder: Path) -> None:
    """Train a byte-level tokenizer and save it, with the chat template, in the format of transformers."""
    library = tokenizers.Tokenizer(tokenizers.models.BPE())
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIALS,
        show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )
    library.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=library, bos_token=SPECIALS[0], eos_token=SPECIALS[4], chat_template=TEMPLATE
    )
    tokenizer.save_pretrained(folder)


def train(model: LlamaForCausalLM, encoded: Sequence[Conversation], steps: int) -> float:
    """Train on the assistant's messages; return the last loss."""
    ids = torch.zeros(len(encoded), PADDED_TO, dtype=torch.long)
    labels = torch.full_like(ids, -100)
    for row, (tokens, mask) in enumerate(encoded):
        tokens, counted = torch.from_numpy(tokens), torch.from_numpy(mask).bool()
        ids[row, : len(tokens)] = tokens
        labels[row, : len(tokens)] = torch.where(counted, tokens, -100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=steps)
    generator = torch.Generator().manual_seed(0)
    loss = torch.zeros(())
    with ProgressBar("training the source", steps, unit="step") as progress:
        for _ in range(steps):
            rows = torch.randint(0, len(ids), (BATCH,), generator=generator)
            loss = model(input_ids=ids[rows], labels=labels[rows]).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            progress.advance(1)
    return float(loss.detach())


def main(argv: Sequence[str]) -> None:
    """Write the conversations, then the model."""
    options: TinyOptions
    (options,) = parse_command_line(
        [TinyOptions], argv, program="tiny_llama.py", description="A tiny Llama and conversations."
    )
    source = options.output / "source"
    source.mkdir(parents=True, exist_ok=True)
    whole = conversations(options.held_out + options.conversations, seed=0)
    held_out, training = whole[: options.held_out], whole[options.held_out :]
    for name, some in (("held_out", held_out), ("train", training)):
        lines: list[dict[str, Any]] = [{"messages": messages} for messages in some]
        (options.output / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    make_tokenizer([message["content"] for messages in training for message in messages], source)
    encoder = ConversationEncoder(HuggingFaceTokenizer(source))
    encoded = encoder.encode([encoder.render(messages) for messages in training])
    torch.manual_seed(0)
    bos, eos = 0, 4
    config = LlamaConfig(**SIZES, vocab_size=VOCABULARY, bos_token_id=bos, eos_token_id=eos, pad_token_id=None)
    model = LlamaForCausalLM(config)
    loss = train(model, encoded, options.steps)
    model.to(torch.bfloat16).save_pretrained(source)
    print(f"{source}: {model.num_parameters():,} parameters, loss {loss:.3f} after {options.steps} steps")


def entry_point() -> NoReturn:
    """Run as a program."""
    run_program(main)


if __name__ == "__main__":
    entry_point()

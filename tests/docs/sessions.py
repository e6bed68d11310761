"""Runs the fences of documentation pages, one after another, as real processes in a prepared folder."""

import json
import os
import re
import shutil
import sys
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration

from tests.docs.pages import ROOT, Fence, fences
from tests.helpers.commands import free_port, run_command
from tests.unit.convert.saved_models import MSCALES, YARN, save_model

CORPUS_BYTES, LARGE_CORPUS_BYTES = 3_000_000, 10_000_000
TIMEOUT = 900.0
SIZES = (
    "--hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 512 --micro-batch-size 2 "
    "--lr 1e-3 --split 9,1,0 --eval-iters 1"
)
SENTENCE_PIECES = "--tokenizer-type SentencePieceTokenizer --tokenizer-model tokenizer.model"
BYTE_PAIRS = "--tokenizer-type HuggingFaceTokenizer --tokenizer-model tokenizer.json"
MODEL = f"{SIZES} --data-path corpus_text_document {SENTENCE_PIECES}"
TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"


def write_corpus(folder: Path, most_bytes: int = CORPUS_BYTES) -> None:
    """Write `corpus.jsonl` with the sources of Python's standard library."""
    texts, size = [], 0
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        text = path.read_text(encoding="utf-8", errors="ignore")
        if "site-packages" not in path.parts and text.strip():
            texts.append(json.dumps({"text": text}))
            size += len(text)
        if size > most_bytes:
            break
    (folder / "corpus.jsonl").write_text("\n".join(texts) + "\n", encoding="utf-8")


def write_large_corpus(folder: Path) -> None:
    """Write a `corpus.jsonl` that is large enough for a vocabulary of 32,000."""
    write_corpus(folder, LARGE_CORPUS_BYTES)


def write_chat(folder: Path) -> None:
    """Write `chat.jsonl`, and a tokenizer with a chat template."""
    _run(
        folder,
        "python tools/train_tokenizer.py --input corpus.jsonl --vocab-size 500 --model-type bpe "
        "--model-prefix TOKENIZER_DIRECTORY/tokenizer",
    )
    (folder / "TOKENIZER_DIRECTORY" / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    turns = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
    (folder / "chat.jsonl").write_text(20 * (json.dumps({"messages": turns}) + "\n"), encoding="utf-8")


def train_tokenizer(folder: Path) -> None:
    """Write `tokenizer.model` and `tokenizer.json`."""
    for kind in ("sentencepiece", "bpe"):
        _run(
            folder,
            "python tools/train_tokenizer.py --input corpus.jsonl --vocab-size 1000 --max-megabytes 1 "
            f"--model-prefix tokenizer --model-type {kind}",
        )


def tokenize(folder: Path) -> None:
    """Write `corpus_text_document`."""
    _run(
        folder,
        f"python tools/preprocess_data.py --input corpus.jsonl --output-prefix corpus --append-eod {SENTENCE_PIECES}",
    )


def train(folder: Path) -> None:
    """Write `checkpoints/`, `tensorboard/` and `traces/` of a run with two processes."""
    _run(
        folder,
        "torchrun --nproc-per-node 2 pretrain_ladder.py --tensor-model-parallel-size 2 --num-layers 2 "
        "--residual-mode ladder --train-iters 12 --save checkpoints --load checkpoints --tensorboard-dir tensorboard "
        f"--profile --profile-step-start 10 --profile-step-end 12 --profile-dir traces {MODEL}",
    )


def write_llama(folder: Path) -> None:
    """Write `Llama-3.1-8B-Instruct/`, a tiny Llama with more than 16 layers and a chat template."""
    _run(
        folder,
        f"python tools/preprocess_data.py --input corpus.jsonl --output-prefix llama --append-eod {BYTE_PAIRS}\n"
        "python pretrain_ladder.py --num-layers 18 --train-iters 1 --save untrained-llama "
        f"--data-path llama_text_document {SIZES} {BYTE_PAIRS}\n"
        "python tools/convert_checkpoint.py export --load untrained-llama --hf Llama-3.1-8B-Instruct",
    )
    (folder / "Llama-3.1-8B-Instruct" / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")


def write_qwen(folder: Path) -> None:
    """Write `Qwen3-30B-A3B/`, a tiny Qwen3 with experts."""
    _run(
        folder,
        "python pretrain_ladder.py --num-layers 2 --num-experts 4 --qk-layernorm --train-iters 1 --save untrained "
        f"{MODEL}\n"
        "python tools/convert_checkpoint.py export --load untrained --hf Qwen3-30B-A3B",
    )


def write_instella(folder: Path) -> None:
    """Write `Instella-MoE-16B-A3B-Think/`, random and tiny, and `instella_text_document`, tokenized with it."""
    directory = folder / "Instella-MoE-16B-A3B-Think"
    sizes = {
        "vocab_size": 1000,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "max_position_embeddings": 512,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "qk_nope_head_dim": 24,
        "qk_rope_head_dim": 8,
        "v_head_dim": 32,
        "kv_lora_rank": 32,
        "moe_intermediate_size": 32,
    }
    # Servers have tables for the extended positions only.
    rope = YARN | MSCALES | {"factor": 32.0}
    save_model(directory, "instella_moe", torch.bfloat16, rope_parameters=rope, **sizes)
    shutil.copy(folder / "tokenizer.json", directory)
    card = "---\nlicense: other\nlicense_name: researchrail\nlicense_link: LICENSE\n---\n"
    (directory / "README.md").write_text(card, encoding="utf-8")
    (directory / "LICENSE").write_text("RESEARCH-ONLY RAIL Model License\n", encoding="utf-8")
    _run(
        folder,
        "python tools/preprocess_data.py --input corpus.jsonl --output-prefix instella --append-eod "
        f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {directory.name}",
    )


def write_qwen_with_vision_tower(folder: Path) -> None:
    """Write `Qwen3.6-35B-A3B/`, random and tiny, as published, and `qwen_text_document`, tokenized with it."""
    directory = folder / "Qwen3.6-35B-A3B"
    text = {
        "vocab_size": 1000,
        "hidden_size": 64,
        "num_hidden_layers": 24,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
    }
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 64}
    config = Qwen3_5MoeConfig(text_config=text, vision_config=vision)
    torch.manual_seed(0)
    model = Qwen3_5MoeForConditionalGeneration(config).to(torch.bfloat16)
    model.save_pretrained(directory, save_original_format=False)
    weights = load_file(directory / "model.safetensors")
    last = "model.language_model.layers.23."
    head = {name.replace(last, "mtp.layers.0."): one.clone() for name, one in weights.items() if last in name}
    norms = {f"mtp.{name}.weight": torch.zeros(64) for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")}
    head |= {"mtp.fc.weight": torch.randn(64, 128) / 16} | norms
    save_file(weights | {name: one.bfloat16() for name, one in head.items()}, directory / "model.safetensors")
    shutil.copy(folder / "tokenizer.json", directory)
    _run(
        folder,
        "python tools/preprocess_data.py --input corpus.jsonl --output-prefix qwen --append-eod "
        f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {directory.name}",
    )


NEEDS: dict[str, tuple[Callable[[Path], None], ...]] = {
    "text": (write_large_corpus,),
    "preprocess": (write_corpus, train_tokenizer),
    "data-sets": (write_corpus, train_tokenizer, tokenize),
    "chat": (write_corpus, write_chat),
    "trained": (write_corpus, train_tokenizer, tokenize, train),
    "llama": (write_corpus, train_tokenizer, tokenize, write_llama),
    "experts": (write_corpus, train_tokenizer, tokenize, write_qwen),
    "instella": (write_corpus, train_tokenizer, write_instella),
    "hybrid": (write_corpus, train_tokenizer, write_qwen_with_vision_tower),
    "models": (write_corpus, train_tokenizer, tokenize, train, write_llama),
}
"""Session name up to the first dot -> functions that prepare its folder; other sessions start in an empty one."""


def sessions(page: str, text: str) -> dict[str, list[Fence]]:
    """Return the fences of each session of a page, each followed by the fence with its output, if there is one."""
    found: dict[str, list[Fence]] = {}
    current: list[Fence] | None = None
    for fence in fences(page, text):
        if fence.session:
            current = found.setdefault(fence.session, [])
            current.append(fence)
        elif fence.mark == "prints" and current is not None:
            current.append(fence)
        else:
            current = None
    return found


def run_session(name: str, steps: Sequence[Fence], shelf: Path, folder: Path) -> None:
    """Run the fences of a session.

    Args:
        shelf: cache of prepared folders, shared by all sessions.
        folder: the working directory, which must not exist.

    Raises:
        AssertionError: a command fails, or does not print what the page shows.
    """
    shutil.copytree(prepared(NEEDS.get(name.partition(".")[0], ()), shelf), folder, symlinks=True)
    (folder / ".exported").unlink(missing_ok=True)
    printed = ""
    for step in steps:
        if step.mark == "prints":
            missing = missing_line(step.text, printed)
            assert missing is None, f"{step.place}: {missing!r} is not in what was printed:\n{printed}"
        else:
            printed = _run(folder, step.text, step.place, step.language)


def prepared(needs: tuple[Callable[[Path], None], ...], shelf: Path) -> Path:
    """Return a folder with the repository's scripts in which these functions were called in order."""
    made = shelf / "-".join(["scripts", *(need.__name__ for need in needs)])
    if made.is_dir():
        return made
    making = made.with_suffix(".partial")
    shutil.rmtree(making, ignore_errors=True)
    if needs:
        shutil.copytree(prepared(needs[:-1], shelf), making, symlinks=True)
        needs[-1](making)
    else:
        making.mkdir()
        for entry in ("pretrain_ladder.py", "tools", "examples", "tests", "docs"):
            (making / entry).symlink_to(ROOT / entry)
    return making.rename(made)


def missing_line(shown: str, printed: str) -> str | None:
    """Return the first shown line that was not printed after its predecessors; `...` matches any text."""
    lines = iter([" ".join(line.split()) for line in printed.splitlines()])
    for line in shown.splitlines():
        words = " ".join(line.split())
        if words in ("", "..."):
            continue
        pattern = ".*".join(re.escape(part) for part in words.split("..."))
        if not any(re.fullmatch(pattern, candidate) for candidate in lines):
            return line
    return None


def _run(folder: Path, text: str, place: str = "preparing", language: str = "bash") -> str:
    """Run commands until one fails, and return their output, stderr last."""
    argv = [sys.executable, "-c", text] if language == "python" else _shell(text)
    environment = {"HF_HUB_OFFLINE": "1", "TORCH_EXTENSIONS_DIR": os.environ["TORCH_EXTENSIONS_DIR"]}
    done = run_command(argv, TIMEOUT, environment, folder)
    assert done.returncode == 0, f"{place}: exit code {done.returncode} of\n{text}\n{done.stdout}{done.stderr}"
    return done.stdout + done.stderr


def _shell(text: str) -> list[str]:
    """Return a shell command with the variables that earlier fences exported.

    Its launchers use a free port, because other runs on this machine may use the default port.
    """
    port = free_port()
    before = (
        'set -euo pipefail\nexported=$PWD/.exported\n[ ! -f "$exported" ] || source "$exported"\n'
        'cd "${exported%/*}"\n'
        f'deepspeed() {{ command deepspeed --master_port {port} "$@"; }}\n'
        f'torchrun() {{ command torchrun --master-port {port} "$@"; }}\n'
    )
    return ["bash", "-c", f'{before}{text}\nexport -p > "$exported"']

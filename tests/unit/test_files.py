"""Atomic file replacement and locks of `megatron_ladder.files`, and files that are only pointers."""

import fcntl
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from megatron_ladder.cli import convert_checkpoint, generate, inspect_data, preprocess_data, train_tokenizer
from megatron_ladder.errors import UserError
from megatron_ladder.files import atomic_writer, lock_file, remove_temporary_files, write_atomically
from tests.helpers.tokenizer_copies import write_words
from tests.helpers.tokens import write_lines, write_tokens
from tests.unit.convert.hand_made import write_directory


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_is_replaced_or_an_error_keeps_it(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_atomically(path, "older")
    write_atomically(path, b"old")
    with pytest.raises(RuntimeError), atomic_writer(path) as file:
        file.write(b"new")
        raise RuntimeError
    with pytest.raises(OSError, match=f"Full: '{path}'$"), atomic_writer(path):
        raise OSError(28, "Full")
    assert path.read_bytes() == b"old" and names(tmp_path) == ["a.json"]


def test_content_and_rename_are_synced_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def note_sync(descriptor: int) -> None:
        calls.append("directory" if os.path.isdir(f"/proc/self/fd/{descriptor}") else "file")

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(os, "replace", lambda *_: calls.append("rename"))
    write_atomically(tmp_path / "a.json", "x")
    assert calls == ["file", "rename", "directory"]


def test_temporary_files_of_a_killed_writer_are_removed(tmp_path: Path) -> None:
    program = (
        "import os, signal, sys; from pathlib import Path; from megatron_ladder.files import atomic_writer\n"
        "with atomic_writer(Path(sys.argv[1])) as file: os.kill(os.getpid(), signal.SIGKILL)"
    )
    path = tmp_path / "a.json"
    done = subprocess.run([sys.executable, "-c", program, str(path)], cwd=Path(__file__).parents[2])
    assert done.returncode == -signal.SIGKILL and len(names(tmp_path)) == 1 and not path.exists()
    remove_temporary_files(path)
    assert names(tmp_path) == []


def test_a_file_system_without_locks_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(descriptor: int, operation: int) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    with open(tmp_path / "lock", "w") as file:
        error = lock_file(file.fileno())
    assert error is not None and error.strerror == "No locks available"


POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 17\n"
TOKENIZER = "--tokenizer-type HFTokenizer --tokenizer-model"


@pytest.mark.parametrize(
    ("file", "program", "words"),
    [
        ("a.jsonl", preprocess_data, "--tokenizer-type ByteTokenizer --output-prefix {0}/out --input {0}/a.jsonl"),
        ("a.txt", preprocess_data, "--tokenizer-type ByteTokenizer --output-prefix {0}/out --input {0}/a.txt"),
        ("a.parquet", train_tokenizer, "--vocab-size 300 --model-prefix {0}/out --input {0}/*.parquet"),
        ("set/train.jsonl", train_tokenizer, "--vocab-size 300 --model-prefix {0}/out --input hf://{0}/set"),
        ("t.model", preprocess_data, "--tokenizer-type Llama2Tokenizer --tokenizer-model {0}/t.model {1}"),
        ("tokenizer.json", preprocess_data, f"{TOKENIZER} {{0}} {{1}}"),
        ("tokenizer_config.json", preprocess_data, f"{TOKENIZER} {{0}} {{1}}"),
        ("t.jinja", preprocess_data, f"{TOKENIZER} {{0}} --chat --chat-template {{0}}/t.jinja {{1}}"),
        ("tokens.bin", inspect_data, "{0}/tokens"),
        ("tokens.idx", inspect_data, "{0}/tokens"),
        ("tokens.json", inspect_data, "{0}/tokens"),
        ("hf/config.json", convert_checkpoint, "import --hf {0}/hf --save {0}/out"),
        ("hf/model.safetensors", convert_checkpoint, "import --hf {0}/hf --save {0}/out"),
        ("hf/tokenizer.json", convert_checkpoint, "import --hf {0}/hf --save {0}/out"),
        ("prompts.txt", generate, "--model {0}/hf --prompt-file {0}/prompts.txt"),
    ],
)
def test_a_pointer_of_git_lfs_is_not_the_file(tmp_path: Path, file: str, program: ModuleType, words: str) -> None:
    """A repository that was cloned without Git LFS has such files."""
    write_lines(tmp_path / "b.jsonl", ["text"])
    write_tokens(tmp_path / "tokens")
    write_directory(tmp_path / "hf")
    for folder in (tmp_path, tmp_path / "hf"):
        write_words(folder / "tokenizer.json", "[UNK]", "</s>", "a")
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(POINTER)
    other = f"--input {tmp_path}/b.jsonl --output-prefix {tmp_path}/out"
    with pytest.raises(UserError) as raised:
        program.main(words.format(tmp_path, other).split())
    message = re.sub(r"^--\S+ ", "", str(raised.value))
    assert message.startswith(f"{tmp_path / file}: contains only the address of its content in Git LFS: ")
    assert not list(tmp_path.glob("out*"))

"""Whole runs of preprocessing: what they write, and what they keep if they are interrupted or fail."""

import contextlib
import fcntl
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from megatron_ladder.cli import preprocess_data
from megatron_ladder.data.encoding import Task
from megatron_ladder.data.indexed import IndexedDataset, read_sidecar
from megatron_ladder.data.inspect import verify
from megatron_ladder.data.loader import check_tokenizer
from megatron_ladder.data.preprocess import Partial, PreprocessOptions, preprocess
from megatron_ladder.data.reading.protocol import Reading
from megatron_ladder.errors import UserError
from megatron_ladder.tokenizers.kinds import ByteTokenizer
from megatron_ladder.tokenizers.sentencepiece import SentencePieceTokenizer
from tests.helpers.commands import run_command
from tests.helpers.pairwise import quick_share
from tests.helpers.tokens import write_lines

SHARD = 20_000
TEXTS = [f"document {number} of some" for number in range(6000)]


def run(inputs: list[Any], prefix: Path, append_eod: bool = False, **reading: Any) -> list[str]:
    """Preprocess bytes in small shards and return the messages."""
    reported: list[str] = []
    options = PreprocessOptions(report=reported.append, shard_bytes=SHARD)
    preprocess(inputs, prefix, Task(ByteTokenizer(), Reading(**reading), append_eod), options)
    return reported


def files_of(prefix: Path) -> list[bytes]:
    return [Path(f"{prefix}_text_document.{suffix}").read_bytes() for suffix in ("bin", "idx", "json")]


def documents_of(prefix: Path) -> list[list[int]]:
    dataset = IndexedDataset(prefix)
    return [dataset.document(number).tolist() for number in range(len(dataset))]


def texts_of(prefix: Path) -> list[str]:
    return [bytes(document).decode() for document in documents_of(Path(f"{prefix}_text_document"))]


def test_json_lines_and_plain_text(tmp_path: Path, sentencepiece_tokenizer: SentencePieceTokenizer) -> None:
    (tmp_path / "a.jsonl").write_bytes(
        b'\xef\xbb\xbf{"text": "", "text": "one\\ttwo\\u0000", "n": NaN}\r\n\n  \n{"text": ""}\n'
        b'{"text": "caf\\u00e9 \\ud83c\\udf89", "n": "\\ud800"}'
    )
    (tmp_path / "b.py").write_bytes(b"\xef\xbb\xbfdef f():\r\n\treturn 1\n")
    (tmp_path / "empty.txt").write_text("")
    inputs = [tmp_path / "a.jsonl", tmp_path / "empty.txt", tmp_path / "b.py"]
    sidecar = preprocess(inputs, tmp_path / "out", Task(sentencepiece_tokenizer, append_eod=True))["text"]
    texts = ["one\ttwo\0", "café 🎉", "def f():\r\n\treturn 1\n"]
    expected = [[*sentencepiece_tokenizer.encode(text), 2] for text in texts]
    assert documents_of(tmp_path / "out_text_document") == expected
    assert read_sidecar(tmp_path / "out_text_document") == sidecar
    assert (sidecar.documents, sidecar.tokens) == (3, sum(map(len, expected)))
    assert sidecar.largest_id == max(map(max, expected))
    assert (sidecar.vocab_size, sidecar.eod_id, sidecar.append_eod) == (600, 2, True)
    assert sidecar.tokenizer_sha256 == sentencepiece_tokenizer.sha256
    verified = verify(IndexedDataset(tmp_path / "out_text_document"))
    assert sum("equals that in the sidecar" in line for line in verified) == 2


@pytest.mark.parametrize(
    ("content", "line", "reason"),
    [
        (b'{"text": "a"}\n{"text": \n', 2, "not JSON: Expecting value"),
        (b'{"text": "a"}\n\n{"text": "\xff"}\n', 3, "byte 0xff is not UTF-8"),
        (b'{"text": "a"}\n["a"]', 2, "expected a JSON object, found list"),
        (b'{"title": "a", "id": 1}', 1, r"no key 'text' \(keys found: 'title', 'id'\): .*--json-keys$"),
        (b'{"messages": []}', 1, ".*name the key with --json-keys, or read conversations with .* --chat"),
        (b'{"text": null}', 1, "expected a text under 'text', found NoneType"),
        (b'{"text": "a"}\n{"text": "\\uD83C"}', 2, r"\\ud83c under 'text' is half of a surrogate pair"),
        (b"[" * 100_000, 1, "unreadable JSON"),
    ],
)
def test_a_bad_line_is_located_and_leaves_no_files(tmp_path: Path, content: bytes, line: int, reason: str) -> None:
    (tmp_path / "bad.jsonl").write_bytes(content)
    with pytest.raises(UserError, match=rf"bad\.jsonl:{line}: {reason}"):
        run([tmp_path / "bad.jsonl"], tmp_path / "out")
    assert os.listdir(tmp_path) == ["bad.jsonl"]


def test_documents_without_an_end_and_a_replaced_data_set_are_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text("something")
    command = f"--input {tmp_path}/a.txt --output-prefix {tmp_path}/out --tokenizer-type ByteTokenizer".split()
    for words, printed in (([], (True, False)), (["--append-eod"], (False, True))):
        preprocess_data.main([*command, *words])
        found = capsys.readouterr().out
        assert f"{tmp_path}/out_text_document: 1 document, " in found
        assert ("documents will run into each other" in found, "out_text_document: exists, and is" in found) == printed


def test_an_error_keeps_the_previous_output(tmp_path: Path) -> None:
    (tmp_path / "good.txt").write_text("something")
    (tmp_path / "bad.txt").write_bytes(b"line 1\nline 2\n\xe9t\xe9")
    run([tmp_path / "good.txt"], tmp_path / "out")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(UserError, match=r"bad\.txt:3: byte 0xe9 is not UTF-8"):
        run([tmp_path / "good.txt", tmp_path / "bad.txt"], tmp_path / "out")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    with pytest.raises(UserError, match="--output-prefix .*good.txt/out: cannot be written"):
        run([tmp_path / "good.txt"], tmp_path / "good.txt" / "out")


def test_bad_lines_are_skipped_counted_and_listed(tmp_path: Path) -> None:
    """A run continues counting after an error, in whichever shard the bad lines are."""
    texts = dict(enumerate(TEXTS))
    lines = [json.dumps({"text": text}).encode() for text in TEXTS]
    for number, line in ((5, b'{"text": 1}'), (3000, b"\xff"), (5900, b"{")):
        lines[number] = line
        del texts[number]
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    with pytest.raises(UserError, match=r"a\.jsonl:5901: not JSON.*\(2 before it were skipped: --skip-bad-lines 2\)"):
        run([tmp_path / "a.jsonl"], tmp_path / "out", max_bad=2)
    reported = run([tmp_path / "a.jsonl"], tmp_path / "out", max_bad=3)
    assert reported[0].startswith("resuming: an earlier run has finished ")
    assert [line.split(": ")[0] for line in reported[1:]] == [f"skipped {tmp_path}/a.jsonl:5901"]
    sidecar = read_sidecar(tmp_path / "out_text_document")
    assert sidecar is not None and sidecar.skipped == 3
    assert texts_of(tmp_path / "out") == list(texts.values())


class Stopped(BaseException):
    """Simulates a killed process."""


def interrupted(tmp_path: Path, shards: int = 3, append_eod: bool = False) -> None:
    """Kill a run after some shards."""
    write_lines(tmp_path / "a.jsonl", TEXTS)
    begin, begun = Partial.begin, iter(range(shards))

    def stopped(*arguments: Any) -> Any:
        if next(begun, None) is None:
            raise Stopped
        return begin(*arguments)

    with mock.patch.object(Partial, "begin", stopped), pytest.raises(Stopped):
        run([tmp_path / "a.jsonl"], tmp_path / "out", append_eod)


@pytest.mark.parametrize("shards", [1, 7])
def test_a_killed_run_continues_after_its_finished_shards(tmp_path: Path, shards: int) -> None:
    interrupted(tmp_path, shards)
    assert not list(tmp_path.glob("out_*")) and (tmp_path / ".out.partial").is_dir()
    finished = {path: path.stat().st_mtime_ns for path in (tmp_path / ".out.partial").glob("*.json")}
    assert len(finished) == shards
    # What a killed writer left.
    (tmp_path / ".out.partial" / f"{shards:05}_text.bin.0123abcd.partial").write_bytes(b"torn")
    (tmp_path / "out_text_document.bin.0123abcd.partial").write_bytes(b"torn")
    count = -(-(tmp_path / "a.jsonl").stat().st_size // SHARD)
    with mock.patch.object(Partial, "begin", autospec=True, side_effect=Partial.begin) as begun:
        (reported,) = run([tmp_path / "a.jsonl"], tmp_path / "out")
    assert begun.call_count == count - shards and f"has finished {shards} of {count}" in reported
    run([tmp_path / "a.jsonl"], tmp_path / "whole")
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")
    assert not (tmp_path / ".out.partial").exists() and not list(tmp_path.glob("*.partial"))


def test_shards_of_other_flags_or_input_are_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def reasons(reported: list[str]) -> set[str]:
        return set(re.findall("of an earlier run has other (.*): starting it from scratch", "\n".join(reported)))

    interrupted(tmp_path)
    reported = run([tmp_path / "a.jsonl"], tmp_path / "out", append_eod=True)
    assert reasons(reported) == {"--append-eod, end-of-document token"}
    interrupted(tmp_path, append_eod=True)
    monkeypatch.setattr(ByteTokenizer, "eod_id", 9)
    reported = run([tmp_path / "a.jsonl"], tmp_path / "out", append_eod=True)
    assert reasons(reported) == {"end-of-document token"}
    assert {document[-1] for document in documents_of(tmp_path / "out_text_document")} == {9}
    interrupted(tmp_path)
    os.utime(write_lines(tmp_path / "a.jsonl", TEXTS[::-1]), (1, 1))
    assert reasons(run([tmp_path / "a.jsonl"], tmp_path / "out")) == {"input"}
    assert texts_of(tmp_path / "out") == TEXTS[::-1]


@pytest.mark.parametrize("step", range(7))
def test_a_crash_while_publishing_leaves_no_mixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    for name in ("a", "b"):
        # Documents and tokens are equal in number and differ only in content.
        (tmp_path / f"{name}.jsonl").write_text(f'{{"text": "{name * 9}"}}\n{{"text": "{name}"}}\n')
    prefix = tmp_path / "out_text_document"
    run([tmp_path / "a.jsonl"], tmp_path / "out")
    steps = iter(range(step))

    def crash_in_time(function: Any) -> Any:
        def counted(path: Any, *arguments: Any, **others: Any) -> Any:
            target = Path(arguments[0]) if arguments else path
            if target.parent == tmp_path and ".partial" not in target.name and next(steps, None) is None:
                raise Stopped
            return function(path, *arguments, **others)

        return counted

    with monkeypatch.context() as patched, pytest.raises(Stopped) if step < 6 else contextlib.nullcontext():
        patched.setattr(os, "replace", crash_in_time(os.replace))
        patched.setattr(Path, "unlink", crash_in_time(Path.unlink))
        run([tmp_path / "b.jsonl"], tmp_path / "out")
    # The old sidecar is deleted first, then the index and the mask; then .bin, .idx and .json are published.
    try:
        found = bytes(IndexedDataset(prefix).tokens.tolist())
        check_tokenizer([IndexedDataset(prefix)], ByteTokenizer())
    except UserError:
        found = b""
    assert found == (b"a" * 10 if step < 2 else b"" if step < 5 else b"b" * 10)
    run([tmp_path / "b.jsonl"], tmp_path / "out")
    assert bytes(IndexedDataset(prefix).tokens.tolist()) == b"b" * 10
    check_tokenizer([IndexedDataset(prefix)], ByteTokenizer())
    assert not list(tmp_path.glob("*.partial")) and not (tmp_path / ".out.partial").exists()


@pytest.mark.parametrize(
    ("program", "kibibytes", "file"),
    quick_share(
        [
            ("preprocess_data", 256, ".out.partial/00000_text.bin"),
            ("preprocess_data", 2560, "out_text_document.bin"),
            ("train_tokenizer", 4, "out.model"),
        ],
        3,
    ),
)
def test_a_full_disk(tmp_path: Path, program: str, kibibytes: int, file: str) -> None:
    """The message names the file and what helps; a shard that is finished is kept."""
    disk = tmp_path / "disk"
    disk.mkdir()
    inside = ["unshare", "--user", "--map-root-user", "--mount", "bash", "-c"]
    mount = f"mount -t tmpfs -o size={kibibytes}k none {disk}"
    if subprocess.run([*inside, mount], capture_output=True).returncode:
        pytest.skip("no mounts in user namespaces")
    write_lines(tmp_path / "a.jsonl", [f"document {number} of some, to fill a disk" for number in range(20_000)])
    words = {
        "preprocess_data": "--output-prefix {}/out --tokenizer-type ByteTokenizer",
        "train_tokenizer": "--model-prefix {}/out --vocab-size 300",
    }[program].format(disk)
    command = f"{sys.executable} tools/{program}.py --input {tmp_path}/a.jsonl {words}"
    done = run_command([*inside, f"{mount} && {command}"], 60)
    assert (done.returncode, done.stderr.splitlines()[-1]) == (
        2,
        f"error: {disk}/{file}: No space left on device: free some space, or write to another disk, and run the same "
        "command again",
    )
    assert ("keeps 1 finished shards" in done.stdout) == (kibibytes == 2560)


def test_concurrent_runs_with_the_same_output_are_rejected(tmp_path: Path) -> None:
    interrupted(tmp_path)
    with open(tmp_path / ".out.partial" / "lock", "a") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="--output-prefix .*out: another process is writing there"):
            run([tmp_path / "a.jsonl"], tmp_path / "out")
    assert run([tmp_path / "a.jsonl"], tmp_path / "out")[0].startswith("resuming")

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from megatron_ladder.cli import preprocess_data, train_tokenizer
from megatron_ladder.data.indexed import IndexedDataset
from megatron_ladder.data.preprocess import PreprocessOptions, preprocess
from megatron_ladder.data.reading.find import find_sources
from megatron_ladder.data.reading.protocol import GROUP_BYTES, Reading
from megatron_ladder.data.sidecar import Sidecar, read_sidecar
from megatron_ladder.data.tokenizer_training import TextSample
from megatron_ladder.data.tokenizers import HuggingFaceTokenizer, SentencePieceTokenizer, Tokenizer
from megatron_ladder.errors import UserError
from megatron_ladder.progress import ProgressBar
from tests.helpers.patience import patient

ROOT = Path(__file__).resolve().parents[3]


def documents_of(prefix: Path) -> list[list[int]]:
    dataset = IndexedDataset(prefix)
    return [dataset.document(number).tolist() for number in range(len(dataset))]


def run(
    inputs: list[Path],
    prefix: Path,
    tokenizer: Tokenizer,
    append_eod: bool = False,
    json_keys: tuple[str, ...] = ("text",),
    workers: int = 1,
    report: Callable[[str], None] = lambda line: None,
) -> dict[str, Sidecar]:
    options = PreprocessOptions(workers=workers, report=report)
    return preprocess(inputs, prefix, tokenizer, append_eod, Reading(json_keys), options)


def test_json_lines_and_plain_text(tmp_path: Path, sentencepiece_tokenizer: SentencePieceTokenizer) -> None:
    lines = tmp_path / "a.jsonl"
    lines.write_bytes(
        b'\xef\xbb\xbf{"text": "one\\ttwo", "n": 1}\r\n\n  \n{"text": ""}\n{"text": "caf\\u00e9 \\ud83c\\udf89"}'
    )
    code = tmp_path / "b.py"
    code.write_bytes(b"\xef\xbb\xbfdef f():\r\n\treturn 1\n")
    (tmp_path / "empty.txt").write_text("")
    sidecars = run(
        [lines, tmp_path / "empty.txt", code],
        tmp_path / "out",
        sentencepiece_tokenizer,
        append_eod=True,
    )
    texts = ["one\ttwo", "café 🎉", "def f():\r\n\treturn 1\n"]
    expected = [[*sentencepiece_tokenizer.encode(text), 2] for text in texts]
    assert documents_of(tmp_path / "out_text_document") == expected
    sidecar = sidecars["text"]
    assert read_sidecar(tmp_path / "out_text_document") == sidecar
    assert (sidecar.documents, sidecar.tokens) == (3, sum(map(len, expected)))
    assert sidecar.largest_id == max(map(max, expected))
    assert (sidecar.vocab_size, sidecar.eod_id, sidecar.append_eod) == (600, 2, True)
    assert sidecar.tokenizer_sha256 == sentencepiece_tokenizer.sha256


def test_a_data_set_for_each_key(tmp_path: Path, hugging_face_tokenizer: HuggingFaceTokenizer) -> None:
    lines = tmp_path / "a.jsonl"
    lines.write_text('{"body": "first", "title": "1"}\n{"body": "second", "title": ""}\n')
    run([lines], tmp_path / "out", hugging_face_tokenizer, json_keys=("body", "title"))
    encode = hugging_face_tokenizer.encode
    assert documents_of(tmp_path / "out_body_document") == [encode("first"), encode("second")]
    assert documents_of(tmp_path / "out_title_document") == [encode("1")]


def big_file(path: Path, span_bytes: int, bad_line: int | None = None) -> list[str]:
    """Write JSON lines of about four spans, one line longer than a span, and return the texts."""
    texts = [f"document {number} " + "word " * (span_bytes // 2500) for number in range(1400)]
    texts[700] = "long " * (span_bytes // 4)
    with open(path, "w") as file:
        for number, text in enumerate(texts, start=1):
            file.write("{oops\n" if number == bad_line else json.dumps({"text": text}) + "\n")
    return texts


class RecordedProgress(ProgressBar):
    """Records the amounts that are displayed."""

    instances: ClassVar[list["RecordedProgress"]] = []

    def __init__(self, description: str, total: float | None, done: float) -> None:
        super().__init__(description, total, done=done)
        self.total, self.done, self.documents = total, done, 0
        self.instances.append(self)

    def advance(self, amount: float, **notes: Any) -> None:
        self.done += amount
        self.documents = notes["documents"]
        super().advance(amount, **notes)


def test_workers_keep_the_order(
    tmp_path: Path, hugging_face_tokenizer: HuggingFaceTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("reading.files.SPAN_BYTES", "reading.find.GROUP_BYTES", "preprocess.GROUP_BYTES"):
        monkeypatch.setattr(f"megatron_ladder.data.{name}", 20_000)
    texts = big_file(tmp_path / "big.jsonl", 20_000)
    assert (tmp_path / "big.jsonl").stat().st_size > 4 * 20_000
    with monkeypatch.context() as patch:
        patch.setattr("megatron_ladder.data.preprocess.ProgressBar", RecordedProgress)
        run([tmp_path / "big.jsonl"], tmp_path / "one", hugging_face_tokenizer)
    (progress,) = RecordedProgress.instances
    assert progress.total == progress.done == (tmp_path / "big.jsonl").stat().st_size and progress.documents == 1400
    run([tmp_path / "big.jsonl"], tmp_path / "two", hugging_face_tokenizer, workers=2)
    for suffix in ("bin", "idx", "json"):
        paths = [tmp_path / f"{name}_text_document.{suffix}" for name in ("one", "two")]
        assert paths[0].read_bytes() == paths[1].read_bytes()
    assert documents_of(tmp_path / "one_text_document") == hugging_face_tokenizer.encode_batch(texts)


@pytest.mark.parametrize(
    ("content", "line", "reason"),
    [
        (b'{"text": "a"}\n{"text": \n', 2, "not JSON: Expecting value"),
        (b'{"text": "a"}\n\n{"text": "\xff"}\n', 3, "byte 0xff is not UTF-8"),
        (b'{"text": "a"}\n["a"]', 2, "expected a JSON object, found list"),
        (b'{"title": "a", "id": 1}', 1, r"no key 'text' \(keys found: 'title', 'id'\): .*--json-keys"),
        (b'{"text": null}', 1, "expected a text under 'text', found NoneType"),
        (b'{"text": "a"}\n{"text": "\\uD83C"}', 2, r"\\ud83c under 'text' is half of a surrogate pair"),
        (b"[" * 100_000, 1, "unreadable JSON"),
    ],
)
def test_a_bad_line_is_located_and_leaves_no_files(
    tmp_path: Path, sentencepiece_tokenizer: SentencePieceTokenizer, content: bytes, line: int, reason: str
) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(content)
    with pytest.raises(UserError, match=rf"bad\.jsonl:{line}: {reason}"):
        run([path], tmp_path / "out", sentencepiece_tokenizer)
    assert os.listdir(tmp_path) == ["bad.jsonl"]


def test_an_error_keeps_the_previous_output(tmp_path: Path, sentencepiece_tokenizer: SentencePieceTokenizer) -> None:
    good, bad = tmp_path / "good.txt", tmp_path / "bad.txt"
    good.write_text("something")
    bad.write_bytes(b"line 1\nline 2\n\xe9t\xe9")
    run([good], tmp_path / "out", sentencepiece_tokenizer)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(UserError, match=r"bad\.txt:3: byte 0xe9 is not UTF-8"):
        run([good, bad], tmp_path / "out", sentencepiece_tokenizer)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_the_sidecar_is_published_last(
    tmp_path: Path, sentencepiece_tokenizer: SentencePieceTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_text("something")
    run([tmp_path / "a.txt"], tmp_path / "out", sentencepiece_tokenizer)
    seen = []
    rename = os.replace

    def watched(source: Path, target: Path) -> None:
        seen.append((target.suffix, (tmp_path / "out_text_document.json").exists()))
        rename(source, target)

    monkeypatch.setattr(os, "replace", watched)
    run([tmp_path / "a.txt"], tmp_path / "out", sentencepiece_tokenizer)
    assert seen == [(".bin", False), (".idx", False), (".json", False)]


@pytest.mark.parametrize("content", ["", "\n\n", '{"text": ""}\n'])
def test_an_input_without_documents_leaves_no_files(
    tmp_path: Path, sentencepiece_tokenizer: SentencePieceTokenizer, content: str
) -> None:
    (tmp_path / "none.jsonl").write_text(content)
    with pytest.raises(UserError, match=r"--input .*none\.jsonl: no document with a non-empty 'text'"):
        run([tmp_path / "none.jsonl"], tmp_path / "out", sentencepiece_tokenizer)
    assert os.listdir(tmp_path) == ["none.jsonl"]


def test_all_unreadable_inputs_are_reported(tmp_path: Path, sentencepiece_tokenizer: SentencePieceTokenizer) -> None:
    (tmp_path / "plain.txt").write_text("a")
    inputs = [tmp_path / "missing", tmp_path, tmp_path / "plain.txt"]
    with pytest.raises(UserError) as caught:
        run(inputs, tmp_path / "out", sentencepiece_tokenizer, json_keys=("body",))
    missing, directory, plain = caught.value.messages
    assert "missing: no such file" in missing and "is a directory" in directory and "no keys body" in plain
    with pytest.raises(UserError, match="--output-prefix .*plain.txt/out: cannot be written"):
        run([inputs[2]], tmp_path / "plain.txt" / "out", sentencepiece_tokenizer)


def test_a_command_line_with_two_workers_and_a_bad_line(
    tmp_path: Path, sentencepiece_tokenizer: SentencePieceTokenizer
) -> None:
    big_file(tmp_path / "big.jsonl", GROUP_BYTES, bad_line=1300)
    command = [
        sys.executable,
        str(ROOT / "tools" / "preprocess_data.py"),
        "--input",
        str(tmp_path / "big.jsonl"),
    ]
    command += ["--output-prefix", str(tmp_path / "out"), "--tokenizer-type", "SentencePieceTokenizer"]
    command += ["--tokenizer-model", str(sentencepiece_tokenizer.files[0]), "--workers", "2"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=patient(60), check=False)
    assert ended.returncode == 2
    *progress, error = ended.stderr.splitlines()
    assert error.startswith(f"error: {tmp_path}/big.jsonl:1300: not JSON: Expecting property name")
    # A slow machine prints its progress first.
    assert all(line.startswith("tokenized:") for line in progress)
    assert os.listdir(tmp_path) == ["big.jsonl"]


def test_command_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text(Path(np.__file__).read_text())
    train = [
        "--input",
        str(tmp_path / "a.txt"),
        "--vocab-size",
        "400",
        "--model-prefix",
        str(tmp_path / "m.x"),
    ]
    train_tokenizer.main(train)
    run = ["--input", str(tmp_path / "a.txt"), "--output-prefix", str(tmp_path / "out")]
    run += ["--tokenizer-type", "Llama2Tokenizer", "--tokenizer-model", str(tmp_path / "m.x.model")]
    preprocess_data.main([*run, "--append-eod"])
    assert SentencePieceTokenizer(tmp_path / "m.x.model").vocab_size == 400
    tokens = IndexedDataset(tmp_path / "out_text_document").tokens
    assert tokens[-1] == 2
    assert f"out_text_document: 1 documents, {len(tokens):,} tokens" in capsys.readouterr().out
    with pytest.raises(UserError) as caught:
        preprocess_data.main([*run, "--workers", "0", "--json-keys", "a/b", "a/b"])
    assert len(caught.value.messages) == 3


def test_a_training_sample_covers_the_whole_input(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("".join(f"{'abcdefghij' * 10} {number:06d}\n" for number in range(20_000)))
    sources = find_sources([tmp_path / "a.txt"], Reading())
    sample = TextSample(sources, Reading(), (tmp_path / "a.txt").stat().st_size // 100, in_lines=True)
    numbers = [int(line.split()[-1]) for line in sample]
    assert len(numbers) == 200 and len(np.unique(np.diff(numbers))) == 1

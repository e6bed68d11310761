import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from megatron_ladder.cli import preprocess_data
from megatron_ladder.data.indexed import HashedFile, IndexedDataset
from megatron_ladder.data.partial import Partial
from megatron_ladder.data.preprocess import PreprocessOptions, _InputPosition, preprocess
from megatron_ladder.data.reading.protocol import Reading
from megatron_ladder.data.sidecar import check_sidecar, read_sidecar
from megatron_ladder.data.tokenizers import ByteTokenizer, SentencePieceTokenizer
from megatron_ladder.errors import UserError
from tests.helpers.patience import patient

ROOT = Path(__file__).resolve().parents[3]
SPAN = 2000
SUFFIXES = ("bin", "idx", "json")


@pytest.fixture(autouse=True)
def small_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("reading.files.SPAN_BYTES", "reading.find.GROUP_BYTES", "preprocess.GROUP_BYTES"):
        monkeypatch.setattr(f"megatron_ladder.data.{name}", SPAN)
    monkeypatch.setattr("megatron_ladder.data.preprocess._COMMIT_SECONDS", 0)


def write_lines(path: Path, first: int = 0) -> list[str]:
    """Write about ten spans and return their texts."""
    texts = [f"document {number} of some" for number in range(first, first + 500)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return texts


def run(inputs: list[Path], prefix: Path, append_eod: bool = False, **reading: int) -> list[str]:
    """Preprocess bytes and return the messages."""
    reported: list[str] = []
    options = PreprocessOptions(report=reported.append)
    preprocess(inputs, prefix, ByteTokenizer(), append_eod, Reading(**reading), options)
    return reported


def files_of(prefix: Path) -> list[bytes]:
    return [Path(f"{prefix}_text_document.{suffix}").read_bytes() for suffix in SUFFIXES]


@pytest.fixture
def interrupt(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Raise KeyboardInterrupt in the group at index 0 of the list; index 1 counts groups."""
    at = [-1, 0]
    take = _InputPosition.advance

    def interrupted(self: _InputPosition, *arguments: object) -> list[str]:
        at[1] += 1
        reported = take(self, *arguments)  # type: ignore[arg-type]
        if self.groups == at[0]:
            raise KeyboardInterrupt
        return reported

    monkeypatch.setattr(_InputPosition, "advance", interrupted)
    yield at


@pytest.mark.parametrize("stopped_at", [1, 2, 7])
def test_an_interrupted_run_resumes(tmp_path: Path, interrupt: list[int], stopped_at: int) -> None:
    inputs = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for number, path in enumerate(inputs):
        write_lines(path, 1000 * number)
    run(inputs, tmp_path / "whole")
    groups, interrupt[1] = interrupt[1], 0
    assert groups > 15
    interrupt[0] = stopped_at
    with pytest.raises(KeyboardInterrupt):
        run(inputs, tmp_path / "out")
    assert not list(tmp_path.glob("out_*")) and (tmp_path / ".out.partial").is_dir()
    interrupt[:] = [-1, 0]
    reported = run(inputs, tmp_path / "out")
    # The interrupted group was counted but not written, so it is repeated.
    assert interrupt[1] == groups - stopped_at + 1
    assert any(line.startswith("resuming after") for line in reported) == (stopped_at > 1)
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")
    assert not (tmp_path / ".out.partial").exists()


def test_a_killed_run_resumes(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl")
    run([tmp_path / "a.jsonl"], tmp_path / "whole")
    script = f"""
import os, signal, sys
from pathlib import Path
from megatron_ladder.data import partial, preprocess as module, reading
from megatron_ladder.data.reading import files, find
from megatron_ladder.data.tokenizers import ByteTokenizer
files.SPAN_BYTES = find.GROUP_BYTES = module.GROUP_BYTES = {SPAN}
module._COMMIT_SECONDS = 0
commit = partial.Partial.commit
def killed(self, place, **others):
    commit(self, place, **others)
    if place["groups"] == 4:
        os.kill(os.getpid(), signal.SIGKILL)
if __name__ == "__main__":
    partial.Partial.commit = killed
    module.preprocess([Path("a.jsonl").absolute()], Path("out").absolute(), ByteTokenizer(),
                      options=module.PreprocessOptions(workers=2))
"""
    (tmp_path / "killed.py").write_text(script)
    command = [sys.executable, str(tmp_path / "killed.py")]
    ended = subprocess.run(
        command,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=patient(60),
    )
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    reported = run([tmp_path / "a.jsonl"], tmp_path / "out")
    assert any("of an earlier run" in line for line in reported)
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")


def begin(tmp_path: Path, interrupt: list[int], append_eod: bool = False) -> Path:
    """Interrupt a run in its fifth group."""
    write_lines(tmp_path / "a.jsonl")
    interrupt[0] = 5
    with pytest.raises(KeyboardInterrupt):
        run([tmp_path / "a.jsonl"], tmp_path / "out", append_eod)
    interrupt[0] = -1
    return tmp_path / ".out.partial"


def test_changes_since_the_interruption_are_reported(tmp_path: Path, interrupt: list[int]) -> None:
    begin(tmp_path, interrupt)
    reported = run([tmp_path / "a.jsonl"], tmp_path / "out", append_eod=True)
    changed = "an earlier run was started with other"
    assert f"{changed} --append-eod, end-of-document token: starting from scratch" in reported
    begin(tmp_path, interrupt, append_eod=True)
    os.utime(tmp_path / "a.jsonl", (1, 1))
    texts = write_lines(tmp_path / "a.jsonl", 7000)
    reported = run([tmp_path / "a.jsonl"], tmp_path / "out")
    assert f"{changed} input, --append-eod: starting from scratch" in reported
    dataset = IndexedDataset(tmp_path / "out_text_document")
    assert [bytes(dataset.document(number).tolist()).decode() for number in range(len(dataset))] == texts


def test_another_tokenizer_starts_from_scratch(
    tmp_path: Path, interrupt: list[int], sentencepiece_tokenizer: SentencePieceTokenizer
) -> None:
    begin(tmp_path, interrupt)
    reported: list[str] = []
    options = PreprocessOptions(report=reported.append)
    preprocess([tmp_path / "a.jsonl"], tmp_path / "out", sentencepiece_tokenizer, options=options)
    assert "an earlier run was started with other tokenizer: starting from scratch" in reported


def test_another_end_of_document_token_starts_from_scratch(
    tmp_path: Path, interrupt: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test a tokenizer directory that names another token, which is not part of its checksum."""
    begin(tmp_path, interrupt, append_eod=True)
    monkeypatch.setattr(ByteTokenizer, "eod_id", 9)
    reported = run([tmp_path / "a.jsonl"], tmp_path / "out", append_eod=True)
    assert "an earlier run was started with other end-of-document token: starting from scratch" in reported
    dataset = IndexedDataset(tmp_path / "out_text_document")
    assert {int(dataset.document(number)[-1]) for number in range(len(dataset))} == {9}
    begin(tmp_path, interrupt)
    monkeypatch.setattr(ByteTokenizer, "eod_id", 8)
    assert any("of an earlier run" in line for line in run([tmp_path / "a.jsonl"], tmp_path / "out"))


@pytest.mark.parametrize("damage", ["text.bin", "text.lengths"])
def test_damaged_progress_is_discarded(tmp_path: Path, interrupt: list[int], damage: str) -> None:
    folder = begin(tmp_path, interrupt)
    content = bytearray((folder / damage).read_bytes())
    content[10] ^= 1
    (folder / damage).write_bytes(content)
    reported = run([tmp_path / "a.jsonl"], tmp_path / "out")
    assert any("are damaged: starting from scratch" in line for line in reported)
    run([tmp_path / "a.jsonl"], tmp_path / "whole")
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")


def test_data_after_the_last_commit_is_truncated(tmp_path: Path, interrupt: list[int]) -> None:
    folder = begin(tmp_path, interrupt)
    for name, tail in (("text.bin", b"more"), ("text.lengths", b"more"), ("journal", b'{"place": {"groups"')):
        with open(folder / name, "ab") as file:
            file.write(tail)
    interrupt[0] = 8
    with pytest.raises(KeyboardInterrupt):
        run([tmp_path / "a.jsonl"], tmp_path / "out")
    interrupt[0] = -1
    assert any(line.startswith("resuming after") for line in run([tmp_path / "a.jsonl"], tmp_path / "out"))
    run([tmp_path / "a.jsonl"], tmp_path / "whole")
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")


class Crash(BaseException):
    """Simulates a power failure."""


@pytest.mark.parametrize("step", range(8))
def test_a_crash_while_publishing_leaves_no_mixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    for name in ("a", "b"):
        # Documents and tokens are equal in number and differ only in content.
        (tmp_path / f"{name}.jsonl").write_text(f'{{"text": "{name * 9}"}}\n{{"text": "{name}"}}\n')
    prefix = tmp_path / "out_text_document"
    run([tmp_path / "a.jsonl"], tmp_path / "out")
    left = [step]

    def crash_in_time(function: object) -> object:
        def counted(*arguments: object, **others: object) -> object:
            if left[0] == 0:
                raise Crash
            left[0] -= 1
            return function(*arguments, **others)  # type: ignore[operator]

        return counted

    crashed = False
    with monkeypatch.context() as patched:
        publishing = Partial.publish

        def publish(self: Partial, sidecars: object) -> None:
            # Until then the previous files are unchanged.
            patched.setattr(os, "replace", crash_in_time(os.replace))
            patched.setattr(Path, "unlink", crash_in_time(Path.unlink))
            publishing(self, sidecars)  # type: ignore[arg-type]

        patched.setattr(Partial, "publish", publish)
        try:
            run([tmp_path / "b.jsonl"], tmp_path / "out")
        except Crash:
            crashed = True
    assert crashed == (step < 7)
    try:
        found = bytes(IndexedDataset(prefix).tokens.tolist())
        check_sidecar(IndexedDataset(prefix), ByteTokenizer())
    except UserError:
        found = b""
    # The old sidecar is deleted first, then the index; the new tokens are published first, then the index.
    assert found == (b"a" * 10 if step < 2 else b"" if step < 5 else b"b" * 10)
    reported = run([tmp_path / "b.jsonl"], tmp_path / "out")
    assert ("an earlier run finished without publishing its output: publishing it" in reported) == crashed
    assert bytes(IndexedDataset(prefix).tokens.tolist()) == b"b" * 10
    check_sidecar(IndexedDataset(prefix), ByteTokenizer())
    assert not (tmp_path / ".out.partial").exists()


def test_concurrent_runs_with_the_same_output_are_rejected(tmp_path: Path, interrupt: list[int]) -> None:
    folder = begin(tmp_path, interrupt)
    script = "import fcntl, sys; file = open(sys.argv[1], 'a'); fcntl.flock(file, 2); print(flush=True); input()"
    command = [sys.executable, "-c", script, str(folder / "journal")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with pytest.raises(UserError, match="--output-prefix .*out: another process is writing there"):
            run([tmp_path / "a.jsonl"], tmp_path / "out")
        other.communicate(b"\n")
    assert any(line.startswith("resuming after") for line in run([tmp_path / "a.jsonl"], tmp_path / "out"))


def test_checksums_are_those_of_the_files(tmp_path: Path) -> None:
    import xxhash

    write_lines(tmp_path / "a.jsonl")
    run([tmp_path / "a.jsonl"], tmp_path / "out", append_eod=True)
    prefix = tmp_path / "out_text_document"
    sidecar = read_sidecar(prefix)
    assert sidecar is not None
    for suffix, checksum in (("bin", sidecar.bin_checksum), ("idx", sidecar.idx_checksum)):
        content = Path(f"{prefix}.{suffix}").read_bytes()
        assert checksum == f"xxh3_128:{xxhash.xxh3_128(content).hexdigest()}"
    values = json.loads(Path(f"{prefix}.json").read_bytes())
    for name in ("bin_checksum", "idx_checksum", "skipped"):
        del values[name]
    Path(f"{prefix}.json").write_text(json.dumps(values))
    older = read_sidecar(prefix)
    assert older is not None and (older.tokens, older.bin_checksum) == (sidecar.tokens, None)


def test_the_index_is_written_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_lines(tmp_path / "a.jsonl")
    run([tmp_path / "a.jsonl"], tmp_path / "one")
    monkeypatch.setattr("megatron_ladder.data.indexed._INDEX_BLOCK", 70)
    run([tmp_path / "a.jsonl"], tmp_path / "many")
    assert files_of(tmp_path / "one") == files_of(tmp_path / "many")


BAD = b'{"text": "one"}\n{"text": 1}\n\n{"text": "two"}\n\xff\n{"text": "three"}'


def test_bad_lines_are_skipped_counted_and_listed(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_bytes(BAD)
    inputs = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    reported = run(inputs, tmp_path / "out", max_bad=4)
    skipped = [line for line in reported if line.startswith("skipped")]
    assert [line.split(": ")[0] for line in skipped] == [
        f"skipped {tmp_path}/{place}" for place in ("a.jsonl:2", "a.jsonl:5", "b.jsonl:2", "b.jsonl:5")
    ]
    sidecar = read_sidecar(tmp_path / "out_text_document")
    assert sidecar is not None and (sidecar.documents, sidecar.skipped) == (6, 4)
    with pytest.raises(UserError, match=r"b\.jsonl:5: .*\(3 before it were skipped: --skip-bad-lines 3\)"):
        run(inputs, tmp_path / "few", max_bad=3)
    assert not [name for name in os.listdir(tmp_path) if "few" in name]


def test_lines_are_counted_over_spans_and_interruptions(tmp_path: Path, interrupt: list[int]) -> None:
    write_lines(tmp_path / "a.jsonl")
    lines = (tmp_path / "a.jsonl").read_bytes().split(b"\n")
    lines[450] = b"oops"
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    interrupt[0] = 5
    with pytest.raises(KeyboardInterrupt):
        run([tmp_path / "a.jsonl"], tmp_path / "out")
    interrupt[0] = -1
    with pytest.raises(UserError, match=r"a\.jsonl:451: not JSON: Expecting value at column 1"):
        run([tmp_path / "a.jsonl"], tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == ["a.jsonl"]


def test_a_large_text_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x" * (2 << 20))
    (tmp_path / "b.txt").write_text("small")
    command = f"--input {tmp_path}/?.txt --output-prefix {tmp_path}/out --tokenizer-type ByteTokenizer".split()
    with pytest.raises(UserError, match=r"a\.txt:1: 2,097,152 bytes .*--max-document-megabytes, now 1"):
        preprocess_data.main([*command, "--max-document-megabytes", "1"])
    preprocess_data.main([*command, "--max-document-megabytes", "1", "--skip-bad-lines", "1"])
    assert np.array_equal(IndexedDataset(tmp_path / "out_text_document").tokens, list(b"small"))


def test_a_reopened_file_continues_after_its_durable_part(tmp_path: Path) -> None:
    file = HashedFile(tmp_path / "f")
    file.append(b"abc")
    size, checksum = file.size, file.checksum
    file.append(np.arange(3, dtype="<u2"))
    file.close()
    again = HashedFile.reopen(tmp_path / "f", size, checksum)
    assert again is not None
    again.append(b"d")
    again.sync()
    assert (tmp_path / "f").read_bytes() == b"abcd"
    again.close()
    assert HashedFile.reopen(tmp_path / "f", 5, checksum) is None
    assert HashedFile.reopen(tmp_path / "g", 0, checksum) is None

import os
import sysconfig
from pathlib import Path

import pytest

from megatron_ladder.cli import prepare_corpus
from megatron_ladder.data.corpus import _library_sources, _limit_bytes
from megatron_ladder.data.indexed import IndexedDataset
from megatron_ladder.data.tokenizers import SentencePieceTokenizer
from megatron_ladder.errors import UserError

LIBRARY = Path(sysconfig.get_paths()["stdlib"])


def test_sources_are_the_library_without_tests() -> None:
    names = [path.relative_to(LIBRARY).as_posix() for path in _library_sources(LIBRARY)]
    assert {"argparse.py", "json/decoder.py", "asyncio/tasks.py"} <= set(names)
    assert "pydoc_data/topics.py" not in names
    folders = {part for name in names for part in name.split("/")[:-1]}
    assert not folders & {"site-packages", "dist-packages", "test", "tests", "idle_test"}


def test_files_that_are_not_utf8_are_excluded(tmp_path: Path) -> None:
    (tmp_path / "good.py").write_text("é", encoding="utf-8")
    (tmp_path / "latin.py").write_text("é", encoding="latin-1")
    assert _library_sources(tmp_path) == [tmp_path / "good.py"]


def test_limit_keeps_order_and_size(tmp_path: Path) -> None:
    paths = [tmp_path / f"{number:02d}.py" for number in range(40)]
    for path in paths:
        path.write_text("x" * 100)
    chosen = _limit_bytes(paths, tmp_path, 1050)
    assert len(chosen) == 10 and chosen == sorted(chosen) and chosen != paths[:10]
    assert len(_limit_bytes(paths, tmp_path, 1)) == 1


def test_corpus_is_made_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--output-dir", str(tmp_path / "c"), "--vocab-size", "800", "--max-megabytes", "0.5"]
    prepare_corpus.main(arguments)
    tokenizer = SentencePieceTokenizer(tmp_path / "c" / "tokenizer.model")
    valid = IndexedDataset(tmp_path / "c" / "valid_text_document")
    topics = (LIBRARY / "pydoc_data" / "topics.py").read_text(encoding="utf-8")
    assert len(valid) == 1
    assert tokenizer.decode(valid.document(0).tolist()) == topics
    assert valid.document(0)[-1] == tokenizer.eod_id
    train = IndexedDataset(tmp_path / "c" / "train_text_document")
    assert len(train) > 20 and 100_000 < len(train.tokens) < 400_000

    def times() -> dict[str, int]:
        return {name: os.stat(tmp_path / "c" / name).st_mtime_ns for name in os.listdir(tmp_path / "c")}

    before = times()
    prepare_corpus.main(arguments)
    assert times() == before
    assert capsys.readouterr().out.count(" exists") == 3

    (tmp_path / "c" / "valid_text_document.json").unlink()
    prepare_corpus.main(arguments)
    assert {name for name, time in times().items() if time != before[name]} == {
        f"valid_text_document.{suffix}" for suffix in ("bin", "idx", "json")
    }


def test_other_settings_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "corpus.json").write_text('{"vocab_size": 4096, "max_megabytes": null}')
    with pytest.raises(UserError, match="made with --vocab-size 4096, not with --vocab-size 500: give another"):
        prepare_corpus.main(["--output-dir", str(tmp_path), "--vocab-size", "500"])
    with pytest.raises(UserError) as caught:
        prepare_corpus.main(["--output-dir", str(tmp_path), "--vocab-size", "0", "--max-megabytes", "-1"])
    assert len(caught.value.messages) == 2

"""Files of an imported model in checkpoints: chat template, special token ids, generation settings."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from huggingface_hub import ModelCard

from megatron_ladder.blueprint.tensors import model_tensors
from megatron_ladder.checkpoint.format import Checkpoint
from megatron_ladder.comm.group import CommGroup
from megatron_ladder.config.sections import CheckpointConfig, OptimizerConfig
from megatron_ladder.convert.small_files import model_card
from megatron_ladder.data.chat_template import read_chat_template
from megatron_ladder.data.indexed import IndexedDataset, IndexedDatasetWriter, Sidecar, token_dtype, write_sidecar
from megatron_ladder.data.loader import Sources
from megatron_ladder.generate.loading import open_model
from megatron_ladder.tokenizers.kinds import ByteTokenizer, Tokenizer, load_tokenizer
from megatron_ladder.train.checkpoints import CheckpointSaver
from megatron_ladder.train.record import RunRecord
from megatron_ladder.train.resume import has_another_tokenizer
from tests.helpers.tokenizer_copies import write_words
from tests.unit.checkpoint import tiny_training
from tests.unit.convert.hand_made import CONFIG, write_directory
from tests.unit.convert.saved_models import convert, export, small_config
from tests.unit.generate.tiny_model import write_checkpoint_with_tokenizer

EXTRA_FILES = {
    "tokenizer_config.json": '{"eos_token": "<eos>", "tokenizer_class": "PreTrainedTokenizerFast"}',
    "chat_template.jinja": "{{ messages }}",
    "generation_config.json": '{"eos_token_id": [0, 2], "temperature": 0.5}',
}
TERMS = {
    "LICENSE": "terms",
    "Notice.txt": "thanks",
    "README.md": "---\nlicense: other\nlicense_name: ours\n---\n# Name\n",
}


@pytest.fixture
def imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of checkpoints with an imported model, next to its Hugging Face directory `hf`."""
    directory = write_directory(tmp_path / "hf", {**CONFIG, "eos_token_id": 5, "pad_token_id": 3})
    write_words(directory / "tokenizer.json", "<eos>", "[UNK]", "a", "b")
    for name, text in (EXTRA_FILES | TERMS).items():
        (directory / name).write_text(text)
    convert("import", "--hf", directory, "--save", tmp_path / "imported")
    # The tiny state receives the tensors of that model.
    config = open_model(tmp_path / "imported", None, None).config
    shapes = {tensor.name: tensor.shape for tensor in model_tensors(config)}
    monkeypatch.setattr(tiny_training, "SHAPES", shapes)
    return tmp_path / "imported"


def train(
    load: Path, save: Path, tokenizer: Tokenizer | None, finetune: bool, iteration: int, sources: Any = None
) -> Path:
    """Run a training that loads, saves after a step and at its end; return its last checkpoint."""
    opened = Checkpoint.open(load)
    run = SimpleNamespace(
        checkpoint=CheckpointConfig(load=load, save=save, finetune=finetune),
        loads_only_weights=finetune,
        logging=SimpleNamespace(skip_train=False),
        optimizer=OptimizerConfig(lr=1.0),
        training=SimpleNamespace(train_iters=9),
        model=SimpleNamespace(to_dict=lambda: opened.manifest["model"], mtp_num_layers=0),
        to_dict=dict,
    )
    trainer: Any = SimpleNamespace(
        run=run,
        mesh=SimpleNamespace(world=CommGroup.alone(), data=None),
        model=SimpleNamespace(stack=SimpleNamespace()),
        engine=SimpleNamespace(optimizer=tiny_training.TinyState(1)),
        guard=SimpleNamespace(set_state=lambda stored: None, state=dict),
    )
    inputs: Any = SimpleNamespace(
        sources=sources or Sources(None, {}),
        tokenizer=tokenizer,
        stream=None,
        checkpoint=opened,
        data={},
        end_ids=frozenset(),
        answers_end=True,
    )
    with CheckpointSaver(trainer, inputs, RunRecord(None)) as saver:
        saver.resume()
        batches: Any = SimpleNamespace(consumed_samples=4 * iteration)
        saver.save(iteration, batches)
        saver.save(iteration + 1, batches, final=True)
    return Checkpoint.open(save).directory


@pytest.mark.parametrize("given", ["", "hf", "words.json"])
def test_imported_files_are_exported_after_two_runs(imported: Path, tmp_path: Path, given: str) -> None:
    """The runs have no tokenizer, the model's directory, or a copy of only the tokenizer's file."""
    hf = tmp_path / "hf"
    (tmp_path / "words.json").write_bytes((hf / "tokenizer.json").read_bytes())
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": "<eos>"}')
    tokenizer = load_tokenizer("HuggingFaceTokenizer", tmp_path / given) if given else None
    train(imported, tmp_path / "run", tokenizer, True, 1)
    directory = train(tmp_path / "run", tmp_path / "again", tokenizer, False, 2)
    assert Checkpoint.open(directory).manifest["hugging_face"] == {
        "model_type": "llama",
        "eos_token_id": [0, 2],
        "pad_token_id": 3,
    }
    assert open_model(directory, None, None).eos_ids == {0, 2}
    convert("export", "--load", tmp_path / "again", "--hf", tmp_path / "back")
    for name in (*EXTRA_FILES, "tokenizer.json", "LICENSE", "Notice.txt"):
        assert (tmp_path / "back" / name).read_bytes() == (hf / name).read_bytes(), name
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert config["eos_token_id"] == [0, 2] and config["pad_token_id"] == 3
    card = ModelCard.load(tmp_path / "back" / "README.md")
    assert card.data.to_dict() == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "license": "other",
        "base_model": "hf",
        "license_name": "ours",
    }
    assert "wiring: standard." in card.text and 'from_pretrained("back", dtype="auto")' in card.text
    assert 'tokenizer = AutoTokenizer.from_pretrained("back")' in card.text
    assert card.text.endswith("check `license`, and replace `base_model` by its full name on the Hub.\n")


def test_an_imported_directory_may_hold_its_tokenizer_in_two_formats(tmp_path: Path) -> None:
    run, _, own = write_checkpoint_with_tokenizer(tmp_path)
    convert("export", "--load", run, "--hf", tmp_path / "hf")
    convert("import", "--hf", tmp_path / "hf", "--save", tmp_path / "imported")
    (tmp_path / "alone").mkdir()
    write_words(tmp_path / "words.json", "</s>", "[UNK]")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "alone" / name).write_bytes((tmp_path / "hf" / name).read_bytes())
    others = [load_tokenizer("HuggingFaceTokenizer", tmp_path / name) for name in ("hf", "alone", "words.json")]
    for directory, has_json in ((run, False), (tmp_path / "imported", True)):
        checkpoint = Checkpoint.open(directory)
        expected = [False, False, not has_json, True]
        assert [has_another_tokenizer(checkpoint, tokenizer) for tokenizer in (own, *others)] == expected
        assert not has_another_tokenizer(checkpoint, None)


def test_the_card_asks_only_for_what_the_model_has(tmp_path: Path) -> None:
    """A model from scratch, without a tokenizer; and one of the Hub, whose full name is known."""
    exported, _ = export(tmp_path, small_config())
    card = ModelCard.load(exported / "README.md")
    assert "base_model" not in card.content and "AutoTokenizer" not in card.content
    assert card.text.endswith("Before you publish the model, set `license`.\n")
    imported = b"---\nbase_model: meta-llama/Llama-2-7b\nlicense: llama2\n---\n"
    parts = {"has_tokenizer": True, "needs_code": False}
    card = ModelCard(model_card(small_config(), "standard", "new", imported, **parts).decode())
    assert card.data.base_model == "meta-llama/Llama-2-7b"
    assert card.text.endswith("Before you publish the model, check `license`.\n")


def test_the_template_of_the_data_is_exported(
    imported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It replaces that of the tokenizer and of the imported model; a second one is reported."""
    datasets = []
    for name in ("first", "second"):
        with IndexedDatasetWriter(tmp_path / name, token_dtype(9), has_loss_mask=True) as writer:
            writer.add_documents(np.arange(3), np.array([3], np.int32), np.ones(3, np.uint8))
            checksums = writer.publish()
        sidecar = Sidecar("HuggingFaceTokenizer", "ab", 4, 0, False, 2, 1, 3, conversations=True, chat_template=name)
        write_sidecar(tmp_path / name, dataclasses.replace(sidecar, **checksums))
        datasets.append(IndexedDataset(tmp_path / name))
    tokenizer = load_tokenizer("HuggingFaceTokenizer", tmp_path / "hf")
    directory = train(imported, tmp_path / "run", tokenizer, True, 1, SimpleNamespace(datasets=datasets))
    found = open_model(directory, None, None).tokenizer
    assert found is not None and read_chat_template(found).source == "first"
    assert f"*** {tmp_path}/second: has another chat template than {tmp_path}/first" in capsys.readouterr().out
    convert("export", "--load", tmp_path / "run", "--hf", tmp_path / "back")
    assert (tmp_path / "back" / "chat_template.jinja").read_text() == "first"


def test_licences_travel_with_another_tokenizer(imported: Path, tmp_path: Path) -> None:
    found = {path.name for path in train(imported, tmp_path / "run", ByteTokenizer(), True, 1).iterdir()}
    assert found > TERMS.keys() and not {*EXTRA_FILES, "tokenizer.json"} & found

"""Validation of a training command line, its files, and the checkpoint that it resumes."""

import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ladder.checkpoint.manifest import decode_manifest
from megatron_ladder.checkpoint.publish import write_manifest
from megatron_ladder.cli import preprocess_data
from megatron_ladder.comm.launch import RankInfo
from megatron_ladder.config.run import parse_run
from megatron_ladder.data.indexed import IndexedDataset, Sidecar, loss_mask_path, sidecar_path, write_sidecar
from megatron_ladder.tokenizers.kinds import ByteTokenizer
from megatron_ladder.train import inputs, setup
from megatron_ladder.train.inputs import RunInputs
from megatron_ladder.train.resume import learned_changes
from tests.helpers.runs import errors_of
from tests.helpers.tokenizer_copies import train_byte_level
from tests.helpers.tokens import write_documents
from tests.unit.convert.hand_made import write_directory
from tests.unit.generate.tiny_model import tiny_config, train_tokenizer, write_checkpoint

SIZES = (
    "--num-layers 3 --hidden-size 32 --ffn-hidden-size 48 --num-attention-heads 4 --num-key-value-heads 2 "
    "--seq-length 12 --vocab-size 67 --train-iters 5 --lr 1e-3"
).split()


def read_inputs(argv: Sequence[str], place: RankInfo | None = None, *ask: Any) -> RunInputs:
    return inputs.read_inputs(parse_run(argv), place or RankInfo(0, 1, 0), *ask)


def mistakes(words: str, place: RankInfo | None = None) -> list[str]:
    return errors_of(read_inputs, [*SIZES, *words.split()], place)


def differences_in(save: Path, words: str) -> list[str]:
    found = mistakes(f"--load {save} {words}", RankInfo(0, 4, 0))
    assert found
    return [message.split(":")[0] for message in found if "was trained with" in message]


def test_all_invalid_inputs_are_reported_before_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each stage reports all its errors: numbers, what rank 0 finds, this machine, and files."""
    prefix = write_documents(tmp_path / "tokens", [99] * 40)
    write_sidecar(prefix, Sidecar("t", "0" * 64, 100, 0, False, largest_id=99, documents=1, tokens=40))
    (tmp_path / "file").touch()
    data = f"--data-path {prefix} --split 1 --eval-iters 0"
    outputs = (
        f"--save {tmp_path}/file --tensorboard-dir {tmp_path}/file/x --compile-sub-blocks "
        f"--profile --profile-step-start 0 --profile-step-end 1 --profile-dir {tmp_path}/file/y"
    )
    monkeypatch.setattr(shutil, "which", lambda program: None)
    for words, starts in (
        (f"{data} {outputs} --seq-length 0 --lr x", ["--lr: 'x' is not", "--seq-length 0: expected"]),
        (
            f"{data} {outputs} --load {tmp_path}/iter_0000009 --distill-from {tmp_path}/none",
            [f"--load {tmp_path}/iter_0000009: there is no such", f"--distill-from {tmp_path}/none: no such directory"],
        ),
        (
            f"{data} {outputs} --hidden-size 65 --max-position-embeddings 8 --tokenizer-type HFTokenizer "
            f"--tokenizer-model {tmp_path}/no",
            [f"--tokenizer-model {tmp_path}/no", "--hidden-size 65 is not divisible", "--seq-length 12 is longer"],
        ),
        (
            f"{data} {outputs}",
            [
                "--compile-sub-blocks: no C++ compiler was found",
                f"--save {tmp_path}/file: cannot be written to",
                f"--tensorboard-dir {tmp_path}/file/x: cannot be written to",
                f"--profile-dir {tmp_path}/file/y: cannot be written to",
            ],
        ),
        (f"{data} --cuda-graph", ["--cuda-graph: this machine has no GPU"]),
        (
            f"{data} --sample-prompts {tmp_path}/none",
            [f"{prefix}: holds token ids up to 99, the model has 67", "--sample-prompts "],
        ),
    ):
        found = mistakes(words)
        assert [line.startswith(start) for line, start in zip(found, starts, strict=True)] == [True] * len(found), found


def test_kernels_of_sinks_are_checked_before_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the model and of its teacher, on a GPU without a compiler; tiny heads need none."""
    prefix = write_documents(tmp_path / "tokens", [3] * 40)
    write_checkpoint(tmp_path / "teacher", tiny_config(softmax_type="learnable", head_dim=16))
    monkeypatch.setattr(RankInfo, "device", lambda place: torch.device("cuda"))
    monkeypatch.setattr(shutil, "which", lambda program: None)
    data = f"--data-path {prefix} --split 1 --eval-iters 0"
    for words, start in (
        (
            "--softmax-type learnable --head-dim 16",
            "--softmax-type learnable: attention with sinks is compiled on GPUs: ",
        ),
        (
            f"--distill-from {tmp_path}/teacher",
            f"--distill-from {tmp_path}/teacher/iter_0000010: attention with sinks is compiled",
        ),
    ):
        (error,) = mistakes(f"{data} {words}")
        assert error.startswith(start), error
    read_inputs([*SIZES, *data.split(), "--softmax-type", "learnable"])


@pytest.mark.parametrize("words", ["", "--parse-special-tokens", "--chat"])
def test_sample_prompts_are_encoded_as_the_data(tmp_path: Path, words: str) -> None:
    train_byte_level([], 258, ["<s>", "</s>"]).save(str(tmp_path / "tokenizer.json"))
    text = "a </s> <s>"
    message = {"role": "assistant", "content": "a"}
    (tmp_path / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }} </s> <s>{% endfor %}")
    (tmp_path / "a.jsonl").write_text((json.dumps({"text": text, "messages": [message]}) + "\n") * 8)
    (tmp_path / "prompts").write_text(text)
    tokenizer = f"--tokenizer-type HFTokenizer --tokenizer-model {tmp_path}"
    files = f"--input {tmp_path}/a.jsonl --output-prefix {tmp_path}/a"
    preprocess_data.main([*files.split(), *tokenizer.split(), *words.split()])
    (prefix,) = [path.with_suffix("") for path in tmp_path.glob("a_*.idx")]
    flags = f"--data-path {prefix} --split 1 --eval-iters 0 --sample-tokens 1 {tokenizer}"
    flags = f"{flags} --sample-prompts {tmp_path}/prompts"
    ((_, ids),) = read_inputs([*SIZES, *flags.split(), "--vocab-size", "258"]).sample_prompts
    assert list(ids) == IndexedDataset(prefix).document(0).tolist()


def test_a_refused_start_leaves_no_directories(tmp_path: Path) -> None:
    prefix = write_documents(tmp_path / "tokens", range(40))
    before = {*tmp_path.rglob("*")}
    outputs = f"--tensorboard-dir {tmp_path}/curves --profile --profile-step-start 0 --profile-step-end 1"
    found = mistakes(f"--data-path {prefix} --split 0,1 {outputs} --profile-dir {tmp_path}/a/traces")
    assert len(found) == 1 and "for training" in found[0]
    assert {*tmp_path.rglob("*")} == before


def test_only_a_run_with_deepspeed_compares_its_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prefix = write_documents(tmp_path / "tokens", range(40))
    monkeypatch.setattr(setup, "version", lambda package: f"that of {package}")
    place, name = RankInfo(0, 2, 0), "version of deepspeed"
    for words, expected in (("", None), ("--zero-stage 2", "that of deepspeed")):
        opened = read_inputs([*SIZES, *f"--data-path {prefix} --split 1 --eval-iters 0 {words}".split()], place)
        assert setup._shared_settings(opened, torch.device("cpu"), "torch").get(name) == expected


def test_sizes_come_from_the_checkpoint(tmp_path: Path) -> None:
    """The model, its vocabulary, the length and the seed of a resumed run need no flags."""
    config = tiny_config(residual_mode="ladder", ladder_layers=(1, 2), qk_layernorm=True, rotary_base=500.0)
    run = {"training": {"seq_length": 8, "seed": 5}}
    write_checkpoint(tmp_path, config, run=run)
    write_documents(tmp_path / "tokens", range(60))
    words = f"--train-iters 20 --lr 1 --data-path {tmp_path}/tokens --split 1 --eval-iters 0 --load {tmp_path}"

    def read(more: str) -> RunInputs:
        return read_inputs([*words.split(), *more.split()])

    resumed = read("--no-load-optim --use-checkpoint-args")
    assert resumed.run.model == config
    assert (resumed.run.training.seq_length, resumed.run.training.seed) == (8, 5)
    assert resumed.values["hidden_size"] == config.hidden_size and resumed.values["seq_length"] == 8
    tuned = read("--finetune --seq-length 40")
    assert tuned.run.model == replace(config, max_position_embeddings=max(40, config.max_position_embeddings))
    assert (tuned.run.training.seq_length, tuned.run.training.seed) == (40, 1234)
    # A tokenizer may have more ids than the model, as long as they do not occur.
    for more in ("", "--vocab-size 67"):
        found = read(f"--finetune --seq-length 8 --tokenizer-type ByteTokenizer {more}")
        assert found.run.model.vocab_size == config.vocab_size == 67
    for more, message in (
        ("--num-layers 4", "--num-layers 4: .* was trained with 3"),
        ("--num-layers 4 --ladder-layers 2-3", "--num-layers 4: .* was trained with 3"),
        ("--residual-mode parallel", "--residual-mode parallel: .* was trained with ladder: .*convert_checkpoint.py"),
        ("--tokenizer-type ByteTokenizer --vocab-size 66", "--vocab-size 66 is smaller than the tokenizer's 257 ids"),
        ("--ladder-layers 1", r"--ladder-layers \[2\]: .* was trained with \[1, 2\]"),
        ("--hidden-size 64", "--hidden-size 64: .* was trained with 32: leave the flag out, or train a new model"),
        ("--seq-length 9", "--seq-length 9: .* was trained with 8: leave the flag out, or give --finetune to"),
        ("--seed 6", "--seed 6: .* was trained with 5: leave the flag out, or give --finetune to start"),
    ):
        (error,) = errors_of(read, f"--no-load-optim {more}")
        assert re.search(message, error)
    (error,) = errors_of(read, f"--load {tmp_path}/empty")
    assert error.startswith(f"--load {tmp_path}/empty: holds no checkpoint that would provide --num-layers, ")
    write_directory(tmp_path / "hf")
    for name, why in (("empty", "holds no checkpoint, and --finetune requires one"), ("hf", "is a Hugging Face direc")):
        assert f"--load {tmp_path}/{name}: {why}" in "".join(mistakes(f"--load {tmp_path}/{name} --finetune"))
    (error,) = errors_of(read, f"--finetune --save {tmp_path}/hf")
    assert error.startswith(f"--save {tmp_path}/hf: is a Hugging Face directory")


def test_all_values_of_a_resumed_run_come_from_its_checkpoint(tmp_path: Path) -> None:
    prefix = write_documents(tmp_path / "tokens", range(60), range(50))
    more = f"--lr-warmup-iters 3 --lr-decay-style linear --eval-iters 0 --exit-interval 7 --data-path {prefix}"
    more += f" --save {tmp_path} --save-interval 2"
    learned = "--split 1,0,0 --z-loss-coeff 0.1 --bf16 --global-batch-size 3"
    first = read_inputs([*SIZES, *more.split(), *learned.split()]).run
    write_checkpoint(tmp_path, run=first.to_dict())

    def resumed(words: str) -> RunInputs:
        return read_inputs(["--load", str(tmp_path), "--no-load-optim", "--vocab-size", "67", *words.split()])

    again = resumed("").run
    assert again.training == first.training and again.logging == first.logging
    assert resumed(f"--save {tmp_path}").run.checkpoint.save_interval == 2
    assert again.data == first.data
    assert again.optimizer == first.optimizer.completed(5)
    assert again.reliability.exit_interval is None
    assert resumed("--train-iters 2").run.optimizer.lr_decay_iters == 5
    changed = resumed("--z-loss-coeff 0.2 --no-bf16 --micro-batch-size 3")
    assert changed.checkpoint is not None
    assert learned_changes(again, changed.checkpoint) == []
    assert [*map(str, learned_changes(changed.run, changed.checkpoint))] == [
        "--bf16 False: the checkpoint was trained with True",
        "--z-loss-coeff 0.2: the checkpoint was trained with 0.1",
    ]
    other = resumed(f"--valid-data-path {prefix} --train-data-path {prefix}").run.data
    assert other.data_path == () and other.split == "969,30,1"
    new_decay = resumed("--lr 2e-3 --override-opt-param-scheduler --train-iters 9")
    assert new_decay.run.optimizer == replace(first.optimizer, lr=2e-3) and new_decay.checkpoint is not None
    changes = learned_changes(new_decay.run, new_decay.checkpoint)
    assert [name for change in changes for name in change.fields] == ["lr", "lr_decay_iters"]
    assert resumed(f"--finetune --train-iters 1 --lr 1 --data-path {prefix} --split 1").run.training.seq_length == 12
    found = errors_of(resumed, "--finetune")
    assert [message.split(" is required")[0] for message in found] == ["--train-iters", "--lr"]


def test_a_desync_model_resumes_only_at_its_tensor_parallel_size(tmp_path: Path) -> None:
    config = tiny_config(residual_mode="desync", desync_interval=4, desync_tp=2)
    write_checkpoint(tmp_path, config)
    desync = "--residual-mode desync --desync-interval"
    assert differences_in(tmp_path, f"{desync} 4 --tensor-model-parallel-size 2") == []
    assert differences_in(tmp_path, f"{desync} 4 --tensor-model-parallel-size 4") == ["--tensor-model-parallel-size 4"]
    assert differences_in(tmp_path, f"{desync} 2 --tensor-model-parallel-size 2") == ["--desync-interval 2"]
    assert differences_in(tmp_path, "--tensor-model-parallel-size 2") == []
    assert differences_in(tmp_path, "--tensor-model-parallel-size 2 --residual-mode standard") == [
        "--residual-mode standard"
    ]


def test_a_run_must_continue_the_checkpoints_that_save_holds(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "here")
    for name in ("here", "there"):
        write_checkpoint(tmp_path / name)

    def errors(words: str) -> list[str]:
        found = mistakes(words.format(here=tmp_path / "here", dir=tmp_path))
        return [message for message in found if "of another run" in message]

    start = f"--save {tmp_path / 'here'}: holds iter_0000010 of another run, and "
    fix = f"continue iter_0000010 with --load {tmp_path / 'here'}"
    for words, why in (
        ("", f"--load is not given, so this run would start from scratch: {fix}, or "),
        ("--load {dir}/there", f"this run starts from --load {tmp_path / 'there'}: {fix}, or "),
        ("--load {dir}/there --finetune", f"this run starts from --load {tmp_path / 'there'}: {fix} and without"),
        ("--load {here} --finetune", f"--finetune starts at iteration 0 again: {fix} and without --finetune, or "),
        ("--load {dir}/nothing", f"this run starts from --load {tmp_path / 'nothing'}: {fix}, or "),
    ):
        (error,) = errors(f"--save {{here}} {words}")
        assert error.startswith(start + why) and "another --save, or --overwrite-checkpoints, after which" in error
        assert errors(f"--save {{here}} {words} --overwrite-checkpoints") == []
    continuing = ("--load {here}", "--load {dir}/link", "--load {here}/iter_0000010")
    for words in (*continuing, "--load {dir}/there --skip-train"):
        assert errors(f"--save {{here}} {words}") == []
    assert errors("--save {dir}/new") == []


def test_finetuning_may_change_length_and_order_of_samples(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    manifest = tmp_path / "iter_0000010" / "manifest.json"
    stored = decode_manifest(manifest.read_bytes())[0] | {"run": {"training": {"seq_length": 8, "seed": 5}}}
    whole = json.loads(manifest.read_text())
    write_manifest(manifest.parent, stored | {key: whole[key] for key in ("tilings", "tensors")})
    assert differences_in(tmp_path, "--no-load-optim --seed 1234") == ["--seed 1234", "--seq-length 12"]
    assert differences_in(tmp_path, "--finetune") == []
    assert differences_in(tmp_path, "--skip-train") == []
    assert differences_in(tmp_path, "--skip-train --residual-mode ladder") == ["--residual-mode ladder"]


def test_changed_data_is_rejected_or_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prefix = tmp_path / "tokens"
    words = [*SIZES, *f"--data-path {prefix} --split 1 --eval-iters 0".split()]
    write_documents(prefix, range(40))
    write_checkpoint(tmp_path / "save", data=read_inputs(words).data)
    load = ["--load", str(tmp_path / "save"), "--no-load-optim"]

    def about_data(words: list[str]) -> list[str]:
        return [line for line in errors_of(read_inputs, words) if str(prefix) in line]

    assert about_data([*words, *load]) == []
    write_documents(prefix, range(20, 60))
    (line,) = about_data([*words, *load])
    assert (
        line.startswith(f"--data-path {prefix}: tokens changed after the checkpoint: give")
        and "--allow-data-change" in line
    )
    capsys.readouterr()
    assert about_data([*words, *load, "--allow-data-change"]) == []
    said = capsys.readouterr().out
    assert f"*** --allow-data-change: --data-path {prefix}: tokens" in said and "of the new order ***" in said


def test_a_run_may_continue_with_the_other_format_of_its_tokenizer(tmp_path: Path) -> None:
    """A data set and a checkpoint made with tokenizer.model are used with the tokenizer.json that was next to it."""
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    (tmp_path / "a.jsonl").write_text('{"text": "def add(a, b):"}\n' * 50)
    made = train_tokenizer(folder, ["def add(a, b):\n    return a + b\n"] * 20)
    (folder / "tokenizer.json").write_bytes(made.as_json())
    with_model = f"--tokenizer-type SentencePieceTokenizer --tokenizer-model {folder}/tokenizer.model"
    with_json = f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {folder}"
    preprocess_data.main(f"--input {tmp_path}/a.jsonl --output-prefix {tmp_path}/a {with_model}".split())
    words = [*SIZES, *f"--vocab-size 300 --data-path {tmp_path}/a_text_document --split 1 --eval-iters 0".split()]
    data = read_inputs([*words, *with_model.split()]).data
    write_checkpoint(tmp_path / "save", tiny_config(vocab_size=300), data=json.loads(json.dumps(data)))
    load = [*words, "--load", str(tmp_path / "save"), "--no-load-optim"]

    def reported() -> list[str]:
        return [line for line in errors_of(read_inputs, [*load, *with_json.split()]) if "tokenizer" in line]

    (folder / "tokenizer.model").unlink()
    assert reported() == []
    train_byte_level([], 300, ["</s>"]).save(str(folder / "tokenizer.json"))
    (not_of_data,) = reported()
    assert "is not the tokenizer of" in not_of_data
    sidecar_path(tmp_path / "a_text_document").unlink()
    (changed,) = reported()
    assert changed.startswith("--tokenizer-model: the checkpoint was trained with another one")


def test_documents_must_end_with_the_expected_token(tmp_path: Path) -> None:
    """The token is defined in tokenizer_config.json, which the checksum of tokenizer.json does not cover."""
    tokenizer = ByteTokenizer()
    made = Sidecar(
        tokenizer.kind, tokenizer.sha256, 257, eod_id=7, append_eod=True, largest_id=39, documents=1, tokens=40
    )
    a, b = (write_documents(tmp_path / name, range(40)) for name in "ab")

    def errors(words: str, of_a: Sidecar, of_b: Sidecar) -> list[str]:
        write_sidecar(a, of_a)
        write_sidecar(b, of_b)
        data = f"--vocab-size 300 --data-path {a} {b} --split 1 --eval-iters 0 {words}"
        return [line.split(": give")[0] for line in mistakes(data)]

    nine, byte, both = replace(made, eod_id=9), "--tokenizer-type ByteTokenizer", replace(made, eod_id=256)
    by_tokenizer = [
        f"{path}: the end-of-document token is {eod_id} by {path}.json, and 256 by --tokenizer-type ByteTokenizer"
        for path, eod_id in ((a, 7), (b, 9))
    ]
    by_a = [f"{b}: the end-of-document token is 9 by {b}.json, and 7 by {a}"]
    without = {"append_eod": False, "conversations": True}
    for path in (a, b):
        loss_mask_path(path).write_bytes(bytes([1]) * 40)
    talk, other_talk = replace(made, **without), replace(nine, **without)
    for words, of_a, of_b, expected in (
        (byte, both, both, []),
        (byte, made, nine, by_tokenizer),
        ("", made, nine, by_a),
        ("--reset-attention-mask", talk, other_talk, []),
        ("--eod-mask-loss", talk, other_talk, by_a),
    ):
        assert errors(words, of_a, of_b) == expected


def test_documents_of_data_without_a_description_must_end_with_the_token(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Megatron's data sets have none. Flags about documents without an effect on one of them are an error."""
    # Megatron keeps an entry for an empty text.
    ended = [[1, 2, 3, 66], [], [5, 6, 66]] * 20
    a = write_documents(tmp_path / "a", *ended)
    b = write_documents(tmp_path / "b", *([*document[:-1], 65] for document in ended if document))
    c = write_documents(tmp_path / "c", [1, 2, 3], *ended[1:])
    d = write_documents(tmp_path / "d", [1, 66, 2, 66, 3] * 9)
    flags = "--reset-position-ids --reset-attention-mask --eod-mask-loss"
    tokenizer = "--tokenizer-type NullTokenizer --vocab-size 66"

    def errors(words: str) -> list[str]:
        capsys.readouterr()
        return mistakes(f"{tokenizer} --eval-iters 1 {words}")

    (line,) = errors(f"--train-data-path {a} {b} --valid-data-path {a} {flags}")
    assert line.startswith(
        f"{flags}: no document of {b} ends with the end-of-document token 66 of --tokenizer-type NullTokenizer (40 "
        "documents read; most end with 65): give the tokenizer of the data, copy its b.json as well"
    )
    for flag in flags.split():
        for words in (f"--data-path {b} --split 1,1", f"--train-data-path {a} --valid-data-path x={a} y={b}"):
            (line,) = errors(f"{words} {flag}")
            assert line.startswith(f"{flag}: no document of {b} ends with")
    assert not errors(f"--train-data-path {a} --valid-data-path {a} {flags}") and "***" not in capsys.readouterr().out
    assert not errors(f"--train-data-path {b} --valid-data-path {b}") and "***" not in capsys.readouterr().out
    assert not errors(f"--train-data-path {a} {c} --valid-data-path {d} {flags}")
    said = capsys.readouterr().out
    assert f"*** {flags}: 97.5% of the documents of {c} end with the end-of-document token 66 of" in said
    assert f"*** {flags}: 0.0% of the documents of {d} end with" in said and str(a) not in said


def test_an_evaluation_needs_a_model_and_validation_data(tmp_path: Path) -> None:
    """It needs no training data."""
    prefix = write_documents(tmp_path / "tokens", range(40))

    def errors(words: str) -> list[str]:
        return [message.split(":")[0] for message in mistakes(f"--skip-train {words}")]

    valid = f"--valid-data-path {prefix} --eval-iters 1"
    assert errors(valid) == ["--skip-train requires --load"]
    assert errors(f"{valid} --load {tmp_path}") == [f"--load {tmp_path}"]
    assert errors(f"{valid} --load {tmp_path}/iter_0000009") == [f"--load {tmp_path}/iter_0000009"]
    write_checkpoint(tmp_path)
    load = f"--load {tmp_path}"
    assert errors(f"{load} --data-path {prefix} --split 1") == ["--skip-train needs validation data"]
    assert errors(f"{load} --data-path {prefix} --split 1 --eval-iters 0") == ["--skip-train needs validation data"]
    sources = read_inputs([*SIZES, "--skip-train", *valid.split(), *load.split()]).sources
    assert sources.train is None and sources.valid

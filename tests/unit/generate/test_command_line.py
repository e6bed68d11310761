"""The command line in one process: flags, prompts, models, and output."""

import json
import math
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ladder.cli.generate import main
from megatron_ladder.comm.launch import RankInfo
from megatron_ladder.generate.options import PromptOptions
from megatron_ladder.generate.prompts import PromptEncoder, read_prompts
from megatron_ladder.model.language_model import LanguageModel
from megatron_ladder.model.mixers.mixer import States
from tests.helpers.runs import errors_of
from tests.helpers.tokenizer_copies import write_words
from tests.reference import reference_logits
from tests.unit.generate.tiny_model import (
    ALWAYS,
    MODELS,
    drafting_reference,
    reference_of,
    tiny_config,
    train_tokenizer,
    write_checkpoint,
    write_checkpoint_with_tokenizer,
)


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint_with_tokenizer(tmp_path_factory.mktemp("model"))[0]


@pytest.fixture(scope="module")
def without_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("bare")).parent


def lines_of(argv: list[str], capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    main([*argv, "--json"])
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_all_errors_of_a_command_line_are_reported() -> None:
    words = "--tp 0 --max-new-tokens 0 --temperature -1 --top-k -1 --top-p 0 --seed -1 --tokens 1 x --json --stream"
    errors = errors_of(main, ["--promt", "a", "--tokenizer-model", "x", *words.split()])
    beginnings = [
        "--promt is not a flag of this program: did you mean --prompt?",
        "--model is required",
        "--tp 0: ",
        "--max-new-tokens 0: ",
        "--temperature -1.0: ",
        "--top-k -1: ",
        "--top-p 0.0: ",
        "--seed -1: ",
        "--tokenizer-model x requires --tokenizer-type",
        "--json and --stream exclude each other",
    ]
    assert len(errors) == len(beginnings), errors
    assert all(line.startswith(beginning) for line, beginning in zip(errors, beginnings, strict=True)), errors


def test_a_terminal_is_not_read_as_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    (missing,) = errors_of(main, ["--model", "somewhere"])
    assert missing.startswith("there is no prompt; ")


def test_a_damaged_checkpoint_is_rejected(run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Only files that generation reads are compared with their checksums."""
    folder = shutil.copytree(run_folder, tmp_path / "run")
    (weights,) = folder.glob("iter_*/weights_*")
    argv = ["--model", str(folder), "--prompt", "def", "--max-new-tokens", "4"]
    content = bytearray(weights.read_bytes())
    content[-8] ^= 1
    weights.write_bytes(content)
    (error,) = errors_of(main, argv)
    assert error.startswith(f"--model {weights}: damaged: the manifest records xxh3_128:")
    assert error.endswith("pass --no-verify to load the file nevertheless")
    assert capsys.readouterr().out == ""
    main([*argv, "--no-verify"])
    assert capsys.readouterr().out.startswith("def")


def test_text_output_repeats_the_prompt(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Streamed or not, the text equals that of the JSON line."""
    argv = ["--model", str(run_folder), "--prompt", "def add(", "--max-new-tokens", "30", "--seed", "3"]
    (printed,) = lines_of(argv, capsys)
    for how in ([], ["--stream"]):
        main([*argv, *how])
        captured = capsys.readouterr()
        assert captured.out == "def add(" + printed["text"] + "\n"
        assert captured.err.splitlines()[-1].startswith("1 prompt: ")


def test_prompts_are_processed_in_parts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = write_checkpoint(tmp_path, tiny_config(**MODELS["sinks"]))
    argv = ["--model", str(checkpoint), "--tokens", *"1 2 3 4 5 6 7 8 40 9 2".split(), "--max-new-tokens", "6"]
    (whole,) = lines_of(argv, capsys)
    passes: list[int] = []
    compute = LanguageModel.hidden_states

    def counted(model: LanguageModel, tokens: torch.Tensor, *arguments: Any) -> torch.Tensor:
        passes.append(tokens.shape[1])
        return compute(model, tokens, *arguments)

    monkeypatch.setattr(LanguageModel, "hidden_states", counted)
    (in_parts,) = lines_of([*argv, "--prefill-chunk-size", "4"], capsys)
    assert passes == [4, 4, 3, 1, 1, 1, 1, 1]
    assert in_parts["ids"] == whole["ids"]


def test_the_states_of_windows_are_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sequence has 32,768 tokens: the prompt, and one new token."""
    allocated: list[int] = []
    allocate = States.allocate

    def noted(*arguments: Any) -> States:
        states = allocate(*arguments)
        allocated.append(sum(state[0].nbytes for of_mixer in states.tensors for state in of_mixer.values()))
        return states

    monkeypatch.setattr(States, "allocate", noted)
    config = tiny_config(num_layers=8, vocab_size=257, max_position_embeddings=32768, num_key_value_heads=2)
    reported = []
    for changes in ({}, {"window_size": 1024, "window_layers": (0, 1, 2, 4, 5, 6)}):
        checkpoint = write_checkpoint(tmp_path / f"{len(changes)}", replace(config, **changes))
        argv = ["--model", str(checkpoint), "--tokenizer-type", "ByteTokenizer", "--tokens", "1", "--temperature", "0"]
        (first,) = lines_of([*argv, "--max-new-tokens", "1"], capsys)
        argv += ["--max-new-tokens", "32767", "--stop", first["text"]]
        reported.append(lines_of(argv, capsys)[0]["state_bytes"])
        main(argv)
        summary = capsys.readouterr().err.splitlines()[-1]
        assert summary.endswith(f"; states of a sequence: {reported[-1] / 1e6:.2f} MB")
    # Keys and values in fp32.
    entry = 2 * 2 * config.head_dim * 4
    assert reported == [8 * 32768 * entry, (2 * 32768 + 6 * 1024) * entry]
    assert reported[1] < 0.28 * reported[0] and {*allocated} >= {*reported}


def test_the_tokenizers_end_of_text_ends_a_continuation(
    tmp_path: Path, run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--model", str(run_folder), "--tokens", "4", "5", "--max-new-tokens", "12", "--seed", "3"]
    ids = lines_of(argv, capsys)[0]["ids"]
    end = ids[4]
    write_words(tmp_path / "tokenizer.json", *(f"w{number}" for number in range(300)), unknown="w0")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": f"w{end}"}))
    argv += ["--tokenizer-type", "HFTokenizer", "--tokenizer-model", str(tmp_path)]
    (ended,) = lines_of(argv, capsys)
    until_end = ids[: ids.index(end) + 1]
    assert (ended["ids"], ended["finish_reason"]) == (until_end, "eos")
    assert f"w{end}" not in ended["text"].split()
    assert f"w{until_end[0]}" in ended["text"].split()
    (continued,) = lines_of([*argv, "--ignore-eos"], capsys)
    assert (continued["ids"], continued["finish_reason"]) == (ids, "length")
    assert f"w{end}" in continued["text"].split()


def test_flags_of_sampling_reach_the_sampler(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def ids(*flags: str) -> list[list[int]]:
        argv = ["--model", str(run_folder), "--prompt", "def", "class", "--max-new-tokens", "5", *flags]
        return [line["ids"] for line in lines_of(argv, capsys)]

    greedy, uniform = ids("--temperature", "0"), ["--temperature", "1e6"]
    assert ids(*uniform, "--top-k", "1") == greedy
    assert ids("--temperature", "1", "--top-p", "1e-9") == greedy
    # All tokens are about equally likely, so the tokens depend only on the random numbers.
    first, second = ids(*uniform, "--seed", "1")
    assert first != second
    assert ids(*uniform, "--seed", "1") == [first, second]
    assert ids(*uniform, "--seed", "2")[0] != first


def test_bytes_need_no_file_of_a_tokenizer(without_tokenizer: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", str(without_tokenizer), "--max-new-tokens", "1", "--json", "--prompt", "0123"]
    main([*words, "--tokenizer-type", "ByteTokenizer"])
    assert json.loads(capsys.readouterr().out)["prompt_ids"] == [48, 49, 50, 51]
    assert errors_of(main, [*words, "--tokenizer-type", "HFTokenizer"]) == [
        "--tokenizer-type HFTokenizer needs --tokenizer-model"
    ]


def test_prompt_files(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(tmp_path, ["def size(x):\n    return x\n"] * 20)
    text, lines = tmp_path / "a.txt", tmp_path / "b.jsonl"
    text.write_bytes("\ufeffdef f(x):\n    größe\n".encode())
    lines.write_text('{"prompt": "one\\n", "id": 3}\n\n{"prompt": "two"}')
    encoder = PromptEncoder(tokenizer, (), chat=False, system=None)
    options = PromptOptions(prompt=("zero",), prompt_file=(text, lines), tokens=("5",))
    prompts = read_prompts(options, encoder, None)
    assert [prompt.text for prompt in prompts] == ["zero", "def f(x):\n    größe", "one\n", "two", None]
    assert [tokenizer.decode(prompt.ids) for prompt in prompts[:4]] == [prompt.text for prompt in prompts[:4]]
    assert prompts[4].ids == (5,)
    assert str(prompts[3].problem("x")) == f"--prompt-file {lines}:3: x"


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.txt", b"caf\xe9s", "a.txt: not UTF-8: invalid continuation byte at byte 3"),
        ("a.txt", None, "a.txt: cannot be read: No such file or directory"),
        ("a.jsonl", b"\n\n", "a.jsonl: the file contains no prompt"),
        ("a.jsonl", b'{"prompt": "x"}\n{"text": "x"}', "a.jsonl:2: expected a JSON object"),
        ("a.jsonl", b'{"prompt": "\\ud800"}', "a.jsonl:1: expected a JSON object"),
    ],
)
def test_bad_prompt_files(tmp_path: Path, run_folder: Path, name: str, content: bytes | None, expected: str) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    (error,) = errors_of(main, ["--model", str(run_folder), "--prompt-file", str(path)])
    assert error.startswith(f"--prompt-file {tmp_path}/{expected}")


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--prompt", "a", "--stop="], "--stop: an empty text would end every continuation"),
        (["--prompt", "a", "--repetition-penalty", "1e-300"], "--repetition-penalty 1e-300: expected 0.01 to 100"),
        (["--prompt", "a", "--logprobs"], "--logprobs requires --json or --score"),
        (["--tokens", "1", "--tp-all-reduce", "symmetric"], "--tp-all-reduce symmetric needs all ranks on GPUs"),
        (["--tokens", "1", "--compile-sub-blocks"], "--compile-sub-blocks: no C++ compiler was found"),
        (["--tokens", "1", "--chat"], "--tokens and --chat exclude each other"),
        (
            ["--tokens", "1", "--draft", "mtp"],
            "--draft mtp: {model} has no drafting head of one layer; leave --draft out, or train one with",
        ),
        (["--tokens", "1", "--draft-tokens", "2"], "--draft-tokens 2 requires --draft"),
        (["--tokens", "1", "--draft", "mtp", "--draft-tokens", "0"], "--draft-tokens 0: expected 1 to 32"),
        (["--tokens", "1 2", "--draft", "mtp", "--score"], "--score and --draft exclude each other"),
        (["--tokens", ","], "--tokens: the prompt is empty"),
        (["--prompt", "a", ""], "--prompt '': the prompt is empty"),
        (["--tokens", "1", "300"], "--tokens: the id 300 is outside the model's vocabulary of 300"),
        (["--tokens", "1", "--max-new-tokens", "96"], "--tokens: 1 tokens and --max-new-tokens 96 are 97, but the"),
        (["--prompt", "x " * 40], "--prompt 'x x x x x x x x x x x x x x x x x x x x ...': 80 tokens and"),
        (
            ["--tokens", "1", "--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", "no.model"],
            "--tokenizer-model no.model: no such file",
        ),
    ],
)
def test_flags_and_prompts_that_cannot_be_continued(
    run_folder: Path, flags: list[str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine without a GPU and a compiler."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(shutil, "which", lambda program: None)
    (error,) = errors_of(main, ["--model", str(run_folder), *flags])
    assert error.startswith(expected.replace("{model}", str(run_folder / "iter_0000010")))


def test_drafts_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """So are the bytes of the head's states, and of the states after each draft."""
    config = tiny_config(**MODELS["delta"], mtp_num_layers=1)
    weights, _ = drafting_reference(config, *ALWAYS)
    argv = ["--model", str(write_checkpoint(tmp_path, config, weights)), "--tokens", "5 9 3", "--temperature", "0"]
    argv += ["--max-new-tokens", "25"]
    (plain,) = lines_of(argv, capsys)
    assert "accepted_length" not in plain and "accepted" not in capsys.readouterr().err
    (drafted,) = lines_of([*argv, "--draft", "mtp", "--draft-tokens", "2"], capsys)
    assert (drafted["ids"], drafted["accepted_length"]) == (plain["ids"], 3.0)
    main([*argv, "--draft", "mtp", "--draft-tokens", "2"])
    assert "; accepted length 3.00; states of a sequence: " in capsys.readouterr().err
    (single,) = lines_of([*argv, "--draft", "mtp", "--max-new-tokens", "1"], capsys)
    assert single["accepted_length"] is single["decode_tokens_per_second"] is None
    entry = 4 * 2 * config.num_key_value_heads * config.head_dim
    fixed = plain["state_bytes"] - 28 * entry
    assert drafted["state_bytes"] == 4 * fixed + 2 * (28 + 2) * entry


def test_kernels_of_sinks_are_checked_before_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU without a compiler."""
    checkpoint = write_checkpoint(tmp_path, tiny_config(softmax_type="learnable", head_dim=16))
    monkeypatch.setattr(RankInfo, "device", lambda place: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(shutil, "which", lambda program: None)
    (error,) = errors_of(main, ["--model", str(checkpoint), "--tokens", "1"])
    assert error.startswith(f"--model {checkpoint}: attention with sinks is compiled on GPUs: ")


def test_unusable_model_directories(tmp_path: Path, run_folder: Path, without_tokenizer: Path) -> None:
    text = ["--prompt", "a"]
    (error,) = errors_of(main, ["--model", str(tmp_path / "none"), *text])
    assert error == f"--model {tmp_path / 'none'}: no such directory"
    (tmp_path / "none").mkdir()
    (error,) = errors_of(main, ["--model", str(tmp_path / "none"), *text])
    assert error == f"--model {tmp_path / 'none'}: no checkpoint found"
    (error,) = errors_of(main, ["--model", str(run_folder.parent), *text])
    assert error == f"--model {run_folder.parent}: no checkpoint found: did you mean {run_folder}?"
    mistyped = run_folder.with_name(run_folder.name + "s")
    (error,) = errors_of(main, ["--model", str(mistyped), *text])
    assert error == f"--model {mistyped}: no such directory: did you mean {run_folder}?"
    (error,) = errors_of(main, ["--model", str(without_tokenizer), *text])
    assert error.startswith("--prompt 'a': the model's directory has no tokenizer; use --tokenizer-type")
    cut = shutil.copytree(run_folder, tmp_path / "cut") / "iter_0000010" / "weights_rank_00000.safetensors"
    cut.write_bytes(cut.read_bytes()[:-1])
    first, *others = errors_of(main, ["--model", str(tmp_path / "cut"), *text])
    assert first.startswith(f"--model {tmp_path / 'cut'}: none of its 1 checkpoints is complete")
    tokenizer = train_tokenizer(tmp_path, ["def size(x):\n    return x\n"] * 20).files[0]
    flags = ["--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", str(tokenizer)]
    (error,) = errors_of(main, ["--model", str(without_tokenizer), *text, *flags])
    assert error.startswith("--prompt 'a': the id ") and error.endswith("use the tokenizer that belongs to the model")
    assert "outside the model's vocabulary of 67" in error


def test_scores_equal_those_of_the_reference(without_tokenizer: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights, reference = reference_of(tiny_config())
    ids = (7, 60, 12, 3)
    logprobs = reference_logits(weights, reference, torch.tensor([ids]))[0].log_softmax(-1)
    expected = [logprobs[place, token].item() for place, token in enumerate(ids[1:])]
    argv = ["--model", str(without_tokenizer), "--score", "--tokens", *map(str, ids)]
    (found,) = lines_of([*argv, "--logprobs"], capsys)
    assert found["logprobs"] == pytest.approx(expected, abs=1e-4)
    assert found["log_likelihood"] == pytest.approx(sum(expected), abs=1e-4)
    assert found["perplexity"] == pytest.approx(math.exp(-sum(expected) / 3), rel=1e-4)
    main(argv)
    printed = capsys.readouterr().out
    assert printed == f"3 tokens scored, log-likelihood {found['log_likelihood']:.4f}, " + (
        f"perplexity {found['perplexity']:.4f}\n"
    )
    (error,) = errors_of(main, argv[:-3])
    assert error == "--tokens: a single token has no score, because there is no token before it"
